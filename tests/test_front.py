"""Step time against memory: no plan of a front is beaten, and each is what a search under its limit finds."""

import itertools
from typing import Any

import pytest

import autoshard
from autoshard.front import Front
from tests.helpers.questions import ARGS, MESH, mlp, plan_of


def front_of(**options: Any) -> Front:
    return autoshard.pareto(mlp, *ARGS, **{"topology": "v3:2x2", "mesh": MESH, "gap": 0.0, **options})


def points(front: Front) -> list[tuple[float, float]]:
    return [(plan.step_seconds, plan.estimate.peak_bytes) for plan in front]


@pytest.mark.parametrize("mesh", [MESH, None], ids=["given", "searched"])
def test_no_plan_is_beaten(mesh: dict[str, int] | None) -> None:
    front = front_of(mesh=mesh)
    assert len(front) >= 3
    for (seconds, peak), (later, lower) in itertools.pairwise(points(front)):
        assert seconds < later and peak > lower
    assert all(plan.fits for plan in front)
    assert front.least_bytes <= front[-1].estimate.peak_bytes


def test_each_plan_is_the_fastest_within_its_peak() -> None:
    front = front_of(points=12)
    for plan in front:
        alone = plan_of(memory_limit_bytes=plan.estimate.peak_bytes)
        assert alone.fits and alone.step_seconds == pytest.approx(plan.step_seconds, rel=1e-9)
    assert front[0].step_seconds == pytest.approx(plan_of().step_seconds)


def test_more_points_find_no_worse() -> None:
    few, many = front_of(points=3), front_of(points=12)
    for plan in few:
        found = many.within(plan.estimate.peak_bytes)
        assert found is None or found.step_seconds <= plan.step_seconds * (1 + 1e-9)
    assert len(many) >= len(few)


def test_the_fastest_within_a_limit() -> None:
    front = front_of()
    for plan in front:
        assert front.within(plan.estimate.peak_bytes) is plan
        assert front.within(plan.estimate.peak_bytes * 1.000001) is plan
    assert front.within(0) is None
    assert front.within(2**40) is front[0]


def test_a_searched_mesh_is_no_worse_than_a_given_one() -> None:
    searched, given = front_of(mesh=None), front_of()
    assert searched[0].step_seconds <= given[0].step_seconds * (1 + 1e-9)


def test_a_plan_sweeps_its_own_request() -> None:
    plan = plan_of()
    assert points(plan.front()) == points(front_of())
    assert plan.front()[0] is plan


def test_what_does_not_fit_is_a_front_of_one() -> None:
    front = plan_of(memory_limit_bytes=1e6).front()
    assert len(front) == 1 and not front[0].fits


def test_it_prints() -> None:
    front = front_of()
    lines = str(front).splitlines()
    assert lines[0] == "Step time against memory"
    assert len(lines) == 3 + len(front)
    assert lines[2].split()[:2] == ["data=2", "model=4"]
    assert front._repr_html_().count("<tr>") == 1 + len(front)
