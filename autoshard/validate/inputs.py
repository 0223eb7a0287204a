"""Draws arguments for a program from their shapes alone, so that it runs to numbers worth comparing.

Integers that index are drawn within the smallest dim that they index; what goes under a root or a logarithm
is drawn non-negative, so that an optimizer's second moment makes no NaN. Both are read off the traced
program: an input is followed through ops that hand its values on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.program import Op, Program, Value

__all__ = ["Ranges", "draw", "ranges"]

_DEFAULT_BOUND = 4
_HAND_ON = frozenset(
    "convert_element_type reshape transpose squeeze expand_dims broadcast_in_dim slice rev copy pad"
    " concatenate select_n clamp add sub max min rem while scan cond optimization_barrier".split()
)
_SCALED = frozenset({"mul", "div"})
_ROOTS = frozenset({"sqrt", "rsqrt", "log"})


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """What values the flat inputs of a program may have: bounds of indices, and who must not be negative."""

    bounds: Mapping[int, int]
    non_negative: frozenset[int]


def ranges(program: Program) -> Ranges:
    """Read off a program which inputs index, within which bound, and which ones go under a root.

    Example:
      >>> import jax.numpy as jnp
      >>> from autoshard.trace import trace
      >>> shapes = [jax.ShapeDtypeStruct((50, 8), "float32"), jax.ShapeDtypeStruct((3,), "int32")]
      >>> dict(ranges(trace(lambda table, ids: table[ids], shapes).program).bounds)
      {1: 50}
    """
    walk = _Walk()
    walk.program(program, [frozenset({i}) for i in range(len(program.inputs))])
    return Ranges(bounds=walk.bounds, non_negative=frozenset(walk.non_negative))


class _Walk:
    def __init__(self) -> None:
        self.bounds: dict[int, int] = {}
        self.non_negative: set[int] = set()

    def program(self, program: Program, given: Sequence[frozenset[int]]) -> list[frozenset[int]]:
        """Follow inputs (each a set of inputs of the whole) through a body; return those of its outputs."""
        known: dict[Value, frozenset[int]] = dict(zip(program.inputs, given, strict=True))
        nothing: frozenset[int] = frozenset()

        def of(atom: Any) -> frozenset[int]:
            return known.get(atom, nothing) if isinstance(atom, Value) else nothing

        for op in program.ops:
            sets = [of(atom) for atom in op.inputs]
            if op.blocks:
                results = self._control(op, sets)
            else:
                self._note(op, sets)
                merged = frozenset().union(*sets) if self._hands_on(op, sets) else nothing
                results = [merged] * len(op.outputs)
                if op.name in ("gather", "dynamic_slice"):
                    results = [sets[0]]
            known.update(zip(op.outputs, results, strict=True))
        return [of(atom) for atom in program.outputs]

    def _hands_on(self, op: Op, sets: Sequence[frozenset[int]]) -> bool:
        return op.name in _HAND_ON or (op.name in _SCALED and sum(map(bool, sets)) == 1)

    def _control(self, op: Op, sets: list[frozenset[int]]) -> list[frozenset[int]]:
        if op.name == "scan":
            return self.program(op.blocks[0], sets)
        if op.name == "while":
            split, more = op.params["cond_nconsts"], op.params["body_nconsts"]
            self.program(op.blocks[0], [*sets[:split], *sets[split + more :]])
            return self.program(op.blocks[1], sets[split:])
        branches = [self.program(block, sets[1:]) for block in op.blocks]
        return [frozenset().union(*parts) for parts in zip(*branches, strict=True)]

    def _note(self, op: Op, sets: Sequence[frozenset[int]]) -> None:
        if op.name in _ROOTS:
            self.non_negative |= sets[0]
        for position, bound in _indexed(op):
            for i in sets[position]:
                self.bounds[i] = min(self.bounds.get(i, bound), bound)


def _indexed(op: Op) -> list[tuple[int, int]]:
    """List (operand that indexes, bound of its values)."""
    avals: list[Any] = [atom.aval for atom in op.inputs]
    shape = avals[0].shape if avals else ()
    if op.name == "gather":
        dims = op.params["dimension_numbers"].start_index_map
        sizes = op.params["slice_sizes"]
        return [(1, min([shape[d] - sizes[d] + 1 for d in dims], default=1))]
    if op.name.startswith("scatter"):
        numbers = op.params["dimension_numbers"]
        single = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        dims = numbers.scatter_dims_to_operand_dims
        return [(1, min([shape[d] if d in single else 1 for d in dims], default=1))]
    if op.name == "dynamic_slice":
        sizes = op.params["slice_sizes"]
        return [(1 + d, shape[d] - sizes[d] + 1) for d in range(len(shape))]
    if op.name == "dynamic_update_slice":
        update = avals[1].shape
        return [(2 + d, shape[d] - update[d] + 1) for d in range(len(shape))]
    return []


def draw(
    program: Program,
    avals: Sequence[Any],
    names: Sequence[str],
    *,
    bounds: int | Mapping[str, int] | None = None,
    seed: int = 0,
) -> list[Any]:
    """Draw one array for each flat input.

    Args:
      program: the traced program.
      avals: shape and dtype of each input.
      names: pytree path of each input.
      bounds: of integers, by path or for all; None, or a path that is not named, means what the program
        indexes with the input, and 4 where it does not.
      seed: of the generator; an input's values depend on its position only.

    Returns:
      NumPy arrays; JAX keys for random keys.
    """
    found = ranges(program)
    arrays: list[Any] = []
    for i, (aval, name) in enumerate(zip(avals, names, strict=True)):
        generator = np.random.default_rng([seed, i])
        given = bounds.get(name) if isinstance(bounds, Mapping) else bounds
        bound = found.bounds.get(i, _DEFAULT_BOUND) if given is None else given
        arrays.append(_array(generator, aval, bound, i in found.non_negative))
    return arrays


def _array(generator: np.random.Generator, aval: Any, bound: int, non_negative: bool) -> Any:
    shape, dtype = tuple(aval.shape), aval.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        keys = jax.random.split(jax.random.key(int(generator.integers(2**31))), int(np.prod(shape)))
        return keys.reshape(shape)
    if jnp.issubdtype(dtype, np.bool_):
        return generator.integers(0, 2, shape).astype(bool)
    if jnp.issubdtype(dtype, np.integer):
        return generator.integers(0, max(1, bound), shape).astype(dtype)
    # Of the order of one in and out of a product, so that no term drowns in the rounding of another.
    scale = shape[-2] ** -0.5 if len(shape) > 1 and shape[-2] else 1.0
    values = generator.standard_normal(shape) * scale
    if jnp.issubdtype(dtype, np.complexfloating):
        values = values + 1j * generator.standard_normal(shape) * scale
    return np.asarray(np.abs(values) if non_negative else values).astype(dtype)
