"""The per-device program: groups emitted on local arrays, with explicit collectives between them.

`Decisions` say how every group splits its factors and how every boundary value is laid out; `spmd` turns
them into a function over global arrays that runs under `jax.shard_map`. Each group's equations carry a name
scope, `g12.dot_general`, by which the estimate and a profile find them again; resharding for group 12
carries `r12`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.boundary import Boundary, boundaries, free_axes
from autoshard.fusion import OUTPUT_SCOPE, PARTIAL_SCOPE
from autoshard.grouping import Block, Group
from autoshard.layout import Layout, MeshShape, replicated, to_spec
from autoshard.partition.misread import misread
from autoshard.partition.reshard import Resharder
from autoshard.partition.steps import apply_steps
from autoshard.program import Atom, Op, Value, shape_of
from autoshard.rules import Assignment, Kind, family
from autoshard.rules.host import EVERYWHERE

__all__ = [
    "Decisions",
    "constrained",
    "emit_group",
    "leaves_partial",
    "number_groups",
    "spmd",
]


@dataclass(frozen=True, eq=False, kw_only=True)
class Decisions:
    """How everything is split: an assignment per group, a layout per boundary value.

    Boundary values are the program's inputs and constants, what a loop or branch takes in (`block.inputs`),
    what it stacks or returns (a control-flow group's outputs), and the program's outputs by position.
    """

    assignments: Mapping[Group, Assignment]
    layouts: Mapping[Value, Layout]
    outputs: tuple[Layout, ...]


def number_groups(block: Block) -> dict[Group, int]:
    """Number the groups of a program and of its blocks in execution order."""
    return {item: i for i, item in enumerate(block.walk())}


def literal(atom: Any) -> Any:
    """Return the array of a literal."""
    return np.asarray(atom.val, atom.aval.dtype)


def emit_group(item: Group, operands: Sequence[Any], assignment: Assignment, mesh: MeshShape) -> list[Any]:
    """Bind the local computation of a group on local operands (in the layouts that it reads).

    Without a mesh the operands are whole, and so is the computation.
    """
    env: dict[Value, Any] = dict(zip(item.inputs, operands, strict=True))
    if item.is_copy:
        return list(operands)
    outside = {v: f"{OUTPUT_SCOPE}{j}" for j, v in enumerate(item.outputs)}
    with jax.named_scope(PARTIAL_SCOPE) if leaves_partial(item, assignment) else nullcontext():
        for i, op in enumerate(item.ops):
            arrays = [env[a] if isinstance(a, Value) else literal(a) for a in op.inputs]
            named = item.kind is Kind.ELEMENTWISE and op.outputs[0] in outside
            with jax.named_scope(outside[op.outputs[0]]) if named else nullcontext():
                results = family(op).emit(op, arrays, item.view(i, assignment, mesh))
            env.update(zip(op.outputs, results, strict=True))
    return [env[v] for v in item.outputs]


def leaves_partial(item: Group, assignment: Assignment) -> bool:
    """Tell whether a group's results are partial sums."""
    return any(item.output_layout(j, assignment).unreduced for j in range(len(item.outputs)))


Env = dict[Value, tuple[Any, Layout]]


class AbstractEmitter(abc.ABC):
    """Walks a grouped program and emits it; how values move between layouts is left to subclasses."""

    def __init__(self, block: Block, decisions: Decisions) -> None:
        self.decisions = decisions
        self.numbers = number_groups(block)

    @abc.abstractmethod
    def move(self, array: Any, value: Value, have: Layout, want: Layout) -> Any:
        """Bring an array from one layout to another."""

    @abc.abstractmethod
    def compute(self, item: Group, operands: Sequence[Any], assignment: Assignment) -> list[Any]:
        """Emit the ops of a group; return its outputs in the layouts that the assignment leaves."""

    def split(self, item: Group) -> Assignment:
        """Return how a group is split."""
        return self.decisions.assignments[item]

    def settle(self, array: Any, layout: Layout) -> Any:
        """State the layout that an array of a loop, branch or barrier has by now."""
        return array

    def block(self, block: Block, env: Env) -> Callable[[Atom, Layout], Any]:
        """Emit the groups of a block; return a reader of its values in a wanted layout."""
        for item in block.groups:
            if item.kind is Kind.IDENTITY:
                self._identity(item, env)
            elif item.kind is Kind.CONTROL:
                self._control(item, env)
            else:
                self._group(item, env)
        return lambda atom, layout: self._read(env, atom, layout)

    def _read(self, env: Env, atom: Atom, layout: Layout) -> Any:
        if not isinstance(atom, Value):
            return literal(atom)
        array, have = env[atom]
        return self.move(array, atom, have, layout)

    def _group(self, item: Group, env: Env) -> None:
        assignment = self.split(item)
        number = self.numbers[item]
        with jax.named_scope(f"r{number}"):
            operands = [
                self._read(env, v, item.input_layout(i, assignment)) for i, v in enumerate(item.inputs)
            ]
        with jax.named_scope(f"g{number}.{item.title}"):
            results = self.compute(item, operands, assignment)
        for j, (value, array) in enumerate(zip(item.outputs, results, strict=True)):
            env[value] = array, item.output_layout(j, assignment)

    def _identity(self, item: Group, env: Env) -> None:
        (op,) = item.ops
        arrays = [env[a][0] if isinstance(a, Value) else literal(a) for a in op.inputs]
        with jax.named_scope(f"g{self.numbers[item]}.{item.title}"):
            results = lax.optimization_barrier(arrays)
        for atom, value, array in zip(op.inputs, op.outputs, results, strict=True):
            layout = env[atom][1] if isinstance(atom, Value) else replicated(len(value.shape))
            env[value] = self.settle(array, layout), layout

    def _control(self, item: Group, env: Env) -> None:
        (op,) = item.ops
        boundary = boundaries(item)
        with jax.named_scope(f"r{self.numbers[item]}"):
            operands = []
            for atom, (inner, crossing) in zip(op.inputs, boundary.operands, strict=True):
                layout = self._layout(boundary, inner) if inner is not None else Layout(())
                operands.append(self._read(env, atom, crossing.outside(layout)))
        emitters = {"scan": self._scan, "while": self._while, "cond": self._cond, "shard_map": self._mapped}
        emit = emitters[op.name]
        with jax.named_scope(f"g{self.numbers[item]}.{op.name}"):
            results = emit(item, op, boundary, operands)
        for value, decider, array in zip(op.outputs, boundary.results, results, strict=True):
            layout = self.decisions.layouts[decider]
            env[value] = self.settle(array, layout), layout

    def _layout(self, boundary: Boundary, inner: Value) -> Layout:
        return self.decisions.layouts[boundary.same.get(inner, inner)]

    def _run(self, boundary: Boundary, body: Block, index: int, arrays: Sequence[Any]) -> list[Any]:
        env: Env = {}
        for value, array in zip(body.inputs, arrays, strict=True):
            layout = self._layout(boundary, value)
            env[value] = self.settle(array, layout), layout
        read = self.block(body, env)
        results = []
        wanted = {j: (value, crossing) for b, j, value, crossing in boundary.yields if b == index}
        with jax.named_scope("yield"):
            for j, atom in enumerate(body.outputs):
                if j in wanted:
                    value, crossing = wanted[j]
                    layout = crossing.inside(self.decisions.layouts[value])
                else:
                    layout = replicated(len(shape_of(atom)))
                results.append(read(atom, layout))
        return results

    def _scan(self, item: Group, op: Op, boundary: Boundary, operands: list[Any]) -> Sequence[Any]:
        consts, carries = op.params["num_consts"], op.params["num_carry"]
        held = operands[:consts]

        def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            results = self._run(boundary, item.blocks[0], 0, [*held, *carry, *xs])
            return results[:carries], results[carries:]

        carry, stacked = lax.scan(
            body,
            operands[consts : consts + carries],
            operands[consts + carries :],
            length=op.params["length"],
            reverse=op.params["reverse"],
            unroll=op.params["unroll"],
        )
        return [*carry, *stacked]

    def _while(self, item: Group, op: Op, boundary: Boundary, operands: list[Any]) -> Sequence[Any]:
        split, more = op.params["cond_nconsts"], op.params["body_nconsts"]
        cond_held, body_held = operands[:split], operands[split : split + more]

        def cond(carry: Any) -> Any:
            return self._run(boundary, item.blocks[0], 0, [*cond_held, *carry])[0]

        def body(carry: Any) -> list[Any]:
            return self._run(boundary, item.blocks[1], 1, [*body_held, *carry])

        return list(lax.while_loop(cond, body, operands[split + more :]))

    def _cond(self, item: Group, op: Op, boundary: Boundary, operands: list[Any]) -> Sequence[Any]:
        def branch(index: int) -> Callable[..., list[Any]]:
            return lambda *arrays: self._run(boundary, item.blocks[index], index, arrays)

        branches = [branch(i) for i in range(len(item.blocks))]
        platforms = op.params.get("branches_platforms")
        if platforms:  # the choice stays with the lowering, which drops what other platforms would run
            chosen = {p: run for names, run in zip(platforms, branches, strict=True) for p in names or ()}
            default = next(
                (run for names, run in zip(platforms, branches, strict=True) if names is None), None
            )
            return list(lax.platform_dependent(*operands[1:], default=default, **chosen))
        index = lax.convert_element_type(operands[0], np.dtype("int32"))
        return list(lax.switch(index, branches, *operands[1:]))

    def _mapped(self, item: Group, op: Op, boundary: Boundary, operands: list[Any]) -> Sequence[Any]:
        """Emit the body of a `shard_map`: local arrays are its operands as they are."""
        return self._run(boundary, item.blocks[0], 0, operands)


class _Local(AbstractEmitter):
    """Emits local arrays and explicit collectives: the body of a `shard_map`."""

    def __init__(self, block: Block, decisions: Decisions, resharder: Resharder) -> None:
        super().__init__(block, decisions)
        self.resharder = resharder

    def move(self, array: Any, value: Value, have: Layout, want: Layout) -> Any:
        found = self.resharder.inside(value.manual).find(value.shape, value.dtype, have, want)
        if found.seconds == float("inf"):
            raise AssertionError(f"{value!r} cannot go from {have} to {want}")
        return apply_steps(array, found.steps, value.shape, self.resharder.machine.mesh)

    def compute(self, item: Group, operands: Sequence[Any], assignment: Assignment) -> list[Any]:
        return emit_group(item, operands, assignment, self.resharder.machine.mesh)


class _Constrained(AbstractEmitter):
    """Emits the original ops on global arrays with sharding constraints: XLA's partitioner does the rest.

    A reshard is constrained after every step of the plan's sequence: asked for the whole move at once, XLA
    replicates arrays that it finds no short way for. What a loop carries, slices and stacks is constrained
    too, since XLA would choose a layout of its own for the buffers.

    Two things keep XLA from its own errors (docs/xla.md). Factors that it misreads stay whole, and what it may
    not split is constrained on both sides of the op. Partial sums are constrained before they are reduced,
    with their axes left out: a product whose result is also resharded comes out wrong. What runs on every device
    with whole arrays is mapped over the mesh.
    """

    def __init__(self, block: Block, decisions: Decisions, resharder: Resharder, mesh: Any) -> None:
        super().__init__(block, decisions)
        self.resharder, self.mesh = resharder, mesh

    def split(self, item: Group) -> Assignment:
        assignment = super().split(item)
        kept_whole = _misread(item, assignment)
        return {f: axes for f, axes in assignment.items() if f not in kept_whole}

    def move(self, array: Any, value: Value, have: Layout, want: Layout) -> Any:
        # A factor that was left whole leaves no partial sums over its axes.
        partial = tuple(a for a in want.unreduced if a in have.unreduced)
        want = Layout(want.dims, partial, want.monoid if partial else "sum")
        found = self.resharder.inside(value.manual).find(value.shape, value.dtype, have, want)
        for step in found.steps:
            if step.before.unreduced != step.after.unreduced:
                array = self._constrain(array, Layout(step.before.dims))
            array = self._constrain(array, step.after)
        return array

    def settle(self, array: Any, layout: Layout) -> Any:
        return self._constrain(array, layout)

    def compute(self, item: Group, operands: Sequence[Any], assignment: Assignment) -> list[Any]:
        layouts = [item.output_layout(j, assignment) for j in range(len(item.outputs))]
        if _misread(item, super().split(item)):
            have = [item.input_layout(i, assignment) for i in range(len(item.inputs))]
            operands = [self._constrain(x, Layout(y.dims)) for x, y in zip(operands, have, strict=True)]
            layouts = [Layout(y.dims) for y in layouts]
        if any(family(op).name in EVERYWHERE for op in item.ops):
            results = self._on_every_device(item, operands)
        else:
            results = emit_group(item, operands, {}, {})
        return [self._constrain(x, y) for x, y in zip(results, layouts, strict=True)]

    def _mapped(self, item: Group, op: Op, boundary: Boundary, operands: list[Any]) -> Sequence[Any]:
        around, manual = self.mesh, op.params["manual"]

        def body(*arrays: Any) -> list[Any]:
            self.mesh = jax.sharding.get_abstract_mesh()
            results = self._run(boundary, item.blocks[0], 0, arrays)
            self.mesh = around
            return results

        mapped: Any = jax.shard_map(
            body,
            mesh=around,
            in_specs=tuple(to_spec(Layout(split)) for split in op.params["in_splits"]),
            out_specs=[to_spec(Layout(split)) for split in op.params["out_splits"]],
            axis_names=set(manual),
            check_vma=False,
        )
        return list(mapped(*operands))

    def _on_every_device(self, item: Group, operands: Sequence[Any]) -> list[Any]:
        free = free_axes(dict(self.mesh.shape), item.manual)

        def run(*arrays: Any) -> list[Any]:
            return list(emit_group(item, arrays, {}, {}))

        if not free:
            return run(*operands)
        mapped: Any = jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            axis_names=set(free),
            check_vma=False,
        )
        return list(mapped(*operands))

    def _constrain(self, array: Any, layout: Layout) -> Any:
        if layout.unreduced or not layout.dims:
            return array  # partial sums have no form here; the constraint behind the reduction stands
        return lax.with_sharding_constraint(array, NamedSharding(self.mesh, to_spec(layout)))


def _misread(item: Group, assignment: Assignment) -> frozenset[str]:
    """Return the factors of a group that XLA's partitioner must find whole."""
    split = {g for g, axes in assignment.items() if axes}
    return frozenset(
        factors[f]
        for op, rule, factors in zip(item.ops, item.op_rules, item.factors, strict=True)
        for f in misread(op, rule, {f for f, g in factors.items() if g in split})
        if f in factors
    )


def _run_program(emitter: AbstractEmitter, block: Block, arrays: Sequence[Any]) -> tuple[Any, ...]:
    decisions = emitter.decisions
    env: Env = {
        value: (array, decisions.layouts[value])
        for value, array in zip((*block.inputs, *(v for v, _ in block.consts)), arrays, strict=True)
    }
    read = emitter.block(block, env)
    with jax.named_scope("outputs"):
        return tuple(
            read(atom, layout) for atom, layout in zip(block.outputs, decisions.outputs, strict=True)
        )


def spmd(
    block: Block, decisions: Decisions, resharder: Resharder, mesh: Any
) -> Callable[..., tuple[Any, ...]]:
    """Return the partitioned program as a function of the flat global inputs.

    Args:
      block: the grouped program.
      decisions: how to split it.
      resharder: plans of the collectives, on the machine that they were priced for.
      mesh: a `jax.sharding.Mesh` or `AbstractMesh` whose axes are those of the machine's mesh.
    """
    emitter = _Local(block, decisions, resharder)
    held = tuple(value for value, _ in block.consts)
    mapped: Any = jax.shard_map(
        lambda *arrays: _run_program(emitter, block, arrays),
        mesh=mesh,
        in_specs=tuple(to_spec(decisions.layouts[value]) for value in (*block.inputs, *held)),
        out_specs=tuple(map(to_spec, decisions.outputs)),
        check_vma=False,
    )
    return lambda *arrays: mapped(*arrays, *(array for _, array in block.consts))


def constrained(
    block: Block, decisions: Decisions, resharder: Resharder, mesh: Any
) -> Callable[..., tuple[Any, ...]]:
    """Return the original program with sharding constraints, as a function of the flat inputs.

    Args:
      block: the grouped program.
      decisions: how to split it.
      resharder: plans of the collectives, as for `spmd`; XLA is led through the same steps.
      mesh: a `jax.sharding.Mesh` or `AbstractMesh` to constrain over.
    """
    emitter = _Constrained(block, decisions, resharder, mesh)
    return lambda *arrays: _run_program(emitter, block, (*arrays, *(array for _, array in block.consts)))
