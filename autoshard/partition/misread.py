"""Ops that XLA's partitioner computes wrongly when they are split; docs/xla.md holds the evidence."""

from __future__ import annotations

from collections.abc import Collection

from autoshard.program import Op
from autoshard.rules import ShardingRule

__all__ = ["misread"]

_WINDOWED = ("reduce_window", "select_and_scatter", "select_and_gather")


def misread(op: Op, rule: ShardingRule, split: Collection[str]) -> frozenset[str]:
    """Return the factors that must stay whole when XLA's partitioner splits the op along those in `split`.

    They run along the dims that a window slides over: those of pooling and its gradients, of convolutions
    whose filter or features are split, too, of slices with strides and of pads between elements.
    """
    moved = frozenset({*rule.exchange, *rule.reduce})
    if op.name == "conv_general_dilated":
        numbers = op.params["dimension_numbers"]
        left, right = rule.inputs
        filters = {f for dim in right for f in dim}
        if not filters & set(split):
            return frozenset()
        dims = [left[d] for d in numbers.lhs_spec[2:]] + [right[d] for d in numbers.rhs_spec[2:]]
        return moved & {f for dim in dims for f in dim}
    if op.name == "slice":
        strides = op.params["strides"] or ()
        return moved if any(n > 1 for n in strides) else frozenset()
    if op.name == "pad":
        return moved if any(between for _, _, between in op.params["padding_config"]) else frozenset()
    return moved if op.name.startswith(_WINDOWED) else frozenset()
