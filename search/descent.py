"""Single-node moves on a plan: bring it within the memory, then improve it without leaving.

All strategies of all nodes lie in one flat array with their cost against the present neighbours, so the best
move of the whole plan is one `argmin`.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from search.graph import Graph
from search.memory import Ints
from search.problem import Floats


class Descent:
    """A graph prepared for moves."""

    def __init__(self, graph: Graph, expired: Callable[[], bool] = lambda: False) -> None:
        """Index the graph's strategies.

        Args:
            graph: what to move in.
            expired: whether time is up; then a repair gives up and a polish stops where it is.

        """
        self._graph = graph
        self._expired = expired
        self._near = graph.neighbours()
        sizes = np.array(graph.sizes, dtype=np.int64)
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._node = np.repeat(np.arange(len(sizes)), sizes)
        memory = graph.memory
        self._buffered = {n for pair, _ in memory.buffers for n in pair} if memory else set()

    def repair(self, plan: Sequence[int]) -> list[int] | None:
        """Move nodes to leaner strategies, least extra cost per byte first, until the plan fits.

        Small graphs look at every strategy after each move; large ones make a batch of moves in between.

        Args:
            plan: any choice.

        Returns:
            A plan that fits, or None when the moves do not get there.
        """
        memory = self._graph.memory
        choice = list(plan)
        if memory is None:
            return choice
        local = self._local(choice)
        at = self._starts[:-1] + np.array(choice, dtype=np.int64)
        excess = memory.excess(choice)
        batch = max(1, len(choice) // 400)
        for _ in range(min(2000, 16 + 4 * len(choice))):
            if self._expired():
                return None
            over = np.where(excess > memory.tolerance, excess, 0.0)
            if not over.any():
                return choice
            moves = self._leaner(local, at, over)
            if not len(moves):
                return None
            for move in moves[:batch].tolist():
                node = int(self._node[move])
                if batch > 1 and not self._still_over(node, excess, local[move]):
                    continue
                was = choice[node]
                self._move(local, choice, node, move - int(self._starts[node]))
                excess = self._after(excess, choice, node, was)
                at[node] = move
        return None

    def _leaner(self, local: Floats, at: Ints, over: Floats) -> Ints:
        """Rank the moves that free bytes where they lack: free ones first, then by cost per useful byte."""
        memory = self._graph.memory
        assert memory is not None
        weight = memory.priced(over / memory.scale)[: len(self._node)]
        gain = weight[at][self._node] - weight
        need = float(over @ over) / memory.scale
        candidates = np.flatnonzero((gain > 1e-12 * need) & np.isfinite(local))
        gain = gain[candidates]
        with np.errstate(invalid="ignore"):
            extra = local[candidates] - local[at][self._node[candidates]]
        paid = np.where(extra > 0, extra / np.minimum(gain, need).clip(1e-300), 0.0)
        order = np.lexsort((np.where(extra > 0, 0.0, extra - gain), paid))
        ranked = candidates[order]
        _, first = np.unique(self._node[ranked], return_index=True)
        best: Ints = ranked[np.sort(first)]
        return best

    def _still_over(self, node: int, excess: Floats, cost: float) -> bool:
        memory = self._graph.memory
        assert memory is not None
        profile = memory.nodes[node]
        if not np.isfinite(cost) or not len(profile.starts):
            return False
        worst = np.maximum.reduceat(excess, profile.starts)
        return bool(worst[profile.loads.any(axis=1)].max(initial=0.0) > memory.tolerance)

    def polish(self, plan: Sequence[int], *, passes: int = 20, ties: bool = False) -> list[int]:
        """Give each node in turn its cheapest strategy that still fits, until nothing changes.

        Args:
            plan: fits.
            passes: most rounds over the nodes.
            ties: also move to a lower position at equal cost (relative rounding 1e-12).

        Returns:
            A plan that fits and costs no more.

        """
        choice = list(plan)
        memory = self._graph.memory
        local = self._local(choice)
        excess = memory.excess(choice) if memory else np.zeros(0)
        scale = abs(self._graph.cost(choice)) * 1e-12 if ties else 0.0
        for _ in range(passes):
            moved = False
            if self._expired():
                break
            for node, size in enumerate(self._graph.sizes):
                if size < 2:
                    continue
                a = int(self._starts[node])
                costs = local[a : a + size]
                now = choice[node]
                better = costs < costs[now]
                if ties:
                    better[:now] |= costs[:now] <= costs[now] + scale
                better &= self._allowed(node, now, excess)
                options = np.flatnonzero(better)
                if not len(options):
                    continue
                least = costs[options].min()
                for option in options[np.argsort(costs[options] > least + scale, kind="stable")]:
                    old = list(choice) if node in self._buffered else choice
                    trial = int(option)
                    if node in self._buffered:
                        old[node] = trial
                        if not self._graph.fits(old):
                            continue
                    self._move(local, choice, node, trial)
                    excess = self._after(excess, choice, node, now)
                    moved = True
                    break
            if not moved:
                break
        return choice

    def _local(self, choice: list[int]) -> Floats:
        """Cost of every strategy against the neighbours' present strategies, flat."""
        parts = []
        for node, cost in enumerate(self._graph.unary):
            total = cost.copy()
            for other, table in self._near[node]:
                total += table[:, choice[other]]
            parts.append(total)
        return np.concatenate([*parts, np.zeros(0)])

    def _move(self, local: Floats, choice: list[int], node: int, to: int) -> None:
        was = choice[node]
        choice[node] = to
        for other, table in self._near[node]:
            a, b = self._starts[other], self._starts[other + 1]
            with np.errstate(invalid="ignore"):
                step = table[to] - table[was]
            if np.isfinite(step).all() and np.isfinite(local[a:b]).all():
                local[a:b] += step
                continue
            fresh = self._graph.unary[other].copy()
            for near, costs in self._near[other]:
                fresh += costs[:, choice[near]]
            local[a:b] = fresh

    def _allowed(self, node: int, now: int, excess: Floats) -> npt.NDArray[np.bool_]:
        """Mark the strategies of a node that fit while the others hold (buffers apart)."""
        memory = self._graph.memory
        if memory is None or not len(memory.nodes[node].starts):
            return np.ones(len(self._graph.unary[node]), dtype=bool)
        profile = memory.nodes[node]
        room = memory.tolerance - np.maximum.reduceat(excess, profile.starts)
        return np.asarray((profile.loads - profile.loads[:, now, None] <= room[:, None]).all(axis=0))

    def _after(self, excess: Floats, choice: list[int], node: int, was: int) -> Floats:
        memory = self._graph.memory
        if memory is None:
            return excess
        if node in self._buffered:
            return memory.excess(choice)
        starts, step = memory.nodes[node].change(choice[node], was)
        if len(starts):
            excess[starts[0] :] += np.repeat(step, np.diff(starts, append=len(excess)))
        return excess
