"""Recipes: what a known way of sharding lets each array and each group of ops do.

A recipe is a list of wishes about a `Site`, an array or a group of ops whose dims have roles. Of the
possible splits those are kept that meet the first wish, of these those that meet the second, and so on; a
wish that nothing meets is passed over. What is left open, the search decides: so a baseline is the best
completion of the known idea, with the constraints on activations that an expert would write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.grouping import PARTIAL, Group
from autoshard.layout import Axes, MeshShape, mesh_size
from autoshard.program import Value
from autoshard.roles import PRODUCTS, Roles
from autoshard.rules import Assignment

__all__ = [
    "Recipe",
    "Site",
    "Wish",
    "batch_parallel",
    "keep",
    "site_of_group",
    "site_of_value",
    "tensor_parallel",
]

_HEAVY = PRODUCTS | {"gather", "scatter-add", "scatter_add"}


@dataclass(frozen=True, kw_only=True)
class Site:
    """An array or a group of ops, as recipes see it: its factors by role.

    Attributes:
      batch, inner, outer, scanned: the factors of each role that may be split.
      sizes: extents of all factors.
      product: whether a product or a lookup is computed here.
      stacked: whether it holds all layers at once.
      rank: number of factors that are not scanned; 1 for what is a vector in each layer.
      kind: for the inputs "data", "parameter" or "state"; "reading" for what is a parameter but for casts,
        copies and loops; "operand" for a copy that only products read; otherwise "group" or "value".
    """

    batch: tuple[str, ...]
    inner: tuple[str, ...]
    outer: tuple[str, ...]
    scanned: tuple[str, ...]
    sizes: Mapping[str, int]
    product: bool
    stacked: bool
    rank: int
    kind: str

    @property
    def activation(self) -> bool:
        """Whether it has one row per example."""
        return bool(self.batch)

    def splits(self, factors: Sequence[str], axes: Axes, mesh: MeshShape) -> tuple[str, ...]:
        """Those of `factors` that `axes` split evenly."""
        return tuple(f for f in factors if self.sizes[f] % mesh_size(axes, mesh) == 0)


Wish = Callable[[Site, Assignment], bool]
Recipe = Sequence[Wish]


def is_product(item: Group) -> bool:
    """Tell a product, convolution or lookup."""
    return any(op.name in _HEAVY for op in item.ops)


def site_of_group(item: Group, roles: Roles, readers: Sequence[Group] = ()) -> Site:
    """Describe a group of ops; a copy that only products read is their operand, gathered once for all."""
    classes = roles.dimensions.of_group(item)
    sizes = {f: item.rule.sizes[f] for f in item.rule.factors}
    reading = all(v in roles.readings for v in (*item.inputs, *item.outputs))
    if item.is_copy and readers and all(map(is_product, readers)):
        return _site(classes, sizes, roles, False, "operand")
    return _site(classes, sizes, roles, is_product(item), "reading" if reading else "group")


def site_of_value(value: Value, roles: Roles, kind: str = "") -> Site:
    """Describe an array; its factors are called d0, d1, ... as its dims."""
    kind = kind or ("reading" if value in roles.readings else "value")
    classes = {f"d{d}": c for d, c in enumerate(roles.dimensions.of_value(value)) if c is not None}
    sizes = {f"d{d}": n for d, n in enumerate(value.shape) if n > 1}
    return _site(classes, sizes, roles, False, kind)


def _site(
    classes: Mapping[str, int], sizes: Mapping[str, int], roles: Roles, product: bool, kind: str
) -> Site:
    def of(members: Any) -> tuple[str, ...]:
        return tuple(f for f in sizes if classes.get(f) in members)

    scanned = of(roles.dimensions.scanned)
    return Site(
        batch=of({roles.batch} - {None}),
        inner=of(roles.inner),
        outer=of(roles.outer),
        scanned=scanned,
        sizes=sizes,
        product=product,
        stacked=bool(scanned),
        rank=sum(1 for f, n in sizes.items() if n > 1 and f not in scanned),
        kind=kind,
    )


def keep(options: Sequence[Assignment], site: Site, recipe: Recipe) -> list[Assignment]:
    """Apply a recipe's wishes in turn, passing over those that no option meets."""
    left = list(options)
    for wish in recipe:
        left = [a for a in left if wish(site, a)] or left
    return left


def _split_axes(assignment: Assignment, factors: Sequence[str] | None = None) -> set[str]:
    """Axes that split dims (of some factors)."""
    names = [f for f in assignment if f != PARTIAL] if factors is None else factors
    return {a for f in names for a in assignment.get(f, ())}


def _used(assignment: Assignment) -> set[str]:
    return {a for axes in assignment.values() for a in axes}


def _layers_whole(site: Site, assignment: Assignment) -> bool:
    return not _split_axes(assignment, site.scanned)


def batch_parallel(mesh: MeshShape, batch: Axes, shards: Callable[[Site], str]) -> Recipe:
    """Every device works on its own examples with all of the weights.

    Args:
      mesh: axis name to size.
      batch: the axes that split the batch.
      shards: says of an array or group without examples whether it is "whole", is "sharded" over all
        axes, or is "open" to either. Vectors stay whole: gathering one costs more than it saves.
    """
    all_axes = {a for a, n in mesh.items() if n > 1}

    def examples(site: Site, a: Assignment) -> bool:
        return not site.activation or any(a.get(f, ()) == batch for f in site.batch)

    def nothing_else(site: Site, a: Assignment) -> bool:
        return not site.activation or _used(a) == set(batch)

    def storage(site: Site, a: Assignment) -> bool:
        if site.activation:
            return True
        want = "whole" if site.rank < 2 and site.kind in ("parameter", "state") else shards(site)
        split = _split_axes(a)
        if want == "whole":
            return not split
        return split == all_axes or (want == "open" and not split)

    def one_dim(site: Site, a: Assignment) -> bool:
        return site.activation or sum(1 for f, axes in a.items() if f != PARTIAL and axes) <= 1

    return [_layers_whole, examples, nothing_else, lambda s, a: storage(s, a) and one_dim(s, a), storage]


def tensor_parallel(
    mesh: MeshShape, batch: Axes, model: Axes, *, residual: Axes = (), stored: Axes = ()
) -> Recipe:
    """Pairs of products split along the features between them.

    Args:
      mesh: axis name to size.
      batch: the axes that split the batch.
      model: the axes that split inner features, in weights, in products and in activations.
      residual: the axes that split the residual stream between the pairs.
      stored: the axes that further split the outer features of weights where they are stored.
    """

    def examples(site: Site, a: Assignment) -> bool:
        return not site.activation or any(a.get(f, ()) == batch for f in site.batch)

    def batch_axes_only_there(site: Site, a: Assignment) -> bool:
        elsewhere = [f for f in a if f != PARTIAL and f not in site.batch]
        if not site.activation:
            elsewhere = [f for f in elsewhere if f not in site.outer or not set(a[f]) <= set(stored)]
        return not _split_axes(a, elsewhere) & (set(batch) | set(stored))

    def inner(site: Site, a: Assignment) -> bool:
        possible = site.splits(site.inner, model, mesh)
        return not possible or any(a.get(f, ()) == model for f in possible)

    def not_instead(site: Site, a: Assignment) -> bool:
        """Where the inner features do not divide (few key-value heads), the outer ones are no stand-in."""
        stuck = bool(site.inner) and not site.splits(site.inner, model, mesh)
        return not stuck or not _split_axes(a, site.outer) & set(model)

    def between(site: Site, a: Assignment) -> bool:
        if site.splits(site.inner, model, mesh) or not site.outer or site.product or site.kind == "operand":
            return True
        if not site.activation:
            return site.rank > 1 or not _split_axes(a) - set(residual)
        others = [f for f in a if f not in (PARTIAL, *site.outer)]
        split = [a.get(f, ()) for f in site.outer if a.get(f)]
        return split == ([residual] if residual else []) and not _split_axes(a, others) & set(model)

    def storage(site: Site, a: Assignment) -> bool:
        held = site.kind in ("parameter", "state") or site.stacked
        possible = site.splits(site.outer, stored, mesh)
        if site.activation or not held or not stored or site.rank < 2 or not possible:
            return True
        return any(a.get(f, ()) == stored for f in possible)

    return [_layers_whole, examples, batch_axes_only_there, inner, not_instead, between, storage]
