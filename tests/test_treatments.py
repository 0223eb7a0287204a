"""Ops that are not split by a rule: inlined, run once, left to the platform, or run whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import mlir

import autoshard
import search
from autoshard.errors import TraceError
from autoshard.solving import model_of
from autoshard.trace import trace
from tests.helpers.running import differences, session_of, whole_decisions

X = jnp.arange(8.0)
LIKE = jax.ShapeDtypeStruct(X.shape, X.dtype)


def _names(fn, *args):
    return [op.name for op in trace(fn, args).program.walk()]


def _primitive(name, implementation):
    """Define a primitive as packages do: one function is its implementation and its lowering."""
    made = Primitive(name)
    made.def_impl(implementation)
    made.def_abstract_eval(lambda x, **params: x)
    mlir.register_lowering(made, mlir.lower_fun(implementation, multiple_results=False))
    return made


def _on_eight(fn, *args):
    plan = autoshard.suggest(fn, *args, topology="v3", mesh={"a": 8})
    for apply in (plan.spmd, plan.jit):
        assert not differences(jax.tree.leaves(apply(fn)(*args)), jax.tree.leaves(fn(*args)), rtol=1e-4)
    return plan


# Inlined by implementation ---------------------------------------------------------------------------


def test_a_primitive_written_in_jax_is_its_implementation() -> None:
    centred = _primitive("centred", lambda x, *, by: by * (x - x.mean()))
    fn = lambda x: centred.bind(jnp.sin(x), by=2.0)  # noqa: E731
    assert "centred" not in _names(fn, X) and "reduce_sum" in _names(fn, X)
    assert _on_eight(fn, X).coverage.complete


def test_an_implementation_that_wants_real_arrays_stays_an_op() -> None:
    hosted = _primitive("hosted", lambda x: jnp.asarray(np.sort(np.asarray(x))))
    plan = autoshard.suggest(lambda x: hosted.bind(x) + 1, X, topology="v3", mesh={"a": 8})
    assert dict(plan.coverage.without_rule) == {"hosted": 1}


def test_an_implementation_that_binds_itself_stays_an_op() -> None:
    again = Primitive("again")
    again.def_impl(lambda x: jax.jit(again.bind)(x))
    again.def_abstract_eval(lambda x: x)
    assert _names(lambda x: again.bind(x) + 1, X) == ["again", "add"]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.linalg.solve(jnp.eye(8) * 9 + jnp.outer(x, x), x),
        lambda x: jax.scipy.sparse.linalg.cg(lambda y: (2 + x) * y, x)[0],
        lambda x: lax.composite(lambda y: jnp.sin(y) * 2, name="our.own")(x),
        lambda x: jax.custom_derivatives.linear_call(lambda r, y: r * y, lambda r, y: r * y, 2.0, x),
    ],
    ids=["custom_linear_solve", "cg", "composite", "linear_call"],
)
def test_calls_of_jax_are_inlined(fn) -> None:
    assert _on_eight(fn, X).coverage.complete


# Run once -------------------------------------------------------------------------------------------


def test_a_callback_runs_once_with_whole_arrays() -> None:
    seen: list[tuple[int, ...]] = []

    def host(x):
        seen.append(x.shape)
        return np.square(x)

    for fn in (
        lambda x: io_callback(host, LIKE, 2 * x) + 1,
        lambda x: io_callback(host, LIKE, 2 * x, ordered=True) + 1,
    ):
        plan = autoshard.suggest(fn, X, topology="v3", mesh={"a": 8})
        assert any("runs once, on the first device" in note for note in plan.notes)
        assert not any("equally likely" in note for note in plan.notes)
        for apply in (plan.spmd, plan.jit):
            seen.clear()
            found = apply(fn)(X)
            jax.effects_barrier()
            assert seen == [(8,)]
            np.testing.assert_array_equal(found, np.square(2 * X) + 1)


def test_a_pure_callback_sees_whole_arrays_and_moves_nothing() -> None:
    seen: list[tuple[int, ...]] = []

    def host(x):
        seen.append(x.shape)
        return np.square(x)

    fn = lambda x: jax.pure_callback(host, LIKE, 2 * x) + 1  # noqa: E731
    plan = autoshard.suggest(fn, X, topology="v3", mesh={"a": 8})
    for apply in (plan.spmd, plan.jit):
        seen.clear()
        np.testing.assert_array_equal(apply(fn)(X), np.square(2 * X) + 1)
        assert set(seen) == {(8,)}
        compiled = apply(fn).lower(X).compile().as_text()
        assert "all-reduce" not in compiled and "all-gather" not in compiled
    assert not plan.estimate.collectives


def test_a_pure_callback_inside_a_shard_map_over_some_axes() -> None:
    """It runs on every device of the axes that are left, too."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    like = jax.ShapeDtypeStruct((2,), X.dtype)

    def fn(x):
        inside = lambda x: jax.pure_callback(np.square, like, 2 * x) + 1  # noqa: E731
        spec = jax.sharding.PartitionSpec("a")
        return jax.shard_map(
            inside, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"a"}, check_vma=False
        )(x)

    plan = autoshard.suggest(fn, X, topology="v3", mesh={"a": 4, "b": 2})
    for apply in (plan.spmd, plan.jit):
        np.testing.assert_array_equal(jax.jit(apply(fn))(X), np.square(2 * X) + 1)


def test_what_is_printed_in_order_is_printed_once_in_order(capsys) -> None:
    def fn(x):
        for i in range(3):
            jax.debug.print("line {} of {}", i, x.sum(), ordered=True)
        jax.debug.callback(lambda s: print("last", s), x.max(), ordered=True)
        return 2 * x

    plan = autoshard.suggest(fn, X, topology="v3", mesh={"a": 8})
    for apply in (plan.spmd, plan.jit):
        jax.block_until_ready(apply(fn)(X))
        jax.effects_barrier()
        assert capsys.readouterr().out.split("\n") == [
            *(f"line {i} of 28.0" for i in range(3)),
            "last 7.0",
            "",
        ]


def test_hidden_state_gives_all_devices_the_same_numbers() -> None:
    fn = lambda: lax.rng_uniform(0.0, 1.0, (64,))  # noqa: E731
    plan = autoshard.suggest(fn, topology="v3", mesh={"a": 8})
    parts = [np.asarray(s.data) for s in plan.spmd(fn)().addressable_shards]
    if len({p.shape for p in parts}) == 1 and parts[0].shape == (64,):
        assert all((p == parts[0]).all() for p in parts)
    whole = np.asarray(plan.spmd(fn)())
    assert ((whole >= 0) & (whole < 1)).all() and len(set(whole.tolist())) > 32


# The platform --------------------------------------------------------------------------------------------


def test_the_branch_for_tpus_is_counted_and_the_one_of_the_platform_runs() -> None:
    w = jnp.ones((512, 512))
    heavy = lambda x: jnp.tanh(x @ x @ x @ x)  # noqa: E731

    def fn(x):
        return lax.platform_dependent(x, cpu=heavy, tpu=lambda x: 2 * x, default=heavy)

    def seconds(f):
        return autoshard.suggest(f, w, topology="v3", mesh={"a": 8}).step_seconds

    plan = autoshard.suggest(fn, w, topology="v3", mesh={"a": 8})
    assert plan.step_seconds < seconds(heavy) / 2
    assert plan.estimate.flops <= 2 * w.size
    for apply in (plan.spmd, plan.jit):
        np.testing.assert_allclose(apply(fn)(w), heavy(w), rtol=1e-5)


def test_a_branch_for_another_platform_is_not_lowered() -> None:
    def fn(x):
        alien = lambda x: jax.ffi.ffi_call("no_such_target", LIKE)(x)  # noqa: E731
        return lax.platform_dependent(x, cpu=jnp.sin, cuda=alien)

    plan = autoshard.suggest(fn, X, topology="v3", mesh={"a": 8})
    np.testing.assert_allclose(plan.spmd(fn)(X), jnp.sin(X), rtol=1e-6)


# References ------------------------------------------------------------------------------------------


def test_only_what_must_stay_between_references_does() -> None:
    def fn(x):
        total = jax.new_ref(x)
        total[0] = 1.0
        waves = jnp.cos(x)
        peak = 3 * total[1]
        total[2] = peak
        return total[...] + waves, jnp.sin(peak)

    assert sorted(_names(fn, X)) == sorted(["cos", "references", "add", "sin"])
    assert dict(_on_eight(fn, X).coverage.without_rule) == {"references": 1}


def test_a_reference_inside_a_loop_body() -> None:
    def body(c, _):
        total = jax.new_ref(c)
        total[0] += 1
        return total[...], total[1]

    _on_eight(lambda x: lax.scan(body, x, None, length=3), X)


def test_a_reference_from_outside_is_refused() -> None:
    outside = jax.new_ref(X)

    def fn(x):
        outside[0] = 1.0
        return outside[...] + x

    with pytest.raises(TraceError, match="mutable reference that it does not make itself"):
        trace(fn, (X,))


# Effects -----------------------------------------------------------------------------------------------


def test_what_has_an_effect_is_not_dead() -> None:
    call = jax.ffi.ffi_call("no_such_target", LIKE, has_side_effect=True)

    def fn(x):
        call(x)
        jax.debug.print("{}", x)
        lax.rng_uniform(0.0, 1.0, (8,))
        return x + 1

    assert _names(fn, X) == ["ffi_call", "debug_print", "add"]


# Prices ------------------------------------------------------------------------------------------------


def _flops(fn, *args) -> float:
    session = session_of(fn, args, {"a": 2})
    return session.estimate(whole_decisions(session.source.block)).flops


def test_a_kernel_of_pallas_costs_its_body_once_per_point_of_its_grid() -> None:
    def body(x, w, out):
        out[...] = jnp.dot(x[...], w[...])

    def product(x, w):
        rows = pl.BlockSpec((128, 256), lambda i: (i, 0))
        whole = pl.BlockSpec((256, 256), lambda i: (0, 0))
        like = jax.ShapeDtypeStruct((1024, 256), jnp.float32)
        return pl.pallas_call(body, grid=(8,), in_specs=[rows, whole], out_specs=rows, out_shape=like)(x, w)

    x, w = jnp.ones((1024, 256)), jnp.ones((256, 256))
    assert _flops(product, x, w) == _flops(lambda x, w: x @ w, x, w) == 2 * 1024 * 256 * 256


def test_products_in_a_kernel_of_pallas_find_their_operands_in_vmem() -> None:
    def body(x, w, out):
        out[...] = jnp.dot(x[...], w[...], preferred_element_type=jnp.float32)

    def product(x, w, *, steps):
        rows = pl.BlockSpec((x.shape[0] // steps, 512), lambda i: (i, 0))
        whole = pl.BlockSpec((512, 512), lambda i: (0, 0))
        like = jax.ShapeDtypeStruct(x.shape, jnp.float32)
        return pl.pallas_call(body, grid=(steps,), in_specs=[rows, whole], out_specs=rows, out_shape=like)(
            x, w
        )

    x, w = jnp.ones((65536, 512), jnp.bfloat16), jnp.ones((512, 512), jnp.bfloat16)
    found = []
    for steps in (1, 64):
        session = session_of(functools.partial(product, steps=steps), (x, w), {"a": 2})
        (entry,) = session.estimate(whole_decisions(session.source.block)).entries
        found.append(entry.cost.matrix_seconds)
    assert found[0] == pytest.approx(found[1])


def test_what_lies_in_the_hosts_memory_takes_no_hbm() -> None:
    def block(x, w):
        return jnp.tanh(checkpoint_name(x, "kept") @ w)

    def loss(ws, x):
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["kept"],
            offload_src="device",
            offload_dst="pinned_host",
        )
        step = jax.checkpoint(block, policy=policy)
        return lax.scan(lambda x, w: (step(x, w), None), x, ws)[0].sum()

    ws, x = jnp.ones((16, 128, 128)), jnp.ones((8192, 128))
    session = session_of(jax.grad(loss), (ws, x), {"a": 2})
    found = session.estimate(whole_decisions(session.source.block))
    kept = 16 * 8192 * 128 * 4
    assert found.peak_bytes < kept
    assert any("host's memory" in remark for remark in session.source.remarks)
    # Put there and fetched once: the array crosses HBM twice in all.
    assert sum(e.cost.hbm_bytes * e.count for e in found.entries if e.title == "device_put") == 2 * kept
    model, _ = model_of(session, {})
    choice = list(search.solve(model.problem, time_limit_seconds=20).choice)
    seconds = session.estimate(model.decisions(choice)).serial_seconds
    assert seconds == pytest.approx(model.problem.objective(choice), rel=1e-6)


def test_a_ragged_product_costs_every_row_once() -> None:
    sizes = jnp.full(8, 16, jnp.int32)
    x, w, g = jnp.ones((128, 64)), jnp.ones((8, 64, 32)), jnp.ones((128, 32))
    once = 2 * 128 * 64 * 32
    weights = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    assert _flops(lambda x, w: lax.ragged_dot(x, w, sizes), x, w) == once
    assert _flops(lambda x, g: lax.ragged_dot_general(x, g, sizes, weights), x, g) == once
    two = [jnp.stack([a, a]) for a in (x, w, sizes)]
    assert _flops(jax.vmap(lax.ragged_dot), *two) == 2 * once


def test_columns_of_a_solve_share_its_price() -> None:
    a, b = jnp.eye(64), jnp.ones((64, 16))
    solve = lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True)  # noqa: E731
    assert _flops(solve, a, b) == 2 * _flops(solve, a, b[:, :8]) == 64 * 64 * 16
