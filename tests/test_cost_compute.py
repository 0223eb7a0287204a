"""Time of the matrix unit, the vector unit and HBM, against the compiler, hardware and the book."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import (
    VECTOR_CLASSES,
    Chip,
    chip,
    chips,
    convolution_seconds,
    hbm_seconds,
    matmul_seconds,
    result_seconds,
    vector_seconds,
)

V3 = chip("v3")
sizes = st.integers(1, 4096)


def square(figures: Chip, n: int) -> float:
    """Seconds of a bf16 product of n x n matrices as one kernel."""
    array = matmul_seconds(figures, batch=1, m=n, k=n, n=n, dtype_bytes=2)
    return max(array, hbm_seconds(figures, 3 * 2 * n * n)) + figures.kernel_overhead_seconds


@pytest.mark.parametrize(("n", "of_peak"), [(1024, 0.77), (2048, 0.93), (4096, 0.953), (8192, 0.969)])
def test_v3_squares_reach_the_compilers_share_of_peak(n: int, of_peak: float) -> None:
    seconds = matmul_seconds(V3, batch=1, m=n, k=n, n=n, dtype_bytes=2)
    assert 2 * n**3 / seconds / 61.5e12 == pytest.approx(of_peak, abs=0.015)


@pytest.mark.parametrize(
    ("m", "k", "n", "cycles", "tolerance"),
    [
        (512, 512, 512, 9045, 0.20),
        (512, 4096, 512, 42111, 0.10),
        (4096, 512, 512, 46045, 0.20),
        (512, 512, 4096, 49704, 0.25),
        (8192, 1024, 1024, 279946, 0.02),
        (1024, 8192, 1024, 283348, 0.02),
        (2048, 2048, 8192, 1094016, 0.02),
        (1024, 8192, 8192, 2198962, 0.02),
        (16384, 1024, 1024, 546925, 0.02),
        (4096, 4096, 16384, 8763518, 0.01),
        (8, 4096, 4096, 85887, 0.12),
    ],
)
def test_v3_products_take_the_compilers_cycles(m: int, k: int, n: int, cycles: int, tolerance: float) -> None:
    array = matmul_seconds(V3, batch=1, m=m, k=k, n=n, dtype_bytes=2)
    seconds = max(array, hbm_seconds(V3, 2 * (m * k + k * n + m * n))) + V3.kernel_overhead_seconds
    assert seconds * 940e6 == pytest.approx(cycles, rel=tolerance)


@pytest.mark.parametrize(
    ("name", "n", "microseconds", "tolerance"),
    [
        # jax-ml/jax, docs/pallas/tpu/matmul.ipynb, timed from the host.
        ("v5e", 4096, 827, 0.08),
        ("v5e", 8192, 6050, 0.01),
        # AI-Hypercomputer/tpu-recipes, on the device.
        ("v6e", 8192, 1328.8, 0.01),
        ("v7x", 128, 1.62, 0.06),
        ("v7x", 512, 2.55, 0.13),
        ("v7x", 1024, 6.14, 0.22),
        ("v7x", 2048, 25.3, 0.16),
        ("v7x", 4096, 153.9, 0.04),
        ("v7x", 16384, 2 * 16384**3 / 950.13e6, 0.01),
        # openxla/xla, GEMM performance table for sm_90; its maximum is 805e12 operations a second.
        ("h100", 256, 5.0, 0.05),
        ("h100", 512, 6.2, 0.14),
        ("h100", 1024, 8.5, 0.02),
        ("h100", 2048, 26.8, 0.05),
        ("h100", 4096, 176, 0.02),
        ("h100", 16384, 2 * 16384**3 / 805e6, 0.02),
    ],
)
def test_squares_on_hardware(name: str, n: int, microseconds: float, tolerance: float) -> None:
    assert square(chip(name), n) == pytest.approx(microseconds * 1e-6, rel=tolerance)


def test_v2_layer_on_hardware() -> None:
    """8 cores do 2 x 32 x 1024 x 8192 x 32768 operations in 96 ms: scaling book, profiling chapter."""
    one_of_eight = matmul_seconds(chip("v2"), batch=1, m=32 * 1024 // 4, k=8192, n=32768 // 2, dtype_bytes=2)
    assert one_of_eight == pytest.approx(96e-3, rel=0.02)


@pytest.mark.parametrize(
    ("copied", "gigabytes_per_second", "tolerance"),
    [(2 * 2**20, 1379.3, 0.17), (32 * 2**20, 3009.8, 0.02), (2**30, 3198.4, 0.01), (8 * 2**30, 3210.5, 0.01)],
)
def test_v7x_copies(copied: int, gigabytes_per_second: float, tolerance: float) -> None:
    """AI-Hypercomputer/tpu-recipes, microbenchmarks/ironwood/hbm, one core."""
    seconds = hbm_seconds(chip("v7x"), 2 * copied) + chip("v7x").kernel_overhead_seconds
    assert 2 * copied / seconds / 1e9 == pytest.approx(gigabytes_per_second, rel=tolerance)


def test_v6e_copy() -> None:
    """A copy of 33.5 MB in 49.36 us: AI-Hypercomputer/tpu-recipes, microbenchmarks."""
    seconds = hbm_seconds(chip("v6e"), 2 * 33.55e6) + chip("v6e").kernel_overhead_seconds
    assert seconds == pytest.approx(49.36e-6, rel=0.02)


def test_v3_elementwise_takes_the_compilers_cycles() -> None:
    seconds = hbm_seconds(V3, 2 * 4 * 2**20) + V3.kernel_overhead_seconds
    assert seconds * 940e6 == pytest.approx(19964, rel=0.05)


def test_book_critical_batch() -> None:
    """v5e is compute bound in bf16 from 240 tokens on: How to Scale Your Model, roofline chapter."""
    v5e = chip("v5e")
    assert v5e.matmul_flops_per_second / v5e.hbm_bytes_per_second == pytest.approx(240, rel=0.01)


def test_precision_multiplies_passes() -> None:
    def time(dtype_bytes: float, precision: Any) -> float:
        return matmul_seconds(
            V3,
            batch=1000,
            m=1024,
            k=1024,
            n=1024,
            dtype_bytes=dtype_bytes,
            precision=precision,
        )

    assert time(4, "default") == pytest.approx(time(2, "default"), rel=1e-3)
    assert time(2, "highest") == time(2, "default")
    assert time(4, "high") == pytest.approx(3 * time(4, "default"), rel=1e-3)
    assert time(4, "highest") == pytest.approx(6 * time(4, "default"), rel=1e-3)
    assert time(8, "default") == pytest.approx(4 * time(4, "default"), rel=1e-3)
    with pytest.raises(ValueError, match="Unknown precision 'best'. Choose one of default, high, highest."):
        time(4, "best")


@pytest.mark.parametrize(
    ("precision", "rate"), [("default", 494.7e12), ("high", 494.7e12), ("highest", 66.9e12)]
)
def test_float32_products_on_a_gpu(precision: Any, rate: float) -> None:
    """TF32 and float32 run at their own peaks: NVIDIA's data sheet of H100."""
    size: Any = {"batch": 1000, "m": 4096, "k": 4096, "n": 4096, "dtype_bytes": 4}
    h100 = chip("h100")
    seconds = matmul_seconds(h100, precision=precision, **size)
    assert 2 * 1000 * 4096**3 / seconds / h100.matmul_efficiency == pytest.approx(rate, rel=0.01)


def test_narrow_results_cost_more_on_tpus_only() -> None:
    for name, ratio in [("v3", 1.44), ("h100", 1.0)]:
        wide, narrow = (result_seconds(chip(name), size * 2**20, size) for size in (4, 2))
        assert narrow / wide == pytest.approx(ratio if ratio > 1 else 1 / 2)


def test_narrow_types_use_their_rate() -> None:
    def time(name: str, dtype_bytes: float) -> float:
        return matmul_seconds(chip(name), batch=1000, m=1024, k=1024, n=1024, dtype_bytes=dtype_bytes)

    for name, ratio in [("v3", 1), ("v5e", 2), ("v6e", 2), ("v7x", 2), ("h100", 2), ("a100", 2)]:
        assert time(name, 2) == pytest.approx(ratio * time(name, 1), rel=1e-2)


def test_padding_to_the_array() -> None:
    def time(m: int, k: int, n: int, name: str = "v3") -> float:
        return matmul_seconds(chip(name), batch=10**6, m=m, k=k, n=n, dtype_bytes=2)

    assert time(4096, 64, 4096) == pytest.approx(time(4096, 128, 4096), rel=1e-3)
    assert time(4096, 128, 1) == pytest.approx(time(4096, 128, 128), rel=1e-3)
    assert time(1, 4096, 4096) == pytest.approx(time(128, 4096, 4096), rel=1e-3)
    assert time(1025, 128, 128) == pytest.approx(time(1032, 128, 128), rel=1e-3)
    assert time(1024, 128, 128, "v6e") == pytest.approx(time(1024, 256, 256, "v6e"), rel=1e-3)


@given(sizes, sizes, sizes, st.sampled_from(list(chips())))
def test_products_are_symmetric_and_never_beat_the_peak(m: int, k: int, n: int, figures: Chip) -> None:
    seconds = matmul_seconds(figures, batch=1, m=m, k=k, n=n, dtype_bytes=2)
    assert seconds == pytest.approx(matmul_seconds(figures, batch=1, m=n, k=k, n=m, dtype_bytes=2))
    assert math.isfinite(seconds)
    assert seconds >= 2 * m * k * n / figures.matmul_flops_per_second > 0


@given(sizes, sizes, sizes, st.integers(1, 64), st.integers(0, 3))
def test_more_work_never_costs_less(m: int, k: int, n: int, more: int, which: int) -> None:
    def time(batch: int, m: int, k: int, n: int) -> float:
        return matmul_seconds(V3, batch=batch, m=m, k=k, n=n, dtype_bytes=2)

    base = [1, m, k, n]
    larger = [size + more * (at == which) for at, size in enumerate(base)]
    assert time(*larger) >= time(*base)


def test_nothing_takes_no_time() -> None:
    assert matmul_seconds(V3, batch=0, m=1, k=1, n=1, dtype_bytes=2) == 0
    assert hbm_seconds(V3, 0) == 0
    spatial: Any = {"out_spatial": (0, 8), "window": (3, 3)}
    assert convolution_seconds(V3, batch=1, in_features=8, out_features=8, dtype_bytes=2, **spatial) == 0


@pytest.mark.parametrize(
    ("batch", "out_spatial", "features", "window", "cycles", "tolerance"),
    [
        (8, (64, 64), (128, 128), (3, 3), 158315, 0.03),
        (32, (56, 56), (256, 256), (3, 3), 1835245, 0.03),
        (32, (112, 112), (3, 64), (7, 7), 831133, 0.03),
        (8, (64, 64), (64, 64), (3, 3), 94004, 0.10),
        (128, (3, 3), (8, 128), (64, 64), 157743, 0.08),  # gradients of filters
        (128, (3, 3), (2, 256), (128, 128), 310642, 0.08),
        (64, (3, 3), (4, 64), (128, 128), 160155, 0.10),
    ],
)
def test_v3_convolutions_take_the_compilers_cycles(
    batch: int,
    out_spatial: tuple[int, ...],
    features: tuple[int, int],
    window: tuple[int, ...],
    cycles: int,
    tolerance: float,
) -> None:
    seconds = convolution_seconds(
        V3,
        batch=batch,
        out_spatial=out_spatial,
        in_features=features[0],
        out_features=features[1],
        window=window,
        dtype_bytes=2,
    )
    assert seconds * 940e6 == pytest.approx(cycles, rel=tolerance)


@given(sizes, sizes, st.sampled_from([1, 2, 4, 8]), st.integers(1, 5))
def test_convolutions_never_beat_the_peak(inputs: int, outputs: int, groups: int, taps: int) -> None:
    shape: Any = {"batch": 2, "out_spatial": (16, 16), "window": (taps, taps)}
    seconds = convolution_seconds(
        V3,
        in_features=inputs * groups,
        out_features=outputs * groups,
        groups=groups,
        dtype_bytes=2,
        **shape,
    )
    flops = 2 * 2 * 16 * 16 * taps**2 * inputs * outputs * groups
    assert seconds >= flops / V3.matmul_flops_per_second


def test_groups_divide_the_features() -> None:
    with pytest.raises(ValueError, match="A convolution of 6 to 8 features has 4 groups."):
        convolution_seconds(
            V3, batch=1, out_spatial=(8,), in_features=6, out_features=8, window=(3,), groups=4, dtype_bytes=2
        )


@pytest.mark.parametrize(("op_class", "pairs", "cycles"), [("cheap", 40, 40960), ("medium", 20, 40960)])
def test_v3_chains_take_the_compilers_cycles(op_class: Any, pairs: int, cycles: int) -> None:
    """40 more multiply-add pairs, or 20 more log-add pairs, on f32[1024, 1024]."""
    with_add = vector_seconds(V3, elements=2**20, op_class="cheap")
    seconds = pairs * (vector_seconds(V3, elements=2**20, op_class=op_class) + with_add)
    assert seconds * 940e6 == pytest.approx(cycles, rel=0.01)


def test_vector_classes_are_ordered() -> None:
    cheap, medium, expensive, trigonometric = (
        vector_seconds(V3, elements=1e6, op_class=name) for name in VECTOR_CLASSES[:4]
    )
    assert 0 < cheap < medium < expensive < trigonometric
    unknown: Any = "cosmic"
    with pytest.raises(ValueError, match="Unknown class of vector operation 'cosmic'. Choose one of cheap, "):
        vector_seconds(V3, elements=1, op_class=unknown)
