"""Ops along one dim: cumulative ops, sort and top_k."""

from __future__ import annotations

from autoshard.program import Op, shape_of
from autoshard.rules.registry import Family, Kind, register
from autoshard.rules.rule import ShardingRule
from autoshard.rules.shape import rule_with_whole


def _same_shape_whole_axis(op: Op) -> ShardingRule:
    """Ops along one dim that keep the shape: cumulative ops."""
    return rule_with_whole(op, [op.params["axis"]], linear=op.name == "cumsum")


def _sort_rule(op: Op) -> ShardingRule:
    return rule_with_whole(op, [op.params["dimension"]], linear=False)


def _top_k_rule(op: Op) -> ShardingRule:
    rank = len(shape_of(op.inputs[0]))
    axis = op.params.get("axis", op.params.get("reduction_dimension", rank - 1)) % rank
    return rule_with_whole(op, [axis], linear=False)


register(
    Family(name="cumulative", kind=Kind.SINGLE, rule=_same_shape_whole_axis),
    ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"],
)
register(Family(name="sort", kind=Kind.SINGLE, rule=_sort_rule), ["sort"])
register(Family(name="top_k", kind=Kind.SINGLE, rule=_top_k_rule), ["top_k", "approx_top_k"])
