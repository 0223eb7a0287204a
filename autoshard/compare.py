"""Plans side by side: a row of figures per plan, and where two plans differ.

Everything here reads finished plans; nothing is priced again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from autoshard.errors import PlanMismatchError
from autoshard.layout import to_spec
from autoshard.plan import Leaf, Plan

__all__ = ["compare", "diff"]

_GIB = float(2**30)
# Categories of the peak that have a column of their own; what is left are temporaries.
_CATEGORIES = {
    "parameters": "parameters_gib",
    "optimizer state": "optimizer_gib",
    "inputs": "inputs_gib",
}


def compare(
    plans: Sequence[Plan] | Mapping[str, Plan],
    *,
    model_flops: float | None = None,
    allow_different: bool = False,
) -> pd.DataFrame:
    """Put plans for one function side by side.

    Args:
      plans: plans, or plans by the name that they get in the table.
      model_flops: operations that a step needs on all devices together, recomputation left out; with it
        there is a column `mfu`.
      allow_different: take plans that were made for different functions or shapes.

    Returns:
      A row per plan, by name (of plans with one name, the later ones get a number). Times are of a step in
      milliseconds: `compute_ms` and `hbm_ms` are the kernels by what bounds them, each kind of collective has
      a column per mesh axes, such as `all_gather data*model_ms`, and `exposed_communication_ms` is what
      the step waits for. `hfu` and `mfu` are fractions of the peak. Memory is of one device at its fullest
      moment, in GiB, and `sent_gib` what a device sends in a step. `gap` is missing where nothing was
      searched.

    Raises:
      PlanMismatchError: the plans were made for different functions or shapes.
      ValueError: there are no plans.

    Example:
      >>> import jax
      >>> from autoshard import evaluate
      >>> x = jax.ShapeDtypeStruct((4096, 512), "float32")
      >>> w = jax.ShapeDtypeStruct((512, 512), "float32")
      >>> plan = evaluate(lambda w, x: x @ w, w, x, topology="v3:2x2", mesh={"data": 8}, name="whole")
      >>> table = compare([plan])
      >>> list(table.index), bool(table.loc["whole", "fits"])
      (['whole'], True)
    """
    named = _named(plans)
    if not allow_different:
        _require_one_function(named)
    rows = {name: _row(plan, model_flops) for name, plan in named.items()}
    first = ["topology", "mesh", "step_ms", "compute_ms", "hbm_ms"]
    collectives = sorted({key for row in rows.values() for key in row if " " in key})
    rest = [key for key in next(iter(rows.values())) if key not in first and " " not in key]
    table = pd.DataFrame.from_dict(rows, orient="index", columns=[*first, *collectives, *rest])
    table[collectives] = table[collectives].astype(float).fillna(0.0)
    table["gap"] = table["gap"].astype(float)
    table.index.name = "plan"
    return table


def diff(plan_a: Plan, plan_b: Plan, *, lines: int = 20, allow_different: bool = False) -> pd.DataFrame:
    """Show where two plans differ: arrays split otherwise, and the work whose time changes most.

    Args:
      plan_a: a plan.
      plan_b: another plan for the same function.
      lines: how many lines of work to list.
      allow_different: take plans that were made for different functions; arrays are matched by path.

    Returns:
      Rows by `part` and `line`. Part "input" and "output" are arrays, with `a_spec` and `b_spec`; part "work"
      are groups of ops with the resharding for them, by number, title and source line, with `a_ms`, `b_ms`
      and `difference_ms` (b minus a, of a step), largest difference first.

    Raises:
      PlanMismatchError: the plans were made for different functions or shapes.
    """
    if not allow_different:
        _require_one_function(_named([plan_a, plan_b]))
    rows: list[dict[str, object]] = []
    for part in ("input", "output"):
        a, b = _specs(plan_a, part), _specs(plan_b, part)
        for path in [*a, *(p for p in b if p not in a)]:
            if a.get(path) != b.get(path):
                rows.append({"part": part, "line": path, "a_spec": a.get(path), "b_spec": b.get(path)})
    seconds_a, seconds_b = _work(plan_a), _work(plan_b)
    work = []
    for key in dict.fromkeys([*seconds_a, *seconds_b]):
        (title_a, a_ms), (title_b, b_ms) = (s.get(key, ("", 0.0)) for s in (seconds_a, seconds_b))
        if a_ms != b_ms:
            line = " ".join(part for part in (f"g{key[0]}", title_a or title_b, key[1]) if part)
            work.append(
                {"part": "work", "line": line, "a_ms": a_ms, "b_ms": b_ms, "difference_ms": b_ms - a_ms}
            )
    work.sort(key=lambda row: -abs(float(str(row["difference_ms"]))))
    columns = ["part", "line", "a_spec", "b_spec", "a_ms", "b_ms", "difference_ms"]
    table = pd.DataFrame([*rows, *work[:lines]], columns=columns)
    for column in ("a_ms", "b_ms", "difference_ms"):
        table[column] = table[column].astype(float)
    return table.set_index(["part", "line"])


def _named(plans: Sequence[Plan] | Mapping[str, Plan]) -> dict[str, Plan]:
    pairs = list(plans.items()) if isinstance(plans, Mapping) else [(plan.name, plan) for plan in plans]
    if not pairs:
        raise ValueError(
            "compare was given no plans; give at least one, as from suggest, evaluate or baselines."
        )
    named: dict[str, Plan] = {}
    for name, plan in pairs:
        unique, number = name, 1
        while unique in named:
            number += 1
            unique = f"{name} ({number})"
        named[unique] = plan
    return named


def _require_one_function(named: Mapping[str, Plan]) -> None:
    groups: dict[str, list[str]] = {}
    for name, plan in named.items():
        groups.setdefault(plan.fingerprint, []).append(name)
    if len(groups) > 1:
        listed = "\n  ".join(f"{', '.join(names)}: {_shape_of(named[names[0]])}" for names in groups.values())
        raise PlanMismatchError(
            "The plans were made for different functions or shapes; their times cannot be compared:"
            f"\n  {listed}\nCompare plans of one function at one set of shapes, or pass allow_different=True."
        )


def _shape_of(plan: Plan) -> str:
    leaves = [f"{leaf.path} {leaf.dtype}{list(leaf.shape)}" for leaf in plan.inputs]
    more = f", ... {len(leaves) - 3} more" if len(leaves) > 3 else ""
    return f"{len(leaves)} arguments ({', '.join(leaves[:3])}{more}), program {plan.fingerprint[:8]}"


def _row(plan: Plan, model_flops: float | None) -> dict[str, object]:
    estimate = plan.estimate
    parts = estimate.breakdown()
    kernels = parts["compute"] + parts["hbm"]
    sizes = estimate.peak.by_category()
    row: dict[str, Any] = {
        "topology": plan.topology,
        "mesh": " ".join(f"{axis}={size}" for axis, size in plan.mesh.items()),
        "step_ms": 1e3 * plan.step_seconds,
    }
    row |= {f"{key}_ms": 1e3 * seconds for key, seconds in parts.items()}
    row["exposed_communication_ms"] = 1e3 * max(0.0, plan.step_seconds - kernels)
    row["hfu"] = estimate.hardware_utilization
    if model_flops is not None:
        row["mfu"] = plan.mfu(model_flops)
    row["peak_gib"] = estimate.peak_bytes / _GIB
    row |= {column: sizes.get(category, 0.0) / _GIB for category, column in _CATEGORIES.items()}
    row["temporaries_gib"] = row["peak_gib"] - sum(row[column] for column in _CATEGORIES.values())
    row["sent_gib"] = sum(c.sent_bytes * c.count for c in estimate.collectives) / _GIB
    row["fits"] = plan.fits
    row["gap"] = plan.gap
    return row


def _specs(plan: Plan, part: str) -> dict[str, str]:
    leaves: Sequence[Leaf] = plan.inputs if part == "input" else plan.outputs
    layouts = plan.input_layouts if part == "input" else plan.output_layouts
    return {leaf.path: str(to_spec(x)) for leaf, x in zip(leaves, layouts, strict=True)}


def _work(plan: Plan) -> dict[tuple[int, str], tuple[str, float]]:
    """Title and milliseconds of each group, its resharding included."""
    found: dict[tuple[int, str], tuple[str, float]] = {}
    for entry in plan.estimate.entries:
        key = entry.group, entry.source
        title, milliseconds = found.get(key, ("", 0.0))
        if entry.kind == "kernel":
            title = entry.title
        found[key] = title, milliseconds + 1e3 * entry.exposed_seconds
    return found
