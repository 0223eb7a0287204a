"""When the tensors of a problem live: intervals of times, and run lengths of counts."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Intervals:
    """One live tensor per node from time `first` up to, not including, `last`: a table `[T, N]` of ones.

    Args:
        first: `[N]`.
        last: `[N]`; equal to `first` where the node never lives.
        num_times: T.

    """

    first: Ints
    last: Ints
    num_times: int

    @property
    def shape(self) -> tuple[int, int]:
        """(times, nodes)."""
        return self.num_times, len(self.first)

    def __matmul__(self, values: Floats) -> Floats:
        """Add a number per node up over what is live at each time."""
        steps = np.bincount(self.first, weights=values, minlength=self.num_times + 1)
        steps -= np.bincount(self.last, weights=values, minlength=self.num_times + 1)
        return np.cumsum(steps[:-1])

    def counts(self) -> sp.csr_array:
        """Write the table out."""
        spans = self.last - self.first
        indptr = np.concatenate([[0], np.cumsum(spans)])
        rows = np.arange(indptr[-1]) - np.repeat(indptr[:-1] - self.first, spans)
        return sp.csr_array(sp.csc_array((np.ones(len(rows)), rows, indptr), shape=self.shape))


def runs(live: "sp.csr_matrix | sp.csr_array | Intervals") -> Iterator[tuple[Ints, Floats]]:
    """Per node the times at which its count changes, ascending, and the count from each on; 0 before."""
    if isinstance(live, Intervals):
        for span in zip(live.first.tolist(), live.last.tolist(), strict=True):
            known = 0 if span[0] == span[1] else 2 - (span[1] == live.num_times)
            yield np.array(span[:known], dtype=np.int64), np.array((1.0, 0.0)[:known])
        return
    table = sp.csc_array(live)
    table.sum_duplicates()
    for a, b in zip(table.indptr[:-1].tolist(), table.indptr[1:].tolist(), strict=True):
        rows, counts = table.indices[a:b].astype(np.int64), table.data[a:b].astype(np.float64)
        if not len(rows):
            yield rows, counts
            continue
        new = np.flatnonzero((np.diff(rows) != 1) | (np.diff(counts) != 0)) + 1
        starts = rows[np.concatenate([[0], new])]
        ends = rows[np.concatenate([new - 1, [len(rows) - 1]])] + 1
        both = np.stack([starts, ends], axis=1).ravel()
        held = np.stack([counts[np.concatenate([[0], new])], np.zeros(len(starts))], axis=1).ravel()
        last = np.append(both[1:] != both[:-1], both[-1] < table.shape[0])
        yield both[last], held[last]
