"""Ops with the text of their rule and operands to run them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core.primitives import empty2_p
from jax.extend.random import threefry2x32_p


class Case(NamedTuple):
    """The last op named `name` in the trace of `fn(*args)`, and its rule."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    text: str


def f32(*shape: int, seed: int = 0) -> Any:
    """Small integers."""
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), jnp.float32)


def i32(values: Any) -> Any:
    """Integers as given."""
    return jnp.asarray(values, jnp.int32)


# Linear algebra ---------------------------------------------------------------------------------------

REGULAR = jnp.stack([(9.0 + i) * jnp.eye(4) + f32(4, 4, seed=i) for i in range(6)])
DEFINITE = REGULAR + REGULAR.mT
BANDS = (f32(6, 5), jnp.full((6, 5), 9.0), f32(6, 5, seed=1), f32(6, 5, 3, seed=2))


def triangular(left: bool) -> Callable[..., Any]:
    """Solve with the lower triangle."""
    return lambda a, b: lax.linalg.triangular_solve(a, b, left_side=left, lower=True)


def reflected(left: bool) -> Callable[..., Any]:
    """Apply reflectors."""
    return lambda a, t, c: lax.linalg.ormqr(0.1 * a, 0.1 * t, c, left=left)


LINALG = [
    Case("cholesky", lax.linalg.cholesky, (DEFINITE,), "(b0 1 1) -> (b0 1 1)"),
    Case("cholesky", lax.linalg.cholesky, (DEFINITE[0],), "(1 1) -> (1 1)"),
    Case("cholesky_update", lax.linalg.cholesky_update, (DEFINITE[0], f32(4)), "(1 1), (1) -> (1 1)"),
    Case("eig", lambda a: abs(lax.linalg.eig(a)[0]), (REGULAR,), "(b0 1 1) -> (b0 1), (b0 1 1), (b0 1 1)"),
    Case("eigh", lambda a: lax.linalg.eigh(a)[1], (DEFINITE,), "(b0 1 1) -> (b0 1 1), (b0 1)"),
    Case("hessenberg", lax.linalg.hessenberg, (REGULAR,), "(b0 1 1) -> (b0 1 1), (b0 1)"),
    Case(
        "householder_product",
        lambda a, t: lax.linalg.householder_product(0.1 * a, 0.1 * t),
        (REGULAR, f32(6, 4)),
        "(b0 1 1), (b0 1) -> (b0 1 1)",
    ),
    Case("lu", lax.linalg.lu, (REGULAR,), "(b0 1 1) -> (b0 1 1), (b0 1), (b0 1)"),
    Case(
        "lu_pivots_to_permutation",
        lambda p: lax.linalg.lu_pivots_to_permutation(p, 6),
        (i32([[3, 2, 5]] * 6),),
        "(b0 1) -> (b0 1)",
    ),
    Case(
        "ormqr", reflected(True), (REGULAR, f32(6, 4), f32(6, 4, 3)), "(b0 1 1), (b0 1), (b0 1 c) -> (b0 1 c)"
    ),
    Case(
        "ormqr",
        reflected(False),
        (REGULAR, f32(6, 4), f32(6, 3, 4)),
        "(b0 1 1), (b0 1), (b0 c 1) -> (b0 c 1)",
    ),
    Case(
        "qr",
        lambda a: lax.linalg.qr(a, full_matrices=False),
        (REGULAR.reshape(2, 3, 4, 4),),
        "(b0 b1 1 1) -> (b0 b1 1 1), (b0 b1 1 1)",
    ),
    Case("schur", lax.linalg.schur, (DEFINITE,), "(b0 1 1) -> (b0 1 1), (b0 1 1)"),
    Case("svd", lambda a: lax.linalg.svd(a, compute_uv=False), (REGULAR[..., :3],), "(b0 1 1) -> (b0 1)"),
    Case(
        "symmetric_product",
        lambda a, c: lax.linalg.symmetric_product(a, c, alpha=2.0, beta=3.0),
        (f32(6, 4, 5), f32(6, 4, 4)),
        "(b0 1 k), (b0 1 1) -> (b0 1 1) {reduce: k}",
    ),
    Case("triangular_solve", triangular(True), (REGULAR, f32(6, 4, 3)), "(b0 1 1), (b0 1 c) -> (b0 1 c)"),
    Case("triangular_solve", triangular(False), (REGULAR, f32(6, 3, 4)), "(b0 1 1), (b0 c 1) -> (b0 c 1)"),
    Case("triangular_solve", triangular(True), (REGULAR[0], f32(4, 8)), "(1 1), (1 c) -> (1 c)"),
    Case("tridiagonal", lax.linalg.tridiagonal, (DEFINITE,), "(b0 1 1) -> (b0 1 1), (b0 1), (b0 1), (b0 1)"),
    Case(
        "tridiagonal_solve",
        lax.linalg.tridiagonal_solve,
        BANDS,
        "(b0 1), (b0 1), (b0 1), (b0 1 c) -> (b0 1 c)",
    ),
]

# Ragged products --------------------------------------------------------------------------------------

SIZES = i32([3, 0, 5, 2, 1])  # of 13 rows, two are in no group


def ragged(numbers: lax.RaggedDotDimensionNumbers) -> Callable[..., Any]:
    """Ragged product of any mode."""
    return lambda x, w, sizes: lax.ragged_dot_general(x, w, sizes, numbers)


def numbers(contract: Any, batch: Any, row: int) -> lax.RaggedDotDimensionNumbers:
    """Dims of a ragged product without groups in the right operand."""
    return lax.RaggedDotDimensionNumbers((contract, batch), [row], [])


RAGGED = [
    Case(
        "ragged_dot_general",
        lax.ragged_dot,
        (f32(13, 6), f32(5, 6, 4, seed=1), SIZES),
        "(r k0), (g k0 n2), (1) -> (r n2) {reduce: k0 g}",
    ),
    Case(
        "ragged_dot_general",
        lax.ragged_dot,
        (f32(13, 6), f32(5, 6, 4, seed=1), SIZES + 3),
        "(r k0), (g k0 n2), (1) -> (r n2) {reduce: k0 g}",
    ),
    Case(
        "ragged_dot_general",
        ragged(numbers(((0,), (0,)), ((), ()), 0)),
        (f32(13, 6), f32(13, 4, seed=1), SIZES),
        "(r m1), (r n1), (1) -> (g m1 n1) {reduce: r}",
    ),
    Case(
        "ragged_dot_general",
        ragged(numbers(((2,), (1,)), ((0,), (0,)), 0)),
        (f32(8, 3, 4), f32(8, 4, 2, seed=1), i32([3, 5])),
        "(r m1 k0), (r k0 n2), (1) -> (r m1 n2) {reduce: k0}",
    ),
    Case(
        "ragged_dot_general",
        jax.vmap(lax.ragged_dot),
        (f32(2, 13, 4), f32(2, 5, 4, 4), jnp.stack([SIZES, SIZES[::-1]])),
        "(b0 r k0), (b0 1 k0 n3), (b0 1) -> (b0 r n3) {reduce: k0}",
    ),
    Case(
        "ragged_dot_general",
        jax.grad(lambda x, w, s: jnp.square(lax.ragged_dot(x, w, s)).sum(), (0, 1)),
        (f32(13, 6), f32(5, 6, 4, seed=1), SIZES),
        "(r k0), (g n1 k0), (1) -> (r n1) {reduce: k0 g}",
    ),
]

# Random draws -----------------------------------------------------------------------------------------

KEY = jax.random.key(0)
KEYS = jax.random.split(KEY, 8)
WORDS = jnp.arange(12, dtype=jnp.uint32).reshape(4, 3)

RANDOM = [
    Case("random_gamma", lambda k: jax.random.gamma(k, jnp.ones(4)), (KEY,), "(), (1) -> (1)"),
    Case("random_gamma", jax.vmap(jax.random.gamma), (KEYS, jnp.ones((8, 3))), "(b0), (b0 1) -> (b0 1)"),
    Case(
        "rng_bit_generator",
        lambda k: lax.rng_bit_generator(k, (8, 3)),
        (jnp.arange(4, dtype=jnp.uint32),),
        "(1) -> (1), (s0 s1)",
    ),
    Case(
        "threefry2x32",
        lambda a, b: threefry2x32_p.bind(a, a, b, b + 1),
        (WORDS, WORDS + 1),
        "(d0 d1), (d0 d1), (d0 d1), (d0 d1) -> (d0 d1), (d0 d1)",
    ),
]

# Reductions, scatters, and the rest -----------------------------------------------------------------------

ROWS = (f32(16, 8), i32([3, 3, 0, 15, 7]), f32(5, 8, seed=1))


def scatter_sub(x: Any, rows: Any, updates: Any) -> Any:
    """Subtract rows."""
    return x.at[rows].subtract(updates)


REST = [
    Case(
        "scatter-max",
        lambda x, i, u: x.at[i].max(u),
        ROWS,
        "(o0 o1), (r0 1), (r0 o1) -> (o0 o1) {reduce: r0=max}",
    ),
    Case(
        "scatter-min",
        lambda x, i, u: x.astype(jnp.int32).at[i].min(u.astype(jnp.int32)),
        ROWS,
        "(o0 o1), (r0 1), (r0 o1) -> (o0 o1) {reduce: r0=min}",
    ),
    Case("scatter-sub", scatter_sub, ROWS, "(o0 o1), (r0 1), (r0 o1) -> (o0 o1) {reduce: r0}"),
    Case("scatter-mul", lambda x, i, u: x.at[i].mul(u), ROWS, "(o0 o1), (1 1), (1 o1) -> (o0 o1)"),
    Case(
        "reduce",
        lambda x: lax.reduce(x, 0.0, lambda a, b: jnp.maximum(a, b) + 0.0, (1,)),
        (f32(5, 3, 4),),
        "(d0 d1 d2), () -> (d0 d2) {exchange: d1=merge}",
    ),
    Case("reduce_precision", lambda x: lax.reduce_precision(x / 3, 8, 7), (f32(5, 4),), "(d0 d1) -> (d0 d1)"),
    Case("clamp", lambda x: lax.clamp(-1.0, x, 2.0), (f32(5, 4),), "(), (d0 d1), () -> (d0 d1)"),
    Case("empty", lambda x: lax.empty((8, 4), jnp.float32) * 0 + x, (f32(8, 4),), " -> (d0 d1)"),
    Case(
        "empty2",
        lambda x: empty2_p.bind(dtype=np.dtype("float32"), memory_space=jax.memory.Space.Device) * 0 + x,
        (f32(8),),
        " -> ()",
    ),
    Case(
        "platform_index",
        lambda x: lax.platform_dependent(x, cpu=lambda x: x + 1, tpu=lambda x: x + 2, default=jnp.sin),
        (f32(8),),
        " -> ()",
    ),
    Case(
        "bitcast_convert_type",
        lambda x: lax.bitcast_convert_type(x, jnp.uint8),
        (f32(6, 5),),
        "(d0 d1) -> (d0 d1 1)",
    ),
    Case(
        "stack",
        lambda x: lax.stack([x, 2 * x, -x], 1),
        (f32(6, 5),),
        "(d0 d2), (d0 d2), (d0 d2) -> (d0 d1 d2) {linear: 0 1 2}",
    ),
    Case(
        "unstack",
        lambda x: lax.unstack(x, 1),
        (f32(6, 3, 5),),
        "(d0 d1 d2) -> (d0 d2), (d0 d2), (d0 d2) {reduce: d1; linear: 0}",
    ),
    Case(
        "tile",
        lambda x: lax.tile(x, (1, 2)),
        (f32(6, 5),),
        "(d0 d1) -> (d0 d1) {exchange: d1=halo; linear: 0}",
    ),
    Case(
        "device_put",
        lambda x: jax.device_put(jax.device_put(x, jax.memory.Space.Device) * 2, jax.memory.Space.Device),
        (f32(8, 5),),
        "(a0d0 a0d1) -> (a0d0 a0d1)",
    ),
]

# Never split ------------------------------------------------------------------------------------------

VECTOR = jax.ShapeDtypeStruct((8,), jnp.float32)


@custom_partitioning
def _doubled(x: Any) -> Any:
    return 2 * x


_doubled.def_partition(
    partition=lambda mesh, args, result: (mesh, lambda x: 2 * x, result.sharding, (args[0].sharding,)),
    infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
    sharding_rule="i -> i",
)


def _double_kernel(x: Any, out: Any) -> None:
    out[...] = 2 * x[...]


def _referring(x: Any) -> Any:
    total = jax.new_ref(x)
    total[0] = 1.0
    waves = jnp.cos(x)  # before all of them

    def add(i: Any, _: None) -> None:
        total[i] += 2.0

    lax.fori_loop(0, 4, add, None)
    peak = 3 * total[1]
    total[2] = peak
    return total[...] + waves, jnp.sin(peak)


def _printing(x: Any) -> Any:
    jax.debug.print("{}", x)
    return x + 1


WHOLE = [
    Case("pure_callback", lambda x: jax.pure_callback(np.square, VECTOR, x) + 1, (f32(8),), "(1) -> (1)"),
    Case("io_callback", lambda x: io_callback(np.square, VECTOR, x, ordered=True), (f32(8),), "(1) -> (1)"),
    Case("debug_print", _printing, (f32(8),), "(1) -> "),
    Case(
        "pallas_call",
        lambda x: pl.pallas_call(_double_kernel, out_shape=VECTOR, interpret=True)(x),
        (f32(8),),
        "(1) -> (1)",
    ),
    Case("custom_partitioning", lambda x: _doubled(x) + 1, (f32(8),), "(1) -> (1)"),
    Case("references", _referring, (f32(8),), "(1) -> (), (1)"),
]

CASES = LINALG + RAGGED + RANDOM + REST + WHOLE
