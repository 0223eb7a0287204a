"""Steps of random programs: linear algebra, ragged products, random draws, and ops that run whole or once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def _linalg(pool: Any) -> None:
    batch, size = int(pool.rng.choice([1, 2, 3, 4, 8])), int(pool.rng.choice([2, 3, 4]))
    i = pool.ints((batch, size, size))

    def regular(x: Any) -> Any:
        return x + 20 * jnp.eye(size)

    def definite(x: Any) -> Any:
        return regular(x + x.mT) + 20 * jnp.eye(size)

    pick = int(pool.rng.integers(7))
    if pick == 0:
        pool.step("cholesky", lambda x: jnp.linalg.cholesky(definite(x)), [i], exact=False)
    elif pick == 1:
        j = pool.ints((batch, size, int(pool.rng.choice([1, 3, 8]))))
        pool.step("solve", lambda x, b: jnp.linalg.solve(regular(x), b), [i, j], exact=False)
    elif pick == 2:
        pool.step("eigh", lambda x: jnp.linalg.eigh(definite(x))[0], [i], exact=False)
    elif pick == 3:
        pool.step("svd", lambda x: jnp.linalg.svd(regular(x), compute_uv=False), [i], exact=False)
    elif pick == 4:
        pool.step("det", lambda x: jnp.linalg.slogdet(regular(x)), [i], exact=False)
    elif pick == 5:
        pool.step("qr_grad", jax.grad(lambda x: jnp.linalg.qr(regular(x))[1].sum()), [i], exact=False)
    else:
        pool.step(
            "cholesky_grad", jax.grad(lambda x: jnp.linalg.cholesky(definite(x)).sum()), [i], exact=False
        )


def _ragged(pool: Any) -> None:
    rows, groups = int(pool.rng.choice([4, 7, 8, 13, 16])), int(pool.rng.choice([2, 3, 4, 5, 8]))
    i = pool.ints((rows, int(pool.rng.choice([2, 4, 6]))))
    j = pool.ints((groups, pool.values[i].shape[1], int(pool.rng.choice([1, 3, 4]))))
    share = pool.rng.multinomial(rows, [1 / groups] * groups)
    share[int(pool.rng.integers(groups))] += int(pool.rng.choice([0, 0, 5]))  # more than there are, at times
    share[int(pool.rng.integers(groups))] = 0  # fewer
    sizes = pool.add_input(jnp.asarray(share, jnp.int32))
    if pool.rng.random() < 0.5:
        pool.step("ragged_dot", lax.ragged_dot, [i, j, sizes])
    else:
        loss = jax.grad(lambda x, w, s: jnp.square(lax.ragged_dot(x, w, s)).sum(), (0, 1))
        pool.step("ragged_dot_grad", loss, [i, j, sizes])


def _draws(pool: Any) -> None:
    pick = int(pool.rng.integers(4))
    if pick == 0:
        words = pool.add_input(jnp.arange(4, dtype=jnp.uint32))
        shape = pool.shape(2)
        pool.step("bit_generator", lambda k: lax.rng_bit_generator(k, shape), [words])
        return
    key = pool.add_input(jax.random.key(int(pool.rng.integers(100))))
    if pick == 1:
        pool.step("gamma", lambda k: jax.random.gamma(k, jnp.ones(4)), [key], exact=False)
    elif pick == 2:
        pool.step("poisson", lambda k: jax.random.poisson(k, 3.0, (8,)), [key])
    else:
        i = pool.ints((int(pool.rng.choice([4, 5, 8])), 4))
        pool.step("categorical", lambda k, x: jax.random.categorical(k, 0.5 * x, axis=-1), [key, i])


def _whole(pool: Any) -> None:
    i = pool.pick(least=1)
    shape = pool.values[i].shape
    pick = int(pool.rng.integers(4))
    if pick == 0:
        like = jax.ShapeDtypeStruct(shape, jnp.float32)
        pool.step("callback", lambda x: jax.pure_callback(np.negative, like, x) + 1, [i])
    elif pick == 1:

        def refer(x: Any) -> Any:
            total = jax.new_ref(x)
            total[...] += 1
            return total[...], 2 * x

        pool.step("references", refer, [i])
    elif pick == 2:
        pool.step(
            "platform", lambda x: lax.platform_dependent(x, cpu=lambda x: x + 1, default=lambda x: x - 1), [i]
        )
    else:
        pool.step(
            "reduce_with",
            lambda x: lax.reduce(x, 0.0, lambda a, b: jnp.maximum(a, b) + 0.0, (x.ndim - 1,)),
            [i],
        )


def _along_grad(pool: Any) -> None:
    i = pool.pick(least=1)
    axis = pool.axis(i)
    weights = jnp.arange(1.0, 1 + pool.values[i].size).reshape(pool.values[i].shape)
    ops = [
        lambda x: jnp.cumsum(x, axis),
        lambda x: lax.cumprod(1 + 0.1 * jnp.tanh(x), axis, reverse=True),
        lambda x: lax.cumlogsumexp(jnp.tanh(x), axis),
        lambda x: jnp.prod(1 + 0.1 * jnp.tanh(x), axis, keepdims=True),
        lambda x: jax.nn.log_softmax(jnp.tanh(x), axis),
        lambda x: jnp.sort(x + 1e-3 * weights, axis),
        lambda x: lax.top_k(x + 1e-3 * weights, 1, axis=axis)[0],
    ]
    op = ops[int(pool.rng.integers(len(ops)))]
    pool.step("along_grad", jax.grad(lambda x: (op(x) * jnp.cos(weights)).sum()), [i], exact=False)


STEPS: dict[str, Callable[[Any], None]] = {
    "linalg": _linalg,
    "ragged": _ragged,
    "draws": _draws,
    "whole": _whole,
    "along_grad": _along_grad,
}
