"""Repeated structure (unrolled layers), found by colour refinement: nodes that are alike are decided as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoshard.model import Edge, Node

__all__ = ["tie"]

# Rounds of colour refinement: nodes whose surroundings agree this far are tied.
TIE_ROUNDS = 4
TIE_COPIES = 3
# Smaller programs are solved without tying: equal surroundings do not always want equal shardings.
TIE_ABOVE = 1000


def tie(nodes: Sequence[Node], edges: Sequence[Edge]) -> list[int]:
    """Give nodes that repeat the same class: equal signatures and equal surroundings."""
    if len(nodes) <= TIE_ABOVE:
        return list(range(len(nodes)))
    colours: dict[Any, int] = {}

    def number(key: Any) -> int:
        return colours.setdefault(key, len(colours))

    colour = [number(("start", n.signature)) for n in nodes]
    around: list[list[tuple[int, Any]]] = [[] for _ in nodes]
    for e in edges:
        # How the reader wants the value, not at which place: hundreds of terms of one sum are alike.
        role = number(("role", tuple(e.want[-1]), len(e.want)))
        around[e.target].append((e.source, ("in", role)))
        around[e.source].append((e.target, ("out", role)))
    for _ in range(TIE_ROUNDS):
        colour = [
            number((c, tuple(sorted((colour[m], role) for m, role in near))))
            for c, near in zip(colour, around, strict=True)
        ]
    members: dict[int, list[int]] = defaultdict(list)
    for i, c in enumerate(colour):
        members[c].append(i)
    class_of = [0] * len(nodes)
    count = 0
    for i, c in enumerate(colour):
        together = members[c]
        if len(together) < TIE_COPIES:
            class_of[i] = count
            count += 1
        elif together[0] == i:
            for m in together:
                class_of[m] = count
            count += 1
    return class_of
