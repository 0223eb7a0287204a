"""Groups: the ops that are decided, priced and run together.

A group is what a compiler would make one kernel of: a cluster of elementwise ops, perhaps ended by
reductions; or a single matrix product, gather, loop and so on. All ops of a group share one split of the
group's factors, so resharding happens only between groups, and the cost of a group depends on its own split
alone. Values that several groups read rest in a *copy* (`autoshard.sharing`), an empty group whose layout is a
decision too: a partial sum is reduced, or a weight gathered, once for all who share it.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from autoshard.groups import PARTIAL, Block, Group, with_inputs
from autoshard.merging import merge_rules
from autoshard.program import Atom, Op, Program, Value, shape_of
from autoshard.rules import Family, Kind, ShardingRule, family
from autoshard.rules.rule import Dims
from autoshard.sharing import copy_of, with_copies

__all__ = ["PARTIAL", "Block", "Group", "group"]

# Cheap enough to compute again in every kernel that reads them, so never stored.
_CHEAP = frozenset(
    "add sub mul and or not xor eq ne lt le gt ge select_n convert_element_type max min neg".split()
)
# Ops whose results are partial sums where what they sum over is split.
_SUMMING = frozenset(
    {"dot_general", "conv_general_dilated", "ragged_dot_general", "scatter-add", "scatter_add"}
)


def group(program: Program) -> Block:
    """Cluster the ops of a Program, and of its blocks, into groups."""
    drafts = _Clusters(program).run()
    return with_copies(
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


def _combines(rule: ShardingRule) -> str | None:
    """How a reduction's results are combined: kernels end in reductions of one way only."""
    return next(iter((*rule.reduce.values(), *rule.exchange.values())), None)


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
            draft.monoid = _combines(fam.rule(op)) or draft.monoid

    def _adds_products(self, op: Op, bases: Sequence[Value]) -> bool:
        """Tell a sum of results of products or lookups' gradients, or of such sums: best added before reduced."""
        if op.name not in ("add", "add_any") or len(bases) < 2:
            return False
        homes = [self.home.get(v) for v in bases]
        return all(
            home is not None and (home.sums or home.ops[0].name in _SUMMING) for home in homes
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
            monoid = _combines(fam.rule(op))
            if best.monoid not in (None, monoid):
                return None
        best.rank = max([best.rank] + [rank + 1 for rank in others])
        return best

    def _add(self, draft: _Draft, op: Op) -> None:
        inputs = [self._inside(draft, a) if isinstance(a, Value) else a for a in op.inputs]
        if any(a is not b for a, b in zip(inputs, op.inputs, strict=True)):
            op = with_inputs(op, tuple(inputs))
        draft.ops.append(op)
        for value in op.outputs:
            self.home[value] = draft
            draft.made.add(value)

    def _inside(self, draft: _Draft, value: Value) -> Value:
        """The value as this group reads it: an inlined one is computed again inside."""
        if value in self.inline:
            if value not in draft.local:
                source = self.inline[value]
                copy = replace(value)
                inputs = tuple(self._inside(draft, a) if isinstance(a, Value) else a for a in source.inputs)
                draft.ops.append(replace(source, inputs=inputs, outputs=(copy,)))
                draft.local[value] = copy
                draft.made.add(copy)
            return draft.local[value]
        home = self.home.get(value)
        if home is not None and home is not draft:
            home.read = True
            home.used_outside.add(value)
        return value


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
            copies.append(copy_of(atom, replace(atom)))
            atom = copies[-1].outputs[0]
        inputs.append(atom)
    if copies:
        draft.ops[0] = with_inputs(op, tuple(inputs))
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
