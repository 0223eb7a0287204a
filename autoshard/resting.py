"""Where completed programs keep what several read: in copies, and in what a loop holds unchanged.

Completion says how every group computes. What is left open is where a value rests between its maker and its
readers: a gathered weight serves several products, a weight that is whole anyway serves one product whole and
another in slices, and a loop that reads the same operand at every trip can have it gathered once before it
starts. Each such value takes the layout that costs least in all, by the prices of the resharding itself. What is
made of a copy alone, as a weight reversed for the gradient of a convolution, may be made where the copy rests:
then one gathered copy serves both. Partial results that are added up rest unreduced until they are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from autoshard.annotations import Pins
from autoshard.boundary import Boundary, boundaries
from autoshard.groups import PARTIAL, Block, Group
from autoshard.layout import Layout, local_shape
from autoshard.partition.emitter import Decisions
from autoshard.partition.kernels import kernel_costs
from autoshard.partition.price import Cost
from autoshard.partition.reshard import Resharder
from autoshard.program import Atom, Op, Value
from autoshard.rules import Assignment, Kind
from autoshard.rules.rule import Dims

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
        self.followers: dict[Value, list[Group]] = defaultdict(list)
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
            if self._may_follow(item):
                self.followers[item.inputs[0]].append(item)
                return
            for i, value in enumerate(item.inputs):
                self._want(value, item.input_layout(i, self.assignments[item]))

    def _copy(self, item: Group) -> None:
        (value,), (dims,) = item.outputs, item.rule.outputs
        followers = self.followers[value]
        own = [reader.input_layout(0, self.assignments[reader]) for reader in followers]
        if not self.wants[value] and not followers:
            return

        def seconds(option: Layout) -> float:
            return sum(self._seconds(value, option, want) for want in self.wants[value]) + sum(
                self._following(reader, option)[0] for reader in followers
            )

        best = self._cheapest(value, self._have(item.inputs[0]), [*self.wants[value], *own], seconds)
        self.assignments[item] = _split(dims, best)
        for reader in followers:
            self.assignments[reader] = self._following(reader, best)[1]

    def _may_follow(self, item: Group) -> bool:
        """Tell a group that makes one value of a copy, dim by dim: it may be split as the copy is."""
        if len(item.inputs) != 1 or len(item.outputs) != 1 or item.is_copy or item in self.fixed.groups:
            return False
        maker = self.makers.get(item.inputs[0])
        (taken,), (made,) = item.rule.inputs, item.rule.outputs
        return (
            maker is not None
            and maker[0].is_copy
            and all(len(dim) < 2 for dim in taken)
            and sorted(taken) == sorted(made)
            and not item.rule.reduce
            and PARTIAL not in self.assignments[item]
        )

    def _following(self, reader: Group, copy: Layout) -> tuple[float, Assignment]:
        """Price a reader of a copy as it is split, and as the copy is; return the better, with its split."""
        (value,), (made,) = reader.inputs, reader.outputs
        stays, follows = self.assignments[reader], _split(reader.rule.inputs[0], copy)
        options = [a for a in (stays, follows) if a is stays or reader.rule.valid(a, self._mesh)]
        prices = kernel_costs([(reader, a) for a in options], self.resharder.machine)

        def seconds(split: Assignment, kernel: Cost) -> float:
            left = reader.output_layout(0, split)
            return (
                self._seconds(value, copy, reader.input_layout(0, split))
                + kernel.seconds
                + sum(self._seconds(made, left, want) for want in self.wants[made])
            )

        found = [(seconds(a, kernel), a) for a, kernel in zip(options, prices, strict=True)]
        return min(found, key=lambda entry: entry[0])

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
        wants = self.wants[inner]
        best = self._cheapest(
            atom,
            self._have(atom),
            wants,
            lambda option: trips * sum(self._seconds(atom, option, want) for want in wants),
        )
        more = self._bytes(inner, best) - self._bytes(inner, self.layouts[inner])
        if more <= self.free_bytes:
            self.layouts[inner] = best
            self.free_bytes -= max(0.0, more)

    def _cheapest(
        self, value: Value, have: Layout, wants: Sequence[Layout], behind: Callable[[Layout], float]
    ) -> Layout:
        """Choose between the layout that a value has and those that its readers want.

        `behind` is the price of what follows from a choice.
        """
        options = dict.fromkeys([*wants, Layout(have.dims)])
        return min(options, key=lambda option: self._seconds(value, have, option) + behind(option))

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


def _split(dims: Dims, layout: Layout) -> Assignment:
    """Split the factors of dims as a layout does: one factor a dim."""
    return {f: axes for dim, axes in zip(dims, layout.dims, strict=True) for f in dim if axes}
