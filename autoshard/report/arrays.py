"""The arrays of a plan as rows for a table: those of one argument that are split alike share a row."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoshard.layout import Axes, Layout, local_shape
from autoshard.report.paths import collapse, keys_of

if TYPE_CHECKING:
    from autoshard.plan import Leaf, Plan

__all__ = ["ArrayRow", "argument_rows", "result_rows", "short_array", "short_dtype", "spec_text"]


@dataclass(frozen=True, kw_only=True)
class ArrayRow:
    """Arrays split alike: argument key, pattern of paths in it, dtype, shape of each, bytes on a device."""

    argument: str
    category: str
    pattern: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    layout: Layout
    device_bytes: float

    @property
    def count(self) -> int:
        """How many arrays there are."""
        return len(self.shapes)

    @property
    def sizes(self) -> list[list[int]]:
        """Sizes of each dim, in ascending order; arrays that are split alike have one rank."""
        return [sorted(set(column)) for column in zip(*self.shapes, strict=True)]

    @property
    def array(self) -> str:
        """The shapes as one: two sizes that differ are listed, more are a range."""
        dims = [f"{c[0]}..{c[-1]}" if len(c) > 2 else "|".join(map(str, c)) for c in self.sizes]
        return short_array(self.dtype, dims)

    @property
    def spec(self) -> str:
        """The layout as Python writes a `PartitionSpec`."""
        return spec_text(self.layout, comma=", ")


def argument_rows(plan: Plan, *, full: bool = False) -> list[ArrayRow]:
    """Return rows of all inputs, in the order of the arguments; with `full` a row for each array."""
    return _rows(plan, list(zip(plan.inputs, plan.input_layouts, strict=True)), full)


def result_rows(plan: Plan, *, full: bool = False) -> tuple[list[ArrayRow], int]:
    """Return rows of the outputs, and how many were left out for being as the input of their path: state.

    With `full` there is a row for each array, and none is left out.
    """
    arrays = list(zip(plan.outputs, plan.output_layouts, strict=True))
    if full:
        return _rows(plan, arrays, full), 0
    inputs = {
        leaf.path: (leaf.shape, leaf.dtype, layout)
        for leaf, layout in zip(plan.inputs, plan.input_layouts, strict=True)
    }
    others = [
        (leaf, layout) for leaf, layout in arrays if inputs.get(leaf.path) != (leaf.shape, leaf.dtype, layout)
    ]
    return _rows(plan, others, full), len(arrays) - len(others)


def _rows(plan: Plan, arrays: Sequence[tuple[Leaf, Layout]], full: bool) -> list[ArrayRow]:
    paths = [leaf.path for leaf, _ in arrays]
    if full:
        groups = [(path, [i]) for i, path in enumerate(paths)]
    else:
        groups = collapse(paths, [(leaf.category, leaf.dtype, layout) for leaf, layout in arrays])
    rows = []
    for pattern, members in groups:
        first, layout = arrays[members[0]]
        argument = keys_of(first.path)[0]
        rows.append(
            ArrayRow(
                argument=argument,
                category=first.category,
                pattern=pattern[len(argument) :],
                dtype=first.dtype,
                shapes=tuple(arrays[i][0].shape for i in members),
                layout=layout,
                device_bytes=sum(_device_bytes(plan, *arrays[i]) for i in members),
            )
        )
    return rows


def _device_bytes(plan: Plan, leaf: Leaf, layout: Layout) -> float:
    shape = local_shape(leaf.shape, layout, plan.mesh)
    if leaf.dtype.startswith("key<"):  # a key of Threefry is two words, of the others four
        return float(math.prod(shape) * (8 if "fry" in leaf.dtype else 16))
    return float(plan.estimate.machine.bytes_of(shape, leaf.dtype))


def spec_text(layout: Layout, *, comma: str = ",") -> str:
    """Write a layout as the `PartitionSpec` that a person would type, with `comma` between axes of a dim.

    >>> spec_text(Layout((("data",), (), ("x", "y"), ())))
    "P('data', None, ('x','y'))"
    """
    entries = [_entry(axes, comma) for axes in layout.dims]
    while entries and entries[-1] == "None":
        entries.pop()
    if layout.unreduced:
        entries.append("unreduced={" + ", ".join(map(repr, layout.unreduced)) + "}")
    return f"P({', '.join(entries)})"


def _entry(axes: Axes, comma: str) -> str:
    names = comma.join(map(repr, axes))
    return f"({names})" if len(axes) > 1 else names or "None"


def short_array(dtype: str, dims: Sequence[object]) -> str:
    """Write an array type in short.

    >>> short_array("bfloat16", (8, 128)), short_array("int32", ())
    ('bf16[8,128]', 'i32[]')
    """
    return f"{short_dtype(dtype)}[{','.join(map(str, dims))}]"


def short_dtype(name: str) -> str:
    """Shorten the name of a dtype as XLA does.

    >>> [short_dtype(name) for name in ("bfloat16", "float32", "int32", "uint8", "bool")]
    ['bf16', 'f32', 'i32', 'u8', 'bool']
    """
    return re.sub(r"^(b|u|)(float|int)(\d)", lambda m: (m[1] + m[2][0] + m[3]).replace("ui", "u"), name)
