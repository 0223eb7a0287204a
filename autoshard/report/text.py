"""A plan for a terminal: what it is, where the time and the memory go, and how every array is split.

`plan_view` is a `rich` renderable, for a console with colours; `plan_text` the same as plain text, for
`print(plan)`, logs and pipes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from autoshard.report.arrays import short_array
from autoshard.report.page import Bar, fact_list, grid, plain, section, size_text, size_unit, time_unit
from autoshard.report.parts import step_parts
from autoshard.report.specs import arguments, results
from autoshard.report.tables import lines

if TYPE_CHECKING:
    from autoshard.plan import Plan

__all__ = ["plan_text", "plan_view"]

_ROWS = 8


def plan_text(
    plan: Plan, *, full: bool = False, timings: bool = False, model_flops: float | None = None
) -> str:
    """Return the plan as plain text: header, step time, memory, specs, coverage, notes.

    Args:
      plan: any plan.
      full: list every array, output, buffer and source line instead of the groups and the largest.
      timings: add the seconds that each stage of planning took.
      model_flops: flops of a step, all devices, nothing recomputed; adds the MFU.

    Returns:
      Lines as wide as the terminal, 80 to 140 columns; 100 where there is none.
    """
    return plain(plan_view(plan, full=full, timings=timings, model_flops=model_flops))


def plan_view(
    plan: Plan, *, full: bool = False, timings: bool = False, model_flops: float | None = None
) -> RenderableType:
    """Return the plan as a `rich` renderable; arguments as for `plan_text`."""
    parts: list[RenderableType] = [
        _header(plan, model_flops),
        *section("Step time", _step_table(plan)),
        *section("Where the time goes, by source line", _source_table(plan, full)),
        *section(f"HBM of a device at its peak, in {_peak_place(plan)}", _memory_table(plan)),
        *section("Largest buffers then", _buffer_table(plan, full)),
        *arguments(plan, full),
        *results(plan, full),
        Text(),
        fact_list([("coverage", _sentence(plan.coverage)), *(("note", Text(n)) for n in plan.notes)]),
    ]
    if timings and plan.timings:
        parts += section("Time to plan", _timing_table(plan))
    return Group(*parts)


# Header ------------------------------------------------------------------------------------------------


def _header(plan: Plan, model_flops: float | None) -> RenderableType:
    estimate, placement = plan.estimate, plan.estimate.machine.placement
    topology = placement.topology
    chips = topology.num_chips // topology.num_slices
    names = ("nodes", "GPUs") if topology.chip.platform == "gpu" else ("slices", "chips")
    counts = [(topology.num_slices, names[0]), (chips, names[1]), (topology.chip.devices_per_chip, "cores")]
    parts = [f"{count} {what}" for count, what in counts if count > 1 or what == names[1]]
    devices = f"{topology.num_devices} devices"
    if len(parts) > 1:
        devices = f"{' x '.join(parts)} = {devices}"
    used = f", {placement.num_devices} of them used" if placement.num_devices < topology.num_devices else ""
    axes = "; ".join(
        f"{name}={size} on {' '.join(map(str, segments)) or 'one device'}"
        for (name, size), segments in zip(placement.mesh, placement.segments, strict=True)
    )
    step = f"{_time(plan.step_seconds, plan)}, HFU {100 * estimate.hardware_utilization:.1f} %"
    if estimate.hidden_seconds:
        step += f", {_time(estimate.hidden_seconds, plan)} of communication beside kernels"
    if model_flops is not None:
        step += f", MFU {100 * plan.mfu(model_flops):.1f} %"
    facts = [
        ("slice", Text(f"{plan.topology}: {devices}{used}")),
        ("mesh", Text(axes)),
        ("step", Text(step, style="bold")),
        ("memory", _memory_verdict(plan)),
        ("search", Text(_search_verdict(plan))),
    ]
    return Group(Text(f"Plan: {plan.name}", style="bold"), fact_list(facts))


def _memory_verdict(plan: Plan) -> Text:
    peak, limit = plan.estimate.peak_bytes, plan.memory_limit_bytes
    text = f"peak {size_text(peak)} of {size_text(limit)} ({100 * peak / limit:.0f} %): "
    if plan.fits:
        return Text(text + "fits", style="green")
    return Text(text + f"DOES NOT FIT, by {size_text(peak - limit)}", style="bold red")


def _search_verdict(plan: Plan) -> str:
    if plan.gap is None:
        return "none: the given shardings were completed and priced"
    if not plan.fits:
        return "found nothing on this mesh that fits; this has the least peak of what was tried"
    judged = "model, overlap aside" if plan.estimate.hidden_seconds else "model"
    if plan.gap == 0:
        return f"proven best on this mesh under the {judged}"
    bound = f"within {100 * plan.gap:.2g} % of the best on this mesh under the {judged}"
    if plan.lower_bound_seconds is not None:
        bound += f" (at least {_time(plan.lower_bound_seconds, plan)})"
    stopped = any("out of time" in note for note in plan.notes)
    return f"stopped at the time limit; {bound}" if stopped else bound


def _sentence(coverage: Any) -> Text:
    return Text(str(coverage), style="" if coverage.complete else "yellow")


# Time --------------------------------------------------------------------------------------------------


def _step_table(plan: Plan) -> RenderableType:
    """One row for compute, HBM, and each kind of collective on each mesh axis, the costly ones first."""
    found = list(plan.estimate.breakdown())  # of parts that take equally long, the first stays first
    parts = sorted(step_parts(plan), key=lambda p: (bool(p.axes), -p.seconds, found.index(p.key)))
    total = plan.step_seconds or 1.0
    unit, scale = size_unit(max((part.sent_bytes for part in parts), default=0.0) / 1000)
    table = grid(
        ("", "whole"), ("mesh axes", "whole"), ("runs", "r"), (f"{unit} sent", "r"), *_time_columns(total)
    )
    for part in parts:
        table.add_row(
            Text(part.label),
            Text(part.axes),
            Text(f"{part.runs:,.0f}" if part.axes else ""),
            Text(f"{part.sent_bytes / scale:,.1f}" if part.axes else ""),
            *_time_cells(part.seconds, total),
        )
    return table


def _source_table(plan: Plan, full: bool) -> RenderableType:
    """The source lines whose ops take longest, and what bounds them."""
    found: dict[str, list[Any]] = {}
    for line in lines(plan):
        found.setdefault(_place(line.source), []).append(line)
    seconds = {source: sum(x.seconds for x in members) for source, members in found.items()}
    order = sorted(found, key=lambda source: -seconds[source])
    total = plan.step_seconds or 1.0
    table = grid(("", "whole"), ("compute", "r"), ("HBM", "r"), ("ICI", "r"), *_time_columns(total))
    shown = order if full else order[:_ROWS]
    for source in shown:
        by = {bound: sum(x.seconds for x in found[source] if x.bound == bound) for bound in _BOUNDS}
        table.add_row(
            Text(source or "(no source line)"),
            *(Text(_number(by[bound], total) if by[bound] else "-") for bound in _BOUNDS),
            *_time_cells(seconds[source], total),
        )
    rest = order[len(shown) :]
    if rest:
        others = [x for source in rest for x in found[source]]
        by = {bound: sum(x.seconds for x in others if x.bound == bound) for bound in _BOUNDS}
        table.add_row(
            Text(f"{len(rest)} more"),
            *(Text(_number(by[bound], total) if by[bound] else "-") for bound in _BOUNDS),
            *_time_cells(sum(by.values()), total),
            style="dim",
        )
    return table


_BOUNDS = ("compute", "hbm", "ici")


def _time_columns(total: float) -> tuple[tuple[str, str], ...]:
    return (time_unit(total)[0], "r"), ("share", "r"), ("", "l")


def _time_cells(seconds: float, total: float) -> tuple[Text, Text, Bar]:
    return Text(_number(seconds, total)), Text(f"{100 * seconds / total:.1f} %"), Bar(share=seconds / total)


def _timing_table(plan: Plan) -> RenderableType:
    total = sum(plan.timings.values()) or 1.0
    table = grid(("", "whole"), ("s", "r"), ("share", "r"), ("", "l"))
    for stage, seconds in (*plan.timings.items(), ("total", total)):
        table.add_row(
            Text(stage),
            Text(f"{seconds:.2f}"),
            Text(f"{100 * seconds / total:.0f} %"),
            Bar(share=seconds / total) if stage != "total" else Text(),
        )
    return table


# Memory ------------------------------------------------------------------------------------------------


def _peak_place(plan: Plan) -> str:
    """Say where the peak is: the op, and its source line where only one has that name."""
    where = plan.estimate.peak.where
    sources = {e.source for e in plan.estimate.entries if e.title == where.rpartition(": ")[2] and e.source}
    return f"{where}, {_place(sources.pop())}" if len(sources) == 1 else where


def _memory_table(plan: Plan) -> RenderableType:
    limit = plan.memory_limit_bytes
    parts = plan.estimate.peak.by_category()
    rest = plan.estimate.peak_bytes - sum(parts.values())
    if rest > 1:  # what the peak counts beyond the buffers that it names
        parts["not itemised"] = rest
    unit, scale = size_unit(plan.estimate.peak_bytes)
    table = grid(("", "whole"), (unit, "r"), ("of limit", "r"), ("", "l"))
    for category, size in sorted(parts.items(), key=lambda item: -item[1]):
        table.add_row(
            Text(category),
            Text(f"{size / scale:,.2f}"),
            Text(f"{100 * size / limit:.1f} %"),
            Bar(share=size / limit),
        )
    free = limit - plan.estimate.peak_bytes
    table.add_row(
        Text("free" if free >= 0 else "over the limit"),
        Text(f"{abs(free) / scale:,.2f}" if unit == "GiB" else size_text(abs(free))),
        Text(f"{100 * abs(free) / limit:.1f} %"),
        style="dim" if free >= 0 else "bold red",
    )
    return table


def _buffer_table(plan: Plan, full: bool) -> RenderableType:
    merged: dict[tuple[str, str, str], list[float]] = {}
    for buffer in plan.estimate.peak.buffers:
        array = short_array(buffer.dtype, buffer.shape)
        merged.setdefault((buffer.name, array, buffer.category), []).append(buffer.bytes)
    order = sorted(merged, key=lambda key: -sum(merged[key]))
    unit, scale = size_unit(max(map(sum, merged.values()), default=0.0) / 1000)
    table = grid(("", "whole"), ("category", "l"), ("array on a device", "l"), (unit, "r"))
    shown = order if full else order[:_ROWS]
    for name, array, category in shown:
        sizes = merged[(name, array, category)]
        times = f"{len(sizes)} x " if len(sizes) > 1 else ""
        table.add_row(Text(name), Text(category), Text(times + array), Text(f"{sum(sizes) / scale:,.1f}"))
    rest = order[len(shown) :]
    if rest:
        size = sum(sum(merged[key]) for key in rest)
        table.add_row(Text(f"{len(rest)} more"), Text(), Text(), Text(f"{size / scale:,.1f}"), style="dim")
    return table


# Words -------------------------------------------------------------------------------------------------


def _place(source: str) -> str:
    """Drop the column from `file.py:line:column (function)`, and what encloses the function."""
    return re.sub(r"[\w.<>]+\.<locals>\.", "", re.sub(r":(\d+):\d+", r":\1", source))


def _number(seconds: float, total: float) -> str:
    """Write a time in the unit of a step of `total` seconds."""
    return f"{seconds / time_unit(total)[1]:,.3f}"


def _time(seconds: float, plan: Plan) -> str:
    return f"{_number(seconds, plan.step_seconds)} {time_unit(plan.step_seconds)[0]}"
