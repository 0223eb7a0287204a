"""The cost model beside the TPU compiler: writes docs/accuracy.md.

For each program, plan and slice the plan's own per-device program is compiled, and its cycles, bytes, memory and
collectives are set against the estimate. Run it as `make accuracy`; `--programs mlp,moe` picks programs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import autoshard
import cost_models as cm
from autoshard import Plan
from autoshard.validate import CompiledReport
from autoshard.zoo import convnet, dense
from benchmarks.referee import Workload, compiled, peer_programs

CASES: tuple[tuple[str, Mapping[str, int]], ...] = (("v3:4x4", {"x": 8, "y": 4}),)
PLANS = ("suggested", "megatron", "fsdp", "data_parallel", "gspmd_2d", "weight_update_sharding")
# Programs for which the compiler writes code for longer than anybody waits.
WITHOUT_CODE = frozenset({"unet3d"})


@dataclass(frozen=True, kw_only=True)
class Row:
    """One program under one plan; seconds and bytes of a step on one device.

    `products` are kernels and fusions with a matrix product or convolution in them, `rest` the others but the
    collectives. `roofline` is what the compiled instructions take at the peak rates of HBM and matrix unit.
    """

    program: str
    plan: str
    topology: str
    mesh: Mapping[str, int]
    products: float
    rest: float
    memory: float
    compiled_products: float
    compiled_rest: float
    roofline: float
    compiled_memory: float
    fits: bool
    complete: bool

    @property
    def compute(self) -> float:
        """Predicted seconds without collectives."""
        return self.products + self.rest

    @property
    def compiled_compute(self) -> float:
        """The compiler's cycles as seconds, without collectives."""
        return self.compiled_products + self.compiled_rest


def measured(plan: Plan, work: Workload, report: CompiledReport) -> Row:
    """Set a plan's estimate against what the compiler made of its program."""
    chip = cm.Topology.parse(plan.topology).chip
    clock = report.clock_hz
    assert clock is not None

    def seconds(cycles: int | None, size: int) -> float:
        return size / chip.hbm_bytes_per_second if cycles is None else cycles / clock

    kernels = [e for e in plan.estimate.entries if e.kind != "collective"]
    found = report.instructions
    assert report.memory is not None
    return Row(
        program=work.name,
        plan=plan.name,
        topology=plan.topology,
        mesh=plan.mesh,
        products=sum(e.seconds for e in kernels if e.cost.matrix_seconds),
        rest=sum(e.seconds for e in kernels if not e.cost.matrix_seconds),
        memory=plan.estimate.peak_bytes,
        compiled_products=sum(seconds(i.cycles, i.bytes) * i.trips for i in found if i.flops),
        compiled_rest=sum(seconds(i.cycles, i.bytes) * i.trips for i in found if not i.flops),
        roofline=sum(
            max(i.bytes / chip.hbm_bytes_per_second, i.flops / chip.matmul_flops_per_second) * i.trips
            for i in found
        ),
        compiled_memory=report.memory.total_bytes,
        fits=report.fits,
        complete=report.complete,
    )


def programs() -> dict[str, Callable[[], Workload]]:
    """The peers' programs, and the zoo's at sizes for a slice of 32 cores."""

    def zoo(name: str, build: Callable[[], tuple]) -> Callable[[], Workload]:
        def make() -> Workload:
            fn, args = build()
            return Workload(name=name, fn=fn, args=args, donated=tuple(range(len(args) - 1)))

        return make

    return {
        **peer_programs(),
        "dense_1b": zoo("dense_1b", dense.dense_1b),
        "resnet50": zoo("resnet50", convnet.resnet50),
    }


def plans(work: Workload, topology: str, mesh: Mapping[str, int], names: Sequence[str]) -> Iterator[Plan]:
    """Yield the plans of these names that there are."""
    given = dict(topology=topology, mesh=mesh, donate_argnums=work.donated)
    if "suggested" in names:
        yield autoshard.suggest(work.fn, *work.args, **given)
    kinds = [n for n in names if n != "suggested"]
    yield from autoshard.baselines(work.fn, *work.args, **given, names=kinds).values()


def measure(names: Sequence[str], kinds: Sequence[str]) -> Iterator[Row]:
    """Yield a row per program, slice and plan."""
    known = programs()
    for topology, mesh in CASES:
        for name in names:
            work = known[name]()
            for plan in plans(work, topology, mesh, kinds):
                report = compiled(plan, work, stop_early=name in WITHOUT_CODE)
                if report.memory is not None:
                    yield measured(plan, work, report)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print progress and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", default="", help="names, with commas; all by default")
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--output", type=Path, default=Path("docs/accuracy.md"))
    options = parser.parse_args(argv)
    started = time.perf_counter()
    rows = []
    for row in measure(
        options.programs.split(",") if options.programs else list(programs()), options.plans.split(",")
    ):
        rows.append(row)
        print(line(row), flush=True)
    good = [r for r in rows if r.complete]
    print("products median error", statistics.median(abs(r.products / r.compiled_products - 1) for r in good))
    print(
        "memory median error",
        statistics.median(abs(r.memory / r.compiled_memory - 1) for r in rows),
        "within 10%",
        sum(abs(r.memory / r.compiled_memory - 1) <= 0.1 for r in rows) / len(rows),
    )
    print(f"{len(rows)} rows in {time.perf_counter() - started:.0f} s")


def line(row: Row) -> str:
    """One row as text."""
    ok = row.compute >= 0.9 * row.roofline and (not row.complete or row.compute <= 1.1 * row.compiled_compute)
    products = (
        row.products / row.compiled_products if row.complete and row.compiled_products else float("nan")
    )
    return (
        f"{row.program:12s} {row.plan[:14]:14s} products {row.products * 1e3:9.3f} {row.compiled_products * 1e3:9.3f} {products:5.2f}"
        f"  rest {row.rest * 1e3:8.3f} {row.compiled_rest * 1e3:8.3f}  compute/roofline {row.compute / row.roofline:5.2f}"
        f" /cycles {row.compute / row.compiled_compute:5.2f} {'ok ' if ok else 'OUT'}"
        f"  memory {row.memory / 2**30:6.3f} {row.compiled_memory / 2**30:6.3f} {row.memory / row.compiled_memory:5.2f}"
    )


if __name__ == "__main__":
    main()
