"""Single ops under many splits, all in one compiled program; padding of uneven splits holds garbage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.layout import Layout, local_shape, mesh_size, to_spec
from autoshard.program import Op
from autoshard.rules import Assignment, LocalView, family, rule_of
from autoshard.trace import trace
from tests.helpers.running import cpu_mesh, differences, run

_FINISH: dict[str, Any] = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}


@dataclass(frozen=True, kw_only=True)
class Single:
    """An op, its operands, and how its factors are split."""

    op: Op
    args: tuple[Any, ...]
    assignment: Assignment
    expected: tuple[Any, ...]


def op_of(fn: Callable[..., Any], args: Sequence[Any]) -> Op:
    """Return the one op that a function consists of."""
    (op,) = trace(fn, tuple(args)).program.ops
    return op


def random_split(op: Op, mesh: Mapping[str, int], rng: np.random.Generator) -> Assignment:
    """Split factors of an op by axes in any order, as unevenly as they come; at least one if that is possible."""
    rule = rule_of(op)
    for _ in range(20):
        split: dict[str, tuple[str, ...]] = {}
        for axis in rng.permutation(list(mesh)):
            factor = str(rng.choice(["", *rule.factors])) if rule.factors else ""
            if factor:
                split[factor] = (*split.get(factor, ()), str(axis))
        if split and rule.valid(split, mesh):
            return split
    return {}


def wrong_ones(cases: Sequence[Single], mesh: Mapping[str, int], rtol: float = 1e-5) -> list[str]:
    """Run all cases in one program over a mesh; say which results differ from what is expected."""
    rules = [rule_of(case.op) for case in cases]
    inputs, specs = [], []
    for case, rule in zip(cases, rules, strict=True):
        for x, dims in zip(case.args, rule.inputs, strict=True):
            layout = rule.layout(dims, case.assignment)
            inputs.append(_padded(x, layout, mesh))
            specs.append(to_spec(layout))
    layouts = [
        [rule.output_layout(j, case.assignment) for j in range(len(case.op.outputs))]
        for case, rule in zip(cases, rules, strict=True)
    ]

    def body(*arrays: Any) -> list[list[Any]]:
        left, results = list(arrays), []
        for case, rule, outs in zip(cases, rules, layouts, strict=True):
            own, left = left[: len(case.args)], left[len(case.args) :]
            view = LocalView(rule=rule, assignment=case.assignment, mesh=mesh)
            made = family(case.op).emit(case.op, own, view)
            shapes = [view.out_shape(case.op, j) for j in range(len(made))]
            assert [tuple(x.shape) for x in made] == shapes
            results.append(
                [
                    _FINISH[y.monoid](x, y.unreduced) if y.unreduced else x
                    for x, y in zip(made, outs, strict=True)
                ]
            )
        return results

    mapped: Any = jax.shard_map(
        body,
        mesh=cpu_mesh(mesh),
        in_specs=tuple(specs),
        out_specs=[[to_spec(Layout(y.dims)) for y in outs] for outs in layouts],
        check_vma=False,
    )
    wrong = []
    for case, found in zip(cases, run(mapped, inputs), strict=True):
        cut = [x[tuple(map(slice, y.shape))] for x, y in zip(found, case.expected, strict=True)]
        for difference in differences(cut, case.expected, rtol):
            shapes = [x.shape for x in case.args]
            wrong.append(f"{case.op.name} {case.op.params} {shapes} {case.assignment}: {difference}")
    return wrong


def _padded(x: Any, layout: Layout, mesh: Mapping[str, int]) -> Any:
    local = local_shape(x.shape, layout, mesh)
    full = [n * mesh_size(axes, mesh) for n, axes in zip(local, layout.dims, strict=True)]
    array = np.asarray(x)
    kind = jnp.dtype(x.dtype)
    if jnp.issubdtype(kind, jnp.inexact):
        garbage = np.full(full, np.nan, kind)
    elif kind == jnp.bool_:
        garbage = np.random.default_rng(0).integers(0, 2, full).astype(bool)
    else:
        garbage = np.random.default_rng(0).integers(0, 100, full).astype(kind)
    garbage[tuple(map(slice, array.shape))] = array
    return jnp.asarray(garbage)
