"""What there is to choose: the ways to split a rule's factors, or a value's dims, over a mesh."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

from autoshard.grouping import PARTIAL
from autoshard.layout import Axes, Layout, MeshShape, chunk, mesh_size
from autoshard.rules import Assignment, ShardingRule
from autoshard.rules.windowed import rings

__all__ = ["assignments", "layouts", "splits", "windowed"]

# Padding of an uneven split, as a share of the dim, above which it is not among the choices.
WASTE = 0.25


def splits(size: int, ways: int, waste: float = WASTE) -> bool:
    """Tell whether a dim is worth splitting: evenly, or with little padding."""
    return chunk(size, ways) * ways <= (1 + waste) * size


def assignments(rule: ShardingRule, mesh: MeshShape, waste: float = WASTE) -> list[Assignment]:
    """List the valid ways to split the factors of `rule`, plainest first.

    Every axis of more than one device splits one factor, or none. Axes on one factor nest in mesh order. A
    linear rule may also leave an axis on its inputs' partial sums. Uneven splits count too, where no more than
    `waste` of a factor is padding.
    """
    axes = [a for a, n in mesh.items() if n > 1]
    options = [*rule.factors] + ([PARTIAL] if rule.linear else [])
    found: list[Assignment] = []
    for picks in itertools.product([None, *options], repeat=len(axes)):
        assignment: dict[str, Axes] = {}
        for axis, factor in zip(axes, picks, strict=True):
            if factor is not None:
                assignment[factor] = (*assignment.get(factor, ()), axis)
        proper = {f: a for f, a in assignment.items() if f != PARTIAL}
        if not all(splits(rule.sizes[f], mesh_size(a, mesh), waste) for f, a in proper.items()):
            continue
        if rule.valid(proper, mesh) and not (
            assignment.get(PARTIAL) and any(m != "sum" for f, m in rule.reduce.items() if f in proper)
        ):
            found.append(assignment)
    found.sort(key=lambda a: (sum(map(len, a.values())), len(a)))
    return found


def windowed(rule: ShardingRule, options: Sequence[Assignment], mesh: MeshShape) -> list[Assignment]:
    """List the rings that a product could run, beside its plain assignments."""
    return [{**a, ring.key: (ring.axis,)} for a in options for ring in rings(rule, a, mesh)]


def layouts(
    shape: Sequence[int], mesh: MeshShape, *, even: bool = False, waste: float = WASTE
) -> list[Layout]:
    """List the ways to split an array of `shape`, plainest first; `even` for arrays that cross `jax.jit`."""
    return list(_layouts(tuple(shape), tuple(mesh.items()), even, waste))


@lru_cache(maxsize=4096)
def _layouts(
    shape: tuple[int, ...], mesh: tuple[tuple[str, int], ...], even: bool, waste: float
) -> tuple[Layout, ...]:
    names = tuple(f"d{i}" for i in range(len(shape)))
    dims = tuple((f,) if n > 1 else () for f, n in zip(names, shape, strict=True))
    rule = ShardingRule(
        inputs=(),
        outputs=(dims,),
        sizes=dict(zip(names, shape, strict=True)),
        even=frozenset(names if even else ()),
    )
    return tuple(rule.layout(dims, a) for a in assignments(rule, dict(mesh), waste))
