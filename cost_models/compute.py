"""Time on one device: matrix unit, vector unit and HBM.

Each function gives the time of one resource; an op takes the longest of those that it uses, plus
`Chip.kernel_overhead_seconds`. Nothing here knows of fusion or of overlap: the caller decides what runs
together.
"""

import functools
import math
from typing import Literal, get_args

from cost_models.chip import Chip

__all__ = [
    "VECTOR_CLASSES",
    "Precision",
    "VectorClass",
    "convolution_seconds",
    "hbm_seconds",
    "matmul_seconds",
    "result_seconds",
    "vector_operations",
    "vector_seconds",
]

Precision = Literal["default", "high", "highest"]

VectorClass = Literal[
    "cheap", "medium", "expensive", "trigonometric", "reduce_major", "reduce_second_minor", "reduce_minor"
]
VECTOR_CLASSES: tuple[VectorClass, ...] = get_args(VectorClass)

# Cheap operations that one costs. Fitted to the v3 compiler's estimated cycles of fusions that chain 4 to 80
# operations on f32[1024, 1024]: exp, tanh and rsqrt 2; log and divide 3; erf 22; sin 183 (range reduction); a
# sum over the minor dimension 1.8 more than over another one. v2 and v4 give the same within 2 %.
_VECTOR_OPS: dict[str, float] = {
    "cheap": 1.0,
    "medium": 3.0,
    "expensive": 22.0,
    "trigonometric": 183.0,
    "reduce_major": 1.0,
    "reduce_second_minor": 1.0,
    "reduce_minor": 3.0,
}

_PRECISIONS: tuple[Precision, ...] = get_args(Precision)

# First blocks of the operands, and cycles between the first load and the first result. Fitted, together with
# `Chip.matmul_efficiency`, to the v3 compiler's estimated cycles of bf16 products (see `matmul_seconds`).
_FILL_BLOCK = 768
_FILL_CYCLES = 750


@functools.lru_cache(maxsize=65536)
def matmul_seconds(
    chip: Chip,
    *,
    batch: int,
    m: int,
    k: int,
    n: int,
    dtype_bytes: float,
    precision: Precision = "default",
    resident: bool = False,
) -> float:
    """Time of the matrix unit for `batch` products of an m x k by a k x n matrix.

    One operand is held in the systolic array in square tiles while the other streams through it one row per
    cycle. So the contracted dimension and one other are padded to the array's size, the last to 8 rows; a
    stream shorter than the array waits for the next tile to load. The cheaper choice of operand counts.
    To this comes the fill: the first blocks of both operands arrive from HBM before the array can start.

    Args:
        chip: figures of one device.
        batch: independent products, 1 or more.
        m: rows of the left operand.
        k: contracted dimension.
        n: columns of the right operand.
        dtype_bytes: bytes per element of the operands: 1 takes the int8 or float8 rate where the chip has
            one, 2 and 4 the bfloat16 rate, 8 counts as complex64.
        precision: of float32 operands, which TPUs round to bfloat16 at `"default"`; see `Chip.f32_passes`.
        resident: the operands lie in VMEM, as in a kernel written by hand: nothing is filled.

    Returns:
        Seconds; 0 if any dimension is 0.

    Raises:
        ValueError: for an unknown precision.

    Fitted to the v3 compiler's estimated cycles. Squares of 1024, 2048, 4096 and 8192 reach 77, 93, 95 and 97
    % of peak there, and come out within 1.5 points; products of more than 2^33 operations within 1.5 % of
    their time unless HBM bound, those of 2^28 to 2^31 between 24 % too fast and 6 % too slow. With the
    overhead of a kernel added, squares of 128 to 32768 on v7x hardware come out between 21 % too fast and 5 %
    too slow, and squares of 256 to 4096 in XLA's table for H100 between 14 % too fast and 5 % too slow. On GPUs
    the array's size is the granularity of their tiles.

    >>> from cost_models import chip
    >>> seconds = matmul_seconds(chip("v3"), batch=1, m=8192, k=8192, n=8192, dtype_bytes=2)
    >>> round(2 * 8192**3 / seconds / chip("v3").matmul_flops_per_second, 2)
    0.96

    """
    if precision not in _PRECISIONS:
        raise ValueError(f"Unknown precision {precision!r}. Choose one of {', '.join(_PRECISIONS)}.")
    if not (batch and m and k and n):
        return 0.0
    seconds = batch * _array_seconds(chip, m, k, n, dtype_bytes, precision)
    if resident:
        return seconds
    block_bytes = k * (min(m, _FILL_BLOCK) + min(n, _FILL_BLOCK)) * dtype_bytes
    return seconds + _fill_seconds(chip, block_bytes)


@functools.lru_cache(maxsize=16384)
def convolution_seconds(
    chip: Chip,
    *,
    batch: int,
    out_spatial: tuple[int, ...],
    in_features: int,
    out_features: int,
    window: tuple[int, ...],
    groups: int = 1,
    dtype_bytes: float,
    precision: Precision = "default",
) -> float:
    """Time of the matrix unit for a convolution, as one matrix product per window tap.

    Every tap multiplies a (batch x out_spatial) x (in_features / groups) matrix by a (in_features / groups) x
    (out_features / groups) one, and both feature dimensions are padded to the array. Taps share a tile where
    their input features, padded to 8, fit side by side; small groups share one as blocks of its diagonal.
    Where there are more taps than output positions, as in the gradient of a filter, taps and input features
    are contracted as one dimension, and nothing is padded between them.

    Against the v3 compiler's estimated cycles of bf16 convolutions: 3x3 on 128 and on 256 features and 7x7 on
    3 are within 3 %, 3x3 on 64 features is 8 % and on 32 features 43 % too fast. Gradients of 3x3 filters are
    6 to 8 % too fast; those of one image 33 % on 128 features, and 5 times on 32. Grouped convolutions are a
    guess: the compiler takes 0.7 of this for a depthwise one, and 7 times as long for 8 groups of 32
        features.

    Args:
        chip: figures of one device.
        batch: images.
        out_spatial: output positions along each spatial dimension.
        in_features: input features of all groups together.
        out_features: output features of all groups together.
        window: taps along each spatial dimension.
        groups: feature groups; equal to `in_features` for a depthwise convolution.
        dtype_bytes: as `matmul_seconds`.
        precision: as `matmul_seconds`.

    Returns:
        Seconds; 0 if any dimension is 0.

    Raises:
        ValueError: if `groups` does not divide both feature counts, or for an unknown precision.

    >>> from cost_models import chip
    >>> thin, full = (
    ...     convolution_seconds(chip("v3"), batch=8, out_spatial=(64, 64), in_features=features,
    ...                         out_features=128, window=(3, 3), dtype_bytes=2)
    ...     for features in (32, 128)
    ... )
    >>> round(thin / full, 2)
    0.34

    """
    if precision not in _PRECISIONS:
        raise ValueError(f"Unknown precision {precision!r}. Choose one of {', '.join(_PRECISIONS)}.")
    if groups < 1 or in_features % groups or out_features % groups:
        raise ValueError(
            f"A convolution of {in_features} to {out_features} features has {groups} groups. The number of "
            "groups divides both."
        )
    rows = batch * math.prod(out_spatial)
    taps = math.prod(window)
    if not (rows and taps and in_features and out_features):
        return 0.0
    k, n = in_features // groups, out_features // groups
    per_tile = min(groups, max(1, min(chip.mxu_dim // k, chip.mxu_dim // n)))
    tiles = math.ceil(groups / per_tile)
    depth = k * per_tile
    if taps > math.prod(out_spatial):
        passes, depth = 1, taps * depth
    else:
        passes = math.ceil(taps / max(1, chip.mxu_dim // _pad(depth, 8)))
    seconds = passes * tiles * _array_seconds(chip, rows, depth, n * per_tile, dtype_bytes, precision)
    block_bytes = (
        min(rows, _FILL_BLOCK) * in_features + taps * k * min(out_features, _FILL_BLOCK)
    ) * dtype_bytes
    return seconds + _fill_seconds(chip, block_bytes)


def _fill_seconds(chip: Chip, block_bytes: float) -> float:
    """Time before the array is busy: the first blocks, at most a quarter of VMEM, and the first result."""
    return hbm_seconds(chip, min(block_bytes, chip.vmem_bytes / 4)) + _FILL_CYCLES / chip.clock_hz


def _array_seconds(chip: Chip, m: int, k: int, n: int, dtype_bytes: float, precision: Precision) -> float:
    """Time of one product in the systolic arrays, at the rate of the element type."""
    tile = chip.mxu_dim
    depth = math.ceil(k / tile)
    macs = (
        tile
        * tile
        * min(
            depth * math.ceil(n / tile) * max(_pad(m, 8), tile),
            depth * math.ceil(m / tile) * max(_pad(n, 8), tile),
        )
    )
    rate = chip.matmul_flops_per_second
    if dtype_bytes <= 1:
        rate = max(rate, chip.int8_ops_per_second, chip.fp8_flops_per_second)
    passes = chip.f32_passes[_PRECISIONS.index(precision)] if dtype_bytes >= 4 else 1.0
    products = 4 if dtype_bytes >= 8 else 1
    return 2 * macs * passes * products / (rate * chip.matmul_efficiency)


def vector_seconds(chip: Chip, *, elements: float, op_class: VectorClass = "cheap") -> float:
    """Time of the vector unit for one operation on every element.

    Args:
        chip: figures of one device.
        elements: elements, in 32-bit lanes: narrower types are widened for arithmetic. Pass the padded count
            where padding matters, for a tile costs the same however full it is.
        op_class: `"cheap"` (add, multiply, compare, select, cast), `"medium"` (divide, exp, tanh, log,
            rsqrt), `"expensive"` (erf, pow, atan2), `"trigonometric"` (sin, cos, tan), `"reduce_major"`,
            `"reduce_second_minor"` or `"reduce_minor"` (a reduction by the dimension that it removes; the
            minor one crosses lanes).

    Returns:
        Seconds.

    Raises:
        ValueError: for an unknown class.

    >>> from cost_models import chip
    >>> vector_seconds(chip("v3"), elements=0)
    0.0

    """
    return elements * vector_operations(op_class) / chip.vector_flops_per_second


def vector_operations(op_class: VectorClass) -> float:
    """Return how many cheap operations one of a class takes.

    Raises:
        ValueError: for an unknown class.

    >>> vector_operations("medium")
    3.0

    """
    if op_class not in _VECTOR_OPS:
        raise ValueError(
            f"Unknown class of vector operation {op_class!r}. Choose one of {', '.join(_VECTOR_OPS)}."
        )
    return _VECTOR_OPS[op_class]


def hbm_seconds(chip: Chip, num_bytes: float) -> float:
    """Time to stream bytes from or to HBM, at the bandwidth that long streams reach.

    Args:
        chip: figures of one device.
        num_bytes: bytes read plus bytes written, padded as in memory.

    Returns:
        Seconds.

    >>> from cost_models import chip
    >>> round(hbm_seconds(chip("v3"), 450e9 * 0.92), 6)
    1.0

    """
    return num_bytes / (chip.hbm_bytes_per_second * chip.hbm_efficiency)


def result_seconds(chip: Chip, num_bytes: float, element_bytes: float) -> float:
    """Time to write the result of a matrix product or convolution to HBM.

    Args:
        chip: figures of one device.
        num_bytes: bytes of the result, padded as in memory.
        element_bytes: bytes per element; on TPUs narrow elements take longer than their size says.

    >>> from cost_models import chip
    >>> wide, narrow = (result_seconds(chip("v3"), size * 2**20, size) for size in (4, 2))
    >>> round(narrow / wide, 2)
    1.44

    """
    per_element = max(element_bytes, chip.narrow_result_bytes) if element_bytes <= 2 else element_bytes
    return hbm_seconds(chip, num_bytes / element_bytes * per_element)


def _pad(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
