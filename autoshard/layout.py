"""How one value is laid out over a mesh: the inside form of a `PartitionSpec`.

`Layout.dims[i]` names the mesh axes that split dim i, major first; `unreduced` the axes over which the local
arrays are still partial results. A dim that its axes do not divide is split into parts of the next larger
extent, the last of them padded; what stands in the padding is undefined. A `PartitionSpec` says the same and
is what users see.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from autoshard.errors import SpecError

__all__ = [
    "Layout",
    "MeshShape",
    "chunk",
    "coordinates",
    "from_spec",
    "local_shape",
    "mesh_size",
    "position",
    "replicated",
    "spec_problems",
    "to_spec",
    "undivided",
]

MeshShape = Mapping[str, int]
Axes = tuple[str, ...]


class Layout(NamedTuple):
    """Mesh axes per dim, axes still to be reduced, and the monoid to reduce them with."""

    dims: tuple[Axes, ...]
    unreduced: Axes = ()
    monoid: str = "sum"

    @property
    def axes(self) -> Axes:
        """All axes that split a dim."""
        return tuple(axis for dim in self.dims for axis in dim)

    def __str__(self) -> str:
        return str(to_spec(self))


def replicated(rank: int) -> Layout:
    """Return the layout that keeps a whole copy on every device."""
    return Layout(((),) * rank)


def mesh_size(axes: Iterable[str], mesh: MeshShape) -> int:
    """Return the product of the sizes of `axes`."""
    return math.prod(mesh[axis] for axis in axes)


def coordinates(number: int, axes: Axes, mesh: MeshShape) -> dict[str, int]:
    """Return where along each of `axes` a device stands, from its number, row major over them."""
    found = {}
    for axis in reversed(axes):
        number, found[axis] = divmod(number, mesh[axis])
    return found


def position(coords: MeshShape, axes: Iterable[str], mesh: MeshShape) -> int:
    """Return the number of a device, row major over `axes`, from its coordinates."""
    result = 0
    for axis in axes:
        result = result * mesh[axis] + coords[axis]
    return result


def chunk(size: int, ways: int) -> int:
    """Return the extent of one of `ways` parts of a dim: the last parts of an uneven split are padded."""
    return -(-size // ways)


def local_shape(shape: Sequence[int], layout: Layout, mesh: MeshShape) -> tuple[int, ...]:
    """Return the per-device shape, padding of uneven splits included."""
    return tuple(
        chunk(size, mesh_size(axes, mesh)) if axes else size
        for size, axes in zip(shape, layout.dims, strict=True)
    )


def to_spec(layout: Layout) -> PartitionSpec:
    """Write a layout as a `PartitionSpec`, without trailing Nones.

    >>> to_spec(Layout((("data",), (), ("x", "y"), ())))
    PartitionSpec('data', None, ('x', 'y'))
    """
    entries: list[Any] = [axes[0] if len(axes) == 1 else (axes or None) for axes in layout.dims]
    while entries and entries[-1] is None:
        entries.pop()
    if layout.unreduced:
        return PartitionSpec(*entries, unreduced=set(layout.unreduced))
    return PartitionSpec(*entries)


def from_spec(spec: PartitionSpec, rank: int) -> Layout:
    """Read a `PartitionSpec` for an array of `rank` dims; `UNCONSTRAINED` dims are read as whole."""
    dims: list[Axes] = []
    for entry in tuple(spec):
        if entry is None or entry is PartitionSpec.UNCONSTRAINED:
            dims.append(())
        elif isinstance(entry, str):
            dims.append((entry,))
        else:
            dims.append(tuple(entry))
    dims += [()] * (rank - len(dims))
    return Layout(tuple(dims), tuple(sorted(spec.unreduced)))


def spec_problems(spec: Any, shape: Sequence[int], mesh: MeshShape) -> list[str]:
    """List what is wrong with `spec` for an array of `shape`; an indivisible dim is not wrong."""
    if not isinstance(spec, PartitionSpec):
        return [f"{spec!r} is of type {type(spec).__name__}: give a jax.sharding.PartitionSpec"]
    problems = []
    if len(spec) > len(shape):
        problems.append(
            f"{spec} has {len(spec)} entries but the array has {len(shape)} dims; a spec may be shorter than"
            f" the rank, never longer: drop {len(spec) - len(shape)}"
        )
    used: set[str] = set()
    for entry in tuple(spec):
        if entry is None or entry is PartitionSpec.UNCONSTRAINED:
            continue
        for axis in (entry,) if isinstance(entry, str) else tuple(entry):
            if axis not in mesh:
                problems.append(
                    f"{spec} names axis {axis!r}, and the mesh has {dict(mesh)}: use one of those axes"
                )
            elif axis in used:
                problems.append(
                    f"{spec} uses axis {axis!r} twice; an axis can split one dim of an array only: drop one"
                )
            used.add(axis)
    return problems


def undivided(layout: Layout, shape: Sequence[int], mesh: MeshShape) -> tuple[Layout, list[str]]:
    """Leave whole every dim that its axes do not divide; say which and why."""
    dims: list[Axes] = []
    notes = []
    for index, (size, axes) in enumerate(zip(shape, layout.dims, strict=True)):
        ways = mesh_size(axes, mesh)
        if axes and size % ways:
            padded = -(-size // ways) * ways
            notes.append(
                f"dim {index} = {size} is not divisible by {'*'.join(f'{a}({mesh[a]})' for a in axes)}: left"
                f" whole (padding to {padded} would cost {100 * (padded - size) / size:.2g} % more)"
            )
            dims.append(())
        else:
            dims.append(axes)
    return Layout(tuple(dims), layout.unreduced, layout.monoid), notes


def require_specs(entries: Iterable[tuple[str, Any, Sequence[int]]], mesh: MeshShape) -> None:
    """Raise one SpecError that lists every wrong `(path, spec, shape)`."""
    wrong = [
        f"{path} {list(shape)}: {problem}"
        for path, spec, shape in entries
        for problem in spec_problems(spec, shape, mesh)
    ]
    if wrong:
        raise SpecError("PartitionSpecs that do not fit:\n  " + "\n  ".join(wrong))
