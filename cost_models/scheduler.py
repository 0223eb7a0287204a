"""The compiler's own price of a collective, for comparison with `cost_models.collectives`.

The TPU compiler's latency-hiding scheduler decides by these figures what it runs while a collective is under
way, and writes them into its schedule dump. They see the group's size and little else: not strides, nor hops,
nor that groups and the cores of a chip share links. With N the full tensor, k the group's size, L one link in
one direction and D the longest axis of the slice that the group touches:

    all-gather          N / (2 d L)       d = 2 where the group covers two whole wrapped axes, otherwise 1
    all-reduce          N / (d L)
    reduce-scatter      N / (d L)         which it lowers to an all-reduce and a slice
    all-to-all          N/k (k-1)/k D / (2 L), a half of it on a wrapped slice, 0 within a chip
    collective-permute  N / L

Read from schedule dumps of libtpu 0.0.52 for v3:4x4 to v3:32x32, 64 KiB to 256 MiB, within 1 %; on other
generations checked at 32 MiB only. Some all-gathers were seen with a factor (k-1)/k. Transfers between slices are no
part of it.
"""

from cost_models.collectives import COLLECTIVES, CollectiveKind
from cost_models.placement import LINE, Placement

__all__ = ["scheduler_seconds"]


def scheduler_seconds(
    kind: CollectiveKind, full_bytes: float, axes: tuple[str, ...], placement: Placement
) -> float:
    """Price a collective as the compiler's scheduler does.

    Args:
        kind: as `collective_seconds`.
        full_bytes: as `collective_seconds`.
        axes: names of the logical axes that a group spans.
        placement: the mesh on its slice.

    Returns:
        Seconds; 0 for a group of one.

    Raises:
        ValueError: for an unknown kind.
        KeyError: for an axis that the mesh lacks.

    >>> from cost_models import Topology, place
    >>> grid = place(Topology.parse("v3:4x4"), {"data": 4, "model": 8})
    >>> round(scheduler_seconds("all_gather", 2**25, ("model",), grid) * 1e6, 1)
    204.6

    """
    if kind not in COLLECTIVES:
        raise ValueError(f"Unknown collective {kind!r}. Choose one of {', '.join(COLLECTIVES)}.")
    topology = placement.topology
    segments = [segment for axis in axes for segment in placement.axis_segments(axis)]
    group = 1
    for axis in axes:
        group *= placement.axis_sizes[axis]
    if group == 1:
        return 0.0
    rings = [segment for segment in segments if segment.wrapped and segment.extent == segment.size]
    seconds = full_bytes / topology.chip.link_bytes_per_second
    planes = 2 if len(rings) >= 2 else 1
    match kind:
        case "all_gather":
            return seconds / (2 * planes)
        case "all_reduce" | "reduce_scatter":
            return seconds / planes
        case "all_to_all":
            between = [segment for segment in segments if segment.axis != "core"]
            sizes = [max(topology.dims) if segment.axis == LINE else segment.size for segment in between]
            ports = 2 if any(topology.wrap) else 1
            return seconds / group * (group - 1) / group * max(sizes, default=0) / (2 * ports)
    return seconds
