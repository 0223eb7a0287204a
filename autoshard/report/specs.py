"""How every array of a plan is split, for a terminal: arrays that are split alike share a row."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from autoshard.layout import Axes, Layout, local_shape
from autoshard.program import value_bytes
from autoshard.report.page import grid, section, size_unit
from autoshard.report.paths import collapse, keys_of

if TYPE_CHECKING:
    from autoshard.plan import Leaf, Plan

__all__ = ["arguments", "results", "short_dtype", "spec_text"]

_ROWS = 40
_PATH_WIDTH = 30
_SHAPE_WIDTH = 22
_KEY_BYTES = {"key<fry>": 8, "key<rbg>": 16, "key<urbg>": 16}


def arguments(plan: Plan, full: bool) -> list[RenderableType]:
    """Return the section of the arguments."""
    return section("Arguments", _array_table(plan, "input", full))


def _array_table(plan: Plan, what: str, full: bool, members: Sequence[int] | None = None) -> RenderableType:
    """Specs, arrays of one argument, category and spec on one row; with `full` a row for each."""
    leaves: tuple[Leaf, ...] = getattr(plan, f"{what}s")
    layouts: tuple[Layout, ...] = getattr(plan, f"{what}_layouts")
    chosen = list(range(len(leaves)) if members is None else members)
    labels = [(leaves[i].category, leaves[i].dtype, layouts[i]) for i in chosen]
    groups: list[tuple[str, list[int]]]
    if full:
        groups = [(leaves[i].path, [i]) for i in chosen]
    else:
        found = collapse([leaves[i].path for i in chosen], labels)
        groups = [(pattern, [chosen[j] for j in inside]) for pattern, inside in found]
    sizes = [sum(_device_bytes(plan, leaves[i], layouts[i]) for i in inside) for _, inside in groups]
    unit, scale = size_unit(max(sizes, default=0.0) / 1000)
    table = grid(("", "whole"), ("n", "r"), ("array", "l"), ("spec", "l"), (unit, "r"))
    shown = list(range(len(groups)))
    if not full and len(groups) > _ROWS:
        shown = sorted(sorted(shown, key=lambda g: -sizes[g])[:_ROWS])
    heading = None
    for g in shown:
        pattern, inside = groups[g]
        first = leaves[inside[0]]
        current = (keys_of(first.path)[0], first.category)
        if what == "input" and current != heading:
            heading = current
            table.add_row(Text(" ".join(filter(None, current)), style="bold"))
        table.add_row(
            _path_cell(pattern[len(current[0]) :] if what == "input" else pattern, what),
            Text(str(len(inside))),
            Text(_shapes([leaves[i] for i in inside])),
            Text(spec_text(layouts[inside[0]]), style="cyan"),
            Text(f"{sizes[g] / scale:,.2f}"),
        )
    if len(shown) < len(groups):
        rest = [g for g in range(len(groups)) if g not in set(shown)]
        arrays = sum(len(groups[g][1]) for g in rest)
        table.add_row(
            Text(f"{len(rest)} more rows: list them with full"),
            Text(str(arrays)),
            Text(),
            Text(),
            Text(f"{sum(sizes[g] for g in rest) / scale:,.2f}"),
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


def results(plan: Plan, full: bool) -> list[RenderableType]:
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
        which = "every" if not others else "every other"
        parts += [Text()] if not others else []
        parts.append(Text(f"  {which} result is split as the argument of the same path", style="dim"))
    return parts


def _device_bytes(plan: Plan, leaf: Leaf, layout: Layout) -> float:
    shape = local_shape(leaf.shape, layout, plan.mesh)
    if leaf.dtype in _KEY_BYTES:
        return value_bytes(shape, "uint8") * _KEY_BYTES[leaf.dtype]
    return float(plan.estimate.machine.bytes_of(shape, leaf.dtype))


def _shapes(leaves: Sequence[Leaf]) -> str:
    """Write the shapes of arrays of one rank as one, listing the sizes that differ while there is room."""
    sizes = [sorted(set(column)) for column in zip(*(leaf.shape for leaf in leaves), strict=True)]
    dims = ["|".join(map(str, column)) for column in sizes]
    text = f"{short_dtype(leaves[0].dtype)}[{','.join(dims)}]"
    if len(text) <= _SHAPE_WIDTH:
        return text
    shapes = len({leaf.shape for leaf in leaves})
    return text if shapes == 1 else f"{short_dtype(leaves[0].dtype)} rank {len(sizes)}, {shapes} shapes"


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


def short_dtype(name: str) -> str:
    """Shorten the name of a dtype as XLA does.

    >>> [short_dtype(name) for name in ("bfloat16", "float32", "int32", "uint8", "bool")]
    ['bf16', 'f32', 'i32', 'u8', 'bool']
    """
    return re.sub(r"^(b|u|)(float|int)(\d)", lambda m: (m[1] + m[2][0] + m[3]).replace("ui", "u"), name)
