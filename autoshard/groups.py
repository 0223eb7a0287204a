"""What a group is: ops that are decided, priced and run together, and the values that cross its boundary."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autoshard.layout import Layout, MeshShape
from autoshard.program import Atom, Op, Value, aval_of
from autoshard.rules import Assignment, Kind, LocalView, ShardingRule
from autoshard.rules.windowed import ring_of, with_ring

__all__ = ["PARTIAL", "Block", "Group", "group_signature", "with_inputs"]

# In an assignment, the axes over which a linear group's inputs and outputs stay partial sums.
PARTIAL = "+"


@dataclass(frozen=True, eq=False, kw_only=True)
class Group:
    """Some ops with one rule; `inputs` and `outputs` are the values that cross its boundary.

    `factors[i]` maps the factors of op i to those of the group. A control-flow group has `blocks`.
    """

    kind: Kind
    ops: tuple[Op, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    rule: ShardingRule
    factors: tuple[Mapping[str, str], ...] = ()
    op_rules: tuple[ShardingRule, ...] = ()
    blocks: tuple[Block, ...] = ()

    def input_layout(self, index: int, assignment: Assignment) -> Layout:
        """Layout in which the group reads its input when its factors are split by `assignment`.

        The axes of the pseudo-factor `PARTIAL` are those over which linear inputs stay partial sums.
        """
        dims = self.rule.inputs[index]
        layout = self.rule.layout(dims, assignment)
        ring = ring_of(assignment)
        if ring is not None and ring.operand == index:
            return Layout(with_ring(layout.dims, dims, ring))
        partial = assignment.get(PARTIAL, ())
        return Layout(layout.dims, partial) if partial and index in self.rule.linear else layout

    def output_layout(self, index: int, assignment: Assignment) -> Layout:
        """Layout in which the group leaves its output."""
        layout = self.rule.output_layout(index, assignment)
        ring = ring_of(assignment)
        if ring is not None and ring.operand < 0:
            unreduced = tuple(a for a in layout.unreduced if a != ring.axis)
            return Layout(with_ring(layout.dims, self.rule.outputs[index], ring), unreduced)
        partial = assignment.get(PARTIAL, ())
        return Layout(layout.dims, layout.unreduced + partial) if partial else layout

    def view(self, index: int, assignment: Assignment, mesh: MeshShape) -> LocalView:
        """Return what the emission of op `index` knows when the group is split by `assignment`."""
        mapping = self.factors[index]
        own = {f: assignment[g] for f, g in mapping.items() if assignment.get(g)}
        ring = ring_of(assignment)
        if ring is not None:
            ring = ring._replace(factor=next(f for f, g in mapping.items() if g == ring.factor))
        return LocalView(rule=self.op_rules[index], assignment=own, mesh=mesh, ring=ring)

    @property
    def is_copy(self) -> bool:
        """Tell whether the group only holds a value in a layout of its own."""
        return not self.ops

    @property
    def heavy(self) -> Op | None:
        """The op that the group is about, if it is a single one."""
        return self.ops[0] if len(self.ops) == 1 else None

    @property
    def title(self) -> str:
        """Short name: the primitive, or the first and last of a cluster."""
        if self.is_copy:
            return "copy"
        if len(self.ops) == 1:
            return self.ops[0].name
        return f"{self.ops[0].name}..{self.ops[-1].name}"

    @property
    def manual(self) -> frozenset[str]:
        """Mesh axes that the group must not split anything over: those of the `shard_map`s around it."""
        return next((v.manual for v in (*self.outputs, *self.inputs)), frozenset())

    @property
    def source(self) -> str:
        """Source line of the last op."""
        return self.ops[-1].source if self.ops else ""

    def __str__(self) -> str:
        return f"{self.title}: {self.rule}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Block:
    """A Program body as groups in execution order."""

    inputs: tuple[Value, ...]
    consts: tuple[tuple[Value, Any], ...]
    groups: tuple[Group, ...]
    outputs: tuple[Atom, ...]

    def walk(self) -> Iterable[Group]:
        """Yield every group, those of inner blocks after the group that holds them."""
        for item in self.groups:
            yield item
            for block in item.blocks:
                yield from block.walk()

    def __str__(self) -> str:
        return "\n".join(f"{i:4d} {g}" for i, g in enumerate(self.walk()))


def with_inputs(op: Op, inputs: tuple[Atom, ...]) -> Op:
    """Return the op with other operands."""
    return replace(op, inputs=inputs)


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
