"""Memory over time as step functions: what each strategy adds, from which time on.

A node's bytes change at a few times only, however long it lives, so that a step function per node stays small
where a table of times by nodes explodes. Nodes that were merged add up to one function.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from search.problem import Floats

Ints = npt.NDArray[np.int64]
Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Profile:
    """Bytes by strategy (or by pair of strategies) over the rows of a `Memory`.

    Args:
        starts: `[K]`, ascending; `loads[k]` holds from row `starts[k]` up to the next start, 0 before.
        loads: `[K, S]`, or `[K, S_i, S_j]` of a buffer.

    """

    starts: Ints
    loads: Floats

    @property
    def flat(self) -> Floats:
        """The loads as `[K, columns]`."""
        return self.loads.reshape(len(self.starts), int(np.prod(self.loads.shape[1:])))

    def lean(self, rows: int) -> "Profile":
        """Drop repeated starts but the last, starts beyond the rows, and steps that change nothing."""
        last = np.append(self.starts[1:] != self.starts[:-1], True)[: len(self.starts)]
        last &= self.starts < rows
        starts, loads = self.starts[last], self.loads[last]
        changed = Profile(starts=starts, loads=_steps(loads) != 0).flat.any(axis=1)
        return Profile(starts=starts[changed], loads=loads[changed])

    def change(self, to: int, was: int) -> tuple[Ints, Floats]:
        """Return the step function of moving from one strategy to another: (starts, bytes)."""
        return self.starts, self.loads[:, to] - self.loads[:, was]


def _steps(loads: Floats) -> Floats:
    """Differences along the rows, the first against 0."""
    out = loads.copy()
    out[1:] -= loads[:-1]
    return out


def summed(profiles: Sequence[Profile], shape: tuple[int, ...]) -> Profile:
    """Add step functions over the same strategies.

    Args:
        profiles: any number.
        shape: of the loads at one row.

    """
    if len(profiles) == 1:
        return profiles[0]
    if not profiles:
        return Profile(starts=np.zeros(0, dtype=np.int64), loads=np.zeros((0, *shape)))
    starts, where = np.unique(np.concatenate([p.starts for p in profiles]), return_inverse=True)
    steps = np.zeros((len(starts), *shape))
    np.add.at(steps, where, np.concatenate([_steps(p.loads) for p in profiles]))
    return Profile(starts=starts, loads=np.cumsum(steps, axis=0))


@dataclass(frozen=True, kw_only=True, eq=False)
class Memory:
    """Bytes in use at the times that can matter: nodes plus buffers stay within `room` at every row.

    Args:
        nodes: per node bytes by strategy.
        buffers: (pair, bytes by both strategies) of each edge with a buffer, oriented as the pair.
        room: bytes `[R]` that are left for what the choice adds.
        times: `[R]`, the problem's time of each row.
        scale: bytes that count as 1 in rounding decisions.

    """

    nodes: tuple[Profile, ...]
    buffers: tuple[tuple[Pair, Profile], ...]
    room: Floats
    times: Ints
    scale: float

    @property
    def tolerance(self) -> float:
        """Bytes of rounding error that a row may show."""
        return 1e-9 * self.scale

    @cached_property
    def starts(self) -> Ints:
        """First column of each node, then of each buffer, then the number of columns."""
        widths = [p.flat.shape[1] for p in self._profiles()]
        return np.concatenate([[0], np.cumsum(np.array(widths, dtype=np.int64))]).astype(np.int64)

    @cached_property
    def steps(self) -> sp.csc_array:
        """What each strategy (column) changes at each row: CSC `[R, columns]`."""
        rows, columns, values = [], [], []
        for first, p in zip(self.starts[:-1].tolist(), self._profiles(), strict=True):
            if not len(p.starts):
                continue
            flat = _steps(p.flat)
            k, s = np.nonzero(flat)
            rows.append(p.starts[k])
            columns.append(first + s)
            values.append(flat[k, s])
        shape = (len(self.room), int(self.starts[-1]))
        if not rows:
            return sp.csc_array(shape)
        entries = (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns)))
        return sp.csc_array(sp.coo_array(entries, shape=shape))

    @cached_property
    def _by_column(self) -> sp.csr_array:
        return sp.csr_array(self.steps.T)

    def _profiles(self) -> list[Profile]:
        return [*self.nodes, *(p for _, p in self.buffers)]

    def columns(self, choice: Sequence[int]) -> Ints:
        """Columns that a choice uses: one per node, one per buffer."""
        picked = np.asarray(choice, dtype=np.int64)
        cells = [choice[i] * p.loads.shape[2] + choice[j] for (i, j), p in self.buffers]
        used: Ints = self.starts[:-1] + np.concatenate([picked, np.array(cells, dtype=np.int64)])
        return used

    def load(self, weights: Floats) -> Floats:
        """Bytes `[R]` of weighted columns."""
        return np.asarray(np.cumsum(self.steps @ weights), dtype=np.float64)

    def excess(self, choice: Sequence[int]) -> Floats:
        """Bytes above the room, per row; at most 0 where the choice fits."""
        weights = np.zeros(int(self.starts[-1]))
        weights[self.columns(choice)] = 1.0
        return self.load(weights) - self.room

    def priced(self, prices: Floats) -> Floats:
        """Cost of every column at a price per byte for every row."""
        return np.asarray(self._by_column @ np.cumsum(prices[::-1])[::-1], dtype=np.float64)

    def loads_at(self, rows: Sequence[int]) -> sp.csr_array:
        """Bytes of every column at some rows: CSR `[len(rows), columns]`."""
        wanted = np.asarray(rows, dtype=np.int64)
        r, c, v = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
        for first, p in zip(self.starts[:-1].tolist(), self._profiles(), strict=True):
            segment = np.searchsorted(p.starts, wanted, side="right") - 1
            inside = np.flatnonzero(segment >= 0)
            flat = p.flat[segment[inside]]
            k, s = np.nonzero(flat)
            r.append(inside[k])
            c.append(first + s)
            v.append(flat[k, s])
        entries = (np.concatenate(v), (np.concatenate(r), np.concatenate(c)))
        return sp.csr_array(sp.coo_array(entries, shape=(len(wanted), int(self.starts[-1]))))

    def restrict(self, positions: Sequence[Ints]) -> "Memory":
        """Keep only the named strategies of each node."""
        nodes = tuple(
            Profile(starts=p.starts, loads=p.loads[:, keep])
            for p, keep in zip(self.nodes, positions, strict=True)
        )
        buffers = tuple(
            ((i, j), Profile(starts=p.starts, loads=p.loads[:, positions[i]][:, :, positions[j]]))
            for (i, j), p in self.buffers
        )
        return replace(self, nodes=nodes, buffers=buffers)

    def tighten(self) -> "Memory | None":
        """Shift what every strategy uses into the room; drop rows that no choice exceeds or that repeat.

        Returns:
            Fewer rows with the same meaning, or None when none is left.

        """
        profiles = self._profiles()
        flat = [p.flat for p in profiles]
        least = [f.min(axis=1) for f in flat]
        most = [f.max(axis=1) for f in flat]
        room = self.room - self._total(profiles, least)
        spread = self._total(profiles, [b - a for a, b in zip(least, most, strict=True)])
        shifted = [
            Profile(starts=p.starts, loads=p.loads - low.reshape(-1, *[1] * (p.loads.ndim - 1)))
            for p, low in zip(profiles, least, strict=True)
        ]
        memory = self._with(shifted, room)._only(np.flatnonzero(spread > room + self.tolerance))
        for later in (True, False):
            memory = memory._only(memory._undominated(later=later))
        memory = replace(memory, buffers=tuple(b for b in memory.buffers if len(b[1].starts)))
        return memory if len(memory.room) else None

    def _with(self, profiles: Sequence[Profile], room: Floats) -> "Memory":
        n = len(self.nodes)
        buffers = tuple((pair, p) for (pair, _), p in zip(self.buffers, profiles[n:], strict=True))
        return replace(self, nodes=tuple(profiles[:n]), buffers=buffers, room=room)

    def _total(self, profiles: Iterable[Profile], values: Iterable[Floats]) -> Floats:
        """Add per profile numbers `[K]` up to one per row."""
        starts = np.concatenate([np.zeros(0, dtype=np.int64), *(p.starts for p in profiles)])
        steps = np.concatenate([np.zeros(0), *(_steps(v) for v in values)])
        return np.cumsum(np.bincount(starts, weights=steps, minlength=len(self.room)))

    def _only(self, rows: Ints) -> "Memory":
        """Keep only the named rows, ascending."""
        if len(rows) == len(self.room):
            moved = self._profiles()
        else:
            moved = [Profile(starts=np.searchsorted(rows, p.starts), loads=p.loads) for p in self._profiles()]
        leaned = [p.lean(len(rows)) for p in moved]
        return replace(self._with(leaned, self.room[rows]), times=self.times[rows])

    def _undominated(self, *, later: bool) -> Ints:
        """Rows that a neighbour in time does not imply: `later` drops a row that its successor implies."""
        r = len(self.room)
        rises, falls = np.zeros(r, dtype=bool), np.zeros(r, dtype=bool)
        for p in self._profiles():
            steps = _steps(p.flat)
            rises[p.starts[(steps > 0).any(axis=1)]] = True
            falls[p.starts[(steps < 0).any(axis=1)]] = True
        wider = self.room[1:] >= self.room[:-1]
        narrower = self.room[1:] <= self.room[:-1]
        implied = np.zeros(r, dtype=bool)
        if later:
            implied[:-1] = ~falls[1:] & narrower
        else:
            implied[1:] = ~rises[1:] & wider
        return np.flatnonzero(~implied)
