"""Reductions: split a reduced dim and the results are partial, or are merged at once.

A sum, maximum or minimum stays partial until a collective finishes it. What no collective finishes (products, bits,
places of a maximum, functions of the user's) every device reduces from all devices' results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.program import Op, aval_of, shape_of
from autoshard.rules.registry import Family, Kind, LocalView, bind, names, register
from autoshard.rules.rule import Dims, ShardingRule

_MONOIDS = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "prod",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_xor": "xor",
    "argmax": "max",
    "argmin": "min",
}
# Those that a collective can finish; of truth values also "and" and "or", as minimum and maximum.
_COLLECTIVE = frozenset({"reduce_sum", "reduce_max", "reduce_min"})
_OF_BOOLS = {"reduce_and": "min", "reduce_or": "max"}


def _collective(op: Op) -> str | None:
    """Return the monoid with which a collective finishes the reduction, if one can."""
    if jnp.issubdtype(aval_of(op.inputs[0]).dtype, jnp.bool_) and op.name in _OF_BOOLS:
        return _OF_BOOLS[op.name]
    return _MONOIDS[op.name] if op.name in _COLLECTIVE else None


def _axes(op: Op) -> tuple[int, ...]:
    return tuple(op.params["dimensions" if op.name == "reduce" else "axes"])


def _rule(op: Op) -> ShardingRule:
    shape, gone = shape_of(op.inputs[0]), _axes(op)
    factors = names(len(shape), "d")
    source: Dims = tuple((f,) if n > 1 else () for f, n in zip(factors, shape, strict=True))
    monoid = _collective(op)
    reduced = [factors[i] for i in sorted(gone) if shape[i] > 1]
    return ShardingRule(
        inputs=tuple(source if len(shape_of(a)) == len(shape) else () for a in op.inputs),
        outputs=(tuple(d for i, d in enumerate(source) if i not in gone),) * len(op.outputs),
        sizes=dict(zip(factors, shape, strict=True)),
        reduce=dict.fromkeys(reduced, monoid) if monoid else {},
        exchange={} if monoid else dict.fromkeys(reduced, "merge"),
        linear=(0,) if monoid == "sum" else (),
    )


def identity_of(monoid: str, dtype: Any) -> Any:
    """Return the value that changes no reduction with the monoid."""
    inexact, truth = jnp.issubdtype(dtype, jnp.inexact), jnp.issubdtype(dtype, jnp.bool_)
    if monoid == "sum":
        return np.asarray(-0.0 if inexact else 0, dtype)
    if monoid == "prod":
        return np.asarray(1, dtype)
    if monoid in ("or", "xor"):
        return np.asarray(0, dtype)
    if monoid == "and":
        return np.invert(np.asarray(0, dtype))
    if inexact:
        return np.asarray(-math.inf if monoid == "max" else math.inf, dtype)
    if truth:
        return np.asarray(monoid == "min")
    info = jnp.iinfo(dtype)  # type: ignore[no-untyped-call]
    return np.asarray(info.min if monoid == "max" else info.max, dtype)


def _identity(op: Op, i: int) -> Any:
    return identity_of(_MONOIDS[op.name], aval_of(op.inputs[i]).dtype)


# Merging -----------------------------------------------------------------------------------------------


def _merges(op: Op, view: LocalView) -> bool:
    return any(map(view.axes, view.rule.exchange))


def _emit_merge(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    """Reduce locally, gather the results of all devices, and reduce those."""
    arrays = list(operands[: len(op.outputs)])
    starts = list(operands[len(op.outputs) :])  # of a reduction with a function: its identities
    fills = starts or [_identity(op, i) for i in range(len(arrays))]
    gone = tuple(d if i in _axes(op) else () for i, d in enumerate(view.rule.inputs[0]))
    arrays = [view.without_padding(x, gone, fill) for x, fill in zip(arrays, fills, strict=True)]
    axes = tuple(a for f in view.rule.exchange for a in view.axes(f))
    if op.name in ("argmax", "argmin"):
        return [_place(op, arrays[0], axes, view)]
    local = bind(op, [*arrays, *starts])
    gathered = [lax.all_gather(x, axes) for x in local]
    return bind(op, [*gathered, *starts], **{"dimensions" if op.name == "reduce" else "axes": (0,)})


def _place(op: Op, x: Any, axes: tuple[str, ...], view: LocalView) -> Any:
    """Find the device with the best value, of equal ones the first, and take the place that it found."""
    (factor,) = view.rule.exchange
    (place,) = bind(op, [x])
    best = (lax.reduce_max if op.name == "argmax" else lax.reduce_min)(x, _axes(op))
    place = lax.all_gather(place + view.offset(factor).astype(place.dtype), axes)
    (winner,) = bind(op, [lax.all_gather(best, axes)], axes=(0,))
    rows = lax.broadcasted_iota(winner.dtype, place.shape, 0)
    return lax.reduce_sum(jnp.where(rows == winner, place, 0), (0,))


def _register(name: str, primitives: Sequence[str]) -> None:
    family = Family(
        name=name,
        kind=Kind.REDUCTION,
        rule=_rule,
        special=_merges,
        emit_special=_emit_merge,
        identity=_identity,
    )
    register(family, primitives)


_register("reduce", [*sorted(_COLLECTIVE), *_OF_BOOLS])
_register("reduce_merged", ["reduce_prod", "reduce_xor", "argmax", "argmin", "reduce"])
