"""Single-node moves on a plan: bring it within the memory, then improve it without leaving.

All strategies of all nodes lie in one flat array with their cost against the present neighbours, so the best
move of the whole plan is one `argmin`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from search.graph import Graph
from search.memory import Ints
from search.problem import Floats


@dataclass(kw_only=True, eq=False)
class State:
    """A plan with what moves need to know of it.

    Args:
        choice: strategy position per node.
        local: per strategy (flat) its cost against the neighbours' present strategies.
        excess: bytes above the room per memory row.
        cost: of the plan.

    """

    choice: list[int]
    local: Floats
    excess: Floats
    cost: float

    def copy(self) -> "State":
        """Return a state that moves apart from this one."""
        return State(
            choice=list(self.choice), local=self.local.copy(), excess=self.excess.copy(), cost=self.cost
        )


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

    def state(self, plan: Sequence[int]) -> State:
        """Prepare a plan for moves."""
        choice = list(plan)
        memory = self._graph.memory
        return State(
            choice=choice,
            local=self._local(choice),
            excess=memory.excess(choice) if memory else np.zeros(0),
            cost=self._graph.cost(choice),
        )

    def repair(self, plan: Sequence[int]) -> list[int] | None:
        """Return the plan after `mend`, or None when the moves do not get there."""
        state = self.state(plan)
        return state.choice if self.mend(state) else None

    def polish(self, plan: Sequence[int], *, ties: bool = False) -> list[int]:
        """Return the plan, which fits, after `improve`."""
        state = self.state(plan)
        self.improve(state, ties=ties)
        return state.choice

    def mend(self, state: State) -> bool:
        """Move nodes to leaner strategies, least extra cost per byte first, until the plan fits.

        Small graphs look at every strategy after each move; large ones make a batch of moves in between.

        Args:
            state: any plan.

        Returns:
            Whether it fits now.

        """
        memory = self._graph.memory
        if memory is None:
            return True
        batch = max(1, len(state.choice) // 400)
        for _ in range(min(2000, 16 + 4 * len(state.choice))):
            if self._expired():
                return False
            over = np.where(state.excess > memory.tolerance, state.excess, 0.0)
            if not over.any():
                return True
            moves = self._leaner(state, over)
            if not len(moves):
                return False
            for move in moves[:batch].tolist():
                node = int(self._node[move])
                if batch == 1 or self._still_over(node, state, move):
                    self.move(state, node, move - int(self._starts[node]))
        return False

    def _leaner(self, state: State, over: Floats) -> Ints:
        """Rank the moves that free bytes where they lack: free ones first, then by cost per useful byte."""
        memory, local, at = self._graph.memory, state.local, self._at(state)
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

    def _at(self, state: State) -> Ints:
        """Flat position of each node's present strategy."""
        at: Ints = self._starts[:-1] + np.array(state.choice, dtype=np.int64)
        return at

    def _still_over(self, node: int, state: State, move: int) -> bool:
        memory = self._graph.memory
        assert memory is not None
        profile = memory.nodes[node]
        if not np.isfinite(state.local[move]) or not len(profile.starts):
            return False
        worst = np.maximum.reduceat(state.excess, profile.starts)
        return bool(worst[profile.loads.any(axis=1)].max(initial=0.0) > memory.tolerance)

    def improve(self, state: State, *, ties: bool = False) -> None:
        """Give nodes their cheapest strategy that still fits, until none can change.

        Args:
            state: fits, and does so afterwards.
            ties: also move to a lower position at equal cost (relative rounding 1e-12).

        """
        scale = abs(state.cost) * 1e-12 if ties else 0.0
        for _ in range(20):
            if self._expired() or not self._pass(state, scale, ties):
                return

    def _pass(self, state: State, scale: float, ties: bool) -> bool:
        """Look once at every node that could improve; whether one did."""
        moved = False
        if not len(state.choice):
            return moved
        least = np.minimum.reduceat(state.local, self._starts[:-1])
        present = state.local[self._at(state)]
        hopeful = np.flatnonzero(least <= present + scale if ties else least < present)
        for node in hopeful.tolist():
            now = state.choice[node]
            costs = state.local[self._starts[node] : self._starts[node + 1]]
            better = costs < costs[now]
            if ties:
                better[:now] |= costs[:now] <= costs[now] + scale
            better &= self._allowed(node, now, state.excess)
            options = np.flatnonzero(better)
            if not len(options):
                continue
            least_cost = costs[options].min()
            for option in options[np.argsort(costs[options] > least_cost + scale, kind="stable")].tolist():
                if node in self._buffered and not self._graph.fits(
                    [*state.choice[:node], option, *state.choice[node + 1 :]]
                ):
                    continue
                self.move(state, node, option)
                moved = True
                break
        return moved

    def move(self, state: State, node: int, to: int) -> None:
        """Give a node another strategy; by way of a forbidden plan, the cost gets lost (it is not finite then)."""
        was, start = state.choice[node], self._starts[node]
        with np.errstate(invalid="ignore"):
            state.cost += float(state.local[start + to] - state.local[start + was])
        self._move(state.local, state.choice, node, to)
        state.excess = self._after(state.excess, state.choice, node, was)

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
