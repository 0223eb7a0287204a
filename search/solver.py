"""`solve`: the main path, from a problem to a choice with its certificate.

Problem -> Graph -> presolve -> elimination without memory -> (fits? done)
-> integer program with memory rows added where a plan breaks them -> Solution
"""

from collections.abc import Callable

import numpy as np

from search import backend, elimination
from search.graph import Graph, from_problem
from search.incumbent import Incumbent
from search.presolve import presolve
from search.problem import Problem
from search.program import build, with_memory
from search.solution import Progress, Solution

TABLE_CAP = 1 << 22  # entries of the largest table that elimination may build


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
    graph = presolve(from_problem(problem))
    if _without_memory(graph, best) or best.done:
        return
    _integer(graph, best, seed)
    if best.choice is None and graph.memory is not None and best.left:
        _least_overshoot(graph, best, seed)


def _without_memory(graph: Graph, best: Incumbent) -> bool:
    """Minimise while ignoring memory; whether that settles the problem."""
    order = elimination.plan(graph.sizes, graph.pairs, cap=TABLE_CAP)
    if order is None:
        return False
    value, choice = order.minimum(graph.unary, graph.pairs)
    if np.isinf(value):
        best.impossible = "No choice avoids the forbidden pairs"
        return True
    best.prove(value + graph.constant, "elimination")
    return best.offer(graph.original(choice), "elimination")


def _integer(graph: Graph, best: Incumbent, seed: int) -> None:
    """Solve the integer program, adding the memory rows that its plans break, until a plan fits."""
    base = build(graph)
    rows: list[int] = []
    integer = False
    while best.left:
        program = with_memory(base, graph, rows) if rows else base
        answer = backend.run(program, integer=integer, seconds=best.left, gap=best.target, seed=seed)
        if answer.infeasible:
            best.impossible = "No permitted choice fits the memory" if rows else "Every choice is forbidden"
            return
        best.prove(answer.bound + program.constant, "integer program" if integer else "linear program")
        if answer.values is None:
            return
        choice = program.choice(answer.values)
        best.offer(graph.original(choice), "integer program")
        if best.done or (integer and not answer.complete):
            return
        broken = _broken(graph, choice, rows)
        rows += broken
        if integer and not broken:
            return
        integer = integer or not broken


def _broken(graph: Graph, choice: list[int], rows: list[int]) -> list[int]:
    if graph.memory is None:
        return []
    excess = graph.memory.excess(choice)
    known = set(rows)
    worst = [int(r) for r in np.argsort(-excess, kind="stable") if excess[r] > graph.memory.tolerance]
    return [r for r in worst if r not in known][:16]


def _least_overshoot(graph: Graph, best: Incumbent, seed: int) -> None:
    """With nothing that fits, find the choice whose peak is least above the limit."""
    base = build(graph)
    assert graph.memory is not None
    program = with_memory(base, graph, range(len(graph.memory.room)), soft=True)
    answer = backend.run(program, integer=True, seconds=best.left, seed=seed)
    if answer.values is not None:
        best.offer(graph.original(program.choice(answer.values)), "least overshoot")
