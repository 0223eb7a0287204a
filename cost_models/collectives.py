"""What a collective costs on the links that its group occupies.

All formulas are here. With V the bytes of the full tensor of one group, e the chips of the group along a
physical axis, p its ports (2 on a ring, 1 on a line), s the share (groups interleaved on the axis times
devices of a chip), c the group's devices on one chip and L the bytes per second of one link in one direction:

    all-gather over one axis      (V/c) (e-1)/e s / (p L)
    over several contiguous axes  (V/c) (k-1)/k s / (sum(p) L),  k the product of their lengths
    reduce-scatter                as all-gather; as all-reduce over more mesh axes than the compiler scatters
    all-reduce                    a reduce-scatter, then an all-gather
    all-to-all                    (V e/g) s floor(e/2) ceil(e/2)/e^2 / L on a line; on a ring of even
                                  length half of it; the slowest axis counts; g is the group's size
    collective-permute            bytes x (messages on the busiest link) / L

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

A reduce-scatter is not charged as the all-reduce that the compiler's scheduler takes it for: v2 hardware
measures a reduce-scatter at the rate of the links. An all-reduce pipelined to one end of a line and back
could do with V / L; no measurement shows that one does.

A group's devices on one chip exchange over the chip's own link while the next part of the tensor travels
between chips, so the slower of the two counts. Latency is a start plus one hop's time per physical hop, and
hops hide behind the transfer where that takes longer: `max(hops x latency, bytes / bandwidth)`.

Sources: Austin et al., How to Scale Your Model, 2025, sharding chapter (rings, lines, all-to-all, latency);
the XLA TPU scheduler's figures (link rates, several axes); Chan et al., Collective communication: theory,
practice, and experience, 2007 (hierarchical composition).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable
from typing import Literal, get_args

from cost_models.chip import Chip
from cost_models.links import GroupLinks, Lane, group_links, permutation_load, shift_load
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
        latency_seconds: start, and the hops that the transfer does not hide.
        bandwidth_seconds: time that the busiest link is in use.
        hops: physical hops one after the other.
        sent_bytes: bytes that one device sends, counted once however many links they cross.
        link_bytes: bytes over the busiest inter-chip link in one direction, of all groups that share it.

    >>> print(CollectiveCost(kind="all_gather", group_size=4, seconds=3e-5, latency_seconds=5e-6,
    ...                      bandwidth_seconds=2.5e-5, hops=3, sent_bytes=3e6, link_bytes=3e6))
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

    def __str__(self) -> str:
        return (
            f"{self.kind} of {self.group_size}: {self.seconds * 1e6:.1f} us (latency "
            f"{self.latency_seconds * 1e6:.1f}, bandwidth {self.bandwidth_seconds * 1e6:.1f}), "
            f"{self.hops} hops, {self.link_bytes / 1e6:.2f} MB on the busiest link"
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
        load = shift_load(placement, axes, shift, cyclic)
        busy = (load.link_messages * full_bytes, load.core_messages * full_bytes)
        sent = full_bytes if load.moved else 0.0
        return _price(kind, links.size, chip, sent=sent, busy=busy, wire=busy[0], hops=load.hops)
    if links.size == 1 or full_bytes == 0:
        return _price(kind, links.size, chip, sent=0.0, busy=(0.0, 0.0), wire=0.0, hops=0)
    hops = sum(lane.hops for lane in links.lanes)
    whole = kind == "reduce_scatter" and len(axes) > chip.reduce_scatter_axes
    sent = sent_bytes("all_reduce" if whole else kind, full_bytes, links.size)
    if kind == "all_to_all":
        wire, on_link, on_core = _exchange(chip, links)
    else:
        wire, on_link, on_core = _gather(chip, links)
        if kind == "all_reduce" or whole:
            hops, wire, on_link, on_core = 2 * hops, 2 * wire, 2 * on_link, 2 * on_core
    busy = (on_link * full_bytes, on_core * full_bytes)
    return _price(kind, links.size, chip, sent=sent, busy=busy, wire=wire * full_bytes, hops=hops)


def sent_bytes(kind: CollectiveKind, full_bytes: float, group_size: int) -> float:
    """Return the bytes that each device of a group sends, on a ring or directly.

    Args:
        kind: as for `collective_seconds`.
        full_bytes: as for `collective_seconds`.
        group_size: devices of the group.

    >>> [sent_bytes(kind, 80, 4) for kind in COLLECTIVES]
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
    busy = (load.link_messages * bytes_per_device, load.core_messages * bytes_per_device)
    sent = bytes_per_device if load.moved else 0.0
    chip = placement.topology.chip
    return _price(
        "collective_permute", placement.num_devices, chip, sent=sent, busy=busy, wire=busy[0], hops=load.hops
    )


def _price(
    kind: str, size: int, chip: Chip, *, sent: float, busy: tuple[float, float], wire: float, hops: int
) -> CollectiveCost:
    """Turn bytes into seconds.

    Args:
        kind: as in the result.
        size: as in the result.
        chip: figures of one device.
        sent: bytes that a device sends; 0 makes the collective free.
        busy: bytes on the busiest inter-chip link and on the busiest link within a chip.
        wire: bytes one after the other through one inter-chip link's rate.
        hops: physical hops.

    """
    bandwidth = wire / chip.link_bytes_per_second
    if busy[1]:
        bandwidth = max(bandwidth, busy[1] / chip.core_link_bytes_per_second)
    latency = 0.0
    if sent:
        latency = chip.collective_start_seconds + max(0.0, hops * chip.hop_latency_seconds - bandwidth)
    return CollectiveCost(
        kind=kind,
        group_size=size,
        seconds=latency + bandwidth,
        latency_seconds=latency,
        bandwidth_seconds=bandwidth,
        hops=hops if sent else 0,
        sent_bytes=sent,
        link_bytes=busy[0],
    )


@functools.lru_cache(maxsize=65536)
def _gather(chip: Chip, links: GroupLinks) -> tuple[float, float, float]:
    """All-gather per byte of the full tensor: link time in bytes, bytes on a link, bytes on a core link.

    Lanes run one after the other; each gathers all that the lanes before it left, so the last one carries the
    most. Contiguous lanes may instead run together, each starting with a part of the tensor. The best of
    all orders counts.
    """
    within = (links.cores - 1) / links.cores
    if not links.lanes:
        return 0.0, 0.0, within
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
    return best[0] / links.cores, best[1] / links.cores, within


def _lane_cost(chip: Chip, lanes: tuple[Lane, ...]) -> tuple[float, float]:
    """Link time and load of the busiest link, per byte that one device receives over lanes in parallel."""
    ports = sum(lane.ports / lane.share for lane in lanes)
    # The fitted loss on lines is known for one axis alone; a pair of short lines on v7x shows none.
    loss = chip.line_efficiency if len(lanes) == 1 and lanes[0].ports == 1 else 1.0
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
def _exchange(chip: Chip, links: GroupLinks) -> tuple[float, float, float]:
    """All-to-all per byte of the full tensor, as `_gather`; every lane carries each device's tensor once."""
    within = (links.cores - 1) / links.cores / links.size
    wire = load = 0.0
    for lane in links.lanes:
        half = lane.extent // 2
        cut = half * (lane.extent - half) / lane.extent**2 if lane.ports == 1 else _ring_load(lane.extent)
        on_link = cut * lane.share * lane.extent / links.size
        loss = chip.line_efficiency if lane.ports == 1 else 1.0
        wire, load = max(wire, on_link / loss), max(load, on_link)
    return wire, load, within


def _ring_load(extent: int) -> float:
    """Load of a ring's link, per byte of the ring's tensor: mean distance over both directions' links."""
    distances = sum(min(step, extent - step) for step in range(extent))
    return distances / (2 * extent**2)
