"""A call of every elementwise primitive, on arrays of one shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives
from jax.extend.random import threefry2x32_p


class Operands(NamedTuple):
    """Arrays of one shape: between -1 and 1, above 0, complex, integers with sign, without, and below 5."""

    x: Any
    p: Any
    c: Any
    n: Any
    u: Any
    s: Any


def operands(shape: tuple[int, ...], seed: int = 0) -> Operands:
    """Draw operands."""
    rng = np.random.default_rng(seed)
    x, y = rng.uniform(-0.9, 0.9, (2, *shape)).astype(np.float32)
    n = rng.integers(-9, 9, shape).astype(np.int32)
    u = (n + 9).astype(np.uint32)
    return Operands(*map(jnp.asarray, (x, 0.1 + abs(y), x + 1j * y, n, u, u % 5)))


_NAMED = """abs acos asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv exp exp2
expm1 floor is_finite log1p logistic neg round sign sin sinh square tan tanh""".split()
_POSITIVE = "erfc lgamma log rsqrt sqrt".split()
_PAIRS = "add atan2 div eq ge gt le lt max min mul ne nextafter rem sub".split()
_INTEGERS = "and or xor shift_left shift_right_logical shift_right_arithmetic".split()
_FUNCTIONS = {"and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor}


def _call(name: str, *fields: str) -> Callable[[Operands], Any]:
    function = _FUNCTIONS.get(name) or getattr(lax, name)
    return lambda o: function(*(getattr(o, field) for field in fields))


CALLS: dict[str, Callable[[Operands], Any]] = {
    **{name: _call(name, "x") for name in _NAMED},
    **{name: _call(name, "p") for name in _POSITIVE},
    **{name: _call(name, "x", "p") for name in _PAIRS},
    **{name: _call(name, "u", "s") for name in _INTEGERS},
    "acosh": lambda o: lax.acosh(1 + o.p),
    "add_any": lambda o: primitives.add_jaxvals_p.bind(o.x, o.p),
    "clamp": lambda o: lax.clamp(-0.5, o.x, 0.5),
    "clz": lambda o: lax.clz(o.u),
    "complex": lambda o: lax.complex(o.x, o.p),
    "conj": lambda o: lax.conj(o.c),
    "convert_element_type": lambda o: o.x.astype(jnp.bfloat16),
    "eq_to": lambda o: primitives.eq_to_p.bind(o.x, o.p),
    "igamma": lambda o: lax.igamma(o.p, o.p + 1),
    "igamma_grad_a": lambda o: lax.igamma_grad_a(o.p, o.p + 1),
    "igammac": lambda o: lax.igammac(o.p, o.p + 1),
    "imag": lambda o: lax.imag(o.c),
    "integer_pow": lambda o: o.x**3,
    "le_to": lambda o: primitives.le_to_p.bind(o.x, o.p),
    "lt_to": lambda o: primitives.lt_to_p.bind(o.x, o.p),
    "not": lambda o: ~o.n,
    "polygamma": lambda o: lax.polygamma(jnp.ones_like(o.p), o.p + 1),
    "population_count": lambda o: lax.population_count(o.u),
    "pow": lambda o: o.p**o.x,
    "real": lambda o: lax.real(o.c),
    "reduce_precision": lambda o: lax.reduce_precision(o.x, 8, 7),
    "regularized_incomplete_beta": lambda o: lax.betainc(o.p + 1, o.p + 2, o.p / 2),
    "select_n": lambda o: jnp.where(o.x > 0, o.x, o.p),
    "stop_gradient": lambda o: lax.stop_gradient(o.x),
    "threefry2x32": lambda o: threefry2x32_p.bind(o.u, o.u, o.u + 1, o.u + 2),
    "zeta": lambda o: lax.zeta(o.p + 2, o.p + 1),
}


def everything(*arrays: Any) -> list[Any]:
    """Make every call."""
    return [y for call in CALLS.values() for y in jax.tree.leaves(call(Operands(*arrays)))]
