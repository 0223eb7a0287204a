"""A program on a mesh with the roles of its dims, and the search problem that a recipe makes of it.

Between the recipes, which know sites and roles, and the search, which knows groups and layouts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from autoshard.annotations import assignment_choices, pins
from autoshard.boundary import deciding_values, free_axes
from autoshard.choices import layouts
from autoshard.errors import AutoshardError
from autoshard.grouping import Group
from autoshard.layout import Axes, Layout, mesh_size, replicated
from autoshard.model import Model
from autoshard.program import Value
from autoshard.recipes import Recipe, Site, keep, site_of_group, site_of_value
from autoshard.roles import Roles
from autoshard.rules import Kind
from autoshard.session import Session
from autoshard.strategies import build_model

__all__ = ["BaselineError", "Study"]


class BaselineError(AutoshardError, ValueError):
    """A baseline makes no sense for the program or the mesh, or there is none of that name."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Study:
    """A program on a mesh with the roles of its dims: what baselines are made from."""

    session: Session

    @cached_property
    def roles(self) -> Roles:
        """Roles of the dims; the same on every mesh."""
        return Roles.of(self.session.source)

    @property
    def axes(self) -> Axes:
        """Mesh axes of more than one device."""
        return tuple(a for a, n in self.session.machine.mesh.items() if n > 1)

    @cached_property
    def batch_size(self) -> int:
        """Extent of the batch; 1 without."""
        values = self.roles.dimensions.values
        sizes = [
            v.shape[d]
            for v in self.session.source.block.inputs
            for d in range(len(v.shape))
            if values.get((v, d), -1) == self.roles.batch
        ]
        return min(sizes, default=1)

    def batch_axes(self, axes: Axes) -> tuple[Axes, list[str]]:
        """Those of `axes` that the batch can be split over, and a note if not all.

        Raises:
          BaselineError: there is no batch, or no axis divides it.
        """
        mesh = self.session.machine.mesh
        if not axes:
            return (), []
        if self.roles.batch is None:
            raise BaselineError(
                "there is no batch: no dim of the data runs through the products without being a weight's,"
                " being scanned or meeting itself in one array"
            )
        subsets = (c for n in range(len(axes), -1, -1) for c in itertools.combinations(axes, n))
        possible = [c for c in subsets if self.batch_size % mesh_size(c, mesh) == 0]
        taken = max(possible, key=lambda c: mesh_size(c, mesh))
        if not taken:
            raise BaselineError(f"no mesh axis of {dict(mesh)} divides the batch of {self.batch_size}")
        left = [a for a in axes if a not in taken]
        notes = (
            [f"the batch of {self.batch_size} is not split over {', '.join(left)}: not divisible"]
            if left
            else []
        )
        return taken, notes

    def model(self, recipe: Recipe) -> Model:
        """State the search problem of a recipe."""
        source, mesh = self.session.source, self.session.machine.mesh
        block, roles = source.block, self.roles
        mapped = {v for item in block.walk() if item.title == "shard_map" for v in item.outputs}
        pinned = {
            v: self._layouts(v, site_of_value(v, roles), recipe)
            for v in deciding_values(block)
            if v not in mapped
        }
        for i, value in enumerate(block.inputs):
            kind = "parameter" if i in roles.parameters else "state" if i in roles.state else "data"
            pinned[value] = self._layouts(value, site_of_value(value, roles, kind), recipe)
        given = pins(source.traced, block, mesh, {}).groups
        allowed = {}
        readers: dict[Value, list[Group]] = defaultdict(list)
        for item in block.walk():
            for value in item.inputs:
                readers[value].append(item)
        for item in block.walk():
            if item.kind not in (Kind.CONTROL, Kind.IDENTITY):
                options = assignment_choices(item.rule, given.get(item, {}), free_axes(mesh, item.manual))
                site = site_of_group(item, roles, [r for v in item.outputs for r in readers[v]])
                allowed[item] = keep(options, site, recipe)
        return build_model(
            block,
            self.session.resharder,
            fusions=self.session.fusions,
            pinned=pinned,
            pinned_outputs={
                j: self._layouts(atom, site_of_value(atom, roles), recipe)
                for j, atom in enumerate(block.outputs)
                if isinstance(atom, Value) and j not in source.state
            },
            allowed=allowed,
            state=source.state,
            donated=source.donated,
            loop_trips=self.session.loop_trips,
        )

    def _layouts(self, value: Value, site: Site, recipe: Recipe) -> list[Layout]:
        """Layouts that a recipe leaves to an array."""
        if site.kind == "data" and not site.activation:
            return [replicated(len(value.shape))]
        mesh = free_axes(self.session.machine.mesh, value.manual)
        found = {x.dims: x for x in layouts(value.shape, mesh, even=True)}
        options = [{f"d{d}": axes for d, axes in enumerate(key) if axes} for key in found]
        if site.kind == "data":  # the data come split by examples only, whatever is computed with them
            options = [a for a in options if set(a) <= set(site.batch)]
        return [
            found[tuple(a.get(f"d{d}", ()) for d in range(len(value.shape)))]
            for a in keep(options, site, recipe)
        ]
