"""Calls: equations whose meaning is a body of other equations, which tracing puts in their place.

Besides the calls that carry their body (`jit`, `custom_jvp_call`, `remat2`, ...) these are primitives that no rule
knows and that are implemented in JAX: `custom_linear_solve`, `custom_vmap_call` and `composite`, sparse products,
and what packages define for themselves. By JAX's convention the implementation of such a primitive is what it
lowers to, so tracing it finds the body. A loop that `vmap` gave a condition per example is one, too: its body is
the loop with one condition that it lowers to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun, jaxprs_in_params

from autoshard.program import aval_of
from autoshard.rules import families

__all__ = ["BODIES", "body_of"]

# Calls whose body is the whole meaning of the op, and the parameter that holds it.
BODIES = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_lin": "call_jaxpr",
}


def body_of(eqn: Any) -> Any:
    """Return the body of a call, closed or not, or None where the equation is an op of its own."""
    name = eqn.primitive.name
    if name in BODIES and BODIES[name] in eqn.params:
        return eqn.params[BODIES[name]]
    if name == "while" and eqn.params["cond_jaxpr"].out_avals[0].shape:
        return _loop_while_any(eqn)
    if name in families or eqn.effects:
        return None
    return _implementation(eqn)


def _loop_while_any(eqn: Any) -> ClosedJaxpr:
    """Trace a loop with a condition per example as one that runs while any holds; the others keep their values."""
    params = eqn.params
    conditions, body = jaxpr_as_fun(params["cond_jaxpr"]), jaxpr_as_fun(params["body_jaxpr"])
    split = params["cond_nconsts"]
    first = split + params["body_nconsts"]

    def run(*operands: Any) -> list[Any]:
        def going(carry: Sequence[Any]) -> Any:
            return conditions(*operands[:split], *carry)[0]

        def step(carry: Sequence[Any]) -> list[Any]:
            stepped, each = body(*operands[split:first], *carry), going(carry)
            choice = [lax.broadcast_in_dim(each, x.shape, range(each.ndim)) for x in carry]
            return list(map(lax.select, choice, stepped, carry))

        def any_going(carry: Sequence[Any]) -> Any:
            each = going(carry)
            return lax.reduce_or(each, range(each.ndim))

        return lax.while_loop(any_going, step, list(operands[first:]))

    return jax.make_jaxpr(run)(*map(aval_of, eqn.invars))


def _implementation(eqn: Any) -> ClosedJaxpr | None:
    """Trace the implementation of a primitive; None where it has none, or only binds the primitive again."""
    avals = [aval_of(a) for a in eqn.invars]

    def run(*operands: Any) -> Any:
        return eqn.primitive.impl(*operands, **eqn.primitive.get_bind_params(eqn.params))

    try:
        closed = jax.make_jaxpr(run)(*avals)
    except Exception:  # whatever foreign code raises when it is given tracers: it is not written in JAX
        return None
    made = [(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.outvars]
    if made != [(v.aval.shape, v.aval.dtype) for v in eqn.outvars]:
        return None
    return None if eqn.primitive in set(_primitives(closed.jaxpr)) else closed


def _primitives(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn.primitive
        for body in jaxprs_in_params(eqn.params):
            yield from _primitives(body)
