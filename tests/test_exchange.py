"""Halo exchange: every device holds the window that it asked for."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from autoshard.layout import Axes, chunk
from autoshard.rules.exchange import fetch
from autoshard.rules.transfers import per_device
from tests.helpers.running import cpu_mesh, run

MESH = {"a": 2, "b": 4}


def _windows(rng: np.random.Generator, size: int, ways: int) -> tuple[list[int], int]:
    part = chunk(size, ways)
    kind = int(rng.integers(4))
    if kind == 0:  # a stencil
        before, behind = (int(v) for v in rng.integers(0, part + 2, 2))
        return [p * part - before for p in range(ways)], part + before + behind
    if kind == 1:  # a stretch or a squeeze
        step = int(rng.integers(1, 2 * part + 1))
        return [p * step + int(rng.integers(-3, 3)) for p in range(ways)], step
    if kind == 2:  # a reversal
        return [size - (p + 1) * part for p in range(ways)], part
    return [int(v) for v in rng.integers(-4, size + 3, ways)], int(rng.integers(1, part + 3))


@pytest.mark.parametrize("axes", [("a",), ("b",), ("a", "b"), ("b", "a")], ids="-".join)
@pytest.mark.parametrize(("seed", "padding"), [(0, 777), (1, 777), (2, 0), (3, 0)])
def test_windows_hold_what_the_dim_holds_there(seed: int, padding: int, axes: Axes) -> None:
    """And zeros outside the dim, if its padding is zero."""
    rng = np.random.default_rng([seed, *map(ord, "".join(axes))])
    ways = math.prod(MESH[a] for a in axes)
    cases = []
    for _ in range(12):
        size = int(rng.integers(2 - bool(padding), 40))
        cases.append((size, *_windows(rng, size, ways)))
    arrays = [jnp.asarray(rng.integers(-99, 99, (3, size)), jnp.int32) for size, _, _ in cases]

    def body(*arrays: Any) -> list[Any]:
        results = []
        for x, (size, starts, length) in zip(arrays, cases, strict=True):
            part = chunk(size, ways)
            x = jnp.pad(x, ((0, 0), (0, part * ways - size)), constant_values=padding)
            local = lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * part, part, axis=1)
            window = fetch(local, 1, axes, MESH, size, starts, length)
            place = per_device(starts, axes) + jnp.arange(length)
            results.append(jnp.where((place >= 0) & (place < size), window, 0) if padding else window)
        return results

    spec = P(None, axes)
    mapped = jax.shard_map(
        body, mesh=cpu_mesh(MESH), in_specs=P(), out_specs=[spec] * len(cases), check_vma=False
    )
    for (size, starts, length), x, found in zip(cases, arrays, run(mapped, arrays), strict=True):
        x = np.asarray(x)
        for p, start in enumerate(starts):
            window = np.asarray(found)[:, p * length : (p + 1) * length]
            want = np.zeros((3, length), np.int32)
            for k in range(length):
                if 0 <= start + k < size:
                    want[:, k] = x[:, start + k]
            np.testing.assert_array_equal(window, want, err_msg=f"{size} {starts} {length} at {p}")


def test_a_border_of_one_row_moves_one_row() -> None:
    def body(x: Any) -> Any:
        return fetch(x, 0, ("b",), MESH, 64, [16 * p - 1 for p in range(4)], 18)

    mapped = jax.shard_map(body, mesh=cpu_mesh(MESH), in_specs=P("b"), out_specs=P("b"), check_vma=False)
    eqns = jax.make_jaxpr(mapped)(jnp.zeros((64, 8))).jaxpr.eqns[0].params["jaxpr"].eqns
    moved = [e.invars[0].aval.shape for e in eqns if e.primitive.name == "ppermute"]
    assert moved == [(1, 8), (1, 8)]
    assert not any(e.primitive.name == "all_gather" for e in eqns)
