"""Convolutions and pooling: an op on windows, split any way, computes what it computes whole."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core.primitives import select_and_scatter_p
from jax.sharding import PartitionSpec as P

from autoshard.choices import assignments
from autoshard.grouping import PARTIAL
from autoshard.layout import Layout, chunk, mesh_size
from autoshard.program import Op, Value
from autoshard.rules import Assignment, LocalView, family, rule_of
from autoshard.rules.reduction import identity_of
from autoshard.trace import trace
from tests.helpers.running import cpu_mesh, differences, run

MESH = {"a": 2, "b": 4}
REDUCE = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}


def _part(x: Any, layout: Layout) -> Any:
    """Return this device's part of an array; NaN, or a large number, where an uneven split pads it."""
    garbage = np.nan if jnp.issubdtype(x.dtype, jnp.inexact) else 77
    for d, axes in enumerate(layout.dims):
        ways = mesh_size(axes, MESH)
        size = chunk(x.shape[d], ways)
        pads = [(0, size * ways - n if i == d else 0) for i, n in enumerate(x.shape)]
        x = jnp.pad(x, pads, constant_values=garbage)
        if axes:
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, axis=d)
    return x


def _emitted(op: Op, arrays: Sequence[Any], assignment: Assignment) -> list[Any]:
    """Run an op on parts of its operands; add up what is partial."""
    rule = rule_of(op)
    view = LocalView(rule=rule, assignment=assignment, mesh=MESH)
    parts = [_part(x, rule.layout(dims, assignment)) for x, dims in zip(arrays, rule.inputs, strict=True)]
    results = []
    for i, result in enumerate(family(op).emit(op, parts, view)):
        assert result.shape == view.out_shape(op, i), (op, assignment)
        layout = rule.output_layout(i, assignment)
        results.append(REDUCE[layout.monoid](result, layout.unreduced) if layout.unreduced else result)
    return results


def check(cases: Sequence[tuple[Op, Sequence[Any], Assignment]]) -> None:
    """Compare ops under their assignments with the ops alone, all in one program."""
    specs, expected = [], []
    for op, arrays, assignment in cases:
        rule = rule_of(op)
        specs.append([P(*rule.layout(dims, assignment).dims) for dims in rule.outputs])
        found = jax.jit(lambda *a, op=op: op.primitive.bind(*a, **op.primitive.get_bind_params(op.params)))(
            *arrays
        )
        expected.append(found if op.primitive.multiple_results else [found])

    def body(operands: Any) -> Any:
        return tuple(_emitted(op, arrays, a) for (op, _, a), arrays in zip(cases, operands, strict=True))

    mapped = jax.shard_map(body, mesh=cpu_mesh(MESH), in_specs=P(), out_specs=tuple(specs), check_vma=False)
    operands = tuple(tuple(arrays) for _, arrays, _ in cases)
    for (op, _, assignment), found, want in zip(cases, run(mapped, [operands]), expected, strict=True):
        held = [x[tuple(slice(n) for n in y.shape)] for x, y in zip(found, want, strict=True)]
        wrong = differences(held, want)
        assert not wrong, (op, op.params, str(rule_of(op)), assignment, wrong)


def operation(
    fn: Callable[..., Any], args: Sequence[Any], name: str, rng: np.random.Generator
) -> tuple[Op, Any]:
    """Return the last op of a name in a function, and small whole numbers for its operands."""
    op = [op for op in trace(fn, tuple(args)).program.walk() if op.name == name][-1]
    draws = [rng.integers(-3, 4, a.aval.shape) if isinstance(a, Value) else a.val for a in op.inputs]
    return op, [jnp.asarray(x, a.aval.dtype) for x, a in zip(draws, op.inputs, strict=True)]


def split(op: Op, rng: np.random.Generator) -> Assignment:
    """Draw a split: mostly of factors that exchange."""
    rule = rule_of(op)
    found = [a for a in assignments(rule, MESH, 100.0) if PARTIAL not in a]
    better = [a for a in found if any(f in rule.exchange for f in a)]
    picked = (better or found)[int(rng.integers(len(better or found)))]
    return {f: tuple(str(x) for x in rng.permutation(list(axes))) for f, axes in picked.items()}


def _pick(rng: np.random.Generator, *options: int) -> int:
    return int(rng.choice(options))


def convolution(rng: np.random.Generator) -> tuple[Op, Any]:
    """A convolution of any kind: strides, dilations, padding, groups and dimension numbers."""
    while True:
        args, settings = _convolution(rng)

        def fn(x: Any, w: Any, settings: Any = settings) -> Any:
            return lax.conv_general_dilated(x, w, **settings)

        try:
            if _not_empty(fn, *args):
                return operation(fn, args, "conv_general_dilated", rng)
        except (ValueError, TypeError):  # a padded dim is shorter than the window
            continue


def _convolution(rng: np.random.Generator) -> tuple[list[Any], dict[str, Any]]:
    rank = _pick(rng, 1, 2, 2, 3)
    groups, kind = _pick(rng, 1, 1, 2, 3), str(rng.choice(["feature", "batch"]))
    long = rng.random() < 0.4  # a long window, as in the gradient of a filter
    sizes = [_pick(rng, 4, 6, 8, 9, 13, 16, 23)] + [_pick(rng, 2, 3, 5, 8) for _ in range(rank - 1)]
    taps = [_pick(rng, *((5, 7, 8, 12) if long else (1, 2, 3, 4)))]
    taps += [_pick(rng, 1, 2, 3) for _ in range(rank - 1)]
    batch, features = _pick(rng, 1, 2, 4), 2
    if kind == "batch":
        batch *= groups
    orders = [tuple(int(i) for i in rng.permutation(rank + 2)) for _ in range(3)]
    lhs = [batch, features * (groups if kind == "feature" else 1), *sizes]
    rhs = [groups * _pick(rng, 1, 2), features, *taps]
    args = []
    for shape, order in zip((lhs, rhs), orders, strict=False):
        args.append(jnp.zeros([n for _, n in sorted(zip(order, shape, strict=True))]))
    return args, {
        "window_strides": [_pick(rng, 1, 1, 2, 3) for _ in range(rank)],
        "padding": [(_pick(rng, -1, 0, 1, 2, 4), _pick(rng, -2, 0, 1, 3)) for _ in range(rank)],
        "lhs_dilation": [_pick(rng, 1, 1, 2, 3) for _ in range(rank)],
        "rhs_dilation": [_pick(rng, 1, 1, 2, 3) for _ in range(rank)],
        "dimension_numbers": lax.ConvDimensionNumbers(*orders),
        f"{kind}_group_count": groups,
    }


def _pooled(rng: np.random.Generator, dilated: bool) -> tuple[Any, dict[str, Any]]:
    rank = _pick(rng, 1, 2, 3)
    shape = [_pick(rng, 2, 5, 8, 9, 13, 16, 23)] + [_pick(rng, 1, 2, 3, 5, 8) for _ in range(rank - 1)]
    settings = {
        "window_dimensions": [_pick(rng, 1, 2, 3, 5, n) for n in shape],
        "window_strides": [_pick(rng, 1, 1, 2, 3) for _ in shape],
        "padding": [(_pick(rng, 0, 0, 1, 2), _pick(rng, 0, 0, 1, 3)) for _ in shape],
    }
    if dilated:
        settings["base_dilation"] = [_pick(rng, 1, 1, 2, 3) for _ in shape]
        settings["window_dilation"] = [_pick(rng, 1, 1, 2, 3) for _ in shape]
    return shape, settings


def _not_empty(fn: Callable[..., Any], *args: Any) -> bool:
    return all(math.prod(x.shape) for x in jax.tree.leaves(jax.eval_shape(fn, *args)))


def pooling(rng: np.random.Generator) -> tuple[Op, Any]:
    """A reduction of windows by a monoid, or by functions of the user's, also of pairs."""
    while True:
        shape, settings = _pooled(rng, True)
        dtype = [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8][_pick(rng, 0, 0, 1, 2, 3)]
        lowest, highest = identity_of("max", dtype), identity_of("min", dtype)
        monoid, start, name = [
            (lax.add, np.zeros((), dtype), "reduce_window_sum"),
            (lax.max, lowest, "reduce_window_max"),
            (lax.min, highest, "reduce_window_min"),
            (jnp.maximum, lowest, "reduce_window"),
        ][_pick(rng, 0, 1, 2, 3)]

        def fn(x: Any, start: Any = start, monoid: Any = monoid, settings: Any = settings) -> Any:
            return lax.reduce_window(x, start, monoid, **settings)

        def pair(x: Any, start: Any = start, settings: Any = settings) -> Any:
            both = lambda a, b: (lax.max(a[0], b[0]), lax.add(a[1], b[1]))  # noqa: E731
            return lax.reduce_window((x, x + 1), (start, np.zeros_like(start)), both, **settings)

        chosen = pair if name == "reduce_window" and rng.random() < 0.5 else fn
        x = jnp.zeros(shape, dtype)
        if _not_empty(chosen, x):
            return operation(chosen, [x], name, rng)


def _extreme(rng: np.random.Generator, settings: Any) -> Callable[[Any], Any]:
    if rng.random() < 0.5:
        return lambda x: lax.reduce_window(x, -jnp.inf, lax.max, **settings)
    return lambda x: lax.reduce_window(x, jnp.inf, lax.min, **settings)


def gathering(rng: np.random.Generator) -> tuple[Op, Any]:
    """The derivative of pooling by maximum or minimum, forwards; which of equal elements wins is not defined."""
    while True:
        shape, settings = _pooled(rng, True)
        fn, x = _extreme(rng, settings), jnp.zeros(shape)
        if _not_empty(fn, x):
            derivative = lambda x, t, fn=fn: jax.jvp(fn, (x,), (t,))[1]  # noqa: E731
            op, (tangents, operand) = operation(derivative, [x, x], "select_and_gather_add", rng)
            return op, [tangents, rng.permutation(operand.size).reshape(shape).astype(np.float32)]


def scattering(rng: np.random.Generator) -> tuple[Op, Any]:
    """The derivative of pooling by maximum or minimum, backwards."""
    while True:
        shape, settings = _pooled(rng, False)
        fn, x = _extreme(rng, settings), jnp.zeros(shape)
        if _not_empty(fn, x):
            return operation(jax.grad(lambda x, fn=fn: fn(x).sum()), [x], "select_and_scatter_add", rng)


KINDS = {f.__name__: f for f in (convolution, pooling, gathering, scattering)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 4))])
def test_an_op_on_windows_computes_the_same_however_it_is_split(seed: int, kind: str) -> None:
    rng = np.random.default_rng([seed, len(kind)])
    cases = [KINDS[kind](rng) for _ in range(12)]
    check([(op, arrays, split(op, rng)) for op, arrays in cases])


def _with_operands(fn: Callable[..., Any], shapes: Sequence[Sequence[int]], name: str) -> tuple[Op, Any]:
    return operation(fn, [jnp.zeros(shape) for shape in shapes], name, np.random.default_rng(0))


def test_a_scatter_by_functions_of_the_users_splits_beside_the_windows() -> None:
    choose, add = (jax.make_jaxpr(f)(0.0, 0.0).jaxpr for f in (lax.ge, lax.add))

    def fn(operand: Any, source: Any, start: Any) -> Any:
        return select_and_scatter_p.bind(
            operand,
            source,
            start,
            select_jaxpr=choose,
            select_consts=(),
            scatter_jaxpr=add,
            scatter_consts=(),
            window_dimensions=(1, 2),
            window_strides=(1, 2),
            padding=((0, 0), (0, 0)),
        )

    op, arrays = _with_operands(fn, [(5, 8), (5, 4), ()], "select_and_scatter")
    assert str(rule_of(op)) == "(d0 1), (d0 1), () -> (d0 1)"
    check([(op, arrays, {"d0": axes}) for axes in (("a",), ("b", "a"))])


def test_a_dim_that_one_window_covers_is_reduced() -> None:
    def contracted(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (3,), [(0, 0)])

    def covered(x: Any) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (9, 3), (2, 2), [(2, 1), (1, 1)], (1, 1), (1, 1))

    convolved = _with_operands(contracted, [(2, 4, 13), (6, 4, 13)], "conv_general_dilated")
    pooled = _with_operands(covered, [(7, 5)], "reduce_window_max")
    assert "reduce: i s0}" in str(rule_of(convolved[0]))
    assert "reduce: d0=max; exchange: d1=halo}" in str(rule_of(pooled[0]))
    check(
        [(*convolved, {"s0": axes}) for axes in (("a",), ("b",), ("b", "a"))]
        + [(*pooled, {"d0": ("a",), "d1": ("b",)}), (*pooled, {"d0": ("b", "a")})]
    )


def _bound(op: Op, arrays: Sequence[Any], assignment: Assignment) -> list[Any]:
    """Equations of an op that is split."""
    dims = [rule_of(op).layout(d, assignment).dims for d in rule_of(op).outputs]

    def body(*operands: Any) -> tuple[Any, ...]:
        view = LocalView(rule=rule_of(op), assignment=assignment, mesh=MESH)
        return tuple(family(op).emit(op, operands, view))

    mapped = jax.shard_map(
        body,
        mesh=cpu_mesh(MESH),
        in_specs=tuple(P(*rule_of(op).layout(d, assignment).dims) for d in rule_of(op).inputs),
        out_specs=tuple(P(*d) for d in dims),
        check_vma=False,
    )
    (eqn,) = jax.make_jaxpr(mapped)(*arrays).jaxpr.eqns
    return list(eqn.params["jaxpr"].eqns)


def test_borders_move_and_nothing_else() -> None:
    """A 3x3 convolution of an image split by height and width sends one row and one column each way."""

    def fn(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    op, arrays = _with_operands(fn, [(1, 32, 32, 4), (3, 3, 4, 4)], "conv_general_dilated")
    eqns = _bound(op, arrays, {"s0": ("a",), "s1": ("b",)})
    sent = [e.invars[0].aval.shape for e in eqns if e.primitive.name == "ppermute"]
    assert sent == [(1, 1, 8, 4)] * 2 + [(1, 18, 1, 4)] * 2
    assert {e.primitive.name for e in eqns} <= {"slice", "ppermute", "concatenate", "conv_general_dilated"}


def test_windows_that_do_not_cross_a_border_stay_on_the_device() -> None:
    settings = ((1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    pool = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, *settings)  # noqa: E731
    split = {"d1": ("b",), "d2": ("a",)}
    for fn, name in (
        (pool, "reduce_window_max"),
        (jax.grad(lambda x: pool(x).sum()), "select_and_scatter_add"),
    ):
        op, arrays = _with_operands(fn, [(1, 16, 16, 4)], name)
        assert {e.primitive.name for e in _bound(op, arrays, split)} <= {name, "slice"}
