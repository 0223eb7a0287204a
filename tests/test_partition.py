"""The partitioned program computes what the original does, however it is split."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.choices import assignments
from autoshard.grouping import PARTIAL
from autoshard.layout import Layout
from autoshard.partition.emitter import Decisions
from autoshard.rules import Kind
from autoshard.session import Session
from tests.helpers.programs import FAMILIES, random_program
from tests.helpers.running import (
    MESHES,
    differences,
    random_decisions,
    run_spmd,
    session_of,
    whole_decisions,
)

# More programs: AUTOSHARD_PROGRAMS=400 pytest tests/test_partition.py
PROGRAMS = int(os.environ.get("AUTOSHARD_PROGRAMS", "4"))


def _check(seed: int, families: list[str] | None = None, most: int = 8) -> None:
    made = random_program(seed, families, most)
    rng = np.random.default_rng(seed)
    mesh = MESHES[int(rng.integers(len(MESHES)))]
    session = session_of(made.fn, made.args, mesh)
    decisions = random_decisions(session.source.block, mesh, rng)
    wrong = differences(run_spmd(session, decisions, made.args), made.expected)
    assert not wrong, (made.names, mesh, wrong)


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_random_programs_split_at_random(seed: int) -> None:
    _check(seed)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_split_at_random(family: str) -> None:
    _check(1000 + list(FAMILIES).index(family), [family], most=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10_000, 10_300))
def test_many_random_programs_split_at_random(seed: int) -> None:
    _check(seed)


@pytest.mark.parametrize("seed", range(int(os.environ.get("AUTOSHARD_PLANS", "6"))))
def test_suggested_plans_compute_the_function(seed: int) -> None:
    made = random_program(seed, most=5)
    plan = autoshard.suggest(made.fn, *made.args, topology="v3", mesh=MESHES[seed % len(MESHES)])
    for applied in (plan.spmd(made.fn), plan.jit(made.fn)):
        assert not differences(jax.tree.leaves(applied(*made.args)), made.expected)


# Programs that went wrong once, under every assignment of the group in question ------------------------


def _f32(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), jnp.float32)


def _with(session: Session, choices: dict[str, Any]) -> Decisions:
    """Keep everything whole but the groups named by primitive, which are split as given."""
    whole = whole_decisions(session.source.block)
    groups = dict(whole.assignments)
    for item in groups:
        if item.title in choices:
            groups[item] = choices[item.title]
    return Decisions(assignments=groups, layouts=whole.layouts, outputs=whole.outputs)


KEYS = jax.random.split(jax.random.key(3, impl="rbg"), 8)
FORMER = {
    "outer product": ("dot_general", lambda x: lax.dot_general(x, x, (((), ()), ((), ()))), (_f32(8),)),
    "gram": ("dot_general", lambda x: x @ x.T, (_f32(8, 4),)),
    "square": ("dot_general", lambda x: x @ x, (_f32(8, 8),)),
    "bool lookup": ("gather", lambda x, i: (x > 0)[i], (_f32(8, 4), jnp.arange(8) % 5)),
    "key lookup": (
        "gather",
        lambda i: jax.random.key_data(jax.random.split(jax.random.key(0), 8)[i]),
        (jnp.arange(4),),
    ),
    "rbg keys": ("random_bits", jax.vmap(lambda k: jax.random.bits(k, (4,))), (KEYS,)),
    "transposing reshape": ("reshape", lambda x: lax.reshape(x, (8, 4), (1, 0, 2)), (_f32(2, 8, 2),)),
    "one dropped row": (
        "scatter-add",
        lambda x, i, u: (2 * x.at[i].add(u, mode="drop"), x.at[i].max(u)),
        (_f32(8, 4), jnp.array([4]), _f32(1, 4, seed=1)),
    ),
    "slice past the end, split again": (
        "dynamic_slice",
        lambda x, i: jnp.tanh(lax.dynamic_slice_in_dim(2 * x, i, 4, 0)),
        (_f32(8, 4), jnp.array(7)),
    ),
    "an empty part": ("split", lambda x: lax.split(2 * x, (3, 0, 5)), (_f32(8, 4),)),
    "a condition per example": (
        "gt..reduce_or",
        jax.vmap(lambda x, n: lax.while_loop(lambda c: c[1] > 0, lambda c: (c[0] * 2, c[1] - 1), (x, n))),
        (_f32(8, 4), jnp.array([3, 0, 5, 1, 2, 2, 0, 4])),
    ),
    "unsigned indices": (
        "gather",
        lambda x, i: jnp.take(x, i, 0, mode="clip"),
        (_f32(8, 4), jnp.array([0, 7, 9, 4], jnp.uint32)),
    ),
    "grouped convolution": (
        "conv_general_dilated",
        jax.grad(
            lambda x, w: jnp.square(
                lax.conv_general_dilated(
                    x, w, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2
                )
            ).sum(),
            (0, 1),
        ),
        (_f32(2, 4, 4, 4), _f32(3, 1, 2, 4, seed=1)),
    ),
}


@pytest.mark.parametrize("name", FORMER)
def test_former_mistakes_under_every_split(name: str) -> None:
    title, fn, args = FORMER[name]
    mesh = {"a": 2, "b": 2}
    session = session_of(fn, args, mesh)
    expected = jax.tree.leaves(fn(*args))
    items = [g for g in session.source.block.walk() if g.title == title]
    assert items
    options = {str(a): a for item in items for a in assignments(item.rule, mesh) if PARTIAL not in a}
    for assignment in list(options.values())[:10]:
        valid = [g for g in items if assignment in assignments(g.rule, mesh)]
        decisions = _with(session, {})
        groups = {**decisions.assignments, **{g: assignment for g in valid}}
        changed = Decisions(assignments=groups, layouts=decisions.layouts, outputs=decisions.outputs)
        assert not differences(run_spmd(session, changed, args), expected), assignment


def test_a_partial_sum_is_not_added_to_a_whole_array() -> None:
    """In a group of linear ops either all inputs are partial or none: a whole array is no partial sum."""
    session = session_of(lambda x, y, w: x @ w + y, (_f32(8, 4), _f32(8, 2), _f32(4, 2)), {"a": 2})
    items = {g.title: g for g in session.source.block.groups}
    product, total = (
        items["dot_general"],
        next(g for g in session.source.block.groups if g.rule.linear == (0, 1)),
    )
    (contracted,) = product.rule.reduce
    decisions = _with(session, {"dot_general": {contracted: ("a",)}, total.title: {PARTIAL: ("a",)}})
    with pytest.raises(AssertionError, match="cannot go from"):
        run_spmd(session, decisions, (_f32(8, 4), _f32(8, 2), _f32(4, 2)))


def test_partial_sums_pass_through_linear_groups() -> None:
    """`(x w + y v)^T`, both products partial, reduced once at the end."""
    args = (_f32(8, 4), _f32(4, 2, seed=1), _f32(8, 4, seed=2), _f32(4, 2, seed=3))
    session = session_of(lambda x, w, y, v: (x @ w + y @ v).T.reshape(4, 4), args, {"a": 2, "b": 2})
    choices: dict[Any, Any] = {}
    for item in session.source.block.walk():
        if item.title == "dot_general":
            (contracted,) = item.rule.reduce
            choices[item] = {contracted: ("a", "b")}
        else:
            choices[item] = (
                {PARTIAL: ("a", "b")}
                if item.rule.linear and item.inputs[0] not in session.source.block.inputs
                else {}
            )
    whole = whole_decisions(session.source.block)
    decisions = Decisions(assignments=choices, layouts=whole.layouts, outputs=whole.outputs)
    estimate = session.estimate(decisions)
    assert [(c.kind, c.axes) for c in estimate.collectives] == [("all_reduce", ("a", "b"))]
    x, w, y, v = args
    assert not differences(run_spmd(session, decisions, args), [(x @ w + y @ v).T.reshape(4, 4)])


def test_a_suggested_plan_may_add_partial_sums() -> None:
    args = tuple(_f32(*shape, seed=i) for i, shape in enumerate([(64, 4096), (4096, 1024)] * 2))
    fn = lambda x, w, y, v: x @ w + y @ v  # noqa: E731
    given = {"[0]": P(None, "a"), "[1]": P("a"), "[2]": P(None, "a"), "[3]": P("a"), "out": P()}
    plan = autoshard.suggest(fn, *args, topology="v3", mesh={"a": 8}, annotations=given)
    assert any(a.get(PARTIAL) for a in plan.assignments)
    assert [(c.kind, c.axes) for c in plan.estimate.collectives] == [("all_reduce", ("a",))]
    for applied in (plan.spmd(fn), plan.jit(fn)):
        assert not differences([applied(*args)], [fn(*args)])


def test_threefry_bits_are_made_in_parts() -> None:
    """A device makes the bits of its own part only: nothing of the whole shape appears."""
    fn = lambda k: jax.random.bits(k, (64, 32))  # noqa: E731
    session = session_of(fn, (jax.random.key(1),), {"a": 8})
    (item,) = [g for g in session.source.block.groups if g.title == "random_bits"]
    whole = whole_decisions(session.source.block)
    decisions = Decisions(
        assignments={**whole.assignments, item: {item.rule.factors[0]: ("a",)}},
        layouts=whole.layouts,
        outputs=(Layout((("a",), ())),),
    )
    text = str(jax.make_jaxpr(session.program(decisions))(jax.random.key(1)))
    assert "u32[8,32]" in text and "random_bits" not in text
    assert not differences(run_spmd(session, decisions, (jax.random.key(1),)), [fn(jax.random.key(1))])


def test_control_groups_are_not_assigned() -> None:
    made = random_program(3, ["loop"], most=2)
    session = session_of(made.fn, made.args, {"a": 2})
    assert all(
        g.kind not in (Kind.CONTROL, Kind.IDENTITY) for g in whole_decisions(session.source.block).assignments
    )


def test_a_scatter_left_with_one_row_on_each_device_keeps_what_lies_at_the_edge() -> None:
    """XLA merges the cut of the operand with the scatter of a row that is dropped, and reads past the edge."""
    x, at, to = jnp.array([1.0, 0, -3, -3, 3, 2, 2, 0]), jnp.array([7, 4, 7, 6]), jnp.array([-3.0, -1, -3, 0])
    session = session_of(lambda x, at, to: x.at[at].min(to), (x, at, to), {"a": 2, "b": 4})
    whole = whole_decisions(session.source.block)
    (scatter,) = (item for item in whole.assignments if item.title == "scatter-min")
    (columns,) = scatter.rule.outputs[0][0]
    (rows,) = scatter.rule.reduce
    assignments = {**whole.assignments, scatter: {columns: ("a",), rows: ("b",)}}
    split = Decisions(assignments=assignments, layouts=whole.layouts, outputs=whole.outputs)
    assert not differences(run_spmd(session, split, (x, at, to)), [x.at[at].min(to)])
