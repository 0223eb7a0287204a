"""The equations that a group's emission would trace to, and so its price, without tracing where possible.

Most ops bind their own primitive on local shapes, so their equations are written down directly. The few that
emit more (masks, offsets) are really traced, all candidates together in one jaxpr.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax

from autoshard.fusion import PLAIN, Fused, Fusions, Rider
from autoshard.groups import Group, group_signature
from autoshard.layout import local_shape
from autoshard.partition.emitter import emit_group, leaves_partial
from autoshard.partition.ledger import Ledger, group_tag
from autoshard.partition.price import FREE, Cost, Machine, add_costs
from autoshard.program import Value, local_aval
from autoshard.rules import Assignment, family

__all__ = ["kernel_costs"]


@dataclass(frozen=True, eq=False)
class _Var:
    aval: Any


@dataclass(frozen=True, eq=False)
class _Eqn:
    primitive: Any
    params: Any
    invars: tuple[Any, ...]
    outvars: tuple[Any, ...]


def kernel_costs(
    requests: Sequence[tuple[Group, Assignment]],
    machine: Machine,
    loop_trips: int = 1,
    fusions: Fusions | None = None,
) -> list[Cost]:
    """Price each group under its assignment as the estimate will price what it emits."""
    parts = [fusions.of(item) if fusions else PLAIN for item, _ in requests]
    costs: list[Cost | None] = []
    traced: list[int] = []
    for i, (item, assignment) in enumerate(requests):
        written = ([], [], []) if item.is_copy else _written_down(item, assignment, parts[i], machine)
        if written is None:
            traced.append(i)
            costs.append(None)
        else:
            eqns, inputs, outputs = written
            part = replace(parts[i], tail=None) if leaves_partial(item, assignment) else parts[i]
            costs.append(machine.kernel(eqns, outputs, part, _riders(inputs, part)) if eqns else FREE)
    found = _traced([requests[i] for i in traced], [parts[i] for i in traced], machine, loop_trips)
    for i, cost in zip(traced, found, strict=True):
        costs[i] = cost
    return [c for c in costs if c is not None]


def _riders(inputs: Sequence[Any], part: Fused) -> dict[Any, Rider]:
    return {v: r for v, r in zip(inputs, part.riders or (None,) * len(inputs), strict=True) if r is not None}


def _written_down(
    item: Group, assignment: Assignment, part: Fused, machine: Machine
) -> tuple[list[Any], list[Any], list[Any]] | None:
    env: dict[Value, _Var] = {}
    for i, value in enumerate(item.inputs):
        shape = local_shape(value.shape, item.input_layout(i, assignment), machine.mesh)
        env[value] = _Var(local_aval(value, shape))
    eqns = []
    for i, op in enumerate(item.ops):
        view = item.view(i, assignment, machine.mesh)
        fam = family(op)
        if fam.emits_more(op, view):
            return None
        for j, value in enumerate(op.outputs):
            env[value] = _Var(local_aval(value, view.out_shape(op, j)))
        changes = fam.params(op, view)
        eqns.append(
            _Eqn(
                op.primitive,
                {**op.params, **changes} if changes else op.params,
                tuple(env[a] if isinstance(a, Value) else a for a in op.inputs),
                tuple(env[v] for v in op.outputs),
            )
        )
    riding = part.outputs or (None,) * len(item.outputs)
    stored = [env[v] for v, rider in zip(item.outputs, riding, strict=True) if rider is None]
    return eqns, [env[v] for v in item.inputs], stored


def _traced(
    requests: Sequence[tuple[Group, Assignment]],
    parts: Sequence[Fused],
    machine: Machine,
    loop_trips: int,
) -> list[Cost]:
    if not requests:
        return []
    emitted, which = _distinct(requests)
    avals: list[Any] = []
    spans: list[tuple[int, int]] = []
    for item, assignment in emitted:
        first = len(avals)
        for i, value in enumerate(item.inputs):
            shape = local_shape(value.shape, item.input_layout(i, assignment), machine.mesh)
            avals.append(jax.ShapeDtypeStruct(shape, value.dtype))
        spans.append((first, len(avals)))

    def everything(*arrays: Any) -> list[Any]:
        results = []
        for i, ((item, assignment), (a, b)) in enumerate(zip(emitted, spans, strict=True)):
            with jax.named_scope(f"g{i}.candidate"):
                results.append(emit_group(item, arrays[a:b], assignment, machine.mesh))
        return results

    closed = jax.make_jaxpr(everything, axis_env=[(str(a), n) for a, n in machine.mesh.items()])(*avals)
    by_candidate: dict[int, list[Any]] = {}
    for eqn in closed.jaxpr.eqns:
        tag = group_tag(eqn)
        assert tag is not None
        by_candidate.setdefault(tag[0], []).append(eqn)
    ends = list(itertools.accumulate((len(item.outputs) for item, _ in emitted), initial=0))
    costs = []
    for i, part in zip(which, parts, strict=True):
        a, b = spans[i]
        outputs = closed.jaxpr.outvars[ends[i] : ends[i + 1]]
        riders = _riders(closed.jaxpr.invars[a:b], part)
        ledger = Ledger(machine=machine, loop_trips=loop_trips, sources={}, fused={i: part}, riders=riders)
        ledger.body(SimpleNamespace(eqns=by_candidate.get(i, []), outvars=outputs), 1.0)
        costs.append(_total(ledger))
    return costs


def _distinct(
    requests: Sequence[tuple[Group, Assignment]],
) -> tuple[list[tuple[Group, Assignment]], list[int]]:
    """Return requests that emit different equations, and for every request which of them it is like."""
    signatures: dict[Group, Any] = {}
    places: dict[Any, int] = {}
    emitted: list[tuple[Group, Assignment]] = []
    which: list[int] = []
    for item, assignment in requests:
        if item not in signatures:
            signatures[item] = group_signature(item)
        key = signatures[item], item.manual, tuple(sorted(assignment.items()))
        if key not in places:
            places[key] = len(emitted)
            emitted.append((item, assignment))
        which.append(places[key])
    return emitted, which


def _total(ledger: Ledger) -> Cost:
    return add_costs(add_costs([e.cost], e.count) for e in ledger.entries)
