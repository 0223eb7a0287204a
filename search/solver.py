"""`solve`: the main path, from a problem to a choice with its certificate.

    Problem -> Graph -> presolve -> message passing with memory prices, and plans repaired to fit
            -> strategies ruled out by their margins -> elimination -> linear program, more ruled out
            -> integer program -> ties -> Solution

Each stage ends the search when plan and bound meet.
"""

import math
from collections.abc import Callable

import numpy as np

from search.contract import contract
from search.descent import Descent
from search.exact import ROWS_AT_ONCE, least_overshoot
from search.finish import LONG, attempt, by_margins, finish, thinned
from search.graph import Graph, from_problem
from search.improve import improve
from search.incumbent import Incumbent
from search.memory import Ints
from search.neighbourhood import Neighbourhood
from search.presolve import presolve
from search.problem import Problem
from search.relaxation import Relaxation
from search.solution import Progress, Solution, relative_gap
from search.ties import settle

ROUNDS = 60  # of two sweeps each
NARROW = 6  # programs over promising strategies at most
PATIENCE = 8  # rounds without a better bound or plan before the next stage


def solve(
    problem: Problem,
    *,
    time_limit_seconds: float = 60.0,
    gap: float = 0.0,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """Find the cheapest choice that fits, with a bound that says how good it is.

    Args:
        problem: what to choose, and what it costs.
        time_limit_seconds: wall-clock limit; the best plan so far comes back when it is reached.
        gap: relative gap at which to stop; 0 asks for a proof.
        seed: of every random number; the same input and seed give the same answer.
        progress: called with each better plan or bound.

    Returns:
        The best choice, proven optimal, or within its gap, or INFEASIBLE with the least overshoot found.

    Example:
        >>> import numpy as np
        >>> problem = Problem(
        ...     costs=(np.array([1.0, 2.0]), np.array([5.0, 0.0])),
        ...     edges=((0, 1),),
        ...     edge_costs=(np.array([[0.0, 9.0], [9.0, 0.0]]),),
        ... )
        >>> solve(problem).choice
        (1, 1)

    """
    best = Incumbent(problem, time_limit_seconds, gap, progress)
    interrupted = False
    try:
        _search(problem, best, seed)
    except KeyboardInterrupt:
        interrupted = True
    return best.solution(interrupted=interrupted)


def _search(problem: Problem, best: Incumbent, seed: int) -> None:
    raw = contract(from_problem(problem))
    whole = presolve(raw)
    positions, times = _by_messages(whole, best, seed)
    graph = thinned(whole, positions, best)
    if not best.done:
        finish(graph, best, seed, times)
    if best.choice is None and whole.memory is not None and best.left:
        least_overshoot(whole, best, seed)
    if best.left:
        settle(raw, best, seed)


def _by_messages(graph: Graph, best: Incumbent, seed: int) -> tuple[list[Ints] | None, list[int]]:
    """Bound and plan by message passing, memory priced.

    Returns:
        (positions that a better plan may use, or None when unknown; times at which memory has a price).

    """
    relaxation, descent = Relaxation(graph), Descent(graph, lambda: not best.left)
    moves = Neighbourhood(graph, seed)
    stalled, length = 0, 1.0
    estimate = math.inf
    seen = (best.objective, best.lower_bound)
    rounds = 0
    while best.left and rounds < ROUNDS and stalled < PATIENCE:
        plans = relaxation.round()
        rounds += 1
        best.prove(min(relaxation.bound, best.objective), "message passing")
        if not best.left:
            break
        plan = min(plans, key=graph.cost)
        estimate = min(estimate, max(graph.cost(plan), relaxation.bound))
        attempt(graph, descent, plan, best)
        if best.done:
            return None, []
        if rounds % 4 == 0:
            plan = moves.step(relaxation.unary, plan, moves.forest(len(graph.unary)))
            attempt(graph, descent, plan, best)
            if best.done:
                return None, []
        if graph.memory is not None and rounds == 2 and math.isinf(best.objective):
            _lean(graph, descent, best)
        if graph.memory is not None and rounds >= 5:
            goal = best.objective if math.isfinite(best.objective) else estimate
            relaxation.step(plans[-1], goal, length)
        better = _moved(seen, (best.objective, best.lower_bound))
        stalled = 0 if better else stalled + 1
        length = length if better else max(length * 0.8, 0.01)
        seen = (best.objective, best.lower_bound)
    times: list[int] = []
    if graph.memory is not None:
        dearest = np.argsort(-relaxation.prices, kind="stable")[:ROWS_AT_ONCE]
        times = [int(graph.memory.times[r]) for r in dearest if relaxation.prices[r] > 0]
    if math.isinf(best.objective) or not best.left:
        return None, times
    if graph.cells > LONG:
        _narrowly(graph, relaxation, times, best, seed)
    improve(graph, best, relaxation.prices, seed, patience=12)
    if best.done:
        return None, times
    relaxation.round()
    best.prove(min(relaxation.bound, best.objective), "message passing")
    return relaxation.survivors(best.objective), times


def _narrowly(graph: Graph, relaxation: Relaxation, times: list[int], best: Incumbent, seed: int) -> None:
    """Alternate between programs over the most promising strategies and message passing at their prices."""
    for _ in range(NARROW):
        before, prices, bound = best.objective, relaxation.prices, relaxation.bound
        found = by_margins(graph, relaxation.messages.margins, times, best, seed)
        if found is None or best.done:
            return
        relaxation.price(found)
        for _ in range(PATIENCE):
            if not best.left:
                return
            relaxation.round()
        if relaxation.bound <= bound:  # prices of a narrow program may be far off
            relaxation.price((prices + found) / 2)
            relaxation.round(2 * PATIENCE)
        best.prove(min(relaxation.bound, best.objective), "message passing")
        if best.objective > 0.999 * before and relaxation.bound <= bound:
            return


def _moved(before: tuple[float, float], after: tuple[float, float]) -> bool:
    """Whether the gap shrank by a fiftieth."""
    old, new = relative_gap(*before), relative_gap(*after)
    return math.isinf(old) or new < 0.98 * old


def _lean(graph: Graph, descent: Descent, best: Incumbent) -> None:
    """Look for a first plan that fits at ever higher prices on memory, then bring its cost down."""
    assert graph.memory is not None
    relaxation = Relaxation(graph)
    spread = sum(float(np.ptp(u)) for u in graph.unary) + 1e-300
    for power in (0, 2, 4):
        if not best.left:
            return
        rows = len(graph.memory.room)
        relaxation.price(np.full(rows, spread * 10.0**power / rows / graph.memory.scale))
        for plan in relaxation.round():
            attempt(graph, descent, plan, best)
        if best.choice is not None:
            plan = graph.positions(best.choice) or plan
            best.offer(graph.original(descent.polish(plan)), "descent")
            return
