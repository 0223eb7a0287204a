"""Local search by regions: plans whose nodes can only change together."""

import numpy as np

import search
from search.graph import from_problem
from search.improve import improve
from search.incumbent import Incumbent


def in_step(count: int) -> search.Problem:
    """A row of nodes that must all agree; that all choose the second strategy is cheapest."""
    agree = np.where(np.eye(3, dtype=bool), 0.0, np.inf)
    return search.Problem(
        costs=(np.array([2.0, 1.0, 3.0]),) * count,
        edges=tuple((i, i + 1) for i in range(count - 1)),
        edge_costs=(agree,) * (count - 1),
    )


def test_a_detour_over_forbidden_plans_is_taken() -> None:
    problem = in_step(12)
    best = Incumbent(problem, 10.0, 0.0, None)
    best.offer((0,) * 12, "start")
    improve(from_problem(problem), best, None, 0, patience=12)
    assert best.choice == (1,) * 12 and best.objective == 12.0
