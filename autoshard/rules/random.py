"""Random keys and bits: the partitioned bits equal the unpartitioned ones.

With JAX's partitionable threefry a bit depends on the key and on its own global position only, so a device
makes just its part; for other key types the bits are made whole and sliced, at their true cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from autoshard.program import Op, aval_of, shape_of
from autoshard.rules.registry import Family, Kind, LocalView, bind, names, register
from autoshard.rules.rule import Dims, ShardingRule

_DRAWS = frozenset({"random_bits", "random_gamma", "random_split"})


def _key_rule(op: Op) -> ShardingRule:
    """Batch dims of keys are parallel; what an op adds behind them is whole."""
    batch = _batch_shape(op)
    factors = tuple(f"b{i}" for i in range(len(batch)))
    sizes = dict(zip(factors, batch, strict=True))
    lead = tuple((f,) if n > 1 else () for f, n in sizes.items())

    def dims(shape: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
        return lead + ((),) * (len(shape) - len(lead)) if len(shape) >= len(lead) else ((),) * len(shape)

    outputs = []
    for value in op.outputs:
        own = dims(value.shape)
        if op.name == "random_bits":
            extra = {f"s{i}": n for i, n in enumerate(value.shape[len(batch) :])}
            if not batch:
                sizes |= extra
                own = lead + tuple((f,) if n > 1 else () for f, n in extra.items())
        outputs.append(own)
    return ShardingRule(
        inputs=tuple(dims(shape_of(a)) for a in op.inputs), outputs=tuple(outputs), sizes=sizes
    )


def _is_threefry(dtype: Any) -> bool:
    return str(dtype) == "key<fry>"


def _batch_shape(op: Op) -> tuple[int, ...]:
    """Dims that all keys of the op share."""
    shapes = [
        tuple(aval_of(a).shape)
        for a in (*op.inputs, *op.outputs)
        if jnp.issubdtype(aval_of(a).dtype, jax.dtypes.prng_key)
    ]
    batch = min(shapes, key=len)
    if op.name in _DRAWS and not _is_threefry(aval_of(op.inputs[0]).dtype):
        return ()  # other generators draw for a batch of keys as a whole: a part of it would draw differently
    if any(shape[: len(batch)] != batch for shape in shapes):
        return ()
    if any(tuple(shape_of(a))[: len(batch)] != batch for a in op.inputs):
        return ()
    return batch


def _bits_are_split(op: Op, view: LocalView) -> bool:
    return any(view.axes(f) for dim in view.rule.outputs[0] for f in dim if f[0] == "s")


def _emit_bits(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    (dims,) = view.rule.outputs
    (key,) = operands
    if (
        _is_threefry(key.dtype)
        and jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
        and op.params["bit_width"] == 32
    ):
        return [_threefry_part(op, key, view)]
    return [_part(bind(op, operands)[0], dims, view)]


def _part(bits: Any, dims: Dims, view: LocalView) -> Any:
    """Cut this device's part out of bits that were made whole."""
    for i, dim in enumerate(dims):
        if dim and view.axes(dim[0]):
            bits = view.part(bits, dim[0], i)
    return bits


def _threefry_part(op: Op, key: Any, view: LocalView) -> Any:
    """Threefry on the 64-bit global positions of the local elements (Salmon et al. 2011)."""
    high, low = _positions(op, view)
    words = jax.random.key_data(key)
    first, second = threefry2x32_p.bind(
        jnp.broadcast_to(words[0], high.shape), jnp.broadcast_to(words[1], high.shape), high, low
    )
    return first ^ second


def _positions(op: Op, view: LocalView) -> tuple[Any, Any]:
    """64-bit global positions of the local elements of the first result, as (high, low) words."""
    shape, local = op.outputs[0].shape, view.out_shape(op)
    dims = view.rule.outputs[0]
    high = low = jnp.zeros(local, jnp.uint32)
    stride = 1
    for i in reversed(range(len(shape))):
        place = lax.broadcasted_iota(jnp.uint32, local, i)
        if dims[i] and view.axes(dims[i][0]):
            place = place + lax.convert_element_type(view.offset(dims[i][0]), jnp.uint32)
        product_high, product_low = _wide_multiply(place, stride)
        total = low + product_low
        carry = lax.convert_element_type(total < low, jnp.uint32)
        high, low = high + product_high + carry, total
        stride *= shape[i]
    return high, low


def _wide_multiply(place: Any, stride: int) -> tuple[Any, Any]:
    """64-bit product of a uint32 array and a Python integer, as (high, low) words."""
    stride_high, stride_low = stride >> 32, stride & 0xFFFFFFFF
    low_high, low_low = stride_low >> 16, stride_low & 0xFFFF
    place_high, place_low = place >> 16, place & jnp.uint32(0xFFFF)
    a = place_low * jnp.uint32(low_low)
    b = place_high * jnp.uint32(low_low)
    c = place_low * jnp.uint32(low_high)
    d = place_high * jnp.uint32(low_high)
    middle = (a >> 16) + (b & jnp.uint32(0xFFFF)) + (c & jnp.uint32(0xFFFF))
    low = (a & jnp.uint32(0xFFFF)) | (middle << 16)
    high = d + (b >> 16) + (c >> 16) + (middle >> 16) + place * jnp.uint32(stride_high)
    return high, low


def _shaped_rule(op: Op) -> ShardingRule:
    """Bits of a shape given by a parameter: their dims split, the key is whole."""
    shape = op.outputs[-1].shape
    factors = names(len(shape), "s")
    bits = tuple((f,) if n > 1 else () for f, n in zip(factors, shape, strict=True))
    return ShardingRule(
        inputs=tuple(((),) * len(shape_of(a)) for a in op.inputs),
        outputs=tuple(bits if v.shape == shape else ((),) * len(v.shape) for v in op.outputs),
        sizes=dict(zip(factors, shape, strict=True)),
    )


def _shape_is_split(op: Op, view: LocalView) -> bool:
    return any(map(view.axes, view.rule.sizes))


def _emit_generated(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    key, bits = bind(op, operands)
    return [key, _part(bits, view.rule.outputs[1], view)]


register(
    Family(
        name="random_bits",
        kind=Kind.SINGLE,
        rule=_key_rule,
        special=_bits_are_split,
        emit_special=_emit_bits,
        about="threefry bits are made in parts, others whole and then cut",
    ),
    ["random_bits"],
)
register(
    Family(name="random_key", kind=Kind.SINGLE, rule=_key_rule),
    "random_seed random_wrap random_unwrap random_fold_in random_split random_clone random_gamma".split(),
)
register(
    Family(
        name="bit_generator",
        kind=Kind.SINGLE,
        rule=_shaped_rule,
        special=_shape_is_split,
        emit_special=_emit_generated,
        about="bits are made whole and then cut",
    ),
    ["rng_bit_generator"],
)
register(
    Family(
        name="positions",
        kind=Kind.SINGLE,
        rule=_shaped_rule,
        special=_shape_is_split,
        emit_special=lambda op, operands, view: _positions(op, view),
        about="a device counts from its own positions",
    ),
    ["iota_2x32_shape"],
)
