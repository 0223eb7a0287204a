"""The physical links that a group of devices uses: the geometry below the collectives' prices.

A group spans some logical axes of a `Placement`. `group_links` reduces it to a few `Lane`s, one per physical
axis, each with its length, its ports and how many groups share a link, and to how many of its devices a slice
holds. `permutation_load` routes an arbitrary permutation and counts the messages on the busiest link.

A switch, as GPUs have within a node and as the network between slices is taken for, gives every device a link
of its own: groups do not share it, and everyone is one hop away.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

from cost_models.placement import LINE, Placement
from cost_models.topology import Topology

__all__ = ["GroupLinks", "Lane", "PermutationLoad", "group_links", "permutation_load", "shift_load"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lane:
    """One physical axis as a group uses it.

    Attributes:
        extent: chips (on a snake: devices) of the group along the axis.
        ports: directions in which the chip at the end of the stretch can receive: 2 on a ring, 1 on a line and
            from a switch.
        share: bytes on one link per byte that one device moves one logical hop: groups interleaved by a
            stride times devices of a chip.
        hops: physical hops across the lane: half way round a ring, from end to end of a line, 1 over a switch.
        contiguous: whether neighbours in the group are neighbours in the slice.
        switched: whether a switch joins the devices, rather than links between neighbours.

    """

    extent: int
    ports: int
    share: float
    hops: int
    contiguous: bool
    switched: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupLinks:
    """What a collective needs to know of a group.

    Attributes:
        size: devices in the group.
        lanes: inter-chip axes in use, in no particular order.
        cores: devices of one chip in the group; they talk over the chip's own link.
        inside: devices of the group in one slice; the fewest, where a snake puts unequal parts into slices.

    """

    size: int
    lanes: tuple[Lane, ...]
    cores: int
    inside: int


@functools.lru_cache(maxsize=65536)
def group_links(placement: Placement, axes: tuple[str, ...]) -> GroupLinks:
    """Find the links of the groups that span some logical axes.

    Args:
        placement: the mesh on its slice.
        axes: names of logical axes; the order does not matter.

    Returns:
        The lanes that every such group uses.

    Raises:
        ValueError: naming all axes that the mesh lacks, or that are given twice.

    >>> from cost_models import Topology, place
    >>> links = group_links(place(Topology.parse("v3:8x8"), {"data": 8, "model": 16}), ("model",))
    >>> links.size, links.cores, [lane.extent for lane in links.lanes]
    (16, 2, [8])

    """
    _check_axes(placement, axes)
    chip = placement.topology.chip
    per_chip = chip.devices_per_chip
    wraps = dict(zip("xyz", placement.topology.wrap, strict=False))
    stretches: dict[str, list[tuple[int, int, int]]] = {}
    for name in axes:
        for segment in placement.axis_segments(name):
            stretches.setdefault(segment.axis, []).append((segment.stride, segment.extent, segment.size))
    cores = math.prod(extent for _, extent, _ in stretches.pop("core", []))
    stretches.pop("slice", None)
    lanes = []
    if chip.has_switch and stretches:
        extent = math.prod(extent for parts in stretches.values() for _, extent, _ in parts)
        lanes.append(Lane(extent=extent, ports=1, share=1, hops=1, contiguous=True, switched=True))
        stretches = {}
    for axis, parts in stretches.items():
        for stride, extent, size in _merge(parts):
            if axis == LINE and per_chip % (stride * extent) == 0:
                cores *= extent
            elif axis == LINE:
                # On a snake the cores of a chip are neighbours, so the stride already counts those that
                # share.
                hops = -(-(extent - 1) * stride // per_chip)
                near = stride <= per_chip
                lanes.append(Lane(extent=extent, ports=1, share=stride, hops=hops, contiguous=near))
            else:
                ring = wraps[axis] and extent * stride == size
                steps = extent // 2 if ring else extent - 1
                lanes.append(
                    Lane(
                        extent=extent,
                        ports=2 if ring else 1,
                        share=stride * per_chip,
                        hops=steps * stride,
                        contiguous=stride == 1,
                    )
                )
    size = math.prod(placement.axis_sizes[name] for name in axes)
    return GroupLinks(size=size, lanes=tuple(lanes), cores=cores, inside=_inside(placement, axes))


def _inside(placement: Placement, axes: tuple[str, ...]) -> int:
    """Count the devices of a group in each slice that it touches, and return the fewest."""
    if placement.topology.num_slices == 1:
        return math.prod(placement.axis_sizes[name] for name in axes)
    held: collections.Counter[tuple[tuple[int, ...], int]] = collections.Counter()
    positions = itertools.product(*(range(size) for _, size in placement.mesh))
    others = [at for at, (name, _) in enumerate(placement.mesh) if name not in axes]
    for position, device in zip(positions, placement.device_order, strict=True):
        held[tuple(position[at] for at in others), placement.topology.slice_of(device)] += 1
    return min(held.values())


def _check_axes(placement: Placement, axes: tuple[str, ...]) -> None:
    unknown = [axis for axis in axes if axis not in placement.axis_sizes]
    twice = sorted({axis for axis in axes if axes.count(axis) > 1})
    faults = [f"{axis!r} is not an axis" for axis in unknown] + [f"{axis!r} is given twice" for axis in twice]
    if faults:
        known = ", ".join(f"{name}={size}" for name, size in placement.mesh)
        raise ValueError(
            f"Cannot form a group over {axes}: {', '.join(faults)}. The mesh has the axes {known}."
        )


def _merge(parts: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Join stretches of one physical axis that continue each other."""
    merged: list[tuple[int, int, int]] = []
    for stride, extent, size in sorted(parts):
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0], merged[-1][1] * extent, size)
        else:
            merged.append((stride, extent, size))
    return merged


@dataclasses.dataclass(frozen=True, kw_only=True)
class PermutationLoad:
    """The busiest links of a permutation, in messages.

    Attributes:
        link_messages: messages over the busiest inter-chip link in one direction.
        core_messages: messages over the busiest link between two devices of a chip, in one direction.
        dcn_messages: messages between slices that the busiest chip sends, or receives.
        hops: inter-chip hops of the longest message within a slice.
        moved: devices that send to another device.

    """

    link_messages: int
    core_messages: int
    dcn_messages: int
    hops: int
    moved: int


def permutation_load(placement: Placement, pairs: Iterable[tuple[int, int]]) -> PermutationLoad:
    """Route messages in dimension order, the shorter way round a ring, and count them on every link.

    Between slices a message goes straight from chip to chip.

    Args:
        placement: the mesh on its slice.
        pairs: (source, target) positions in the row-major mesh, as in `jax.lax.ppermute`.

    Returns:
        The busiest links' messages and the longest route.

    >>> from cost_models import Topology, place
    >>> row = place(Topology.parse("v5e:4x1"), {"x": 4})
    >>> permutation_load(row, [(0, 3), (1, 2)]).link_messages
    2

    """
    return _permutation_load(placement, tuple(pairs))


@functools.lru_cache(maxsize=16384)
def _permutation_load(placement: Placement, pairs: tuple[tuple[int, int], ...]) -> PermutationLoad:
    topology = placement.topology
    links: collections.Counter[_Link] = collections.Counter()
    within: collections.Counter[_Link] = collections.Counter()
    between: collections.Counter[_Link] = collections.Counter()
    longest = moved = 0
    for pair in pairs:
        source, target = (placement.device_order[position] for position in pair)
        (start, core), (end, end_core) = topology.coordinates(source), topology.coordinates(target)
        home, away = topology.slice_of(source), topology.slice_of(target)
        moved += source != target
        if home != away:
            between.update([(home, start, "out"), (away, end, "in")])
        elif start != end:
            route = list(_route(topology, start, end))
            links.update((home, *link) for link in route)
            longest = max(longest, 1 if topology.chip.has_switch else len(route))
        elif core != end_core:
            within[home, start, core, end_core] += 1
    return PermutationLoad(
        link_messages=max(links.values(), default=0),
        core_messages=max(within.values(), default=0),
        dcn_messages=max(between.values(), default=0),
        hops=longest,
        moved=moved,
    )


_Link = tuple[object, ...]


def _route(topology: Topology, start: tuple[int, ...], end: tuple[int, ...]) -> Iterator[_Link]:
    """List the links, each in one direction, from a chip to another one of its slice."""
    if topology.chip.has_switch:
        yield from ((start, "out"), (end, "in"))
        return
    here = list(start)
    for axis, (size, ring) in enumerate(zip(topology.dims, topology.wrap, strict=True)):
        ahead = end[axis] - here[axis]
        if ring and 2 * abs(ahead) > size:
            ahead -= size if ahead > 0 else -size
        sign = 1 if ahead > 0 else -1
        for _ in range(abs(ahead)):
            yield tuple(here), axis, sign
            here[axis] = (here[axis] + sign) % size


@functools.lru_cache(maxsize=16384)
def shift_load(placement: Placement, axes: tuple[str, ...], shift: int, cyclic: bool) -> PermutationLoad:
    """Load of moving every shard by some positions along the given axes, row-major among them.

    Args:
        placement: the mesh on its slice.
        axes: logical axes that form the line of shards, slowest first.
        shift: positions, of either sign.
        cyclic: whether the shards that leave one end enter the other.

    Returns:
        The load of all groups shifting at once.

    Raises:
        ValueError: as `group_links`.

    """
    _check_axes(placement, axes)
    return permutation_load(placement, _shift_pairs(placement.mesh, axes, shift, cyclic))


def _shift_pairs(
    mesh: tuple[tuple[str, int], ...], axes: tuple[str, ...], shift: int, cyclic: bool
) -> list[tuple[int, int]]:
    sizes: Mapping[str, int] = dict(mesh)
    steps: dict[str, int] = {}
    width = 1
    for name, size in reversed(mesh):
        steps[name] = width
        width *= size
    line = [0]
    for name in axes:
        line = [base + steps[name] * at for base in line for at in range(sizes[name])]
    others = [range(0, steps[name] * size, steps[name]) for name, size in mesh if name not in axes]
    pairs = []
    for offset in map(sum, itertools.product(*others)):
        for at, source in enumerate(line):
            if cyclic or 0 <= at + shift < len(line):
                pairs.append((offset + source, offset + line[(at + shift) % len(line)]))
    return pairs
