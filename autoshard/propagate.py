"""Sharding completion: a few annotations become a sharding of everything, as GSPMD does it.

Shardings flow through rules forwards and backwards until nothing changes, pass-through ops before products
(GSPMD, arXiv 2105.04663, section 3.5). What a person gave is never changed; a dim that is open takes what
arrives first, from the larger array where several compete; an axis is used once per array and per group. Where the
operands of a product compete, the one leads that costs the least resharding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from autoshard.annotations import constraint_choices, input_choices, output_names
from autoshard.grouping import Block, Group
from autoshard.layout import Axes, Layout, mesh_size, replicated
from autoshard.partition.emitter import Decisions, boundaries, deciding_values
from autoshard.partition.reshard import Resharder
from autoshard.program import Atom, Value, shape_of, value_bytes
from autoshard.resting import settle, unchanging
from autoshard.rules import Assignment, Kind
from autoshard.rules.rule import Dims
from autoshard.session import Session

__all__ = ["complete", "propagate"]

_HEAVY = frozenset({"dot_general", "conv_general_dilated", "gather", "ragged_dot_general"})


def complete(session: Session, given: Mapping[str, PartitionSpec]) -> tuple[Decisions, list[str]]:
    """Complete specs by pytree path (outputs as `out...`) to decisions for the whole program.

    Returns the decisions, and notes on dims that had to be left whole.
    """
    source, mesh = session.source, session.machine.mesh
    traced, block = source.traced, source.block
    names = [*traced.in_names, *output_names(traced)]
    choices, notes = input_choices(given, names, [*traced.in_avals, *traced.out_avals], mesh, "specs")
    allowed, more = constraint_choices(block, mesh)
    count = len(traced.in_names)
    fixed = {block.inputs[i]: options[0] for i, options in choices.items() if i < count}
    fixed_outputs = {i - count: options[0] for i, options in choices.items() if i >= count}
    decisions = propagate(
        block,
        session.resharder,
        fixed=fixed,
        fixed_outputs=fixed_outputs,
        fixed_groups={item: options[0] for item, options in allowed.items()},
        state=source.state,
    )
    return settle(block, decisions, session.resharder), notes + more


def propagate(
    block: Block,
    resharder: Resharder,
    *,
    fixed: Mapping[Value, Layout],
    fixed_outputs: Mapping[int, Layout],
    fixed_groups: Mapping[Group, Assignment],
    state: Mapping[int, int],
) -> Decisions:
    """Run completion to its fix-point.

    Args:
      block: the grouped program.
      resharder: prices of resharding, on the machine to complete for.
      fixed: layouts of inputs that must not change.
      fixed_outputs: the same for outputs, by position.
      fixed_groups: assignments of groups that must not change (constraints in the program).
      state: outputs that follow an input unless fixed.
    """
    flow = _Flow(block, resharder, fixed, fixed_outputs, fixed_groups, state)
    flow.run()
    return flow.decisions()


class _Flow:
    def __init__(
        self,
        block: Block,
        resharder: Resharder,
        fixed: Mapping[Value, Layout],
        fixed_outputs: Mapping[int, Layout],
        fixed_groups: Mapping[Group, Assignment],
        state: Mapping[int, int],
    ) -> None:
        self.block_, self.resharder, self.state = block, resharder, state
        self.mesh = resharder.machine.mesh
        self.fixed_outputs = fixed_outputs
        self.dims: dict[Value, list[Axes]] = {v: list(x.dims) for v, x in fixed.items()}
        self.closed: set[Value] = set(fixed)
        self.groups: dict[Group, dict[str, Axes]] = {g: dict(a) for g, a in fixed_groups.items()}
        self.closed_groups = set(fixed_groups)
        self.links: list[tuple[Value, Value, int]] = []  # (outer, inner, leading dims of outer only)
        self.order: list[Group] = []
        self.trips: dict[Value, int] = {}  # of the loop that holds a value unchanged
        self._collect(block)
        self._follow_copies()
        self.changed = False

    # Structure ------------------------------------------------------------------------------------

    def _collect(self, block: Block) -> None:
        for item in block.groups:
            self.order.append(item)
            if item.kind is Kind.IDENTITY:
                (op,) = item.ops
                self._link_all(op.inputs, op.outputs)
            elif item.kind is Kind.CONTROL:
                (op,) = item.ops
                boundary = boundaries(item)
                held, trips = unchanging(op)
                for i, (atom, (inner, lead)) in enumerate(zip(op.inputs, boundary.operands, strict=True)):
                    if inner is not None:
                        self._link(atom, inner, lead)
                        if i < held and isinstance(atom, Value):
                            self.trips[inner] = trips * self.trips.get(atom, 1)
                for inner, decider in boundary.same.items():
                    self._link(decider, inner, 0)
                self._link_all(op.outputs, boundary.results)
                for index, out, decider, lead in boundary.yields:
                    self._link_inner(decider, item.blocks[index].outputs[out], lead)
                for body in item.blocks:
                    self._collect(body)

    def _follow_copies(self) -> None:
        """A copy of what is given is given too: what its readers do is no reason to split it."""
        for item in self.order:
            if item.is_copy:
                (source,), (value,) = item.inputs, item.outputs
                if source in self.closed:
                    self.dims[value] = self.dims[source]
                    self.closed.add(value)
                if source in self.trips:
                    self.trips[value] = self.trips[source]

    def _link_all(self, ones: Any, others: Any) -> None:
        for one, other in zip(ones, others, strict=True):
            self._link(one, other, 0)

    def _link(self, outer: Atom, inner: Value, lead: int) -> None:
        if isinstance(outer, Value) and outer is not inner:
            self.links.append((outer, inner, lead))

    def _link_inner(self, decider: Value, atom: Atom, lead: int) -> None:
        if isinstance(atom, Value) and atom is not decider:
            self.links.append((decider, atom, lead))

    # Flow -----------------------------------------------------------------------------------------

    def run(self) -> None:
        for heavy in (False, True):
            while True:
                self.changed = False
                self._sweep(self.order, heavy)
                self._sweep(self.order[::-1], heavy)
                self._follow_links()
                self._follow_state()
                if not self.changed:
                    break

    def _sweep(self, order: list[Group], heavy: bool) -> None:
        for item in order:
            if item.kind in (Kind.CONTROL, Kind.IDENTITY):
                continue
            if heavy or not _is_heavy(item):
                self._through(item)

    def _through(self, item: Group) -> None:
        ends = [(v, d) for v, d in zip(item.inputs, item.rule.inputs, strict=True)]
        ends += [(v, d) for v, d in zip(item.outputs, item.rule.outputs, strict=True)]
        if item not in self.closed_groups:
            taken = self._taken(item, [(v, d) for v, d in ends if v in self.dims])
            self.changed |= taken != self.groups.get(item, {})
            self.groups[item] = taken
        assignment = self.groups.get(item)
        if assignment:
            for value, dims in ends:
                self._push(item.rule.layout(dims, assignment).dims, value)

    def _taken(self, item: Group, ends: Sequence[tuple[Value, Dims]]) -> dict[str, Axes]:
        """Let a group take the axes of its values, the larger before the smaller.

        Of the values of a product the one goes first that makes for the least resharding.
        """
        ends = sorted(ends, key=lambda e: -value_bytes(e[0].shape, e[0].dtype))
        options: list[dict[str, Axes]] = []
        for leader in ends if _is_heavy(item) else ends[:1]:
            option = self._pulled(item, [leader, *ends])
            if option not in options:
                options.append(option)
        if len(options) > 1:
            return min(options, key=lambda option: self._seconds(item, option))
        return options[0] if options else dict(self.groups.get(item, {}))

    def _pulled(self, item: Group, ends: Sequence[tuple[Value, Dims]]) -> dict[str, Axes]:
        """Axes that a group takes of its values, one value after the other."""
        taken = dict(self.groups.get(item, {}))
        for value, dims in ends:
            for axes, factors in zip(self.dims[value], dims, strict=True):
                for factor, part in self._spread(axes, factors, item.rule.sizes).items():
                    have = taken.get(factor, ())
                    if part == have or part[: len(have)] != have:
                        continue
                    used = {a for f, x in taken.items() if f != factor for a in x}
                    if not used & set(part) and item.rule.valid({**taken, factor: part}, self.mesh):
                        taken[factor] = part
        return taken

    def _seconds(self, item: Group, assignment: Assignment) -> float:
        """Price of bringing what a group reads, and what it leaves, from and to where they are by now.

        An operand that a loop holds unchanged can be brought once for all trips.
        """
        total = 0.0
        for i, value in enumerate(item.inputs):
            if value in self.dims:
                want = item.input_layout(i, assignment)
                found = self.resharder.find(value.shape, value.dtype, self._layout(value), want)
                total += found.seconds / self.trips.get(value, 1)
        for j, value in enumerate(item.outputs):
            left = item.output_layout(j, assignment)
            want = self._layout(value) if value in self.dims else Layout(left.dims)
            total += self.resharder.find(value.shape, value.dtype, left, want).seconds
        return total

    def _spread(self, axes: Axes, factors: tuple[str, ...], sizes: Mapping[str, int]) -> dict[str, Axes]:
        """Deal the axes of a dim out to its factors, major first."""
        found: dict[str, Axes] = {}
        rest = list(axes)
        for factor in factors:
            part: list[str] = []
            while rest and sizes[factor] % mesh_size([*part, rest[0]], self.mesh) == 0:
                part.append(rest.pop(0))
            if part:
                found[factor] = tuple(part)
            if mesh_size(part, self.mesh) != sizes[factor]:
                break
        return found

    def _push(self, layout: tuple[Axes, ...], value: Value) -> None:
        """Let a value take the axes of a neighbour, dim by dim."""
        if value in self.closed:
            return
        own = self.dims.setdefault(value, [()] * len(value.shape))
        for d, axes in enumerate(layout):
            have = own[d]
            if axes == have or axes[: len(have)] != have:
                continue
            if {a for e, x in enumerate(own) if e != d for a in x} & set(axes):
                continue
            if value.shape[d] % mesh_size(axes, self.mesh) == 0:
                own[d] = axes
                self.changed = True

    def _follow_links(self) -> None:
        for outer, inner, lead in self.links:
            if outer in self.dims:
                self._push(tuple(self.dims[outer][lead:]), inner)
            if inner in self.dims:
                self._push(((),) * lead + tuple(self.dims[inner]), outer)

    def _follow_state(self) -> None:
        """Results that are the next step's inputs exchange shardings with them; so do fixed outputs."""
        block = self.block_
        for j, atom in enumerate(block.outputs):
            if not isinstance(atom, Value):
                continue
            if j in self.fixed_outputs:
                self._push(self.fixed_outputs[j].dims, atom)
            elif j in self.state:
                value = block.inputs[self.state[j]]
                if value in self.dims:
                    self._push(tuple(self.dims[value]), atom)

    # Result ---------------------------------------------------------------------------------------

    def decisions(self) -> Decisions:
        block = self.block_
        layouts = {v: self._layout(v) for v in deciding_values(block)}
        self._whole_leads(layouts)
        outputs = []
        for j, atom in enumerate(block.outputs):
            if j in self.fixed_outputs:
                outputs.append(self.fixed_outputs[j])
            elif j in self.state:
                outputs.append(layouts[block.inputs[self.state[j]]])
            elif isinstance(atom, Value):
                outputs.append(self._layout(atom))
            else:
                outputs.append(replicated(len(shape_of(atom))))
        return Decisions(
            assignments={
                item: {f: a for f, a in self.groups.get(item, {}).items() if a}
                for item in self.order
                if item.kind not in (Kind.CONTROL, Kind.IDENTITY)
            },
            layouts=layouts,
            outputs=tuple(outputs),
        )

    def _layout(self, value: Value) -> Layout:
        dims = self.dims.get(value)
        return Layout(tuple(dims)) if dims is not None else replicated(len(value.shape))

    def _whole_leads(self, layouts: dict[Value, Layout]) -> None:
        """A dim that a scan slices or stacks stays whole inside: each step needs one slice of it."""
        for item in self.order:
            if item.kind is Kind.CONTROL:
                for _, _, decider, lead in boundaries(item).yields:
                    if lead:
                        layouts[decider] = Layout(((),) * lead + layouts[decider].dims[lead:])


def _is_heavy(item: Group) -> bool:
    return any(op.name in _HEAVY for op in item.ops)
