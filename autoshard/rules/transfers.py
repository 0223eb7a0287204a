"""Transfers: what every device receives along a split dim, in as few and as short permutes as serve.

An op's emission lists for every device the `Segment`s that its result is made of. Those that lie on other
devices are dealt to rounds; in a round every device sends at most one piece and receives at most one, so that a
round is one permute. What arrived is then laid into the result by one kernel.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from autoshard.addresses import cut
from autoshard.layout import Axes, MeshShape, coordinates, mesh_size, position
from autoshard.padding import pad_around, pad_end

__all__ = ["Round", "Segment", "assemble", "per_device", "permute", "rounds_of", "segments", "work"]


class Segment(NamedTuple):
    """Elements of one device's result that stand together in one device's part of one operand."""

    operand: int
    source: int  # position of the device that holds them
    start: int  # in its local array
    at: int  # in the result
    length: int


@dataclass(frozen=True)
class Round:
    """What is received at once: for every receiver one segment, no two of them from one device."""

    pieces: dict[int, Segment] = field(default_factory=dict)

    @property
    def is_local(self) -> bool:
        """Tell whether every device has its piece already."""
        return all(receiver == piece.source for receiver, piece in self.pieces.items())

    @property
    def length(self) -> int:
        """Elements that every source sends."""
        return max(piece.length for piece in self.pieces.values())

    def begins(self, parts: Sequence[int]) -> dict[int, int]:
        """Where in its array every source begins to send: at one place if that is no longer.

        `parts` are the local extents of the operands.
        """
        pieces, length = self.pieces.values(), self.length
        first = min(piece.start for piece in pieces)
        if max(piece.start + piece.length for piece in pieces) - first == length:
            return {piece.source: first for piece in pieces}
        return {p.source: max(0, min(p.start, parts[p.operand] - length)) for p in pieces}

    def places(self, parts: Sequence[int], ways: int) -> list[int]:
        """Where in each device's result a piece begins; who receives nothing has it where another one does."""
        begins = self.begins(parts)
        found = {p: piece.at - piece.start + begins[piece.source] for p, piece in self.pieces.items()}
        return [found.get(p, max(found.values())) for p in range(ways)]

    def load(self, ways: int) -> int:
        """How many pieces pass the busiest link of a ring."""
        ends = np.zeros((2, 2 * ways + 1), int)
        for receiver, piece in self.pieces.items():
            up, down = (receiver - piece.source) % ways, (piece.source - receiver) % ways
            way, begin = (0, piece.source) if up <= down else (1, receiver)
            ends[way, begin] += 1
            ends[way, begin + min(up, down)] -= 1
        loads = np.cumsum(ends, axis=1)
        return int((loads[:, :ways] + loads[:, ways : 2 * ways]).max())


def segments(
    operand: int, held: Sequence[int], part: int, first: int, last: int, at: int
) -> Iterator[Segment]:
    """Cut the elements from `first` to `last` of a split dim where devices' parts begin.

    Args:
      operand: number of the operand that the dim is of.
      held: where the parts begin, in increasing order.
      part: extent of a part; what a part has beyond the next one's begin is padding.
      first: first element.
      last: first element behind.
      at: where the first element stands in the result.
    """
    sources = range(bisect_right(held, first) - 1, bisect_right(held, last - 1)) if last > first else ()
    for j in sources:
        begin, end = max(first, held[j]), min([last, held[j] + part, *held[j + 1 : j + 2]])
        if begin < end:
            yield Segment(operand, j, begin - held[j], at + begin - first, end - begin)


def rounds_of(wanted: Sequence[Sequence[Segment]], parts: Sequence[int]) -> list[Round]:
    """Deal the segments of every device's result to rounds: those that move first, the local ones last.

    Of several ways to deal them out that is taken by which pieces need only be joined, if there is one; then that
    of the fewest rounds, and of the least work. `parts` are the local extents of the operands.
    """
    ways = len(wanted)
    each = [(rank, p, piece) for p, pieces in enumerate(wanted) for rank, piece in enumerate(pieces)]
    moved = [(p, piece) for _, p, piece in sorted(each, key=lambda e: e[0]) if piece.source != p]
    options = [
        _dealt(moved, lambda p, piece: piece.source - p),
        _dealt(moved, lambda p, piece: (piece.source - p) % ways),
        _matched(moved),
        _matched(sorted(moved, key=lambda e: -e[1].length)),
    ]
    local = _dealt([(p, s) for _, p, s in each if s.source == p], lambda p, piece: piece.operand)
    local = [r for r in local if r.length]

    def effort(rounds: list[Round]) -> tuple[bool, int, int]:
        return not _lie_apart(rounds + local, parts, ways), len(rounds), work(rounds, ways)

    return min(options, key=effort) + local


def _lie_apart(rounds: Iterable[Round], parts: Sequence[int], ways: int) -> bool:
    """Tell whether pieces lie apart, and each at the same place in every device's result."""
    places = [(r.places(parts, ways), r.length) for r in rounds]
    spans = sorted((at[0], at[0] + length) for at, length in places)
    apart = all(end <= then for (_, end), (then, _) in pairwise(spans))
    return apart and all(len(set(at)) == 1 for at, _ in places)


def work(rounds: Iterable[Round], ways: int) -> int:
    """Elements that pass the busiest link of a ring, one round after the other."""
    return sum(r.length * r.load(ways) for r in rounds)


def _dealt(each: Iterable[tuple[int, Segment]], key: Callable[[int, Segment], Hashable]) -> list[Round]:
    """One round for every key, and more where a receiver has several segments of one key."""
    rounds: dict[tuple[Any, int], Round] = {}
    for p, piece in each:
        rank = 0
        while p in rounds.setdefault((key(p, piece), rank), Round()).pieces:
            rank += 1
        rounds[key(p, piece), rank].pieces[p] = piece
    return list(rounds.values())


def _matched(each: Iterable[tuple[int, Segment]]) -> list[Round]:
    """Put each segment into the first round in which both its ends are free."""
    rounds: list[tuple[Round, set[int]]] = []
    for p, piece in each:
        free = (entry for entry in rounds if p not in entry[0].pieces and piece.source not in entry[1])
        found = next(free, None)
        if found is None:
            found = Round(), set()
            rounds.append(found)
        found[0].pieces[p] = piece
        found[1].add(piece.source)
    return [r for r, _ in rounds]


def assemble(
    operands: Sequence[Any], dim: int, axes: Axes, mesh: MeshShape, rounds: Sequence[Round], length: int
) -> Any:
    """Carry rounds out: return the array of `length` elements along `dim` that their segments make.

    What no segment covers is undefined; it is zero, or what an operand has in padding, if each device has a
    piece in every local round.
    """
    ways, parts = mesh_size(axes, mesh), [x.shape[dim] for x in operands]
    pieces = [_received(operands, dim, axes, mesh, r) for r in rounds]
    places = [r.places(parts, ways) for r in rounds]
    whole = all(len(r.pieces) == ways for r in rounds if r.is_local)
    if whole and _lie_apart(rounds, parts, ways):
        laid = sorted(zip([at[0] for at in places], pieces, strict=True), key=lambda e: e[0])
        return _joined(operands[0], dim, length, laid)
    return _overlaid(operands[0], dim, axes, length, rounds, pieces, places)


def _received(operands: Sequence[Any], dim: int, axes: Axes, mesh: MeshShape, r: Round) -> Any:
    """Cut out what this device sends, and return what it receives."""
    ways, begins = mesh_size(axes, mesh), r.begins([x.shape[dim] for x in operands])
    of = {piece.source: piece.operand for piece in r.pieces.values()}
    used = sorted(set(of.values()))
    cuts = []
    for i in used:
        own = {source: begin for source, begin in begins.items() if of[source] == i}
        other = next(iter(own.values()))
        table = [own.get(j, other) for j in range(ways)]
        x = pad_end(operands[i], dim, max(0, max(table) + r.length - operands[i].shape[dim]))
        if len(set(table)) == 1:
            cuts.append(lax.slice_in_dim(x, other, other + r.length, axis=dim))
        else:
            cuts.append(cut(x, per_device(table, axes), r.length, axis=dim))
    piece = cuts[0]
    if len(cuts) > 1:
        which = [used.index(of.get(j, used[0])) for j in range(ways)]
        piece = lax.select_n(lax.convert_element_type(per_device(which, axes), np.int32), *cuts)
    if r.is_local:
        return piece
    return permute(piece, axes, mesh, [(s.source, p) for p, s in r.pieces.items()])


def _joined(x: Any, dim: int, length: int, laid: Sequence[tuple[int, Any]]) -> Any:
    """Join pieces that lie apart, and at the same places on every device; gaps are filled with zeros."""
    row: list[Any] = []
    end = 0

    def gap(to: int) -> None:
        if to > end:
            row.append(_zeros(x, dim, to - end))

    for at, piece in laid:
        gap(at)
        end = at + piece.shape[dim]
        row.append(pad_around(piece, dim, min(0, at), min(0, length - end)))
    gap(length)
    return row[0] if len(row) == 1 else lax.concatenate(row, dim)


def _overlaid(
    x: Any,
    dim: int,
    axes: Axes,
    length: int,
    rounds: Sequence[Round],
    pieces: Sequence[Any],
    places: Sequence[Sequence[int]],
) -> Any:
    """Lay pieces over each other, each where its segments are; the lowest one everywhere."""
    ways = len(places[0]) if places else 1
    base = [i for i, r in enumerate(rounds) if not r.is_local or len(r.pieces) == ways]
    lowest = max(base, key=lambda i: rounds[i].length, default=-1)
    result = _zeros(x, dim, length) if lowest < 0 else None
    for i in sorted(range(len(rounds)), key=lambda i: i != lowest):
        piece = _shifted(pieces[i], dim, axes, places[i], length)
        result = piece if i == lowest else _over(piece, result, dim, axes, rounds[i], ways)
    return result


def _shifted(piece: Any, dim: int, axes: Axes, places: Sequence[int], length: int) -> Any:
    """Return an array of `length` elements that has a piece at this device's place; beside it are zeros."""
    low, high = min(places), max(places)
    piece = pad_around(piece, dim, high, length - low - piece.shape[dim])
    if low == high:
        return piece
    return cut(piece, per_device([high - at for at in places], axes), length, axis=dim)


def _over(piece: Any, under: Any, dim: int, axes: Axes, r: Round, ways: int) -> Any:
    """Lay a piece over an array where this device's segment is."""
    spans = [(s.at, s.at + s.length) if s else (0, 0) for s in map(r.pieces.get, range(ways))]
    place = lax.iota(np.int32, piece.shape[dim])
    low, high = (
        lax.broadcast(np.int32(bound) if isinstance(bound, int) else bound, place.shape)
        for bound in (per_device([span[k] for span in spans], axes) for k in (0, 1))
    )
    inside = lax.bitwise_and(lax.ge(place, low), lax.lt(place, high))
    return lax.select(lax.broadcast_in_dim(inside, piece.shape, (dim,)), piece, under)


def _zeros(x: Any, dim: int, length: int) -> Any:
    """Return zeros like `x`, of another extent along `dim`."""
    return pad_around(lax.slice_in_dim(x, 0, 0, axis=dim), dim, 0, length)


def per_device(values: Sequence[int], axes: Axes) -> Any:
    """Return this device's value of one per position along `axes`; int32 scalar, or a number if all agree."""
    if len(set(values)) == 1:
        return int(values[0])
    index = lax.axis_index(axes)
    step = values[1] - values[0]
    if all(b - a == step for a, b in pairwise(values)):
        return lax.add(lax.mul(index, np.int32(step)), np.int32(values[0]))
    # No table: an array constant would be one more operand of the program around this one.
    return lax.select_n(index, *(np.int32(v) for v in values))


def permute(x: Any, axes: Axes, mesh: MeshShape, pairs: Sequence[tuple[int, int]]) -> Any:
    """Send `x` from each source to its target, both positions along `axes`; who receives nothing gets zeros."""
    base = tuple(a for a in mesh if a in axes)  # `lax.ppermute` counts positions in mesh order

    def number(p: int) -> int:
        return position(coordinates(p, axes, mesh), base, mesh)

    return lax.ppermute(x, base, [(number(source), number(target)) for source, target in pairs])
