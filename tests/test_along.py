"""Ops along a split dim: cumulative ops, reductions, top_k, sorts and Fourier transforms."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.helpers.running import run
from tests.helpers.single import Single, op_of, random_split, wrong_ones

MESHES: tuple[dict[str, int], ...] = (
    {"a": 2, "b": 4},
    {"a": 5},
    {"a": 2, "b": 2, "c": 2},
    {"a": 8},
    {"a": 3},
)
CASES = int(os.environ.get("AUTOSHARD_SINGLE", "16"))
DTYPES = (jnp.float32, jnp.float32, jnp.bfloat16, jnp.int32, jnp.int8, jnp.uint8, jnp.uint32, jnp.bool_)


def _array(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, odd: bool = True) -> Any:
    """Many ties; of floats also NaN of both signs, infinities and both zeros."""
    kind = jnp.dtype(dtype)
    if kind == jnp.bool_:
        return jnp.asarray(rng.integers(0, 2, shape), bool)
    if not jnp.issubdtype(kind, jnp.inexact):
        info = jnp.iinfo(kind)
        array = rng.integers(max(info.min, -3), 5, shape).astype(kind)
        return jnp.asarray(np.where(rng.random(shape) < 0.1, rng.choice([info.min, info.max]), array))
    values = rng.integers(-3, 4, shape).astype(np.float64)
    if jnp.issubdtype(kind, jnp.complexfloating):
        values = values + 1j * rng.integers(-3, 4, shape)
    if odd and rng.random() < 0.6:
        special = rng.choice([np.nan, -np.nan, np.inf, -np.inf, -0.0], shape)
        values = np.where(rng.random(shape) < rng.choice([0.05, 0.5]), special, values)
    return jnp.asarray(values.astype(kind))


def _shape(rng: np.random.Generator, least: int = 1) -> tuple[int, ...]:
    rank = int(rng.integers(least, 5))
    return tuple(
        int(n) for n in rng.choice([1, 2, 3, 5, 6, 7, 8, 9, 13] if rank < 3 else [1, 2, 3, 5, 8], rank)
    )


def _check(
    make: Callable[[np.random.Generator], tuple[Any, tuple[Any, ...]]], seed: int, rtol: float = 1e-5
) -> None:
    rng = np.random.default_rng(seed)
    mesh = MESHES[seed % len(MESHES)]
    made = [make(rng) for _ in range(CASES)]
    results = iter(
        run(
            lambda *a: [jax.tree.leaves(f(*x)) for (f, _), x in zip(made, a, strict=True)],
            [x for _, x in made],
        )
    )
    cases = []
    for fn, args in made:
        op = op_of(fn, args)
        cases.append(
            Single(op=op, args=args, assignment=random_split(op, mesh, rng), expected=tuple(next(results)))
        )
    assert sum(bool(c.assignment) for c in cases) > CASES // 4
    wrong = wrong_ones(cases, mesh, rtol)
    assert not wrong, wrong


def _cumulative(rng: np.random.Generator) -> tuple[Any, tuple[Any, ...]]:
    name = str(rng.choice(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"]))
    dtype = DTYPES[int(rng.integers(7))]
    shape = _shape(rng)
    if name == "cumlogsumexp":
        dtype = jnp.float32
    axis, reverse = int(rng.integers(len(shape))), bool(rng.integers(2))
    x = _array(rng, shape, dtype)
    if name == "cumprod" and dtype is jnp.float32:
        x = jnp.clip(x, -2, 2)
    return (lambda x: getattr(lax, name)(x, axis, reverse)), (x,)


def _reduction(rng: np.random.Generator) -> tuple[Any, tuple[Any, ...]]:
    pick = int(rng.integers(6))
    shape = _shape(rng)
    axes = tuple(int(d) for d in range(len(shape)) if rng.random() < 0.6) or (0,)
    dtype = DTYPES[int(rng.integers(len(DTYPES)))]
    if pick < 2:
        index = (jnp.int32, jnp.int8, jnp.uint32)[int(rng.integers(3))]
        fn = (lax.argmax, lax.argmin)[pick]
        return (lambda x: fn(x, axes[0], index)), (_array(rng, shape, dtype),)
    if pick == 2:
        dtype = (jnp.int32, jnp.int8, jnp.uint8, jnp.bool_)[int(rng.integers(4))]
        fn = (lax.reduce_and, lax.reduce_or, lax.reduce_xor)[int(rng.integers(3))]
        return (lambda x: fn(x, axes)), (_array(rng, shape, dtype),)
    if pick == 3:
        dtype = (jnp.float32, jnp.int32, jnp.uint8)[int(rng.integers(3))]
        return (lambda x: lax.reduce_prod(x, axes)), (_array(rng, shape, dtype),)
    if pick == 4:
        fn = (lax.reduce_sum, lax.reduce_max, lax.reduce_min)[int(rng.integers(3))]
        dtype = DTYPES[int(rng.integers(7))]
        # XLA's all-reduce on CPUs drops NaN from maxima.
        return (lambda x: fn(x, axes)), (_array(rng, shape, dtype, odd=fn is lax.reduce_sum),)

    def longest(a: Any, b: Any) -> Any:
        """The greatest, how often it is there, and a product beside it."""
        first = a[0] > b[0]
        count = lax.select(a[0] == b[0], a[1] + b[1], lax.select(first, a[1], b[1]))
        return lax.select(first, a[0], b[0]), count, a[2] * b[2]

    args = tuple(_array(rng, shape, d, odd=False) for d in (jnp.float32, jnp.int32, jnp.int32))
    starts = (jnp.float32(-jnp.inf), jnp.int32(0), jnp.int32(1))
    return (lambda x, y, z, a, b, c: lax.reduce((x, y, z), (a, b, c), longest, axes)), (*args, *starts)


def _top_k(rng: np.random.Generator) -> tuple[Any, tuple[Any, ...]]:
    shape = _shape(rng)
    axis = int(rng.integers(len(shape)))
    k = int(rng.integers(1, shape[axis] + 1))
    dtype = DTYPES[int(rng.integers(len(DTYPES)))]
    if rng.random() < 0.1:
        return (lambda x: lax.approx_max_k(x, k, axis)), (_array(rng, shape, jnp.float32, odd=False),)
    return (lambda x: lax.top_k(x, k, axis=axis)), (_array(rng, shape, dtype),)


def _sort(rng: np.random.Generator) -> tuple[Any, tuple[Any, ...]]:
    shape = _shape(rng)
    axis = int(rng.integers(len(shape)))
    count = int(rng.integers(1, 4))
    keys = int(rng.integers(1, count + 1))
    dtypes = (*DTYPES, jnp.complex64)
    operands = [_array(rng, shape, dtypes[int(rng.integers(len(dtypes)))]) for _ in range(count)]
    operands.append(lax.broadcasted_iota(jnp.int32, shape, axis))
    return (lambda *x: lax.sort(x, dimension=axis, num_keys=keys)), tuple(operands)


def _fft(rng: np.random.Generator) -> tuple[Any, tuple[Any, ...]]:
    shape = _shape(rng)
    count = int(rng.integers(1, min(3, len(shape)) + 1))
    kind = list(lax.FftType)[int(rng.integers(4))]
    lengths = shape[len(shape) - count :]
    if kind is lax.FftType.IRFFT:
        lengths = (*lengths[:-1], max(1, 2 * (lengths[-1] - 1) + int(rng.integers(2))))
    real = kind is lax.FftType.RFFT
    values = rng.standard_normal(shape) + (0 if real else 1j * rng.standard_normal(shape))
    x = jnp.asarray(values, jnp.float32 if real else jnp.complex64)
    return (lambda x: lax.fft_p.bind(x, fft_type=kind, fft_lengths=lengths)), (x,)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("make", [_cumulative, _reduction, _top_k, _sort, _fft])
def test_an_op_along_a_split_dim_computes_the_same(make: Any, seed: int) -> None:
    _check(make, seed, rtol=1e-2 if make is _cumulative else 1e-5)
