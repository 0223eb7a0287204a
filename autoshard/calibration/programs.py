"""The micro-programs that a chip is calibrated with: a fixed family, half to fit and half to test.

Every program is one kernel on one device. In all kinds but the last, one parameter of the cost model decides the
time; the programs of such a kind are listed so that neighbours are alike, and the first, third, fifth ... are its fit
set, the others its test set. Reductions fit nothing and are all tests: the TPU compiler's cycles charge them like
kernels that write a result of their operand's size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

__all__ = ["FAMILY", "KINDS", "Kind", "MicroProgram", "fit_set"]

Kind = Literal["products", "streams", "chains", "narrow results", "tiny kernels", "reductions"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# Carries no annotations in JAX.
_STRUCT: Any = jax.ShapeDtypeStruct


@dataclass(frozen=True, eq=False, kw_only=True)
class MicroProgram:
    """A program of one kernel: a function and the shapes of its arguments."""

    name: str
    kind: Kind
    fn: Callable[..., Any]
    args: tuple[Any, ...]

    def __str__(self) -> str:
        return self.name


def fit_set(programs: Sequence[MicroProgram]) -> tuple[MicroProgram, ...]:
    """Return the first, third, fifth ... program of each kind but reductions; the others are the test set."""
    of_kind = [[p for p in programs if p.kind == kind] for kind in KINDS if kind != "reductions"]
    return tuple(program for found in of_kind for program in found[::2])


# The programs ------------------------------------------------------------------------------------------


def _product(kind: Kind, m: int, k: int, n: int, dtype: str = "bfloat16", batch: int = 0) -> MicroProgram:
    lead = (batch,) if batch else ()
    left, right = _STRUCT((*lead, m, k), dtype), _STRUCT((*lead, k, n), dtype)
    return MicroProgram(name=f"{_text(left)} @ {_text(right)}", kind=kind, fn=jnp.matmul, args=(left, right))


_ELEMENTWISE: dict[int, tuple[str, Callable[..., Any]]] = {
    1: ("x + 1", lambda x: x + 1),
    2: ("2 * x + y", lambda x, y: 2 * x + y),
    3: ("x * y + z", lambda x, y, z: x * y + z),
}
_REDUCTIONS: dict[str, Callable[..., Any]] = {"sum": jnp.sum, "max": jnp.max}


def _elementwise(kind: Kind, operands: int, *shape: int) -> MicroProgram:
    x = _STRUCT(shape, jnp.float32)
    text, fn = _ELEMENTWISE[operands]
    return MicroProgram(name=f"{text} of {_text(x)}", kind=kind, fn=fn, args=(x,) * operands)


def _reduction(kind: Kind, name: str, axis: int, *shape: int) -> MicroProgram:
    x, reduce = _STRUCT(shape, jnp.float32), _REDUCTIONS[name]
    return MicroProgram(
        name=f"{name} of x * x of {_text(x)} over dim {axis}",
        kind=kind,
        fn=lambda x: reduce(x * x, axis=axis),
        args=(x,),
    )


def _chain(length: int, *shape: int) -> MicroProgram:
    def chain(x: Any) -> Any:
        # Constants, as the vector unit reads an array's register more slowly; of all sizes, so that none is folded.
        for i in range(length):
            x = x * (1.01 + i / length) + (0.5 + i)
        return x

    x = _STRUCT(shape, jnp.float32)
    return MicroProgram(
        name=f"{length} multiplies and adds of {_text(x)}", kind="chains", fn=chain, args=(x,)
    )


def _text(array: Any) -> str:
    short = {"float32": "f32", "bfloat16": "bf16"}[jnp.dtype(array.dtype).name]
    return f"{short}[{','.join(map(str, array.shape))}]"


FAMILY: tuple[MicroProgram, ...] = (
    _product("products", 512, 512, 512),
    _product("products", 1024, 1024, 1024),
    _product("products", 2048, 2048, 2048),
    _product("products", 4096, 4096, 4096),
    _product("products", 8192, 8192, 8192),
    _product("products", 6144, 6144, 6144),
    _product("products", 2048, 2048, 2048, "float32"),
    _product("products", 4096, 4096, 4096, "float32"),
    _product("products", 1024, 8192, 4096),
    _product("products", 4096, 8192, 1024),
    _product("products", 1024, 1024, 1024, batch=16),
    _product("products", 1024, 1024, 2048, batch=8),
    _elementwise("streams", 1, 4096, 4096),
    _elementwise("streams", 1, 8192, 8192),
    _elementwise("streams", 2, 8192, 8192),
    _elementwise("streams", 2, 4096, 4096),
    _elementwise("streams", 3, 4096, 4096),
    _elementwise("streams", 3, 16384, 2048),
    _chain(64, 1024, 1024),
    _chain(96, 1024, 1024),
    _chain(64, 4096, 1024),
    _chain(96, 2048, 2048),
    _chain(128, 2048, 1024),
    _chain(128, 1024, 4096),
    _product("narrow results", 4096, 128, 4096),
    _product("narrow results", 8192, 128, 8192),
    _product("narrow results", 16384, 128, 2048),
    _product("narrow results", 2048, 128, 16384),
    _product("narrow results", 1024, 128, 1024, batch=32),
    _product("narrow results", 2048, 128, 2048, batch=16),
    _elementwise("tiny kernels", 1, 8, 128),
    _elementwise("tiny kernels", 2, 8, 128),
    _elementwise("tiny kernels", 2, 8, 256),
    _elementwise("tiny kernels", 1, 16, 128),
    _reduction("tiny kernels", "sum", 1, 8, 128),
    _reduction("tiny kernels", "max", 1, 8, 128),
    _reduction("reductions", "sum", 1, 8192, 4096),
    _reduction("reductions", "max", 1, 4096, 8192),
    _reduction("reductions", "sum", 0, 8192, 4096),
    _reduction("reductions", "max", 0, 4096, 8192),
)
"""All programs, in the order in which every second one is taken."""
