"""A person's own shardings: read, checked against shapes and mesh, and turned into what may be chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.choices import layouts
from autoshard.errors import SpecError
from autoshard.grouping import Block, Group
from autoshard.layout import Layout, MeshShape, from_spec, require_specs, undivided
from autoshard.rules import Assignment
from autoshard.rules.manual import boundary_assignment
from autoshard.trace import Traced

__all__ = ["constraint_choices", "input_choices", "specs_by_path"]


def specs_by_path(specs: Any, tree: Any, names: Sequence[str], what: str) -> dict[str, PartitionSpec]:
    """Spread a pytree prefix of specs over the leaves of `tree`; None leaves stay open.

    Raises:
      SpecError: the structure of `specs` is no prefix of the arguments'.
    """
    if specs is None:
        return {}
    is_leaf = lambda x: x is None or isinstance(x, (PartitionSpec, NamedSharding))  # noqa: E731
    full = jax.tree.unflatten(tree, list(range(len(names))))
    found: dict[str, PartitionSpec] = {}

    def spread(spec: Any, part: Any) -> None:
        if spec is None:
            return
        plain = spec.spec if isinstance(spec, NamedSharding) else spec
        for index in jax.tree.leaves(part):
            found[names[index]] = plain

    try:
        jax.tree.map(spread, specs, full, is_leaf=is_leaf)
    except (ValueError, TypeError) as error:
        raise SpecError(
            f"{what} has another structure than what it describes: {_said(error, what)}\n"
            f"Give a pytree of PartitionSpec (None for open) like the {what.split('_')[0]}puts, or a prefix:"
            f" {jax.tree.structure(full)}"
        ) from error
    return found


def _said(error: Exception, what: str) -> str:
    """Return what JAX says of two structures, on one line and in the user's words."""
    text = " ".join(str(error).split()).partition(" so the diff in the metadata")[0]
    return (
        text.removeprefix("pytree structure error: ")
        .replace("tree_map tree", what)
        .replace(" At that key path, ", ": ")
    )


def input_choices(
    given: Mapping[str, PartitionSpec],
    names: Sequence[str],
    avals: Sequence[Any],
    mesh: MeshShape,
    what: str = "annotations",
) -> tuple[dict[int, list[Layout]], list[str]]:
    """Turn specs by path into the layouts that each position may take, and notes on dims left whole.

    A dim that is `PartitionSpec.UNCONSTRAINED` stays open; a dim beyond the spec's end is whole.

    Raises:
      SpecError: a path that does not exist, or a spec that does not fit; all of them at once.
    """
    import difflib

    unknown = [path for path in given if path not in names]
    if unknown:
        lines = [
            f"{path!r}; near it: {', '.join(difflib.get_close_matches(path, names, 3, 0.3)) or 'nothing'}"
            for path in unknown
        ]
        raise SpecError(
            f"{what} name no such array:\n  "
            + "\n  ".join(lines)
            + "\nGive the whole path of one array: [i]... in argument i, out... in the result."
        )
    shapes = {n: tuple(a.shape) for n, a in zip(names, avals, strict=True)}
    require_specs(((p, s, shapes[p]) for p, s in given.items()), mesh)
    choices, notes = {}, []
    for path, spec in given.items():
        index, shape = list(names).index(path), shapes[path]
        layout, left = undivided(from_spec(spec, len(shape)), shape, mesh)
        notes += [f"{path} {n}" for n in left]
        entries = list(spec) + [None] * (len(shape) - len(spec))
        open_dims = [d for d, e in enumerate(entries) if e is PartitionSpec.UNCONSTRAINED]
        if open_dims:
            used = set(layout.axes)
            options = [
                Layout(tuple(x.dims[d] if d in open_dims else layout.dims[d] for d in range(len(shape))))
                for x in layouts(shape, mesh, even=True)
                if not any(x.dims[d] for d in range(len(shape)) if d not in open_dims)
                and not used & set(x.axes)
            ]
            choices[index] = options
        else:
            choices[index] = [layout]
    return choices, notes


def constraint_choices(block: Block, mesh: MeshShape) -> tuple[dict[Group, list[Assignment]], list[str]]:
    """Read sharding constraints and `shard_map`s inside the function as the assignments that they leave.

    Raises:
      SpecError: a constraint names an axis that the mesh lacks.
    """
    allowed: dict[Group, list[Assignment]] = {}
    notes: list[str] = []
    wrong: list[str] = []
    for item in block.walk():
        op = item.heavy
        if op is not None and op.name == "shard_map":
            try:
                given = boundary_assignment(op, mesh)
            except ValueError as error:
                wrong.append(str(error))
                continue
            allowed[item] = [{item.factors[0][f]: axes for f, axes in given.items()}]
            continue
        if op is None or op.name not in ("sharding_constraint", "reshard"):
            continue
        sharding = op.params.get("sharding", op.params.get("dst_sharding"))
        spec = getattr(sharding, "spec", None)
        shape = op.outputs[0].shape
        if spec is None:
            notes.append(f"{op.source}: a sharding constraint that is no NamedSharding is not kept")
            continue
        missing = [a for a in jax.tree.leaves(tuple(spec)) if isinstance(a, str) and a not in mesh]
        if missing:
            wrong.append(f"{op.source}: constraint {spec} names {missing}; the mesh has {dict(mesh)}")
            continue
        open_dims = set(op.params.get("unconstrained_dims") or ())
        layout, left = undivided(from_spec(spec, len(shape)), shape, mesh)
        notes += [f"{op.source}: constrained {n}" for n in left]
        options: list[Assignment] = []
        for x in layouts(shape, mesh) if open_dims else [layout]:
            dims = [x.dims[d] if d in open_dims else layout.dims[d] for d in range(len(shape))]
            flat = [a for axes in dims for a in axes]
            if len(flat) == len(set(flat)):
                options.append(
                    {
                        dim[0]: axes
                        for dim, axes in zip(item.rule.outputs[0], dims, strict=True)
                        if dim and axes
                    }
                )
        allowed[item] = options
    if wrong:
        raise SpecError("shardings inside the function do not fit the mesh:\n  " + "\n  ".join(wrong))
    return allowed, notes


def output_names(traced: Traced) -> list[str]:
    """Return names of the outputs as annotations give them: `out` and the pytree path."""
    return [f"out{name}" for name in traced.out_names]
