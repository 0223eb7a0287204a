"""A grouped program and a machine become a `search.Problem`.

One node per group: its strategies are the ways to split its factors, their cost the seconds of its kernel.
One node per boundary value (inputs, loop carries, what a scan slices or stacks, outputs): its strategies are
layouts. One edge per value read: the cost of resharding from the layout that the source leaves to the one
that the reader wants. What a loop runs n times costs n times. Repeated structure (unrolled layers) is found
by colour refinement and tied: one node stands for all, with their summed cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

import search
from autoshard.boundary import Boundary, Crossing, boundaries, free_axes
from autoshard.choices import assignments, layouts, windowed
from autoshard.fusion import Fusions, Rider, Tail
from autoshard.grouping import Block, Group
from autoshard.groups import group_signature
from autoshard.layout import Layout, local_shape, replicated
from autoshard.model import Edge, Model, Node
from autoshard.partition.emitter import number_groups
from autoshard.partition.kernels import kernel_costs
from autoshard.partition.nested import branch_shares
from autoshard.partition.price import Cost
from autoshard.partition.reshard import Resharder
from autoshard.program import Atom, Op, Value, aval_of, local_aval, shape_of
from autoshard.rules import Assignment, Kind
from autoshard.strategies_memory import buffers
from autoshard.ties import tie

__all__ = ["build_model"]


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
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
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
        node = Node(
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
        node = Node(
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
            Edge(
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
                    Node(
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
                    Edge(
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
        slices = zip((int(r is None) for r in fused.slices), item.blocks[0].inputs[first:], strict=True)
        stacks = zip(fused.stacks, op.outputs[op.params["num_carry"] :], strict=True)
        for lead, pairs in ((0, slices), (1, stacks)):
            for copies, value in pairs:
                if copies:
                    origin = self.origin[value]
                    shape, prices = value.shape[lead:], []
                    for x in origin.layouts:
                        local = local_shape(shape, Layout(x.dims[lead:]), self.machine.mesh)
                        var = SimpleNamespace(aval=local_aval(value, local))
                        prices.append(weight * copies * self.machine.copying_cost(var).seconds)
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
            Node(
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
                Edge(
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

    def edge_table(self, edge: Edge) -> np.ndarray:
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
