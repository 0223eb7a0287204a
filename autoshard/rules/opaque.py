"""Ops without a rule: every device holds all operands and computes everything, at its true cost."""

from __future__ import annotations

from autoshard.program import Op, shape_of
from autoshard.rules.registry import Family, Kind, register
from autoshard.rules.rule import ShardingRule


def _opaque_rule(op: Op) -> ShardingRule:
    return ShardingRule(
        inputs=tuple(((),) * len(shape_of(a)) for a in op.inputs),
        outputs=tuple(((),) * len(v.shape) for v in op.outputs),
        sizes={},
    )


register(Family(name="opaque", kind=Kind.SINGLE, rule=_opaque_rule), ["<opaque>"])
register(Family(name="control", kind=Kind.CONTROL, rule=_opaque_rule), ["scan", "while", "cond"])
register(Family(name="identity", kind=Kind.IDENTITY, rule=_opaque_rule), ["optimization_barrier"])
