"""Ops that move or cut dims: reshape through compound factors; slices, pads, joins along whole dims."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax

from autoshard.program import Op, Value, shape_of
from autoshard.rules.registry import Family, Kind, LocalView, bind, names, register
from autoshard.rules.rule import Dims, ShardingRule


def reshape_dims(source: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims, dict[str, int], set[str]]:
    """Factor two shapes of equal, non-zero size into common factors, major first.

    Returns the dims of both sides, the factors' sizes, and the factors that must stay whole.

    >>> reshape_dims((4, 32), (4, 8, 4))[:2]
    ((('f0',), ('f1', 'f2')), (('f0',), ('f1',), ('f2',)))
    """
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    sides: tuple[list[list[str]], list[list[str]]] = ([[] for _ in source], [[] for _ in target])
    # Where each dim of size > 1 ends, as the number of elements counted from the major end.
    ends = [_ends(source), _ends(target)]
    done = 1
    while True:
        later = sorted({end for side in ends for end, _ in side if end > done})
        if not later:
            break
        step = later[0]
        if step % done or any(end % step for end in later):
            step = math.gcd(*later)  # the dims overlap without nesting: only a common major part splits
            if step == done:
                done = _whole_block(ends, sides, done, sizes, whole)
                continue
        name = f"f{len(sizes)}"
        sizes[name] = step // done
        for side, dims in zip(ends, sides, strict=True):
            dims[next(i for end, i in side if end > done)].append(name)
        done = step
    left, right = (tuple(tuple(d) for d in dims) for dims in sides)
    return left, right, sizes, whole


def _ends(shape: Sequence[int]) -> list[tuple[int, int]]:
    total, ends = 1, []
    for i, size in enumerate(shape):
        if size > 1:
            total *= size
            ends.append((total, i))
    return ends


def _whole_block(
    ends: Sequence[Sequence[tuple[int, int]]],
    sides: Sequence[list[list[str]]],
    done: int,
    sizes: dict[str, int],
    whole: set[str],
) -> int:
    """Pass the dims up to the next point where both sides end together as whole factors."""
    meet = min(e for e, _ in ends[0] if e > done and any(e == f for f, _ in ends[1]))
    for side, dims in zip(ends, sides, strict=True):
        start = done
        for end, i in side:
            if done < end <= meet:
                name = f"f{len(sizes)}"
                sizes[name] = end // start
                whole.add(name)
                dims[i].append(name)
                start = end
    return meet


def _reshape_rule(op: Op) -> ShardingRule:
    source, target = shape_of(op.inputs[0]), op.outputs[0].shape
    if 0 in source:
        return ShardingRule(inputs=(((),) * len(source),), outputs=(((),) * len(target),), sizes={})
    order = op.params["dimensions"] or range(len(source))  # a reshape may transpose first
    moved, right, sizes, whole = reshape_dims([source[d] for d in order], target)
    left = tuple(moved[list(order).index(d)] for d in range(len(source)))
    return ShardingRule(inputs=(left,), outputs=(right,), sizes=sizes, whole=frozenset(whole), linear=(0,))


def _local_sizes(op: Op, view: LocalView) -> Mapping[str, Any]:
    return {"new_sizes": view.out_shape(op), "sharding": None}


def rule_with_whole(op: Op, whole_dims: Sequence[int], linear: bool = True) -> ShardingRule:
    """Same rank in and out, dims aligned; `whole_dims` are never split. Scalars operands have no factors."""
    rank = len(op.outputs[0].shape)
    factors = names(rank, "d")
    keep = set(whole_dims)

    def dims(shape: tuple[int, ...]) -> Dims:
        if len(shape) != rank:
            return ((),) * len(shape)
        return tuple(
            (f,) if i not in keep and n > 1 else ()
            for i, (f, n) in enumerate(zip(factors, shape, strict=True))
        )

    return ShardingRule(
        inputs=tuple(dims(shape_of(a)) for a in op.inputs),
        outputs=tuple(dims(v.shape) for v in op.outputs),
        sizes=dict(zip(factors, op.outputs[0].shape, strict=True)),
        linear=tuple(i for i, a in enumerate(op.inputs) if len(shape_of(a)) == rank) if linear else (),
    )


def _slice_rule(op: Op) -> ShardingRule:
    source, out = shape_of(op.inputs[0]), op.outputs[0].shape
    return rule_with_whole(op, [i for i, (a, b) in enumerate(zip(source, out, strict=True)) if a != b])


def _local_limits(op: Op, view: LocalView) -> Mapping[str, Any]:
    shape = view.in_shape(op, 0)
    full = shape_of(op.inputs[0])
    limits = tuple(
        n if f == g and lim == g else lim
        for n, f, g, lim in zip(shape, op.outputs[0].shape, full, op.params["limit_indices"], strict=True)
    )
    return {"limit_indices": limits}


def _pad_rule(op: Op) -> ShardingRule:
    config = op.params["padding_config"]
    rule = rule_with_whole(op, [i for i, c in enumerate(config) if tuple(c) != (0, 0, 0)], linear=False)
    return rule


def _concatenate_rule(op: Op) -> ShardingRule:
    return rule_with_whole(op, [op.params["dimension"]])


def _split_rule(op: Op) -> ShardingRule:
    return rule_with_whole(op, [op.params["axis"]])


def _stack_rule(op: Op) -> ShardingRule:
    axis = op.params.get("axis", 0)
    rank = len(op.outputs[0].shape)
    factors = names(rank, "d")
    shape = op.outputs[0].shape
    out = tuple(
        (f,) if i != axis and n > 1 else () for i, (f, n) in enumerate(zip(factors, shape, strict=True))
    )
    inner = tuple(d for i, d in enumerate(out) if i != axis)
    return ShardingRule(
        inputs=(inner,) * len(op.inputs),
        outputs=(out,),
        sizes=dict(zip(factors, shape, strict=True)),
        linear=tuple(range(len(op.inputs))),
    )


def _unstack_rule(op: Op) -> ShardingRule:
    axis = op.params.get("axis", 0)
    shape = shape_of(op.inputs[0])
    factors = names(len(shape), "d")
    source = tuple(
        (f,) if i != axis and n > 1 else () for i, (f, n) in enumerate(zip(factors, shape, strict=True))
    )
    return ShardingRule(
        inputs=(source,),
        outputs=(tuple(d for i, d in enumerate(source) if i != axis),) * len(op.outputs),
        sizes=dict(zip(factors, shape, strict=True)),
        linear=(0,),
    )


def _tile_rule(op: Op) -> ShardingRule:
    repeats = op.params["reps"]
    return rule_with_whole(op, [i for i, r in enumerate(repeats) if r != 1])


def _dynamic_slice_rule(op: Op) -> ShardingRule:
    source, out = shape_of(op.inputs[0]), op.outputs[0].shape
    rule = rule_with_whole(op, [i for i, (a, b) in enumerate(zip(source, out, strict=True)) if a != b])
    return ShardingRule(
        inputs=(rule.inputs[0],) + tuple(((),) * len(shape_of(a)) for a in op.inputs[1:]),
        outputs=rule.outputs,
        sizes=rule.sizes,
        linear=(0,),
    )


def _local_slice_sizes(op: Op, view: LocalView) -> Mapping[str, Any]:
    return {"slice_sizes": view.out_shape(op)}


def _starts_are_computed(op: Op, view: LocalView) -> bool:
    return any(isinstance(a, Value) for a in op.inputs[1:])


def _emit_dynamic_slice(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    """Clamp the starts as the op itself would: XLA forgets to when it merges the slice with a reshard's."""
    array, *starts = operands
    sizes = view.out_shape(op)
    clamped = []
    for atom, start, whole, part in zip(op.inputs[1:], starts, array.shape, sizes, strict=True):
        if isinstance(atom, Value):
            most = min(whole - part, int(np.iinfo(start.dtype).max))
            start = lax.clamp(np.asarray(0, start.dtype), start, np.asarray(most, start.dtype))
        clamped.append(start)
    return bind(op, [array, *clamped], slice_sizes=sizes)


def _dynamic_update_slice_rule(op: Op) -> ShardingRule:
    source, update = shape_of(op.inputs[0]), shape_of(op.inputs[1])
    rule = rule_with_whole(op, [i for i, (a, b) in enumerate(zip(source, update, strict=True)) if a != b])
    return ShardingRule(
        inputs=(rule.inputs[0], rule.inputs[0]) + ((),) * (len(op.inputs) - 2),
        outputs=rule.outputs,
        sizes=rule.sizes,
    )


def _rev_rule(op: Op) -> ShardingRule:
    return rule_with_whole(op, op.params["dimensions"])


register(Family(name="reshape", kind=Kind.SINGLE, rule=_reshape_rule, params=_local_sizes), ["reshape"])
register(Family(name="slice", kind=Kind.SINGLE, rule=_slice_rule, params=_local_limits), ["slice"])
register(Family(name="pad", kind=Kind.SINGLE, rule=_pad_rule), ["pad"])
register(Family(name="concatenate", kind=Kind.SINGLE, rule=_concatenate_rule), ["concatenate"])
register(Family(name="split", kind=Kind.SINGLE, rule=_split_rule), ["split"])
register(Family(name="stack", kind=Kind.SINGLE, rule=_stack_rule), ["stack"])
register(Family(name="unstack", kind=Kind.SINGLE, rule=_unstack_rule), ["unstack"])
register(Family(name="tile", kind=Kind.SINGLE, rule=_tile_rule), ["tile"])
register(
    Family(
        name="dynamic_slice",
        kind=Kind.SINGLE,
        rule=_dynamic_slice_rule,
        params=_local_slice_sizes,
        special=_starts_are_computed,
        emit_special=_emit_dynamic_slice,
    ),
    ["dynamic_slice"],
)
register(
    Family(name="dynamic_update_slice", kind=Kind.SINGLE, rule=_dynamic_update_slice_rule),
    ["dynamic_update_slice"],
)
register(Family(name="reverse", kind=Kind.SINGLE, rule=_rev_rule), ["rev"])
