"""Exact minimisation without memory by eliminating one node after another (non-serial dynamic programming).

Eliminating a node replaces it and the tables that touch it by one table over its neighbours. The work is the
size of the largest table, so the order (least table first) is planned on sizes alone; a plan that would need
too large a table is refused and the integer program takes over.

Reference: U. Bertele and F. Brioschi, Nonserial Dynamic Programming, Academic Press, 1972.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from search.memory import Pair
from search.problem import Floats

MOST_AXES = 60  # an array has at most 64


@dataclass(frozen=True, kw_only=True)
class Elimination:
    """An order of elimination with the scope of every intermediate table.

    Args:
        order: nodes, first eliminated first.
        scopes: for each node of `order`, its neighbours at that moment, ascending.
        cells: entries of all tables together.

    """

    order: tuple[int, ...]
    scopes: tuple[tuple[int, ...], ...]
    cells: int

    def minimum(self, unary: Sequence[Floats], pairs: Mapping[Pair, Floats]) -> tuple[float, list[int]]:
        """Return the least total cost and a choice that has it.

        Args:
            unary: per node costs `[S_i]`.
            pairs: tables `[S_i, S_j]` by (i, j), i < j, on the same pairs that the order was planned for.

        Returns:
            (value, choice); the value is `inf` when every choice is forbidden. Ties take the lower position.

        """
        factors: list[list[tuple[tuple[int, ...], Floats]]] = [[] for _ in unary]
        rank = {node: k for k, node in enumerate(self.order)}
        for (i, j), table in pairs.items():
            factors[i if rank[i] < rank[j] else j].append(((i, j), table))
        total = 0.0
        best: list[np.ndarray] = []
        for node, scope in zip(self.order, self.scopes, strict=True):
            target = (*scope, node)
            table = np.zeros((*(len(unary[n]) for n in scope), len(unary[node]))) + unary[node]
            for axes, values in factors[node]:
                table += _spread(axes, values, target)
            factors[node] = []
            pick = table.argmin(axis=-1)
            best.append(pick)
            left = np.take_along_axis(table, pick[..., None], axis=-1)[..., 0]
            if scope:
                factors[min(scope, key=rank.__getitem__)].append((scope, left))
            else:
                total += float(left)
        choice = [0] * len(unary)
        for node, scope, pick in reversed(list(zip(self.order, self.scopes, best, strict=True))):
            choice[node] = int(pick[tuple(choice[n] for n in scope)])
        return total, choice


def _spread(axes: tuple[int, ...], values: Floats, target: tuple[int, ...]) -> Floats:
    """View a table over `axes` as one over `target`, length 1 along the missing axes."""
    by_target = sorted(range(len(axes)), key=lambda k: target.index(axes[k]))
    shape = [1] * len(target)
    for k in by_target:
        shape[target.index(axes[k])] = values.shape[k]
    return values.transpose(by_target).reshape(shape)


def plan(sizes: Sequence[int], pairs: Iterable[Pair], *, cap: int) -> Elimination | None:
    """Choose the order that keeps every table small: least table first, then the lower index.

    A node with more neighbours than a table has axes waits until they are gone (one-strategy nodes make
    such tables small, but not narrow).

    Args:
        sizes: strategies per node.
        pairs: the pairs of nodes with a table.
        cap: most entries that one table may have.

    Returns:
        The order, or None when some table would be larger than `cap`.

    """
    near: list[set[int]] = [set() for _ in sizes]
    for i, j in pairs:
        near[i].add(j)
        near[j].add(i)

    def table(node: int) -> tuple[bool, int]:
        product = sizes[node]
        for other in near[node]:
            product *= sizes[other]
        return len(near[node]) >= MOST_AXES, product

    cost = [table(node) for node in range(len(sizes))]
    heap = [(c, node) for node, c in enumerate(cost)]
    heapq.heapify(heap)
    waiting = set(range(len(sizes)))
    order: list[int] = []
    scopes: list[tuple[int, ...]] = []
    total = 0
    while waiting:
        c, node = heapq.heappop(heap)
        if node not in waiting or c != cost[node]:
            continue  # superseded by a later entry
        wide, cells = c
        if wide or cells > cap:
            return None
        total += cells
        waiting.remove(node)
        scope = near[node]
        order.append(node)
        scopes.append(tuple(sorted(scope)))
        for other in scope:
            near[other] |= scope
            near[other] -= {other, node}
        for other in scope:
            cost[other] = table(other)
            heapq.heappush(heap, (cost[other], other))
    return Elimination(order=tuple(order), scopes=tuple(scopes), cells=total)
