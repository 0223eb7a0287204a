"""Reductions: split a reduced dim and the results are partial, with the reduction's monoid."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from autoshard.program import Op, aval_of, shape_of
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


def identity_of(monoid: str, dtype: Any) -> Any:
    """Return the value that changes no reduction with the monoid."""
    if monoid == "sum":
        return np.zeros((), dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        return np.asarray(monoid == "min")
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.asarray(-math.inf if monoid == "max" else math.inf, dtype)
    info = jnp.iinfo(dtype)
    return np.asarray(info.min if monoid == "max" else info.max, dtype)


def _identity(op: Op, i: int) -> Any:
    return identity_of(MONOIDS[op.name], aval_of(op.inputs[i]).dtype)


def _generic_rule(op: Op) -> ShardingRule:
    """A reduction with a function of the user's: nothing is known of it, so what it reduces stays whole."""
    arrays = len(op.inputs) // 2
    shape = shape_of(op.inputs[0])
    factors = names(len(shape), "d")
    gone = set(op.params["dimensions"])
    source = tuple(
        (f,) if n > 1 and i not in gone else () for i, (f, n) in enumerate(zip(factors, shape, strict=True))
    )
    return ShardingRule(
        inputs=(source,) * arrays + ((),) * arrays,
        outputs=(tuple(d for i, d in enumerate(source) if i not in gone),) * arrays,
        sizes=dict(zip(factors, shape, strict=True)),
    )


register(Family(name="reduce", kind=Kind.REDUCTION, rule=_reduce_rule, identity=_identity), MONOIDS)
register(
    Family(name="reduce_whole", kind=Kind.REDUCTION, rule=_reduce_rule),
    ["reduce_and", "reduce_or", "reduce_xor", "reduce_prod", "argmax", "argmin"],
)
register(Family(name="generic_reduce", kind=Kind.REDUCTION, rule=_generic_rule), ["reduce"])
