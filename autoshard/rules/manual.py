"""`shard_map` inside the user's function: its boundary layouts are given, its body runs as it stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal, jaxpr_as_fun

from autoshard.layout import MeshShape, from_spec
from autoshard.program import Op, aval_of, shape_of
from autoshard.rules.registry import Family, Kind, LocalView, register
from autoshard.rules.rule import Assignment, Dims, ShardingRule


def _rule(op: Op) -> ShardingRule:
    sizes: dict[str, int] = {}

    def dims(prefix: str, shape: tuple[int, ...]) -> Dims:
        found = []
        for d, n in enumerate(shape):
            sizes[f"{prefix}d{d}"] = n
            found.append((f"{prefix}d{d}",) if n > 1 else ())
        return tuple(found)

    return ShardingRule(
        inputs=tuple(dims(f"i{k}", shape_of(a)) for k, a in enumerate(op.inputs)),
        outputs=tuple(dims(f"o{k}", v.shape) for k, v in enumerate(op.outputs)),
        sizes=sizes,
    )


def boundary_assignment(op: Op, mesh: MeshShape) -> Assignment:
    """Return the one assignment that a `shard_map` allows: the layouts that its specs name.

    Raises:
      ValueError: its mesh axes are not axes of `mesh` with the same sizes.
    """
    own = dict(op.params["mesh"].shape)
    if any(mesh.get(a) != n for a, n in own.items()):
        raise ValueError(
            f"{op.source}: the shard_map inside the function is over the mesh {own}; the plan's mesh is"
            f" {dict(mesh)}. Plan on a mesh that has its axes, with the same sizes."
        )
    assignment = {}
    for prefix, specs, atoms in (
        ("i", op.params["in_specs"], op.inputs),
        ("o", op.params["out_specs"], op.outputs),
    ):
        for k, (spec, atom) in enumerate(zip(specs, atoms, strict=True)):
            for d, axes in enumerate(from_spec(spec, len(shape_of(atom))).dims):
                kept = tuple(a for a in axes if mesh[a] > 1)
                if kept:
                    assignment[f"{prefix}{k}d{d}"] = kept
    return assignment


def evaluate(jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
    """Bind the equations of a body one by one, with varying-axis checks off, as in the program around it."""
    env: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))

    def read(atom: Any) -> Any:
        return np.asarray(atom.val, aval_of(atom).dtype) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        arrays = [read(a) for a in eqn.invars]
        name = eqn.primitive.name
        if name in ("jit", "pjit", "closed_call"):
            inner = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
            results = evaluate(inner.jaxpr, arrays) if not inner.consts else jaxpr_as_fun(inner)(*arrays)
        elif name in ("pvary", "pcast", "pbroadcast"):
            results = arrays
        elif name == "psum_invariant":
            results = list(lax.psum(arrays, eqn.params["axes"]))
        elif name == "all_gather_invariant":
            p = eqn.params
            results = [
                lax.all_gather(x, p["axis_name"], axis=p["all_gather_dimension"], tiled=p["tiled"])
                for x in arrays
            ]
        else:
            made = eqn.primitive.bind(*arrays, **eqn.primitive.get_bind_params(eqn.params))
            results = list(made) if eqn.primitive.multiple_results else [made]
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _emit(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    def body(*arrays: Any) -> list[Any]:
        return evaluate(op.params["jaxpr"], arrays)

    if view.devices is None:
        return list(body(*operands))
    mapped = jax.shard_map(
        body,
        mesh=view.devices,
        in_specs=tuple(op.params["in_specs"]),
        out_specs=list(op.params["out_specs"]),
        check_vma=False,
    )
    return list(mapped(*operands))


register(
    Family(
        name="shard_map",
        kind=Kind.SINGLE,
        rule=_rule,
        special=lambda op, view: True,
        emit_special=_emit,
        about="operands and results take the layouts that it names; its body runs as it stands",
    ),
    ["shard_map"],
)
