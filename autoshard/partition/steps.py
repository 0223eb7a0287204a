"""The steps that resharding is made of: what each does to a local array, how it is emitted and priced.

A step is a slice, all-gather, all-to-all, permute, reduce-scatter or all-reduce over some mesh axes. A dim
whose extent its parts do not divide is padded before it is split, and cut where it becomes whole again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations, permutations
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from autoshard.addresses import address, cut
from autoshard.layout import (
    Axes,
    Layout,
    MeshShape,
    chunk,
    local_shape,
    mesh_size,
)
from autoshard.padding import pad_end
from autoshard.partition.price import Machine

__all__ = ["Step", "apply_steps", "permutation", "step_seconds", "steps_from"]

SLICES = frozenset({"slice", "dynamic_slice", "pad"})  # primitives that cut or pad a local array in a reshard


class Step(NamedTuple):
    """One collective (or slice) over `axes`, from one layout to the next.

    `dim` is the dim that changes; in an all-to-all it loses its axes to `other`.
    """

    kind: str
    axes: Axes
    before: Layout
    after: Layout
    dim: int = -1
    other: int = -1


def _with(layout: Layout, dims: dict[int, Axes], reduced: Axes = ()) -> Layout:
    unreduced = tuple(a for a in layout.unreduced if a not in reduced)
    return Layout(
        tuple(dims.get(d, axes) for d, axes in enumerate(layout.dims)),
        unreduced,
        layout.monoid if unreduced else "sum",
    )


def steps_from(shape: Sequence[int], layout: Layout, mesh: MeshShape) -> Iterator[Step]:
    """Yield every step but permutes that leads from `layout` to another one."""
    dims = layout.dims
    used = {a for axes in dims for a in axes} | set(layout.unreduced)
    free = [a for a, n in mesh.items() if n > 1 and a not in used]

    def nests(d: int, outer: Axes, inner: Axes) -> bool:
        """Tell whether a part of dim d by `outer` is cut by `inner` where the whole dim would be."""
        if not outer:
            return True
        ways = mesh_size(inner, mesh)
        parts = mesh_size(outer, mesh)
        return chunk(shape[d], parts) == ways * chunk(shape[d], parts * ways)

    for d in range(len(dims)):
        if shape[d] == 1:
            continue
        for axes in _ordered(free):
            if nests(d, dims[d], axes):
                yield Step("slice", axes, layout, _with(layout, {d: dims[d] + axes}), d)
        if layout.monoid == "sum":
            for axes in _ordered(layout.unreduced):
                if nests(d, dims[d], axes):
                    after = _with(layout, {d: dims[d] + axes}, axes)
                    yield Step("reduce_scatter", axes, layout, after, d)
        for at in range(len(dims[d])):
            outer, axes = dims[d][:at], dims[d][at:]
            if not nests(d, outer, axes):
                continue
            yield Step("all_gather", axes, layout, _with(layout, {d: outer}), d)
            for e in range(len(dims)):
                if e != d and shape[e] > 1 and nests(e, dims[e], axes):
                    after = _with(layout, {d: outer, e: dims[e] + axes})
                    yield Step("all_to_all", axes, layout, after, d, e)
    for count in range(1, len(layout.unreduced) + 1):
        for axes in combinations(layout.unreduced, count):
            yield Step("all_reduce", axes, layout, _with(layout, {}, axes))


def _ordered(axes: Sequence[str]) -> Iterator[Axes]:
    for count in range(1, len(axes) + 1):
        yield from permutations(axes, count)


def permute_step(before: Layout, after: Layout) -> Step:
    """Return the step between two layouts that cut an array into the same parts, held by other devices."""
    moved = {a for x, y in zip(before.dims, after.dims, strict=True) if x != y for a in (*x, *y)}
    return Step("permute", tuple(sorted(moved)), before, after)


# Emission ---------------------------------------------------------------------------------------------


def apply_steps(x: Any, steps: Sequence[Step], shape: Sequence[int], mesh: MeshShape) -> Any:
    """Run the steps on a local array of an array of global `shape`, inside `shard_map`."""
    for step in steps:
        x = _apply(x, step, shape, mesh)
    return x


def _apply(x: Any, step: Step, shape: Sequence[int], mesh: MeshShape) -> Any:
    after = local_shape(shape, step.after, mesh)
    if step.kind == "slice":
        return _cut(x, step, after, mesh)
    if step.kind == "all_gather":
        return _trimmed(lax.all_gather(x, step.axes, axis=step.dim, tiled=True), step.dim, after)
    if step.kind == "reduce_scatter":
        x = _padded(x, step.dim, after, step, mesh)
        return lax.psum_scatter(x, step.axes, scatter_dimension=step.dim, tiled=True)
    if step.kind == "all_to_all":
        x = _padded(x, step.other, after, step, mesh)
        x = lax.all_to_all(x, step.axes, split_axis=step.other, concat_axis=step.dim, tiled=True)
        return _trimmed(x, step.dim, after)
    if step.kind == "all_reduce":
        reduce: Any = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}[step.before.monoid]
        return reduce(x, step.axes)
    return lax.ppermute(x, *permutation(step, mesh))


def _cut(x: Any, step: Step, after: Sequence[int], mesh: MeshShape) -> Any:
    """Cut out this device's part. The part at an uneven end is cut a little early and moved up."""
    size, whole, d = after[step.dim], x.shape[step.dim], step.dim
    start = address(step.axes, size)
    if size * mesh_size(step.axes, mesh) == whole:
        return cut(x, start, size, axis=d)
    early = lax.min(start, np.int32(whole - size))
    part = cut(x, early, size, axis=d)
    return cut(pad_end(part, d, size), lax.min(lax.sub(start, early), np.int32(size)), size, axis=d)


def _trimmed(x: Any, dim: int, after: Sequence[int]) -> Any:
    return x if x.shape[dim] == after[dim] else lax.slice_in_dim(x, 0, after[dim], axis=dim)


def _padded(x: Any, dim: int, after: Sequence[int], step: Step, mesh: MeshShape) -> Any:
    return pad_end(x, dim, after[dim] * mesh_size(step.axes, mesh) - x.shape[dim])


# Prices -----------------------------------------------------------------------------------------------


def step_seconds(step: Step, shape: Sequence[int], dtype: Any, machine: Machine) -> float:
    """Price of one step, by the functions that price its equations in a jaxpr."""
    mesh = machine.mesh
    before, after = (local_shape(shape, x, mesh) for x in (step.before, step.after))
    if step.kind == "permute":
        axes, pairs = permutation(step, mesh)
        return machine.permute_cost(before, dtype, axes, pairs).seconds
    ways = mesh_size(step.axes, mesh)
    if step.kind == "slice":
        seconds = machine.slice_cost(after, dtype).seconds
        if after[step.dim] * ways == before[step.dim]:
            return seconds
        twice = _resized(after, step.dim, 2 * after[step.dim])
        return 2 * seconds + machine.slice_cost(twice, dtype).seconds
    total = 0.0
    taken, made = before, after
    grown = {"reduce_scatter": step.dim, "all_to_all": step.other}.get(step.kind)
    if grown is not None and after[grown] * ways != before[grown]:
        taken = _resized(before, grown, after[grown] * ways)
        total += machine.slice_cost(taken, dtype).seconds
    if step.kind in ("all_gather", "all_to_all") and before[step.dim] * ways != after[step.dim]:
        made = _resized(after, step.dim, before[step.dim] * ways)
        total += machine.slice_cost(after, dtype).seconds
    return total + machine.collective_cost(step.kind, taken, made, dtype, step.axes).seconds


def _resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return tuple(size if i == dim else n for i, n in enumerate(shape))


# Permutes ---------------------------------------------------------------------------------------------


def permutation(step: Step, mesh: MeshShape) -> tuple[Axes, tuple[tuple[int, int], ...]]:
    """Who sends to whom, so that every device gets its part in the layout after a permute.

    Returns the axes in mesh order and (source, target) positions, row major over them: `lax.ppermute` counts
    positions in mesh order whatever the order in which axes are named.
    """
    return _permutation(step.before.dims, step.after.dims, step.axes, tuple(mesh.items()))


@lru_cache(maxsize=4096)
def _permutation(
    before: tuple[Axes, ...], after: tuple[Axes, ...], moved: Axes, sizes: tuple[tuple[str, int], ...]
) -> tuple[Axes, tuple[tuple[int, int], ...]]:
    mesh = dict(sizes)
    base = tuple(a for a in mesh if a in moved)
    along = dict(zip(base, np.indices([mesh[a] for a in base]).reshape(len(base), -1), strict=True))

    def part(which: int) -> np.ndarray:
        """Number, for every device, the part of the array that it has before or wants after."""
        number = np.zeros(mesh_size(base, mesh), dtype=np.int64)
        for layouts in zip(before, after, strict=True):
            for axis in layouts[which] if layouts[0] != layouts[1] else ():
                number = number * mesh[axis] + along[axis]
        return number

    held, wanted = part(0), part(1)
    # What is there already stays; other parts go from their holders to who wants them, both in device order.
    sources, targets = np.arange(held.size), np.arange(held.size)
    moving = np.flatnonzero(held != wanted)
    sources[moving[np.argsort(wanted[moving], kind="stable")]] = moving[
        np.argsort(held[moving], kind="stable")
    ]
    return base, tuple(zip(sources.tolist(), targets.tolist(), strict=True))


def parts(layout: Layout, mesh: MeshShape) -> tuple[int, ...]:
    """Return into how many parts a layout cuts each dim."""
    return tuple(math.prod(mesh[a] for a in axes) for axes in layout.dims)
