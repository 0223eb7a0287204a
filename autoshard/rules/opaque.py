"""Ops that are never split: every device holds all operands and computes everything, at its true cost.

Those are ops without a rule, kernels and calls whose inside only their author knows, and equations that share a
mutable reference; control flow, whose bodies are split instead; and what is known when the program is lowered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoshard.program import Op, shape_of
from autoshard.rules.manual import evaluate
from autoshard.rules.registry import Family, Kind, LocalView, register
from autoshard.rules.rule import ShardingRule

# Families that a plan's coverage names: their ops run whole on every device.
UNSPLIT = frozenset({"opaque", "references"})
# Kernels and calls on their own terms: a part of the operands means nothing to them.
_CLOSED = "call_exported custom_partitioning dce_sink ffi_call pallas_call".split()


def opaque_rule(op: Op) -> ShardingRule:
    """Return the rule of an op that is never split."""
    return ShardingRule(
        inputs=tuple(((),) * len(shape_of(a)) for a in op.inputs),
        outputs=tuple(((),) * len(v.shape) for v in op.outputs),
        sizes={},
    )


def _emit_references(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    return evaluate(op.params["body"], operands)


register(
    Family(
        name="opaque",
        kind=Kind.SINGLE,
        rule=opaque_rule,
        about="runs whole on every device; named in the plan's coverage",
    ),
    ["<opaque>", *_CLOSED],
)
register(
    Family(
        name="references",
        kind=Kind.SINGLE,
        rule=opaque_rule,
        special=lambda op, view: True,
        emit_special=_emit_references,
        about="the equations that use mutable references run whole on every device, in their order",
    ),
    ["references"],
)
register(
    Family(
        name="constant",
        kind=Kind.SINGLE,
        rule=opaque_rule,
        about="a scalar known when the program is lowered; of a conditional on the platform a plan counts the"
        " branch for TPUs, and the program still holds all",
    ),
    ["empty2", "platform_index"],
)
register(
    Family(
        name="control",
        kind=Kind.CONTROL,
        rule=opaque_rule,
        about="its bodies are split op by op; what it carries, slices and returns keeps one layout each",
    ),
    ["scan", "while", "cond"],
)
register(
    Family(
        name="shard_map",
        kind=Kind.CONTROL,
        rule=opaque_rule,
        about="operands and results keep the axes that it names; its body is split op by op over the others",
    ),
    ["shard_map"],
)
register(
    Family(name="identity", kind=Kind.IDENTITY, rule=opaque_rule, about="every operand keeps its layout"),
    ["optimization_barrier"],
)
