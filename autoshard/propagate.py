"""Sharding completion: a few annotations become a sharding of everything, as GSPMD does it.

Shardings flow through rules forwards and backwards until nothing changes, in four passes to a fix-point each
(GSPMD, arXiv 2105.04663, section 3.5, and XLA's `sharding_propagation.cc`): through ops that pass their
operands' dims on; then through products, reductions, lookups and the rest; then backwards through broadcasts;
last forwards through broadcasts. What an op of a later pass finds goes through all that pass dims on before the
next op takes its turn. What a person gave is never changed. A dim that is open takes what arrives first, from the
larger array where several compete, and later only what splits it finer; an axis is used once per array and per
group. Batch dims of a product come before others; where its operands, and what is done with its result, compete
for those, the outcome counts that costs the least resharding.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from autoshard.annotations import Given, Pins, deal, pins
from autoshard.boundary import PLAIN, Crossing, boundaries, deciding_values
from autoshard.grouping import Block, Group
from autoshard.layout import Axes, Layout, mesh_size, replicated
from autoshard.partition.emitter import Decisions
from autoshard.partition.reshard import Resharder
from autoshard.program import Atom, Value, shape_of, value_bytes
from autoshard.resting import settle, unchanging
from autoshard.rules import Assignment, Kind
from autoshard.rules.rule import Dims
from autoshard.session import Session

__all__ = ["complete", "propagate"]

_HEAVY = frozenset({"dot_general", "conv_general_dilated", "gather", "ragged_dot_general"})
_LOOKUPS = frozenset({"gather"})
# Ops, besides elementwise ones, that pass dims on as they are.
_PASS = frozenset(
    "concatenate dynamic_slice expand_dims reshape reshard sharding_constraint split squeeze transpose".split()
)
# The passes: which exchanges between a group and a value take part from when on.
_PASSING, _COMPUTING, _BROADCAST_BACK, _BROADCAST = range(4)
# So many of the claims that contest axes are tried in every order.
_CONTEST = 3

_Claim = tuple[str, Axes]
"""A factor, and the axes by which a value of the group splits it."""


def complete(session: Session, given: Mapping[str, PartitionSpec]) -> tuple[Decisions, list[str]]:
    """Complete specs by key (as for `autoshard.suggest`) to decisions for the whole program.

    Returns the decisions, and notes on dims that had to be left whole.
    """
    source, resharder = session.source, session.resharder
    fixed = pins(source.traced, source.block, session.machine.mesh, given, "specs")
    decisions = propagate(source.block, resharder, fixed, source.state)
    return settle(source.block, decisions, resharder, fixed), fixed.notes


def propagate(block: Block, resharder: Resharder, fixed: Pins, state: Mapping[int, int]) -> Decisions:
    """Run completion to its fix-point.

    Args:
      block: the grouped program.
      resharder: prices of resharding, on the machine to complete for.
      fixed: what must not change.
      state: outputs that follow an input unless fixed.
    """
    flow = Flow(block, resharder, fixed, state)
    flow.run()
    return flow.decisions()


@dataclass(frozen=True, eq=False, kw_only=True)
class _End:
    """A value at a group: its dims there, and the passes from which on each gives to the other."""

    value: Value
    dims: Dims
    to_group: int
    to_value: int


def _ends(item: Group) -> list[_End]:
    """List the values of a group, the largest first."""
    rule = item.rule
    passes = all(op.name in _PASS for op in item.ops) or not item.ops or item.kind is Kind.ELEMENTWISE
    factors = {f for dims in rule.inputs + rule.outputs for dim in dims for f in dim}
    ends = []
    for values, sides, result in ((item.inputs, rule.inputs, False), (item.outputs, rule.outputs, True)):
        for value, dims in zip(values, sides, strict=True):
            to_group = to_value = _PASSING if passes else _COMPUTING
            if passes and factors - {f for dim in dims for f in dim}:
                to_group, to_value = (_COMPUTING, _COMPUTING) if result else (_BROADCAST, _BROADCAST_BACK)
            ends.append(_End(value=value, dims=dims, to_group=to_group, to_value=to_value))
    return sorted(ends, key=lambda e: -value_bytes(e.value.shape, e.value.dtype))


class Flow:
    """The state of completion: axes per dim of values and per factor of groups, and what must not change."""

    def __init__(self, block: Block, resharder: Resharder, fixed: Pins, state: Mapping[int, int]) -> None:
        self.block_, self.resharder, self.state = block, resharder, state
        self.mesh = resharder.machine.mesh
        self.fixed = fixed
        self.dims: dict[Value, list[Axes]] = {}
        self.closed: dict[Value, set[int]] = {}  # dims that must not change
        self.groups: dict[Group, dict[str, Axes]] = {}
        for value, given in fixed.values.items():
            self._close(value, given)
        for item, factors in fixed.groups.items():
            self.groups[item] = {f: axes for f, axes in factors.items() if axes}
            for value, dims in zip(item.outputs, item.rule.outputs, strict=True):
                layout = item.rule.layout(dims, factors).dims
                known = (all(f in factors for f in dim) for dim in dims)
                self._close(value, tuple(x if k else None for x, k in zip(layout, known, strict=True)))
        # Values that are laid out alike: by each the others, and its layout as it is there.
        self.links: dict[Value, list[tuple[Value, Callable[[Layout], Layout]]]] = defaultdict(list)
        self.order: list[Group] = []
        self.ends: dict[Group, list[_End]] = {}
        self.around: dict[Value, list[Group]] = defaultdict(list)  # the groups that read or make a value
        self.trips: dict[Value, int] = {}  # of the loop that holds a value unchanged
        self.changed = False
        self.fresh: list[Value] = []  # values that changed and have not been passed on
        self._collect(block)
        self._follow_copies()

    def _close(self, value: Value, given: Given) -> None:
        self.dims[value] = [axes or () for axes in given]
        self.closed[value] = {d for d, axes in enumerate(given) if axes is not None}

    # Structure ------------------------------------------------------------------------------------

    def _collect(self, block: Block) -> None:
        for item in block.groups:
            if item.kind is Kind.IDENTITY:
                (op,) = item.ops
                self._link_all(op.inputs, op.outputs)
            elif item.kind is Kind.CONTROL:
                (op,) = item.ops
                boundary = boundaries(item)
                held, trips = unchanging(op)
                for i, (atom, (inner, crossing)) in enumerate(zip(op.inputs, boundary.operands, strict=True)):
                    if inner is not None:
                        self._link(atom, inner, crossing)
                        if crossing.manual:
                            self.dims.setdefault(inner, [()] * len(inner.shape))
                        if i < held and isinstance(atom, Value):
                            self.trips[inner] = trips * self.trips.get(atom, 1)
                for inner, decider in boundary.same.items():
                    self._link(decider, inner)
                self._link_all(op.outputs, boundary.results)
                for index, out, decider, crossing in boundary.yields:
                    if crossing.manual:
                        self._push(crossing.split, decider)
                    self._link_inner(decider, item.blocks[index].outputs[out], crossing)
                for body in item.blocks:
                    self._collect(body)
            else:
                self.order.append(item)
                self.ends[item] = _ends(item)
                for end in self.ends[item]:
                    self.around[end.value].append(item)

    def _follow_copies(self) -> None:
        """A copy of what is given is given too: what its readers do is no reason to split it."""
        for item in self.order:
            if item.is_copy:
                (source,), (value,) = item.inputs, item.outputs
                if source in self.closed and value not in self.closed:
                    self.dims[value] = list(self.dims[source])
                    self.closed[value] = self.closed[source]
                if source in self.trips:
                    self.trips[value] = self.trips[source]

    def _link_all(self, ones: Any, others: Any) -> None:
        for one, other in zip(ones, others, strict=True):
            self._link(one, other)

    def _link(self, outer: Atom, inner: Value, crossing: Crossing = PLAIN) -> None:
        if isinstance(outer, Value) and outer is not inner:
            self.links[outer].append((inner, crossing.inside))
            self.links[inner].append((outer, crossing.outside))

    def _link_inner(self, decider: Value, atom: Atom, crossing: Crossing) -> None:
        if isinstance(atom, Value):
            self._link(decider, atom, crossing)

    # Flow -----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Let everything flow until nothing changes."""
        for level in (_PASSING, _COMPUTING, _BROADCAST_BACK, _BROADCAST):
            self.changed = True
            while self.changed:
                self.changed = False
                for value in list(self.dims):
                    self._follow_links(value)
                for item in (*self.order, *reversed(self.order)):
                    self._through(item, level)
                    self._pass_on()
                self._follow_state()

    def _pass_on(self) -> None:
        """Let what changed go as far as ops pass their dims on, before another op computes by it."""
        while self.fresh:
            for item in self.around[self.fresh.pop()]:
                self._through(item, _PASSING)

    def _through(self, item: Group, level: int) -> None:
        """Let the values of a group give to it, and it to them."""
        known = [e for e in self.ends[item] if e.to_group <= level and e.value in self.dims]
        own = self.groups.get(item, {})
        claims = self._claims(item, known)
        if claims:
            options = self._options(item, own, claims)
            best = options[0]
            if len(options) > 1:
                best = min(options, key=lambda option: self._seconds(item, option, claims))
            self.changed |= best != own
            self.groups[item] = own = best
        for end in self.ends[item]:
            if own and end.to_value <= level:
                result = end.value in item.outputs
                layout = (
                    self._rest(item, own, claims, end.dims) if result else item.rule.layout(end.dims, own)
                )
                self._push(layout.dims, end.value)

    def _claims(self, item: Group, ends: Sequence[_End]) -> list[_Claim]:
        """List by which axes values split factors of a group."""
        found = dict.fromkeys(
            claim
            for end in ends
            for axes, factors in zip(self.dims[end.value], end.dims, strict=True)
            for claim in deal(axes, factors, item.rule.sizes, self.mesh).items()
        )
        return list(found)

    def _batch(self, item: Group) -> set[str]:
        """Factors of a product that all its operands and results have."""
        if not any(op.name in _HEAVY - _LOOKUPS for op in item.ops):
            return set()
        return set.intersection(*({f for dim in end.dims for f in dim} for end in self.ends[item]))

    def _options(
        self, item: Group, own: Mapping[str, Axes], claims: Sequence[_Claim]
    ) -> list[dict[str, Axes]]:
        """List the splits that a group may take: of a product, one for each outcome of a contest for axes."""
        batch = self._batch(item)
        first = [claim for claim in claims if claim[0] in batch]
        contested = [
            (f, axes)
            for f, axes in claims
            if any(f != other and set(axes) & set(others) for other, others in claims)
        ]
        orders: Iterable[Sequence[_Claim]] = [()]
        if _is_heavy(item):
            orders = itertools.permutations(contested, min(len(contested), _CONTEST))
        options: list[dict[str, Axes]] = []
        for order in orders:
            option = self._taken(item, own, [*first, *order, *claims])
            if option not in options:
                options.append(option)
        return options

    def _taken(
        self, item: Group, own: Mapping[str, Axes], claims: Sequence[_Claim], only: Set[str] | None = None
    ) -> dict[str, Axes]:
        """Axes of a group's factors (of those in `only`) after one claim after the other, as far as they go."""
        taken, closed = dict(own), self.fixed.groups.get(item, {})
        for factor, part in claims:
            have = taken.get(factor, ())
            if factor in closed or part == have or part[: len(have)] != have:
                continue
            used = {a for f, x in taken.items() if f != factor for a in x}
            if (only is not None and factor not in only) or used & set(part):
                continue
            if item.rule.valid({**taken, factor: part}, self.mesh):
                taken[factor] = part
        return taken

    def _rest(self, item: Group, own: Mapping[str, Axes], claims: Sequence[_Claim], dims: Dims) -> Layout:
        """Layout in which a result rests: partial sums are scattered over dims that competed for their axes."""
        here = {f for dim in dims for f in dim}
        kept = {f: axes for f, axes in own.items() if f in here}
        return item.rule.layout(dims, self._taken(item, kept, claims, here))

    def _seconds(self, item: Group, assignment: Assignment, claims: Sequence[_Claim]) -> float:
        """Price of bringing what a group reads, and what it leaves, from and to where they are by now.

        An operand that a loop holds unchanged can be brought once for all trips.
        """
        total = 0.0
        for i, value in enumerate(item.inputs):
            if value in self.dims:
                want = item.input_layout(i, assignment)
                total += self._reshard(value, self._layout(value), want) / self.trips.get(value, 1)
        for j, (value, dims) in enumerate(zip(item.outputs, item.rule.outputs, strict=True)):
            left = item.output_layout(j, assignment)
            want = self._layout(value) if value in self.dims else self._rest(item, assignment, claims, dims)
            total += self._reshard(value, left, want)
        return total

    def _reshard(self, value: Value, source: Layout, target: Layout) -> float:
        return self.resharder.inside(value.manual).find(value.shape, value.dtype, source, target).seconds

    def _push(self, layout: tuple[Axes, ...], value: Value) -> None:
        """Let a value take the axes of a neighbour, dim by dim."""
        own = self.dims.setdefault(value, [()] * len(value.shape))
        before = list(own)
        for d, axes in enumerate(layout):
            have = own[d]
            if d in self.closed.get(value, ()) or axes == have or axes[: len(have)] != have:
                continue
            if {a for e, x in enumerate(own) if e != d for a in x} & set(axes):
                continue
            if value.shape[d] % mesh_size(axes, self.mesh) == 0:
                own[d] = axes
        if own != before:
            self.changed = True
            self.fresh.append(value)
            self._follow_links(value)

    def _follow_links(self, value: Value) -> None:
        """Let what enters or leaves a loop or branch take the axes of a value at once, as in program order."""
        for other, moved in self.links[value]:
            self._push(moved(self._layout(value)).dims, other)

    def _follow_state(self) -> None:
        """Results that are the next step's inputs exchange shardings with them; so do fixed outputs."""
        block = self.block_
        for j, atom in enumerate(block.outputs):
            if not isinstance(atom, Value):
                continue
            if j in self.fixed.outputs:
                self._push(tuple(axes or () for axes in self.fixed.outputs[j]), atom)
            elif j in self.state:
                value = block.inputs[self.state[j]]
                if value in self.dims:
                    self._push(tuple(self.dims[value]), atom)

    # Result ---------------------------------------------------------------------------------------

    def decisions(self) -> Decisions:
        """Read what was reached as decisions of the partitioner."""
        block = self.block_
        layouts = {v: self._layout(v) for v in deciding_values(block)}
        self._fit(layouts)
        outputs = []
        for j, atom in enumerate(block.outputs):
            if j in self.fixed.outputs:
                outputs.append(self._completed(self.fixed.outputs[j], atom))
            elif j in self.state:
                outputs.append(layouts[block.inputs[self.state[j]]])
            elif isinstance(atom, Value):
                outputs.append(self._layout(atom))
            else:
                outputs.append(replicated(len(shape_of(atom))))
        return Decisions(
            assignments={
                item: {f: a for f, a in self.groups.get(item, {}).items() if a} for item in self.order
            },
            layouts=layouts,
            outputs=tuple(outputs),
        )

    def _completed(self, given: Given, atom: Atom) -> Layout:
        """Layout of an output: what is given, and in open dims that of the value."""
        have = self._layout(atom).dims if isinstance(atom, Value) else ((),) * len(given)
        used = {a for axes in given for a in axes or ()}
        dims = [
            x if axes is None and not used & set(x) else axes or ()
            for x, axes in zip(have, given, strict=True)
        ]
        return Layout(tuple(dims))

    def _layout(self, value: Value) -> Layout:
        dims = self.dims.get(value)
        return Layout(tuple(dims)) if dims is not None else replicated(len(value.shape))

    def _fit(self, layouts: dict[Value, Layout]) -> None:
        """What leaves a block is split as it can: a scan stacks whole slices, a `shard_map` says how."""
        for item in self.block_.walk():
            if item.kind is Kind.CONTROL:
                for _, _, decider, crossing in boundaries(item).yields:
                    layouts[decider] = crossing.fitted(layouts[decider])


def _is_heavy(item: Group) -> bool:
    return any(op.name in _HEAVY for op in item.ops)
