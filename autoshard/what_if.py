"""The same program under other circumstances, and what a little more of a resource would be worth.

Both ask the search again from the traced program of a plan: another slice or mesh needs new prices, another memory
limit only another solution.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import cost_models as cm
from autoshard.fit import grown
from autoshard.meshes import resolve_topology
from autoshard.session import Session
from autoshard.solving import MEMORY_DECIDES, Request, request_of, solve

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

    from autoshard.plan import Plan

__all__ = ["RATES", "Price", "ShadowPrices", "shadow_prices", "what_if"]

RATES: Mapping[str, str] = {
    "ICI bandwidth": "link_bytes_per_second",
    "HBM bandwidth": "hbm_bytes_per_second",
    "matrix unit": "matmul_flops_per_second",
}
"""What a step may wait for, and the figure of `cost_models.Chip` that says how fast it is."""

_CHANGE = 0.1


def what_if(
    plan: Plan,
    annotations: Mapping[str, PartitionSpec] | None,
    topology: str | cm.Topology | None,
    mesh: Mapping[str, int] | None,
    memory_limit_bytes: float | None,
) -> Plan:
    """Answer a plan's request with something changed; see `Plan.what_if`."""
    request = request_of(plan)
    if topology is not None or mesh is not None:
        request = _moved(request, topology, mesh)
    if memory_limit_bytes is not None:
        request = request.limited(memory_limit_bytes)
    if annotations:
        request = dataclasses.replace(request, annotations={**request.annotations, **annotations})
    return _solved(request, "what if")


def _solved(request: Request, name: str) -> Plan:
    plan = solve(request, name=name)
    assert plan is not None  # every node of a whole problem has a permitted strategy
    return plan


def _moved(request: Request, topology: str | cm.Topology | None, mesh: Mapping[str, int] | None) -> Request:
    """Place the program of a request elsewhere."""
    session = request.session
    slice_ = resolve_topology(topology or session.machine.placement.topology, mesh)
    if isinstance(topology, str) and slice_.chip.name == session.machine.chip.name:
        slice_ = slice_.with_chip(session.machine.chip)
    if mesh is None:
        mesh = session.machine.mesh
        devices = math.prod(mesh.values())
        if slice_.num_devices % devices:
            raise cm.MeshError(
                f"{slice_} has {slice_.num_devices} devices, and the plan's mesh {dict(mesh)} of {devices} does not"
                " grow to it by a whole factor. Give the mesh, too."
            )
        mesh = grown(mesh, slice_.num_devices)
    beside, usual = session.machine.beside, session.machine.chip.async_collectives
    moved = Session.of(
        session.source,
        slice_,
        mesh,
        session.loop_trips,
        session.windowed_einsum,
        None if beside == frozenset(usual) else sorted(beside),
    )
    return dataclasses.replace(request, session=moved)


# Shadow prices ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Price:
    """What a change of one resource does to the step, everything decided anew.

    Attributes:
      resource: what is changed.
      change: by how much, as text.
      less, more: the plans with less and with more of it; where the plan stays as it is, the plan itself.
      less_seconds, more_seconds: how much longer the step takes with less (infinite where nothing fits), and with
        more (negative: it gains).
    """

    resource: str
    change: str
    less: Plan
    more: Plan
    less_seconds: float
    more_seconds: float


@dataclass(frozen=True, kw_only=True)
class ShadowPrices:
    """An answer to `Plan.shadow_prices`: `prices` by resource, "HBM" and those of `RATES`."""

    plan: Plan
    prices: Mapping[str, Price]

    def __getitem__(self, resource: str) -> Price:
        return self.prices[resource]

    def __str__(self) -> str:
        from autoshard.report.answers import price_table

        return str(price_table(self))

    def _repr_html_(self) -> str:
        from autoshard.report.answers import price_table

        return price_table(self).html()


def shadow_prices(plan: Plan, step_bytes: float) -> ShadowPrices:
    """Price the resources of a plan's machine; see `Plan.shadow_prices`."""
    request = request_of(plan)
    found = [_capacity(plan, request, step_bytes)]
    found += [_rate(plan, request, resource, figure) for resource, figure in RATES.items()]
    return ShadowPrices(plan=plan, prices={price.resource: price for price in found})


def _price(plan: Plan, resource: str, change: str, less: Plan, more: Plan) -> Price:
    return Price(
        resource=resource,
        change=change,
        less=less,
        more=more,
        less_seconds=less.step_seconds - plan.step_seconds if less.fits else math.inf,
        more_seconds=more.step_seconds - plan.step_seconds,
    )


def _capacity(plan: Plan, request: Request, step_bytes: float) -> Price:
    """Price HBM: a plan that fits within less is not solved again, nor with more one that memory did not decide."""
    limit, less, more = request.capacity_bytes, plan, plan
    if plan.estimate.peak_bytes > limit - step_bytes:
        less = _solved(request.limited(max(limit - step_bytes, 1.0)), "less HBM")
    if MEMORY_DECIDES in plan.notes or not plan.fits:
        more = _solved(request.limited(limit + step_bytes), "more HBM")
    return _price(plan, "HBM", f"{step_bytes / 2**30:g} GiB", less, more)


def _rate(plan: Plan, request: Request, resource: str, figure: str) -> Price:
    """Price a rate: the whole problem is priced and solved again at a lower and a higher one."""
    less, more = (
        _solved(_at(request, figure, 1 + sign * _CHANGE), f"{resource} {100 * sign * _CHANGE:+.0f} %")
        for sign in (-1, 1)
    )
    return _price(plan, resource, f"{100 * _CHANGE:.0f} %", less, more)


def _at(request: Request, figure: str, factor: float) -> Request:
    """Return a request on the same machine with one figure of its chip scaled."""
    machine = request.session.machine
    topology = machine.placement.topology
    chip = dataclasses.replace(topology.chip, **{figure: factor * getattr(topology.chip, figure)})
    placement = dataclasses.replace(machine.placement, topology=dataclasses.replace(topology, chip=chip))
    session = dataclasses.replace(request.session, machine=dataclasses.replace(machine, placement=placement))
    return dataclasses.replace(request, session=session)
