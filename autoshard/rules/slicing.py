"""Slices, pads and reversals: every device fetches the window that its part of the result is made of.

A dim that is cut, filled or reversed is an *exchange* factor of operand and result, whose extents may differ.
Where little is left of a dim, the dim is a *reduce* factor: who holds the elements gives them, the others zeros.
Starts that are computed are known to no table, so `dynamic_slice` always goes that way; and `dynamic_update_slice`
lets every device write what of the update falls into its own part.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.layout import Axes, MeshShape, chunk, mesh_size
from autoshard.padding import pad_around
from autoshard.program import Op, Value, shape_of
from autoshard.rules.exchange import fetch, per_device, window_of
from autoshard.rules.registry import Family, Kind, LocalView, names, register
from autoshard.rules.rule import Dims, ShardingRule

__all__ = ["adds_up", "aligned_rule", "is_piece", "moves", "window"]

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
        x = sliced(x, d, view.axes(factor), view.mesh, source[d], starts[d], strides[d], out[d])
    return [x]


def sliced(
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
    results = []
    for value, end in zip(op.outputs, itertools.accumulate(op.params["sizes"]), strict=True):
        count = value.shape[axis]
        if factor in view.rule.reduce:
            at = [int(end) - count if d == axis else 0 for d in range(x.ndim)]
            sizes = [count if d == axis else n for d, n in enumerate(x.shape)]
            results.append(take(x, at, sizes, {axis: view.offset(factor)}))
        elif count > 1:
            results.append(sliced(x, axis, axes, view.mesh, size, int(end) - count, 1, count))
        else:
            starts = [int(end) - count] * view.ways(factor)
            results.append(fetch(x, axis, axes, view.mesh, size, starts, count))
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
    return [lax.pad(x, value, [(0, 0, 0) if d in moved else c for d, c in enumerate(config)])]


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
    return lax.dynamic_slice_in_dim(x, per_device(ahead, view.axes(factor)), part, axis=d)


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


# Computed starts -------------------------------------------------------------------------------------


def clamped(op: Op, starts: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
    """Clamp the starts of a window of the first operand as the op itself would; int32.

    XLA forgets to when it merges the slice with another one.
    """
    found = []
    for start, whole, size in zip(starts, shape_of(op.inputs[0]), sizes, strict=True):
        most = min(whole - size, int(np.iinfo(np.dtype(start.dtype)).max))
        start = lax.clamp(np.asarray(0, start.dtype), start, np.asarray(most, start.dtype))
        found.append(lax.convert_element_type(start, np.int32))
    return found


def _indices(values: Sequence[Any]) -> list[Any]:
    return [jnp.asarray(v, jnp.int32) for v in values]


def take(x: Any, starts: Sequence[Any], sizes: Sequence[int], offsets: Mapping[int, Any]) -> Any:
    """Return what this device holds of a window of the whole array, and zeros in place of the rest.

    Args:
      x: the local array.
      starts: where the window begins, per dim of the whole array, inside of it.
      sizes: extents of the window.
      offsets: for every dim that is split, where this device's part begins.
    """
    begin: list[Any] = list(starts)
    shift: list[Any] = [0] * x.ndim
    held = [min(size, n) for size, n in zip(sizes, x.shape, strict=True)]
    for d, offset in offsets.items():
        wanted = starts[d] - offset
        begin[d] = lax.clamp(0, wanted, x.shape[d] - held[d])
        shift[d] = sizes[d] + lax.clamp(-sizes[d], wanted - begin[d], held[d])
    x = lax.dynamic_slice(x, _indices(begin), held, allow_negative_indices=False)
    if not offsets:
        return x
    # A sum with -0.0 is what it was; one with 0.0 is not, of -0.0.
    zero = np.asarray(-0.0 if jnp.issubdtype(x.dtype, jnp.inexact) else 0, x.dtype)
    x = lax.pad(x, zero, [(n, n, 0) if d in offsets else (0, 0, 0) for d, n in enumerate(sizes)])
    return lax.dynamic_slice(x, _indices(shift), sizes, allow_negative_indices=False)


def put(x: Any, update: Any, starts: Sequence[Any], offsets: Mapping[int, Any]) -> Any:
    """Write the part of an update that falls into this device's part of an array; operands as of `take`."""
    begin: list[Any] = list(starts)
    shift: list[Any] = [0] * x.ndim
    held = [min(size, n) for size, n in zip(update.shape, x.shape, strict=True)]
    inside: Any = True
    for d, offset in offsets.items():
        wanted, size = starts[d] - offset, update.shape[d]
        begin[d] = lax.clamp(0, wanted, x.shape[d] - held[d])
        first = lax.clamp(
            -held[d], begin[d] - wanted, size
        )  # row of the update that meets the first row here
        shift[d] = held[d] + first
        row = lax.iota(np.int32, held[d]) + first
        inside = inside & spread((row >= 0) & (row < size), held, d)
    for d in offsets:
        update = pad_around(update, d, held[d], held[d])
    update = lax.dynamic_slice(update, _indices(shift), held, allow_negative_indices=False)
    before = lax.dynamic_slice(x, _indices(begin), held, allow_negative_indices=False)
    update = jnp.where(inside, update, before)
    return lax.dynamic_update_slice(x, update, _indices(begin), allow_negative_indices=False)


def _dynamic_slice_rule(op: Op) -> ShardingRule:
    source, out = shape_of(op.inputs[0]), op.outputs[0].shape
    cut = {i for i, (a, b) in enumerate(zip(source, out, strict=True)) if a != b}
    summed = {i for i in cut if out[i]} if adds_up(op.outputs[0].dtype) else set()
    return aligned_rule(op, reduce=summed, whole=cut - summed, linear=(0,))


def _local_slice_sizes(op: Op, view: LocalView) -> Mapping[str, Any]:
    return {"slice_sizes": view.out_shape(op)}


def _dynamic_slice_is_special(op: Op, view: LocalView) -> bool:
    return any(isinstance(a, Value) for a in op.inputs[1:]) or moves(op, view)


def _emit_dynamic_slice(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    x, *given = operands
    sizes = view.out_shape(op)
    starts = clamped(op, given, op.outputs[0].shape)
    split = moved_dims(view, view.rule.inputs[0], view.rule.reduce)
    return [take(x, starts, sizes, {d: view.offset(f) for d, f in split.items()})]


def _dynamic_update_slice_rule(op: Op) -> ShardingRule:
    source, update = shape_of(op.inputs[0]), shape_of(op.inputs[1])
    rule = aligned_rule(op)
    spared = tuple(dim if a == b else () for dim, a, b in zip(rule.inputs[0], source, update, strict=True))
    return ShardingRule(
        inputs=(rule.inputs[0], spared, *rule.inputs[2:]), outputs=rule.outputs, sizes=rule.sizes
    )


def _split_under_update(op: Op, view: LocalView) -> dict[int, str]:
    """Dims of the operand that are split where the update is whole."""
    into, update = view.rule.inputs[:2]
    return {d: a[0] for d, (a, b) in enumerate(zip(into, update, strict=True)) if a != b and view.axes(a[0])}


def _update_is_special(op: Op, view: LocalView) -> bool:
    return bool(_split_under_update(op, view))


def _emit_dynamic_update_slice(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    x, update, *given = operands
    starts = clamped(op, given, shape_of(op.inputs[1]))
    offsets = {d: view.offset(f) for d, f in _split_under_update(op, view).items()}
    return [put(x, update, starts, offsets)]


def _family(name: str, rule: Any, emit: Any, **more: Any) -> Family:
    given = {"special": moves, **more}
    return Family(name=name, kind=Kind.SINGLE, rule=rule, emit_special=emit, **given)


register(_family("slice", _slice_rule, _emit_slice, params=_local_limits), ["slice"])
register(_family("split", _split_rule, _emit_split, params=_local_parts), ["split"])
register(_family("pad", _pad_rule, _emit_pad), ["pad"])
register(_family("reverse", _rev_rule, _emit_rev), ["rev"])
register(
    _family(
        "dynamic_slice",
        _dynamic_slice_rule,
        _emit_dynamic_slice,
        params=_local_slice_sizes,
        special=_dynamic_slice_is_special,
    ),
    ["dynamic_slice"],
)
register(
    _family(
        "dynamic_update_slice",
        _dynamic_update_slice_rule,
        _emit_dynamic_update_slice,
        special=_update_is_special,
    ),
    ["dynamic_update_slice"],
)
