"""Known answers, limits, interruption and the checker."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

import search
from search import __main__ as cli
from search import iopddl

# five nodes in the contest's format; its costs and usages are literals, so the answers below are arithmetic
INSTANCE = {
    "problem": {
        "name": "small",
        "nodes": {
            "intervals": [[30, 70], [40, 70], [50, 120], [110, 140], [110, 150]],
            "costs": [[15], [55, 65], [25, 45, 35], [85, 75], [95]],
            "usages": [[10], [25, 25], [15, 20, 15], [10, 10], [15]],
        },
        "edges": {
            "nodes": [[0, 1], [0, 2], [1, 3], [2, 4], [3, 4]],
            "costs": [[30, 40], [50, 10, 40], [90, 10, 20, 80], [60, 20, 30], [70, 60]],
        },
        "usage_limit": 50,
    }
}


def chain(n: int, *, size: int = 3) -> search.Problem:
    """Make a chain whose neighbours like to differ, and whose cheap strategies are the large ones."""
    table = np.eye(size)
    return search.Problem(
        costs=tuple(np.arange(size, dtype=float) for _ in range(n)),
        edges=tuple((i, i + 1) for i in range(n - 1)),
        edge_costs=(table,) * (n - 1),
        usages=tuple(np.arange(size, 0, -1, dtype=float) for _ in range(n)),
        live=sp.csr_array(np.ones((1, n))),
        usage_limit=float(2 * n),
    )


def test_no_nodes() -> None:
    problem = search.Problem(costs=())
    solution = search.solve(problem)
    search.check(problem, solution)
    assert solution.choice == ()
    assert solution.objective == 0.0
    assert solution.status is search.Status.OPTIMAL


def test_single_strategies() -> None:
    problem = search.Problem(
        costs=(np.array([3.0]), np.array([4.0])), edges=((1, 0),), edge_costs=(np.array([[5.0]]),)
    )
    solution = search.solve(problem)
    search.check(problem, solution)
    assert solution.objective == 3.0 + 4.0 + 5.0


def test_a_star_of_single_strategies_is_wider_than_a_table() -> None:
    leaves = range(1, 80)
    problem = search.Problem(
        costs=(np.zeros(1),) * 80,
        edges=tuple((0, leaf) for leaf in leaves),
        edge_costs=(np.ones((1, 1)),) * len(leaves),
    )
    assert search.solve(problem).objective == 79


def test_contest_instance() -> None:
    problem = iopddl.from_document(INSTANCE)
    solution = search.solve(problem)
    search.check(problem, solution)
    # strategies 0 0 2 1 0: nodes, then edges in order
    assert solution.choice == (0, 0, 2, 1, 0)
    assert solution.objective == (15 + 55 + 35 + 75 + 95) + (30 + 40 + 10 + 30 + 60)
    assert solution.peak_usage == 10 + 25 + 15


def test_contest_instance_that_does_not_fit() -> None:
    document = json.loads(json.dumps(INSTANCE))
    document["problem"]["usage_limit"] = 49
    problem = iopddl.from_document(document)
    solution = search.solve(problem)
    search.check(problem, solution)
    assert solution.status is search.Status.INFEASIBLE
    assert solution.peak_usage == 10 + 25 + 15
    assert "1 (2.04%) above the limit of 49" in solution.reason
    assert "at time 0" in solution.reason


def test_half_open_intervals() -> None:
    # node 1 starts exactly when node 0 ends: they never share memory; node 2 is never live
    live = iopddl.live_times(np.array([[0, 5], [5, 9], [4, 4]])).counts()
    assert live.toarray().tolist() == [[1, 0, 0], [0, 1, 0]]


def test_memory_forces_the_dearer_strategy() -> None:
    problem = search.Problem(
        costs=(np.array([1.0, 3.0]), np.array([1.0, 2.0])),
        usages=(np.array([10.0, 4.0]), np.array([10.0, 4.0])),
        live=sp.csr_array(np.array([[1.0, 1.0], [3.0, 0.0]])),
        fixed_usage=np.array([2.0, 0.0]),
        usage_limit=30.0,
    )
    assert search.solve(problem).choice == (0, 0)  # 10 + 10 + 2 and 3 * 10
    tight = dataclasses.replace(problem, usage_limit=16.0)
    assert search.solve(tight).choice == (1, 0)  # 4 + 10 + 2 and 3 * 4
    tighter = dataclasses.replace(problem, usage_limit=15.0)
    assert search.solve(tighter).choice == (1, 1)


def test_a_buffer_can_be_what_does_not_fit() -> None:
    problem = search.Problem(
        costs=(np.array([0.0, 1.0]), np.array([0.0, 1.0])),
        edges=((1, 0),),
        edge_costs=(np.zeros((2, 2)),),
        edge_usages={0: np.array([[8.0, 0.0], [8.0, 0.0]])},
        edge_live=sp.csr_array(np.ones((1, 1))),
        usage_limit=7.0,
    )
    solution = search.solve(problem)
    search.check(problem, solution)
    assert solution.choice == (1, 0)


@pytest.mark.parametrize("n", [1, 2, 9])
def test_ties_go_to_the_lower_index(n: int) -> None:
    agree = np.where(np.eye(4) > 0, 0.0, 1.0)
    problem = search.Problem(
        costs=tuple(np.ones(4) for _ in range(n)),
        edges=tuple((i, j) for i in range(n) for j in range(i)),
        edge_costs=(agree,) * (n * (n - 1) // 2),
    )
    assert search.solve(problem).choice == (0,) * n


def test_contradictory_pairs_are_infeasible() -> None:
    problem = search.Problem(
        costs=(np.zeros(2), np.zeros(2)), edges=((0, 1),), edge_costs=(np.full((2, 2), np.inf),)
    )
    solution = search.solve(problem)
    search.check(problem, solution)
    assert solution.status is search.Status.INFEASIBLE
    assert "forbidden" in solution.reason


def hard(n: int = 60) -> search.Problem:
    """Make a frustrated random graph under memory: no proof within a fraction of a second."""
    rng = np.random.default_rng(0)
    edges = tuple((i, j) for i in range(n) for j in range(i + 1, n) if rng.random() < 0.2)
    return search.Problem(
        costs=tuple(rng.random(8) for _ in range(n)),
        edges=edges,
        edge_costs=tuple(rng.random((8, 8)) for _ in edges),
        usages=tuple(rng.random(8) for _ in range(n)),
        live=sp.csr_array(rng.integers(0, 2, (10, n))),
        usage_limit=0.2 * n,
    )


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_time_limit_returns_the_best_so_far(seconds: float) -> None:
    problem = hard()
    solution = search.solve(problem, time_limit_seconds=seconds)
    search.check(problem, solution)
    assert solution.seconds < seconds + 2.0
    if seconds:
        assert solution.status is search.Status.TIME_LIMIT
        assert 0 < solution.gap < 1


def test_gap_stops_early() -> None:
    problem = hard()
    solution = search.solve(problem, gap=0.5)
    search.check(problem, solution)
    assert solution.status is search.Status.GAP
    assert 0 < solution.gap <= 0.5


def test_interrupt_returns_the_best_so_far() -> None:
    def stop(news: search.Progress) -> None:
        if news.objective < float("inf"):
            raise KeyboardInterrupt

    problem = hard()
    solution = search.solve(problem, progress=stop)
    search.check(problem, solution)
    assert solution.status is search.Status.INTERRUPTED
    assert "Interrupted after" in solution.reason


def test_progress_is_monotone() -> None:
    news: list[search.Progress] = []
    search.solve(chain(6), progress=news.append)
    assert news
    assert all(a.objective >= b.objective for a, b in zip(news, news[1:], strict=False))
    assert all(a.lower_bound <= b.lower_bound for a, b in zip(news, news[1:], strict=False))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"choice": (0, 1)}, "choice has 2 entries for 4 nodes"),
        ({"choice": (0, 1, 0, 7)}, "node 3 (node3) picks strategy 7 of 3"),
        ({"choice": (2, 2, 2, 2)}, "objective is 11.0"),
        ({"choice": (0, 0, 0, 0)}, "1 times exceed 8.0 bytes, first time 0 with 12.0"),
        ({"objective": 1.0}, "not 1.0"),
        ({"lower_bound": 99.0}, "lower bound 99.0 exceeds the objective"),
        ({"lower_bound": 1.0}, "gap is"),
        ({"gap": 0.5}, "OPTIMAL with a gap of 0.5"),
        ({"peak_usage": 7.5}, "not 7.5"),
        ({"peak_time": 3}, "peak time 3 is not one of the 1 times"),
        ({"status": search.Status.INFEASIBLE}, "its own choice is permitted and fits"),
    ],
)
def test_checker_catches_tampering(change: dict[str, object], said: str) -> None:
    problem = chain(4)
    solution = search.solve(problem)
    search.check(problem, solution)
    with pytest.raises(search.CheckError) as error:
        search.check(problem, dataclasses.replace(solution, **change))
    assert said in str(error.value)


def test_faults_are_listed_together() -> None:
    with pytest.raises(search.ProblemError) as error:
        search.Problem(
            costs=(np.array([np.inf, np.inf]), np.array([np.nan])), names=("embed", "dense"), edges=()
        )
    assert "node 0 (embed): all of its 2 strategies are forbidden; permit at least one." in str(error.value)
    assert "node 1 (dense): costs contains NaN or -inf." in str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"edge_costs": (np.zeros((2, 2)),) * 3},
            "costs has shape (2, 2); its nodes' strategies make",
        ),
        ({"edges": ((0, 0), (1, 2), (2, 3))}, "edge 0 joins nodes 0 and 0"),
        ({"names": ("a",)}, "names has 1 entries for 4 nodes"),
        ({"live": None}, "usages and live go together"),
        ({"live": sp.csr_array((2, 9))}, "live has shape (2, 9); (2, 4) is needed"),
        ({"usages": (np.ones(2),) * 4}, "usages has shape (2,), costs (3,)"),
        ({"edge_usages": {0: np.ones((3, 3))}}, "edge_usages and edge_live go together"),
        ({"fixed_usage": np.ones(5)}, "fixed_usage has shape (5,); (1,) is needed"),
        ({"usage_limit": float("nan")}, "usage_limit is NaN"),
    ],
)
def test_contradictory_problems_are_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(search.ProblemError) as error:
        dataclasses.replace(chain(4), **change)
    assert said in str(error.value)


def test_problem_and_solution_print() -> None:
    problem = chain(4)
    assert str(problem) == "4 nodes, 12 strategies, 3 edges, at most 8 bytes at 1 time"
    text = str(search.solve(problem))
    assert text.startswith("OPTIMAL: objective ")
    assert "proven optimal" in text


def test_command_line_writes_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "small.json", tmp_path / "plan.json"
    source.write_text(json.dumps(INSTANCE))
    assert cli.main([str(source), "--time-limit", "10", "--out", str(target)]) == 0
    plan = json.loads(target.read_text())
    assert plan["choice"] == [0, 0, 2, 1, 0]
    assert plan["objective"] == plan["lower_bound"] == 445.0
    assert plan["peak_usage"] == 50.0
    printed = capsys.readouterr()
    assert printed.out == printed.err == ""
    assert cli.main([str(source)]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "OPTIMAL"


def test_command_line_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([str(tmp_path / "absent.json")]) == 2
    assert "absent.json" in capsys.readouterr().err.replace("\n", "")
    broken = tmp_path / "broken.json"
    broken.write_text('{"problem": {"nodes": {}}}')
    assert cli.main([str(broken)]) == 2
    tight = json.loads(json.dumps(INSTANCE))
    tight["problem"]["usage_limit"] = 1
    source = tmp_path / "tight.json"
    source.write_text(json.dumps(tight))
    assert cli.main([str(source)]) == 1


def test_layer_imports_no_jax() -> None:
    code = (
        "import sys, search, search.__main__;"
        "bad = {'jax', 'autoshard', 'cost_models'} & set(sys.modules);"
        "sys.exit(f'search imported {sorted(bad)}' if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(search.__file__).parents[1])
