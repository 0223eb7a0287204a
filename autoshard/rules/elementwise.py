"""Elementwise ops, and the shape ops that a compiler fuses with them.

Size-1 dims and scalars broadcast inside elementwise primitives, so an operand's dim of extent 1 against a
larger result has no factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax

from autoshard.program import Op, aval_of, shape_of
from autoshard.rules.registry import Family, Kind, LocalView, bind, names, register
from autoshard.rules.rule import ShardingRule

UNARY = """abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e bitcast cbrt ceil clz conj
convert_element_type cos cosh digamma erf erf_inv erfc exp exp2 expm1 floor imag integer_pow is_finite
layout_constraint lgamma log log1p logistic neg not population_count real reciprocal reduce_precision round
rsqrt sign sin sinh sqrt square tan tanh""".split()
NARY = """add add_any and atan2 clamp complex div eq eq_to ge gt igamma igamma_grad_a igammac le le_to lt lt_to
max min mul mulhi ne nextafter or philox2x32 philox4x32 polygamma pow random_gamma_grad
regularized_incomplete_beta rem select_n shift_left shift_right_arithmetic shift_right_logical sub
threefry2x32 threefry4x32 xor zeta""".split()

# Partial sums pass through these: by operand position, all of them together or the one alone.
_LINEAR = {
    "add": (0, 1),
    "add_any": (0, 1),
    "sub": (0, 1),
    "neg": (0,),
    "convert_element_type": (0,),
    "real": (0,),
    "imag": (0,),
}


def _elementwise_rule(op: Op) -> ShardingRule:
    shape = op.outputs[0].shape
    factors = names(len(shape), "d")
    out = tuple((f,) if n > 1 else () for f, n in zip(factors, shape, strict=True))
    inputs = tuple(
        tuple(dim if n == size else () for dim, n, size in zip(out, shape_of(a), shape, strict=True))
        if shape_of(a)
        else ()
        for a in op.inputs
    )
    linear: tuple[int, ...] = _LINEAR.get(op.name, ())
    if op.name == "convert_element_type" and not _both_inexact(op):
        linear = ()
    if linear and any(shape_of(op.inputs[i]) != shape for i in linear):
        linear = ()
    if op.name in ("mul", "div") and len(op.inputs) == 2:
        linear = _scaled_operand(op)
    return ShardingRule(
        inputs=inputs,
        outputs=(out,) * len(op.outputs),
        sizes=dict(zip(factors, shape, strict=True)),
        linear=linear,
    )


def _both_inexact(op: Op) -> bool:
    import jax.numpy as jnp

    return all(
        jnp.issubdtype(dtype, jnp.inexact) for dtype in (aval_of(op.inputs[0]).dtype, op.outputs[0].dtype)
    )


def _scaled_operand(op: Op) -> tuple[int, ...]:
    """A product with a scalar is linear in the other operand."""
    left, right = op.inputs
    if not shape_of(right) and shape_of(left) == op.outputs[0].shape:
        return (0,)
    if op.name == "mul" and not shape_of(left) and shape_of(right) == op.outputs[0].shape:
        return (1,)
    return ()


def _bitcast_rule(op: Op) -> ShardingRule:
    """A change of width adds or drops a minor dim, which stays whole."""
    shapes = shape_of(op.inputs[0]), op.outputs[0].shape
    shared = min(shapes, key=len)
    factors = names(len(shared), "d")
    lead = tuple((f,) if n > 1 else () for f, n in zip(factors, shared, strict=True))

    def dims(shape: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
        return lead + ((),) * (len(shape) - len(lead))

    return ShardingRule(
        inputs=(dims(shapes[0]),), outputs=(dims(shapes[1]),), sizes=dict(zip(factors, shared, strict=True))
    )


def _broadcast_rule(op: Op) -> ShardingRule:
    (shape,) = (op.outputs[0].shape,)
    factors = names(len(shape), "d")
    source = shape_of(op.inputs[0])
    positions = op.params["broadcast_dimensions"]
    inputs = tuple((factors[p],) if n > 1 else () for n, p in zip(source, positions, strict=True))
    return ShardingRule(
        inputs=(inputs,) + ((),) * (len(op.inputs) - 1),
        outputs=(tuple((f,) if n > 1 else () for f, n in zip(factors, shape, strict=True)),),
        sizes=dict(zip(factors, shape, strict=True)),
    )


def _local_shape(op: Op, view: LocalView) -> Mapping[str, Any]:
    return {"shape": view.out_shape(op), "sharding": None}


def _iota_rule(op: Op) -> ShardingRule:
    shape = op.outputs[0].shape
    factors = names(len(shape), "d")
    return ShardingRule(
        inputs=(),
        outputs=(tuple((f,) if n > 1 else () for f, n in zip(factors, shape, strict=True)),),
        sizes=dict(zip(factors, shape, strict=True)),
    )


def _iota_is_split(op: Op, view: LocalView) -> bool:
    return bool(view.dim_axes(view.rule.outputs[0][op.params["dimension"]]))


def _emit_split_iota(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    (result,) = bind(op, operands, **_local_shape(op, view))
    (factor,) = view.rule.outputs[0][op.params["dimension"]]
    return [result + lax.convert_element_type(view.offset(factor), result.dtype)]


def _transpose_rule(op: Op) -> ShardingRule:
    shape = shape_of(op.inputs[0])
    factors = names(len(shape), "d")
    source = tuple((f,) if n > 1 else () for f, n in zip(factors, shape, strict=True))
    return ShardingRule(
        inputs=(source,),
        outputs=(tuple(source[p] for p in op.params["permutation"]),),
        sizes=dict(zip(factors, shape, strict=True)),
        linear=(0,),
    )


def _squeeze_rule(op: Op) -> ShardingRule:
    shape = shape_of(op.inputs[0])
    factors = names(len(shape), "d")
    source = tuple((f,) if n > 1 else () for f, n in zip(factors, shape, strict=True))
    gone = set(op.params["dimensions"])
    return ShardingRule(
        inputs=(source,),
        outputs=(tuple(d for i, d in enumerate(source) if i not in gone),),
        sizes=dict(zip(factors, shape, strict=True)),
        linear=(0,),
    )


register(Family(name="elementwise", kind=Kind.ELEMENTWISE, rule=_elementwise_rule), UNARY + NARY)
register(Family(name="bitcast", kind=Kind.ELEMENTWISE, rule=_bitcast_rule), ["bitcast_convert_type"])
register(
    Family(name="broadcast", kind=Kind.ELEMENTWISE, rule=_broadcast_rule, params=_local_shape),
    ["broadcast_in_dim"],
)
register(
    Family(
        name="iota",
        kind=Kind.ELEMENTWISE,
        rule=_iota_rule,
        params=_local_shape,
        special=_iota_is_split,
        emit_special=_emit_split_iota,
    ),
    ["iota"],
)
register(
    Family(
        name="empty",
        kind=Kind.ELEMENTWISE,
        rule=_iota_rule,
        params=lambda op, view: {"shape": view.out_shape(op), "out_sharding": None},
        about="a device allocates its part",
    ),
    ["empty"],
)
register(Family(name="transpose", kind=Kind.ELEMENTWISE, rule=_transpose_rule), ["transpose"])
register(Family(name="squeeze", kind=Kind.ELEMENTWISE, rule=_squeeze_rule), ["squeeze"])
