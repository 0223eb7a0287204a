"""Reshape, through compound factors.

A split of the major factor of a merged dim need not cut the dim where a split of the dim itself would: 40 heads
of 128 over 16 devices are 3 heads each, the 5120 together 320 each. So a reshape first fetches the blocks of its
factors, or the parts of the merged dim last. Dims that overlap without nesting, `[4, 6]` and `[6, 4]`, are split
together as well: each device fetches its elements in row-major order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from jax import lax

from autoshard.layout import chunk
from autoshard.program import Op, shape_of
from autoshard.rules.exchange import fetch
from autoshard.rules.registry import Family, Kind, LocalView, register
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
    source = tuple(source[d] for d in order)
    left, right, sizes, whole = reshape_dims(source, target)
    uneven = ([f for f in dim if f not in whole and sizes[f] > 2] for dim in left + right if len(dim) > 1)
    merged = {factors[0] for factors in uneven if factors}
    for i, j in _overlaps(source, target, left, right, whole):
        gone = {*left[i], *right[j]}
        name = (left[i] + right[j])[0]
        sizes = {f: n for f, n in sizes.items() if f not in gone} | {name: max(source[i], target[j])}
        whole, merged = whole - gone, merged - gone | {name}
        left, right = ((*dims[:k], (name,), *dims[k + 1 :]) for dims, k in ((left, i), (right, j)))
    return ShardingRule(
        inputs=(tuple(left[list(order).index(d)] for d in range(len(source))),),
        outputs=(right,),
        sizes=sizes,
        exchange={f: "halo" for f in sorted(merged)},
        whole=frozenset(whole),
        linear=(0,),
    )


def _overlaps(
    source: Sequence[int], target: Sequence[int], left: Dims, right: Dims, whole: Set[str]
) -> list[tuple[int, int]]:
    """List the dims of both sides that begin at the same element, where neither is a part of the other."""
    return [
        (i, j)
        for i, a in enumerate(left)
        for j, b in enumerate(right)
        if a and b and a[-1] in whole and b[-1] in whole and math.prod(source[:i]) == math.prod(target[:j])
    ]


def _local_sizes(op: Op, view: LocalView) -> Mapping[str, Any]:
    return {"new_sizes": view.out_shape(op), "sharding": None}


@dataclass(frozen=True)
class _Side:
    """The operand, or the result, of a reshape: its extents and factors, and what a device has of it."""

    shape: Sequence[int]
    dims: Dims
    view: LocalView

    def ways(self, d: int) -> int:
        return math.prod(self.view.ways(f) for f in self.dims[d])

    def part(self, d: int) -> int:
        """Extent of a dim on one device as its layout has it."""
        return chunk(self.shape[d], self.ways(d))

    def block(self, d: int) -> int:
        """Extent of a dim on one device as the split of its factors leaves it."""
        if len(self.dims[d]) < 2:
            return self.part(d)
        return math.prod(self.view.local_size(f) for f in self.dims[d])

    def blocks(self, d: int) -> list[int]:
        """Where each device's block begins."""
        strides = [
            math.prod(self.view.rule.sizes[f] for f in self.dims[d][k + 1 :])
            for k in range(len(self.dims[d]))
        ]
        steps = [self.view.local_size(f) * n for f, n in zip(self.dims[d], strides, strict=True)]
        places = itertools.product(*(range(self.view.ways(f)) for f in self.dims[d]))
        begins = [sum(p * n for p, n in zip(place, steps, strict=True)) for place in places]
        for p in reversed(range(len(begins) - 1)):  # nothing is left of its row for a device
            begins[p] = min(begins[p], begins[p + 1])
        return begins

    def parts(self, d: int) -> list[int]:
        """Where each device's part begins."""
        return [p * self.part(d) for p in range(self.ways(d))]

    def broken(self) -> list[int]:
        """Dims of which a device's part is not its block."""
        merged = [d for d, dim in enumerate(self.dims) if len(dim) > 1]
        return [d for d in merged if self.part(d) != self.block(d) or self.parts(d) != self.blocks(d)]

    def fetch(self, x: Any, d: int, starts: Sequence[int], length: int, held: Sequence[int]) -> Any:
        axes = self.view.dim_axes(self.dims[d])
        return fetch(x, d, axes, self.view.mesh, self.shape[d], starts, length, held)


def _sides(op: Op, view: LocalView) -> tuple[_Side, _Side]:
    order = op.params["dimensions"] or range(len(view.rule.inputs[0]))
    source, dims = shape_of(op.inputs[0]), view.rule.inputs[0]
    return (
        _Side(tuple(source[d] for d in order), tuple(dims[d] for d in order), view),
        _Side(op.outputs[0].shape, view.rule.outputs[0], view),
    )


def _shifts(left: _Side, right: _Side) -> list[tuple[int, int, int, int]]:
    """List split pairs of overlapping dims whose devices' elements differ: dims, and elements of a row of each."""
    found = []
    for i, a in enumerate(left.dims):
        for j, b in enumerate(right.dims):
            if len(a) == 1 and a == b and left.shape[i] != right.shape[j]:
                ends = (
                    {math.prod(s.shape[k : n + 1]) for n in range(k, len(s.shape))}
                    for s, k in ((left, i), (right, j))
                )
                size = min(set.intersection(*ends))
                rows = size // left.shape[i], size // right.shape[j]
                if left.part(i) * rows[0] != right.part(j) * rows[1]:
                    found.append((i, j, *rows))
    return found


def _exchanges(op: Op, view: LocalView) -> bool:
    left, right = _sides(op, view)
    return bool(left.broken() or right.broken() or _shifts(left, right))


def _emit_reshape(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    (x,) = operands
    left, right = _sides(op, view)
    if op.params["dimensions"]:
        x = lax.transpose(x, op.params["dimensions"])
    for d in left.broken():
        x = left.fetch(x, d, left.blocks(d), left.block(d), left.parts(d))
    blocks = [right.block(d) for d in range(len(right.shape))]
    for i, j, old, new in _shifts(left, right):
        before, rows = math.prod(blocks[:j]), left.part(i) * old
        behind = x.size // (before * rows)
        x = x.reshape((before, rows, behind) if behind > 1 else (before, rows))
        starts = [begin * new for begin in right.parts(j)]
        (factor,) = left.dims[i]
        x = fetch(x, 1, view.axes(factor), view.mesh, left.shape[i] * old, starts, right.part(j) * new)
    x = x.reshape(blocks)
    for d in right.broken():
        x = right.fetch(x, d, right.parts(d), right.part(d), right.blocks(d))
    return [x]


register(
    Family(
        name="reshape",
        kind=Kind.SINGLE,
        rule=_reshape_rule,
        params=_local_sizes,
        special=_exchanges,
        emit_special=_emit_reshape,
    ),
    ["reshape"],
)
