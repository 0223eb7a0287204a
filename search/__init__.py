"""A solver for choose-one-per-node problems with edge costs and memory over time; knows no JAX."""

from search.checker import CheckError, check
from search.problem import Problem, ProblemError
from search.solution import Progress, Solution, Status
from search.solver import solve

__all__ = ["CheckError", "Problem", "ProblemError", "Progress", "Solution", "Status", "check", "solve"]
