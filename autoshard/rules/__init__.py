"""Sharding rules, one module per op family, and the registry that finds them."""

from autoshard.rules import (  # noqa: F401  (importing a family registers it)
    along,
    constraint,
    contraction,
    convolution,
    dynamic,
    elementwise,
    fft,
    host,
    indexing,
    joining,
    linalg,
    manual,
    opaque,
    pooling,
    ragged,
    random,
    reduction,
    shape,
    slicing,
    sort,
)
from autoshard.rules.registry import Family, Kind, LocalView, families, family, register
from autoshard.rules.rule import Assignment, ShardingRule

__all__ = [
    "Assignment",
    "Family",
    "Kind",
    "LocalView",
    "ShardingRule",
    "families",
    "family",
    "register",
    "rule_of",
]


def rule_of(op: object) -> ShardingRule:
    """Return the sharding rule of an op."""
    from autoshard.program import Op

    assert isinstance(op, Op)
    return family(op).rule(op)
