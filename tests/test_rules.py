"""Sharding rules: their text for every family, and the arithmetic of reshapes."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import Primitive

from autoshard.program import Op
from autoshard.rules import ShardingRule, families, family, rule_of
from autoshard.rules.shape import reshape_dims
from autoshard.trace import trace

KEY = jax.random.key(0)
KEYS = jax.eval_shape(lambda: jax.random.split(KEY, 8))
RBG_KEYS = jax.eval_shape(lambda: jax.random.split(jax.random.key(0, impl="rbg"), 8))


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def op_of(fn: Callable[..., Any], args: tuple[Any, ...], name: str) -> Op:
    """Return the last op with a name."""
    return [op for op in trace(fn, args).program.walk() if op.name == name][-1]


def conv(groups: int = 1, padding: str = "SAME") -> Callable[..., Any]:
    return lambda x, w: lax.conv_general_dilated(
        x, w, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


def conv_grad(groups: int = 1) -> Callable[..., Any]:
    return lambda x, w: jax.grad(lambda w: conv(groups)(x, w).sum())(w)


CASES = [
    ("dot_general", lambda x, w: x @ w, (f32(8, 4), f32(4, 2)), "(m0 k0), (k0 n1) -> (m0 n1) {reduce: k0}"),
    (
        "dot_general",
        lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k),
        (f32(2, 8, 4, 3), f32(2, 8, 4, 3)),
        "(b0 m1 b1 k0), (b0 n1 b1 k0) -> (b0 b1 m1 n1) {reduce: k0}",
    ),
    ("dot_general", lambda x, w: x @ w, (f32(8, 1), f32(1, 2)), "(m0 1), (1 n1) -> (m0 n1) {reduce: k0}"),
    ("add", jnp.add, (f32(4, 2), f32(4, 2)), "(d0 d1), (d0 d1) -> (d0 d1) {linear: 0 1}"),
    ("mul", lambda x: 2 * x, (f32(4, 2),), "(), (d0 d1) -> (d0 d1) {linear: 1}"),
    ("mul", jnp.multiply, (f32(4, 2), f32(4, 2)), "(d0 d1), (d0 d1) -> (d0 d1)"),
    ("div", lambda x: x / 3, (f32(4, 2),), "(d0 d1), () -> (d0 d1) {linear: 0}"),
    ("exp", jnp.exp, (f32(4, 1, 2),), "(d0 1 d2) -> (d0 1 d2)"),
    ("convert_element_type", lambda x: x.astype(jnp.bfloat16), (f32(4),), "(d0) -> (d0) {linear: 0}"),
    ("convert_element_type", lambda x: x.astype(jnp.int32), (f32(4),), "(d0) -> (d0)"),
    ("broadcast_in_dim", lambda x: jnp.broadcast_to(x, (3, 4, 2)), (f32(4, 1),), "(d1 1) -> (d0 d1 d2)"),
    ("iota", lambda: lax.broadcasted_iota(jnp.int32, (4, 2), 0), (), " -> (d0 d1)"),
    ("transpose", lambda x: x.transpose(2, 0, 1), (f32(2, 3, 4),), "(d0 d1 d2) -> (d2 d0 d1) {linear: 0}"),
    ("squeeze", lambda x: x.squeeze(1), (f32(2, 1, 4),), "(d0 1 d2) -> (d0 d2) {linear: 0}"),
    ("reduce_sum", lambda x: x.sum(1), (f32(2, 3, 4),), "(d0 d1 d2) -> (d0 d2) {reduce: d1; linear: 0}"),
    ("reduce_max", lambda x: x.max(0), (f32(2, 3),), "(d0 d1) -> (d1) {reduce: d0=max}"),
    ("reduce_min", lambda x: x.min((0, 1)), (f32(2, 3),), "(d0 d1) -> () {reduce: d0=min d1=min}"),
    ("reduce_prod", lambda x: x.prod(0), (f32(2, 3),), "(d0 d1) -> (d1) {exchange: d0=merge}"),
    ("reduce_or", lambda x: (x > 0).any(0), (f32(2, 3),), "(d0 d1) -> (d1) {reduce: d0=max}"),
    ("reduce_or", lambda x: lax.reduce_or(x, (0,)), (i32(2, 3),), "(d0 d1) -> (d1) {exchange: d0=merge}"),
    ("argmax", lambda x: x.argmax(1), (f32(2, 3),), "(d0 d1) -> (d0) {exchange: d1=merge}"),
    (
        "reshape",
        lambda x: x.reshape(4, 8, 4),
        (f32(4, 32),),
        "(f0 (f1 f2)) -> (f0 f1 f2) {exchange: f1=halo; linear: 0}",
    ),
    (
        "reshape",
        lambda x: x.reshape(6, 4),
        (f32(4, 6),),
        "(f0 f2) -> (f0 f4) {exchange: f0=halo; whole: f2 f4; linear: 0}",
    ),
    (
        "reshape",
        lambda x: lax.reshape(x, (8, 3), (1, 0, 2)),
        (f32(2, 4, 3),),
        "(f1 f0 f2) -> ((f0 f1) f2) {exchange: f0=halo; linear: 0}",
    ),
    (
        "reshape",
        lambda x: x.reshape(6, 4),
        (f32(2, 3, 4),),
        "(f0 f1 f2) -> ((f0 f1) f2) {exchange: f1=halo; linear: 0}",
    ),
    ("reshape", lambda x: x.reshape(4, 4), (f32(2, 2, 4),), "(f0 f1 f2) -> ((f0 f1) f2) {linear: 0}"),
    ("slice", lambda x: x[:, -1], (f32(2, 4),), "(d0 d1) -> (d0 1) {reduce: d1; linear: 0}"),
    ("slice", lambda x: (x > 0)[:, -1], (f32(2, 4),), "(d0 1) -> (d0 1) {linear: 0}"),
    (
        "concatenate",
        lambda x, y: jnp.concatenate([y, x], 1),
        (f32(2, 4), f32(2, 1)),
        "(d0 1), (d0 d1) -> (d0 d1) {exchange: d1=halo; linear: 0 1}",
    ),
    ("slice", lambda x: x[:, 1:3], (f32(2, 4),), "(d0 d1) -> (d0 d1) {exchange: d1=halo; linear: 0}"),
    (
        "pad",
        lambda x: jnp.pad(x, ((0, 0), (1, 2))),
        (f32(2, 4),),
        "(d0 d1), () -> (d0 d1) {exchange: d1=halo; linear: 0}",
    ),
    (
        "concatenate",
        lambda x: jnp.concatenate([x, x], 1),
        (f32(2, 4),),
        "(d0 d1), (d0 d1) -> (d0 d1) {exchange: d1=halo; linear: 0 1}",
    ),
    (
        "split",
        lambda x: jnp.split(x, 2, 1),
        (f32(2, 4),),
        "(d0 d1) -> (d0 d1), (d0 d1) {exchange: d1=halo; linear: 0}",
    ),
    ("rev", lambda x: x[::-1], (f32(2, 4),), "(d0 d1) -> (d0 d1) {exchange: d0=halo; linear: 0}"),
    (
        "dynamic_slice",
        lambda x, i: lax.dynamic_slice_in_dim(x, i, 1, 0),
        (f32(2, 4), i32()),
        "(d0 d1), (), () -> (1 d1) {reduce: d0; linear: 0}",
    ),
    (
        "dynamic_update_slice",
        lambda x, u, i: lax.dynamic_update_slice_in_dim(x, u, i, 0),
        (f32(2, 4), f32(1, 4), i32()),
        "(d0 d1), (1 d1), (), () -> (d0 d1)",
    ),
    (
        "cumsum",
        lambda x: x.cumsum(0),
        (f32(2, 4),),
        "(d0 d1) -> (d0 d1) {exchange: d0=scan; linear: 0}",
    ),
    ("cummax", lambda x: lax.cummax(x, 0), (f32(2, 4),), "(d0 d1) -> (d0 d1) {exchange: d0=scan}"),
    ("sort", lambda x: jnp.sort(x, 1), (f32(2, 4),), "(d0 d1) -> (d0 d1) {exchange: d1=merge}"),
    ("top_k", lambda x: lax.top_k(x, 2), (f32(8, 4),), "(d0 d1) -> (d0 1), (d0 1) {exchange: d1=merge}"),
    ("approx_top_k", lambda x: lax.approx_max_k(x, 2), (f32(8, 4),), "(d0 1) -> (d0 1), (d0 1)"),
    (
        "fft",
        lambda x: jnp.fft.rfft2(x),
        (f32(3, 8, 4),),
        "(d0 d1 d2) -> (d0 d1 d2) {exchange: d1=pencil d2=pencil; linear: 0}",
    ),
    ("fft", lambda x: jnp.fft.rfft(x), (f32(8),), "(d0) -> (d0) {whole: d0; linear: 0}"),
    ("gather", lambda t, i: t[i], (f32(16, 8), i32(4, 2)), "(o0 o1), (r0 r1 1) -> (r0 r1 o1) {reduce: o0}"),
    ("gather", lambda t, i: t[i] > 0, (f32(16, 8), i32(4)), "(o0 o1), (r0 1) -> (r0 o1) {reduce: o0}"),
    (
        "gather",
        lambda t, i: (t > 0)[i],
        (f32(16, 8), i32(4)),
        "(1 o1), (r0 1) -> (r0 o1)",
    ),
    ("gather", lambda k, i: k[i], (KEYS, i32(4)), "(1), (r0 1) -> (r0)"),
    (
        "gather",
        lambda x, i: jnp.take_along_axis(x, i, 1),
        (f32(4, 8), i32(4, 2)),
        "(r0 o1), (r0 r1 1) -> (r0 r1) {reduce: o1}",
    ),
    (
        "scatter-add",
        lambda t, i, u: t.at[i].add(u),
        (f32(16, 8), i32(4), f32(4, 8)),
        "(o0 o1), (r0 1), (r0 o1) -> (o0 o1) {reduce: r0}",
    ),
    (
        "scatter",
        lambda t, i, u: t.at[i].set(u),
        (f32(16, 8), i32(4), f32(4, 8)),
        "(o0 o1), (1 1), (1 o1) -> (o0 o1)",
    ),
    (
        "conv_general_dilated",
        conv(),
        (f32(2, 8, 8, 4), f32(3, 1, 4, 8)),
        "(b s0 s1 i), (1 1 i o) -> (b s0 s1 o) {reduce: i; exchange: s0=halo}",
    ),
    (
        "conv_general_dilated",
        conv(2),
        (f32(2, 8, 8, 4), f32(3, 3, 2, 8)),
        "(b s0 s1 (g i)), (1 1 i (g o)) -> (b s0 s1 (g o)) {reduce: i; exchange: s0=halo s1=halo; even: g}",
    ),
    (
        "conv_general_dilated",
        conv_grad(),
        (f32(2, 8, 8, 4), f32(3, 3, 4, 6)),
        "(i s0 s1 b), (i s0 s1 o) -> (1 1 b o) {reduce: i s0 s1; exchange: s0=halo s1=halo}",
    ),
    (
        "conv_general_dilated",
        conv_grad(2),
        (f32(2, 8, 8, 4), f32(3, 3, 2, 6)),
        "(i s0 s1 (g b)), (i s0 s1 (g o)) -> (1 1 b (g o)) {reduce: i s0 s1; exchange: s0=halo s1=halo; even: g}",
    ),
    (
        "reduce_window_max",
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID"),
        (f32(2, 8, 4),),
        "(d0 d1 d2) -> (d0 d1 d2) {exchange: d1=halo}",
    ),
    (
        "conv_general_dilated",
        lambda x, w: lax.conv_general_dilated(x, w, (2,), [(0, 0)], rhs_dilation=(1,)),
        (f32(2, 4, 16), f32(8, 4, 16)),
        "(b i s0), (o i s0) -> (b o 1) {reduce: i s0}",
    ),
    (
        "reduce_window_sum",
        lambda x: lax.reduce_window(x, 0.0, lax.add, (8, 2), (8, 1), [(0, 0), (1, 0)]),
        (f32(8, 4),),
        "(d0 d1) -> (1 d1) {reduce: d0; exchange: d1=halo; linear: 0}",
    ),
    (
        "reduce_window",
        lambda x: lax.reduce_window(x, 0.0, lambda a, b: a + jnp.abs(b), (8, 2), (8, 1), [(0, 0), (1, 0)]),
        (f32(8, 4),),
        "(1 d1), () -> (1 d1) {exchange: d1=halo}",
    ),
    (
        "select_and_scatter_add",
        jax.grad(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (3, 1), (2, 1), "SAME").sum()),
        (f32(8, 4),),
        "(d0 d1), (d0 d1) -> (d0 d1) {exchange: d0=halo; linear: 0}",
    ),
    (
        "select_and_gather_add",
        lambda x: jax.jvp(
            lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (3, 1), (2, 1), "SAME"), (x,), (x,)
        ),
        (f32(8, 4),),
        "(d0 d1), (d0 d1) -> (d0 d1) {exchange: d0=halo; linear: 0}",
    ),
    ("random_bits", lambda k: jax.random.bits(k, (8, 4)), (KEY,), "() -> (s0 s1)"),
    ("random_bits", jax.vmap(lambda k: jax.random.bits(k, (4,))), (KEYS,), "(b0) -> (b0 1)"),
    ("random_bits", jax.vmap(lambda k: jax.random.bits(k, (4,))), (RBG_KEYS,), "(1) -> (s0 s1)"),
    ("random_split", lambda k: jax.random.split(k, 4), (KEY,), "() -> (1)"),
    ("random_fold_in", jax.vmap(jax.random.fold_in), (KEYS, i32(8)), "(b0), (b0) -> (b0)"),
    ("cholesky", jnp.linalg.cholesky, (f32(4, 4),), "(1 1) -> (1 1)"),
]


@pytest.mark.parametrize(
    ("name", "fn", "args", "text"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)]
)
def test_a_rule_reads_as_expected(name: str, fn: Any, args: tuple[Any, ...], text: str) -> None:
    assert str(rule_of(op_of(fn, args, name))) == text


@pytest.mark.parametrize(
    ("name", "fn", "args", "text"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)]
)
def test_a_rule_parses_to_itself(name: str, fn: Any, args: tuple[Any, ...], text: str) -> None:
    rule = rule_of(op_of(fn, args, name))
    again = ShardingRule.parse(text, rule.sizes)
    assert again == rule and str(again) == text


def test_whole_factors_are_never_split() -> None:
    rule = ShardingRule.parse("(a b) -> (a b) {whole: b}", {"a": 8, "b": 8})
    assert rule.factors == ("a",)
    assert rule.valid({"a": ("x",)}, {"x": 2}) and not rule.valid({"b": ("x",)}, {"x": 2})


def test_a_minor_factor_is_split_only_behind_full_major_ones() -> None:
    rule = ShardingRule.parse("((a b)) -> (a b)", {"a": 4, "b": 4})
    mesh = {"x": 2, "y": 4}
    assert rule.valid({"a": ("y",), "b": ("x",)}, mesh)
    assert not rule.valid({"a": ("x",), "b": ("y",)}, mesh)
    assert not rule.valid({"b": ("x",)}, mesh)


def test_mixed_monoids_are_not_valid() -> None:
    rule = ShardingRule.parse("(a b) -> () {reduce: a b=max}", {"a": 6, "b": 4})
    assert rule.valid({"a": ("x",)}, {"x": 2, "y": 4})
    assert not rule.valid({"a": ("x",), "b": ("y",)}, {"x": 2, "y": 4})


def test_an_uneven_split_is_valid_unless_the_factor_is_even_or_its_dim_is_cut_elsewhere() -> None:
    mesh = {"y": 4}
    assert ShardingRule.parse("(a) -> (a)", {"a": 6}).valid({"a": ("y",)}, mesh)
    assert not ShardingRule.parse("(a) -> (a) {even: a}", {"a": 6}).valid({"a": ("y",)}, mesh)
    # 6 rows of 5 over 4: parts of 2 rows, 10 elements, but a quarter of the 30 elements is 8.
    assert not ShardingRule.parse("((a b)) -> (a b)", {"a": 6, "b": 5}).valid({"a": ("y",)}, mesh)
    # 2 by 11 over 2 by 4: as even parts of 22 the second row would begin in the fourth part.
    behind = ShardingRule.parse("((a b)) -> (a b)", {"a": 2, "b": 11})
    assert not behind.valid({"a": ("x",), "b": ("y",)}, {"x": 2, **mesh})
    assert ShardingRule.parse("((a b)) -> (a b) {exchange: a=halo}", {"a": 6, "b": 5}).valid(
        {"a": ("y",)}, mesh
    )


def test_an_op_without_a_rule_is_whole_everywhere() -> None:
    unknown = Primitive("unknown")
    unknown.def_abstract_eval(lambda x: x)
    op = op_of(unknown.bind, (f32(4, 4),), "unknown")
    assert family(op).name == "opaque" and not rule_of(op).factors


def test_a_primitive_belongs_to_one_family() -> None:
    from autoshard.rules import register

    with pytest.raises(ValueError, match="'dot_general' already belongs to family 'dot'"):
        register(families["add"], ["dot_general"])


# Reshape ---------------------------------------------------------------------------------------------


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    primes = draw(st.lists(st.sampled_from([2, 2, 2, 3, 5]), max_size=6))

    def cut(order: list[int]) -> tuple[int, ...]:
        places = sorted(draw(st.lists(st.integers(0, len(order)), max_size=3)))
        edges = [0, *places, len(order)]
        return tuple(math.prod(order[a:b]) for a, b in zip(edges, edges[1:], strict=False))

    return cut(primes), cut(draw(st.permutations(primes)))


@given(reshapes())
def test_factors_multiply_to_the_dims(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    left, right, sizes, whole = reshape_dims(*shapes)
    for dims, shape in zip((left, right), shapes, strict=True):
        assert tuple(math.prod(sizes[f] for f in dim) for dim in dims) == shape
    free = [[f for dim in dims for f in dim if f not in whole] for dims in (left, right)]
    assert free[0] == free[1]
    assert len(set(free[0])) == len(free[0])


@settings(max_examples=200)
@given(reshapes(), st.data())
def test_a_local_reshape_is_a_part_of_the_global_one(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], data: st.DataObject
) -> None:
    """Cut the source by a valid even split, reshape each part: the parts are those of the target."""
    left, right, sizes, whole = reshape_dims(*shapes)
    mesh = {"x": 2, "y": 3, "z": 2}
    rule = ShardingRule(
        inputs=(left,), outputs=(right,), sizes=sizes, even=frozenset(sizes), whole=frozenset(whole)
    )
    assignment: dict[str, tuple[str, ...]] = {}
    for axis in mesh:
        factor = data.draw(st.sampled_from([None, *rule.factors]))
        if factor is not None:
            more = {**assignment, factor: (*assignment.get(factor, ()), axis)}
            if rule.valid(more, mesh):
                assignment = more
    source, target = shapes
    array = np.arange(math.prod(source)).reshape(source)
    for place in np.ndindex(*mesh.values()):
        at = dict(zip(mesh, place, strict=True))
        part = _part(array, rule.layout(left, assignment).dims, mesh, at)
        want = _part(array.reshape(target), rule.layout(right, assignment).dims, mesh, at)
        np.testing.assert_array_equal(part.reshape(want.shape), want)


def _part(array: Any, dims: Any, mesh: dict[str, int], at: dict[str, int]) -> Any:
    for d, axes in enumerate(dims):
        index, ways = 0, 1
        for axis in axes:
            index, ways = index * mesh[axis] + at[axis], ways * mesh[axis]
        array = np.split(array, ways, axis=d)[index]
    return array
