"""The arrays of a plan as rows for a table: those of one argument that are split alike share a row."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoshard.layout import Layout, local_shape, to_spec
from autoshard.report.paths import collapse, keys_of

if TYPE_CHECKING:
    from autoshard.plan import Leaf, Plan

__all__ = ["ArrayRow", "argument_rows", "result_rows", "short_array"]


@dataclass(frozen=True, kw_only=True)
class ArrayRow:
    """Arrays split alike: argument key, pattern of paths in it, how many, shapes, spec, bytes on a device."""

    argument: str
    category: str
    pattern: str
    count: int
    array: str
    spec: str
    device_bytes: float


def argument_rows(plan: Plan) -> list[ArrayRow]:
    """Return rows of all inputs, in the order of the arguments."""
    return _rows(plan, plan.inputs, plan.input_layouts)


def result_rows(plan: Plan) -> tuple[list[ArrayRow], int]:
    """Return rows of the outputs, and how many were left out for being as the input of their path: state."""
    inputs = {
        leaf.path: (leaf.shape, leaf.dtype, layout)
        for leaf, layout in zip(plan.inputs, plan.input_layouts, strict=True)
    }
    others = [
        (leaf, layout)
        for leaf, layout in zip(plan.outputs, plan.output_layouts, strict=True)
        if inputs.get(leaf.path) != (leaf.shape, leaf.dtype, layout)
    ]
    rows = _rows(plan, [leaf for leaf, _ in others], [layout for _, layout in others])
    return rows, len(plan.outputs) - len(others)


def _rows(plan: Plan, leaves: Sequence[Leaf], layouts: Sequence[Layout]) -> list[ArrayRow]:
    labels = [
        (leaf.category, leaf.dtype, layout, len(leaf.shape))
        for leaf, layout in zip(leaves, layouts, strict=True)
    ]
    rows = []
    for pattern, members in collapse([leaf.path for leaf in leaves], labels):
        first = leaves[members[0]]
        argument = next(iter(keys_of(first.path)), "")
        rows.append(
            ArrayRow(
                argument=argument,
                category=first.category,
                pattern=pattern[len(argument) :],
                count=len(members),
                array=_shapes([leaves[i] for i in members]),
                spec=_spec(layouts[members[0]]),
                device_bytes=sum(_device_bytes(plan, leaves[i], layouts[i]) for i in members),
            )
        )
    return rows


def _device_bytes(plan: Plan, leaf: Leaf, layout: Layout) -> float:
    import numpy as np

    shape = local_shape(leaf.shape, layout, plan.mesh)
    if leaf.dtype.startswith("key<"):  # a key of Threefry is two words, of the others four
        return float(np.prod(shape)) * (8 if "fry" in leaf.dtype else 16)
    return float(plan.estimate.machine.bytes_of(shape, leaf.dtype))


def _spec(layout: Layout) -> str:
    """Write a layout as the `PartitionSpec` that a person would type."""
    entries = [repr(entry) for entry in to_spec(layout)]
    if layout.unreduced:
        entries.append("unreduced={" + ", ".join(map(repr, layout.unreduced)) + "}")
    return f"P({', '.join(entries)})"


def _shapes(leaves: Sequence[Leaf]) -> str:
    """Write the shapes of arrays of one rank as one: sizes that differ are listed, many as a range."""
    sizes = [sorted(set(column)) for column in zip(*(leaf.shape for leaf in leaves), strict=True)]
    dims = [f"{c[0]}..{c[-1]}" if len(c) > 2 else "|".join(map(str, c)) for c in sizes]
    return short_array(leaves[0].dtype, dims)


def short_array(dtype: str, dims: Sequence[object]) -> str:
    """Write an array type in short.

    >>> short_array("bfloat16", (8, 128)), short_array("int32", ())
    ('bf16[8,128]', 'i32[]')
    """
    short = re.sub(r"^(b?)float(\d)", r"\1f\2", re.sub(r"^(u?)int(\d)", r"\1i\2", dtype))
    return f"{short}[{','.join(map(str, dims))}]"
