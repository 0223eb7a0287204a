"""Price a per-device program: a ledger of kernels and collectives, and the peak of HBM.

`estimate` takes any jaxpr that holds a `shard_map`, also one written by hand. It walks the equations of the
mapped body: equations of one group (marked by the name scope that the emitter sets) run as one kernel, others
are clustered by the same rule of thumb that groups a program; a loop's body counts as often as it runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from autoshard.memory import Buffer, Peak, peak_memory
from autoshard.partition.price import COLLECTIVES, FREE, Cost, Machine, add_costs
from autoshard.program import itemsize

__all__ = ["Collective", "Entry", "Estimate", "estimate", "mapped_body"]

_GROUP = re.compile(r"^g(\d+)\.(.*)$")
_RESHARD = re.compile(r"^r(\d+)$")
_CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat2",
    "checkpoint",
)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of the program, as often as it runs in a step; bytes as XLA would report them.

    `full_bytes` is the tensor of one group (gathered or not yet reduced), `sent_bytes` what a device sends.
    """

    kind: str
    axes: tuple[str, ...]
    full_bytes: float
    sent_bytes: float
    count: float
    seconds: float
    dtype: str
    shape: tuple[int, ...]
    group: int
    source: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A line of the ledger: a kernel or a collective, its cost for one run and the runs in a step."""

    title: str
    kind: str
    cost: Cost
    count: float
    group: int = -1
    source: str = ""
    axes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds in a step."""
        return self.cost.seconds * self.count


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
    def step_seconds(self) -> float:
        """Step time with the overlap that the chip's compiler achieves; on v2 and v3 that is none."""
        return self.serial_seconds

    @property
    def peak_bytes(self) -> float:
        """Peak HBM of one device."""
        return self.peak.total_bytes

    @property
    def fits(self) -> bool:
        """Tell whether the peak is within the HBM that a program may use."""
        return self.peak_bytes <= self.machine.chip.hbm_capacity_bytes

    @property
    def flops(self) -> float:
        """Floating-point operations of one device in a step, recomputation included."""
        return sum(e.cost.flops * e.count for e in self.entries)

    @property
    def hardware_utilization(self) -> float:
        """Share of the peak that the executed flops reach (HFU: recomputation counts)."""
        peak = self.machine.chip.matmul_flops_per_second
        return self.flops / (peak * self.serial_seconds) if self.serial_seconds else 0.0

    def breakdown(self) -> dict[str, float]:
        """Seconds by what bounds them: compute, hbm, and each collective with its mesh axes."""
        parts: dict[str, float] = {"compute": 0.0, "hbm": 0.0}
        for e in self.entries:
            if e.kind == "collective":
                key = f"{e.title} {'*'.join(e.axes)}"
            else:
                busy = max(e.cost.matrix_seconds, e.cost.vector_seconds)
                key = "compute" if busy >= e.cost.hbm_seconds else "hbm"
            parts[key] = parts.get(key, 0.0) + e.seconds
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
            f"estimate takes a function that is one jax.shard_map over the whole mesh; this one holds {len(found)}."
        )
    return found[0]


def _mapped(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            yield eqn.params["jaxpr"]
        else:
            for inner in _calls(eqn):
                yield from _mapped(inner)


def _calls(eqn: JaxprEqn) -> Iterator[Any]:
    if eqn.primitive.name in _CALLS:
        body = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
        yield body.jaxpr if isinstance(body, ClosedJaxpr) else body


def estimate(
    closed: ClosedJaxpr,
    machine: Machine,
    *,
    donated: Sequence[bool] | None = None,
    names: Sequence[str] = (),
    categories: Sequence[str] = (),
    sources: Mapping[int, str] | None = None,
    loop_trips: int = 1,
) -> Estimate:
    """Price a jaxpr that holds one `shard_map`.

    Args:
      closed: what `jax.make_jaxpr` returns for the per-device program.
      machine: the mesh on its slice.
      donated: which inputs may be overwritten.
      names, categories: of the inputs, for the memory report.
      sources: user source line by group number.
      loop_trips: how often a `while` loop runs whose trip count the program does not fix.

    """
    body = mapped_body(closed)
    walk = _Walk(machine=machine, loop_trips=loop_trips, sources=sources or {})
    walk.body(body, 1.0)
    peak = peak_memory(
        body, machine, donated=donated, names=names, categories=categories, kernels_of=kernels_of
    )
    return Estimate(
        entries=tuple(walk.entries),
        collectives=tuple(walk.collectives),
        peak=peak,
        machine=machine,
        notes=tuple(walk.notes),
    )


def group_tag(eqn: JaxprEqn) -> tuple[int, str] | None:
    """Read the number and title of the group that an equation was emitted for."""
    for part in reversed(str(eqn.source_info.name_stack).split("/")):
        match = _GROUP.match(part)
        if match:
            return int(match[1]), match[2]
        if _RESHARD.match(part):
            return None
    return None


def reshard_tag(eqn: JaxprEqn) -> int:
    """Read the number of the group that an equation reshards for; -1 if it does not."""
    for part in reversed(str(eqn.source_info.name_stack).split("/")):
        match = _RESHARD.match(part)
        if match:
            return int(match[1])
    return -1


def kernels_of(jaxpr: Any) -> list[tuple[tuple[int, str] | None, list[JaxprEqn]]]:
    """Cut a body into kernels in order: (tag, equations); collectives and loops stand alone."""
    kernels: list[tuple[tuple[int, str] | None, list[JaxprEqn]]] = []
    for eqn in jaxpr.eqns:
        tag = group_tag(eqn)
        alone = eqn.primitive.name in COLLECTIVES or eqn.primitive.name in ("scan", "while", "cond")
        if tag is not None and not alone and kernels and kernels[-1][0] == tag:
            kernels[-1][1].append(eqn)
        else:
            kernels.append((None if alone else tag, [eqn]))
    return kernels


@dataclass
class _Walk:
    machine: Machine
    loop_trips: int
    sources: Mapping[int, str]

    def __post_init__(self) -> None:
        self.entries: list[Entry] = []
        self.collectives: list[Collective] = []
        self.notes: list[str] = []

    def body(self, jaxpr: Any, count: float) -> None:
        used = _last_readers(jaxpr)
        for tag, eqns in kernels_of(jaxpr):
            name = eqns[0].primitive.name
            if name in COLLECTIVES:
                self._collective(eqns[0], count)
            elif name == "scan":
                self.body(eqns[0].params["jaxpr"].jaxpr, count * eqns[0].params["length"])
            elif name == "while":
                self._while(eqns[0], count)
            elif name == "cond":
                branches = eqns[0].params["branches"]
                for branch in branches:
                    self.body(branch.jaxpr, count / len(branches))
            elif next(_calls(eqns[0]), None) is not None and len(eqns) == 1:
                for inner in _calls(eqns[0]):
                    self.body(inner, count)
            else:
                self._kernel(tag, eqns, used, count)

    def _while(self, eqn: JaxprEqn, count: float) -> None:
        self.notes.append(f"a while loop of unknown length is counted {self.loop_trips} time(s)")
        self.body(eqn.params["cond_jaxpr"].jaxpr, count * self.loop_trips)
        self.body(eqn.params["body_jaxpr"].jaxpr, count * self.loop_trips)

    def _collective(self, eqn: JaxprEqn, count: float) -> None:
        cost = self.machine.eqn_collective(eqn)
        if not cost.seconds:
            return
        kind = COLLECTIVES[eqn.primitive.name]
        axes = eqn.params.get("axes") or eqn.params.get("axis_name")
        names = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
        number = reshard_tag(eqn)
        source = self.sources.get(number, "")
        self.entries.append(
            Entry(
                title=kind, kind="collective", cost=cost, count=count, group=number, source=source, axes=names
            )
        )
        for a, b in zip(eqn.invars, eqn.outvars, strict=True):
            sizes = [_size(a), _size(b)]
            self.collectives.append(
                Collective(
                    kind=kind,
                    axes=names,
                    full_bytes=max(sizes),
                    sent_bytes=cost.ici_bytes,
                    count=count,
                    seconds=cost.seconds,
                    dtype=str(b.aval.dtype),
                    shape=tuple(b.aval.shape),
                    group=number,
                    source=source,
                )
            )

    def _kernel(
        self,
        tag: tuple[int, str] | None,
        eqns: list[JaxprEqn],
        used: Callable[[Iterable[JaxprEqn]], list[Any]],
        count: float,
    ) -> None:
        if tag is None and all(not v.aval.shape for e in eqns for v in e.outvars):
            return  # addresses of a reshard: the scalar unit's work
        cost = self.kernel_cost(tag, eqns, used(eqns))
        if cost is FREE:
            return
        title = tag[1] if tag else eqns[-1].primitive.name
        number = tag[0] if tag else reshard_tag(eqns[0])
        kind = "kernel" if tag else "reshard"
        self.entries.append(
            Entry(
                title=title,
                kind=kind,
                cost=cost,
                count=count,
                group=number,
                source=self.sources.get(number, ""),
            )
        )

    def kernel_cost(self, tag: tuple[int, str] | None, eqns: list[JaxprEqn], outputs: list[Any]) -> Cost:
        eqn = eqns[0]
        if tag is None and eqn.primitive.name == "dynamic_slice" and reshard_tag(eqn) >= 0:
            return self.machine.slice_cost(eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype)
        return self.machine.kernel(eqns, outputs)


def _size(var: Any) -> float:
    size = itemsize(var.aval.dtype)
    for n in var.aval.shape:
        size *= n
    return size


def _last_readers(jaxpr: Any) -> Callable[[Iterable[JaxprEqn]], list[Any]]:
    """Return a function that lists what some equations make and others read."""
    readers: dict[Any, set[int]] = {}
    for eqn in jaxpr.eqns:
        for var in eqn.invars:
            if not isinstance(var, Literal):
                readers.setdefault(var, set()).add(id(eqn))
    final = {v for v in jaxpr.outvars if not isinstance(v, Literal)}

    def crossing(eqns: Iterable[JaxprEqn]) -> list[Any]:
        inside = {id(e) for e in eqns}
        return [v for e in eqns for v in e.outvars if v in final or readers.get(v, set()) - inside]

    return crossing


__all__ += ["Buffer", "add_costs", "group_tag", "kernels_of", "reshard_tag"]
