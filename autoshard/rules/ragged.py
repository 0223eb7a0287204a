"""Ragged matrix products: rows lie group after group, and each group has a matrix of its own.

Batch, free and contracting dims split as in any product. The ragged dim splits too, without communication: every
device works out which part of each group it holds. Split groups (experts) are a device's own: it shifts the
rows of its groups to the front, works on those, and shifts the results back. What lies outside them is zero, so
where groups are rows of the result, the results are partial sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.addresses import cut
from autoshard.program import Op, shape_of
from autoshard.rules.registry import Family, Kind, LocalView, bind, register
from autoshard.rules.rule import ShardingRule

_RAGGED, _GROUP = "r", "g"


@dataclass(frozen=True)
class _Roles:
    """Factor names of the dims of a ragged product's operands and result."""

    op: Op

    @cached_property
    def names(self) -> tuple[list[str], list[str]]:
        """Factors of the left and of the right operand, by dim."""
        numbers = self.op.params["ragged_dot_dimension_numbers"]
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
        (ragged,) = numbers.lhs_ragged_dimensions
        lhs = [f"m{i}" for i in range(len(shape_of(self.op.inputs[0])))]
        rhs = [f"n{i}" for i in range(len(shape_of(self.op.inputs[1])))]
        for prefix, left, right in (("b", lhs_batch, rhs_batch), ("k", lhs_contract, rhs_contract)):
            for i, (a, b) in enumerate(zip(left, right, strict=True)):
                lhs[a] = rhs[b] = _RAGGED if a == ragged else f"{prefix}{i}"
        lhs[ragged] = _RAGGED
        for i in numbers.rhs_group_dimensions:
            rhs[i] = _GROUP
        return lhs, rhs

    @cached_property
    def batch(self) -> list[str]:
        """Factors of the batch dims, in the order of the result."""
        (_, (batch, _)) = self.op.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        return [self.names[0][i] for i in batch]

    @cached_property
    def contracted(self) -> list[str]:
        """Factors of the contracting dims."""
        ((contract, _), _) = self.op.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        return [self.names[0][i] for i in contract]

    @cached_property
    def out(self) -> list[str]:
        """Factors of the result, by dim."""
        lhs, rhs = self.names
        inner = set(self.batch) | set(self.contracted)
        lead = [_GROUP] if _RAGGED in self.contracted else []
        free = [f for f in lhs if f not in inner] + [f for f in rhs if f not in inner and f != _GROUP]
        return lead + self.batch + free

    @cached_property
    def prefix(self) -> list[str]:
        """Factors that group sizes of more than one dim have before the groups."""
        if len(shape_of(self.op.inputs[2])) == 1:
            return []
        lhs = self.names[0]
        if _RAGGED in self.batch:
            return self.batch[: self.batch.index(_RAGGED)]
        inner = set(self.batch) | set(self.contracted)
        outer = self.contracted if _RAGGED in self.contracted else [f for f in lhs if f not in inner]
        return self.batch + outer[: outer.index(_RAGGED)]

    @cached_property
    def reduce(self) -> list[str]:
        """Factors that leave partial sums."""
        return self.contracted + ([_GROUP] if _GROUP in self.names[1] else [])

    @cached_property
    def whole(self) -> bool:
        """Tell whether groups are never split: each batch element has its own, or they mean nothing."""
        return bool(self.prefix) or _RAGGED in self.batch


def _rule(op: Op) -> ShardingRule:
    roles = _Roles(op)
    lhs, rhs = roles.names
    sizes = dict(zip(lhs, shape_of(op.inputs[0]), strict=True))
    sizes |= dict(zip(rhs, shape_of(op.inputs[1]), strict=True))
    sizes |= dict(zip(roles.out, op.outputs[0].shape, strict=True))

    def dims(names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        return tuple((f,) if sizes[f] > 1 and not (f == _GROUP and roles.whole) else () for f in names)

    return ShardingRule(
        inputs=(dims(lhs), dims(rhs), (*dims(roles.prefix), ())),
        outputs=(dims(roles.out),),
        sizes=sizes,
        reduce={f: "sum" for f in roles.reduce if sizes[f] > 1 and not (f == _GROUP and roles.whole)},
    )


def _local_params(op: Op, view: LocalView) -> Mapping[str, Any]:
    return {"out_sharding": None}


def _groups_are_cut(op: Op, view: LocalView) -> bool:
    return bool(view.axes(_RAGGED) or view.axes(_GROUP))


def _emit(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    lhs, rhs, sizes = operands
    roles = _Roles(op)
    rows = np.int32(view.local_size(_RAGGED))
    sizes = lax.convert_element_type(sizes, np.int32)
    ends = lax.cumsum(sizes, axis=sizes.ndim - 1)
    starts = ends - sizes
    if view.axes(_RAGGED):
        starts, ends = (lax.clamp(np.int32(0), x - view.offset(_RAGGED), rows) for x in (starts, ends))
    if not view.axes(_GROUP):
        return bind(op, [lhs, rhs, ends - starts], out_sharding=None)
    own_starts, own_ends = (view.part(x, _GROUP, 0) for x in (starts, ends))
    begin = lax.min(own_starts[0], rows)
    own_sizes = own_ends - own_starts
    at = roles.names[0].index(_RAGGED)
    lhs = _forward(lhs, begin, at)
    if _RAGGED in roles.contracted:
        rhs = _forward(rhs, begin, roles.names[1].index(_RAGGED))
        return bind(op, [lhs, rhs, own_sizes], out_sharding=None)
    (result,) = bind(op, [lhs, rhs, own_sizes], out_sharding=None)
    at = roles.out.index(_RAGGED)
    place = lax.broadcasted_iota(np.int32, result.shape, at)
    result = jnp.where(place < own_sizes.sum(), result, jnp.zeros((), result.dtype))
    return [_backward(result, begin, at)]


def _forward(array: Any, count: Any, dim: int) -> Any:
    """Move rows up by `count`; zeros follow."""
    padded = lax.concatenate([array, jnp.zeros_like(array)], dim)
    return cut(padded, count, array.shape[dim], dim)


def _backward(array: Any, count: Any, dim: int) -> Any:
    """Move rows down by `count`; zeros come before."""
    rows = array.shape[dim]
    padded = lax.concatenate([jnp.zeros_like(array), array], dim)
    return cut(padded, np.int32(rows) - count, rows, dim)


register(
    Family(
        name="ragged_dot",
        kind=Kind.SINGLE,
        rule=_rule,
        params=_local_params,
        special=_groups_are_cut,
        emit_special=_emit,
        identity=lambda op, i: 0 if i < 2 else None,
    ),
    ["ragged_dot_general"],
)
