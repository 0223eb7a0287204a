"""Slices, pads and reversals: every device fetches the window that its part of the result is made of.

A dim that is cut, filled or reversed is an *exchange* factor of operand and result, whose extents may differ.
Where little is left of a dim, the dim is a *reduce* factor: who holds the elements gives them, the others zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.addresses import cut
from autoshard.layout import Axes, MeshShape, chunk, mesh_size
from autoshard.program import Op, Value, shape_of
from autoshard.rules.aligned import adds_up, aligned_rule, is_piece, moved_dims, moves, spread, window
from autoshard.rules.dynamic import take
from autoshard.rules.exchange import fetch
from autoshard.rules.registry import Family, Kind, LocalView, register
from autoshard.rules.rule import ShardingRule
from autoshard.rules.transfers import per_device

# Slice -----------------------------------------------------------------------------------------------


def _slice_rule(op: Op) -> ShardingRule:
    source, out = shape_of(op.inputs[0]), op.outputs[0].shape
    strides = op.params["strides"] or (1,) * len(source)
    cut = {i for i, (a, b) in enumerate(zip(source, out, strict=True)) if a != b}
    pieces = {i for i in cut if out[i] == 1 or (strides[i] == 1 and is_piece(out[i], source[i]))}
    summed = {i for i in pieces if out[i] and adds_up(op.outputs[0].dtype)}
    whole = {i for i in cut - summed if out[i] <= 1}
    return aligned_rule(op, exchange=cut, reduce=summed, whole=whole, linear=(0,))


def _local_limits(op: Op, view: LocalView) -> Mapping[str, Any]:
    shape, full = view.in_shape(op, 0), shape_of(op.inputs[0])
    limits = tuple(
        n if f == g and lim == g else lim
        for n, f, g, lim in zip(shape, op.outputs[0].shape, full, op.params["limit_indices"], strict=True)
    )
    return {"limit_indices": limits}


def _emit_slice(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    (x,) = operands
    dims, source, out = view.rule.inputs[0], shape_of(op.inputs[0]), op.outputs[0].shape
    starts = op.params["start_indices"]
    strides = op.params["strides"] or (1,) * len(source)
    fetched = moved_dims(view, dims, view.rule.exchange)
    summed = moved_dims(view, dims, view.rule.reduce)
    for d in range(len(source)):
        if d not in fetched and d not in summed and source[d] != out[d]:
            x = lax.slice_in_dim(x, starts[d], op.params["limit_indices"][d], strides[d], d)
    if summed:
        at = [starts[d] if d in summed else 0 for d in range(len(source))]
        sizes = [out[d] if d in summed else n for d, n in enumerate(x.shape)]
        x = take(x, at, sizes, {d: view.offset(f) for d, f in summed.items()})
    for d, factor in fetched.items():
        x = _sliced(x, d, view.axes(factor), view.mesh, source[d], starts[d], strides[d], out[d])
    return [x]


def _sliced(
    x: Any, d: int, axes: Axes, mesh: MeshShape, size: int, start: int, stride: int, count: int
) -> Any:
    """Return this device's part of a strided slice of a split dim."""
    ways = mesh_size(axes, mesh)
    part = chunk(count, ways)
    if stride > 1 and x.shape[d] % stride == 0:  # the elements stand alike in all parts: only they move
        x = lax.slice_in_dim(x, start % stride, None, stride, d)
        size, start, stride = chunk(size - start % stride, stride), start // stride, 1
    starts = [start + p * part * stride for p in range(ways)]
    return lax.slice_in_dim(
        fetch(x, d, axes, mesh, size, starts, (part - 1) * stride + 1), 0, None, stride, d
    )


def _split_rule(op: Op) -> ShardingRule:
    axis = op.params["axis"]
    size, parts = shape_of(op.inputs[0])[axis], [v.shape[axis] for v in op.outputs]
    if len(parts) == 1:
        return aligned_rule(op, linear=(0,))
    if not all(is_piece(n, size) for n in parts):
        return aligned_rule(op, exchange=(axis,), linear=(0,))
    adds = adds_up(op.outputs[0].dtype)
    return aligned_rule(op, reduce=(axis,) if adds else (), whole=() if adds else (axis,), linear=(0,))


def _local_parts(op: Op, view: LocalView) -> Mapping[str, Any]:
    if len(op.outputs) > 1:
        return {}
    return {"sizes": (view.out_shape(op)[op.params["axis"]],)}


def _emit_split(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    (x,) = operands
    axis = op.params["axis"]
    (factor,) = view.rule.inputs[0][axis]
    axes, size = view.axes(factor), shape_of(op.inputs[0])[axis]
    results, start = [], 0
    for value in op.outputs:
        count = value.shape[axis]
        if factor in view.rule.reduce or (count == 1 and adds_up(value.dtype)):
            at = [start if d == axis else 0 for d in range(x.ndim)]
            sizes = [count if d == axis else n for d, n in enumerate(x.shape)]
            piece = take(x, at, sizes, {axis: view.offset(factor)})
            results.append(piece if factor in view.rule.reduce else lax.psum(piece, axes))
        elif count == 1:
            results.append(fetch(x, axis, axes, view.mesh, size, [start] * view.ways(factor), 1))
        else:
            results.append(_sliced(x, axis, axes, view.mesh, size, start, 1, count))
        start += count
    return results


# Pad and reverse -------------------------------------------------------------------------------------


def _pad_rule(op: Op) -> ShardingRule:
    source, out = shape_of(op.inputs[0]), op.outputs[0].shape
    filled = {i for i, c in enumerate(op.params["padding_config"]) if tuple(c) != (0, 0, 0)}
    whole = {i for i in filled if out[i] <= 1 or not source[i]}
    zeros = not isinstance(op.inputs[1], Value) and not np.any(op.inputs[1].val)
    return aligned_rule(op, exchange=filled, whole=whole, linear=(0,) if zeros else ())


def _emit_pad(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    x, value = operands
    config = [(int(a), int(b), int(c)) for a, b, c in op.params["padding_config"]]
    moved = moved_dims(view, view.rule.outputs[0], view.rule.exchange)
    for d, factor in moved.items():
        x = _padded(op, x, value, d, factor, view)
    rest = [(0, 0, 0) if d in moved else c for d, c in enumerate(config)]
    return [lax.pad(x, value, rest) if any(map(any, rest)) else x]


def _padded(op: Op, x: Any, value: Any, d: int, factor: str, view: LocalView) -> Any:
    """Return this device's part of a padded dim.

    Its first element lies `ahead` of an element of the operand, or of where one would be, by less than a step.
    """
    low, _, interior = op.params["padding_config"][d]
    size, step, ways = shape_of(op.inputs[0])[d], int(interior) + 1, view.ways(factor)
    part = chunk(op.outputs[0].shape[d], ways)
    firsts, ahead = zip(*(divmod(p * part - int(low), step) for p in range(ways)), strict=True)
    need = max(ahead) + part
    length = chunk(need, step)
    x = window(view, factor, x, d, view.rule.inputs[0][d], size, firsts, length)
    place = lax.iota(np.int32, length) + per_device(firsts, view.axes(factor))
    held = spread((place >= 0) & (place < size), x.shape, d)
    x = jnp.where(held, x, value)
    if step == 1:
        return x
    more = need - (length - 1) * step - 1
    x = lax.pad(x, value, [(0, more, step - 1) if i == d else (0, 0, 0) for i in range(x.ndim)])
    return cut(x, per_device(ahead, view.axes(factor)), part, axis=d)


def _rev_rule(op: Op) -> ShardingRule:
    out = op.outputs[0].shape
    return aligned_rule(op, exchange=[i for i in op.params["dimensions"] if out[i] > 1], linear=(0,))


def _emit_rev(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    (x,) = operands
    for d, factor in moved_dims(view, view.rule.inputs[0], view.rule.exchange).items():
        size, part = shape_of(op.inputs[0])[d], x.shape[d]
        starts = [size - (p + 1) * part for p in range(view.ways(factor))]
        x = fetch(x, d, view.axes(factor), view.mesh, size, starts, part)
    return [lax.rev(x, op.params["dimensions"])]


def _register(name: str, rule: Any, emit: Any, params: Any = lambda op, view: {}) -> None:
    family = Family(name=name, kind=Kind.SINGLE, rule=rule, params=params, special=moves, emit_special=emit)
    register(family, [name])


_register("slice", _slice_rule, _emit_slice, _local_limits)
_register("split", _split_rule, _emit_split, _local_parts)
_register("pad", _pad_rule, _emit_pad)
_register("rev", _rev_rule, _emit_rev)
