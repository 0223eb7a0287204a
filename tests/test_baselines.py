"""Baselines: found from structure, as an expert would write them, and never better than what is suggested."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cost_models as cm
import search
from autoshard.baselines import BASELINES, BaselineError, Study, _table, baseline, baselines
from autoshard.plan import Plan
from autoshard.planner import suggest
from autoshard.roles import Roles
from autoshard.session import Session, Source
from autoshard.zoo import convnet, dense

SMALL = dataclasses.replace(dense.scaled_down(dense.PRESETS["8b"]), layers=8)
UNROLLED = dataclasses.replace(SMALL, layers=2, scan=False)
MESH = {"data": 2, "model": 4}
# Unoptimised code compiles faster and computes the same.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
TRAINING = dict(topology="v3:2x2", donate_argnums=dense.DONATE)


@functools.cache
def _plans(config: dense.DenseConfig, mesh: tuple[tuple[str, int], ...]) -> dict[str, Plan]:
    fn, args = dense.train_step(config)
    return baselines(fn, *args, mesh=dict(mesh), **TRAINING)


def _dense(config: dense.DenseConfig = SMALL, mesh: Mapping[str, int] = MESH) -> dict[str, Plan]:
    return _plans(config, tuple(mesh.items()))


def _shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)  # type: ignore[no-untyped-call]


def _collectives(plan: Plan) -> set[tuple[str, tuple[str, ...]]]:
    return {(c.kind, c.axes) for c in plan.estimate.collectives}


def nameless(ps: Any, x: jax.Array) -> jax.Array:
    """A block with square attention kernels in a list."""
    a, b, c, d, e, f = ps
    n, t, m = x.shape
    q, k, v = ((x @ w).reshape(n, t, 8, m // 8) for w in (a, b, c))
    s = jax.nn.softmax(jnp.einsum("bqhe,bkhe->bhqk", q, k), -1)
    x = x + jnp.einsum("bhqk,bkhe->bqhe", s, v).reshape(n, t, m) @ d
    return x + jax.nn.gelu(x @ e) @ f


NAMELESS = ([_shape(128, 128)] * 4 + [_shape(128, 512), _shape(512, 128)], _shape(8, 32, 128))


def mlp_step(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    """Plain gradient descent on a chain of four products without residuals."""

    def loss(ws: Any) -> jax.Array:
        h = x
        for w in ws[:-1]:
            h = jnp.tanh(h @ w)
        return jnp.mean((h @ ws[-1] - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


CHAIN = ([_shape(16, 64), _shape(64, 64), _shape(64, 64), _shape(64, 8)], _shape(32, 16), _shape(32, 8))


# Roles ------------------------------------------------------------------------------------------------


def _letters(fn: Any, args: Any) -> dict[str, str]:
    source = Source.of(fn, args)
    roles = Roles.of(source)

    def letter(c: int | None) -> str:
        if c is not None and c == roles.batch:
            return "B"
        if c in roles.dimensions.scanned:
            return "L"
        return "i" if c in roles.inner else "o" if c in roles.outer else "."

    return {
        value.name: "".join(map(letter, roles.dimensions.of_value(value))) for value in source.block.inputs
    }


def test_roles_of_a_scanned_transformer() -> None:
    found = _letters(*dense.train_step(SMALL))
    wanted = {
        "wq": "Loi.",
        "wk": "Loi.",
        "wv": "Loi.",
        "wo": "Li.o",
        "up": "Loi",
        "gate": "Loi",
        "down": "Lio",
    }
    assert {name: found[f"[0]['blocks']['{name}']"] for name in wanted} == wanted
    assert found["[0]['embed']"] == "io"
    assert found["[0]['head']"] == "oi"
    assert found["[1]['m']['blocks']['down']"] == "Lio"
    assert found["[2]['tokens']"] == found["[2]['targets']"] == "B."


def test_roles_of_nameless_square_kernels_come_from_the_flow() -> None:
    assert list(_letters(nameless, NAMELESS).values()) == ["oi", "oi", "oi", "io", "oi", "io", "B.o"]


def test_roles_alternate_along_a_chain_without_residuals() -> None:
    assert list(_letters(mlp_step, CHAIN).values()) == ["oi", "io", "oi", "io", "Bo", "Bo"]


def test_the_cache_of_a_decode_step_is_no_weight() -> None:
    def decode(params: Any, cache: jax.Array, token: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = params["table"][token]
        cache = jax.lax.dynamic_update_slice(cache, (x @ params["k"])[:, None], (0, at, 0))
        s = jax.nn.softmax(jnp.einsum("bm,btm->bt", x @ params["q"], cache), -1)
        return (jnp.einsum("bt,btm->bm", s, cache) @ params["out"], cache)

    params = {"table": _shape(64, 32), "k": _shape(32, 16), "q": _shape(32, 16), "out": _shape(16, 64)}
    args = (params, _shape(8, 128, 16), _shape(8, dtype="int32"), _shape(dtype="int32"))
    source = Source.of(decode, args)
    roles = Roles.of(source)
    assert {source.traced.in_names[i] for i in roles.weights} == {
        f"[0]['{name}']" for name in ("table", "k", "q", "out")
    }
    plan = baseline("data_parallel", decode, *args, topology="v3:2x2", mesh={"data": 8})
    assert plan.spec("[1]") == P("data")
    with pytest.raises(BaselineError, match="no optimizer state"):
        baseline("weight_update_sharding", decode, *args, topology="v3:2x2", mesh={"data": 8})


def test_layers_that_only_a_loop_reads_are_scanned() -> None:
    def forward(ws: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    args = _shape(8, 64, 64), _shape(16, 64)
    assert list(_letters(forward, args).values()) == ["Loo", "Bo"]
    found = baselines(forward, *args, topology="v3:2x2", mesh={"x": 8})
    assert found["fsdp"].spec("[0]") in (P(None, "x"), P(None, None, "x"))
    assert found.left_out["megatron"] == (
        "megatron does not apply: no weight can be split over x(8): none lies in a column and row pair whose"
        " inner features it divides"
    )


# What comes out ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "specs"),
    [
        ("replicated", dict(up=P(), down=P(), wq=P(), wo=P(), norm=P(), tokens=P())),
        (
            "data_parallel",
            dict(up=P(), down=P(), wq=P(), wo=P(), norm=P(), tokens=P(("data", "model"))),
        ),
        (
            "megatron",
            dict(
                up=P(None, None, "model"),
                down=P(None, "model"),
                wq=P(None, None, "model"),
                wo=P(None, "model"),
                norm=P(),
                tokens=P("data"),
            ),
        ),
        (
            "gspmd_2d",
            dict(
                up=P(None, "data", "model"),
                down=P(None, "model", "data"),
                wq=P(None, "data", "model"),
                wo=P(None, "model", None, "data"),
                norm=P("model"),
                tokens=P("data"),
            ),
        ),
    ],
)
def test_dense_specs(name: str, specs: dict[str, P]) -> None:
    paths = {"norm": "[0]['norm']", "tokens": "[2]['tokens']"}
    plan = _dense()[name]
    for key, spec in specs.items():
        assert plan.spec(paths.get(key, f"[0]['blocks']['{key}']")) == spec, key


def test_zero_stages_shard_state_and_weights() -> None:
    both = ("data", "model")
    zero1, zero3 = _dense()["weight_update_sharding"], _dense()["fsdp"]
    for leaf, one, three in zip(zero1.inputs, zero1.input_layouts, zero3.input_layouts, strict=True):
        kind, _, path = leaf.path.partition("]")
        is_matrix = len(leaf.shape) - ("blocks" in path) > 1 and kind != "[2"
        assert set(three.axes) == (set(both) if is_matrix or kind == "[2" else set()), leaf
        assert set(one.axes) == (set() if kind == "[0" or not is_matrix and kind != "[2" else set(both)), leaf
        if "blocks" in path:
            assert one.dims[0] == three.dims[0] == (), "a dim that a loop takes apart is whole"


@pytest.mark.parametrize("config", [SMALL, UNROLLED], ids=["scan", "unrolled"])
@pytest.mark.parametrize("name", ["fsdp", "megatron", "gspmd_2d"])
def test_optimizer_state_follows_its_parameter(config: dense.DenseConfig, name: str) -> None:
    plan = _dense(config)[name]
    for leaf in plan.inputs:
        if leaf.path.startswith("[0]"):
            for moment in "mv":
                assert plan.spec(leaf.path) == plan.spec(f"[1]['{moment}']{leaf.path[3:]}")


@pytest.mark.parametrize("config", [SMALL, UNROLLED], ids=["scan", "unrolled"])
def test_collectives_are_those_of_the_idea(config: dense.DenseConfig) -> None:
    both, plans = ("data", "model"), _dense(config)
    assert _collectives(plans["replicated"]) == set()
    assert _collectives(plans["data_parallel"]) == {("all_reduce", both)}
    zero = {("all_reduce", both), ("all_gather", both), ("reduce_scatter", both)}
    assert _collectives(plans["weight_update_sharding"]) == zero
    assert _collectives(plans["fsdp"]) == zero
    assert _collectives(plans["megatron"]) == {("all_reduce", ("data",)), ("all_reduce", ("model",))}
    assert {kind for kind, _ in _collectives(plans["gspmd_2d"])} == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
    }


def test_megatron_reduces_the_residual_twice_per_layer_and_pass() -> None:
    fn, args = dense.forward(SMALL)
    plan = baseline("megatron", fn, *args, topology="v3:2x2", mesh=MESH)
    rows = SMALL.batch // 2
    counts = [c.count for c in plan.estimate.collectives if c.shape == (rows, SMALL.seq, SMALL.d_model)]
    assert sum(counts) == 2 * SMALL.layers + 1  # behind attention and the feed-forward; and the lookup
    assert _collectives(plan) == {("all_reduce", ("model",))}


def test_names_do_not_matter() -> None:
    fn, (params, opt, batch) = dense.train_step(SMALL)
    leaves, tree = jax.tree.flatten((params, opt))

    def renamed(state: Any, data: Any) -> Any:
        p, o = jax.tree.unflatten(tree, state)
        p, o, loss = fn(p, o, dict(zip(sorted(batch), data, strict=True)))
        return jax.tree.leaves((p, o)), loss

    data = [batch[k] for k in sorted(batch)]
    plans = baselines(renamed, leaves, data, topology="v3:2x2", mesh=MESH, donate_argnums=(0,))
    for name, plan in _dense().items():
        assert plans[name].input_layouts == plan.input_layouts, name


@pytest.mark.parametrize("name", BASELINES)
def test_objective_is_the_estimate(name: str) -> None:
    fn, args = dense.train_step(SMALL)
    session = Session.of(Source.of(fn, args, dense.DONATE), cm.Topology.parse("v3:2x2"), MESH)
    study = Study(session=session)
    model = study.model(BASELINES[name].recipe(study)[0])
    solution = search.solve(model.problem)
    assert solution.objective == pytest.approx(_dense()[name].estimate.serial_seconds, rel=1e-6)


@pytest.mark.parametrize("name", BASELINES)
def test_numbers_are_those_of_the_original(name: str) -> None:
    config = dataclasses.replace(SMALL, layers=2)
    fn, shapes = dense.train_step(config)
    plan = baseline(name, fn, *shapes, mesh=MESH, **TRAINING)
    params = dense.init(config, jax.random.key(0))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes[1])
    tokens = jax.random.randint(jax.random.key(1), (config.batch, config.seq), 0, config.vocab)
    args = params, zeros, {"tokens": tokens, "targets": jnp.roll(tokens, -1, axis=1)}
    wanted = jax.jit(fn).lower(*args).compile(compiler_options=QUICK)(*args)
    applied = plan.spmd(fn).lower(*args).compile(compiler_options=QUICK)
    placed = jax.tree.map(lambda x, s: jax.device_put(jnp.copy(x), s), args, applied.input_shardings[0])
    found = applied(*placed)
    np.testing.assert_allclose(found[2], wanted[2], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(found[1]["m"]), jax.tree.leaves(wanted[1]["m"]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


# Against the suggestion -------------------------------------------------------------------------------


def _refuted(suggested: Plan, plans: Mapping[str, Plan]) -> list[str]:
    """Names of baselines that fit and are faster than the suggestion's gap allows."""
    assert suggested.gap is not None
    limit = suggested.step_seconds * (1 - suggested.gap) * (1 - 1e-9)
    return [name for name, plan in plans.items() if plan.fits and plan.step_seconds < limit]


@pytest.mark.parametrize("mesh", [MESH, {"x": 8}], ids=str)
@pytest.mark.parametrize("config", [SMALL, UNROLLED], ids=["scan", "unrolled"])
def test_no_baseline_beats_the_suggestion_on_small_models(
    config: dense.DenseConfig, mesh: dict[str, int]
) -> None:
    fn, args = dense.train_step(config)
    assert _refuted(suggest(fn, *args, mesh=mesh, **TRAINING), _dense(config, mesh)) == []


def test_no_baseline_beats_the_suggestion_on_8b() -> None:
    fn, args = dense.dense_8b()
    on = dict(topology="v3:8x8", mesh={"data": 8, "model": 16}, donate_argnums=dense.DONATE)
    plans = baselines(fn, *args, **on)
    suggested = suggest(fn, *args, **on)
    assert _refuted(suggested, plans) == []
    assert [name for name, plan in plans.items() if plan.fits] == ["fsdp", "gspmd_2d"]
    # 8.03e9 f32 parameters with two moments, over 128 cores; tile padding adds little
    state = 3 * 4 * dense.parameter_count(dense.PRESETS["8b"]) / 128
    kept = plans["fsdp"].estimate.peak.argument_bytes
    assert state <= kept <= 1.01 * state + 2**20


def test_convolutions_train_data_parallel() -> None:
    fn, args = convnet.train_step(convnet.scaled_down(convnet.PRESETS["resnet50"]))
    plan = baseline("data_parallel", fn, *args, topology="v3:2x2", mesh={"data": 8}, donate_argnums=(0, 1, 2))
    assert plan.spec("[3]['images']") == plan.spec("[3]['labels']") == P("data")
    assert {layout.axes for layout in plan.input_layouts[:-2]} == {()}
    assert _collectives(plan) == {("all_reduce", ("data",))}


# Where they do not apply ------------------------------------------------------------------------------


def test_forward_only_has_no_update_to_shard() -> None:
    found = baselines(nameless, *NAMELESS, topology="v3:2x2", mesh=MESH)
    assert list(found) == [name for name in BASELINES if name != "weight_update_sharding"]
    assert found.left_out == {
        "weight_update_sharding": "weight_update_sharding does not apply: there is no optimizer state to"
        " shard: no result but weights and vectors comes back"
    }
    with pytest.raises(BaselineError, match="no optimizer state"):
        baseline("weight_update_sharding", nameless, *NAMELESS, topology="v3:2x2", mesh=MESH)


def test_unknown_names_list_the_choices() -> None:
    with pytest.raises(BaselineError, match=r"no baseline 'zero'; choose one of: replicated, data_parallel"):
        baseline("zero", nameless, *NAMELESS, topology="v3:2x2", mesh=MESH)
    with pytest.raises(BaselineError, match=r"no baseline 'zero', 'tp'; choose from: replicated"):
        baselines(nameless, *NAMELESS, topology="v3:2x2", mesh=MESH, names=["zero", "fsdp", "tp"])


def test_a_batch_that_no_axis_divides() -> None:
    args = NAMELESS[0], _shape(3, 32, 128)
    found = baselines(nameless, *args, topology="v3:2x2", mesh=MESH)
    assert list(found) == ["replicated"]
    message = "no mesh axis of {'data': 2, 'model': 4} divides the batch of 3"
    assert found.left_out["data_parallel"] == f"data_parallel does not apply: {message}"


def test_a_batch_takes_the_axes_that_divide_it() -> None:
    args = NAMELESS[0], _shape(4, 32, 128)
    plan = baseline("data_parallel", nameless, *args, topology="v3:2x2", mesh=MESH)
    assert plan.spec("[1]") == P("model")
    assert "the batch of 4 is not split over data: not divisible" in plan.notes


def test_no_batch_and_no_pairs() -> None:
    def power(a: jax.Array) -> jax.Array:
        return jnp.linalg.norm(a @ a)

    found = baselines(power, _shape(64, 64), topology="v3:2x2", mesh={"x": 8})
    assert list(found) == ["replicated"]
    assert "there is no batch" in found.left_out["data_parallel"]


def test_one_axis_is_tensor_parallelism_alone() -> None:
    plans = _dense(SMALL, {"x": 8})
    for name in ("megatron", "gspmd_2d"):
        assert plans[name].spec("[2]['tokens']") == P()
        assert plans[name].spec("[0]['blocks']['up']") == P(None, None, "x")
    assert ("reduce_scatter", ("x",)) in _collectives(plans["gspmd_2d"])
    assert _collectives(plans["megatron"]) == {("all_reduce", ("x",))}


def test_few_key_value_heads_are_not_split_by_model_width() -> None:
    config = dataclasses.replace(SMALL, heads=16, kv_heads=2)
    plan = _dense(config)["megatron"]
    assert plan.spec("[0]['blocks']['wq']") == P(None, None, "model")
    assert plan.spec("[0]['blocks']['wk']") in (P(), P(None, None, None, "model"))


def test_one_device_has_nothing_to_split() -> None:
    found = baselines(mlp_step, *CHAIN, topology="v3:2x2", mesh={"x": 1})
    assert len({plan.step_seconds for plan in found.values()}) == 1
    assert all(not layout.axes for plan in found.values() for layout in plan.input_layouts)


def test_a_chain_pairs_columns_with_rows() -> None:
    plan = baseline("megatron", mlp_step, *CHAIN, topology="v3:2x2", mesh=MESH)
    assert [plan.spec(f"[0][{i}]") for i in range(4)] == [P(None, "model"), P("model")] * 2


def test_the_registry_refuses_duplicates() -> None:
    with pytest.raises(ValueError, match="two baselines are called 'fsdp'"):
        _table(BASELINES["fsdp"], BASELINES["fsdp"])


def test_plans_carry_their_idea_as_a_note() -> None:
    for name, plan in _dense().items():
        assert plan.name == name
        assert BASELINES[name].summary in plan.notes
        assert math.isfinite(plan.step_seconds) and plan.gap is None
