"""Why a plan is as it is: what the nearest rivals of one decision cost, everything else decided anew.

A rival is a strategy for the array or op in question. The search problem of the plan is solved again without the
strategies seen so far, so the nearest rival comes first; each is a whole plan, and its ledger beside that of the plan
explained says which term decides.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from autoshard.annotations import output_names
from autoshard.errors import SpecError
from autoshard.layout import Layout
from autoshard.places import Places
from autoshard.report.arrays import spec_text
from autoshard.session import decisions_of
from autoshard.solving import MEMORY_DECIDES, Request, request_of, solve

if TYPE_CHECKING:
    from autoshard.model import Model, Node
    from autoshard.plan import Plan

__all__ = ["Decision", "Rival", "Why", "why"]

# Decisions that one key is explained by; a line in unrolled layers names many.
_MOST = 4


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A strategy that was not chosen, and the best plan with it.

    Attributes:
      strategy: as text.
      plan: the best plan with it.
      extra_seconds: how much longer its step takes.
      terms: by how much each term of the step grows, those of most change first.
      decides: the term that decides: "compute", "hbm", a collective with its axes, "memory", "nothing" where the
        difference is within the search's gap, or "overlap" where only what runs beside kernels makes the rival faster.
    """

    strategy: str
    plan: Plan
    extra_seconds: float
    terms: Mapping[str, float] = field(default_factory=dict)
    decides: str = ""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """An array or op, the strategy chosen for it, and the nearest rivals."""

    name: str
    chosen: str
    rivals: tuple[Rival, ...]


@dataclass(frozen=True, kw_only=True)
class Why:
    """An answer to `Plan.why`; `more` decisions have the same key and are not explained."""

    key: str
    plan: Plan
    decisions: tuple[Decision, ...]
    more: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as JSON values: the step, and the rivals of each decision."""
        return {
            "key": self.key,
            "step_seconds": self.plan.step_seconds,
            "decisions": [
                {
                    "name": decision.name,
                    "chosen": decision.chosen,
                    "rivals": [
                        {
                            "strategy": rival.strategy,
                            "step_seconds": rival.plan.step_seconds,
                            "peak_bytes": rival.plan.estimate.peak_bytes,
                            "fits": rival.plan.fits,
                            "decides": rival.decides,
                            "terms": dict(rival.terms),
                        }
                        for rival in decision.rivals
                    ],
                }
                for decision in self.decisions
            ],
        }

    def __str__(self) -> str:
        from autoshard.report.answers import why_tables

        return "\n\n".join(map(str, why_tables(self)))

    def _repr_html_(self) -> str:
        from autoshard.report.answers import why_tables

        return "".join(table.html() for table in why_tables(self))


def why(plan: Plan, key: str, rivals: int = 3) -> Why:
    """Explain what a plan chooses for an array or op; see `Plan.why`."""
    request = request_of(plan)
    model, _ = request.stated
    found = list(_nodes(plan, request, model, key))
    distinct = list({model.class_of[n]: n for n in reversed(found)}.values())[::-1]
    return Why(
        key=key,
        plan=plan,
        decisions=tuple(_decision(plan, request, model, n, rivals) for n in distinct[:_MOST]),
        more=len(found) - len(distinct[:_MOST]),
    )


# What a key names ------------------------------------------------------------------------------------


def _nodes(plan: Plan, request: Request, model: Model, key: str) -> Iterator[int]:
    """Find the nodes that decide what a key names."""
    source = request.session.source
    inputs = dict(zip((leaf.path for leaf in plan.inputs), source.block.inputs, strict=True))
    outputs = dict(zip(output_names(source.traced), model.outputs, strict=True))
    if key in outputs:
        yield outputs[key]
        return
    places = Places(source.block)
    named = [n for n, node in enumerate(model.nodes) if node.group and key in _labels(node)]
    owners: list[Any] = [inputs[key]] if key in inputs else []
    if not owners and not named:
        owners = [site.group or site.value for site in places.find(key)]
        if not owners:
            labels = [label for node in model.nodes if node.group for label in _labels(node)]
            paths = difflib.get_close_matches(key, [*inputs, *outputs, *labels], 3, 0.3)
            near = [*paths, *places.near(key)]
            raise SpecError(
                f"nothing in the program is called {key!r}; near it: {', '.join(near) or 'nothing'}. Give an"
                " argument's path, out... for a result, name:... for a checkpoint_name, file.py:line[:primitive],"
                " or a group such as g12."
            )
    yield from named
    yield from (n for n in map(model.decided, owners) if n is not None)


def _labels(node: Node) -> tuple[str, str]:
    return node.name, node.name.partition(".")[0]


# Rivals ----------------------------------------------------------------------------------------------


def _decision(plan: Plan, request: Request, model: Model, node: int, count: int) -> Decision:
    """Explain one decision."""
    strategies, costs = model.nodes[node].strategies, model.problem.costs[model.class_of[node]]
    chosen = _strategy(plan, request, model, node)
    tried = [chosen]
    rivals: list[Rival] = []
    while len(rivals) < count:
        rest = [i for i, s in enumerate(strategies) if s not in tried and np.isfinite(costs[i])]
        if not rest:
            break
        narrowed = model.permitting({model.class_of[node]: rest})
        rival = solve(request, narrowed, name="rival")
        if rival is None:
            break
        tried.append(_strategy(rival, request, model, node))
        rivals.append(_rival(plan, rival, request, narrowed, strategy_text(tried[-1])))
    return Decision(name=_name(plan, model, node), chosen=strategy_text(chosen), rivals=tuple(rivals))


def _strategy(plan: Plan, request: Request, model: Model, node: int) -> Any:
    """Return what a plan chooses at a node."""
    decisions = decisions_of(plan, request.session.source.block)
    decided = model.nodes[node]
    if decided.group is not None:
        return decisions.assignments[decided.group]
    if decided.value is not None:
        return decisions.layouts[decided.value]
    return plan.output_layouts[model.outputs.index(node)]


def _rival(plan: Plan, rival: Plan, request: Request, model: Model, strategy: str) -> Rival:
    """Hold the best plan with a rival against the plan explained."""
    mine, other = _terms(plan), _terms(rival)
    terms = {k: other.get(k, 0.0) - mine.get(k, 0.0) for k in dict.fromkeys([*mine, *other])}
    terms = {k: v for k, v in sorted(terms.items(), key=lambda item: -abs(item[1])) if v}
    extra = rival.step_seconds - plan.step_seconds
    return Rival(
        strategy=strategy,
        plan=rival,
        extra_seconds=extra,
        terms=terms,
        decides=_decides(plan, rival, terms, extra, request, model),
    )


def _terms(plan: Plan) -> dict[str, float]:
    """Seconds of a step by term; axes of collectives in the order of the mesh."""
    found: dict[str, float] = {}
    for term, seconds in plan.estimate.breakdown().items():
        kind, _, axes = term.partition(" ")
        ordered = sorted(axes.split("*"), key=list(plan.mesh).index) if axes else []
        key = " ".join(filter(None, (kind, "*".join(ordered))))
        found[key] = found.get(key, 0.0) + seconds
    return found


def _decides(
    plan: Plan, rival: Plan, terms: Mapping[str, float], extra: float, request: Request, model: Model
) -> str:
    if plan.fits and not rival.fits:
        return "memory"
    if abs(extra) <= request.gap * plan.step_seconds:
        return "nothing"
    if extra < 0:  # the search minimises the time with nothing overlapped
        return "overlap"
    if MEMORY_DECIDES in rival.notes:
        free = solve(request.limited(float("inf")), model)
        if free is not None and free.step_seconds < plan.step_seconds:
            return "memory"
    kinds: dict[str, float] = {}
    for term, seconds in terms.items():
        kinds[term.partition(" ")[0]] = kinds.get(term.partition(" ")[0], 0.0) + seconds
    most = max(kinds, key=lambda kind: kinds[kind])
    return max((t for t in terms if t.partition(" ")[0] == most), key=lambda term: terms[term])


# Words -----------------------------------------------------------------------------------------------


def strategy_text(strategy: Layout | Mapping[str, Sequence[str]]) -> str:
    """Write a layout as a spec, and an assignment as the axes of each factor."""
    if isinstance(strategy, Layout):
        return spec_text(strategy)
    return ", ".join(f"{factor}={'*'.join(axes)}" for factor, axes in strategy.items() if axes) or "whole"


def _name(plan: Plan, model: Model, node: int) -> str:
    """Name a decision: an array's path and shape, or a group with its rule and source line."""
    decided = model.nodes[node]
    if decided.group is not None:
        place = decided.group.source
        return f"{decided.name}, {decided.group.rule}" + (f", {place}" if place else "")
    if decided.value is not None:
        name = decided.name.removeprefix("input ")
        return f"{name} {decided.value.dtype}{list(decided.value.shape)}"
    leaf = plan.outputs[model.outputs.index(node)]
    return f"out{leaf.path} {leaf.dtype}{list(leaf.shape)}"
