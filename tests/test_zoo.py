"""The zoo's programs: known sizes, equal numerics of equivalent variants, and training that learns."""

import dataclasses
import functools
import importlib.util
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import zoo
from autoshard.zoo import convnet, dense, experts

DENSE_SMALL = [dense.scaled_down(config) for config in dense.PRESETS.values()]
GROUPED = dense.scaled_down(dense.PRESETS["8b"])


def _dense_arguments(config: dense.DenseConfig) -> tuple[Any, ...]:
    params = dense.init(config, jax.random.key(0))
    _, (_, opt_state, batch) = dense.train_step(config)
    tokens = jax.random.randint(jax.random.key(1), batch["tokens"].shape, 0, config.vocab)
    opt_state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), opt_state)
    return params, opt_state, {"tokens": tokens, "targets": jnp.roll(tokens, -1, axis=1)}


@functools.cache
def _dense_losses(config: dense.DenseConfig) -> tuple[float, ...]:
    step = jax.jit(dense.train_step(config)[0])
    params, opt_state, batch = _dense_arguments(config)
    losses = []
    for _ in range(8):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return tuple(losses)


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), tree)


def _elements(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        # layers * (q and o, k and v, three matrices, two norms) + table + head + norm
        (
            "8b",
            32 * (2 * 4096 * 32 * 128 + 2 * 4096 * 8 * 128 + 3 * 4096 * 14336 + 2 * 4096)
            + 2 * 128256 * 4096
            + 4096,
        ),
        ("64b", 32 * (4 * 8192 * 128 * 128 + 3 * 8192 * 65536 + 2 * 8192) + 32000 * 8192 + 8192),
        ("175b", 96 * (4 * 12288 * 96 * 128 + 2 * 12288 * 49152 + 2 * 12288) + 32000 * 12288 + 12288),
        ("1t", 128 * (4 * 16384 * 256 * 128 + 3 * 16384 * 131072 + 2 * 16384) + 32000 * 16384 + 16384),
    ],
)
def test_dense_parameter_count_is_the_arithmetic(name: str, count: int) -> None:
    assert dense.parameter_count(dense.PRESETS[name]) == count


@pytest.mark.parametrize(
    ("name", "published"),
    [("128b", 137_702_416_384), ("175b", 174_366_928_896), ("1t", 1_100.04e9), ("8b", 8.03e9)],
)
def test_dense_parameter_count_is_near_the_published(name: str, published: float) -> None:
    assert dense.parameter_count(dense.PRESETS[name]) == pytest.approx(published, rel=2e-4)


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("config", DENSE_SMALL, ids=lambda config: config.name)
def test_dense_parameter_count_is_the_tree(config: dense.DenseConfig, scan: bool) -> None:
    _, (params, opt_state, _) = dense.train_step(dataclasses.replace(config, scan=scan))
    assert _elements(params) == dense.parameter_count(config)
    assert _elements(opt_state) == 2 * dense.parameter_count(config) + 1


def test_dense_model_flops_is_the_arithmetic() -> None:
    config = dense.PRESETS["8b"]
    multiplied = 8_030_261_248 - 128256 * 4096
    assert dense.model_flops(config) == (6 * multiplied + 12 * 32 * 32 * 128 * 1024) * 256 * 1024


def test_dense_model_flops_agrees_with_xla_without_remat() -> None:
    config = dataclasses.replace(GROUPED, scan=False, remat=False, d_model=256, d_ff=512, head_dim=16)
    fn, args = dense.train_step(config)
    cost = jax.jit(fn).lower(*args).compile().cost_analysis()
    assert isinstance(cost, dict)
    assert cost["flops"] == pytest.approx(dense.model_flops(config), rel=0.15)


@pytest.mark.parametrize("name", zoo.programs())
def test_programs_trace_quickly_and_abstractly(name: str) -> None:
    start = time.perf_counter()
    fn, args = zoo.build(name)
    results = jax.jit(fn).trace(*args).out_info
    seconds = time.perf_counter() - start
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args))
    *state, loss = results
    assert _shapes(tuple(state)) == _shapes(args[:-1])
    assert (loss.shape, loss.dtype) == ((), jnp.float32)
    assert seconds < 10.0, f"{name} took {seconds:.1f} s; alone it takes about 0.2 s"


@pytest.mark.parametrize("name", zoo.programs())
def test_programs_hold_no_large_constants_and_no_shardings(name: str) -> None:
    fn, args = zoo.build(name)
    closed = jax.make_jaxpr(fn)(*args)
    assert sum(np.size(const) for const in closed.consts) == 0
    text = str(closed)
    assert "sharding_constraint" not in text
    assert "shard_map" not in text


@pytest.mark.parametrize("config", [GROUPED, dense.scaled_down(dense.PRESETS["175b"])], ids=lambda c: c.name)
def test_dense_learns(config: dense.DenseConfig) -> None:
    losses = _dense_losses(config)
    assert losses[0] == pytest.approx(math.log(config.vocab), rel=0.25)
    assert losses[-1] < losses[0] - 0.3
    assert all(after < before for before, after in zip(losses, losses[1:], strict=False))


@pytest.mark.parametrize(("scan", "remat"), [(False, True), (True, False), (False, False)])
def test_dense_variants_have_equal_losses(scan: bool, remat: bool) -> None:
    variant = dataclasses.replace(GROUPED, scan=scan, remat=remat)
    assert _dense_losses(variant) == pytest.approx(_dense_losses(GROUPED), rel=1e-4)


def test_dense_keeps_activations_by_name() -> None:
    variant = dataclasses.replace(GROUPED, saved=("query", "up"), offloaded=("block_in",))
    assert _dense_losses(variant) == pytest.approx(_dense_losses(GROUPED), rel=1e-4)


def test_dense_learns_with_adafactor() -> None:
    losses = _dense_losses(dataclasses.replace(GROUPED, optimizer="adafactor"))
    assert losses[-1] < losses[0] - 0.1
    assert all(after < before for before, after in zip(losses, losses[1:], strict=False))


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("config", DENSE_SMALL, ids=lambda config: config.name)
def test_dense_names_every_dim_of_its_parameters(config: dense.DenseConfig, scan: bool) -> None:
    config = dataclasses.replace(config, scan=scan)
    _, (params, _, _) = dense.train_step(config)
    dims = dense.weight_dims(config)
    is_leaf = lambda x: isinstance(x, tuple)  # noqa: E731
    ranks = jax.tree.map(len, dims, is_leaf=is_leaf)
    assert ranks == jax.tree.map(lambda p: p.ndim, params)


EXPERTS = dataclasses.replace(GROUPED, name="experts-small", experts=8, routed=2)


def test_dense_with_experts_learns_and_counts_them() -> None:
    losses = _dense_losses(EXPERTS)
    assert losses[-1] < losses[0] - 0.3
    _, (params, _, _) = dense.train_step(EXPERTS)
    assert _elements(params) == dense.parameter_count(EXPERTS)
    ranks = jax.tree.map(len, dense.weight_dims(EXPERTS), is_leaf=lambda x: isinstance(x, tuple))
    assert ranks == jax.tree.map(lambda p: p.ndim, params)
    # of the experts' weights, a token meets those of two
    mlp, tokens = 3 * EXPERTS.d_model * EXPERTS.d_ff, EXPERTS.batch * EXPERTS.seq
    router = EXPERTS.d_model * EXPERTS.experts
    plain = dense.model_flops(GROUPED)
    assert dense.model_flops(EXPERTS) == plain + 6 * EXPERTS.layers * (mlp + router) * tokens


@pytest.mark.parametrize("capacity", [4.0, 0.5])
def test_experts_take_the_tokens_that_they_have_room_for(capacity: float) -> None:
    batch, seq, width, hidden, count, routed = 2, 16, 8, 12, 4, 2
    keys = iter(jax.random.split(jax.random.key(3), 5))
    shapes = {"router": (width, count), "up": (count, width, hidden), "gate": (count, width, hidden)}
    shapes["down"] = (count, hidden, width)
    weights = {label: jax.random.normal(next(keys), shape) for label, shape in shapes.items()}
    x = jax.random.normal(next(keys), (batch, seq, width))
    found = experts.routed_mlp(x, weights, routed, capacity, lambda x, label: x)

    expected = np.zeros(x.shape)
    room = experts.slots(seq, count, routed, capacity)
    for b in range(batch):
        taken = [0] * count
        for s in range(seq):
            logits = x[b, s] @ weights["router"]
            best = np.argsort(-logits, kind="stable")[:routed]
            share = jax.nn.softmax(logits[best])
            for e, weight in zip(best, share, strict=True):
                taken[e] += 1
                if taken[e] <= room:
                    hidden_ = jax.nn.silu(x[b, s] @ weights["gate"][e]) * (x[b, s] @ weights["up"][e])
                    expected[b, s] += weight * (hidden_ @ weights["down"][e])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_dense_refuses_more_experts_a_token_than_there_are() -> None:
    with pytest.raises(ValueError, match="experts=4 are gated, and a token goes to routed=5 of them at most"):
        dataclasses.replace(GROUPED, experts=4, routed=5)


@pytest.mark.parametrize("parallel", [False, True])
def test_dense_decodes_what_the_forward_pass_computes(parallel: bool) -> None:
    config = dataclasses.replace(GROUPED, parallel=parallel, remat=False)
    params, _, batch = _dense_arguments(config)
    expected = dense.forward(config)[0](params, batch["tokens"])
    step, (shapes, cache, *_) = dense.decode_step(config)
    assert _shapes(shapes) == _shapes(params)
    cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), cache)
    for position in range(4):
        logits, cache = jax.jit(step)(params, cache, batch["tokens"][:, position], jnp.int32(position))
        np.testing.assert_allclose(logits, expected[:, position], rtol=2e-3, atol=2e-3)


def test_dense_decodes_stacked_layers_only() -> None:
    with pytest.raises(ValueError, match="decode_step scans over the layers; set scan=True"):
        dense.decode_step(dataclasses.replace(GROUPED, scan=False))


def test_dense_refuses_names_that_it_does_not_give() -> None:
    with pytest.raises(ValueError, match="no activation is called 'mlp'; choose from: embedded, block_in"):
        dataclasses.replace(GROUPED, saved=("mlp",))
    with pytest.raises(ValueError, match="optimizer='sgd' must be one of: adam, adafactor"):
        dataclasses.replace(GROUPED, optimizer="sgd")


def test_dense_in_bfloat16_stays_near_float32() -> None:
    half = dataclasses.replace(GROUPED, dtype="bfloat16")
    assert _dense_losses(half) == pytest.approx(_dense_losses(GROUPED), rel=2e-2)


def test_dense_is_causal() -> None:
    fn, _ = dense.forward(GROUPED)
    params, _, batch = _dense_arguments(GROUPED)
    changed = batch["tokens"].at[:, 9:].set(0)
    before, after = fn(params, batch["tokens"]), fn(params, changed)
    np.testing.assert_allclose(before[:, :9], after[:, :9], rtol=1e-5, atol=1e-5)
    assert float(jnp.max(jnp.abs(before[:, 9:] - after[:, 9:]))) > 1e-2


def test_dense_rotary_positions_are_relative() -> None:
    x = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    cos, sin = dense._rotary_tables(16, 8)

    def product(query_position: int, key_position: int) -> float:
        q = dense._rotate(x[0], cos[query_position], sin[query_position])
        k = dense._rotate(x[1], cos[key_position], sin[key_position])
        return float(jnp.sum(q * k))

    assert product(9, 4) == pytest.approx(product(5, 0), rel=1e-5)
    assert product(9, 4) != pytest.approx(product(9, 5), rel=1e-2)


@pytest.mark.parametrize("tie", [True, False])
def test_dense_head_is_tied_or_its_own(tie: bool) -> None:
    _, (params, _, _) = dense.train_step(dataclasses.replace(GROUPED, tie=tie))
    assert ("head" in params) is not tie


def test_dense_config_lists_every_fault() -> None:
    with pytest.raises(ValueError) as error:
        dataclasses.replace(GROUPED, layers=0, heads=12, head_dim=7)
    assert str(error.value) == (
        "DenseConfig '8b-small': layers=0 must be at least 1; kv_heads=8 must divide heads=12; "
        "head_dim=7 must be even: rotary positions turn pairs"
    )


def test_convnet_sizes_are_the_known_ones() -> None:
    config = convnet.PRESETS["resnet50"]
    _, (params, stats, velocity, _) = convnet.train_step(config)
    assert convnet.parameter_count(config) == 25_557_032
    assert _elements(params) == _elements(velocity) == 25_557_032
    assert _elements(stats) == 2 * 26_560
    assert len(list(convnet.convolutions(config))) == 1 + 3 * (3 + 4 + 6 + 3) + 4
    # 4.09e9 multiply-adds per image, forward
    assert convnet.model_flops(config) / (6 * config.batch) == pytest.approx(4.09e9, rel=2e-3)


def test_convnet_learns_and_keeps_statistics() -> None:
    config = convnet.scaled_down(convnet.PRESETS["resnet50"])
    fn, (_, _, velocity, batch) = convnet.train_step(config)
    step = jax.jit(fn)
    params, stats = convnet.init(config, jax.random.key(0))
    velocity = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), velocity)
    images = jax.random.normal(jax.random.key(1), batch["images"].shape)
    labels = jnp.arange(config.batch, dtype=jnp.int32)
    before, losses = stats, []
    for _ in range(6):
        params, stats, velocity, loss = step(params, stats, velocity, {"images": images, "labels": labels})
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    moved = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))) > 0, before, stats)
    assert all(jax.tree.leaves(moved))


def test_convnet_normalises_each_channel() -> None:
    x = 3.0 + 2.0 * jax.random.normal(jax.random.key(0), (4, 6, 6, 8))
    identity = {"kernel": jnp.eye(8)[None, None], "scale": jnp.ones(8), "bias": jnp.zeros(8)}
    stats = {"mean": jnp.zeros(8), "variance": jnp.ones(8)}
    y, new_stats = convnet._conv_norm(x, identity, stats, stride=1)
    np.testing.assert_allclose(jnp.mean(y, axis=(0, 1, 2)), 0.0, atol=1e-5)
    np.testing.assert_allclose(jnp.std(y, axis=(0, 1, 2)), 1.0, atol=1e-4)
    np.testing.assert_allclose(new_stats["mean"], 0.1 * jnp.mean(x, axis=(0, 1, 2)), rtol=1e-5)


def test_convnet_config_names_the_fault() -> None:
    with pytest.raises(ValueError, match="image=100 must be divisible by 32"):
        dataclasses.replace(convnet.PRESETS["resnet50"], image=100)


def test_programs_can_be_loaded_by_file() -> None:
    path = Path(dense.__file__)
    spec = importlib.util.spec_from_file_location("loaded_by_file", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _, args = module.dense_8b()
    assert args[2]["tokens"].shape == (256, 1024)


def test_an_unknown_program_lists_the_choices() -> None:
    with pytest.raises(
        KeyError, match="no program 'dense_9b' in the zoo; choose one of: dense_100m, .*resnet50"
    ):
        zoo.build("dense_9b")


def test_a_name_is_given_once() -> None:
    with pytest.raises(ValueError, match="two programs in the zoo are called 'dense_8b'; rename one"):
        zoo._table(dense.dense_8b, dense.dense_8b)
