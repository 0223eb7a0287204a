"""Padded sizes against the argument sizes that the TPU compiler reports."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import chip, padded_bytes

# (shape, bytes per element, bytes on v3, bytes on v6e and v7x): `memory_analysis()` of libtpu 0.0.52.
COMPILED: list[tuple[tuple[int, ...], int, int, int]] = [
    ((), 4, 1024, 512),
    ((5,), 4, 1024, 512),
    ((1000,), 4, 4096, 4096),
    ((1024,), 2, 2048, 2048),
    ((100000,), 2, 200704, 200704),
    ((100,), 1, 1024, 512),
    ((3,), 1, 1024, 512),
    ((128, 3), 4, 2048, 2048),
    ((3, 128), 2, 1024, 1024),
    ((1, 128), 2, 1024, 512),
    ((1, 1000), 2, 8192, 4096),
    ((1, 1024), 4, 8192, 4096),
    ((1024, 1), 4, 8192, 4096),
    ((2, 3), 4, 1024, 1024),
    ((2, 1, 5), 4, 1024, 1024),
    ((5, 1000), 2, 16384, 16384),
    ((12, 1000), 2, 32768, 32768),
    ((17, 1000), 2, 49152, 49152),
    ((100, 100), 2, 26624, 26624),
    ((100, 100), 1, 13312, 13312),
    ((7, 1000), 1, 8192, 8192),
    ((40, 1000), 1, 40960, 40960),
    ((1000, 3), 1, 8192, 4096),
    ((64, 1, 1000), 4, 262144, 262144),
    ((8, 32, 1, 128), 2, 65536, 65536),
    ((2048, 8, 16), 2, 524288, 524288),
    ((3, 3, 64, 64), 2, 147456, 147456),
    ((7, 7, 3, 64), 2, 43008, 43008),
    ((50257, 768), 4, 154411008, 154411008),
    ((16, 1024, 12, 64), 2, 25165824, 25165824),
    ((256, 512, 128, 2), 4, 134217728, 134217728),
    ((8388608, 8, 4), 4, 1073741824, 1073741824),
]


@pytest.mark.parametrize(("shape", "itemsize", "on_v3", "on_later"), COMPILED)
def test_sizes_are_the_compilers(shape: tuple[int, ...], itemsize: int, on_v3: int, on_later: int) -> None:
    assert padded_bytes(chip("v3"), shape, itemsize) == on_v3
    assert padded_bytes(chip("v6e"), shape, itemsize) == on_later
    assert padded_bytes(chip("v7x"), shape, itemsize) == on_later


def test_empty_narrow_and_wide() -> None:
    v3 = chip("v3")
    assert padded_bytes(v3, (0, 128), 4) == 0
    assert padded_bytes(v3, (4096, 4096), 0.5) == 4096 * 4096 // 2
    assert padded_bytes(v3, (4096, 4096), 8) == 4096 * 4096 * 8
    assert padded_bytes(v3, (4096, 100), 16) == 4 * padded_bytes(v3, (4096, 100), 4)


@given(st.lists(st.integers(0, 300), max_size=5), st.sampled_from([0.5, 1, 2, 4, 8, 16]))
def test_gpus_pad_nothing(dims: list[int], itemsize: float) -> None:
    assert padded_bytes(chip("h100"), tuple(dims), itemsize) == math.ceil(math.prod(dims) * itemsize)


@given(st.lists(st.integers(1, 300), max_size=5), st.sampled_from([1, 2, 4]), st.sampled_from(["v3", "v5e"]))
def test_padding_only_adds_and_ignores_order(dims: list[int], itemsize: int, name: str) -> None:
    padded = padded_bytes(chip(name), tuple(dims), itemsize)
    assert padded >= math.prod(dims) * itemsize
    assert padded == padded_bytes(chip(name), tuple(reversed(dims)), itemsize)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.integers(0, 3), st.integers(1, 200))
def test_a_larger_array_never_takes_less(dims: list[int], which: int, more: int) -> None:
    larger = list(dims)
    larger[which % len(dims)] += more
    assert padded_bytes(chip("v3"), tuple(larger), 2) >= padded_bytes(chip("v3"), tuple(dims), 2)
