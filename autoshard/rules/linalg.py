"""Batched linear algebra: batch dims are parallel, matrix dims whole.

A device factors or solves the matrices that it holds and no part of one. Columns of a right-hand side, and those
of what reflectors are applied to, do not depend on each other and split as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from autoshard.program import Op, shape_of
from autoshard.rules.registry import Family, Kind, LocalView, bind, register
from autoshard.rules.rule import Dims, ShardingRule

# Dims of one matrix, vector or pair of them, per operand; all dims before are batch.
_RANKS: Mapping[str, tuple[int, ...]] = {
    "cholesky": (2,),
    "cholesky_update": (2, 1),
    "eig": (2,),
    "eigh": (2,),
    "geqp3": (2, 1),
    "geqrf": (2,),
    "hessenberg": (2,),
    "householder_product": (2, 1),
    "lu": (2,),
    "lu_pivots_to_permutation": (1,),
    "ormqr": (2, 1, 2),
    "qr": (2,),
    "schur": (2,),
    "svd": (2,),
    "symmetric_product": (2, 2),
    "triangular_solve": (2, 2),
    "tridiagonal": (2,),
    "tridiagonal_solve": (1, 1, 1, 2),
}


def _columns(op: Op) -> int | None:
    """Dim of the last operand and the result, counted from the end, whose entries are independent."""
    if op.name == "tridiagonal_solve":
        return -1
    if op.name == "triangular_solve":
        return -1 if op.params["left_side"] else -2
    if op.name == "ormqr":
        return -1 if op.params["left"] else -2
    return None


def _rule(op: Op) -> ShardingRule:
    ranks = _RANKS[op.name]
    batch = shape_of(op.inputs[0])[: len(shape_of(op.inputs[0])) - ranks[0]]
    sizes = {f"b{i}": n for i, n in enumerate(batch)}
    lead: Dims = tuple((f,) if n > 1 else () for f, n in sizes.items())
    inputs = [lead + ((),) * rank for rank in ranks]
    outputs = [lead + ((),) * (len(v.shape) - len(lead)) for v in op.outputs]
    column = _columns(op)
    if column is not None and op.outputs[0].shape[column] > 1:
        sizes["c"] = op.outputs[0].shape[column]
        inputs[-1] = outputs[0] = lead + ((("c",), ()) if column == -2 else ((), ("c",)))
    return ShardingRule(inputs=tuple(inputs), outputs=tuple(outputs), sizes=sizes)


def _some_hold_padding(op: Op, view: LocalView) -> bool:
    return any(map(view.uneven, view.rule.sizes))


def _emit_without_padding(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    """Put zeros into padding: an iteration over whatever stands there need not converge."""
    pairs = zip(operands, view.rule.inputs, strict=True)
    return bind(op, [view.without_padding(array, dims, 0) for array, dims in pairs])


def _product_rule(op: Op) -> ShardingRule:
    """`alpha a a^T + beta c`: both dims of the result are rows of `a`, so only `k` and batch dims split."""
    rule = _rule(op)
    rows = shape_of(op.inputs[0])
    if rows[-1] == 1:
        return rule
    left, right = rule.inputs
    return ShardingRule(
        inputs=((*left[:-1], ("k",)), right),
        outputs=rule.outputs,
        sizes={**rule.sizes, "k": rows[-1]},
        reduce={"k": "sum"},
    )


def _sums_products(op: Op, view: LocalView) -> bool:
    return bool(view.axes("k"))


def _emit_sum_of_products(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    """Add `c` on one device only."""
    factor, addend = operands
    first = view.index(view.axes("k")) == 0
    return bind(op, [factor, jnp.where(first, addend, jnp.zeros((), addend.dtype))])


register(
    Family(
        name="linalg",
        kind=Kind.SINGLE,
        rule=_rule,
        special=_some_hold_padding,
        emit_special=_emit_without_padding,
    ),
    sorted(set(_RANKS) - {"symmetric_product"}),
)
register(
    Family(
        name="symmetric_product",
        kind=Kind.SINGLE,
        rule=_product_rule,
        special=_sums_products,
        emit_special=_emit_sum_of_products,
        identity=lambda op, i: 0 if i == 0 else None,
    ),
    ["symmetric_product"],
)
