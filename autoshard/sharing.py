"""Copies: where values that several groups read rest, so that a reshard is paid once for all who share it.

A value that a group makes and several read gets one right behind its maker; readers close to each other get
one more, which may hold the value gathered while the first keeps it split. An input that products read far
apart gets one for them all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoshard.groups import Block, Group, with_inputs
from autoshard.program import Value
from autoshard.rules import Kind, ShardingRule

__all__ = ["SIBLING_DISTANCE", "copy_of", "with_copies"]

# Readers of a value further apart than this many groups do not share a resharded copy of it.
SIBLING_DISTANCE = 64


def with_copies(block: Block) -> Block:
    """Insert copies where several groups read one value."""
    readers: dict[Value, list[int]] = defaultdict(list)
    for i, item in enumerate(block.groups):
        for value in item.inputs:
            readers[value].append(i)
    outside = [a for a in block.outputs if isinstance(a, Value)]
    made = {v for item in block.groups for v in item.outputs if item.kind is not Kind.IDENTITY}
    before: dict[int, list[Group]] = defaultdict(list)
    after: dict[int, list[Group]] = defaultdict(list)
    renamed: dict[tuple[int, Value], Value] = {}
    final: dict[Value, Value] = {}
    producer = {v: i for i, item in enumerate(block.groups) for v in item.outputs}
    for value, where in readers.items():
        if not any(n > 1 for n in value.shape):
            continue
        uses = len(where) + outside.count(value)
        rest = value
        if value in made and uses > 1:
            rest = replace(value)
            after[producer[value]].append(copy_of(value, rest))
            for i in where:
                renamed[i, value] = rest
            final[value] = rest
        elif value not in made and uses > 1:
            # An input that products read far apart: gathered once for all, or by each.
            heavy = [i for i in where if block.groups[i].kind is Kind.SINGLE]
            if len(heavy) > 1 and len(_near(heavy)) > 1:
                rest = replace(value)
                before[heavy[0]].append(copy_of(value, rest))
                for i in heavy:
                    renamed[i, value] = rest
                where = heavy
                uses = len(heavy)
        for siblings in _near(where):
            if len(siblings) > 1 and not (rest is not value and len(siblings) == uses):
                shared = replace(value)
                before[siblings[0]].append(copy_of(rest, shared))
                for i in siblings:
                    renamed[i, value] = shared
    groups: list[Group] = []
    for i, item in enumerate(block.groups):
        groups += before[i]
        groups.append(_renamed(item, {v: renamed[i, v] for v in item.inputs if (i, v) in renamed}))
        groups += after[i]
    return Block(
        inputs=block.inputs,
        consts=block.consts,
        groups=tuple(groups),
        outputs=tuple(final.get(a, a) if isinstance(a, Value) else a for a in block.outputs),
    )


def _near(positions: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for p in positions:
        if runs and p - runs[-1][-1] <= SIBLING_DISTANCE:
            runs[-1].append(p)
        else:
            runs.append([p])
    return runs


def copy_of(source: Value, target: Value) -> Group:
    """Return the empty group that holds `source` as `target`."""
    factors = tuple(f"f{i}" for i in range(len(source.shape)))
    dims = tuple((f,) if n > 1 else () for f, n in zip(factors, source.shape, strict=True))
    rule = ShardingRule(
        inputs=(dims,), outputs=(dims,), sizes=dict(zip(factors, source.shape, strict=True)), linear=(0,)
    )
    return Group(kind=Kind.ELEMENTWISE, ops=(), inputs=(source,), outputs=(target,), rule=rule)


def _renamed(item: Group, names: Mapping[Value, Value]) -> Group:
    if not names:
        return item
    ops = tuple(
        with_inputs(op, tuple(names.get(a, a) if isinstance(a, Value) else a for a in op.inputs))
        for op in item.ops
    )
    return Group(
        kind=item.kind,
        ops=ops,
        inputs=tuple(names.get(v, v) for v in item.inputs),
        outputs=item.outputs,
        rule=item.rule,
        factors=item.factors,
        op_rules=item.op_rules,
        blocks=item.blocks,
    )
