"""Where a device's part begins, by scalar arithmetic on its position in the mesh, and how it is cut out.

It is bound through `jax.lax`: operators on traced scalars go through `jax.numpy` and take far longer to trace.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from autoshard.layout import Axes

__all__ = ["address", "cut"]


def address(axes: Axes, step: int = 1, base: int = 0) -> Any:
    """Return `base + step * position` of this device along `axes`, row major; int32 scalar."""
    place = lax.axis_index(axes)
    if step != 1:
        place = lax.mul(place, np.int32(step))
    return lax.add(place, np.int32(base)) if base else place


def cut(x: Any, start: Any, size: int, axis: int) -> Any:
    """Cut `size` elements of `axis` out of `x`, from a `start` that is not negative on."""
    return lax.dynamic_slice_in_dim(x, start, size, axis, allow_negative_indices=False)
