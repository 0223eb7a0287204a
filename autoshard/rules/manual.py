"""Collectives that the user wrote, over the manual axes of a `shard_map`: they pass on the dims that they leave alone.

Inside a `shard_map` an array is the part of one device along the manual axes. The other mesh axes split it
further, as anywhere; a collective over manual axes runs alike in every part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import Literal, jaxpr_as_fun

from autoshard.program import Op, aval_of, shape_of
from autoshard.rules.registry import Family, Kind, LocalView, register
from autoshard.rules.rule import Dims, ShardingRule

# Reductions whose results are sums of what their operands are: partial sums pass.
_LINEAR = frozenset({"psum", "psum_invariant", "ppermute"})


def _free(shape: Sequence[int], prefix: str, whole: Sequence[int] = ()) -> Dims:
    """Dims with a factor each, but for some that stay whole."""
    return tuple((f"{prefix}{d}",) if n > 1 and d not in whole else () for d, n in enumerate(shape))


def _sizes(shape: Sequence[int], prefix: str) -> dict[str, int]:
    return {f"{prefix}{d}": n for d, n in enumerate(shape)}


def _elementwise_rule(op: Op) -> ShardingRule:
    shapes = [shape_of(a) for a in op.inputs]
    dims = tuple(_free(shape, f"i{k}d") for k, shape in enumerate(shapes))
    sizes = {f: n for k, shape in enumerate(shapes) for f, n in _sizes(shape, f"i{k}d").items()}
    linear = tuple(range(len(shapes))) if op.name in _LINEAR else ()
    return ShardingRule(inputs=dims, outputs=dims, sizes=_used(sizes, dims), linear=linear)


def _used(sizes: dict[str, int], sides: Sequence[Dims]) -> dict[str, int]:
    used = {f for dims in sides for dim in dims for f in dim}
    return {f: n for f, n in sizes.items() if f in used}


def _moving_rule(op: Op) -> ShardingRule:
    """Rule of a collective that gathers, scatters or exchanges along some dims."""
    (shape,), p = [shape_of(a) for a in op.inputs], op.params
    if op.name == "all_to_all":
        taken, made = p["split_axis"], p["concat_axis"]
    elif op.name == "reduce_scatter":
        taken, made = p["scatter_dimension"], None
    else:
        taken, made = None, p["all_gather_dimension"]
    if len(op.outputs[0].shape) == len(shape):
        dims = outs = _free(shape, "d", [d for d in (taken, made) if d is not None])
    else:
        dims = _free(shape, "d", () if taken is None else (taken,))
        rest = [dim for d, dim in enumerate(dims) if d != taken]
        outs = tuple(rest if made is None else [*rest[:made], (), *rest[made:]])
    return ShardingRule(inputs=(dims,), outputs=(outs,), sizes=_used(_sizes(shape, "d"), [dims]), linear=(0,))


def _scalar_rule(op: Op) -> ShardingRule:
    return ShardingRule(inputs=(), outputs=((),), sizes={})


def _bind(primitive: Any, p: Any, arrays: Sequence[Any]) -> list[Any]:
    """Bind a primitive with varying-axis checks off, as in the program around it."""
    name = primitive.name
    if name in ("pvary", "pcast"):
        return list(arrays)
    if name == "psum_invariant":
        return list(lax.psum(list(arrays), p["axes"]))
    if name == "all_gather_invariant":
        dim, tiled = p["all_gather_dimension"], p["tiled"]
        return [lax.all_gather(x, p["axis_name"], axis=dim, tiled=tiled) for x in arrays]
    made = primitive.bind(*arrays, **primitive.get_bind_params(p))
    return list(made) if primitive.multiple_results else [made]


def _emit(op: Op, operands: Sequence[Any], view: LocalView) -> Sequence[Any]:
    return _bind(op.primitive, op.params, operands)


def evaluate(jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
    """Bind the equations of a body one by one, with varying-axis checks off, as in the program around it."""
    env: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))

    def read(atom: Any) -> Any:
        return np.asarray(atom.val, aval_of(atom).dtype) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        arrays = [read(a) for a in eqn.invars]
        name = eqn.primitive.name
        if name in ("jit", "pjit", "closed_call"):
            inner = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
            results = evaluate(inner.jaxpr, arrays) if not inner.consts else jaxpr_as_fun(inner)(*arrays)
        else:
            results = _bind(eqn.primitive, eqn.params, arrays)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(a) for a in jaxpr.outvars]


register(
    Family(
        name="manual reduction",
        kind=Kind.SINGLE,
        rule=_elementwise_rule,
        special=lambda op, view: True,
        emit_special=_emit,
        about="over the manual axes of a shard_map, alike in every part by the others",
    ),
    ["psum", "psum_invariant", "pmax", "pmin", "ppermute"],
)
register(
    Family(
        name="manual exchange",
        kind=Kind.SINGLE,
        rule=_moving_rule,
        special=lambda op, view: True,
        emit_special=_emit,
        about="over the manual axes of a shard_map; the dims that it gathers, scatters or exchanges stay whole",
    ),
    ["all_gather", "all_gather_invariant", "reduce_scatter", "all_to_all"],
)
register(
    Family(
        name="manual index",
        kind=Kind.SINGLE,
        rule=_scalar_rule,
        about="the place of a device along a manual axis of a shard_map",
    ),
    ["axis_index"],
)
