"""The main path: from an unannotated function to a plan."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

import cost_models as cm
import search
from autoshard.annotations import assignment_choices, layout_choices, pins, specs_by_path
from autoshard.boundary import free_axes
from autoshard.fit import smallest_fitting_slice
from autoshard.meshes import candidate_meshes, resolve_topology
from autoshard.model import Model
from autoshard.partition.emitter import Decisions
from autoshard.plan import Plan
from autoshard.report.page import size_text
from autoshard.session import Session, Source
from autoshard.strategies import build_model

__all__ = ["evaluate", "model_of", "suggest"]

# Memory rows are added at this many of the fullest moments at a time.
_ROWS = 64
_ROUNDS = 8
# Plans within this share of each other's cost count as equal, and the one with the smaller arguments wins.
_TIE = 1e-5
_INTERRUPTED = "the search was interrupted: this is the best plan so far, within its gap"
_UNFINISHED = {
    search.Status.TIME_LIMIT: ("the search ran out of time: this is the best plan so far, within its gap",),
    search.Status.INTERRUPTED: (_INTERRUPTED,),
}

Progress = Callable[[str], None]


def suggest(
    fn: Callable[..., Any],
    *args: Any,
    topology: str | cm.Topology,
    mesh: Mapping[str, int] | None = None,
    annotations: Mapping[str, PartitionSpec] | None = None,
    donate_argnums: Sequence[int] = (),
    memory_limit_bytes: float | None = None,
    time_limit_seconds: float = 60.0,
    gap: float = 1e-4,
    loop_trips: int = 1,
    windowed_einsum: bool = False,
    async_collectives: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Find the shardings with the least predicted step time that fit in memory.

    What is minimised is the time with nothing overlapped; `step_seconds` of the plan says what overlap makes of it.

    Args:
      fn: a function of positional pytree arguments, without annotations (constraints in it are kept).
      args: pytrees of arrays or `jax.ShapeDtypeStruct`s.
      topology: a slice as the TPU compiler names it, `"v3:4x4"` (16 chips, 32 cores), several over DCN,
        `"2*v5e:16x16"`, or GPUs, `"h100:8"` and `"4*h100:8"` (four nodes); with a `mesh`, a bare
        generation, `"v3"`, means the smallest slice that holds it.
      mesh: axis name to size, such as `{"data": 8, "model": 4}`; without it meshes of the slice are searched.
      annotations: specs that the plan must keep, by key: `"[0]['embed']"` for an input by its pytree path,
        `"out[0]['embed']"` for an output, `"name:attn_out"` for what `jax.ad_checkpoint.checkpoint_name` names,
        `"model.py:42"` for what is made at a source line, `"model.py:42:dot_general"` by one primitive there.
        A dim may be `PartitionSpec.UNCONSTRAINED`.
      donate_argnums: arguments whose memory the results may take.
      memory_limit_bytes: HBM of one device that the plan may use; by default 95 % of what a program can.
      time_limit_seconds: of the search, over all meshes; then the best plan so far is returned with its gap.
      gap: relative distance to the proven bound at which the search may stop.
      loop_trips: how often a `while` loop of unknown length runs.
      windowed_einsum: offer matrix products as rings, too, that pass an operand or the result on to the neighbour
        beside the partial products, in place of an all-gather or reduce-scatter. `plan.spmd` runs them.
      async_collectives: kinds that the compiler runs beside kernels, of "all_gather", "reduce_scatter", "all_reduce",
        "all_to_all", "collective_permute"; by default what it does on the generation without flags.
      progress: called with a line of news now and then.

    Returns:
      The plan. When nothing fits it is the one with the least peak, and its notes say what is in the way.

    Raises:
      TraceError, SpecError, cost_models.TopologyError, cost_models.MeshError: the input cannot be used.

    Example:
      >>> import jax
      >>> x = jax.ShapeDtypeStruct((4096, 8192), "bfloat16")
      >>> w = jax.ShapeDtypeStruct((8192, 8192), "bfloat16")
      >>> plan = suggest(lambda w, x: x @ w, w, x, topology="v3:2x2", mesh={"data": 8})
      >>> plan.gap <= 1e-4, plan.fits
      (True, True)
    """
    slice_, meshes = _machines(topology, mesh)
    source = Source.of(fn, args, donate_argnums)
    deadline = time.monotonic() + time_limit_seconds
    best: Plan | None = None
    untried: list[str] = []
    stopped = ""
    for i, (where, candidate) in enumerate(meshes(slice_)):
        left = deadline - time.monotonic()
        if best is not None and (stopped or left <= 0):
            stopped = stopped or "the time limit was reached"
            untried.append(str(candidate))
            continue
        if progress is not None:
            progress(f"mesh {i + 1}: {candidate}")
        try:
            plan = _search(
                Session.of(source, where, candidate, loop_trips, windowed_einsum, async_collectives),
                annotations or {},
                limit=memory_limit_bytes,
                seconds=max(left, 1.0),
                gap=gap,
                progress=progress,
            )
        except KeyboardInterrupt:
            if best is None:
                raise
            stopped = "interrupted"
            untried.append(str(candidate))
            continue
        if _INTERRUPTED in plan.notes:
            stopped = "interrupted"
        if best is None or _better(plan, best):
            best = plan
    assert best is not None
    more = [f"{stopped} before these meshes were tried: {', '.join(untried)}"] if untried else []
    if not best.fits and stopped != "interrupted":
        more.append(_where_it_fits(best, source, annotations or {}, memory_limit_bytes, loop_trips, gap))
    return best.replace(notes=(*best.notes, *more))


def evaluate(
    fn: Callable[..., Any],
    *args: Any,
    topology: str | cm.Topology,
    mesh: Mapping[str, int],
    in_specs: Any = None,
    out_specs: Any = None,
    annotations: Mapping[str, PartitionSpec] | None = None,
    donate_argnums: Sequence[int] = (),
    memory_limit_bytes: float | None = None,
    loop_trips: int = 1,
    async_collectives: Sequence[str] | None = None,
    name: str = "evaluated",
) -> Plan:
    """Complete a person's own annotations, as GSPMD would, and price the result.

    Args:
      fn: as for `suggest`.
      args: as for `suggest`.
      topology: as for `suggest`.
      mesh: axis name to size.
      in_specs: a pytree of `PartitionSpec` like the arguments, or a prefix of it; None leaves are open.
      out_specs: the same for the results.
      annotations: further specs by key, as for `suggest`.
      donate_argnums: as for `suggest`.
      memory_limit_bytes: what the peak is held against; by default as for `suggest`.
      loop_trips: as for `suggest`.
      async_collectives: as for `suggest`.
      name: what the plan is called in a comparison.

    Raises:
      As `suggest`.
    """
    from autoshard.propagate import complete

    slice_ = resolve_topology(topology, mesh)
    source = Source.of(fn, args, donate_argnums)
    session = Session.of(source, slice_, mesh, loop_trips, async_collectives=async_collectives)
    traced = source.traced
    given = specs_by_path(in_specs, traced.in_tree, traced.in_names, "in_specs")
    given |= {
        f"out{path}": spec
        for path, spec in specs_by_path(out_specs, traced.out_tree, traced.out_names, "out_specs").items()
    }
    start = time.perf_counter()
    decisions, notes = complete(session, {**given, **(annotations or {})})
    completed = time.perf_counter()
    plan = session.plan(
        name,
        decisions,
        gap=None,
        lower_bound_seconds=None,
        memory_limit_bytes=memory_limit_bytes,
        notes=notes,
        timings={"propagate": completed - start},
    )
    return _with_fit_notes(plan)


def _machines(topology: str | cm.Topology, mesh: Mapping[str, int] | None) -> Any:
    slice_ = resolve_topology(topology, mesh)
    if mesh is not None:
        return slice_, lambda where: [(where, dict(mesh))]
    return slice_, lambda where: [(where, m) for m in candidate_meshes(where)]


def _better(plan: Plan, other: Plan) -> bool:
    if plan.fits != other.fits:
        return plan.fits
    if not plan.fits:
        return plan.estimate.peak_bytes < other.estimate.peak_bytes
    return plan.step_seconds < other.step_seconds


def _search(
    session: Session,
    annotations: Mapping[str, PartitionSpec],
    *,
    limit: float | None,
    seconds: float,
    gap: float,
    progress: Progress | None,
) -> Plan:
    start = time.perf_counter()
    model, notes = model_of(session, annotations)
    stated = time.perf_counter()
    capacity = limit or session.machine.usable_bytes
    found = _solve_within(session, model, capacity, seconds, gap, progress)
    solved = time.perf_counter()
    decisions, estimated, solution, bound, limited = found
    plan = session.plan(
        "suggested",
        decisions,
        estimate=estimated,
        gap=search_gap(estimated.serial_seconds, bound) if estimated.peak_bytes <= capacity else None,
        lower_bound_seconds=bound,
        memory_limit_bytes=capacity,
        notes=[*notes, *_scope(model, limited), *_UNFINISHED.get(solution.status, ())],
        timings={"strategies": stated - start, "search and estimate": solved - stated},
    )
    return _with_fit_notes(plan)


def _scope(model: Model, limited: bool) -> list[str]:
    """Say over which plans the bound holds, where not over all of them."""
    notes = []
    if len(model.problem.costs) < len(model.nodes):
        notes.append("repeated layers are decided as one: the bound is over plans that treat them alike")
    if limited:
        notes.append("memory decides: the bound is over plans whose peak the search counts within the limit")
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


def _solve_within(
    session: Session,
    model: Model,
    capacity: float,
    seconds: float,
    gap: float,
    progress: Progress | None,
) -> tuple[Decisions, Any, search.Solution, float, bool]:
    """Solve, adding memory rows where the plan's own estimate or the model exceeds the capacity.

    Returns the decisions, their estimate, the solution, its bound, and whether memory rows were needed.
    """
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
        decisions = model.decisions(small.choice)
        return decisions, session.estimate(decisions), small, bound, False
    limit, rows = capacity, set[int]()
    best: tuple[Decisions, Any, search.Solution] | None = None
    for _ in range(_ROUNDS):
        if solution.status is not search.Status.INFEASIBLE:
            solution = _smallest(model, problem, solution, deadline)
        choice = solution.choice[: len(model.problem.costs)]
        decisions = model.decisions(choice)
        estimated = session.estimate(decisions)
        if best is None or estimated.peak_bytes < best[1].peak_bytes:
            best = (decisions, estimated, solution)
        if estimated.peak_bytes <= capacity:
            return decisions, estimated, solution, bound, bool(rows)
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
    assert best is not None
    return (*best, bound, bool(rows))


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


def _where_it_fits(
    plan: Plan,
    source: Source,
    annotations: Mapping[str, PartitionSpec],
    limit: float | None,
    loop_trips: int,
    gap: float,
) -> str:
    """Name the smallest slice that would do."""

    def plan_on(where: cm.Topology, mesh: Mapping[str, int], seconds: float) -> Plan:
        session = Session.of(source, where, mesh, loop_trips)
        return _search(session, annotations, limit=limit, seconds=seconds, gap=gap, progress=None)

    found = smallest_fitting_slice(
        source,
        cm.Topology.parse(plan.topology),
        plan.mesh,
        plan_on,
        memory_limit_bytes=plan.memory_limit_bytes,
    )
    generation = cm.Topology.parse(plan.topology).chip.name
    if found is None:
        return f"no slice of {generation} was found that the program fits as it is written"
    return f"the smallest slice of {generation} found to do is {found[0]}, as mesh {found[1]}"


def _with_fit_notes(plan: Plan) -> Plan:
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
