"""The solver on the instances of the ASPLOS 2025 / EuroSys 2025 contest: writes docs/iopddl.md.

Every instance is solved in a process of its own through the command line, `python -m search`, and its answer is
checked again here. The published values are the best of the contest's 20 teams.

Run it as `make bench-iopddl`; `--instances B,G` picks instances and `--time-limit` sets the seconds for each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from search.iopddl import read

PUBLISHED = {
    "A": 6548641531,
    "B": 532843,
    "C": 84102445260,
    "D": 313613524736,
    "E": 338965335230,
    "F": 364364563561,
    "G": 217039,
    "H": 527715404257,
    "I": 583706456444,
    "J": 1360981630371,
    "K": 2274276676,
    "L": 1970993742,
    "M": 49928460991,
    "N": 202739586553,
    "O": 222880199765,
    "P": 651833115436,
    "Q": 526776842042,
    "R": 371899551572,
    "S": 1534613444,
    "T": 682895254913,
    "U": 2569342178,
    "V": 1632051,
    "W": 11818845467155,
    "X": 280461191177,
    "Y": 621176568278,
}
"""Best published value of each instance (for P that of XLA's own solver)."""

_HEAD = """# The contest's instances

Written by `make bench-iopddl LIMIT={limit:g}`. The instances are those of the ASPLOS 2025 / EuroSys 2025 contest on
intra-operator parallelism (github.com/google/iopddl), dumped from XLA's auto-sharding. *Published* is the best value of
the contest's 20 teams, whose limits were 60 to 300 s by instance. A ratio below 1 is a plan cheaper than any published
one; a gap of 0 is a proof that none is cheaper. Seconds are those of the search; *total* adds starting Python, reading
the file and checking the answer. Each instance has {limit:g} s on {cores} cores.

| instance | size | objective | published | ratio | lower bound | gap | seconds | total | why it stopped |
|---|---|--:|--:|--:|--:|--:|--:|--:|---|
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one instance came to: the command line's answer, the instance's size, and the seconds of the process."""

    name: str
    size: str
    answer: dict[str, object]
    total: float

    def __str__(self) -> str:
        """One line of the table."""
        objective, bound, gap = (self._number(key) for key in ("objective", "lower_bound", "gap"))
        published = PUBLISHED.get(self.name)
        ratio = "" if published is None or objective is None else f"{objective / published:.4f}"
        cells = [
            self.name,
            self.size,
            _integer(objective),
            _integer(published),
            ratio,
            _integer(bound),
            "" if gap is None else f"{gap:.3%}",
            f"{self._number('seconds'):.1f}",
            f"{self.total:.1f}",
            str(self.answer["status"]).lower().replace("_", " "),
        ]
        return f"| {' | '.join(cells)} |"

    def _number(self, key: str) -> float | None:
        value = self.answer[key]
        return float(value) if isinstance(value, int | float) else None


def _integer(value: float | None) -> str:
    return "none" if value is None else f"{value:.0f}"


def measure(path: Path, limit: float) -> Row:
    """Solve one instance in a process of its own and check what it wrote."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "search", str(path), "--time-limit", f"{limit:g}", "--out", str(out)]
        code = subprocess.run(command, check=False).returncode
        total = time.perf_counter() - started
        if not out.exists():
            raise SystemExit(f"{path.name}: the solver ended with exit code {code} and wrote no plan.")
        answer = json.loads(out.read_text())
    problem = read(path)
    objective = problem.objective(answer["choice"])
    if code == 0 and objective != answer["objective"]:
        raise SystemExit(f"{path.name}: the plan costs {objective}, not {answer['objective']} as claimed.")
    if code == 0 and problem.usage_limit is not None:
        peak = float(problem.usage(answer["choice"]).max(initial=0.0))
        if peak > problem.usage_limit:
            raise SystemExit(f"{path.name}: the plan uses {peak} bytes of {problem.usage_limit}.")
    size = f"{len(problem.costs)} nodes, {len(problem.edges)} edges"
    return Row(name=path.name.split(".")[0], size=size, answer=answer, total=total)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print each row and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the instances lie, as NAME.json.gz or NAME.json")
    parser.add_argument(
        "--instances", default=None, help="names, with commas; all of the contest's when left out"
    )
    parser.add_argument("--time-limit", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--output", type=Path, default=Path("docs/iopddl.md"))
    options = parser.parse_args(argv)
    wanted = list(PUBLISHED) if options.instances is None else options.instances.split(",")
    paths = [p for n in wanted for p in sorted(options.folder.glob(f"{n}.json*"))[:1]]
    if not paths:
        parser.error(
            f"{options.folder} holds none of the instances {', '.join(wanted)}. They are released at "
            "github.com/google/iopddl; name their folder with make bench-iopddl IOPDDL=FOLDER."
        )
    missing = [n for n in wanted if not list(options.folder.glob(f"{n}.json*"))]
    if missing:
        print(f"{options.folder} does not hold {', '.join(missing)}: left out.", flush=True)
    page = _HEAD.format(limit=options.time_limit, cores=os.cpu_count())
    print(page, end="", flush=True)
    for path in paths:
        line = f"{measure(path, options.time_limit)}\n"
        print(line, end="", flush=True)
        page += line
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(page)


if __name__ == "__main__":
    main()
