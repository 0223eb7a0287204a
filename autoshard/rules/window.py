"""Windowed dims: which part of the input a device's part of an output, or of the window, meets.

A window slides over a dim as in a convolution or in pooling. Where the output is split, every device fetches
the elements that its outputs see (GSPMD, arXiv 2105.04663, section 4.3). Where the window itself is the long
one and is split, as in the gradient of a filter, it fetches those that its taps meet. With base dilation the
first element need not lie at the same distance on every device: then some further outputs, or taps, come
before the device's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from autoshard.addresses import cut
from autoshard.layout import Axes, MeshShape, chunk, mesh_size
from autoshard.rules.exchange import fetch
from autoshard.rules.transfers import per_device

__all__ = ["Cut", "Window", "cut_out", "outside_filled", "view_of"]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A split of a windowed dim: tables by the position of the device.

    The window of the input begins at `starts[p]`, has `length` elements and takes `padding`. It serves `count`
    outputs (or taps), of which the device's own `part` follow the first `skip[p]`.
    """

    starts: tuple[int, ...]
    length: int
    padding: tuple[int, int]
    skip: tuple[int, ...]
    part: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Window:
    """One dim of a windowed op: extents of input, window and output, and how the window moves."""

    size: int
    taps: int
    out: int
    stride: int = 1
    padding: tuple[int, int] = (0, 0)
    base: int = 1
    dilation: int = 1

    @property
    def reach(self) -> int:
        """Elements of the padded and dilated input that one output spans."""
        return (self.taps - 1) * self.dilation + 1

    @property
    def path(self) -> int:
        """Elements of the padded and dilated input that one tap spans."""
        return (self.out - 1) * self.stride + 1

    @property
    def parallel(self) -> bool:
        """Tell whether output i sees input i and no other."""
        return self.taps == self.stride == self.base == 1 and self.padding == (0, 0)

    @property
    def contracts(self) -> bool:
        """Tell whether there is one output, and tap i meets input i and no other."""
        return (
            self.out == self.base == self.dilation == 1 and self.size == self.taps and self.padding == (0, 0)
        )

    @property
    def covers(self) -> bool:
        """Tell whether there is one output, and it sees every input."""
        low = self.padding[0]
        last = low + (self.size - 1) * self.base
        return self.out == self.dilation == 1 and low >= 0 and self.taps > last

    def by_output(self, ways: int) -> Cut:
        """Split the output."""
        return self._cut(self.out, self.stride, self.reach, ways)

    def by_taps(self, ways: int) -> Cut:
        """Split the window."""
        return self._cut(self.taps, self.dilation, self.path, ways)

    def _cut(self, total: int, step: int, reach: int, ways: int) -> Cut:
        part = chunk(total, ways)
        period = self.base // math.gcd(step, self.base)  # by so many steps an element lies as before
        skip = tuple(p * part % period for p in range(ways))
        count = part + max(skip)
        begins = [(p * part - s) * step - self.padding[0] for p, s in enumerate(skip)]
        phase = -begins[0] % self.base
        span = max((count - 1) * step + reach, phase + 1)
        length = (span - 1 - phase) // self.base + 1
        return Cut(
            starts=tuple(-(-b // self.base) for b in begins),
            length=length,
            padding=(phase, span - 1 - phase - (length - 1) * self.base),
            skip=skip,
            part=part,
            count=count,
        )


def view_of(
    x: Any, dim: int, axes: Axes, mesh: MeshShape, size: int, starts: Sequence[int], length: int, fill: Any
) -> Any:
    """Fetch a window of a split dim; it holds `fill` outside the dim, zeros for None."""
    if fill is None:
        if size % mesh_size(axes, mesh):
            x = outside_filled(
                x, dim, axes, size, [p * x.shape[dim] for p in range(mesh_size(axes, mesh))], 0
            )
        return fetch(x, dim, axes, mesh, size, starts, length)
    x = fetch(x, dim, axes, mesh, size, starts, length)
    if min(starts) >= 0 and max(starts) + length <= size:
        return x
    return outside_filled(x, dim, axes, size, starts, fill)


def outside_filled(x: Any, dim: int, axes: Axes, size: int, starts: Sequence[int], fill: Any) -> Any:
    """Put `fill` where a window that begins at `starts[p]` lies outside a dim of `size` elements."""
    start = lax.convert_element_type(per_device(starts, axes), np.int32)
    place = lax.add(lax.iota(np.int32, x.shape[dim]), lax.broadcast(start, x.shape[dim : dim + 1]))
    bounds = [lax.full_like(place, bound) for bound in (0, size)]
    inside = lax.bitwise_and(lax.ge(place, bounds[0]), lax.lt(place, bounds[1]))
    fill = lax.convert_element_type(fill, x.dtype)
    return lax.select(lax.broadcast_in_dim(inside, x.shape, [dim]), x, lax.broadcast(fill, x.shape))


def cut_out(x: Any, dim: int, axes: Axes, starts: Sequence[int], length: int) -> Any:
    """Cut `length` elements out of a local array, on the device at p from `starts[p]` on."""
    if set(starts) == {0} and length == x.shape[dim]:
        return x
    if len(set(starts)) == 1:
        return lax.slice_in_dim(x, starts[0], starts[0] + length, axis=dim)
    return cut(x, per_device(starts, axes), length, axis=dim)
