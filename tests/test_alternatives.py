"""The next best plans: brute force over how the arguments are split finds the same, and bounds hold."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.choices import layouts
from autoshard.layout import to_spec
from autoshard.plan import Plan
from autoshard.solving import request_of

MESH = {"data": 2, "model": 4}


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mlp(x: Any, w: Any, scale: Any) -> Any:
    return jax.nn.gelu(x @ w) * scale


ARGS = (f32(512, 256), f32(256, 1024), f32(1024))


def plan_of(**options: Any) -> Plan:
    return autoshard.suggest(mlp, *ARGS, topology="v3:2x2", mesh=MESH, gap=0.0, **options)


def every_split() -> dict[tuple[Any, ...], float]:
    """Step seconds of the best plan for each way to split the arguments."""
    found = {}
    for picks in itertools.product(*(layouts(a.shape, {"data": 2}, even=True) for a in ARGS)):
        pinned = {f"[{i}]": to_spec(x) for i, x in enumerate(picks)}
        plan = autoshard.suggest(mlp, *ARGS, topology="v3:2x2", mesh={"data": 2}, annotations=pinned, gap=0.0)
        found[picks] = plan.step_seconds
    return found


def test_the_alternatives_are_the_next_best() -> None:
    every = every_split()
    plan = autoshard.suggest(mlp, *ARGS, topology="v3:2x2", mesh={"data": 2}, gap=0.0)
    found = [plan, *plan.alternatives(len(every))]
    assert [p.step_seconds for p in found] == pytest.approx(sorted(every.values()), rel=1e-9)
    assert {p.input_layouts for p in found} == set(every)
    for each in found:
        assert each.step_seconds == pytest.approx(every[each.input_layouts], rel=1e-9)


def test_each_alternative_is_the_best_that_differs() -> None:
    plan = plan_of()
    found = plan.alternatives(4)
    assert len({p.input_layouts for p in (plan, *found)}) == 5
    assert [p.gap for p in found] == [0.0] * 4
    assert list(found) == sorted(found, key=lambda p: p.step_seconds)
    assert plan.step_seconds <= found[0].step_seconds * (1 + 1e-9)


def test_plans_differ_where_asked() -> None:
    plan = plan_of()
    found = plan.alternatives(3, among=["[1]"])
    assert len({p.input_layouts[1] for p in (plan, *found)}) == 4
    best = min(
        plan_of(annotations={"[1]": to_spec(x)}).step_seconds
        for x in layouts(ARGS[1].shape, MESH, even=True)
        if x != plan.input_layouts[1]
    )
    assert found[0].step_seconds == pytest.approx(best, rel=1e-9)


def test_plans_that_split_over_other_axes() -> None:
    def axes(plan: Plan) -> list[set[str]]:
        return [{a for dim in x.dims for a in dim} for x in plan.input_layouts]

    plan = plan_of()
    found = [axes(p) for p in (plan, *plan.alternatives(4, by="axes"))]
    assert all(one != other for one, other in itertools.combinations(found, 2))
    with pytest.raises(autoshard.SpecError, match="told apart by 'dims'; choose from 'layouts', 'axes'"):
        plan.alternatives(1, by="dims")


def test_annotations_are_kept_and_exhausted_choices_end() -> None:
    pinned = {f"[{i}]": jax.sharding.PartitionSpec() for i in range(3)}
    assert plan_of(annotations=pinned).alternatives(3) == ()
    del pinned["[2]"]
    plan = plan_of(annotations=pinned)
    found = plan.alternatives(10)
    assert {p.input_layouts[:2] for p in found} == {plan.input_layouts[:2]}
    assert len(found) == len(layouts(ARGS[2].shape, MESH, even=True)) - 1


def test_alternatives_fit_where_the_plan_does() -> None:
    free = plan_of()
    limit = 0.9 * free.estimate.peak_bytes
    plan = plan_of(memory_limit_bytes=limit)
    assert plan.fits
    found = plan.alternatives(3)
    assert found and all(p.fits and p.memory_limit_bytes == limit for p in found)


def test_a_plan_from_a_file_says_what_to_do() -> None:
    plan = plan_of()
    again = Plan.from_json(plan.to_json())
    with pytest.raises(autoshard.PlanMismatchError, match=r"plan.attach\(fn, \*args\)"):
        again.alternatives(1)
    attached = again.attach(mlp, *ARGS)
    assert attached.to_json() == plan.to_json()
    assert request_of(attached).capacity_bytes == plan.memory_limit_bytes
    (one,), (other,) = plan.alternatives(1), attached.alternatives(1)
    assert one.input_layouts == other.input_layouts and one.step_seconds == other.step_seconds
    with pytest.raises(autoshard.PlanMismatchError):
        again.attach(lambda x, w, s: x @ w + s, *ARGS)


def test_a_path_that_names_nothing() -> None:
    with pytest.raises(autoshard.SpecError, match=r"among names '\[7\]'"):
        plan_of().alternatives(1, among=["[7]"])
