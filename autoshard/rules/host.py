"""Ops that must run once, not once per device: callbacks with effects, and draws from hidden state.

In the per-device program the first device runs them, on whole arrays, and sends what they return to the others. A
pure callback runs on every device, which costs no communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import io_callback

from autoshard.layout import mesh_size
from autoshard.program import Op
from autoshard.rules.opaque import opaque_rule
from autoshard.rules.registry import Family, Kind, LocalView, bind, register

SCOPE = "once"  # name of the conditional whose true branch the first device runs while the others wait
# Families that a plan's notes tell of.
ONCE = frozenset({"host", "hidden_state"})
# Families that run on every device with whole arrays, where XLA's partitioner would run them on one and send the result.
EVERYWHERE = frozenset({"pure_callback"})
_CALLBACKS = "debug_callback debug_print io_callback".split()


def _ordered_debug(op: Op) -> bool:
    """Tell a debugging callback that keeps its order: JAX runs none on more than one device."""
    if op.name == "debug_callback":
        return "Ordered" in type(op.params["effect"]).__name__
    return op.name == "debug_print" and bool(op.params["ordered"])


def _differs(op: Op, view: LocalView) -> bool:
    return _ordered_debug(op) or _devices(view) > 1


def _devices(view: LocalView) -> int:
    return mesh_size(view.mesh, view.mesh)


def _run(op: Op, operands: Sequence[Any]) -> Sequence[Any]:
    if not _ordered_debug(op):
        return bind(op, operands)
    params = op.primitive.get_bind_params(op.params)

    def show(*arrays: Any) -> None:
        op.primitive.impl(*arrays, **params)

    io_callback(show, None, *operands, ordered=True)
    return []


def _emit_once(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    if _devices(view) == 1:
        return _run(op, operands)
    axes = tuple(a for a, n in view.mesh.items() if n > 1)

    def run(*arrays: Any) -> tuple[Any, ...]:
        return tuple(_run(op, arrays))

    def wait(*arrays: Any) -> tuple[Any, ...]:
        return tuple(jnp.zeros(v.shape, v.dtype) for v in op.outputs)

    with jax.named_scope(SCOPE):
        results = lax.cond(view.index(axes) == 0, run, wait, *operands)
    return [_sent(array, axes) for array in results]


def _sent(array: Any, axes: tuple[str, ...]) -> Any:
    """Send what the first device holds to the others, which hold zeros."""
    if array.dtype == jnp.bool_:
        return lax.psum(array.astype(jnp.uint8), axes).astype(jnp.bool_)
    return lax.psum(array, axes)


register(
    Family(
        name="host",
        kind=Kind.SINGLE,
        rule=opaque_rule,
        special=_differs,
        emit_special=_emit_once,
        about="runs once, on the first device, with whole arrays, and its results are sent to the others; time"
        " on the host is not counted",
    ),
    _CALLBACKS,
)
register(
    Family(
        name="pure_callback",
        kind=Kind.SINGLE,
        rule=opaque_rule,
        about="runs on every device with whole arrays; time on the host is not counted",
    ),
    ["pure_callback"],
)
register(
    Family(
        name="hidden_state",
        kind=Kind.SINGLE,
        rule=opaque_rule,
        special=_differs,
        emit_special=_emit_once,
        about="runs once, on the first device, and its results are sent to the others: devices would differ",
    ),
    ["rng_uniform"],
)
