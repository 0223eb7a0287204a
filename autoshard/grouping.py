"""Groups: the ops that are decided, priced and run together.

A group is what a compiler would make one kernel of: a cluster of elementwise ops, perhaps ended by
reductions; or a single matrix product, gather, loop and so on. All ops of a group share one split of the
group's factors, so resharding happens only between groups, and the cost of a group depends on its own split
alone. Values that several groups read rest in a *copy*, an empty group whose layout is a decision too: a
partial sum is reduced, or a weight gathered, once for all who share it.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoshard.layout import Layout
from autoshard.program import Atom, Op, Program, Value, shape_of
from autoshard.rules import Assignment, Family, Kind, ShardingRule, family
from autoshard.rules.rule import Dims

__all__ = ["PARTIAL", "Block", "Group", "group"]

# In an assignment, the axes over which a linear group's inputs and outputs stay partial sums.
PARTIAL = "+"

# Cheap enough to compute again in every kernel that reads them, so never stored.
_CHEAP = frozenset(
    "add sub mul and or not xor eq ne lt le gt ge select_n convert_element_type max min neg".split()
)
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
# Consumers of a value further apart than this many groups do not share a resharded copy of it.
SIBLING_DISTANCE = 64


@dataclass(frozen=True, eq=False, kw_only=True)
class Group:
    """Some ops with one rule; `inputs` and `outputs` are the values that cross its boundary.

    `factors[i]` maps the factors of op i to those of the group. A control-flow group has `blocks`.
    """

    kind: Kind
    ops: tuple[Op, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    rule: ShardingRule
    factors: tuple[Mapping[str, str], ...] = ()
    op_rules: tuple[ShardingRule, ...] = ()
    blocks: tuple[Block, ...] = ()

    def input_layout(self, index: int, assignment: Assignment) -> Layout:
        """Layout in which the group reads its input when its factors are split by `assignment`.

        The axes of the pseudo-factor `PARTIAL` are those over which linear inputs stay partial sums.
        """
        layout = self.rule.layout(self.rule.inputs[index], assignment)
        partial = assignment.get(PARTIAL, ())
        return Layout(layout.dims, partial) if partial and index in self.rule.linear else layout

    def output_layout(self, index: int, assignment: Assignment) -> Layout:
        """Layout in which the group leaves its output."""
        layout = self.rule.output_layout(index, assignment)
        partial = assignment.get(PARTIAL, ())
        return Layout(layout.dims, layout.unreduced + partial) if partial else layout

    @property
    def is_copy(self) -> bool:
        """Tell whether the group only holds a value in a layout of its own."""
        return not self.ops

    @property
    def heavy(self) -> Op | None:
        """The op that the group is about, if it is a single one."""
        return self.ops[0] if len(self.ops) == 1 else None

    @property
    def title(self) -> str:
        """Short name: the primitive, or the first and last of a cluster."""
        if self.is_copy:
            return "copy"
        if len(self.ops) == 1:
            return self.ops[0].name
        return f"{self.ops[0].name}..{self.ops[-1].name}"

    @property
    def source(self) -> str:
        """Source line of the last op."""
        return self.ops[-1].source if self.ops else ""

    def __str__(self) -> str:
        return f"{self.title}: {self.rule}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Block:
    """A Program body as groups in execution order."""

    inputs: tuple[Value, ...]
    consts: tuple[tuple[Value, Any], ...]
    groups: tuple[Group, ...]
    outputs: tuple[Atom, ...]

    def walk(self) -> Iterable[Group]:
        """Yield every group, those of inner blocks after the group that holds them."""
        for item in self.groups:
            yield item
            for block in item.blocks:
                yield from block.walk()

    def __str__(self) -> str:
        return "\n".join(f"{i:4d} {g}" for i, g in enumerate(self.walk()))


def group(program: Program) -> Block:
    """Cluster the ops of a Program, and of its blocks, into groups."""
    drafts = _Clusters(program).run()
    return _with_copies(
        Block(
            inputs=program.inputs,
            consts=program.consts,
            groups=tuple(g for draft in _ordered(drafts, program.outputs) for g in _finished(draft)),
            outputs=program.outputs,
        )
    )


@dataclass(eq=False)
class _Draft:
    """A group while it is being collected."""

    kind: Kind
    rank: int
    volume: int
    ops: list[Op] = field(default_factory=list)
    closed: set[Value] = field(default_factory=set)
    local: dict[Value, Value] = field(default_factory=dict)
    read: bool = False
    monoid: str | None = None
    made: set[Value] = field(default_factory=set)
    used_outside: set[Value] = field(default_factory=set)
    sums: bool = False  # adds up what products leave, perhaps as partial sums: nothing else joins


def _volume(op: Op) -> int:
    return max(math.prod(shape_of(a)) for a in (*op.inputs, *op.outputs))


class _Clusters:
    """One pass over a body that puts each op into a group."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.drafts: list[_Draft] = []
        self.home: dict[Value, _Draft] = {}
        self.inline: dict[Value, Op] = {}

    def run(self) -> list[_Draft]:
        for op in self.program.ops:
            fam = family(op)
            if self._is_inline(op, fam):
                self.inline[op.outputs[0]] = op
            elif fam.kind in (Kind.ELEMENTWISE, Kind.REDUCTION):
                self._place(op, fam)
            else:
                self._alone(op, fam)
        for atom in self.program.outputs:
            if isinstance(atom, Value):
                self._materialise(atom)
                if atom in self.home:
                    self.home[atom].used_outside.add(atom)
        return self._absorbed()

    def _absorbed(self) -> list[_Draft]:
        """Merge each cluster that a single other cluster reads into its reader."""
        wanted = {a for a in self.program.outputs if isinstance(a, Value)}
        readers: dict[Value, set[int]] = defaultdict(set)
        for i, draft in enumerate(self.drafts):
            for op in draft.ops:
                for atom in op.inputs:
                    if isinstance(atom, Value) and atom not in draft.made:
                        readers[atom].add(i)
        current = list(range(len(self.drafts)))
        place = {id(draft): i for i, draft in enumerate(self.drafts)}

        def find(i: int) -> int:
            while current[i] != i:
                i = current[i]
            return i

        for i in reversed(range(len(self.drafts))):
            draft = self.drafts[i]
            if draft.kind is not Kind.ELEMENTWISE or not draft.used_outside or draft.sums:
                continue
            targets = {find(r) for v in draft.used_outside for r in readers[v]}
            if len(targets) != 1 or (draft.used_outside - wanted) & draft.closed:
                continue
            if any(readers[v] for v in draft.used_outside & draft.closed):
                continue
            target = self.drafts[targets.pop()]
            if target.kind is not Kind.ELEMENTWISE or target.volume != draft.volume or target.sums:
                continue
            if target is draft or (draft.monoid and target.monoid not in (None, draft.monoid)):
                continue
            target.ops[:0] = draft.ops
            target.made |= draft.made
            target.used_outside |= draft.used_outside & wanted
            target.closed |= draft.closed
            target.monoid = target.monoid or draft.monoid
            current[i] = place[id(target)]
        return [d for i, d in enumerate(self.drafts) if current[i] == i]

    def _is_inline(self, op: Op, fam: Family) -> bool:
        if fam.name in ("broadcast", "iota"):
            return True
        return (
            fam.name == "elementwise"
            and op.name in _CHEAP
            and all(not isinstance(a, Value) or a in self.inline for a in op.inputs)
            and any(isinstance(a, Value) for a in op.inputs)
            and bool(op.outputs[0].shape)
        )

    def _bases(self, atoms: Iterable[Atom]) -> list[Value]:
        """Stored values that the atoms are computed from."""
        found: dict[Value, None] = {}
        stack = [a for a in atoms if isinstance(a, Value)]
        while stack:
            value = stack.pop()
            if value in self.inline:
                stack += [a for a in self.inline[value].inputs if isinstance(a, Value)]
            else:
                found.setdefault(value)
        return list(found)

    def _rank_of(self, value: Value) -> int:
        return self.home[value].rank if value in self.home else 0

    def _materialise(self, value: Value) -> None:
        """Give an inlined value a group of its own, for a reader that needs it stored."""
        if value not in self.inline:
            return
        op = self.inline.pop(value)
        draft = self._new(Kind.ELEMENTWISE, op)
        self._add(draft, op)

    def _new(self, kind: Kind, op: Op) -> _Draft:
        bases = self._bases(op.inputs)
        draft = _Draft(kind=kind, rank=1 + max(map(self._rank_of, bases), default=0), volume=_volume(op))
        self.drafts.append(draft)
        return draft

    def _alone(self, op: Op, fam: Family) -> None:
        for atom in op.inputs:
            if isinstance(atom, Value):
                self._materialise(atom)
        self._add(self._new(fam.kind, op), op)

    def _place(self, op: Op, fam: Family) -> None:
        bases = self._bases(op.inputs)
        sums = self._adds_products(op, bases)
        draft = self._joinable(op, fam, bases, sums)
        if draft is None:
            draft = self._new(Kind.ELEMENTWISE, op)
            draft.sums = sums
        self._add(draft, op)
        if fam.kind is Kind.REDUCTION:
            draft.closed.update(op.outputs)
            draft.monoid = next(iter(fam.rule(op).reduce.values()), None) or draft.monoid

    def _adds_products(self, op: Op, bases: Sequence[Value]) -> bool:
        """Tell a sum of results of products, or of such sums: partial sums are best added before reduced."""
        if op.name not in ("add", "add_any") or len(bases) < 2:
            return False
        homes = [self.home.get(v) for v in bases]
        return all(
            home is not None and (home.sums or home.ops[0].name in _PRODUCTS) for home in homes
        ) and not any(v in self.inline for v in op.inputs if isinstance(v, Value))

    def _joinable(self, op: Op, fam: Family, bases: Sequence[Value], sums: bool) -> _Draft | None:
        homes = [self.home[v] for v in bases if v in self.home]
        if not homes:
            return None
        best = max(homes, key=lambda d: d.rank)
        if best.sums != sums:
            return None
        if best.kind is not Kind.ELEMENTWISE or best.volume != _volume(op):
            return None
        if any(v in best.closed for v in bases):
            return None
        others = [d.rank for d in homes if d is not best]
        if best.read and any(rank >= best.rank for rank in others):
            return None
        if fam.kind is Kind.REDUCTION:
            monoid = next(iter(fam.rule(op).reduce.values()), None)
            if best.monoid not in (None, monoid):
                return None
        best.rank = max([best.rank] + [rank + 1 for rank in others])
        return best

    def _add(self, draft: _Draft, op: Op) -> None:
        inputs = [self._inside(draft, a) if isinstance(a, Value) else a for a in op.inputs]
        if any(a is not b for a, b in zip(inputs, op.inputs, strict=True)):
            op = _with_inputs(op, tuple(inputs))
        draft.ops.append(op)
        for value in op.outputs:
            self.home[value] = draft
            draft.made.add(value)

    def _inside(self, draft: _Draft, value: Value) -> Value:
        """The value as this group reads it: an inlined one is computed again inside."""
        if value in self.inline:
            if value not in draft.local:
                source = self.inline[value]
                copy = Value(aval=value.aval, name=value.name)
                inputs = tuple(self._inside(draft, a) if isinstance(a, Value) else a for a in source.inputs)
                draft.ops.append(
                    Op(
                        primitive=source.primitive,
                        params=source.params,
                        inputs=inputs,
                        outputs=(copy,),
                        source_info=source.source_info,
                    )
                )
                draft.local[value] = copy
                draft.made.add(copy)
            return draft.local[value]
        home = self.home.get(value)
        if home is not None and home is not draft:
            home.read = True
            home.used_outside.add(value)
        return value


def _with_inputs(op: Op, inputs: tuple[Atom, ...]) -> Op:
    return Op(
        primitive=op.primitive,
        params=op.params,
        inputs=inputs,
        outputs=op.outputs,
        blocks=op.blocks,
        source_info=op.source_info,
    )


def _ordered(drafts: Sequence[_Draft], outputs: Sequence[Atom]) -> list[_Draft]:
    """Topological order that stays close to the order of the program.

    A group runs at the place of its last op, but never after a group that reads it.
    """
    home = {v: d for d in drafts for v in d.made}
    readers: dict[int, set[int]] = defaultdict(set)
    waits: dict[int, int] = defaultdict(int)
    position = {id(d): i for i, d in enumerate(drafts)}
    for i, draft in enumerate(drafts):
        sources = {
            position[id(home[a])]
            for op in draft.ops
            for a in op.inputs
            if isinstance(a, Value) and a in home and home[a] is not draft
        }
        waits[i] = len(sources)
        for s in sources:
            readers[s].add(i)
    ready = [i for i in range(len(drafts)) if not waits[i]]
    heapq.heapify(ready)
    order = []
    while ready:
        i = heapq.heappop(ready)
        order.append(drafts[i])
        for r in readers[i]:
            waits[r] -= 1
            if not waits[r]:
                heapq.heappush(ready, r)
    if len(order) != len(drafts):
        raise AssertionError("groups depend on each other in a circle")
    return order


def _finished(draft: _Draft) -> list[Group]:
    """Finish a group; an operand that its op reads in two roles (`x @ x.T`) comes as two copies."""
    if draft.kind is not Kind.SINGLE:
        return [_finish(draft)]
    (op,) = draft.ops
    dims = family(op).rule(op).inputs
    first: dict[Value, Dims] = {}
    copies: list[Group] = []
    inputs: list[Atom] = []
    for atom, own in zip(op.inputs, dims, strict=True):
        if isinstance(atom, Value) and first.setdefault(atom, own) != own:
            copies.append(_copy(atom, Value(aval=atom.aval, name=atom.name)))
            atom = copies[-1].outputs[0]
        inputs.append(atom)
    if copies:
        draft.ops[0] = _with_inputs(op, tuple(inputs))
    return [*copies, _finish(draft)]


def _finish(draft: _Draft) -> Group:
    ops = tuple(draft.ops)
    made = draft.made
    inputs = tuple(
        dict.fromkeys(a for op in ops for a in op.inputs if isinstance(a, Value) and a not in made)
    )
    outputs = tuple(v for op in ops for v in op.outputs if v in draft.used_outside)
    if draft.kind in (Kind.CONTROL, Kind.IDENTITY) or not outputs:
        outputs = tuple(v for op in ops for v in op.outputs)
    if draft.kind is Kind.CONTROL:
        (op,) = ops
        return Group(
            kind=draft.kind,
            ops=ops,
            inputs=inputs,
            outputs=outputs,
            rule=ShardingRule(inputs=(), outputs=(), sizes={}),
            blocks=tuple(group(block) for block in op.blocks),
        )
    op_rules = tuple(family(op).rule(op) for op in ops)
    rule, factors = merge_rules(ops, op_rules, inputs, outputs)
    return Group(
        kind=draft.kind,
        ops=ops,
        inputs=inputs,
        outputs=outputs,
        rule=rule,
        factors=factors,
        op_rules=op_rules,
    )


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
    names: dict[tuple[int, str], str] = {}
    sizes: dict[str, int] = {}
    reduce: dict[str, str] = {}
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
        maps.append(mapping)
    whole_names = {names[find(x)] for x in whole if find(x) in names}

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


def _with_copies(block: Block) -> Block:
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
            rest = Value(aval=value.aval, name=value.name)
            after[producer[value]].append(_copy(value, rest))
            for i in where:
                renamed[i, value] = rest
            final[value] = rest
        elif value not in made and uses > 1:
            # An input that products read far apart: gathered once for all, or by each.
            heavy = [i for i in where if block.groups[i].kind is Kind.SINGLE]
            if len(heavy) > 1 and len(_near(heavy)) > 1:
                rest = Value(aval=value.aval, name=value.name)
                before[heavy[0]].append(_copy(value, rest))
                for i in heavy:
                    renamed[i, value] = rest
                where = heavy
                uses = len(heavy)
        for siblings in _near(where):
            if len(siblings) > 1 and not (rest is not value and len(siblings) == uses):
                shared = Value(aval=value.aval, name=value.name)
                before[siblings[0]].append(_copy(rest, shared))
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


def _copy(source: Value, target: Value) -> Group:
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
        _with_inputs(op, tuple(names.get(a, a) if isinstance(a, Value) else a for a in op.inputs))
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
