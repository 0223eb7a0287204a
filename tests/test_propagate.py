"""Completion: annotations are kept, it reaches a fix-point, and the known cases come out as people do them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.annotations import output_names
from autoshard.layout import Layout, from_spec, to_spec
from autoshard.partition.emitter import Decisions
from autoshard.propagate import complete
from autoshard.session import Session
from tests.helpers.programs import random_program
from tests.helpers.running import MESHES, differences, random_decisions, run_spmd, session_of

MESH = {"data": 2, "model": 4}


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def given_specs(session: Session, rng: np.random.Generator) -> dict[str, P]:
    """Annotate some inputs and outputs at random."""
    traced, mesh = session.source.traced, session.machine.mesh
    layouts = random_decisions(session.source.block, mesh, rng)
    specs = {
        n: to_spec(layouts.layouts[v])
        for n, v in zip(traced.in_names, session.source.block.inputs, strict=True)
    }
    specs |= {n: to_spec(x) for n, x in zip(output_names(traced), layouts.outputs, strict=True)}
    return {n: spec for n, spec in specs.items() if rng.random() < 0.4}


def specs_of(session: Session, decisions: Decisions) -> dict[str, Layout]:
    traced = session.source.traced
    found = {
        n: decisions.layouts[v] for n, v in zip(traced.in_names, session.source.block.inputs, strict=True)
    }
    return found | dict(zip(output_names(traced), decisions.outputs, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_what_was_given_is_kept_and_completing_again_changes_nothing(seed: int) -> None:
    made, rng = random_program(seed + 500), np.random.default_rng(seed)
    session = session_of(made.fn, made.args, MESHES[seed % len(MESHES)])
    given = given_specs(session, rng)
    decisions, notes = complete(session, given)
    found = specs_of(session, decisions)
    for name, spec in given.items():
        assert found[name] == from_spec(spec, len(found[name].dims)), name
    assert not notes
    again, _ = complete(session, {n: to_spec(x) for n, x in found.items()})
    assert specs_of(session, again) == found


@pytest.mark.parametrize("seed", range(6))
def test_a_completed_program_computes_the_function(seed: int) -> None:
    made, rng = random_program(seed + 600), np.random.default_rng(seed)
    session = session_of(made.fn, made.args, MESHES[seed % len(MESHES)])
    decisions, _ = complete(session, given_specs(session, rng))
    assert not differences(run_spmd(session, decisions, made.args), made.expected)


def collectives(plan: autoshard.Plan) -> list[tuple[str, tuple[str, ...]]]:
    return [(c.kind, c.axes) for c in plan.estimate.collectives]


def evaluated(fn: Any, args: Any, in_specs: Any, mesh: Mapping[str, int] = MESH) -> autoshard.Plan:
    return autoshard.evaluate(fn, *args, topology="v3", mesh=mesh, in_specs=in_specs)


def test_a_split_batch_flows_to_activations_without_collectives() -> None:
    def fn(x: Any, w: Any) -> Any:
        return jax.nn.softmax(jnp.tanh(x @ w)), x.reshape(16, 4, 8)

    plan = evaluated(fn, (f32(16, 32), f32(32, 64)), (P("data"), None))
    assert plan.in_specs == (P("data"), P()) and plan.out_specs == (P("data"), P("data"))
    assert not collectives(plan)


def test_column_then_row_weights_need_one_all_reduce() -> None:
    def fn(x: Any, up: Any, down: Any) -> Any:
        return jnp.tanh(x @ up) @ down

    plan = evaluated(fn, (f32(16, 32), f32(32, 64), f32(64, 32)), (P("data"), P(None, "model"), P("model")))
    assert collectives(plan) == [("all_reduce", ("model",))]
    assert plan.out_specs == P("data")


def test_column_weights_alone_leave_their_columns_split() -> None:
    plan = evaluated(lambda x, w: jnp.tanh(x @ w), (f32(16, 32), f32(32, 64)), (P("data"), P(None, "model")))
    assert not collectives(plan) and plan.out_specs == P("data", "model")


def test_weights_split_over_the_batch_axis_are_gathered() -> None:
    """ZeRO-3: the batch keeps the axis, the weight is collected for its product."""
    plan = evaluated(lambda x, w: jnp.tanh(x @ w), (f32(4096, 64), f32(64, 32)), (P("data"), P("data")))
    assert collectives(plan) == [("all_gather", ("data",))]
    assert plan.out_specs == P("data")


def test_gradients_of_a_split_batch_are_reduced_once() -> None:
    def fn(w: Any, x: Any) -> Any:
        return jax.grad(lambda w: jnp.square(x @ w).sum())(w)

    plan = evaluated(fn, (f32(32, 64), f32(16, 32)), (None, P("data")))
    assert collectives(plan) == [("all_reduce", ("data",))]


def test_a_dim_that_does_not_divide_is_left_whole_and_said() -> None:
    plan = evaluated(lambda x: x * 2, (f32(7, 8),), (P("data"),))
    assert plan.in_specs == (P(),) and any("dim 0 = 7 is not divisible" in n for n in plan.notes)


def test_a_constraint_in_the_function_is_kept() -> None:
    from jax.sharding import AxisType, NamedSharding

    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def fn(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(jnp.tanh(x), NamedSharding(mesh, P(None, "model"))) * 2

    assert evaluated(fn, (f32(16, 32),), (P("data"),)).out_specs == P(None, "model")


def test_weights_that_a_loop_reads_are_gathered_once_before_it() -> None:
    def fn(w: Any, state: Any) -> Any:
        return jax.lax.scan(lambda s, _: (jnp.tanh(s @ w), None), state, None, length=7)[0]

    plan = evaluated(fn, (f32(256, 256), f32(512, 256)), (P("data"), P("data")), {"data": 8})
    assert [(c.kind, c.axes, c.count) for c in plan.estimate.collectives] == [("all_gather", ("data",), 1)]


def test_weights_that_do_not_fit_whole_are_gathered_at_every_trip() -> None:
    side, layers = 32768, 4  # four gathered weights of 4 GiB are more than a device holds

    def fn(weights: Any, state: Any) -> Any:
        def step(s: Any, _: None) -> tuple[Any, None]:
            for w in weights:
                s = jnp.tanh(s @ w)
            return s, None

        return jax.lax.scan(step, state, None, length=7)[0]

    plan = evaluated(fn, ([f32(side, side)] * layers, f32(side, side)), (P("data"), P("data")), {"data": 8})
    counts = [c.count for c in plan.estimate.collectives if c.kind == "all_gather"]
    assert counts.count(1) >= 1 and counts.count(7) >= 1 and len(counts) == layers


def test_a_whole_weight_is_not_gathered_for_its_split_momentum() -> None:
    """ZeRO-1: the gradient is scattered for the update, and the new weight gathered once."""

    def fn(w: Any, v: Any, x: Any) -> Any:
        v = v + jax.grad(lambda w: jnp.square(x @ w).sum())(w)
        return w - v, v

    shapes = (f32(256, 128), f32(256, 128), f32(512, 256))
    plan = autoshard.evaluate(
        fn,
        *shapes,
        topology="v3:2x2",
        mesh={"data": 8},
        in_specs=(P(), P("data"), P("data")),
        out_specs=(P(), P("data")),
    )
    kinds = sorted(c.kind for c in plan.estimate.collectives)
    assert kinds == ["all_gather", "reduce_scatter"]


def test_partial_sums_are_added_before_they_are_reduced() -> None:
    def fn(x: Any, w: Any, y: Any, u: Any) -> Any:
        return x @ w + y @ u

    plan = evaluated(
        fn, (f32(16, 32), f32(32, 64)) * 2, (P(None, "model"), P("model"), P(None, "model"), P("model"))
    )
    assert collectives(plan) == [("all_reduce", ("model",))]


def test_a_product_gathers_its_weight_where_that_sends_less_than_its_partial_sums() -> None:
    """The weight is the larger operand, but keeping it in place would leave partial sums larger still."""
    plan = evaluated(
        lambda x, w: jnp.einsum("bm,mh->bh", x, w),
        (f32(1024, 256), f32(256, 4096)),
        (P("data"), P("data")),
        {"data": 8},
    )
    assert collectives(plan) == [("all_gather", ("data",))] and plan.out_specs == P("data")
