"""Reductions: split a reduced dim and the results are partial, with the reduction's monoid."""

from __future__ import annotations

from autoshard.program import Op, shape_of
from autoshard.rules.registry import Family, Kind, names, register
from autoshard.rules.rule import ShardingRule

# The monoids that a collective can finish.
MONOIDS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min"}


def _reduce_rule(op: Op) -> ShardingRule:
    shape = shape_of(op.inputs[0])
    axes = set(op.params["axes"])
    factors = names(len(shape), "d")
    monoid = MONOIDS.get(op.name)
    source = tuple(
        (f,) if n > 1 and (monoid or i not in axes) else ()
        for i, (f, n) in enumerate(zip(factors, shape, strict=True))
    )
    return ShardingRule(
        inputs=(source,) * len(op.inputs),
        outputs=(tuple(d for i, d in enumerate(source) if i not in axes),) * len(op.outputs),
        sizes=dict(zip(factors, shape, strict=True)),
        reduce={factors[i]: monoid for i in sorted(axes) if shape[i] > 1} if monoid else {},
        linear=(0,) if monoid == "sum" else (),
    )


register(Family(name="reduce", kind=Kind.REDUCTION, rule=_reduce_rule), MONOIDS)
register(
    Family(name="reduce_whole", kind=Kind.REDUCTION, rule=_reduce_rule),
    ["reduce_and", "reduce_or", "reduce_xor", "reduce_prod", "argmax", "argmin"],
)
