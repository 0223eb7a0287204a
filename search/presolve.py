"""Exact reduction: drop strategies that another one of the same node always beats.

Strategy a of node i dominates b when, whatever the neighbours choose, a costs no more and uses no more
memory: `c[a] - c[b] + sum_e max_q (C_e[a, q] - C_e[b, q]) <= 0`. Of two equals the lower index stays, so that
ties keep their preference.

Reference: R. F. Goldstein, Efficient rotamer elimination applied to protein side-chains and related spin
glasses, Biophysical Journal 66, 1994.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from search.contract import contract
from search.graph import Graph
from search.memory import Ints, Pair, Profile
from search.problem import Floats
from search.program import centre, classes

Marks = npt.NDArray[np.bool_]
_CELLS = 4_000_000  # comparisons per table above which the general test is skipped


def presolve(graph: Graph, *, rounds: int = 4, expired: Callable[[], bool] = lambda: False) -> Graph:
    """Repeat merging, dominance and row reduction until nothing changes.

    Args:
        graph: as stated by the problem.
        rounds: most repetitions.
        expired: tells that the time is up: what is reduced so far is returned.

    Returns:
        A smaller graph that still contains an optimal choice.

    """
    for _ in range(rounds):
        before = graph.sizes
        if expired():
            break
        graph = _tight(contract(folded(graph)))
        if expired():
            break
        positions = _undominated(graph)
        if any(len(p) < size for p, size in zip(positions, graph.sizes, strict=True)):
            graph = _tight(graph.restrict(positions))
        if graph.sizes == before:
            break
    return graph


def _tight(graph: Graph) -> Graph:
    return graph if graph.memory is None else replace(graph, memory=graph.memory.tighten())


def folded(graph: Graph) -> Graph:
    """Move what a pair's table says about one node alone into that node's costs.

    A table that is a row term plus a column term, as every table of a node with one strategy is, vanishes.

    Args:
        graph: any.

    Returns:
        A graph of the same costs with fewer pairs.
    """
    buffered = {p for p, _ in graph.memory.buffers} if graph.memory is not None else set()
    unary = list(graph.unary)
    pairs: dict[Pair, Floats] = {}
    known: dict[int, tuple[Floats, Floats] | None] = {}
    for (i, j), table in graph.pairs.items():
        if id(table) not in known:
            known[id(table)] = _terms(table)
        terms = known[id(table)]
        if terms is None or (i, j) in buffered:
            pairs[i, j] = table
            continue
        unary[i] = unary[i] + terms[0]
        unary[j] = unary[j] + terms[1]
    return replace(graph, unary=tuple(unary), pairs=pairs)


def _terms(table: Floats) -> tuple[Floats, Floats] | None:
    """Row and column terms of a table that is their sum, or None."""
    if not np.isfinite(table).all():
        return None
    rest, by_row, by_col = centre(table)
    return None if rest.any() else (by_row, by_col)


def _undominated(graph: Graph) -> list[Ints]:
    """Strategies to keep per node; a node's own strategies are judged with all neighbours' present."""
    buffers: dict[Pair, Profile] = {}
    matters = [False] * len(graph.unary)
    memory = graph.memory
    if memory is not None:
        buffers = dict(memory.buffers)
        matters = [len(p.starts) > 0 for p in memory.nodes]
    kept = [_possible(graph, i, near) for i, near in enumerate(graph.neighbours())]
    if any(len(k) < size for k, size in zip(kept, graph.sizes, strict=True)):
        return kept
    distinct = {id(table): table for table in graph.pairs.values()}
    small_of = {key: _compress(table) for key, table in distinct.items()}
    compressed = {pair: small_of[id(table)] for pair, table in graph.pairs.items()}
    for i, near in enumerate(graph.neighbours()):
        if len(graph.unary[i]) < 2:
            continue
        tables = []
        for j, _ in near:
            small, by_row, by_col = compressed[min(i, j), max(i, j)]
            tables.append((small, by_row) if i < j else (small.T, by_col))
        extra = [memory.nodes[i].loads.T] if memory is not None and matters[i] else []
        for j, _ in near:
            if (buffer := buffers.get((min(i, j), max(i, j)))) is not None:
                loads = buffer.loads.transpose((1, 0, 2) if i < j else (2, 0, 1))
                extra.append(loads.reshape(len(loads), -1))
        kept[i] = _survivors(graph.unary[i], tables, extra)
    return kept


def _compress(table: Floats) -> tuple[Floats, Ints, Ints]:
    """Keep distinct rows and columns: (small table, class of each row, class of each column)."""
    by_row, first_row = classes(table)
    by_col, first_col = classes(table[first_row].T)
    return table[np.ix_(first_row, first_col)], by_row, by_col


def _possible(graph: Graph, node: int, near: list[tuple[int, Floats]]) -> Ints:
    """Strategies that every neighbour has an answer to; all of them if none has."""
    possible = np.ones(len(graph.unary[node]), dtype=bool)
    for _, table in near:
        possible &= np.isfinite(table).any(axis=1)
    return np.flatnonzero(possible) if possible.any() else np.arange(len(possible))


def _survivors(
    unary: Floats,
    tables: list[tuple[Floats, Ints]],
    extra: list[Floats],
) -> Ints:
    size = len(unary)
    worst = unary[:, None] - unary[None, :]
    allowed = np.ones((size, size), dtype=bool)
    for small, row_class in tables:
        if small.shape[0] ** 2 * small.shape[1] > _CELLS:
            same = row_class[:, None] == row_class[None, :]
            worst = np.where(same, worst, np.inf)
            continue
        with np.errstate(invalid="ignore"):  # a wholly forbidden row meets a forbidden pair: no verdict
            worst = worst + _worst(small)[np.ix_(row_class, row_class)]
    for usage in extra:
        small, row_class, _ = _compress(usage)
        no_more = np.asarray((small[:, None, :] <= small[None, :, :]).all(axis=-1))
        allowed &= no_more[np.ix_(row_class, row_class)]
    return _keep(worst, allowed)


def _worst(table: Floats) -> Floats:
    """Return `[a, b]`, the most that row a can cost above row b."""
    a, b = table[:, None, :], table[None, :, :]
    with np.errstate(invalid="ignore"):
        difference = a - b
    difference = np.where(np.isinf(b), -np.inf, difference)
    return np.asarray(difference.max(axis=-1))


def _keep(worst: Floats, allowed: Marks) -> Ints:
    """Walk the strategies in order of preference, dropping what a survivor dominates."""
    size = len(worst)
    beats = allowed & (worst <= 0)
    alive = np.ones(size, dtype=bool)
    for b in range(size):
        rivals = beats[:, b] & alive
        rivals[b] = False
        # of two that beat each other only the lower index may remain
        rivals &= ~beats[b, :] | (np.arange(size) < b)
        if rivals.any():
            alive[b] = False
    return np.flatnonzero(alive)
