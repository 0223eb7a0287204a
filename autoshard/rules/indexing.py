"""Gather and scatter, partitioned by index rows, by passed-through dims, or by mask and reduce.

The four ways of GSPMD (arXiv 2105.04663): rows of indices and results are split together (index parallel);
dims that a slice takes whole pass through (operand passthrough); an indexed dim is split, each device
answers for the rows that it holds and the answers are summed (mask and reduce); rows of updates are split,
and the partial results summed (scatter-add).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.program import Op, shape_of
from autoshard.rules.aligned import adds_up
from autoshard.rules.reduction import identity_of
from autoshard.rules.registry import Family, Kind, LocalView, bind, register
from autoshard.rules.rule import ShardingRule

# How partial results of split rows of updates are reduced.
_MONOIDS = {
    "scatter-add": "sum",
    "scatter_add": "sum",
    "scatter-sub": "sum",
    "scatter-max": "max",
    "scatter-min": "min",
}
# What holds of global indices need not hold of shifted and masked ones.
_NO_PROMISES = {"indices_are_sorted": False, "unique_indices": False}


def _mode(op: Op) -> lax.GatherScatterMode:
    return lax.GatherScatterMode.from_any(op.params["mode"])


@dataclass(frozen=True, kw_only=True)
class _Roles:
    """Factor names per dim: operand, index rows, and window dims of the result or updates."""

    operand: tuple[str, ...]
    rows: tuple[str, ...]
    sizes: dict[str, int]
    indexed: tuple[str, ...]  # one per component of the index vector: the operand dim that it points into
    split_by_mask: frozenset[str]
    whole: frozenset[str]


def _roles(
    operand_shape: Sequence[int],
    index_shape: Sequence[int],
    slice_sizes: Sequence[int],
    pointed: Sequence[int],
    collapsed: Sequence[int],
    operand_batch: Sequence[int],
    index_batch: Sequence[int],
) -> _Roles:
    rows = [f"r{i}" for i in range(len(index_shape) - 1)]
    operand = [f"o{i}" for i in range(len(operand_shape))]
    sizes = {f"r{i}": n for i, n in enumerate(index_shape[:-1])}
    for a, b in zip(operand_batch, index_batch, strict=True):
        operand[a] = rows[b]
    masks, whole = set(), set()
    for i, name in enumerate(operand):
        if name[0] == "r":
            continue
        sizes[name] = operand_shape[i]
        if i in pointed and i in collapsed:
            masks.add(name)
        elif slice_sizes[i] != operand_shape[i]:
            whole.add(name)
        elif i in pointed:
            whole.add(name)  # a slice as large as the dim, but at a computed start that is clamped or dropped
    return _Roles(
        operand=tuple(operand),
        rows=tuple(rows),
        sizes=sizes,
        indexed=tuple(operand[i] for i in pointed),
        split_by_mask=frozenset(masks),
        whole=frozenset(whole),
    )


def _dims(names: Sequence[str], sizes: dict[str, int]) -> tuple[tuple[str, ...], ...]:
    return tuple((f,) if sizes[f] > 1 else () for f in names)


def _gather_roles(op: Op) -> _Roles:
    numbers = op.params["dimension_numbers"]
    return _roles(
        shape_of(op.inputs[0]),
        shape_of(op.inputs[1]),
        op.params["slice_sizes"],
        numbers.start_index_map,
        numbers.collapsed_slice_dims,
        numbers.operand_batching_dims,
        numbers.start_indices_batching_dims,
    )


def _gather_rule(op: Op) -> ShardingRule:
    roles, numbers = _gather_roles(op), op.params["dimension_numbers"]
    if not adds_up(op.outputs[0].dtype):
        roles = replace(roles, whole=roles.whole | roles.split_by_mask, split_by_mask=frozenset())
    sizes = dict(roles.sizes)
    gone = set(numbers.collapsed_slice_dims) | set(numbers.operand_batching_dims)
    windows = iter([i for i in range(len(roles.operand)) if i not in gone])
    rows = iter(roles.rows)
    result: list[tuple[str, ...]] = []
    for i, size in enumerate(op.outputs[0].shape):
        if i in numbers.offset_dims:
            name = roles.operand[next(windows)]
            result.append((name,) if size > 1 and name not in roles.whole else ())
        else:
            name = next(rows)
            result.append((name,) if size > 1 else ())
    return ShardingRule(
        inputs=(
            tuple(() if f in roles.whole else (f,) if sizes[f] > 1 else () for f in roles.operand),
            _dims(roles.rows, sizes) + ((),),
        ),
        outputs=(tuple(result),),
        sizes=sizes,
        reduce={f: "sum" for f in roles.operand if f in roles.split_by_mask and sizes[f] > 1},
    )


def _local_indices(
    op: Op, roles: _Roles, indices: Any, view: LocalView, slice_sizes: Sequence[int]
) -> tuple[Any, Any, Any]:
    """Indices shifted into the local part of each masked dim.

    Returns (shifted indices, mask of rows held here or None, mask of rows in bounds globally).
    """
    shape = shape_of(op.inputs[0])
    clip = _mode(op) == lax.GatherScatterMode.CLIP
    columns, held, valid = [], None, None
    for column, factor in enumerate(roles.indexed):
        value = indices[..., column]
        dim = roles.operand.index(factor)
        limit = shape[dim] - slice_sizes[dim]
        if clip:
            value = jnp.clip(value, np.asarray(0, value.dtype), np.asarray(limit, value.dtype))
        inside = (value >= 0) & (value <= limit)
        valid = inside if valid is None else valid & inside
        if view.axes(factor):
            value = value - lax.convert_element_type(view.offset(factor), value.dtype)
            here = (value >= 0) & (value < view.local_size(factor))
            held = here if held is None else held & here
        columns.append(value)
    return jnp.stack(columns, axis=-1), held, valid


def _masked(roles: _Roles, view: LocalView) -> list[str]:
    return [f for f in roles.indexed if view.axes(f) and f in roles.split_by_mask]


def _local_slice_sizes(op: Op, view: LocalView) -> Mapping[str, Any]:
    sizes = list(op.params["slice_sizes"])
    for i, name in enumerate(_gather_roles(op).operand):
        if sizes[i] > 1 and sizes[i] == view.rule.sizes[name]:
            sizes[i] = view.local_size(name)
    return {"slice_sizes": tuple(sizes)}


def _emit_gather(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    roles, numbers = _gather_roles(op), op.params["dimension_numbers"]
    operand, indices = operands
    masked = _masked(roles, view)
    slice_sizes = _local_slice_sizes(op, view)["slice_sizes"]
    shifted, held, valid = _local_indices(op, roles, indices, view, op.params["slice_sizes"])
    (picked,) = bind(
        op,
        [operand, shifted],
        slice_sizes=slice_sizes,
        mode=lax.GatherScatterMode.CLIP,
        fill_value=None,
        **_NO_PROMISES,
    )
    row_dims = [i for i in range(picked.ndim) if i not in numbers.offset_dims]

    def spread(mask: Any) -> Any:
        return lax.broadcast_in_dim(mask, picked.shape, row_dims)

    result = jnp.where(spread(held & valid), picked, jnp.zeros((), picked.dtype))
    if _mode(op) == lax.GatherScatterMode.FILL_OR_DROP:
        axes = tuple(a for f in masked for a in view.axes(f))
        first = view.index(axes) == 0
        result = jnp.where(spread(~valid & first), _fill_value(op, picked.dtype), result)
    return [result]


def _fill_value(op: Op, dtype: Any) -> Any:
    given = op.params.get("fill_value")
    if given is not None:
        return jnp.asarray(given, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        return jnp.asarray(True)
    info: Any = np.iinfo(np.dtype(dtype))
    return jnp.asarray(info.min if jnp.issubdtype(dtype, jnp.signedinteger) else info.max, dtype)


def _scatter_roles(op: Op) -> tuple[_Roles, list[int]]:
    numbers = op.params["dimension_numbers"]
    operand_shape = shape_of(op.inputs[0])
    gone = set(numbers.inserted_window_dims) | set(numbers.operand_batching_dims)
    window_dims = [i for i in range(len(operand_shape)) if i not in gone]
    slice_sizes = [1] * len(operand_shape)
    for i, u in zip(window_dims, numbers.update_window_dims, strict=True):
        slice_sizes[i] = shape_of(op.inputs[2])[u]
    roles = _roles(
        operand_shape,
        shape_of(op.inputs[1]),
        slice_sizes,
        numbers.scatter_dims_to_operand_dims,
        numbers.inserted_window_dims,
        numbers.operand_batching_dims,
        numbers.scatter_indices_batching_dims,
    )
    return roles, slice_sizes


def _scatter_rule(op: Op) -> ShardingRule:
    roles, _ = _scatter_roles(op)
    numbers = op.params["dimension_numbers"]
    sizes = dict(roles.sizes)
    shared = {f for f in roles.operand if f[0] == "r"}
    rows_whole = {f for f in roles.rows if f not in shared} if op.name not in _MONOIDS else set()
    gone = set(numbers.inserted_window_dims) | set(numbers.operand_batching_dims)
    windows = iter([i for i in range(len(roles.operand)) if i not in gone])
    rows = iter(roles.rows)
    updates: list[tuple[str, ...]] = []
    for i, size in enumerate(shape_of(op.inputs[2])):
        name = roles.operand[next(windows)] if i in numbers.update_window_dims else next(rows)
        keep = size > 1 and name not in roles.whole and name not in rows_whole
        updates.append((name,) if keep else ())
    operand = tuple(() if f in roles.whole else (f,) if sizes[f] > 1 else () for f in roles.operand)
    index = tuple((f,) if sizes[f] > 1 and f not in rows_whole else () for f in roles.rows) + ((),)
    return ShardingRule(
        inputs=(operand, index, tuple(updates)),
        outputs=(operand,),
        sizes=sizes,
        reduce={
            f: _MONOIDS[op.name]
            for f in roles.rows
            if f not in shared and f not in rows_whole and sizes[f] > 1
        },
    )


def _emit_scatter(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    roles, slice_sizes = _scatter_roles(op)
    operand, indices, updates = operands
    partial = tuple(a for f in view.rule.reduce for a in view.axes(f))
    if partial and _MONOIDS[op.name] == "sum":  # every device adds its rows; the operand must count once
        first = view.index(partial) == 0
        operand = jnp.where(first, operand, jnp.zeros((), operand.dtype))
    if _masked(roles, view):
        shifted, held, valid = _local_indices(op, roles, indices, view, slice_sizes)
        if math.prod(indices.shape[:-1]) == 1:
            # XLA's simplifier reads past the edge when it merges the slice that made the operand with a
            # scatter of one row that is to be dropped; it does not look through a barrier.
            operand = lax.optimization_barrier(operand)
        outside = jnp.asarray(np.iinfo(shifted.dtype).max, shifted.dtype)
        shifted = jnp.where((held & valid)[..., None], shifted, outside)
        return bind(op, [operand, shifted, updates], mode=lax.GatherScatterMode.FILL_OR_DROP, **_NO_PROMISES)
    return bind(op, [operand, indices, updates])


def _scatter_identity(op: Op, i: int) -> Any:
    """Rows of updates that are padding change nothing, wherever their indices point."""
    return identity_of(_MONOIDS[op.name], op.outputs[0].dtype) if i == 2 else None


def _gather_is_masked(op: Op, view: LocalView) -> bool:
    return bool(_masked(_gather_roles(op), view))


def _scatter_is_special(op: Op, view: LocalView) -> bool:
    return bool(_masked(_scatter_roles(op)[0], view)) or any(view.axes(f) for f in view.rule.reduce)


register(
    Family(
        name="gather",
        kind=Kind.SINGLE,
        rule=_gather_rule,
        params=_local_slice_sizes,
        special=_gather_is_masked,
        emit_special=_emit_gather,
    ),
    ["gather"],
)
register(
    Family(
        name="scatter",
        kind=Kind.SINGLE,
        rule=_scatter_rule,
        identity=_scatter_identity,
        special=_scatter_is_special,
        emit_special=_emit_scatter,
    ),
    ["scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter-min", "scatter-max", "scatter-sub"],
)
