"""Halo exchange: every device fetches the window of a split dim that its part of an op needs.

`fetch` knows, for every device, where its window starts. What other devices hold of it comes by permutes, each
of them as short as any receiver needs; where that would move more than the whole dim, the dim is gathered
(GSPMD, arXiv 2105.04663, section 4.3).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.addresses import cut
from autoshard.layout import Axes, MeshShape, coordinates, mesh_size, position
from autoshard.padding import pad_around

__all__ = ["fetch", "per_device", "permute", "window_of"]


@dataclass(frozen=True)
class _Round:
    """One permute: for every receiver the source, and the part of the source's array that it needs."""

    pieces: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    @property
    def is_local(self) -> bool:
        return all(receiver == source for receiver, (source, _, _) in self.pieces.items())

    @property
    def is_permutation(self) -> bool:
        return len({source for source, _, _ in self.pieces.values()}) == len(self.pieces)

    @property
    def length(self) -> int:
        """Elements that every source sends."""
        return max(end - start for _, start, end in self.pieces.values())

    def begins(self, part: int) -> dict[int, int]:
        """Where in its part every source begins to send: at one place if that is no longer."""
        first = min(start for _, start, _ in self.pieces.values())
        if max(end for _, _, end in self.pieces.values()) - first == self.length:
            return {source: first for source, _, _ in self.pieces.values()}
        return {source: min(start, part - self.length) for source, start, _ in self.pieces.values()}

    def work(self, ways: int) -> int:
        """Elements times hops around a ring."""
        apart = [abs(receiver - source) for receiver, (source, _, _) in self.pieces.items()]
        return self.length * max(min(n, ways - n) for n in apart)


def per_device(values: Sequence[int], axes: Axes) -> Any:
    """Return this device's value of one per position along `axes`; int32 scalar, or a number if all agree."""
    if len(set(values)) == 1:
        return int(values[0])
    index = lax.axis_index(axes)
    step = values[1] - values[0]
    if all(b - a == step for a, b in zip(values, values[1:], strict=False)):
        return lax.add(lax.mul(index, np.int32(step)), np.int32(values[0]))
    # No table: an array constant would be one more operand of the program around this one.
    return lax.select_n(index, *(np.int32(v) for v in values))


def permute(x: Any, axes: Axes, mesh: MeshShape, pairs: Sequence[tuple[int, int]]) -> Any:
    """Send `x` from each source to its target, both positions along `axes`; who receives nothing gets zeros."""
    base = tuple(a for a in mesh if a in axes)  # `lax.ppermute` counts positions in mesh order

    def number(p: int) -> int:
        return position(coordinates(p, axes, mesh), base, mesh)

    return lax.ppermute(x, base, [(number(source), number(target)) for source, target in pairs])


def fetch(
    x: Any,
    dim: int,
    axes: Axes,
    mesh: MeshShape,
    size: int,
    starts: Sequence[int],
    length: int,
    held: Sequence[int] = (),
) -> Any:
    """Return the window of `length` elements of `dim` that begins at `starts[p]` on the device at p.

    Args:
      x: the local array; `dim`, of `size` elements, is split over `axes` into parts of its local extent.
      dim: the dim to fetch along.
      axes: mesh axes that split it, major first; p is the position along them.
      mesh: sizes of the mesh axes.
      size: extent of the dim, over all devices.
      starts: where each device's window begins; it may begin before 0 or end behind `size`.
      length: extent of the windows.
      held: where each device's own part begins, in increasing order, if not one local extent apart.

    What a window has outside the dim is undefined; for a dim of more than one element it is zero if what `x`
    has in padding is.
    """
    if not length:
        return lax.slice_in_dim(x, 0, 0, axis=dim)
    ways, part = mesh_size(axes, mesh), x.shape[dim]
    held = held or [p * part for p in range(ways)]
    rounds = _rounds(part, size, starts, length, held)
    if sum(r.work(ways) for r in rounds) > part * ways // 2:
        return window_of(_gathered(x, dim, axes, held), dim, axes, starts, length)
    places = [_places(r, part, starts, held) for r in rounds]
    # What others send comes first, so that a single kernel joins it to the device's own.
    order = sorted(range(len(rounds)), key=lambda i: rounds[i].is_local)
    made = {i: _receive(x, dim, axes, mesh, rounds[i]) for i in order}
    pieces = [made[i] for i in range(len(rounds))]
    if _regular(held, part) and all(len(set(at)) == 1 for at in places):
        return _joined(
            x, dim, length, sorted(zip([at[0] for at in places], pieces, strict=True), key=lambda e: e[0])
        )
    margin = max((r.length for r in rounds), default=0)
    window = _zeros(x, dim, length + 2 * margin)
    for at, piece in zip(
        places, pieces, strict=True
    ):  # padding of a part lies where the next one's piece goes
        window = _put(window, piece, dim, per_device([margin + a for a in at], axes))
    return lax.slice_in_dim(window, margin, margin + length, axis=dim)


def _rounds(part: int, size: int, starts: Sequence[int], length: int, held: Sequence[int]) -> list[_Round]:
    """Pair receivers with sources: by how far apart they stand, or by each one's first, second, ... source."""
    by_shift: dict[int, _Round] = {}
    by_rank: dict[int, _Round] = {}
    for p, start in enumerate(starts):
        first, last = max(start, 0), min(start + length, size)
        source = bisect_right(held, first) - 1
        for rank, j in enumerate(range(source, bisect_right(held, last - 1)) if last > first else ()):
            until = min([last, held[j] + part, *held[j + 1 : j + 2]])
            piece = max(first - held[j], 0), until - held[j]
            if piece[0] < piece[1]:
                for rounds, key in ((by_shift, j - p), (by_rank, rank)):
                    rounds.setdefault(key, _Round()).pieces[p] = j, *piece
    ranked = list(by_rank.values())
    if not _aligned(starts, held) and all(r.is_permutation for r in ranked) and len(ranked) < len(by_shift):
        return ranked
    return [by_shift[shift] for shift in sorted(by_shift)]


def _regular(held: Sequence[int], part: int) -> bool:
    """Tell whether the parts stand one local extent apart."""
    return all(b - a == part for a, b in zip(held, held[1:], strict=False))


def _aligned(starts: Sequence[int], held: Sequence[int]) -> bool:
    """Tell whether every window begins at the same distance from its device's own part."""
    return len({start - own for start, own in zip(starts, held, strict=True)}) == 1


def _places(r: _Round, part: int, starts: Sequence[int], held: Sequence[int]) -> list[int]:
    """Where a piece begins in each window; who receives nothing puts it before the window."""
    begins = r.begins(part)
    found = {p: held[j] + begins[j] - starts[p] for p, (j, _, _) in r.pieces.items()}
    if _aligned(starts, held) and len(set(found.values())) == 1:
        return [next(iter(found.values()))] * len(starts)
    return [found.get(p, -r.length) for p in range(len(starts))]


def _receive(x: Any, dim: int, axes: Axes, mesh: MeshShape, r: _Round) -> Any:
    begins = r.begins(x.shape[dim])
    first = next(iter(begins.values()))
    table = [begins.get(j, first) for j in range(mesh_size(axes, mesh))]
    if len(set(table)) == 1:
        piece = lax.slice_in_dim(x, first, first + r.length, axis=dim)
    else:
        piece = cut(x, per_device(table, axes), r.length, axis=dim)
    if r.is_local:
        return piece
    return permute(piece, axes, mesh, [(source, p) for p, (source, _, _) in r.pieces.items()])


def _joined(x: Any, dim: int, length: int, pieces: Sequence[tuple[int, Any]]) -> Any:
    """Join pieces that lie at the same place on every device; gaps are filled with zeros."""
    row: list[Any] = []
    end = 0

    def gap(to: int) -> None:
        if to > end:
            row.append(_zeros(x, dim, to - end))

    for at, piece in pieces:
        gap(at)
        row.append(piece)
        end = at + piece.shape[dim]
    gap(length)
    return row[0] if len(row) == 1 else lax.concatenate(row, dim)


def _put(window: Any, piece: Any, dim: int, start: Any) -> Any:
    zero = jnp.zeros((), jnp.int32)
    starts = [jnp.asarray(start, jnp.int32) if i == dim else zero for i in range(window.ndim)]
    return lax.dynamic_update_slice(window, piece, starts, allow_negative_indices=False)


def _zeros(x: Any, dim: int, length: int) -> Any:
    """Return zeros like `x`, of another extent along `dim`."""
    return pad_around(lax.slice_in_dim(x, 0, 0, axis=dim), dim, 0, length)


def _gathered(x: Any, dim: int, axes: Axes, held: Sequence[int]) -> Any:
    """Gather a whole dim, and close the gaps between parts that begin less than a local extent apart."""
    whole, part = lax.all_gather(x, axes, axis=dim, tiled=True), x.shape[dim]
    if _regular(held, part):
        return whole
    lengths = [b - a for a, b in zip(held, held[1:], strict=False)] + [part]
    pieces = [lax.slice_in_dim(whole, j * part, j * part + n, axis=dim) for j, n in enumerate(lengths)]
    return lax.concatenate(pieces, dim)


def window_of(x: Any, dim: int, axes: Axes, starts: Sequence[int], length: int) -> Any:
    """Return the window as `fetch` does, of an array that every device holds whole along `dim`."""
    size = x.shape[dim]
    if size == 1:
        return lax.broadcast_in_dim(
            x, [length if i == dim else n for i, n in enumerate(x.shape)], range(x.ndim)
        )
    starts = [min(max(start, -length), size) for start in starts]
    before, behind = max(0, -min(starts)), max(0, max(starts) + length - size)
    x = pad_around(x, dim, before, behind)
    return cut(x, per_device([s + before for s in starts], axes), length, axis=dim)
