"""A plan for a terminal: what it is, where the time and the memory go, and how every array is split.

`plan_view` is a `rich` renderable, for a console with colours; `plan_text` the same as plain text, for
`print(plan)`, logs and pipes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from autoshard.layout import Axes, Layout, local_shape
from autoshard.program import value_bytes
from autoshard.report.page import bar, fact_list, grid, plain, section
from autoshard.report.paths import collapse, keys_of
from autoshard.report.tables import lines

if TYPE_CHECKING:
    from autoshard.plan import Leaf, Plan

__all__ = ["plan_text", "plan_view", "spec_text"]

_ROWS = 8
_ARRAY_ROWS = 40
_PATH_WIDTH = 30
_SHAPE_WIDTH = 22
_NAMES = {"compute": "compute-bound kernels", "hbm": "HBM-bound kernels"}
_KEY_BYTES = {"key<fry>": 8, "key<rbg>": 16, "key<urbg>": 16}
_MIB = 2**20
_GIB = 2**30


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
        *section("Arguments", _array_table(plan, "input", full)),
        *_outputs(plan, full),
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
    devices = f"{topology.num_devices} devices"
    if topology.chip.devices_per_chip > 1:
        devices = f"{topology.num_chips} chips x {topology.chip.devices_per_chip} cores = {devices}"
    used = f", {placement.num_devices} of them used" if placement.num_devices < topology.num_devices else ""
    axes = "; ".join(
        f"{name}={size} on {' '.join(map(str, segments)) or 'one device'}"
        for (name, size), segments in zip(placement.mesh, placement.segments, strict=True)
    )
    step = f"{_ms(plan.step_seconds, plan.step_seconds)} ms, HFU {100 * estimate.hardware_utilization:.1f} %"
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
    text = f"peak {_gib(peak)} of {_gib(limit)} GiB ({100 * peak / limit:.0f} %): "
    if plan.fits:
        return Text(text + "fits", style="green")
    return Text(text + f"DOES NOT FIT, by {_gib(peak - limit)} GiB", style="bold red")


def _search_verdict(plan: Plan) -> str:
    if plan.gap is None:
        return "none: the given shardings were completed and priced"
    if not plan.fits:
        return "found nothing on this mesh that fits; this has the least peak of what was tried"
    if plan.gap == 0:
        return "proven best on this mesh under the model"
    bound = f"within {100 * plan.gap:.2g} % of the best on this mesh under the model"
    if plan.lower_bound_seconds is not None:
        bound += f" (at least {_ms(plan.lower_bound_seconds, plan.step_seconds)} ms)"
    stopped = any("at the time limit" in note for note in plan.notes)
    return f"stopped at the time limit; {bound}" if stopped else bound


def _sentence(coverage: Any) -> Text:
    return Text(str(coverage), style="" if coverage.complete else "yellow")


# Time --------------------------------------------------------------------------------------------------


def _step_table(plan: Plan) -> RenderableType:
    """One row for compute, HBM, and each kind of collective on each mesh axis, the costly ones first."""
    runs: dict[str, float] = {}
    sent: dict[str, float] = {}
    for line in lines(plan):
        if line.kind == "collective":
            key = f"{line.title} {'*'.join(line.axes)}"
            runs[key] = runs.get(key, 0.0) + line.count
            sent[key] = sent.get(key, 0.0) + line.nbytes
    parts = {key: seconds for key, seconds in plan.estimate.breakdown().items() if seconds}
    order = sorted(parts, key=lambda key: (key in runs, -parts[key]))
    total = plan.estimate.serial_seconds or 1.0
    table = grid(("", "l"), ("mesh axes", "l"), ("runs", "r"), ("MiB sent", "r"), *_TIME)
    for key in order:
        kind, _, axes = key.partition(" ")
        table.add_row(
            Text(_NAMES.get(kind, kind.replace("_", "-"))),
            Text(axes),
            Text(f"{runs[key]:,.0f}" if key in runs else ""),
            Text(f"{sent[key] / _MIB:,.1f}" if key in runs else ""),
            *_time_cells(parts[key], total),
        )
    return table


_TIME = (("ms", "r"), ("share", "r"), ("", "l"))


def _source_table(plan: Plan, full: bool) -> RenderableType:
    """The source lines whose ops take longest, and what bounds them."""
    found: dict[str, list[Any]] = {}
    for line in lines(plan):
        found.setdefault(_place(line.source), []).append(line)
    seconds = {source: sum(x.seconds for x in members) for source, members in found.items()}
    order = sorted(found, key=lambda source: -seconds[source])
    total = plan.estimate.serial_seconds or 1.0
    table = grid(("", "l"), ("compute", "r"), ("HBM", "r"), ("ICI", "r"), *_TIME)
    shown = order if full else order[:_ROWS]
    for source in shown:
        by = {bound: sum(x.seconds for x in found[source] if x.bound == bound) for bound in _BOUNDS}
        table.add_row(
            Text(source or "(no source line)"),
            *(Text(_ms(by[bound], total) if by[bound] else "-") for bound in _BOUNDS),
            *_time_cells(seconds[source], total),
        )
    rest = order[len(shown) :]
    if rest:
        others = [x for source in rest for x in found[source]]
        by = {bound: sum(x.seconds for x in others if x.bound == bound) for bound in _BOUNDS}
        table.add_row(
            Text(f"{len(rest)} more"),
            *(Text(_ms(by[bound], total) if by[bound] else "-") for bound in _BOUNDS),
            *_time_cells(sum(by.values()), total),
            style="dim",
        )
    return table


_BOUNDS = ("compute", "hbm", "ici")


def _time_cells(seconds: float, total: float) -> tuple[Text, Text, Text]:
    return Text(_ms(seconds, total)), Text(f"{100 * seconds / total:.1f} %"), bar(seconds / total)


def _timing_table(plan: Plan) -> RenderableType:
    total = sum(plan.timings.values()) or 1.0
    table = grid(("", "l"), ("s", "r"), ("share", "r"), ("", "l"))
    for stage, seconds in (*plan.timings.items(), ("total", total)):
        table.add_row(
            Text(stage),
            Text(f"{seconds:.2f}"),
            Text(f"{100 * seconds / total:.0f} %"),
            bar(seconds / total) if stage != "total" else Text(),
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
    table = grid(("", "l"), ("GiB", "r"), ("of limit", "r"), ("", "l"))
    for category, size in sorted(parts.items(), key=lambda item: -item[1]):
        table.add_row(
            Text(category), Text(_gib(size)), Text(f"{100 * size / limit:.1f} %"), bar(size / limit)
        )
    free = limit - plan.estimate.peak_bytes
    table.add_row(
        Text("free" if free >= 0 else "over the limit"),
        Text(_gib(abs(free))),
        Text(f"{100 * abs(free) / limit:.1f} %"),
        style="dim" if free >= 0 else "bold red",
    )
    return table


def _buffer_table(plan: Plan, full: bool) -> RenderableType:
    merged: dict[tuple[str, str, str], list[float]] = {}
    for buffer in plan.estimate.peak.buffers:
        array = f"{_dtype(buffer.dtype)}[{','.join(map(str, buffer.shape))}]"
        merged.setdefault((buffer.name, array, buffer.category), []).append(buffer.bytes)
    order = sorted(merged, key=lambda key: -sum(merged[key]))
    table = grid(("", "l"), ("category", "l"), ("array on a device", "l"), ("MiB", "r"))
    shown = order if full else order[:_ROWS]
    for name, array, category in shown:
        sizes = merged[(name, array, category)]
        times = f"{len(sizes)} x " if len(sizes) > 1 else ""
        table.add_row(Text(name), Text(category), Text(times + array), Text(f"{sum(sizes) / _MIB:,.1f}"))
    rest = order[len(shown) :]
    if rest:
        size = sum(sum(merged[key]) for key in rest)
        table.add_row(Text(f"{len(rest)} more"), Text(), Text(), Text(f"{size / _MIB:,.1f}"), style="dim")
    return table


# Arrays ------------------------------------------------------------------------------------------------


def _array_table(plan: Plan, what: str, full: bool, members: Sequence[int] | None = None) -> RenderableType:
    """Specs, arrays of one argument, category and spec on one row; with `full` a row for each."""
    leaves: tuple[Leaf, ...] = getattr(plan, f"{what}s")
    layouts: tuple[Layout, ...] = getattr(plan, f"{what}_layouts")
    chosen = list(range(len(leaves)) if members is None else members)
    kinds = _categories(plan) if what == "input" else {}
    labels = [(kinds.get(leaves[i].path, ""), leaves[i].dtype, layouts[i]) for i in chosen]
    groups: list[tuple[str, list[int]]]
    if full:
        groups = [(leaves[i].path, [i]) for i in chosen]
    else:
        found = collapse([leaves[i].path for i in chosen], labels)
        groups = [(pattern, [chosen[j] for j in inside]) for pattern, inside in found]
    sizes = [sum(_device_bytes(plan, leaves[i], layouts[i]) for i in inside) for _, inside in groups]
    table = grid(("", "whole"), ("n", "r"), ("array", "l"), ("spec", "l"), ("MiB", "r"))
    shown = list(range(len(groups)))
    if not full and len(groups) > _ARRAY_ROWS:
        shown = sorted(sorted(shown, key=lambda g: -sizes[g])[:_ARRAY_ROWS])
    heading = None
    for g in shown:
        pattern, inside = groups[g]
        first = leaves[inside[0]]
        current = (keys_of(first.path)[0], kinds.get(first.path, ""))
        if what == "input" and current != heading:
            heading = current
            table.add_row(Text(" ".join(filter(None, current)), style="bold"))
        table.add_row(
            _path_cell(pattern[len(current[0]) :] if what == "input" else pattern, what),
            Text(str(len(inside))),
            Text(_shapes([leaves[i] for i in inside])),
            Text(spec_text(layouts[inside[0]]), style="cyan"),
            Text(f"{sizes[g] / _MIB:,.2f}"),
        )
    if len(shown) < len(groups):
        rest = [g for g in range(len(groups)) if g not in set(shown)]
        arrays = sum(len(groups[g][1]) for g in rest)
        table.add_row(
            Text(f"{len(rest)} more rows: list them with full"),
            Text(str(arrays)),
            Text(),
            Text(),
            Text(f"{sum(sizes[g] for g in rest) / _MIB:,.2f}"),
            style="dim",
        )
    return table


def _path_cell(pattern: str, what: str) -> Text:
    """Break a long pattern before a key, or after a comma, and indent what stands below an argument."""
    indent = "  " if what == "input" else ""
    lines_of_cell, line = [], indent
    for piece in re.findall(r"[^,\[]*,|\[[^,\[]*,?|[^,\[]+", pattern):
        if len(line) + len(piece) > _PATH_WIDTH and line.strip():
            lines_of_cell.append(line)
            line = indent + "  "
        line += piece
    return Text("\n".join([*lines_of_cell, line]) if pattern else indent + "(all of it)")


def _outputs(plan: Plan, full: bool) -> list[RenderableType]:
    """Outputs, less those that are laid out as the input that has their path and shape: state."""
    if full:
        return section("Results", _array_table(plan, "output", full))
    inputs = {
        leaf.path: (leaf.shape, leaf.dtype, layout)
        for leaf, layout in zip(plan.inputs, plan.input_layouts, strict=True)
    }
    others = [
        i
        for i, (leaf, layout) in enumerate(zip(plan.outputs, plan.output_layouts, strict=True))
        if inputs.get(leaf.path) != (leaf.shape, leaf.dtype, layout)
    ]
    alike = len(plan.outputs) - len(others)
    parts: list[RenderableType] = []
    if others:
        parts += section("Results", _array_table(plan, "output", full, others))
    if alike:
        rest = "all" if not others else "the other"
        parts += [Text()] if not others else []
        parts.append(
            Text(f"  {rest} {alike} results are split as the arguments of the same path", style="dim")
        )
    return parts


def _categories(plan: Plan) -> dict[str, str]:
    """What each input is, where the peak tells; an array that is not live then goes with its neighbours."""
    known = {buffer.name: buffer.category for buffer in plan.estimate.peak.buffers}
    found: dict[str, str] = {}
    for leaf in plan.inputs:
        keys = keys_of(leaf.path)
        if leaf.path in known:
            found[leaf.path] = known[leaf.path]
        else:
            prefixes = ["".join(keys[:n]) for n in range(len(keys) - 1, 0, -1)]
            near = (known[path] for prefix in prefixes for path in known if path.startswith(prefix))
            found[leaf.path] = next(near, "")
    return found


def _device_bytes(plan: Plan, leaf: Leaf, layout: Layout) -> float:
    shape = local_shape(leaf.shape, layout, plan.mesh)
    if leaf.dtype in _KEY_BYTES:
        return value_bytes(shape, "uint8") * _KEY_BYTES[leaf.dtype]
    return float(plan.estimate.machine.bytes_of(shape, leaf.dtype))


def _shapes(leaves: Sequence[Leaf]) -> str:
    """Write the shapes of arrays of one rank as one, listing the sizes that differ while there is room."""
    sizes = [sorted(set(column)) for column in zip(*(leaf.shape for leaf in leaves), strict=True)]
    dims = ["|".join(map(str, column)) for column in sizes]
    text = f"{_dtype(leaves[0].dtype)}[{','.join(dims)}]"
    if len(text) <= _SHAPE_WIDTH:
        return text
    shapes = len({leaf.shape for leaf in leaves})
    return text if shapes == 1 else f"{_dtype(leaves[0].dtype)} rank {len(sizes)}, {shapes} shapes"


def spec_text(layout: Layout) -> str:
    """Write a layout as the `PartitionSpec` that a person would type.

    >>> spec_text(Layout((("data",), (), ("x", "y"), ())))
    "P('data', None, ('x','y'))"
    """
    entries = [_entry(axes) for axes in layout.dims]
    while entries and entries[-1] == "None":
        entries.pop()
    if layout.unreduced:
        entries.append("unreduced={" + ", ".join(map(repr, layout.unreduced)) + "}")
    return f"P({', '.join(entries)})"


def _entry(axes: Axes) -> str:
    names = ",".join(map(repr, axes))
    return f"({names})" if len(axes) > 1 else names or "None"


def _dtype(name: str) -> str:
    return re.sub(r"^(b?)(?:float|int)(\d)", lambda m: f"{m[1]}{'i' if 'int' in m[0] else 'f'}{m[2]}", name)


def _place(source: str) -> str:
    """Drop the column from `file.py:line:column (function)`."""
    return re.sub(r":(\d+):\d+", r":\1", source)


def _ms(seconds: float, total: float) -> str:
    """Write milliseconds of a step of `total` seconds, to 1 us or, where it is short, to 1 ns."""
    return f"{1e3 * seconds:,.{3 if total >= 1e-3 else 6}f}"


def _gib(size: float) -> str:
    return f"{size / _GIB:.2f}"
