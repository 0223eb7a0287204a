"""Prices of collectives: published answers, measured points, the compiler's figures, and properties."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import (
    COLLECTIVES,
    Chip,
    CollectiveCost,
    CollectiveKind,
    Placement,
    Topology,
    chip,
    collective_seconds,
    permutation_load,
    permutation_seconds,
    place,
    placements,
    scheduler_seconds,
)

US = 1e-6
KINDS: list[CollectiveKind] = list(COLLECTIVES)


def on(name: str, **mesh: int) -> Placement:
    return place(Topology.parse(name), mesh)


def like(name: str, changes: dict[str, Any], wrap: bool, **mesh: int) -> Placement:
    """Make a slice of a chip with other figures, for sources that assume others."""
    topology = Topology.parse(name)
    figures: Chip = dataclasses.replace(topology.chip, **changes)
    return place(Topology(chip=figures, dims=topology.dims, wrap=(wrap,) * len(topology.dims)), mesh)


# How to Scale Your Model, 2025, sharding chapter: v4, 4x4x4, bf16[1024, 4096], 4.5e10 B/s a link one way.
BOOK_V4 = on("v4:4x4x4", z=4, y=4, x=4)
BOOK_V = 2 * 1024 * 4096


def test_book_gather_over_one_axis() -> None:
    cost = collective_seconds("all_gather", BOOK_V / 4, ("x",), BOOK_V4)
    assert cost.bandwidth_seconds == pytest.approx(BOOK_V / 4 / 9e10 * 3 / 4)
    assert cost.bandwidth_seconds / (3 / 4) == pytest.approx(23 * US, rel=0.02)


def test_book_gather_over_two_axes() -> None:
    cost = collective_seconds("all_gather", BOOK_V, ("x", "y"), BOOK_V4)
    assert cost.bandwidth_seconds == pytest.approx(BOOK_V / (2 * 9e10) * 15 / 16)
    assert cost.bandwidth_seconds / (15 / 16) == pytest.approx(46 * US, rel=0.02)


def test_book_all_reduce() -> None:
    cost = collective_seconds("all_reduce", BOOK_V, ("z",), BOOK_V4)
    assert cost.bandwidth_seconds == pytest.approx(2 * BOOK_V / 9e10 * 3 / 4)
    assert cost.bandwidth_seconds / (3 / 4) == pytest.approx(190 * US, rel=0.03)


def test_book_small_gather_is_two_hops() -> None:
    cost = collective_seconds("all_gather", 2 * 128, ("x",), BOOK_V4)
    assert cost.hops == 4 // 2
    assert cost.latency_seconds + cost.bandwidth_seconds == pytest.approx(
        chip("v4").collective_start_seconds + 2 * US
    )


def test_book_all_to_all_is_a_quarter_of_a_gather() -> None:
    ring = on("v5e:16x16", y=16, x=16)
    quarter = collective_seconds("all_to_all", 2**28, ("x",), ring).bandwidth_seconds
    whole = collective_seconds("all_gather", 2**28, ("x",), ring).bandwidth_seconds
    assert quarter == pytest.approx(2**28 / (4 * 2 * 4.5e10))
    assert quarter / whole == pytest.approx(1 / 4 / (15 / 16))


def test_book_line_gather() -> None:
    """The book's 560 us, without the loss that its own measurement shows."""
    line = like("v5e:4x8", {"line_efficiency": 1.0}, False, a=8, b=4)
    cost = collective_seconds("all_gather", 2 * 2048 * 8192, ("b",), line)
    assert cost.bandwidth_seconds == pytest.approx(3 * 2 * 2048 * 8192 / 4 / 4.5e10)
    assert cost.bandwidth_seconds == pytest.approx(560 * US, rel=0.01)


@pytest.mark.parametrize(
    ("name", "mesh", "axes", "kind", "full_bytes", "measured", "tolerance"),
    [
        # v5e 8x4, all-gather over the axis of 4: How to Scale Your Model, sharding chapter, question 2.
        ("v5e:8x4", {"b": 4, "a": 8}, ("b",), "all_gather", 2 * 2048 * 8192, 680 * US, 0.02),
        ("v5e:8x4", {"b": 4, "a": 8}, ("b",), "all_gather", 2 * 256 * 256, 8 * US, 0.05),
        # v5e 8x16, all-gather over the wrapped axis of 16: from about 10 MB on at 95 % of 4.5e10 B/s on each of
        # the two links; How to Scale Your Model, later version of the sharding chapter.
        ("v5e:8x16", {"a": 16, "b": 8}, ("a",), "all_gather", 1e7, 1e7 * 15 / 16 / (0.95 * 2 * 4.5e10), 0.01),
        ("v5e:8x16", {"a": 16, "b": 8}, ("a",), "all_gather", 1e8, 1e8 * 15 / 16 / (0.95 * 2 * 4.5e10), 0.06),
        # v7x, all-gather of f32 over 4 chips by both cores: accelerator-microbenchmarks.
        ("v7x:2x2x1", {"a": 4, "core": 2}, ("a",), "all_gather", 4 * 4 * 65536, 1.573e6 / 71.8e9, 0.05),
        ("v7x:2x2x1", {"a": 4, "core": 2}, ("a",), "all_gather", 4 * 4 * 2**18, 6.291e6 / 129.2e9, 0.02),
        ("v7x:2x2x1", {"a": 4, "core": 2}, ("a",), "all_gather", 4 * 4 * 2**20, 25.17e6 / 161.9e9, 0.02),
        ("v7x:2x2x1", {"a": 4, "core": 2}, ("a",), "all_gather", 4 * 4 * 2**22, 100.7e6 / 174.8e9, 0.02),
        ("v7x:2x2x1", {"a": 4, "core": 2}, ("a",), "all_gather", 4 * 4 * 2**24, 402.7e6 / 178.8e9, 0.02),
        (
            "v7x:2x2x2",
            {"z": 2, "a": 4, "core": 2},
            ("a",),
            "all_gather",
            4 * 4 * 65536,
            1.573e6 / 69.5e9,
            0.05,
        ),
        (
            "v7x:2x2x2",
            {"z": 2, "a": 4, "core": 2},
            ("a",),
            "all_gather",
            4 * 4 * 2**18,
            6.291e6 / 127.4e9,
            0.03,
        ),
        (
            "v7x:2x2x2",
            {"z": 2, "a": 4, "core": 2},
            ("a",),
            "all_gather",
            4 * 4 * 2**20,
            25.17e6 / 162.1e9,
            0.02,
        ),
        (
            "v7x:2x2x2",
            {"z": 2, "a": 4, "core": 2},
            ("a",),
            "all_gather",
            4 * 4 * 2**24,
            402.7e6 / 178.8e9,
            0.02,
        ),
        # v2-8, reduce-scatter of a 134 MB shard over one hop: How to Scale Your Model, profiling chapter. The
        # mesh of 4 x 2 cores has its pairs on neighbouring chips' links or on the link within a chip.
        ("v2:2x2", {"a": 4, "b": 2}, ("b",), "reduce_scatter", 2 * 134e6, 1.13e-3, 0.05),
        # v6e, psum within a slice of 256 and between two: tpu-recipes, trillium/collectives, timed from the host.
        ("v6e:16x16", {"a": 256}, ("a",), "all_reduce", 2 * 17408**2, 5.12e-3, 0.01),
        ("2*v6e:16x16", {"dcn": 2, "ici": 256}, ("dcn",), "all_reduce", 303e6, 73.7e-3, 0.01),
    ],
)
def test_measured(
    name: str,
    mesh: dict[str, int],
    axes: tuple[str, ...],
    kind: CollectiveKind,
    full_bytes: float,
    measured: float,
    tolerance: float,
) -> None:
    cost = collective_seconds(kind, full_bytes, axes, on(name, **mesh))
    assert cost.seconds == pytest.approx(measured, rel=tolerance)


def test_several_axes_at_once_on_v6e() -> None:
    """Both axes together give 1.31 times what one gives; the links would allow 2."""
    pod = on("v6e:16x16", a=16, b=16)
    one, both = (collective_seconds("all_reduce", 2**30, axes, pod) for axes in (("a",), ("a", "b")))
    assert one.bandwidth_seconds == pytest.approx(2 * 2**30 * 15 / 16 / (2 * 90e9))
    assert both.bandwidth_seconds == pytest.approx(2 * 2**30 * 255 / 256 / (4 * 90e9 * 0.655))


def test_palm_between_two_pods() -> None:
    """PaLM 540B: two pods of 3072 v4, split 12 x 256 ways within; a step takes 17.6 s and loses 3 % to the second pod.

    About 1.3 GB of gradients leave each host of 4 chips in a step.
    """
    pods = on("2*v4:12x16x16", pod=2, model=12, data=256)
    cost = collective_seconds("all_reduce", 2 * 540.35e9 / 3072, ("pod",), pods)
    assert 4 * cost.dcn_bytes == pytest.approx(1.3e9, rel=0.1)
    assert 0.002 < cost.seconds / 17.6 < 0.03


# XLA's table of collectives on 8 H100 (default_collective_perf_table, sm_90): bytes and microseconds. An all-to-all
# counts the bytes of one device.
H100_SIZES = (2**16, 2**20, 2**24, 2**28, 2**31)
H100_TABLE: dict[CollectiveKind, tuple[float, ...]] = {
    "all_gather": (18.6, 31, 82, 729, 5340),
    "all_reduce": (39.7, 52, 145, 1262, 9340),
    "reduce_scatter": (38, 20, 87, 771, 5710),
    "all_to_all": (24, 55, 106, 759, 5530),
}


@pytest.mark.parametrize("kind", H100_TABLE)
def test_h100_table(kind: CollectiveKind) -> None:
    node = on("h100:8", a=8)
    for size, measured in zip(H100_SIZES, H100_TABLE[kind], strict=True):
        full_bytes = size * (8 if kind == "all_to_all" else 1)
        ratio = collective_seconds(kind, full_bytes, ("a",), node).seconds / (measured * US)
        if size >= 2**28:
            assert ratio == pytest.approx(1, abs=0.13)
        elif size == 2**24:
            assert 0.64 < ratio < 0.9
        else:
            assert 1 / 1.81 < ratio < 1.81


def test_a_switch_gives_each_device_its_own_link() -> None:
    """How to Scale Your Model, GPU chapter: V (N-1) / (N W), twice for an all-reduce, V (N-1) / (N^2 W)."""
    node = on("h100:8", a=2, b=2, c=2)
    link = chip("h100").link_bytes_per_second
    for axes, size in [(("a",), 2), (("c",), 2), (("a", "c"), 4), (("a", "b", "c"), 8)]:
        for kind, share in [
            ("all_gather", (size - 1) / size),
            ("reduce_scatter", (size - 1) / size),
            ("all_reduce", 2 * (size - 1) / size),
            ("all_to_all", (size - 1) / size**2),
        ]:
            cost = collective_seconds(kind, 2**30, axes, node)
            assert cost.bandwidth_seconds == pytest.approx(2**30 * share / link)
            assert cost.hops == (2 if kind == "all_reduce" else 1)
    shift = collective_seconds("collective_permute", 1e9, ("a", "b", "c"), node, shift=3)
    assert shift.bandwidth_seconds == pytest.approx(1e9 / link)


def test_between_nodes_all_devices_share_what_crosses() -> None:
    """Within a node over NVLink, between M nodes over InfiniBand: V (M-1) / (M W_node) and V (M-1) / (M^2 W_node)."""
    nodes = on("4*h100:8", a=32)
    figures = chip("h100")
    rate = figures.dcn_bytes_per_second * figures.dcn_efficiency
    gather = collective_seconds("all_gather", 2**30, ("a",), nodes)
    assert gather.dcn_bytes == pytest.approx(2**30 * 3 / 4 / 8)
    assert gather.bandwidth_seconds == pytest.approx(
        2**30 * 7 / 8 / figures.link_bytes_per_second + 2**30 * 3 / 4 / (8 * rate)
    )
    exchange = collective_seconds("all_to_all", 2**30, ("a",), nodes)
    assert exchange.dcn_bytes == pytest.approx(2**30 * 3 / 4**2 / 8)
    both = collective_seconds("all_reduce", 2**30, ("a",), nodes)
    assert both.latency_seconds == pytest.approx(
        figures.collective_start_seconds + 2 * figures.hop_latency_seconds + 2 * figures.dcn_latency_seconds
    )


def test_slices_reduce_within_between_and_within() -> None:
    """An all-reduce over data = 2 slices x 16: each of the 16 chips exchanges a sixteenth with its counterpart."""
    pods = on("2*v5e:16x16", data=32, model=16)
    cost = collective_seconds("all_reduce", 2**30, ("data",), pods)
    within = collective_seconds("all_reduce", 2**30, ("data",), on("v5e:16x16", data=16, model=16))
    assert cost.dcn_bytes == pytest.approx(2 * 2**30 / 16 / 2)
    assert cost.link_bytes == pytest.approx(within.link_bytes)
    assert cost.bandwidth_seconds == pytest.approx(within.bandwidth_seconds + 2**30 / 16 / (3.125e9 * 0.329))
    assert collective_seconds("all_reduce", 2**30, ("model",), pods).dcn_bytes == 0
    assert str(cost).endswith("67.11 MB between slices")


def test_cores_share_what_a_chip_sends_between_slices() -> None:
    pods = on("2*v3:4x4", pod=2, chip=16, core=2)
    assert collective_seconds("all_gather", 2**20, ("pod",), pods).dcn_bytes == 2 * 2**20 / 2
    assert collective_seconds("all_gather", 2**20, ("pod", "core"), pods).dcn_bytes == 2**20 / 2


def test_a_snake_over_unequal_parts_of_slices() -> None:
    """Of 7 devices on 2 slices of 4 chips, three have to fetch four sevenths."""
    snake = on("2*v5e:2x2", a=7)
    cost = collective_seconds("all_gather", 7e6, ("a",), snake)
    assert cost.dcn_bytes == pytest.approx(4e6 / 3)
    assert collective_seconds("all_to_all", 7e6, ("a",), snake).dcn_bytes == pytest.approx(1e6 * 4 / 7)


def test_a_shift_between_slices() -> None:
    pods = on("2*v5e:16x16", data=32, model=16)
    ring = collective_seconds("collective_permute", 1e9, ("data",), pods)
    assert ring.dcn_bytes == 1e9 and ring.bandwidth_seconds == pytest.approx(1e9 / (3.125e9 * 0.329))
    assert collective_seconds("collective_permute", 1e9, ("model",), pods).dcn_bytes == 0
    load = permutation_load(pods, [(0, 256), (1, 256), (16, 17)])
    assert (load.dcn_messages, load.link_messages, load.hops) == (2, 1, 1)


@pytest.mark.parametrize("full_bytes", [2**22, 2**25, 2**28])
@pytest.mark.parametrize("kind", ["all_gather", "all_reduce", "all_to_all"])
@pytest.mark.parametrize("axes", [("model",), ("data", "model")])
def test_v3_agrees_with_the_scheduler_on_wrapped_axes(
    kind: CollectiveKind, axes: tuple[str, ...], full_bytes: float
) -> None:
    pod = on("v3:32x32", data=32, model=64)
    ours = collective_seconds(kind, full_bytes, axes, pod).bandwidth_seconds
    assert ours == pytest.approx(scheduler_seconds(kind, full_bytes, axes, pod), rel=0.05)


def test_v3_agrees_with_the_scheduler_without_wraparound() -> None:
    """Two axes give a corner chip two ports, as many as a ring; one axis gives it one."""
    grid = on("v3:8x8", data=8, model=16)
    for kind in ("all_gather", "all_reduce"):
        both = collective_seconds(kind, 2**25, ("data", "model"), grid).bandwidth_seconds
        assert both == pytest.approx(scheduler_seconds(kind, 2**25, ("data", "model"), grid), rel=0.05)
        one = collective_seconds(kind, 2**25, ("model",), grid).bandwidth_seconds
        assert one == pytest.approx(2 * 7 / 8 * scheduler_seconds(kind, 2**25, ("model",), grid))
    pair = on("v3:8x8", a=64, core=2)
    gather = collective_seconds("all_gather", 2**25, ("core",), pair).bandwidth_seconds
    assert gather == pytest.approx(2**25 / 2 / 164e9)


def test_the_schedulers_own_figures() -> None:
    """Schedule dumps of v3:4x4, 32 MiB: 192327 cycles for an all-gather, 384654 for an all-reduce."""
    grid = on("v3:4x4", data=4, model=8)
    assert scheduler_seconds("all_gather", 2**25, ("model",), grid) == pytest.approx(192327 / 940e6, rel=1e-4)
    assert scheduler_seconds("all_reduce", 2**25, ("data",), grid) == pytest.approx(384654 / 940e6, rel=1e-4)
    exchange = scheduler_seconds("all_to_all", 8 * 2**25, ("model",), grid)
    assert exchange == pytest.approx(673143 / 940e6, rel=1e-3)
    assert scheduler_seconds("collective_permute", 82e9, ("data",), grid) == 1.0
    assert scheduler_seconds("all_reduce", 82e9, ("a",), on("v3:4x4", a=1, b=32)) == 0.0
    with pytest.raises(ValueError, match="Unknown collective 'psum'"):
        psum: Any = "psum"
        scheduler_seconds(psum, 1, ("data",), grid)


def test_cores_share_the_links_of_a_chip() -> None:
    grid = on("v3:8x8", y=8, x=8, core=2)
    alone = collective_seconds("all_gather", 2**25, ("x",), grid)
    together = collective_seconds("all_gather", 2**25, ("x", "core"), grid)
    assert alone.bandwidth_seconds == pytest.approx(2 * together.bandwidth_seconds)
    assert alone.link_bytes == 2 * 2**25 * 7 / 8


def test_strided_groups_share_links() -> None:
    strided = on("v5e:16x1", outer=4, inner=4)
    near = collective_seconds("all_to_all", 2**25, ("inner",), strided)
    far = collective_seconds("all_to_all", 2**25, ("outer",), strided)
    # The outer groups close into rings, which halves the load; four of them interleave.
    assert far.link_bytes == pytest.approx(4 / 2 * near.link_bytes)
    assert far.hops == 4 // 2 * 4


def test_a_shift_on_a_line_and_on_a_ring() -> None:
    line, ring = on("v5e:8x1", x=8), on("v5e:16x1", x=16)
    assert collective_seconds("collective_permute", 1e6, ("x",), line).hops == 7
    assert collective_seconds("collective_permute", 1e6, ("x",), line, cyclic=False).hops == 1
    assert collective_seconds("collective_permute", 1e6, ("x",), ring).hops == 1
    assert collective_seconds("collective_permute", 1e6, ("x",), ring, shift=-2).link_bytes == 2e6
    assert collective_seconds("collective_permute", 1e6, ("x",), ring, shift=16).seconds == 0


def test_a_shift_over_the_cores() -> None:
    grid = on("v3:4x4", data=4, model=8)
    cost = collective_seconds("collective_permute", 1e6, ("model",), grid, cyclic=False)
    assert (cost.hops, cost.link_bytes) == (1, 1e6)
    within = collective_seconds("collective_permute", 1e9, ("core",), on("v3:4x4", chip=16, core=2))
    assert (within.hops, within.link_bytes) == (0, 0)
    assert within.bandwidth_seconds == pytest.approx(1e9 / 164e9)


def test_permutations() -> None:
    row = on("v5e:4x1", x=4)
    reverse = permutation_load(row, [(at, 3 - at) for at in range(4)])
    assert (reverse.link_messages, reverse.hops, reverse.moved) == (2, 3, 4)
    assert permutation_seconds(45e9, [(0, 3), (1, 2)], row).bandwidth_seconds == 2.0
    assert permutation_seconds(45e9, [(at, at) for at in range(4)], row).seconds == 0.0


def exchanged_pairs(placement: Placement, axes: tuple[str, ...]) -> list[tuple[int, int]]:
    """List who sends to whom when every group over some axes exchanges all with all."""
    sizes = placement.axis_sizes
    positions = list(itertools.product(*(range(size) for size in sizes.values())))
    fixed = [at for at, name in enumerate(sizes) if name not in axes]
    return [
        (source, target)
        for source, one in enumerate(positions)
        for target, other in enumerate(positions)
        if all(one[at] == other[at] for at in fixed)
    ]


@pytest.mark.parametrize(
    "axes", [("a",), ("b",), ("c",), ("a", "b"), ("b", "c"), ("a", "c"), ("a", "b", "c")]
)
@pytest.mark.parametrize("name", ["v3:4x4", "v4:2x2x4", "v5e:4x8", "v5e:8x4", "v7x:2x2x2", "h100:8"])
def test_an_all_to_all_loads_links_as_its_messages_do(name: str, axes: tuple[str, ...]) -> None:
    """Route each of the messages and count them on the busiest link."""
    topology = Topology.parse(name)
    mesh = {"a": 2, "b": topology.num_devices // 8, "c": 4}
    for placement in placements(topology, mesh):
        load = permutation_load(placement, exchanged_pairs(placement, axes))
        size = math.prod(mesh[axis] for axis in axes)
        cost = collective_seconds("all_to_all", size**2, axes, placement)
        assert cost.link_bytes == pytest.approx(load.link_messages)


def test_a_snake_is_priced_as_a_line() -> None:
    line = on("v3:4x4", a=5)
    cost = collective_seconds("all_gather", 5e6, ("a",), line)
    assert cost.link_bytes == pytest.approx(4e6)
    assert cost.hops == 2
    pairs = on("v3:2x2", a=3, b=2)
    assert collective_seconds("all_gather", 2e6, ("b",), pairs).hops == 0


@pytest.mark.parametrize(
    ("kind", "axes", "full_bytes", "text"),
    [
        (
            "psum",
            ("data",),
            1,
            "Unknown collective 'psum'. Choose one of all_gather, reduce_scatter, all_reduce, all_to_all, "
            "collective_permute.",
        ),
        (
            "all_gather",
            ("data", "expert", "data"),
            1,
            "Cannot form a group over ('data', 'expert', 'data'): 'expert' is not an axis, 'data' is given "
            "twice. The mesh has the axes data=4, model=8.",
        ),
        (
            "all_gather",
            ("data",),
            -1,
            "all_gather over ('data',) was given -1 bytes. Bytes are not negative.",
        ),
    ],
)
def test_bad_arguments_are_explained(kind: Any, axes: tuple[str, ...], full_bytes: float, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        collective_seconds(kind, full_bytes, axes, on("v3:4x4", data=4, model=8))
    assert str(caught.value) == text


def test_an_all_to_all_sends_between_slices_what_its_messages_do() -> None:
    for name in ("2*v3:2x2", "2*v5e:2x4", "4*h100:4"):
        topology = Topology.parse(name)
        mesh = {"a": 2, "b": topology.num_devices // 8, "c": 4}
        for placement, axes in itertools.product(
            placements(topology, mesh), [("a",), ("a", "b"), ("b", "c")]
        ):
            load = permutation_load(placement, exchanged_pairs(placement, axes))
            size = math.prod(mesh[axis] for axis in axes)
            cost = collective_seconds("all_to_all", size**2, axes, placement)
            assert cost.dcn_bytes == pytest.approx(load.dcn_messages)


SHAPES = [
    *("v3:4x4", "v3:8x8", "v3:4x4 wrap=xy", "v4:2x2x4", "v4:4x4x4", "v5e:4x8", "v5e:8x16", "v6e:16x16"),
    *("v7x:2x2x2", "2*v3:4x4", "3*v5e:4x4", "2*v7x:2x2x2", "h100:8", "4*h100:8", "2*a100:3"),
]


@st.composite
def groups(draw: st.DrawFn) -> tuple[Placement, tuple[str, ...]]:
    topology = Topology.parse(draw(st.sampled_from(SHAPES)))
    mesh: dict[str, int] = {}
    left = topology.num_devices
    for name in "abc":
        divisors = [size for size in range(1, left + 1) if left % size == 0]
        mesh[name] = draw(st.one_of(st.sampled_from(divisors), st.integers(1, left)))
        left //= mesh[name]
    axes = draw(st.lists(st.sampled_from("abc"), unique=True, max_size=3))
    return draw(st.sampled_from(list(placements(topology, mesh)))), tuple(axes)


def check(cost: CollectiveCost) -> None:
    assert math.isfinite(cost.seconds)
    assert cost.seconds == pytest.approx(cost.latency_seconds + cost.bandwidth_seconds)
    assert min(cost.latency_seconds, cost.bandwidth_seconds, cost.sent_bytes, cost.link_bytes, cost.hops) >= 0


@given(groups(), st.sampled_from(KINDS), st.floats(1, 1e12))
def test_zero_only_for_a_group_of_one(
    group: tuple[Placement, tuple[str, ...]], kind: CollectiveKind, full_bytes: float
) -> None:
    placement, axes = group
    cost = collective_seconds(kind, full_bytes, axes, placement)
    check(cost)
    size = math.prod(placement.axis_sizes[axis] for axis in axes)
    assert cost.group_size == size
    assert (cost.seconds > 0) == (cost.bandwidth_seconds > 0) == (size > 1)
    assert collective_seconds(kind, 0, axes, placement).seconds == 0


@given(groups(), st.sampled_from(KINDS), st.floats(1, 1e12), st.floats(1, 1e3))
def test_more_bytes_never_cost_less(
    group: tuple[Placement, tuple[str, ...]], kind: CollectiveKind, full_bytes: float, factor: float
) -> None:
    placement, axes = group
    fewer = collective_seconds(kind, full_bytes, axes, placement)
    more = collective_seconds(kind, full_bytes * factor, axes, placement)
    assert more.seconds >= fewer.seconds * (1 - 1e-12)


@given(groups(), st.sampled_from(KINDS), st.floats(1, 1e12))
def test_slower_links_never_cost_less(
    group: tuple[Placement, tuple[str, ...]], kind: CollectiveKind, full_bytes: float
) -> None:
    placement, axes = group
    topology = placement.topology
    poorer_links: list[tuple[dict[str, Any], tuple[bool, ...]]] = [
        ({"hop_latency_seconds": 2 * topology.chip.hop_latency_seconds}, topology.wrap),
        ({"link_bytes_per_second": topology.chip.link_bytes_per_second / 2}, topology.wrap),
        ({"dcn_bytes_per_second": topology.chip.dcn_bytes_per_second / 2}, topology.wrap),
        ({"dcn_latency_seconds": 1e-3}, topology.wrap),
        ({}, (False,) * len(topology.dims)),
    ]
    for changes, wrap in poorer_links:
        figures = dataclasses.replace(topology.chip, **changes)
        worse = dataclasses.replace(topology, chip=figures, wrap=wrap)
        segments = tuple(
            tuple(dataclasses.replace(part, wrapped=part.wrapped and any(wrap)) for part in parts)
            for parts in placement.segments
        )
        poorer = dataclasses.replace(placement, topology=worse, segments=segments)
        before = collective_seconds(kind, full_bytes, axes, placement).seconds
        assert collective_seconds(kind, full_bytes, axes, poorer).seconds >= before * (1 - 1e-12)


@given(groups(), st.floats(1, 1e12))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(
    group: tuple[Placement, tuple[str, ...]], full_bytes: float
) -> None:
    placement, axes = group
    gather = collective_seconds("all_gather", full_bytes, axes, placement)
    scatter = collective_seconds("reduce_scatter", full_bytes, axes, placement)
    both = collective_seconds("all_reduce", full_bytes, axes, placement)
    whole = len(axes) > placement.topology.chip.reduce_scatter_axes
    assert scatter.seconds == (both if whole else gather).seconds
    assert both.bandwidth_seconds == pytest.approx(2 * gather.bandwidth_seconds)
    assert both.hops == 2 * gather.hops


@given(
    st.sampled_from(
        ["v3:4x4", "v4:4x4x4", "v5e:8x8", "v5e:16x16", "v6e:8x16", "v7x:4x4x4", "h100:4", "a100:2"]
    ),
    st.sampled_from(KINDS),
    st.sampled_from([("a",), ("a", "b"), ("a", "c"), ("a", "b", "c")]),
    st.floats(1, 1e12),
    st.data(),
)
def test_slices_never_cost_less_than_one_of_their_size(
    name: str, kind: CollectiveKind, axes: tuple[str, ...], full_bytes: float, data: st.DataObject
) -> None:
    """Twice as long a slice holds the same mesh on the same axes, with links where the two have DCN."""
    one = Topology.parse(name)
    longer = (*one.dims[:-1], 2 * one.dims[-1])
    figures = dataclasses.replace(one.chip, pod_dims=tuple(64 for _ in one.dims))
    wrap = one.wrap
    two = Topology(chip=figures, dims=one.dims, wrap=wrap, num_slices=2)
    whole = Topology(chip=figures, dims=longer, wrap=wrap)
    left = one.num_devices
    b = data.draw(st.sampled_from([size for size in range(1, left + 1) if left % size == 0]))
    mesh = {"a": 2, "b": b, "c": left // b}
    apart, together = (
        collective_seconds(kind, full_bytes, axes, place(where, mesh)) for where in (two, whole)
    )
    assert apart.seconds >= together.seconds * (1 - 1e-12)


@given(groups(), st.floats(1, 1e12))
def test_the_order_of_axes_does_not_matter(
    group: tuple[Placement, tuple[str, ...]], full_bytes: float
) -> None:
    placement, axes = group
    one = collective_seconds("all_gather", full_bytes, axes, placement)
    other = collective_seconds("all_gather", full_bytes, axes[::-1], placement)
    assert one.seconds == pytest.approx(other.seconds)


@pytest.mark.parametrize("kind", KINDS)
def test_a_longer_stride_never_costs_less(kind: CollectiveKind) -> None:
    lines = [on("v3:8x1", outer=8 // stride // 2, pair=2, inner=stride, core=2) for stride in (1, 2, 4)]
    costs = [collective_seconds(kind, 2**25, ("pair",), line, cyclic=False) for line in lines]
    assert [cost.hops for cost in costs] == [hops * (1 + (kind == "all_reduce")) for hops in (1, 2, 4)]
    assert costs[0].seconds < costs[1].seconds < costs[2].seconds
