"""What a sharding rule is: an einsum-like statement over factors, data with a text form.

`(b m k), (b k n) -> (b m n) {reduce: k}` says that dims which share a factor are split together, and that
splitting `k` leaves partial sums. A dim may be compound, `((h d))`, major factor first; a dim without
factors, written `1`, is never split. Factors may be

- parallel: split freely, also unevenly: the last devices then compute on padding;
- reduce, with a monoid: the results are partial over the axes that split them;
- exchange, with a way: split, and the op itself communicates along them. A `halo` is fetched from the
  neighbours (the dims of one such factor may differ in extent), a `scan` passes on what stands before, a
  `merge` combines what every device finds, and so on: the emission of the op's family says how;
- even: split evenly or not at all;
- whole: known, never split (the op needs all of it on every device).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from autoshard.layout import Axes, Layout, MeshShape, chunk, mesh_size

__all__ = ["Assignment", "Dims", "ShardingRule"]

Dims = tuple[tuple[str, ...], ...]
Assignment = Mapping[str, Axes]


@dataclass(frozen=True, kw_only=True)
class ShardingRule:
    """Factors of every dim of every operand and result; `sizes` are the factors' extents.

    `linear` rules let partial sums pass: with every listed operand partial over the same axes, so are the
    results, and nothing need be reduced before.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, int]
    reduce: Mapping[str, str] = field(default_factory=dict)
    exchange: Mapping[str, str] = field(default_factory=dict)
    even: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    linear: tuple[int, ...] = ()

    @property
    def factors(self) -> tuple[str, ...]:
        """Factors that may be split, in order of first appearance."""
        seen: dict[str, None] = {}
        for dims in self.inputs + self.outputs:
            for dim in dims:
                for factor in dim:
                    if factor not in self.whole:
                        seen.setdefault(factor)
        return tuple(seen)

    def layout(self, dims: Dims, assignment: Assignment) -> Layout:
        """Layout of a value with these `dims` when the factors are split by `assignment`."""
        return Layout(tuple(tuple(a for f in dim for a in assignment.get(f, ())) for dim in dims))

    def output_layout(self, index: int, assignment: Assignment) -> Layout:
        """Layout of a result; it is unreduced over the axes of reduce factors that it lacks."""
        layout = self.layout(self.outputs[index], assignment)
        held = {f for dim in self.outputs[index] for f in dim}
        partial = [(a, self.reduce[f]) for f in self.reduce if f not in held for a in assignment.get(f, ())]
        if not partial:
            return layout
        return Layout(layout.dims, tuple(a for a, _ in partial), partial[0][1])

    def valid(self, assignment: Assignment, mesh: MeshShape) -> bool:
        """Tell whether the split can be carried out.

        No minor factor of a compound dim is split before its major ones are full, an uneven split of a major
        factor cuts the dim where a split of the dim itself would, and all that is reduced has one monoid.
        """
        for factor, axes in assignment.items():
            if axes and (
                factor in self.whole or (factor in self.even and self.sizes[factor] % mesh_size(axes, mesh))
            ):
                return False
        for dims in self.inputs + self.outputs:
            for dim in dims:
                if len(dim) > 1 and not self._nested(dim, assignment, mesh):
                    return False
        monoids = {self.reduce[f] for f, axes in assignment.items() if axes and f in self.reduce}
        return len(monoids) <= 1

    def _nested(self, dim: Iterable[str], assignment: Assignment, mesh: MeshShape) -> bool:
        full = regular = True
        whole, ways, local = 1, 1, 1
        for factor in dim:
            size, own = self.sizes[factor], mesh_size(assignment.get(factor, ()), mesh)
            if own > 1 and not full:
                return False
            if own > size:
                return False
            full = full and own == size
            regular = regular and (ways == 1 or size % own == 0)  # else padding lies within the dim
            whole, ways, local = whole * size, ways * own, local * chunk(size, own)
        return (regular and local == chunk(whole, ways)) or any(f in self.exchange for f in dim)

    def __str__(self) -> str:
        text = ", ".join(map(_dims_text, self.inputs)) + " -> " + ", ".join(map(_dims_text, self.outputs))
        notes = [f"reduce: {_reduce_text(self.reduce)}"] if self.reduce else []
        if self.exchange:
            notes.append("exchange: " + " ".join(f"{f}={way}" for f, way in self.exchange.items()))
        if self.even:
            notes.append("even: " + " ".join(sorted(self.even)))
        if self.whole:
            notes.append("whole: " + " ".join(sorted(self.whole)))
        if self.linear:
            notes.append("linear: " + " ".join(map(str, self.linear)))
        return text + (" {" + "; ".join(notes) + "}" if notes else "")

    @classmethod
    def parse(cls, text: str, sizes: Mapping[str, int]) -> ShardingRule:
        """Read the text form.

        >>> str(ShardingRule.parse("(b (h d)) -> (b h d)", {"b": 2, "h": 4, "d": 8}))
        '(b (h d)) -> (b h d)'
        """
        body, _, notes = text.partition("{")
        left, _, right = body.partition("->")
        reduce: dict[str, str] = {}
        exchange: dict[str, str] = {}
        even: frozenset[str] = frozenset()
        whole: frozenset[str] = frozenset()
        linear: tuple[int, ...] = ()
        for note in notes.rstrip("} ").split(";"):
            key, _, value = note.partition(":")
            if key.strip() == "reduce":
                for item in value.split():
                    factor, _, monoid = item.partition("=")
                    reduce[factor] = monoid or "sum"
            elif key.strip() == "exchange":
                exchange = dict(item.split("=") for item in value.split())
            elif key.strip() == "even":
                even = frozenset(value.split())
            elif key.strip() == "whole":
                whole = frozenset(value.split())
            elif key.strip() == "linear":
                linear = tuple(int(item) for item in value.split())
        return cls(
            inputs=_parse_side(left),
            outputs=_parse_side(right),
            sizes=dict(sizes),
            reduce=reduce,
            exchange=exchange,
            even=even,
            whole=whole,
            linear=linear,
        )


def _dims_text(dims: Dims) -> str:
    return "(" + " ".join("1" if not d else d[0] if len(d) == 1 else f"({' '.join(d)})" for d in dims) + ")"


def _reduce_text(reduce: Mapping[str, str]) -> str:
    return " ".join(f if monoid == "sum" else f"{f}={monoid}" for f, monoid in reduce.items())


def _parse_side(text: str) -> tuple[Dims, ...]:
    tokens = re.findall(r"[()]|[^\s(),]+", text)
    values: list[Dims] = []
    dims: list[tuple[str, ...]] = []
    compound: list[str] | None = None
    depth = 0
    for token in tokens:
        if token == "(":
            depth += 1
            if depth == 1:
                dims = []
            else:
                compound = []
        elif token == ")":
            depth -= 1
            if depth == 0:
                values.append(tuple(dims))
            elif compound is not None:
                dims.append(tuple(compound))
                compound = None
        elif compound is not None:
            compound.append(token)
        else:
            dims.append(() if token == "1" else (token,))
    return tuple(values)
