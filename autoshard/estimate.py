"""Price a per-device program: a ledger of kernels and collectives, and the peak of HBM.

`estimate` takes any jaxpr that holds a `shard_map`, also one written by hand. It walks the equations of the
mapped body: equations of one group (marked by the name scope that the emitter sets) run as one kernel, and groups
share kernels as `autoshard.fusion` says; other equations are kernels of their own. A loop's body counts as often
as it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr

from autoshard.fusion import Fused
from autoshard.memory import Peak, peak_memory
from autoshard.partition.ledger import Collective, Entry, Ledger, calls, kernels_of
from autoshard.partition.price import Machine

__all__ = ["Collective", "Entry", "Estimate", "estimate", "mapped_body"]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Predicted step of a per-device program on a machine."""

    entries: tuple[Entry, ...]
    collectives: tuple[Collective, ...]
    peak: Peak
    machine: Machine
    notes: tuple[str, ...] = ()

    @property
    def serial_seconds(self) -> float:
        """Step time with nothing overlapped."""
        return sum(e.seconds for e in self.entries)

    @property
    def hidden_seconds(self) -> float:
        """Communication that runs beside kernels; on v2 and v3 the compiler by default runs none so."""
        return sum(e.hidden * e.count for e in self.entries)

    @property
    def step_seconds(self) -> float:
        """Step time with the overlap that the chip's compiler achieves."""
        return sum(e.exposed_seconds for e in self.entries)

    @property
    def peak_bytes(self) -> float:
        """Peak HBM of one device."""
        return self.peak.total_bytes

    @property
    def fits(self) -> bool:
        """Tell whether the peak is within the HBM that a plan may use by default."""
        return self.peak_bytes <= self.machine.usable_bytes

    @property
    def flops(self) -> float:
        """Floating-point operations of one device in a step, recomputation included."""
        return sum(e.cost.flops * e.count for e in self.entries)

    @property
    def hardware_utilization(self) -> float:
        """Share of the peak that the executed flops reach (HFU: recomputation counts)."""
        peak = self.machine.chip.matmul_flops_per_second
        return self.flops / (peak * self.step_seconds) if self.step_seconds else 0.0

    def breakdown(self) -> dict[str, float]:
        """Seconds of the step by what bounds them: compute, hbm, and each collective with its mesh axes.

        Of collectives only what nothing else runs beside.
        """
        parts: dict[str, float] = {"compute": 0.0, "hbm": 0.0}
        for e in self.entries:
            if e.kind == "collective":
                key = f"{e.title} {'*'.join(e.axes)}"
            else:
                busy = max(e.cost.matrix_seconds, e.cost.vector_seconds)
                key = "compute" if busy >= e.cost.hbm_seconds else "hbm"
            parts[key] = parts.get(key, 0.0) + e.exposed_seconds
        return parts

    def __str__(self) -> str:
        lines = [f"step {self.step_seconds * 1e3:.3f} ms, peak HBM {self.peak_bytes / 2**30:.2f} GiB"]
        lines += [f"  {k:<40s} {v * 1e3:10.3f} ms" for k, v in self.breakdown().items() if v]
        return "\n".join(lines)


def mapped_body(closed: ClosedJaxpr) -> Any:
    """Return the body of the one `shard_map` in a jaxpr, looking through calls.

    Raises:
      ValueError: there is none, or there are several.

    """
    found = list(_mapped(closed.jaxpr))
    if len(found) != 1:
        raise ValueError(
            "estimate takes a function that is one jax.shard_map over the whole mesh; this one holds"
            f" {len(found)}."
        )
    return found[0]


def _mapped(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            yield eqn.params["jaxpr"]
        else:
            for inner in calls(eqn):
                yield from _mapped(inner)


def estimate(
    closed: ClosedJaxpr,
    machine: Machine,
    *,
    donated: Sequence[bool] | None = None,
    names: Sequence[str] = (),
    categories: Sequence[str] = (),
    sources: Mapping[int, str] | None = None,
    fused: Mapping[int, Fused] | None = None,
    loop_trips: int = 1,
) -> Estimate:
    """Price a jaxpr that holds one `shard_map`.

    Args:
      closed: what `jax.make_jaxpr` returns for the per-device program.
      machine: the mesh on its slice.
      donated: which inputs may be overwritten.
      names, categories: of the inputs, for the memory report.
      sources: user source line by group number.
      fused: how groups share kernels, by number.
      loop_trips: how often a `while` loop runs whose trip count the program does not fix.

    """
    body = mapped_body(closed)
    walk = Ledger(machine=machine, loop_trips=loop_trips, sources=sources or {}, fused=fused or {})
    walk.body(body, 1.0)
    peak = peak_memory(
        body,
        machine,
        donated=donated,
        names=names,
        categories=categories,
        kernels_of=kernels_of,
        unstored=walk.unstored,
    )
    return Estimate(
        entries=tuple(walk.entries),
        collectives=tuple(walk.collectives),
        peak=peak,
        machine=machine,
        notes=tuple(walk.notes),
    )
