"""A plan as data: the ledger as a table, and the summary that a script reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoshard.layout import to_spec

if TYPE_CHECKING:
    import pandas as pd

    from autoshard.plan import Plan

__all__ = ["Line", "ledger", "lines", "summary"]


@dataclass(frozen=True, kw_only=True)
class Line:
    """What one group of ops, or one collective that it needs, costs a device in a step.

    `nbytes` is HBM traffic for a kernel or a reshard, and what the device sends for a collective; `bound` is
    "compute", "hbm" or "ici", whichever takes longest; `count` how often it runs.
    """

    group: int
    title: str
    source: str
    kind: str
    axes: tuple[str, ...]
    bound: str
    seconds: float
    flops: float
    nbytes: float
    count: float


def lines(plan: Plan) -> list[Line]:
    """List the ledger in program order: one line per group, kind and mesh axes."""
    merged: dict[tuple[Any, ...], list[Any]] = {}
    for entry in plan.estimate.entries:
        key = (entry.group, entry.title, entry.source, entry.kind, entry.axes)
        merged.setdefault(key, []).append(entry)
    found = []
    for (group, title, source, kind, axes), entries in merged.items():
        compute = sum(max(e.cost.matrix_seconds, e.cost.vector_seconds) * e.count for e in entries)
        memory = sum(e.cost.hbm_seconds * e.count for e in entries)
        found.append(
            Line(
                group=group,
                title=title,
                source=source,
                kind=kind,
                axes=axes,
                bound="ici" if kind == "collective" else "compute" if compute >= memory else "hbm",
                seconds=sum(e.exposed_seconds for e in entries),
                flops=sum(e.cost.flops * e.count for e in entries),
                nbytes=sum(
                    (e.cost.ici_bytes if kind == "collective" else e.cost.hbm_bytes) * e.count
                    for e in entries
                ),
                count=sum(e.count for e in entries),
            )
        )
    return found


def ledger(plan: Plan) -> pd.DataFrame:
    """Return where a step's time goes, one row per group of ops, kind and mesh axes, in program order.

    Args:
      plan: any plan.

    Returns:
      Columns `group`, `title`, `source` (user's source line), `kind` ("kernel", "reshard", "collective"),
      `axes` (mesh axes of a collective, as "data*model"), `bound` ("compute", "hbm", "ici"), `ms`, `flops`,
      `bytes` (HBM traffic; for a collective, bytes sent) and `count` (runs): of one device in one step.

    Example:
      >>> import autoshard, jax
      >>> x = jax.ShapeDtypeStruct((512, 512), "float32")
      >>> plan = autoshard.suggest(lambda x: x @ x, x, topology="v3:2x2", mesh={"data": 8})
      >>> bool(abs(ledger(plan).ms.sum() - 1e3 * plan.estimate.step_seconds) < 1e-9)
      True
    """
    import pandas as pd

    return pd.DataFrame(
        {
            "group": x.group,
            "title": x.title,
            "source": x.source,
            "kind": x.kind,
            "axes": "*".join(x.axes),
            "bound": x.bound,
            "ms": 1e3 * x.seconds,
            "flops": x.flops,
            "bytes": x.nbytes,
            "count": x.count,
        }
        for x in lines(plan)
    )


def summary(plan: Plan, *, model_flops: float | None = None) -> dict[str, Any]:
    """Return the plan in short, in JSON types: what `--json` prints.

    Args:
      plan: any plan.
      model_flops: flops of a step, all devices, nothing recomputed; for `mfu`.
    """
    estimate = plan.estimate
    return {
        "name": plan.name,
        "topology": plan.topology,
        "mesh": dict(plan.mesh),
        "step_seconds": plan.step_seconds,
        "serial_seconds": estimate.serial_seconds,
        "step_seconds_by": {key: seconds for key, seconds in estimate.breakdown().items() if seconds},
        "lower_bound_seconds": plan.lower_bound_seconds,
        "gap": plan.gap,
        "hfu": estimate.hardware_utilization,
        "mfu": None if model_flops is None else plan.mfu(model_flops),
        "fits": plan.fits,
        "memory_limit_bytes": plan.memory_limit_bytes,
        "peak_bytes": estimate.peak_bytes,
        "peak_bytes_by": estimate.peak.by_category(),
        "peak_at": estimate.peak.where,
        "inputs": _arrays(plan, "input"),
        "outputs": _arrays(plan, "output"),
        "coverage": {
            "ops": plan.coverage.ops,
            "without_rule": dict(plan.coverage.without_rule),
            "flops_share": plan.coverage.flops_share,
        },
        "notes": list(plan.notes),
        "timings": dict(plan.timings),
    }


def _arrays(plan: Plan, what: str) -> list[dict[str, Any]]:
    leaves, layouts = getattr(plan, f"{what}s"), getattr(plan, f"{what}_layouts")
    return [
        {
            "path": leaf.path,
            "shape": list(leaf.shape),
            "dtype": leaf.dtype,
            "spec": [list(entry) if isinstance(entry, tuple) else entry for entry in tuple(to_spec(layout))],
        }
        for leaf, layout in zip(leaves, layouts, strict=True)
    ]
