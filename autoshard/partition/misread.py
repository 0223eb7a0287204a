"""Ops that XLA's partitioner computes wrongly when they are split; docs/xla.md holds the evidence."""

from __future__ import annotations

from autoshard.program import Op
from autoshard.rules import ShardingRule

__all__ = ["misread"]

_WINDOWED = ("reduce_window", "select_and_scatter", "select_and_gather")


def misread(op: Op, rule: ShardingRule) -> frozenset[str]:
    """Return the factors that must stay whole when XLA's partitioner splits the op.

    They run along the dims that a window slides over: those of pooling and its gradients, of convolutions
    unless every window has its own part of the input, of slices with strides and of pads between elements.
    """
    moved = frozenset({*rule.exchange, *rule.reduce})
    if op.name == "conv_general_dilated":
        numbers = op.params["dimension_numbers"]
        operands = zip(rule.inputs, (numbers.lhs_spec, numbers.rhs_spec), strict=True)
        return moved & {f for dims, spec in operands for d in spec[2:] for f in dims[d]}
    if op.name == "slice":
        strides = op.params["strides"] or ()
        return moved if any(n > 1 for n in strides) else frozenset()
    if op.name == "pad":
        return moved if any(between for _, _, between in op.params["padding_config"]) else frozenset()
    return moved if op.name.startswith(_WINDOWED) else frozenset()
