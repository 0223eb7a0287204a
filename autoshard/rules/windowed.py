"""Windowed einsum (collective matmul): a product in a ring of permutes that run beside the partial products.

Wang et al., "Overlap Communication with Dependent Computation via Decomposition", ASPLOS 2023. A ring takes the
place of an all-gather of one operand (`gather`) or of a reduce-scatter of the result (`scatter`): in every step a
device multiplies the part that it holds and hands a part on to its neighbour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.addresses import cut
from autoshard.layout import Axes, MeshShape
from autoshard.program import Op
from autoshard.rules.rule import Assignment, Dims, ShardingRule

__all__ = ["OVERLAPPED", "Ring", "emit_ring", "ring_of", "rings", "with_ring"]

# Name scope of a loop whose collectives run beside its products.
OVERLAPPED = "overlapped"
_MARK = "@"


class Ring(NamedTuple):
    """A factor that one operand holds in parts over an axis (or, with `operand` -1, the result is left in)."""

    operand: int
    factor: str
    axis: str

    @property
    def key(self) -> str:
        """How an assignment names the ring."""
        return f"{_MARK}{self.operand}.{self.factor}"


def ring_of(assignment: Assignment) -> Ring | None:
    """Read the ring of an assignment, if it has one."""
    for key, axes in assignment.items():
        if key.startswith(_MARK):
            operand, _, factor = key[len(_MARK) :].partition(".")
            return Ring(int(operand), factor, axes[0])
    return None


def rings(rule: ShardingRule, assignment: Assignment, mesh: MeshShape) -> list[Ring]:
    """List the rings that a product under an assignment could run.

    An axis that an operand holds copies over may hold parts of it instead; an axis over which the result is
    partial may leave it in parts. The factor is one that nothing splits, and divides evenly.
    """
    found = []
    for operand, dims in enumerate(rule.inputs):
        used = {a for dim in dims for f in dim for a in assignment.get(f, ())}
        busy = {a for axes in assignment.values() for a in axes} - used
        found += [Ring(operand, f, a) for f in _free(dims, rule, assignment) for a in sorted(busy)]
    partial = [a for f in rule.reduce for a in assignment.get(f, ())]
    found += [Ring(-1, f, a) for f in _free(rule.outputs[0], rule, assignment) for a in partial]
    return [r for r in found if rule.sizes[r.factor] % mesh[r.axis] == 0]


def _free(dims: Dims, rule: ShardingRule, assignment: Assignment) -> list[str]:
    return [dim[0] for dim in dims if len(dim) == 1 and not assignment.get(dim[0])]


def with_ring(layout: tuple[Axes, ...], dims: Dims, ring: Ring) -> tuple[Axes, ...]:
    """Add the ring's axis to the dim that it holds in parts."""
    return tuple(
        (*axes, ring.axis) if dim == (ring.factor,) else axes for axes, dim in zip(layout, dims, strict=True)
    )


def emit_ring(op: Op, operands: Sequence[Any], rule: ShardingRule, ring: Ring, ways: int) -> Any:
    """Bind the ring of a `dot_general` on local operands."""
    with jax.named_scope(OVERLAPPED):
        if ring.operand < 0:
            return _scatter(op, operands, rule, ring, ways)
        return _gather(op, operands, rule, ring, ways)


def _product(op: Op, operands: Sequence[Any], wide: Any) -> Any:
    params = dict(op.params) | {"out_sharding": None, "preferred_element_type": wide}
    return op.primitive.bind(*operands, **params)


def _wide(dtype: Any) -> Any:
    """What partial products are added up in."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _place(dims: Dims, factor: str) -> int | None:
    return dims.index((factor,)) if (factor,) in dims else None


def _gather(op: Op, operands: Sequence[Any], rule: ShardingRule, ring: Ring, ways: int) -> Any:
    """In step t a device holds the part of the device t ahead of it."""
    dtype = op.outputs[0].dtype
    held, other = operands[ring.operand], operands[1 - ring.operand]
    own = _place(rule.inputs[ring.operand], ring.factor)
    shared = _place(rule.inputs[1 - ring.operand], ring.factor)
    out = _place(rule.outputs[0], ring.factor)
    assert own is not None
    size = held.shape[own]
    wide = _wide(dtype) if out is None else dtype
    index = lax.axis_index(ring.axis)
    back = [(i, (i - 1) % ways) for i in range(ways)]

    def part(held: Any, step: Any) -> tuple[Any, Any]:
        start = (index + step) % ways * size
        rest = other if shared is None else cut(other, start, size, axis=shared)
        pair = (held, rest) if ring.operand == 0 else (rest, held)
        return _product(op, pair, wide), start

    def put(total: Any, piece: Any, start: Any) -> Any:
        return (
            total + piece if out is None else lax.dynamic_update_slice_in_dim(total, piece, start, axis=out)
        )

    def body(carry: Any, step: Any) -> tuple[Any, None]:
        held, total = carry
        following = lax.ppermute(held, ring.axis, back)
        piece, start = part(held, step)
        return (following, put(total, piece, start)), None

    shape = jax.eval_shape(lambda h: part(h, 0)[0], held).shape
    if out is not None:
        shape = tuple(n * ways if d == out else n for d, n in enumerate(shape))
    (held, total), _ = lax.scan(body, (held, lax.full(shape, 0, wide)), jnp.arange(ways - 1))
    return lax.convert_element_type(put(total, *part(held, ways - 1)), dtype)


def _scatter(op: Op, operands: Sequence[Any], rule: ShardingRule, ring: Ring, ways: int) -> Any:
    """The sum for a device begins at the next one and travels around until it arrives."""
    dtype = op.outputs[0].dtype
    wide = _wide(dtype)
    places = [_place(dims, ring.factor) for dims in rule.inputs]
    size = rule.sizes[ring.factor] // ways
    index = lax.axis_index(ring.axis)
    on = [(i, (i + 1) % ways) for i in range(ways)]

    def part(step: Any) -> Any:
        start = (index - step - 1) % ways * size
        pieces = [
            x if at is None else cut(x, start, size, axis=at) for x, at in zip(operands, places, strict=True)
        ]
        return _product(op, pieces, wide)

    def body(total: Any, step: Any) -> tuple[Any, None]:
        return lax.ppermute(total, ring.axis, on) + part(step), None

    total, _ = lax.scan(body, part(0), jnp.arange(1, ways))
    return lax.convert_element_type(total, dtype)
