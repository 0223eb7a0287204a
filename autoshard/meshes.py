"""Slices and the logical meshes on them: what a user names, and what is searched when they name none."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from numbers import Integral

import cost_models as cm

__all__ = ["candidate_meshes", "machines", "resolve_topology"]


def resolve_topology(topology: str | cm.Topology, mesh: Mapping[str, int] | None) -> cm.Topology:
    """Return the slice that a user named.

    Args:
      topology: a slice or several, or their name; a bare generation with a mesh means the smallest slice that holds it.
      mesh: axis name to size, or None.

    Raises:
      cost_models.TopologyError: the name is no slice.
      cost_models.MeshError: the mesh is empty or no mapping, or an axis has no name or no whole size from 1.
    """
    if mesh is not None:
        _check_mesh(mesh)
    if isinstance(topology, cm.Topology):
        return topology
    if not isinstance(topology, str):
        raise cm.TopologyError(
            f"topology {topology!r} is of type {type(topology).__name__}: give the name of a slice, such as"
            ' "v3:4x4", or a cost_models.Topology.'
        )
    if mesh is not None and _is_generation(topology):
        return cm.Topology.smallest(topology, math.prod(mesh.values()))
    return cm.Topology.parse(topology)


def machines(
    topology: str | cm.Topology, mesh: Mapping[str, int] | None
) -> tuple[cm.Topology, list[dict[str, int]]]:
    """Return the slice that a user named and the meshes to search on it; errors as of `resolve_topology`."""
    slice_ = resolve_topology(topology, mesh)
    return slice_, list(candidate_meshes(slice_)) if mesh is None else [dict(mesh)]


def _check_mesh(mesh: Mapping[str, int]) -> None:
    cure = 'Give axes and sizes, such as {"data": 8, "model": 4}, or leave mesh out to have it chosen.'
    if not isinstance(mesh, Mapping):
        raise cm.MeshError(f"mesh {mesh!r} is of type {type(mesh).__name__}, no mapping. {cure}")
    if not mesh:
        raise cm.MeshError(f"mesh {{}} has no axes and so no devices. {cure}")
    wrong = [
        f"axis {name!r} has size {size!r}"
        for name, size in mesh.items()
        if not isinstance(name, str) or not isinstance(size, Integral) or size < 1
    ]
    if wrong:
        raise cm.MeshError(
            f"mesh {dict(mesh)}: {', '.join(wrong)}; names are text and sizes whole numbers from 1. {cure}"
        )


def _is_generation(name: str) -> bool:
    try:
        cm.chip(name)
    except cm.UnknownChipError:
        return False
    return True


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
