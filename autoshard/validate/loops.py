"""Finds how often each instruction of an HLO module runs: the trip counts of its loops.

Optimised TPU modules do not state a loop's trip count, so it is solved here: the few scalars on which a
loop's condition depends are followed from their initial values through the body. Counters that grow by a
constant are solved by bisection, anything else that consists of integer arithmetic is stepped through.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from autoshard.validate.hlo import Computation, Instruction, Module

_STEP_LIMIT = 100_000
_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_PASS_THROUGH = frozenset(
    {
        "copy",
        "bitcast",
        "reshape",
        "convert",
        "broadcast",
        "copy-start",
        "copy-done",
        "opt-barrier",
        "transpose",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """An instruction as it runs in a step.

    `trips` is the product of the trip counts around it. `computation` is where it is written.
    """

    instruction: Instruction
    computation: Computation
    trips: int


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Everything that a module runs in one step, and the loops whose trip count could not be solved.

    A loop in `unknown_loops` is taken to run once. Each branch of a conditional is taken to run once.
    """

    executions: tuple[Execution, ...]
    trip_counts: Mapping[str, int]
    unknown_loops: tuple[str, ...]


class _Frame(Protocol):
    """What the parameters of a computation are worth where it is called."""

    def scalar(self, parameter: int) -> int | None: ...
    def element(self, parameter: int, index: int) -> int | None: ...


class _Unknown:
    def scalar(self, parameter: int) -> int | None:
        return None

    def element(self, parameter: int, index: int) -> int | None:
        return None


@dataclass(frozen=True, kw_only=True)
class _Call:
    """Parameters are operands of a call or fusion."""

    module: Module
    caller: Computation
    operands: tuple[str, ...]
    frame: _Frame

    def scalar(self, parameter: int) -> int | None:
        return _scalar(self.module, self.caller, self.operands[parameter], self.frame)

    def element(self, parameter: int, index: int) -> int | None:
        return _element(self.module, self.caller, self.operands[parameter], index, self.frame)


@dataclass(frozen=True, kw_only=True)
class _Carry:
    """The one parameter is a loop's carried tuple, whose elements `read` knows."""

    read: Callable[[int], int | None]

    def scalar(self, parameter: int) -> int | None:
        return self.read(-1)

    def element(self, parameter: int, index: int) -> int | None:
        return self.read(index)


def schedule(module: Module) -> Schedule:
    """Return every instruction that the module executes, with its number of executions per step.

    The instructions inside fusions are not listed: a fusion runs as one instruction.

    Args:
        module: a parsed module.

    Returns:
        The executions in the order of the text, callees after their caller's instruction.

    """
    trip_counts: dict[str, int] = {}
    unknown: list[str] = []
    executions = tuple(_walk(module, module.entry, 1, _Unknown(), trip_counts, unknown))
    return Schedule(executions=executions, trip_counts=trip_counts, unknown_loops=tuple(unknown))


def _walk(
    module: Module,
    computation: Computation,
    trips: int,
    frame: _Frame,
    trip_counts: dict[str, int],
    unknown: list[str],
) -> Iterator[Execution]:
    for instruction in computation.instructions.values():
        yield Execution(instruction=instruction, computation=computation, trips=trips)
        if instruction.opcode == "while":
            count = _trip_count(module, computation, instruction, frame)
            if count is None:
                unknown.append(instruction.name)
            else:
                trip_counts[instruction.name] = count
            inner = _invariants(module, computation, instruction, frame)
            inside = trips * (1 if count is None else count)
            for name in instruction.called("body"):
                yield from _walk(module, module.computations[name], inside, inner, trip_counts, unknown)
            continue
        for name in _callees(instruction):
            call = _Call(module=module, caller=computation, operands=instruction.operands, frame=frame)
            callee = call if instruction.opcode == "call" else _Unknown()
            yield from _walk(module, module.computations[name], trips, callee, trip_counts, unknown)


def _callees(instruction: Instruction) -> tuple[str, ...]:
    if instruction.opcode == "call":
        return instruction.called("to_apply")
    if instruction.opcode == "async-start":
        return instruction.called("calls")
    if instruction.opcode == "conditional":
        branches = instruction.called("branch_computations")
        return branches or instruction.called("true_computation") + instruction.called("false_computation")
    return ()


def _trip_count(module: Module, computation: Computation, loop: Instruction, frame: _Frame) -> int | None:
    stated = _KNOWN.search(loop.attributes)
    if stated:
        return int(stated.group(1))
    condition = module.computations[loop.called("condition")[0]]
    body = module.computations[loop.called("body")[0]]
    state: dict[int, int | None] = {}

    def initial(index: int) -> int | None:
        if index not in state:
            if index < 0:
                state[index] = _scalar(module, computation, loop.operands[0], frame)
            else:
                state[index] = _element(module, computation, loop.operands[0], index, frame)
        return state[index]

    def proceeds(values: Mapping[int, int | None]) -> int | None:
        return _scalar(module, condition, condition.root.name, _Carry(read=values.get))

    def advance(values: Mapping[int, int | None]) -> dict[int, int | None]:
        return {index: _updated(module, body, index, _Carry(read=values.get)) for index in values}

    # Evaluating once with a recording reader finds the scalars that matter; repeat until no new one appears.
    first = _Carry(read=initial)
    try:
        _scalar(module, condition, condition.root.name, first)
        known = -1
        while known != len(state):
            known = len(state)
            for index in tuple(state):
                _updated(module, body, index, first)
        return _solve(state, proceeds, advance)
    except (RecursionError, ZeroDivisionError):
        return None


def _solve(
    start: Mapping[int, int | None],
    proceeds: Callable[[Mapping[int, int | None]], int | None],
    advance: Callable[[Mapping[int, int | None]], dict[int, int | None]],
) -> int | None:
    """Return the number of times that `advance` runs until `proceeds` is false."""
    begun = proceeds(start)
    if begun is None:
        return None
    if not begun:
        return 0
    second = advance(start)
    steps: dict[int, int] = {}
    for index, value in start.items():
        after = second[index]
        if value is not None and after is not None:
            steps[index] = after - value

    def at(trip: int) -> dict[int, int | None]:
        return {i: None if v is None or i not in steps else v + trip * steps[i] for i, v in start.items()}

    # Affine counters: the first trip at which the condition fails, by doubling and bisection.
    high = 1
    while high < 2**48 and proceeds(at(high)):
        high *= 2
    if high < 2**48 and proceeds(at(high)) is not None:
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if proceeds(at(middle)) else (low, middle)
        probes = {1, high // 2, high - 1} - {0}
        if all(advance(at(probe)) == at(probe + 1) for probe in probes):
            return high
    values: Mapping[int, int | None] = start
    for trip in range(_STEP_LIMIT):
        decision = proceeds(values)
        if decision is None:
            return None
        if not decision:
            return trip
        values = advance(values)
    return None


def _updated(module: Module, body: Computation, index: int, frame: _Frame) -> int | None:
    if index < 0:
        return _scalar(module, body, body.root.name, frame)
    return _element(module, body, body.root.name, index, frame)


def _invariants(module: Module, computation: Computation, loop: Instruction, frame: _Frame) -> _Frame:
    """Return the frame of a loop's body in any iteration: only what the loop never changes is known."""
    body = module.computations[loop.called("body")[0]]

    def read(index: int) -> int | None:
        if index < 0 or not is_invariant(body, index):
            return None
        return _element(module, computation, loop.operands[0], index, frame)

    return _Carry(read=read)


def is_invariant(body: Computation, index: int) -> bool:
    """Tell whether a loop hands an element of its tuple on unchanged."""
    if body.root.opcode != "tuple":
        return False
    source = body.instructions.get(body.root.operands[index])
    while source is not None and source.opcode in ("copy", "bitcast"):
        source = body.instructions.get(source.operands[0])
    return (
        source is not None
        and source.opcode == "get-tuple-element"
        and _tuple_index(source) == index
        and body.instructions[source.operands[0]].opcode == "parameter"
    )


def _tuple_index(instruction: Instruction) -> int:
    return int(instruction.attribute("index") or 0)


def _element(module: Module, computation: Computation, name: str, index: int, frame: _Frame) -> int | None:
    """Evaluate one element of a tuple-valued instruction."""
    instruction = computation.instructions[name]
    if instruction.opcode == "tuple":
        return _scalar(module, computation, instruction.operands[index], frame)
    if instruction.opcode == "parameter":
        return frame.element(int(instruction.arguments), index)
    if instruction.opcode in ("copy", "opt-barrier"):
        return _element(module, computation, instruction.operands[0], index, frame)
    if instruction.opcode in ("fusion", "call"):
        callee, inner = _enter(module, computation, instruction, frame)
        return _element(module, callee, callee.root.name, index, inner)
    if instruction.opcode == "while":
        body = module.computations[instruction.called("body")[0]]
        if is_invariant(body, index):
            return _element(module, computation, instruction.operands[0], index, frame)
    return None


def _enter(
    module: Module, computation: Computation, instruction: Instruction, frame: _Frame
) -> tuple[Computation, _Frame]:
    key = "calls" if instruction.opcode == "fusion" else "to_apply"
    callee = module.computations[instruction.called(key)[0]]
    return callee, _Call(module=module, caller=computation, operands=instruction.operands, frame=frame)


def _scalar(module: Module, computation: Computation, name: str, frame: _Frame) -> int | None:
    """Evaluate an instruction that yields one integer or truth value; None when it cannot be known."""
    instruction = computation.instructions[name]
    opcode = instruction.opcode
    if opcode == "constant":
        return _literal(instruction.arguments)
    if opcode == "parameter":
        return frame.scalar(int(instruction.arguments))
    if opcode == "get-tuple-element":
        return _element(module, computation, instruction.operands[0], _tuple_index(instruction), frame)
    if opcode in ("fusion", "call"):
        callee, inner = _enter(module, computation, instruction, frame)
        return _scalar(module, callee, callee.root.name, inner)
    if opcode in _PASS_THROUGH:
        return _scalar(module, computation, instruction.operands[0], frame)
    if opcode not in _ARITHMETIC and opcode != "compare":
        return None
    values = [_scalar(module, computation, operand, frame) for operand in instruction.operands]
    known = [value for value in values if value is not None]
    if len(known) != len(values):
        return None
    if opcode == "compare":
        return int(_COMPARISONS[instruction.attribute("direction") or "EQ"](known[0], known[1]))
    return _ARITHMETIC[opcode](known)


def _literal(text: str) -> int | None:
    text = text.strip().strip("{} ")
    if text in ("true", "false"):
        return int(text == "true")
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _truncated_division(dividend: int, divisor: int) -> int:
    quotient = abs(dividend) // abs(divisor)
    return quotient if (dividend < 0) == (divisor < 0) else -quotient


_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
}

_ARITHMETIC: Mapping[str, Callable[[list[int]], int]] = {
    "add": lambda v: v[0] + v[1],
    "subtract": lambda v: v[0] - v[1],
    "multiply": lambda v: v[0] * v[1],
    "divide": lambda v: _truncated_division(v[0], v[1]),
    "remainder": lambda v: v[0] - v[1] * _truncated_division(v[0], v[1]),
    "maximum": max,
    "minimum": min,
    "negate": lambda v: -v[0],
    "abs": lambda v: abs(v[0]),
    "and": lambda v: v[0] & v[1],
    "or": lambda v: v[0] | v[1],
    "xor": lambda v: v[0] ^ v[1],
    # Only truth values are negated in a loop condition.
    "not": lambda v: int(not v[0]),
    "select": lambda v: v[1] if v[0] else v[2],
    "clamp": lambda v: max(v[0], min(v[1], v[2])),
}
