"""From one layout of a value to another: the collectives, their order and their price.

The steps are slice, reduce-scatter, all-to-all, all-reduce, all-gather and permute. Axes are added while the
local array is still small and removed last; of the orders tried the cheapest is taken. A `Resharder` holds
the choice, so that what is priced is what is emitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from jax import lax

from autoshard.layout import Axes, Layout, MeshShape, local_shape, mesh_size
from autoshard.partition.price import Machine

__all__ = ["Reshard", "Resharder", "Step", "apply_steps", "plan_steps"]


class Step(NamedTuple):
    """One collective (or slice) over `axes`; `dim` is the dim that changes, `other` a second one.

    A permute reorders the axes of `dim` from `axes` to `order`.
    """

    kind: str
    axes: Axes
    dim: int = -1
    other: int = -1
    order: Axes = ()
    monoid: str = "sum"


class Reshard(NamedTuple):
    """Steps with their price; `seconds` is infinite when no sequence exists."""

    steps: tuple[Step, ...]
    seconds: float


IMPOSSIBLE = Reshard((), math.inf)


def plan_steps(
    shape: Sequence[int], source: Layout, target: Layout, mesh: MeshShape, *, slice_first: bool = True
) -> tuple[Step, ...] | None:
    """Find steps from `source` to `target`, or None if there are none (sums cannot be undone)."""
    if not set(target.unreduced) <= set(source.unreduced):
        return None
    if target.unreduced and target.monoid != source.monoid:
        return None
    state = _State(shape, source, target, mesh)
    if slice_first:
        state.slices()
    state.reduce_scatters()
    state.moves()
    state.all_reduce()
    if not slice_first:
        state.gathers()
        state.slices()
    else:
        state.slices()
        state.gathers()
        state.slices()
    state.reorders()
    if tuple(map(tuple, state.dims)) != target.dims:
        return None
    return tuple(state.steps)


@dataclass
class _State:
    """The layout while steps are being collected."""

    shape: Sequence[int]
    source: Layout
    target: Layout
    mesh: MeshShape
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dims = [list(axes) for axes in self.source.dims]
        self.unreduced = list(self.source.unreduced)

    def _splits(self, dim: int, axes: Sequence[str]) -> bool:
        return self.shape[dim] % mesh_size([*self.dims[dim], *axes], self.mesh) == 0

    def _extra(self, dim: int) -> list[str]:
        return [a for a in self.dims[dim] if a not in self.target.dims[dim]]

    def slices(self) -> None:
        """Split dims over axes that hold copies now."""
        used = {a for axes in self.dims for a in axes} | set(self.unreduced)
        for dim, wanted in enumerate(self.target.dims):
            new = [a for a in wanted if a not in self.dims[dim] and a not in used]
            if new and self._splits(dim, new):
                self.dims[dim] += new
                self.steps.append(Step("slice", tuple(new), dim))

    def reduce_scatters(self) -> None:
        """Reduce partial sums straight into the dims that take their axes."""
        if self.source.monoid != "sum":
            return
        for dim, wanted in enumerate(self.target.dims):
            new = [a for a in wanted if a in self.unreduced and a not in self.target.unreduced]
            if new and self._splits(dim, new):
                self.dims[dim] += new
                self.unreduced = [a for a in self.unreduced if a not in new]
                self.steps.append(Step("reduce_scatter", tuple(new), dim))

    def moves(self) -> None:
        """Move axes from dim to dim."""
        for dim in range(len(self.shape)):
            for axis in reversed(self._extra(dim)):
                to = next((d for d, axes in enumerate(self.target.dims) if axis in axes), None)
                if to is None or not self._splits(to, [axis]):
                    continue
                if self.dims[dim][-1] != axis:
                    self._reorder(dim, [a for a in self.dims[dim] if a != axis] + [axis])
                self.dims[dim].pop()
                self.dims[to].append(axis)
                self.steps.append(Step("all_to_all", (axis,), dim, to))

    def all_reduce(self) -> None:
        """Finish the sums that are left."""
        rest = tuple(a for a in self.unreduced if a not in self.target.unreduced)
        if rest:
            self.unreduced = [a for a in self.unreduced if a in self.target.unreduced]
            self.steps.append(Step("all_reduce", rest, monoid=self.source.monoid))

    def gathers(self) -> None:
        """Collect dims over axes that they leave."""
        for dim in range(len(self.shape)):
            extra = self._extra(dim)
            if extra:
                kept = [a for a in self.dims[dim] if a not in extra]
                self._reorder(dim, kept + extra)
                self.dims[dim] = kept
                self.steps.append(Step("all_gather", tuple(extra), dim))

    def reorders(self) -> None:
        """Bring the axes of each dim into the wanted order."""
        for dim, wanted in enumerate(self.target.dims):
            if set(wanted) == set(self.dims[dim]):
                self._reorder(dim, list(wanted))

    def _reorder(self, dim: int, order: list[str]) -> None:
        if self.dims[dim] != order:
            self.steps.append(Step("permute", tuple(self.dims[dim]), dim, order=tuple(order)))
            self.dims[dim] = order


def _candidates(
    shape: Sequence[int], source: Layout, target: Layout, mesh: MeshShape
) -> Iterator[tuple[Step, ...] | None]:
    """List the orders to try: slices early, slices late, and finishing and gathering all before slicing."""
    yield plan_steps(shape, source, target, mesh)
    yield plan_steps(shape, source, target, mesh, slice_first=False)
    whole = Layout(((),) * len(shape), target.unreduced, target.monoid)
    gathered = plan_steps(shape, source, whole, mesh)
    cut = plan_steps(shape, whole, target, mesh)
    yield None if gathered is None or cut is None else gathered + cut


class Resharder:
    """Plans and prices resharding on one machine; remembers what it found."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._found: dict[tuple[Any, ...], Reshard] = {}
        self._orders: dict[tuple[Any, ...], tuple[tuple[Step, ...], ...]] = {}
        self._prices: dict[tuple[Any, ...], tuple[float, tuple[int, ...]]] = {}
        self._devices = math.prod(machine.mesh.values())

    def find(self, shape: tuple[int, ...], dtype: Any, source: Layout, target: Layout) -> Reshard:
        """Return the cheapest steps known from `source` to `target` for an array of global `shape`."""
        if source == target or (source.dims == target.dims and not source.unreduced + target.unreduced):
            return Reshard((), 0.0)
        key = (shape, dtype, source, target)
        if key not in self._found:
            best = IMPOSSIBLE
            for steps in self._candidates(shape, source, target):
                seconds = self._seconds(steps, local_shape(shape, source, self.machine.mesh), dtype)
                if seconds < best.seconds:
                    best = Reshard(steps, seconds)
            self._found[key] = best
        return self._found[key]

    def _candidates(
        self, shape: tuple[int, ...], source: Layout, target: Layout
    ) -> tuple[tuple[Step, ...], ...]:
        """List the orders to try; they depend on the shape only by what divides its dims."""
        divisors = tuple(math.gcd(n, self._devices) for n in shape)
        key = (divisors, source, target)
        if key not in self._orders:
            found = _candidates(divisors, source, target, self.machine.mesh)
            self._orders[key] = tuple(dict.fromkeys(steps for steps in found if steps is not None))
        return self._orders[key]

    def _seconds(self, steps: Sequence[Step], shape: tuple[int, ...], dtype: Any) -> float:
        total = 0.0
        for step in steps:
            key = (step, shape, dtype)
            if key not in self._prices:
                after = step_shape(step, shape, self.machine.mesh)
                self._prices[key] = (step_seconds(step, shape, after, dtype, self.machine), after)
            seconds, shape = self._prices[key]
            total += seconds
        return total


def step_shape(step: Step, shape: tuple[int, ...], mesh: MeshShape) -> tuple[int, ...]:
    """Local shape after a step."""
    ways = mesh_size(step.axes, mesh)
    result = list(shape)
    if step.kind in ("slice", "reduce_scatter"):
        result[step.dim] //= ways
    elif step.kind == "all_gather":
        result[step.dim] *= ways
    elif step.kind == "all_to_all":
        result[step.dim] *= ways
        result[step.other] //= ways
    return tuple(result)


def step_seconds(
    step: Step, before: tuple[int, ...], after: tuple[int, ...], dtype: Any, machine: Machine
) -> float:
    """Price of one step, by the functions that price its equations in a jaxpr."""
    if step.kind == "slice":
        return machine.slice_cost(after, dtype).seconds
    if step.kind == "permute":
        axes, pairs = permutation(step.axes, step.order, machine.mesh)
        return machine.permute_cost(before, dtype, axes, pairs).seconds
    return machine.collective_cost(step.kind, before, after, dtype, step.axes).seconds


def permutation(axes: Axes, order: Axes, mesh: MeshShape) -> tuple[Axes, tuple[tuple[int, int], ...]]:
    """Who sends to whom, to turn a split by `axes` into one by `order`.

    Returns the axes in mesh order and (source, target) positions, row major over them: `lax.ppermute` counts
    positions in mesh order whatever the order in which axes are named.
    """
    return _permutation(axes, order, tuple(mesh.items()))


@lru_cache(maxsize=4096)
def _permutation(
    axes: Axes, order: Axes, sizes: tuple[tuple[str, int], ...]
) -> tuple[Axes, tuple[tuple[int, int], ...]]:
    mesh = dict(sizes)
    base = tuple(a for a in mesh if a in axes)
    pairs = []
    for source in range(mesh_size(base, mesh)):
        coords = _digits(source, base, mesh)
        block = _number(coords, axes, mesh)
        pairs.append((source, _number(_digits(block, order, mesh), base, mesh)))
    return base, tuple(pairs)


def _digits(number: int, axes: Axes, mesh: MeshShape) -> dict[str, int]:
    found = {}
    for axis in reversed(axes):
        number, found[axis] = divmod(number, mesh[axis])
    return found


def _number(coords: MeshShape, axes: Axes, mesh: MeshShape) -> int:
    result = 0
    for axis in axes:
        result = result * mesh[axis] + coords[axis]
    return result


def apply_steps(x: Any, steps: Sequence[Step], mesh: MeshShape) -> Any:
    """Run the steps on a local array, inside `shard_map`."""
    for step in steps:
        if step.kind == "slice":
            size = x.shape[step.dim] // mesh_size(step.axes, mesh)
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(step.axes) * size, size, axis=step.dim)
        elif step.kind == "all_gather":
            x = lax.all_gather(x, step.axes, axis=step.dim, tiled=True)
        elif step.kind == "reduce_scatter":
            x = lax.psum_scatter(x, step.axes, scatter_dimension=step.dim, tiled=True)
        elif step.kind == "all_to_all":
            x = lax.all_to_all(x, step.axes, split_axis=step.other, concat_axis=step.dim, tiled=True)
        elif step.kind == "all_reduce":
            reduce: Any = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}[step.monoid]
            x = reduce(x, step.axes)
        else:
            x = lax.ppermute(x, *permutation(step.axes, step.order, mesh))
    return x
