"""Which values are computed on the spot, which work ends a product's kernel, and what that is priced at."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autoshard
from autoshard.fusion import Fusions, fusions_of
from autoshard.grouping import Block, Group, group
from autoshard.partition.emitter import Decisions
from autoshard.session import Session
from autoshard.trace import trace
from tests.helpers.running import differences, run_spmd, session_of, whole_decisions

X = jax.ShapeDtypeStruct((64, 128), jnp.float32)
W = jax.ShapeDtypeStruct((128, 256), jnp.float32)
V = jax.ShapeDtypeStruct((256, 32), jnp.float32)


def found_in(fn: Callable[..., Any], *args: Any) -> tuple[Block, Fusions]:
    block = group(trace(fn, args).program)
    return block, fusions_of(block)


def titled(block: Block, title: str) -> Group:
    (item,) = (g for g in block.walk() if g.title == title)
    return item


def priced(fn: Callable[..., Any], *args: Any) -> Any:
    session = session_of(fn, args, {"a": 4})
    return session.estimate(whole_decisions(session.source.block))


def test_elementwise_work_before_a_product_is_done_while_it_reads() -> None:
    block, fusions = found_in(lambda x, w: jnp.tanh(x * 2) @ w, X, W)
    before, product = (fusions.of(g) for g in block.groups)
    assert before.outputs and before.outputs[0] == product.riders[0]
    assert before.outputs[0].reads == ((0, 4.0),) and not before.runs


def test_elementwise_work_behind_a_product_ends_its_kernel() -> None:
    block, fusions = found_in(
        lambda x, w, b: (x @ w + b, x), X, W, jax.ShapeDtypeStruct((64, 256), jnp.float32)
    )
    product, behind = (fusions.of(titled(block, t)) for t in ("dot_general", "add"))
    assert product.tail is not None and product.tail is behind.within
    assert product.tail.read_bytes == 4 and product.tail.written == (4.0,) and not product.tail.stored


def test_dear_work_on_two_arrays_is_stored_and_cheap_work_is_not() -> None:
    _, dear = found_in(lambda x, y, w: jnp.exp(x + y) @ w, X, X, W)
    _, cheap = found_in(lambda x, y, w: (x + y) @ w, X, X, W)
    assert not dear.riders
    assert [r.reads for r in cheap.riders.values()] == [((0, 4.0), (1, 4.0))]


def test_a_long_computation_is_not_repeated_for_several_readers() -> None:
    def normalised(rounds: int) -> Callable[..., Any]:
        def fn(x: jax.Array) -> jax.Array:
            for _ in range(rounds):
                x = jnp.exp(x - jax.nn.logsumexp(x, axis=0))
                x = x / jnp.sum(x, axis=1, keepdims=True)
            return x

        return fn

    # Every round costs the same: what came before is not computed again.
    seconds = [priced(normalised(n), X).serial_seconds for n in (4, 8, 16)]
    assert (seconds[2] - seconds[1]) / (seconds[1] - seconds[0]) == pytest.approx(2, rel=0.05)
    _, fusions = found_in(normalised(16), X)
    assert max(r.work for r in fusions.riders.values()) < 100


def test_arrays_without_elements_have_a_price() -> None:
    x, y = (jnp.zeros((0, 128), jnp.float32) for _ in range(2))
    assert priced(lambda x, y, w: jnp.tanh(x + y) @ w, x, y, W).serial_seconds >= 0


def test_a_result_of_the_program_is_stored() -> None:
    def fn(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        twice = x * 2
        return twice, twice @ w

    block, fusions = found_in(fn, X, W)
    assert not any(fusions.of(g).outputs for g in block.groups if g.title == "mul")


def test_softmax_between_products_stores_the_scores_only() -> None:
    """The maximum ends the first product; what is divided is computed while the second one reads."""

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.softmax((q @ k.T).astype(jnp.float32), -1).astype(q.dtype) @ v

    q = jax.ShapeDtypeStruct((512, 64), jnp.bfloat16)
    block, fusions = found_in(attention, q, q, q)
    scores, context = (g for g in block.groups if g.title == "dot_general")
    tail = fusions.of(scores).tail
    assert tail is not None and tail.stored and not tail.written
    rider = fusions.of(context).riders[0]
    assert rider is not None and rider.read_bytes == 2


def test_memory_holds_nothing_that_is_computed_on_the_spot() -> None:
    big = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    found = priced(lambda x, w: jnp.sin(jnp.tanh(x)) @ w, big, big)
    assert found.peak_bytes == pytest.approx(3 * 4096**2 * 4, rel=1e-3)


def test_what_is_computed_on_the_spot_costs_its_work_in_the_reader() -> None:
    plain = priced(lambda x, w: x @ w, X, W)
    dear = priced(lambda x, w: jnp.sin(jnp.sin(jnp.sin(jnp.sin(x)))) @ w, X, W)
    assert dear.serial_seconds > plain.serial_seconds
    assert len(dear.entries) == len(plain.entries) == 1


def test_a_reshard_on_the_way_stores_the_value() -> None:
    session = session_of(lambda x, w: jnp.tanh(x) @ w, (X, W), {"a": 4})
    whole = whole_decisions(session.source.block)
    before = next(g for g in whole.assignments if g.title == "tanh")
    rows = before.rule.outputs[0][0][0]
    split = Decisions(
        assignments={**whole.assignments, before: {rows: ("a",)}},
        layouts=whole.layouts,
        outputs=whole.outputs,
    )
    titles = [e.title for e in session.estimate(split).entries]
    assert "store" in titles and "store" not in [e.title for e in session.estimate(whole).entries]


def test_partial_sums_are_stored_and_what_follows_is_a_kernel_of_its_own() -> None:
    session = session_of(lambda x, w: jnp.tanh(x @ w), (X, W), {"a": 4})
    whole = whole_decisions(session.source.block)
    product = next(g for g in whole.assignments if g.title == "dot_general")
    (contracted,) = product.rule.reduce
    split = Decisions(
        assignments={**whole.assignments, product: {contracted: ("a",)}},
        layouts=whole.layouts,
        outputs=whole.outputs,
    )
    assert "apart" in [e.title for e in session.estimate(split).entries]
    assert "apart" not in [e.title for e in session.estimate(whole).entries]


def test_a_scan_copies_slices_that_several_kernels_read_and_what_products_stack() -> None:
    def step(x: jax.Array, given: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        w, y = given
        made = x @ w
        return made * jnp.sum(y) + jnp.max(jnp.abs(y)) * 3, made

    stacked = jax.ShapeDtypeStruct((4, 128, 128), jnp.float32)
    args = (X, (stacked, jax.ShapeDtypeStruct((4, 64, 128), jnp.float32)))
    block, fusions = found_in(lambda x, given: lax.scan(step, x, given), *args)
    scan = fusions.of(titled(block, "scan"))
    assert [r is not None for r in scan.slices] == [True, False] and scan.stacks == (1,)
    titles = [e.title for e in priced(lambda x, given: lax.scan(step, x, given), *args).entries]
    assert titles.count("slice of a scan") == 1 and titles.count("stack of a scan") == 1


def test_a_stack_that_replaces_what_its_scan_slices_is_copied_at_the_end() -> None:
    def fn(x: jax.Array, cache: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(x: jax.Array, old: jax.Array) -> tuple[jax.Array, jax.Array]:
            new = lax.dynamic_update_slice(old, x[:1], (3, 0))
            return jnp.tanh(new @ new.T @ x), new

        return lax.scan(step, x, cache)

    args = (jax.ShapeDtypeStruct((128, 128), jnp.float32), jax.ShapeDtypeStruct((4, 128, 128), jnp.float32))
    given, kept = (
        autoshard.evaluate(fn, *args, topology="v3", mesh={"a": 4}, donate_argnums=donated)
        for donated in ((1,), ())
    )
    copies = [
        sum(e.count for e in plan.estimate.entries if e.title == "stack of a scan") for plan in (given, kept)
    ]
    assert copies == [8, 4]


@pytest.mark.parametrize("order", [(1, 0), (0, 2, 1)])
def test_a_transposed_product_swaps_its_operands(order: tuple[int, ...]) -> None:
    batch = order[:-2]
    rng = np.random.default_rng(0)
    shape = (3,) * len(batch)
    x, y = (jnp.asarray(rng.standard_normal((*shape, 4, n)), jnp.float32) for n in (5, 6))
    numbers = (((x.ndim - 2,), (x.ndim - 2,)), (batch, batch))

    def fn(x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.dot_general(x, y, numbers).transpose(order)

    session = session_of(fn, (x, y), {"a": 2})
    assert [op.name for op in session.source.traced.program.ops] == ["dot_general"]
    found = run_spmd(session, whole_decisions(session.source.block), (x, y))
    assert not differences(found, [fn(x, y)])


def test_a_product_that_something_else_reads_keeps_its_order() -> None:
    def fn(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        made = x @ w
        return made.T, jnp.sum(made)

    program = trace(fn, (X, W)).program
    assert [op.name for op in program.ops].count("transpose") == 1


def test_sessions_with_rings_end_no_kernels_in_other_work() -> None:
    session = session_of(lambda x, w: jnp.tanh(x @ w), (X, W), {"a": 4})
    ringed = Session.of(session.source, session.machine.placement.topology, {"a": 4}, windowed_einsum=True)
    assert session.fusions.tails and not ringed.fusions.tails
