"""A grouped program and a machine become a `search.Problem`.

One node per group: its strategies are the ways to split its factors, their cost the seconds of its kernel.
One node per boundary value (inputs, loop carries, what a scan slices or stacks, outputs): its strategies are
layouts. One edge per value read: the cost of resharding from the layout that the source leaves to the one
that the reader wants. What a loop runs n times costs n times. Repeated structure (unrolled layers) is found
by colour refinement and tied: one node stands for all, with their summed cost.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import scipy.sparse as sp

import search
from autoshard.boundary import Boundary, Crossing, boundaries, free_axes
from autoshard.choices import assignments, layouts, windowed
from autoshard.fusion import Fusions, Rider, Tail
from autoshard.grouping import Block, Group
from autoshard.layout import Layout, local_shape, replicated
from autoshard.partition.emitter import Decisions, number_groups
from autoshard.partition.kernels import kernel_costs
from autoshard.partition.nested import branch_shares
from autoshard.partition.price import Cost
from autoshard.partition.reshard import Resharder
from autoshard.program import Atom, Op, Value, aval_of, shape_of
from autoshard.rules import Assignment, Kind
from autoshard.strategies_memory import Tensor, buffers
from autoshard.ties import tie

__all__ = ["Model", "build_model"]


@dataclass(eq=False)
class _Node:
    name: str
    weight: float
    strategies: list[Any]  # Assignment for a group, Layout for a value
    costs: np.ndarray
    group: Group | None = None
    value: Value | None = None
    signature: Any = None


@dataclass(eq=False)
class _Edge:
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
    nodes: list[_Node]
    class_of: list[int]
    outputs: list[int]
    tensors: list[Tensor]
    edge_tensors: list[tuple[int, np.ndarray, int, int]]  # (tied edge, bytes, start, end)
    moments: int

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


@dataclass(frozen=True, kw_only=True, eq=False)
class _Origin:
    """Where a value comes from: a node, and its layout per strategy of that node."""

    node: int
    layouts: list[Layout]


class _Builder:
    def __init__(
        self,
        block: Block,
        resharder: Resharder,
        pinned: Mapping[Value, Sequence[Layout]],
        pinned_outputs: Mapping[int, Sequence[Layout]],
        allowed: Mapping[Group, Sequence[Assignment]],
        held: Collection[Value],
        state: Mapping[int, int],
        donated: Sequence[bool],
        loop_trips: int,
        rings: bool,
        fusions: Fusions,
    ) -> None:
        self.rings = rings
        self.block, self.resharder = block, resharder
        self.machine = resharder.machine
        self.pinned, self.pinned_outputs, self.allowed, self.held = pinned, pinned_outputs, allowed, held
        self.state, self.donated, self.loop_trips = state, donated, loop_trips
        self.numbers = number_groups(block)
        self.fusions = fusions
        self.nodes: list[_Node] = []
        self.edges: list[_Edge] = []
        self.origin: dict[Value, _Origin] = {}
        self.outputs: list[int] = []
        self._tables: dict[Any, np.ndarray] = {}
        self._signatures: dict[Any, list[Assignment]] = {}

    # Nodes ----------------------------------------------------------------------------------------

    def value_node(
        self,
        value: Value,
        weight: float,
        kind: str,
        name: str,
        *,
        options: Sequence[Layout] = (),
        even: bool = False,
    ) -> int:
        mesh = free_axes(self.machine.mesh, value.manual)
        options = list(options or self.pinned.get(value) or layouts(value.shape, mesh, even=even))
        node = _Node(
            name=name,
            weight=weight,
            strategies=options,
            costs=np.zeros(len(options)),
            value=value,
            signature=("value", kind, value.shape, str(value.dtype), weight, tuple(options)),
        )
        self.nodes.append(node)
        self.origin[value] = _Origin(node=len(self.nodes) - 1, layouts=options)
        return len(self.nodes) - 1

    def group_node(self, item: Group, weight: float) -> None:
        signature = group_signature(item)
        options = list(self.allowed.get(item, ())) or self._options(item, signature)
        node = _Node(
            name=f"g{self.numbers[item]}.{item.title}",
            weight=weight,
            strategies=options,
            costs=np.zeros(len(options)),
            group=item,
            signature=(
                (signature, self.fusions.of(item)),
                item.manual,
                weight,
                len(options),
                tuple(map(repr, self.allowed.get(item, ()))),
            ),
        )
        self.nodes.append(node)
        index = len(self.nodes) - 1
        for i, value in enumerate(item.inputs):
            self.read(value, index, [item.input_layout(i, a) for a in options], weight, item)
        for j, value in enumerate(item.outputs):
            self.origin[value] = _Origin(node=index, layouts=[item.output_layout(j, a) for a in options])

    def _options(self, item: Group, signature: Any) -> list[Assignment]:
        key = signature, item.manual
        if key not in self._signatures:
            mesh = free_axes(self.machine.mesh, item.manual)
            options = assignments(item.rule, mesh)
            if self.rings and item.title == "dot_general" and len(item.inputs) == 2:
                options += windowed(item.rule, options, mesh)
            self._signatures[key] = options
        return self._signatures[key]

    def read(self, value: Atom, target: int, want: list[Layout], weight: float, item: Group) -> None:
        if not isinstance(value, Value):
            return
        number = self.numbers[item]
        span = (number, number)
        if item.kind is Kind.CONTROL:
            span = (number, number + sum(1 for b in item.blocks for _ in b.walk()))
        elif item.is_copy:
            span = (number, number)
        origin = self.origin[value]
        self.edges.append(
            _Edge(
                source=origin.node,
                target=target,
                value=value,
                have=origin.layouts,
                want=want,
                weight=weight,
                moment=span,
            )
        )

    # Walk -----------------------------------------------------------------------------------------

    def program(self) -> None:
        for i, value in enumerate(self.block.inputs):
            self.value_node(value, 1.0, f"input {self.donated[i]}", f"input {value.name}", even=True)
        for value, _ in self.block.consts:
            self.value_node(value, 1.0, "constant", value.name, even=True)
        self.walk(self.block, 1.0)
        end = len(self.numbers)
        for j, atom in enumerate(self.block.outputs):
            options = list(self.pinned_outputs.get(j, ()))
            tied = self.state.get(j)
            if tied is not None and not options:
                node = self.origin[self.block.inputs[tied]].node
                options = self.nodes[node].strategies
            else:
                options = options or layouts(shape_of(atom), self.machine.mesh, even=True)
                self.nodes.append(
                    _Node(
                        name=f"output {j}",
                        weight=1.0,
                        strategies=options,
                        costs=np.zeros(len(options)),
                        signature=("output", shape_of(atom), str(aval_of(atom).dtype), tuple(options)),
                    )
                )
                node = len(self.nodes) - 1
            self.outputs.append(node)
            if isinstance(atom, Value):
                origin = self.origin[atom]
                self.edges.append(
                    _Edge(
                        source=origin.node,
                        target=node,
                        value=atom,
                        have=origin.layouts,
                        want=options,
                        weight=1.0,
                        moment=(end, end),
                    )
                )

    def walk(self, block: Block, weight: float) -> None:
        for item in block.groups:
            if item.kind is Kind.IDENTITY:
                (op,) = item.ops
                for atom, value in zip(op.inputs, op.outputs, strict=True):
                    if isinstance(atom, Value):
                        self.origin[value] = self.origin[atom]
                    else:
                        self.value_node(value, weight, "literal", f"g{self.numbers[item]}.literal")
            elif item.kind is Kind.CONTROL:
                self.control(item, weight)
            else:
                self.group_node(item, weight)

    def control(self, item: Group, weight: float) -> None:
        (op,) = item.ops
        boundary = boundaries(item)
        number = self.numbers[item]
        for i, (atom, (inner, crossing)) in enumerate(zip(op.inputs, boundary.operands, strict=True)):
            if inner is None:
                want = [replicated(len(shape_of(atom)))]
                if isinstance(atom, Value):
                    index = self._fixed_node(atom, f"g{number}.index")
                    self.read(atom, index, want, weight, item)
                continue
            name, even = f"g{number}.{op.name} operand {i}", bool(crossing.manual)
            index = self.value_node(inner, weight, "operand", name, even=even)
            want = [crossing.outside(x) for x in self.nodes[index].strategies]
            self.read(atom, index, want, weight, item)
        leaving = {value: self.leaving(item, b, j, value, x) for b, j, value, x in boundary.yields}
        for j, value in enumerate(boundary.results):
            if value in op.outputs:
                name = f"g{number}.{op.name} result {j}"
                self.value_node(value, weight, "result", name, options=leaving[value])
        for value, decider in boundary.same.items():
            self.origin[value] = self.origin[decider]
        if op.name == "scan":
            self.copies(item, weight * op.params["length"])
        for index, (body, runs) in enumerate(zip(item.blocks, self.runs(op), strict=True)):
            self.walk(body, weight * runs)
            self.yields(item, boundary, index, body, weight * runs)
        for j, value in enumerate(op.outputs):
            self.origin[value] = self.origin[boundary.results[j]]

    def copies(self, item: Group, weight: float) -> None:
        """Price the copies of what a scan slices and stacks."""
        (op,) = item.ops
        fused = self.fusions.of(item)
        first = op.params["num_consts"] + op.params["num_carry"]
        slices = zip((r is None for r in fused.slices), item.blocks[0].inputs[first:], strict=True)
        stacks = zip(fused.stacks, op.outputs[op.params["num_carry"] :], strict=True)
        for lead, pairs in ((0, slices), (1, stacks)):
            for copied, value in pairs:
                if copied:
                    origin = self.origin[value]
                    shape, prices = value.shape[lead:], []
                    for x in origin.layouts:
                        local = local_shape(shape, Layout(x.dims[lead:]), self.machine.mesh)
                        var = SimpleNamespace(aval=jax.ShapeDtypeStruct(local, value.dtype))
                        prices.append(weight * self.machine.copying_cost(var).seconds)
                    node = self.nodes[origin.node]
                    node.costs = node.costs + np.array(prices)

    def leaving(self, item: Group, index: int, j: int, value: Value, crossing: Crossing) -> Sequence[Layout]:
        """List the layouts in which a value can leave a block."""
        if value in self.pinned:
            return list(dict.fromkeys(map(crossing.fitted, self.pinned[value])))
        mesh = free_axes(self.machine.mesh, value.manual | crossing.manual)
        shape = shape_of(item.blocks[index].outputs[j])
        return [crossing.outside(x) for x in layouts(shape, mesh, even=bool(crossing.manual))]

    def runs(self, op: Op) -> Sequence[float]:
        """How often each body of a loop or conditional counts."""
        if op.name == "cond":
            return branch_shares(op.params, len(op.blocks))
        trips = {"scan": op.params.get("length", 1), "while": self.loop_trips}.get(op.name, 1)
        return [trips] * len(op.blocks)

    def _fixed_node(self, atom: Value, name: str) -> int:
        self.nodes.append(
            _Node(
                name=name,
                weight=1.0,
                strategies=[replicated(len(atom.shape))],
                costs=np.zeros(1),
                signature=(name.split(".")[1], atom.shape),
            )
        )
        return len(self.nodes) - 1

    def yields(self, item: Group, boundary: Boundary, index: int, body: Block, weight: float) -> None:
        last = max((self.numbers[g] for g in body.walk()), default=self.numbers[item])
        wanted = {j: (value, crossing) for b, j, value, crossing in boundary.yields if b == index}
        for j, atom in enumerate(body.outputs):
            if not isinstance(atom, Value):
                continue
            if j in wanted:
                value, crossing = wanted[j]
                target = self.origin[value].node
                want = [crossing.inside(x) for x in self.nodes[target].strategies]
            else:
                target = self._fixed_node(atom, f"g{self.numbers[item]}.predicate")
                want = [replicated(len(atom.shape))]
            origin = self.origin[atom]
            self.edges.append(
                _Edge(
                    source=origin.node,
                    target=target,
                    value=atom,
                    have=origin.layouts,
                    want=want,
                    weight=weight,
                    moment=(last, last),
                )
            )

    # Costs ----------------------------------------------------------------------------------------

    def price_groups(self) -> None:
        """Fill in kernel costs: each distinct signature once."""
        representative: dict[Any, tuple[Group, list[Assignment]]] = {}
        for node in self.nodes:
            if node.group is not None:
                key = node.signature[:2], node.signature[3:]
                representative.setdefault(key, (node.group, node.strategies))
        requests = [(g, a) for g, options in representative.values() for a in options]
        seconds = [c.seconds for c in kernel_costs(requests, self.machine, self.loop_trips, self.fusions)]
        found, at = {}, 0
        for key, (_, options) in representative.items():
            found[key] = np.array(seconds[at : at + len(options)])
            at += len(options)
        for node in self.nodes:
            if node.group is not None:
                node.costs = node.costs + node.weight * found[node.signature[:2], node.signature[3:]]

    def edge_table(self, edge: _Edge) -> np.ndarray:
        value = edge.value
        shared = self.fusions.riders.get(value) or self.fusions.tail(value, self.nodes[edge.target].group)
        key = (value.shape, value.dtype, value.manual, tuple(edge.have), tuple(edge.want), shared)
        if key not in self._tables:
            rows: dict[Layout, int] = {}
            columns: dict[Layout, int] = {}
            at = [rows.setdefault(x, len(rows)) for x in edge.have]
            to = [columns.setdefault(x, len(columns)) for x in edge.want]
            resharder = self.resharder.inside(value.manual)
            distinct = resharder.table(value.shape, value.dtype, list(rows), list(columns))
            if shared is not None:
                distinct = distinct + self._storing(value, shared, list(rows), list(columns))
            self._tables[key] = distinct[np.ix_(at, to)]
        if value in self.held:
            moved = [[bool(a.unreduced) and b != Layout(a.dims) for b in edge.want] for a in edge.have]
            return np.where(np.array(moved), math.inf, self._tables[key])
        return self._tables[key]

    def _storing(
        self, value: Value, shared: Rider | Tail, have: Sequence[Layout], want: Sequence[Layout]
    ) -> np.ndarray:
        """Price of storing, where it is resharded, what its reader else computes on the spot."""
        machine = self.machine

        def seconds(cost_of: Callable[[Any, Any], Cost], layout: Layout) -> float:
            shape = local_shape(value.shape, layout, machine.mesh)
            return cost_of(SimpleNamespace(aval=jax.ShapeDtypeStruct(shape, value.dtype)), shared).seconds

        if isinstance(shared, Rider):
            before = np.array([seconds(machine.storing_cost, x) for x in have])
            after = np.zeros(len(want))
        else:  # partial sums are stored in any case
            before = np.array([0.0 if x.unreduced else seconds(machine.parting_cost, x) for x in have])
            after = np.array([seconds(machine.apart_cost, x) for x in want])
        parted = isinstance(shared, Tail)
        moved = np.array([[a != b or (parted and bool(a.unreduced)) for b in want] for a in have])
        return np.where(moved, before[:, None] + after, 0.0)


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # where a function lies differs from run to run


def _freeze(value: Any) -> Any:
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    return _ADDRESS.sub("", str(value))


def group_signature(item: Group) -> Any:
    """Return what makes two groups alike: ops, parameters, shapes and how values flow between the ops."""
    places: dict[Value, int] = {v: i for i, v in enumerate(item.inputs)}
    parts: list[Any] = [str(item.rule), tuple((v.shape, str(v.dtype)) for v in item.inputs)]
    for op in item.ops:
        operands = tuple(
            places[a] if isinstance(a, Value) else ("literal", str(aval_of(a).dtype)) for a in op.inputs
        )
        for v in op.outputs:
            places[v] = len(places)
        params = tuple((k, _freeze(v)) for k, v in sorted(op.params.items()) if k != "update_jaxpr")
        outs = tuple((v.shape, str(v.dtype)) for v in op.outputs)
        parts.append((op.name, operands, params, outs))
    parts.append(tuple(places.get(v, -1) for v in item.outputs))
    return tuple(parts)


def build_model(
    block: Block,
    resharder: Resharder,
    *,
    fusions: Fusions,
    pinned: Mapping[Value, Sequence[Layout]] | None = None,
    pinned_outputs: Mapping[int, Sequence[Layout]] | None = None,
    allowed: Mapping[Group, Sequence[Assignment]] | None = None,
    held: Collection[Value] = (),
    state: Mapping[int, int] | None = None,
    donated: Sequence[bool] = (),
    loop_trips: int = 1,
    rings: bool = False,
) -> Model:
    """State the choice of shardings as a search problem.

    Args:
      block: the grouped program.
      resharder: prices of resharding on the machine.
      fusions: groups that share kernels.
      pinned: layouts that a value may take, where not all.
      pinned_outputs: the same for outputs, by position.
      allowed: assignments that a group may take, where not all.
      held: values whose partial sums are reduced before they are split otherwise.
      state: output position -> input position that must have the same layout (training state).
      donated: which inputs may be overwritten.
      loop_trips: runs of a `while` loop.
      rings: offer products as windowed einsums, too.
    """
    builder = _Builder(
        block,
        resharder,
        pinned or {},
        pinned_outputs or {},
        allowed or {},
        held,
        state or {},
        donated or [False] * len(block.inputs),
        loop_trips,
        rings,
        fusions,
    )
    builder.program()
    builder.price_groups()
    class_of = tie(builder.nodes, builder.edges)
    return _assemble(builder, class_of)


def _assemble(builder: _Builder, class_of: list[int]) -> Model:
    nodes = builder.nodes
    classes = max(class_of) + 1 if class_of else 0
    costs: dict[int, Any] = {}
    names = [""] * classes
    for node, c in zip(nodes, class_of, strict=True):
        costs[c] = node.costs if c not in costs else costs[c] + node.costs
        names[c] = names[c] or node.name
    tables: dict[tuple[int, int], np.ndarray] = {}
    for edge in builder.edges:
        i, j = class_of[edge.source], class_of[edge.target]
        table = builder.edge_table(edge)  # what cannot be done stays so where it counts for nothing
        table = np.multiply(table, edge.weight, where=np.isfinite(table), out=table.copy())
        if i == j:
            costs[i] = costs[i] + np.diagonal(table)
            continue
        if i > j:
            i, j, table = j, i, table.T
        tables[i, j] = table if (i, j) not in tables else tables[i, j] + table
    index = {pair: e for e, pair in enumerate(tables)}
    problem = search.Problem(
        costs=tuple(costs[c] for c in range(classes)),
        edges=tuple(tables),
        edge_costs=tuple(tables.values()),
        names=tuple(names),
    )
    tensors, edge_tensors = buffers(builder, class_of, index)
    return Model(
        problem=problem,
        nodes=nodes,
        class_of=class_of,
        outputs=builder.outputs,
        tensors=tensors,
        edge_tensors=edge_tensors,
        moments=len(builder.numbers) + 1,
    )
