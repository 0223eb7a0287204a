"""The working form of a problem: permitted strategies, one table per pair of nodes, memory as step functions.

`search.presolve` maps a `Graph` to a smaller one; elimination, the local search and the integer program all
read it. Every node of the problem knows which node of the graph decides it, so a choice translates back.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy.sparse as sp

from search.liveness import runs
from search.memory import Ints, Memory, Pair, Profile, summed
from search.problem import Floats, Problem


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """A problem reduced to what can still be chosen.

    Args:
        owner: per node of the problem the node of this graph that decides it; -1 where nothing is left to choose.
        kept: per node of the problem its strategy for each strategy of the owner (one entry where owner is -1).
        leads: per node the node of the problem whose strategies it lists, each once, ascending.
        unary: per node costs `[S_i]`, finite.
        pairs: cost table per pair (i, j), i < j, in ascending order; `inf` where forbidden.
        constant: cost that every choice pays.
        memory: None when no permitted choice can exceed the limit.

    """

    owner: tuple[int, ...]
    kept: tuple[Ints, ...]
    leads: tuple[int, ...]
    unary: tuple[Floats, ...]
    pairs: dict[Pair, Floats]
    constant: float
    memory: Memory | None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Strategies per node."""
        return tuple(len(u) for u in self.unary)

    @property
    def cells(self) -> int:
        """Entries of all tables."""
        return sum(c.size for c in self.pairs.values())

    def cost(self, choice: Sequence[int]) -> float:
        """Total cost of a choice given in this graph's strategy positions."""
        total = self.constant + sum(float(u[s]) for u, s in zip(self.unary, choice, strict=True))
        return total + sum(float(c[choice[i], choice[j]]) for (i, j), c in self.pairs.items())

    def original(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Translate a choice to the problem's own strategy indices."""
        return tuple(int(k[choice[o] if o >= 0 else 0]) for o, k in zip(self.owner, self.kept, strict=True))

    def positions(self, choice: Sequence[int]) -> list[int] | None:
        """Translate a choice of the problem to this graph's positions, or None where one was dropped."""
        out = []
        for lead in self.leads:
            where = int(np.searchsorted(self.kept[lead], choice[lead]))
            if where == len(self.kept[lead]) or self.kept[lead][where] != choice[lead]:
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
        return replace(
            self,
            kept=tuple(k[positions[o]] if o >= 0 else k for o, k in zip(self.owner, self.kept, strict=True)),
            unary=tuple(u[p] for u, p in zip(self.unary, positions, strict=True)),
            pairs={(i, j): c[np.ix_(positions[i], positions[j])] for (i, j), c in self.pairs.items()},
            memory=None if self.memory is None else self.memory.restrict(positions),
        )


def from_problem(problem: Problem) -> Graph:
    """Drop forbidden strategies, add up parallel edges, and state memory as step functions.

    Args:
        problem: any valid problem.

    Returns:
        A graph with the same permitted choices and costs.

    """
    kept = tuple(np.flatnonzero(np.isfinite(c)) for c in problem.costs)
    whole = [len(k) == len(c) for k, c in zip(kept, problem.costs, strict=True)]

    def cut(i: int, j: int, table: Floats) -> Floats:
        inner = table if whole[i] and whole[j] else table[..., kept[i], :][..., kept[j]]
        return inner if i < j else inner.swapaxes(-1, -2)

    pairs: dict[Pair, Floats] = {}
    for (i, j), table in zip(problem.edges, problem.edge_costs, strict=True):
        key = (min(i, j), max(i, j))
        inner = cut(i, j, table)
        pairs[key] = pairs[key] + inner if key in pairs else inner
    return Graph(
        owner=tuple(range(len(kept))),
        kept=kept,
        leads=tuple(range(len(kept))),
        unary=tuple(c[k] for c, k in zip(problem.costs, kept, strict=True)),
        pairs=dict(sorted(pairs.items())),
        constant=0.0,
        memory=_memory(problem, kept, cut),
    )


def _memory(
    problem: Problem, kept: tuple[Ints, ...], cut: Callable[[int, int, Floats], Floats]
) -> Memory | None:
    times, limit = problem.num_times, problem.usage_limit
    if limit is None or not np.isfinite(limit) or not times:
        return None
    room = np.full(times, float(limit))
    if problem.fixed_usage is not None:
        room -= problem.fixed_usage
    if problem.usages is None or problem.live is None:
        nodes = tuple(summed([], (len(k),)) for k in kept)
    else:
        nodes = tuple(
            Profile(starts=starts, loads=counts[:, None] * u[k])
            for (starts, counts), u, k in zip(runs(problem.live), problem.usages, kept, strict=True)
        )
    buffers: dict[Pair, list[Profile]] = defaultdict(list)
    if problem.edge_live is not None:
        columns = runs(sp.csr_array(problem.edge_live.tocsc()[:, list(problem.edge_usages)]))
        for (e, usage), (starts, counts) in zip(problem.edge_usages.items(), columns, strict=True):
            i, j = problem.edges[e]
            loads = counts[:, None, None] * cut(i, j, usage)
            buffers[min(i, j), max(i, j)].append(Profile(starts=starts, loads=loads))
    return Memory(
        nodes=nodes,
        buffers=tuple((pair, summed(ps, ps[0].loads.shape[1:])) for pair, ps in sorted(buffers.items())),
        room=room,
        times=np.arange(times),
        scale=max(abs(float(limit)), 1.0),
    )
