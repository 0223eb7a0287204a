"""Names of slices, their shapes and their wraparound."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import Topology, TopologyError, UnknownChipError, chips, larger, slices

GRAMMAR = (
    "The grammar is [<slices>*]<generation>:<X>x<Y>[x<Z>], counted in chips, as v3:4x4 or 2*v5e:16x16 (two slices "
    "over DCN), and [<nodes>*]<generation>:<devices> for GPUs, as h100:8 or 4*h100:8; known generations, with "
    "examples: v2:8x8, v3:8x16, v4:4x4x8, v5e:4x8, v5p:4x8x8, v6e:4x8, v7x:4x8x8, a100:4, h100:4, h200:4."
)


def test_slices_multiply_devices() -> None:
    topology = Topology.parse("2*v3:4x8")
    assert (topology.num_slices, topology.dims, topology.wrap) == (2, (4, 8), (False, False))
    assert (topology.num_chips, topology.num_devices) == (2 * 4 * 8, 2 * 4 * 8 * 2)
    assert topology.grid == {"slice": 2, "y": 8, "x": 4, "core": 2}
    assert topology != Topology.parse("v3:4x8")


def test_a_node_of_gpus_is_a_slice_of_one_axis() -> None:
    topology = Topology.parse("4*h100:8")
    assert (topology.dims, topology.wrap, topology.num_devices) == ((8,), (False,), 4 * 8)
    assert [Topology.parse(f"h100:{count}").num_devices for count in range(1, 9)] == list(range(1, 9))


def test_v3_counts_cores() -> None:
    topology = Topology.parse("v3:4x4")
    assert (topology.dims, topology.num_chips, topology.num_devices) == ((4, 4), 4 * 4, 4 * 4 * 2)


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("v2:8x16", (False, False)),
        ("v2:16x16", (True, True)),
        ("v3:16x32", (False, False)),
        ("v3:32x32", (True, True)),
        ("v4:2x4x4", (False, False, False)),
        ("v4:4x4x4", (True, True, True)),
        ("v5p:4x4x12", (True, True, True)),
        ("v7x:2x2x1", (False, False, False)),
        ("v5e:8x16", (False, True)),
        ("v6e:16x16", (True, True)),
        ("v6e:8x8", (False, False)),
        ("v3:8x8 wrap=xy", (True, True)),
        ("v3:8x8 wrap=y", (False, True)),
        ("v3:32x32 wrap=none", (False, False)),
    ],
)
def test_wraparound(name: str, wrap: tuple[bool, ...]) -> None:
    assert Topology.parse(name).wrap == wrap


@pytest.mark.parametrize("topology", [each for chip in chips() for each in slices(chip.name)], ids=str)
def test_names_round_trip(topology: Topology) -> None:
    assert Topology.parse(str(topology)) == topology
    assert topology.is_offered


@given(
    st.sampled_from([each for chip in chips() for each in slices(chip.name)]),
    st.integers(1, 100),
    st.tuples(*[st.booleans()] * 3),
)
def test_names_of_several_slices_round_trip(one: Topology, count: int, wrap: tuple[bool, ...]) -> None:
    wrap = (False,) if one.chip.has_switch else wrap[: len(one.dims)]
    topology = dataclasses.replace(one, num_slices=count, wrap=wrap)
    assert Topology.parse(str(topology)) == topology
    assert topology.num_devices == count * one.num_devices


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("tpu7x:2x2x1", "v7x:2x2x1"),
        (" TPU v3:4x4 ", "v3:4x4"),
        ("V5E=2x4", "v5e:2x4"),
        ("v3:4x4 wrap=none", "v3:4x4"),
        ("1*v3:4x4", "v3:4x4"),
        (" 2 * V5E:16x16", "2*v5e:16x16"),
        ("2*v3:4x4 wrap=xy", "2*v3:4x4 wrap=xy"),
        ("4*H100=8", "4*h100:8"),
    ],
)
def test_spellings(name: str, same: str) -> None:
    assert str(Topology.parse(name)) == same


@pytest.mark.parametrize(
    ("name", "reason", "cure"),
    [
        ("v3-32", "it does not follow the grammar", "'v3-32' counts cores. Did you mean 'v3:4x4'?"),
        ("v5litepod-16", "it does not follow the grammar", "counts chips. Did you mean 'v5e:4x4'?"),
        ("v3 4x4", "it does not follow the grammar", "Did you mean 'v3:4x4'?"),
        ("v9:4x4", "'v9' is no known generation", "Did you mean 'v6e:4x4'?"),
        ("v4:4x4", "v4 slices have three axes, X, Y and Z, not 2", "Did you mean 'v4:2x2x4'?"),
        ("v3:4x4x4", "v3 slices have two axes, X and Y, not 3", "Did you mean 'v3:8x8'?"),
        ("v3:0x4", "0x4 has an axis without chips", "Did you mean 'v3:2x2'?"),
        (
            "v3:64x64",
            "64x64 (4096 chips) does not fit the v3 pod of 32x32 (1024 chips)",
            "Did you mean '4*v3:32x32'?",
        ),
        ("0*v3:4x4", "0 slices are none", "Did you mean 'v3:4x4'?"),
        ("2*v9:4x4", "'v9' is no known generation", "Did you mean 'v6e:4x4'?"),
        ("*v3:4x4", "it does not follow the grammar", "h200:4."),
        ("h100-8", "it does not follow the grammar", "'h100-8' counts GPUs. Did you mean 'h100:8'?"),
        (
            "h100:16",
            "an h100 node has 8 devices, not 16; put several nodes together",
            "Did you mean '2*h100:8'?",
        ),
        (
            "h100:8 wrap=x",
            "h100 devices are behind a switch, which has no wraparound",
            "Did you mean 'h100:8'?",
        ),
        ("h100:2x4", "h100 nodes have one number, their devices, not 2", "Did you mean 'h100:8'?"),
        ("somewhere", "it does not follow the grammar", "h200:4."),
    ],
)
def test_a_bad_name_is_explained(name: str, reason: str, cure: str) -> None:
    with pytest.raises(TopologyError) as caught:
        Topology.parse(name)
    assert str(caught.value).startswith(f"Cannot read {name!r} as a topology: {reason}. {GRAMMAR}")
    assert str(caught.value).endswith(cure)


def test_wrong_number_of_wrap_flags() -> None:
    chip = Topology.parse("v3:4x4").chip
    with pytest.raises(TopologyError, match="Give one flag per axis"):
        Topology(chip=chip, dims=(4, 4), wrap=(True, True, False))


@pytest.mark.parametrize("generation", [each.name for each in chips()])
def test_slices_ascend(generation: str) -> None:
    sizes = [topology.num_devices for topology in slices(generation)]
    assert sizes == sorted(sizes)
    for size in sizes:
        assert Topology.smallest(generation, size).num_devices == size
        assert Topology.smallest(generation, size - 1).num_devices <= size


def test_no_slice_is_large_enough() -> None:
    with pytest.raises(TopologyError, match="the largest v3 slice, v3:32x32, has 2048.*such as 2[*]v3:32x32"):
        Topology.smallest("v3", 2049)
    with pytest.raises(UnknownChipError):
        Topology.smallest("v99", 1)


@pytest.mark.parametrize(("generation", "devices"), [("v3", 32), ("h100", 4), ("h100", 16), ("v5p", 0)])
def test_what_is_larger_ascends(generation: str, devices: int) -> None:
    found = list(larger(generation, devices))
    sizes = [each.num_devices for each in found]
    assert sizes == sorted(set(sizes)) and sizes[0] > devices
    assert found[-1].num_slices == 64
    assert {each.chip.name for each in found} == {generation}


@pytest.mark.parametrize("name", ["2*v3:4x8", "3*v4:2x4x4", "2*v7x:2x2x4", "4*h100:8", "v5e:4x4", "5*a100:3"])
def test_device_numbers_are_a_permutation_with_slices_slowest(name: str) -> None:
    topology = Topology.parse(name)
    places = itertools.product(
        range(topology.num_slices),
        *(range(size) for size in reversed(topology.dims)),
        range(topology.chip.devices_per_chip),
    )
    for device, (number, *position, core) in enumerate(places):
        assert topology.device(tuple(reversed(position)), core, number) == device
        assert topology.coordinates(device) == (tuple(reversed(position)), core)
        assert topology.slice_of(device) == number
    assert device == topology.num_devices - 1


@given(st.sampled_from(["v3:4x8", "v4:2x4x4", "v7x:2x2x4"]), st.data())
def test_device_numbers_round_trip(name: str, data: st.DataObject) -> None:
    topology = Topology.parse(name)
    device = data.draw(st.integers(0, topology.num_devices - 1))
    (x, y, *z), core = topology.coordinates(device)
    width, depth = topology.dims[:2]
    assert device == (((z or [0])[0] * depth + y) * width + x) * topology.chip.devices_per_chip + core
    assert topology.device((x, y, *z), core) == device
