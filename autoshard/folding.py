"""Transposes around matrix products: dimension numbers and the order of operands say the same, and nothing is moved.

XLA folds most of them, too. As ops of their own they would be priced as copies, and decide how a product is split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.lax import DotAlgorithm

from autoshard.program import Atom, Op, Program, Value, shape_of

__all__ = ["fold_transposes"]


def fold_transposes(program: Program) -> Program:
    """Let products read through transposes, and swap the operands of those that a transpose alone reads.

    A transpose before a product is folded where the order of the product's results stays, one behind it where it
    puts the right operand's dims before the left one's. A value with a checkpoint name stays: somebody may
    annotate it.
    """
    reads = Counter(a for op in program.ops for a in op.inputs if isinstance(a, Value))
    reads.update(a for a in program.outputs if isinstance(a, Value))
    made: dict[Value, Op] = {}
    products: dict[Value, int] = {}
    ops: list[Op] = []
    for op in program.ops:
        if op.blocks:
            op = replace(op, blocks=tuple(map(fold_transposes, op.blocks)))
        source = op.inputs[0] if op.name == "transpose" else None
        if isinstance(source, Value) and source in products and reads[source] == 1 and not source.labels:
            at = products[source]
            if _swaps(ops[at], op.params["permutation"]):
                ops[at] = replace(_swapped(ops[at]), outputs=op.outputs)
                products[op.outputs[0]] = at
                continue
        if op.name == "dot_general":
            op = _reading_through(op, made)
            products[op.outputs[0]] = len(ops)
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


def _swaps(op: Op, order: Sequence[int]) -> bool:
    """Tell whether an order of a product's dims only puts the right operand's free dims before the left one's."""
    (contract, _), (batch, _) = op.params["dimension_numbers"]
    if isinstance(op.params["precision"], DotAlgorithm):
        return False  # it may treat the operands differently
    left = len(shape_of(op.inputs[0])) - len(contract)
    shared = len(batch)
    return tuple(order) == (*range(shared), *range(left, len(order)), *range(shared, left))


def _swapped(op: Op) -> Op:
    """Return the product with its operands in the other order."""
    contract, batch = op.params["dimension_numbers"]
    precision = op.params["precision"]
    changes = {
        "dimension_numbers": (contract[::-1], batch[::-1]),
        "precision": precision[::-1] if isinstance(precision, tuple) else precision,
    }
    return replace(op, inputs=op.inputs[::-1], params={**op.params, **changes})
