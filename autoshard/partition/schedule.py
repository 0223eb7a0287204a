"""What of a body's communication runs beside its kernels.

Kernels run one at a time on the core. Asynchronous collectives run one at a time on the wire, beside them; other
collectives, and loops that hold some, take both. Whoever is ready and has the longest way to the end of the body
goes first: list scheduling by critical path, as latency-hiding schedulers of compilers do. Iterations of a loop
do not run into each other.

Source: Graham, Bounds on multiprocessing timing anomalies, 1969 (list scheduling); the XLA TPU compiler's schedules
(one all-gather at a time, the body of a loop by itself).
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jax.extend.core import Literal

from autoshard.partition.price import COLLECTIVES

if TYPE_CHECKING:
    from autoshard.partition.ledger import Entry

__all__ = ["Task", "Timeline", "Unit", "hidden_seconds"]


class Unit(enum.Enum):
    """What a task keeps busy."""

    CORE = enum.auto()
    WIRE = enum.auto()
    BOTH = enum.auto()


@dataclass(frozen=True, kw_only=True)
class Task:
    """Something that takes `seconds` of a unit, after the tasks at the places in `after`, all earlier ones."""

    unit: Unit
    seconds: float
    after: Sequence[int]


def hidden_seconds(tasks: Sequence[Task]) -> list[float]:
    """Schedule tasks and return for each how long it runs beside the core's; 0 for all that is not on the wire.

    >>> gather = Task(unit=Unit.WIRE, seconds=3.0, after=())
    >>> product = Task(unit=Unit.CORE, seconds=2.0, after=())
    >>> hidden_seconds([gather, product, Task(unit=Unit.CORE, seconds=1.0, after=(0, 1))])
    [2.0, 0.0, 0.0]

    """
    return _Schedule(tasks).run()


@dataclass
class Timeline:
    """One run of a body, noted down piece by piece.

    `beside` are the kinds of collectives that are asynchronous; without any, nothing is noted. The body runs `count`
    times in a step.
    """

    beside: frozenset[str]
    count: float
    tasks: list[Task] = field(default_factory=list)
    makers: dict[Any, int] = field(default_factory=dict)
    wires: dict[int, int] = field(default_factory=dict)  # ledger's places of the collectives, by task

    def add(self, eqns: Sequence[Any], entries: Sequence[Entry], place: int) -> None:
        """Add a kernel, collective or loop, and its entries, the first of which is at `place` of the ledger."""
        if not self.beside:
            return
        reads = dict.fromkeys(v for e in eqns for v in e.invars if not isinstance(v, Literal))
        after = {self.makers[v] for v in reads if v in self.makers}
        if entries and eqns[0].primitive.name in COLLECTIVES and entries[-1].title in self.beside:
            if len(entries) > 1:
                after = {self._task(Unit.CORE, entries[:-1], after)}
            here = self._task(Unit.WIRE, entries[-1:], after)
            self.wires[here] = place + len(entries) - 1
        else:
            wired = any(e.kind == "collective" for e in entries)
            here = self._task(Unit.BOTH if wired else Unit.CORE, entries, after)
        self.makers.update(dict.fromkeys((v for e in eqns for v in e.outvars), here))

    def _task(self, unit: Unit, entries: Sequence[Entry], after: set[int]) -> int:
        seconds = sum(e.exposed_seconds for e in entries) / self.count
        self.tasks.append(Task(unit=unit, seconds=seconds, after=tuple(after)))
        return len(self.tasks) - 1

    def hidden(self) -> Iterator[tuple[int, float]]:
        """Yield the ledger's places of collectives, and the seconds of one run that are hidden."""
        if self.wires:
            found = hidden_seconds(self.tasks)
            yield from ((place, found[i]) for i, place in self.wires.items() if found[i])


class _Schedule:
    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.readers: list[list[int]] = [[] for _ in tasks]
        for i, task in enumerate(tasks):
            for j in task.after:
                self.readers[j].append(i)
        self.waiting = [len(task.after) for task in tasks]
        self.way = [0.0] * len(tasks)  # seconds from the start of a task to the end of the body
        for i in reversed(range(len(tasks))):
            self.way[i] = tasks[i].seconds + max((self.way[j] for j in self.readers[i]), default=0.0)
        self.ready: dict[bool, list[tuple[float, int]]] = {True: [], False: []}  # for the wire, for the core
        self.running: list[tuple[float, int]] = []
        self.on: dict[bool, int | None] = {True: None, False: None}
        self.hidden = [0.0] * len(tasks)

    def run(self) -> list[float]:
        for i in [i for i, count in enumerate(self.waiting) if not count]:
            self._release(i)
        now = 0.0
        self._start(now)
        while self.running:
            end, i = heapq.heappop(self.running)
            wire, core = self.on[True], self.on[False]
            if wire is not None and core is not None and wire != core:
                self.hidden[wire] += end - now
            now = end
            self.on = {unit: None if at == i else at for unit, at in self.on.items()}
            self._finish(i)
            self._start(now)
        return self.hidden

    def _release(self, i: int) -> None:
        if self.tasks[i].seconds:
            heapq.heappush(self.ready[self.tasks[i].unit is Unit.WIRE], (-self.way[i], i))
        else:
            self._finish(i)

    def _finish(self, i: int) -> None:
        done = [i]
        while done:
            for j in self.readers[done.pop()]:
                self.waiting[j] -= 1
                if not self.waiting[j] and self.tasks[j].seconds:
                    self._release(j)
                elif not self.waiting[j]:
                    done.append(j)

    def _start(self, now: float) -> None:
        first = self.ready[False][0][1] if self.ready[False] and self.on[False] is None else None
        if first is not None and self.tasks[first].unit is Unit.BOTH:
            if self.on[True] is None:
                self._run(first, now, {True: first, False: first})
                heapq.heappop(self.ready[False])
            return  # nothing more enters the wire before it
        if first is not None:
            heapq.heappop(self.ready[False])
            self._run(first, now, {False: first})
        if self.ready[True] and self.on[True] is None:
            _, i = heapq.heappop(self.ready[True])
            self._run(i, now, {True: i})

    def _run(self, i: int, now: float, units: dict[bool, int]) -> None:
        self.on |= units
        heapq.heappush(self.running, (now + self.tasks[i].seconds, i))
