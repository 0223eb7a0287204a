"""Recognises reduce-scatters that a compiler leaves as an all-reduce and slices of its result.

XLA's partitioner writes every reduce-scatter so; the TPU and GPU compilers then make one op of the two, the CPU
compiler does not. `sliced_bytes` finds them, so that traffic can be counted alike for all compilers: an
all-reduce is a reduce-scatter where each device reads its own part of the result and nothing else.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.validate.hlo import Array, Computation, Instruction, Module
from autoshard.validate.loops import is_invariant

# Ops that hand all elements on, in another form.
_FORMS = frozenset({"bitcast", "copy", "reshape", "transpose", "convert", "optimization-barrier"})
# Ops whose operands are the parameters of a computation that they name, by the attribute that names it.
_CALLS = {"fusion": "calls", "call": "to_apply"}


@dataclass(frozen=True, kw_only=True)
class _Scope:
    """A computation, and where it was entered from; `caller` is None in the one that holds the all-reduce."""

    computation: Computation
    caller: "tuple[_Scope, Instruction] | None" = None

    def users(self, name: str) -> Iterator[tuple[Instruction, int]]:
        """Yield who reads an instruction, and as which operand."""
        for instruction in self.computation.instructions.values():
            for place, operand in enumerate(instruction.operands):
                if operand == name:
                    yield instruction, place


def sliced_bytes(module: Module, computation: Computation, reduction: Instruction, group_size: int) -> int:
    """Return the bytes of an all-reduce's result of which each device reads only its own part.

    Args:
        module: the parsed module.
        computation: where the all-reduce is written.
        reduction: the all-reduce; with several operands each is judged by itself.
        group_size: devices that reduce together: a device's own part is one of so many.

    """
    scope = _Scope(computation=computation)
    if not reduction.shape.startswith("("):
        (array,) = reduction.arrays
        return array.bytes if _only_sliced(module, scope, reduction.name, array, group_size) else 0
    total = 0
    for index, array in enumerate(reduction.arrays):
        elements = [
            user.name
            for user, _ in scope.users(reduction.name)
            if user.opcode == "get-tuple-element" and int(user.attribute("index") or 0) == index
        ]
        if elements and all(_only_sliced(module, scope, name, array, group_size) for name in elements):
            total += array.bytes
    return total


def _only_sliced(module: Module, scope: _Scope, name: str, array: Array, ways: int) -> bool:
    """Tell whether all readers of a value take the device's own part of it."""
    users = list(scope.users(name))
    if scope.computation.instructions[name].is_root:
        return False
    return bool(users) and all(_slices(module, scope, user, place, array, ways) for user, place in users)


def _slices(module: Module, scope: _Scope, user: Instruction, place: int, array: Array, ways: int) -> bool:
    if user.opcode in _FORMS:
        return _only_sliced(module, scope, user.name, array, ways)
    if user.opcode == "dynamic-slice":
        part = user.arrays[0].size * ways == array.size
        return place == 0 and part and any(_own(module, scope, index) for index in user.operands[1:])
    if user.opcode in _CALLS:
        (callee,) = user.called(_CALLS[user.opcode])
        inner = _Scope(computation=module.computations[callee], caller=(scope, user))
        parameter = inner.computation.parameters[place]
        return _only_sliced(module, inner, parameter.name, array, ways)
    return False


def _own(module: Module, scope: _Scope, name: str) -> bool:
    """Tell whether a value follows from the number of the device."""
    instruction = scope.computation.instructions[name]
    if instruction.opcode in ("partition-id", "replica-id"):
        return True
    if instruction.opcode == "get-tuple-element":
        return _own_element(module, scope, instruction.operands[0], int(instruction.attribute("index") or 0))
    if instruction.opcode == "parameter":
        if scope.caller is None:
            return False
        outer, call = scope.caller
        return _own(module, outer, call.operands[int(instruction.arguments)])
    if instruction.opcode in _CALLS:
        (callee,) = instruction.called(_CALLS[instruction.opcode])
        inner = _Scope(computation=module.computations[callee], caller=(scope, instruction))
        return _own(module, inner, inner.computation.root.name)
    return any(_own(module, scope, operand) for operand in instruction.operands)


def _own_element(module: Module, scope: _Scope, name: str, index: int) -> bool:
    """Tell the same of an element of a tuple; compilers move the arithmetic of slices out of loops."""
    instruction = scope.computation.instructions[name]
    if instruction.opcode == "tuple":
        return _own(module, scope, instruction.operands[index])
    if instruction.opcode == "parameter" and scope.caller is None:
        for outer in module.computations.values():
            for loop in outer.instructions.values():
                if loop.opcode == "while" and scope.computation.name in loop.called("body"):
                    return is_invariant(scope.computation, index) and _own_element(
                        module, _Scope(computation=outer), loop.operands[0], index
                    )
    return False
