"""What a program's structure tells about its inputs, without looking at names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from autoshard.boundary import boundaries
from autoshard.grouping import Block
from autoshard.program import Value
from autoshard.rules import Kind

__all__ = ["roots_of_products"]

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "gather", "ragged_dot_general"})
_CARRIES = frozenset(
    "convert_element_type reshape transpose squeeze broadcast_in_dim slice dynamic_slice split".split()
)


def origins(block: Block) -> dict[Value, Value]:
    """Map values that only rename an input (casts, copies, slices of a scan) to that input."""
    found = {value: value for value in block.inputs}
    _follow(block, found)
    return found


def _follow(block: Block, found: dict[Value, Value]) -> None:
    for item in block.groups:
        if item.kind is Kind.CONTROL:
            (op,) = item.ops
            boundary = boundaries(item)
            for atom, (inner, _) in zip(op.inputs, boundary.operands, strict=True):
                if inner is not None and isinstance(atom, Value) and atom in found:
                    found[inner] = found[atom]
            for inner, decider in boundary.same.items():
                if decider in found:
                    found[inner] = found[decider]
            for body in item.blocks:
                _follow(body, found)
        elif item.kind is Kind.IDENTITY:
            (op,) = item.ops
            _rename(op.inputs, op.outputs, found)
        elif item.is_copy:
            _rename(item.inputs, item.outputs, found)
        else:
            for op in item.ops:
                if op.name in _CARRIES and isinstance(op.inputs[0], Value) and op.inputs[0] in found:
                    for value in op.outputs:
                        found[value] = found[op.inputs[0]]


def _rename(sources: Iterable[Any], targets: Iterable[Value], found: dict[Value, Value]) -> None:
    for source, target in zip(sources, targets, strict=True):
        if isinstance(source, Value) and source in found:
            found[target] = found[source]


def roots_of_products(block: Block) -> set[Value]:
    """Return the inputs that a product, convolution or lookup reads as such."""
    found = origins(block)
    roots = set()
    for item in block.walk():
        for op in item.ops:
            if op.name in _PRODUCTS:
                for atom in op.inputs[:1] if op.name == "gather" else op.inputs:
                    if isinstance(atom, Value) and atom in found:
                        roots.add(found[atom])
    return roots
