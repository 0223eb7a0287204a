"""Sorting along a split dim: every device keeps one part, and neighbours merge and split theirs.

After a local sort, `ways` rounds in which the devices pair up with the one behind and the one before in turn
(odd-even transposition, Knuth, The Art of Computer Programming, volume 3) put all in order, in the memory of two
parts. Every merge is stable and joins neighbours only, so the whole is stable, and padding, which has the greatest
keys and stands at the end, stays there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.addresses import cut
from autoshard.program import Op
from autoshard.rules.along import along_rule, exchanges, filled
from autoshard.rules.reduction import identity_of
from autoshard.rules.registry import Family, Kind, LocalView, bind, register
from autoshard.rules.rule import ShardingRule
from autoshard.rules.transfers import permute


def _rule(op: Op) -> ShardingRule:
    return along_rule(op, op.params["dimension"], "merge")


def _greatest(dtype: Any) -> Any:
    """Return a value that no other is sorted behind: NaN where there is one."""
    if jnp.issubdtype(dtype, jnp.inexact):
        nan = np.asarray(complex(np.nan, np.nan) if jnp.issubdtype(dtype, jnp.complexfloating) else np.nan)
        if np.isnan(nan.astype(dtype)):
            return nan.astype(dtype)
        return np.asarray(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]
    return identity_of("min", dtype)


def _emit(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    dim, keys = op.params["dimension"], op.params["num_keys"]
    (factor,) = view.rule.exchange
    ways = view.ways(factor)
    masked = [filled(x, dim, _greatest(x.dtype), view) if i < keys else x for i, x in enumerate(operands)]
    parts = list(bind(op, masked, is_stable=True))
    if ways == 2:
        return _round(op, parts, view, 0)

    def both(parts: list[Any], _: None) -> tuple[list[Any], None]:
        return _round(op, _round(op, parts, view, 0), view, 1), None

    parts, _ = lax.scan(both, parts, length=ways // 2)
    return _round(op, parts, view, 0) if ways % 2 else parts


def _round(op: Op, parts: list[Any], view: LocalView, first: int) -> list[Any]:
    """Merge the parts of the pairs (first, first + 1), (first + 2, first + 3), ... and split them again."""
    dim = op.params["dimension"]
    (factor,) = view.rule.exchange
    axes, ways, size = view.axes(factor), view.ways(factor), view.local_size(factor)
    pairs = [(p, p + 1) for p in range(first, ways - 1, 2)]
    sent = pairs + [(q, p) for p, q in pairs]
    received = [permute(mine, axes, view.mesh, sent) for mine in parts]
    index = view.index(axes)
    is_left = (index & 1) == first
    joined = []
    for mine, theirs in zip(parts, received, strict=True):
        row = lax.concatenate([theirs, mine, theirs], dim)
        joined.append(cut(row, jnp.where(is_left, size, 0), 2 * size, dim))
    merged = bind(op, joined, is_stable=True)
    kept = [cut(x, jnp.where(is_left, 0, size), size, dim) for x in merged]
    alone = [p for p in range(ways) if not any(p in pair for pair in pairs)]
    if not alone:
        return kept
    stays = functools.reduce(jnp.logical_or, [index == p for p in alone])
    return [jnp.where(stays, mine, x) for mine, x in zip(parts, kept, strict=True)]


register(Family(name="sort", kind=Kind.SINGLE, rule=_rule, special=exchanges, emit_special=_emit), ["sort"])
