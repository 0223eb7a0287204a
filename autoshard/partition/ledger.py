"""The ledger of a per-device program: walk its equations, price kernels and collectives, count loop trips.

Equations of one group run as one kernel; the emitter marks them with a name scope, `g12.dot_general`.
Equations without a mark (a reshard, or a program written by hand) are kernels of their own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal

from autoshard.fusion import OUTPUT_SCOPE, PARTIAL_SCOPE, PLAIN, Fused, Rider, Tail
from autoshard.partition.nested import bodies
from autoshard.partition.price import COLLECTIVES, FREE, Cost, Machine
from autoshard.partition.schedule import Timeline
from autoshard.partition.steps import SLICES
from autoshard.program import Equation, itemsize
from autoshard.rules.host import SCOPE
from autoshard.rules.windowed import OVERLAPPED

__all__ = ["Collective", "Entry", "Ledger", "calls", "kernels_of"]

_GROUP = re.compile(r"^g(\d+)\.(.*)$")
# Resharding for a group; also what a program or the body of a loop returns is resharded.
_RESHARD = re.compile(r"^(?:r(\d+)|outputs|yield)$")
_CONTROL = frozenset({"scan", "while", "cond"})
_CALLS = frozenset(
    "jit pjit closed_call core_call custom_jvp_call custom_vjp_call remat2 checkpoint shard_map".split()
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
    """A line of the ledger: a kernel or a collective, its cost for one run and the runs in a step.

    `hidden` are the seconds of one run of a collective in which kernels run beside it.
    """

    title: str
    kind: str
    cost: Cost
    count: float
    group: int = -1
    source: str = ""
    axes: tuple[str, ...] = ()
    hidden: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds in a step."""
        return self.cost.seconds * self.count

    @property
    def exposed_seconds(self) -> float:
        """Seconds in a step in which nothing else runs beside it."""
        return (self.cost.seconds - self.hidden) * self.count


def calls(eqn: Equation) -> Iterator[Any]:
    """Yield the body of a call."""
    if eqn.primitive.name in _CALLS:
        body = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
        yield body.jaxpr if isinstance(body, ClosedJaxpr) else body


def group_tag(eqn: Any) -> tuple[int, str] | None:
    """Read the number and title of the group that an equation was emitted for."""
    for part in reversed(str(eqn.source_info.name_stack).split("/")):
        match = _GROUP.match(part)
        if match:
            return int(match[1]), match[2]
        if _RESHARD.match(part):
            return None
    return None


def _emitted_for(eqn: Equation) -> tuple[int, str] | None:
    """Tag of the group whose emission binds a loop; None for a loop of the program's own."""
    tag = group_tag(eqn)
    return tag if tag and tag[1] not in _CONTROL else None


def reshard_tag(eqn: Any) -> int:
    """Read the number of the group that an equation reshards for; -1 if for none."""
    for part in reversed(str(eqn.source_info.name_stack).split("/")):
        match = _RESHARD.match(part)
        if match:
            return int(match[1]) if match[1] else -1
    return -1


def reshards(eqn: Any) -> bool:
    """Tell whether an equation was emitted to reshard."""
    return any(_RESHARD.match(part) for part in str(eqn.source_info.name_stack).split("/"))


def overlaps(eqn: Any) -> bool:
    """Tell a loop that was emitted so that its collectives run beside its kernels."""
    return OVERLAPPED in str(eqn.source_info.name_stack).split("/")


def kernels_of(
    jaxpr: Any, within: tuple[int, str] | None = None
) -> list[tuple[tuple[int, str] | None, list[Equation]]]:
    """Cut a body into kernels in order: (tag, equations); collectives and loops stand alone.

    `within` is the tag of the group whose emission binds the loop that the body belongs to: tracing a loop
    leaves no name scope inside.
    """
    kernels: list[tuple[tuple[int, str] | None, list[Equation]]] = []
    for eqn in jaxpr.eqns:
        tag = group_tag(eqn) or within
        alone = eqn.primitive.name in COLLECTIVES or eqn.primitive.name in _CONTROL
        if tag is not None and not alone and kernels and kernels[-1][0] == tag:
            kernels[-1][1].append(eqn)
        else:
            kernels.append((None if alone else tag, [eqn]))
    return kernels


@dataclass
class Ledger:
    """Collects entries; `body` walks a jaxpr body that runs `count` times."""

    machine: Machine
    loop_trips: int
    sources: Mapping[int, str]
    fused: Mapping[int, Fused] = field(default_factory=dict)
    riders: dict[Any, Rider] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tails: dict[Any, Tail] = {}  # results of products that end in another group's work
        self.parted: set[Any] = set()  # those of them that are stored: partial sums
        self.moved: dict[Any, int] = {}  # what was resharded on its way, and for which group
        self.unstored: dict[
            Any, list[Equation]
        ] = {}  # what is computed on the spot, and the kernel that would
        self.entries: list[Entry] = []
        self.collectives: list[Collective] = []
        self.notes: list[str] = []

    def body(self, jaxpr: Any, count: float, within: tuple[int, str] | None = None) -> None:
        used = _last_readers(jaxpr)
        kernels = kernels_of(jaxpr, within)
        pieces = _pieces(kernels)
        timeline = Timeline(self.machine.beside if count else frozenset(), count)
        for i, (tag, eqns) in enumerate(kernels):
            name, mark = eqns[0].primitive.name, len(self.entries)
            if reshards(eqns[0]):
                self._stores(eqns[0], count)
            if name in COLLECTIVES:
                self._collective(eqns[0], count)
            elif name == "scan" and overlaps(eqns[0]):
                self._overlapped(eqns[0], count)
            elif name == "scan":
                times = count * eqns[0].params["length"]
                self._scanned(eqns[0], times)
                self.body(eqns[0].params["jaxpr"].jaxpr, times, _emitted_for(eqns[0]) or within)
            elif name == "while":
                self._while(eqns[0], count)
            elif name == "cond":
                self._cond(eqns[0], count)
            elif next(calls(eqns[0]), None) is not None and len(eqns) == 1:
                for inner in calls(eqns[0]):
                    self.body(inner, count)
            else:
                whole = tag is not None and len(pieces[tag[0]]) == 1
                self._kernel(tag, eqns, used, count, whole)
            number = _number(tag, eqns[0])
            tail = self.fused.get(number, PLAIN).tail
            if tail is not None and len(pieces[number]) > 1 and pieces[number][-1] == i:
                # A product in several kernels, with an exchange between: what follows it is one more.
                result = eqns[-1].outvars[-1]
                self._enter("apart", self.machine.apart_cost(result, tail), number, count)
                self.tails[result] = tail
            timeline.add(eqns, self.entries[mark:], mark)
        for at, hidden in timeline.hidden():
            self.entries[at] = replace(self.entries[at], hidden=hidden)

    def _scanned(self, eqn: Equation, times: float) -> None:
        """Price the copies of what a scan slices and stacks."""
        number = _number(None, eqn)
        if number not in self.fused:
            return
        fused, body, carries = self.fused[number], eqn.params["jaxpr"].jaxpr, eqn.params["num_carry"]
        for var, rider in zip(body.invars[eqn.params["num_consts"] + carries :], fused.slices, strict=True):
            if rider is None:
                self._enter("slice of a scan", self.machine.copying_cost(var), number, times)
            else:
                self.riders[var] = rider
                self.unstored[var] = []
        for var, copies in zip(body.outvars[carries:], fused.stacks, strict=True):
            if copies:
                self._enter("stack of a scan", self.machine.copying_cost(var), number, times * copies)

    def _overlapped(self, eqn: Equation, count: float) -> None:
        """A loop whose collectives run beside its kernels: what they take longer than these is exposed."""
        inner = Ledger(machine=self.machine, loop_trips=self.loop_trips, sources=self.sources)
        inner.body(eqn.params["jaxpr"].jaxpr, 1.0)
        busy = sum(e.seconds for e in inner.entries if e.kind != "collective")
        wire = sum(e.seconds for e in inner.entries if e.kind == "collective")
        exposed = max(0.0, wire - busy) / wire if wire else 0.0
        tag, times = group_tag(eqn), count * eqn.params["length"]
        title, number = (tag[1], tag[0]) if tag else ("scan", -1)
        for e in inner.entries:
            on_wire = e.kind == "collective"
            cost = replace(e.cost, seconds=e.cost.seconds * exposed) if on_wire else e.cost
            self.entries.append(
                replace(
                    e,
                    title=e.title if on_wire else title,
                    kind=e.kind if on_wire else "kernel",
                    cost=cost,
                    count=e.count * times,
                    group=number,
                    source=self.sources.get(number, ""),
                )
            )
        for c in inner.collectives:
            self.collectives.append(
                replace(c, count=c.count * times, seconds=c.seconds * exposed, group=number)
            )

    def _while(self, eqn: Equation, count: float) -> None:
        self.notes.append(f"a while loop of unknown length is counted {self.loop_trips} time(s)")
        self.body(eqn.params["cond_jaxpr"].jaxpr, count * self.loop_trips)
        self.body(eqn.params["body_jaxpr"].jaxpr, count * self.loop_trips)

    def _cond(self, eqn: Any, count: float) -> None:
        if SCOPE in str(eqn.source_info.name_stack).split("/"):
            self.body(eqn.params["branches"][1].jaxpr, count)
            return
        if not eqn.params.get("branches_platforms"):
            self.notes.append("the branches of a cond are counted as equally likely")
        for body, share in bodies(eqn):
            if share:
                self.body(body, count * share)

    def _collective(self, eqn: Equation, count: float) -> None:
        cost = self.machine.eqn_collective(eqn)
        if not cost.seconds:
            return
        kind = COLLECTIVES[eqn.primitive.name]
        axes = eqn.params.get("axes") or eqn.params.get("axis_name")
        names = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
        tag = group_tag(eqn)
        number = tag[0] if tag else reshard_tag(eqn)
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

    def _stores(self, eqn: Equation, count: float) -> None:
        """Price storing what is resharded from where it would be computed on the spot."""
        number = reshard_tag(eqn)
        for var in eqn.invars:
            if isinstance(var, Literal) or not (var in self.riders or var in self.tails):
                continue
            if self.moved.get(var) != number and var not in self.parted:
                stored = (
                    self.machine.storing_cost(var, self.riders[var])
                    if var in self.riders
                    else self.machine.parting_cost(var, self.tails[var])
                )
                self._enter("store", stored, number, count)
                self.unstored.pop(var, None)
            for table in (self.riders, self.tails):
                if var in table:
                    table.update(dict.fromkeys(eqn.outvars, table[var]))
            self.moved.update(dict.fromkeys(eqn.outvars, number))

    def _enter(self, title: str, cost: Cost, number: int, count: float) -> None:
        if cost is not FREE:
            source = self.sources.get(number, "")
            self.entries.append(
                Entry(title=title, kind="kernel", cost=cost, count=count, group=number, source=source)
            )

    def _fused(self, number: int, eqns: list[Equation], count: float, whole: bool) -> Fused:
        """Return how a group shares kernels, and note what that makes of its results."""
        fused = self.fused.get(number, PLAIN)
        made = {v: e for e in eqns for v in e.outvars}
        if fused.tail is not None and any(map(_is_partial, eqns)):
            self.tails.update(dict.fromkeys(made, fused.tail))
            self.parted |= made.keys()
            whole = False
        if not whole:
            fused = replace(fused, tail=None)
        for var, position in _outputs(eqns).items() if fused.outputs else ():
            rider = fused.outputs[position]
            if rider is not None:
                self.riders[var] = rider
                self.unstored[var] = eqns
        if fused.tail is not None:
            self.tails.update(dict.fromkeys(made, fused.tail))
            if not fused.tail.stored:
                self.unstored.update(dict.fromkeys(made, eqns))
        if fused.within is not None:
            for var in dict.fromkeys(v for e in eqns for v in e.invars if not isinstance(v, Literal)):
                if self.tails.get(var) is fused.within and (var in self.moved or var in self.parted):
                    self._enter("apart", self.machine.apart_cost(var, fused.within), number, count)
        return fused

    def _kernel(
        self,
        tag: tuple[int, str] | None,
        eqns: list[Equation],
        used: Callable[[Iterable[Equation]], list[Any]],
        count: float,
        whole: bool,
    ) -> None:
        bare = tag is None or tag[1] in _CONTROL
        if bare and all(not v.aval.shape for e in eqns for v in e.outvars):
            return  # addresses of a reshard, the index of a branch: the scalar unit's work
        cost = self.kernel_cost(tag, eqns, used(eqns), count, whole)
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

    def kernel_cost(
        self,
        tag: tuple[int, str] | None,
        eqns: list[Equation],
        outputs: list[Any],
        count: float,
        whole: bool,
    ) -> Cost:
        eqn = eqns[0]
        if tag is None and eqn.primitive.name in SLICES and reshards(eqn):
            return self.machine.slice_cost(eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype)
        fused = self._fused(tag[0], eqns, count, whole) if tag else PLAIN
        return self.machine.kernel(eqns, [v for v in outputs if v not in self.riders], fused, self.riders)


def _outputs(eqns: Sequence[Any]) -> dict[Any, int]:
    """The results of an elementwise group's equations that are outputs of it, with their positions."""
    found = {}
    for eqn in eqns:
        scope = str(eqn.source_info.name_stack).rsplit("/", 1)[-1]
        if scope.startswith(OUTPUT_SCOPE):
            found[int(scope.removeprefix(OUTPUT_SCOPE))] = eqn.outvars[0]
    return {var: position for position, var in found.items()}


def _is_partial(eqn: Any) -> bool:
    """Tell an equation of a group that leaves partial sums."""
    return PARTIAL_SCOPE in str(eqn.source_info.name_stack).split("/")


def _number(tag: tuple[int, str] | None, eqn: Equation) -> int:
    """Number of the group that a kernel or collective belongs to; -1 for none."""
    found = tag or group_tag(eqn)
    return found[0] if found else -1


def _pieces(kernels: Sequence[tuple[tuple[int, str] | None, list[Equation]]]) -> dict[int, list[int]]:
    """Places of the kernels and collectives of every group."""
    found: dict[int, list[int]] = defaultdict(list)
    for i, (tag, eqns) in enumerate(kernels):
        found[_number(tag, eqns[0])].append(i)
    return found


def _size(var: Any) -> float:
    size = itemsize(var.aval.dtype)
    for n in var.aval.shape:
        size *= n
    return size


def _last_readers(jaxpr: Any) -> Callable[[Iterable[Equation]], list[Any]]:
    """Return a function that lists what some equations make and others read."""
    readers: dict[Any, set[int]] = {}
    for eqn in jaxpr.eqns:
        for var in eqn.invars:
            if not isinstance(var, Literal):
                readers.setdefault(var, set()).add(id(eqn))
    final = {v for v in jaxpr.outvars if not isinstance(v, Literal)}

    def crossing(eqns: Iterable[Equation]) -> list[Any]:
        inside = {id(e) for e in eqns}
        return [v for e in eqns for v in e.outvars if v in final or readers.get(v, set()) - inside]

    return crossing
