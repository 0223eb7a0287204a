"""Prices on memory: a bound for the limited problem, and margins that rule strategies out.

Every memory row gets a price >= 0 (cost per byte above the room). For any prices, the least priced cost minus
the prices' room is a lower bound; message passing bounds the former. Prices follow the excess of the plans
that they produce (subgradient steps of Polyak's length).

Reference: M. L. Fisher, The Lagrangian relaxation method for solving integer programming problems, Management
Science 27, 1981.
"""

import itertools
import math

import numpy as np

from search.graph import Graph
from search.memory import Ints
from search.messages import Messages
from search.problem import Floats


class Relaxation:
    """A graph with prices; each `round` is two sweeps at the present prices."""

    def __init__(self, graph: Graph) -> None:
        """Start at zero prices.

        Args:
            graph: what to bound.

        """
        self.graph = graph
        self.messages = Messages(graph)
        self.bound = -math.inf
        rows = 0 if graph.memory is None else len(graph.memory.room)
        self.prices: Floats = np.zeros(rows)
        self.unary: list[Floats] = list(graph.unary)
        self._offset = 0.0
        self._tables: dict[tuple[int, int], Floats] = {}
        if graph.memory is not None:
            pairs = {p for p, _ in graph.memory.buffers}
            self._tables = {(i, j): self.messages.table(i, j) for i, j in sorted(pairs)}
        self._last = -math.inf
        self._before = -math.inf
        self._fresh = 0

    def price(self, prices: Floats) -> None:
        """Set the memory rows' prices, cost per byte `[R]`, >= 0."""
        memory = self.graph.memory
        if memory is None:
            return
        self.prices = prices
        flat = memory.priced(prices)
        priced = [flat[a:b] for a, b in itertools.pairwise(memory.starts.tolist())]
        self.unary = [c + p for c, p in zip(self.graph.unary, priced, strict=False)]
        tables = dict(self._tables)
        for (pair, _), p in zip(memory.buffers, priced[len(self.unary) :], strict=True):
            tables[pair] = tables[pair] + p.reshape(tables[pair].shape)
        for (i, j), table in tables.items():
            self.messages.replace(i, j, table)
        self._offset = float(prices @ memory.room)
        self._fresh = 0

    def round(self, sweeps: int = 2) -> list[list[int]]:
        """Sweep at the present prices.

        Args:
            sweeps: how often, alternating in direction.

        Returns:
            The plans rounded on the way; `bound` keeps the best bound of all rounds.

        """
        plans = []
        for k in range(sweeps):
            bound, plan = self.messages.sweep(self.unary, forward=k % 2 == 0)
            self._before = self._last
            self._last = bound - self._offset + self.graph.constant
            self.bound = max(self.bound, self._last)
            self._fresh += 1
            plans.append(plan)
        return plans

    def step(self, plan: list[int], best: float, length: float) -> None:
        """Move the prices along a plan's excess.

        Args:
            plan: made at the present prices.
            best: cost of the best plan that fits, or of a plan that nearly does.
            length: factor on Polyak's step, in (0, 2).

        """
        memory = self.graph.memory
        if memory is None:
            return
        slope = memory.excess(plan) / memory.scale
        slope = np.where((self.prices > 0) | (slope > 0), slope, 0.0)
        norm = float(slope @ slope)
        distance = max(best - self._last, 1e-6 * abs(best))
        if norm > 0 and math.isfinite(distance):
            self.price(np.maximum(0.0, self.prices + length * distance / norm * slope / memory.scale))

    def survivors(self, best: float) -> list[Ints] | None:
        """Say which strategies a plan that costs at most `best` may use.

        Args:
            best: cost of a known plan.

        Returns:
            Positions per node, ascending; None before two sweeps at the present prices.

        """
        if self._fresh < 2:
            return None
        # a margin adds to the bound at the moment of its node, which the sweep before did not exceed
        slack = best - self._before + 1e-9 * abs(best)
        return [np.flatnonzero(m <= slack) for m in self.messages.margins]
