"""The search's notebook: best plan so far, best bound so far, time left, news to the caller."""

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from search.problem import Problem
from search.solution import Progress, Solution, Status, fits, relative_gap

PROVEN = 1e-9  # relative rounding error up to which a plan equals its bound


class Incumbent:
    """Collects plans and bounds during one search; the only mutable thing in it."""

    def __init__(
        self, problem: Problem, seconds: float, gap: float, progress: Callable[[Progress], None] | None
    ) -> None:
        """Start the clock.

        Args:
            problem: what is searched.
            seconds: time limit.
            gap: relative gap at which the search is done.
            progress: called with every improvement.

        """
        self.problem = problem
        self.target = max(gap, 0.0)
        self.choice: tuple[int, ...] | None = None
        self.objective = math.inf
        self.lower_bound = -math.inf
        self.fallback: tuple[int, ...] = tuple(int(np.argmin(c)) for c in problem.costs)
        self.overshoot = (math.inf, math.inf)
        self.impossible = ""
        self._progress = progress
        self._start = time.perf_counter()
        self._seconds = seconds

    @property
    def elapsed(self) -> float:
        """Seconds since the search began."""
        return time.perf_counter() - self._start

    @property
    def left(self) -> float:
        """Seconds until the time limit, at least 0."""
        return max(0.0, self._seconds - self.elapsed)

    @property
    def done(self) -> bool:
        """Whether the plan is as close to the bound as was asked, or there can be none."""
        if self.impossible:
            return True
        return relative_gap(self.objective, self.lower_bound) <= max(self.target, PROVEN)

    def offer(self, choice: Sequence[int], stage: str) -> bool:
        """Take a choice (in the problem's indices) if it is the best so far.

        Args:
            choice: one strategy per node, feasible or not.
            stage: who found it.

        Returns:
            Whether it is feasible.

        """
        choice = tuple(int(s) for s in choice)
        objective = self.problem.objective(choice)
        peak = float(self.problem.usage(choice).max(initial=0.0))
        feasible = math.isfinite(objective) and fits(self.problem, peak)
        if not feasible:
            limit = self.problem.usage_limit
            over = 0.0 if limit is None else max(0.0, peak - limit)
            key = (math.inf, over) if math.isinf(objective) else (over, objective)
            if key < self.overshoot:
                self.fallback, self.overshoot = choice, key
            return False
        if objective < self.objective or (objective == self.objective and choice < (self.choice or choice)):
            self.choice, self.objective = choice, objective
            self.report(stage)
        return True

    def prefer(self, choice: Sequence[int]) -> bool:
        """Replace the plan by one that costs the same (relative 1e-12) and fits; whether it did."""
        choice = tuple(int(s) for s in choice)
        objective = self.problem.objective(choice)
        peak = float(self.problem.usage(choice).max(initial=0.0))
        if objective > self.objective + 1e-12 * abs(self.objective) or not fits(self.problem, peak):
            return False
        self.choice, self.objective = choice, objective
        return True

    def prove(self, bound: float, stage: str) -> None:
        """Take a lower bound if it is better than the last."""
        if bound > self.lower_bound:
            self.lower_bound = bound
            self.report(stage)

    def exhausted(self, why: str) -> None:
        """Conclude that nothing cheaper than the present plan exists; without one, that nothing does."""
        if self.choice is None:
            self.impossible = why
        else:
            self.prove(self.objective, "exhausted")

    def report(self, stage: str) -> None:
        """Tell the caller where the search stands."""
        if self._progress is not None:
            news = Progress(
                stage=stage,
                objective=self.objective,
                lower_bound=min(self.lower_bound, self.objective),
                seconds=self.elapsed,
            )
            self._progress(news)

    def solution(self, *, interrupted: bool) -> Solution:
        """Close the search with the best plan and the reason for stopping."""
        found = self.choice is not None and not self.impossible
        choice = self.choice if self.choice is not None else self.fallback
        objective = self.problem.objective(choice)
        usage = self.problem.usage(choice)
        peak_time = int(usage.argmax()) if len(usage) else None
        peak = float(usage[peak_time]) if peak_time is not None else 0.0
        bound = min(self.lower_bound, objective)
        gap = relative_gap(objective, bound)
        if gap <= PROVEN and found:
            bound, gap = objective, 0.0
        status, reason = self._verdict(found, gap, peak, peak_time, interrupted)
        return Solution(
            choice=choice,
            objective=objective,
            lower_bound=bound,
            gap=gap if found else math.inf,
            peak_usage=peak,
            peak_time=peak_time,
            status=status,
            reason=reason,
            seconds=self.elapsed,
        )

    def _verdict(
        self, found: bool, gap: float, peak: float, peak_time: int | None, interrupted: bool
    ) -> tuple[Status, str]:
        if not found:
            limit = self.problem.usage_limit
            if limit is not None and peak_time is not None and not fits(self.problem, peak):
                where = (
                    f"the least peak found is {peak:.6g} bytes at time {peak_time}, {peak - limit:.6g} "
                    f"({(peak - limit) / max(abs(limit), 1.0):.2%}) above the limit of {limit:.6g}"
                )
            else:
                where = "every choice found uses a forbidden pair of strategies"
            why = self.impossible or f"no permitted choice was found in {self.elapsed:.2f} s"
            return Status.INFEASIBLE, f"{why}; {where}."
        if gap == 0.0:
            return Status.OPTIMAL, f"Proven optimal in {self.elapsed:.2f} s."
        if interrupted:
            return Status.INTERRUPTED, f"Interrupted after {self.elapsed:.2f} s with a gap of {gap:.3%}."
        if gap <= self.target:
            return Status.GAP, f"Within the requested gap of {self.target:.3%} after {self.elapsed:.2f} s."
        return Status.TIME_LIMIT, f"Stopped at the time limit, {self.elapsed:.2f} s, with a gap of {gap:.3%}."
