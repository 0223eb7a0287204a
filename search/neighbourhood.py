"""Local search whose every step is exact: all nodes of a random forest are re-optimised at once.

With the other nodes held, the nodes of an induced forest form trees, which elimination solves exactly; so a
step never makes a plan worse. Forests change from step to step.
"""

from collections.abc import Sequence

import numpy as np

from search import elimination
from search.graph import Graph
from search.memory import Ints
from search.problem import Floats


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
        n = len(self._near)
        root = list(range(n))

        def find(a: int) -> int:
            while root[a] != a:
                root[a] = root[root[a]]
                a = root[a]
            return a

        inside = [False] * n
        taken: list[int] = []
        for node in self._order(size):
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

    def step(self, unary: Sequence[Floats], choice: list[int], free: Sequence[int]) -> list[int]:
        """Re-optimise the nodes of a forest, the others held.

        Args:
            unary: node costs, with prices if any.
            choice: the present plan.
            free: ascending nodes from `forest`.

        Returns:
            A plan that costs no more.

        """
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
        order = elimination.plan([len(c) for c in local], pairs, cap=1 << 62)
        assert order is not None
        _, best = order.minimum(local, pairs)
        after = list(choice)
        for k, node in enumerate(free):
            after[node] = best[k]
        return after
