"""The outcome of a validation: tables of predicted beside found, named differences, and what failed."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Table", "Validation"]

_WIDTH = 110


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of plain values under a title; `formats` says how a column is written, by a `str.format` spec.

    A format of `"GiB"`, `"MB"` or `"ms"` divides as its unit says and puts the unit into the heading. At most
    `shown` rows are printed.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    formats: Mapping[str, str] = field(default_factory=dict)
    shown: int = 40

    def frame(self) -> pd.DataFrame:
        """Return the rows as numbers, in the base units of the columns' names."""
        import pandas as pd

        return pd.DataFrame([list(row) for row in self.rows], columns=list(self.columns))

    def cells(self) -> list[list[str]]:
        """Return the heading and the rows that are shown as text."""
        return [
            [_heading(name, self.formats.get(name, "")) for name in self.columns],
            *(
                [_cell(x, self.formats.get(name, "")) for name, x in zip(self.columns, row, strict=True)]
                for row in self.rows[: self.shown]
            ),
        ]

    @property
    def hidden(self) -> str:
        """Say how many rows are not shown; empty if all are."""
        more = len(self.rows) - self.shown
        return f"... {more} more rows" if more > 0 else ""

    def __str__(self) -> str:
        cells = self.cells()
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        left = [all(isinstance(row[i], str) for row in self.rows) for i in range(len(self.columns))]
        lines = [self.title]
        for row in cells:
            parts = [
                x.ljust(w) if is_text else x.rjust(w) for x, w, is_text in zip(row, widths, left, strict=True)
            ]
            lines.append(("  " + "  ".join(parts)).rstrip())
        return "\n".join([*lines, f"  {self.hidden}"] if self.hidden else lines)

    def to_html(self) -> str:
        """Return an HTML table."""
        heading, *rows = self.cells()
        head = "".join(f"<th>{html.escape(x)}</th>" for x in heading)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(x)}</td>" for x in row) + "</tr>" for row in rows)
        return (
            f"<table><caption>{html.escape(self.title)}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table><p>{self.hidden}</p>"
        )


_UNITS = {"GiB": (2.0**30, "{:.3f}"), "MB": (1e6, "{:,.1f}"), "ms": (1e-3, "{:,.3f}"), "T": (1e12, "{:,.2f}")}
_BASE = ("_bytes", "_seconds", "_flops")


def _heading(name: str, unit: str) -> str:
    if unit in _UNITS:
        for ending in _BASE:
            name = name.removesuffix(ending)
        return f"{name.replace('_', ' ')} {unit}"
    return name.replace("_", " ")


def _cell(value: Any, unit: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if unit in _UNITS:
        scale, text = _UNITS[unit]
        return text.format(value / scale)
    return unit.format(value) if unit else f"{value:g}"


@dataclass(frozen=True, kw_only=True)
class Validation:
    """What a validation found.

    Attributes:
      plan: the plan in a line.
      level: "numerics", "compile" or "profile".
      tables: what was compared, predicted beside found, by name.
      differences: where the two sides do different things, each by name; a known habit of a compiler is one.
      failures: what makes the validation fail; empty if nothing does.
      notes: where it ran, and what else a reader should know.
    """

    plan: str
    level: str
    tables: Mapping[str, Table]
    differences: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Tell whether nothing failed."""
        return not self.failures

    def frame(self, name: str) -> pd.DataFrame:
        """Return a table as a DataFrame, in base units.

        Raises:
          KeyError: there is no such table; the message lists those that are.
        """
        if name not in self.tables:
            raise KeyError(f"no table {name!r} at level {self.level!r}; there are: {', '.join(self.tables)}")
        return self.tables[name].frame()

    def to_dict(self) -> dict[str, Any]:
        """Return everything in JSON types."""
        return {
            "plan": self.plan,
            "level": self.level,
            "ok": self.ok,
            "failures": list(self.failures),
            "differences": list(self.differences),
            "notes": list(self.notes),
            "tables": {
                name: [dict(zip(table.columns, row, strict=True)) for row in table.rows]
                for name, table in self.tables.items()
            },
        }

    def __str__(self) -> str:
        lines = [f"{self.level}: {'ok' if self.ok else 'FAILED'} - {self.plan}"]
        lines += [_wrapped("failed: ", text) for text in self.failures]
        for table in self.tables.values():
            lines += ["", str(table)]
        if self.differences:
            lines += ["", "differences"]
            lines += [_wrapped("  ", text) for text in self.differences]
        lines += ["", *(_wrapped("note: ", text) for text in self.notes)] if self.notes else []
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        title = f"<p><b>{self.level}: {'ok' if self.ok else 'FAILED'}</b> {html.escape(self.plan)}</p>"
        tables = "".join(table.to_html() for table in self.tables.values())
        lists = "".join(
            f"<p>{name}</p><ul>" + "".join(f"<li>{html.escape(text)}</li>" for text in texts) + "</ul>"
            for name, texts in (
                ("failed", self.failures),
                ("differences", self.differences),
                ("notes", self.notes),
            )
            if texts
        )
        return f"<div>{title}{tables}{lists}</div>"


def _wrapped(head: str, text: str) -> str:
    import textwrap

    indent = " " * (len(head) + 2)
    lines: Sequence[str] = [
        part
        for i, line in enumerate(text.splitlines())
        for part in textwrap.wrap(
            line, _WIDTH, initial_indent=head if i == 0 else indent, subsequent_indent=indent
        )
    ]
    return "\n".join(lines)
