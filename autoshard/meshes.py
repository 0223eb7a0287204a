"""Slices and the logical meshes on them: what a user names, and what is searched when they name none."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import cost_models as cm

__all__ = ["candidate_meshes", "resolve_topology"]


def resolve_topology(topology: str | cm.Topology, mesh: Mapping[str, int] | None) -> cm.Topology:
    """Return the slice that a user named.

    Args:
      topology: a slice, or its name; a bare generation with a mesh means the smallest slice that holds it.
      mesh: axis name to size, or None.

    Raises:
      cost_models.TopologyError: the name is no slice.
      cost_models.MeshError: the mesh is empty or holds a size below 1.
    """
    if mesh is not None and (not mesh or any(not isinstance(n, int) or n < 1 for n in mesh.values())):
        raise cm.MeshError(
            f"mesh {dict(mesh)} has no devices: give at least one axis, each of size 1 or more, such as"
            ' {"data": 8, "model": 4}; leave mesh out to have it chosen.'
        )
    if isinstance(topology, cm.Topology):
        return topology
    if mesh is not None and ":" not in topology:
        return cm.Topology.smallest(topology, math.prod(mesh.values()))
    return cm.Topology.parse(topology)


def candidate_meshes(topology: cm.Topology) -> Iterator[dict[str, int]]:
    """List the meshes of one and two axes that fill a slice, flat ones first.

    Axes are named by role only for reading; the search gives them their meaning.
    """
    total = topology.num_devices
    yield {"x": total}
    for first in sorted(_divisors(total), key=lambda n: abs(math.log2(n * n / total))):
        if 1 < first < total:
            yield {"x": first, "y": total // first}


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
