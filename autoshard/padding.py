"""Padding at the end of a dim, for arrays of any dtype."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["pad_end"]


def pad_end(x: Any, dim: int, more: int) -> Any:
    """Make `dim` longer by `more` zeros; keys, which have no zero, by keys of zero words."""
    if not more:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            pad_end(jax.random.key_data(x), dim, more), impl=jax.random.key_impl(x)
        )
    return lax.pad(x, lax.full((), 0, x.dtype), [(0, more if i == dim else 0, 0) for i in range(x.ndim)])
