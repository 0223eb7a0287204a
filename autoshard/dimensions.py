"""Dimension classes: which dims of which arrays are the same thing, read off the rules.

Two dims are in one class when a rule splits them together anywhere in the program: the batch of the tokens is
the batch of the logits, the columns of one weight are the rows of the next. Loops and the training state pass
classes on. A compound factor, `((h d))`, lends its dim the class of its major part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autoshard.boundary import boundaries
from autoshard.grouping import Block, Group
from autoshard.program import Atom, Value
from autoshard.rules import Kind

__all__ = ["Dimensions", "run_groups"]

_Node = tuple[object, object]


@dataclass(frozen=True, eq=False, kw_only=True)
class Dimensions:
    """The classes of a program, numbered.

    Attributes:
      values: class of (value, dim).
      factors: class of (group, factor).
      scanned: classes of dims that a loop slices or stacks, one step at a time.
    """

    values: Mapping[tuple[Value, int], int]
    factors: Mapping[tuple[Group, str], int]
    scanned: frozenset[int]

    @classmethod
    def of(cls, block: Block, state: Mapping[int, int]) -> Dimensions:
        """Find the classes of a grouped program.

        Args:
          block: the program.
          state: output position -> input position of what a step hands to the next.
        """
        union = _Union()
        union.block(block)
        for j, i in state.items():
            union.follow(block.outputs[j], block.inputs[i])
        numbers: dict[_Node, int] = {}
        values, factors = {}, {}
        for node in union.nodes():
            number = numbers.setdefault(union.find(node), len(numbers))
            owner, part = node
            if isinstance(owner, Group):
                factors[owner, str(part)] = number
            elif isinstance(owner, Value) and isinstance(part, int):
                values[owner, part] = number
        scanned = frozenset(values[node] for node in union.scanned if node in values)
        return cls(values=values, factors=factors, scanned=scanned)

    def of_value(self, value: Value) -> tuple[int | None, ...]:
        """Class of each dim; None for one that nothing relates to another."""
        return tuple(self.values.get((value, d)) for d in range(len(value.shape)))

    def of_group(self, item: Group) -> dict[str, int]:
        """Class of each factor that may be split."""
        return {f: self.factors[item, f] for f in item.rule.factors if (item, f) in self.factors}


class _Union:
    """Union-find over the dims of values and the factors of groups."""

    def __init__(self) -> None:
        self.parent: dict[_Node, _Node] = {}
        self.scanned: list[tuple[Value, int]] = []

    def nodes(self) -> list[_Node]:
        return list(self.parent)

    def find(self, node: _Node) -> _Node:
        while self.parent.setdefault(node, node) != node:
            self.parent[node] = self.parent[self.parent[node]]
            node = self.parent[node]
        return node

    def join(self, one: _Node, other: _Node) -> None:
        self.parent[self.find(other)] = self.find(one)

    def follow(self, outer: Atom, inner: Atom, lead: int = 0) -> None:
        """Join the dims of two values, the first with `lead` more dims in front."""
        if isinstance(outer, Value) and isinstance(inner, Value):
            for d in range(len(inner.shape)):
                self.join((outer, d + lead), (inner, d))

    def block(self, block: Block) -> None:
        for item in block.groups:
            if item.kind is Kind.CONTROL:
                self._control(item)
            elif item.kind is Kind.IDENTITY:
                (op,) = item.ops
                for atom, value in zip(op.inputs, op.outputs, strict=True):
                    self.follow(atom, value)
            else:
                self._group(item)

    def _group(self, item: Group) -> None:
        for factor in item.rule.factors:
            self.find((item, factor))
        sides = ((item.inputs, item.rule.inputs), (item.outputs, item.rule.outputs))
        for values, rows in sides:
            for value, dims in zip(values, rows, strict=True):
                for d, dim in enumerate(dims):
                    if dim:
                        self.join((value, d), (item, dim[0]))

    def _control(self, item: Group) -> None:
        (op,) = item.ops
        boundary = boundaries(item)
        for atom, (inner, crossing) in zip(op.inputs, boundary.operands, strict=True):
            if inner is not None:
                self.follow(atom, inner, crossing.lead)
                if crossing.lead and isinstance(atom, Value):
                    self._scan(atom)
        for value, decider in zip(op.outputs, boundary.results, strict=True):
            self.follow(value, decider)
        for inner, decider in boundary.same.items():
            self.follow(decider, inner)
        for body in item.blocks:
            self.block(body)
        for index, j, decider, crossing in boundary.yields:
            self.follow(decider, item.blocks[index].outputs[j], crossing.lead)
            if crossing.lead:
                self._scan(decider)

    def _scan(self, value: Value) -> None:
        self.find((value, 0))
        self.scanned.append((value, 0))


def run_groups(block: Block, times: float = 1.0) -> Iterator[tuple[Group, float]]:
    """Yield every group that computes, in program order, with how often it runs in a step.

    A `while` loop counts once: only proportions are wanted here.
    """
    for item in block.groups:
        if item.kind is Kind.CONTROL:
            (op,) = item.ops
            trips = op.params["length"] if op.name == "scan" else 1
            for body in item.blocks:
                yield from run_groups(body, times * trips)
        elif item.kind is not Kind.IDENTITY:
            yield item, times
