"""Matrix products: `dot_general` in every mix of batch, contracting and free dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.program import Op, shape_of
from autoshard.rules.registry import Family, Kind, LocalView, register
from autoshard.rules.rule import ShardingRule
from autoshard.rules.windowed import emit_ring


def _dot_rule(op: Op) -> ShardingRule:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = op.params["dimension_numbers"]
    left, right = shape_of(op.inputs[0]), shape_of(op.inputs[1])
    lhs: list[str] = [""] * len(left)
    rhs: list[str] = [""] * len(right)
    sizes: dict[str, int] = {}
    for i, (a, b) in enumerate(zip(lhs_batch, rhs_batch, strict=True)):
        lhs[a] = rhs[b] = f"b{i}"
        sizes[f"b{i}"] = left[a]
    for i, (a, b) in enumerate(zip(lhs_contract, rhs_contract, strict=True)):
        lhs[a] = rhs[b] = f"k{i}"
        sizes[f"k{i}"] = left[a]
    for prefix, dims, shape in (("m", lhs, left), ("n", rhs, right)):
        for i, size in enumerate(shape):
            if not dims[i]:
                dims[i] = f"{prefix}{i}"
                sizes[dims[i]] = size
    out = [lhs[i] for i in lhs_batch]
    out += [f for f in lhs if f[0] == "m"] + [f for f in rhs if f[0] == "n"]
    return ShardingRule(
        inputs=(
            tuple((f,) if sizes[f] > 1 else () for f in lhs),
            tuple((f,) if sizes[f] > 1 else () for f in rhs),
        ),
        outputs=(tuple((f,) if sizes[f] > 1 else () for f in out),),
        sizes=sizes,
        reduce={f: "sum" for f in sizes if f[0] == "k"},
    )


def _local_params(op: Op, view: LocalView) -> Mapping[str, Any]:
    return {"out_sharding": None}


def _in_a_ring(op: Op, view: LocalView) -> bool:
    return view.ring is not None


def _emit_ring(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    assert view.ring is not None
    return [emit_ring(op, operands, view.rule, view.ring, view.mesh[view.ring.axis])]


register(
    Family(
        name="dot",
        kind=Kind.SINGLE,
        rule=_dot_rule,
        params=_local_params,
        special=_in_a_ring,
        emit_special=_emit_ring,
        identity=lambda op, i: 0,
    ),
    ["dot_general"],
)
