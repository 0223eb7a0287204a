"""Mutable references inside a function: the equations that use them become one op.

Whoever reads a reference sees what was written before, so these equations keep their order. An equation between
two of them stays out if it can run before all of them or after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import DebugInfo, Jaxpr, Literal, Primitive

from autoshard.errors import TraceError

__all__ = ["gathered", "is_reference"]

_REFERENCES = Primitive("references")
_REFERENCES.multiple_results = True


@dataclass(frozen=True, eq=False, kw_only=True)
class _Equation:
    """The equations that use references, as one."""

    params: dict[str, Any]
    invars: list[Any]
    outvars: list[Any]
    source_info: Any
    primitive: Any = _REFERENCES
    effects: frozenset[Any] = frozenset()


def is_reference(atom: Any) -> bool:
    """Tell a reference from an array."""
    return hasattr(atom.aval, "inner_aval")


def gathered(jaxpr: Any) -> Sequence[Any]:
    """Return the equations of a body, those that use references joined into one.

    Raises:
      TraceError: a reference comes from outside the body or leaves it.
    """
    eqns = list(jaxpr.eqns)
    users = [i for i, e in enumerate(eqns) if any(map(is_reference, (*e.invars, *e.outvars)))]
    if any(map(is_reference, (*jaxpr.invars, *jaxpr.constvars, *jaxpr.outvars))):
        raise TraceError(
            "The function uses a mutable reference that it does not make itself, or returns one. Make it inside"
            " (jax.new_ref), and return its value (ref[...])."
        )
    if not users:
        return eqns
    first, last = users[0], users[-1]
    behind = _readers(eqns[first : last + 1], {i - first for i in users})
    inside, before, after = [], [], []
    wanted: set[Any] = set()
    for i in reversed(range(first, last + 1)):
        eqn = eqns[i]
        if i not in users and i - first not in behind:
            before.append(eqn)
        elif i in users or any(v in wanted for v in eqn.outvars):
            inside.append(eqn)
            wanted.update(_variables(eqn))
        else:
            after.append(eqn)
    later = [*reversed(after), *eqns[last + 1 :]]
    return [*eqns[:first], *reversed(before), _joined(inside[::-1], later, jaxpr.outvars), *later]


def _variables(eqn: Any) -> list[Any]:
    return [a for a in eqn.invars if not isinstance(a, Literal)]


def _readers(eqns: Sequence[Any], users: set[int]) -> set[int]:
    """Return which equations use references or what such equations make."""
    found: set[int] = set()
    made: set[Any] = set()
    for i, eqn in enumerate(eqns):
        if i in users or any(a in made for a in _variables(eqn)):
            found.add(i)
            made.update(eqn.outvars)
    return found


def _joined(eqns: Sequence[Any], later: Sequence[Any], results: Sequence[Any]) -> _Equation:
    made = {v for e in eqns for v in e.outvars}
    read = dict.fromkeys(a for e in eqns for a in _variables(e) if a not in made)
    wanted = {a for e in later for a in _variables(e)} | {a for a in results if not isinstance(a, Literal)}
    kept = [v for e in eqns for v in e.outvars if v in wanted]
    about = DebugInfo("references", "equations that use mutable references", None, None)
    body = Jaxpr(constvars=[], invars=list(read), outvars=kept, eqns=list(eqns), debug_info=about)
    return _Equation(params={"body": body}, invars=list(read), outvars=kept, source_info=eqns[0].source_info)
