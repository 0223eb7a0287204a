"""Shifts and rolls: slices of an array that are joined again become one op, whose devices exchange borders once.

`jnp.roll`, and the shift `jnp.concatenate([first, x[:-1]])` of a pipeline, are written so. As ops of their own the
slices would move what they cut off a split dim first, and the join would move the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from autoshard.program import Atom, Op, Program, Value, shape_of

__all__ = ["fold_slices"]


def fold_slices(program: Program) -> Program:
    """Let concatenations read the operands of slices, where they keep more than half of an array.

    The parameter `windows` of such a concatenation says what is joined: number of the operand, first element,
    first one behind. A slice with a checkpoint name stays: somebody may annotate it.
    """
    made: dict[Value, Op] = {}
    ops = []
    for op in program.ops:
        if op.blocks:
            op = replace(op, blocks=tuple(map(fold_slices, op.blocks)))
        if op.name == "concatenate":
            op = _joining_parts(op, made)
        ops.append(op)
        made.update(dict.fromkeys(op.outputs, op))
    return replace(program, ops=tuple(ops))


def _joining_parts(op: Op, made: Mapping[Value, Op]) -> Op:
    axis = op.params["dimension"]
    whole = [(atom, 0, shape_of(atom)[axis]) for atom in op.inputs]
    parts = [_part(atom, axis, made) or own for atom, own in zip(op.inputs, whole, strict=True)]
    kept: Counter[Atom] = Counter()
    for part, own in zip(parts, whole, strict=True):
        kept[part[0]] += part[2] - part[1] if part is not own else 0
    taken = [
        part if 2 * kept[part[0]] > shape_of(part[0])[axis] else own
        for part, own in zip(parts, whole, strict=True)
    ]
    if taken == whole:
        return op
    inputs = tuple(dict.fromkeys(atom for atom, _, _ in taken))
    windows = tuple((inputs.index(atom), first, last) for atom, first, last in taken)
    return replace(op, inputs=inputs, params={**op.params, "windows": windows})


def _part(atom: Atom, axis: int, made: Mapping[Value, Op]) -> tuple[Atom, int, int] | None:
    """Return the array that an operand is a slice of along one dim, and where it begins and ends there."""
    op = made.get(atom) if isinstance(atom, Value) and not atom.labels else None
    if op is None or op.name != "slice" or set(op.params["strides"] or (1,)) != {1}:
        return None
    source, out = shape_of(op.inputs[0]), op.outputs[0].shape
    if any(n != m for d, (n, m) in enumerate(zip(source, out, strict=True)) if d != axis):
        return None
    return op.inputs[0], op.params["start_indices"][axis], op.params["limit_indices"][axis]
