"""`with_sharding_constraint` inside the user's function: an identity whose layout is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoshard.program import Op, shape_of
from autoshard.rules.registry import Family, Kind, LocalView, names, register
from autoshard.rules.rule import ShardingRule


def _rule(op: Op) -> ShardingRule:
    shape = shape_of(op.inputs[0])
    factors = names(len(shape), "d")
    dims = tuple((f,) if n > 1 else () for f, n in zip(factors, shape, strict=True))
    return ShardingRule(inputs=(dims,), outputs=(dims,), sizes=dict(zip(factors, shape, strict=True)))


def _emit(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    return list(operands)


register(
    Family(
        name="sharding_constraint",
        kind=Kind.SINGLE,
        rule=_rule,
        special=lambda op, view: True,
        emit_special=_emit,
    ),
    ["sharding_constraint", "reshard"],
)
