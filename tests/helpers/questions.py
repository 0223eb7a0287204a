"""A small network to ask questions about: two products, on eight devices."""

from typing import Any

import jax
import jax.numpy as jnp

import autoshard
from autoshard.plan import Plan

MESH = {"data": 2, "model": 4}


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mlp(params: Any, x: Any) -> Any:
    return jax.nn.gelu(x @ params["up"]) @ params["down"]


ARGS = ({"up": f32(1024, 4096), "down": f32(4096, 1024)}, f32(2048, 1024))


def plan_of(**options: Any) -> Plan:
    """Plan it on v3:2x2, proven best."""
    return autoshard.suggest(mlp, *ARGS, **{"topology": "v3:2x2", "mesh": MESH, "gap": 0.0, **options})
