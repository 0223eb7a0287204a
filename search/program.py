"""The integer program: exact, and as tight as the local marginal polytope.

    minimise    sum_i c_i . x_i  +  sum_ij C_ij . e_ij
    (1)  sum_s x_i[s] = 1                                      every node i, x binary
    (2)  sum_q e_ij[p, q] = sum_{s in p} x_i[s]                every pair, row class p, e >= 0 continuous
    (3)  sum_p e_ij[p, q] = sum_{s in q} x_j[s]                every pair, column class q
    (4)  sum_i live[t, i] u_i . x_i + buffers <= room[t]       every time t in use, added lazily

Equal rows and columns of a table share one class, so a pair costs one variable per distinct (row, column).
A table that is a sum of a row and a column term has no pair variables at all: its terms move to the nodes.
Everything is built as arrays and handed to the backend at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from search.graph import Graph
from search.memory import Ints, Pair
from search.problem import Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """`minimise cost @ v, low <= matrix @ v <= high, 0 <= v <= upper`, the first `num_binary` binary.

    Args:
        cost: `[V]`, unscaled.
        upper: `[V]`, 0 for what is forbidden and 1 otherwise.
        matrix: CSR `[rows, V]`.
        low: `[rows]`.
        high: `[rows]`.
        num_binary: node choices come first; the rest is continuous.
        starts: `[N + 1]`, where each node's strategies begin.
        constant: cost outside of the program.
        tables: per pair with variables (first variable, row class `[S_i]`, column class `[S_j]`, columns).

    """

    cost: Floats
    upper: Floats
    matrix: sp.csr_array
    low: Floats
    high: Floats
    num_binary: int
    starts: Ints
    constant: float
    tables: dict[Pair, tuple[int, Ints, Ints, int]]

    def choice(self, values: Floats) -> list[int]:
        """Pick the strategy with the largest value per node, lower index first."""
        return [int(np.argmax(values[a:b])) for a, b in zip(self.starts[:-1], self.starts[1:], strict=True)]


def classes(table: Floats) -> tuple[Ints, Ints]:
    """Group equal rows: (class of each row, first row of each class), classes by first appearance.

    >>> import numpy as np
    >>> [x.tolist() for x in classes(np.array([[1.0, 2.0], [0.0, 1.0], [1.0, 2.0]]))]
    [[0, 1, 0], [0, 1]]
    """
    keys: dict[bytes, int] = {}
    of = np.empty(len(table), dtype=np.int64)
    first: list[int] = []
    for r, row in enumerate(np.ascontiguousarray(table + 0.0)):
        k = keys.setdefault(row.tobytes(), len(first))
        if k == len(first):
            first.append(r)
        of[r] = k
    return of, np.array(first, dtype=np.int64)


def build(graph: Graph) -> Program:
    """Write rows (1)-(3) of the module's program.

    Args:
        graph: what to choose from.

    Returns:
        The program without memory rows.

    """
    sizes = np.array(graph.sizes, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    num_binary = int(starts[-1])
    node_cost = np.concatenate([*graph.unary, np.zeros(0)]).copy()
    buffers = {pair: p.loads for pair, p in graph.memory.buffers} if graph.memory is not None else {}
    row_parts: list[Ints] = [np.repeat(np.arange(len(sizes)), sizes)]
    col_parts: list[Ints] = [np.arange(num_binary)]
    val_parts: list[Floats] = [np.ones(num_binary)]
    costs, uppers = [node_cost], [np.ones(num_binary)]
    rows, columns = len(sizes), num_binary
    tables: dict[Pair, tuple[int, Ints, Ints, int]] = {}
    for (i, j), full in graph.pairs.items():
        keep = np.concatenate([full[None], buffers.get((i, j), full[None])])
        row_class, row_first = classes(np.concatenate(keep, axis=1))
        col_class, col_first = classes(np.concatenate(keep, axis=0).T)
        small, by_row, by_col = centre(full[np.ix_(row_first, col_first)])
        node_cost[starts[i] : starts[i + 1]] += by_row[row_class]
        node_cost[starts[j] : starts[j + 1]] += by_col[col_class]
        if not small.any() and (i, j) not in buffers:
            continue
        p, q = small.shape
        variable = columns + np.arange(p * q)
        row_parts += [rows + np.repeat(np.arange(p), q), rows + row_class]
        col_parts += [variable, starts[i] + np.arange(len(row_class))]
        val_parts += [np.ones(p * q), -np.ones(len(row_class))]
        row_parts += [rows + p + np.tile(np.arange(q), p), rows + p + col_class]
        col_parts += [variable, starts[j] + np.arange(len(col_class))]
        val_parts += [np.ones(p * q), -np.ones(len(col_class))]
        flat = small.ravel()
        costs.append(np.where(np.isfinite(flat), flat, 0.0))
        uppers.append(np.isfinite(flat).astype(np.float64))
        tables[i, j] = (columns, row_class, col_class, q)
        rows += p + q
        columns += p * q
    bound = np.zeros(rows)
    bound[: len(sizes)] = 1.0
    entries = (np.concatenate(val_parts), (np.concatenate(row_parts), np.concatenate(col_parts)))
    return Program(
        cost=np.concatenate(costs),
        upper=np.concatenate(uppers),
        matrix=sp.csr_array(sp.coo_array(entries, shape=(rows, columns))),
        low=bound,
        high=bound,
        num_binary=num_binary,
        starts=starts,
        constant=graph.constant,
        tables=tables,
    )


def centre(table: Floats) -> tuple[Floats, Floats, Floats]:
    """Split a table into a least-zero rest and the row and column terms taken out of it."""
    finite = np.isfinite(table)
    by_row = np.where(finite.any(axis=1), np.min(table, axis=1, initial=np.inf), 0.0)
    rest = table - by_row[:, None]
    by_col = np.where(finite.any(axis=0), np.min(rest, axis=0, initial=np.inf), 0.0)
    rest = rest - by_col[None, :]
    tiny = 1e-13 * np.abs(table[finite]).max(initial=0.0)
    return np.where(np.abs(rest) <= tiny, 0.0, rest), by_row, by_col


def with_memory(program: Program, graph: Graph, which: Sequence[int], *, soft: bool = False) -> Program:
    """Add memory rows (4), in units of the memory's scale.

    Args:
        program: built from `graph`.
        graph: has a memory.
        which: the memory rows to add.
        soft: replace the costs: one more variable, the last, is the overshoot allowed to every row
            (in units of the scale) and the only thing that costs.

    Returns:
        A larger program.

    """
    memory = graph.memory
    assert memory is not None
    chosen = list(which)
    wide = program.matrix.shape[1]
    block = sp.csr_array(memory.loads_at(chosen) @ variables(program, graph)) * (1.0 / memory.scale)
    cost, upper, matrix = program.cost, program.upper, program.matrix
    if soft:
        block = sp.csr_array(sp.hstack([block, sp.csr_array(-np.ones((len(chosen), 1)))]))
        matrix = sp.csr_array(sp.hstack([matrix, sp.csr_array((matrix.shape[0], 1))]))
        cost = np.concatenate([np.zeros(wide), [1.0]])
        upper = np.concatenate([upper, [np.inf]])
    return Program(
        cost=cost,
        upper=upper,
        matrix=sp.csr_array(sp.vstack([matrix, block])),
        low=np.concatenate([program.low, np.full(len(chosen), -np.inf)]),
        high=np.concatenate([program.high, memory.room[chosen] / memory.scale]),
        num_binary=program.num_binary,
        starts=program.starts,
        constant=0.0 if soft else program.constant,
        tables=program.tables,
    )


def variables(program: Program, graph: Graph) -> sp.csr_array:
    """CSR `[memory columns, V]`: the variable that stands for each column of the memory.

    Several cells of a pair's table may share a variable; the first of them has its bytes.
    """
    memory = graph.memory
    assert memory is not None
    rows, variables = [np.arange(program.num_binary)], [np.arange(program.num_binary)]
    for start, (pair, _) in zip(memory.starts[len(memory.nodes) :].tolist(), memory.buffers, strict=False):
        first, row_class, col_class, q = program.tables[pair]
        index = first + row_class[:, None] * q + col_class[None, :]
        shared, where = np.unique(index.ravel(), return_index=True)
        rows.append(start + where)
        variables.append(shared)
    row, column = np.concatenate(rows), np.concatenate(variables)
    return sp.csr_array(
        (np.ones(len(row)), (row, column)), shape=(int(memory.starts[-1]), program.matrix.shape[1])
    )
