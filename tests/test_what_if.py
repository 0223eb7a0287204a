"""What if: the answer is the plan that a fresh search finds; shadow prices are differences between such plans."""

import math
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.solving import request_of
from autoshard.what_if import RATES
from tests.helpers.questions import MESH, plan_of

CHANGES: dict[str, dict[str, Any]] = {
    "annotations": {"annotations": {"[1]": P("model", "data")}},
    "mesh": {"mesh": {"data": 4, "model": 2}},
    "slice": {"topology": "v3:4x4", "mesh": {"data": 4, "model": 8}},
    "generation": {"topology": "v5e:2x4", "mesh": MESH},
    "memory": {"memory_limit_bytes": 2.4e7},
    "several": {"memory_limit_bytes": 2.8e7, "annotations": {"out": P("data")}, "mesh": {"data": 8}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_answer_is_that_of_a_fresh_search(change: str) -> None:
    plan = plan_of()
    found, fresh = plan.what_if(**CHANGES[change]), plan_of(**CHANGES[change])
    assert found.replace(name="", timings={}).to_json() == fresh.replace(name="", timings={}).to_json()
    assert found.step_seconds != plan.step_seconds
    assert list(autoshard.compare([plan, found]).index) == ["suggested", "what if"]
    assert request_of(found).session.source is request_of(plan).session.source


def test_another_limit_states_nothing_again() -> None:
    plan = plan_of()
    found = plan.what_if(memory_limit_bytes=6e6)
    assert request_of(found).stated is request_of(plan).stated


def test_own_annotations_stay_unless_replaced() -> None:
    plan = plan_of(annotations={"[1]": P("model"), "out": P("model")})
    found = plan.what_if(annotations={"out": P("data")})
    assert found.spec("[1]") == P("model") and found.out_specs == P("data")


def test_the_mesh_grows_with_the_slice() -> None:
    assert plan_of().what_if(topology="v3:4x4").mesh == {"data": 8, "model": 4}
    with pytest.raises(
        autoshard.MeshError, match="does not grow to it by a whole factor. Give the mesh, too"
    ):
        plan_of().what_if(topology="v5e:2x2")


def test_faster_links_are_worth_what_a_search_on_them_finds() -> None:
    plan = plan_of()
    prices = plan.shadow_prices()
    assert list(prices.prices) == ["HBM", *RATES]
    for resource in RATES:
        price = prices[resource]
        assert price.more_seconds <= 0 <= price.less_seconds
        assert price.more.step_seconds == pytest.approx(plan.step_seconds + price.more_seconds)
    assert any(prices[resource].less_seconds > 0 for resource in RATES)
    chips = [prices["ICI bandwidth"].less.estimate.machine.chip, plan.estimate.machine.chip]
    assert chips[0].link_bytes_per_second == pytest.approx(0.9 * chips[1].link_bytes_per_second)
    # What the same plan would pay bounds what is paid when all is decided anew.
    sent = sum(e.seconds for e in plan.estimate.entries if e.kind == "collective")
    assert prices["ICI bandwidth"].less_seconds <= sent * (1 / 0.9 - 1) * (1 + 1e-9)


def test_memory_is_worth_nothing_where_there_is_enough() -> None:
    price = plan_of().shadow_prices()["HBM"]
    assert (price.less_seconds, price.more_seconds) == (0.0, 0.0)


def test_scarce_memory_has_its_price() -> None:
    free = plan_of()
    limit, step = 0.75 * free.estimate.peak_bytes, 0.26 * free.estimate.peak_bytes
    plan = plan_of(memory_limit_bytes=limit)
    price = plan.shadow_prices(step)["HBM"]
    less, more = (plan_of(memory_limit_bytes=limit + s * step) for s in (-1, 1))
    assert price.less_seconds == pytest.approx(less.step_seconds - plan.step_seconds)
    assert price.more_seconds == pytest.approx(more.step_seconds - plan.step_seconds)
    assert price.less_seconds > 0 > price.more_seconds
    none = plan.shadow_prices(2**40)["HBM"]
    assert math.isinf(none.less_seconds)
    assert none.more_seconds == pytest.approx(free.step_seconds - plan.step_seconds)


def test_prices_print() -> None:
    prices = plan_of().shadow_prices()
    lines = str(prices).splitlines()
    assert lines[0].startswith("What resources are worth in a step of")
    assert [line.split("  ")[1] for line in lines[2:]] == list(prices.prices)
    assert prices._repr_html_().count("<tr>") == 5
