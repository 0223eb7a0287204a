"""Sharding completion: a few annotations become a sharding of everything, as GSPMD does it.

Shardings flow through rules forwards and backwards until nothing changes, pass-through ops before products
(GSPMD, arXiv 2105.04663, section 3.5). What a person gave is never changed; a dim that is open takes what
arrives first, from the larger array where several compete; an axis is used once per array and per group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

from autoshard.annotations import constraint_choices, input_choices, output_names
from autoshard.grouping import Block, Group
from autoshard.layout import Axes, Layout, MeshShape, mesh_size, replicated
from autoshard.partition.emitter import Decisions, boundaries, deciding_values
from autoshard.program import Atom, Value, shape_of, value_bytes
from autoshard.rules import Assignment, Kind
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
        mesh,
        fixed=fixed,
        fixed_outputs=fixed_outputs,
        fixed_groups={item: options[0] for item, options in allowed.items()},
        state=source.state,
    )
    return decisions, notes + more


def propagate(
    block: Block,
    mesh: MeshShape,
    *,
    fixed: Mapping[Value, Layout],
    fixed_outputs: Mapping[int, Layout],
    fixed_groups: Mapping[Group, Assignment],
    state: Mapping[int, int],
) -> Decisions:
    """Run completion to its fix-point.

    Args:
      block: the grouped program.
      mesh: axis name to size.
      fixed: layouts of inputs that must not change.
      fixed_outputs: the same for outputs, by position.
      fixed_groups: assignments of groups that must not change (constraints in the program).
      state: outputs that follow an input unless fixed.
    """
    flow = _Flow(block, mesh, fixed, fixed_outputs, fixed_groups, state)
    flow.run()
    return flow.decisions()


class _Flow:
    def __init__(
        self,
        block: Block,
        mesh: MeshShape,
        fixed: Mapping[Value, Layout],
        fixed_outputs: Mapping[int, Layout],
        fixed_groups: Mapping[Group, Assignment],
        state: Mapping[int, int],
    ) -> None:
        self.block_, self.mesh, self.state = block, mesh, state
        self.fixed_outputs = fixed_outputs
        self.dims: dict[Value, list[Axes]] = {v: list(x.dims) for v, x in fixed.items()}
        self.closed: set[Value] = set(fixed)
        self.groups: dict[Group, dict[str, Axes]] = {g: dict(a) for g, a in fixed_groups.items()}
        self.closed_groups = set(fixed_groups)
        self.links: list[tuple[Value, Value, int]] = []  # (outer, inner, leading dims of outer only)
        self.order: list[Group] = []
        self._collect(block)
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
                for atom, (inner, lead) in zip(op.inputs, boundary.operands, strict=True):
                    if inner is not None:
                        self._link(atom, inner, lead)
                for inner, decider in boundary.same.items():
                    self._link(decider, inner, 0)
                self._link_all(op.outputs, boundary.results)
                for index, out, decider, lead in boundary.yields:
                    self._link_inner(decider, item.blocks[index].outputs[out], lead)
                for body in item.blocks:
                    self._collect(body)

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
            if heavy or not any(op.name in _HEAVY for op in item.ops):
                self._through(item)

    def _through(self, item: Group) -> None:
        ends = [(v, d) for v, d in zip(item.inputs, item.rule.inputs, strict=True)]
        ends += [(v, d) for v, d in zip(item.outputs, item.rule.outputs, strict=True)]
        if item not in self.closed_groups:
            for value, dims in sorted(ends, key=lambda e: -value_bytes(e[0].shape, e[0].dtype)):
                if value in self.dims:
                    self._pull(item, value, dims)
        assignment = self.groups.get(item)
        if assignment:
            for value, dims in ends:
                self._push(item.rule.layout(dims, assignment).dims, value)

    def _pull(self, item: Group, value: Value, dims: tuple[tuple[str, ...], ...]) -> None:
        """Let a group take the axes of one of its values."""
        own = self.groups.setdefault(item, {})
        for axes, factors in zip(self.dims[value], dims, strict=True):
            for factor, part in self._spread(axes, factors, item.rule.sizes).items():
                have = own.get(factor, ())
                if part == have or part[: len(have)] != have:
                    continue
                used = {a for f, x in own.items() if f != factor for a in x}
                if used & set(part):
                    continue
                if item.rule.valid({**own, factor: part}, self.mesh):
                    own[factor] = part
                    self.changed = True

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
        self._share()
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

    def _share(self) -> None:
        """Let a copy whose readers all want one layout take it, so that the resharding is done once."""
        readers: dict[Value, list[Layout]] = {}
        for item in self.order:
            if item.kind in (Kind.CONTROL, Kind.IDENTITY):
                for value in item.inputs:
                    readers.setdefault(value, []).append(self._layout(value))
            elif not item.is_copy:
                for i, value in enumerate(item.inputs):
                    want = item.input_layout(i, self.groups.get(item, {}))
                    readers.setdefault(value, []).append(want)
        for atom in self.block_.outputs:
            if isinstance(atom, Value):
                readers.setdefault(atom, []).append(self._layout(atom))
        for item in reversed(self.order):
            if not item.is_copy:
                continue
            wants = readers.get(item.outputs[0], [])
            if wants and all(w == wants[0] for w in wants):
                self.groups[item] = {
                    f: a for (f,), a in zip(_single(item), wants[0].dims, strict=True) if f and a
                }
            readers.setdefault(item.inputs[0], []).append(item.input_layout(0, self.groups.get(item, {})))


def _single(item: Group) -> list[tuple[str]]:
    return [(dim[0],) if dim else ("",) for dim in item.rule.outputs[0]]
