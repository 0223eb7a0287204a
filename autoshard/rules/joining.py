"""Joins and repetitions: concatenate, stack and its inverse, tile.

Where the joined dim is split, every device fetches what its part of the result holds of each operand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.layout import chunk
from autoshard.program import Op, shape_of
from autoshard.rules.aligned import adds_up, aligned_rule, is_piece, moved_dims, moves, spread
from autoshard.rules.dynamic import take
from autoshard.rules.exchange import fetch, gathers, window_of
from autoshard.rules.registry import Family, Kind, LocalView, bind, names, register
from autoshard.rules.rule import Dims, ShardingRule
from autoshard.rules.transfers import Segment, assemble, per_device, rounds_of, segments


def _windows(op: Op) -> Sequence[tuple[int, int, int]]:
    """What a concatenation takes, in order: number of the operand, first element, first one behind.

    They are listed where slices are folded into it (`autoshard.shifts`); else it takes its operands whole.
    """
    whole = ((i, 0, shape_of(a)[op.params["dimension"]]) for i, a in enumerate(op.inputs))
    return op.params.get("windows") or list(whole)


def _concatenate_rule(op: Op) -> ShardingRule:
    """Small operands are whole along the joined dim, not spread over the devices."""
    axis = op.params["dimension"]
    size = op.outputs[0].shape[axis]
    joins = len(_windows(op)) > 1 and size > 1
    rule = aligned_rule(op, exchange=(axis,) if joins else (), linear=range(len(op.inputs)))
    if not joins:
        return rule
    inputs = (
        tuple(() if d == axis and is_piece(shape_of(a)[d], size) else dim for d, dim in enumerate(dims))
        for a, dims in zip(op.inputs, rule.inputs, strict=True)
    )
    return replace(rule, inputs=tuple(inputs))


def _concatenates_more(op: Op, view: LocalView) -> bool:
    return "windows" in op.params or moves(op, view)


def _joined(op: Op, operands: Sequence[Any]) -> Any:
    """Join what a concatenation takes of operands that are whole along its dim."""
    axis = op.params["dimension"]
    return lax.concatenate([lax.slice_in_dim(operands[i], a, b, axis=axis) for i, a, b in _windows(op)], axis)


def _emit_concatenate(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    if not moves(op, view):
        return [_joined(op, operands)]
    axis = op.params["dimension"]
    (factor,) = view.rule.outputs[0][axis]
    axes, ways = view.axes(factor), view.ways(factor)
    part = chunk(op.outputs[0].shape[axis], ways)
    parts, split = [x.shape[axis] for x in operands], [bool(dims[axis]) for dims in view.rule.inputs]
    wanted = [_taken(op, parts, split, p, ways) for p in range(ways)]
    rounds = rounds_of(wanted, parts)
    if any(split) and not gathers(rounds, list(compress(parts, split)), ways):
        return [assemble(operands, axis, axes, view.mesh, rounds, part)]
    whole = [
        lax.all_gather(x, axes, axis=axis, tiled=True) if s else x
        for x, s in zip(operands, split, strict=True)
    ]
    return [window_of(_joined(op, whole), axis, axes, [p * part for p in range(ways)], part)]


def _taken(op: Op, parts: Sequence[int], split: Sequence[bool], p: int, ways: int) -> list[Segment]:
    """List what the device at p takes for its part of a concatenation: of operands of local extents `parts`."""
    size = chunk(op.outputs[0].shape[op.params["dimension"]], ways)
    found: list[Segment] = []
    offset = 0
    for i, start, limit in _windows(op):
        first, last = max(offset, p * size), min(offset + limit - start, (p + 1) * size)
        at, shift = first - p * size, start - offset
        offset += limit - start
        if split[i]:
            held = [j * parts[i] for j in range(ways)]
            found += segments(i, held, parts[i], first + shift, last + shift, at)
        elif first < last:
            found.append(Segment(i, p, first + shift, at, last - first))
    return found


def _with_axis(op: Op, shape: Sequence[int]) -> tuple[Dims, Dims, dict[str, int]]:
    """Return the dims of the array that has the stacked axis, of those that have not, and sizes."""
    factors = names(len(shape), "d")
    full = tuple((f,) if n > 1 else () for f, n in zip(factors, shape, strict=True))
    rest = tuple(dim for d, dim in enumerate(full) if d != op.params["axis"])
    return full, rest, dict(zip(factors, shape, strict=True))


def _stack_rule(op: Op) -> ShardingRule:
    full, rest, sizes = _with_axis(op, op.outputs[0].shape)
    count = len(op.inputs)
    return ShardingRule(inputs=(rest,) * count, outputs=(full,), sizes=sizes, linear=tuple(range(count)))


def _stacks_some(op: Op, view: LocalView) -> bool:
    return bool(view.dim_axes(view.rule.outputs[0][op.params["axis"]]))


def _emit_stack(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    """Stack the operands that this device keeps."""
    (factor,) = view.rule.outputs[0][op.params["axis"]]
    part, last = view.local_size(factor), len(operands) - 1
    mine = [[operands[min(p * part + k, last)] for p in range(view.ways(factor))] for k in range(part)]
    return bind(op, [lax.select_n(view.index(view.axes(factor)), *cases) for cases in mine])


def _unstack_rule(op: Op) -> ShardingRule:
    full, rest, sizes = _with_axis(op, shape_of(op.inputs[0]))
    axis = op.params["axis"]
    adds = adds_up(op.outputs[0].dtype)
    return ShardingRule(
        inputs=(tuple(dim if d != axis or adds else () for d, dim in enumerate(full)),),
        outputs=(rest,) * len(op.outputs),
        sizes=sizes,
        reduce={f: "sum" for f in full[axis]} if adds else {},
        linear=(0,),
    )


def _emit_unstack(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    (x,) = operands
    axis = op.params["axis"]
    (factor,) = view.rule.inputs[0][axis]
    sizes = [1 if d == axis else n for d, n in enumerate(x.shape)]
    rows = (
        take(x, [k if d == axis else 0 for d in range(x.ndim)], sizes, {axis: view.offset(factor)})
        for k in range(len(op.outputs))
    )
    return [lax.squeeze(row, [axis]) for row in rows]


def _tile_rule(op: Op) -> ShardingRule:
    source = shape_of(op.inputs[0])
    repeated = [d for d, r in enumerate(op.params["reps"]) if r > 1 and source[d] > 1]
    return aligned_rule(op, exchange=repeated, linear=(0,))


def _local_reps(op: Op, view: LocalView) -> Mapping[str, Any]:
    pairs = zip(op.params["reps"], view.in_shape(op, 0), view.out_shape(op), strict=True)
    return {"reps": tuple(after // before if before else r for r, before, after in pairs)}


def _emit_tile(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    (x,) = operands
    moved = moved_dims(view, view.rule.inputs[0], view.rule.exchange)
    for d, factor in moved.items():
        x = _repeated(x, d, factor, shape_of(op.inputs[0])[d], op.outputs[0].shape[d], view)
    reps = [1 if d in moved else r for d, r in enumerate(_local_reps(op, view)["reps"])]
    return bind(op, [x], reps=tuple(reps)) if max(reps) > 1 else [x]


def _repeated(x: Any, d: int, factor: str, size: int, total: int, view: LocalView) -> Any:
    """Return this device's part of `total` elements that repeat the `size` elements of a split dim."""
    axes, ways = view.axes(factor), view.ways(factor)
    part = chunk(total, ways)
    starts = [p * part % size for p in range(ways)]
    if part > size:
        whole = fetch(x, d, axes, view.mesh, size, [0] * ways, size)
        return window_of(lax.concatenate([whole] * (1 + chunk(part, size)), d), d, axes, starts, part)
    before = fetch(x, d, axes, view.mesh, size, starts, part)
    if max(starts) + part <= size:
        return before
    behind = fetch(x, d, axes, view.mesh, size, [start - size for start in starts], part)
    place = lax.iota(np.int32, part) + per_device(starts, axes)
    return jnp.where(spread(place < size, before.shape, d), before, behind)


register(
    Family(
        name="concatenate",
        kind=Kind.SINGLE,
        rule=_concatenate_rule,
        special=_concatenates_more,
        emit_special=_emit_concatenate,
    ),
    ["concatenate"],
)
register(
    Family(name="stack", kind=Kind.SINGLE, rule=_stack_rule, special=_stacks_some, emit_special=_emit_stack),
    ["stack"],
)
register(
    Family(name="unstack", kind=Kind.SINGLE, rule=_unstack_rule, special=moves, emit_special=_emit_unstack),
    ["unstack"],
)
register(
    Family(
        name="tile",
        kind=Kind.SINGLE,
        rule=_tile_rule,
        params=_local_reps,
        special=moves,
        emit_special=_emit_tile,
    ),
    ["tile"],
)
