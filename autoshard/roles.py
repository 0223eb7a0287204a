"""What the dims of a program are for: batch, layers, residual stream, inner features.

Roles are read from data flow, never from names. The *batch* enters with the data, is nobody's weight, never
meets itself in one array, and runs through most of the products. A *scanned* dim is taken apart by a loop.
What is left of the weights is two-coloured: a product leads from the dims that it contracts to the dims that
it makes, and a dim that later products make again is the *residual* stream, of colour `outer`. Its neighbours
across a weight are `inner`, theirs `outer` again. So a weight's column or row side, and the pairs that
Megatron splits (Shoeybi et al., arXiv 1909.08053, 2019), follow from the flow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from autoshard.dimensions import Dimensions, run_groups
from autoshard.grouping import Group
from autoshard.program import Op, Value
from autoshard.session import Source
from autoshard.structure import origins

__all__ = ["PRODUCTS", "Roles"]

PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
_LOOKUPS = frozenset({"gather"})


@dataclass(frozen=True, eq=False, kw_only=True)
class Roles:
    """The classes of a program by role.

    Attributes:
      dimensions: the classes.
      batch: class of the batch, or None where the data has none.
      outer: classes of colour outer: residual streams, and what lies two weights away from one.
      inner: classes between them, the ones a pair of products splits.
      weights: positions of the inputs that products and lookups read as weights.
      state: positions of the inputs that a step hands to the next, and of all in one argument with weights.
      parameters: positions of the weights, and of the state that meets examples otherwise (scales, biases).
      readings: values that are a parameter but for casts, copies and the slices of a loop.
    """

    dimensions: Dimensions
    batch: int | None
    outer: frozenset[int]
    inner: frozenset[int]
    weights: frozenset[int]
    state: frozenset[int]
    parameters: frozenset[int]
    readings: frozenset[Value]

    @classmethod
    def of(cls, source: Source) -> Roles:
        """Read the roles off a traced function."""
        dimensions = Dimensions.of(source.block, source.state)
        reads = _first_reads(source)
        weights = _weights(source, dimensions, reads)
        arguments = {source.traced.arg_of_input[i] for i in weights}
        state = frozenset(
            i
            for i, argument in enumerate(source.traced.arg_of_input)
            if i in source.state.values() or argument in arguments
        )
        inputs = source.block.inputs
        data = [v for i, v in enumerate(inputs) if i not in state]
        held = {c for i in weights for c in dimensions.of_value(inputs[i]) if c is not None}
        batch = _batch(source, dimensions, data, held)
        edges = _edges(source, dimensions, reads, weights)
        given = {c for v in data for c in dimensions.of_value(v) if c is not None}
        inner, outer = _colours(edges, dimensions, _mixed(source, dimensions, reads), given)
        root = origins(source.block)
        parameters = weights | _beside_examples(source, dimensions, root, state, batch)
        read = {inputs[i] for i in parameters}
        return cls(
            dimensions=dimensions,
            batch=batch,
            outer=outer,
            inner=inner,
            weights=weights,
            state=state,
            parameters=parameters,
            readings=frozenset(value for value, origin in root.items() if origin in read),
        )


@dataclass(frozen=True, kw_only=True)
class _Read:
    """How a product or lookup reads an input: in which group, and at which operand."""

    item: Group
    op: Op
    operand: int


def _first_reads(source: Source) -> dict[Value, _Read]:
    """First product or lookup, in program order, that reads each input as such."""
    root = origins(source.block)
    reads: dict[Value, _Read] = {}
    for item, _ in run_groups(source.block):
        for op in item.ops:
            if op.name in PRODUCTS | _LOOKUPS:
                for k, atom in enumerate(op.inputs[:2]):
                    if isinstance(atom, Value) and atom in root:
                        reads.setdefault(root[atom], _Read(item=item, op=op, operand=k))
    return reads


def _weights(source: Source, dimensions: Dimensions, reads: Mapping[Value, _Read]) -> frozenset[int]:
    """Inputs read as weights.

    That is training state which a product or lookup reads, and without state the right operands and looked-up
    tables, with what shares their argument. An array with a dim of the integer data (a cache of past tokens)
    is no weight.
    """
    inputs, arg_of = source.block.inputs, source.traced.arg_of_input
    state = set(source.state.values())
    floating = {i for i, v in enumerate(inputs) if jnp.issubdtype(v.dtype, jnp.inexact)}
    counted = {
        c
        for i, v in enumerate(inputs)
        if i not in state and jnp.issubdtype(v.dtype, jnp.integer)
        for c in dimensions.of_value(v)
    } - {None}
    found: set[int] = set()
    beside: set[int] = set()
    for i, value in enumerate(inputs):
        read = reads.get(value)
        if i not in floating or read is None or counted & set(dimensions.of_value(value)):
            continue
        as_weight = read.operand == (0 if read.op.name in _LOOKUPS else 1)
        (found if as_weight or i in state else beside).add(i)
    arguments = {arg_of[i] for i in found}
    return frozenset(found | {i for i in beside if arg_of[i] in arguments})


def _batch(source: Source, dimensions: Dimensions, data: Sequence[Value], held: set[int]) -> int | None:
    """Class of the data's dims that the most product work runs along and that meets the conditions."""
    twice: set[int] = set()
    work: dict[int, float] = {}
    for item, times in run_groups(source.block):
        for value in (*item.inputs, *item.outputs):
            classes = [c for c in dimensions.of_value(value) if c is not None]
            twice |= {c for c in classes if classes.count(c) > 1}
        if any(op.name in PRODUCTS for op in item.ops):
            volume = times * math.prod(item.rule.sizes.values())
            for c in set(dimensions.of_group(item).values()):
                work[c] = work.get(c, 0.0) + volume
    candidates = [
        (-work.get(c, 0.0), d, i, c)
        for i, value in enumerate(data)
        for d, c in enumerate(dimensions.of_value(value))
        if c is not None and c not in twice | held | dimensions.scanned
    ]
    return min(candidates)[3] if candidates else None


def _beside_examples(
    source: Source,
    dimensions: Dimensions,
    root: Mapping[Value, Value],
    state: Iterable[int],
    batch: int | None,
) -> set[int]:
    """State without examples in it that is read together with examples; an optimizer's never is."""
    possible = {source.block.inputs[i]: i for i in state}
    found: set[int] = set()
    for item, _ in run_groups(source.block):
        if batch is not None and batch in dimensions.of_group(item).values():
            origins_read = {root[value] for value in item.inputs if value in root}
            found |= {possible[v] for v in origins_read if v in possible}
    return {i for i in found if batch not in dimensions.of_value(source.block.inputs[i])}


@dataclass(frozen=True, kw_only=True)
class _Edge:
    """A weight as its first product uses it: classes contracted and classes made, in the weight's order."""

    contracted: tuple[int, ...]
    made: tuple[int, ...]
    lookup: bool

    @property
    def ends(self) -> tuple[int, ...]:
        return self.contracted + self.made


def _edges(
    source: Source, dimensions: Dimensions, reads: Mapping[Value, _Read], weights: Iterable[int]
) -> list[_Edge]:
    kept = {source.block.inputs[i] for i in weights}
    edges = []
    for value, read in reads.items():
        if value not in kept:
            continue
        item, rule = read.item, read.item.rule
        place = item.inputs.index(read.op.inputs[read.operand])
        factors = [f for dim in rule.inputs[place] for f in dim]
        classes = [(f, dimensions.factors[item, f]) for f in factors if (item, f) in dimensions.factors]
        edges.append(
            _Edge(
                contracted=tuple(c for f, c in classes if f in rule.reduce),
                made=tuple(c for f, c in classes if f not in rule.reduce),
                lookup=read.op.name in _LOOKUPS,
            )
        )
    return edges


def _mixed(source: Source, dimensions: Dimensions, reads: Mapping[Value, _Read]) -> set[int]:
    """Classes that a product of two activations contracts (the size of a head, in attention)."""
    of_weights = {read.op for read in reads.values()}
    found: set[int] = set()
    for item, _ in run_groups(source.block):
        for op in item.ops:
            if op.name in PRODUCTS and op not in of_weights:
                found |= {
                    dimensions.factors[item, f] for f in item.rule.reduce if (item, f) in dimensions.factors
                }
    return found


def _colours(
    edges: Sequence[_Edge], dimensions: Dimensions, mixed: set[int], given: set[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """Two-colour the classes of weights from the residual streams on; return (inner, outer)."""
    after: dict[int, dict[int, None]] = {}
    beside: dict[int, dict[int, None]] = {}
    order: dict[int, None] = {}
    for edge in edges:
        for a in edge.contracted:
            for b in edge.made:
                beside.setdefault(a, {})[b] = None
                beside.setdefault(b, {})[a] = None
                if not edge.lookup:
                    after.setdefault(a, {})[b] = None
                    order.setdefault(a)
    for edge in edges:
        for c in edge.ends:
            order.setdefault(c)
    reach = {c: _reachable(c, after) for c in order}
    colour: dict[int, int] = {}
    for c in order:  # one residual stream per cycle: its earliest class
        if c in reach[c] and c not in colour:
            cycle = {d for d in reach[c] if c in reach[d]}
            colour[c] = 0
            _spread([c], {a: [b for b in beside[a] if b in cycle] for a in cycle}, colour)
    _spread(list(colour), {a: list(b) for a, b in beside.items()}, colour)
    for c in order:
        if c not in colour:
            colour[c] = 0
            _spread([c], {a: list(b) for a, b in beside.items()}, colour)
    sides = (_split_side(edge, colour, dimensions, mixed, given) for edge in edges)
    inner = {side for side in sides if side is not None}
    return frozenset(inner), frozenset(c for c, n in colour.items() if n == 0 and c not in inner)


def _reachable(start: int, after: Mapping[int, Iterable[int]]) -> set[int]:
    seen: set[int] = set()
    stack = list(after.get(start, ()))
    while stack:
        c = stack.pop()
        if c not in seen:
            seen.add(c)
            stack += after.get(c, ())
    return seen


def _spread(sources: list[int], beside: Mapping[int, Sequence[int]], colour: dict[int, int]) -> None:
    queue = list(sources)
    for c in queue:
        for d in beside.get(c, ()):
            if d not in colour:
                colour[d] = 1 - colour[c]
                queue.append(d)


def _split_side(
    edge: _Edge, colour: Mapping[int, int], dimensions: Dimensions, mixed: set[int], given: set[int]
) -> int | None:
    """Choose the class by which a weight is split: inner, not contracted between activations, outermost."""
    options = [
        (c in mixed, place, c)
        for place, c in enumerate(edge.ends)
        if colour.get(c) == 1 and c not in dimensions.scanned | given
    ]
    return min(options)[2] if options else None
