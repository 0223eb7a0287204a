"""Runs a plan on the devices present and puts measured times beside predicted ones, op by op.

An instruction of the profile and an entry of the ledger meet by the number of the group that both were made
for: it stands in the name scope that the emitter sets. Instructions that the compiler made by itself carry no
scope; those meet by the user's source line, or stay unmatched and are listed as such.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax

import cost_models as cm
from autoshard.apply import device_mesh, flat_program, matching_source
from autoshard.errors import AutoshardError
from autoshard.validate.match import group_of
from autoshard.validate.profiler import OpTime, ProfileReport, profile
from autoshard.validate.validation import Table, Validation

if TYPE_CHECKING:
    from autoshard.plan import Plan

__all__ = ["measure_plan"]

_PROGRAMS = {"xla": "plan.jit", "autoshard": "plan.spmd"}
# On the planned chip, a step may differ from its prediction by this much.
_TIME_RTOL = 0.25
# Of the measured time, this much must belong to ops of the plan.
_MATCHED_SHARE = 0.5
_TOP = 40


@dataclass
class _Row:
    """Predicted and measured seconds of one group."""

    group: int
    title: str
    source: str
    predicted: float = 0.0
    measured: float = 0.0


def measure_plan(
    plan: Plan,
    fn: Callable[..., Any],
    args: Sequence[Any],
    arrays: Sequence[Any],
    *,
    partitioners: Sequence[str],
    devices: Sequence[Any] | None,
    steps: int,
) -> Validation:
    """Profile a plan's programs.

    Args:
      plan: the plan.
      fn: its function.
      args: the arguments, for their structure.
      arrays: the flat inputs.
      partitioners: which ways of applying the plan to run.
      devices: where; by default `jax.devices()`.
      steps: how many to measure.

    Raises:
      AutoshardError: there are fewer devices than the mesh holds.
      ProfileError: the profiler cannot start here.
    """
    try:
        mesh = device_mesh(plan, devices)
    except ValueError as error:
        raise AutoshardError(f"cannot profile here: {error}") from error
    kinds = sorted({d.device_kind for d in mesh.devices.flat})
    planned = cm.Topology.parse(plan.topology).chip.name
    is_planned = kinds == [cm.chip(planned).device_kind]
    tables: dict[str, Table] = {}
    rows: list[tuple[Any, ...]] = [("predicted", plan.step_seconds, plan.step_seconds, None)]
    failures: list[str] = []
    differences: list[str] = []
    for partitioner in partitioners:
        name = _PROGRAMS[partitioner]
        report, note = _run(plan, fn, args, arrays, partitioner, mesh, steps)
        groups, other = _by_group(plan, report)
        matched = sum(row.measured for row in groups)
        share = matched / report.busy_seconds if report.busy_seconds else 0.0
        rows.append((name, report.step_seconds, report.busy_seconds, share))
        tables[f"ops {name}"] = _table(name, groups)
        differences += [f"{name}: {note}"] if note else []
        differences += _differences(name, groups, other, report)
        if share < _MATCHED_SHARE:
            failures.append(
                f"{name}: only {100 * share:.0f} % of the measured time belongs to ops that the plan knows"
            )
        if is_planned and abs(report.step_seconds / plan.step_seconds - 1) > _TIME_RTOL:
            failures.append(
                f"{name}: a step took {1e3 * report.step_seconds:.3f} ms, predicted"
                f" {1e3 * plan.step_seconds:.3f}"
            )
    where = f"ran on {mesh.devices.size} x {', '.join(kinds)}, {steps} steps"
    if not is_planned:
        where += f": not the planned {planned}, so this checks that the same ops run, not how long they take"
    step = Table(
        title="a step",
        columns=("program", "step_seconds", "busy_seconds", "matched_share"),
        rows=tuple(rows),
        formats={"step_seconds": "ms", "busy_seconds": "ms", "matched_share": "{:.0%}"},
    )
    return Validation(
        plan=repr(plan)[1:-1],
        level="profile",
        tables={"step": step, **tables},
        differences=tuple(differences),
        failures=tuple(failures),
        notes=(where,),
    )


def _run(
    plan: Plan,
    fn: Callable[..., Any],
    args: Sequence[Any],
    arrays: Sequence[Any],
    partitioner: str,
    mesh: Any,
    steps: int,
) -> tuple[ProfileReport, str]:
    """Profile one program; also say what was changed for it."""
    flat, ins, outs, donated = flat_program(plan, fn, args, partitioner, mesh)
    source = replace(
        matching_source(plan, fn, args), donated=tuple(i in donated for i in range(len(plan.inputs)))
    )
    note = ""
    if not set(donated) <= set(source.state.values()):
        note = "ran without donation: not every donated input comes back as an output to run the next step on"
        donated = ()
    followers = {i: j for j, i in source.state.items() if i in donated}
    placed = [jax.device_put(x, where, may_alias=False) for x, where in zip(arrays, ins, strict=True)]

    def following(outputs: Any, inputs: tuple[Any, ...]) -> list[Any]:
        return [outputs[followers[i]] if i in followers else x for i, x in enumerate(inputs)]

    jitted = jax.jit(flat, in_shardings=ins, out_shardings=outs, donate_argnums=donated)
    compiled = jitted.lower(*placed).compile()
    return profile(compiled, placed, steps=steps, next_args=following if followers else None), note


def _by_group(plan: Plan, report: ProfileReport) -> tuple[list[_Row], list[OpTime]]:
    """Add up both sides by group; return the rows and the instructions that belong to none."""
    rows: dict[int, _Row] = {}
    for entry in plan.estimate.entries:
        row = rows.setdefault(entry.group, _Row(group=entry.group, title=entry.title, source=entry.source))
        row.predicted += entry.seconds
        if entry.kind == "kernel":
            row.title = entry.title
    lines = {_line_of(row.source): row for row in rows.values() if row.source}
    other: list[OpTime] = []
    for op in report.ops:
        found = rows.get(group_of(op.op_name)) or lines.get(_line_of(op.source))
        if found is None:
            other.append(op)
        else:
            found.measured += op.seconds
    return list(rows.values()), other


def _line_of(source: str) -> tuple[str, ...]:
    """Reduce `dir/file.py:12:3 (function)` to file and line."""
    name = source.split(" ")[0].rpartition("/")[2]
    return tuple(name.split(":")[:2])


def _table(name: str, groups: Sequence[_Row]) -> Table:
    ordered = sorted(groups, key=lambda row: (-max(row.predicted, row.measured), row.group))[:_TOP]
    return Table(
        title=f"{name}: seconds of a step by group of ops, largest first",
        columns=("group", "op", "source", "predicted_seconds", "measured_seconds"),
        rows=tuple((row.group, row.title, row.source, row.predicted, row.measured) for row in ordered),
        formats={"predicted_seconds": "ms", "measured_seconds": "ms"},
    )


def _differences(
    name: str, groups: Sequence[_Row], other: Sequence[OpTime], report: ProfileReport
) -> list[str]:
    lines = []
    silent = [row for row in groups if row.predicted and not row.measured]
    if silent:
        listed = ", ".join(f"{row.title} ({row.group})" for row in silent[:6])
        lines.append(
            f"{name}: {len(silent)} predicted groups name no instruction, fused into others or removed:"
            f" {listed}" + (" ..." if len(silent) > 6 else "")
        )
    if other:
        seconds = sum(op.seconds for op in other)
        listed = ", ".join(f"{op.name} {1e3 * op.seconds:.3f} ms" for op in other[:6])
        lines.append(
            f"{name}: {len(other)} instructions, {100 * seconds / report.busy_seconds:.0f} % of the measured"
            f" time, belong to no op of the plan: {listed}" + (" ..." if len(other) > 6 else "")
        )
    return lines
