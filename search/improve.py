"""Local search on a plan that fits, by regions: one region is solved exactly at prices, then made to fit.

A region is a tree-like part of the graph around a node, a whole block around a node, or a stretch of the
program. The nodes outside of it are held; bytes cost what they cost in the relaxation, and prices rise where
plans overflow and fall elsewhere. A plan is taken when it fits and costs no more.
"""

import numpy as np

from search.descent import Descent, State
from search.graph import Graph
from search.incumbent import Incumbent
from search.neighbourhood import Neighbourhood
from search.problem import Floats

SMALLEST = 16  # nodes of a region
REPORT = 1.0  # seconds between plans that are passed on


class Improver:
    """A plan under improvement; the same seed and the same number of steps give the same plan."""

    def __init__(
        self, graph: Graph, best: Incumbent, prices: Floats | None, seed: int, *, patience: int
    ) -> None:
        """Start from the incumbent.

        Args:
            graph: contains the incumbent's plan.
            best: has a plan, and takes better ones.
            prices: cost per byte of each memory row; 0 when unknown.
            seed: of the regions.
            patience: steps without a better plan after which to stop.

        """
        self._graph, self._best, self._patience = graph, best, patience
        rows = 0 if graph.memory is None else len(graph.memory.room)
        self._prices = np.zeros(rows) if prices is None else prices
        self._descent = Descent(graph, lambda: not best.left)
        self._moves = Neighbourhood(graph, seed)
        self._rng = np.random.default_rng(seed)
        self._sizes = [
            *(SMALLEST << k for k in range(20) if SMALLEST << k < len(graph.unary)),
            len(graph.unary),
        ]
        self._steps = self._vain = 0
        self._told = -REPORT
        self.state = self._begin()

    def _begin(self) -> State | None:
        plan = None if self._best.choice is None else self._graph.positions(self._best.choice)
        return None if plan is None else self._descent.state(plan)

    def step(self) -> bool:
        """Try one region; whether there is a point in trying another."""
        state = self.state
        if state is None or self._best.done or not self._best.left or self._vain >= self._patience:
            self.tell()
            return False
        size = self._sizes[int(self._rng.integers(len(self._sizes)))]
        free = (self._moves.forest, self._moves.block, self._moves.stretch)[self._steps % 3](size)
        trial = self._solved(state, free)
        self._steps += 1
        self._vain += 1
        if self._descent.mend(trial):
            self._descent.improve(trial)
            if trial.cost < state.cost - 1e-12 * abs(state.cost):
                self._vain = 0
            if trial.cost <= state.cost:
                self.state = trial
        if self._best.elapsed - self._told > REPORT:
            self.tell()
        return True

    def tell(self) -> None:
        """Pass the present plan on."""
        self._told = self._best.elapsed
        if self.state is not None and self.state.cost < self._best.objective:
            self._best.offer(self._graph.original(self.state.choice), "local search")

    def _solved(self, state: State, free: list[int]) -> State:
        """Re-optimise a region at prices, and move the prices."""
        memory = self._graph.memory
        unary = list(self._graph.unary)
        if memory is not None:
            flat = memory.priced(self._prices)
            for node in free:
                unary[node] = unary[node] + flat[memory.starts[node] : memory.starts[node + 1]]
        after = self._moves.step(unary, state.choice, free)
        trial = state.copy()
        for node in free:
            if after[node] != trial.choice[node]:
                self._descent.move(trial, node, after[node])
        if not np.isfinite(trial.cost):
            trial.cost = self._graph.cost(trial.choice)
        if memory is not None:
            over = trial.excess > memory.tolerance
            floor = 1e-3 * abs(state.cost) / memory.scale / len(over)
            typical = max(floor, float(self._prices.sum()) / max(1, int(np.count_nonzero(self._prices))))
            self._prices = np.where(over, self._prices + 0.05 * typical, self._prices * 0.995)
        return trial


def improve(graph: Graph, best: Incumbent, prices: Floats | None, seed: int, *, patience: int) -> None:
    """Improve the incumbent until a row of steps in vain; see `Improver`."""
    search = Improver(graph, best, prices, seed, patience=patience)
    while search.step():
        pass
