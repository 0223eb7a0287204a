"""Tracing: calls are inlined, dead ops dropped, nothing runs, and the Program still computes the function."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autoshard
from autoshard.partition.emitter import constrained
from autoshard.program import Op
from autoshard.trace import trace
from tests.helpers.programs import random_program
from tests.helpers.running import cpu_mesh, differences, run, run_spmd, session_of, whole_decisions


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def ops(fn: Any, *args: Any) -> list[Op]:
    return list(trace(fn, args).program.walk())


def names(fn: Any, *args: Any) -> list[str]:
    return [op.name for op in ops(fn, *args)]


@jax.custom_jvp
def doubled(x: Any) -> Any:
    return jnp.sin(x)


@doubled.defjvp
def _doubled_jvp(primals: Any, tangents: Any) -> Any:
    return doubled(primals[0]), 2 * tangents[0]


@jax.custom_vjp
def tripled(x: Any) -> Any:
    return jnp.cos(x)


tripled.defvjp(lambda x: (tripled(x), None), lambda _, g: (3 * g,))


def test_calls_are_inlined() -> None:
    fn = jax.jit(lambda x: doubled(jax.jit(tripled)(x)))
    assert names(fn, f32(4)) == ["cos", "sin"]
    gradient = names(jax.grad(lambda x: fn(x).sum()), f32(4))
    assert gradient.count("mul") == 2 and not {"sin", "cos"} & set(gradient)


def test_a_differentiated_checkpoint_recomputes_behind_a_barrier() -> None:
    layer = jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w)))
    assert names(layer, f32(4, 4), f32(4, 4)) == ["dot_general", "sin", "sin"]
    found = names(jax.grad(lambda w, x: layer(x, w).sum()), f32(4, 4), f32(4, 4))
    assert found.count("optimization_barrier") == 1
    assert found.index("optimization_barrier") < found.index("cos")


def test_dead_ops_are_dropped_in_a_scan() -> None:
    def fn(x: Any, w: Any, dead: Any) -> Any:
        def body(carry: Any, row: Any) -> Any:
            a, b = carry
            return (a + row, jnp.tanh(b * dead)), (jnp.exp(row), jnp.sin(row))

        (a, _), (ys, _) = lax.scan(body, (w, w), x)
        return a, ys

    traced = trace(fn, (f32(3, 4), f32(4), f32(4)))
    scan = next(op for op in traced.program.ops if op.name == "scan")
    assert sorted(op.name for op in scan.blocks[0].ops) == ["add", "exp"]
    assert (len(scan.inputs), len(scan.outputs)) == (2, 2)
    assert (scan.params["num_consts"], scan.params["num_carry"]) == (0, 1)


def test_dead_ops_are_dropped_in_a_while() -> None:
    def fn(x: Any, w: Any) -> Any:
        step = lambda c: (c[0] + 1, c[1] * 2, jnp.sin(c[2] * w), c[3] + c[1])  # noqa: E731
        return lax.while_loop(lambda c: c[0] < 3, step, (0, x, x, x))[3]

    loop = next(op for op in trace(fn, (f32(4), f32(4))).program.ops if op.name == "while")
    assert sorted(op.name for op in loop.blocks[1].ops) == ["add", "add", "mul"]
    assert len(loop.outputs) == 3 and loop.params["body_nconsts"] == 0


def test_a_loop_with_a_condition_per_example_runs_while_any_holds() -> None:
    one = lambda x, n: lax.while_loop(lambda c: c[1] < n, lambda c: (c[0] * 2, c[1] + 1), (x, 0))[0]  # noqa: E731
    (loop,) = (op for op in ops(jax.vmap(one), f32(8, 4), f32(8)) if op.name == "while")
    condition, step = loop.blocks
    assert [op.name for op in condition.ops][-2:] == ["lt", "reduce_or"] and condition.outputs[0].shape == ()
    assert [op.name for op in step.ops].count("select_n") == 2


def test_dead_ops_are_dropped_in_branches() -> None:
    def fn(flag: Any, x: Any, y: Any) -> Any:
        return lax.cond(flag, lambda x, y: (x + 1, jnp.sin(y)), lambda x, y: (x * 2, y), x, y)[0]

    cond = next(
        op
        for op in trace(fn, (jax.ShapeDtypeStruct((), bool), f32(4), f32(4))).program.ops
        if op.name == "cond"
    )
    assert [[op.name for op in block.ops] for block in cond.blocks] == [["mul"], ["add"]]
    assert len(cond.inputs) == 2


def test_an_op_with_an_effect_is_kept() -> None:
    def fn(x: Any) -> Any:
        jax.debug.print("{}", x.sum())
        return x * 2

    assert "reduce_sum" in names(fn, f32(4))


def test_nested_constants_become_operands_once() -> None:
    table = jnp.arange(8.0)

    def fn(x: Any) -> Any:
        def body(c: Any, row: Any) -> Any:
            return lax.cond(c.sum() > 0, lambda c: c + table, lambda c: c - table, c) + row, None

        return lax.scan(body, x[0] + table, x)[0]

    program = trace(fn, (f32(4, 8),)).program
    assert len(program.consts) == 1 and program.consts[0][1].shape == (8,)
    scan = next(op for op in program.ops if op.name == "scan")
    assert scan.inputs[0] is program.consts[0][0] and not scan.blocks[0].consts


def test_keys_keep_their_type() -> None:
    traced = trace(lambda k: jax.random.uniform(k, (4,)), (jax.random.key(0),))
    assert str(traced.program.inputs[0].dtype) == "key<fry>"


def test_arithmetic_on_literals_is_folded() -> None:
    assert names(lambda x: x * (1 / jnp.sqrt(jnp.float32(16))), f32(4)) == ["mul"]
    (op,) = ops(lambda x: x * (1 / jnp.sqrt(jnp.float32(16))), f32(4))
    assert float(op.inputs[1].val) == 1 / 16**0.5


def test_ops_name_the_users_line() -> None:
    (op,) = ops(lambda x: jnp.sin(x), f32(4))
    assert op.source.startswith("test_trace.py:") and "test_ops_name_the_users_line" in op.source


def test_names_are_tree_paths() -> None:
    traced = trace(lambda p, x: {"y": p["w"] @ x, "z": [x]}, ({"w": f32(2, 4)}, f32(4)))
    assert traced.in_names == ("[0]['w']", "[1]") and traced.out_names == ("['y']", "['z'][0]")
    assert traced.arg_of_input == (0, 1)


def test_nothing_is_materialised() -> None:
    huge = f32(2**20, 2**20)
    before = len(jax.live_arrays())
    program = trace(lambda x: jnp.tril(x + jnp.ones(x.shape)) @ jnp.zeros((2**20, 8)), (huge,)).program
    assert program.size and not program.consts and len(jax.live_arrays()) == before


def test_a_leaf_that_is_no_array_is_named() -> None:
    with pytest.raises(autoshard.TraceError, match=r"args\[1\]\['mode'\] is a str: 'train'"):
        trace(lambda x, o: x, (f32(4), {"mode": "train"}))


def test_a_failing_function_is_told_with_its_arguments() -> None:
    with pytest.raises(autoshard.TraceError, match=r"(?s)failed while it was traced.*\[0\]: float32\[4, 2\]"):
        trace(lambda x, w: x @ w, (f32(4, 2), f32(4, 2)))


@functools.cache
def program(seed: int) -> Any:
    return random_program(seed, ["loop", "model", "unary", "random"], most=4)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("how", ["constrained", "spmd"])
def test_the_program_computes_the_function(seed: int, how: str) -> None:
    made, mesh = program(seed), {"a": 2}
    session = session_of(made.fn, made.args, mesh)
    decisions = whole_decisions(session.source.block)
    if how == "spmd":
        found = run_spmd(session, decisions, made.args)
    else:
        found = run(
            constrained(session.source.block, decisions, session.resharder, cpu_mesh(mesh)), made.args
        )
    assert not differences(found, made.expected)


def test_custom_rules_are_kept() -> None:
    fn = jax.grad(lambda x: (doubled(x) * tripled(x)).sum())
    session = session_of(fn, (f32(4),), {"a": 2})
    (found,) = run_spmd(session, whole_decisions(session.source.block), (jnp.arange(4.0),))
    np.testing.assert_allclose(found, fn(jnp.arange(4.0)), rtol=1e-6)
