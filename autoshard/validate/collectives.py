"""Lists the collectives of an optimised HLO module: kind, bytes, groups, mesh axes and executions.

It reads the three spellings of replica groups, explicit `{{0,1},{2,3}}`, iota `[4,2]<=[2,4]T(1,0)` and mesh
axes `mesh['a'=2,'b'=4] {'b'}`, and recovers from the groups which axes of the caller's mesh a collective
spans: partition `i` of the module is the device at position `i` of the mesh in row-major order.

An asynchronous pair counts once. A reduce-scatter that the TPU compiler writes as a fusion around an
all-reduce is listed as a reduce-scatter; an all-gather whose work is spread over several fusions with one
channel counts once.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.validate.hlo import Array, Computation, HloParseError, Instruction, Module
from autoshard.validate.loops import Execution, Schedule
from autoshard.validate.scatter import sliced_bytes

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:,\s*device_ids=\((.*?)\))?\s*(?:\{([^}]*)\})?$")
_AXIS = re.compile(r"'?([^'=,:]+)'?=(\d+)")
_AXIS_REFERENCE = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")
_PAIR = re.compile(r"\{(\d+),(\d+)\}")
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*?)_\d+"')
_TRANSFERS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One kind of communication that a step performs.

    Attributes:
        kind: one of `KINDS`.
        bytes: packed bytes, on one device, of the larger side: the gathered tensor of an all-gather, the
            unreduced tensor of a reduce-scatter, the whole operand otherwise. Tile padding is not included.
        result_bytes: packed bytes of the result on one device.
        count: number of identical instructions that this row stands for.
        trips: how often a step runs each of them: the product of the trip counts around it.
        group_size: devices that communicate with each other; for a permutation, the size of the axes along
            which it moves.
        sliced_bytes: of an all-reduce, the part of `bytes` of which each device reads its own share only: what
            a compiler that forms reduce-scatters would scatter (`autoshard.validate.scatter`).
        axes: names of the mesh axes that vary within a group, in mesh order; empty when no mesh was given.
        whole_axes: whether a group is exactly the product of `axes` rather than a part of it.
        is_async: whether the compiler split it into a start and a done.
        slices: slices between which it carries data over the data centre network; 1 within a slice. The rest of
            what one operation of the program does between slices is rows of its own (`find_collectives`).
        op_name: JAX's path of the operation.
        source: `file:line`, or empty.
        name: the name of (the first of) the instructions.

    """

    kind: str
    bytes: int
    result_bytes: int
    count: int
    trips: int
    group_size: int
    sliced_bytes: int
    axes: tuple[str, ...]
    whole_axes: bool
    is_async: bool
    op_name: str
    source: str
    name: str
    slices: int = 1

    @property
    def step_bytes(self) -> int:
        """`bytes` of all executions in a step."""
        return self.bytes * self.count * self.trips

    def __str__(self) -> str:
        axes = ",".join(self.axes) or "?"
        part = "" if self.whole_axes else " (part)"
        return (
            f"{self.kind} over {axes}{part} [{self.group_size}]: {self.bytes:,} B x {self.count * self.trips}"
            f"  {self.op_name}"
        )


def find_collectives(
    module: Module, schedule: Schedule, mesh_shape: Mapping[str, int], num_slices: int = 1
) -> tuple[Collective, ...]:
    """Return the collectives of a module, identical ones folded into one row.

    For several slices the TPU compiler writes one module, in which partitions are those of a slice: what crosses
    slices is a transfer, a `send` and a `recv` through the hosts that name its kind, and the rest of the same
    operation collectives within the slice.

    Args:
        module: the parsed module.
        schedule: its executions.
        mesh_shape: axis name to size, in the order of the mesh; empty if unknown.
        num_slices: slices that the mesh covers, as equal stretches of its devices.

    Returns:
        The collectives in the order in which they first appear.

    Raises:
        HloParseError: replica groups are written in a way that is not known.

    """
    devices = math.prod(mesh_shape.values())
    async_bodies = {
        name
        for execution in schedule.executions
        if execution.instruction.opcode == "async-start"
        for name in execution.instruction.called("calls")
    }
    rows: dict[Collective, int] = {}
    names: dict[Collective, str] = {}
    for execution, found, computation, is_async in _occurrences(module, schedule, async_bodies):
        kind = _kind(found) or ""
        operand_bytes, result_bytes = _sides(found, computation)
        if kind == "all-reduce" and _is_reduce_scatter(execution.instruction, computation):
            kind, result_bytes = "reduce-scatter", execution.instruction.bytes
        group_size, axes, whole = _span(found, mesh_shape, devices)
        sliced = sliced_bytes(module, computation, found, group_size) if kind == "all-reduce" else 0
        row = Collective(
            kind=kind,
            bytes=max(operand_bytes, result_bytes),
            result_bytes=result_bytes,
            count=1,
            trips=execution.trips,
            group_size=group_size,
            sliced_bytes=sliced,
            axes=axes,
            whole_axes=whole,
            is_async=is_async,
            op_name=found.op_name or execution.instruction.op_name,
            source=module.source(found) or module.source(execution.instruction),
            name="",
        )
        rows[row] = rows.get(row, 0) + 1
        names.setdefault(row, found.name)
    for transfer in _transfers(module, schedule, mesh_shape, num_slices):
        row = replace(transfer, name="")
        rows[row] = rows.get(row, 0) + 1
        names.setdefault(row, transfer.name)
    return tuple(replace(row, count=count, name=names[row]) for row, count in rows.items())


def _transfers(
    module: Module, schedule: Schedule, mesh_shape: Mapping[str, int], num_slices: int
) -> Iterator[Collective]:
    """Yield what goes between slices: per operation its sends and receives, which may come in pieces."""
    sides: dict[tuple[str, str, str], dict[str, list[Execution]]] = {}
    for execution in schedule.executions:
        instruction = execution.instruction
        found = _TRANSFER.search(instruction.attributes)
        meeting = _RENDEZVOUS.search(instruction.attributes)
        if instruction.opcode in ("send", "recv") and found and meeting:
            key = (execution.computation.name, meeting[1], found[1])
            sides.setdefault(key, {"send": [], "recv": []})[instruction.opcode].append(execution)
    for (_, name, way), ends in sides.items():
        if way not in _TRANSFERS:
            raise HloParseError(f"unknown transfer between slices: {way}; known: {', '.join(_TRANSFERS)}")
        kind, first = _TRANSFERS[way], ends["send"][0]
        sent, received = (sum(e.instruction.arrays[0].bytes for e in ends[side]) for side in ("send", "recv"))
        size, axes, whole = _between(mesh_shape, num_slices)
        yield Collective(
            kind=kind,
            bytes=max(sent, received),
            result_bytes=received,
            count=1,
            trips=first.trips,
            group_size=size,
            sliced_bytes=0,
            axes=axes,
            # An exchange goes through the hosts as a whole, and a permute as far as it leaves the slice.
            whole_axes=whole or kind in ("all-to-all", "collective-permute"),
            is_async=True,
            op_name=first.instruction.op_name,
            source=module.source(first.instruction),
            name=name,
            slices=num_slices,
        )


def _between(mesh_shape: Mapping[str, int], num_slices: int) -> tuple[int, tuple[str, ...], bool]:
    """As `_span`, for the devices that have the same place in all slices."""
    devices = math.prod(mesh_shape.values())
    firsts = np.arange(1, num_slices, dtype=np.int64) * (devices // num_slices)
    axes = _varying_axes(np.stack([0 * firsts, firsts], axis=1), mesh_shape, devices)
    return num_slices, axes, math.prod(mesh_shape[axis] for axis in axes) == num_slices


def step_bytes_by_kind(collectives: Sequence[Collective]) -> dict[str, int]:
    """Return the bytes of all executions in a step, by kind, in the order of `KINDS`."""
    totals = {kind: 0 for kind in KINDS}
    for collective in collectives:
        totals[collective.kind] += collective.step_bytes
    return {kind: total for kind, total in totals.items() if total}


def _occurrences(
    module: Module, schedule: Schedule, async_bodies: set[str]
) -> Iterator[tuple[Execution, Instruction, Computation, bool]]:
    """Yield (what runs, the collective in it, where that is written, whether it is asynchronous)."""
    seen: set[tuple[str, str, str]] = set()
    for execution in schedule.executions:
        instruction = execution.instruction
        if _kind(instruction):
            is_async = instruction.opcode.endswith("-start") or execution.computation.name in async_bodies
            yield execution, instruction, execution.computation, is_async
        elif instruction.opcode == "fusion":
            for computation, inner in _inside_fusion(module, instruction):
                channel = inner.attribute("channel_id")
                key = (execution.computation.name, _kind(inner) or "", channel or inner.name)
                if channel is not None and key in seen:
                    continue
                seen.add(key)
                yield execution, inner, computation, "chain_id=" in inner.attributes


def _inside_fusion(module: Module, fusion: Instruction) -> Iterator[tuple[Computation, Instruction]]:
    for name in fusion.called("calls"):
        computation = module.computations[name]
        for instruction in computation.instructions.values():
            if _kind(instruction):
                yield computation, instruction
            elif instruction.opcode == "fusion":
                yield from _inside_fusion(module, instruction)


def _kind(instruction: Instruction) -> str | None:
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def _sides(instruction: Instruction, computation: Computation) -> tuple[int, int]:
    """Return the bytes of the operands and of the result of a collective."""
    operands: list[Array] = []
    for name in instruction.operands:
        operands += computation.instructions[name].arrays
    operand_bytes = sum(array.bytes for array in operands)
    results = instruction.arrays
    if instruction.opcode in ("all-gather-start", "collective-permute-start"):
        # The shape of a start is (operands, results, context).
        results = results[len(operands) : 2 * len(operands)]
    if instruction.opcode == "ragged-all-to-all":
        operand_bytes = operands[0].bytes
    return operand_bytes, sum(array.bytes for array in results)


def _is_reduce_scatter(runs: Instruction, computation: Computation) -> bool:
    if runs.opcode != "fusion":
        return False
    if "all-reduce-scatter" in computation.name:
        return True
    root = computation.root
    while root.opcode in ("bitcast", "copy", "reshape", "convert"):
        root = computation.instructions[root.operands[0]]
    return root.opcode == "dynamic-slice"


def _span(
    instruction: Instruction, mesh_shape: Mapping[str, int], devices: int
) -> tuple[int, tuple[str, ...], bool]:
    """Return the group size, the mesh axes that a group spans and whether it spans them wholly."""
    pairs = instruction.attribute("source_target_pairs")
    if pairs is not None:
        moves = np.array([[int(a), int(b)] for a, b in _PAIR.findall(pairs)], dtype=np.int64).reshape(-1, 2)
        axes = _varying_axes(moves, mesh_shape, devices)
        size = math.prod(mesh_shape[axis] for axis in axes) if axes else len(moves)
        return size, axes, len(axes) <= 1
    groups = parse_replica_groups(instruction.attribute("replica_groups") or "{}", devices)
    size = max(len(group) for group in groups)
    axes = _varying_axes_of_groups(groups, mesh_shape, devices)
    return size, axes, math.prod(mesh_shape[axis] for axis in axes) == size or not mesh_shape


def _varying_axes_of_groups(
    groups: tuple[tuple[int, ...], ...], mesh_shape: Mapping[str, int], devices: int
) -> tuple[str, ...]:
    pairs = [(group[0], member) for group in groups for member in group[1:]]
    return _varying_axes(np.array(pairs, dtype=np.int64).reshape(-1, 2), mesh_shape, devices)


def _varying_axes(pairs: NDArray[np.int64], mesh_shape: Mapping[str, int], devices: int) -> tuple[str, ...]:
    if not mesh_shape or not len(pairs) or pairs.max() >= devices:
        return ()
    sizes = tuple(mesh_shape.values())
    first, second = np.unravel_index(pairs[:, 0], sizes), np.unravel_index(pairs[:, 1], sizes)
    return tuple(name for name, a, b in zip(mesh_shape, first, second, strict=True) if bool(np.any(a != b)))


@functools.lru_cache(maxsize=4096)
def parse_replica_groups(text: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of partition ids that a `replica_groups` attribute stands for.

    Args:
        text: the attribute in any of the three spellings; `{}` means one group of all.
        devices: number of partitions of the module, needed for `{}` only.

    Raises:
        HloParseError: the spelling is not known.

    Example:
        >>> parse_replica_groups("[4,2]<=[2,4]T(1,0)", 8)
        ((0, 4), (1, 5), (2, 6), (3, 7))
        >>> parse_replica_groups("mesh['a'=2,'b'=4] {'b':(1)2}", 8)
        ((0, 2), (1, 3), (4, 6), (5, 7))
        >>> parse_replica_groups("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", 8)
        ((0, 1, 2, 3), (4, 5, 6, 7))

    """
    text = text.strip()
    if text == "{}":
        return (tuple(range(devices)),)
    if text.startswith("{"):
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", text))
    iota = _IOTA.fullmatch(text)
    if iota:
        return _as_groups(_iota(iota.group(1), iota.group(2), iota.group(3)))
    mesh = _MESH.fullmatch(text)
    if mesh is None:
        raise HloParseError(f"unknown spelling of replica groups: {text[:200]!r}")
    sizes = {name.strip(): int(size) for name, size in _AXIS.findall(mesh.group(1))}
    return _as_groups(_mesh_groups(sizes, mesh.group(2), mesh.group(3)))


def _iota(dims: str, reshape: str, permutation: str | None) -> NDArray[np.int64]:
    source = _integers(reshape)
    ids = np.arange(math.prod(source), dtype=np.int64).reshape(source)
    if permutation is not None:
        ids = ids.transpose(_integers(permutation))
    return ids.reshape(_integers(dims))


def _mesh_groups(sizes: Mapping[str, int], device_ids: str | None, axes: str | None) -> NDArray[np.int64]:
    """Split the mesh axes into sub-axes, then move those that the groups span to the end."""
    ids = np.arange(math.prod(sizes.values()), dtype=np.int64)
    if device_ids:
        # `[16,8]<=[8,16]T(1,0)`, or `[8,16]T(1,0)` alone.
        iota = re.search(r"\[([\d,]+)\](?:T\(([\d,]+)\))?$", device_ids)
        if iota:
            ids = _iota(str(ids.size), iota.group(1), iota.group(2)).reshape(-1)
        else:
            ids = np.array(re.findall(r"\d+", device_ids), dtype=np.int64)
    names = list(sizes)
    wanted: list[tuple[str, int, int]] = []
    for name, before, size in _AXIS_REFERENCE.findall(axes or ""):
        wanted.append((name, int(before or 1), int(size or sizes[name])))
    if axes is None:
        wanted = [(name, 1, sizes[name]) for name in names]
    dims: list[int] = []
    position: dict[tuple[str, int], int] = {}
    for name in names:
        # Cut the axis at every boundary of a sub-axis that is used.
        cuts = sorted({1, sizes[name]} | {b for n, b, _ in wanted if n == name} | _ends(wanted, name))
        for low, high in zip(cuts, cuts[1:], strict=False):
            position[name, low] = len(dims)
            dims.append(high // low)
    spanned = [
        position[name, low]
        for name, before, size in wanted
        for low in sorted(low for n, low in position if n == name and before <= low < before * size)
    ]
    rest = [index for index in range(len(dims)) if index not in spanned]
    members = math.prod(dims[index] for index in spanned)
    return ids.reshape(dims).transpose(rest + spanned).reshape(-1, members)


def _ends(wanted: Sequence[tuple[str, int, int]], name: str) -> set[int]:
    return {before * size for n, before, size in wanted if n == name}


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _as_groups(ids: NDArray[np.int64]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(i) for i in group) for group in ids.reshape(-1, ids.shape[-1]))
