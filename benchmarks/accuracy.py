"""The cost model beside the TPU compiler: writes docs/accuracy.md.

For each program, plan and slice the plan's own per-device program is compiled, and its cycles, bytes, memory and
collectives are set against the estimate. Run it as `make accuracy`; `--programs mlp,moe` picks programs. Reports
of the compiler are kept in `.cache`, so that a second run takes the time of planning.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import autoshard
import cost_models as cm
from autoshard import Plan
from autoshard.validate import CompiledReport
from autoshard.validate.match import compiled_runs, match, predicted_runs
from autoshard.zoo import convnet
from benchmarks.referee import Workload, compiled, peer_programs

CASES: tuple[tuple[str, Mapping[str, int]], ...] = (("v3:4x4", {"x": 8, "y": 4}),)
PLANS = ("suggested", "data_parallel", "weight_update_sharding", "fsdp", "megatron", "gspmd_2d")
# The compiler writes code for 3D convolutions for longer than anybody waits: no cycles for these programs.
WITHOUT_CODE = frozenset({"unet3d"})
# What the compute part may be of the compiled instructions' time at peak rates, and of the compiler's cycles.
LEAST_OF_ROOFLINE, MOST_OF_CYCLES = 0.9, 1.1


@dataclass(frozen=True, kw_only=True)
class Row:
    """One program under one plan; seconds and bytes of a step on one device, predicted and compiled.

    `products` are kernels and fusions with a matrix product or convolution in them, `rest` the others but the
    collectives. `roofline` is what the compiled instructions take at the peak rates of HBM and matrix unit.
    `wire` are the collectives, those of the compiled program priced by the same formulas. `unexplained` is the
    share of the bytes that the two programs send differently and for no reason that is known.
    """

    program: str
    plan: str
    topology: str
    mesh: Mapping[str, int]
    products: float
    rest: float
    wire: float
    memory: float
    compiled_products: float
    compiled_rest: float
    compiled_wire: float
    compiled_memory: float
    roofline: float
    unexplained: float
    complete: bool

    @property
    def compute(self) -> float:
        """Predicted seconds without collectives."""
        return self.products + self.rest

    @property
    def compiled_compute(self) -> float:
        """The compiler's cycles as seconds, without collectives."""
        return self.compiled_products + self.compiled_rest

    @property
    def within(self) -> bool:
        """Whether the compute part lies between roofline and cycles."""
        least = LEAST_OF_ROOFLINE * self.roofline
        most = MOST_OF_CYCLES * self.compiled_compute if self.complete else math.inf
        return least <= self.compute <= most


def measured(plan: Plan, work: Workload, report: CompiledReport) -> Row:
    """Set a plan's estimate against what the compiler made of its program.

    An instruction without cycles, such as a gather, is priced by its bytes.
    """
    topology = cm.Topology.parse(plan.topology)
    chip, clock = topology.chip, report.clock_hz
    assert clock is not None and report.memory is not None

    def seconds(cycles: int | None, size: int) -> float:
        return size / chip.hbm_bytes_per_second if cycles is None else cycles / clock

    kernels = [e for e in plan.estimate.entries if e.kind != "collective"]
    found = report.instructions
    return Row(
        program=work.name,
        plan=plan.name,
        topology=plan.topology.split()[0],
        mesh=plan.mesh,
        products=sum(e.seconds for e in kernels if e.cost.matrix_seconds),
        rest=sum(e.seconds for e in kernels if not e.cost.matrix_seconds),
        wire=sum(e.seconds for e in plan.estimate.entries if e.kind == "collective"),
        memory=plan.estimate.peak_bytes,
        compiled_products=sum(seconds(i.cycles, i.bytes) * i.trips for i in found if i.flops),
        compiled_rest=sum(seconds(i.cycles, i.bytes) * i.trips for i in found if not i.flops),
        compiled_wire=_wire(plan, report),
        compiled_memory=report.memory.total_bytes,
        roofline=sum(
            max(i.bytes / chip.hbm_bytes_per_second, i.flops / chip.matmul_flops_per_second) * i.trips
            for i in found
        ),
        unexplained=match(
            predicted_runs(plan.estimate.collectives), compiled_runs(report.collectives, {})
        ).unexplained_share,
        complete=report.complete,
    )


def _wire(plan: Plan, report: CompiledReport) -> float:
    """Seconds of the compiled program's collectives on the slice's links; a permute counts as one to a neighbour."""
    placement = cm.place(cm.Topology.parse(plan.topology), plan.mesh)
    total = 0.0
    for found in report.collectives:
        if not found.axes:
            raise ValueError(
                f"{report.program} on {report.target}: {found.name} ({found.kind}) runs over groups of"
                f" {found.group_size} that are no axes of the mesh {dict(plan.mesh)}. Only such groups have a price."
            )
        kind = found.kind.replace("-", "_")
        size = found.bytes * (found.group_size if kind == "all_to_all" else 1)
        if kind == "all_reduce" and found.sliced_bytes == found.bytes:
            kind = "reduce_scatter"
        cost = cm.collective_seconds(kind, size, found.axes, placement)
        total += cost.seconds * found.count * found.trips
    return total


def programs() -> dict[str, Callable[[], Workload]]:
    """The peers' programs, where their file is, and of the zoo what suits a slice of 32 cores."""

    def resnet50() -> Workload:
        fn, args = convnet.resnet50()
        return Workload(name="resnet50", fn=fn, args=args, donated=(0, 1, 2))

    return {**peer_programs(), "resnet50": resnet50}


def plans(work: Workload, topology: str, mesh: Mapping[str, int], names: Sequence[str]) -> Iterator[Plan]:
    """Yield the plans of these names that there are."""
    given: Any = {"topology": topology, "mesh": mesh, "donate_argnums": work.donated}
    if "suggested" in names:
        yield autoshard.suggest(work.fn, *work.args, **given)
    kinds = [n for n in names if n != "suggested"]
    yield from autoshard.baselines(work.fn, *work.args, **given, names=kinds).values()


def measure(names: Sequence[str], kinds: Sequence[str]) -> Iterator[Row]:
    """Yield a row per slice, program and plan that fits."""
    known = programs()
    for topology, mesh in CASES:
        for name in names:
            work = known[name]()
            for plan in plans(work, topology, mesh, kinds):
                report = compiled(plan, work, stop_early=name in WITHOUT_CODE)
                if report.memory is not None and report.fits:
                    yield measured(plan, work, report)


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Kendall's tau of two rankings, pairs within 1 % of each other left out.

    >>> kendall([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
    0.3333333333333333

    """
    signs = [
        math.copysign(1, (one[i] - one[j]) * (other[i] - other[j]))
        for i, j in itertools.combinations(range(len(one)), 2)
        if abs(other[i] - other[j]) > 0.01 * max(other[i], other[j])
    ]
    return statistics.fmean(signs) if signs else 1.0


_INTRODUCTION = """\
# The cost model beside the TPU compiler

Written by `make accuracy{asked}`. Every plan's per-device program is compiled for the slice with the production TPU compiler.
*Products* are fusions with a matrix product or convolution, predicted over the compiler's cycles. *Compute* is all
but collectives: over the compiled instructions at peak rates (roofline), which it should not undercut by more than
10 %, and over the compiler's cycles, which it should not exceed by more than 10 %; cycles overprice narrow elementwise
work. Gathers, scatters and sorts have no cycles and are priced by their bytes. *Memory* is the predicted peak over
the compiler's total. *Collectives* is the share of the bytes sent that differs without a known reason.
"""


def page(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Write the tables; `names` are the programs that were asked for."""
    asked = "" if list(names) == list(programs()) else f" PROGRAMS={','.join(names)}"
    lines = [_INTRODUCTION.format(asked=asked)]
    lines.append(
        "| program | plan | slice | products | compute / roofline | / cycles | memory | collectives |"
    )
    lines.append("|---|---|---|--:|--:|--:|--:|--:|")
    for r in rows:
        products = f"{r.products / r.compiled_products:.2f}" if r.complete and r.compiled_products else "-"
        cycles = f"{r.compute / r.compiled_compute:.2f}" if r.complete else "-"
        lines.append(
            f"| {r.program} | {r.plan} | {r.topology} | {products} | {r.compute / r.roofline:.2f}"
            f"{'' if r.within else ' (outside)'} | {cycles} | {r.memory / r.compiled_memory:.2f}"
            f" | {100 * r.unexplained:.1f} % |"
        )
    return "\n".join([*lines, "", *summary(rows), "", *ranking(rows)]) + "\n"


def summary(rows: Sequence[Row]) -> list[str]:
    """The figures over all rows."""
    products = [abs(r.products / r.compiled_products - 1) for r in rows if r.complete and r.compiled_products]
    memory = [abs(r.memory / r.compiled_memory - 1) for r in rows]
    return [
        f"- Products: median error {100 * statistics.median(products):.1f} %, largest"
        f" {100 * max(products):.1f} %.",
        f"- Compute between roofline and cycles: {sum(r.within for r in rows)} of {len(rows)}.",
        f"- Memory: median error {100 * statistics.median(memory):.1f} %, within 10 %:"
        f" {sum(e <= 0.1 for e in memory)} of {len(rows)}.",
    ]


def ranking(rows: Sequence[Row]) -> list[str]:
    """How our order of the plans of a program compares with the compiler's."""
    of: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.complete:
            of[row.program, row.topology].append(row)
    lines = [
        "## Ranking",
        "",
        "Cycles and the compiled collectives on the slice's links, summed, against the predicted step.",
        "",
        "| program | slice | plans | Kendall's tau | regret of our first |",
        "|---|---|--:|--:|--:|",
    ]
    taus, regrets = [], []
    for (program, topology), found in of.items():
        if len(found) < 3:
            continue
        ours = [r.compute + r.wire for r in found]
        theirs = [r.compiled_compute + r.compiled_wire for r in found]
        tau = kendall(ours, theirs)
        regret = theirs[ours.index(min(ours))] / min(theirs) - 1
        taus.append(tau)
        regrets.append(regret)
        lines.append(f"| {program} | {topology} | {len(found)} | {tau:.2f} | {100 * regret:.1f} % |")
    if taus:
        lines += [
            "",
            f"- Median tau {statistics.median(taus):.2f}, largest regret {100 * max(regrets):.1f} %.",
        ]
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print progress and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", default="", help="names, with commas; all when left out")
    parser.add_argument("--plans", default=",".join(PLANS), help="names, with commas")
    parser.add_argument("--output", type=Path, default=Path("docs/accuracy.md"))
    options = parser.parse_args(argv)
    started = time.perf_counter()
    names = options.programs.split(",") if options.programs else list(programs())
    rows = []
    for row in measure(names, options.plans.split(",")):
        rows.append(row)
        print(
            f"{row.program} {row.plan}: products {1e3 * row.products:.3f} ms ({1e3 * row.compiled_products:.3f}),"
            f" rest {1e3 * row.rest:.3f} ({1e3 * row.compiled_rest:.3f}, roofline of all"
            f" {1e3 * row.roofline:.3f}), memory {row.memory / 2**30:.3f} GiB ({row.compiled_memory / 2**30:.3f})"
            f"{'' if row.within else ' OUTSIDE'}",
            flush=True,
        )
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(page(rows, names))
    print("\n".join(summary(rows) + ranking(rows)))
    print(f"{options.output}: {len(rows)} rows in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
