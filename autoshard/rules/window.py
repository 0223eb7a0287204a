"""Convolutions and pooling: split over batch, channels and groups, and over untouched spatial dims."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoshard.program import Op, shape_of
from autoshard.rules.registry import Family, Kind, LocalView, names, register
from autoshard.rules.rule import ShardingRule


def _convolution_rule(op: Op) -> ShardingRule:
    numbers = op.params["dimension_numbers"]
    lhs_spec, rhs_spec, out_spec = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    left, right, out = shape_of(op.inputs[0]), shape_of(op.inputs[1]), op.outputs[0].shape
    groups, batch_groups = op.params["feature_group_count"], op.params["batch_group_count"]
    sizes: dict[str, int] = {"g": max(groups, batch_groups)}
    sizes["b"] = out[out_spec[0]]
    sizes["o"] = right[rhs_spec[0]] // sizes["g"]
    sizes["i"] = right[rhs_spec[1]]
    lhs: list[tuple[str, ...]] = [()] * len(left)
    rhs: list[tuple[str, ...]] = [()] * len(right)
    res: list[tuple[str, ...]] = [()] * len(out)
    lhs[lhs_spec[0]] = ("g", "b") if batch_groups > 1 else ("b",)
    lhs[lhs_spec[1]] = ("g", "i") if groups > 1 else ("i",)
    rhs[rhs_spec[0]] = ("g", "o")
    rhs[rhs_spec[1]] = ("i",)
    res[out_spec[0]] = ("b",)
    res[out_spec[1]] = ("g", "o")
    for k, (a, b) in enumerate(zip(lhs_spec[2:], out_spec[2:], strict=True)):
        untouched = (
            right[rhs_spec[2 + k]] == 1
            and op.params["window_strides"][k] == 1
            and tuple(op.params["padding"][k]) == (0, 0)
            and op.params["lhs_dilation"][k] == 1
        )
        if untouched:
            sizes[f"s{k}"] = left[a]
            lhs[a] = res[b] = (f"s{k}",)

    def clean(dims: list[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(f for f in dim if sizes[f] > 1) for dim in dims)

    return ShardingRule(
        inputs=(clean(lhs), clean(rhs)),
        outputs=(clean(res),),
        sizes=sizes,
        reduce={"i": "sum"} if sizes["i"] > 1 else {},
        even=frozenset({"g"}) if sizes["g"] > 1 else frozenset(),
    )


def _local_groups(op: Op, view: LocalView) -> Mapping[str, Any]:
    counts = ("feature_group_count", "batch_group_count")
    return {name: op.params[name] // view.ways("g") for name in counts if op.params[name] > 1}


def _window_rule(op: Op) -> ShardingRule:
    """Pooling: dims with a window of one and no padding are parallel, the others whole."""
    params = op.params
    shape = shape_of(op.inputs[0])
    rank = len(shape)
    ones = (1,) * rank
    whole = {
        i
        for i in range(rank)
        if params["window_dimensions"][i] != 1
        or params["window_strides"][i] != 1
        or tuple(params["padding"][i]) != (0, 0)
        or params.get("base_dilation", ones)[i] != 1
        or params.get("window_dilation", ones)[i] != 1
    }
    factors = names(rank, "d")
    dims = tuple((f,) if i not in whole and shape[i] > 1 else () for i, f in enumerate(factors))
    return ShardingRule(
        inputs=tuple(dims if shape_of(a) else () for a in op.inputs),
        outputs=(dims,) * len(op.outputs),
        sizes=dict(zip(factors, shape, strict=True)),
    )


register(
    Family(
        name="convolution",
        kind=Kind.SINGLE,
        rule=_convolution_rule,
        params=_local_groups,
        identity=lambda op, i: 0,
    ),
    ["conv_general_dilated"],
)
register(
    Family(name="window", kind=Kind.SINGLE, rule=_window_rule),
    [
        "reduce_window",
        "reduce_window_sum",
        "reduce_window_max",
        "reduce_window_min",
        "select_and_scatter_add",
        "select_and_gather_add",
    ],
)
