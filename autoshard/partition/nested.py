"""Equations that hold others: which bodies they run, and how often.

A kernel of Pallas runs its body once per point of its grid. Loops and branches of a whole program are the
ledger's; those inside one kernel or opaque op are counted here in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jax.extend.core import ClosedJaxpr

from autoshard.program import Equation

__all__ = ["bodies", "branch_shares"]

_CALLS = frozenset(
    "jit pjit closed_call core_call custom_jvp_call custom_vjp_call remat2 checkpoint custom_partitioning".split()
)


def bodies(eqn: Equation) -> list[tuple[Any, float]]:
    """Return the bodies that an equation runs, with the number of runs; a `while` counts once."""
    name, params = eqn.primitive.name, eqn.params
    if name in _CALLS:
        found = [(next(params[k] for k in ("jaxpr", "call_jaxpr", "call") if k in params), 1.0)]
    elif name == "scan":
        found = [(params["jaxpr"], float(params["length"]))]
    elif name == "while":
        found = [(params["cond_jaxpr"], 1.0), (params["body_jaxpr"], 1.0)]
    elif name == "cond":
        found = list(zip(params["branches"], branch_shares(params, len(params["branches"])), strict=True))
    elif name == "pallas_call":
        grid = params["grid_mapping"].grid
        found = [(params["jaxpr"], float(math.prod(n for n in grid if isinstance(n, int))))]
    else:
        found = []
    return [(body.jaxpr if isinstance(body, ClosedJaxpr) else body, times) for body, times in found]


def branch_shares(params: Mapping[str, Any], count: int) -> list[float]:
    """Return how often each branch of a `cond` counts: equally, or the one for TPUs if the platform decides."""
    platforms = params.get("branches_platforms")
    for name in ("tpu", None):
        for i, given in enumerate(platforms or ()):
            if given is None if name is None else name in (given or ()):
                return [float(j == i) for j in range(count)]
    return [1.0 / count] * count
