"""The intermediate representation: a flat graph of ops in single-assignment form.

A `Program` is what `trace` makes of a JAX function and what every later stage reads. Calls are inlined;
`scan`, `while` and `cond` keep their bodies as sub-Programs (`Op.blocks`). Values are compared by identity.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import Literal, Primitive

__all__ = [
    "Atom",
    "Equation",
    "Op",
    "Program",
    "Value",
    "aval_of",
    "is_value",
    "itemsize",
    "shape_of",
    "value_bytes",
]


@dataclass(frozen=True, eq=False, kw_only=True)
class Value:
    """An array in the program: its shape and dtype, and for inputs the pytree path it came in by.

    `labels` are the names that `jax.ad_checkpoint.checkpoint_name` gave it. Inside a `shard_map` it is the part of
    one device along the `manual` axes, another on each.
    """

    aval: Any
    name: str = ""
    labels: list[str] = field(default_factory=list)
    manual: frozenset[str] = frozenset()

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return tuple(self.aval.shape)

    @property
    def dtype(self) -> Any:
        """Element type; may be an extended one (a PRNG key)."""
        return self.aval.dtype

    def __repr__(self) -> str:
        dims = ",".join(map(str, self.shape))
        return f"{self.name or 'value'}:{self.dtype}[{dims}]"


Atom = Value | Literal
_PLACE = re.compile(r"(.+?):(\d+)(?::\d+)*(?: \(|$)")


def is_value(atom: Atom) -> bool:
    """Tell a computed array from a scalar literal."""
    return isinstance(atom, Value)


def aval_of(atom: Any) -> Any:
    """Abstract value of a value, a literal or a jaxpr variable; JAX types it too loosely to use."""
    return atom.aval


def shape_of(atom: Atom) -> tuple[int, ...]:
    """Global shape of a value or a literal."""
    return tuple(aval_of(atom).shape)


@lru_cache(maxsize=256)
def on_host(aval: Any) -> bool:
    """Tell an array that lies in the host's memory."""
    return bool(getattr(aval, "memory_space", None) == jax.memory.Space.Host)


def local_aval(value: Value, shape: tuple[int, ...]) -> Any:
    """Abstract value of one device's part of a value."""
    if on_host(value.aval):
        return value.aval.update(shape=shape)
    return jax.ShapeDtypeStruct(shape, value.dtype)


def itemsize(dtype: Any) -> float:
    """Bytes per element of a dtype, PRNG keys and sub-byte integers included.

    >>> import jax.numpy as jnp
    >>> itemsize(jnp.dtype("bfloat16"))
    2.0
    """
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        return float(dtype.itemsize)
    name = np.dtype(dtype).name
    if name in ("int4", "uint4", "float4_e2m1fn"):
        return 0.5
    if name in ("int2", "uint2"):
        return 0.25
    return float(np.dtype(dtype).itemsize)


def value_bytes(shape: tuple[int, ...], dtype: Any) -> float:
    """Bytes of an unpadded array of `shape` and `dtype`; Python integers, so no 32-bit overflow."""
    size = 1
    for extent in shape:
        size *= extent
    return size * itemsize(dtype)


class Equation(Protocol):
    """What prices need of a jaxpr equation; `jax.extend.core.JaxprEqn` is one."""

    @property
    def primitive(self) -> Any: ...
    @property
    def params(self) -> Any: ...
    @property
    def invars(self) -> Any: ...
    @property
    def outvars(self) -> Any: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class Op:
    """One operation: a JAX primitive bound to operands, with the user's source line.

    `blocks` are the sub-Programs of a control-flow op: the body of a `scan`; condition and body of a
    `while`; the branches of a `cond`. A `transposed` op is the backward one of the op on its source line.
    """

    primitive: Primitive
    params: Mapping[str, Any]
    inputs: tuple[Atom, ...]
    outputs: tuple[Value, ...]
    blocks: tuple[Program, ...] = ()
    source_info: Any = None
    transposed: bool = False

    @property
    def name(self) -> str:
        """The primitive's name."""
        return str(self.primitive.name)

    @property
    def source(self) -> str:
        """`file.py:line (function)` of the user's code, or '' where JAX recorded none."""
        if self.source_info is None:
            return ""
        text = str(source_info_util.summarize(self.source_info))
        head, _, tail = text.rpartition("/")
        return tail if head else text

    @property
    def place(self) -> tuple[str, int]:
        """File and line of the user's code; ("", 0) where JAX recorded none."""
        if self.source_info is None:
            return "", 0
        found = _PLACE.match(str(source_info_util.summarize(self.source_info)))
        return (found[1], int(found[2])) if found else ("", 0)

    def __repr__(self) -> str:
        outs = " ".join(map(repr, self.outputs))
        ins = " ".join(repr(a) if is_value(a) else str(a) for a in self.inputs)
        return f"{outs} = {self.name} {ins}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Program:
    """A function body: inputs, ops in execution order, outputs; `consts` are arrays that it closes over."""

    inputs: tuple[Value, ...]
    consts: tuple[tuple[Value, Any], ...]
    ops: tuple[Op, ...]
    outputs: tuple[Atom, ...]
    output_names: tuple[str, ...] = field(default=())

    def walk(self) -> Iterator[Op]:
        """Yield every op, those of sub-Programs after the op that holds them."""
        for op in self.ops:
            yield op
            for block in op.blocks:
                yield from block.walk()

    @property
    def size(self) -> int:
        """Number of ops, those of sub-Programs included."""
        return sum(1 for _ in self.walk())

    def __str__(self) -> str:
        lines = [f"program of {self.size} ops, {len(self.inputs)} inputs, {len(self.outputs)} outputs"]
        lines += _body_lines(self, "  ")
        return "\n".join(lines)


def _body_lines(program: Program, indent: str) -> list[str]:
    lines = []
    for op in program.ops:
        lines.append(f"{indent}{op!r}  # {op.source}")
        for block in op.blocks:
            lines.append(f"{indent}  block:")
            lines += _body_lines(block, indent + "    ")
    return lines
