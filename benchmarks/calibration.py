"""Figures of chips fitted to the TPU compiler's cycles, beside those of the data files: writes docs/calibration.md.

Run it as `make calibration`, which takes under a minute; `TOPOLOGIES=v3:4x4,v6e:2x2` picks others.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from autoshard.calibration import Calibration, calibrate

TOPOLOGIES = ("v3:4x4", "v5e:2x2")

_INTRODUCTION = """\
# Calibration

Written by `make calibration{asked}`, with what `autoshard calibrate --topology {first}` finds. A fixed family of programs
of one kernel is compiled; the first, third, fifth ... program of each kind are the fit set, the others the test set.
Each parameter is set so that the median ratio of predicted to measured time is 1 over the fit set of its kind. *Was* is
the value in `cost_models/hardware`; errors are relative, of the predicted time. Copies between HBM and VMEM, which
have no cycles, are added at the nominal bandwidth. Where the test set comes out worse than *before*, one number does
not describe the kind: the product kernels of v5e fetch whole operands first, or stream them, as their shapes allow.

Nothing is fitted to reductions: the compiler's cycles charge them like kernels that write a result of their operand's
size, which is twice what is predicted of one operand.
"""


def page(found: Sequence[Calibration]) -> str:
    """Write the tables of each calibration."""
    topologies = [str(each.topology) for each in found]
    asked = "" if tuple(topologies) == TOPOLOGIES else f" TOPOLOGIES={','.join(topologies)}"
    lines = [_INTRODUCTION.format(asked=asked, first=topologies[0])]
    for each in found:
        head, *rows = each.table()
        lines += [f"## {each.topology}", "", f"{each.source}, {each.date}.", ""]
        lines += [_row(head), "|---|---|--:|--:|---|---|---|---|", *map(_row, rows), ""]
        lines += [
            "| kind | program | set | measured us | error before | error |",
            "|---|---|---|--:|--:|--:|",
        ]
        lines += [
            _row(
                (
                    outcome.program.kind,
                    outcome.program.name.replace("*", "\\*"),
                    "fit" if outcome.fitted else "test",
                    f"{1e6 * outcome.measured_seconds:.2f}",
                    f"{100 * outcome.error_before:+.1f} %",
                    f"{100 * outcome.error:+.1f} %",
                )
            )
            for outcome in each.outcomes
        ]
        lines.append("")
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Calibrate, print progress and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topologies", default="", help="names, with commas; v3 and v5e when left out")
    parser.add_argument("--output", type=Path, default=Path("docs/calibration.md"))
    options = parser.parse_args(argv)
    started = time.perf_counter()
    found = []
    for name in options.topologies.split(",") if options.topologies else TOPOLOGIES:
        found.append(calibrate(name))
        print(found[-1], flush=True)
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(page(found))
    print(f"{options.output}: {len(found)} slices in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
