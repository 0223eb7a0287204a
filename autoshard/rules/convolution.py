"""Convolutions: split over batch, channels, groups, and over space with halo exchange.

A spatial dim splits with the output, and its input is fetched by halo; or, where the window is longer than the
path of one tap as in a filter's gradient, with the window, and the results are partial sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.padding import pad_around
from autoshard.program import Op, shape_of
from autoshard.rules.registry import Family, Kind, LocalView, bind, register
from autoshard.rules.rule import ShardingRule
from autoshard.rules.window import Cut, Window, cut_out, outside_filled, view_of


def _windows(op: Op) -> list[Window]:
    """Spatial dims in the order of the window's."""
    numbers = op.params["dimension_numbers"]
    left, right, out = shape_of(op.inputs[0]), shape_of(op.inputs[1]), op.outputs[0].shape
    return [
        Window(
            size=left[a],
            taps=right[w],
            out=out[b],
            stride=op.params["window_strides"][k],
            padding=tuple(op.params["padding"][k]),
            base=op.params["lhs_dilation"][k],
            dilation=op.params["rhs_dilation"][k],
        )
        for k, (a, w, b) in enumerate(
            zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
        )
    ]


def _by_taps(window: Window) -> bool:
    return window.reach > window.path


def _rule(op: Op) -> ShardingRule:
    numbers = op.params["dimension_numbers"]
    lhs_spec, rhs_spec, out_spec = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    right, out = shape_of(op.inputs[1]), op.outputs[0].shape
    groups, batch_groups = op.params["feature_group_count"], op.params["batch_group_count"]
    sizes: dict[str, int] = {"g": max(groups, batch_groups)}
    sizes["b"] = out[out_spec[0]]
    sizes["o"] = right[rhs_spec[0]] // sizes["g"]
    sizes["i"] = right[rhs_spec[1]]
    lhs: list[tuple[str, ...]] = [()] * len(out)
    rhs: list[tuple[str, ...]] = [()] * len(out)
    res: list[tuple[str, ...]] = [()] * len(out)
    lhs[lhs_spec[0]] = ("g", "b") if batch_groups > 1 else ("b",)
    lhs[lhs_spec[1]] = ("g", "i") if groups > 1 else ("i",)
    rhs[rhs_spec[0]] = ("g", "o")
    rhs[rhs_spec[1]] = ("i",)
    res[out_spec[0]] = ("b",)
    res[out_spec[1]] = ("g", "o")
    reduce = ["i"]
    exchange = {}
    for k, window in enumerate(_windows(op)):
        name = f"s{k}"
        sizes[name] = window.taps if _by_taps(window) else window.out
        if min(window.size, sizes[name]) == 1:
            continue
        lhs[lhs_spec[2 + k]] = (name,)
        if _by_taps(window):
            rhs[rhs_spec[2 + k]] = (name,)
            reduce.append(name)
        else:
            res[out_spec[2 + k]] = (name,)
        if not (window.parallel or window.contracts):
            exchange[name] = "halo"

    def clean(dims: list[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(f for f in dim if sizes[f] > 1) for dim in dims)

    return ShardingRule(
        inputs=(clean(lhs), clean(rhs)),
        outputs=(clean(res),),
        sizes=sizes,
        reduce={f: "sum" for f in reduce if sizes[f] > 1},
        exchange=exchange,
        even=frozenset({"g"}) if sizes["g"] > 1 else frozenset(),
    )


def _local_groups(op: Op, view: LocalView) -> Mapping[str, Any]:
    counts = ("feature_group_count", "batch_group_count")
    return {name: op.params[name] // view.ways("g") for name in counts if op.params[name] > 1}


def _fetches(op: Op, view: LocalView) -> bool:
    return any(map(view.axes, view.rule.exchange))


def _emit(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    """Fetch what the device's outputs or taps see, dim by dim, and convolve without the others' padding."""
    lhs, rhs = operands
    numbers = op.params["dimension_numbers"]
    padding = list(op.params["padding"])
    cuts: dict[int, Cut] = {}
    for k, window in enumerate(_windows(op)):
        name, dim = f"s{k}", numbers.lhs_spec[2 + k]
        axes, ways = view.axes(name), view.ways(name)
        if not axes or name not in view.rule.exchange:
            continue
        if _by_taps(window):
            cut = window.by_taps(ways)
            rhs = _taps(rhs, numbers.rhs_spec[2 + k], view, name, cut)
        else:
            cut = cuts[k] = window.by_output(ways)
        lhs = view_of(lhs, dim, axes, view.mesh, window.size, cut.starts, cut.length, None)
        padding[k] = cut.padding
    (result,) = bind(op, [lhs, rhs], padding=tuple(padding), **_local_groups(op, view))
    for k, cut in cuts.items():
        result = cut_out(result, numbers.out_spec[2 + k], view.axes(f"s{k}"), cut.skip, cut.part)
    return [result]


def _taps(rhs: Any, dim: int, view: LocalView, name: str, cut: Cut) -> Any:
    """Bring the device's taps to their place behind `cut.skip` zeros; there are none outside the window."""
    axes = view.axes(name)
    if view.uneven(name):
        starts = [p * cut.part for p in range(view.ways(name))]
        rhs = outside_filled(rhs, dim, axes, view.rule.sizes[name], starts, 0)
    more = cut.count - cut.part
    return cut_out(pad_around(rhs, dim, more, more), dim, axes, [more - s for s in cut.skip], cut.count)


register(
    Family(
        name="convolution",
        kind=Kind.SINGLE,
        rule=_rule,
        params=_local_groups,
        special=_fetches,
        emit_special=_emit,
        identity=lambda op, i: 0,
    ),
    ["conv_general_dilated"],
)
