"""Reads the text of an optimised HLO module into computations and instructions.

This is the bottom of `autoshard.validate`: the compiler's answer arrives as text (`Compiled.as_text()`
or a dump file), and `loops`, `collectives` and `work` ask their questions of the `Module` made here.
It knows the grammar of HLO text and the sizes of its element types, and nothing about what an opcode means.

Both styles of operand are read, `add(%a, %b)` and `add(f32[8] %a, f32[8] %b)`, with or without `%`.
"""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

_BITS_BY_TYPE = {
    "pred": 8,
    "s1": 1,
    "u1": 1,
    "s2": 2,
    "u2": 2,
    "s4": 4,
    "u4": 4,
    "s8": 8,
    "u8": 8,
    "s16": 16,
    "u16": 16,
    "s32": 32,
    "u32": 32,
    "s64": 64,
    "u64": 64,
    "bf16": 16,
    "f16": 16,
    "f32": 32,
    "f64": 64,
    "c64": 64,
    "c128": 128,
    "f4e2m1fn": 4,
    "token": 0,
    "opaque": 0,
}

_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,<=]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)(?:\s+\(.*)?\s*\{\s*$")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_BRACKETS = re.compile(r'[()"]')
_COMMENT = re.compile(r"/\*.*?\*/")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_EXPORT_PREFIX = re.compile(r"^(?:jit\([^()]*\)/call_exported(?:/|$))?(?:jit\(autoshard_artifact\)/)?")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_FIELD = re.compile(r"(\w+)=(\d+)")
_OLD_SOURCE = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')


class HloParseError(ValueError):
    """A piece of text is not the HLO that this module can read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Array:
    """One array of a shape: its HLO element type and its dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes of the elements, packed and without tile padding."""
        return -(-self.size * element_bits(self.dtype) // 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """One line of a computation.

    `shape` is the text of the result's shape, `operands` the names of the operands, `arguments` the text
    between the opcode's parentheses, `attributes` everything that follows them.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    is_root: bool

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of the result in order; a nested tuple is flattened."""
        return parse_shape(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of all arrays of the result."""
        return sum(array.bytes for array in self.arrays)

    @property
    def op_name(self) -> str:
        """JAX's path of the operation, without the frames that an exported artifact puts around it."""
        match = _OP_NAME.search(self.attributes)
        return _EXPORT_PREFIX.sub("", match.group(1)) if match else ""

    def attribute(self, key: str) -> str | None:
        """Return the text of attribute `key` up to its closing bracket or comma, or None."""
        start = self.attributes.find(f" {key}=")
        if start < 0:
            return None
        return _balanced_value(self.attributes, start + len(key) + 2)

    def called(self, key: str) -> tuple[str, ...]:
        """Return the computations named by attribute `key`, `body` or `branch_computations` say."""
        text = self.attribute(key)
        if text is None:
            return ()
        return tuple(part.strip().lstrip("%") for part in text.strip("{}").split(",") if part.strip())

    def estimated_cycles(self) -> int | None:
        """Return the TPU compiler's own estimate for this instruction in clock cycles, or None."""
        match = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(match.group(1)) if match else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Computation:
    """A named sequence of instructions, in schedule order where the module is scheduled."""

    name: str
    instructions: Mapping[str, Instruction]
    is_entry: bool

    @property
    def root(self) -> Instruction:
        """The instruction whose value the computation returns."""
        instructions = tuple(self.instructions.values())
        for instruction in reversed(instructions):
            if instruction.is_root:
                return instruction
        raise HloParseError(f"computation %{self.name} of {len(instructions)} instructions has no ROOT")

    @property
    def parameters(self) -> Mapping[int, Instruction]:
        """The parameters by their number."""
        return {
            int(instruction.arguments): instruction
            for instruction in self.instructions.values()
            if instruction.opcode == "parameter"
        }


@dataclass(frozen=True, kw_only=True)
class Module:
    """A parsed HLO module.

    `sources` maps a `stack_frame_id` to `file:line` of its innermost frame.
    """

    name: str
    computations: Mapping[str, Computation]
    sources: Mapping[int, str]

    @property
    def entry(self) -> Computation:
        """The computation that runs first."""
        for computation in self.computations.values():
            if computation.is_entry:
                return computation
        raise HloParseError(f"HLO module {self.name!r} has no ENTRY computation")

    def source(self, instruction: Instruction) -> str:
        """Return `file:line` of an instruction, or the empty string when the module does not say."""
        frame = _FRAME.search(instruction.attributes)
        if frame:
            return self.sources.get(int(frame.group(1)), "")
        old = _OLD_SOURCE.search(instruction.attributes)
        return ":".join(part for part in old.groups() if part) if old else ""


def element_bits(dtype: str) -> int:
    """Return the bits of one element of an HLO type; 8-bit floats of any flavour are 8.

    Raises:
        HloParseError: the type is not known.

    """
    if dtype in _BITS_BY_TYPE:
        return _BITS_BY_TYPE[dtype]
    if dtype.startswith("f8"):
        return 8
    raise HloParseError(f"unknown HLO element type {dtype!r}; known: {', '.join(_BITS_BY_TYPE)}, f8*")


@functools.lru_cache(maxsize=65536)
def parse_shape(text: str) -> tuple[Array, ...]:
    """Return the arrays of a shape's text; layouts are ignored, a bounded dimension counts as its bound.

    Example:
        >>> parse_shape("(bf16[8,128]{1,0:T(8,128)(2,1)}, s4[3])")[0].bytes
        2048

    """
    return tuple(
        Array(dtype=dtype, dims=tuple(int(d.removeprefix("<=")) for d in dims.split(",") if d))
        for dtype, dims in _ARRAY.findall(_COMMENT.sub("", text))
    )


def parse_module(text: str) -> Module:
    """Parse the text of an HLO module.

    Args:
        text: what `jax.stages.Compiled.as_text()` returns, or the content of an XLA dump file.

    Returns:
        The module, with its computations in the order of the text.

    Raises:
        HloParseError: the text holds no computation, or a line of a computation cannot be read.

    """
    lines = text.splitlines()
    title = re.match(r"HloModule\s+([^\s,]+)", text)
    computations: dict[str, Computation] = {}
    preamble: list[str] = []
    current: dict[str, Instruction] | None = None
    name, is_entry = "", False
    for number, line in enumerate(lines, start=1):
        if current is None:
            header = _HEADER.match(line)
            if header and not line.startswith("HloModule"):
                is_entry, name, current = bool(header.group(1)), header.group(2), {}
            elif not computations:
                preamble.append(line)
        elif line.startswith("}"):
            computations[name] = Computation(name=name, instructions=current, is_entry=is_entry)
            current = None
        elif line.strip():
            instruction = _parse_instruction(line, number)
            current[instruction.name] = instruction
    if not computations:
        raise HloParseError(f"no HLO computation in a text of {len(lines)} lines that starts {text[:80]!r}")
    return Module(name=title.group(1) if title else "", computations=computations, sources=_sources(preamble))


def _parse_instruction(line: str, number: int) -> Instruction:
    left, separator, right = line.partition(" = ")
    if not separator:
        raise HloParseError(f"line {number} of the HLO text is no instruction: {line.strip()[:120]!r}")
    words = left.split()
    if right.startswith("("):
        end = _closing(right, 0)
    else:
        end = right.find(" ")
    shape = right[:end]
    opcode = _OPCODE.match(right, end)
    if end < 0 or opcode is None:
        raise HloParseError(f"line {number} of the HLO text has no opcode: {line.strip()[:120]!r}")
    close = _closing(right, opcode.end() - 1)
    arguments = right[opcode.end() : close - 1]
    return Instruction(
        name=words[-1].lstrip("%"),
        shape=shape,
        opcode=opcode.group(1),
        operands=() if opcode.group(1) in ("constant", "parameter", "iota") else _operands(arguments),
        arguments=arguments,
        attributes=right[close:],
        is_root=words[0] == "ROOT",
    )


def _operands(arguments: str) -> tuple[str, ...]:
    names = tuple(_NAME.findall(arguments))
    if names or not arguments.strip():
        return names
    return tuple(part.split()[-1] for part in arguments.split(",") if part.strip())


def _closing(text: str, start: int) -> int:
    """Return the index just behind the bracket that closes the one at `start`; quoted text is skipped."""
    depth, quoted = 0, False
    for match in _BRACKETS.finditer(text, start):
        character = match.group()
        if character == '"':
            quoted = not quoted
        elif not quoted:
            depth += 1 if character == "(" else -1
            if depth == 0:
                return match.end()
    raise HloParseError(f"unbalanced brackets in HLO text: {text[start : start + 120]!r}")


def _balanced_value(text: str, start: int) -> str:
    depth = 0
    for position in range(start, len(text)):
        character = text[position]
        if character in "{[(":
            depth += 1
        elif character in "}])":
            depth -= 1
        elif character == "," and depth == 0:
            # `mesh[...], device_ids=(...) {...}` is one value with a comma inside.
            if not text.startswith(", device_ids=", position):
                return text[start:position]
    return text[start:]


def _sources(preamble: list[str]) -> Mapping[int, str]:
    """Join the three tables at the top of a module text into frame id → `file:line`."""
    files: dict[int, str] = {}
    locations: dict[int, dict[str, int]] = {}
    frames: dict[int, dict[str, int]] = {}
    table = ""
    for line in preamble:
        key, _, rest = line.partition(" ")
        if not key.isdigit():
            table = line.strip()
        elif table == "FileNames":
            files[int(key)] = rest.strip('"')
        elif table == "FileLocations":
            locations[int(key)] = {k: int(v) for k, v in _FIELD.findall(rest)}
        elif table == "StackFrames":
            frames[int(key)] = {k: int(v) for k, v in _FIELD.findall(rest)}
    found: dict[int, str] = {}
    for frame, fields in frames.items():
        location = locations.get(fields.get("file_location_id", -1), {})
        file = files.get(location.get("file_name_id", -1))
        if file is not None:
            found[frame] = f"{file}:{location.get('line', 0)}"
    return found
