"""Optimizer updates written out leaf by leaf, as the zoo's train steps use them.

The optimizer is most of a train step's equations and two thirds of its resident bytes, so the zoo
spells it in plain `jax.numpy` instead of hiding it in a library: a planner sees every elementwise op.
Parameters, gradients and moments are trees of one structure.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

Tree: TypeAlias = Any
"""A pytree of arrays, or of `jax.ShapeDtypeStruct`s."""


def adam_init(params: Tree) -> dict[str, Tree]:
    """Return Adam's state before the first step.

    Args:
        params: tree of f32 arrays.

    Returns:
        `{"count": i32[], "m": zeros like params, "v": zeros like params}`.

    """
    return {
        "count": jnp.zeros((), jnp.int32),
        "m": jax.tree.map(jnp.zeros_like, params),
        "v": jax.tree.map(jnp.zeros_like, params),
    }


def adam_update(
    params: Tree,
    gradients: Tree,
    state: dict[str, Tree],
    *,
    learning_rate: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.95,
    epsilon: float = 1e-8,
) -> tuple[Tree, dict[str, Tree]]:
    """Take one step of Adam with bias correction.

    Args:
        params: tree of f32 arrays.
        gradients: tree of f32 arrays, shaped as `params`.
        state: what `adam_init` or the previous step returned.
        learning_rate: step length, in units of the parameters.
        beta1: decay of the first moment, per step.
        beta2: decay of the second moment, per step.
        epsilon: added to the root of the second moment.

    Returns:
        The new parameters and the new state.

    Example:
        The first step moves each parameter by the learning rate against the sign of its gradient.

        >>> params = {"w": jnp.array([1.0, 1.0])}
        >>> gradients = {"w": jnp.array([0.5, -3.0])}
        >>> params, _ = adam_update(params, gradients, adam_init(params), learning_rate=0.25)
        >>> [round(float(w), 4) for w in params["w"]]
        [0.75, 1.25]

    Reference:
        Kingma and Ba, "Adam: a method for stochastic optimization", 2014, algorithm 1.

    """
    count = state["count"] + 1
    steps = count.astype(jnp.float32)
    bias1 = 1.0 - beta1**steps
    bias2 = 1.0 - beta2**steps
    m = jax.tree.map(lambda m, g: beta1 * m + (1.0 - beta1) * g, state["m"], gradients)
    v = jax.tree.map(lambda v, g: beta2 * v + (1.0 - beta2) * g * g, state["v"], gradients)

    def stepped(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        moved: jax.Array = p - learning_rate * (m / bias1) / (jnp.sqrt(v / bias2) + epsilon)
        return moved.astype(p.dtype)

    params = jax.tree.map(stepped, params, m, v)
    return params, {"count": count, "m": m, "v": v}


def momentum_init(params: Tree) -> Tree:
    """Return the velocity before the first step: zeros like `params`."""
    return jax.tree.map(jnp.zeros_like, params)


def momentum_update(
    params: Tree, gradients: Tree, velocity: Tree, *, learning_rate: float = 0.1, momentum: float = 0.9
) -> tuple[Tree, Tree]:
    """Take one step of stochastic gradient descent with heavy-ball momentum.

    Args:
        params: tree of f32 arrays.
        gradients: tree of f32 arrays, shaped as `params`.
        velocity: what `momentum_init` or the previous step returned.
        learning_rate: step length per unit of velocity.
        momentum: decay of the velocity, per step.

    Returns:
        The new parameters and the new velocity.

    Example:
        >>> params, velocity = momentum_update(jnp.array(1.0), jnp.array(2.0), jnp.array(0.0))
        >>> round(float(params), 4), float(velocity)
        (0.8, 2.0)

    Reference:
        Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013.

    """
    velocity = jax.tree.map(lambda u, g: momentum * u + g, velocity, gradients)
    params = jax.tree.map(lambda p, u: p - learning_rate * u, params, velocity)
    return params, velocity


def adafactor_init(params: Tree) -> dict[str, Tree]:
    """Return Adafactor's state before the first step: means over rows and over columns of squared gradients.

    Args:
        params: tree of arrays. An array is factored over its two largest dims; one of a single dim is not.

    Returns:
        `{"count": i32[], "rows": ..., "columns": ...}`, f32 trees like `params`: "rows" lacks the last of the two
        dims, "columns" the first; of an array that is not factored "rows" is the whole second moment, "columns" f32[].

    """

    def zeros(p: jax.Array, side: int) -> jax.Array:
        pair = _factored_dims(p.shape)
        if pair is None:
            return jnp.zeros(p.shape if side else (), jnp.float32)
        return jnp.zeros(p.shape[: pair[side]] + p.shape[pair[side] + 1 :], jnp.float32)

    return {
        "count": jnp.zeros((), jnp.int32),
        "rows": jax.tree.map(lambda p: zeros(p, 1), params),
        "columns": jax.tree.map(lambda p: zeros(p, 0), params),
    }


def adafactor_update(
    params: Tree,
    gradients: Tree,
    state: dict[str, Tree],
    *,
    learning_rate: float = 1e-2,
    decay_power: float = 0.8,
    clipping: float = 1.0,
    epsilon: float = 1e-30,
    least_scale: float = 1e-3,
) -> tuple[Tree, dict[str, Tree]]:
    """Take one step of Adafactor without first moment: relative steps, clipped updates.

    Args:
        params: tree of arrays.
        gradients: tree of arrays, shaped as `params`.
        state: what `adafactor_init` or the previous step returned.
        learning_rate: step length, in units of the root mean square of the parameters.
        decay_power: the second moment decays by `1 - step ** -decay_power`.
        clipping: root mean square above which an update is scaled down.
        epsilon: added to the squared gradients.
        least_scale: root mean square that parameters count as at least.

    Returns:
        The new parameters and the new state.

    Example:
        The first step of a vector moves by the learning rate times the scale of the parameters.

        >>> params = {"w": jnp.array([1.0, 1.0])}
        >>> gradients = {"w": jnp.array([0.5, -3.0])}
        >>> params, _ = adafactor_update(params, gradients, adafactor_init(params), learning_rate=0.25)
        >>> [round(float(w), 4) for w in params["w"]]
        [0.75, 1.25]

    Reference:
        Shazeer and Stern, "Adafactor: adaptive learning rates with sublinear memory cost", 2018, algorithm 5.

    """
    count = state["count"] + 1
    decay = 1.0 - count.astype(jnp.float32) ** -decay_power

    def step(p: jax.Array, g: jax.Array, r: jax.Array, c: jax.Array) -> tuple[jax.Array, ...]:
        square = jnp.square(g.astype(jnp.float32)) + epsilon
        pair = _factored_dims(p.shape)
        if pair is None:
            r = decay * r + (1.0 - decay) * square
            moment = r
        else:
            first, last = pair
            r = decay * r + (1.0 - decay) * jnp.mean(square, axis=last)
            c = decay * c + (1.0 - decay) * jnp.mean(square, axis=first)
            rows, columns = jnp.expand_dims(r, last), jnp.expand_dims(c, first)
            moment = rows * columns / jnp.mean(rows, axis=first, keepdims=True)
        update = g * jax.lax.rsqrt(moment)
        update = update / jnp.maximum(1.0, _root_mean_square(update) / clipping)
        scale = jnp.maximum(least_scale, _root_mean_square(p))
        return (p - learning_rate * scale * update).astype(p.dtype), r, c

    found = jax.tree.map(step, params, gradients, state["rows"], state["columns"])
    params, rows, columns = jax.tree.transpose(jax.tree.structure(params), None, found)
    return params, {"count": count, "rows": rows, "columns": columns}


def _factored_dims(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Positions of the two largest dims, in order; None for an array with fewer."""
    if len(shape) < 2:
        return None
    first, last = sorted(sorted(range(len(shape)), key=lambda d: shape[d])[-2:])
    return first, last


def _root_mean_square(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer: `init(params)` and `update(params, gradients, state)`, which returns both anew."""

    init: Callable[[Tree], dict[str, Tree]]
    update: Callable[[Tree, Tree, dict[str, Tree]], tuple[Tree, dict[str, Tree]]]


OPTIMIZERS: Mapping[str, Optimizer] = MappingProxyType(
    {
        "adam": Optimizer(init=adam_init, update=adam_update),
        "adafactor": Optimizer(init=adafactor_init, update=adafactor_update),
    }
)
"""Name -> optimizer."""
