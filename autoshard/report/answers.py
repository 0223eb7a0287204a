"""Answers to questions about a plan, as tables: why a decision was made, what is scarce, what memory buys."""

from __future__ import annotations

import html
import math
import pprint
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec
from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from autoshard.layout import local_shape
from autoshard.report.arrays import spec_text
from autoshard.report.page import grid, plain, size_text, time_unit

if TYPE_CHECKING:
    from autoshard.explain import Rival, Why
    from autoshard.front import Front
    from autoshard.minimal import Minimal
    from autoshard.plan import Plan
    from autoshard.what_if import ShadowPrices

__all__ = ["Answer", "alternative_tables", "annotation_code", "front_table", "price_table", "why_tables"]

_TERMS = 3
# Arguments up to which specs are written as a pytree.
_LEAVES = 16


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


# Alternatives ----------------------------------------------------------------------------------------


def alternative_tables(plan: Plan, others: Sequence[Plan]) -> list[Answer]:
    """Return a table of the plans, and for each other one of the arguments that it splits otherwise."""
    unit, scale = time_unit(plan.step_seconds)
    rows = []
    for each in (plan, *others):
        slower = 100 * (each.step_seconds / plan.step_seconds - 1) if plan.step_seconds else 0.0
        gap = "" if each.gap is None else f"{100 * each.gap:.2g} %"
        change = "" if each is plan else f"{slower:+.3f} %"
        peak = size_text(each.estimate.peak_bytes)
        rows.append([each.name, f"{each.step_seconds / scale:,.3f}", change, peak, gap])
    columns = [("", "l"), (f"step {unit}", "r"), ("slower", "r"), ("peak", "r"), ("gap", "r")]
    tables = [Answer(title="Plans", columns=columns, rows=rows)]
    for other in others:
        pairs = zip(plan.inputs, plan.input_layouts, other.input_layouts, strict=True)
        rows = [[leaf.path, spec_text(a), spec_text(b)] for leaf, a, b in pairs if a != b]
        tables.append(
            Answer(title=other.name, columns=[("", "l"), (plan.name, "l"), ("instead", "l")], rows=rows)
        )
    return tables


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


# Memory ----------------------------------------------------------------------------------------------


def front_table(front: Front) -> Answer:
    """Return a row per plan of a front, fastest first, with what its arguments take and what it loses."""
    fastest = front[0]
    unit, scale = time_unit(fastest.step_seconds)
    rows = []
    for plan in front:
        slower = 100 * (plan.step_seconds / fastest.step_seconds - 1) if fastest.step_seconds else 0.0
        rows.append(
            [
                " ".join(f"{axis}={size}" for axis, size in plan.mesh.items()),
                f"{plan.step_seconds / scale:,.3f}",
                f"{slower:+.2f} %" if plan is not fastest else "",
                size_text(plan.estimate.peak_bytes),
                size_text(argument_bytes(plan)),
                "" if plan.gap is None else f"{100 * plan.gap:.2g} %",
            ]
        )
    columns = [
        ("mesh", "l"),
        (f"step {unit}", "r"),
        ("slower", "r"),
        ("peak", "r"),
        ("arguments", "r"),
        ("gap", "r"),
    ]
    note = f"nothing fits below {size_text(front.least_bytes)}"
    return Answer(title="Step time against memory", columns=columns, rows=rows, notes=[note])


def argument_bytes(plan: Plan) -> float:
    """Bytes that the arguments take on a device."""
    return sum(
        plan.estimate.machine.bytes_of(local_shape(leaf.shape, layout, plan.mesh), leaf.dtype)
        for leaf, layout in zip(plan.inputs, plan.input_layouts, strict=True)
    )


# Annotations -----------------------------------------------------------------------------------------


class _Code:
    """Something that prints as it is, inside a pytree."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def annotation_code(answer: Minimal) -> str:
    """Return a few annotations as code to paste, with what completion makes of them as a comment."""
    unit, scale = time_unit(answer.plan.step_seconds)
    steps = [f"{plan.step_seconds / scale:,.3f} {unit}" for plan in (answer.completed, answer.plan)]
    verdict = "the plan" if answer.found else "NOT the plan"
    lines = [
        f"# Completed, these {len(answer.annotations)} make {verdict}: a step of {steps[0]}, planned {steps[1]}.",
        "from jax.sharding import PartitionSpec as P",
        "",
    ]
    trees = {"in_specs": answer.in_specs, "out_specs": answer.out_specs}
    inside = answer.inside
    if len(answer.plan.inputs) > _LEAVES:
        trees, inside = {}, dict(answer.annotations)
    for name, tree in trees.items():
        if any(spec is not None for spec in _leaves(tree)):
            lines.append(f"{name} = {_written(tree)}")
    if inside:
        lines.append("annotations = {  # by path of an argument, or place inside the function")
        lines += [f"    {key!r}: {_spec_code(spec)}," for key, spec in inside.items()]
        lines.append("}")
    return "\n".join(lines)


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: x is None or isinstance(x, PartitionSpec))


def _written(tree: Any) -> str:
    """Write a pytree of specs, on several lines where it is long."""
    is_leaf = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    code = jax.tree.map(lambda spec: _Code(_spec_code(spec)), tree, is_leaf=is_leaf)
    return pprint.pformat(code, width=100, sort_dicts=False)


def _spec_code(spec: PartitionSpec) -> str:
    return f"P({', '.join(map(repr, spec))})"
