"""Step time against memory: the plans that no other beats in both.

The search is asked again under ever lower memory limits, from the peak of the fastest plan down to what nothing fits
below; the problem of a mesh is stated once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from autoshard.meshes import machines
from autoshard.session import Session, Source
from autoshard.solving import Progress, Request, request_of, solve

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

    import cost_models as cm
    from autoshard.plan import Plan

__all__ = ["Front", "front_of", "pareto"]

# Of the meshes that are searched where none is given, so many of the fastest are swept.
_MESHES = 3
# A limit this much below a peak asks for another plan.
_BELOW = 1e-4


@dataclass(frozen=True, kw_only=True)
class Front:
    """Plans by falling step time and rising peak: none is beaten by another in both; fastest first.

    `least_bytes` is a peak below which nothing fits, by the count of the search, on the meshes swept.
    """

    plans: tuple[Plan, ...]
    least_bytes: float

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, index: int) -> Plan:
        return self.plans[index]

    def within(self, peak_bytes: float) -> Plan | None:
        """Return the fastest of the plans whose peak is within a limit; None where none is."""
        return next((plan for plan in self.plans if plan.estimate.peak_bytes <= peak_bytes), None)

    def __str__(self) -> str:
        from autoshard.report.answers import front_table

        return str(front_table(self))

    def _repr_html_(self) -> str:
        from autoshard.report.answers import front_table

        return front_table(self).html()


def pareto(
    fn: Callable[..., Any],
    *args: Any,
    topology: str | cm.Topology,
    mesh: Mapping[str, int] | None = None,
    points: int = 8,
    annotations: Mapping[str, PartitionSpec] | None = None,
    donate_argnums: Sequence[int] = (),
    time_limit_seconds: float = 20.0,
    gap: float = 1e-4,
    loop_trips: int = 1,
    windowed_einsum: bool = False,
    async_collectives: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Front:
    """Find what memory buys: the plans of least step time at one limit of memory after the other.

    Args:
      fn: as for `suggest`.
      args: as for `suggest`.
      topology: as for `suggest`.
      mesh: axis name to size; without it the three meshes with the fastest plans are swept.
      points: limits to try on a mesh, spread evenly from the peak of its fastest plan to what nothing fits below.
      annotations: as for `suggest`.
      donate_argnums: as for `suggest`.
      time_limit_seconds: of the search for one plan.
      gap: as for `suggest`, of every plan.
      loop_trips: as for `suggest`.
      windowed_einsum: as for `suggest`.
      async_collectives: as for `suggest`.
      progress: called with a line of news now and then.

    Returns:
      The front; limits beyond the HBM of a device are not tried.

    Raises:
      As `suggest`.

    Example:
      >>> import jax
      >>> x = jax.ShapeDtypeStruct((4096, 8192), "bfloat16")
      >>> w = jax.ShapeDtypeStruct((8192, 8192), "bfloat16")
      >>> front = pareto(lambda w, x: x @ w, w, x, topology="v3:2x2", mesh={"data": 8})
      >>> front[0].step_seconds <= front[-1].step_seconds
      True
    """
    source = Source.of(fn, args, donate_argnums)
    slice_, meshes = machines(topology, mesh)
    requests = [
        Request(
            session=Session.of(source, slice_, candidate, loop_trips, windowed_einsum, async_collectives),
            annotations=annotations or {},
            time_limit_seconds=time_limit_seconds,
            gap=gap,
        )
        for candidate in meshes
    ]
    fastest: list[tuple[Plan, Request]] = []
    for request in requests:
        if progress is not None:
            progress(f"mesh {dict(request.session.machine.mesh)}")
        fastest.append((_solved(request), request))
    fastest.sort(key=lambda found: (not found[0].fits, found[0].step_seconds))
    return _front([(plan, request) for plan, request in fastest[:_MESHES]], points, progress)


def front_of(plan: Plan, points: int) -> Front:
    """Sweep the memory limits of a plan's request; see `Plan.front`."""
    return _front([(plan, request_of(plan))], points, None)


def _front(starts: Iterable[tuple[Plan, Request]], points: int, progress: Progress | None) -> Front:
    plans: list[Plan] = []
    least = []
    for fastest, request in starts:
        floor = float(request.stated[0].floor().max(initial=0.0))
        least.append(floor)
        plans += [fastest, *_sweep(fastest, request, floor, points, progress)]
    return Front(plans=_undominated(plans), least_bytes=min(least))


def _sweep(
    fastest: Plan, request: Request, floor: float, points: int, progress: Progress | None
) -> Iterator[Plan]:
    """Yield plans under ever lower limits; a limit that the last plan keeps is passed over."""
    peak = fastest.estimate.peak_bytes
    last = peak
    for limit in np.linspace(peak, floor, points + 1)[1:]:
        if last <= limit:
            continue
        if progress is not None:
            progress(f"mesh {dict(fastest.mesh)}: at most {limit / 2**30:.2f} GiB")
        plan = _solved(request.limited(min(float(limit), last * (1 - _BELOW))))
        if not plan.fits:
            return
        last = plan.estimate.peak_bytes
        yield plan


def _solved(request: Request) -> Plan:
    plan = solve(request)
    assert plan is not None  # every node of a whole problem has a permitted strategy
    return plan


def _undominated(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Keep the plans that no other beats in step time and peak, fastest first."""
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda p: (not p.fits, p.step_seconds, p.estimate.peak_bytes)):
        if not kept or (plan.fits and plan.estimate.peak_bytes < kept[-1].estimate.peak_bytes):
            kept.append(plan)
    return tuple(kept)
