"""The solver and each of its stages against brute force, on random problems small enough to enumerate."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import search
from search import elimination
from search.backend import run
from search.contract import contract
from search.graph import from_problem
from search.liveness import Intervals
from search.messages import Messages
from search.presolve import presolve
from search.program import build, with_memory
from search.relaxation import Relaxation


def random_problem(
    seed: int, *, memory: bool, buffers: bool = False, whole: bool = True, tied: bool = False
) -> search.Problem:
    """One to six nodes of one to three strategies; some forbidden, parallel edges, repeated rows.

    Where `tied`, half of the edges permit one answer to each strategy, and each node lives once.
    """
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 7))
    sizes = rng.integers(1, 4, n)
    noise = 0.0 if whole else 1.0
    costs = []
    for size in sizes:
        cost = rng.integers(0, 6, size) + noise * rng.random(size)
        cost[1:][rng.random(size - 1) < 0.1] = np.inf
        costs.append(cost)
    edges = [(i, j) for i in range(n) for j in range(n) if i != j and rng.random() < 0.35]
    tables = []
    for i, j in edges:
        table = rng.integers(0, 5, (sizes[i], sizes[j])) + noise * rng.random((sizes[i], sizes[j]))
        table[rng.random(table.shape) < 0.1] = np.inf
        tables.append(table[rng.integers(0, sizes[i], sizes[i])])
        if tied and rng.random() < 0.5:
            answers = (np.arange(sizes[i]) + rng.integers(0, 3)) % sizes[j]
            tables[-1] = np.where(np.arange(sizes[j]) == answers[:, None], table, np.inf)
    if not memory:
        return search.Problem(costs=tuple(costs), edges=tuple(edges), edge_costs=tuple(tables))
    times = int(rng.integers(1, 5))
    used = {}
    if buffers:
        used = {e: rng.integers(0, 6, t.shape) for e, t in enumerate(tables) if rng.random() < 0.5}
    live: sp.csr_array | Intervals = sp.csr_array(rng.integers(0, 3, (times, n)))
    if tied:
        first = rng.integers(0, times, n)
        live = Intervals(first=first, last=rng.integers(first, times + 1), num_times=times)
    return search.Problem(
        costs=tuple(costs),
        edges=tuple(edges),
        edge_costs=tuple(tables),
        usages=tuple(rng.integers(0, 8, size) for size in sizes),
        live=live,
        edge_usages=used,
        edge_live=sp.csr_array(rng.integers(0, 2, (times, len(edges)))) if used else None,
        usage_limit=float(rng.integers(3, 30)),
        fixed_usage=rng.integers(0, 4, times),
    )


def choices(problem: search.Problem) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(len(c)) for c in problem.costs))


def fits(problem: search.Problem, choice: tuple[int, ...]) -> bool:
    return problem.usage_limit is None or bool((problem.usage(choice) <= problem.usage_limit).all())


def brute_force(problem: search.Problem) -> float:
    return min((problem.objective(c) for c in choices(problem) if fits(problem, c)), default=math.inf)


def least_peak(problem: search.Problem) -> float:
    permitted = [c for c in choices(problem) if math.isfinite(problem.objective(c))]
    return min((float(problem.usage(c).max()) for c in permitted), default=math.inf)


KINDS = {
    "free": {"memory": False},
    "memory": {"memory": True},
    "buffers": {"memory": True, "buffers": True},
    "real": {"memory": True, "buffers": True, "whole": False},
    "tied": {"memory": True, "buffers": True, "tied": True},
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_agrees_with_brute_force(kind: str, seed: int) -> None:
    problem = random_problem(seed, **KINDS[kind])
    solution = search.solve(problem)
    search.check(problem, solution)
    best = brute_force(problem)
    if math.isinf(best):
        assert solution.status is search.Status.INFEASIBLE
        peak = least_peak(problem) if kind != "free" else math.inf
        assert math.isinf(peak) or solution.peak_usage == pytest.approx(peak, rel=1e-6)
        return
    assert solution.status is search.Status.OPTIMAL
    assert solution.objective == pytest.approx(best, rel=1e-9, abs=1e-9)
    assert solution.lower_bound == solution.objective
    assert solution.gap == 0.0


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_single_node_can_move_to_a_lower_index_at_equal_cost(kind: str, seed: int) -> None:
    problem = random_problem(seed, **KINDS[kind])
    solution = search.solve(problem)
    if solution.status is not search.Status.OPTIMAL:
        return
    for node, strategy in enumerate(solution.choice):
        for lower in range(strategy):
            other = (*solution.choice[:node], lower, *solution.choice[node + 1 :])
            assert not fits(problem, other) or problem.objective(other) > solution.objective


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_same_input_same_answer(seed: int) -> None:
    problem = random_problem(seed, memory=True, buffers=True)
    first, second = search.solve(problem), search.solve(problem)
    assert first.choice == second.choice
    assert first.lower_bound == second.lower_bound


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "free"])
@settings(max_examples=80, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_merged_nodes_cost_and_use_what_their_members_do(kind: str, seed: int) -> None:
    problem = random_problem(seed, **KINDS[kind])
    graph = contract(from_problem(problem))
    assert graph.memory is not None and problem.usage_limit is not None
    for choice in itertools.product(*(range(size) for size in graph.sizes)):
        original = graph.original(choice)
        assert graph.cost(choice) == pytest.approx(problem.objective(original))
        assert graph.memory.excess(choice) == pytest.approx(problem.usage(original) - problem.usage_limit)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_presolve_keeps_an_optimal_choice(kind: str, seed: int) -> None:
    problem = random_problem(seed, **KINDS[kind])
    before = from_problem(problem)
    after = presolve(before)
    assert sum(after.sizes) <= sum(before.sizes)
    inside = itertools.product(*(range(size) for size in after.sizes))
    best = min((after.cost(c) for c in inside if after.fits(c)), default=math.inf)
    assert best == pytest.approx(brute_force(problem), abs=1e-9)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_elimination_is_exact_without_memory(seed: int) -> None:
    problem = random_problem(seed, memory=False)
    graph = from_problem(problem)
    order = elimination.plan(graph.sizes, graph.pairs, cap=1 << 20)
    assert order is not None
    value, choice = order.minimum(graph.unary, graph.pairs)
    assert value == pytest.approx(brute_force(problem))
    assert graph.cost(choice) == value or value == pytest.approx(graph.cost(choice))


def test_elimination_refuses_what_is_too_wide() -> None:
    clique = list(itertools.combinations(range(5), 2))
    assert elimination.plan([4] * 5, clique, cap=4**5 - 1) is None
    order = elimination.plan([4] * 5, clique, cap=4**5)
    assert order is not None
    assert order.cells == 4**5 + 4**4 + 4**3 + 4**2 + 4


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_message_passing_bounds_from_below_and_rises(seed: int) -> None:
    problem = random_problem(seed, memory=False, whole=False)
    graph = from_problem(problem)
    best = brute_force(problem)
    messages = Messages(graph)
    bounds = [messages.sweep(graph.unary, forward=k % 2 == 0)[0] for k in range(20)]
    if math.isinf(best):
        return
    assert max(bounds) <= best + 1e-9
    assert all(later >= earlier - 1e-9 for earlier, later in itertools.pairwise(bounds[1:]))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_margins_never_rule_out_an_optimal_choice(kind: str, seed: int) -> None:
    problem = random_problem(seed, **KINDS[kind])
    graph = from_problem(problem)
    best = brute_force(problem)
    if math.isinf(best):
        return
    optimal = [c for c in choices(problem) if fits(problem, c) and problem.objective(c) <= best + 1e-12]
    relaxation = Relaxation(graph)
    for _ in range(8):
        plan = relaxation.round()[-1]
        assert relaxation.bound <= best + 1e-9
        kept = relaxation.survivors(best)
        assert kept is not None
        for choice in optimal:
            positions = graph.positions(choice)
            assert positions is not None
            assert all(p in k for p, k in zip(positions, kept, strict=True))
        relaxation.step(plan, best, 1.0)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_integer_program_alone_is_exact(kind: str, seed: int) -> None:
    problem = random_problem(seed, **KINDS[kind])
    graph = from_problem(problem)
    program = build(graph)
    if graph.memory is not None:
        program = with_memory(program, graph, range(len(graph.memory.room)))
    linear = run(program, integer=False, seconds=10.0)
    whole = run(program, integer=True, seconds=10.0)
    best = brute_force(problem)
    if math.isinf(best):
        assert whole.infeasible
        return
    assert linear.bound + program.constant <= best + 1e-6
    assert whole.objective + program.constant == pytest.approx(best, abs=1e-6)
    assert whole.values is not None
    assert graph.cost(program.choice(whole.values)) == pytest.approx(best, abs=1e-6)
