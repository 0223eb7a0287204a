"""Resharding: whatever the layouts, every device ends up with its block, at the planned price."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import cost_models as cm
from autoshard.choices import layouts
from autoshard.estimate import estimate
from autoshard.layout import Layout, replicated, to_spec
from autoshard.partition.price import Machine
from autoshard.partition.reshard import Resharder
from autoshard.partition.steps import apply_steps
from autoshard.session import abstract_mesh
from tests.helpers.running import cpu_mesh, run

MESH = {"a": 2, "b": 2, "c": 2}
SHAPES = ((8, 8), (16, 4, 2), (8,), (2, 8, 1), (4, 3, 8))
# Big enough that a collective is priced by its bytes, and that nothing is hidden by latency.
BIG = 64


def resharder(mesh: Mapping[str, int] = MESH) -> Resharder:
    return Resharder(Machine.of(cm.Topology.smallest("v3", math.prod(mesh.values())), mesh))


def random_layout(rng: np.random.Generator, shape: tuple[int, ...]) -> Layout:
    """Draw a layout; axes of one dim nest in any order."""
    options = layouts(shape, MESH)
    picked = options[int(rng.integers(len(options)))]
    return Layout(tuple(tuple(str(a) for a in rng.permutation(list(d))) for d in picked.dims))


def random_case(rng: np.random.Generator) -> tuple[tuple[int, ...], Layout, Layout]:
    """Draw a shape and two layouts; the source may hold partial results over axes that it does not use."""
    shape = SHAPES[int(rng.integers(len(SHAPES)))]
    source, target = random_layout(rng, shape), random_layout(rng, shape)
    free = [a for a in MESH if a not in source.axes]
    partial = tuple(a for a in free if rng.random() < 0.4)
    if not partial:
        return shape, source, target
    monoid = str(rng.choice(["sum", "sum", "max", "min"]))
    kept = tuple(a for a in partial if a not in target.axes and rng.random() < 0.3)
    return (
        shape,
        Layout(source.dims, partial, monoid),
        Layout(target.dims, kept, monoid if kept else "sum"),
    )


def spoil(x: Any, layout: Layout) -> Any:
    """Turn whole values into partial results that add up (or compare) to them."""
    if not layout.unreduced:
        return x
    index = lax.axis_index(layout.unreduced)
    ways = math.prod(MESH[a] for a in layout.unreduced)
    if layout.monoid == "sum":
        return x * jnp.where(index == 0, 1 - ways * (ways - 1) // 2, index).astype(x.dtype)
    return x - index if layout.monoid == "max" else x + index


def finish(x: Any, layout: Layout) -> Any:
    """Reduce what a target leaves partial."""
    if not layout.unreduced:
        return x
    return {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}[layout.monoid](x, layout.unreduced)


@pytest.mark.parametrize("seed", range(3))
def test_every_device_gets_its_block(seed: int) -> None:
    """The result is put together by JAX from the target's spec, independent of how steps count devices."""
    rng = np.random.default_rng(seed)
    cases = [random_case(rng) for _ in range(30)]
    arrays = [jnp.asarray(rng.permutation(math.prod(s)).reshape(s), jnp.float32) for s, _, _ in cases]
    finder = resharder()
    steps = []
    for shape, source, target in cases:
        found = finder.find(shape, jnp.dtype("float32"), source, target)
        assert math.isfinite(found.seconds), (shape, source, target)
        steps.append(found.steps)

    def body(*local: Any) -> list[Any]:
        return [
            finish(apply_steps(spoil(x, source), s, shape, MESH), target)
            for x, s, (shape, source, target) in zip(local, steps, cases, strict=True)
        ]

    mapped = jax.shard_map(
        body,
        mesh=cpu_mesh(MESH),
        in_specs=tuple(to_spec(Layout(source.dims)) for _, source, _ in cases),
        out_specs=[to_spec(Layout(target.dims)) for _, _, target in cases],
        check_vma=False,
    )
    for case, want, found in zip(cases, arrays, run(mapped, arrays), strict=True):
        for shard in found.addressable_shards:  # also the copies must agree
            np.testing.assert_array_equal(shard.data, np.asarray(want)[shard.index], err_msg=str(case))


@pytest.mark.parametrize("seed", range(40))
def test_the_planned_price_is_that_of_the_program(seed: int) -> None:
    rng = np.random.default_rng([seed, 1])
    shape, source, target = random_case(rng)
    shape = tuple(n * BIG for n in shape)
    finder = resharder()
    found = finder.find(shape, jnp.dtype("float32"), source, target)

    def body(x: Any) -> Any:
        with jax.named_scope("r0"):
            return apply_steps(x, found.steps, shape, MESH)

    mapped = jax.shard_map(
        body,
        mesh=abstract_mesh(MESH),
        in_specs=to_spec(Layout(source.dims)),
        out_specs=to_spec(Layout(target.dims)),
        check_vma=False,
    )
    closed = jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct(shape, jnp.float32))
    priced = estimate(closed, finder.machine).serial_seconds
    assert priced == pytest.approx(found.seconds, rel=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_only_staying_is_free(shape: tuple[int, ...]) -> None:
    finder = resharder()
    for source in layouts(shape, MESH):
        for target in layouts(shape, MESH):
            found = finder.find(shape, jnp.dtype("float32"), source, target)
            assert (found.seconds == 0) == (source == target), (source, target)
            assert bool(found.steps) == (source != target)


def test_partial_sums_are_not_free_to_finish_nor_to_make() -> None:
    finder, whole = resharder(), replicated(2)
    partial = Layout(whole.dims, ("a",))
    assert finder.find((8, 8), jnp.dtype("float32"), partial, whole).seconds > 0
    assert finder.find((8, 8), jnp.dtype("float32"), whole, partial).seconds == math.inf
    assert finder.find((8, 8), jnp.dtype("float32"), partial, partial).seconds == 0
    greatest = Layout(whole.dims, ("a",), "max")
    assert finder.find((8, 8), jnp.dtype("float32"), greatest, partial).seconds == math.inf


@pytest.mark.parametrize("seed", range(30))
def test_a_detour_through_whole_copies_is_never_cheaper(seed: int) -> None:
    rng = np.random.default_rng([seed, 2])
    shape, source, target = random_case(rng)
    if target.unreduced:
        return
    shape = tuple(n * BIG for n in shape)
    finder, dtype = resharder(), jnp.dtype("float32")
    direct = finder.find(shape, dtype, source, target).seconds
    whole = replicated(len(shape))
    there = finder.find(shape, dtype, source, whole).seconds
    back = finder.find(shape, dtype, whole, target).seconds
    assert direct <= (there + back) * (1 + 1e-9)


def test_more_bytes_never_cost_less() -> None:
    finder = resharder()
    for source in layouts((8, 8), MESH):
        for target in layouts((8, 8), MESH):
            costs = [
                finder.find((n, n), jnp.dtype("float32"), source, target).seconds for n in (8, 64, 512, 4096)
            ]
            assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(costs)), (source, target)


def test_a_sum_is_scattered_and_not_reduced_whole() -> None:
    found = resharder().find(
        (64, 64), jnp.dtype("float32"), Layout(((), ()), ("a", "b")), Layout((("a", "b"), ()))
    )
    assert [s.kind for s in found.steps] == ["reduce_scatter"]


def test_an_axis_moves_between_dims_by_all_to_all() -> None:
    found = resharder().find((64, 64), jnp.dtype("float32"), Layout((("a",), ())), Layout(((), ("a",))))
    assert [(s.kind, s.axes) for s in found.steps] == [("all_to_all", ("a",))]


# Dims that the axes do not divide, some with parts that are all padding.
UNEVEN = ((5, 8), (7, 3, 6), (9,), (2, 50), (13, 4), (3, 3))


def _uneven_case(rng: np.random.Generator) -> tuple[tuple[int, ...], Layout, Layout]:
    shape = UNEVEN[int(rng.integers(len(UNEVEN)))]

    def draw() -> Layout:
        dims: list[tuple[str, ...]] = [()] * len(shape)
        for axis in rng.permutation(list(MESH)):
            d = int(rng.integers(-1, len(shape)))
            if d >= 0:
                dims[d] = (*dims[d], str(axis))
        return Layout(tuple(dims))

    return shape, draw(), draw()


@pytest.mark.parametrize("seed", range(3))
def test_padding_of_uneven_parts_comes_and_goes(seed: int) -> None:
    rng = np.random.default_rng([seed, 3])
    cases = [_uneven_case(rng) for _ in range(30)]
    finder, dtype = resharder(), jnp.dtype("float32")
    arrays = [jnp.asarray(rng.permutation(math.prod(s)).reshape(s), dtype) for s, _, _ in cases]

    def body(*local: Any) -> list[Any]:
        results = []
        for x, (shape, source, target) in zip(local, cases, strict=True):
            whole = replicated(len(shape))
            for a, b in itertools.pairwise((whole, source, target, whole)):
                x = apply_steps(x, finder.find(shape, dtype, a, b).steps, shape, MESH)
            results.append(x)
        return results

    mapped = jax.shard_map(
        body,
        mesh=cpu_mesh(MESH),
        in_specs=to_spec(replicated(0)),
        out_specs=to_spec(replicated(0)),
        check_vma=False,
    )
    for case, want, found in zip(cases, arrays, run(mapped, arrays), strict=True):
        for shard in found.addressable_shards:
            np.testing.assert_array_equal(shard.data, want, err_msg=str(case))


@pytest.mark.parametrize("seed", range(30))
def test_the_price_of_padding_is_that_of_the_program(seed: int) -> None:
    rng = np.random.default_rng([seed, 4])
    shape, source, target = _uneven_case(rng)
    shape = tuple(n * 64 + int(rng.integers(3)) for n in shape)
    finder, dtype = resharder(), jnp.dtype("float32")
    whole = replicated(len(shape))
    paths = [finder.find(shape, dtype, a, b) for a, b in ((whole, source), (source, target), (target, whole))]

    def body(x: Any) -> Any:
        for found in paths:
            with jax.named_scope("r0"):
                x = apply_steps(x, found.steps, shape, MESH)
        return x

    mapped = jax.shard_map(
        body, mesh=abstract_mesh(MESH), in_specs=to_spec(whole), out_specs=to_spec(whole), check_vma=False
    )
    closed = jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct(shape, dtype))
    priced = estimate(closed, finder.machine).serial_seconds
    assert priced == pytest.approx(sum(found.seconds for found in paths), rel=1e-9)


def test_axes_that_trade_places_permute_and_never_pass_through_the_whole_array() -> None:
    found = resharder().find((4096, 4096), jnp.dtype("float32"), Layout((("a",), ())), Layout((("b",), ())))
    assert "permute" in [s.kind for s in found.steps]
    assert all(s.after.dims[0] for s in found.steps)
