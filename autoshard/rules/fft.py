"""Fourier transforms: batch dims are parallel; a split transform dim is made whole pencil by pencil.

A transform of several dims is one per dim. For one that is split, another dim takes over its axes by an all-to-all,
and gives them back after the transform (Dalcin, Mortensen and Keyes, Fast parallel multidimensional FFT using advanced
MPI, 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from autoshard.layout import chunk, mesh_size
from autoshard.padding import pad_end
from autoshard.program import Op, shape_of
from autoshard.rules.registry import Family, Kind, LocalView, bind, names, register
from autoshard.rules.rule import Dims, ShardingRule

# What transforms the dims that hold complex numbers on both sides.
_COMPLEX = {
    lax.FftType.FFT: lax.FftType.FFT,
    lax.FftType.IFFT: lax.FftType.IFFT,
    lax.FftType.RFFT: lax.FftType.FFT,
    lax.FftType.IRFFT: lax.FftType.IFFT,
}


def _dims(op: Op) -> range:
    """Transform dims of an fft."""
    rank = len(shape_of(op.inputs[0]))
    return range(rank - len(op.params["fft_lengths"]), rank)


def _rule(op: Op) -> ShardingRule:
    source = shape_of(op.inputs[0])
    factors = names(len(source), "d")
    dims: Dims = tuple((f,) if n > 1 else () for f, n in zip(factors, source, strict=True))
    transformed = [factors[i] for i in _dims(op) if source[i] > 1]
    swapped = [f for i, f in enumerate(factors) if f in transformed and _others(source, i) > 1]
    return ShardingRule(
        inputs=(dims,),
        outputs=(dims,),
        sizes=dict(zip(factors, source, strict=True)),
        exchange=dict.fromkeys(swapped, "pencil"),
        whole=frozenset(transformed) - frozenset(swapped),
        linear=(0,),
    )


def _others(shape: Sequence[int], dim: int) -> int:
    """Extent of the longest other dim."""
    return max((n for i, n in enumerate(shape) if i != dim), default=1)


def _swaps(op: Op, view: LocalView) -> bool:
    return any(map(view.axes, view.rule.exchange))


def _emit(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    """Transform the unsplit minor dims at once, where the real dim is among them, and the others one by one."""
    (x,) = operands
    dims, last = _dims(op), _dims(op)[-1]
    split = [d for d in dims if view.dim_axes(view.rule.inputs[0][d])]
    minor = range(max(split) + 1, last + 1)

    def transform(x: Any) -> Any:
        if not minor:
            return _one(op, x, last, op.params["fft_type"], view)
        (x,) = bind(op, [x], fft_lengths=op.params["fft_lengths"][-len(minor) :])
        return x

    inverse = op.params["fft_type"] is lax.FftType.IRFFT  # the real numbers come last
    if not inverse:
        x = transform(x)
    for d in dims:
        if d not in minor and d != last and op.params["fft_lengths"][d - dims.stop] > 1:
            x = _one(op, x, d, _COMPLEX[op.params["fft_type"]], view)
    return [transform(x) if inverse else x]


def _one(op: Op, x: Any, dim: int, kind: lax.FftType, view: LocalView) -> Any:
    """Transform one dim; while it is made whole, another one is split by its axes."""
    axes = view.dim_axes(view.rule.inputs[0][dim])
    if not axes:
        return _along(op, x, dim, kind)
    ways = mesh_size(axes, view.mesh)
    other = min(
        (i for i in range(x.ndim) if i != dim),
        key=lambda i: (chunk(x.shape[i], ways) / x.shape[i], -x.shape[i]),
    )
    size = x.shape[other]
    x = pad_end(x, other, chunk(size, ways) * ways - size)
    x = lax.all_to_all(x, axes, split_axis=other, concat_axis=dim, tiled=True)
    x = _along(op, _cut(x, dim, shape_of(op.inputs[0])[dim]), dim, kind)
    x = pad_end(x, dim, chunk(x.shape[dim], ways) * ways - x.shape[dim])
    x = lax.all_to_all(x, axes, split_axis=dim, concat_axis=other, tiled=True)
    return _cut(x, other, size)


def _cut(x: Any, dim: int, size: int) -> Any:
    return x if x.shape[dim] == size else lax.slice_in_dim(x, 0, size, axis=dim)


def _along(op: Op, x: Any, dim: int, kind: lax.FftType) -> Any:
    """Transform one whole dim."""
    length = op.params["fft_lengths"][dim - x.ndim]
    order = [i if i not in (dim, x.ndim - 1) else dim + x.ndim - 1 - i for i in range(x.ndim)]
    moved = lax.transpose(x, order) if dim < x.ndim - 1 else x
    (moved,) = bind(op, [moved], fft_type=kind, fft_lengths=(length,))
    return lax.transpose(moved, order) if dim < x.ndim - 1 else moved


register(
    Family(name="fft", kind=Kind.SINGLE, rule=_rule, special=_swaps, emit_special=_emit),
    ["fft"],
)
