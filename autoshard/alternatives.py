"""The next best plans: each the best of those that differ from all before it in how arguments are split.

A plan found is excluded from the problem by a constraint, and the problem is solved again; so each alternative
has a bound of its own, over all plans that the search admits and that differ from those before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from autoshard.errors import SpecError
from autoshard.layout import Layout
from autoshard.solving import Request, request_of, solve

if TYPE_CHECKING:
    from autoshard.model import Model
    from autoshard.plan import Plan

__all__ = ["alternatives"]


_BY: Mapping[str, Callable[[Layout], object]] = {
    "layouts": lambda layout: layout,
    "axes": lambda layout: frozenset(a for axes in layout.dims for a in axes),
}


def alternatives(
    plan: Plan, count: int, among: Sequence[str] | None = None, by: str = "layouts"
) -> tuple[Plan, ...]:
    """Find the best plans after `plan`; see `Plan.alternatives`."""
    if by not in _BY:
        raise SpecError(f"plans cannot be told apart by {by!r}; choose from {', '.join(map(repr, _BY))}.")
    request = request_of(plan)
    model, _ = request.stated
    known = plan
    found: list[Plan] = []
    which = _inputs(plan, among)
    while len(found) < count:
        narrowed = _differing(request, model, known, which, _BY[by])
        if narrowed is None:
            break
        model = narrowed
        another = solve(request, model, name=f"alternative {len(found) + 1}")
        if another is None or (plan.fits and not another.fits):
            break
        known = another
        found.append(another)
    return tuple(sorted(found, key=lambda p: p.step_seconds))


def _inputs(plan: Plan, among: Sequence[str] | None) -> list[int]:
    """Return the positions of the inputs in which plans must differ."""
    paths = [leaf.path for leaf in plan.inputs]
    if among is None:
        return list(range(len(paths)))
    unknown = [p for p in among if not any(path.startswith(p) for path in paths)]
    if unknown:
        raise SpecError(
            f"among names {', '.join(map(repr, unknown))}, and no argument's path begins so. Paths are such as"
            f" {', '.join(map(repr, paths[:3]))}."
        )
    return [i for i, path in enumerate(paths) if path.startswith(tuple(among))]


def _differing(
    request: Request, model: Model, plan: Plan, which: Sequence[int], seen: Callable[[Layout], object]
) -> Model | None:
    """Exclude the plans whose inputs look as those of `plan`; None where that excludes all."""
    values = request.session.source.block.inputs
    alike: dict[int, list[int]] = {}
    for i in which:
        node = model.decided(values[i])
        assert node is not None  # every input is decided by itself
        looks = [seen(x) for x in model.nodes[node].strategies]
        same = [s for s, look in enumerate(looks) if look == seen(plan.input_layouts[i])]
        if not same:
            return model  # no plan of the search looks so
        if len(same) < len(looks):
            alike[model.class_of[node]] = same
    return model.differing(alike) if alike else None
