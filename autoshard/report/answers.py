"""Answers to questions about a plan, as tables: why a decision was made, what is scarce, what memory buys."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from autoshard.report.page import grid, plain, size_text, time_unit

if TYPE_CHECKING:
    from autoshard.explain import Rival, Why
    from autoshard.plan import Plan
    from autoshard.what_if import ShadowPrices

__all__ = ["Answer", "price_table", "why_tables"]

_TERMS = 3


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A heading, a table and notes, for a terminal and for a notebook. Columns are `(title, side)` as in `grid`."""

    title: str
    columns: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        table = grid(*self.columns)
        for row in self.rows:
            table.add_row(*map(Text, row))
        notes = [Padding(Text(note), (0, 0, 0, 2)) for note in self.notes]
        return plain(Group(Text(self.title), Padding(table, (0, 0, 0, 2)), *notes))

    def html(self) -> str:
        """Return the same as a fragment of HTML."""
        sides = ["right" if side == "r" else "left" for _, side in self.columns]
        head = _cells("th", sides, (title for title, _ in self.columns))
        body = "".join(_cells("td", sides, row) for row in self.rows)
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return f"<p><b>{html.escape(self.title)}</b></p><table>{head}{body}</table>{notes}"


def _cells(tag: str, sides: Sequence[str], texts: Iterable[str]) -> str:
    cells = (
        f'<{tag} style="text-align:{side}">{html.escape(text)}</{tag}>'
        for side, text in zip(sides, texts, strict=True)
    )
    return f"<tr>{''.join(cells)}</tr>"


def term_text(term: str) -> str:
    """Write a term of the step as a person says it.

    >>> term_text("all_gather data*model"), term_text("hbm")
    ('all-gather over data*model', 'HBM')
    """
    name, _, axes = term.partition(" ")
    return f"{name.replace('_', '-')} over {axes}" if axes else {"hbm": "HBM"}.get(name, name)


# Why -------------------------------------------------------------------------------------------------


def why_tables(answer: Why) -> list[Answer]:
    """Return a table per decision that the key names."""
    unit, scale = time_unit(answer.plan.step_seconds)
    columns = [
        ("", "l"),
        (f"step {unit}", "r"),
        ("slower", "r"),
        ("peak", "r"),
        ("decides", "l"),
        (f"what changes, {unit}", "l"),
    ]
    tables = []
    for decision in answer.decisions:
        rows = [_row(decision.chosen, answer.plan, scale)]
        rows += [_rival_row(answer.plan, rival, scale) for rival in decision.rivals]
        notes = [] if decision.rivals else ["nothing else can be chosen here"]
        tables.append(Answer(title=decision.name, columns=columns, rows=rows, notes=notes))
    if answer.more:
        tables[-1] = Answer(
            title=tables[-1].title,
            columns=columns,
            rows=tables[-1].rows,
            notes=[*tables[-1].notes, f"{answer.more} more are called {answer.key}; they are not shown"],
        )
    return tables


def _row(strategy: str, plan: Plan, scale: float) -> list[str]:
    step = f"{plan.step_seconds / scale:,.3f}"
    return [strategy, step, "", size_text(plan.estimate.peak_bytes), "chosen", ""]


def _rival_row(plan: Plan, rival: Rival, scale: float) -> list[str]:
    row = _row(rival.strategy, rival.plan, scale)
    slower = 100 * rival.extra_seconds / plan.step_seconds if plan.step_seconds else 0.0
    largest = max(map(abs, rival.terms.values()), default=0.0)
    terms = [(k, v) for k, v in rival.terms.items() if abs(v) >= 0.05 * largest][:_TERMS]
    changes = ", ".join(f"{v / scale:+,.3f} {term_text(k)}" for k, v in terms)
    decides = term_text(rival.decides)
    if rival.decides == "memory" and not rival.plan.fits:
        decides = "memory: does not fit"
    return [*row[:2], f"{slower:+.2f} %", row[3], decides, changes]


# Shadow prices ---------------------------------------------------------------------------------------


def price_table(answer: ShadowPrices) -> Answer:
    """Return a row per resource: what less of it costs and more of it gains."""
    unit, scale = time_unit(answer.plan.step_seconds)
    step = answer.plan.step_seconds or 1.0

    def cells(seconds: float) -> tuple[str, str]:
        if not math.isfinite(seconds):
            return "does not fit", ""
        return f"{seconds / scale:+,.3f}", f"{100 * seconds / step:+.2f} %"

    return Answer(
        title=f"What resources are worth in a step of {step / scale:,.3f} {unit}",
        columns=[
            ("", "l"),
            ("change", "r"),
            (f"less, {unit}", "r"),
            ("", "r"),
            (f"more, {unit}", "r"),
            ("", "r"),
        ],
        rows=[
            [price.resource, price.change, *cells(price.less_seconds), *cells(price.more_seconds)]
            for price in answer.prices.values()
        ],
    )
