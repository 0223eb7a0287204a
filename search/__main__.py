"""`python -m search FILE`: solve one instance in the IOPDDL format and write the plan as JSON.

Exit codes: 0 a plan that fits (optimal or not), 1 nothing fits, 2 the file or the arguments are wrong,
130 interrupted (the best plan so far is still written).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.status import Status as Spinner

from search.checker import check
from search.iopddl import read
from search.solution import Progress, Solution, Status
from search.solver import solve

_EXIT = {Status.INFEASIBLE: 1, Status.INTERRUPTED: 130}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; the process's own when None.

    Returns:
        The exit code.

    """
    parser = argparse.ArgumentParser(prog="python -m search", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="an instance, .json or .json.gz")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="SECONDS", help="default: 60")
    parser.add_argument("--gap", type=float, default=0.0, help="relative gap at which to stop; default: 0")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--out", type=Path, default=None, help="where to write; default: standard output")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    try:
        problem = read(options.file)
    except (OSError, ValueError) as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2
    loud = console.is_terminal
    if loud:
        console.print(f"{options.file.name}: {problem}", markup=False)
    with console.status("searching") as spinner:
        solution = solve(
            problem,
            time_limit_seconds=options.time_limit,
            gap=options.gap,
            seed=options.seed,
            progress=(lambda news: _show(spinner, news)) if loud else None,
        )
    check(problem, solution)
    if loud:
        console.print(str(solution), markup=False)
        console.print(solution.reason, markup=False)
    text = json.dumps(to_json(solution)) + "\n"
    if options.out is None:
        sys.stdout.write(text)
    else:
        options.out.write_text(text)
    return _EXIT.get(solution.status, 0)


def to_json(solution: Solution) -> dict[str, object]:
    """Return the written form: the plan, its certificate, and why the search stopped."""
    return {
        "choice": list(solution.choice),
        "objective": _number(solution.objective),
        "lower_bound": _number(solution.lower_bound),
        "gap": _number(solution.gap),
        "peak_usage": solution.peak_usage,
        "peak_time": solution.peak_time,
        "status": solution.status.name,
        "reason": solution.reason,
        "seconds": round(solution.seconds, 3),
    }


def _number(value: float) -> float | None:
    """JSON has no infinity; null stands for it."""
    return value if abs(value) != float("inf") else None


def _show(spinner: Spinner, news: Progress) -> None:
    spinner.update(f"{news}")


if __name__ == "__main__":
    sys.exit(main())
