"""How every array of a plan is split, for a terminal: the rows of `autoshard.report.arrays` in tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from autoshard.report.arrays import (
    ArrayRow,
    argument_rows,
    result_rows,
    short_array,
    short_dtype,
    spec_text,
)
from autoshard.report.page import grid, section, size_unit

if TYPE_CHECKING:
    from autoshard.plan import Plan

__all__ = ["arguments", "results", "spec_text"]

_ROWS = 40
_PATH_WIDTH = 30
_SHAPE_WIDTH = 22


def arguments(plan: Plan, full: bool) -> list[RenderableType]:
    """Return the section of the arguments."""
    return section("Arguments", _array_table(argument_rows(plan, full=full), full, headed=True))


def results(plan: Plan, full: bool) -> list[RenderableType]:
    """Outputs, less those that are laid out as the input that has their path and shape: state."""
    rows, alike = result_rows(plan, full=full)
    parts: list[RenderableType] = []
    if rows or full:
        parts += section("Results", _array_table(rows, full, headed=False))
    if alike:
        which = "every other" if rows else "every"
        parts += [] if rows else [Text()]
        parts.append(Text(f"  {which} result is split as the argument of the same path", style="dim"))
    return parts


def _array_table(rows: Sequence[ArrayRow], full: bool, headed: bool) -> RenderableType:
    """List rows, the largest only unless `full`; if `headed`, below their argument and category."""
    unit, scale = size_unit(max((row.device_bytes for row in rows), default=0.0) / 1000)
    table = grid(("", "whole"), ("n", "r"), ("array", "l"), ("spec", "l"), (unit, "r"))
    shown = list(range(len(rows)))
    if not full:
        shown = sorted(sorted(shown, key=lambda i: -rows[i].device_bytes)[:_ROWS])
    heading = None
    for row in (rows[i] for i in shown):
        current = (row.argument, row.category)
        if headed and current != heading:
            heading = current
            table.add_row(Text(" ".join(filter(None, current)), style="bold"))
        table.add_row(
            _path_cell(row.pattern, "  ") if headed else _path_cell(row.argument + row.pattern, ""),
            Text(str(row.count)),
            Text(_shapes(row)),
            Text(spec_text(row.layout), style="cyan"),
            Text(f"{row.device_bytes / scale:,.2f}"),
        )
    rest = [rows[i] for i in sorted(set(range(len(rows))) - set(shown))]
    if rest:
        table.add_row(
            Text(f"{len(rest)} more rows: list them with full"),
            Text(str(sum(row.count for row in rest))),
            Text(),
            Text(),
            Text(f"{sum(row.device_bytes for row in rest) / scale:,.2f}"),
            style="dim",
        )
    return table


def _path_cell(pattern: str, indent: str) -> Text:
    """Break a long pattern before a key, or after a comma, and indent what stands below an argument."""
    lines_of_cell, line = [], indent
    for piece in re.findall(r"[^,\[]*,|\[[^,\[]*,?|[^,\[]+", pattern):
        if len(line) + len(piece) > _PATH_WIDTH and line.strip():
            lines_of_cell.append(line)
            line = indent + "  "
        line += piece
    return Text("\n".join([*lines_of_cell, line]) if pattern else indent + "(all of it)")


def _shapes(row: ArrayRow) -> str:
    """Write the shapes of a row as one, listing the sizes that differ while there is room."""
    text = short_array(row.dtype, ["|".join(map(str, column)) for column in row.sizes])
    shapes = len(set(row.shapes))
    if len(text) <= _SHAPE_WIDTH or shapes == 1:
        return text
    return f"{short_dtype(row.dtype)} rank {len(row.sizes)}, {shapes} shapes"
