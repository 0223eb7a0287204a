"""Communication beside kernels: the schedule of a body, and what it makes of a program's step."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.partition.schedule import Task, Unit, hidden_seconds


def core(seconds, *after):
    return Task(unit=Unit.CORE, seconds=seconds, after=after)


def wire(seconds, *after):
    return Task(unit=Unit.WIRE, seconds=seconds, after=after)


def both(seconds, *after):
    return Task(unit=Unit.BOTH, seconds=seconds, after=after)


@st.composite
def bodies(draw):
    tasks = []
    for i in range(draw(st.integers(0, 10))):
        after = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set()
        seconds = draw(st.integers(0, 5))
        unit = draw(st.sampled_from(list(Unit)))
        tasks.append(Task(unit=unit, seconds=float(seconds), after=tuple(after)))
    return tasks


def _total(tasks, *units):
    return sum(t.seconds for t in tasks if t.unit in units)


def _longest_chain(tasks):
    ends = []
    for t in tasks:
        ends.append(t.seconds + max((ends[j] for j in t.after), default=0.0))
    return max(ends, default=0.0)


@given(bodies())
def test_a_schedule_is_no_faster_than_its_units_and_chains_and_no_slower_than_one_by_one(tasks):
    hidden = hidden_seconds(tasks)
    assert all(0 <= h <= t.seconds for h, t in zip(hidden, tasks, strict=True))
    assert all(h == 0 for h, t in zip(hidden, tasks, strict=True) if t.unit is not Unit.WIRE)
    step = sum(t.seconds for t in tasks) - sum(hidden)
    assert step >= _total(tasks, Unit.CORE, Unit.BOTH) - 1e-9
    assert step >= _total(tasks, Unit.WIRE, Unit.BOTH) - 1e-9
    assert step >= _longest_chain(tasks) - 1e-9


@given(bodies())
def test_on_the_core_alone_nothing_is_hidden(tasks):
    assert not any(
        hidden_seconds([t if t.unit is not Unit.WIRE else core(t.seconds, *t.after) for t in tasks])
    )


@pytest.mark.parametrize(
    ("tasks", "hidden"),
    [
        ([wire(3), core(3, 0)], 0),  # the only reader waits
        ([wire(3), core(5), core(1, 0, 1)], 3),
        (
            [wire(3), wire(2), core(2, 0), core(9, 1, 2)],
            2,
        ),  # the wire takes one at a time, the longer way first
        ([both(3), core(5)], 0),
        ([wire(2), both(1), core(4, 0, 1)], 0),  # one that takes both waits for the wire, and is waited for
        ([core(0), wire(4, 0), core(0), core(3, 2)], 3),  # what takes no time holds nobody up
        ([core(6), core(1), wire(5, 1), core(1, 2)], 5),  # what leads to the wire goes first
    ],
)
def test_small_schedules(tasks, hidden):
    assert sum(hidden_seconds(tasks)) == hidden


def _two_layers(weights, x):
    for w in weights:
        x = jax.nn.relu(x @ w)
    return x


def _evaluated(topology, **options):
    weights = [jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)] * 4
    x = jax.ShapeDtypeStruct((32768, 4096), jnp.bfloat16)
    return autoshard.evaluate(
        _two_layers,
        weights,
        x,
        topology=topology,
        mesh={"data": 16},
        in_specs=([P("data")] * 4, P("data")),
        out_specs=P("data"),
        **options,
    )


def test_gathers_of_later_layers_run_beside_the_first():
    plan = _evaluated("v5e:4x4")
    gathers = [e for e in plan.estimate.entries if e.title == "all_gather"]
    assert len(gathers) == 4
    assert plan.step_seconds + plan.estimate.hidden_seconds == pytest.approx(plan.estimate.serial_seconds)
    assert sum(plan.estimate.breakdown().values()) == pytest.approx(plan.step_seconds)
    products = sum(e.seconds for e in plan.estimate.entries if e.kind == "kernel")
    wires = sum(e.seconds for e in gathers)
    assert plan.step_seconds >= max(products, wires)
    assert plan.estimate.hidden_seconds > 0.5 * min(products, wires)
    assert "of communication beside kernels" in str(plan)


def test_by_default_nothing_is_beside_on_v3_and_one_may_say_otherwise():
    plain = _evaluated("v3:2x4")
    assert plain.estimate.hidden_seconds == 0
    assert plain.step_seconds == plain.estimate.serial_seconds
    asked = _evaluated("v3:2x4", async_collectives=["all_gather"])
    assert asked.step_seconds < plain.step_seconds
    assert asked.estimate.serial_seconds == plain.estimate.serial_seconds
    assert any("all_gather" in note for note in asked.notes)
    assert _evaluated("v5e:4x4", async_collectives=[]).estimate.hidden_seconds == 0


def test_a_kind_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"'gather'.*all_gather"):
        _evaluated("v3:2x4", async_collectives=["gather"])


def test_a_plan_in_json_keeps_what_is_hidden():
    plan = _evaluated("v5e:4x4")
    again = autoshard.Plan.from_json(plan.to_json())
    assert again.step_seconds == plan.step_seconds
    assert again.estimate.hidden_seconds == plan.estimate.hidden_seconds
