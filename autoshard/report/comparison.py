"""A comparison of plans for a terminal: the fastest that fits first, with what makes the others slower."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from autoshard.report.page import grid

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["comparison_view"]

_MILLISECONDS = {"compute_ms": "compute", "hbm_ms": "HBM", "exposed_communication_ms": "ICI"}


def comparison_view(table: pd.DataFrame) -> RenderableType:
    """Return the table of `autoshard.compare.compare` as a `rich` renderable, its main columns only.

    Args:
      table: a row per plan.

    Returns:
      A table with the plans that fit first, by step time; "slower" is against the first row.
    """
    records: dict[Any, dict[Any, Any]] = table.to_dict(orient="index")
    rows = [{"plan": name, **record} for name, record in records.items()]
    rows.sort(key=lambda row: (not row["fits"], row["step_ms"]))
    best = rows[0]["step_ms"] or 1.0
    use = "mfu" if "mfu" in table.columns else "hfu"
    where = [c for c in ("topology", "mesh") if table[c].nunique() > 1]
    view = grid(
        ("plan", "whole"),
        *((c, "l") for c in where),
        ("step ms", "r"),
        ("slower", "r"),
        *((title, "r") for title in _MILLISECONDS.values()),
        (use.upper(), "r"),
        ("peak GiB", "r"),
        ("fits", "whole"),
    )
    for row in rows:
        view.add_row(
            Text(str(row["plan"])),
            *(Text(str(row[c])) for c in where),
            Text(_ms(row["step_ms"], best)),
            Text(_slower(row["step_ms"] / best)),
            *(Text(_ms(row[column], best)) for column in _MILLISECONDS),
            Text(f"{100 * row[use]:.1f} %"),
            Text(f"{row['peak_gib']:,.2f}"),
            _fits(row),
        )
    return view


def _fits(row: dict[Any, Any]) -> Text:
    return Text("yes", style="green") if row["fits"] else Text("NO", style="bold red")


def _ms(value: float, best: float) -> str:
    """Write milliseconds to a place that tells plans apart from one that takes `best`."""
    return f"{value:,.{1 if best >= 100 else 3 if best >= 1 else 6}f}"


def _slower(ratio: float) -> str:
    if ratio == 1:
        return ""
    return f"{ratio:,.1f} x" if ratio >= 2 else f"{100 * (ratio - 1):+.1f} %"
