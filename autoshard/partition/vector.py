"""Work of the vector unit by primitive: elements, class of operation, flops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from autoshard.program import Equation

__all__ = ["vector_work"]

OpClass = Literal[
    "cheap", "medium", "expensive", "trigonometric", "reduce_major", "reduce_second_minor", "reduce_minor"
]

_MEDIUM = frozenset(
    """acosh asinh atanh cbrt div exp exp2 expm1 log log1p logistic rem rsqrt sqrt tanh integer_pow square
    reduce_precision nextafter""".split()
)
_EXPENSIVE = frozenset(
    """acos asin atan atan2 bessel_i0e bessel_i1e cosh digamma erf erf_inv erfc igamma igamma_grad_a
    igammac lgamma polygamma pow regularized_incomplete_beta sinh zeta random_gamma_grad""".split()
)
_TRIGONOMETRIC = frozenset({"sin", "cos", "tan"})
_CHEAP_POWERS = frozenset({"square", "integer_pow"})
# Ops that move data: HBM traffic is their price.
_MOVES = frozenset(
    """broadcast_in_dim concatenate copy dynamic_slice dynamic_update_slice gather iota pad reshape rev
    slice split squeeze stack tile transpose unstack bitcast_convert_type expand_dims device_put get swap
    new_ref""".split()
)
# Operations per element of the cube of the matrix size (Golub and Van Loan, Matrix Computations, 2013).
_CUBIC = {
    "cholesky": 1 / 3,
    "lu": 2 / 3,
    "qr": 4 / 3,
    "geqrf": 4 / 3,
    "geqp3": 4 / 3,
    "householder_product": 4 / 3,
    "hessenberg": 10 / 3,
    "tridiagonal": 4 / 3,
    "eigh": 9.0,
    "eig": 25.0,
    "schur": 25.0,
    "svd": 21.0,
}
# Operations per element of the last operand and of what each of its elements meets: a row of a triangle, the
# reflectors, a row of a rank-1 update, the rows above and below, the other pivots.
_PER_ELEMENT: dict[str, tuple[float, Callable[[list[Any]], int]]] = {
    "triangular_solve": (1.0, lambda shapes: shapes[0][-1]),
    "ormqr": (4.0, lambda shapes: shapes[1][-1]),
    "cholesky_update": (6.0, lambda shapes: shapes[0][-1]),
    "symmetric_product": (2.0, lambda shapes: shapes[0][-1]),
    "tridiagonal_solve": (8.0, lambda _: 1),
    "lu_pivots_to_permutation": (2.0, lambda _: 1),
}
_BITS_OPS = 110.0  # 20 rounds of add, rotate and xor, and the key schedule, for two words
# Words that a random draw takes: a gamma sample is a normal and a uniform one, nearly always accepted, and a boost.
_WORDS = {"random_bits": 1.0, "rng_bit_generator": 1.0, "rng_uniform": 1.0, "random_gamma": 4.0}


def vector_work(eqn: Equation) -> tuple[float, OpClass, float]:
    """Return (elements, class of operation, flops) of one equation on local shapes."""
    name = eqn.primitive.name
    taken = max((math.prod(v.aval.shape) for v in eqn.invars), default=1)
    made = max((math.prod(v.aval.shape) for v in eqn.outvars), default=1)
    if name in _MOVES:
        return 0.0, "cheap", 0.0
    if name.startswith("reduce_") and name != "reduce_precision" and "window" not in name:
        return float(taken), _reduce_class(eqn), float(taken)
    if name == "reduce":
        work = float(taken * len(eqn.params["jaxpr"].eqns))
        return work, _reduce_class(eqn), work
    if name in ("argmax", "argmin"):
        return 2.0 * taken, _reduce_class(eqn), float(taken)
    if name.startswith("cum"):
        length = eqn.invars[0].aval.shape[eqn.params["axis"]]
        steps = max(1.0, math.log2(length))
        return taken * steps, "cheap", float(taken)
    if name in ("sort", "top_k", "approx_top_k"):
        length = max(2, _sorted_length(eqn))
        steps = math.log2(length) ** 2 / 2
        return taken * steps * len(eqn.invars), "cheap", 0.0
    if name.startswith("reduce_window") or name.startswith("select_and"):
        window = math.prod(eqn.params.get("window_dimensions", (1,)))
        return float(max(made, 1)) * window, "cheap", float(made) * window
    if name in _WORDS:
        return made * _WORDS[name] * _BITS_OPS / 2, "cheap", 0.0
    if name.startswith(("threefry", "philox")):
        return made * _BITS_OPS / 2, "cheap", 0.0
    if name in _CUBIC:
        shape = eqn.invars[0].aval.shape
        work = _CUBIC[name] * taken * min(shape[-2:])
        return work, "cheap", work
    if name in _PER_ELEMENT:
        shapes = [v.aval.shape for v in eqn.invars]
        factor, met = _PER_ELEMENT[name]
        work = factor * math.prod(shapes[-1]) * met(shapes)
        return work, "cheap", work
    if name == "fft":
        points = math.prod(eqn.params["fft_lengths"])
        work = 5.0 * max(taken, made) * max(1.0, math.log2(points))
        return work, "cheap", work
    flops = float(made)
    if name in _TRIGONOMETRIC:
        return float(made), "trigonometric", flops
    if name in _EXPENSIVE:
        return float(made), "expensive", flops
    if name in _MEDIUM and name not in _CHEAP_POWERS:
        return float(made), "medium", flops
    if name == "integer_pow":
        return float(made) * max(1, abs(int(eqn.params["y"])).bit_length()), "cheap", flops
    return float(max(made, taken)) if name == "scatter-add" else float(made), "cheap", flops


def _reduce_class(eqn: Equation) -> OpClass:
    rank = len(eqn.invars[0].aval.shape)
    axes: Any = eqn.params.get("axes", eqn.params.get("dimensions", ()))
    if rank and rank - 1 in axes:
        return "reduce_minor"
    if rank > 1 and rank - 2 in axes:
        return "reduce_second_minor"
    return "reduce_major"


def _sorted_length(eqn: Equation) -> int:
    shape = eqn.invars[0].aval.shape
    if not shape:
        return 1
    return int(shape[eqn.params.get("dimension", eqn.params.get("axis", -1))])
