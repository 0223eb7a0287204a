"""A `shard_map` of the user's: its specs are kept, its body is split over the axes that it leaves free."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import autoshard
import search
from autoshard.annotations import pins
from autoshard.boundary import boundaries
from autoshard.errors import SpecError
from autoshard.groups import Group
from autoshard.layout import Layout
from autoshard.propagate import complete
from autoshard.session import Session
from autoshard.solving import model_of
from autoshard.zoo import dense
from tests.helpers.running import cpu_mesh, differences, random_decisions, run_spmd, session_of

MESH = {"data": 2, "model": 4}
ABSTRACT = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def mapped(
    body: Callable[..., Any], mesh: Any, axes: set[str], ins: Any, outs: Any, check: bool = True
) -> Any:
    return jax.shard_map(body, mesh=mesh, axis_names=axes, in_specs=ins, out_specs=outs, check_vma=check)


def arrays(*shapes: tuple[int, ...]) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.integers(-3, 4, s), jnp.float32) for s in shapes)


# Each case: a function of a mesh that makes the function, and its arguments.


def plain(mesh: Any) -> Any:
    """No collective inside: the body is a product and what is done with it."""

    def body(x: Any, w: Any) -> Any:
        return jax.nn.relu(x @ w) @ w.T + lax.axis_index("data").astype(x.dtype)

    return lambda x, w: mapped(body, mesh, {"data"}, (P("data"), P()), P("data"))(x * 2, w) + 1


def every_collective(mesh: Any) -> Any:
    def body(x: Any, w: Any) -> Any:
        h = x @ w
        summed = lax.psum(h, "data")
        gathered = lax.all_gather(h, "data", axis=0, tiled=True)
        stacked = lax.all_gather(h, "data", axis=1)
        scattered = lax.psum_scatter(h, "data", scatter_dimension=0, tiled=True)
        exchanged = lax.all_to_all(h, "data", 1, 0, tiled=True)
        unstacked = lax.all_to_all(h.reshape(2, -1, h.shape[1]), "data", 0, 1)
        shifted = lax.ppermute(h, "data", [(0, 1), (1, 0)])
        most = lax.pmax(h, "data") - lax.pmin(h, "data")
        return summed, gathered, stacked, scattered, exchanged, unstacked, shifted, most, h.sum()[None]

    outs = (P(), P("data"), P("data"), P("data"), P("data"), P("data"), P("data"), P(), P("data"))
    return lambda x, w: mapped(body, mesh, {"data"}, (P("data"), P()), outs)(x, w)


def data_parallel_step(mesh: Any) -> Any:
    """Manual data parallelism, gradients summed by hand, around what is left to tensor parallelism."""

    def body(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            for up, down in params:
                x_ = jnp.square(x @ up) @ down
            return jnp.square(x_).sum() / 4096

        value, grads = jax.value_and_grad(loss)(lax.pcast(params, "data", to="varying"))
        return lax.psum(value, "data"), jax.tree.map(lambda g: lax.psum(g, "data"), grads)

    def fn(up: Any, down: Any, x: Any) -> Any:
        value, ((grads),) = mapped(body, mesh, {"data"}, (P(), P("data")), P())([(up, down)], x)
        return value, grads

    return fn


def differentiated(mesh: Any) -> Any:
    """The transpose of a `shard_map` is one too."""

    def loss(w: Any, x: Any) -> Any:
        body = lambda w, x: lax.pmean(jnp.square(x @ w).sum(), "data")  # noqa: E731
        return mapped(body, mesh, {"data"}, (P(None, None), P("data", None)), P())(w, x)

    return lambda x, w: jax.value_and_grad(loss)(w, x)


def looped(mesh: Any) -> Any:
    def body(x: Any, w: Any) -> Any:
        def step(c: Any, _: None) -> tuple[Any, Any]:
            c = lax.ppermute(jnp.clip(c @ w, -9, 9), "data", [(0, 1), (1, 0)])
            return c, c.sum(-1)

        return lax.scan(step, x, None, length=3)

    return lambda x, w: mapped(body, mesh, {"data"}, (P("data"), P()), (P("data"), P(None, "data")))(x, w)


def nested(mesh: Any) -> Any:
    """One more axis becomes manual inside."""

    def inner(x: Any) -> Any:
        return x + lax.psum(x, "model") * 2

    def body(x: Any, w: Any) -> Any:
        h = x @ w
        return (
            jax.shard_map(inner, axis_names={"model"}, in_specs=P(None, "model"), out_specs=P(None, "model"))(
                h
            )
            * 3
        )

    return lambda x, w: mapped(body, mesh, {"data"}, (P("data"), P()), P("data"))(x, w)


def whole(mesh: Any) -> Any:
    """All axes are manual: nothing is left to split."""

    def body(x: Any, w: Any) -> Any:
        return lax.psum(x @ w, "model")

    return lambda x, w: mapped(body, mesh, {"data", "model"}, (P("data", "model"), P("model")), P("data"))(
        x, w
    )


def unchecked(mesh: Any) -> Any:
    def body(x: Any) -> Any:
        return lax.all_gather(jnp.square(x), "data", axis=0, tiled=True)

    return lambda x, w: mapped(body, mesh, {"data"}, P("data"), P(), check=False)(x) @ w


X, W = (16, 8), (8, 12)
CASES = {
    "plain": (plain, arrays(X, W)),
    "collectives": (every_collective, arrays(X, W)),
    "step": (data_parallel_step, arrays((8, 12), (12, 8), X)),
    "differentiated": (differentiated, arrays(X, W)),
    "looped": (looped, arrays(X, (8, 8))),
    "nested": (nested, arrays(X, W)),
    "whole": (whole, arrays(X, W)),
    "unchecked": (unchecked, arrays(X, W)),
}


def case(name: str) -> tuple[Any, Any, list[Any]]:
    """Return the function over an abstract mesh, arguments, and what JAX itself makes of it on a real one."""
    make, args = CASES[name]
    expected = jax.tree.leaves(jax.jit(make(cpu_mesh(MESH)))(*args))
    return make(ABSTRACT), args, expected


@pytest.mark.parametrize("name", CASES)
def test_a_suggested_plan_computes_what_jax_does(name: str) -> None:
    fn, args, expected = case(name)
    plan = autoshard.suggest(fn, *args, topology="v3", mesh=MESH)
    assert plan.coverage.complete
    for applied in (plan.spmd(fn), plan.jit(fn)):
        assert not differences(jax.tree.leaves(applied(*args)), expected)


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 4))])
@pytest.mark.parametrize("name", CASES)
def test_a_body_split_at_random_computes_what_jax_does(name: str, seed: int) -> None:
    fn, args, expected = case(name)
    session = session_of(fn, args, MESH)
    decisions = random_decisions(session.source.block, MESH, np.random.default_rng(seed))
    assert not differences(run_spmd(session, decisions, args), expected)


@pytest.mark.parametrize("name", CASES)
def test_objective_is_estimate(name: str) -> None:
    fn, args, _ = case(name)
    session = session_of(fn, args, MESH)
    model, _ = model_of(session, {})
    solution = search.solve(model.problem, time_limit_seconds=20)
    seconds = session.estimate(model.decisions(solution.choice)).serial_seconds
    assert seconds == pytest.approx(solution.objective, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_completion_runs_through_the_body(name: str) -> None:
    fn, args, expected = case(name)
    session = session_of(fn, args, MESH)
    decisions, _ = complete(session, {"[1]": P(None, "model")} if name != "whole" else {})
    assert not differences(run_spmd(session, decisions, args), expected)


def body_of(session: Session) -> Group:
    (item,) = [g for g in session.source.block.walk() if g.title == "shard_map"]
    return item


def test_completion_splits_the_body_over_the_free_axes() -> None:
    fn, args, _ = case("plain")
    session = session_of(fn, args, MESH)
    decisions, _ = complete(session, {"[1]": P(None, "model")})
    item = body_of(session)
    inner = [decisions.layouts[v].dims for v, _ in boundaries(item).operands if v is not None]
    assert inner == [((), ()), ((), ("model",))]
    assert decisions.layouts[item.outputs[0]] == Layout((("data",), ()))
    assert decisions.outputs[0] == Layout((("data",), ()))


def test_the_search_splits_the_body_over_the_free_axes() -> None:
    """A product in a body that only `data` splits is split by `model` too."""

    def fn(x: Any, w: Any) -> Any:
        return mapped(lambda x, w: x @ w, ABSTRACT, {"data"}, (P("data"), P()), P("data"))(x, w)

    shapes = jax.ShapeDtypeStruct((4096, 4096), jnp.float32), jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    plan = autoshard.suggest(fn, *shapes, topology="v3", mesh=MESH)
    (product,) = [e for e in plan.estimate.entries if e.title == "dot_general"]
    assert product.cost.flops == pytest.approx(2 * 4096**3 / 8)


def test_what_the_user_gathers_is_counted() -> None:
    fn, args, _ = case("unchecked")
    plan = autoshard.suggest(fn, *args, topology="v3", mesh=MESH)
    gathers = [c for c in plan.estimate.collectives if c.kind == "all_gather" and c.axes == ("data",)]
    assert gathers and gathers[0].source.startswith("test_manual.py:")


def test_annotations_inside_must_not_name_manual_axes() -> None:
    def fn(x: Any) -> Any:
        body = lambda x: checkpoint_name(jnp.tanh(x), "inner") * 2  # noqa: E731
        return mapped(body, ABSTRACT, {"data"}, P("data"), P("data"))(x)

    args = arrays(X)
    plan = autoshard.evaluate(fn, *args, topology="v3", mesh=MESH, annotations={"inner": P(None, "model")})
    assert plan.out_specs == P("data", "model")
    session = session_of(fn, args, MESH)
    with pytest.raises(SpecError, match=r"inner .*: data is manual in the shard_map around it"):
        pins(session.source.traced, session.source.block, MESH, {"inner": P(None, "data")})


def test_a_mesh_that_is_not_the_plans() -> None:
    fn, args, _ = case("plain")
    with pytest.raises(SpecError, match="Plan on a mesh that has its axes, with the same sizes"):
        autoshard.suggest(fn, *args, topology="v3", mesh={"data": 4, "model": 2})


def test_a_result_leaves_as_its_spec_says() -> None:
    def fn(x: Any) -> Any:
        return checkpoint_name(mapped(jnp.tanh, ABSTRACT, {"data"}, P("data"), P("data"))(x), "made") * 2

    args = arrays(X)
    plan = autoshard.suggest(fn, *args, topology="v3", mesh=MESH, annotations={"made": P(("data", "model"))})
    assert plan.coverage.complete
    with pytest.raises(
        SpecError, match=r"leaving its loop or shard_map it can be P\('data', 'model'\) instead"
    ):
        autoshard.suggest(fn, *args, topology="v3", mesh=MESH, annotations={"made": P(None, "model")})


@pytest.mark.slow
def test_a_language_model_with_manual_data_parallelism() -> None:
    """Gradients averaged by hand over `data`; what `model` splits is the plan's to choose."""
    config = dataclasses.replace(dense.scaled_down(dense.PRESETS["8b"]), scan=True)
    logits, _ = dense.forward(config)

    def make(mesh: Any) -> Any:
        def body(params: Any, tokens: Any) -> Any:
            def loss(params: Any) -> Any:
                logp = jax.nn.log_softmax(logits(params, tokens[:, :-1]))
                return -jnp.take_along_axis(logp, tokens[:, 1:, None], -1).mean()

            return jax.tree.map(lambda x: lax.pmean(x, "data"), jax.value_and_grad(loss)(params))

        return mapped(body, mesh, {"data"}, (P(), P("data")), P(), check=False)

    tokens = jnp.asarray(np.random.default_rng(1).integers(0, config.vocab, (4, 17)), jnp.int32)
    args = dense.init(config, jax.random.key(0)), tokens
    fn, expected = make(ABSTRACT), jax.tree.leaves(jax.jit(make(cpu_mesh(MESH)))(*args))
    plan = autoshard.suggest(fn, *args, topology="v3", mesh=MESH)
    assert {c.axes for c in plan.estimate.collectives} == {("data",), ("model",)}
    for applied in (plan.spmd(fn), plan.jit(fn)):
        assert not differences(jax.tree.leaves(applied(*args)), expected, 1e-4)
