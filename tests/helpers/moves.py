"""Steps of random programs that cut, move and join dims, and their gradients: stencils, shifts, caches, heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def _move_fn(pool: Any, x: Any, axis: int) -> tuple[str, Callable[[Any], Any]]:
    """Draw a function of one array that moves elements along a dim."""
    n = x.shape[axis]
    amount = int(pool.rng.integers(0, n + 1))
    other = int(pool.rng.integers(1, 4))
    drawn: list[tuple[str, Callable[[Any], Any]]] = [
        ("roll", lambda x: jnp.roll(x, amount, axis)),
        ("diff", lambda x: jnp.diff(x, axis=axis, prepend=1, append=2)),
        ("last", lambda x: lax.slice_in_dim(x, n - 1, n, axis=axis)),
        ("every", lambda x: lax.slice_in_dim(x, amount % n, n, other, axis)),
        ("shift", lambda x: jnp.concatenate([jnp.ones_like(x.take(jnp.array([0]), axis)), x], axis)),
        ("double", lambda x: jnp.concatenate([x, -x, x], axis)),
        ("tile", lambda x: jnp.tile(x, [other if d == axis else 1 for d in range(x.ndim)])),
        ("flip", lambda x: jnp.flip(x, axis)),
        (
            "pad",
            lambda x: lax.pad(x, 3.0, [(other, -1, 1) if d == axis else (0, 0, 0) for d in range(x.ndim)]),
        ),
        ("rows", lambda x: [k * row for k, row in enumerate(jnp.unstack(x, axis=axis))]),
        ("stack", lambda x: jnp.stack([x, 2 * x, -x], axis)),
        ("flat", lambda x: x.reshape(-1)),
        ("heads", lambda x: jnp.swapaxes(x.reshape(-1, x.shape[-1]), 0, 1)),
    ]
    return drawn[int(pool.rng.integers(len(drawn)))]


def _moves(pool: Any) -> None:
    i = pool.pick(least=1)
    name, fn = _move_fn(pool, pool.values[i], pool.axis(i))
    if pool.rng.random() < 0.5:
        pool.step(name, fn, [i])
        return

    def loss(x: Any) -> Any:
        return sum(
            (jnp.square(y) * (1 + jnp.arange(y.size).reshape(y.shape) % 3)).sum()
            for y in jax.tree.leaves(fn(x))
        )

    pool.step(f"{name}_grad", jax.grad(loss), [i])


def _computed(pool: Any) -> None:
    i = pool.pick(least=1)
    x, axis = pool.values[i], pool.axis(i)
    n = x.shape[axis]
    at = pool.ints((), -2, n + 2, jnp.int32)
    size = int(pool.rng.integers(1, n + 1))
    j = pool.ints(tuple(size if d == axis else m for d, m in enumerate(x.shape)))

    def take(x: Any, s: Any) -> Any:
        return lax.dynamic_slice_in_dim(x, s, size, axis)

    def put(x: Any, u: Any, s: Any) -> Any:
        return lax.dynamic_update_slice_in_dim(x, u, s, axis)

    pick = int(pool.rng.integers(4))
    if pick == 0:
        pool.step("roll_by", lambda x, s: jnp.roll(x, s, axis), [i, at])
    elif pick == 1:
        pool.step("take_grad", jax.grad(lambda x, s: jnp.square(take(x, s)).sum()), [i, at])
    elif pick == 2:
        pool.step("put_grad", jax.grad(lambda x, u, s: jnp.square(put(x, u, s)).sum(), (0, 1)), [i, j, at])
    else:

        def fill(x: Any, u: Any, s: Any) -> Any:
            def body(cache: Any, k: Any) -> Any:
                cache = put(cache, k * u, s + k)
                return cache, cache.sum()

            return lax.scan(body, x, jnp.arange(3))

        pool.step("cache", fill, [i, j, at])


MOVES: dict[str, Callable[[Any], None]] = {"moves": _moves, "computed": _computed}
