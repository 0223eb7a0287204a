"""Logical meshes on physical axes."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import LINE, MeshError, Placement, Segment, Topology, place, placements

TOPOLOGIES = [
    "v3:4x4",
    "v3:8x8",
    "v3:2x2",
    "v4:2x2x4",
    "v4:4x4x4",
    "v5e:4x8",
    "v7x:2x2x1",
    "v5e:1x1",
    "v5p:4x4x12",
    "2*v3:4x4",
    "3*v5e:2x2",
    "2*v7x:2x2x1",
    "4*h100:8",
    "h100:6",
]


def on(placement: Placement) -> dict[str, list[str]]:
    return {name: [str(each) for each in placement.axis_segments(name)] for name in placement.axis_names}


@pytest.mark.parametrize(
    ("name", "mesh", "segments"),
    [
        ("v3:8x8", {"data": 8, "model": 16}, {"data": ["y[8]"], "model": ["x[8]", "core[2]"]}),
        (
            "v3:4x4",
            {"data": 2, "model": 16},
            {"data": ["y[2 of 4, stride 2]"], "model": ["y[2 of 4]", "x[4]", "core[2]"]},
        ),
        ("v3:4x4", {"data": 32}, {"data": ["y[4]", "x[4]", "core[2]"]}),
        ("v3:4x4", {"a": 1, "b": 32, "c": 1}, {"a": [], "b": ["y[4]", "x[4]", "core[2]"], "c": []}),
        ("v3:32x32", {"a": 32, "b": 64}, {"a": ["y[32, ring]"], "b": ["x[32, ring]", "core[2]"]}),
        (
            "v4:4x4x4",
            {"a": 8, "b": 8},
            {
                "a": ["z[4, ring]", "y[2 of 4, stride 2, ring]"],
                "b": ["y[2 of 4]", "x[4, ring]"],
            },
        ),
        ("v5e:8x16", {"a": 16, "b": 8}, {"a": ["y[16, ring]"], "b": ["x[8]"]}),
        (
            "2*v5e:16x16",
            {"data": 32, "model": 16},
            {"data": ["slice[2]", "y[16, ring]"], "model": ["x[16, ring]"]},
        ),
        ("2*v5e:16x16", {"a": 2, "b": 256}, {"a": ["slice[2]"], "b": ["y[16, ring]", "x[16, ring]"]}),
        ("2*v3:4x4", {"a": 64}, {"a": ["slice[2]", "y[4]", "x[4]", "core[2]"]}),
        ("4*h100:8", {"a": 8, "b": 4}, {"a": ["slice[4]", "x[2 of 8, stride 4]"], "b": ["x[4 of 8]"]}),
        # 16 does not nest into z=12 slowest, so the axes change places.
        ("v5p:4x4x12", {"a": 16, "b": 12}, {"a": ["y[4, ring]", "x[4, ring]"], "b": ["z[12, ring]"]}),
    ],
)
def test_segments(name: str, mesh: dict[str, int], segments: dict[str, list[str]]) -> None:
    assert on(place(Topology.parse(name), mesh)) == segments


def test_the_natural_order_is_row_major() -> None:
    assert place(Topology.parse("v3:8x8"), {"data": 8, "model": 16}).device_order == tuple(range(8 * 8 * 2))


def test_slices_are_the_slowest_axis() -> None:
    for name, mesh in [("2*v3:8x8", {"data": 16, "model": 16}), ("4*h100:8", {"data": 4, "model": 8})]:
        topology = Topology.parse(name)
        assert place(topology, mesh).device_order == tuple(range(topology.num_devices))
    assert place(Topology.parse("2*v3:8x8"), {"data": 128}).device_order == tuple(range(128))


def test_a_snake_goes_from_slice_to_slice() -> None:
    placement = place(Topology.parse("2*v5e:2x2"), {"a": 7})
    assert placement.device_order == (0, 1, 3, 2, 4, 5, 7)
    assert placement.note.endswith("1 of 8 devices idle")


def test_a_smaller_mesh_leaves_devices_idle() -> None:
    placement = place(Topology.parse("v3:4x4"), {"a": 2, "b": 4})
    assert placement.device_order == tuple(range(8))
    assert placement.note == "24 of 32 devices idle"


def test_a_snake_where_sizes_do_not_factor() -> None:
    placement = place(Topology.parse("v3:4x4"), {"data": 10})
    assert placement.axis_segments("data") == (
        Segment(axis=LINE, size=32, extent=10, stride=1, wrapped=False),
    )
    # x = 0..3 on the first row, both cores of each chip, then back from x = 3 on the second.
    assert placement.device_order == (0, 1, 2, 3, 4, 5, 6, 7, 14, 15)
    assert placement.note == (
        "snake through the chips: 10 does not factor along the axes of v3:4x4; 22 of 32 devices idle"
    )
    assert str(placement).endswith(f"({placement.note})")


@pytest.mark.parametrize("name", ["v3:4x4", "v4:4x4x4", "v5p:4x4x12"])
def test_a_snake_steps_between_neighbours(name: str) -> None:
    topology = Topology.parse(name)
    chips = [
        topology.coordinates(device)[0]
        for device in place(topology, {"a": topology.num_devices - 1}).device_order
    ]
    for here, there in itertools.pairwise(chips):
        assert sum(abs(one - two) for one, two in zip(here, there, strict=True)) <= 1


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        ({}, "The mesh for v3:4x4 has no axes. Name at least one, such as {'data': 1}."),
        (
            {"a": 0, "b": 4, "c": -1},
            "The mesh {'a': 0, 'b': 4, 'c': -1} has axes without devices: 'a' is 0, 'c' is -1. Sizes "
            "start at 1.",
        ),
        (
            {"a": 8, "b": 8},
            "The mesh {'a': 8, 'b': 8} needs 64 devices, but v3:4x4 has 32 (16 chips x 2 cores). Shrink an "
            "axis, or use a larger slice: v3:4x8 has 64.",
        ),
        (
            {"a": 4096},
            "The mesh {'a': 4096} needs 4096 devices, but v3:4x4 has 32 (16 chips x 2 cores). Shrink an axis, or "
            "use a larger slice: 2*v3:32x32 has 4096.",
        ),
        (
            {"a": 131073},
            "The mesh {'a': 131073} needs 131073 devices, but v3:4x4 has 32 (16 chips x 2 cores). No v3 slice "
            "is large enough: shrink an axis.",
        ),
    ],
)
def test_bad_meshes_are_explained(mesh: dict[str, int], text: str) -> None:
    for attempt in (place, placements):
        with pytest.raises(MeshError) as caught:
            attempt(Topology.parse("v3:4x4"), mesh)
        assert str(caught.value) == text


def test_an_unknown_axis() -> None:
    with pytest.raises(KeyError, match="has no axis 'model'"):
        place(Topology.parse("v3:4x4"), {"data": 32}).axis_segments("model")


def test_alternatives_of_a_square() -> None:
    found = list(placements(Topology.parse("v5e:4x4"), {"a": 4, "b": 4}))
    assert [on(each) for each in found] == [{"a": ["y[4]"], "b": ["x[4]"]}, {"a": ["x[4]"], "b": ["y[4]"]}]


@st.composite
def meshes(draw: st.DrawFn) -> tuple[Topology, dict[str, int]]:
    topology = Topology.parse(draw(st.sampled_from(TOPOLOGIES)))
    mesh: dict[str, int] = {}
    left = topology.num_devices
    for name in "abc"[: draw(st.integers(1, 3))]:
        mesh[name] = draw(st.integers(1, left))
        left //= mesh[name]
    return topology, mesh


@given(meshes())
def test_every_placement_uses_each_device_once(drawn: tuple[Topology, dict[str, int]]) -> None:
    topology, mesh = drawn
    found = list(placements(topology, mesh))
    assert found[0] == place(topology, mesh)
    assert len({each.segments for each in found}) == len(found)
    for placement in found:
        order = placement.device_order
        assert len(order) == len(set(order)) == math.prod(mesh.values())
        assert set(order) <= set(range(topology.num_devices))
        for name, size in mesh.items():
            assert math.prod(segment.extent for segment in placement.axis_segments(name)) == size
        idle = topology.num_devices - len(order)
        assert (f"{idle} of {topology.num_devices} devices idle" in placement.note) == (idle > 0)


@given(st.sampled_from(TOPOLOGIES), st.data())
def test_every_mesh_of_the_right_size_fills_the_slices(name: str, data: st.DataObject) -> None:
    topology = Topology.parse(name)
    mesh: dict[str, int] = {}
    left = topology.num_devices
    for axis in "ab":
        mesh[axis] = data.draw(st.sampled_from([size for size in range(1, left + 1) if left % size == 0]))
        left //= mesh[axis]
    placement = place(topology, mesh | {"c": left})
    assert sorted(placement.device_order) == list(range(topology.num_devices))
    assert "idle" not in placement.note


@given(meshes())
def test_segments_describe_the_device_order(drawn: tuple[Topology, dict[str, int]]) -> None:
    topology, mesh = drawn
    placement = place(topology, mesh)
    if LINE in {segment.axis for segments in placement.segments for segment in segments}:
        return
    step = 1
    for name, size in reversed(mesh.items()):
        at = 1
        for segment in reversed(placement.axis_segments(name)):
            near, far = (topology.coordinates(placement.device_order[index]) for index in (0, step * at))
            axes = dict(zip("xyz", zip(near[0], far[0], strict=True), strict=False)) | {
                "core": (near[1], far[1]),
                "slice": tuple(topology.slice_of(placement.device_order[index]) for index in (0, step * at)),
            }
            moved = {axis: there - here for axis, (here, there) in axes.items() if here != there}
            assert moved == {segment.axis: segment.stride}
            at *= segment.extent
        step *= size
