"""The estimate: positive, finite, monotone, and at home with programs that were written by hand."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

import autoshard
import cost_models as cm
from autoshard.estimate import Estimate, estimate
from autoshard.partition.price import Machine
from autoshard.session import abstract_mesh

MESH = {"x": 2, "y": 4}


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def machine(mesh: dict[str, int] = MESH) -> Machine:
    return Machine.of(cm.Topology.smallest("v3", math.prod(mesh.values())), mesh)


def by_hand(fn: Any, in_specs: Any, out_specs: Any, *args: Any) -> Estimate:
    mapped = jax.shard_map(
        fn, mesh=abstract_mesh(MESH), in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return estimate(jax.make_jaxpr(mapped)(*args), machine())


def test_a_program_written_by_hand_is_priced() -> None:
    def fn(x: Any, w: Any) -> Any:
        return lax.psum(jnp.tanh(x @ w), "y").sum(0)

    found = by_hand(fn, (P("x", "y"), P("y")), P(None), f32(256, 512), f32(512, 128))
    (collective,) = found.collectives
    assert (collective.kind, collective.axes) == ("all_reduce", ("y",))
    assert collective.full_bytes == 256 / 2 * 128 * 4
    assert found.flops >= 2 * (256 / 2) * (512 / 4) * 128
    assert found.serial_seconds == pytest.approx(sum(found.breakdown().values()))
    local = 4 * (256 / 2 * 512 / 4 + 512 / 4 * 128)
    assert found.peak_bytes >= local


# What the compiler for v3 estimates: it multiplies and adds on the vector unit.
VECTOR_PRODUCTS = [((8, 1), (1, 8), 42.5e-6), ((8, 8), (8, 1), 81.6e-6), ((1, 128), (128, 1), 247.8e-6)]


@pytest.mark.parametrize("left,right,seconds", VECTOR_PRODUCTS)
def test_a_product_with_a_vector_does_not_fill_the_array(left: Any, right: Any, seconds: float) -> None:
    count = 65536
    made = jax.make_jaxpr(lax.batch_matmul)(f32(count, *left), f32(count, *right))
    found = machine().kernel(made.jaxpr.eqns, made.jaxpr.outvars)
    assert seconds / 2 < found.seconds < seconds * 2 and not found.matrix_seconds
    assert found.flops == 2 * count * math.prod(left) * right[1]


def test_a_loop_by_hand_counts_its_trips() -> None:
    def fn(x: Any) -> Any:
        return lax.scan(lambda c, _: (lax.psum(c, "x") * 0.5, None), x, None, length=7)[0]

    found = by_hand(fn, P("y"), P("y"), f32(256, 128))
    assert [c.count for c in found.collectives] == [7]


def test_two_mapped_programs_are_refused() -> None:
    with pytest.raises(ValueError, match="this one holds 0"):
        estimate(jax.make_jaxpr(jnp.sin)(f32(8)), machine())


def step(layers: int, batch: int, width: int) -> Estimate:
    def fn(x: Any, w: Any) -> Any:
        return lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), x, w)

    args = f32(batch, width), f32(layers, width, width)
    return autoshard.evaluate(
        fn, *args, topology="v3", mesh=MESH, in_specs=(P("x"), P(None, None, "y"))
    ).estimate


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([1, 2, 5]),
    st.sampled_from([64, 128, 1024]),
    st.sampled_from([64, 256, 1024]),
    st.integers(0, 2),
)
def test_more_of_anything_never_costs_less(layers: int, batch: int, width: int, which: int) -> None:
    sizes = [layers, batch, width]
    small = step(*sizes)
    sizes[which] *= 2
    large = step(*sizes)
    assert 0 < small.serial_seconds <= large.serial_seconds < math.inf
    assert 0 < small.peak_bytes <= large.peak_bytes < math.inf


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_wider_numbers_never_cost_less(dtype: str) -> None:
    def seconds(dtype: str) -> float:
        args = jax.ShapeDtypeStruct((512, 1024), dtype), jax.ShapeDtypeStruct((1024, 1024), dtype)
        plan = autoshard.evaluate(
            lambda x, w: jnp.tanh(x @ w), *args, topology="v3", mesh=MESH, in_specs=(P("x", "y"), P("y"))
        )
        return plan.estimate.serial_seconds

    assert seconds("bfloat16") <= seconds(dtype)


def test_an_op_without_a_rule_costs_something() -> None:
    mystery = Primitive("mystery")
    mystery.def_abstract_eval(lambda aval: aval)
    known = autoshard.evaluate(jnp.linalg.cholesky, f32(512, 512), topology="v3", mesh=MESH)
    other = autoshard.evaluate(mystery.bind, f32(512, 512), topology="v3", mesh=MESH)
    assert known.estimate.flops > 0 and known.coverage.complete
    assert other.coverage.without_rule == {"mystery": 1} and not other.coverage.complete
    # It reads and writes its megabyte, whole on every device.
    chip = cm.Topology.parse("v3:2x2").chip
    assert other.step_seconds >= 2 * 512 * 512 * 4 / chip.hbm_bytes_per_second
