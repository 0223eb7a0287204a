"""The main path: from an unannotated function to a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

import cost_models as cm
from autoshard.annotations import specs_by_path
from autoshard.fit import smallest_fitting_slice
from autoshard.meshes import machines, resolve_topology
from autoshard.plan import Plan
from autoshard.session import Session, Source
from autoshard.solving import INTERRUPTED, Progress, Request, solve, with_fit_notes

__all__ = ["evaluate", "suggest"]


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
    slice_, meshes = machines(topology, mesh)
    source = Source.of(fn, args, donate_argnums)
    deadline = time.monotonic() + time_limit_seconds
    best: Plan | None = None
    untried: list[str] = []
    stopped = ""
    for i, candidate in enumerate(meshes):
        left = deadline - time.monotonic()
        if best is not None and (stopped or left <= 0):
            stopped = stopped or "the time limit was reached"
            untried.append(str(candidate))
            continue
        if progress is not None:
            progress(f"mesh {i + 1}: {candidate}")
        request = Request(
            session=Session.of(source, slice_, candidate, loop_trips, windowed_einsum, async_collectives),
            annotations=annotations or {},
            memory_limit_bytes=memory_limit_bytes,
            time_limit_seconds=max(left, 1.0),
            gap=gap,
        )
        try:
            plan = _answer(request, progress)
        except KeyboardInterrupt:
            if best is None:
                raise
            stopped = "interrupted"
            untried.append(str(candidate))
            continue
        if INTERRUPTED in plan.notes:
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
    return with_fit_notes(plan)


def _answer(request: Request, progress: Progress | None = None) -> Plan:
    """Solve a whole request: every node of its problem has a permitted strategy."""
    plan = solve(request, progress=progress)
    assert plan is not None
    return plan


def _better(plan: Plan, other: Plan) -> bool:
    if plan.fits != other.fits:
        return plan.fits
    if not plan.fits:
        return plan.estimate.peak_bytes < other.estimate.peak_bytes
    return plan.step_seconds < other.step_seconds


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
        request = Request(
            session=Session.of(source, where, mesh, loop_trips),
            annotations=annotations,
            memory_limit_bytes=limit,
            time_limit_seconds=seconds,
            gap=gap,
        )
        return _answer(request)

    found = smallest_fitting_slice(
        source,
        plan.slice,
        plan.mesh,
        plan_on,
        memory_limit_bytes=plan.memory_limit_bytes,
    )
    generation = plan.slice.chip.name
    if found is None:
        return f"no slice of {generation} was found that the program fits as it is written"
    return f"the smallest slice of {generation} found to do is {found[0]}, as mesh {found[1]}"
