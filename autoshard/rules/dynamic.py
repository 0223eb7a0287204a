"""Slices and updates at computed starts.

No table knows the starts, so nothing is fetched. A cut dim is a *reduce* factor of `dynamic_slice`: who holds the
elements gives them, the others zeros. Under `dynamic_update_slice` every device writes what of the update falls
into its own part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.padding import pad_around
from autoshard.program import Op, Value, shape_of
from autoshard.rules.aligned import adds_up, aligned_rule, moved_dims, moves, spread
from autoshard.rules.registry import Family, Kind, LocalView, register
from autoshard.rules.rule import ShardingRule

__all__ = ["take"]


def _starts_are_computed(op: Op, first: int) -> bool:
    return any(isinstance(a, Value) for a in op.inputs[first:])


def _clamped(op: Op, starts: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
    """Clamp the starts of a window of the first operand as the op itself would; int32.

    XLA forgets to when it merges the slice with another one, and its partitioner drops an update that is to be
    clamped along a split dim.
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
    zero = np.zeros((), x.dtype)
    x = lax.pad(x, zero, [(n, n, 0) if d in offsets else (0, 0, 0) for d, n in enumerate(sizes)])
    return lax.dynamic_slice(x, _indices(shift), sizes, allow_negative_indices=False)


def _put(x: Any, update: Any, starts: Sequence[Any], offsets: Mapping[int, Any]) -> Any:
    """Write the part of an update that falls into this device's part of an array; operands as of `take`."""
    if not offsets:
        return lax.dynamic_update_slice(x, update, starts, allow_negative_indices=False)
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
    return _starts_are_computed(op, 1) or moves(op, view)


def _emit_dynamic_slice(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    x, *given = operands
    sizes = view.out_shape(op)
    starts = _clamped(op, given, op.outputs[0].shape)
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
    return _starts_are_computed(op, 2) or bool(_split_under_update(op, view))


def _emit_dynamic_update_slice(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    x, update, *given = operands
    starts = _clamped(op, given, shape_of(op.inputs[1]))
    offsets = {d: view.offset(f) for d, f in _split_under_update(op, view).items()}
    return [_put(x, update, starts, offsets)]


register(
    Family(
        name="dynamic_slice",
        kind=Kind.SINGLE,
        rule=_dynamic_slice_rule,
        params=_local_slice_sizes,
        special=_dynamic_slice_is_special,
        emit_special=_emit_dynamic_slice,
    ),
    ["dynamic_slice"],
)
register(
    Family(
        name="dynamic_update_slice",
        kind=Kind.SINGLE,
        rule=_dynamic_update_slice_rule,
        special=_update_is_special,
        emit_special=_emit_dynamic_update_slice,
    ),
    ["dynamic_update_slice"],
)
