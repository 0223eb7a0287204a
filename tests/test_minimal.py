"""A few annotations: completion finds the plan again from them, and from none fewer."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.minimal import TOLERANCE, Minimal
from autoshard.plan import Plan
from autoshard.zoo import dense
from autoshard.zoo.dense_config import PRESETS, scaled_down

MESH = {"data": 2, "model": 4}


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mlp(params: Any, x: Any) -> Any:
    def loss(p: Any) -> Any:
        hidden = jax.nn.gelu(x @ p["up"])
        return jnp.square(hidden @ p["down"]).mean()

    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, jax.grad(loss)(params))


MLP = mlp, ({"up": f32(2048, 8192), "down": f32(8192, 2048)}, f32(16384, 2048))


def again(program: Any, plan: Plan, found: Minimal) -> Plan:
    """Complete the annotations by the public way."""
    fn, args = program
    return autoshard.evaluate(fn, *args, topology="v3:2x2", mesh=plan.mesh, annotations=found.annotations)


def test_an_mlp_takes_few() -> None:
    fn, args = MLP
    plan = autoshard.suggest(fn, *args, topology="v3:2x2", mesh=MESH, donate_argnums=(0,))
    found = plan.minimal()
    assert found.found and len(found.annotations) <= 4
    completed = again(MLP, plan, found)
    assert completed.input_layouts == plan.input_layouts
    assert completed.output_layouts == plan.output_layouts
    assert completed.step_seconds <= plan.step_seconds * (1 + TOLERANCE)


def test_a_transformer_takes_few() -> None:
    fn, args = dense.train_step(scaled_down(PRESETS["1b"]))
    plan = autoshard.suggest(
        fn, *args, topology="v3:2x2", mesh={"data": 2, "model": 2}, donate_argnums=(0, 1)
    )
    found = plan.minimal()
    assert found.found and len(found.annotations) <= 4 and len(plan.inputs) == 36
    completed = again((fn, args), plan, found)
    assert completed.input_layouts == plan.input_layouts
    assert completed.step_seconds <= plan.step_seconds * (1 + TOLERANCE)


def test_none_can_be_left_out() -> None:
    fn, args = MLP
    plan = autoshard.suggest(fn, *args, topology="v3:2x2", mesh=MESH)
    found = plan.minimal()
    for key in found.annotations:
        fewer = {k: spec for k, spec in found.annotations.items() if k != key}
        completed = autoshard.evaluate(fn, *args, topology="v3:2x2", mesh=MESH, annotations=fewer)
        assert (
            completed.input_layouts != plan.input_layouts
            or completed.output_layouts != plan.output_layouts
            or completed.step_seconds > plan.step_seconds * (1 + TOLERANCE)
        )


def test_whole_plans_need_none() -> None:
    plan = autoshard.suggest(lambda x: x + 1, f32(8), topology="v3:2x2", mesh=MESH, annotations={"[0]": P()})
    found = plan.minimal()
    assert found.found and found.annotations == {} and found.inside == {}
    assert str(found).startswith("# Completed, these 0 make the plan")


def test_it_prints_as_code() -> None:
    fn, args = MLP
    plan = autoshard.suggest(fn, *args, topology="v3:2x2", mesh=MESH, donate_argnums=(0,))
    found = plan.minimal()
    names: dict[str, Any] = {}
    exec(str(found), names)
    assert (
        jax.tree.structure(names["in_specs"], is_leaf=lambda x: x is None or isinstance(x, P)) == plan.in_tree
    )
    assert names["in_specs"] == found.in_specs
    assert names.get("annotations", {}) == found.inside


def test_a_plan_without_its_program() -> None:
    fn, args = MLP
    plan = autoshard.suggest(fn, *args, topology="v3:2x2", mesh=MESH)
    with pytest.raises(autoshard.PlanMismatchError, match="attach"):
        Plan.from_json(plan.to_json()).minimal()
