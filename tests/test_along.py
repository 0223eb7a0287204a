"""Ops along a split dim: cumulative ops, reductions, top_k, sorts and Fourier transforms."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autoshard
from autoshard.partition.emitter import Decisions
from autoshard.solving import model_of
from tests.helpers.programs import random_program
from tests.helpers.running import differences, run, run_spmd, session_of, whole_decisions
from tests.helpers.single import Single, op_of, random_split, wrong_ones
from tests.test_invariants import choices_of, gap

MESHES: tuple[dict[str, int], ...] = (
    {"a": 2, "b": 4},
    {"a": 5},
    {"a": 2, "b": 2, "c": 2},
    {"a": 8},
    {"a": 3},
)
CASES = int(os.environ.get("AUTOSHARD_SINGLE", "8"))
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


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 10))])
@pytest.mark.parametrize("make", [_cumulative, _reduction, _top_k, _sort, _fft])
def test_an_op_along_a_split_dim_computes_the_same(make: Any, seed: int) -> None:
    _check(make, seed, rtol=1e-2 if make is _cumulative else 1e-5)


def _split_along(fn: Any, args: tuple[Any, ...], title: str, axes: tuple[str, ...]) -> tuple[Any, Any]:
    """Run a function with the exchanged factors of the groups of an op split; what differs, and the estimate."""
    session = session_of(fn, args, {"a": 8})
    whole = whole_decisions(session.source.block)
    groups = dict(whole.assignments)
    found = [g for g in groups if any(op.name == title for op in g.ops)]
    assert found
    for item in found:
        (factor,) = item.rule.exchange or item.rule.reduce
        groups[item] = {factor: axes}
    decisions = Decisions(assignments=groups, layouts=whole.layouts, outputs=whole.outputs)
    wrong = differences(run_spmd(session, decisions, args), jax.tree.leaves(fn(*args)))
    return wrong, session.estimate(decisions)


def test_log_softmax_over_an_odd_vocabulary_moves_no_logits() -> None:
    """257 words over 8 devices: 33 each, and padding in the last."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((4, 257)) * 3, jnp.float32)
    labels = jnp.asarray(rng.integers(0, 257, 4))

    def loss(x: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], 1).sum()

    for fn in (jax.nn.logsumexp, lambda x: jax.nn.logsumexp(x, axis=1), loss, jax.grad(loss)):
        session = session_of(fn, (logits,), {"a": 8})
        whole = whole_decisions(session.source.block)
        groups = dict(whole.assignments)
        for item in groups:
            words = [f for f, n in item.rule.sizes.items() if n == 257 and f in item.rule.factors]
            if words and item.rule.valid({words[0]: ("a",)}, {"a": 8}):
                groups[item] = {words[0]: ("a",)}
        assert any(groups.values())
        decisions = Decisions(assignments=groups, layouts=whole.layouts, outputs=whole.outputs)
        assert not differences(run_spmd(session, decisions, (logits,)), jax.tree.leaves(fn(logits)))


def test_the_most_likely_of_split_words_is_found_from_one_word_each() -> None:
    logits = jnp.asarray(np.random.default_rng(0).integers(0, 9, (4, 257)), jnp.float32)
    wrong, estimate = _split_along(lambda x: jnp.argmax(x, 1), (logits,), "argmax", ("a",))
    assert not wrong
    inside = [c for c in estimate.collectives if c.kind == "all_gather"]
    assert inside and all(c.full_bytes <= 8 * 4 * 4 for c in inside)


def test_a_sort_keeps_two_parts_in_memory() -> None:
    x = jnp.asarray(np.random.default_rng(0).integers(0, 99, 1000), jnp.int32)
    wrong, estimate = _split_along(lambda x: jnp.argsort(x), (x,), "sort", ("a",))
    assert not wrong
    permutes = [c for c in estimate.collectives if c.kind == "collective_permute"]
    assert sum(c.count for c in permutes) == 2 * 8 and all(c.full_bytes == 4 * 125 for c in permutes)


def test_positions_along_a_split_sequence_pass_on_totals_only() -> None:
    mask = jnp.asarray(np.random.default_rng(0).integers(0, 2, (2, 509)), jnp.int32)
    wrong, estimate = _split_along(lambda m: jnp.cumsum(m, 1), (mask,), "cumsum", ("a",))
    assert not wrong
    assert min(c.full_bytes for c in estimate.collectives) == 2 * 8 * 4


@pytest.mark.parametrize("shape", [(64, 32), (7, 12, 10)])
def test_filters_in_frequency_and_their_gradients_under_a_plan(shape: tuple[int, ...]) -> None:
    def blur(x: Any) -> Any:
        spectrum = jnp.fft.rfftn(x, axes=(-2, -1))
        return jnp.fft.irfftn(
            spectrum * jnp.exp(-0.1 * jnp.arange(spectrum.shape[-1])), s=x.shape[-2:], axes=(-2, -1)
        )

    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    fn = lambda x: (blur(x), jax.grad(lambda x: jnp.square(blur(x)).sum())(x))  # noqa: E731
    plan = autoshard.suggest(fn, x, topology="v3", mesh={"a": 8})
    assert not differences(jax.tree.leaves(plan.spmd(fn)(x)), jax.tree.leaves(fn(x)), 1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_the_objective_is_the_estimate(seed: int) -> None:
    made = random_program(seed, ["along", "argmax", "reduce", "along_grad"], most=4)
    session = session_of(made.fn, made.args, MESHES[2 * (seed % 2)])
    model, _ = model_of(session, {})
    gaps = [gap(session, model, c) for c in choices_of(model, np.random.default_rng(seed))]
    finite = [g for g in gaps if g is not None]
    assert finite and max(finite) < 1e-6
