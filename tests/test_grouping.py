"""Groups: what is decided and priced together, and that grouping loses nothing."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.grouping import Block, group
from autoshard.program import Value
from autoshard.rules import Kind
from autoshard.trace import trace
from tests.helpers.programs import random_program


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def grouped(fn: Any, *args: Any) -> Block:
    return group(trace(fn, args).program)


def titles(block: Block) -> list[str]:
    return [item.title for item in block.walk() if not item.is_copy]


def test_an_elementwise_chain_is_one_group() -> None:
    block = grouped(lambda x, b: jnp.tanh(x * 2 + b) - x, f32(8, 4), f32(4))
    assert len(titles(block)) == 1
    (item,) = [g for g in block.groups if not g.is_copy]
    assert str(item.rule) == "(f0 f1), (f1) -> (f0 f1)"


def test_a_reduction_ends_its_group() -> None:
    block = grouped(lambda x: jnp.exp(x - x.max(-1, keepdims=True)).sum(), f32(8, 4))
    assert [str(g.rule) for g in block.groups if not g.is_copy] == [
        "(f0 f1) -> (f0) {reduce: f1=max}",
        "(f0), (f0 f2) -> () {reduce: f0 f2}",
    ]


def test_masks_are_made_again_where_they_are_read() -> None:
    def fn(x: Any) -> Any:
        mask = jnp.tril(jnp.ones((8, 8), bool))
        return jnp.where(mask, x, 0) @ jnp.where(mask, x, 1)

    for item in grouped(fn, f32(8, 8)).walk():
        assert all(v.dtype != jnp.bool_ for v in (*item.inputs, *item.outputs))


def test_an_array_read_in_two_roles_is_two_copies() -> None:
    """In `x x^T` both dims of the result are the rows of x: only one could be split if x came once."""
    block = grouped(lambda x: lax.dot_general(x, x, (((1,), (1,)), ((), ()))), f32(8, 4))
    product = block.groups[-1]
    assert str(product.rule) == "(f1 f0), (f2 f0) -> (f1 f2) {reduce: f0}"
    assert product.inputs[0] is not product.inputs[1]


def test_dims_that_would_be_split_alike_are_whole() -> None:
    block = grouped(lambda x: jnp.exp(x) + jnp.exp(x.T), f32(8, 8))
    rules = [g.rule for g in block.groups if not g.is_copy]
    assert all(not r.factors for r in rules if len(r.inputs) == 1)


def test_a_sum_with_a_sum_may_stay_partial_and_one_with_a_whole_array_not() -> None:
    both = grouped(lambda x, y, w: x @ w + y @ w, f32(8, 4), f32(8, 4), f32(4, 2))
    assert both.groups[-1].rule.linear == (0, 1)
    shifted = grouped(lambda x, w: x @ w + 1.0, f32(8, 4), f32(4, 2))
    assert shifted.groups[-1].rule.linear == ()
    product = grouped(lambda x, w: (x @ w) * (x @ w), f32(8, 4), f32(4, 2))
    assert product.groups[-1].rule.linear == ()


def _check(block: Block, known: set[Value]) -> None:
    known = known | set(block.inputs) | {v for v, _ in block.consts}
    for item in block.groups:
        assert known.issuperset(item.inputs), item
        inner = set(item.inputs)
        for op in item.ops:
            assert all(a in inner or a in known for a in op.inputs if isinstance(a, Value)), op
            inner |= set(op.outputs)
        for body in item.blocks:
            _check(body, set())
        assert not known & set(item.outputs)
        known |= set(item.outputs)
        for values, dims in ((item.inputs, item.rule.inputs), (item.outputs, item.rule.outputs)):
            if item.kind not in (Kind.CONTROL, Kind.IDENTITY):
                for value, own in zip(values, dims, strict=True):
                    factors = [f for dim in own for f in dim if f not in item.rule.whole]
                    assert len(own) == len(value.shape) and len(factors) == len(set(factors)), (item, value)
    assert known.issuperset(a for a in block.outputs if isinstance(a, Value))


@pytest.mark.parametrize("seed", range(12))
def test_groups_run_in_order_and_name_what_they_read(seed: int) -> None:
    made = random_program(seed, ["unary", "binary", "dot", "reduce", "move", "model", "loop", "iota"])
    _check(grouped(made.fn, *made.args), set())
