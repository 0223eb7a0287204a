"""The parts of a step and of HBM: what reports and plots show, in one order and with one colour for each.

Colours tell the kind of part and stripes the mesh axes, from the palette of Okabe and Ito (2008), which
people of every kind of colour vision can tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoshard.report.tables import lines

if TYPE_CHECKING:
    from autoshard.plan import Plan

__all__ = [
    "Part",
    "Style",
    "memory_parts",
    "memory_styles",
    "ms_text",
    "step_parts",
    "step_styles",
]

_OTHER = "#8C8C8C"
_KINDS = {
    "compute": ("compute-bound kernels", "#0072B2"),
    "hbm": ("HBM-bound kernels", "#56B4E9"),
    "all_gather": ("all-gather", "#E69F00"),
    "reduce_scatter": ("reduce-scatter", "#009E73"),
    "all_reduce": ("all-reduce", "#D55E00"),
    "all_to_all": ("all-to-all", "#CC79A7"),
    "collective_permute": ("collective-permute", "#F0E442"),
    "other_collectives": ("other collectives", _OTHER),
}
_CATEGORIES = {
    "parameters": "#0072B2",
    "optimizer state": "#56B4E9",
    "inputs": "#009E73",
    "constants": "#F0E442",
    "temporary": "#E69F00",
    "loop": "#CC79A7",
    "collective": "#D55E00",
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """A share of a step: what bounds it, mesh axes, seconds; runs and bytes sent where it is a collective."""

    key: str
    label: str
    axes: str
    seconds: float
    runs: float
    sent_bytes: float


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a part is drawn: its name for a legend, its colour, and which of the striped patterns (0: none)."""

    label: str
    colour: str
    stripes: int = 0


def step_parts(plan: Plan) -> list[Part]:
    """List the parts of a step in the order of `step_styles`: kernels, then collectives by kind and axes."""
    runs: dict[str, float] = {}
    sent: dict[str, float] = {}
    for line in lines(plan):
        if line.kind == "collective":
            key = f"{line.title} {'*'.join(line.axes)}"
            runs[key] = runs.get(key, 0.0) + line.count
            sent[key] = sent.get(key, 0.0) + line.nbytes
    seconds = {key: value for key, value in plan.estimate.breakdown().items() if value}
    return [
        Part(
            key=key,
            label=_kind(key)[0],
            axes=key.partition(" ")[2],
            seconds=seconds[key],
            runs=runs.get(key, 0.0),
            sent_bytes=sent.get(key, 0.0),
        )
        for key in step_styles(seconds)
    ]


def step_styles(keys: Iterable[str]) -> dict[str, Style]:
    """Choose a style for each key of `Estimate.breakdown`, in the order in which they are drawn.

    >>> for key, style in step_styles(["all_gather y", "all_gather x", "compute"]).items():
    ...     print(key, style.label, style.colour, style.stripes)
    compute compute-bound kernels #0072B2 0
    all_gather x all-gather x #E69F00 0
    all_gather y all-gather y #E69F00 1
    """
    known = list(dict.fromkeys(keys))
    over = sorted({key.partition(" ")[2] for key in known} - {""}, key=lambda axes: (axes.count("*"), axes))
    order = list(_KINDS)

    def rank(key: str) -> tuple[int, str, int]:
        kind, _, axes = key.partition(" ")
        return order.index(kind) if kind in _KINDS else len(order), kind, over.index(axes) if axes else -1

    return {
        key: Style(
            label=" ".join(filter(None, (_kind(key)[0], key.partition(" ")[2]))),
            colour=_kind(key)[1],
            stripes=max(rank(key)[2], 0),
        )
        for key in sorted(known, key=rank)
    }


def memory_parts(plan: Plan) -> dict[str, float]:
    """Return bytes by category at the peak, in the order of `memory_styles`; `other` is in no buffer."""
    peak = plan.estimate.peak
    parts = {category: size for category, size in peak.by_category().items() if size}
    rest = peak.total_bytes - sum(parts.values())
    if rest > 1e-6 * peak.total_bytes:
        parts["other"] = parts.get("other", 0.0) + rest
    return {category: parts[category] for category in memory_styles(parts)}


def memory_styles(categories: Iterable[str]) -> Mapping[str, Style]:
    """Choose a style for each category of memory, in the order in which they are drawn."""
    order = list(_CATEGORIES)
    known = sorted(
        dict.fromkeys(categories),
        key=lambda category: (order.index(category) if category in _CATEGORIES else len(order), category),
    )
    unknown = [category for category in known if category not in _CATEGORIES]
    return {
        category: Style(
            label=category,
            colour=_CATEGORIES.get(category, _OTHER),
            stripes=unknown.index(category) if category in unknown else 0,
        )
        for category in known
    }


def _kind(key: str) -> tuple[str, str]:
    kind = key.partition(" ")[0]
    return _KINDS.get(kind, (kind.replace("_", "-"), _OTHER))


def ms_text(seconds: float, total: float) -> str:
    """Write milliseconds with as many decimals as give a step of `total` seconds five digits.

    >>> ms_text(0.25, 2.5), ms_text(2.5e-6, 2.5e-5)
    ('250.0', '0.002500')
    """
    digits = 4 - math.floor(math.log10(1e3 * total)) if total > 0 else 3
    return f"{1e3 * seconds:,.{min(max(digits, 0), 6)}f}"
