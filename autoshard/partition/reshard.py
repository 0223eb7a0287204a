"""From one layout of a value to another: the cheapest sequence of collectives, found as a shortest path.

The layouts of an array are the nodes of a graph and the steps (`autoshard.partition.steps`) its edges, priced
on the machine. All shortest paths of a shape are found at once and remembered, so that what is priced is what is
emitted. A sequence through the whole array is taken only when none is cheaper.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import dijkstra

from autoshard.choices import splits
from autoshard.layout import Axes, Layout, MeshShape, mesh_size
from autoshard.partition.price import Machine
from autoshard.partition.steps import Step, parts, permute_step, step_seconds, steps_from

__all__ = ["Reshard", "Resharder"]

# Added to every step while paths are compared, so that of equal ones the shorter is taken.
_STEP_SECONDS = 1e-11


class Reshard(NamedTuple):
    """Steps with their price; `seconds` is infinite when no sequence exists."""

    steps: tuple[Step, ...]
    seconds: float


IMPOSSIBLE = Reshard((), math.inf)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Graph:
    """Layouts of arrays whose dims divide alike, and the steps between them."""

    index: dict[Layout, int]
    steps: list[Step]
    rows: np.ndarray
    columns: np.ndarray
    price_of: np.ndarray  # per step, the position of the first step that costs the same
    priced: list[int]  # positions of the steps that have to be priced


@dataclass(frozen=True, eq=False, kw_only=True)
class _Paths:
    """Shortest paths between all layouts of one shape."""

    graph: _Graph
    seconds: np.ndarray  # from every layout (row) to every other
    previous: np.ndarray
    edge: dict[tuple[int, int], int]

    def find(self, source: int, target: int) -> Reshard:
        if not np.isfinite(self.seconds[source, target]):
            return IMPOSSIBLE
        steps: list[Step] = []
        at = target
        while at != source:
            before = int(self.previous[source, at])
            steps.append(self.graph.steps[self.edge[before, at]])
            at = before
        return Reshard(tuple(reversed(steps)), float(self.seconds[source, target]))


def _seconds(previous: np.ndarray, prices: np.ndarray) -> np.ndarray:
    """Add up the prices along all shortest paths."""
    size = len(previous)
    sources = np.arange(size)[:, None]
    total = np.where(previous >= 0, 0.0, math.inf)
    np.fill_diagonal(total, 0.0)
    at = np.tile(np.arange(size), (size, 1))
    while True:
        before = previous[sources, at]
        moving = before >= 0
        if not moving.any():
            return total
        total[moving] += prices[before[moving], at[moving]]
        at = np.where(moving, before, at)


class Resharder:
    """Plans and prices resharding on one machine; remembers what it found."""

    def __init__(self, machine: Machine, manual: frozenset[str] = frozenset()) -> None:
        self.machine, self.manual = machine, manual
        self._axes = tuple(a for a, n in machine.mesh.items() if n > 1 and a not in manual)
        self._inside: dict[frozenset[str], Resharder] = {manual: self}
        self._devices = math.prod(machine.mesh.values())
        self._found: dict[tuple[Any, ...], Reshard] = {}
        self._graphs: dict[tuple[Any, ...], _Graph] = {}
        self._paths: dict[tuple[Any, ...], _Paths] = {}

    def inside(self, manual: frozenset[str]) -> Resharder:
        """Return the resharder for values that differ along the manual axes of a `shard_map`: it leaves these alone."""
        if manual not in self._inside:
            self._inside[manual] = Resharder(self.machine, manual)
        return self._inside[manual]

    def find(self, shape: tuple[int, ...], dtype: Any, source: Layout, target: Layout) -> Reshard:
        """Return the cheapest steps from `source` to `target` for an array of global `shape`."""
        if source == target or (source.dims == target.dims and not source.unreduced + target.unreduced):
            return Reshard((), 0.0)
        key = (shape, dtype, source, target)
        if key not in self._found:
            self._found[key] = self._search(shape, dtype, self._normal(source), self._normal(target))
        return self._found[key]

    def table(
        self, shape: tuple[int, ...], dtype: Any, sources: Sequence[Layout], targets: Sequence[Layout]
    ) -> np.ndarray:
        """Return the seconds from every source (row) to every target, as `find` gives them."""
        result = np.empty((len(sources), len(targets)))
        if not all(self._splits_well(shape, layout) for layout in (*sources, *targets)):
            for i, a in enumerate(sources):
                result[i] = [self.find(shape, dtype, a, b).seconds for b in targets]
            return result
        wanted = [self._normal(b) for b in targets]
        alike: dict[frozenset[str], list[int]] = defaultdict(list)
        for j, target in enumerate(wanted):
            alike[frozenset(target.axes + target.unreduced)].append(j)
        for i, a in enumerate(sources):
            source = self._normal(a)
            monoid = source.monoid if source.unreduced else ""
            for columns in alike.values():
                axes = self._used(source, wanted[columns[0]])
                paths = self._shortest(shape, dtype, monoid, False, axes)
                index = paths.graph.index
                at = np.array([index.get(wanted[j], -1) for j in columns])
                result[i, columns] = np.where(at < 0, math.inf, paths.seconds[index[source], at])
        return result

    def _used(self, source: Layout, target: Layout) -> Axes:
        """Axes that a reshard may use: a detour over others, which XLA would undo, is none."""
        named = {*source.axes, *source.unreduced, *target.axes, *target.unreduced}
        return tuple(a for a in self._axes if a in named)

    def _splits_well(self, shape: tuple[int, ...], layout: Layout) -> bool:
        return all(
            splits(n, mesh_size(axes, self.machine.mesh)) for n, axes in zip(shape, layout.dims, strict=True)
        )

    def _normal(self, layout: Layout) -> Layout:
        unreduced = tuple(a for a in self._axes if a in layout.unreduced)
        dims = tuple(tuple(a for a in axes if a in self._axes) for axes in layout.dims)
        return Layout(dims, unreduced, layout.monoid if unreduced else "sum")

    def _search(self, shape: tuple[int, ...], dtype: Any, source: Layout, target: Layout) -> Reshard:
        monoid = source.monoid if source.unreduced else ""
        if not set(target.unreduced) <= set(source.unreduced):
            return IMPOSSIBLE
        if target.unreduced and target.monoid != monoid:
            return IMPOSSIBLE
        wasteful = not (self._splits_well(shape, source) and self._splits_well(shape, target))
        paths = self._shortest(shape, dtype, monoid, wasteful, self._used(source, target))
        index = paths.graph.index
        return paths.find(index[source], index[target])

    def _shortest(
        self, shape: tuple[int, ...], dtype: Any, monoid: str, wasteful: bool, axes: Axes
    ) -> _Paths:
        key = (shape, dtype, monoid, wasteful, axes)
        if key not in self._paths:
            graph = self._graph(shape, monoid, wasteful, axes)
            prices = np.zeros(len(graph.steps))
            for at in graph.priced:
                prices[at] = step_seconds(graph.steps[at], shape, dtype, self.machine)
            prices = prices[graph.price_of]
            size = len(graph.index)
            order = np.argsort(-prices, kind="stable")  # of two steps between the same layouts the cheaper
            edge = {(int(graph.rows[e]), int(graph.columns[e])): int(e) for e in order}
            kept = np.fromiter(edge.values(), int, len(edge))
            matrix = sp.csr_array(
                (prices[kept] + _STEP_SECONDS, (graph.rows[kept], graph.columns[kept])), shape=(size, size)
            )
            _, previous = dijkstra(matrix, return_predecessors=True)
            dense = np.zeros((size, size))
            dense[graph.rows[kept], graph.columns[kept]] = prices[kept]
            self._paths[key] = _Paths(
                graph=graph, seconds=_seconds(previous, dense), previous=previous, edge=edge
            )
        return self._paths[key]

    def _graph(self, shape: tuple[int, ...], monoid: str, wasteful: bool, axes: Axes) -> _Graph:
        """Return the graph of a shape; shapes whose dims all devices divide share one."""
        alike = tuple(self._devices if n % self._devices == 0 else n for n in shape)
        key = (alike, monoid, wasteful, axes)
        if key not in self._graphs:
            self._graphs[key] = _graph(alike, monoid, axes, self.machine.mesh, wasteful)
        return self._graphs[key]


def _graph(shape: tuple[int, ...], monoid: str, axes: Axes, mesh: MeshShape, wasteful: bool) -> _Graph:
    nodes = _layouts(shape, monoid, axes, mesh, wasteful)
    index = {layout: i for i, layout in enumerate(nodes)}
    steps = [step for layout in nodes for step in steps_from(shape, layout, mesh) if step.after in index]
    alike: dict[Any, list[Layout]] = defaultdict(list)
    for layout in nodes:
        alike[parts(layout, mesh), layout.unreduced].append(layout)
    for group in alike.values():
        steps += [permute_step(a, b) for a, b in permutations(group, 2)]
    first: dict[Any, int] = {}
    price_of = [first.setdefault(_price_key(step, mesh), at) for at, step in enumerate(steps)]
    return _Graph(
        index=index,
        steps=steps,
        rows=np.array([index[s.before] for s in steps], int),
        columns=np.array([index[s.after] for s in steps], int),
        price_of=np.array(price_of, int),
        priced=sorted(set(price_of)),
    )


def _price_key(step: Step, mesh: MeshShape) -> Any:
    if step.kind == "permute":
        changed = tuple((x, y) for x, y in zip(step.before.dims, step.after.dims, strict=True) if x != y)
        return step.kind, parts(step.before, mesh), changed
    return step.kind, step.axes, step.dim, step.other, parts(step.before, mesh), parts(step.after, mesh)


def _layouts(shape: Sequence[int], monoid: str, axes: Axes, mesh: MeshShape, wasteful: bool) -> list[Layout]:
    """List all layouts of an array, axes of one dim in any order, with any axes still to be reduced."""
    found = []
    places: list[int] = [-1, *(d for d, n in enumerate(shape) if n > 1)]
    for picks in product(places, repeat=len(axes)):
        by_dim = [[a for a, p in zip(axes, picks, strict=True) if p == d] for d in range(len(shape))]
        if not wasteful and not all(
            splits(n, mesh_size(a, mesh)) for n, a in zip(shape, by_dim, strict=True)
        ):
            continue
        free = [a for a, p in zip(axes, picks, strict=True) if p < 0]
        partial = [()] if not monoid else [p for k in range(len(free) + 1) for p in combinations(free, k)]
        for dims in product(*(permutations(a) for a in by_dim)):
            found += [Layout(tuple(dims), p, monoid if p else "sum") for p in partial]
    return found
