"""What a compiler computes on the spot: groups that share kernels, and values that are never stored.

XLA fuses elementwise work into whatever reads it, once for every reader, and computes what follows a product
in the product's own kernel. Which groups do is a property of the program, not of its shardings:

* *Riders*. An elementwise result that derives from at most one large stored array, and that only elementwise
  groups and products read, is not stored: every reader reads that array instead, and computes.
* *Tails*. Elementwise work on the result of a product that nothing else reads ends the product's kernel.

Where such a value is resharded on its way, it is stored after all; that is a price of the reshard
(`Machine.storing_cost`, `Machine.apart_cost`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace

import cost_models as cm
from autoshard.groups import Block, Group
from autoshard.partition.vector import vector_work
from autoshard.program import Op, Value, itemsize, shape_of
from autoshard.rules import Kind, families, family

__all__ = ["Fused", "Fusions", "Rider", "Tail", "fusions_of", "is_reduction"]

PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
# An operand of a group counts as large from this share of the group's own size.
LARGE = 0.25


@dataclass(frozen=True, kw_only=True)
class Rider:
    """What reading a value takes that is computed on the spot, per element of the value.

    `read_bytes` are those of the stored array `base`, which a kernel reads once for all riders on it (-1: none);
    `work` counts cheap vector operations.
    """

    read_bytes: float
    work: float
    base: int = -1


@dataclass(frozen=True, kw_only=True)
class Tail:
    """What a product's kernel does at its end, per element of the result; `stored`: writes the result, too."""

    read_bytes: float
    written_bytes: float
    work: float
    stored: bool


@dataclass(frozen=True, kw_only=True)
class Fused:
    """How a group shares kernels.

    Attributes:
      riders: per input, how it is computed on the spot; None for one that is stored.
      rider: how readers compute the group's elementwise results; None where these are stored.
      tail: of a product, what ends its kernel.
      within: of a group that ends a product's kernel, that tail.

    """

    riders: tuple[Rider | None, ...] = ()
    rider: Rider | None = None
    tail: Tail | None = None
    within: Tail | None = None


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


def is_reduction(primitive: str) -> bool:
    """Tell a primitive that leaves fewer elements than it takes, and so has a result that is stored."""
    return primitive in families and families[primitive].kind is Kind.REDUCTION


def fusions_of(block: Block, *, tails: bool = True) -> Fusions:
    """Find which groups of a program, and of the bodies of its loops, share kernels.

    Args:
      block: the grouped program.
      tails: whether kernels of products may end in other work; one that runs as a ring of steps does not.

    """
    found = [_Analysis(body, tails).run() for body in _blocks(block)]
    return Fusions(
        groups={g: f for one in found for g, f in one.groups.items()},
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

    def rooted(self, value: Value) -> Value:
        return self.root.get(value, value)

    def run(self) -> Fusions:
        rider: dict[Group, Rider] = {}
        for item in self.block.groups:
            found = self.rider(item)
            if found is not None:
                rider[item] = found
                self.riders |= dict.fromkeys(_maps(item), found)
        tails: dict[Value, tuple[Tail, Group]] = {}
        within: dict[Group, Tail] = {}
        for item in reversed(self.block.groups):
            reader = self.follower(item)
            if reader is not None and reader not in within:
                within[reader] = self.tail(item, reader, rider.get(reader))
                tails[item.outputs[0]] = within[reader], reader
        groups = {}
        for item in self.block.groups:
            riders = self.operands(item)
            tail = tails[item.outputs[0]][0] if item.outputs and item.outputs[0] in tails else None
            fused = Fused(
                riders=riders if any(riders) else (),
                rider=rider.get(item),
                tail=tail,
                within=within.get(item),
            )
            if fused != PLAIN:
                groups[item] = fused
        copies = {v: self.riders[root] for v, root in self.root.items() if root in self.riders}
        return Fusions(groups=groups, riders=self.riders | copies, tails=tails)

    def rider(self, item: Group) -> Rider | None:
        """How readers compute the elementwise results of a group, if they are not stored."""
        if not _fusible(item):
            return None
        maps = _maps(item)
        size = _size(item)
        if not maps or any(math.prod(v.shape) != size for v in maps):
            return None
        readers = [r for v in maps for r in self.readers[v]]
        if not readers or not all(r is not None and (_fusible(r) or _is_product(r)) for r in readers):
            return None
        bases = self.large(item)
        if len(bases) > 1:
            return None
        work = sum(_work(op) for op in item.ops if family(op).kind is not Kind.REDUCTION) / size
        work += sum(r.work for v in item.inputs if (r := self.riders.get(self.rooted(v))) is not None)
        (base, width), *_ = (*bases.items(), (-1, 0.0))
        return Rider(read_bytes=width, work=work, base=base)

    def large(self, item: Group, but: Value | None = None) -> dict[int, float]:
        """The large stored arrays that a group reads or computes from: number -> bytes per element of the group."""
        found: dict[int, float] = {}
        for value in item.inputs:
            value = self.rooted(value)
            share = math.prod(value.shape) / _size(item)
            if value is but or share < LARGE:
                continue
            rider = self.riders.get(value)
            if rider is None:
                number = self.bases.setdefault(value, len(self.bases))
                found[number] = share * itemsize(value.dtype)
            elif rider.base >= 0:
                found[rider.base] = share * rider.read_bytes
        return found

    def operands(self, item: Group) -> tuple[Rider | None, ...]:
        """Riders by input, their bases numbered by first appearance, so that like groups look alike."""
        if item.is_copy or item.kind in (Kind.CONTROL, Kind.IDENTITY):
            return ()
        numbers: dict[int, int] = {-1: -1}
        result = []
        for value in item.inputs:
            rider = self.riders.get(self.rooted(value))
            if rider is not None:
                rider = replace(rider, base=numbers.setdefault(rider.base, len(numbers) - 1))
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
        only_rides = plain and value not in self.riders and self._rides_only(reader)
        return reader if plain and not only_rides else None

    def _rides_only(self, item: Group) -> bool:
        """Whether nothing of a group is stored."""
        return all(v in self.riders for v in item.outputs)

    def tail(self, product: Group, reader: Group, rider: Rider | None) -> Tail:
        (value,) = product.outputs
        size = math.prod(value.shape)
        written = 0.0 if rider is not None else sum(itemsize(v.dtype) for v in _maps(reader))
        ridden = sum(r.work for v in reader.inputs if (r := self.riders.get(self.rooted(v))) is not None)
        number = self.bases.get(value, -2)
        return Tail(
            read_bytes=sum(self.large(reader, but=value).values()),
            written_bytes=written,
            work=sum(map(_work, reader.ops)) / size + ridden,
            stored=rider is not None and rider.base == number,
        )


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
    return max(math.prod(shape_of(a)) for op in item.ops for a in (*op.inputs, *op.outputs))


def _work(op: Op) -> float:
    """Cheap vector operations of an op on whole arrays."""
    equation = SimpleNamespace(primitive=op.primitive, params=op.params, invars=op.inputs, outvars=op.outputs)
    elements, op_class, _ = vector_work(equation)
    return elements * cm.vector_operations(op_class)
