"""A plan as text for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoshard.layout import to_spec

if TYPE_CHECKING:
    from autoshard.plan import Plan

__all__ = ["plan_text"]


def plan_text(plan: Plan) -> str:
    """Return the plan: specs, step time by what bounds it, HBM by category, gap, coverage, notes."""
    estimate = plan.estimate
    lines = [
        f"{plan.name} plan on {plan.topology} as {dict(plan.mesh)}",
        f"step {1e3 * plan.step_seconds:.3f} ms, HFU {100 * estimate.hardware_utilization:.1f} %,"
        f" peak HBM {estimate.peak_bytes / 2**30:.2f} of {plan.memory_limit_bytes / 2**30:.2f} GiB",
    ]
    lines += [
        f"  {key:<36s} {1e3 * seconds:10.3f} ms"
        for key, seconds in estimate.breakdown().items()
        if seconds
    ]
    lines += [f"  {key:<36s} {size / 2**30:10.3f} GiB" for key, size in estimate.peak.by_category().items()]
    for leaf, layout in zip(plan.inputs, plan.input_layouts, strict=True):
        lines.append(f"  {leaf.path:<36s} {to_spec(layout)}")
    lines.append("coverage: " + str(plan.coverage))
    lines += [f"note: {note}" for note in plan.notes]
    return "\n".join(lines)
