"""Halo exchange: every device fetches the window of a split dim that its part of an op needs.

`fetch` knows, for every device, where its window starts. What other devices hold of it comes by permutes, each
of them as short as any receiver needs; where that would move more than the whole dim, the dim is gathered
(GSPMD, arXiv 2105.04663, section 4.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from jax import lax

from autoshard.addresses import cut
from autoshard.layout import Axes, MeshShape, mesh_size
from autoshard.padding import pad_around
from autoshard.rules.transfers import Round, Segment, assemble, per_device, rounds_of, segments, work

__all__ = ["fetch", "gathers", "window_of"]


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
    rounds = rounds_of(_windows(part, size, starts, length, held), [part])
    if gathers(rounds, [part], ways):
        return window_of(_gathered(x, dim, axes, held), dim, axes, starts, length)
    return assemble([x], dim, axes, mesh, rounds, length)


def gathers(rounds: Sequence[Round], parts: Sequence[int], ways: int) -> bool:
    """Tell whether to gather split operands, of local extents `parts`, is cheaper than to send what is needed."""
    return work(rounds, ways) > sum(part * ways // 2 for part in parts)


def _windows(
    part: int, size: int, starts: Sequence[int], length: int, held: Sequence[int]
) -> list[list[Segment]]:
    """List what every window is made of; a device that holds padding only has that where others have theirs."""
    found = []
    ahead = {start - own for start, own in zip(starts, held, strict=True)}
    for p, start in enumerate(starts):
        first, last = max(start, 0), min(start + length, size)
        row = list(segments(0, held, part, first, last, first - start))
        own = held[p] - start
        if held[p] >= size and len(ahead) == 1 and -part < own < length:
            row.append(Segment(0, p, max(-own, 0), max(own, 0), 0))
        found.append(row)
    return found


def _regular(held: Sequence[int], part: int) -> bool:
    """Tell whether the parts stand one local extent apart."""
    return all(b - a == part for a, b in pairwise(held))


def _gathered(x: Any, dim: int, axes: Axes, held: Sequence[int]) -> Any:
    """Gather a whole dim, and close the gaps between parts that begin less than a local extent apart."""
    whole, part = lax.all_gather(x, axes, axis=dim, tiled=True), x.shape[dim]
    if _regular(held, part):
        return whole
    lengths = [b - a for a, b in pairwise(held)] + [part]
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
