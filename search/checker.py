"""An independent referee: recompute what a `Solution` claims, sharing no code with the solver.

It walks the problem's raw data in plain Python with exact rational arithmetic where sums are concerned, so
that a mistake in the solver's arrays, or in `Problem.objective`, cannot hide here too.
"""

import itertools
import math
from fractions import Fraction

from search.liveness import Intervals
from search.problem import Problem
from search.solution import Solution


class CheckError(AssertionError):
    """A solution says something that its problem contradicts."""


def check(problem: Problem, solution: Solution, *, relative: float = 1e-9) -> None:
    """Verify a solution against its problem.

    1. The choice has one index per node, each within the node's strategies.
    2. The objective is the sum of the chosen costs, and finite unless the solution says INFEASIBLE.
    3. The lower bound does not exceed the objective of a feasible plan, and the gap follows from the two.
    4. Peak usage and its time are those of the choice.
    5. Every time's usage is within the limit, unless the solution says INFEASIBLE; then one is not, or a
       forbidden strategy was picked.
    6. OPTIMAL claims a gap of zero.

    Args:
        problem: what was to be solved.
        solution: what came back.
        relative: relative tolerance for comparing sums.

    Raises:
        CheckError: naming every claim that is false, with the recomputed number.

    """
    wrong = _choice_faults(problem, solution)
    if not wrong:
        wrong = _claim_faults(problem, solution, relative)
    if wrong:
        raise CheckError("The solution contradicts its problem:\n  " + "\n  ".join(wrong))


def _choice_faults(problem: Problem, solution: Solution) -> list[str]:
    if len(solution.choice) != len(problem.costs):
        return [f"choice has {len(solution.choice)} entries for {len(problem.costs)} nodes."]
    return [
        f"node {i} ({problem.names[i]}) picks strategy {s} of {len(problem.costs[i])}."
        for i, s in enumerate(solution.choice)
        if not 0 <= s < len(problem.costs[i])
    ]


def _claim_faults(problem: Problem, solution: Solution, relative: float) -> list[str]:
    wrong: list[str] = []
    infeasible = solution.status.name == "INFEASIBLE"
    objective = _total(problem, solution.choice)
    if not _near(objective, solution.objective, relative):
        wrong.append(f"objective is {objective!r}, not {solution.objective!r}.")
    if math.isinf(objective) and not infeasible:
        wrong.append("a forbidden strategy or pair was picked.")
    slack = relative * max(abs(objective), abs(solution.lower_bound)) if math.isfinite(objective) else 0.0
    if not infeasible and solution.lower_bound > objective + slack:
        wrong.append(f"lower bound {solution.lower_bound!r} exceeds the objective {objective!r}.")
    if not infeasible and math.isfinite(solution.lower_bound) and math.isfinite(objective):
        gap = max(0.0, objective - solution.lower_bound) / max(abs(objective), 1e-300)
        if abs(gap - solution.gap) > relative + 1e-6 * gap:
            wrong.append(f"gap is {gap!r}, not {solution.gap!r}.")
    if solution.status.name == "OPTIMAL" and solution.gap != 0:
        wrong.append(f"it claims OPTIMAL with a gap of {solution.gap!r}.")
    return wrong + _usage_faults(problem, solution, relative, infeasible, math.isinf(objective))


def _usage_faults(
    problem: Problem, solution: Solution, relative: float, infeasible: bool, forbidden: bool
) -> list[str]:
    wrong: list[str] = []
    usage = _usage_by_time(problem, solution.choice)
    peak = max(usage, default=0.0)
    if not _near(peak, solution.peak_usage, relative):
        wrong.append(f"peak usage is {peak!r} bytes, not {solution.peak_usage!r}.")
    if not usage:
        if solution.peak_time is not None:
            wrong.append(f"peak time {solution.peak_time} is claimed, but the problem has no times.")
    elif solution.peak_time is None or not 0 <= solution.peak_time < len(usage):
        wrong.append(f"peak time {solution.peak_time} is not one of the {len(usage)} times.")
    elif not _near(usage[solution.peak_time], peak, relative):
        wrong.append(
            f"time {solution.peak_time} uses {usage[solution.peak_time]!r} bytes, the peak is {peak!r}."
        )
    limit = problem.usage_limit
    over = (
        []
        if limit is None
        else [t for t, used in enumerate(usage) if used > limit + relative * max(abs(limit), 1.0)]
    )
    if over and not infeasible:
        first = over[0]
        wrong.append(f"{len(over)} times exceed {limit!r} bytes, first time {first} with {usage[first]!r}.")
    if infeasible and not over and not forbidden:
        wrong.append("it claims INFEASIBLE, but its own choice is permitted and fits.")
    return wrong


def _total(problem: Problem, choice: tuple[int, ...]) -> float:
    parts = [float(problem.costs[i][s]) for i, s in enumerate(choice)]
    for e, (i, j) in enumerate(problem.edges):
        parts.append(float(problem.edge_costs[e][choice[i]][choice[j]]))
    if any(math.isinf(x) for x in parts):
        return math.inf
    return float(sum((Fraction(x) for x in parts), Fraction(0)))


def _usage_by_time(problem: Problem, choice: tuple[int, ...]) -> list[float]:
    times = 0
    if problem.fixed_usage is not None:
        times = len(problem.fixed_usage)
    for table in (problem.live, problem.edge_live):
        if table is not None:
            times = table.shape[0]
    usage = [0.0] * times
    if problem.fixed_usage is not None:
        usage = [float(x) for x in problem.fixed_usage]
    if problem.live is not None and problem.usages is not None:
        used = [float(u[s]) for u, s in zip(problem.usages, choice, strict=True)]
        if isinstance(problem.live, Intervals):
            spans = zip(problem.live.first.tolist(), problem.live.last.tolist(), strict=True)
            for t, more in enumerate(_over_time(list(spans), used, times)):
                usage[t] += more
        else:
            rows = problem.live.tocoo()
            for t, i, count in zip(rows.row.tolist(), rows.col.tolist(), rows.data.tolist(), strict=True):
                usage[t] += count * used[i]
    if problem.edge_live is not None:
        rows = problem.edge_live.tocoo()
        for t, e, count in zip(rows.row.tolist(), rows.col.tolist(), rows.data.tolist(), strict=True):
            if e in problem.edge_usages:
                i, j = problem.edges[e]
                usage[t] += count * float(problem.edge_usages[e][choice[i]][choice[j]])
    return usage


def _over_time(spans: list[tuple[int, int]], used: list[float], times: int) -> list[float]:
    """Add up what lives at each time, exactly."""
    steps = [Fraction(0)] * (times + 1)
    for (first, last), size in zip(spans, used, strict=True):
        steps[first] += Fraction(size)
        steps[last] -= Fraction(size)
    return [float(total) for total in itertools.accumulate(steps[:times])]


def _near(a: float, b: float, relative: float) -> bool:
    return a == b or abs(a - b) <= relative * max(abs(a), abs(b))
