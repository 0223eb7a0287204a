"""Pooling and its derivatives: dims that a window slides over split with halo exchange.

A dim that one window covers is reduced: its results are partial. What a selection scatters is worked out for
every window that touches the device's part, also where a neighbour does the same, and the device keeps its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from autoshard.layout import Axes, chunk
from autoshard.padding import pad_around
from autoshard.program import Op, aval_of, shape_of
from autoshard.rules.reduction import identity_of
from autoshard.rules.registry import Family, Kind, LocalView, bind, names, register
from autoshard.rules.rule import Dims, ShardingRule
from autoshard.rules.window import Window, cut_out, view_of

_MONOIDS = {"reduce_window_sum": "sum", "reduce_window_max": "max", "reduce_window_min": "min"}
_LINEAR = frozenset({"reduce_window_sum", "select_and_gather_add", "select_and_scatter_add"})


def _windows(op: Op, shape: Sequence[int], out: Sequence[int]) -> list[Window]:
    """Dims of arrays of `shape` that windows make `out` of."""
    params = op.params
    ones = (1,) * len(shape)
    base, dilation = params.get("base_dilation", ones), params.get("window_dilation", ones)
    return [
        Window(
            size=shape[i],
            taps=params["window_dimensions"][i],
            out=out[i],
            stride=params["window_strides"][i],
            padding=tuple(params["padding"][i]),
            base=base[i],
            dilation=dilation[i],
        )
        for i in range(len(shape))
    ]


def _rule(op: Op, windows: Sequence[Window], halo: bool = True) -> ShardingRule:
    """All arrays have the same factors; with `halo`, also along dims that windows slide over."""
    reduced, exchange = {}, {}
    dims: list[tuple[str, ...]] = []
    for name, window in zip(names(len(windows), "d"), windows, strict=True):
        if op.name in _MONOIDS and window.covers and window.size > 1:
            reduced[name] = _MONOIDS[op.name]
        elif halo and min(window.size, window.out) > 1 and not window.parallel:
            exchange[name] = "halo"
        elif not window.parallel or window.size == 1:
            dims.append(())
            continue
        dims.append((name,))
    kept: Dims = tuple(() if d and d[0] in reduced else d for d in dims)
    return ShardingRule(
        inputs=tuple(tuple(dims) if shape_of(a) else () for a in op.inputs),
        outputs=(kept,) * len(op.outputs),
        sizes={f"d{i}": w.size for i, w in enumerate(windows)},
        reduce=reduced,
        exchange=exchange,
        linear=(0,) if op.name in _LINEAR else (),
    )


def _reduce_rule(op: Op) -> ShardingRule:
    return _rule(op, _reduce_windows(op))


def _scatter_rule(op: Op) -> ShardingRule:
    return _rule(op, _scatter_windows(op))


def _generic_scatter_rule(op: Op) -> ShardingRule:
    """Nothing is known of its functions, so no element can stand for none: windows stay whole."""
    return _rule(op, _windows(op, shape_of(op.inputs[0]), shape_of(op.inputs[1])), halo=False)


def _reduce_windows(op: Op) -> list[Window]:
    return _windows(op, shape_of(op.inputs[0]), op.outputs[0].shape)


def _scatter_windows(op: Op) -> list[Window]:
    source, operand = op.inputs
    return _windows(op, shape_of(operand), shape_of(source))


def _fetches(op: Op, view: LocalView) -> bool:
    return any(map(view.axes, view.rule.exchange))


def _local_windows(op: Op, view: LocalView) -> dict[str, Any]:
    """Parameters of an op whose reduced dims are split: one window covers what the device has."""
    changes: dict[str, list[Any]] = {}
    covering = {"window_dimensions": None, "window_strides": 1, "padding": (0, 0), "base_dilation": 1}
    for name in view.rule.reduce:
        if view.axes(name):
            for key, value in covering.items():
                row = changes.setdefault(key, list(op.params[key]))
                row[int(name[1:])] = view.local_size(name) if value is None else value
    return {key: tuple(row) for key, row in changes.items()}


def _selected_first(op: Op) -> str:
    """Monoid whose identity a selection takes last."""
    return "max" if op.params["select_prim"] is lax.ge_p else "min"


def _fills(op: Op, operands: Sequence[Any]) -> list[Any]:
    """What each array holds where windows reach outside; None for zeros."""
    dtype = aval_of(op.inputs[-1]).dtype
    if op.name == "reduce_window":
        return list(operands[len(operands) // 2 :])
    if op.name == "select_and_gather_add":
        return [None, identity_of(_selected_first(op), dtype)]
    return [None if op.name == "reduce_window_sum" else identity_of(_MONOIDS[op.name], dtype)]


def _emit_reduce(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    """Fetch what the device's windows see, dim by dim; the other devices' padding is not in it."""
    fills = _fills(op, operands)
    arrays, rest = list(operands[: len(fills)]), operands[len(fills) :]
    changes = _local_windows(op, view)
    padding = list(changes.get("padding", op.params["padding"]))
    windows = _reduce_windows(op)
    split = [(i, view.axes(f"d{i}")) for i in range(len(windows)) if f"d{i}" in view.rule.exchange]
    cuts = {i: (axes, windows[i].by_output(view.ways(f"d{i}"))) for i, axes in split if axes}
    for i, (axes, cut) in cuts.items():
        padding[i] = cut.padding
        arrays = [
            view_of(x, i, axes, view.mesh, windows[i].size, cut.starts, cut.length, fill)
            for x, fill in zip(arrays, fills, strict=True)
        ]
    results = bind(op, [*arrays, *rest], **{**changes, "padding": tuple(padding)})
    for i, (axes, cut) in cuts.items():
        results = [cut_out(x, i, axes, cut.skip, cut.part) for x in results]
    return results


def _emit_scatter(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    """Scatter what comes from every window that touches the device's part; keep the part."""
    source, operand = operands
    fill = identity_of(_selected_first(op), operand.dtype)
    padding = list(op.params["padding"])
    kept = []
    for i, window in enumerate(_scatter_windows(op)):
        axes = view.axes(f"d{i}")
        if not axes or f"d{i}" not in view.rule.exchange:
            continue
        part, (firsts, count) = view.local_size(f"d{i}"), _touching(window, view.ways(f"d{i}"))
        starts = [first * window.stride - window.padding[0] for first in firsts]
        length = (count - 1) * window.stride + window.taps
        source = view_of(source, i, axes, view.mesh, window.out, firsts, count, None)
        operand = view_of(operand, i, axes, view.mesh, window.size, starts, length, fill)
        padding[i] = (0, 0)
        kept.append((i, axes, [p * part - start for p, start in enumerate(starts)], part))
    (result,) = bind(op, [source, operand], padding=tuple(padding))
    for i, axes, places, part in kept:
        result = _part_of(result, i, axes, places, part)
    return [result]


def _touching(window: Window, ways: int) -> tuple[list[int], int]:
    """Return the first window that touches each device's part, and how many do at most."""
    part, low, stride = chunk(window.size, ways), window.padding[0], window.stride
    firsts = [-(-(p * part + low - window.taps + 1) // stride) for p in range(ways)]
    lasts = [(min((p + 1) * part, window.size) - 1 + low) // stride for p in range(ways)]
    return firsts, max(1, *(last - first + 1 for first, last in zip(firsts, lasts, strict=True)))


def _part_of(x: Any, dim: int, axes: Axes, places: Sequence[int], part: int) -> Any:
    """Cut the device's part out of what windows touch; where none does there are zeros."""
    before = max(0, -min(places))
    behind = max(0, max(places) + part - x.shape[dim])
    x = pad_around(x, dim, before, behind)
    return cut_out(x, dim, axes, [place + before for place in places], part)


def _identity(op: Op, i: int) -> Any:
    return identity_of(_MONOIDS[op.name], aval_of(op.inputs[i]).dtype)


register(
    Family(
        name="pooling",
        kind=Kind.SINGLE,
        rule=_reduce_rule,
        params=_local_windows,
        special=_fetches,
        emit_special=_emit_reduce,
        identity=_identity,
    ),
    [*_MONOIDS, "reduce_window", "select_and_gather_add"],
)
register(
    Family(
        name="pooling_gradient",
        kind=Kind.SINGLE,
        rule=_scatter_rule,
        special=_fetches,
        emit_special=_emit_scatter,
    ),
    ["select_and_scatter_add"],
)
register(
    Family(
        name="generic_scatter",
        kind=Kind.SINGLE,
        rule=_generic_scatter_rule,
        about="dims that windows slide over stay whole, the others are parallel",
    ),
    ["select_and_scatter"],
)
