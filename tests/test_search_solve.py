"""`search.solve` against brute force."""

import numpy as np
import pytest

import search


def test_two_nodes() -> None:
    problem = search.Problem(
        costs=(np.array([1.0, 2.0]), np.array([5.0, 0.0])),
        edges=((0, 1),),
        edge_costs=(np.array([[0.0, 9.0], [9.0, 0.0]]),),
    )
    solution = search.solve(problem)
    search.check(problem, solution)
    assert solution.choice == (1, 1)
    assert solution.objective == pytest.approx(2.0 + 0.0 + 0.0)
