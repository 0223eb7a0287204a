"""The linear and integer solver: HiGHS through OR-tools MathOpt, fed with whole arrays.

The model travels as a protocol buffer filled from arrays, since adding terms one by one in Python takes
longer than solving. The solve runs in a thread of its own so that Ctrl-C reaches the caller at once.

Reference: Q. Huangfu and J. A. J. Hall, Parallelizing the dual revised simplex method, 2018 (HiGHS).
"""

import datetime
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from ortools.math_opt import model_pb2  # type: ignore[import-untyped]
from ortools.math_opt.python import mathopt  # type: ignore[import-untyped]

from search.problem import Floats
from search.program import Program

GRACE = 1.0  # seconds beyond its limit that the solver is waited for


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """What came back, in the program's own cost unit.

    Args:
        values: `[V]`, or None without a feasible point.
        objective: cost of `values`; `inf` without.
        bound: no feasible point costs less; `-inf` when unknown.
        reduced_costs: `[V]` of an LP solved to optimality, else None.
        duals: `[rows]` of an LP solved to optimality, else None.
        infeasible: proven to have no feasible point.
        complete: solved to the requested gap, or proven infeasible.

    """

    values: Floats | None
    objective: float
    bound: float
    reduced_costs: Floats | None
    duals: Floats | None
    infeasible: bool
    complete: bool


def run(
    program: Program,
    *,
    integer: bool,
    seconds: float,
    gap: float = 0.0,
    seed: int = 0,
    start: Floats | None = None,
    aside: Callable[[], bool] | None = None,
) -> Answer:
    """Solve a program, or its linear relaxation.

    Args:
        program: what to solve.
        integer: whether the first `num_binary` variables are binary, or only within [0, upper].
        seconds: time limit.
        gap: relative gap at which the integer search may stop.
        seed: of the solver's random numbers.
        start: `[num_binary]` values of a known solution to start from.
        aside: a piece of work to repeat while the solver runs in its thread, until it returns False.

    Returns:
        The answer.

    Raises:
        KeyboardInterrupt: as it came; the solver's thread dies at its own time limit.

    """
    deadline = time.perf_counter() + seconds
    size = float(np.abs(program.cost).max(initial=0.0))
    scale = 1.0 if size == 0 else 2.0 ** -math.floor(math.log2(size / 1e3))
    model = mathopt.Model.from_model_proto(_proto(program, integer, scale))
    variables = list(model.variables())
    seconds = deadline - time.perf_counter()  # as filling the model took some
    parameters = mathopt.SolveParameters(
        time_limit=datetime.timedelta(seconds=max(seconds, 0.01)),
        random_seed=seed,
        relative_gap_tolerance=max(gap, 1e-10) if integer else None,
        absolute_gap_tolerance=0.0 if integer else None,
    )
    hints = []
    if start is not None:
        known = {variables[k]: float(v) for k, v in enumerate(start)}
        hints = [mathopt.SolutionHint(variable_values=known)]
    extra = mathopt.ModelSolveParameters(solution_hints=hints)
    result = _interruptible(model, parameters, extra, deadline + GRACE, aside)
    if result is None:
        return Answer(
            values=None,
            objective=math.inf,
            bound=-math.inf,
            reduced_costs=None,
            duals=None,
            infeasible=False,
            complete=False,
        )
    reason = result.termination.reason
    infeasible = reason in (
        mathopt.TerminationReason.INFEASIBLE,
        mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED,
    )
    optimal = reason == mathopt.TerminationReason.OPTIMAL
    values = None
    if result.has_primal_feasible_solution():
        values = np.asarray(result.variable_values(variables))
    reduced, duals = None, None
    if not integer and optimal and result.has_dual_feasible_solution():
        reduced = np.asarray(result.reduced_costs(variables)) / scale
        duals = np.asarray(result.dual_values(list(model.linear_constraints()))) / scale
    bounds = result.termination.objective_bounds
    bound = bounds.dual_bound / scale if integer or optimal else -math.inf
    return Answer(
        values=values,
        objective=math.inf if values is None else float(program.cost @ values),
        bound=math.inf if infeasible else float(bound),
        reduced_costs=reduced,
        duals=duals,
        infeasible=infeasible,
        complete=optimal or infeasible,
    )


def _interruptible(
    model: mathopt.Model,
    parameters: mathopt.SolveParameters,
    extra: mathopt.ModelSolveParameters,
    deadline: float,
    aside: Callable[[], bool] | None,
) -> mathopt.SolveResult | None:
    """Solve in a daemon thread, waiting in slices that let a KeyboardInterrupt through.

    HiGHS may overlook its time limit for minutes; then there is no result, and the thread dies with the process.
    """
    results: list[mathopt.SolveResult] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            solver = mathopt.SolverType.HIGHS
            results.append(mathopt.solve(model, solver, params=parameters, model_params=extra))
        except BaseException as error:  # handed to the caller's thread below
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while thread.is_alive():
        if aside is None or not aside():
            aside = None
            thread.join(0.1)
        if time.perf_counter() > deadline:
            return None
    if errors:
        raise errors[0]
    return results[0]


def _proto(program: Program, integer: bool, scale: float) -> model_pb2.ModelProto:
    rows, columns = program.matrix.shape
    proto = model_pb2.ModelProto()
    variables = proto.variables
    variables.ids.extend(range(columns))
    variables.lower_bounds.extend(np.zeros(columns).tolist())
    variables.upper_bounds.extend(program.upper.tolist())
    kinds = np.arange(columns) < program.num_binary if integer else np.zeros(columns, dtype=bool)
    variables.integers.extend(kinds.tolist())
    proto.linear_constraints.ids.extend(range(rows))
    proto.linear_constraints.lower_bounds.extend(program.low.tolist())
    proto.linear_constraints.upper_bounds.extend(program.high.tolist())
    matrix = sp.csr_array(program.matrix)
    matrix.sum_duplicates()
    entries = matrix.tocoo()
    proto.linear_constraint_matrix.row_ids.extend(_ints(entries.row))
    proto.linear_constraint_matrix.column_ids.extend(_ints(entries.col))
    proto.linear_constraint_matrix.coefficients.extend(entries.data.tolist())
    used = np.flatnonzero(program.cost)
    proto.objective.linear_coefficients.ids.extend(_ints(used))
    proto.objective.linear_coefficients.values.extend((program.cost[used] * scale).tolist())
    return proto


def _ints(values: Iterable[int]) -> list[int]:
    out: list[int] = np.asarray(values, dtype=np.int64).tolist()
    return out
