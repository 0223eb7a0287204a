"""A few annotations from which completion finds a plan again: what a person writes into their own code.

Arguments and results are annotated where completion differs most from the plan; where these do not do, all places
inside the function are, too. Then parts of the annotations are left out as long as completion finds the plan. So
none of those that are left can be left out, but a smaller set of others may exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec

from autoshard.annotations import output_names, pins
from autoshard.errors import SpecError
from autoshard.layout import Layout, to_spec
from autoshard.partition.emitter import Decisions
from autoshard.places import Places, Site
from autoshard.program import aval_of, shape_of, value_bytes
from autoshard.propagate import complete
from autoshard.session import Session, decisions_of
from autoshard.solving import request_of

if TYPE_CHECKING:
    from autoshard.plan import Plan

__all__ = ["Minimal", "minimal"]

# A completed program whose step takes at most this share longer counts as the plan.
TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Minimal:
    """An answer to `Plan.minimal`.

    Attributes:
      plan: the plan to find again.
      annotations: specs by key, as `autoshard.suggest` and `autoshard.evaluate` take them.
      completed: what completion makes of them.
      found: whether that is the plan: arguments and results alike, and a step within 0.1 %.
    """

    plan: Plan
    annotations: Mapping[str, PartitionSpec]
    completed: Plan
    found: bool

    @property
    def in_specs(self) -> Any:
        """The specs of arguments, as a pytree like them with None where completion decides; by path without one."""
        return self._tree([leaf.path for leaf in self.plan.inputs], self.plan.in_tree)

    @property
    def out_specs(self) -> Any:
        """The same for the results."""
        return self._tree([f"out{leaf.path}" for leaf in self.plan.outputs], self.plan.out_tree)

    def _tree(self, keys: list[str], tree: Any) -> Any:
        if tree is None:
            return {key: self.annotations[key] for key in keys if key in self.annotations}
        return jax.tree.unflatten(tree, [self.annotations.get(key) for key in keys])

    @property
    def inside(self) -> dict[str, PartitionSpec]:
        """The specs of what is made inside the function, by checkpoint name or source line."""
        paths = {leaf.path for leaf in self.plan.inputs} | {f"out{leaf.path}" for leaf in self.plan.outputs}
        return {key: spec for key, spec in self.annotations.items() if key not in paths}

    def __str__(self) -> str:
        from autoshard.report.answers import annotation_code

        return annotation_code(self)


def minimal(plan: Plan) -> Minimal:
    """Find annotations that completion turns into a plan; see `Plan.minimal`."""
    return _Search(plan, request_of(plan).session).answer()


_Specs = dict[str, PartitionSpec]


class _Search:
    """A plan, and what completion makes of some annotations in its place."""

    def __init__(self, plan: Plan, session: Session) -> None:
        self.plan, self.session = plan, session
        self.tolerance = TOLERANCE
        source = session.source
        self.block = source.block
        self.target = decisions_of(plan, self.block)
        self._known: dict[tuple[Any, ...], Decisions] = {}
        self._plans: dict[int, Plan] = {}
        inputs = zip(source.traced.in_names, self.block.inputs, plan.input_layouts, strict=True)
        outputs = zip(output_names(source.traced), self.block.outputs, plan.output_layouts, strict=True)
        self.ends: list[tuple[str, Layout, float]] = [
            *((key, x, value_bytes(v.shape, v.dtype)) for key, v, x in inputs),
            *((key, x, value_bytes(shape_of(v), aval_of(v).dtype)) for key, v, x in outputs),
        ]

    # Completion -----------------------------------------------------------------------------------

    def decisions(self, specs: _Specs) -> Decisions:
        """Complete annotations."""
        key = tuple(specs.items())
        if key not in self._known:
            self._known[key] = complete(self.session, specs)[0]
        return self._known[key]

    def completed(self, specs: _Specs) -> Plan:
        """Complete annotations to a plan, with its price."""
        decisions = self.decisions(specs)
        if id(decisions) not in self._plans:
            limit = self.plan.memory_limit_bytes
            self._plans[id(decisions)] = self.session.plan(
                "completed", decisions, gap=None, lower_bound_seconds=None, memory_limit_bytes=limit
            )
        return self._plans[id(decisions)]

    def differing(self, specs: _Specs) -> list[str]:
        """List the arguments and results that completion lays out otherwise, those of most bytes first."""
        decisions = self.decisions(specs)
        layouts = [*(decisions.layouts[v] for v in self.block.inputs), *decisions.outputs]
        wrong = [
            (size, key)
            for (key, layout, size), found in zip(self.ends, layouts, strict=True)
            if found != layout
        ]
        return [key for _, key in sorted(wrong, key=lambda item: -item[0])]

    def reproduces(self, specs: _Specs) -> bool:
        """Tell whether completion finds the plan again."""
        if self.differing(specs):
            return False
        completed = self.completed(specs)
        return completed.fits >= self.plan.fits and self.excess(specs) <= self.tolerance

    def excess(self, specs: _Specs) -> float:
        """By which share the completed step takes longer."""
        own = self.plan.step_seconds
        return (self.completed(specs).step_seconds - own) / own if own else 0.0

    # Adding and leaving out -----------------------------------------------------------------------

    def found(self) -> _Specs:
        """Add annotations until completion finds the plan, and leave out what is not needed."""
        ends = self.of_ends()
        if self.reproduces(ends):
            return self.reduced(ends)
        follow = {self.ends[len(self.block.inputs) + j][0] for j in self.session.source.state}
        specs = self.with_inside({key: to_spec(x) for key, x, _ in self.ends if key not in follow})
        if self.excess(specs) > self.excess(ends) or self.completed(specs).fits < self.plan.fits:
            specs = ends
        self.tolerance = max(self.tolerance, self.excess(specs))
        return self.reduced(dict(reversed(specs.items())))

    def of_ends(self) -> _Specs:
        """Add annotations of arguments and results until they are as planned."""
        specs: _Specs = {}
        layouts = {key: layout for key, layout, _ in self.ends}
        while wrong := [key for key in self.differing(specs) if key not in specs]:
            specs[wrong[0]] = to_spec(layouts[wrong[0]])
        return specs

    def with_inside(self, specs: _Specs) -> _Specs:
        """Add annotations of all places inside that can be annotated as planned."""
        source = self.session.source
        for key, spec in self.places():
            more = {**specs, key: spec}
            try:
                pins(source.traced, self.block, self.session.machine.mesh, more)
            except SpecError:  # one of two arrays of one kernel, or what a loop cannot stack so
                continue
            specs = more
        return specs

    def places(self) -> Iterator[tuple[str, PartitionSpec]]:
        """Yield keys of what is inside, with its spec, where the plan splits all that a key names alike."""
        places = Places(self.block)
        for key in places.keys():
            specs = {to_spec(_layout(site, self.target)) for site in places.find(key)}
            if len(specs) == 1:
                yield key, specs.pop()

    def reduced(self, specs: _Specs) -> _Specs:
        """Leave out what is not needed: first half of it, then ever smaller parts, at last one by one."""
        size = len(specs)
        while size:
            size = (size + 1) // 2
            keys, before = list(specs), len(specs)
            for part in (keys[i : i + size] for i in range(0, len(keys), size)):
                fewer = {k: spec for k, spec in specs.items() if k not in part}
                if self.reproduces(fewer):
                    specs = fewer
                    self.tolerance = max(TOLERANCE, min(self.tolerance, self.excess(specs)))
            if size == 1 and len(specs) == before:
                break
        return specs

    def answer(self) -> Minimal:
        """Return what is found; `found` holds it against the plan without any allowance."""
        specs = self.found()
        self.tolerance = TOLERANCE
        order = {key: i for i, (key, _, _) in enumerate(self.ends)}
        return Minimal(
            plan=self.plan,
            annotations=dict(sorted(specs.items(), key=lambda item: order.get(item[0], len(order)))),
            completed=self.completed(specs),
            found=self.reproduces(specs),
        )


def _layout(site: Site, decisions: Decisions) -> Layout:
    """Layout of what is made at a site, partial sums reduced."""
    if site.group is None:
        return decisions.layouts[site.value]
    return site.group.rule.layout(site.dims, decisions.assignments[site.group])
