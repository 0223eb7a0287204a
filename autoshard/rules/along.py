"""Ops along one dim, which may be split: cumulative ops and top_k."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.addresses import cut
from autoshard.program import Op, shape_of
from autoshard.rules.reduction import identity_of
from autoshard.rules.registry import Family, Kind, LocalView, bind, names, register
from autoshard.rules.rule import ShardingRule

# Each cumulative op's monoid, and how two of its results are combined.
_CUMULATIVE: Mapping[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "cumsum": ("sum", lax.add),
    "cumprod": ("prod", lax.mul),
    "cummax": ("max", lax.max),
    "cummin": ("min", lax.min),
    "cumlogsumexp": ("max", jnp.logaddexp),
}


def along_rule(op: Op, axis: int, way: str, *, kept: bool = True, linear: bool = False) -> ShardingRule:
    """Dims of operands and results are aligned; those along `axis` are exchanged, and whole where not `kept`."""
    shape = shape_of(op.inputs[0])
    factors = names(len(shape), "d")
    dims = tuple((f,) if n > 1 else () for f, n in zip(factors, shape, strict=True))
    out = tuple(d if kept or i != axis else () for i, d in enumerate(dims))
    return ShardingRule(
        inputs=(dims,) * len(op.inputs),
        outputs=(out,) * len(op.outputs),
        sizes=dict(zip(factors, shape, strict=True)),
        exchange=dict.fromkeys(dims[axis], way),
        linear=(0,) if linear else (),
    )


def exchanges(op: Op, view: LocalView) -> bool:
    """Tell whether a factor that the op exchanges is split."""
    return any(map(view.axes, view.rule.exchange))


def filled(x: Any, axis: int, fill: Any, view: LocalView) -> Any:
    """Put `fill` where the first operand's part holds padding along `axis`."""
    dims = view.rule.inputs[0]
    return view.without_padding(x, tuple(d if i == axis else () for i, d in enumerate(dims)), fill)


# Cumulative ops --------------------------------------------------------------------------------------


def _cumulative_rule(op: Op) -> ShardingRule:
    return along_rule(op, op.params["axis"], "scan", linear=op.name == "cumsum")


def _emit_cumulative(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    """Combine the local result with the totals of the devices before, found from everyone's totals."""
    axis, reverse = op.params["axis"], op.params["reverse"]
    axes = view.dim_axes(view.rule.inputs[0][axis])
    monoid, combine = _CUMULATIVE[op.name]
    (x,) = operands
    identity = identity_of(monoid, x.dtype)
    if reverse:
        x = filled(x, axis, identity, view)
    (local,) = bind(op, [x])
    total = lax.index_in_dim(local, 0 if reverse else -1, axis)
    (totals,) = bind(op, [lax.all_gather(total, axes, axis=axis, tiled=True)])
    edge = lax.full_like(total, identity)
    shifted = lax.concatenate([totals, edge] if reverse else [edge, totals], axis)
    before = cut(shifted, view.index(axes) + int(reverse), 1, axis)
    return [combine(local, jnp.broadcast_to(before, local.shape))]


# Top k -----------------------------------------------------------------------------------------------


def _top_k_rule(op: Op) -> ShardingRule:
    return along_rule(op, op.params["axis"], "merge", kept=False)


def _approximate_rule(op: Op) -> ShardingRule:
    """What is found depends on how the searched dim is cut, so it stays whole."""
    shape = shape_of(op.inputs[0])
    axis = op.params["reduction_dimension"] % len(shape)
    factors = names(len(shape), "d")
    dims = tuple(
        (f,) if n > 1 and i != axis else () for i, (f, n) in enumerate(zip(factors, shape, strict=True))
    )
    return ShardingRule(
        inputs=(dims,), outputs=(dims,) * len(op.outputs), sizes=dict(zip(factors, shape, strict=True))
    )


def _least(dtype: Any) -> Any:
    """Return the value that is last in every top_k: of floats the NaN with all bits set."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.full((), -1, f"int{8 * dtype.itemsize}").view(dtype)
    return identity_of("max", dtype)


def _emit_top_k(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    """Find the best of every device's best; of equal ones those of earlier devices are met first."""
    axis, k = op.params["axis"], op.params["k"]
    (factor,) = view.rule.exchange
    x = filled(operands[0], axis, _least(operands[0].dtype), view)
    best, places = bind(op, [x], k=min(k, x.shape[axis]))
    places = places + view.offset(factor)
    best, places = (lax.all_gather(a, view.axes(factor), axis=axis, tiled=True) for a in (best, places))
    values, at = bind(op, [best])
    return [values, jnp.take_along_axis(places, at, axis, mode="promise_in_bounds")]


register(
    Family(
        name="cumulative",
        kind=Kind.SINGLE,
        rule=_cumulative_rule,
        special=exchanges,
        emit_special=_emit_cumulative,
    ),
    _CUMULATIVE,
)
register(
    Family(name="top_k", kind=Kind.SINGLE, rule=_top_k_rule, special=exchanges, emit_special=_emit_top_k),
    ["top_k"],
)
register(Family(name="approx_top_k", kind=Kind.SINGLE, rule=_approximate_rule), ["approx_top_k"])
