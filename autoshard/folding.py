"""Transposes that a matrix product reads through: its dimension numbers say the same, and nothing is moved.

XLA folds them too. As ops of their own they would be priced as copies, and decide how a product is split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autoshard.program import Atom, Op, Program, Value

__all__ = ["fold_transposes"]


def fold_transposes(program: Program) -> Program:
    """Let products read the operand of a transpose where the order of their results stays.

    A transpose whose result has a checkpoint name stays: somebody may annotate it.
    """
    made: dict[Value, Op] = {}
    ops = []
    for op in program.ops:
        if op.blocks:
            op = replace(op, blocks=tuple(map(fold_transposes, op.blocks)))
        if op.name == "dot_general":
            op = _reading_through(op, made)
        ops.append(op)
        made.update(dict.fromkeys(op.outputs, op))
    return replace(program, ops=tuple(ops))


def _reading_through(op: Op, made: Mapping[Value, Op]) -> Op:
    contract, batch = (list(pair) for pair in op.params["dimension_numbers"])
    inputs: list[Atom] = list(op.inputs)
    for i, atom in enumerate(op.inputs):
        source = made.get(atom) if isinstance(atom, Value) and not atom.labels else None
        if source is None or source.name != "transpose":
            continue
        order = source.params["permutation"]
        free = [order[d] for d in range(len(order)) if d not in (*contract[i], *batch[i])]
        if free == sorted(free):
            inputs[i] = source.inputs[0]
            contract[i], batch[i] = (tuple(order[d] for d in dims) for dims in (contract[i], batch[i]))
    numbers: Any = (tuple(contract), tuple(batch))
    return replace(op, inputs=tuple(inputs), params={**op.params, "dimension_numbers": numbers})
