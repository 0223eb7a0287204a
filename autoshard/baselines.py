"""Baselines: the ways of sharding that people use, made for any program from its structure.

A baseline pins the inputs and says what each group of ops may do (`autoshard.recipes`), by the roles of dims
(`autoshard.roles`) and never by names; the search, with the same prices as `suggest`, completes it. So each
is the plan that an expert would write, and the plan that `suggest` finds can be held against it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import cost_models as cm
import search
from autoshard.layout import Axes
from autoshard.meshes import resolve_topology
from autoshard.plan import Plan
from autoshard.recipes import Recipe, Site, batch_parallel, site_of_value, tensor_parallel
from autoshard.session import Session, Source
from autoshard.study import BaselineError, Study

__all__ = ["BASELINES", "Baseline", "BaselineError", "Baselines", "Study", "baseline", "baselines"]


class Baselines(dict[str, Plan]):
    """Plans by name, in the order of the registry; `left_out` says why the others do not apply."""

    def __init__(self, plans: Mapping[str, Plan], left_out: Mapping[str, str]) -> None:
        super().__init__(plans)
        self.left_out = MappingProxyType(dict(left_out))


Made = tuple[Recipe, list[str]]


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A known way of sharding: its name, what it does in a sentence, where it is described, how it is made.

    `recipe(study)` returns wishes and notes, or raises BaselineError where the idea does not apply.
    """

    name: str
    summary: str
    reference: str
    recipe: Callable[[Study], Made]


def _replicated(study: Study) -> Made:
    return [lambda site, assignment: not any(assignment.values())], []


def _data_parallel(study: Study) -> Made:
    batch, notes = study.batch_axes(study.axes)
    return batch_parallel(study.session.machine.mesh, batch, lambda site: "whole"), notes


def _weight_update_sharding(study: Study) -> Made:
    source, roles = study.session.source, study.roles
    extra = [i for i in roles.state - roles.parameters if i in source.state.values()]
    sites = [site_of_value(source.block.inputs[i], roles) for i in extra]
    if not any(site.rank > 1 and not site.activation for site in sites):
        raise BaselineError(
            "there is no optimizer state to shard: no result but weights and vectors comes back"
        )
    batch, notes = study.batch_axes(study.axes)
    kinds = {"parameter": "whole", "reading": "whole", "state": "sharded"}
    return batch_parallel(study.session.machine.mesh, batch, lambda s: kinds.get(s.kind, "open")), notes


def _fsdp(study: Study) -> Made:
    _require_weights(study)
    batch, notes = study.batch_axes(study.axes)

    def shards(site: Site) -> str:
        return (
            "sharded" if site.kind in ("parameter", "state") or (site.stacked and site.rank > 1) else "open"
        )

    return batch_parallel(study.session.machine.mesh, batch, shards), notes


def _megatron(study: Study) -> Made:
    model = study.axes[-1:]
    _require_pairs(study, model)
    batch, notes = study.batch_axes(study.axes[:-1])
    return tensor_parallel(study.session.machine.mesh, batch, model), notes


def _gspmd_2d(study: Study) -> Made:
    model = study.axes[-1:]
    _require_pairs(study, model)
    x = study.axes[:-1]
    batch, notes = study.batch_axes(x)
    mesh = study.session.machine.mesh
    return tensor_parallel(mesh, batch, model, residual=model, stored=x), notes


def _require_weights(study: Study) -> None:
    if not study.roles.weights:
        raise BaselineError(
            "there are no weights: no product, convolution or lookup reads an argument as one"
        )


def _require_pairs(study: Study, model: Axes) -> None:
    _require_weights(study)
    source, mesh = study.session.source, study.session.machine.mesh
    sites = [site_of_value(source.block.inputs[i], study.roles) for i in study.roles.weights]
    if model and not any(site.splits(site.inner, model, mesh) for site in sites):
        raise BaselineError(
            f"no weight can be split over {model[0]}({mesh[model[0]]}): none lies in a column and row pair"
            " whose inner features it divides"
        )


def _table(*entries: Baseline) -> Mapping[str, Baseline]:
    table: dict[str, Baseline] = {}
    for entry in entries:
        if entry.name in table:
            raise ValueError(f"two baselines are called {entry.name!r}; rename one")
        table[entry.name] = entry
    return MappingProxyType(table)


BASELINES: Mapping[str, Baseline] = _table(
    Baseline(
        name="replicated",
        summary="every device does everything",
        reference="none",
        recipe=_replicated,
    ),
    Baseline(
        name="data_parallel",
        summary="the batch is split over all axes; weights and state are whole on every device",
        reference="Krizhevsky, arXiv 1404.5997 (2014)",
        recipe=_data_parallel,
    ),
    Baseline(
        name="weight_update_sharding",
        summary="data parallel, with the optimizer state and the update split over all axes (ZeRO-1)",
        reference="Xu et al., arXiv 2004.13336 (2020); Rajbhandari et al., arXiv 1910.02054 (2020)",
        recipe=_weight_update_sharding,
    ),
    Baseline(
        name="fsdp",
        summary="the batch, and weights and state on one dim that no loop takes apart, split over all axes;"
        " weights are gathered where they are used (ZeRO-3)",
        reference="Rajbhandari et al., arXiv 1910.02054 (2020)",
        recipe=_fsdp,
    ),
    Baseline(
        name="megatron",
        summary="column and row pairs split over the last axis, the batch over the others",
        reference="Shoeybi et al., arXiv 1909.08053 (2019)",
        recipe=_megatron,
    ),
    Baseline(
        name="gspmd_2d",
        summary="the finalized 2D sharding of the GSPMD paper: weights outer over X, inner over Y;"
        " activations batch over X, inner or outer features over Y",
        reference="Xu et al., arXiv 2105.04663 (2021), section 5.1",
        recipe=_gspmd_2d,
    ),
)
"""Name -> baseline, from the plainest to the most elaborate. Y and "the last axis" are the last mesh axis of
more than one device, X all others together: with one axis, `megatron` is tensor parallelism alone, and
`gspmd_2d` differs from it in splitting the residual stream too."""


def of_study(name: str, study: Study, *, memory_limit_bytes: float | None = None, **limits: Any) -> Plan:
    """Make one baseline of a program that is already traced and placed.

    Raises:
      BaselineError: there is no such baseline, or it does not apply; the message says why.
    """
    if name not in BASELINES:
        raise BaselineError(f"no baseline {name!r}; choose one of: {', '.join(BASELINES)}")
    start = time.perf_counter()
    try:
        recipe, notes = BASELINES[name].recipe(study)
    except BaselineError as error:
        raise BaselineError(f"{name} does not apply: {error}") from None
    model = study.model(recipe)
    stated = time.perf_counter()
    solution = search.solve(model.problem, time_limit_seconds=limits.get("time_limit_seconds", 20.0))
    decisions = model.decisions(solution.choice)
    return study.session.plan(
        name,
        decisions,
        gap=None,
        lower_bound_seconds=None,
        memory_limit_bytes=memory_limit_bytes,
        notes=[BASELINES[name].summary, *notes],
        timings={"strategies": stated - start, "search and estimate": time.perf_counter() - stated},
    )


def baseline(
    name: str,
    fn: Callable[..., Any],
    *args: Any,
    topology: str | cm.Topology,
    mesh: Mapping[str, int],
    donate_argnums: Sequence[int] = (),
    memory_limit_bytes: float | None = None,
    loop_trips: int = 1,
) -> Plan:
    """Make one known plan for a function.

    Args:
      name: a key of `BASELINES`.
      fn: as for `suggest`.
      args: as for `suggest`.
      topology: as for `suggest`.
      mesh: axis name to size; the last axis is the one that `megatron` splits features over.
      donate_argnums: as for `suggest`.
      memory_limit_bytes: what the peak is held against; a baseline that does not fit is returned too.
      loop_trips: as for `suggest`.

    Returns:
      The plan; it is called by the baseline's name.

    Raises:
      BaselineError: there is no such baseline, or it does not apply; the message says why.
      TraceError, cost_models.TopologyError, cost_models.MeshError: the input cannot be used.

    Example:
      >>> import jax
      >>> x = jax.ShapeDtypeStruct((4096, 512), "bfloat16")
      >>> w = jax.ShapeDtypeStruct((512, 512), "bfloat16")
      >>> plan = baseline("data_parallel", lambda w, x: x @ w, w, x, topology="v3:2x2", mesh={"data": 8})
      >>> plan.in_specs == (jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data"))
      True
    """
    study = _study(fn, args, topology, mesh, donate_argnums, loop_trips)
    return of_study(name, study, memory_limit_bytes=memory_limit_bytes)


def baselines(
    fn: Callable[..., Any],
    *args: Any,
    topology: str | cm.Topology,
    mesh: Mapping[str, int],
    donate_argnums: Sequence[int] = (),
    names: Sequence[str] | None = None,
    memory_limit_bytes: float | None = None,
    loop_trips: int = 1,
) -> Baselines:
    """Make all known plans that apply to a function, tracing it once.

    Args:
      fn: as for `baseline`.
      args: as for `baseline`.
      topology: as for `baseline`.
      mesh: as for `baseline`.
      donate_argnums: as for `baseline`.
      names: the baselines wanted; all by default.
      memory_limit_bytes: as for `baseline`.
      loop_trips: as for `baseline`.

    Returns:
      Plans by name, a dict; its `left_out` maps the baselines that do not apply to the reason.

    Raises:
      BaselineError: a name in `names` is unknown.
      TraceError, cost_models.TopologyError, cost_models.MeshError: the input cannot be used.
    """
    unknown = [name for name in names or () if name not in BASELINES]
    if unknown:
        raise BaselineError(
            f"no baseline {', '.join(map(repr, unknown))}; choose from: {', '.join(BASELINES)}"
        )
    study = _study(fn, args, topology, mesh, donate_argnums, loop_trips)
    return of_all(study, names=names, memory_limit_bytes=memory_limit_bytes)


def of_all(
    study: Study, *, names: Sequence[str] | None = None, memory_limit_bytes: float | None = None
) -> Baselines:
    """Make the baselines that apply to a program already traced and placed."""
    plans: dict[str, Plan] = {}
    left_out: dict[str, str] = {}
    for name in names or BASELINES:
        try:
            plans[name] = of_study(name, study, memory_limit_bytes=memory_limit_bytes)
        except BaselineError as error:
            left_out[name] = str(error)
    return Baselines(plans, left_out)


def _study(
    fn: Callable[..., Any],
    args: Sequence[Any],
    topology: str | cm.Topology,
    mesh: Mapping[str, int],
    donate_argnums: Sequence[int],
    loop_trips: int,
) -> Study:
    slice_ = resolve_topology(topology, mesh)
    source = Source.of(fn, args, donate_argnums)
    return Study(session=Session.of(source, slice_, mesh, loop_trips))
