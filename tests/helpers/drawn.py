"""Random numbers that Hypothesis draws, in the form of a NumPy generator: what they decide shrinks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st


class Drawn:
    """The part of `numpy.random.Generator` that random programs use.

    Single numbers are drawn by Hypothesis, small ones first; the contents of arrays come from one drawn seed.
    """

    def __init__(self, data: st.DataObject) -> None:
        self._data = data
        self._contents = np.random.default_rng(data.draw(st.integers(0, 2**16)))

    def integers(self, low: int, high: int | None = None, size: Any = None) -> Any:
        """Draw an integer below `low`, or between `low` and `high`; with `size`, an array of contents."""
        if size is not None:
            return self._contents.integers(low, high, size)
        first, last = (0, low) if high is None else (low, high)
        return self._data.draw(st.integers(int(first), int(last) - 1))

    def choice(self, items: Sequence[Any], p: Any = None) -> Any:
        """Draw one of some items; probabilities are Hypothesis's affair."""
        return items[self.integers(len(items))]

    def random(self) -> float:
        """Draw a number between 0 and 1."""
        return float(self.integers(1000)) / 1000

    def permutation(self, items: Any) -> np.ndarray:
        """Draw an order: of few items by Hypothesis, of many as contents."""
        array = np.arange(items) if isinstance(items, (int, np.integer)) else np.asarray(items)
        if len(array) > 4:
            return self._contents.permutation(array)
        return array[list(self._data.draw(st.permutations(range(len(array)))))]

    def shuffle(self, items: list[Any]) -> None:
        """Bring a list into a drawn order."""
        items[:] = self._data.draw(st.permutations(items))

    def multinomial(self, n: int, pvals: Sequence[float]) -> np.ndarray:
        """Share `n` out."""
        return self._contents.multinomial(n, pvals)
