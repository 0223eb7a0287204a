"""Windowed einsums: rings of permutes compute the product, and their collectives hide behind it."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autoshard
from autoshard.choices import assignments, windowed
from autoshard.groups import Group
from autoshard.partition.emitter import Decisions
from autoshard.partition.kernels import kernel_costs
from autoshard.rules.windowed import ring_of
from tests.helpers.running import differences, run_spmd, session_of, whole_decisions

MESH = {"a": 2, "b": 4}
PRODUCTS: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {
    "plain": ((((1,), (0,)), ((), ())), (8, 16), (16, 24)),
    "transposed": ((((0,), (1,)), ((), ())), (16, 8), (8, 16)),
    "batched": ((((2,), (2,)), ((0,), (0,))), (4, 8, 4), (4, 8, 4)),
}


def _only_product(fn: Any, args: tuple[Any, ...]) -> tuple[Any, Group]:
    session = session_of(fn, args, MESH)
    (item,) = (g for g in session.source.block.walk() if g.title == "dot_general")
    return session, item


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_every_ring_computes_the_product(name: str, dtype: Any) -> None:
    numbers, left, right = PRODUCTS[name]
    rng = np.random.default_rng(0)
    args = tuple(jnp.asarray(rng.integers(-3, 4, s), dtype) for s in (left, right))

    def fn(x: Any, y: Any) -> Any:
        return lax.dot_general(x, y, numbers)

    session, item = _only_product(fn, args)
    options = windowed(item.rule, assignments(item.rule, MESH), MESH)
    kinds = {ring.operand for ring in map(ring_of, options) if ring is not None}
    assert kinds == {-1, 0, 1}
    for assignment in options[:: max(1, len(options) // 12)]:
        whole = whole_decisions(session.source.block)
        decisions = Decisions(
            assignments={**whole.assignments, item: assignment}, layouts=whole.layouts, outputs=whole.outputs
        )
        wrong = differences(run_spmd(session, decisions, args), [fn(*args)])
        assert not wrong, (assignment, wrong)


def test_a_ring_that_overlaps_is_found_and_priced_as_it_is_emitted() -> None:
    x = jax.ShapeDtypeStruct((4096, 8192), "bfloat16")
    w = jax.ShapeDtypeStruct((8192, 8192), "bfloat16")
    specs = {"[0]": jax.P("x"), "[1]": jax.P(None, "x"), "out": jax.P(None, "x")}
    options: Any = {"topology": "v3", "mesh": {"x": 8}, "annotations": specs}
    plain = autoshard.suggest(lambda x, w: x @ w, x, w, **options)
    ring = autoshard.suggest(lambda x, w: x @ w, x, w, windowed_einsum=True, **options)
    assert ring.step_seconds < plain.step_seconds
    kinds = {c.kind for c in ring.estimate.collectives}
    assert kinds == {"collective_permute"} and {c.kind for c in plain.estimate.collectives} == {"all_gather"}
    # Only what the permutes take longer than the products beside them is exposed.
    wire = sum(c.seconds for c in ring.estimate.collectives)
    gather = sum(c.seconds for c in plain.estimate.collectives)
    assert wire < 0.8 * gather and ring.gap is not None and ring.gap <= 1e-4


def test_the_price_of_every_ring_is_that_of_its_program() -> None:
    args = tuple(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1024, 2048), (2048, 4096)))
    session, item = _only_product(lambda x, y: x @ y, args)
    options = windowed(item.rule, assignments(item.rule, MESH), MESH)
    for assignment in itertools.islice(options, 0, None, max(1, len(options) // 10)):
        whole = whole_decisions(session.source.block)
        decisions = Decisions(
            assignments={**whole.assignments, item: assignment}, layouts=whole.layouts, outputs=whole.outputs
        )
        (cost,) = kernel_costs([(item, assignment)], session.machine)
        reshards = session.resharder
        moved = sum(
            reshards.find(v.shape, v.dtype, whole.layouts[v], item.input_layout(i, assignment)).seconds
            for i, v in enumerate(item.inputs)
        )
        out = reshards.find(
            item.outputs[0].shape, item.outputs[0].dtype, item.output_layout(0, assignment), whole.outputs[0]
        ).seconds
        total = session.estimate(decisions).serial_seconds
        assert total == pytest.approx(cost.seconds + moved + out, rel=1e-9)
