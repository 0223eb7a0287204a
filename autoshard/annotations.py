"""A person's own shardings: read, checked against shapes and mesh, and turned into what may be chosen.

`pins` reads annotations by key, and the constraints in the function, as what they fix: axes per dim of a value
or an output, axes per factor of a group. Completion starts from them; the search leaves out whatever differs.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.boundary import boundaries, free_axes
from autoshard.choices import assignments, layouts
from autoshard.errors import SpecError
from autoshard.grouping import Block, Group
from autoshard.layout import Axes, Layout, MeshShape, from_spec, mesh_size, require_specs, to_spec, undivided
from autoshard.places import Places, Site
from autoshard.program import Value
from autoshard.rules import Assignment, Kind, ShardingRule
from autoshard.rules.rule import Dims
from autoshard.trace import Traced

__all__ = ["Given", "Pins", "assignment_choices", "deal", "layout_choices", "pins", "specs_by_path"]

# Axes per dim; None where the dim is open.
Given = tuple[Axes | None, ...]


@dataclass(frozen=True, kw_only=True)
class Pins:
    """What is fixed, by what decides it: values, outputs by position, and the factors of groups.

    A value in `held` leaves its group as it is pinned, or as partial sums that are reduced to that.
    """

    values: dict[Value, Given] = field(default_factory=dict)
    outputs: dict[int, Given] = field(default_factory=dict)
    groups: dict[Group, dict[str, Axes]] = field(default_factory=dict)
    held: set[Value] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


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


def pins(
    traced: Traced,
    block: Block,
    mesh: MeshShape,
    given: Mapping[str, PartitionSpec],
    what: str = "annotations",
) -> Pins:
    """Read specs by key, and the constraints in the function.

    A key is the pytree path of an input or, behind `out`, of a result; or what `autoshard.places` reads: a
    checkpoint name, a source line. A dim that is `PartitionSpec.UNCONSTRAINED` stays open; a dim beyond the
    spec's end is whole, and so is one that its axes do not divide, with a note.

    Raises:
      SpecError: a key that names nothing, or a spec that does not fit; all of them at once.
    """
    reader = _Reader(traced, block, mesh)
    targets = reader.targets(given, what)
    require_specs(((name, spec, shape) for name, spec, shape, _ in targets), mesh)
    for name, spec, shape, target in targets:
        reader.pin(name, spec, shape, target)
    for item in block.walk():
        reader.constraint(item)
    reader.require()
    return reader.pins


_Target = Site | int  # a value inside, or an output by position


class _Reader:
    """Collects pins, and all that is wrong with them."""

    def __init__(self, traced: Traced, block: Block, mesh: MeshShape) -> None:
        self.block, self.mesh = block, mesh
        self.inputs = dict(zip(traced.in_names, block.inputs, strict=True))
        self.outputs = {name: j for j, name in enumerate(output_names(traced))}
        self.shapes = [tuple(a.shape) for a in traced.out_avals]
        self.pins = Pins()
        self.leaving = {
            value: crossing
            for item in block.walk()
            if item.kind is Kind.CONTROL
            for _, _, value, crossing in boundaries(item).yields
        }
        self.wrong: list[str] = []
        self.fixed: dict[tuple[Any, str], tuple[Any, str]] = {}

    # Keys -----------------------------------------------------------------------------------------

    def targets(
        self, given: Mapping[str, PartitionSpec], what: str
    ) -> list[tuple[str, PartitionSpec, tuple[int, ...], _Target]]:
        """Find what each key names: (name for messages, spec, shape, target)."""
        found: list[tuple[str, PartitionSpec, tuple[int, ...], _Target]] = []
        unknown = []
        inside = [key for key in given if key not in self.inputs and key not in self.outputs]
        places = Places(self.block) if inside else None
        for key, spec in given.items():
            if key in self.inputs:
                value = self.inputs[key]
                found.append((key, spec, value.shape, Site(value=value)))
            elif key in self.outputs:
                found.append((key, spec, self.shapes[self.outputs[key]], self.outputs[key]))
            elif places is not None and (sites := places.find(key)):
                found += [(f"{key} ({site.text})", spec, site.value.shape, site) for site in sites]
                self.pins.notes.append(f"{key} pins {_counted([site.text for site in sites])}")
            elif places is not None:
                paths = difflib.get_close_matches(key, [*self.inputs, *self.outputs], 3, 0.3)
                near = [*paths, *places.near(key)]
                unknown.append(f"{key!r}; near it: {', '.join(near) or 'nothing'}")
        if unknown:
            raise SpecError(
                f"{what} name no such array:\n  "
                + "\n  ".join(unknown)
                + "\nGive the whole path of one array: [i]... in argument i, out... in the result; or name:... for a"
                " checkpoint_name, or file.py:line[:primitive] for what is made there."
            )
        return found

    # Pinning --------------------------------------------------------------------------------------

    def pin(self, name: str, spec: PartitionSpec, shape: tuple[int, ...], target: _Target) -> None:
        """Pin what a key names."""
        dims = self._dims(name, spec, shape)
        if isinstance(target, int):
            self.pins.outputs[target] = dims
            return
        manual = target.value.manual.intersection(a for axes in dims for a in axes or ())
        if manual:
            self.wrong.append(f"{name}: {'*'.join(sorted(manual))} is manual in the shard_map around it")
        elif target.group is None:
            self._once(target.value, "", dims, name)
            self._crosses(target.value, dims, name)
            self.pins.values[target.value] = dims
        else:
            self._group(target.group, target.dims, dims, name)
            self.pins.held.add(target.value)
            for copy in target.copies:
                self._group(copy, copy.rule.outputs[0], dims, name)

    def _dims(self, name: str, spec: PartitionSpec, shape: tuple[int, ...]) -> Given:
        entries = [*spec, *[None] * (len(shape) - len(spec))]
        layout, left = undivided(from_spec(spec, len(shape)), shape, self.mesh)
        self.pins.notes.extend(f"{name} {note}" for note in left)
        return tuple(
            None if e is PartitionSpec.UNCONSTRAINED else axes
            for e, axes in zip(entries, layout.dims, strict=True)
        )

    def _group(self, item: Group, dims: Dims, given: Given, name: str) -> None:
        """Fix the factors of a group that split a value of these dims."""
        fixed = self.pins.groups.setdefault(item, {})
        for dim, axes in zip(dims, given, strict=True):
            if axes is None:
                continue
            parts = deal(axes, dim, item.rule.sizes, self.mesh)
            if sum(map(len, parts.values())) < len(axes):
                self.wrong.append(f"{name}: {item.title} cannot split that dim over {'*'.join(axes)}")
            for factor in dim:
                part = parts.get(factor, ())
                self._once(item, factor, part, name)
                fixed[factor] = part

    def _crosses(self, value: Value, given: Given, name: str) -> None:
        """Check that a loop can stack, or a `shard_map` return, a value as it is pinned."""
        if value in self.leaving:
            found = self.leaving[value].fitted(Layout(tuple(axes or () for axes in given))).dims
            if any(axes is not None and axes != x for axes, x in zip(given, found, strict=True)):
                self.wrong.append(
                    f"{name}: leaving its loop or shard_map it can be {to_spec(Layout(found))} instead"
                )

    def _once(self, owner: Value | Group, factor: str, axes: Any, name: str) -> None:
        """Note down who fixed what; two must agree."""
        known, first = self.fixed.setdefault((owner, factor), (axes, name))
        if known != axes:
            self.wrong.append(
                f"{first} and {name}: one array, or two of one kernel, cannot be split both ways"
            )

    # Constraints in the function ------------------------------------------------------------------

    def constraint(self, item: Group) -> None:
        """Read a sharding constraint or a `shard_map`."""
        op = item.heavy
        if op is None:
            return
        if op.name == "shard_map":
            own = dict(op.params["mesh"])
            if any(self.mesh.get(a) != n for a, n in own.items()):
                self.wrong.append(
                    f"{op.source}: the shard_map inside the function is over the mesh {own}; the plan's mesh is"
                    f" {dict(self.mesh)}. Plan on a mesh that has its axes, with the same sizes."
                )
        if op.name not in ("sharding_constraint", "reshard"):
            return
        sharding = op.params.get("sharding", op.params.get("dst_sharding"))
        spec = getattr(sharding, "spec", None)
        if spec is None:
            self.pins.notes.append(f"{op.source}: a sharding constraint that is no NamedSharding is not kept")
            return
        missing = [a for a in jax.tree.leaves(tuple(spec)) if isinstance(a, str) and a not in self.mesh]
        if missing:
            self.wrong.append(
                f"{op.source}: constraint {spec} names {missing}; the mesh has {dict(self.mesh)}"
            )
            return
        open_dims = op.params.get("unconstrained_dims") or ()
        dims = self._dims(f"{op.source}: constrained", spec, op.outputs[0].shape)
        dims = tuple(None if d in open_dims else axes for d, axes in enumerate(dims))
        self._group(item, item.rule.outputs[0], dims, f"the constraint at {op.source}")

    def require(self) -> None:
        """Raise one error of all that is wrong."""
        if self.wrong:
            lines = "\n  ".join(dict.fromkeys(self.wrong))
            raise SpecError(f"shardings inside the function do not fit:\n  {lines}")
        for item, fixed in self.pins.groups.items():
            if not assignment_choices(item.rule, fixed, free_axes(self.mesh, item.manual)):
                names = " and ".join(dict.fromkeys(self.fixed[item, f][1] for f in fixed))
                raise SpecError(f"{names}: {item.title} cannot be computed so, split by its rule {item.rule}")


def _counted(texts: Sequence[str]) -> str:
    """Count equal texts."""
    counts = {text: texts.count(text) for text in texts}
    return ", ".join(f"{n} x {text}" if n > 1 else text for text, n in counts.items())


def deal(axes: Axes, factors: tuple[str, ...], sizes: Mapping[str, int], mesh: MeshShape) -> dict[str, Axes]:
    """Deal the axes of a dim out to its factors, major first."""
    found: dict[str, Axes] = {}
    rest = list(axes)
    for factor in factors:
        part: list[str] = []
        while rest and sizes[factor] % mesh_size([*part, rest[0]], mesh) == 0:
            part.append(rest.pop(0))
        if part:
            found[factor] = tuple(part)
        if mesh_size(part, mesh) != sizes[factor]:
            break
    return found


# What is left to choose ---------------------------------------------------------------------------------


def layout_choices(given: Given, shape: Sequence[int], mesh: MeshShape) -> list[Layout]:
    """List the layouts of an array of `shape` that keep what is given, plainest first."""
    return [
        Layout(tuple(x if axes is None else axes for x, axes in zip(found.dims, given, strict=True)))
        for found in layouts(shape, mesh, even=True)
        if all(axes is None or set(x) == set(axes) for x, axes in zip(found.dims, given, strict=True))
    ]


def assignment_choices(rule: ShardingRule, given: Assignment, mesh: MeshShape) -> list[Assignment]:
    """List the ways to split the factors of `rule` that keep what is given, plainest first."""
    fixed = {factor: axes for factor, axes in given.items() if axes}
    return [
        {**found, **fixed}
        for found in assignments(rule, mesh)
        if all(set(found.get(factor, ())) == set(axes) for factor, axes in given.items())
    ]


def output_names(traced: Traced) -> list[str]:
    """Return names of the outputs as annotations give them: `out` and the pytree path."""
    return [f"out{name}" for name in traced.out_names]
