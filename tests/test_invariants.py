"""What the search minimises is what the estimate says, and plans of whole models compute the models."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
import search
from autoshard.grouping import PARTIAL
from autoshard.model import Model
from autoshard.session import Session
from autoshard.solving import model_of
from autoshard.zoo import convnet, dense
from tests.helpers.programs import random_program
from tests.helpers.running import MESHES, differences, session_of

DENSE = dense.scaled_down(dense.PRESETS["8b"])


def gap(session: Session, model: Model, choice: list[int]) -> float | None:
    """Relative distance of objective and estimate; None where the choice is forbidden."""
    objective = model.problem.objective(choice)
    if not math.isfinite(objective):
        return None
    seconds = session.estimate(model.decisions(choice)).serial_seconds
    return abs(seconds - objective) / max(objective, 1e-12)


def choices_of(model: Model, rng: np.random.Generator) -> list[list[int]]:
    """The best choice, neighbours of it, and random ones."""
    best = list(search.solve(model.problem, time_limit_seconds=20).choice)
    plain: dict[int, list[int]] = {}
    for node, c in zip(model.nodes, model.class_of, strict=True):
        plain[c] = [i for i, s in enumerate(node.strategies) if not (isinstance(s, dict) and s.get(PARTIAL))]
    found = [best]
    for _ in range(4):
        found.append([int(rng.choice(plain[c])) for c in range(len(best))])
        found.append([int(rng.choice(plain[c])) if rng.random() < 0.1 else best[c] for c in range(len(best))])
        found.append(
            [
                int(rng.integers(len(model.problem.costs[c]))) if rng.random() < 0.1 else best[c]
                for c in range(len(best))
            ]
        )
    return found


@pytest.mark.parametrize("seed", range(25))
def test_objective_is_estimate_for_any_choice(seed: int) -> None:
    made = random_program(seed)
    session = session_of(made.fn, made.args, MESHES[seed % len(MESHES)])
    model, _ = model_of(session, {})
    gaps = [gap(session, model, c) for c in choices_of(model, np.random.default_rng(seed))]
    finite = [g for g in gaps if g is not None]
    assert len(finite) >= 5 and max(finite) < 1e-6, (made.names, gaps)


def zoo(name: str) -> tuple[Any, tuple[Any, ...]]:
    if name == "convnet":
        return convnet.train_step(convnet.scaled_down(convnet.PRESETS["resnet50"]))
    return dense.train_step(dataclasses.replace(DENSE, scan=name == "scan"))


@pytest.mark.parametrize("mesh", [{"a": 8}, {"a": 2, "b": 4}], ids=str)
@pytest.mark.parametrize("name", ["scan", "unrolled", "convnet"])
def test_objective_is_estimate_for_the_zoo(name: str, mesh: dict[str, int]) -> None:
    fn, args = zoo(name)
    session = session_of(fn, args, mesh)
    model, _ = model_of(session, {})
    solution = search.solve(model.problem, time_limit_seconds=30)
    found = gap(session, model, list(solution.choice))
    assert found is not None and found < 1e-6


# Whole models ----------------------------------------------------------------------------------------


def random_like(shapes: Any, seed: int = 0, limit: int = 16, scale: float = 0.1) -> Any:
    """Fill a tree of shapes: small normal floats, integers below a limit, flags that are true."""
    leaves, tree = jax.tree.flatten(shapes)
    rng = np.random.default_rng(seed)
    arrays = []
    for leaf in leaves:
        if leaf.dtype == jnp.bool_:
            arrays.append(jnp.ones(leaf.shape, bool))
        elif jnp.issubdtype(leaf.dtype, jnp.integer):
            arrays.append(jnp.asarray(rng.integers(0, limit, leaf.shape), leaf.dtype))
        else:
            arrays.append(jnp.asarray(scale * rng.standard_normal(leaf.shape), leaf.dtype))
    return jax.tree.unflatten(tree, arrays)


def check_plan(fn: Any, args: Any, mesh: dict[str, int], *, rtol: float = 1e-5, **options: Any) -> None:
    plan = autoshard.suggest(fn, *args, topology="v3", mesh=mesh, **options)
    expected = jax.tree.leaves(jax.jit(fn)(*args))
    for applied in (plan.spmd(fn), plan.jit(fn)):
        assert not differences(jax.tree.leaves(applied(*args)), expected, rtol)


@functools.cache
def dense_arguments(scan: bool) -> tuple[Any, Any, Any]:
    config = dataclasses.replace(DENSE, scan=scan)
    fn, (_, state, batch) = dense.train_step(config)
    params = dense.init(config, jax.random.key(0))
    return (
        fn,
        params,
        (jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state), random_like(batch, 1, config.vocab)),
    )


@pytest.mark.parametrize(
    ("scan", "mesh"),
    [
        (True, {"a": 2, "b": 4}),
        (False, {"a": 8}),
        pytest.param(True, {"a": 8}, marks=pytest.mark.slow),
        pytest.param(False, {"a": 2, "b": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_dense_gradients_under_the_plan(scan: bool, mesh: dict[str, int]) -> None:
    """Loss and gradients: the optimizer's division would blow rounding up where gradients are zero."""
    config = dataclasses.replace(DENSE, scan=scan)
    _, params, (_, batch) = dense_arguments(scan)
    logits, _ = dense.forward(config)

    def fn(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            logp = jax.nn.log_softmax(logits(params, batch["tokens"]))
            return -jnp.take_along_axis(logp, batch["targets"][..., None], -1).mean()

        return jax.value_and_grad(loss)(params)

    check_plan(fn, (params, batch), mesh)


@pytest.mark.slow
def test_dense_step_under_the_plan() -> None:
    """Adam divides gradients by their own size: near zero it blows rounding up, so the bound is wider."""
    fn, params, (state, batch) = dense_arguments(True)
    check_plan(fn, (params, state, batch), {"a": 2, "b": 4}, rtol=1e-3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the packages, not ours
def test_tunix_llama_under_the_plan() -> None:
    """A Llama-3 that nobody here wrote: logits, and gradients of their mean square."""
    llama = pytest.importorskip("tunix.models.llama3.model")
    from flax import nnx

    base = llama.ModelConfig.llama3p1_8b()
    config = dataclasses.replace(
        base,
        num_layers=2,
        vocab_size=64,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
    )
    graph, state = nnx.split(nnx.eval_shape(lambda: llama.Llama3(config, rngs=nnx.Rngs(0))))
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), state)
    tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32)

    def logits(state: Any, tokens: Any, positions: Any, mask: Any) -> Any:
        return nnx.merge(graph, state)(tokens, positions, None, mask)[0]

    def fn(state: Any, tokens: Any, positions: Any, mask: Any) -> Any:
        loss = lambda state: jnp.square(logits(state, tokens, positions, mask)).mean()  # noqa: E731
        return logits(state, tokens, positions, mask), jax.grad(loss)(state)

    mask = jnp.broadcast_to(jnp.tril(jnp.ones((16, 16), bool)), (8, 16, 16))
    positions = jnp.broadcast_to(jnp.arange(16), (8, 16))
    check_plan(fn, (random_like(state), random_like(tokens, 2, 64), positions, mask), {"a": 2, "b": 4})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_haiku_resnet_under_the_plan() -> None:
    """A ResNet-50 that nobody here wrote: loss, batch statistics, gradients and parameters of a train step."""
    hk = pytest.importorskip("haiku")
    optax = pytest.importorskip("optax")
    net = hk.transform_with_state(lambda x: hk.nets.ResNet50(100, resnet_v2=True)(x, is_training=True))
    images, labels = (
        jax.ShapeDtypeStruct((16, 64, 64, 3), jnp.float32),
        jax.ShapeDtypeStruct((16,), jnp.int32),
    )
    params, state = jax.jit(net.init)(jax.random.key(2), random_like(images))
    optimizer = optax.sgd(0.1, momentum=0.9, nesterov=True)

    def fn(params: Any, state: Any, momentum: Any, images: Any, labels: Any) -> Any:
        def loss(params: Any) -> Any:
            out, new = net.apply(params, state, None, images)
            logp = jax.nn.log_softmax(out)
            decay = 0.5 * sum(jnp.sum(jnp.square(w)) for w in jax.tree.leaves(params))
            return -jnp.take_along_axis(logp, labels[:, None], -1).mean() + 1e-4 * decay, new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, momentum = optimizer.update(grads, momentum, params)
        return value, new, grads, optax.apply_updates(params, updates), momentum

    data = jax.random.normal(jax.random.key(0), images.shape), random_like(labels, 2, 100)
    # Through fifty normalisations the unsharded float32 run is itself 4e-5 away from a float64 one.
    check_plan(fn, (params, state, optimizer.init(params), *data), {"a": 8}, rtol=5e-5)
