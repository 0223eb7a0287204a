"""A plan for a notebook: one card of HTML, with no script and nothing to load, for light and dark pages.

Text takes the colour of the page; bars have their own. Whatever comes from a plan is escaped by `_element`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from autoshard.report.arrays import ArrayRow, argument_rows, result_rows, short_array
from autoshard.report.page import size_text, size_unit
from autoshard.report.parts import (
    Style,
    memory_parts,
    memory_styles,
    ms_text,
    step_parts,
    step_styles,
)
from autoshard.report.tables import lines

if TYPE_CHECKING:
    from autoshard.plan import Plan

__all__ = ["plan_html"]

# Tables of many arrays take the unit of an array this much smaller than the largest, so that more are not 0.00.
_SMALLER = 8
# A smaller gap than this is rounding.
_PROVEN = 1e-9
_BUFFERS = 12
_SOURCES = 12
_STRIPES = (
    "none",
    "repeating-linear-gradient(45deg,rgba(255,255,255,.6) 0 2px,transparent 2px 6px)",
    "repeating-linear-gradient(-45deg,rgba(255,255,255,.6) 0 2px,transparent 2px 6px)",
    "repeating-linear-gradient(90deg,rgba(255,255,255,.6) 0 2px,transparent 2px 6px)",
    "repeating-linear-gradient(0deg,rgba(255,255,255,.6) 0 2px,transparent 2px 6px)",
)
_CSS = """
.asp.asp{color:inherit;font:13px/1.45 system-ui,sans-serif;border:1px solid rgba(128,128,128,.4);
border-radius:8px;padding:12px 16px;max-width:1000px;box-sizing:border-box}
.asp .asp-head{display:flex;flex-wrap:wrap;gap:2px 14px;align-items:baseline}
.asp .asp-name{font-size:15px;font-weight:600}
.asp .asp-dim{opacity:.7}
.asp .asp-tiles{display:flex;flex-wrap:wrap;gap:10px 30px;margin:10px 0 4px}
.asp .asp-big{font-size:19px;font-weight:600;font-variant-numeric:tabular-nums}
.asp .asp-wide{flex:1 1 260px}
.asp .asp-columns{display:flex;flex-wrap:wrap;gap:4px 36px}
.asp .asp-columns>div{flex:2 1 280px;min-width:0}
.asp .asp-columns>div:first-child{flex:3 1 480px}
.asp .asp-section{font-weight:600;margin:12px 0 5px}
.asp .asp-bar{position:relative;display:flex;height:15px;border-radius:3px;overflow:hidden;
background:rgba(128,128,128,.22)}
.asp .asp-bar>span{display:block;flex:none;height:100%;box-sizing:border-box}
.asp .asp-limit{position:absolute;top:0;border-left:3px solid currentColor}
.asp .asp-swatch{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:7px}
.asp .asp-part{white-space:nowrap}
.asp .asp-scroll{overflow-x:auto}
.asp table.asp-table{border-collapse:collapse;border:0;margin:4px 0;font-size:12.5px;width:auto;
table-layout:auto;color:inherit;background:transparent}
.asp table.asp-table tr,.asp table.asp-table tbody tr:nth-child(odd),.asp table.asp-table tbody tr:hover
{background:transparent}
.asp table.asp-table th,.asp table.asp-table td{border:0;border-bottom:1px solid rgba(128,128,128,.22);
padding:2px 14px 2px 0;text-align:left;vertical-align:top;color:inherit;max-width:none;white-space:normal}
.asp table.asp-table th{font-weight:400;opacity:.7;white-space:nowrap}
.asp table.asp-table tr.asp-group>td{font-weight:600;padding-top:7px}
.asp table.asp-table .asp-number{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.asp table.asp-table code,.asp code{font-size:12px;background:transparent;color:inherit;padding:0;
overflow-wrap:anywhere}
.asp details{margin-top:7px}
.asp summary{cursor:pointer;font-weight:600}
.asp ul.asp-notes{margin:2px 0 0;padding-left:20px}
"""


class _Html(str):
    """Text that is HTML already."""


def plan_html(plan: Plan) -> str:
    """Return the plan as a card: step time, HBM, mesh, specs, buffers, coverage and notes.

    Args:
      plan: any plan.

    Returns:
      A self-contained `<div>`; what is long is folded.

    Example:
      >>> import autoshard, jax
      >>> x = jax.ShapeDtypeStruct((512, 512), "float32")
      >>> plan = autoshard.suggest(lambda x: x @ x, x, topology="v3:2x2", mesh={"data": 8})
      >>> plan_html(plan).startswith('<div class="asp"')
      True
    """
    arguments = argument_rows(plan)
    results, alike = result_rows(plan)
    same = f"{alike} split as the arguments of the same path" if alike else ""
    return _element(
        "div",
        _Html(f"<style>{_CSS}</style>"),
        _header(plan),
        _tiles(plan),
        _element("div", _step(plan), _memory(plan), cls="asp-columns"),
        _folded(f"Arguments ({len(plan.inputs)} arrays)", _arrays(arguments)),
        _folded(
            f"Results ({len(plan.outputs)} arrays)",
            _arrays(results) if results else _Html(),
            _element("div", same, cls="asp-dim"),
        ),
        _folded(f"Largest buffers at the peak, in {plan.estimate.peak.where}", _buffers(plan)),
        _folded("Step time by source line", _sources(plan)),
        _closing(plan),
        cls="asp",
        role="group",
        aria_label=f"plan {plan.name}",
    )


# Header ------------------------------------------------------------------------------------------------


def _header(plan: Plan) -> _Html:
    placement = plan.estimate.machine.placement
    held = placement.topology.num_devices
    used = placement.num_devices
    devices = f"{used} devices" if used == held else f"{used} of {held} devices"
    return _element(
        "div",
        _element("span", f"Plan: {plan.name}", cls="asp-name"),
        _element("span", f"{plan.topology}, {devices}"),
        cls="asp-head",
    )


def _tiles(plan: Plan) -> _Html:
    placement = plan.estimate.machine.placement
    step = ms_text(plan.step_seconds, plan.step_seconds)
    mesh = " × ".join(f"{axis} {size}" for axis, size in plan.mesh.items()) or "one device"
    places = "; ".join(
        f"{axis} on {' '.join(map(str, segments))}"
        for (axis, _), segments in zip(placement.mesh, placement.segments, strict=True)
        if segments
    )
    gap, meaning = _search(plan)
    hidden = plan.estimate.hidden_seconds
    below = f"{100 * plan.estimate.hardware_utilization:.1f} % of peak flops (HFU)"
    below += f"; {ms_text(hidden, plan.step_seconds)} ms of communication beside kernels" if hidden else ""
    return _element(
        "div",
        _tile("step time", f"{step} ms", below),
        _tile("gap", gap, meaning),
        _tile("mesh", mesh, places),
        cls="asp-tiles",
    )


def _tile(label: str, value: str, below: str) -> _Html:
    return _element(
        "div",
        _element("div", label, cls="asp-dim"),
        _element("div", value, cls="asp-big"),
        _element("div", below, cls="asp-dim"),
    )


def _search(plan: Plan) -> tuple[str, str]:
    if plan.gap is None:
        return "none", "nothing searched: given, completed, priced"
    aside = ", overlap aside" if plan.estimate.hidden_seconds else ""
    if plan.gap < _PROVEN:
        return "0", f"proven best on this mesh{aside}"
    gap = f"{100 * plan.gap:.2g}" if plan.gap >= 1e-4 else "< 0.01"
    return f"{gap} %", f"at most, from the best on this mesh{aside}"


# Bars --------------------------------------------------------------------------------------------------


def _step(plan: Plan) -> _Html:
    total = plan.step_seconds or 1.0
    parts = step_parts(plan)
    styles = step_styles(part.key for part in parts)
    name, unit = size_unit(max((part.sent_bytes for part in parts), default=0.0), whole=True)
    bar = _bar((styles[p.key], p.seconds / total, f"{ms_text(p.seconds, total)} ms") for p in parts)
    rows = [
        (
            _part(styles[part.key], part.label),
            part.axes,
            f"{part.runs:,.0f}" if part.axes else "",
            f"{part.sent_bytes / unit:,.2f}" if part.axes else "",
            ms_text(part.seconds, total),
            f"{100 * part.seconds / total:.1f} %",
        )
        for part in parts
    ]
    table = _table(("", "mesh axes", ">runs", f">{name} sent", ">ms", ">share"), rows)
    return _element("div", _element("div", "Step time", cls="asp-section"), bar, table)


def _memory(plan: Plan) -> _Html:
    peak, limit = plan.estimate.peak_bytes, plan.memory_limit_bytes
    width = max(peak, limit) or 1.0
    parts = memory_parts(plan)
    styles = memory_styles(parts)
    bar = _bar(
        ((styles[name], size / width, size_text(size, whole=True)) for name, size in parts.items()),
        limit=None if plan.fits else limit / width,
    )
    name, unit = size_unit(max(parts.values(), default=0.0), whole=True)
    rows = [
        (
            _part(styles[category], category),
            f"{size / unit:,.2f}",
            f"{100 * size / (limit or 1.0):.1f} %",
        )
        for category, size in parts.items()
    ]
    left = f"{size_text(abs(limit - peak), whole=True)} {'free' if plan.fits else 'over the limit'}"
    verdict = f"fits, {left}" if plan.fits else f"DOES NOT FIT, {left}"
    title = f"HBM of a device: {size_text(peak, whole=True)} of {size_text(limit, whole=True)}"
    return _element(
        "div",
        _element("div", title, cls="asp-section"),
        bar,
        _table(("", f">{name} at the peak", ">of the limit"), rows),
        _element("div", verdict) if plan.fits else _element("b", verdict),
    )


def _part(style: Style, label: str) -> _Html:
    return _element("span", _swatch(style), label, cls="asp-part")


def _bar(pieces: Iterable[tuple[Style, float, str]], limit: float | None = None) -> _Html:
    """Draw shares of the full width, what they are under the pointer, and a mark at `limit`."""
    drawn = [
        _element("span", style=f"width:{100 * share:.4f}%;{_fill(style)}", title=f"{style.label}: {text}")
        for style, share, text in pieces
    ]
    if limit is not None:
        drawn.append(_element("span", cls="asp-limit", style=f"left:{100 * limit:.4f}%", title="limit"))
    return _element("div", *drawn, cls="asp-bar")


def _swatch(style: Style) -> _Html:
    return _element("span", cls="asp-swatch", style=_fill(style))


def _fill(style: Style) -> str:
    return f"background:{_STRIPES[style.stripes % len(_STRIPES)]} {style.colour}".replace(":none ", ":")


# Folded ------------------------------------------------------------------------------------------------


def _arrays(rows: Sequence[ArrayRow]) -> _Html:
    """One row for arrays of one argument that are split alike, under the argument's key and category."""
    name, unit = size_unit(max((row.device_bytes for row in rows), default=0.0) / _SMALLER, whole=True)
    cells: list[tuple[str, ...]] = []
    for (argument, category), members in groupby(rows, key=lambda row: (row.argument, row.category)):
        inside = list(members)
        title = f"{argument} {category}".strip() or "all of it"
        if len(inside) == 1 and not inside[0].pattern:
            cells.append(_cells(inside[0], _element("b", title), unit))
            continue
        cells.append((title,))
        cells += [_cells(row, _element("code", row.pattern), unit) for row in inside]
    return _table(("path", ">arrays", "type", "spec", f">{name} on a device"), cells)


def _cells(row: ArrayRow, path: _Html, unit: float) -> tuple[str, ...]:
    return (
        path,
        str(row.count),
        _element("code", row.array),
        _element("code", row.spec),
        f"{row.device_bytes / unit:,.2f}",
    )


def _buffers(plan: Plan) -> _Html:
    merged: dict[tuple[str, str, str], list[float]] = {}
    for buffer in plan.estimate.peak.buffers:
        key = (buffer.name, short_array(buffer.dtype, buffer.shape), buffer.category)
        merged.setdefault(key, []).append(buffer.bytes)
    order = sorted(merged, key=lambda key: -sum(merged[key]))
    name, unit = size_unit(max((sum(sizes) for sizes in merged.values()), default=0.0) / _SMALLER, whole=True)
    rows: list[tuple[str, ...]] = [
        (
            _element("code", buffer),
            category,
            str(len(sizes)),
            _element("code", array),
            f"{sum(sizes) / unit:,.2f}",
        )
        for buffer, array, category in order[:_BUFFERS]
        for sizes in [merged[(buffer, array, category)]]
    ]
    rest = [size for key in order[_BUFFERS:] for size in merged[key]]
    if rest:
        rows.append(("others", "", str(len(rest)), "", f"{sum(rest) / unit:,.2f}"))
    return _table(("buffer", "category", ">arrays", "type on a device", f">{name}"), rows)


def _sources(plan: Plan) -> _Html:
    seconds: dict[str, dict[str, float]] = {}
    for line in lines(plan):
        place = re.sub(r":(\d+):\d+", r":\1", line.source) or "(no source line)"
        by = seconds.setdefault(place, dict.fromkeys(("compute", "hbm", "ici"), 0.0))
        by[line.bound] += line.seconds
    total = plan.step_seconds or 1.0
    order = sorted(seconds, key=lambda place: -sum(seconds[place].values()))
    rows = [(_element("code", place), *_times(seconds[place], total)) for place in order[:_SOURCES]]
    rest = order[_SOURCES:]
    if rest:
        by = {bound: sum(seconds[place][bound] for place in rest) for bound in ("compute", "hbm", "ici")}
        rows.append((f"{len(rest)} other lines", *_times(by, total)))
    return _table(("source", ">compute ms", ">HBM ms", ">ICI ms", ">total ms", ">share"), rows)


def _times(by: dict[str, float], total: float) -> tuple[str, ...]:
    whole = sum(by.values())
    parts = (ms_text(by[bound], total) if by[bound] else "-" for bound in ("compute", "hbm", "ici"))
    return (*parts, ms_text(whole, total), f"{100 * whole / total:.1f} %")


def _closing(plan: Plan) -> _Html:
    notes = _element("ul", *(_element("li", note) for note in plan.notes), cls="asp-notes")
    return _element(
        "div",
        _element("div", f"Coverage: {plan.coverage}"),
        *((_element("div", "Notes"), notes) if plan.notes else ()),
        style="margin-top:9px",
    )


# HTML --------------------------------------------------------------------------------------------------


def _element(tag: str, *children: str, cls: str = "", **attributes: str) -> _Html:
    """Write an element; children and attributes are escaped, unless they are HTML already."""
    written = {"class": cls, **{name.replace("_", "-"): value for name, value in attributes.items()}}
    start = "".join(f' {name}="{escape(value)}"' for name, value in written.items() if value)
    inside = "".join(child if isinstance(child, _Html) else escape(child) for child in children)
    return _Html(f"<{tag}{start}>{inside}</{tag}>")


def _folded(title: str, *body: _Html) -> _Html:
    return _element("details", _element("summary", title), *body)


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> _Html:
    """Write a table; a heading that starts with `>` is of numbers, a row of one cell spans all columns."""
    kinds = ["asp-number" if title.startswith(">") else "" for title in heading]
    head = [
        _element("th", title.removeprefix(">"), cls=kind) for title, kind in zip(heading, kinds, strict=True)
    ]
    body = []
    for row in rows:
        if len(row) == 1:
            cell = _element("td", row[0], colspan=str(len(heading)))
            body.append(_element("tr", cell, cls="asp-group"))
        else:
            cells = (_element("td", text, cls=kind) for text, kind in zip(row, kinds, strict=True))
            body.append(_element("tr", *cells))
    table = _element(
        "table", _element("thead", _element("tr", *head)), _element("tbody", *body), cls="asp-table"
    )
    return _element("div", table, cls="asp-scroll")
