"""Random programs: a few ops of every family, composed, with concrete arguments and known results.

A program is a list of steps over a pool of arrays. Each step is run once while the program is made, so the
expected results are known without a second run. Values are *exact* while they are small integers: whatever the
order of summation, they come out bit for bit. Only exact values go into ops that jump (argmax, sort, compare).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.helpers.moves import MOVES
from tests.helpers.steps import STEPS

SIZES = (1, 2, 3, 4, 5, 7, 8, 8, 9, 16)
LIMIT = 2**16


@dataclass
class Pool:
    """Arrays made so far, and how."""

    rng: Any
    values: list[Any] = field(default_factory=list)
    exact: list[bool] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    inputs: list[Any] = field(default_factory=list)
    steps: list[tuple[str, Callable[..., Any], tuple[int, ...], int]] = field(default_factory=list)

    def add_input(self, array: Any, exact: bool = True) -> int:
        """Add an argument of the program; now and then a constant that it closes over."""
        if self.rng.random() < 0.15 and not jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            self.steps.append(("constant", lambda: array, (), 1))
        else:
            self.inputs.append((len(self.values), array))
        self.values.append(array)
        self.exact.append(exact)
        return len(self.values) - 1

    def ints(self, shape: Sequence[int], low: int = -3, high: int = 4, dtype: Any = jnp.float32) -> int:
        """Add an input of small integers."""
        return self.add_input(jnp.asarray(self.rng.integers(low, high, tuple(shape)), dtype))

    def shape(self, rank: int | None = None, most: int = 512) -> tuple[int, ...]:
        """Draw a shape."""
        while True:
            rank_ = int(self.rng.integers(0, 4)) if rank is None else rank
            shape = tuple(int(self.rng.choice(SIZES)) for _ in range(rank_))
            if math.prod(shape) <= most:
                return shape

    def pick(self, *, rank: int | None = None, least: int = 0, exact: bool = False) -> int:
        """Draw a floating-point value of the pool, or make one."""
        found = [
            i
            for i, v in enumerate(self.values)
            if v.dtype == jnp.float32
            and (rank is None or v.ndim == rank)
            and v.ndim >= least
            and v.size <= 1024
            and (self.exact[i] or not exact)
        ]
        if found and self.rng.random() < 0.9:
            weights = np.arange(len(found), 0, -1.0)
            return int(self.rng.choice(found[::-1], p=weights / weights.sum()))
        shape = self.shape(rank if rank is not None else max(least, int(self.rng.integers(1, 4))))
        return self.ints(shape)

    def step(
        self, name: str, fn: Callable[..., Any], operands: Sequence[int], *, exact: bool | None = True
    ) -> None:
        """Run a step and add its results."""
        arrays = [self.values[i] for i in operands]
        results = jax.jit(lambda *a: _bounded(fn(*a)))(*arrays)
        self.used |= set(operands)
        whole = bool(exact) and all(self.exact[i] for i in operands)
        self.steps.append((name, lambda *a: _bounded(fn(*a)), tuple(operands), len(results)))
        for value in results:
            self.values.append(value)
            self.exact.append(whole and _is_exact(value))

    def axis(self, i: int) -> int:
        """Draw a dim of a value."""
        return int(self.rng.integers(0, self.values[i].ndim))


def _bounded(results: Any) -> tuple[Any, ...]:
    """Keep what a step makes in a range where float32 holds every integer, and squashes nothing else."""
    flat = jax.tree.leaves(results)
    return tuple(jnp.clip(x, -LIMIT, LIMIT) if x.dtype == jnp.float32 and x.size > 64 else x for x in flat)


def _is_exact(value: Any) -> bool:
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return True
    array = np.asarray(value)
    if array.dtype.kind in "biu":
        return True
    array = array.astype(np.float64)
    return bool(np.isfinite(array).all() and (array == np.round(array)).all() and (abs(array) <= LIMIT).all())


@dataclass(frozen=True, kw_only=True)
class RandomProgram:
    """A function, its arguments and what it returns."""

    fn: Callable[..., tuple[Any, ...]]
    args: tuple[Any, ...]
    expected: tuple[Any, ...]
    names: tuple[str, ...]


def random_program(seed: Any, families: Sequence[str] | None = None, most: int = 8) -> RandomProgram:
    """Make a program from some families of steps, by a seed or a source of random numbers."""
    rng = np.random.default_rng(seed) if isinstance(seed, int) else seed
    pool = Pool(rng)
    pool.ints(pool.shape(int(rng.integers(1, 4))))
    names = list(families or FAMILIES)
    for _ in range(int(rng.integers(1, most + 1))):
        FAMILIES[str(rng.choice(names))](pool)
    made = [i for i in range(len(pool.values)) if i not in {j for j, _ in pool.inputs}]
    last = [i for i in made if i not in pool.used] or made[-1:] or [0]
    more = [i for i in made if i in pool.used and rng.random() < 0.2]
    outputs = (last + more)[:8]
    inputs, steps = list(pool.inputs), list(pool.steps)

    def fn(*args: Any) -> tuple[Any, ...]:
        given = {i: a for (i, _), a in zip(inputs, args, strict=True)}
        values: list[Any] = []
        for _, run, operands, count in steps:
            while len(values) in given:
                values.append(given[len(values)])
            results = run(*(values[i] for i in operands))
            values.extend([results] if count == 1 and not isinstance(results, tuple) else results)
        while len(values) in given:
            values.append(given[len(values)])
        return tuple(values[i] for i in outputs)

    return RandomProgram(
        fn=fn,
        args=tuple(a for _, a in inputs),
        expected=tuple(pool.values[i] for i in outputs),
        names=tuple(name for name, *_ in steps),
    )


# Families of steps -----------------------------------------------------------------------------------


def _unary(pool: Pool) -> None:
    exact = [jnp.negative, jnp.abs, jnp.sign, jnp.square, lambda x: 2 * x + 1, lambda x: 3.0 - x, jax.nn.relu]
    smooth = [
        jnp.tanh,
        jnp.sin,
        jax.nn.sigmoid,
        lambda x: jnp.exp(jnp.tanh(x)),
        lambda x: jnp.log1p(jnp.abs(x)),
        lambda x: lax.rsqrt(1 + x * x),
        jax.nn.gelu,
        lambda x: x / (1 + x * x),
    ]
    i = pool.pick()
    if pool.rng.random() < 0.6:
        pool.step("unary", exact[int(pool.rng.integers(len(exact)))], [i])
    else:
        pool.step("smooth", smooth[int(pool.rng.integers(len(smooth)))], [i], exact=False)


def _binary(pool: Pool) -> None:
    ops = [jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, jnp.minimum, lambda x, y: x + y + x]
    op = ops[int(pool.rng.integers(len(ops)))]
    i = pool.pick()
    shape = pool.values[i].shape
    matching = [
        j
        for j, v in enumerate(pool.values)
        if v.dtype == jnp.float32 and v.size <= 1024 and _broadcasts(v.shape, shape)
    ]
    if len(matching) > 1 and pool.rng.random() < 0.7:
        j = int(pool.rng.choice(matching))
    else:
        cut = int(pool.rng.integers(0, len(shape) + 1))
        j = pool.ints(tuple(n if pool.rng.random() < 0.7 else 1 for n in shape[cut:]))
    pool.step("binary", op, [i, j])


def _broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    try:
        return math.prod(np.broadcast_shapes(tuple(a), tuple(b))) <= 1024
    except ValueError:
        return False


def _select(pool: Pool) -> None:
    i = pool.pick(exact=True)
    if not pool.exact[i]:
        return
    pick = int(pool.rng.integers(4))
    if pick == 0:
        pool.step("select", lambda x: jnp.where(x > 0, x, -2 * x), [i])
    elif pick == 1:
        pool.step("clip", lambda x: jnp.clip(x, -1, 2), [i])
    elif pick == 2:
        pool.step("cast", lambda x: jnp.remainder(x.astype(jnp.int32), 7).astype(jnp.float32), [i])
    else:
        pool.step("compare", lambda x: (x[None] > 0).astype(jnp.bfloat16).astype(jnp.float32), [i])


def _dot(pool: Pool) -> None:
    i = pool.pick(least=1)
    x = pool.values[i]
    roles = pool.rng.integers(0, 3, x.ndim)
    batch = [d for d in range(x.ndim) if roles[d] == 0]
    contract = [d for d in range(x.ndim) if roles[d] == 1]
    free = [("n", int(pool.rng.choice(SIZES))) for _ in range(int(pool.rng.integers(0, 3)))]
    dims: list[Any] = [("b", d) for d in batch] + [("k", d) for d in contract] + free
    pool.rng.shuffle(dims)
    shape = tuple(int(x.shape[int(d)]) if r in ("b", "k") else int(d) for r, d in dims)
    rows = [d for d in range(x.ndim) if roles[d] == 2]
    if (
        math.prod(shape) > 1024
        or math.prod(x.shape[d] for d in batch + rows) * math.prod(int(d) for r, d in dims if r == "n") > 2048
    ):
        return
    like = [k for k, v in enumerate(pool.values) if v.shape == shape and v.dtype == jnp.float32]
    j = int(pool.rng.choice(like)) if like and pool.rng.random() < 0.5 else pool.ints(shape)
    where = {(str(r), int(d)): p for p, (r, d) in enumerate(dims) if r in ("b", "k")}
    numbers = (
        (tuple(contract), tuple(where["k", d] for d in contract)),
        (tuple(batch), tuple(where["b", d] for d in batch)),
    )
    pool.step("dot", lambda a, b: lax.dot_general(a, b, numbers), [i, j])


def _einsum(pool: Pool) -> None:
    text, shapes = [
        ("bqhd,bkhd->bhqk", ((2, 4, 2, 4), (2, 4, 2, 4))),
        ("bsd,dhk->bshk", ((2, 4, 8), (8, 4, 2))),
        ("ij,jk->ki", ((8, 4), (4, 16))),
        ("ij,j->i", ((8, 16), (16,))),
        ("ii,ij->j", ((8, 8), (8, 4))),
    ][int(pool.rng.integers(5))]
    operands = [pool.ints(s) for s in shapes]
    pool.step("einsum", lambda *a: jnp.einsum(text, *a), operands)


def _reduce(pool: Pool) -> None:
    i = pool.pick(least=1)
    ndim = pool.values[i].ndim
    axes = tuple(int(d) for d in range(ndim) if pool.rng.random() < 0.6) or (pool.axis(i),)
    keep = bool(pool.rng.random() < 0.3)
    pick = int(pool.rng.integers(8))
    if pick <= 1:
        pool.step("sum", lambda x: x.sum(axes, keepdims=keep), [i])
    elif pick == 2:
        pool.step("max", lambda x: x.max(axes, keepdims=keep), [i])
    elif pick == 3:
        pool.step("min", lambda x: x.min(axes, keepdims=keep), [i])
    elif pick == 4:
        pool.step("mean", lambda x: x - x.mean(axes, keepdims=True), [i], exact=False)
    elif pick == 5:
        pool.step("softmax", lambda x: jax.nn.softmax(jnp.tanh(x), axis=axes), [i], exact=False)
    elif pick == 6:
        pool.step("logsumexp", lambda x: jax.nn.logsumexp(jnp.tanh(x), axis=axes), [i], exact=False)
    elif pool.exact[i]:
        pool.step(
            "logic",
            lambda x: ((x > 0).all(axes), (x > 1).any(axes), jnp.sign(x).prod(axes), (x > 0).sum(axes)),
            [i],
        )


_DTYPES = (jnp.int32, jnp.bfloat16, jnp.bool_, jnp.int8, jnp.uint32, jnp.float16)


def _dtypes(pool: Pool) -> None:
    """One op on another dtype; small integers are exact in all of them."""
    rank = int(pool.rng.integers(1, 5))
    i = pool.ints(pool.shape(rank, 256))
    dtype = _DTYPES[int(pool.rng.integers(len(_DTYPES)))]
    axis, n = pool.axis(i), pool.values[i].shape[-1]
    start = int(pool.rng.integers(n))
    ops: list[Callable[[Any], Any]] = [
        lambda x: (x.max(axis), x.min(axis)),
        lambda x: jnp.sort(x, axis),
        lambda x: jnp.argmax(x, axis),
        lambda x: jnp.concatenate([x, x[..., start:]], -1),
        lambda x: jnp.roll(x, start, -1),
        lambda x: jnp.pad(x, [(1, 0)] * x.ndim),
        lambda x: x[..., start:].reshape(-1),
        lambda x: jnp.where(x > 0, x, jnp.zeros((), x.dtype)),
        lambda x: jnp.take(x, jnp.arange(2 * n) % n, -1),
        lambda x: x.at[..., start].set(jnp.ones((), x.dtype)),
        lambda x: jnp.flip(x, axis),
        lambda x: lax.top_k(x, 1),
    ]
    if dtype != jnp.bool_:
        ops += [
            lambda x: x.sum(axis),
            lambda x: jnp.cumsum(x, axis),
            lambda x: x + x * x,
            lambda x: jnp.einsum("...i,...i->...", x, x),
            lambda x: jnp.clip(x, 0, 2).prod(axis),
            lambda x: lax.cummax(x, axis),
        ]
    op = ops[int(pool.rng.integers(len(ops)))]
    exact = bool(jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_)

    def run(x: Any) -> Any:
        clean = jnp.abs(x) if dtype == jnp.uint32 else x
        return op(clean.astype(dtype))

    pool.step(f"{jnp.dtype(dtype).name} {len(ops)}", run, [i], exact=exact)


def _argmax(pool: Pool) -> None:
    i = pool.pick(least=1, exact=True)
    axis = pool.axis(i)
    if pool.exact[i]:
        pool.step("argmax", lambda x: (jnp.argmax(x, axis), jnp.argmin(x, axis)), [i])


def _reshape(pool: Pool) -> None:
    i = pool.pick(least=1)
    size = pool.values[i].size
    shape: list[int] = []
    rest = size
    for _ in range(int(pool.rng.integers(0, 4))):
        divisors = [d for d in range(1, rest + 1) if rest % d == 0]
        shape.append(int(pool.rng.choice(divisors)))
        rest //= shape[-1]
    shape.append(rest)
    pool.step("reshape", lambda x: x.reshape(shape), [i])


def _move(pool: Pool) -> None:
    i = pool.pick(least=1)
    x = pool.values[i]
    axis = pool.axis(i)
    order = tuple(int(p) for p in pool.rng.permutation(x.ndim))
    pick = int(pool.rng.integers(9))
    if pick == 0:
        pool.step("transpose", lambda x: x.transpose(order), [i])
    elif pick == 1:
        pool.step("squeeze", lambda x: jnp.squeeze(x[:, None], 1), [i])
    elif pick == 2:
        pool.step("expand", lambda x: jnp.expand_dims(x, axis), [i])
    elif pick == 3:
        pool.step("flip", lambda x: jnp.flip(x, axis), [i])
    elif pick == 4:
        pool.step("tile", lambda x: jnp.tile(x, [2] + [1] * (x.ndim - 1)), [i])
    elif pick == 5:
        pool.step("stack", lambda x: jnp.stack([x, 2 * x, -x, x], axis), [i])
    elif pick == 6:
        pool.step("roll", lambda x: jnp.roll(x, 1, axis), [i])
    elif pick == 7:
        pool.step("broadcast", lambda x: jnp.broadcast_to(x, (4, *x.shape)), [i])
    else:
        pool.step("unstack", lambda x: [row * k for k, row in enumerate(jnp.moveaxis(x, axis, 0)[:3])], [i])


def _cut(pool: Pool) -> None:
    i = pool.pick(least=1)
    x = pool.values[i]
    axis = pool.axis(i)
    n = x.shape[axis]
    pick = int(pool.rng.integers(6))
    if pick == 0:
        start = int(pool.rng.integers(0, n))
        stride = int(pool.rng.integers(1, 3))
        pool.step("slice", lambda x: lax.slice_in_dim(x, start, n, stride, axis), [i])
    elif pick == 1:
        low, high = int(pool.rng.integers(-1, 3)) if n > 1 else 1, int(pool.rng.integers(0, 3))
        config = [
            (low, high, int(pool.rng.integers(0, 2))) if d == axis else (0, 0, 0) for d in range(x.ndim)
        ]
        pool.step("pad", lambda x: lax.pad(x, jnp.float32(7), config), [i])
    elif pick == 2 and n % 2 == 0:
        pool.step("split", lambda x: jnp.split(x, 2, axis), [i])
    elif pick == 3:
        j = pool.ints(tuple(int(pool.rng.choice(SIZES)) if d == axis else m for d, m in enumerate(x.shape)))
        pool.step("concatenate", lambda a, b: jnp.concatenate([a, b, a], axis), [i, j])
    elif pick == 4:
        at = pool.ints((), -2, n + 2, jnp.int32)
        size = int(pool.rng.integers(1, n + 1))
        pool.step("dynamic_slice", lambda x, s: lax.dynamic_slice_in_dim(x, s, size, axis), [i, at])
    else:
        at = pool.ints((), -2, n + 2, jnp.int32)
        size = int(pool.rng.integers(1, n + 1))
        j = pool.ints(tuple(size if d == axis else m for d, m in enumerate(x.shape)))
        pool.step(
            "dynamic_update_slice", lambda x, u, s: lax.dynamic_update_slice_in_dim(x, u, s, axis), [i, j, at]
        )


def _gather(pool: Pool) -> None:
    i = pool.pick(least=1)
    x = pool.values[i]
    axis = pool.axis(i)
    n = x.shape[axis]
    mode = str(pool.rng.choice(["fill", "clip", "wrap", "fill", "promise_in_bounds"]))
    low, high = (0, n) if mode == "promise_in_bounds" else (-n - 2, n + 3)

    def taken(x: Any, k: Any) -> Any:
        if mode == "promise_in_bounds":
            return jnp.moveaxis(x, axis, 0).at[k].get(mode=mode)
        return jnp.take(x, k, axis, mode=mode)

    pick = int(pool.rng.integers(7))
    rows = pool.shape(int(pool.rng.integers(0, 3)), 32)
    dtype = [jnp.int32, jnp.uint32, jnp.int8][int(pool.rng.integers(3))]
    if dtype == jnp.uint32:
        low = 0
    if pick == 0:
        j = pool.ints(rows, low, high, dtype)
        pool.step("take", lambda x, k: jnp.nan_to_num(taken(x, k)), [i, j])
    elif pick == 1:
        j = pool.ints(rows, low, high, jnp.int32)
        pool.step("take_nan", taken, [i, j])
    elif pick == 2:
        shape = tuple(int(pool.rng.choice(SIZES)) if d == axis else m for d, m in enumerate(x.shape))
        j = pool.ints(shape, 0, n, jnp.int32)
        pool.step("take_along_axis", lambda x, k: jnp.take_along_axis(x, k, axis), [i, j])
    elif pick == 3 and x.ndim > 1:
        j, k = pool.ints(rows, -x.shape[0], x.shape[0], jnp.int32), pool.ints(rows, 0, x.shape[1], jnp.int32)
        pool.step("index_two", lambda x, j, k: x[j, k], [i, j, k])
    elif pick == 4 and x.ndim > 1:
        j = pool.ints((x.shape[0], int(pool.rng.choice(SIZES))), 0, x.shape[1], jnp.int32)
        pool.step("index_batched", lambda x, k: jax.vmap(lambda a, b: a[b])(x, k), [i, j])
    elif pick == 5 and x.ndim > 1:
        j = pool.ints(rows, low, high, jnp.int32)
        pool.step("take_int", lambda x, k: taken(x.astype(jnp.int32), k), [i, j])
    elif pool.exact[i]:
        j = pool.ints(rows, low, high, jnp.int32)
        pool.step("take_bool", lambda x, k: taken(x > 0, k), [i, j])


def _scatter(pool: Pool) -> None:
    i = pool.pick(least=1)
    x = pool.values[i]
    n = x.shape[0]
    mode = str(pool.rng.choice(["drop", "clip", "promise_in_bounds"]))
    low, high = (0, n) if mode == "promise_in_bounds" else (-n - 2, n + 3)
    rows = int(pool.rng.choice([1, 2, 4, 8, 16]))
    pick = int(pool.rng.integers(7))
    if pick == 0:
        j, u = pool.ints((rows,), low, high, jnp.int32), pool.ints((rows, *x.shape[1:]))
        pool.step("scatter_add", lambda x, k, u: x.at[k].add(u, mode=mode), [i, j, u])
    elif pick == 1:
        order = pool.add_input(jnp.asarray(pool.rng.permutation(n)[: max(1, n // 2)], jnp.int32))
        u = pool.ints((max(1, n // 2), *x.shape[1:]))
        pool.step("scatter_set", lambda x, k, u: x.at[k].set(u, unique_indices=True), [i, order, u])
    elif pick == 2:
        j, u = pool.ints((rows,), low, high, jnp.int32), pool.ints((rows, *x.shape[1:]))
        pool.step(
            "scatter_max", lambda x, k, u: (x.at[k].max(u, mode=mode), x.at[k].min(u, mode=mode)), [i, j, u]
        )
    elif pick == 3:
        j = pool.ints((n,), 0, 5, jnp.int32)
        pool.step("segment_sum", lambda x, k: jax.ops.segment_sum(x, k, num_segments=4), [i, j])
    elif pick == 4 and x.ndim > 1:
        j = pool.ints((n, rows), 0, x.shape[1], jnp.int32)
        u = pool.ints((n, rows, *x.shape[2:]))
        pool.step("scatter_batched", jax.vmap(lambda a, k, u: a.at[k].add(u)), [i, j, u])
    elif pick == 5 and x.ndim > 1:
        j = pool.ints((rows,), 0, x.shape[0], jnp.int32)
        k = pool.ints((rows,), 0, x.shape[1], jnp.int32)
        u = pool.ints((rows, *x.shape[2:]))
        pool.step("scatter_two", lambda x, j, k, u: x.at[j, k].add(u), [i, j, k, u])
    else:
        j = pool.ints((rows,), 0, n, jnp.int32)
        pool.step("gather_grad", jax.grad(lambda x, k: (jnp.take(x, k, 0) * 2).sum()), [i, j])


def _window(pool: Pool) -> None:
    channels, out = int(pool.rng.choice([2, 4, 8])), int(pool.rng.choice([4, 8]))
    groups = int(pool.rng.choice([1, 1, 2]))
    sizes = int(pool.rng.choice([1, 2, 4])), int(pool.rng.choice([4, 5, 8])), int(pool.rng.choice([6, 8, 9]))
    i = pool.ints((*sizes, channels))
    taps = int(pool.rng.choice([1, 3])), int(pool.rng.choice([1, 2, 3]))
    kernel = pool.ints((*taps, channels // groups, out), -1, 2)
    strides = int(pool.rng.choice([1, 2])), int(pool.rng.choice([1, 1, 3]))
    padding = str(pool.rng.choice(["SAME", "VALID"]))

    def conv(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(
            x,
            w,
            strides,
            padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    def pooled(x: Any) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, *taps, 1), (1, *strides, 1), padding)

    def averaged(x: Any) -> Any:
        return lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 1, 2, 1), "SAME")

    pick = int(pool.rng.integers(5))
    if pick == 0:
        pool.step("conv", conv, [i, kernel])
    elif pick == 1:
        pool.step("conv_grad", jax.grad(lambda x, w: jnp.square(conv(x, w)).sum(), (0, 1)), [i, kernel])
    elif pick == 2:
        pool.step("pool", lambda x: (pooled(x), averaged(x)), [i])
    elif pick == 3:
        pool.step("pool_grad", jax.grad(lambda x: (3 * pooled(x)).sum() + jnp.square(averaged(x)).sum()), [i])
    else:
        pool.step("cover", lambda x: lax.reduce_window(x, -jnp.inf, lax.max, x.shape, (1,) * 4, "VALID"), [i])


def _along(pool: Pool) -> None:
    i = pool.pick(least=1, exact=True)
    axis = pool.axis(i)
    pick = int(pool.rng.integers(7))
    if pick == 0:
        pool.step("cumsum", lambda x: lax.cumsum(x, axis, reverse=bool(axis)), [i])
    elif pick == 1:
        pool.step("cummax", lambda x: (lax.cummax(x, axis), lax.cumprod(jnp.sign(x), axis)), [i])
    elif pick == 2:
        pool.step("cumlogsumexp", lambda x: lax.cumlogsumexp(jnp.tanh(x), axis), [i], exact=False)
    elif not pool.exact[i]:
        return
    elif pick == 3:
        pool.step("sort", lambda x: jnp.sort(x, axis), [i])
    elif pick == 4:
        pool.step("argsort", lambda x: jnp.argsort(x, axis), [i])
    elif pick == 5:
        pool.step("top_k", lambda x: lax.top_k(x, min(2, x.shape[-1])), [i])
    else:
        pool.step("sort_pairs", lambda x: lax.sort((x, 2 * x), dimension=axis, num_keys=1), [i])


def _iota(pool: Pool) -> None:
    i = pool.pick(least=2)
    pick = int(pool.rng.integers(4))
    if pick == 0:
        pool.step("tril", jnp.tril, [i])
    elif pick == 1:
        pool.step(
            "positions",
            lambda x: x * jnp.arange(x.shape[0], dtype=x.dtype)[(...,) + (None,) * (x.ndim - 1)],
            [i],
        )
    elif pick == 2:
        pool.step("one_hot", lambda x: jax.nn.one_hot(jnp.arange(x.shape[-1]) % 4, 8) + x.sum(), [i])
    else:
        pool.step(
            "causal",
            lambda x: jnp.where(
                lax.broadcasted_iota(jnp.int32, x.shape, 0) >= lax.broadcasted_iota(jnp.int32, x.shape, 1),
                x,
                -9.0,
            ).sum(-1),
            [i],
        )


def _random(pool: Pool) -> None:
    shape = pool.shape(int(pool.rng.integers(1, 4)))
    impl = str(pool.rng.choice(["threefry2x32", "threefry2x32", "rbg"]))
    pick = int(pool.rng.integers(8))
    if pick == 7:
        seed = pool.ints((), 0, 9, jnp.uint32)
        pool.step("seed", lambda s: jax.random.uniform(jax.random.key(s), shape), [seed], exact=False)
        return
    key = pool.add_input(jax.random.key(int(pool.rng.integers(100)), impl=impl))
    if pick == 0:
        pool.step("bits", lambda k: (jax.random.bits(k, shape), jax.random.bits(k, shape, jnp.uint16)), [key])
    elif pick == 1:
        pool.step("normal", lambda k: jax.random.normal(k, shape), [key], exact=False)
    elif pick == 2:
        i = pool.pick(least=1)
        pool.step("dropout", lambda k, x: x * jax.random.bernoulli(k, 0.5, x.shape), [key, i])
    elif pick == 3:
        pool.step("randint", lambda k: jax.random.randint(k, shape, 0, 50), [key])
    elif pick == 4:
        pool.step(
            "keys",
            lambda k: jax.vmap(lambda k: jax.random.normal(jax.random.fold_in(k, 3), (4,)))(
                jax.random.split(k, 8)
            ),
            [key],
            exact=False,
        )
    elif pick == 5:
        pool.step("split", lambda k: jax.random.key_data(jax.random.split(k, 4)), [key])
    else:
        pool.step("permutation", lambda k: jax.random.permutation(k, 8), [key])


def _loop(pool: Pool) -> None:
    i = pool.pick(least=1)
    x = pool.values[i]
    shape = x.shape[1:]
    pick = int(pool.rng.integers(7))
    if pick == 0:

        def scan(x: Any, w: Any) -> Any:
            def body(c: Any, row: Any) -> Any:
                c = jnp.clip(c * w + row, -4, 4)
                return c, (c + 1, row.sum())

            return lax.scan(body, jnp.zeros(shape), x, reverse=bool(x.ndim % 2))

        pool.step("scan", scan, [i, pool.ints(shape)])
    elif pick == 1:
        w = pool.ints((3, 8, 8), -1, 2)
        h = pool.ints((int(pool.rng.choice([4, 8])), 8), -1, 2)

        def layers(h: Any, w: Any) -> Any:
            return lax.scan(lambda c, w: (jnp.clip(c @ w, -3, 3), None), h, w)[0]

        def loss(h: Any, w: Any) -> Any:
            body = jax.checkpoint(
                lambda c, w: (jnp.tanh(c @ w / 8), None)
            )  # unsaturated: 1 - tanh^2 keeps its digits
            return jnp.square(lax.scan(body, h, w)[0]).sum()

        if pool.rng.random() < 0.5:
            pool.step("layers", layers, [h, w])
        else:
            pool.step("layers_grad", jax.grad(loss, (0, 1)), [h, w], exact=False)
    elif pick == 2:
        n = pool.ints((), 1, 4, jnp.int32)
        pool.step(
            "fori", lambda x, n: lax.fori_loop(0, n, lambda k, c: jnp.clip(c + x * k, -9, 9), x), [i, n]
        )
    elif pick == 3 and pool.exact[i]:
        pool.step(
            "while",
            lambda x: lax.while_loop(
                lambda c: (c[0] < 3) & (c[1].sum() < 1e6), lambda c: (c[0] + 1, jnp.flip(c[1], 0) + 1), (0, x)
            ),
            [i],
        )
    elif pick == 4:
        flag = pool.ints((), 0, 2, jnp.int32)
        w = pool.ints(x.shape)
        pool.step(
            "cond",
            lambda x, f, w: lax.cond(
                f > 0, lambda x: (x + w, x.sum()), lambda x: (jnp.flip(x, 0), x.max()), x
            ),
            [i, flag, w],
        )
    elif pick == 5:
        flag = pool.ints((), -1, 4, jnp.int32)
        table = jnp.asarray(pool.rng.integers(-2, 3, x.shape), jnp.float32)
        pool.step(
            "switch",
            lambda x, f: lax.switch(f, [lambda x: x + table, lambda x: -x, lambda x: x * 0], x),
            [i, flag],
        )
    else:

        def nested(x: Any) -> Any:
            def outer(c: Any, row: Any) -> Any:
                inner = lax.scan(lambda d, _: (jnp.clip(d + row, -5, 5), d), c, None, length=2)
                return inner[0], inner[1]

            return lax.scan(outer, jnp.zeros(shape), x)

        pool.step("nested_scan", nested, [i])


def _model(pool: Pool) -> None:
    pick = int(pool.rng.integers(4))
    if pick == 0:
        x, w1, w2 = pool.ints((8, 4)), pool.ints((4, 16), -1, 2), pool.ints((16, 8), -1, 2)
        layer = lambda x, w: jax.nn.relu(x @ w)  # noqa: E731
        if pool.rng.random() < 0.5:
            layer = jax.checkpoint(layer)
        pool.step(
            "mlp_grad",
            jax.value_and_grad(lambda w1, w2, x: jnp.square(layer(layer(x, w1), w2)).mean(), (0, 1)),
            [w1, w2, x],
            exact=False,
        )
    elif pick == 1:
        table, tokens = pool.ints((16, 8), -2, 3), pool.ints((4, 4), 0, 16, jnp.int32)

        def loss(table: Any, tokens: Any) -> Any:
            logits = table[tokens] @ table.T * 0.1
            logp = jax.nn.log_softmax(logits)
            return -jnp.take_along_axis(logp, jnp.roll(tokens, -1, 1)[..., None], -1).mean()

        pool.step("lm_grad", jax.value_and_grad(loss), [table, tokens], exact=False)
    elif pick == 2:
        x, g = pool.ints((4, 2, 8)), pool.ints((8,), 1, 3)

        def norm(x: Any, g: Any) -> Any:
            return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1) * g

        pool.step("norm_grad", jax.grad(lambda x, g: jnp.tanh(norm(x, g)).sum(), (0, 1)), [x, g], exact=False)
    else:
        x, w = pool.ints((2, 4, 8), -1, 2), pool.ints((8, 3, 2, 4), -1, 2)

        def attend(x: Any, w: Any) -> Any:
            q, k, v = jnp.moveaxis(jnp.einsum("bsd,dthk->bsthk", x, w), 2, 0)
            scores = jnp.einsum("bqhk,bshk->bhqs", q, k) * 0.1
            mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
            return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(jnp.where(mask, scores, -1e9)), v).reshape(
                2, 4, 8
            )

        pool.step(
            "attention", jax.value_and_grad(lambda w, x: jnp.square(attend(x, w)).mean()), [w, x], exact=False
        )


FAMILIES: dict[str, Callable[[Pool], None]] = {
    "unary": _unary,
    "binary": _binary,
    "select": _select,
    "dot": _dot,
    "einsum": _einsum,
    "reduce": _reduce,
    "dtypes": _dtypes,
    "argmax": _argmax,
    "reshape": _reshape,
    "move": _move,
    "cut": _cut,
    "gather": _gather,
    "scatter": _scatter,
    "window": _window,
    "along": _along,
    "iota": _iota,
    "random": _random,
    "loop": _loop,
    "model": _model,
    **STEPS,
    **MOVES,
}
