"""Counts the matrix flops, memory traffic and estimated cycles of every instruction that a module runs.

The flops are those of `dot` and `convolution`, also inside fusions: on a TPU everything else is small beside
them. A TPU module writes a batched product as a convolution with dilated windows, so only the taps that
meet an element are counted, as XLA's own analysis does. Cycles are the compiler's `estimated_cycles`.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from autoshard.validate.collectives import KINDS
from autoshard.validate.hlo import Array, Computation, Instruction, Module
from autoshard.validate.loops import Schedule

_NO_WORK = frozenset(
    {
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "while",
        "call",
        "conditional",
        "after-all",
        "partition-id",
        "replica-id",
        "opt-barrier",
        "copy-done",
        "async-start",
        "async-update",
        "async-done",
        "add-dependency",
        "domain",
    }
)
_WINDOW_FIELD = re.compile(r"(\w+)=([\w\-]+)")


@dataclass(frozen=True, kw_only=True)
class InstructionWork:
    """What one instruction does in one execution.

    Attributes:
        name: the instruction's name.
        opcode: its opcode.
        trips: executions per step.
        cycles: the compiler's estimate in clock cycles for one execution; None where it gives none.
        flops: floating-point operations of the matrix products in one execution.
        bytes: packed bytes read and written in one execution, counting only the slice of an operand where the
            instruction reads a slice.
        op_name: JAX's path of the operation.
        source: `file:line`, or empty.

    """

    name: str
    opcode: str
    trips: int
    cycles: int | None
    flops: int
    bytes: int
    op_name: str
    source: str


def measure(module: Module, schedule: Schedule) -> tuple[InstructionWork, ...]:
    """Return the work of each instruction that runs, without collectives and without bookkeeping.

    Args:
        module: the parsed module.
        schedule: its executions.

    Returns:
        One entry for each instruction that moves or computes data.

    """
    found: list[InstructionWork] = []
    for execution in schedule.executions:
        instruction, computation = execution.instruction, execution.computation
        if instruction.opcode in _NO_WORK or _base(instruction.opcode) in KINDS:
            continue
        if instruction.attribute("custom_call_target") == '"AllocateBuffer"':
            continue
        if instruction.opcode == "fusion" and _holds_collective(module, instruction):
            continue
        found.append(
            InstructionWork(
                name=instruction.name,
                opcode=instruction.opcode,
                trips=execution.trips,
                cycles=instruction.estimated_cycles(),
                flops=_flops(module, computation, instruction),
                bytes=_traffic(module, computation, instruction),
                op_name=instruction.op_name,
                source=module.source(instruction),
            )
        )
    return tuple(found)


def _base(opcode: str) -> str:
    return opcode.removesuffix("-start").removesuffix("-done")


def _holds_collective(module: Module, fusion: Instruction) -> bool:
    """Whether a fusion is nothing but a collective; a product with a collective beside it is work."""
    inner = [i for _, i in _fused(module, fusion)]
    has_product = any(i.opcode in ("dot", "convolution") for i in inner)
    return not has_product and any(_base(i.opcode) in KINDS for i in inner)


def _fused(module: Module, fusion: Instruction) -> Iterator[tuple[Computation, Instruction]]:
    for name in fusion.called("calls"):
        computation = module.computations[name]
        for instruction in computation.instructions.values():
            yield computation, instruction
            if instruction.opcode == "fusion":
                yield from _fused(module, instruction)


def _flops(module: Module, computation: Computation, instruction: Instruction) -> int:
    if instruction.opcode == "fusion":
        return sum(_product_flops(where, inner) for where, inner in _fused(module, instruction))
    return _product_flops(computation, instruction)


def _product_flops(computation: Computation, instruction: Instruction) -> int:
    if instruction.opcode not in ("dot", "convolution"):
        return 0
    left, right = (computation.instructions[name].arrays[0] for name in instruction.operands[:2])
    result = instruction.arrays[0]
    if instruction.opcode == "dot":
        contracted = instruction.attribute("lhs_contracting_dims") or "{}"
        dims = [int(dim) for dim in contracted.strip("{}").split(",") if dim]
        return 2 * result.size * math.prod(left.dims[dim] for dim in dims)
    return _convolution_flops(instruction, left, right, result)


def _convolution_flops(instruction: Instruction, left: Array, right: Array, result: Array) -> int:
    labels = (instruction.attribute("dim_labels") or "bf_io->bf").replace("->", "_").split("_")
    input_labels, kernel_labels, output_labels = labels
    window = dict(_WINDOW_FIELD.findall(instruction.attribute("window") or ""))
    flops = 2 * result.dims[output_labels.index("b")] * result.dims[output_labels.index("f")]
    flops *= right.dims[kernel_labels.index("i")]
    for axis in range(len(input_labels) - 2):
        flops *= _taps(
            left.dims[input_labels.index(str(axis))],
            result.dims[output_labels.index(str(axis))],
            right.dims[kernel_labels.index(str(axis))],
            stride=_window(window, "stride", axis, 1),
            padding=_window(window, "pad", axis, 0),
            input_dilation=_window(window, "lhs_dilate", axis, 1),
            kernel_dilation=_window(window, "rhs_dilate", axis, 1),
        )
    return flops


def _window(window: Mapping[str, str], key: str, axis: int, default: int) -> int:
    """Return a window's number for a spatial axis; of a padding `low_high` the low one."""
    if key not in window:
        return default
    return int(window[key].split("x")[axis].split("_")[0])


@functools.lru_cache(maxsize=4096)
def _taps(
    inputs: int,
    outputs: int,
    kernel: int,
    *,
    stride: int,
    padding: int,
    input_dilation: int,
    kernel_dilation: int,
) -> int:
    """Return how many (output, kernel) positions along one axis meet an element of the input."""
    total = 0
    starts = np.arange(outputs, dtype=np.int64) * stride - padding
    for tap in range(kernel):
        at = starts + tap * kernel_dilation
        total += int(
            np.count_nonzero(
                (at >= 0) & (at < (inputs - 1) * input_dilation + 1) & (at % input_dilation == 0)
            )
        )
    return total


def _traffic(module: Module, computation: Computation, instruction: Instruction) -> int:
    if instruction.opcode == "dynamic-update-slice":
        return 2 * computation.instructions[instruction.operands[1]].bytes
    if instruction.opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * instruction.bytes
    if instruction.opcode == "scatter":
        indices, updates = (computation.instructions[name].bytes for name in instruction.operands[1:3])
        return indices + 3 * updates
    operands = [computation.instructions[name] for name in instruction.operands]
    if instruction.opcode == "copy-start":
        return 2 * operands[0].bytes
    if instruction.opcode != "fusion":
        return sum(operand.bytes for operand in operands) + instruction.bytes
    fused = module.computations[instruction.called("calls")[0]]
    read = sum(
        min(operands[number].bytes, _read_bytes(module, fused, parameter))
        for number, parameter in fused.parameters.items()
    )
    return read + _written_bytes(fused, instruction)


_IN_PLACE = frozenset({"dynamic-update-slice", "scatter"})
_RENAMES = frozenset({"bitcast", "reshape", "copy", "transpose"})


def _read_bytes(module: Module, fused: Computation, value: Instruction) -> int:
    """Bytes of a value that a fusion reads: the slices, where nothing else uses it, also in fusions inside."""
    if value.name == fused.root.name:
        return value.bytes
    total = 0
    for user in fused.instructions.values():
        for place, name in enumerate(user.operands):
            if name != value.name:
                continue
            if user.opcode in ("dynamic-slice", "slice", "gather") and place == 0:
                total += user.bytes
            elif user.opcode == "fusion":
                inner = module.computations[user.called("calls")[0]]
                total += _read_bytes(module, inner, inner.parameters[place])
            elif user.opcode in _RENAMES:
                total += _read_bytes(module, fused, user)
            elif user.opcode not in _IN_PLACE or place != 0:
                return value.bytes
    return total


def _written_bytes(fused: Computation, instruction: Instruction) -> int:
    root = fused.root
    while root.opcode in ("bitcast", "copy", "reshape") and root.operands:
        root = fused.instructions[root.operands[0]]
    if root.opcode == "dynamic-update-slice":
        return fused.instructions[root.operands[1]].bytes
    if root.opcode == "scatter":  # reads and writes the rows that it changes
        return 2 * fused.instructions[root.operands[2]].bytes
    return instruction.bytes
