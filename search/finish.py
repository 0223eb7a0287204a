"""The finishing stages: elimination, linear program, integer program, and local search beside them.

The linear program's solution is nearly a plan: a small integer program over the strategies that it uses finds
a plan close to its bound. That plan rules out most strategies, and the integer program over the rest is the
proof. Where the programs are too large, local search takes the time that is left.
"""

import math
from collections.abc import Callable

import numpy as np

from search.descent import Descent
from search.exact import Relaxed, Rows, by_elimination, by_integer_program, by_linear_program
from search.graph import Graph
from search.improve import Improver, improve
from search.incumbent import Incumbent
from search.memory import Ints
from search.neighbourhood import Neighbourhood
from search.presolve import presolve
from search.problem import Floats
from search.relaxation import Relaxation

SMALL = 4_000_000  # table entries up to which the programs are worth a try
PROMISING = 200_000  # table entries of a program over promising strategies, or over a region
LONG = 300_000  # table entries from which a linear program takes long enough to search beside it


def finish(graph: Graph, best: Incumbent, seed: int, times: list[int]) -> None:
    """Close the gap as far as time allows.

    Args:
        graph: contains every plan better than the incumbent.
        best: takes plans and bounds.
        seed: of every random number.
        times: times whose memory rows matter.

    """
    if by_elimination(graph, best) or best.done:
        return
    if graph.cells > SMALL:
        _search_on(graph, times, best, seed)
        return
    graph, rows, relaxed = _by_linear_programs(graph, times, best, seed)
    if best.done or not best.left:
        return
    if relaxed is None:
        _search_on(graph, rows.times, best, seed)
        return
    positions = _sharpened(graph, relaxed, best, seed)
    if best.done:
        return
    slim = thinned(graph, positions, best)
    if best.done or not best.left or by_elimination(slim, best) or best.done:
        return
    aside = _aside(slim, best, None, seed)
    by_integer_program(Rows(slim, rows.times), best, seed, _mend(slim, best), aside=aside)


def _by_linear_programs(
    graph: Graph, times: list[int], best: Incumbent, seed: int
) -> tuple[Graph, Rows, Relaxed | None]:
    """Solve the linear program, adding memory rows until its solution fits.

    Each solution of a large program leads to a plan first, which leaves less for the next program.

    Returns:
        The graph that is left, its program, and the last solution.

    """
    rows, relaxed = Rows(graph, times), None
    while best.left and not best.done:
        latest = by_linear_program(rows, best, seed, aside=_aside(graph, best, None, seed))
        if latest is None or best.done:
            break
        relaxed = latest
        attempt(graph, Descent(graph, lambda: not best.left), relaxed.plan, best)
        more = rows.extend(relaxed.values)
        if graph.cells > LONG:
            _by_support(graph, rows, relaxed, best, seed)
        if not more:
            break
        if graph.cells > LONG and math.isfinite(best.objective):
            graph, relaxed = thinned(graph, relaxed.survivors(best.objective), best), None
            rows = Rows(graph, rows.times)
    return graph, rows, relaxed


def by_margins(
    graph: Graph, margins: list[Floats], times: list[int], best: Incumbent, seed: int
) -> Floats | None:
    """Look for a plan among the strategies that message passing holds for the best.

    Args:
        graph: what to choose from.
        margins: per node how much worse each strategy seems.
        times: times whose memory rows matter.
        best: takes the plan.
        seed: of the solver.

    Returns:
        Cost per byte of each memory row, if the program over these strategies was solved.

    """
    plan = graph.positions(best.choice) if best.choice is not None else None
    if plan is None:
        return None
    margins = [np.where(np.arange(len(m)) == s, 0.0, m) for m, s in zip(margins, plan, strict=True)]
    low, high = 0.0, max(float(m.max()) for m in margins)
    for _ in range(30):  # the largest margin at which the tables stay small
        middle = (low + high) / 2
        counts = [int(np.count_nonzero(m <= middle)) for m in margins]
        small = sum(counts[i] * counts[j] for i, j in graph.pairs) <= PROMISING
        low, high = (middle, high) if small else (low, middle)
    return _within(graph, [np.flatnonzero(m <= low) for m in margins], times, best, seed)


def by_regions(graph: Graph, times: list[int], best: Incumbent, seed: int, *, patience: int) -> None:
    """Improve the incumbent by solving regions with all of their strategies, the rest held.

    Args:
        graph: what to choose from.
        times: times whose memory rows matter.
        best: has a plan, and takes better ones.
        seed: of the regions and of the solver.
        patience: regions in vain after which to stop.

    """
    moves = Neighbourhood(graph, seed)
    vain = 0
    while vain < patience and best.left and not best.done and best.choice is not None:
        plan = graph.positions(best.choice)
        if plan is None:
            return
        before = best.objective
        free = set(moves.region(PROMISING, along=vain % 2 == 0))
        positions = [np.arange(n) if i in free else np.array([plan[i]]) for i, n in enumerate(graph.sizes)]
        _within(graph, positions, times, best, seed)
        vain = 0 if best.objective < before else vain + 1


def _within(
    graph: Graph, positions: list[Ints], times: list[int], best: Incumbent, seed: int
) -> Floats | None:
    """Find the best plan among some strategies: linear program, then integer program over what it uses.

    Returns:
        The linear program's prices on the memory rows of `graph`, or None without a solution.
    """
    part = presolve(graph.restrict(positions), expired=lambda: not best.left)
    if not best.left:
        return None
    rows = Rows(part, times)
    while best.left:
        relaxed = by_linear_program(rows, best, seed, part=True)
        if relaxed is None:
            return None
        if not rows.extend(relaxed.values):
            _by_support(part, rows, relaxed, best, seed)
            return _spread(relaxed.prices, part, graph)
    return None


def _spread(prices: Floats | None, part: Graph, graph: Graph) -> Floats | None:
    """Prices on the memory rows of a part as prices on all rows."""
    if prices is None or part.memory is None or graph.memory is None:
        return None
    out = np.zeros(len(graph.memory.room))
    out[np.searchsorted(graph.memory.times, part.memory.times)] = prices
    return out


def thinned(graph: Graph, positions: list[Ints] | None, best: Incumbent) -> Graph:
    """Keep only what a better plan may use; if a node has nothing left, no plan is better."""
    if positions is None or best.done or not best.left:
        return graph
    if any(len(p) == 0 for p in positions):
        best.exhausted("Every choice is forbidden")
        return graph
    return presolve(graph.restrict(positions), expired=lambda: not best.left)


def attempt(graph: Graph, descent: Descent, plan: list[int], best: Incumbent) -> None:
    """Offer a plan, brought within the memory and polished."""
    if graph.memory is None:
        best.offer(graph.original(plan), "message passing")
        return
    if best.offer(graph.original(plan), "message passing"):
        return
    mended = descent.repair(plan)
    if mended is not None:
        best.offer(graph.original(descent.polish(mended)), "repair")


def _mend(graph: Graph, best: Incumbent) -> Callable[[list[int]], list[int] | None]:
    descent = Descent(graph, lambda: not best.left)

    def mend(plan: list[int]) -> list[int] | None:
        mended = descent.repair(plan)
        return None if mended is None else descent.polish(mended)

    return mend


def _aside(graph: Graph, best: Incumbent, prices: Floats | None, seed: int) -> Callable[[], bool] | None:
    """Local search for the time that a program of this graph takes; None where that is short."""
    if graph.cells < LONG or best.choice is None:
        return None
    return Improver(graph, best, prices, seed, patience=10 * len(graph.unary)).step


def _search_on(graph: Graph, times: list[int], best: Incumbent, seed: int) -> None:
    """Search until the time is up, or nothing is found any more."""
    before = math.inf
    while best.objective < before and best.left and not best.done:
        before = best.objective
        improve(graph, best, None, seed, patience=100)
        by_regions(graph, times, best, seed, patience=2 + graph.cells // PROMISING)


def _by_support(graph: Graph, rows: Rows, relaxed: Relaxed, best: Incumbent, seed: int) -> None:
    """Solve the integer program over what the linear program's solution and the incumbent use."""
    plan = graph.positions(best.choice) if best.choice is not None else None
    part = presolve(graph.restrict(relaxed.support(plan or relaxed.plan)), expired=lambda: not best.left)
    if not best.left:
        return
    by_integer_program(Rows(part, rows.times), best, seed, _mend(part, best), part=True)


def _sharpened(graph: Graph, relaxed: Relaxed, best: Incumbent, seed: int) -> list[Ints] | None:
    """Combine the linear program's verdict on strategies with message passing at its prices."""
    if math.isinf(best.objective):
        return None
    if relaxed.prices is None and graph.memory is not None:
        return relaxed.survivors(best.objective)
    relaxation, descent = Relaxation(graph), Descent(graph, lambda: not best.left)
    if relaxed.prices is not None:
        relaxation.price(relaxed.prices)
    for _ in range(20):
        if not best.left:
            return None
        for plan in relaxation.round():
            attempt(graph, descent, plan, best)
    best.prove(min(relaxation.bound, best.objective), "message passing")
    improve(graph, best, relaxed.prices, seed, patience=12)
    positions, others = relaxed.survivors(best.objective), relaxation.survivors(best.objective)
    if others is None:
        return positions
    return [np.intersect1d(a, b) for a, b in zip(positions, others, strict=True)]
