"""Padding around what a dim holds, for arrays of any dtype."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["pad_around", "pad_end"]


def pad_end(x: Any, dim: int, more: int) -> Any:
    """Make `dim` longer by `more` zeros at its end."""
    return pad_around(x, dim, 0, more)


def pad_around(x: Any, dim: int, before: int, behind: int) -> Any:
    """Put zeros around what `dim` holds; keys, which have no zero, are padded by keys of zero words."""
    if not before and not behind:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = pad_around(jax.random.key_data(x), dim, before, behind)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    config = [(before, behind, 0) if i == dim else (0, 0, 0) for i in range(x.ndim)]
    return lax.pad(x, lax.full((), 0, x.dtype), config)
