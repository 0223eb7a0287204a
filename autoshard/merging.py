"""One rule for several ops: factors unified where values pass from op to op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.program import Op, Value
from autoshard.rules import ShardingRule
from autoshard.rules.rule import Dims

__all__ = ["merge_rules"]


def merge_rules(
    ops: Sequence[Op], rules: Sequence[ShardingRule], inputs: Sequence[Value], outputs: Sequence[Value]
) -> tuple[ShardingRule, tuple[Mapping[str, str], ...]]:
    """Unify the factors of ops that pass values to each other into one rule over the boundary values."""
    parent: dict[tuple[int, str], tuple[int, str]] = {}

    def find(x: tuple[int, str]) -> tuple[int, str]:
        while parent.setdefault(x, x) != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    whole: set[tuple[int, str]] = set()
    even: set[tuple[int, str]] = set()
    seen: dict[Value, tuple[int, Dims]] = {}
    for i, (op, rule) in enumerate(zip(ops, rules, strict=True)):
        for atom, dims in zip(op.inputs, rule.inputs, strict=True):
            if isinstance(atom, Value):
                if atom in seen:
                    _unify(seen[atom], (i, dims), parent, find, whole)
                else:
                    seen[atom] = (i, dims)
        for value, dims in zip(op.outputs, rule.outputs, strict=True):
            seen[value] = (i, dims)
        whole |= {(i, f) for f in rule.whole}
        even |= {(i, f) for f in rule.even}
    names: dict[tuple[int, str], str] = {}
    sizes: dict[str, int] = {}
    reduce: dict[str, str] = {}
    exchange: dict[str, str] = {}
    maps: list[dict[str, str]] = []
    for i, rule in enumerate(rules):
        mapping = {}
        for factor, size in rule.sizes.items():
            root = find((i, factor))
            name = names.setdefault(root, f"f{len(names)}")
            mapping[factor] = name
            sizes[name] = max(size, sizes.get(name, 1))
            if factor in rule.reduce:
                reduce[name] = rule.reduce[factor]
            if factor in rule.exchange:
                exchange[name] = rule.exchange[factor]
        maps.append(mapping)
    whole_names = {names[find(x)] for x in whole if find(x) in names}
    even_names = {names[find(x)] for x in even if find(x) in names}

    def of(value: Value) -> Dims:
        i, dims = seen[value]
        return tuple(tuple(maps[i][f] for f in dim) for dim in dims)

    for v in seen:  # two dims of one array that must be split alike cannot both be
        factors = [f for dim in of(v) for f in dim]
        whole_names |= {f for f in factors if factors.count(f) > 1}
    kept = {f for v in (*inputs, *outputs) for dim in of(v) for f in dim}
    merged = ShardingRule(
        inputs=tuple(of(v) for v in inputs),
        outputs=tuple(of(v) for v in outputs),
        sizes={f: n for f, n in sizes.items() if f in kept},
        reduce={f: m for f, m in reduce.items() if f in kept},
        exchange={f: way for f, way in exchange.items() if f in kept},
        even=frozenset(even_names & kept),
        whole=frozenset(whole_names & kept),
        linear=_linear_inputs(ops, rules, inputs, outputs),
    )
    return merged, tuple(maps)


def _unify(
    one: tuple[int, Dims],
    other: tuple[int, Dims],
    parent: dict[tuple[int, str], tuple[int, str]],
    find: Any,
    whole: set[tuple[int, str]],
) -> None:
    (i, left), (j, right) = one, other
    for a, b in zip(left, right, strict=True):
        if len(a) == 1 and len(b) == 1:
            parent[find((j, b[0]))] = find((i, a[0]))
        else:
            whole |= {(i, f) for f in a} | {(j, f) for f in b}


def _linear_inputs(
    ops: Sequence[Op], rules: Sequence[ShardingRule], inputs: Sequence[Value], outputs: Sequence[Value]
) -> tuple[int, ...]:
    """Positions of the inputs that may all be partial sums, if the outputs then are partial sums too."""
    candidates = set(inputs)
    for op, rule in zip(ops, rules, strict=True):
        for k, atom in enumerate(op.inputs):
            if k not in rule.linear and isinstance(atom, Value):
                candidates.discard(atom)
    partial: set[Value] = set(candidates)
    for op, rule in zip(ops, rules, strict=True):
        is_partial = [isinstance(a, Value) and a in partial for a in op.inputs]
        states = [is_partial[k] for k in rule.linear]
        others = [state for k, state in enumerate(is_partial) if k not in rule.linear]
        if any(others) or (any(states) and not all(states)):
            return ()
        if any(states):
            partial.update(op.outputs)
    if not candidates or not all(v in partial for v in outputs):
        return ()
    return tuple(i for i, v in enumerate(inputs) if v in candidates)
