"""Completion: annotations are kept, it reaches a fix-point, and the known cases come out as people do them."""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.annotations import Pins, output_names
from autoshard.grouping import Block, Group
from autoshard.layout import Axes, Layout, from_spec, mesh_size, to_spec
from autoshard.partition.emitter import Decisions
from autoshard.program import Value, shape_of
from autoshard.propagate import Flow, complete
from autoshard.resting import settle
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


# Properties -------------------------------------------------------------------------------------------


class Watched(Flow):
    """Completion that counts how often anything but a refinement or a given layout changes."""

    undone = 0

    def _push(self, layout: tuple[Axes, ...], value: Value) -> None:
        before = list(self.dims.get(value, ()))
        super()._push(layout, value)
        self._count(before, self.dims[value])

    def _through(self, item: Group, level: int) -> None:
        before = dict(self.groups.get(item, {}))
        super()._through(item, level)
        self._count(list(before.values()), [self.groups[item].get(f, ()) for f in before])

    def _count(self, before: list[Axes], after: list[Axes]) -> None:
        self.undone += sum(new[: len(old)] != old for old, new in zip(before, after, strict=False))


def some_pins(block: Block, mesh: Mapping[str, int], rng: np.random.Generator) -> Pins:
    """Fix some dims of some values and outputs, and some factors of some groups."""
    drawn = random_decisions(block, mesh, rng)

    def part(sizes: Sequence[int], splits: Sequence[Axes]) -> list[Axes | None]:
        even = (n % mesh_size(axes, mesh) == 0 for n, axes in zip(sizes, splits, strict=True))
        return [axes if e and rng.random() < 0.6 else None for e, axes in zip(even, splits, strict=True)]

    found = Pins()
    for j, (atom, layout) in enumerate(zip(block.outputs, drawn.outputs, strict=True)):
        if rng.random() < 0.3:
            found.outputs[j] = tuple(part(shape_of(atom), layout.dims))
    for value in (v for v in drawn.layouts if rng.random() < 0.3):
        found.values[value] = tuple(part(value.shape, drawn.layouts[value].dims))
    for item, assignment in drawn.assignments.items():
        if rng.random() < 0.1:
            factors = item.rule.factors
            axes = part([item.rule.sizes[f] for f in factors], [assignment.get(f, ()) for f in factors])
            found.groups[item] = {f: x for f, x in zip(factors, axes, strict=True) if x is not None}
    return found


@pytest.mark.parametrize("seed", range(40))
def test_completion_refines_to_a_fix_point_and_changes_nothing_given(seed: int) -> None:
    made, rng = random_program(seed + 700), np.random.default_rng(seed)
    session = session_of(made.fn, made.args, MESHES[seed % len(MESHES)])
    block, mesh = session.source.block, session.machine.mesh
    fixed = some_pins(block, mesh, rng)
    flow = Watched(block, session.resharder, fixed, session.source.state)
    flow.run()
    assert not flow.undone
    reached = copy.deepcopy(([*flow.dims.values()], [*flow.groups.values()]))
    flow.run()
    assert ([*flow.dims.values()], [*flow.groups.values()]) == reached
    decisions = settle(block, flow.decisions(), session.resharder, fixed)
    given = [(x, decisions.layouts[v].dims) for v, x in fixed.values.items()]
    given += [(x, decisions.outputs[j].dims) for j, x in fixed.outputs.items()]
    for item, factors in fixed.groups.items():
        given += [(tuple(factors.values()), tuple(decisions.assignments[item].get(f, ()) for f in factors))]
    for wanted, found in given:
        assert all(axes is None or axes == x for axes, x in zip(wanted, found, strict=True))
    assert not differences(run_spmd(session, decisions, made.args), made.expected)


# Priorities -------------------------------------------------------------------------------------------


def test_what_passes_goes_before_what_computes() -> None:
    """The add has its batch from z before the product offers it the weight's axis."""
    plan = evaluated(
        lambda x, w, z: x @ w + z, (f32(8, 512), f32(512, 64), f32(8, 64)), (None, P(None, "data"), P("data"))
    )
    assert plan.out_specs == P("data")


def test_a_batch_dim_of_a_product_goes_first() -> None:
    """Both operands claim the axis; the smaller one for a dim that all three arrays have."""
    plan = evaluated(
        lambda x, w: jnp.einsum("bij,bjk->bik", x, w),
        (f32(8, 16, 16), f32(8, 16, 512)),
        (P("data"), P(None, None, "data")),
    )
    assert plan.out_specs == P("data")


def test_what_is_done_with_a_product_counts_beside_its_operands() -> None:
    """The larger operand alone would win; moving the result to where it is read would cost more."""

    def fn(x: Any, w: Any, labels: Any) -> Any:
        return jnp.square(x @ w - labels).sum(-1)

    shapes = f32(2048, 256), f32(256, 4096), f32(2048, 4096)
    plan = evaluated(fn, shapes, (P("data"), P(None, "data"), P("data")))
    assert plan.out_specs == P("data")
    assert [(c.kind, c.shape) for c in plan.estimate.collectives] == [("all_gather", (256, 4096))]
    plan = evaluated(lambda x, w: x @ w, shapes[:2], (P("data"), P(None, "data")))
    assert plan.out_specs == P(None, "data")


def test_broadcasts_go_last_and_backwards_before_forwards() -> None:
    def fn(bias: Any, x: Any) -> Any:
        return jnp.tanh(x @ jnp.ones((64, 512))) + bias

    shapes = f32(512), f32(16, 64)
    assert evaluated(fn, shapes, (P("data"), P("data"))).out_specs == P("data")
    assert evaluated(fn, shapes, (P("data"), None)).out_specs == P(None, "data")
    plan = autoshard.evaluate(fn, *shapes, topology="v3", mesh=MESH, out_specs=P(None, "model"))
    assert plan.in_specs[0] == P("model")


def test_compatible_shardings_merge_to_a_finer_one() -> None:
    plan = evaluated(lambda x, y: x + y, (f32(16, 32), f32(16, 32)), (P("data"), P(None, "model")))
    assert plan.out_specs == P("data", "model")


@pytest.mark.parametrize("kind", ["scan", "while", "cond"])
@pytest.mark.parametrize("backwards", [False, True])
def test_bodies_of_loops_and_branches_are_passed_both_ways(kind: str, backwards: bool) -> None:
    def fn(x: Any, n: Any) -> Any:
        if kind == "scan":
            return lax.scan(lambda c, _: (jnp.tanh(c), None), x, length=3)[0]
        if kind == "while":
            return lax.while_loop(lambda c: c[1] < 3, lambda c: (jnp.tanh(c[0]), c[1] + 1), (x, n))[0]
        return lax.cond(n > 0, jnp.tanh, lambda x: x * 2, x)

    shapes = f32(16, 32), jax.ShapeDtypeStruct((), jnp.int32)
    spec = P("data", "model")
    if backwards:
        plan = autoshard.evaluate(fn, *shapes, topology="v3", mesh=MESH, out_specs=spec)
    else:
        plan = evaluated(fn, shapes, (spec, None))
    assert (plan.in_specs[0], plan.out_specs) == (spec, spec) and not collectives(plan)


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


def test_what_a_product_finds_is_passed_on_before_the_next_op_computes() -> None:
    """A batch meets a table split by vocabulary over the same axis: the scores' gradient keeps their split.

    Its scatter knows by itself only how the batch is split.
    """
    b, v, m = 1024, 32768, 512

    def loss(table: Any, x: Any, wanted: Any) -> Any:
        scores = jax.nn.log_softmax(x @ table.T)
        return -jnp.mean(jnp.take_along_axis(scores, wanted[:, None], axis=-1))

    tokens = jax.ShapeDtypeStruct((b,), jnp.int32)
    plan = evaluated(
        jax.grad(loss, (0, 1)), (f32(v, m), f32(b, m), tokens), (P("data"), P("data"), P("data")), {"data": 8}
    )
    assert max(math.prod(c.shape) for c in plan.estimate.collectives) == b * m


def test_a_filter_that_both_passes_of_a_convolution_read_is_gathered_once() -> None:
    """The gradient reads it reversed: it is reversed where it lies gathered."""

    def loss(w: Any, x: Any) -> Any:
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.square(y).sum()

    plan = evaluated(
        jax.grad(loss, (0, 1)),
        (f32(3, 3, 64, 64), f32(64, 16, 16, 64)),
        (P(None, None, "data"), P("data")),
        {"data": 8},
    )
    assert [c.shape for c in plan.estimate.collectives if c.kind == "all_gather"] == [(3, 3, 64, 64)]
