"""Ops whose dims correspond by number: their rule, and the windows that a device takes of a split dim."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.program import Op, shape_of
from autoshard.rules.exchange import fetch, window_of
from autoshard.rules.registry import LocalView, names
from autoshard.rules.rule import Dims, ShardingRule

__all__ = ["adds_up", "aligned_rule", "is_piece", "moved_dims", "moves", "spread", "window"]

# A part of a dim is summed over the devices, not spread over them, below this share of the dim.
_PIECE = 1 / 16


def is_piece(extent: int, size: int) -> bool:
    """Tell whether so little is left of a dim that splitting it is not worth the while."""
    return extent <= max(1, _PIECE * size)


def adds_up(dtype: Any) -> bool:
    """Tell whether one device's value and zeros from the others sum to the value: not so for flags and keys."""
    return not (jnp.issubdtype(dtype, jnp.bool_) or jnp.issubdtype(dtype, jax.dtypes.extended))


def aligned_rule(
    op: Op,
    *,
    exchange: Iterable[int] = (),
    reduce: Iterable[int] = (),
    whole: Iterable[int] = (),
    linear: Sequence[int] = (),
) -> ShardingRule:
    """State a rule for dims that correspond by number; scalar operands have no factors.

    Args:
      op: an op whose arrays all have the rank of its results.
      exchange: dims that the op's emission communicates along.
      reduce: dims of operands of which the results keep a part that is summed.
      whole: dims that are never split.
      linear: operands that may be partial sums.
    """
    rank = len(op.outputs[0].shape)
    factors = names(rank, "d")
    reduce, whole = set(reduce), set(whole)
    taken, made = [shape_of(a) for a in op.inputs], [v.shape for v in op.outputs]

    def dims(shape: Sequence[int], gone: set[int]) -> Dims:
        if len(shape) != rank:
            return ((),) * len(shape)
        return tuple((factors[i],) if i not in gone and n > 1 else () for i, n in enumerate(shape))

    shapes = [shape for shape in taken + made if len(shape) == rank]
    return ShardingRule(
        inputs=tuple(dims(shape, whole) for shape in taken),
        outputs=tuple(dims(shape, whole | reduce) for shape in made),
        sizes={f: max(shape[i] for shape in shapes) for i, f in enumerate(factors)},
        reduce={factors[i]: "sum" for i in sorted(reduce)},
        exchange={factors[i]: "halo" for i in sorted(set(exchange) - whole - reduce)},
        linear=tuple(linear),
    )


def moves(op: Op, view: LocalView) -> bool:
    """Tell whether a dim is split that the op moves."""
    return any(view.axes(f) for f in (*view.rule.exchange, *view.rule.reduce))


def moved_dims(view: LocalView, dims: Dims, kinds: Mapping[str, str]) -> dict[int, str]:
    """Return dims of an array that are split along a factor of some kind, with the factor."""
    return {d: dim[0] for d, dim in enumerate(dims) if dim and dim[0] in kinds and view.axes(dim[0])}


def window(
    view: LocalView,
    factor: str,
    x: Any,
    d: int,
    dim: tuple[str, ...],
    size: int,
    starts: Sequence[int],
    n: int,
) -> Any:
    """Return this device's window of `n` elements along dim d of `x`, which `dim` says is split or whole.

    `starts[p]` is where the window of the device at p along the axes of `factor` begins.
    """
    if dim:
        return fetch(x, d, view.axes(factor), view.mesh, size, starts, n)
    return window_of(x, d, view.axes(factor), starts, n)


def spread(mask: Any, shape: Sequence[int], d: int) -> Any:
    """Broadcast a mask along dim d to a whole array."""
    return lax.broadcast_in_dim(mask, shape, (d,))
