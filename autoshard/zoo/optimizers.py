"""Optimizer updates written out leaf by leaf, as the zoo's train steps use them.

The optimizer is most of a train step's equations and two thirds of its resident bytes, so the zoo
spells it in plain `jax.numpy` instead of hiding it in a library: a planner sees every elementwise op.
Parameters, gradients and moments are f32 trees of one structure.
"""

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
    params = jax.tree.map(
        lambda p, m, v: p - learning_rate * (m / bias1) / (jnp.sqrt(v / bias2) + epsilon), params, m, v
    )
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
