"""Which buffers live when, as the search sees them: bytes by strategy, and an interval of moments.

Moment n is the run of group n in execution order, loops unrolled once; the last moment is the end of the
step. The rules are those of `autoshard.memory`, on groups instead of equations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from autoshard.boundary import boundaries
from autoshard.grouping import Block, Group
from autoshard.layout import Layout, local_shape
from autoshard.program import Value, local_aval, on_host
from autoshard.rules import Kind

if TYPE_CHECKING:
    from autoshard.model import Edge
    from autoshard.strategies import _Builder

__all__ = ["Tensor", "buffers"]

_NOT_IN_PLACE = frozenset(
    "dot_general conv_general_dilated gather sort transpose concatenate split slice pad rev".split()
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Tensor:
    """A buffer whose bytes depend on a node's strategy, live from `start` to `end` inclusive."""

    node: int
    bytes: np.ndarray
    start: int
    end: int
    name: str


def buffers(
    builder: _Builder, class_of: list[int], index: Mapping[tuple[int, int], int]
) -> tuple[list[Tensor], list[tuple[int, np.ndarray, int, int]]]:
    """List the tensors of nodes, and the resharded copies of edges as (edge, bytes, start, end)."""
    return _Buffers(builder, class_of, index).run()


class _Buffers:
    def __init__(self, builder: _Builder, class_of: list[int], index: Mapping[tuple[int, int], int]) -> None:
        self.builder, self.class_of, self.index = builder, class_of, index
        self.machine = builder.machine
        self.end = len(builder.numbers)
        self.root: dict[Value, Value] = {}
        self.last: dict[Value, int] = defaultdict(lambda: -1)
        self.readers: dict[Value, int] = defaultdict(int)
        self.tensors: list[Tensor] = []
        self.extra: list[tuple[int, np.ndarray, int, int]] = []
        self._sizes: dict[Any, float] = {}
        self._sources: dict[Value, tuple[Value, ...]] = {}
        fusions = builder.fusions
        tails = {v for v, (tail, _) in fusions.tails.items() if not tail.stored}
        self.unstored = fusions.riders.keys() | tails
        self.maker = {v: item for item in builder.block.walk() for v in item.outputs}

    def run(self) -> tuple[list[Tensor], list[tuple[int, np.ndarray, int, int]]]:
        block = self.builder.block
        self.uses(block, self.end)
        for i, value in enumerate(block.inputs):
            last = self.last[value] if self.builder.donated[i] else self.end
            self.add(value, 0, last)
        for value, _ in block.consts:
            self.add(value, 0, self.end)
        self.block(block)
        self.edges()
        return self.tensors, self.extra

    def find(self, value: Value) -> Value:
        while value in self.root:
            value = self.root[value]
        return value

    def use(self, value: Any, moment: int) -> None:
        """Note that a value is read; who reads one that is not stored reads what it is computed from."""
        if isinstance(value, Value):
            for root in self.stored(value):
                self.last[root] = max(self.last[root], moment)
                self.readers[root] += 1

    def stored(self, value: Value) -> tuple[Value, ...]:
        """The stored values that a reader of `value` reads."""
        root = self.find(value)
        if root not in self.unstored:
            return (root,)
        if root not in self._sources:
            read = self.maker[root].inputs if root in self.maker else ()  # a slice, read in place
            self._sources[root] = tuple(dict.fromkeys(s for v in read for s in self.stored(v)))
        return self._sources[root]

    def uses(self, block: Block, end: int) -> None:
        """Find aliases and last uses."""
        for item in block.groups:
            number = self.builder.numbers[item]
            if item.kind is Kind.IDENTITY:
                (op,) = item.ops
                for atom, value in zip(op.inputs, op.outputs, strict=True):
                    if isinstance(atom, Value):
                        self.root[value] = atom
            elif item.kind is Kind.CONTROL:
                (op,) = item.ops
                boundary = boundaries(item)
                stop = self.after(item)
                for value, decider in zip(op.outputs, boundary.results, strict=True):
                    if value is not decider:
                        self.root[value] = decider
                for value, decider in boundary.same.items():
                    self.root[value] = decider
                mapped = op.name == "shard_map"
                if mapped:  # what comes in is read in place
                    pairs = zip(op.inputs, boundary.operands, strict=True)
                    self.root |= {inner: a for a, (inner, _) in pairs if inner and isinstance(a, Value)}
                for body in item.blocks:
                    self.uses(body, stop)
                carried = set(boundary.results)
                for atom, (inner, _) in zip(op.inputs, boundary.operands, strict=True):
                    self.use(atom, number - 1 if inner in carried or mapped else stop)
                for decider in boundary.results:
                    self.last[decider] = max(self.last[decider], stop)
            elif self.is_view(item):
                self.root[item.outputs[0]] = item.inputs[0]
            else:
                in_place = not any(op.name in _NOT_IN_PLACE for op in item.ops)
                for value in item.inputs:
                    self.use(value, number - 1 if in_place else number)
        for atom in block.outputs:
            self.use(atom, end)

    def after(self, item: Group) -> int:
        """Moment of the last group in the blocks of a control-flow group."""
        numbers = self.builder.numbers
        return max([numbers[item], *(numbers[g] for b in item.blocks for g in b.walk())])

    def is_view(self, item: Group) -> bool:
        """Tell a reshape that moves nothing (its kernel is free under every strategy)."""
        if len(item.ops) != 1 or item.ops[0].name not in ("reshape", "squeeze", "broadcast_in_dim"):
            return False
        if len(item.inputs) != 1:
            return False
        node = self.builder.nodes[self.builder.origin[item.outputs[0]].node]
        return not node.costs.any()

    def size(self, value: Value, layout: Layout) -> float:
        key = (value.shape, value.dtype, on_host(value.aval), layout.dims)
        if key not in self._sizes:
            shape = local_shape(value.shape, layout, self.machine.mesh)
            self._sizes[key] = float(self.machine.stored_bytes(local_aval(value, shape)))
        return self._sizes[key]

    def add(self, value: Value, start: int, end: int) -> None:
        origin = self.builder.origin[value]
        sizes = np.array([self.size(value, x) for x in origin.layouts])
        if sizes.any() and end >= start:
            self.tensors.append(Tensor(node=origin.node, bytes=sizes, start=start, end=end, name=value.name))

    def block(self, block: Block) -> None:
        for item in block.groups:
            number = self.builder.numbers[item]
            if item.kind is Kind.IDENTITY:
                continue
            if item.kind is Kind.CONTROL:
                boundary = boundaries(item)
                made = self.after(item) if item.ops[0].name == "shard_map" else number
                for decider in boundary.results:
                    self.add(decider, made, self.last[decider])
                for inner, crossing in boundary.operands:
                    if inner is not None and crossing.lead and inner not in self.unstored:
                        self.add(inner, number, max(number, self.last[inner]))
                for body in item.blocks:
                    self.block(body)
                continue
            for value in item.outputs:
                if value not in self.root and value not in self.unstored and not self.shares(item):
                    self.add(value, number, max(number, self.last[value]))

    def shares(self, item: Group) -> bool:
        """Tell a copy whose source lives on: a buffer of its own only where the layouts differ."""
        return item.is_copy and self.readers[self.find(item.inputs[0])] > 1

    def edges(self) -> None:
        """Add the buffers of resharded values."""
        for edge in self.builder.edges:
            start, end = edge.moment
            target = self.builder.nodes[edge.target]
            if target.group is not None and target.group.is_copy:
                if not self.shares(target.group):
                    continue
                end = max(end, self.last[target.group.outputs[0]])
                self.extend(edge, end)
            self.reshard(edge, start, end)

    def extend(self, edge: Edge, end: int) -> None:
        root = self.find(edge.value)
        for i, tensor in enumerate(self.tensors):
            if tensor.node == self.builder.origin[root].node and tensor.end < end:
                self.tensors[i] = Tensor(
                    node=tensor.node, bytes=tensor.bytes, start=tensor.start, end=end, name=tensor.name
                )

    def reshard(self, edge: Edge, start: int, end: int) -> None:
        i, j = self.class_of[edge.source], self.class_of[edge.target]
        if i == j:
            return
        sizes = np.array([self.size(edge.value, x) for x in edge.want])
        differ = np.array([[a.dims != b.dims for b in edge.want] for a in edge.have])
        table = np.where(differ, sizes[None, :], 0.0)
        if not table.any():
            return
        if i > j:
            i, j, table = j, i, table.T
        self.extra.append((self.index[i, j], table, start, end))
