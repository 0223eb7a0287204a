"""Sessions, random decisions, and the comparison of a partitioned run with the original."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import cost_models as cm
from autoshard.boundary import boundaries, deciding_values, free_axes
from autoshard.choices import assignments, layouts
from autoshard.grouping import PARTIAL, Block, Group
from autoshard.layout import Layout, replicated
from autoshard.partition.emitter import Decisions
from autoshard.program import Value
from autoshard.rules import Assignment, Kind
from autoshard.session import Session, Source

MESHES: tuple[dict[str, int], ...] = (
    {"a": 8},
    {"a": 2, "b": 4},
    {"a": 4, "b": 2},
    {"a": 2, "b": 2, "c": 2},
    {"a": 2, "one": 1, "b": 4},
)
# Results that cancel to less than this are compared with it: what is left of them is the rounding of f32 terms of
# about 1, in another order.
NOISE = 1e-2
# Unoptimised code compiles faster and computes the same.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def session_of(fn: Callable[..., Any], args: Sequence[Any], mesh: Mapping[str, int]) -> Session:
    """Trace, group and place a function on the smallest slice that holds the mesh."""
    source = Source.of(fn, args)
    return Session.of(source, cm.Topology.smallest("v3", int(np.prod(list(mesh.values())))), mesh)


@functools.cache
def _devices(sizes: tuple[tuple[str, int], ...]) -> Mesh:
    shape = tuple(n for _, n in sizes)
    count = int(np.prod(shape))
    return Mesh(
        np.array(jax.devices()[:count]).reshape(shape),
        tuple(a for a, _ in sizes),
        axis_types=(AxisType.Auto,) * len(shape),
    )


def cpu_mesh(mesh: Mapping[str, int]) -> Mesh:
    """Return the mesh over virtual CPU devices."""
    return _devices(tuple(mesh.items()))


def run(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, ...]:
    """Compile quickly and run."""
    return tuple(jax.jit(fn).lower(*args).compile(compiler_options=QUICK)(*args))


def run_spmd(session: Session, decisions: Decisions, args: Sequence[Any]) -> tuple[Any, ...]:
    """Run the per-device program on flat arguments."""
    return run(session.program(decisions, cpu_mesh(session.machine.mesh)), jax.tree.leaves(tuple(args)))


def run_each(session: Session, splits: Sequence[Decisions], args: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Run the per-device programs of several splits, compiled as one."""
    mesh = cpu_mesh(session.machine.mesh)
    programs = [session.program(decisions, mesh) for decisions in splits]
    flat = run(lambda *leaves: [x for fn in programs for x in fn(*leaves)], jax.tree.leaves(tuple(args)))
    count = len(flat) // len(splits)
    return [flat[i * count : (i + 1) * count] for i in range(len(splits))]


def differences(found: Sequence[Any], expected: Sequence[Any], rtol: float = 1e-5) -> list[str]:
    """Say which results differ: integers at all, floats by more than `rtol` of the largest."""
    assert len(found) == len(expected)
    wrong = []
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            wrong.append(f"{i}: {a.dtype}{a.shape} for {b.dtype}{b.shape}")
            continue
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        x, y = np.asarray(a), np.asarray(b)
        if x.dtype.kind in "biu":
            if not np.array_equal(x, y):
                wrong.append(f"{i}: {np.count_nonzero(x != y)} of {x.size} {x.dtype} differ")
            continue
        wide = np.complex128 if x.dtype.kind == "c" else np.float64
        x, y = x.astype(wide), y.astype(wide)
        if not np.array_equal(np.isnan(x), np.isnan(y)):
            wrong.append(f"{i}: NaN at other places")
            continue
        finite = np.isfinite(y)
        if not np.array_equal(x[~finite & ~np.isnan(y)], y[~finite & ~np.isnan(y)]):
            wrong.append(f"{i}: infinite at other places")
            continue
        x, y = x[finite], y[finite]
        most = max(np.abs(y).max(initial=0.0), NOISE)
        if np.abs(x - y).max(initial=0.0) > rtol * most:
            wrong.append(f"{i}: {np.abs(x - y).max():.3g} off; the largest is {most:.3g}")
    return wrong


# Random decisions ------------------------------------------------------------------------------------


class _Draw:
    def __init__(
        self, block: Block, mesh: Mapping[str, int], rng: np.random.Generator, partial: float
    ) -> None:
        self.block, self.mesh, self.rng, self.partial = block, mesh, rng, partial
        self.groups: dict[Group, Assignment] = {}
        self.have: dict[Value, Layout] = {}

    def run(self) -> Decisions:
        self.values = {v: self.layout(v.shape, manual=v.manual) for v in deciding_values(self.block)}
        for value in (*self.block.inputs, *(v for v, _ in self.block.consts)):
            self.values[value] = self.layout(value.shape, even=True)
        for item in self.block.walk():
            if item.kind is Kind.CONTROL:
                boundary = boundaries(item)
                for inner, crossing in boundary.operands:
                    if inner is not None and crossing.manual:
                        self.values[inner] = self.layout(inner.shape, True, inner.manual)
                for index, j, decider, crossing in boundary.yields:
                    self.values[decider] = crossing.fitted(self.values[decider])
                    if crossing.manual:
                        shape = item.blocks[index].outputs[j].aval.shape
                        inner = self.layout(shape, True, crossing.manual | decider.manual)
                        self.values[decider] = crossing.outside(inner)
        for value in (*self.block.inputs, *(v for v, _ in self.block.consts)):
            self.have[value] = self.values[value]
        self.walk(self.block)
        outputs = tuple(self.layout(tuple(a.aval.shape), even=True) for a in self.block.outputs)
        return Decisions(assignments=self.groups, layouts=self.values, outputs=outputs)

    def layout(
        self, shape: Sequence[int], even: bool = False, manual: frozenset[str] = frozenset()
    ) -> Layout:
        mesh = free_axes(self.mesh, manual)
        options = layouts(shape, mesh, even=even, waste=float(self.rng.choice([0, 0.25, 100])))
        picked = options[int(self.rng.integers(len(options)))]
        return Layout(tuple(tuple(str(a) for a in self.rng.permutation(list(d))) for d in picked.dims))

    def walk(self, block: Block) -> None:
        for item in block.groups:
            if item.kind is Kind.IDENTITY:
                (op,) = item.ops
                for atom, value in zip(op.inputs, op.outputs, strict=True):
                    self.have[value] = self.have[atom] if isinstance(atom, Value) else replicated(0)
            elif item.kind is Kind.CONTROL:
                boundary = boundaries(item)
                for body in item.blocks:
                    for value in body.inputs:
                        self.have[value] = self.values[boundary.same.get(value, value)]
                    self.walk(body)
                for value, decider in zip(item.ops[0].outputs, boundary.results, strict=True):
                    self.have[value] = self.values[decider]
            else:
                self.groups[item] = self.assignment(item)
                for j, value in enumerate(item.outputs):
                    self.have[value] = item.output_layout(j, self.groups[item])

    def assignment(self, item: Group) -> Assignment:
        waste = float(self.rng.choice([0, 0.25, 100]))
        options = [
            a
            for a in assignments(item.rule, free_axes(self.mesh, item.manual), waste)
            if self.supplied(item, a)
        ]
        partial = [a for a in options if a.get(PARTIAL)]
        summing = [a for a in options if any(a.get(f) for f in item.rule.reduce)]
        if partial and self.rng.random() < self.partial:
            options = partial
        elif summing and self.rng.random() < self.partial:
            options = summing
        picked = options[int(self.rng.integers(len(options)))]
        shuffled = {f: tuple(str(x) for x in self.rng.permutation(list(a))) for f, a in picked.items()}
        proper = {f: a for f, a in shuffled.items() if f != PARTIAL}
        return shuffled if item.rule.valid(proper, self.mesh) else picked

    def supplied(self, item: Group, assignment: Assignment) -> bool:
        axes = set(assignment.get(PARTIAL, ()))
        return all(
            axes <= set(self.have[item.inputs[i]].unreduced) and self.have[item.inputs[i]].monoid == "sum"
            for i in (item.rule.linear if axes else ())
        )


def random_decisions(
    block: Block, mesh: Mapping[str, int], rng: np.random.Generator, partial: float = 0.5
) -> Decisions:
    """Draw a split for every group and a layout for every boundary value; partial sums where they can be had."""
    return _Draw(block, mesh, rng, partial).run()


def whole_decisions(block: Block) -> Decisions:
    """Keep everything whole."""
    return Decisions(
        assignments={g: {} for g in block.walk() if g.kind not in (Kind.CONTROL, Kind.IDENTITY)},
        layouts={v: replicated(len(v.shape)) for v in deciding_values(block)},
        outputs=tuple(replicated(len(a.aval.shape)) for a in block.outputs),
    )
