"""Placements inside the user's function: identities whose layout, or kind of memory, is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from autoshard.program import Op, shape_of
from autoshard.rules.registry import Family, Kind, LocalView, names, register
from autoshard.rules.rule import ShardingRule


def _rule(op: Op) -> ShardingRule:
    shape = shape_of(op.inputs[0])
    factors = names(len(shape), "d")
    dims = tuple((f,) if n > 1 else () for f, n in zip(factors, shape, strict=True))
    return ShardingRule(inputs=(dims,), outputs=(dims,), sizes=dict(zip(factors, shape, strict=True)))


def _put_rule(op: Op) -> ShardingRule:
    """Arrays put somewhere together have nothing to do with each other."""
    rank = {i: len(shape_of(a)) for i, a in enumerate(op.inputs)}
    sizes = {f"a{i}d{d}": shape_of(op.inputs[i])[d] for i in rank for d in range(rank[i])}
    dims = tuple(tuple((f,) if sizes[f] > 1 else () for f in names(n, f"a{i}d")) for i, n in rank.items())
    return ShardingRule(inputs=dims, outputs=dims, sizes=sizes)


def _memory_only(op: Op, view: LocalView) -> Mapping[str, Any]:
    """Keep the kind of memory: which devices hold an array is the plan's to say."""
    spaces = tuple(d if isinstance(d, jax.memory.Space) else None for d in op.params["devices"])
    return {"devices": spaces, "srcs": (None,) * len(spaces)}


def _emit(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    return list(operands)


register(
    Family(
        name="sharding_constraint",
        kind=Kind.SINGLE,
        rule=_rule,
        special=lambda op, view: True,
        emit_special=_emit,
        about="takes the layout that it names",
    ),
    ["sharding_constraint", "reshard"],
)
register(
    Family(
        name="device_put",
        kind=Kind.SINGLE,
        rule=_put_rule,
        params=_memory_only,
        about="the kind of memory stays as given; devices are the plan's",
    ),
    ["device_put"],
)
