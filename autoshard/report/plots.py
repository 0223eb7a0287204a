"""Plots of plans side by side: where a step's time goes, and what fills HBM.

Bars lie on their side, so that names of plans are read without turning the head; legends stand beside the
axes. A plan that is far worse than the others would squeeze them: its bar is cut, and says how long it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from autoshard.report.parts import Style, memory_parts, memory_styles, step_styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from autoshard.plan import Plan

__all__ = ["plot_memory", "plot_step_time"]

# Bars of more than so many times the best step, or the memory limit, are cut, a little beyond the others.
_CUT_TIMES = 5.0
_CUT_LIMITS = 2.5
_BEYOND = 1.2
# Room to the right of the longest bar for its figure, as a share of the axis.
_ROOM = 1.25
# A limit of more than so many times the axis is not drawn, only named.
_FAR = 6.0
# Collectives that no bar shows more of than this share of the axis become one part.
_TINY = 0.005
_HATCHES = ("", "////", "\\\\\\\\", "||||", "----", "xxxx", "....")
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_SIZES = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))


def plot_step_time(plans: Sequence[Plan] | Mapping[str, Plan], ax: Axes | None = None) -> Axes:
    """Draw the predicted step time of each plan, stacked by what bounds it.

    Args:
      plans: plans, or plans by the name that they get in the plot; drawn from top to bottom.
      ax: where to draw; by default in a new figure of fitting size.

    Returns:
      The axes. Segments are compute-bound and HBM-bound kernels, then each kind of collective (its colour) on
      its mesh axes (its hatch); those too short to see are one. A bar of more than five times the best step
      is cut.

    Raises:
      ValueError: there are no plans.

    Example:
      >>> import matplotlib; matplotlib.use("agg")
      >>> import autoshard, jax
      >>> x = jax.ShapeDtypeStruct((512, 512), "float32")
      >>> plan = autoshard.suggest(lambda x: x @ x, x, topology="v3:2x2", mesh={"data": 8})
      >>> plot_step_time([plan]).get_title()
      'Predicted step time'
    """
    named = _named(plans)
    parts = [{k: v for k, v in plan.estimate.breakdown().items() if v} for plan in named.values()]
    totals = [plan.step_seconds for plan in named.values()]
    scale, unit = _unit(min(totals), _TIMES)
    cut = _cut(totals, _CUT_TIMES * min(totals), min(totals))
    parts = _without_tiny(parts, _TINY * min(cut, max(totals)))
    axes = _axes(ax, len(named))
    _stack(axes, parts, step_styles(key for found in parts for key in found), scale, cut)
    _label(axes, list(named), totals, scale, unit, cut)
    axes.set_xlabel(f"time of a step ({unit})")
    axes.set_title("Predicted step time")
    return axes


def plot_memory(plans: Sequence[Plan] | Mapping[str, Plan], ax: Axes | None = None) -> Axes:
    """Draw what fills the HBM of one device at the peak of each plan, stacked by category.

    Args:
      plans: plans, or plans by the name that they get in the plot; drawn from top to bottom.
      ax: where to draw; by default in a new figure of fitting size.

    Returns:
      The axes. A dashed line marks the memory limit that each plan was held against, and the figure of a plan
      that does not fit is bold. A bar of more than two and a half times the limit is cut.

    Raises:
      ValueError: there are no plans.

    Example:
      >>> import matplotlib; matplotlib.use("agg")
      >>> import autoshard, jax
      >>> x = jax.ShapeDtypeStruct((512, 512), "float32")
      >>> plan = autoshard.suggest(lambda x: x @ x, x, topology="v3:2x2", mesh={"data": 8})
      >>> plot_memory([plan]).get_title()
      'Predicted HBM of a device at the peak'
    """
    named = _named(plans)
    parts = [memory_parts(plan) for plan in named.values()]
    totals = [plan.estimate.peak_bytes for plan in named.values()]
    limits = [plan.memory_limit_bytes for plan in named.values()]
    scale, unit = _unit(max(totals), _SIZES)
    cut = _cut(totals, _CUT_LIMITS * max(limits), max(limits))
    axes = _axes(ax, len(named))
    _stack(axes, parts, memory_styles(key for found in parts for key in found), scale, cut)
    _label(axes, list(named), totals, scale, unit, cut)
    for text, plan in zip(axes.texts, named.values(), strict=True):
        text.set_fontweight("normal" if plan.fits else "bold")
    _limits(axes, limits, scale, unit)
    axes.set_xlabel(f"HBM of a device ({unit})")
    axes.set_title("Predicted HBM of a device at the peak")
    return axes


def _named(plans: Sequence[Plan] | Mapping[str, Plan]) -> dict[str, Plan]:
    """Give each plan a label of its own: its name, with its mesh where meshes differ, or a number."""
    if not plans:
        raise ValueError("no plans to plot; give at least one, as from suggest, evaluate or baselines.")
    if isinstance(plans, Mapping):
        return dict(plans)
    places = {(plan.topology, tuple(plan.mesh.items())) for plan in plans}
    named: dict[str, Plan] = {}
    for plan in plans:
        label = plan.name
        if len(places) > 1:
            mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
            label += f"\n{plan.topology}, {mesh}" if len({p[0] for p in places}) > 1 else f"\n{mesh}"
        unique, number = label, 1
        while unique in named:
            number += 1
            unique = f"{label} ({number})"
        named[unique] = plan
    return named


def _axes(ax: Axes | None, count: int) -> Axes:
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    _, made = plt.subplots(figsize=(10.0, 1.7 + 0.45 * max(count, 3)), layout="constrained")
    return made


def _unit(size: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Choose the largest unit of which there is one, or the smallest that there is."""
    return next((found for found in units if size >= found[0]), units[-1])


def _cut(totals: Sequence[float], longest: float, least: float) -> float:
    """Return where bars beyond `longest` are cut: a little beyond all others and `least`."""
    return _BEYOND * max([least, *(total for total in totals if total <= longest)])


def _without_tiny(parts: Sequence[Mapping[str, float]], tiny: float) -> list[dict[str, float]]:
    """Add up the collectives that are nowhere longer than `tiny`, unless it is only one."""
    keys = {key for found in parts for key in found if " " in key}
    small = {key for key in keys if all(found.get(key, 0.0) <= tiny for found in parts)}
    if len(small) < 2:
        return [dict(found) for found in parts]
    merged = []
    for found in parts:
        rest = sum(seconds for key, seconds in found.items() if key in small)
        kept = {key: seconds for key, seconds in found.items() if key not in small}
        merged.append(kept | ({"other_collectives": rest} if rest else {}))
    return merged


def _stack(
    axes: Axes, parts: Sequence[Mapping[str, float]], styles: Mapping[str, Style], scale: float, cut: float
) -> None:
    import matplotlib as mpl

    left = [0.0] * len(parts)
    for key, style in styles.items():
        widths = [max(0.0, min(found.get(key, 0.0), cut - at)) for found, at in zip(parts, left, strict=True)]
        with mpl.rc_context({"hatch.linewidth": 1.2}):
            axes.barh(
                range(len(parts)),
                [width / scale for width in widths],
                left=[at / scale for at in left],
                height=0.66,
                label=style.label,
                color=style.colour,
                hatch=_HATCHES[style.stripes % len(_HATCHES)],
                edgecolor="white",
                linewidth=0.0,
            )
        left = [at + width for at, width in zip(left, widths, strict=True)]


def _label(
    axes: Axes, names: Sequence[str], totals: Sequence[float], scale: float, unit: str, cut: float
) -> None:
    """Write names, the figure at the end of each bar, and a torn edge on those that are cut."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.45, -0.55)
    longest = max(min(total, cut) for total in totals) / scale or 1.0
    axes.set_xlim(0.0, longest * _ROOM)
    for row, total in enumerate(totals):
        end = min(total, cut) / scale
        if total > cut:
            axes.plot(
                [end - 0.006 * longest * (i % 2) for i in range(9)],
                [row - 0.36 + 0.09 * i for i in range(9)],
                color=axes.get_facecolor(),
                linewidth=3.0,
                zorder=3,
            )
        figure = f" {_figure(total / scale)} {unit}{' (cut)' if total > cut else ''}"
        axes.text(end, row, figure, va="center", ha="left", fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="0.5", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    _legend(axes)


def _limits(axes: Axes, limits: Sequence[float], scale: float, unit: str) -> None:
    """Mark each plan's limit, where it is not far beyond all bars."""
    right = axes.get_xlim()[1]
    wanted = 1.05 * max(limits) / scale
    if wanted <= _FAR * right:
        axes.set_xlim(0.0, max(right, wanted))
    label = _range(limits, scale, unit)
    if any(limit / scale > axes.get_xlim()[1] for limit in limits):
        label += ",\nbeyond the right edge"
    axes.plot([], [], color="0.25", linestyle="--", label=label)
    for row, limit in enumerate(limits):
        if limit / scale <= axes.get_xlim()[1]:
            axes.plot([limit / scale] * 2, [row - 0.5, row + 0.5], color="0.25", linestyle="--")
    _legend(axes)


def _legend(axes: Axes) -> None:
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, frameon=False, fontsize="small"
    )


def _range(limits: Sequence[float], scale: float, unit: str) -> str:
    low, high = min(limits), max(limits)
    figures = _figure(low / scale) if low == high else f"{_figure(low / scale)} to {_figure(high / scale)}"
    return f"limit: {figures} {unit}"


def _figure(value: float) -> str:
    """Write three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"
