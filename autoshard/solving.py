"""What is asked of the search, and the plan that answers it.

A `Request` is a session with annotations and limits; `solve` states its problem, or takes a narrower one, solves
it within memory and makes the plan. A plan keeps its request, so that later questions start from it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

import search
from autoshard.annotations import assignment_choices, layout_choices, pins
from autoshard.apply import matching_source
from autoshard.boundary import free_axes
from autoshard.errors import PlanMismatchError
from autoshard.estimate import Estimate
from autoshard.model import Model
from autoshard.partition.emitter import Decisions
from autoshard.plan import Plan
from autoshard.report.page import size_text
from autoshard.session import Session
from autoshard.strategies import build_model

__all__ = [
    "INTERRUPTED",
    "MEMORY_DECIDES",
    "UNFINISHED",
    "Progress",
    "Request",
    "attached",
    "model_of",
    "request_of",
    "search_gap",
    "solve",
    "with_fit_notes",
]

# Memory rows are added at this many of the fullest moments at a time.
_ROWS = 64
_ROUNDS = 8
# Plans within this share of each other's cost count as equal, and the one with the smaller arguments wins.
_TIE = 1e-5
INTERRUPTED = "the search was interrupted: this is the best plan so far, within its gap"
UNFINISHED = {
    search.Status.TIME_LIMIT: ("the search ran out of time: this is the best plan so far, within its gap",),
    search.Status.INTERRUPTED: (INTERRUPTED,),
}
MEMORY_DECIDES = "memory decides: the bound is over plans whose peak the search counts within the limit"

Progress = Callable[[str], None]


@dataclass(frozen=True, eq=False, kw_only=True)
class Request:
    """A program on a mesh, with what its plan must keep.

    Attributes:
      session: the traced program on its mesh.
      annotations: specs to keep, by key.
      memory_limit_bytes: of one device; None for what a program can use by default.
      time_limit_seconds: of one search.
      gap: relative distance to the bound at which a search may stop.
    """

    session: Session
    annotations: Mapping[str, PartitionSpec] = field(default_factory=dict)
    memory_limit_bytes: float | None = None
    time_limit_seconds: float = 60.0
    gap: float = 1e-4

    @cached_property
    def stated(self) -> tuple[Model, list[str]]:
        """The search problem, and notes on what was pinned; stated once."""
        return model_of(self.session, self.annotations)

    @property
    def capacity_bytes(self) -> float:
        """Limit on the peak of one device."""
        return self.memory_limit_bytes or self.session.machine.usable_bytes

    def limited(self, limit_bytes: float) -> Request:
        """Return the same request under another memory limit; what is stated is shared."""
        other = dataclasses.replace(self, memory_limit_bytes=limit_bytes)
        if "stated" in self.__dict__:
            other.__dict__["stated"] = self.stated
        return other


def attached(
    plan: Plan,
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    annotations: Mapping[str, PartitionSpec],
    loop_trips: int,
    windowed_einsum: bool,
) -> Plan:
    """Give a plan the request that it answers; see `Plan.attach`."""
    donated = tuple(leaf.donated for leaf in plan.inputs)
    session = Session(
        source=dataclasses.replace(matching_source(plan, fn, args), donated=donated),
        machine=plan.estimate.machine,
        loop_trips=loop_trips,
        windowed_einsum=windowed_einsum,
    )
    limit = plan.memory_limit_bytes
    own = None if limit == session.machine.usable_bytes else limit
    return plan.replace(request=Request(session=session, annotations=annotations, memory_limit_bytes=own))


def request_of(plan: Plan) -> Request:
    """Return the request that a plan answers.

    Raises:
      PlanMismatchError: the plan holds none, as one that was read from a file or not found by the search.
    """
    if not isinstance(plan.request, Request):
        raise PlanMismatchError(
            f"the plan {plan.name!r} does not hold the program that it was made for: plans read from a file, and"
            " plans that completion or a recipe made, do not. Give it: plan = plan.attach(fn, *args), with the"
            " function and arguments that it was made for, and the annotations that other plans must keep, too."
        )
    return plan.request


def solve(
    request: Request,
    model: Model | None = None,
    *,
    name: str = "suggested",
    progress: Progress | None = None,
) -> Plan | None:
    """Find the plan that answers a request.

    Args:
      request: what is asked.
      model: the request's problem with some choices forbidden; all of it by default.
      name: of the plan.
      progress: called with a line of news now and then.

    Returns:
      The plan; one that does not fit where nothing was found that does; None where no choice is permitted.
    """
    start = time.perf_counter()
    whole, notes = request.stated
    model = model or whole
    stated = time.perf_counter()
    found = _solve_within(request, model, progress)
    if found is None:
        return None
    solved = time.perf_counter()
    plan = request.session.plan(
        name,
        found.decisions,
        estimate=found.estimate,
        gap=search_gap(found.estimate.serial_seconds, found.bound) if found.fits else None,
        lower_bound_seconds=found.bound,
        memory_limit_bytes=request.capacity_bytes,
        notes=[*notes, *_scope(model, found.limited), *UNFINISHED.get(found.solution.status, ())],
        timings={"strategies": stated - start, "search and estimate": solved - stated},
        request=request,
    )
    return with_fit_notes(plan)


def _scope(model: Model, limited: bool) -> list[str]:
    """Say over which plans the bound holds, where not over all of them."""
    notes = []
    if model.tied:
        notes.append("repeated layers are decided as one: the bound is over plans that treat them alike")
    if limited:
        notes.append(MEMORY_DECIDES)
    return notes


def search_gap(seconds: float, bound: float) -> float:
    """Relative distance between a plan and its bound."""
    gap = (seconds - bound) / seconds if seconds else 0.0
    return gap if gap > 1e-9 else 0.0


def model_of(session: Session, annotations: Mapping[str, PartitionSpec]) -> tuple[Model, list[str]]:
    """State the search problem of a session under annotations; also return notes."""
    source, mesh = session.source, session.machine.mesh
    fixed = pins(source.traced, source.block, mesh, annotations)
    shapes = [a.shape for a in source.traced.out_avals]
    model = build_model(
        source.block,
        session.resharder,
        fusions=session.fusions,
        pinned={v: layout_choices(given, v.shape, mesh) for v, given in fixed.values.items()},
        pinned_outputs={j: layout_choices(given, shapes[j], mesh) for j, given in fixed.outputs.items()},
        allowed={
            item: assignment_choices(item.rule, x, free_axes(mesh, item.manual))
            for item, x in fixed.groups.items()
        },
        held=fixed.held,
        state={j: i for j, i in source.state.items() if j not in fixed.outputs},
        donated=source.donated,
        loop_trips=session.loop_trips,
        rings=session.windowed_einsum,
    )
    return model, fixed.notes


@dataclass(frozen=True, eq=False, kw_only=True)
class _Found:
    """A solution read back, its bound, and whether memory rows were needed."""

    decisions: Decisions
    estimate: Estimate
    solution: search.Solution
    bound: float
    limited: bool = False
    fits: bool = False


def _solve_within(request: Request, model: Model, progress: Progress | None) -> _Found | None:
    """Solve, adding memory rows where the plan's own estimate or the model exceeds the capacity."""
    session, capacity, gap = request.session, request.capacity_bytes, request.gap
    seconds = request.time_limit_seconds
    deadline = time.monotonic() + seconds
    report = None if progress is None else (lambda news: progress(str(news)))
    problem = model.problem
    solution = search.solve(problem, time_limit_seconds=seconds, gap=gap, progress=report)
    bound = solution.lower_bound
    floor = model.floor()
    if floor.max() > capacity:  # nothing can fit: find what needs least, to say what is in the way
        worst = [int(m) for m in np.argsort(-floor, kind="stable")[:_ROWS]]
        scale = capacity / max(solution.objective, 1e-12)
        left = max(1.0, deadline - time.monotonic())
        small = search.solve(model.smallest_at(worst, scale), time_limit_seconds=left, gap=gap)
        if not math.isfinite(model.problem.objective(small.choice)):
            return None
        decisions = model.decisions(small.choice)
        return _Found(decisions=decisions, estimate=session.estimate(decisions), solution=small, bound=bound)
    limit, rows = capacity, set[int]()
    best: _Found | None = None
    for _ in range(_ROUNDS):
        if solution.status is not search.Status.INFEASIBLE:
            solution = _smallest(model, problem, solution, deadline)
        choice = solution.choice[: len(model.problem.costs)]
        if not math.isfinite(model.problem.objective(choice)):
            break
        decisions = model.decisions(choice)
        estimated = session.estimate(decisions)
        found = _Found(
            decisions=decisions,
            estimate=estimated,
            solution=solution,
            bound=bound,
            limited=bool(rows),
            fits=estimated.peak_bytes <= capacity,
        )
        if found.fits:
            return found
        if best is None or estimated.peak_bytes < best.estimate.peak_bytes:
            best = found
        usage = model.usage(choice)
        # The estimate is the judge: where it sees more than the model, the model's limit is tightened.
        limit = min(limit, capacity - max(0.0, estimated.peak_bytes - usage.max()))
        fullest = [int(m) for m in np.argsort(-usage, kind="stable")[:_ROWS] if usage[m] > limit]
        if not set(fullest) - rows and solution.status is search.Status.INFEASIBLE:
            break
        rows |= set(fullest)
        left = deadline - time.monotonic()
        if left <= 0:
            break
        problem = model.with_memory(limit, sorted(rows))
        solution = search.solve(problem, time_limit_seconds=left, gap=gap, progress=report)
        if solution.status is not search.Status.INFEASIBLE:
            bound = max(bound, solution.lower_bound)
    return best and dataclasses.replace(best, bound=bound, limited=bool(rows))


def _smallest(
    model: Model, problem: search.Problem, solution: search.Solution, deadline: float
) -> search.Solution:
    """Among plans that cost the same as `solution`, find one whose arguments take less memory."""
    left = min(deadline - time.monotonic(), 1.0 + 3.0 * solution.seconds)
    if left <= 0:
        return solution
    priced = model.preferring_small(problem, _TIE * solution.objective)
    found = search.solve(priced, time_limit_seconds=left, gap=1e-9)
    objective = problem.objective(found.choice)
    if found.status is search.Status.INFEASIBLE or objective > solution.objective * (1 + _TIE):
        return solution
    return dataclasses.replace(solution, choice=found.choice, objective=objective)


def with_fit_notes(plan: Plan) -> Plan:
    """Say what is in the way when a plan does not fit."""
    if plan.fits:
        return plan
    peak = plan.estimate.peak
    largest = ", ".join(f"{b.name} {size_text(b.bytes)}" for b in peak.buffers[:4])
    excess = size_text(plan.estimate.peak_bytes - plan.memory_limit_bytes)
    notes = [
        f"does not fit: peak {size_text(peak.total_bytes)} exceeds {size_text(plan.memory_limit_bytes)} by"
        f" {excess}, at {peak.where}; largest buffers: {largest}"
    ]
    return plan.replace(notes=(*plan.notes, *notes))
