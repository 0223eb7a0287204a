"""Where completed programs keep what several read: in copies, and in what a loop holds unchanged.

Completion says how every group computes. What is left open is where a value rests between its maker and its
readers: a gathered weight serves several products, a weight that is whole anyway serves one product whole and
another in slices, and a loop that reads the same operand at every trip can have it gathered once before it
starts. Each such value takes the layout that costs least in all, by the prices of the resharding itself. Partial
results that are added up rest unreduced until they are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from autoshard.annotations import Pins
from autoshard.boundary import Boundary, boundaries
from autoshard.groups import PARTIAL, Block, Group
from autoshard.layout import Layout, local_shape
from autoshard.partition.emitter import Decisions
from autoshard.partition.reshard import Resharder
from autoshard.program import Atom, Op, Value
from autoshard.rules import Kind

__all__ = ["settle", "unchanging"]

# Parameters of loops that count the operands that they do not change; these come first.
_UNCHANGING = ("num_consts", "cond_nconsts", "body_nconsts")
# A `while` is taken to run more than once.
_WHILE_TRIPS = 2


def settle(block: Block, decisions: Decisions, resharder: Resharder, fixed: Pins) -> Decisions:
    """Choose where copies and the unchanging operands of loops rest.

    Args:
      block: the grouped program.
      decisions: how its groups compute, and how its inputs and outputs are laid out; these stay.
      resharder: prices.
      fixed: what must not change.

    Returns:
      The decisions, with other assignments of copies and of sums of partial results, and other layouts of
      what loops hold.
    """
    settling = _Settling(block, decisions, resharder, fixed)
    order = list(block.walk())
    for item in order:
        settling.pass_partial(item)
    for item in reversed(order):  # readers before makers, what is inside a loop before the loop
        settling.settle(item)
    return Decisions(assignments=settling.assignments, layouts=settling.layouts, outputs=decisions.outputs)


def unchanging(op: Op) -> tuple[int, int]:
    """Return how many of a loop's operands, counted from the first, it leaves as they are, and its trips."""
    return sum(op.params.get(name, 0) for name in _UNCHANGING), op.params.get("length", _WHILE_TRIPS)


class _Settling:
    def __init__(self, block: Block, decisions: Decisions, resharder: Resharder, fixed: Pins) -> None:
        self.fixed = fixed
        self.resharder, self._mesh = resharder, resharder.machine.mesh
        self.assignments = dict(decisions.assignments)
        self.layouts = dict(decisions.layouts)
        self.wants: dict[Value, list[Layout]] = defaultdict(list)
        self.makers: dict[Value, tuple[Group, int]] = {}
        self.same: dict[Value, Value] = {}
        for atom, layout in zip(block.outputs, decisions.outputs, strict=True):
            self._want(atom, layout)
        for item in block.walk():
            self.makers |= {value: (item, j) for j, value in enumerate(item.outputs)}
            if item.kind is Kind.CONTROL:
                self._enter(item, boundaries(item))
        machine = resharder.machine
        held = [(v, self.layouts[v]) for v in (*block.inputs, *(v for v, _ in block.consts))]
        self.free_bytes = machine.usable_bytes - sum(self._bytes(v, layout) for v, layout in held)

    def _enter(self, item: Group, boundary: Boundary) -> None:
        self.same |= boundary.same
        for index, out, decider, crossing in boundary.yields:
            self._want(item.blocks[index].outputs[out], crossing.inside(self.layouts[decider]))

    def pass_partial(self, item: Group) -> None:
        """Let partial sums through a linear group that makes no more of them: they are added, then reduced once."""
        operands = [item.inputs[i] for i in item.rule.linear]
        given = item in self.fixed.groups or not self.fixed.held.isdisjoint(operands)
        if given or item.is_copy or not operands or len({v.dtype for v in (*operands, *item.outputs)}) > 1:
            return
        if sum(math.prod(v.shape) for v in item.outputs) > sum(math.prod(v.shape) for v in operands):
            return
        first, *others = map(self._have, operands)
        axes = tuple(a for a in first.unreduced if all(a in x.unreduced for x in others))
        own = {f: tuple(a for a in split if a not in axes) for f, split in self.assignments[item].items()}
        if axes and all(x.monoid == "sum" for x in (first, *others)) and item.rule.valid(own, self._mesh):
            self.assignments[item] = {**own, PARTIAL: axes}

    def settle(self, item: Group) -> None:
        """Settle a group whose readers are settled, and say how it reads its inputs."""
        if item.kind is Kind.CONTROL:
            self._control(item, boundaries(item))
        elif item.kind is Kind.IDENTITY:
            for atom, value in zip(item.ops[0].inputs, item.outputs, strict=True):
                for layout in self.wants[value]:
                    self._want(atom, layout)
        else:
            if item.is_copy and item not in self.fixed.groups:
                self._copy(item)
            for i, value in enumerate(item.inputs):
                self._want(value, item.input_layout(i, self.assignments[item]))

    def _copy(self, item: Group) -> None:
        (value,) = item.outputs
        if self.wants[value]:
            best = self._cheapest(value, self._have(item.inputs[0]), self.wants[value])
            (dims,) = item.rule.outputs
            self.assignments[item] = {
                f: axes for d, axes in zip(dims, best.dims, strict=True) for f in d if axes
            }

    def _control(self, item: Group, boundary: Boundary) -> None:
        (op,) = item.ops
        held, trips = unchanging(op)
        for i, (atom, (inner, crossing)) in enumerate(zip(op.inputs, boundary.operands, strict=True)):
            if inner is None:
                self._want(atom, Layout(()))
                continue
            free = i < held and inner not in self.fixed.values
            if free and isinstance(atom, Value) and self.wants[inner]:
                self._hoist(atom, inner, trips)
            layout = self.layouts[self.same.get(inner, inner)]
            self._want(atom, crossing.outside(layout))

    def _hoist(self, atom: Value, inner: Value, trips: int) -> None:
        """Reshard an operand before a loop rather than at every trip, where that is cheaper and fits."""
        best = self._cheapest(atom, self._have(atom), self.wants[inner], trips)
        more = self._bytes(inner, best) - self._bytes(inner, self.layouts[inner])
        if more <= self.free_bytes:
            self.layouts[inner] = best
            self.free_bytes -= max(0.0, more)

    def _cheapest(self, value: Value, have: Layout, wants: Sequence[Layout], times: int = 1) -> Layout:
        """Choose between the layout that a value has and those that its readers want."""

        def seconds(option: Layout) -> float:
            return self._seconds(value, have, option) + times * sum(
                self._seconds(value, option, want) for want in wants
            )

        return min(dict.fromkeys([*wants, Layout(have.dims)]), key=seconds)

    def _seconds(self, value: Value, source: Layout, target: Layout) -> float:
        return self.resharder.inside(value.manual).find(value.shape, value.dtype, source, target).seconds

    def _have(self, value: Value) -> Layout:
        """Layout in which a value comes."""
        value = self.same.get(value, value)
        if value in self.layouts:
            return self.layouts[value]
        item, j = self.makers[value]
        if item.kind is Kind.CONTROL:
            return self.layouts[boundaries(item).results[j]]
        if item.kind is Kind.IDENTITY:
            atom = item.ops[0].inputs[j]
            return self._have(atom) if isinstance(atom, Value) else Layout(((),) * len(value.shape))
        return item.output_layout(j, self.assignments[item])

    def _want(self, atom: Atom, layout: Layout) -> None:
        if isinstance(atom, Value):
            self.wants[atom].append(layout)

    def _bytes(self, value: Value, layout: Layout) -> float:
        return self.resharder.machine.bytes_of(local_shape(value.shape, layout, self._mesh), value.dtype)
