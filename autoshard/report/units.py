"""Bytes in binary units, for every report."""

from __future__ import annotations

__all__ = ["TERMINAL", "size_text", "size_unit"]

_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
# What `size_unit` chooses from in a terminal: few units, each from a tenth, so that tables are easy to compare.
TERMINAL = (0.1, _UNITS[1:4])


def size_unit(
    size: float, choice: tuple[float, tuple[tuple[str, int], ...]] = (1.0, _UNITS)
) -> tuple[str, int]:
    """Choose the unit for sizes up to `size` bytes: its name and its bytes.

    Args:
      size: bytes.
      choice: how much of a unit there has to be, and the units, the largest first; the last is for the rest.

    >>> size_unit(3 * 2**29), size_unit(96), size_unit(2**29, TERMINAL), size_unit(96, TERMINAL)
    (('GiB', 1073741824), ('B', 1), ('GiB', 1073741824), ('KiB', 1024))
    """
    least, units = choice
    return next((found for found in units if size >= least * found[1]), units[-1])


def size_text(size: float, choice: tuple[float, tuple[tuple[str, int], ...]] = (1.0, _UNITS)) -> str:
    """Write bytes with their unit, chosen as by `size_unit`.

    >>> size_text(3 * 2**29), size_text(96), size_text(2**29, TERMINAL)
    ('1.50 GiB', '96 B', '0.50 GiB')
    """
    name, scale = size_unit(size, choice)
    return f"{size / scale:,.{2 if scale > 1 else 0}f} {name}"
