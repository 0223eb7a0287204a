"""What a collective costs on the links that its group occupies.

All formulas are here. With V the bytes of the full tensor of one group, g the group's size, e the chips of the
group along a physical axis, p its ports (2 on a ring, 1 on a line), s the share (groups interleaved on the axis
times devices of a chip), c the group's devices on one chip and L the bytes per second of one link in one
direction:

    all-gather over one axis      (V/c) (e-1)/e s / (p L)
    over several contiguous axes  (V/c) (k-1)/k s / (sum(p) L),  k the product of their lengths
    reduce-scatter                as all-gather; as all-reduce over more mesh axes than the compiler scatters
    all-reduce                    a reduce-scatter, then an all-gather
    all-to-all                    (V e/g) s floor(e/2) ceil(e/2)/e^2 / L on a line; on a ring of even
                                  length half of it; the slowest axis counts
    collective-permute            bytes x (messages on the busiest link) / L

On a switch, which joins the GPUs of a node, p and s are 1: an all-gather takes V (g-1)/g / L, and an all-to-all
V (g-1)/g^2 / L, whatever part of the node the group is.

A group that spans slices, or nodes of GPUs, works in two levels: within each slice by the formulas above, and
between slices over the data centre network (DCN), another switch, through which each chip sends at D. With m
of the group's devices in a slice and d devices on a chip, an all-gather adds

    V (g-m)/(g m) d / D           each device gathers its counterparts' parts before its slice gathers
    V/g (g-m)/g d / D             an all-to-all

and the levels follow each other, while the messages of a permute travel at once. So m devices share what crosses.
The TPU compiler (libtpu 0.0.52, two slices) writes the same: an all-reduce becomes a reduce-scatter within each
slice, a transfer of a device's part between hosts and an all-gather, an all-gather a transfer and then an
all-gather within, a reduce-scatter the reverse; permutes become separate transfers.

The chip at the end of a stretch must receive all that it lacks through its ports; that bound is met by a
bidirectional ring on a wrapped axis, by pipelining along a line, and by splitting the tensor over the axes
where several are contiguous. On wrapped, contiguous axes that include a chip's cores, all-gather and
all-reduce are what the compiler's scheduler assumes (`cost_models.scheduler`). It assumes as much everywhere;
this model is stricter on three points:

* Without wraparound there is no second way round, which doubles the time: all-gathering 33.5 MB over 4 chips
  of a v5e slice measures 680 us where the ring formula gives 377.
* Groups that stride over others share their links with them.
* The cores of a chip share its links, so a group that leaves out the core axis has half of each. The
  scheduler itself reckons so for an all-to-all.

What hardware makes of the links is data: `line_efficiency` on one axis without wraparound, `joint_efficiency`
on several axes at once. An all-reduce of 606 MB on v6e 16x16 takes 5.12 ms where four links at full rate allow
3.35: both axes together give 1.3 times what one gives. The loss is charged to using two axes, not to reducing,
because a reduce-scatter on v2 and one-axis gathers on v5e reach the rate of the links; on v7x a gather over two
axes does so as well.

A reduce-scatter is not charged as the all-reduce that the compiler's scheduler takes it for: v2 hardware
measures a reduce-scatter at the rate of the links. An all-reduce pipelined to one end of a line and back
could do with V / L; no measurement shows that one does.

A group's devices on one chip exchange over the chip's own link while the next part of the tensor travels
between chips, so the slower of the two counts. Latency is a start plus one hop's time per physical hop, and
hops hide behind the transfer where that takes longer: `max(hops x latency, bytes / bandwidth)`. A pass through
a switch, of which an all-reduce takes two, adds to the transfer: in XLA's table for 8 H100 an all-reduce of any
size takes 1.7 to 2.1 times as long as an all-gather.

Sources: Austin et al., How to Scale Your Model, 2025, sharding chapter (rings, lines, all-to-all, latency);
GPU chapter of the same (switch, nodes); the XLA TPU scheduler's figures (link rates, several axes); Chan et al.,
Collective communication: theory, practice, and experience, 2007 (hierarchical composition).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable
from typing import Literal, get_args

from cost_models.chip import Chip
from cost_models.links import (
    GroupLinks,
    Lane,
    PermutationLoad,
    group_links,
    permutation_load,
    shift_load,
)
from cost_models.placement import Placement

__all__ = [
    "COLLECTIVES",
    "CollectiveCost",
    "CollectiveKind",
    "collective_seconds",
    "permutation_seconds",
    "sent_bytes",
]

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_permute"]
COLLECTIVES: tuple[CollectiveKind, ...] = get_args(CollectiveKind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveCost:
    """Price of one collective.

    Attributes:
        kind: which collective.
        group_size: devices that take part in each group.
        seconds: the sum of the next two.
        latency_seconds: start, the hops that the transfer does not hide, and passes through switches.
        bandwidth_seconds: time that the busiest link, and then that between slices, is in use.
        hops: physical hops one after the other.
        sent_bytes: bytes that one device sends, counted once however many links they cross.
        link_bytes: bytes over the busiest inter-chip link in one direction, of all groups that share it.
        dcn_bytes: bytes that the busiest chip sends to other slices.

    >>> print(CollectiveCost(kind="all_gather", group_size=4, seconds=3e-5, latency_seconds=5e-6,
    ...                      bandwidth_seconds=2.5e-5, hops=3, sent_bytes=3e6, link_bytes=3e6, dcn_bytes=0))
    all_gather of 4: 30.0 us (latency 5.0, bandwidth 25.0), 3 hops, 3.00 MB on the busiest link

    """

    kind: str
    group_size: int
    seconds: float
    latency_seconds: float
    bandwidth_seconds: float
    hops: int
    sent_bytes: float
    link_bytes: float
    dcn_bytes: float

    def __str__(self) -> str:
        return (
            f"{self.kind} of {self.group_size}: {self.seconds * 1e6:.1f} us (latency "
            f"{self.latency_seconds * 1e6:.1f}, bandwidth {self.bandwidth_seconds * 1e6:.1f}), "
            f"{self.hops} hops, {self.link_bytes / 1e6:.2f} MB on the busiest link"
            f"{f', {self.dcn_bytes / 1e6:.2f} MB between slices' if self.dcn_bytes else ''}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Load:
    """Bytes that a collective puts on links.

    Attributes:
        wire: bytes one after the other through one inter-chip link's rate.
        link: bytes over the busiest inter-chip link.
        core: bytes over the busiest link within a chip.
        dcn: bytes that the busiest chip sends to other slices.

    """

    wire: float = 0.0
    link: float = 0.0
    core: float = 0.0
    dcn: float = 0.0

    def times(self, factor: float) -> "_Load":
        return _Load(
            wire=factor * self.wire, link=factor * self.link, core=factor * self.core, dcn=factor * self.dcn
        )


@functools.lru_cache(maxsize=262144)
def collective_seconds(
    kind: CollectiveKind,
    full_bytes: float,
    axes: tuple[str, ...],
    placement: Placement,
    *,
    shift: int = 1,
    cyclic: bool = True,
) -> CollectiveCost:
    """Price a collective that all groups over some logical axes run at once.

    Args:
        kind: `"all_gather"`, `"reduce_scatter"`, `"all_reduce"`, `"all_to_all"` or `"collective_permute"`.
        full_bytes: bytes of the gathered, or not yet reduced, tensor of one group: what an all-gather
            returns, what a reduce-scatter or an all-reduce takes, and group size times what an all-to-all
            takes. For a permute, the bytes that one device sends.
        axes: names of the logical axes that a group spans; for a permute, the line of shards, slowest first.
        placement: the mesh on its slice.
        shift: for a permute, how many positions each shard moves.
        cyclic: for a permute, whether shards that leave one end enter the other.

    Returns:
        The price. Zero for no bytes, for a group of one, and for a permute that moves nothing.

    Raises:
        ValueError: for an unknown kind, axes that the mesh lacks or given twice, or negative bytes.

    >>> from cost_models import Topology, place
    >>> pod = place(Topology.parse("v3:32x32"), {"data": 32, "model": 64})
    >>> cost = collective_seconds("all_gather", 2**28, ("model",), pod)
    >>> round(cost.bandwidth_seconds / (2**28 * 31 / 32 / (2 * 82e9)), 6)
    1.0

    """
    if kind not in COLLECTIVES:
        raise ValueError(f"Unknown collective {kind!r}. Choose one of {', '.join(COLLECTIVES)}.")
    if not full_bytes >= 0:
        raise ValueError(f"{kind} over {axes} was given {full_bytes} bytes. Bytes are not negative.")
    chip = placement.topology.chip
    links = group_links(placement, axes)
    if kind == "collective_permute":
        return _permute(links.size, chip, full_bytes, shift_load(placement, axes, shift, cyclic))
    if links.size == 1 or full_bytes == 0:
        return _price(kind, links.size, chip, sent=0.0, load=_Load(), hops=0)
    whole = kind == "reduce_scatter" and len(axes) > chip.reduce_scatter_axes
    sent = sent_bytes("all_reduce" if whole else kind, full_bytes, links.size)
    per_byte = _exchange(chip, links) if kind == "all_to_all" else _gather(chip, links)
    passes = 2 if kind == "all_reduce" or whole else 1
    hops = passes * sum(lane.hops for lane in links.lanes)
    load = per_byte.times(passes * full_bytes)
    return _price(kind, links.size, chip, sent=sent, load=load, hops=hops, passes=passes)


def sent_bytes(kind: CollectiveKind, full_bytes: float, group_size: int) -> float:
    """Return the bytes that each device of a group sends, on a ring or directly.

    Args:
        kind: as for `collective_seconds`.
        full_bytes: as for `collective_seconds`.
        group_size: devices of the group.

    >>> [sent_bytes(kind, 80.0, 4) for kind in COLLECTIVES]
    [60.0, 60.0, 120.0, 15.0, 80.0]

    """
    if kind == "collective_permute":
        return full_bytes
    share = (group_size - 1) / group_size
    if kind == "all_to_all":
        share /= group_size
    return full_bytes * share * (2 if kind == "all_reduce" else 1)


def permutation_seconds(
    bytes_per_device: float, pairs: Iterable[tuple[int, int]], placement: Placement
) -> CollectiveCost:
    """Price a collective-permute between arbitrary devices.

    Args:
        bytes_per_device: bytes that each source sends.
        pairs: (source, target) positions in the row-major mesh.
        placement: the mesh on its slice.

    Returns:
        The price; zero if nothing moves.

    """
    load = permutation_load(placement, pairs)
    return _permute(placement.num_devices, placement.topology.chip, bytes_per_device, load)


def _permute(size: int, chip: Chip, num_bytes: float, load: PermutationLoad) -> CollectiveCost:
    link = load.link_messages * num_bytes
    busy = _Load(wire=link, link=link, core=load.core_messages * num_bytes, dcn=load.dcn_messages * num_bytes)
    sent = num_bytes if load.moved else 0.0
    return _price("collective_permute", size, chip, sent=sent, load=busy, hops=load.hops)


def _price(
    kind: CollectiveKind, size: int, chip: Chip, *, sent: float, load: _Load, hops: int, passes: int = 1
) -> CollectiveCost:
    """Turn bytes into seconds.

    Args:
        kind: as in the result.
        size: as in the result.
        chip: figures of one device.
        sent: bytes that a device sends; 0 makes the collective free.
        load: bytes on the links.
        hops: physical hops.
        passes: passes through the network between slices, if there is anything for it.

    """
    within = load.wire / chip.link_bytes_per_second
    if load.core:
        within = max(within, load.core / chip.core_link_bytes_per_second)
    between = load.dcn / (chip.dcn_bytes_per_second * chip.dcn_efficiency)
    bandwidth = max(within, between) if kind == "collective_permute" else within + between
    latency = 0.0
    if sent:
        waiting = hops * chip.hop_latency_seconds
        hidden = 0.0 if chip.has_switch else bandwidth
        latency = chip.collective_start_seconds + max(0.0, waiting - hidden)
        latency += passes * chip.dcn_latency_seconds if load.dcn else 0.0
    return CollectiveCost(
        kind=kind,
        group_size=size,
        seconds=latency + bandwidth,
        latency_seconds=latency,
        bandwidth_seconds=bandwidth,
        hops=hops if sent else 0,
        sent_bytes=sent,
        link_bytes=load.link,
        dcn_bytes=load.dcn,
    )


@functools.lru_cache(maxsize=65536)
def _gather(chip: Chip, links: GroupLinks) -> _Load:
    """Load of an all-gather per byte of the full tensor.

    Lanes run one after the other; each gathers all that the lanes before it left, so the last one carries the
    most. Contiguous lanes may instead run together, each starting with a part of the tensor. The best of
    all orders counts.
    """
    within = (links.cores - 1) / links.cores
    between = (links.size - links.inside) / (links.size * links.inside) * chip.devices_per_chip
    if not links.lanes:
        return _Load(core=within, dcn=between)
    stages = [(lane.extent, _lane_cost(chip, (lane,)), lane) for lane in links.lanes]
    options = [stages]
    together = [lane for lane in links.lanes if lane.contiguous]
    if len(together) > 1:
        size = math.prod(lane.extent for lane in together)
        joint = (size, _lane_cost(chip, tuple(together)), together[0])
        options.append([joint, *(stage for stage in stages if not stage[2].contiguous)])
    best = min(
        (_in_turn(order) for option in options for order in itertools.permutations(option)),
        key=lambda pair: pair[0],
    )
    return _Load(wire=best[0] / links.cores, link=best[1] / links.cores, core=within, dcn=between)


def _lane_cost(chip: Chip, lanes: tuple[Lane, ...]) -> tuple[float, float]:
    """Link time and load of the busiest link, per byte that one device receives over lanes in parallel."""
    ports = sum(lane.ports / lane.share for lane in lanes)
    # The fitted loss on lines is known for one axis alone; a pair of short lines on v7x shows none.
    single = chip.line_efficiency if lanes[0].ports == 1 else 1.0
    loss = single if len(lanes) == 1 else chip.joint_efficiency
    return 1.0 / (ports * loss), 1.0 / ports


def _in_turn(stages: tuple[tuple[int, tuple[float, float], Lane], ...]) -> tuple[float, float]:
    time = load = 0.0
    remaining = math.prod(extent for extent, _, _ in stages)
    for extent, (cost, on_link), _ in stages:
        # Later stages multiply the gathered part by `remaining`, so this one ends at 1 / remaining of it.
        remaining //= extent
        received = (extent - 1) / extent / remaining
        time += received * cost
        load = max(load, received * on_link)
    return time, load


@functools.lru_cache(maxsize=65536)
def _exchange(chip: Chip, links: GroupLinks) -> _Load:
    """Load of an all-to-all per byte of the full tensor; every lane carries each device's tensor once."""
    wire = load = 0.0
    for lane in links.lanes:
        on_link = _cut(lane) * lane.share * lane.extent / links.size
        loss = chip.line_efficiency if lane.ports == 1 else 1.0
        wire, load = max(wire, on_link / loss), max(load, on_link)
    within = (links.cores - 1) / links.cores / links.size
    between = (links.size - links.inside) / links.size**2 * chip.devices_per_chip
    return _Load(wire=wire, link=load, core=within, dcn=between)


def _cut(lane: Lane) -> float:
    """Load of a lane's busiest link when all its chips exchange, per byte of their tensor."""
    if lane.switched:
        return (lane.extent - 1) / lane.extent**2
    if lane.ports == 1:
        half = lane.extent // 2
        return half * (lane.extent - half) / lane.extent**2
    return _ring_load(lane.extent)


def _ring_load(extent: int) -> float:
    """Load of a ring's link, per byte of the ring's tensor: mean distance over both directions' links."""
    distances = sum(min(step, extent - step) for step in range(extent))
    return distances / (2 * extent**2)
