"""Exact reduction: nodes that a neighbour decides become part of it.

Node j follows node i where every strategy of i permits one strategy of j only: a pair that forbids all else
ties most operations of a program to another one. A node without effect on memory and with a single neighbour
follows it too, by its cheapest answer. Nodes with one strategy leave their costs with their neighbours. What
remains decides for the rest.
"""

from collections import defaultdict, deque
from dataclasses import replace

import numpy as np

from search.graph import Graph
from search.memory import Ints, Memory, Pair, Profile, summed
from search.problem import Floats


def contract(graph: Graph) -> Graph:
    """Merge nodes until none follows another.

    Args:
        graph: any.

    Returns:
        A graph of fewer nodes with the same least cost; `graph` itself if every choice is forbidden.

    """
    try:
        return _Contraction(graph).run()
    except _ImpossibleError:
        return graph


class _ImpossibleError(Exception):
    """A node has no permitted strategy left."""


class _Contraction:
    """The state of one contraction: live nodes with tables to their live neighbours, both ways."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.unary = list(graph.unary)
        self.near: list[dict[int, Floats]] = [{} for _ in graph.unary]
        self._made: dict[tuple[int, bytes], tuple[Floats, Floats]] = {}
        self._permits: dict[int, tuple[Floats, Ints, bool]] = {}  # by id; the array keeps it taken
        for (i, j), table in graph.pairs.items():
            self.near[i][j] = table
            self.near[j][i] = self._made_from(table, b"T", table.T)
        self.constant = graph.constant
        # per node its present strategies, and once it follows another: whom, and by which of its strategies
        self.positions = [np.arange(len(u)) for u in graph.unary]
        self.leader: dict[int, int] = {}
        self.answer: dict[int, Ints] = {}
        self.heavy = [False] * len(graph.unary)
        if graph.memory is not None:
            self.heavy = [len(p.starts) > 0 for p in graph.memory.nodes]
            for pair, _ in graph.memory.buffers:
                for node in pair:
                    self.heavy[node] = True
        self.todo: deque[Pair] = deque()  # (i, i) settles a node, other pairs are to be looked at

    def run(self) -> Graph:
        """Work until nothing is left to do, then write the result."""
        self.todo.extend((i, i) for i, u in enumerate(self.unary) if len(u) == 1)
        self.todo.extend(pair for i, near in enumerate(self.near) for pair in ((i, j) for j in near))
        while self.todo:
            i, j = self.todo.popleft()
            if i == j:
                self._settle(i)
            elif j in self.near[i]:
                self._look(i, j)
        return self._written()

    def _look(self, i: int, j: int) -> None:
        """Let j follow i, or i lose strategies, if their table says so."""
        possible, single = self._permitted(self.near[i][j])
        if len(possible) < len(self.unary[i]):
            self._keep(i, possible)
        elif single and self._cheap(i, j):
            if len(self.near[j]) > len(self.near[i]) and self._permitted(self.near[j][i])[1]:
                i, j = j, i  # each decides the other: fewer tables move
            self._follow(j, i, np.isfinite(self.near[i][j]).argmax(axis=1))
        elif len(self.near[i]) == 1 and not self.heavy[i]:
            self._follow(i, j, (self.near[j][i] + self.unary[i]).argmin(axis=1))

    def _permitted(self, table: Floats) -> tuple[Ints, bool]:
        """Rows with an answer, and whether each has one only."""
        known = self._permits.get(id(table))
        if known is None:
            answers = np.isfinite(table).sum(axis=1)
            known = (table, np.flatnonzero(answers), bool((answers == 1).all()))
            self._permits[id(table)] = known
        return known[1], known[2]

    def _made_from(self, table: Floats, key: bytes, fresh: Floats) -> Floats:
        """Let equal views of one table be one array, so that what is known of it is found again."""
        return self._made.setdefault((id(table), key), (table, fresh))[1]

    def _cheap(self, i: int, j: int) -> bool:
        """Whether the tables of j, read through i, take no more entries than before."""
        more = len(self.unary[i]) - len(self.unary[j])
        if more <= 0:
            return True
        others = sum(len(self.unary[o]) for o in self.near[j] if o != i)
        return more * others <= self.near[i][j].size

    def _keep(self, i: int, which: Ints) -> None:
        """Drop strategies."""
        if not len(which):
            raise _ImpossibleError
        self.unary[i] = self.unary[i][which]
        self.positions[i] = self.positions[i][which]
        for o, table in self.near[i].items():
            self._join(i, o, self._made_from(table, b"K" + which.tobytes(), table[which]))
        if len(which) == 1:
            self.todo.append((i, i))

    def _join(self, i: int, o: int, table: Floats) -> None:
        self.near[i][o] = table
        self.near[o][i] = self._made_from(table, b"T", table.T)
        self.todo += [(i, o), (o, i)]

    def _settle(self, i: int) -> None:
        """Leave the costs of a node with one strategy with its neighbours."""
        for o in list(self.near[i]):
            del self.near[i][o]
            self._pay(o, self.near[o].pop(i)[:, 0])

    def _pay(self, o: int, cost: Floats) -> None:
        """Charge a node for what a neighbour that is gone made of each of its strategies."""
        self.unary[o] = self.unary[o] + cost
        possible = np.flatnonzero(np.isfinite(self.unary[o]))
        if len(possible) < len(self.unary[o]):
            self._keep(o, possible)
        if len(self.near[o]) == 1:
            self.todo.append((o, next(iter(self.near[o]))))

    def _follow(self, j: int, i: int, answer: Ints) -> None:
        """Make j a part of i: strategy s of i implies `answer[s]` of j."""
        self.leader[j] = i
        self.answer[j] = np.full(len(self.graph.unary[i]), -1, dtype=np.int64)
        self.answer[j][self.positions[i]] = self.positions[j][answer]
        self.heavy[i] = self.heavy[i] or self.heavy[j]
        table = self.near[i].pop(j)
        del self.near[j][i]
        same = np.array_equal(answer, np.arange(len(self.unary[j])))
        for o in list(self.near[j]):
            del self.near[o][j]
            theirs = self.near[j].pop(o)
            read = theirs if same else self._made_from(theirs, answer.tobytes(), theirs[answer])
            old = self.near[i].get(o)
            self._join(i, o, read if old is None else self._made_from(old, b"+%d" % id(read), old + read))
        self._pay(i, self.unary[j][answer] + table[np.arange(len(answer)), answer])

    def _written(self) -> Graph:
        """Number the remaining nodes and translate owners, memory and tables."""
        graph = self.graph
        roots, maps = self._resolved()
        alive = self._alive()
        number = {i: k for k, i in enumerate(alive)}
        whose = [number.get(r, -1) for r in roots]
        fixed = [i for i, u in enumerate(self.unary) if i not in self.leader and len(u) == 1]
        return Graph(
            owner=tuple(whose[o] if o >= 0 else -1 for o in graph.owner),
            kept=tuple(k[maps[o]] if o >= 0 else k for o, k in zip(graph.owner, graph.kept, strict=True)),
            leads=tuple(graph.leads[i] for i in alive),
            unary=tuple(self.unary[i] for i in alive),
            pairs={
                (number[i], number[j]): t for i in alive for j, t in sorted(self.near[i].items()) if i < j
            },
            constant=self.constant + sum(float(self.unary[i][0]) for i in fixed),
            memory=None if graph.memory is None else self._memory(graph.memory, whose, maps),
        )

    def _alive(self) -> list[int]:
        return [i for i, u in enumerate(self.unary) if i not in self.leader and len(u) > 1]

    def _resolved(self) -> tuple[list[int], list[Ints]]:
        """Per node the one that decides it and its strategy for each of that one's."""
        roots = list(range(len(self.unary)))
        maps = list(self.positions)
        for j in reversed(self.leader):  # whoever follows last leads those before
            roots[j] = roots[self.leader[j]]
            maps[j] = self.answer[j][maps[self.leader[j]]]
        return roots, maps

    def _memory(self, memory: Memory, whose: list[int], maps: list[Ints]) -> Memory:
        """Add the profiles of nodes that became one; what has no choice left is taken from the room."""
        parts: dict[int, list[Profile]] = defaultdict(list)
        for node, p in enumerate(memory.nodes):
            if len(p.starts):
                parts[whose[node]].append(Profile(starts=p.starts, loads=p.loads[:, maps[node]]))
        buffers: dict[Pair, list[Profile]] = defaultdict(list)
        for (i, j), p in memory.buffers:
            a, b = whose[i], whose[j]
            loads = p.loads[:, maps[i]][:, :, maps[j]]
            if a == b and a >= 0:
                parts[a].append(Profile(starts=p.starts, loads=np.diagonal(loads, axis1=1, axis2=2)))
            elif a < 0 or b < 0:
                flat = loads[:, 0, :] if a < 0 else loads[:, :, 0]
                parts[max(a, b)].append(Profile(starts=p.starts, loads=flat))
            else:
                turned = loads if a < b else loads.transpose(0, 2, 1)
                buffers[min(a, b), max(a, b)].append(Profile(starts=p.starts, loads=turned))
        fixed = summed(parts.pop(-1, []), (1,))
        steps = np.zeros(len(memory.room))
        steps[fixed.starts] = np.diff(fixed.loads[:, 0], prepend=0.0)
        pairs = [(pair, summed(ps, ps[0].loads.shape[1:])) for pair, ps in sorted(buffers.items())]
        return replace(
            memory,
            nodes=tuple(summed(parts.get(k, []), (len(self.unary[i]),)) for k, i in enumerate(self._alive())),
            buffers=tuple(pairs),
            room=memory.room - np.cumsum(steps),
        )
