"""What a compiler computes on the spot: groups that share kernels, and values that are never stored.

XLA fuses elementwise work into whatever reads it, once for every reader, and computes what follows a product
in the product's own kernel. Which groups do is a property of the program, not of its shardings:

* *Riders*. An elementwise result that only elementwise groups and products read is not stored if it derives from
  one large stored array at most, or if only products read it and it is cheap: every reader reads what is stored
  instead, and computes. Long computations are not repeated for several readers. A slice of what a scan scans is
  read in place likewise.
* *Tails*. Elementwise work on the result of a product that nothing else reads ends the product's kernel.

Where such a value is resharded on its way, it is stored after all; that is a price of the reshard
(`Machine.storing_cost`, `Machine.apart_cost`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import cost_models as cm
from autoshard.groups import Block, Group
from autoshard.partition.vector import vector_work
from autoshard.program import Atom, Op, Value, itemsize, shape_of
from autoshard.rules import Kind, family

__all__ = ["OUTPUT_SCOPE", "PARTIAL_SCOPE", "Fused", "Fusions", "Rider", "Tail", "fusions_of"]

# Name scope of what leaves partial sums: these are added up before anything else happens to them.
PARTIAL_SCOPE = "partial"
# Name scope, with its position, of what makes an output of an elementwise group.
OUTPUT_SCOPE = "output"
PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
# An operand of a group counts as large from this share of the group's own size.
LARGE = 0.25
# Cheap operations on an element that are done anew for each of several readers: on a v3 more of them take longer than
# to write and to read 4 bytes.
REPEATED_WORK = 36


@dataclass(frozen=True, kw_only=True)
class Rider:
    """What reading a value takes that is computed on the spot, per element of the value.

    `reads` lists the stored arrays that it is computed from, each by a number and the bytes of an element; a kernel
    reads an array once for all riders on it. `work` counts cheap vector operations.
    """

    reads: tuple[tuple[int, float], ...]
    work: float

    @property
    def read_bytes(self) -> float:
        """Bytes read per element."""
        return sum(size for _, size in self.reads)


@dataclass(frozen=True, kw_only=True)
class Tail:
    """What a product's kernel does at its end, per element of the result.

    `written` are the bytes of an element of each array that it writes in place of the result, or beside it where
    that is `stored`.
    """

    read_bytes: float
    written: tuple[float, ...]
    work: float
    stored: bool


@dataclass(frozen=True, kw_only=True)
class Fused:
    """How a group shares kernels.

    Attributes:
      riders: per input, how it is computed on the spot; None for one that is stored.
      outputs: per output, how its readers compute it; None for one that is stored.
      tail: of a product, what ends its kernel.
      within: of a group that ends a product's kernel, that tail.
      slices: of a scan, how the slices of what it scans are read in place; None for one that is copied.
      stacks: of a scan, how often each result that it stacks is copied: once where a turn does not make it in place,
        once more where the stack replaces an array that the same scan slices, and so must wait for its end.

    """

    riders: tuple[Rider | None, ...] = ()
    outputs: tuple[Rider | None, ...] = ()
    tail: Tail | None = None
    within: Tail | None = None
    slices: tuple[Rider | None, ...] = ()
    stacks: tuple[int, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether there is a kernel for the group at all."""
        return self.within is None and not (self.outputs and all(self.outputs))


@dataclass(frozen=True, eq=False, kw_only=True)
class Fusions:
    """The groups of a program that share kernels, and the values that are not stored.

    Attributes:
      groups: those that share kernels.
      riders: how values that are not stored are computed; copies of them included.
      tails: results of products that end in another group's work, and that group.

    """

    groups: Mapping[Group, Fused]
    riders: Mapping[Value, Rider]
    tails: Mapping[Value, tuple[Tail, Group]]

    def of(self, item: Group) -> Fused:
        """How a group shares kernels; plainly not, for most."""
        return self.groups.get(item, PLAIN)

    def tail(self, value: Value, reader: Group | None) -> Tail | None:
        """The tail that joins a product's result to its reader, if there is one."""
        tail, group = self.tails.get(value, (None, None))
        return tail if group is reader else None


PLAIN = Fused()


def fusions_of(block: Block, *, tails: bool = True, replaced: Mapping[int, int] | None = None) -> Fusions:
    """Find which groups of a program, and of the bodies of its loops, share kernels.

    Args:
      block: the grouped program.
      tails: whether kernels of products may end in other work; one that runs as a ring of steps does not.
      replaced: outputs that take the place of donated inputs: output position -> input position.

    """
    scans = [item for item in block.walk() if item.kind is Kind.CONTROL and item.ops[0].name == "scan"]
    bodies = {body: _Analysis(body, tails) for body in _blocks(block)}
    scanned = {item: bodies[item.blocks[0]].scanned(item.ops[0]) for item in scans}
    top = bodies[block]
    source = {top.rooted(block.outputs[j]): block.inputs[i] for j, i in (replaced or {}).items()}
    for item in (s for s in scans if s in top.block.groups):
        (op,) = item.ops
        read = {top.rooted(v) for v in op.inputs[op.params["num_consts"] + op.params["num_carry"] :]}
        stacked = op.outputs[op.params["num_carry"] :]
        waits = [source.get(v) in read for v in stacked]
        stacks = tuple(n + wait for n, wait in zip(scanned[item].stacks, waits, strict=True))
        scanned[item] = replace(scanned[item], stacks=stacks)
    found = [analysis.run() for analysis in bodies.values()]
    return Fusions(
        groups={g: f for one in found for g, f in one.groups.items()} | scanned,
        riders={v: r for one in found for v, r in one.riders.items()},
        tails={v: t for one in found for v, t in one.tails.items()},
    )


def _blocks(block: Block) -> list[Block]:
    inner = [b for item in block.groups for body in item.blocks for b in _blocks(body)]
    return [block, *inner]


class _Analysis:
    """One block: riders in order, then tails from the last product to the first."""

    def __init__(self, block: Block, tails: bool) -> None:
        self.block, self.tails = block, tails
        self.root: dict[Value, Value] = {}  # through copies
        self.readers: dict[Value, list[Group | None]] = defaultdict(list)  # None: needs it stored
        for item in block.groups:
            for value in item.inputs:
                if item.is_copy:
                    self.root[item.outputs[0]] = self.rooted(value)
                else:
                    self.readers[self.rooted(value)].append(item)
        for atom in block.outputs:
            if isinstance(atom, Value):
                self.readers[self.rooted(atom)].append(None)
        self.riders: dict[Value, Rider] = {}
        self.bases: dict[Value, int] = {}
        self.dear: set[Value] = set()  # riders that take more than cheap operations

    def rooted(self, value: Any) -> Any:
        """The value that a value is a copy of; literals are no copies."""
        return self.root.get(value, value) if isinstance(value, Value) else value

    def run(self) -> Fusions:
        for item in self.block.groups:
            if _fusible(item):
                self.ride(item)
        tails: dict[Value, tuple[Tail, Group]] = {}
        within: dict[Group, Tail] = {}
        for item in reversed(self.block.groups):
            reader = self.follower(item)
            if reader is not None and reader not in within:
                within[reader] = self.tail(item, reader)
                tails[item.outputs[0]] = within[reader], reader
        groups = {}
        for item in self.block.groups:
            riders = self.operands(item)
            outputs = () if item.is_copy else tuple(map(self.riders.get, item.outputs))
            fused = Fused(
                riders=riders if any(riders) else (),
                outputs=outputs if any(outputs) else (),
                tail=tails[item.outputs[0]][0] if item.outputs and item.outputs[0] in tails else None,
                within=within.get(item),
            )
            if fused != PLAIN:
                groups[item] = fused
        copies = {v: self.riders[root] for v, root in self.root.items() if root in self.riders}
        return Fusions(groups=groups, riders=self.riders | copies, tails=tails)

    def scanned(self, op: Op) -> Fused:
        """How the scan that this block is the body of slices and stacks; slices read in place become riders."""
        consts, carries = op.params["num_consts"], op.params["num_carry"]
        makers = {v: item for item in self.block.groups for v in item.outputs}

        def read_in_place(value: Value) -> bool:
            readers = self.readers[value]
            products = all(r is not None and _is_product(r) for r in readers)
            return products or (len(readers) == 1 and readers[0] is not None and _fusible(readers[0]))

        def made_in_place(atom: Atom) -> bool:
            maker = makers.get(self.rooted(atom)) if isinstance(atom, Value) else None
            return maker is not None and _fusible(maker)

        for value in self.block.inputs[consts + carries :]:
            if read_in_place(value):
                self.riders[value] = Rider(reads=((self.number(value), itemsize(value.dtype)),), work=0.0)
        return Fused(
            slices=tuple(self.riders.get(v) for v in self.block.inputs[consts + carries :]),
            stacks=tuple(int(not made_in_place(a)) for a in self.block.outputs[carries:]),
        )

    def ride(self, item: Group) -> None:
        """Find the elementwise results of a group that are not stored."""
        size = _size(item)
        maker = {v: op for op in item.ops for v in op.outputs}
        for value in _maps(item):
            readers = self.readers[value]
            if not readers or math.prod(value.shape) != size:
                continue
            if not all(r is not None and (_fusible(r) or _is_product(r)) for r in readers):
                continue
            ops, inputs = _cone(value, maker)
            work = [_work(op) / size for op in ops]
            chain = [v for v in map(self.rooted, inputs) if v in self.riders]
            dear = any(w > 1 for w in work) or any(v in self.dear for v in chain)
            reads = self.large(inputs, size)
            if len(reads) > 1 and (dear or not all(r is not None and _is_product(r) for r in readers)):
                continue
            rider = Rider(
                reads=tuple(reads.items()), work=sum(work) + sum(self.riders[v].work for v in chain)
            )
            if len(readers) > 1 and rider.work > REPEATED_WORK:
                continue
            self.riders[value] = rider
            if dear:
                self.dear.add(value)

    def number(self, value: Value) -> int:
        """Number of a stored array."""
        return self.bases.setdefault(value, len(self.bases))

    def large(self, values: Iterable[Value], size: int) -> dict[int, float]:
        """The large stored arrays behind some values: number -> bytes per element of a group of that size."""
        found: dict[int, float] = {}
        for value in map(self.rooted, values):
            share = math.prod(value.shape) / size
            if share < LARGE:
                continue
            rider = self.riders.get(value)
            reads = rider.reads if rider is not None else ((self.number(value), itemsize(value.dtype)),)
            for number, width in reads:
                found[number] = max(found.get(number, 0.0), share * width)
        return found

    def operands(self, item: Group) -> tuple[Rider | None, ...]:
        """Riders by input, their bases numbered by first appearance, so that like groups look alike."""
        if item.is_copy or item.kind in (Kind.CONTROL, Kind.IDENTITY):
            return ()
        numbers: dict[int, int] = {}
        result = []
        for value in item.inputs:
            rider = self.riders.get(self.rooted(value))
            if rider is not None:
                reads = tuple((numbers.setdefault(n, len(numbers)), size) for n, size in rider.reads)
                rider = replace(rider, reads=reads)
            result.append(rider)
        return tuple(result)

    def follower(self, item: Group) -> Group | None:
        """The group that ends a product's kernel: the only one that reads its result."""
        if not self.tails or not _is_product(item):
            return None
        (value,) = item.outputs
        readers = self.readers[value]
        if len(readers) != 1 or readers[0] is None or value not in readers[0].inputs:
            return None
        reader = readers[0]
        plain = _fusible(reader) and _size(reader) == math.prod(value.shape)
        return reader if plain and not all(v in self.riders for v in reader.outputs) else None

    def tail(self, product: Group, reader: Group) -> Tail:
        """What ends a product's kernel, where it is the work of a group that reads the result."""
        (value,) = product.outputs
        size = math.prod(value.shape)
        ridden = sum(r.work for v in reader.inputs if (r := self.riders.get(self.rooted(v))) is not None)
        riding = [r for v in reader.outputs if (r := self.riders.get(v)) is not None]
        others = [v for v in reader.inputs if self.rooted(v) is not value]
        return Tail(
            read_bytes=sum(self.large(others, size).values()),
            written=tuple(itemsize(v.dtype) for v in _maps(reader) if v not in self.riders),
            work=sum(map(_work, reader.ops)) / size + ridden,
            stored=any(self.bases.get(value) in dict(r.reads) for r in riding),
        )


def _cone(value: Value, maker: Mapping[Value, Op]) -> tuple[list[Op], list[Value]]:
    """The ops of a group that a result of it needs, and what they read from outside."""
    ops: dict[Op, None] = {}
    inputs: dict[Value, None] = {}
    stack = [value]
    while stack:
        wanted = stack.pop()
        if wanted not in maker:
            inputs.setdefault(wanted)
        elif maker[wanted] not in ops:
            ops[maker[wanted]] = None
            stack += [a for a in maker[wanted].inputs if isinstance(a, Value)]
    return list(ops), list(inputs)


def _fusible(item: Group) -> bool:
    """Tell elementwise work, perhaps ended by reductions, without exchange between devices."""
    return item.kind is Kind.ELEMENTWISE and not item.is_copy and not item.rule.exchange


def _is_product(item: Group) -> bool:
    return len(item.ops) == 1 and item.ops[0].name in PRODUCTS


def _maps(item: Group) -> list[Value]:
    """Outputs of a group that no reduction made."""
    reduced = {v for op in item.ops if family(op).kind is Kind.REDUCTION for v in op.outputs}
    return [v for v in item.outputs if v not in reduced]


def _size(item: Group) -> int:
    """Elements of the largest array, at least one."""
    return max(1, *(math.prod(shape_of(a)) for op in item.ops for a in (*op.inputs, *op.outputs)))


def _work(op: Op) -> float:
    """Cheap vector operations of an op on whole arrays."""
    equation = SimpleNamespace(primitive=op.primitive, params=op.params, invars=op.inputs, outvars=op.outputs)
    elements, op_class, _ = vector_work(equation)
    return elements * cm.vector_operations(op_class)
