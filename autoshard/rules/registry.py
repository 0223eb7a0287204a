"""The table of op families: for each primitive its sharding rule and how its local part is emitted.

A family's `rule(op)` gives the `ShardingRule`; its `emit(op, operands, view)` binds the per-device
computation on local operands (inside `shard_map`, or under an axis environment while costs are gathered).
A primitive without a family is handled by `autoshard.rules.opaque`: whole on every device, and named in
the plan's coverage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from jax import lax

from autoshard.addresses import address, cut
from autoshard.layout import Axes, MeshShape, chunk, local_shape, mesh_size
from autoshard.padding import pad_end
from autoshard.program import Op, shape_of
from autoshard.rules.rule import Assignment, Dims, ShardingRule
from autoshard.rules.windowed import Ring

__all__ = ["Family", "Kind", "LocalView", "bind", "families", "family", "register"]


class Kind(Enum):
    """How a compiler treats the op: what may share a kernel with what."""

    ELEMENTWISE = "elementwise"  # joins its neighbours in one kernel
    REDUCTION = "reduction"  # ends a kernel of elementwise ops
    SINGLE = "single"  # a kernel of its own
    CONTROL = "control"  # a loop or a branch: its blocks hold the work
    IDENTITY = "identity"  # returns its operands; keeps their layouts


@dataclass(frozen=True, kw_only=True)
class LocalView:
    """What emission knows: the op's rule, how its factors are split, and the mesh."""

    rule: ShardingRule
    assignment: Assignment
    mesh: MeshShape
    ring: Ring | None = None

    def axes(self, factor: str) -> Axes:
        """Mesh axes that split `factor`."""
        return self.assignment.get(factor, ())

    def ways(self, factor: str) -> int:
        """Number of parts that `factor` is split into."""
        return mesh_size(self.axes(factor), self.mesh)

    def local_size(self, factor: str) -> int:
        """Extent of `factor` on one device, padding of an uneven split included."""
        return chunk(self.rule.sizes[factor], self.ways(factor))

    def uneven(self, factor: str) -> bool:
        """Tell whether some device holds padding of `factor`."""
        return bool(self.rule.sizes[factor] % self.ways(factor))

    def index(self, axes: Axes) -> Any:
        """Position of this device along `axes`, row major; int32 scalar."""
        return address(axes)

    def dim_axes(self, dim: tuple[str, ...]) -> Axes:
        """Mesh axes that split a dim."""
        return tuple(a for f in dim for a in self.axes(f))

    def offset(self, factor: str) -> Any:
        """First global index of `factor` on this device; int32 scalar."""
        return address(self.axes(factor), self.local_size(factor))

    def in_shape(self, op: Op, i: int) -> tuple[int, ...]:
        """Local shape of operand i."""
        return local_shape(
            shape_of(op.inputs[i]), self.rule.layout(self.rule.inputs[i], self.assignment), self.mesh
        )

    def out_shape(self, op: Op, i: int = 0) -> tuple[int, ...]:
        """Local shape of result i."""
        return local_shape(
            op.outputs[i].shape, self.rule.layout(self.rule.outputs[i], self.assignment), self.mesh
        )

    def part(self, array: Any, factor: str, dim: int) -> Any:
        """Cut this device's part of `factor` out of an array that holds all of it in `dim`."""
        size = self.local_size(factor)
        array = pad_end(array, dim, size * self.ways(factor) - array.shape[dim])
        return cut(array, self.offset(factor), size, axis=dim)

    def without_padding(self, array: Any, dims: Dims, fill: Any) -> Any:
        """Put `fill` where a local array, laid out by `dims`, holds padding of an uneven split."""
        for d, dim in enumerate(dims):
            size, axes = math.prod(self.rule.sizes[f] for f in dim), self.dim_axes(dim)
            if axes and size % mesh_size(axes, self.mesh):
                place = lax.broadcasted_iota(np.int32, array.shape, d)
                held = lax.lt(place, lax.broadcast(address(axes, -array.shape[d], size), array.shape))
                array = lax.select(held, array, lax.full(array.shape, fill, array.dtype))
        return array


RuleFn = Callable[[Op], ShardingRule]
ParamsFn = Callable[[Op, LocalView], Mapping[str, Any]]
EmitFn = Callable[[Op, Sequence[Any], LocalView], Sequence[Any]]
# What operand i holds, where it holds anything, so that it does not change a reduction; None: as it is.
IdentityFn = Callable[[Op, int], Any]


def _unchanged(op: Op, view: LocalView) -> Mapping[str, Any]:
    return {}


def _never(op: Op, view: LocalView) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Family:
    """A rule and an emission shared by some primitives.

    Most ops are emitted by binding their own primitive on the local operands, with `params(op, view)`
    changed. Where more is needed, `special(op, view)` says so and `emit_special` binds it. Padding of
    unevenly split reduce factors, but those of an exchange, is overwritten with `identity(op, i)` in operand
    i first. `about` says in words what the rule cannot.
    """

    name: str
    kind: Kind
    rule: RuleFn
    params: ParamsFn = _unchanged
    special: Callable[[Op, LocalView], bool] = _never
    emit_special: EmitFn | None = None
    identity: IdentityFn | None = None
    about: str = ""

    def emits_more(self, op: Op, view: LocalView) -> bool:
        """Tell whether emission binds more than the op's own primitive."""
        return self._masks(view) or self.special(op, view)

    def emit(self, op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
        """Bind the per-device computation of an op on local operands."""
        if self._masks(view):
            operands = self._masked(op, operands, view)
        if self.emit_special is not None and self.special(op, view):
            return self.emit_special(op, operands, view)
        return bind(op, operands, **self.params(op, view))

    def _masks(self, view: LocalView) -> bool:
        return self.identity is not None and any(map(view.uneven, self._plainly_reduced(view)))

    @staticmethod
    def _plainly_reduced(view: LocalView) -> list[str]:
        return [f for f in view.rule.reduce if f not in view.rule.exchange]

    def _masked(self, op: Op, operands: Sequence[Any], view: LocalView) -> list[Any]:
        masked = []
        for i, (array, dims) in enumerate(zip(operands, view.rule.inputs, strict=True)):
            fill = self.identity(op, i) if self.identity is not None else None
            reduced = tuple(tuple(f for f in dim if f in self._plainly_reduced(view)) for dim in dims)
            masked.append(array if fill is None else view.without_padding(array, reduced, fill))
        return masked


families: dict[str, Family] = {}


def register(family_: Family, primitives: Iterable[str]) -> None:
    """Enter primitives into the table; a second entry for the same primitive is an error."""
    for primitive in primitives:
        if primitive in families:
            raise ValueError(
                f"primitive {primitive!r} already belongs to family {families[primitive].name!r}"
            )
        families[primitive] = family_


def family(op: Op) -> Family:
    """Return the family of an op; those without a rule belong to the family 'opaque'."""
    return families.get(op.name) or families["<opaque>"]


def bind(op: Op, operands: Sequence[Any], **changes: Any) -> Sequence[Any]:
    """Bind the op's own primitive to local operands, with some parameters changed."""
    params = op.primitive.get_bind_params(dict(op.params) | changes)
    result = op.primitive.bind(*operands, **params)
    return result if op.primitive.multiple_results else [result]


def names(count: int, prefix: str) -> tuple[str, ...]:
    """Return factor names `prefix0`, `prefix1`, ..."""
    return tuple(f"{prefix}{i}" for i in range(count))
