"""What a search answers: the choice, how good it provably is, what it uses, and why it stopped."""

import enum
from dataclasses import dataclass

from search.problem import Problem


class Status(enum.Enum):
    """Why the search stopped."""

    OPTIMAL = "optimal"
    GAP = "within the requested gap"
    TIME_LIMIT = "time limit"
    INTERRUPTED = "interrupted"
    INFEASIBLE = "infeasible"


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A choice with its certificate.

    Args:
        choice: one strategy index per node.
        objective: total cost of `choice`, in the problem's unit; `inf` if it had to pick something forbidden.
        lower_bound: no permitted plan costs less than this (up to rounding, relative 1e-9).
        gap: `(objective - lower_bound) / |objective|`, 0 when proven optimal, `inf` without a plan.
        peak_usage: largest bytes in use over time; 0 without memory.
        peak_time: the first time at which the peak occurs; None without memory.
        status: why the search stopped.
        reason: the same as a sentence with numbers.
        seconds: wall-clock time of the search.

    """

    choice: tuple[int, ...]
    objective: float
    lower_bound: float
    gap: float
    peak_usage: float
    peak_time: int | None
    status: Status
    reason: str
    seconds: float

    def __str__(self) -> str:
        """One line: cost, certificate, peak, time."""
        bound = "proven optimal" if self.gap == 0 else f"gap {self.gap:.3%}"
        peak = (
            "" if self.peak_time is None else f", peak {self.peak_usage:.6g} bytes at time {self.peak_time}"
        )
        return f"{self.status.name}: objective {self.objective:.9g} ({bound}){peak}, {self.seconds:.2f} s"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A line of news during a search: the best plan so far (`inf` before the first) and its bound."""

    stage: str
    objective: float
    lower_bound: float
    seconds: float

    @property
    def gap(self) -> float:
        """Relative distance between plan and bound."""
        return relative_gap(self.objective, self.lower_bound)

    def __str__(self) -> str:
        """One line."""
        return (
            f"{self.seconds:7.2f} s  {self.stage:<28} plan {self.objective:.9g}  bound {self.lower_bound:.9g}"
        )


def relative_gap(objective: float, lower_bound: float) -> float:
    """`(objective - lower_bound) / |objective|`, clipped at 0; `inf` where either is infinite.

    >>> relative_gap(10.0, 9.0)
    0.1
    >>> relative_gap(5.0, 5.0)
    0.0
    """
    if objective <= lower_bound:
        return 0.0
    if objective in (float("inf"), float("-inf")) or lower_bound == float("-inf"):
        return float("inf")
    return (objective - lower_bound) / max(abs(objective), 1e-300)


def fits(problem: Problem, peak_usage: float) -> bool:
    """Whether a peak is within the limit, with a relative rounding tolerance of 1e-9."""
    limit = problem.usage_limit
    return limit is None or peak_usage <= limit + 1e-9 * abs(limit)
