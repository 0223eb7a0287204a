"""The working form of a problem: permitted strategies, one table per pair of nodes, memory as rows.

`search.presolve` maps a `Graph` to a smaller one; elimination, the local search and the integer program all
read it. Strategies carry their original index, so a choice in any graph translates back to the problem.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from search.problem import Floats, Problem

Ints = npt.NDArray[np.int64]
Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Memory:
    """Bytes in use at the times that can matter: `rows @ bytes + buffer_rows @ buffers <= room`.

    Args:
        usages: per node bytes `[S_i]` by kept strategy, least strategy of each node shifted to 0.
        rows: CSR `[R, N]`, live counts at each remaining time.
        buffers: (pair, bytes `[S_i, S_j]`) of each edge with a buffer, oriented as the pair.
        buffer_rows: CSR `[R, B]`, live counts of the buffers.
        room: bytes `[R]` that are left for what the choice adds.
        times: `[R]`, the problem's time of each row.
        scale: bytes that count as 1 in rounding decisions.

    """

    usages: tuple[Floats, ...]
    rows: sp.csr_array
    buffers: tuple[tuple[Pair, Floats], ...]
    buffer_rows: sp.csr_array
    room: Floats
    times: Ints
    scale: float

    def excess(self, choice: Sequence[int]) -> Floats:
        """Bytes above the room, per row; at most 0 where the choice fits."""
        used = np.array([u[s] for u, s in zip(self.usages, choice, strict=True)])
        total = self.rows @ used - self.room
        if self.buffers:
            total += self.buffer_rows @ np.array([u[choice[i], choice[j]] for (i, j), u in self.buffers])
        return np.asarray(total, dtype=np.float64)

    @property
    def tolerance(self) -> float:
        """Bytes of rounding error that a row may show."""
        return 1e-9 * self.scale


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """A problem reduced to what can still be chosen.

    Args:
        kept: per node the original indices of its strategies, ascending.
        unary: per node costs `[S_i]`, finite.
        pairs: cost table per pair (i, j), i < j, in ascending order; `inf` where forbidden.
        constant: cost that every choice pays.
        memory: None when no permitted choice can exceed the limit.

    """

    kept: tuple[Ints, ...]
    unary: tuple[Floats, ...]
    pairs: dict[Pair, Floats]
    constant: float
    memory: Memory | None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Strategies per node."""
        return tuple(len(u) for u in self.unary)

    def cost(self, choice: Sequence[int]) -> float:
        """Total cost of a choice given in this graph's strategy positions."""
        total = self.constant + sum(float(u[s]) for u, s in zip(self.unary, choice, strict=True))
        return total + sum(float(c[choice[i], choice[j]]) for (i, j), c in self.pairs.items())

    def original(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Translate a choice to the problem's own strategy indices."""
        return tuple(int(k[s]) for k, s in zip(self.kept, choice, strict=True))

    def positions(self, choice: Sequence[int]) -> list[int] | None:
        """Translate a choice of the problem to this graph's positions, or None where one was dropped."""
        out = []
        for kept, s in zip(self.kept, choice, strict=True):
            where = int(np.searchsorted(kept, s))
            if where == len(kept) or kept[where] != s:
                return None
            out.append(where)
        return out

    def fits(self, choice: Sequence[int]) -> bool:
        """Whether a choice stays within the memory at every time."""
        return self.memory is None or bool((self.memory.excess(choice) <= self.memory.tolerance).all())

    def neighbours(self) -> list[list[tuple[int, Floats]]]:
        """Per node (other, table `[S_i, S_other]`), by ascending other."""
        out: list[list[tuple[int, Floats]]] = [[] for _ in self.unary]
        for (i, j), cost in self.pairs.items():
            out[i].append((j, cost))
            out[j].append((i, cost.T))
        return out

    def restrict(self, positions: Sequence[Ints]) -> "Graph":
        """Keep only the named strategy positions of each node (ascending)."""
        memory = self.memory
        if memory is not None:
            buffers = tuple(((i, j), u[np.ix_(positions[i], positions[j])]) for (i, j), u in memory.buffers)
            memory = Memory(
                usages=tuple(u[p] for u, p in zip(memory.usages, positions, strict=True)),
                rows=memory.rows,
                buffers=buffers,
                buffer_rows=memory.buffer_rows,
                room=memory.room,
                times=memory.times,
                scale=memory.scale,
            )
        return Graph(
            kept=tuple(k[p] for k, p in zip(self.kept, positions, strict=True)),
            unary=tuple(u[p] for u, p in zip(self.unary, positions, strict=True)),
            pairs={(i, j): c[np.ix_(positions[i], positions[j])] for (i, j), c in self.pairs.items()},
            constant=self.constant,
            memory=memory,
        )


def from_problem(problem: Problem) -> Graph:
    """Drop forbidden strategies, add up parallel edges, and state memory as rows.

    Args:
        problem: any valid problem.

    Returns:
        A graph with the same permitted choices and costs.

    """
    kept = tuple(np.flatnonzero(np.isfinite(c)) for c in problem.costs)
    whole = [len(k) == len(c) for k, c in zip(kept, problem.costs, strict=True)]

    def cut(i: int, j: int, table: Floats) -> Floats:
        inner = table if whole[i] and whole[j] else table[np.ix_(kept[i], kept[j])]
        return inner if i < j else inner.T

    pairs: dict[Pair, Floats] = {}
    for (i, j), table in zip(problem.edges, problem.edge_costs, strict=True):
        key = (min(i, j), max(i, j))
        inner = cut(i, j, table)
        pairs[key] = pairs[key] + inner if key in pairs else inner
    buffers = tuple(
        ((min(problem.edges[e]), max(problem.edges[e])), cut(*problem.edges[e], table))
        for e, table in problem.edge_usages.items()
    )
    return Graph(
        kept=kept,
        unary=tuple(c[k] for c, k in zip(problem.costs, kept, strict=True)),
        pairs=dict(sorted(pairs.items())),
        constant=0.0,
        memory=_memory(problem, kept, buffers),
    )


def _memory(
    problem: Problem, kept: tuple[Ints, ...], buffers: tuple[tuple[Pair, Floats], ...]
) -> Memory | None:
    times, limit = problem.num_times, problem.usage_limit
    if limit is None or not np.isfinite(limit) or not times:
        return None
    room = np.full(times, float(limit))
    if problem.fixed_usage is not None:
        room -= problem.fixed_usage
    n = len(kept)
    usages: tuple[Floats, ...] = tuple(np.zeros(len(k)) for k in kept)
    rows = sp.csr_array((times, n))
    if problem.usages is not None and problem.live is not None:
        usages = tuple(u[k] for u, k in zip(problem.usages, kept, strict=True))
        rows = sp.csr_array(problem.live)
    buffer_rows = sp.csr_array((times, len(buffers)))
    if problem.edge_live is not None:
        buffer_rows = sp.csr_array(problem.edge_live.tocsc()[:, list(problem.edge_usages)])
    memory = Memory(
        usages=usages,
        rows=rows,
        buffers=buffers,
        buffer_rows=buffer_rows,
        room=room,
        times=np.arange(times),
        scale=max(abs(float(limit)), 1.0),
    )
    return tighten(memory)


def tighten(memory: Memory) -> Memory | None:
    """Shift each least usage into the room and drop the rows that no choice can exceed or that repeat.

    Args:
        memory: rows over the present strategies.

    Returns:
        Fewer rows with the same meaning, or None when none is left.

    """
    least = np.array([u.min() for u in memory.usages])
    most = np.array([u.max() for u in memory.usages])
    least_buffer = np.array([u.min(initial=np.inf) for _, u in memory.buffers])
    most_buffer = np.array([u.max(initial=0.0) for _, u in memory.buffers])
    worst = memory.rows @ most + memory.buffer_rows @ most_buffer
    room = memory.room - memory.rows @ least - memory.buffer_rows @ least_buffer
    live = np.flatnonzero(worst > memory.room + memory.tolerance)
    if not len(live):
        return None
    rows = _only(memory.rows[live], most > least)
    buffer_rows = _only(memory.buffer_rows[live], most_buffer > least_buffer)
    room = np.asarray(room[live])
    first = _distinct(rows, buffer_rows, room)
    return Memory(
        usages=tuple(u - low for u, low in zip(memory.usages, least, strict=True)),
        rows=rows[first],
        buffers=tuple((p, u - low) for (p, u), low in zip(memory.buffers, least_buffer, strict=True)),
        buffer_rows=buffer_rows[first],
        room=room[first],
        times=memory.times[live][first],
        scale=memory.scale,
    )


def _only(rows: sp.csr_array, columns: npt.NDArray[np.bool_]) -> sp.csr_array:
    """Zero the columns that cannot vary, keeping the shape."""
    kept = sp.csr_array(rows @ sp.diags_array(columns.astype(np.float64)))
    kept.eliminate_zeros()
    return kept


def _distinct(rows: sp.csr_array, buffer_rows: sp.csr_array, room: Floats) -> Ints:
    """Rows to keep: of those with equal live counts, the one with the least room (then the earliest)."""
    groups: dict[bytes, int] = {}
    for r in range(len(room)):
        key = b"|".join(
            part[table.indptr[r] : table.indptr[r + 1]].tobytes()
            for table in (rows, buffer_rows)
            for part in (table.indices, table.data)
        )
        best = groups.get(key)
        if best is None or room[r] < room[best]:
            groups[key] = r
    return np.array(sorted(groups.values()), dtype=np.int64)
