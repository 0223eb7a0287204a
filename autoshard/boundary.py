"""What crosses into and out of the blocks of a control-flow group, and how its layout changes on the way.

A `scan` slices its stacked operands: the leading dim stays whole outside and is gone inside. A `shard_map` over
some axes shows its block the part of one device along these *manual* axes: they split the dims outside, as its
specs say, and split nothing inside; the other axes split what is left of each dim, and are free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.groups import Block, Group
from autoshard.layout import Axes, Layout, MeshShape
from autoshard.program import Op, Value
from autoshard.rules import Kind

__all__ = ["PLAIN", "Boundary", "Crossing", "boundaries", "deciding_values", "free_axes"]


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """How a value crosses the boundary of a block.

    `lead` leading dims are outside only; `split` are the manual axes that split each dim outside, of all the
    block's `manual` axes.
    """

    lead: int = 0
    split: tuple[Axes, ...] = ()
    manual: frozenset[str] = frozenset()

    def outside(self, inner: Layout) -> Layout:
        """Layout outside of what has the layout `inner` inside."""
        dims = inner.dims
        if self.split:
            dims = tuple((*own, *axes) for own, axes in zip(self.split, dims, strict=True))
        return Layout(((),) * self.lead + dims, inner.unreduced, inner.monoid)

    def inside(self, outer: Layout) -> Layout:
        """Layout inside that is nearest to the layout `outer` outside."""
        dims = tuple(tuple(a for a in axes if a not in self.manual) for axes in outer.dims[self.lead :])
        return Layout(dims, outer.unreduced, outer.monoid)

    def fitted(self, outer: Layout) -> Layout:
        """Layout outside that is nearest to `outer` among those that can cross."""
        return self.outside(self.inside(outer))


PLAIN = Crossing()
_SLICED = Crossing(lead=1)


@dataclass(frozen=True, eq=False, kw_only=True)
class Boundary:
    """Which values of a control-flow group are decided, and what follows them.

    `operands[i]` is the inner value that decides how input i of the op arrives, and how it crosses.
    `results[j]` is the value that decides output j. `yields` lists (block index, output index, deciding value,
    crossing) for what the blocks return. `same` maps further inner values to the one that decides them.
    """

    operands: tuple[tuple[Value | None, Crossing], ...]
    results: tuple[Value, ...]
    yields: tuple[tuple[int, int, Value, Crossing], ...]
    same: dict[Value, Value]


def boundaries(item: Group) -> Boundary:
    """Return the boundary of a `scan`, `while`, `cond` or `shard_map` group."""
    (op,) = item.ops
    if op.name == "scan":
        return _scan_boundary(op, item.blocks[0])
    if op.name == "while":
        return _while_boundary(op, *item.blocks)
    if op.name == "shard_map":
        return _mapped_boundary(op, item.blocks[0])
    return _cond_boundary(op, item.blocks)


def _scan_boundary(op: Op, body: Block) -> Boundary:
    consts, carries = op.params["num_consts"], op.params["num_carry"]
    operands = tuple(
        (value, _SLICED if i >= consts + carries else PLAIN) for i, value in enumerate(body.inputs)
    )
    carried = body.inputs[consts : consts + carries]
    stacked = op.outputs[carries:]
    yields = [(0, j, value, PLAIN) for j, value in enumerate(carried)]
    yields += [(0, carries + j, value, _SLICED) for j, value in enumerate(stacked)]
    return Boundary(operands=operands, results=carried + stacked, yields=tuple(yields), same={})


def _while_boundary(op: Op, cond: Block, body: Block) -> Boundary:
    split, more = op.params["cond_nconsts"], op.params["body_nconsts"]
    carried = body.inputs[more:]
    operands = (*cond.inputs[:split], *body.inputs)
    return Boundary(
        operands=tuple((value, PLAIN) for value in operands),
        results=carried,
        yields=tuple((1, j, value, PLAIN) for j, value in enumerate(carried)),
        same=dict(zip(cond.inputs[split:], carried, strict=True)),
    )


def _cond_boundary(op: Op, branches: Sequence[Block]) -> Boundary:
    first = branches[0].inputs
    same = {value: first[i] for branch in branches[1:] for i, value in enumerate(branch.inputs)}
    return Boundary(
        operands=((None, PLAIN), *((value, PLAIN) for value in first)),
        results=op.outputs,
        yields=tuple(
            (b, j, value, PLAIN) for b in range(len(branches)) for j, value in enumerate(op.outputs)
        ),
        same=same,
    )


def _mapped_boundary(op: Op, body: Block) -> Boundary:
    manual = frozenset(op.params["manual"])
    ins = [Crossing(split=split, manual=manual) for split in op.params["in_splits"]]
    outs = [Crossing(split=split, manual=manual) for split in op.params["out_splits"]]
    return Boundary(
        operands=tuple(zip(body.inputs, ins, strict=True)),
        results=op.outputs,
        yields=tuple((0, j, value, x) for j, (value, x) in enumerate(zip(op.outputs, outs, strict=True))),
        same={},
    )


def deciding_values(block: Block) -> tuple[Value, ...]:
    """List the values whose layout is decided by itself: inputs, constants, what loops and branches take."""
    found: dict[Value, None] = dict.fromkeys(block.inputs)
    found |= dict.fromkeys(value for value, _ in block.consts)
    for item in block.walk():
        if item.kind is Kind.CONTROL:
            boundary = boundaries(item)
            found |= dict.fromkeys(value for value, _ in boundary.operands if value is not None)
            found |= dict.fromkeys(boundary.results)
    return tuple(found)


def free_axes(mesh: MeshShape, manual: frozenset[str]) -> MeshShape:
    """Return the axes of a mesh that are not manual."""
    return {a: n for a, n in mesh.items() if a not in manual} if manual else mesh
