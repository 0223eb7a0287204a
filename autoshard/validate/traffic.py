"""How many bytes a compiled step sends, counted alike whichever compiler and partitioner wrote it.

A collective counts what each device sends on a ring (`cost_models.collectives.sent_bytes`), as often as it runs
in a step; an asynchronous pair counts once. An all-reduce of whose result each device reads its own part only is
a reduce-scatter that the compiler did not form (`autoshard.validate.scatter`), and counts as one.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import cost_models as cm
from autoshard.validate.collectives import Collective

__all__ = ["Sent", "sent", "sent_by_kind"]

_KINDS: Mapping[str, cm.CollectiveKind] = MappingProxyType(
    {
        "all-gather": "all_gather",
        "all-reduce": "all_reduce",
        "reduce-scatter": "reduce_scatter",
        "all-to-all": "all_to_all",
        "ragged-all-to-all": "all_to_all",
        "collective-permute": "collective_permute",
        "collective-broadcast": "collective_permute",
    }
)


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What a device sends in a step for one collective, and where that comes from.

    `kind` is as HLO names it, "reduce-scatter" for an all-reduce that stands for one. `axes` are mesh axes.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    op_name: str
    source: str


def sent(collectives: Iterable[Collective]) -> Iterator[Sent]:
    """Yield what a device sends in a step, collective by collective.

    Args:
        collectives: those of a compiled program, `CompiledReport.collectives`.

    """
    for collective in collectives:
        rest = collective.bytes - collective.sliced_bytes
        for kind, size in ((collective.kind, rest), ("reduce-scatter", collective.sliced_bytes)):
            if size:
                yield Sent(
                    kind=kind,
                    axes=collective.axes,
                    bytes=_step_bytes(collective, kind, size),
                    op_name=collective.op_name,
                    source=collective.source,
                )


def sent_by_kind(collectives: Iterable[Collective]) -> dict[tuple[str, tuple[str, ...]], float]:
    """Add up what a device sends in a step, by kind and mesh axes."""
    totals: dict[tuple[str, tuple[str, ...]], float] = {}
    for part in sent(collectives):
        totals[part.kind, part.axes] = totals.get((part.kind, part.axes), 0.0) + part.bytes
    return totals


def _step_bytes(collective: Collective, kind: str, size: int) -> float:
    group = collective.group_size
    full = size * group if _KINDS[kind] == "all_to_all" else size
    return cm.sent_bytes(_KINDS[kind], full, group) * collective.count * collective.trips
