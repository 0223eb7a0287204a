"""Ops that cut, move, fill and join split dims: slices, pads, reversals, joins, repetitions and reshapes."""

import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.partition.price import COLLECTIVES
from autoshard.rules import LocalView, family, rule_of
from tests.helpers.running import differences, run
from tests.helpers.single import Single, op_of, random_split, wrong_ones

MESHES: tuple[dict[str, int], ...] = (
    {"a": 2, "b": 4},
    {"a": 5},
    {"a": 2, "b": 2, "c": 2},
    {"a": 8},
    {"a": 3, "b": 2},
)
CASES = int(os.environ.get("AUTOSHARD_SINGLE", "8"))
DTYPES = (jnp.float32, jnp.float32, jnp.bfloat16, jnp.int32, jnp.int8, jnp.uint8, jnp.uint32, jnp.bool_)
EXTENTS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 33)

Made = tuple[Any, tuple[Any, ...]]
Rng = np.random.Generator


def _array(rng: Rng, shape: tuple[int, ...], dtype: Any = None) -> Any:
    """Numbers that tell places apart; of floats also NaN, infinities and both zeros."""
    kind = jnp.dtype(dtype or DTYPES[int(rng.integers(len(DTYPES)))])
    if kind == jnp.bool_:
        return jnp.asarray(rng.integers(0, 2, shape), bool)
    values = rng.integers(0, 120, shape).astype(np.float64)
    if jnp.issubdtype(kind, jnp.inexact) and rng.random() < 0.3:
        special = rng.choice([np.nan, np.inf, -np.inf, -0.0], shape)
        values = np.where(rng.random(shape) < 0.2, special, values)
    return jnp.asarray(values.astype(kind))


def _shape(rng: Rng, least: int = 1) -> tuple[int, ...]:
    rank = int(rng.integers(least, 4))
    extents = EXTENTS if rank < 3 else EXTENTS[:6]
    return tuple(int(n) for n in rng.choice(extents, rank))


def _slice(rng: Rng) -> Made:
    x = _array(rng, _shape(rng))
    starts, limits, strides = [], [], []
    for n in x.shape:
        start = int(rng.integers(0, n)) if rng.random() < 0.6 else 0
        starts.append(start)
        limits.append(int(rng.integers(start + 1, n + 1)) if rng.random() < 0.6 else n)
        strides.append(int(rng.choice([1, 1, 2, 3, 5])))
    return lambda x: lax.slice(x, starts, limits, strides), (x,)


def _pad(rng: Rng) -> Made:
    x = _array(rng, _shape(rng))
    config = []
    for n in x.shape:
        interior = int(rng.choice([0, 0, 1, 3]))
        full = n + interior * (n - 1)
        low, high = (int(v) for v in rng.integers(-(full // 3), full + 2, 2))
        config.append((low, high, interior) if rng.random() < 0.7 else (0, 0, 0))
    return lambda x, v: lax.pad(x, v, config), (x, _array(rng, (), x.dtype))


def _rev(rng: Rng) -> Made:
    x = _array(rng, _shape(rng))
    dims = [d for d in range(x.ndim) if rng.random() < 0.7]
    return lambda x: lax.rev(x, dims), (x,)


def _concatenate(rng: Rng) -> Made:
    shape = list(_shape(rng))
    axis = int(rng.integers(len(shape)))
    first = _array(rng, tuple(shape))
    arrays = [first]
    for _ in range(int(rng.integers(1, 5))):
        extent = int(rng.choice([0, 1, 1, 2, 3, 8, 17]))
        arrays.append(_array(rng, (*shape[:axis], extent, *shape[axis + 1 :]), first.dtype))
    rng.shuffle(arrays)
    return lambda *a: lax.concatenate(a, axis), tuple(arrays)


def _shift(rng: Rng) -> Made:
    """A roll, or a shift by which something else comes in at one end: one op when it is traced."""
    x = _array(rng, (*_shape(rng), int(rng.integers(3, 34))))
    axis = int(rng.integers(x.ndim)) if rng.random() < 0.3 else x.ndim - 1
    size = x.shape[axis]
    if rng.random() < 0.5 or size < 3:
        amount = int(rng.integers(1, max(size, 2)))
        return lambda x: jnp.roll(x, amount, axis), (x,)
    away = int(rng.integers(1, (size + 1) // 2))
    shape = (*x.shape[:axis], int(rng.integers(1, size + 1)), *x.shape[axis + 1 :])
    y = _array(rng, shape, x.dtype)
    if rng.random() < 0.5:
        return lambda y, x: lax.concatenate([y, lax.slice_in_dim(x, 0, size - away, axis=axis)], axis), (y, x)
    return lambda x, y: lax.concatenate([lax.slice_in_dim(x, away, size, axis=axis), y], axis), (x, y)


def _split(rng: Rng) -> Made:
    x = _array(rng, _shape(rng))
    axis = int(rng.integers(x.ndim))
    most = 2 if rng.random() < 0.5 else x.shape[axis]
    cuts = sorted(
        int(v) for v in rng.choice(range(1, x.shape[axis]), min(most, x.shape[axis]) - 1, replace=False)
    )
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, x.shape[axis]], strict=True)]
    return lambda x: lax.split(x, sizes, axis), (x,)


def _stack(rng: Rng) -> Made:
    x = _array(rng, _shape(rng))
    arrays = [x] + [_array(rng, x.shape, x.dtype) for _ in range(int(rng.integers(0, 6)))]
    axis = int(rng.integers(x.ndim + 1))
    return lambda *a: jnp.stack(a, axis), tuple(arrays)


def _unstack(rng: Rng) -> Made:
    x = _array(rng, _shape(rng))
    axis = int(rng.integers(x.ndim))
    return lambda x: jnp.unstack(x, axis=axis), (x,)


def _tile(rng: Rng) -> Made:
    x = _array(rng, _shape(rng))
    reps = [int(r) for r in rng.choice([1, 2, 3, 5], x.ndim)]
    return lambda x: lax.tile(x, reps), (x,)


def _starts(rng: Rng, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Starts of some integer type, also outside."""
    dtype = jnp.dtype(rng.choice([jnp.int32, jnp.uint32, jnp.int8, jnp.uint8]))
    low = 0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -3
    return tuple(jnp.asarray(rng.integers(low, n + 3), dtype) for n in shape)


def _part(rng: Rng, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n if rng.random() < 0.4 else int(rng.integers(1, n + 1)) for n in shape)


def _dynamic_slice(rng: Rng) -> Made:
    x = _array(rng, _shape(rng))
    sizes = _part(rng, x.shape)
    starts = _starts(rng, x.shape)
    return lambda x, *s: lax.dynamic_slice_p.bind(x, *s, slice_sizes=sizes), (x, *starts)


def _dynamic_update_slice(rng: Rng) -> Made:
    x = _array(rng, _shape(rng))
    update = _array(rng, _part(rng, x.shape), x.dtype)
    return lambda x, u, *s: lax.dynamic_update_slice_p.bind(x, u, *s), (x, update, *_starts(rng, x.shape))


def _reshape(rng: Rng) -> Made:
    primes = [int(p) for p in rng.choice([2, 2, 2, 3, 5], int(rng.integers(1, 6)))]

    def cut(order: list[int]) -> tuple[int, ...]:
        edges = [
            0,
            *sorted(int(v) for v in rng.integers(0, len(order) + 1, int(rng.integers(0, 4)))),
            len(order),
        ]
        return tuple(math.prod(order[a:b]) for a, b in zip(edges, edges[1:], strict=False))

    same = rng.random() < 0.5
    source, target = cut(primes), cut(primes if same else [int(p) for p in rng.permutation(primes)])
    order = tuple(int(d) for d in rng.permutation(len(source))) if rng.random() < 0.3 else None
    return lambda x: lax.reshape(x, target, order), (_array(rng, source),)


KINDS: dict[str, Callable[[Rng], Made]] = {
    "slice": _slice,
    "pad": _pad,
    "rev": _rev,
    "concatenate": _concatenate,
    "shift": _shift,
    "split": _split,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "reshape": _reshape,
}


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, len(MESHES)))]
)
@pytest.mark.parametrize("kind", KINDS)
def test_an_op_moves_the_same_elements_however_it_is_split(kind: str, seed: int) -> None:
    rng = np.random.default_rng([seed, len(kind)])
    mesh = MESHES[seed % len(MESHES)]
    made: list[tuple[Any, Any, Any, Any]] = []
    while len(made) < CASES:
        fn, args = KINDS[kind](rng)
        try:
            op = op_of(fn, args)
        except ValueError:  # JAX left the op out: it changes nothing
            continue
        split = random_split(op, mesh, rng)
        if split:
            made.append((fn, args, op, split))
    results = run(
        lambda *a: [jax.tree.leaves(m[0](*x)) for m, x in zip(made, a, strict=True)], [m[1] for m in made]
    )
    cases = [
        Single(op=op, args=args, assignment=split, expected=tuple(found))
        for (_, args, op, split), found in zip(made, results, strict=True)
    ]
    assert not wrong_ones(cases, mesh)


def _moved(
    fn: Callable[..., Any], args: tuple[Any, ...], mesh: dict[str, int], split: dict[str, tuple[str, ...]]
) -> list[tuple[str, tuple[int, ...]]]:
    """List the collectives that an op is emitted with: kind and shape of what a device gives."""
    op = op_of(fn, args)
    view = LocalView(rule=rule_of(op), assignment=split, mesh=mesh)
    avals = [jax.ShapeDtypeStruct(view.in_shape(op, i), x.dtype) for i, x in enumerate(args)]
    emit: Any = lambda *a: family(op).emit(op, a, view)  # noqa: E731
    eqns = jax.make_jaxpr(emit, axis_env=list(mesh.items()))(*avals).jaxpr.eqns
    return [(e.primitive.name, e.invars[0].aval.shape) for e in eqns if e.primitive.name in COLLECTIVES]


X = jax.ShapeDtypeStruct((64, 128), jnp.float32)
ROW = jax.ShapeDtypeStruct((1, 128), jnp.float32)
PLACE = jax.ShapeDtypeStruct((), jnp.int32)
VALUE = jax.ShapeDtypeStruct((), jnp.float32)
BORDER = [("ppermute", (1, 128))]


@pytest.mark.parametrize(
    ("fn", "args", "moved"),
    [
        (lambda x: lax.slice_in_dim(x, 1, 64), (X,), BORDER),
        (lambda x: lax.slice_in_dim(x, 0, 63), (X,), []),
        (lambda x: lax.slice_in_dim(x, 1, 64, 2), (X,), []),
        (lambda x, v: lax.pad(x, v, [(1, -1, 0), (0, 0, 0)]), (X, VALUE), BORDER),
        (lambda x, v: lax.pad(x, v, [(0, 1, 1), (0, 0, 0)]), (X, VALUE), []),
        (
            lambda x, y: lax.concatenate([y, x], 0),
            (jax.ShapeDtypeStruct((63, 128), jnp.float32), ROW),
            BORDER,
        ),
        (lambda x: lax.rev(x, (0,)), (X,), [("ppermute", (8, 128))]),
        (lambda x, u, *k: lax.dynamic_update_slice_p.bind(x, u, *k), (X, ROW, PLACE, PLACE), []),
        (lambda x, *k: lax.dynamic_slice_p.bind(x, *k, slice_sizes=(1, 128)), (X, PLACE, PLACE), []),
    ],
)
def test_only_borders_move(fn: Any, args: tuple[Any, ...], moved: list[Any]) -> None:
    assert _moved(fn, args, {"a": 8}, {"d0": ("a",)}) == moved


def _shifted(first: Any, x: Any) -> Any:
    return jnp.concatenate([first, x[:-1]], 0)


ODD = jax.ShapeDtypeStruct((61, 128), jnp.float32)
STAGES = jax.ShapeDtypeStruct((8, 128), jnp.float32)


@pytest.mark.parametrize(
    ("fn", "args", "rows"),
    [
        (lambda x: jnp.roll(x, 1, 0), (X,), [1]),
        (lambda x: jnp.roll(x, -3, 0), (X,), [3]),
        (lambda x: jnp.roll(x, 8, 0), (X,), [8]),
        (lambda x: jnp.roll(x, 20, 0), (X,), [4, 4]),
        (lambda x: jnp.roll(x, 32, 0), (X,), [8]),
        (lambda x: jnp.roll(x, 1, 0), (ODD,), [1]),
        (lambda x: jnp.roll(x, -1, 0), (ODD,), [1]),
        (_shifted, (ROW, X), [1]),
        (_shifted, (ROW, STAGES), [1]),
        (lambda x, y: jnp.concatenate([x, y], 0), (X, X), [8, 8]),
        (lambda x, y: jnp.concatenate([x, y], 0), (X, ODD), [8, 8]),
    ],
)
@pytest.mark.parametrize(("mesh", "axes"), [({"a": 8}, ("a",)), ({"a": 4, "b": 2}, ("b", "a"))])
def test_joins_send_to_each_device_what_it_holds(
    fn: Any, args: tuple[Any, ...], rows: list[int], mesh: dict[str, int], axes: tuple[str, ...]
) -> None:
    """One permute of the border, or as many as a part of the result comes from devices."""
    moved = _moved(fn, args, mesh, {"d0": axes})
    assert moved == [("ppermute", (n, 128)) for n in rows]


def test_a_roll_in_two_dims_sends_one_border_in_each() -> None:
    shape = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    given = {"[0]": P("a", "b"), "out": P("a", "b")}
    plan = autoshard.suggest(
        lambda x: jnp.roll(x, (1, -2), (0, 1)), shape, topology="v3", mesh={"a": 4, "b": 2}, annotations=given
    )
    assert [(c.kind, c.shape) for c in plan.estimate.collectives] == [
        ("collective_permute", (1, 2048)),
        ("collective_permute", (1024, 2)),
    ]


def test_uneven_heads_move_to_the_neighbours() -> None:
    """40 heads of 128 over 16: parts of 320 become parts of 3 heads, from at most two devices each."""
    x = jax.ShapeDtypeStruct((2, 5120), jnp.float32)
    moved = _moved(lambda x: x.reshape(2, 40, 128), (x,), {"a": 16}, {"f1": ("a",)})
    assert moved == [("ppermute", (2, 320))] * 2
    assert not _moved(lambda x: x.reshape(2, 40, 128), (x,), {"a": 8}, {"f1": ("a",)})


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_rows_that_end_in_padding_are_merged(order: tuple[str, str]) -> None:
    """The parts of a minor factor behind a full major one do not lie at equal distances in the merged dim."""
    mesh = {"a": 2, "b": 4}
    major, minor = order
    x = jnp.arange(mesh[major] * 11 * 3.0).reshape(mesh[major], 11, 3)
    split = {"f0": (major,), "f1": (minor,)}
    pairs = [(lambda x: x.reshape(-1), x), (lambda y: y.reshape(x.shape), x.reshape(-1))]
    cases = [Single(op=op_of(fn, (v,)), args=(v,), assignment=split, expected=(fn(v),)) for fn, v in pairs]
    assert not wrong_ones(cases, mesh)


@pytest.mark.parametrize("place", [-5, 0, 6, 14, 200])
def test_an_update_that_is_clamped_is_not_lost(place: int) -> None:
    """Under XLA's partitioner too, which clamps nothing along a dim that is split."""
    fn = lambda x, u, k: 2 * lax.dynamic_update_slice(x, u, (k, 0))  # noqa: E731
    args = (jnp.zeros((16, 4096)), jnp.ones((3, 4096)), jnp.asarray(place))
    given = {"[0]": P("a"), "[1]": P(), "out": P("a")}
    plan = autoshard.suggest(fn, *args, topology="v3", mesh={"a": 8}, annotations=given)
    assert not plan.estimate.collectives
    for applied in (plan.spmd(fn), plan.jit(fn)):
        assert not differences([applied(*args)], [fn(*args)])
