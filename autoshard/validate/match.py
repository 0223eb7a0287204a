"""Puts the collectives that a plan predicts beside those that a compiler wrote, and names each difference.

Both sides are lists of runs: kind, mesh axes, bytes, runs in a step. What agrees is paired first. Then the
known habits of XLA are recognised, each by its own name: it combines several collectives into one, sums where
a reduce-scatter or an all-gather was asked for, moves a cast across, adds partial sums before reducing them,
moves an array once for all that read it, and shifts the shards of a reduce-scatter into place. What is left
on either side is not explained.

A collective between slices is several runs on both sides, within slices and between them: so the TPU compiler
writes it, and so it is priced (`cost_models.collectives`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import cost_models as cm
from autoshard.estimate import Collective as Predicted
from autoshard.validate.collectives import Collective as Compiled

__all__ = ["Difference", "Match", "Run", "match"]

# Sizes agree within this much: shards of uneven dims are padded, scalars ride along.
_BYTES_RTOL = 0.02
# The TPU compiler widens some reduce-scatters by a shifted strip (6 % is the most seen).
_SCATTER_RTOL = 0.08
# At most so many collectives are looked for in one that combines them: by bytes that agree exactly, and nearly.
_COMBINED = {True: 64, False: 8}
# Where more sums of bytes are possible than this, what a collective combines is not looked for.
_SUMS = 100_000
# What XLA may run in place of what was asked for.
_STANDS_FOR = {
    "all-reduce": ("all-reduce", "reduce-scatter", "all-gather"),
    "reduce-scatter": ("reduce-scatter",),
    "all-gather": ("all-gather",),
    "all-to-all": ("all-to-all",),
    "collective-permute": ("collective-permute",),
}
# Of each mesh axis the slices that it spans, and its size within one; empty for one slice.
Levels = Mapping[str, tuple[int, int]]
_BETWEEN = ("slices",)
_TAG = re.compile(r"(?:^|/)([gr])(\d+)(?=[./]|$)")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A collective on one side, run `trips` times in a step.

    Attributes:
      kind: as HLO names it.
      axes: mesh axes, sorted; "data within" for the part of an axis within a slice, "slices" between slices.
      bytes: of the larger side on one device, unpadded.
      trips: runs in a step.
      group: number of the group of ops that it serves; -1 if unknown.
      origin: where it comes from, for people.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    trips: float
    group: int
    origin: str

    @property
    def step_bytes(self) -> float:
        """Bytes of all runs in a step."""
        return self.bytes * self.trips

    def __str__(self) -> str:
        where = f" from {self.origin}" if self.origin else ""
        return (
            f"{self.kind} {megabytes(self.bytes)} over {'*'.join(self.axes) or '?'} x {self.trips:g}{where}"
        )


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Something that the two sides do differently.

    Attributes:
      name: of the kind of difference, the same for all of its sort.
      detail: this one, in words.
      predicted_bytes, compiled_bytes: what is in it on each side, in a step.
      explained: whether it is a known habit of the compiler; what is not may be a fault of the plan.
    """

    name: str
    detail: str
    predicted_bytes: float
    compiled_bytes: float
    explained: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


@dataclass(frozen=True, kw_only=True)
class Match:
    """The outcome: both sides in full, how many runs agree, and the differences, largest first."""

    predicted: tuple[Run, ...]
    compiled: tuple[Run, ...]
    agreed: int
    differences: tuple[Difference, ...]

    @property
    def unexplained_share(self) -> float:
        """Bytes that only one side has and nothing explains, relative to the larger side's total."""
        total = max(sum(r.step_bytes for r in self.predicted), sum(r.step_bytes for r in self.compiled))
        odd = sum(abs(d.compiled_bytes - d.predicted_bytes) for d in self.differences if not d.explained)
        return odd / total if total else 0.0


def megabytes(size: float) -> str:
    """Write a size in decimal units.

    >>> megabytes(117_440_512)
    '117 MB'
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B"


def predicted_runs(
    collectives: Iterable[Predicted], *, widened: bool = False, levels: Levels = MappingProxyType({})
) -> tuple[Run, ...]:
    """List what a plan's estimate holds.

    Args:
      collectives: those of the estimate.
      widened: count 16-bit floats as 32-bit ones, as XLA's CPU compiler computes them.
      levels: what of each axis is between slices and what within, where the compiler knows of slices.
    """
    return tuple(
        Run(kind=kind, axes=axes, bytes=size, trips=c.count, group=c.group, origin=c.source)
        for c in collectives
        for kind, axes, size in _levelled(
            c.kind.replace("_", "-"),
            c.axes,
            c.full_bytes * (2 if widened and c.dtype in ("bfloat16", "float16") else 1),
            levels,
        )
    )


def levels_of(placement: cm.Placement) -> Levels:
    """Return how much of each mesh axis lies between slices, and how much within one; nothing for one slice.

    >>> levels_of(cm.place(cm.Topology.parse("2*v5e:4x4"), {"data": 8, "model": 4}))
    {'data': (2, 4), 'model': (1, 4)}
    """
    if placement.topology.num_slices == 1:
        return {}
    between = [
        math.prod(segment.extent for segment in segments if segment.axis == "slice")
        for segments in placement.segments
    ]
    return {name: (n, size // n) for (name, size), n in zip(placement.mesh, between, strict=True)}


def _levelled(
    kind: str, axes: Sequence[str], size: float, levels: Levels
) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Yield kind, axes and bytes of what a collective is within and between slices."""
    within = _within((axis for axis in axes if axis not in levels or levels[axis][1] > 1), levels)
    if not any(axis in levels and levels[axis][0] > 1 for axis in axes):
        yield kind, tuple(sorted(axes)), size
        return
    part = size / math.prod(levels[axis][1] for axis in axes)
    if kind in ("all-reduce", "reduce-scatter") and within:
        yield "reduce-scatter", within, size
    yield kind, _BETWEEN, size if kind in ("all-to-all", "collective-permute") else part
    if kind in ("all-reduce", "all-gather") and within:
        yield "all-gather", within, size
    if kind == "collective-permute" and within:
        yield kind, within, size


def _within(axes: Iterable[str], levels: Levels) -> tuple[str, ...]:
    return tuple(
        sorted(f"{axis} within" if axis in levels and levels[axis][0] > 1 else axis for axis in axes)
    )


def compiled_runs(
    collectives: Iterable[Compiled], sources: Mapping[int, str], levels: Levels = MappingProxyType({})
) -> tuple[Run, ...]:
    """List what a compiled program holds, each instruction by itself.

    Args:
      collectives: those of the compiled program.
      sources: the user's source line by group number; the instruction itself names the emitter's.
      levels: as for `predicted_runs`.
    """
    return tuple(
        Run(
            kind=c.kind,
            axes=_BETWEEN if c.slices > 1 else _within(c.axes, levels),
            bytes=float(c.bytes),
            trips=float(c.trips),
            group=group_of(c.op_name),
            origin=sources.get(group_of(c.op_name), "") or c.op_name or c.name,
        )
        for c in collectives
        for _ in range(c.count)
    )


def group_of(op_name: str) -> int:
    """Read the number of the group from the innermost scope that the emitter set; -1 without one.

    >>> group_of("jit(f)/shard_map/g22.scan/while/body/r28/all_gather")
    28
    """
    found = _TAG.findall(op_name)
    return int(found[-1][1]) if found else -1


def match(predicted: Sequence[Run], compiled: Sequence[Run]) -> Match:
    """Pair the runs of both sides and name what differs.

    Args:
      predicted: runs by the estimate.
      compiled: runs in the compiled program.

    Example:
      >>> ask = Run(kind="reduce-scatter", axes=("x",), bytes=8e6, trips=1, group=0, origin="")
      >>> got = Run(kind="all-reduce", axes=("x",), bytes=8e6, trips=1, group=0, origin="")
      >>> print(match([ask], [got]).differences[0])
      all-reduce instead of reduce-scatter: 8 MB over x x 1
    """
    state = _State(predicted=list(predicted), compiled=list(compiled))
    for exactly in (True, False):
        state.same(exactly)
        state.combined(exactly)
    state.recast()
    state.added_first()
    state.shared()
    state.shifted()
    state.leftovers()
    ordered = sorted(state.found, key=lambda d: -max(d.predicted_bytes, d.compiled_bytes))
    return Match(
        predicted=tuple(predicted), compiled=tuple(compiled), agreed=state.agreed, differences=tuple(ordered)
    )


@dataclass
class _State:
    """What is not paired yet on either side, and the differences so far."""

    predicted: list[Run]
    compiled: list[Run]

    def __post_init__(self) -> None:
        self.found: list[Difference] = []
        self.paired: list[Run] = []
        self.agreed = 0

    def same(self, exactly: bool) -> None:
        """Pair equals, those of one group first."""
        rtol = 1e-9 if exactly else _BYTES_RTOL
        for near in (True, False):
            for got in list(self.compiled):
                fits = [
                    ask
                    for ask in self._like(got)
                    if ask.kind == got.kind
                    and _close(ask.bytes, got.bytes, rtol)
                    and (ask.group == got.group) >= near
                ]
                if fits:
                    self._pair(min(fits, key=lambda ask: (abs(ask.bytes - got.bytes), self._seen(ask))), got)
                    self.agreed += 1

    def combined(self, exactly: bool) -> None:
        """Find sets of predicted runs whose bytes add up to a compiled one, possibly of another kind."""
        for got in sorted(self.compiled, key=lambda run: -run.bytes):
            asked = _adding_up(self._standing_for(got), got, exactly)
            if not asked:
                continue
            kinds = sorted({ask.kind for ask in asked})
            others = [kind for kind in kinds if kind != got.kind]
            if others:
                name = f"{got.kind} instead of {' and '.join(others)}"
                if len(asked) > 1:
                    name += ", combined"
            elif len(asked) > 1:
                name = f"combined {got.kind}"
            else:
                name = f"widened {got.kind}"
            self._pair_all(name, asked, got)

    def recast(self) -> None:
        """Pair runs of another element size: a cast moved to the other side of the collective."""
        for got in list(self.compiled):
            for ask in self._standing_for(got):
                ratio = got.bytes / ask.bytes if ask.bytes else 0.0
                if any(_close(ratio, r) for r in (0.25, 0.5, 2.0, 4.0)):
                    way = "before" if ratio < 1 else "after"
                    self._pair_all(f"{got.kind} in another dtype (cast narrower {way} it)", [ask], got)
                    break

    def added_first(self) -> None:
        """Drop predicted reductions whose partial sums the compiler adds before it reduces them once."""
        for ask in list(self.predicted):
            once = next(
                (
                    run
                    for run in self.paired
                    if ask.kind in ("reduce-scatter", "all-reduce")
                    and (run.kind, run.axes, run.group, run.bytes, run.trips)
                    == (ask.kind, ask.axes, ask.group, ask.bytes, ask.trips)
                ),
                None,
            )
            if once is not None:
                self.predicted.remove(ask)
                self._note(f"partial sums added before one {ask.kind}", str(ask), [ask], [])

    def shared(self) -> None:
        """Drop predicted moves of an array that the compiler moves once for several readers.

        An array that two groups read in the same layout is predicted to move for each; which array it is, the
        estimate does not say, so equal kind, axes, bytes and runs stand for it.
        """
        kinds = ("all-gather", "all-to-all", "collective-permute")
        for ask in list(self.predicted):
            if ask.kind in kinds and any(
                (run.kind, run.axes, run.bytes, run.trips) == (ask.kind, ask.axes, ask.bytes, ask.trips)
                for run in self.paired
            ):
                self.predicted.remove(ask)
                self._note(f"one {ask.kind} for several readers", str(ask), [ask], [])

    def shifted(self) -> None:
        """Recognise the permutes by which the TPU compiler puts the shards of a reduce-scatter in place."""
        scattered = {(run.axes, run.trips) for run in self.paired if run.kind == "reduce-scatter"}
        for got in list(self.compiled):
            if got.kind == "collective-permute" and (got.axes, got.trips) in scattered:
                self.compiled.remove(got)
                self._note("collective-permute behind a reduce-scatter", str(got), [], [got])

    def leftovers(self) -> None:
        """Name what only one side has."""
        for got in self.compiled:
            self._note("collective not predicted", str(got), [], [got], explained=False)
        for ask in self.predicted:
            self._note("predicted collective not compiled", str(ask), [ask], [], explained=False)

    def _seen(self, ask: Run) -> int:
        """How many runs for the same group are paired already: each group gets one before any gets two."""
        return sum(run.group == ask.group for run in self.paired)

    def _like(self, got: Run) -> list[Run]:
        return [ask for ask in self.predicted if ask.axes == got.axes and ask.trips == got.trips]

    def _standing_for(self, got: Run) -> list[Run]:
        kinds = _STANDS_FOR.get(got.kind, (got.kind,))
        return [ask for ask in self._like(got) if ask.kind in kinds]

    def _pair(self, ask: Run, got: Run) -> None:
        self.predicted.remove(ask)
        self.compiled.remove(got)
        self.paired.append(ask)

    def _pair_all(self, name: str, asked: Sequence[Run], got: Run) -> None:
        for ask in asked:
            self.predicted.remove(ask)
            self.paired.append(ask)
        self.compiled.remove(got)
        parts = " + ".join(megabytes(ask.bytes) for ask in asked)
        size = parts if len(asked) > 1 or not _close(asked[0].bytes, got.bytes) else ""
        detail = f"{megabytes(got.bytes)} over {'*'.join(got.axes)} x {got.trips:g}"
        origins = list(dict.fromkeys(ask.origin for ask in asked if ask.origin))
        detail += f" for {size}" if size else ""
        detail += f" from {', '.join(origins)}" if origins else ""
        self._note(name, detail, asked, [got])

    def _note(
        self, name: str, detail: str, asked: Sequence[Run], got: Sequence[Run], *, explained: bool = True
    ) -> None:
        self.found.append(
            Difference(
                name=name,
                detail=detail,
                predicted_bytes=sum(run.step_bytes for run in asked),
                compiled_bytes=sum(run.step_bytes for run in got),
                explained=explained,
            )
        )


def _close(a: float, b: float, rtol: float = _BYTES_RTOL) -> bool:
    return abs(a - b) <= rtol * max(abs(a), abs(b))


def _adding_up(asked: Sequence[Run], got: Run, exactly: bool) -> list[Run]:
    """Find the smallest set of runs with the bytes of `got`, of one kind or of several."""
    near = (_SCATTER_RTOL if got.kind == "reduce-scatter" else _BYTES_RTOL) * got.bytes
    slack = 0.5 if exactly else near
    pools = [[run for run in asked if run.kind == kind] for kind in _STANDS_FOR.get(got.kind, (got.kind,))]
    if len(pools) > 1:
        pools.append(list(asked))
    for pool in pools:
        if pool and abs(sum(run.bytes for run in pool) - got.bytes) <= slack:
            return pool
        small = [run for run in pool if run.bytes <= got.bytes + slack]
        small.sort(key=lambda run: -run.bytes)
        found = _subset(small, got.bytes, slack, _COMBINED[exactly])
        if found:
            return found
    return []


def _subset(runs: Sequence[Run], target: float, slack: float, most: int) -> list[Run]:
    """Find the fewest runs whose bytes add up to `target`, at most so many; none where there are too many sums."""
    of_size: dict[float, list[Run]] = {}
    for run in runs:
        of_size.setdefault(run.bytes, []).append(run)
    sums: dict[float, tuple[int, ...]] = {0.0: ()}  # how many of each size make up a sum
    for size, members in of_size.items():
        grown: dict[float, tuple[int, ...]] = {}
        for total, taken in sums.items():
            for count in range(min(len(members), most - sum(taken)) + 1):
                more = total + count * size
                if more > target + slack:
                    break
                if more not in grown or sum(taken) + count < sum(grown[more]):
                    grown[more] = (*taken, count)
        if len(grown) > _SUMS:
            return []
        sums = grown
    fitting = [taken for total, taken in sums.items() if abs(total - target) <= slack and taken]
    best = min(fitting, key=sum, default=())
    return [run for members, count in zip(of_size.values(), best, strict=False) for run in members[:count]]


def by_kind(found: Match) -> list[dict[str, object]]:
    """Add both sides up by kind and axes, the largest first: rows for a table."""
    keys = {(run.kind, run.axes) for run in itertools.chain(found.predicted, found.compiled)}
    rows: list[dict[str, object]] = []
    for kind, axes in keys:
        asked = [run for run in found.predicted if (run.kind, run.axes) == (kind, axes)]
        got = [run for run in found.compiled if (run.kind, run.axes) == (kind, axes)]
        rows.append(
            {
                "kind": kind,
                "axes": "*".join(axes) or "?",
                "predicted_runs": sum(run.trips for run in asked),
                "compiled_runs": sum(run.trips for run in got),
                "predicted_bytes": sum(run.step_bytes for run in asked),
                "compiled_bytes": sum(run.step_bytes for run in got),
            }
        )
    return sorted(rows, key=lambda row: (-_largest(row), str(row["kind"]), str(row["axes"])))


def _largest(row: dict[str, object]) -> float:
    return max(float(str(row["predicted_bytes"])), float(str(row["compiled_bytes"])))
