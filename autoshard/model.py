"""The search problem of a program: what its nodes stand for, and how a solution is read back.

One node per group, one per boundary value, one edge per value read (`autoshard.strategies` states them). What a
plan needs of memory is counted here, moment by moment, and stated as rows of the problem where it is tight.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp

import search
from autoshard.grouping import Group
from autoshard.layout import Layout
from autoshard.partition.emitter import Decisions
from autoshard.program import Value
from autoshard.rules import Assignment
from autoshard.strategies_memory import Tensor

__all__ = ["Edge", "Model", "Node"]


# Which states of a chain of differences may follow each other: none so far, this one, an earlier one.
_NEXT = np.array([[0.0, 0.0, math.inf], [math.inf, math.inf, 0.0], [math.inf, math.inf, 0.0]])


@dataclass(eq=False)
class Node:
    name: str
    weight: float
    strategies: list[Any]  # Assignment for a group, Layout for a value
    costs: np.ndarray
    group: Group | None = None
    value: Value | None = None
    signature: Any = None


@dataclass(eq=False)
class Edge:
    source: int
    target: int
    value: Value
    have: list[Layout]  # per strategy of the source
    want: list[Layout]  # per strategy of the target
    weight: float
    moment: tuple[int, int]  # when the resharded copy is live


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """The problem as the program sees it: nodes before tying, and how a solution is read back."""

    problem: search.Problem
    nodes: list[Node]
    class_of: list[int]
    outputs: list[int]
    tensors: list[Tensor]
    edge_tensors: list[tuple[int, np.ndarray, int, int]]  # (tied edge, bytes, start, end)
    moments: int

    @property
    def tied(self) -> bool:
        """Tell whether some nodes are decided as one."""
        return max(self.class_of, default=-1) + 1 < len(self.class_of)

    def decisions(self, choice: Sequence[int]) -> Decisions:
        """Read a choice of strategies as decisions of the partitioner."""
        picked = [choice[c] for c in self.class_of]
        groups: dict[Group, Assignment] = {}
        values: dict[Value, Layout] = {}
        for node, index in zip(self.nodes, picked, strict=True):
            if node.group is not None:
                groups[node.group] = node.strategies[index]
            elif node.value is not None:
                values[node.value] = node.strategies[index]
        outs = tuple(self.nodes[n].strategies[picked[n]] for n in self.outputs)
        return Decisions(assignments=groups, layouts=values, outputs=outs)

    def decided(self, owner: Group | Value) -> int | None:
        """Return the node that decides a group or value by itself; None where it follows another."""
        return self._deciders.get(owner)

    @cached_property
    def _deciders(self) -> dict[Group | Value, int]:
        owners = ((node.group or node.value, n) for n, node in enumerate(self.nodes))
        return {owner: n for owner, n in owners if owner is not None}

    def permitting(self, permitted: Mapping[int, Collection[int]]) -> Model:
        """Return the model with only some strategies of some classes permitted."""
        costs = list(self.problem.costs)
        for c, indices in permitted.items():
            kept = list(indices)
            costs[c] = np.full(len(costs[c]), math.inf)
            costs[c][kept] = self.problem.costs[c][kept]
        return dataclasses.replace(self, problem=dataclasses.replace(self.problem, costs=tuple(costs)))

    def differing(self, alike: Mapping[int, Collection[int]]) -> Model:
        """Return the model without the plans that choose among these strategies, by class, in all the classes.

        A chain of nodes runs along the classes. Each says whether its class is the first to differ, or whether
        none so far or an earlier one is; the last must not say none.
        """
        problem, chain = self.problem, list(alike.items())
        costs, names = [*problem.costs], [*problem.names]
        edges, tables = [*problem.edges], [*problem.edge_costs]
        for k, (c, chosen) in enumerate(chain):
            state = np.zeros(3)  # none so far, this one, an earlier one
            state[2] = math.inf if k == 0 else 0.0
            state[0] = math.inf if k == len(chain) - 1 else 0.0
            agrees = np.isin(np.arange(len(costs[c])), list(chosen))
            edges.append((c, len(costs)))
            tables.append(
                np.stack([np.where(agrees, 0.0, math.inf), np.where(agrees, math.inf, 0.0), 0.0 * agrees], 1)
            )
            if k:
                edges.append((len(costs) - 1, len(costs)))
                tables.append(_NEXT)
            costs.append(state)
            names.append(f"{problem.names[c]} differs")
        return dataclasses.replace(
            self,
            problem=dataclasses.replace(
                problem, costs=tuple(costs), names=tuple(names), edges=tuple(edges), edge_costs=tuple(tables)
            ),
        )

    def preferring_small(self, problem: search.Problem, slack: float) -> search.Problem:
        """Return the problem with a price on the bytes of the arguments.

        The price is so low that no plan costs more than `slack` for it: it decides between plans that cost
        the same, and sends the optimum to the one whose arguments take less memory. Half of it is shared
        out by bytes and half by argument, so that small ones count too.
        """
        sizes = {t.node: t.bytes for t in self.tensors if t.start == 0 and t.bytes.max() > 0}
        total = sum(float(table.max()) for table in sizes.values())
        costs = list(problem.costs)
        for node, table in sizes.items():
            c = self.class_of[node]
            share = table / total + table / (table.max() * len(sizes))
            costs[c] = costs[c] + slack / 2 * share
        return dataclasses.replace(problem, costs=tuple(costs))

    def usage(self, choice: Sequence[int]) -> np.ndarray:
        """Bytes in use at every moment under a choice."""
        change = np.zeros(self.moments + 2)
        for tensor in self.tensors:
            size = tensor.bytes[choice[self.class_of[tensor.node]]]
            change[tensor.start] += size
            change[tensor.end + 1] -= size
        for edge, table, start, end in self.edge_tensors:
            i, j = self.problem.edges[edge]
            size = table[choice[i], choice[j]]
            change[start] += size
            change[end + 1] -= size
        return np.cumsum(change)[: self.moments + 1]

    def floor(self) -> np.ndarray:
        """Bytes at every moment that no choice goes below: each tensor at its smallest, copies left out."""
        change = np.zeros(self.moments + 2)
        for tensor in self.tensors:
            change[tensor.start] += tensor.bytes.min()
            change[tensor.end + 1] -= tensor.bytes.min()
        return np.cumsum(change)[: self.moments + 1]

    def smallest_at(self, moments: Sequence[int], scale: float) -> search.Problem:
        """Return the problem of using the fewest bytes at some moments; time decides only between equals."""
        costs = [np.where(np.isfinite(c), 1e-6 * scale * c, math.inf) for c in self.problem.costs]
        for tensor in self.tensors:
            count = sum(tensor.start <= m <= tensor.end for m in moments)
            if count:
                costs[self.class_of[tensor.node]] += count * tensor.bytes
        edge_costs = [np.where(np.isfinite(c), 1e-6 * scale * c, math.inf) for c in self.problem.edge_costs]
        for edge, table, start, end in self.edge_tensors:
            count = sum(start <= m <= end for m in moments)
            if count:
                edge_costs[edge] = edge_costs[edge] + count * table
        return dataclasses.replace(self.problem, costs=tuple(costs), edge_costs=tuple(edge_costs))

    def with_memory(self, limit: float, moments: Sequence[int]) -> search.Problem:
        """Return the problem with a memory row for each of some moments."""
        when = np.asarray(sorted(moments))
        classes = len(self.problem.costs)
        usages: list[np.ndarray] = [np.zeros(len(c)) for c in self.problem.costs]
        tables: dict[int, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
        for tensor in self.tensors:
            rows = np.nonzero((when >= tensor.start) & (when <= tensor.end))[0]
            if len(rows):
                tables[self.class_of[tensor.node]].append((tensor.bytes, rows))
        # A class may hold tensors of several sizes: the row counts multiples of a shared unit table, so
        # each distinct size becomes a node of its own that follows the class through an equality edge.
        costs = list(self.problem.costs)
        edges, edge_costs = list(self.problem.edges), list(self.problem.edge_costs)
        names = list(self.problem.names)
        live: list[tuple[int, np.ndarray]] = []
        for c in range(classes):
            distinct: dict[bytes, list[np.ndarray]] = {}
            sizes: dict[bytes, np.ndarray] = {}
            for table, rows in tables.get(c, []):
                distinct.setdefault(table.tobytes(), []).append(rows)
                sizes[table.tobytes()] = table
            for k, (key, found) in enumerate(distinct.items()):
                if k == 0:
                    node = c
                    usages[c] = sizes[key]
                else:
                    node = len(costs)
                    count = len(costs[c])
                    costs.append(np.zeros(count))
                    usages.append(sizes[key])
                    names.append(f"{names[c]} size {k}")
                    same = np.full((count, count), math.inf)
                    np.fill_diagonal(same, 0.0)
                    edges.append((c, node))
                    edge_costs.append(same)
                live.append((node, np.concatenate(found)))
        matrix = _counts(live, len(when), len(costs))
        edge_live: list[tuple[int, np.ndarray]] = []
        edge_usages: dict[int, np.ndarray] = {}
        for edge, table, start, end in self.edge_tensors:
            rows = np.nonzero((when >= start) & (when <= end))[0]
            if len(rows):
                # Buffers of tied edges at one moment add up; they share one table per edge.
                if edge in edge_usages and not np.array_equal(edge_usages[edge], table):
                    edge_usages[edge] = np.maximum(edge_usages[edge], table)
                else:
                    edge_usages[edge] = table
                edge_live.append((edge, rows))
        return search.Problem(
            costs=tuple(costs),
            edges=tuple(edges),
            edge_costs=tuple(edge_costs),
            names=tuple(names),
            usages=tuple(usages),
            live=matrix,
            edge_usages=edge_usages,
            edge_live=_counts(edge_live, len(when), len(edges)) if edge_usages else None,
            usage_limit=limit,
        )


def _counts(entries: Sequence[tuple[int, np.ndarray]], rows: int, columns: int) -> sp.csr_array:
    at = np.concatenate([r for _, r in entries]) if entries else np.zeros(0, int)
    to = np.concatenate([np.full(len(r), c) for c, r in entries]) if entries else np.zeros(0, int)
    return sp.csr_array(
        sp.coo_array((np.ones(len(at)), (at.astype(int), to.astype(int))), shape=(rows, columns))
    )
