"""Bytes that an array takes in HBM, with the padding of its tiles.

The two minor dimensions of an array are stored in tiles of 8 x 128 32-bit words, narrower types packed into
them. Which dimensions are minor is the compiler's choice; it is assumed to choose well.
"""

import functools
import itertools
import math

from cost_models.chip import Chip

__all__ = ["padded_bytes"]


@functools.lru_cache(maxsize=262144)
def padded_bytes(chip: Chip, shape: tuple[int, ...], itemsize: float) -> int:
    """Bytes of an array in the layout with the least padding.

    The minor dimension is padded to 128 elements. The second-minor one is padded to the rows of a tile, which
    shrinks for small dimensions: it starts at 1 row of 32-bit words (2 on v2 and v3) and doubles until the
    dimension, or 8, is reached; types of 8 bits or fewer, and 16-bit ones on v7x, use taller tiles once the
    dimension fills one. An array of one dimension is padded to whole rows, and a scalar takes one row.

    Args:
        chip: figures of one device.
        shape: sizes of the dimensions, in any order.
        itemsize: bytes per element; 0.5 for 4-bit types; 8 counts as two 32-bit planes.

    Returns:
        Bytes, at least `prod(shape) * itemsize`; 0 for an array without elements.

    Source: jax-ml/jax, `jax/_src/tpu_info.py` and `infer_tiling`, 2026; openxla/xla, tiled layout, 2026.

    >>> from cost_models import chip
    >>> padded_bytes(chip("v3"), (256, 512, 128, 2), 4) == 256 * 512 * 128 * 2 * 4
    True
    >>> padded_bytes(chip("v3"), (128, 3), 4) == 128 * 4 * 4
    True

    """
    if 0 in shape:
        return 0
    planes, bits = (2, 32) if itemsize == 8 else (1, round(itemsize * 8))
    dims = [size for size in shape if size != 1]
    if len(shape) == 0:
        return round(chip.lanes * itemsize)
    if len(shape) == 1 or len(dims) <= 1:
        row = chip.lanes * (chip.min_tile_rows if len(shape) == 1 else 1) * max(1, 32 // bits)
        return planes * _pad(math.prod(shape), row) * bits // 8
    total = math.prod(dims)
    least = min(
        total
        // (dims[minor] * dims[second])
        * _pad(dims[minor], chip.lanes)
        * _pad(dims[second], _tile_rows(chip, dims[second], bits))
        for minor, second in itertools.permutations(range(len(dims)), 2)
    )
    return planes * least * bits // 8


def _tile_rows(chip: Chip, size: int, bits: int) -> int:
    packing = max(1, 32 // bits)
    tall = chip.tile_rows_16bit if bits == 16 else chip.sublanes * packing
    if size >= tall:
        return tall
    rows = chip.min_tile_rows * packing
    while rows < min(size, chip.sublanes):
        rows *= 2
    return rows


def _pad(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
