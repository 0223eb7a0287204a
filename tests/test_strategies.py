"""The search problem of a program: brute force agrees where it can enumerate, and choices read back."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import search
from autoshard.layout import replicated
from autoshard.model import Model
from autoshard.solving import model_of
from tests.helpers.running import session_of


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


TINY = {
    "product": (lambda x, w: x @ w, (f32(512, 256), f32(256, 128))),
    "softmax": (lambda x: jax.nn.softmax(x), (f32(256, 512),)),
    "lookup": (lambda t, i: t[i], (f32(4096, 128), jax.ShapeDtypeStruct((64,), jnp.int32))),
    "sum": (lambda x: x.sum(0), (f32(1024, 256),)),
    "reshape": (lambda x: x.reshape(64, 512), (f32(64, 8, 64),)),
}


def model(name: str, mesh: dict[str, int]) -> Model:
    fn, args = TINY[name]
    return model_of(session_of(fn, args, mesh), {})[0]


def count(problem: search.Problem) -> int:
    return math.prod(len(c) for c in problem.costs)


@pytest.mark.parametrize("mesh", [{"a": 8}, {"a": 4}], ids=str)
@pytest.mark.parametrize("name", TINY)
def test_brute_force_agrees(name: str, mesh: dict[str, int]) -> None:
    problem = model(name, mesh).problem
    assert count(problem) <= 20_000, "too large to enumerate: make the program smaller"
    every = itertools.product(*(range(len(c)) for c in problem.costs))
    best = min(problem.objective(choice) for choice in every)
    solution = search.solve(problem, time_limit_seconds=20, gap=0.0)
    assert solution.objective == pytest.approx(best, rel=1e-9)
    assert solution.lower_bound <= best * (1 + 1e-9)


def test_everything_whole_is_among_the_choices() -> None:
    found = model("product", {"a": 2, "b": 4})
    plainest = [0] * len(found.problem.costs)
    decisions = found.decisions(plainest)
    assert not any(decisions.assignments.values())
    assert all(x == replicated(len(x.dims)) for x in decisions.layouts.values())
    assert math.isfinite(found.problem.objective(plainest))


def test_no_choice_is_worth_less_than_nothing() -> None:
    for name in TINY:
        problem = model(name, {"a": 2, "b": 4}).problem
        assert all((c >= 0).all() for c in problem.costs)
        assert all((t >= 0).all() for t in problem.edge_costs)


def test_the_same_program_gives_the_same_problem() -> None:
    one, other = (model("softmax", {"a": 2, "b": 4}).problem for _ in range(2))
    assert one.names == other.names and one.edges == other.edges
    assert all((a == b).all() for a, b in zip(one.costs, other.costs, strict=True))


def test_a_loop_weighs_its_trips() -> None:
    def layers(count: int) -> Any:
        def fn(x: Any, w: Any) -> Any:
            return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0]

        problem = model_of(session_of(fn, (f32(512, 512), f32(count, 512, 512)), {"a": 2}), {})[0].problem
        return problem.objective([0] * len(problem.costs))

    assert layers(6) - layers(4) == pytest.approx(layers(4) - layers(2), rel=1e-6)
    assert layers(4) > layers(2)
