"""Local search whose every step is exact: all nodes of a random region are re-optimised at once.

With the other nodes held, elimination solves an induced forest exactly, and any region that is narrow enough;
so a step never makes a plan worse. Regions change from step to step.
"""

import sys
from collections.abc import Sequence

import numpy as np

from search import elimination
from search.graph import Graph
from search.memory import Ints
from search.problem import Floats

CELLS = 1 << 18  # entries of the largest table that a region may need


class Neighbourhood:
    """A graph prepared for repeated forest steps."""

    def __init__(self, graph: Graph, seed: int) -> None:
        """Index the graph.

        Args:
            graph: what to search; its memory is ignored here.
            seed: of the forests.

        """
        self._near = graph.neighbours()
        self._pairs = graph.pairs
        self._rng = np.random.default_rng(seed)

    def forest(self, size: int) -> list[int]:
        """Draw up to `size` nodes that induce no cycle, ascending."""
        return self._acyclic(self._order(size), size)

    def _acyclic(self, order: Ints, size: int) -> list[int]:
        """Take up to `size` nodes, in order, each unless it would close a cycle; ascending."""
        n = len(self._near)
        root = list(range(n))

        def find(a: int) -> int:
            while root[a] != a:
                root[a] = root[root[a]]
                a = root[a]
            return a

        inside = [False] * n
        taken: list[int] = []
        for node in order.tolist():
            trees = [find(other) for other, _ in self._near[node] if inside[other]]
            if len(set(trees)) < len(trees):
                continue
            inside[node] = True
            taken.append(node)
            for tree in trees:
                root[tree] = node
            if len(taken) == size:
                break
        return sorted(taken)

    def _order(self, size: int) -> Ints:
        """All nodes at random, or those around a random node when only a part is wanted."""
        n = len(self._near)
        if size >= n:
            return self._rng.permutation(n)
        order = [int(self._rng.integers(n))]
        seen = set(order)
        for node in order:
            if len(order) > 3 * size:
                break
            for other, _ in self._near[node]:
                if other not in seen:
                    seen.add(other)
                    order.append(other)
        return self._rng.permutation(np.array(order, dtype=np.int64))

    def block(self, size: int) -> list[int]:
        """Draw up to `size` nodes around a random one, ascending."""
        start = int(self._rng.integers(len(self._near)))
        order, seen = [start], {start}
        for node in order:
            for other in self._rng.permutation([o for o, _ in self._near[node]]).tolist():
                if other not in seen and len(order) < size:
                    seen.add(other)
                    order.append(other)
        return sorted(order)

    def stretch(self, size: int) -> list[int]:
        """Draw `size` nodes that follow each other in the program."""
        start = int(self._rng.integers(max(1, len(self._near) - size + 1)))
        return list(range(start, min(start + size, len(self._near))))

    def region(self, cells: int, *, along: bool) -> list[int]:
        """Draw the largest block, or stretch of the program, whose tables stay within so many entries."""
        n = len(self._near)
        start = int(self._rng.integers(n))
        order = [(start + k) % n for k in range(n)] if along else self._around(start)
        inside: set[int] = set()
        for node in order:
            for other, table in self._near[node]:
                cells -= table.size if other in inside else 0
            if cells < 0:
                break
            inside.add(node)
        return sorted(inside)

    def _around(self, start: int) -> list[int]:
        """All nodes that can be reached, nearest first."""
        order, seen = [start], {start}
        for node in order:
            for other, _ in self._near[node]:
                if other not in seen:
                    seen.add(other)
                    order.append(other)
        return order

    def step(self, unary: Sequence[Floats], choice: list[int], free: Sequence[int]) -> list[int]:
        """Re-optimise the nodes of a region, the others held.

        A region that is too wide for elimination is thinned to a forest.

        Args:
            unary: node costs, with prices if any.
            choice: the present plan.
            free: ascending nodes.

        Returns:
            A plan that costs no more.

        """
        for nodes, cap in (
            (free, CELLS),
            (self._acyclic(self._rng.permutation(free), len(free)), sys.maxsize),
        ):
            local, pairs = self._inside(unary, choice, nodes)
            order = elimination.plan([len(c) for c in local], pairs, cap=cap)
            if order is not None and order.cells <= 16 * cap:
                break
        assert order is not None
        _, best = order.minimum(local, pairs)
        after = list(choice)
        for k, node in enumerate(nodes):
            after[node] = best[k]
        return after

    def _inside(
        self, unary: Sequence[Floats], choice: list[int], free: Sequence[int]
    ) -> tuple[list[Floats], dict[tuple[int, int], Floats]]:
        """Costs of a region with the others held: (per node, per pair of positions in `free`)."""
        position = {node: k for k, node in enumerate(free)}
        local: list[Floats] = []
        pairs: dict[tuple[int, int], Floats] = {}
        for k, node in enumerate(free):
            cost = unary[node].copy()
            for other, table in self._near[node]:
                inner = position.get(other)
                if inner is None:
                    cost += table[:, choice[other]]
                elif k < inner:
                    pairs[k, inner] = table
            local.append(cost)
        return local, pairs
