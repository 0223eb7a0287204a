"""Bytes that an array takes in HBM, with the padding of its tiles.

The two minor dimensions of an array are stored in tiles of up to 8 x 128 elements, which types narrower than
32 bits fill by packing. Which dimensions are minor is the compiler's choice; it is assumed to choose well.
GPUs have no tiles: their arrays are dense.
"""

import functools
import itertools
import math

from cost_models.chip import Chip

__all__ = ["padded_bytes"]

_FLAT_TILE = 1024


@functools.lru_cache(maxsize=262144)
def padded_bytes(chip: Chip, shape: tuple[int, ...], itemsize: float) -> int:
    """Bytes of an array in the layout with the least padding.

    The minor dimension is padded to 128 elements, the second-minor one to the rows of a tile. Tiles of small
    arrays are lower: rows start at one 32-bit word (two on v2 and v3) and double until the dimension, or 8,
    is reached. An array of one dimension is padded likewise to 128 elements times a power of two, at most
    1024; a scalar is an array of one element.

    Args:
        chip: figures of one device.
        shape: sizes of the dimensions, in any order.
        itemsize: bytes per element; 0.5 for 4-bit types; 8 and more count as several 32-bit planes.

    Returns:
        Bytes, at least `prod(shape) * itemsize`; 0 for an array without elements.

    Agrees with the argument sizes that the compiler (libtpu 0.0.52) reports for 33 shapes of 8, 16 and 32
    bits on each of v3, v6e and v7x. The rule of growing tiles is that of jax-ml/jax, `infer_tiling`, 2026.

    >>> from cost_models import chip
    >>> padded_bytes(chip("v3"), (256, 512, 128, 2), 4) == 256 * 512 * 128 * 2 * 4
    True
    >>> padded_bytes(chip("v3"), (128, 3), 4) == 128 * 4 * 4
    True

    """
    if 0 in shape:
        return 0
    if chip.lanes == 1:
        return math.ceil(math.prod(shape) * itemsize)
    planes = math.ceil(itemsize / 4)
    bits = round(itemsize * 8 / planes)
    packing = 32 // bits
    if len(shape) < 2:
        size = math.prod(shape)
        tile = _grown(chip.lanes * chip.min_tile_rows * packing, min(size, _FLAT_TILE))
        return planes * _pad(size, tile) * bits // 8
    first_rows = chip.min_tile_rows * packing
    total = math.prod(shape)
    least = min(
        total
        // (minor * second)
        * _pad(minor, chip.lanes)
        * _pad(second, _grown(first_rows, min(second, chip.sublanes)))
        for minor, second in itertools.permutations(shape, 2)
    )
    return planes * least * bits // 8


def _grown(tile: int, size: int) -> int:
    """Double a tile until it holds a size."""
    while tile < size:
        tile *= 2
    return tile


def _pad(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
