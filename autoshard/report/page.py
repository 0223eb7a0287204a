"""What reports are laid out with: sections, tables, bars, plain text of a renderable, and units."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

__all__ = ["Bar", "fact_list", "grid", "plain", "section", "size_text", "size_unit", "time_unit"]

_WIDTH = 100
_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def plain(view: RenderableType) -> str:
    """Render without colours; the same view gives the same text on every terminal of the same width."""
    width = _WIDTH
    if sys.stdout.isatty():
        width = min(max(shutil.get_terminal_size((_WIDTH, 24)).columns, 80), 140)
    sink = io.StringIO()
    console = Console(
        file=sink,
        width=width,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        legacy_windows=False,
        _environ={},
    )
    console.print(view)
    return "\n".join(line.rstrip() for line in sink.getvalue().splitlines())


def section(title: str, body: RenderableType) -> list[RenderableType]:
    """Put a heading over a body, and an empty line above it."""
    return [Text(), Text(title, style="bold"), Padding(body, (0, 0, 0, 2))]


def fact_list(facts: Iterable[tuple[str, Text]]) -> RenderableType:
    """List named facts, one below the other."""
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(style="dim")
    rows.add_column(overflow="fold")
    for name, fact in facts:
        rows.add_row(Text(name), fact)
    return Padding(rows, (0, 0, 0, 2))


def grid(*columns: tuple[str, str]) -> Table:
    """Start a table of `(title, side)` columns: "l" left, "r" right, "whole" left and never broken."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", show_edge=False)
    for title, side in columns:
        table.add_column(
            Text(title), justify="right" if side == "r" else "left", overflow="fold", no_wrap=side != "l"
        )
    return table


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A share of one, drawn in eighths of a character; narrower where the table has no room for `width`."""

    share: float
    width: int = 24

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, self.width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self.width, options.max_width)
        whole, part = divmod(round(8 * width * min(max(self.share, 0.0), 1.0)), 8)
        if _has_blocks():
            yield Text("█" * whole + (" ▏▎▍▌▋▊▉"[part] if part else ""), style="blue", no_wrap=True)
        else:
            yield Text("#" * whole, no_wrap=True)


def _has_blocks() -> bool:
    try:
        "█▏".encode(sys.stdout.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def size_unit(size: float, *, whole: bool = False) -> tuple[str, int]:
    """Choose the unit for sizes up to `size` bytes: its name and its bytes.

    Args:
      size: bytes.
      whole: choose from B to TiB the largest of which there is one, not from KiB to GiB that of a tenth.

    >>> size_unit(3 * 2**30), size_unit(2**29), size_unit(96)
    (('GiB', 1073741824), ('GiB', 1073741824), ('KiB', 1024))
    >>> size_unit(3 * 2**29, whole=True), size_unit(96, whole=True)
    (('GiB', 1073741824), ('B', 1))
    """
    units = _UNITS if whole else _UNITS[1:-1]
    least = 1.0 if whole else 0.1
    return next((found for found in units if size >= least * found[1]), units[-1])


def size_text(size: float, *, whole: bool = False) -> str:
    """Write a size with its unit, chosen as by `size_unit`.

    >>> size_text(1.5 * 2**30), size_text(96, whole=True)
    ('1.50 GiB', '96 B')
    """
    name, scale = size_unit(size, whole=whole)
    return f"{size / scale:,.{2 if scale > 1 else 0}f} {name}"


def time_unit(seconds: float) -> tuple[str, float]:
    """Choose the unit for a step: its name and its seconds.

    >>> time_unit(0.25), time_unit(2e-5)
    (('ms', 0.001), ('us', 1e-06))
    """
    return ("ms", 1e-3) if seconds >= 1e-3 else ("us", 1e-6)
