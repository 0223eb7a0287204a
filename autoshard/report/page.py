"""What the terminal reports are laid out with: sections, tables, bars, and plain text of a renderable."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

__all__ = ["bar", "fact_list", "grid", "plain", "section"]

_WIDTH = 100


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


def bar(share: float, *, width: int = 24) -> Text:
    """Draw a share of the full width in eighths of a character; in ASCII where the terminal has no blocks."""
    eighths = round(8 * width * min(max(share, 0.0), 1.0))
    whole, part = divmod(eighths, 8)
    if not _has_blocks():
        return Text("#" * whole)
    return Text("█" * whole + (" ▏▎▍▌▋▊▉"[part] if part else ""), style="blue")


def _has_blocks() -> bool:
    try:
        "█▏".encode(sys.stdout.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
