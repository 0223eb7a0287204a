"""The finishing stages: exact elimination, and the integer program with memory rows added lazily.

Both work on a graph that earlier stages have thinned, so "nothing there" means: nothing cheaper than the plan
at hand.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from search import backend, elimination
from search.graph import Graph
from search.incumbent import PROVEN, Incumbent
from search.memory import Ints
from search.problem import Floats
from search.program import Program, build, variables, with_memory

TABLE_CAP = 1 << 22  # entries of the largest table that elimination may build
TOTAL_CAP = 1 << 27  # entries of all tables together
ROWS_AT_ONCE = 16  # memory rows added after one solve


def by_elimination(graph: Graph, best: Incumbent) -> bool:
    """Minimise exactly while ignoring memory.

    Args:
        graph: contains a plan at least as good as the incumbent's, or none is better.
        best: takes the plan and the bound.

    Returns:
        Whether that settles the search: the plan fits, or every choice is forbidden.

    """
    order = elimination.plan(graph.sizes, graph.pairs, cap=TABLE_CAP)
    if order is None or order.cells > TOTAL_CAP:
        return False
    value, choice = order.minimum(graph.unary, graph.pairs)
    if np.isinf(value):
        best.exhausted("No choice avoids the forbidden pairs")
        return True
    best.prove(min(value + graph.constant, best.objective), "elimination")
    return best.offer(graph.original(choice), "elimination")


class Rows:
    """The integer program of one graph with the memory rows that turned out to matter."""

    def __init__(self, graph: Graph, times: list[int]) -> None:
        """Build the program.

        Args:
            graph: what to choose from.
            times: times whose memory rows to begin with, where the graph still has them.

        """
        self.graph = graph
        memory = graph.memory
        row_of = {} if memory is None else {int(t): r for r, t in enumerate(memory.times)}
        self.rows = [row_of[t] for t in times if t in row_of]
        self._base = build(graph)
        if memory is not None:
            self._columns = variables(self._base, graph)

    @property
    def times(self) -> list[int]:
        """The problem's times of the present memory rows."""
        memory = self.graph.memory
        return [] if memory is None else [int(memory.times[r]) for r in self.rows]

    def program(self) -> Program:
        """Return the program with the present rows."""
        return with_memory(self._base, self.graph, self.rows) if self.rows else self._base

    def prices(self, duals: Floats | None) -> Floats | None:
        """Turn the duals of the present program into cost per byte of every memory row."""
        memory = self.graph.memory
        if memory is None or duals is None:
            return None
        prices = np.zeros(len(memory.room))
        if self.rows:
            prices[self.rows] = np.maximum(0.0, -duals[-len(self.rows) :]) / memory.scale
        return prices

    def extend(self, values: np.ndarray) -> bool:
        """Add the rows that a solution (fractional or not) breaks most; whether there were any."""
        memory = self.graph.memory
        if memory is None:
            return False
        excess = (memory.load(self._columns @ values) - memory.room) / memory.scale
        known = set(self.rows)
        worst = [int(r) for r in np.argsort(-excess, kind="stable")[: 4 * ROWS_AT_ONCE] if excess[r] > 1e-7]
        new = [r for r in worst if r not in known][:ROWS_AT_ONCE]
        self.rows += new
        return bool(new)


@dataclass(frozen=True, kw_only=True, eq=False)
class Relaxed:
    """The solved linear program.

    Args:
        plan: rounded from its solution.
        values: of all variables, the node choices first.
        reduced_costs: of the node choices.
        starts: `[N + 1]`, where each node's strategies begin.
        bound: no permitted plan costs less.
        prices: cost per byte `[R]` of the graph's memory rows; None when unknown.

    """

    plan: list[int]
    values: Floats
    reduced_costs: Floats
    starts: Ints
    bound: float
    prices: Floats | None

    def survivors(self, objective: float) -> list[Ints]:
        """Strategies per node that a plan cheaper than `objective` may use."""
        slack = objective - self.bound + PROVEN * abs(objective)
        return self._where(self.reduced_costs <= slack)

    def support(self, plan: list[int]) -> list[Ints]:
        """Strategies per node that the solution uses, and those of a plan."""
        used = self.values[: self.starts[-1]] > 1e-7
        used[self.starts[:-1] + np.array(plan, dtype=np.int64)] = True
        return self._where(used)

    def _where(self, marks: npt.NDArray[np.bool_]) -> list[Ints]:
        ends = itertools.pairwise(self.starts.tolist())
        return [np.flatnonzero(marks[a:b]) for a, b in ends]


def by_linear_program(
    rows: Rows,
    best: Incumbent,
    seed: int,
    *,
    part: bool = False,
    aside: Callable[[], bool] | None = None,
) -> Relaxed | None:
    """Solve the linear relaxation with the present memory rows.

    Args:
        rows: the program.
        best: takes the bound.
        seed: of the solver.
        part: whether better plans may lie elsewhere, so that nothing is proven.
        aside: work to do meanwhile.

    Returns:
        The solution, or None without one.

    """
    program = rows.program()
    answer = backend.run(program, integer=False, seconds=best.left, seed=seed, aside=aside)
    if answer.infeasible and not part:
        best.exhausted("No permitted choice fits the memory, not even a fractional one")
    if answer.values is None or answer.reduced_costs is None:
        return None
    bound = answer.bound + program.constant
    if not part:
        best.prove(min(bound, best.objective), "linear program")
    return Relaxed(
        plan=program.choice(answer.values),
        values=answer.values,
        reduced_costs=answer.reduced_costs[: program.num_binary],
        starts=program.starts,
        bound=bound,
        prices=rows.prices(answer.duals),
    )


def by_integer_program(
    rows: Rows,
    best: Incumbent,
    seed: int,
    mend: Callable[[list[int]], list[int] | None],
    *,
    part: bool = False,
    aside: Callable[[], bool] | None = None,
) -> None:
    """Solve the integer program, adding the memory rows that its plans break, until one fits.

    Args:
        rows: the program; it gains rows.
        best: takes plans and bounds.
        seed: of the solver.
        mend: turns a plan into one that fits, or None.
        part: whether better plans may lie elsewhere, so that nothing is proven.
        aside: work to do meanwhile.

    """
    graph = rows.graph
    while best.left:
        program = rows.program()
        start = _indicator(program, graph, best)
        gap = max(best.target, PROVEN)
        answer = backend.run(
            program, integer=True, seconds=best.left, gap=gap, seed=seed, start=start, aside=aside
        )
        if answer.infeasible and part:
            return
        if answer.infeasible:
            best.exhausted(
                "No permitted choice fits the memory" if rows.rows else "Every choice is forbidden"
            )
            return
        if not part:
            best.prove(min(answer.bound + program.constant, best.objective), "integer program")
        if answer.values is None:
            return
        plan = program.choice(answer.values)
        fits = best.offer(graph.original(plan), "integer program")
        if not fits:
            mended = mend(plan)
            if mended is not None:
                best.offer(graph.original(mended), "repair")
        if best.done or not answer.complete or fits or not rows.extend(answer.values):
            return


def least_overshoot(graph: Graph, best: Incumbent, seed: int) -> None:
    """With nothing that fits, find the choice whose peak is least above the limit.

    Args:
        graph: has a memory.
        best: takes the plan as its fallback.
        seed: of the solver.

    """
    memory = graph.memory
    if memory is None:
        return
    base = build(graph)
    rows = [int(np.argmin(memory.room))]
    while best.left:
        program = with_memory(base, graph, rows, soft=True)
        answer = backend.run(program, integer=True, seconds=best.left, gap=1e-6, seed=seed)
        if answer.values is None:
            return
        plan = program.choice(answer.values)
        best.offer(graph.original(plan), "least overshoot")
        excess = memory.excess(plan) / memory.scale
        ceiling = max(float(answer.values[-1]), float(excess[rows].max())) + 1e-7
        known = set(rows)
        broken = [
            int(r) for r in np.argsort(-excess, kind="stable") if excess[r] > ceiling and r not in known
        ]
        if not broken or not answer.complete:
            return
        rows += broken[:ROWS_AT_ONCE]


def _indicator(program: Program, graph: Graph, best: Incumbent) -> Floats | None:
    """Write the incumbent as values of the node variables, if the thinned graph still has it."""
    if best.choice is None:
        return None
    positions = graph.positions(best.choice)
    if positions is None:
        return None
    values = np.zeros(program.num_binary)
    values[program.starts[:-1] + np.array(positions, dtype=np.int64)] = 1.0
    return values
