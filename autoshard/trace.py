"""First stage: a JAX function and argument shapes become a `Program`.

Calls (`jit`, `custom_jvp_call`, `custom_vjp_call`, `remat2`, ...) are inlined, identities dropped and dead
ops removed, also inside loops. A differentiated `remat2` keeps the optimization barrier that JAX lowers it with,
so that whatever is made from the Program recomputes what the user asked to recompute. Nothing is executed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxprs_in_params
from jax.extend.core import primitives as jax_primitives
from jax.sharding import PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from autoshard.calls import body_of
from autoshard.errors import TraceError
from autoshard.folding import fold_transposes
from autoshard.layout import Axes, from_spec
from autoshard.program import Atom, Op, Program, Value, aval_of, shape_of
from autoshard.references import gathered
from autoshard.shifts import fold_slices

__all__ = ["IDENTITIES", "Traced", "trace"]

# Ops that return their operand: they matter to differentiation or naming only.
IDENTITIES = frozenset({"copy", "name", "pvary", "stage", "stop_gradient"})
# Arithmetic that is folded when all of it is literal.
_SCALAR_OPS = frozenset({"add", "convert_element_type", "div", "integer_pow", "mul", "neg", "sqrt", "sub"})
_BARRIER = jax.make_jaxpr(jax.lax.optimization_barrier)(0.0).eqns[0]


@dataclass(frozen=True, eq=False, kw_only=True)
class Traced:
    """A Program with the pytree structure of the function it came from."""

    program: Program
    in_tree: Any
    out_tree: Any
    in_names: tuple[str, ...]
    out_names: tuple[str, ...]
    in_avals: tuple[Any, ...]
    out_avals: tuple[Any, ...]
    arg_of_input: tuple[int, ...]


def trace(fn: Callable[..., Any], args: Sequence[Any]) -> Traced:
    """Trace `fn` abstractly at the shapes of `args`.

    Args:
      fn: a function of positional pytree arguments.
      args: pytrees of arrays or `jax.ShapeDtypeStruct`.

    Raises:
      TraceError: `args` hold a leaf that is no array, or `fn` fails while it is traced.

    """
    flat, in_tree = tree_flatten_with_path(tuple(args))
    in_names = tuple(keystr(path) for path, _ in flat)
    shapes = []
    offenders = []
    for name, (_, leaf) in zip(in_names, flat, strict=True):
        try:
            shapes.append(jax.ShapeDtypeStruct(*_shape_dtype(leaf)))
        except (TypeError, AttributeError):
            offenders.append(f"args{name} is a {type(leaf).__name__}: {leaf!r}"[:160])
    if offenders:
        raise TraceError(
            "Every leaf of the arguments must be an array or a jax.ShapeDtypeStruct.\n  "
            + "\n  ".join(offenders)
            + "\nClose over static values (functools.partial, a lambda) instead of passing them."
        )
    try:
        closed, out_shape = jax.make_jaxpr(fn, return_shape=True)(*jax.tree.unflatten(in_tree, shapes))
    except Exception as error:
        raise TraceError(
            f"{_fn_name(fn)} failed while it was traced with {len(shapes)} array argument(s)"
            f" {_describe(in_names, shapes)}:\n{type(error).__name__}: {str(error).strip()[:1500]}\n"
            "Check that jax.eval_shape(fn, *args) works with the same arguments: the argument structure and"
            " every shape must be what fn expects, and fn must be traceable by jax.jit."
        ) from error
    out_flat, out_tree = tree_flatten_with_path(out_shape)
    out_names = tuple(keystr(path) for path, _ in out_flat)
    program = _close(closed, in_names, out_names)
    arg_of_input = tuple(
        index for index, arg in enumerate(args) for _ in range(len(jax.tree_util.tree_leaves(arg)))
    )
    return Traced(
        program=remove_dead_ops(fold_transposes(fold_slices(program))),
        in_tree=in_tree,
        out_tree=out_tree,
        in_names=in_names,
        out_names=out_names,
        in_avals=tuple(closed.in_avals),
        out_avals=tuple(closed.out_avals),
        arg_of_input=arg_of_input,
    )


def _shape_dtype(leaf: Any) -> tuple[tuple[int, ...], Any]:
    if isinstance(leaf, (bool, int, float, complex)):
        aval = jax.typeof(leaf)
        return tuple(aval.shape), aval.dtype
    return tuple(leaf.shape), leaf.dtype


def _fn_name(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__name__", None) or type(fn).__name__)


def _describe(names: Sequence[str], shapes: Sequence[jax.ShapeDtypeStruct]) -> str:
    shown = [f"{name}: {s.dtype}{list(s.shape)}" for name, s in zip(names, shapes, strict=True)]
    more = f", ... {len(shown) - 6} more" if len(shown) > 6 else ""
    return "(" + ", ".join(shown[:6]) + more + ")"


def _close(
    closed: ClosedJaxpr,
    in_names: Sequence[str],
    out_names: Sequence[str],
    stack: str = "",
    manual: frozenset[str] = frozenset(),
) -> Program:
    builder = _Builder(stack, manual)
    env: dict[Any, Atom] = {}
    inputs = []
    for var, name in zip(closed.jaxpr.invars, in_names, strict=True):
        env[var] = value = Value(aval=var.aval, name=name, manual=manual)
        inputs.append(value)
    for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        env[var] = builder.const(var.aval, const)
    builder.inline(closed.jaxpr, env)
    return Program(
        inputs=tuple(inputs),
        consts=tuple(builder.consts),
        ops=tuple(builder.ops),
        outputs=tuple(_read(env, atom) for atom in closed.jaxpr.outvars),
        output_names=tuple(out_names),
    )


def _read(env: Mapping[Any, Atom], atom: Any) -> Atom:
    return atom if isinstance(atom, Literal) else env[atom]


class _Builder:
    """Collects the ops of one body while the calls in it are inlined.

    `stack` are the names of the transformations and calls that the body stands in, `manual` the axes of the
    `shard_map`s.
    """

    def __init__(self, stack: str, manual: frozenset[str]) -> None:
        self.stack, self.manual = stack, manual
        self.ops: list[Op] = []
        self.consts: list[tuple[Value, Any]] = []
        self._const_ids: dict[int, Value] = {}

    def const(self, aval: Any, array: Any) -> Value:
        if id(array) not in self._const_ids:
            value = Value(aval=aval, name=f"constant {len(self.consts)}", manual=self.manual)
            self._const_ids[id(array)] = value
            self.consts.append((value, array))
        return self._const_ids[id(array)]

    def inline(self, jaxpr: Any, env: dict[Any, Atom]) -> None:
        for eqn in gathered(jaxpr):
            operands = tuple(_read(env, atom) for atom in eqn.invars)
            if eqn.primitive.name in IDENTITIES or _stays_put(eqn):
                if eqn.primitive.name == "name" and isinstance(operands[0], Value):
                    operands[0].labels.append(eqn.params["name"])
                for var, operand in zip(eqn.outvars, operands, strict=True):
                    env[var] = operand
                continue
            body = body_of(eqn)
            if body is None:
                self._append(eqn, operands, env)
            else:
                self._inline_call(eqn, body, operands, env)

    def _inline_call(self, eqn: Any, body: Any, operands: tuple[Atom, ...], env: dict[Any, Atom]) -> None:
        inner: dict[Any, Atom] = {}
        if isinstance(body, ClosedJaxpr):
            for var, const in zip(body.jaxpr.constvars, body.consts, strict=True):
                inner[var] = self.const(var.aval, const)
            body = body.jaxpr
        if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
            operands = self._barrier(operands, eqn.source_info)
        inner.update(zip(body.invars, operands, strict=True))
        outside, self.stack = self.stack, self._stack(eqn)
        self.inline(body, inner)
        self.stack = outside
        for var, atom in zip(eqn.outvars, body.outvars, strict=True):
            env[var] = _read(inner, atom)

    def _stack(self, eqn: Any) -> str:
        return f"{self.stack}/{eqn.source_info.name_stack}"

    def _barrier(self, operands: tuple[Atom, ...], source_info: Any) -> tuple[Atom, ...]:
        held = [a for a in dict.fromkeys(operands) if isinstance(a, Value)]
        outputs = {a: Value(aval=a.aval, manual=self.manual) for a in held}
        self.ops.append(
            Op(
                primitive=_BARRIER.primitive,
                params={},
                inputs=tuple(held),
                outputs=tuple(outputs.values()),
                source_info=source_info,
            )
        )
        return tuple(outputs.get(a, a) if isinstance(a, Value) else a for a in operands)

    def _append(self, eqn: Any, operands: tuple[Atom, ...], env: dict[Any, Atom]) -> None:
        folded = _folded(eqn, operands)
        if folded is not None:
            env[eqn.outvars[0]] = folded
            return
        outputs = tuple(Value(aval=var.aval, manual=self.manual) for var in eqn.outvars)
        for var, value in zip(eqn.outvars, outputs, strict=True):
            env[var] = value
        params, inputs, blocks = self._blocks(eqn, operands)
        self.ops.append(
            Op(
                primitive=eqn.primitive,
                params=params,
                inputs=inputs,
                outputs=outputs,
                blocks=blocks,
                source_info=eqn.source_info,
                transposed="transpose(" in self._stack(eqn).rpartition("rematted_computation")[2],
            )
        )

    def _blocks(
        self, eqn: Any, operands: tuple[Atom, ...]
    ) -> tuple[Mapping[str, Any], tuple[Atom, ...], tuple[Program, ...]]:
        """Turn the bodies of a control-flow op into blocks; what they close over becomes an operand."""
        params = dict(eqn.params)
        if eqn.primitive is jax_primitives.scan_p:
            held, body = self._block(eqn, params.pop("jaxpr"))
            params["num_consts"] += len(held)
            return params, held + operands, (body,)
        if eqn.primitive is jax_primitives.while_p:
            cond_held, cond = self._block(eqn, params.pop("cond_jaxpr"))
            body_held, body = self._block(eqn, params.pop("body_jaxpr"))
            split = params["cond_nconsts"]
            params["cond_nconsts"] += len(cond_held)
            params["body_nconsts"] += len(body_held)
            return params, cond_held + operands[:split] + body_held + operands[split:], (cond, body)
        if eqn.primitive is jax_primitives.cond_p:
            held, branches = self._branches(eqn, params.pop("branches"))
            return params, operands[:1] + held + operands[1:], branches
        if eqn.primitive.name == "shard_map":
            return self._mapped(eqn, operands)
        return eqn.params, operands, ()

    def _mapped(
        self, eqn: Any, operands: tuple[Atom, ...]
    ) -> tuple[Mapping[str, Any], tuple[Atom, ...], tuple[Program, ...]]:
        """Turn the body of a `shard_map` into a block, and its specs into the manual axes of every dim."""
        jaxpr, mesh = eqn.params["jaxpr"], dict(eqn.params["mesh"].shape)
        manual = tuple(a for a in mesh if a in eqn.params["newly_manual_axes"])
        builder = _Builder(self._stack(eqn), self.manual.union(manual))
        env: dict[Any, Atom] = {}
        taken: list[tuple[Value, Atom, Any]] = []  # inside, outside, spec
        for var, atom, spec in zip(jaxpr.invars, operands, eqn.params["in_specs"], strict=True):
            if isinstance(atom, Literal):
                env[var] = atom
            else:
                env[var] = value = Value(aval=var.aval, manual=builder.manual)
                taken.append((value, atom, spec))
        builder.inline(jaxpr, env)
        taken += [(v, self.const(v.aval, array), PartitionSpec()) for v, array in builder.consts]

        def split(spec: Any, atom: Any) -> tuple[Axes, ...]:
            if spec.unreduced or spec.reduced:
                raise TraceError(
                    f"The shard_map has the spec {spec}: only specs without unreduced axes are read."
                )
            dims = from_spec(spec, len(shape_of(atom))).dims
            return tuple(tuple(a for a in axes if mesh[a] > 1) for axes in dims)

        params = {
            "manual": manual,
            "mesh": tuple(mesh.items()),
            "in_splits": tuple(split(spec, atom) for _, atom, spec in taken),
            "out_splits": tuple(map(split, eqn.params["out_specs"], eqn.outvars)),
        }
        body = Program(
            inputs=tuple(value for value, _, _ in taken),
            consts=(),
            ops=tuple(builder.ops),
            outputs=tuple(_read(env, atom) for atom in jaxpr.outvars),
        )
        return params, tuple(atom for _, atom, _ in taken), (body,)

    def _block(self, eqn: Any, closed: ClosedJaxpr) -> tuple[tuple[Atom, ...], Program]:
        names = [""] * len(closed.in_avals), [""] * len(closed.out_avals)
        body = _close(closed, *names, stack=self._stack(eqn), manual=self.manual)
        held = tuple(self.const(value.aval, array) for value, array in body.consts)
        inner = tuple(value for value, _ in body.consts)
        return held, Program(inputs=inner + body.inputs, consts=(), ops=body.ops, outputs=body.outputs)

    def _branches(
        self, eqn: Any, branches: Sequence[ClosedJaxpr]
    ) -> tuple[tuple[Atom, ...], tuple[Program, ...]]:
        blocks = [self._block(eqn, branch) for branch in branches]
        held = tuple(dict.fromkeys(value for values, _ in blocks for value in values))
        aligned = []
        for values, body in blocks:
            own = dict(zip(values, body.inputs[: len(values)], strict=True))
            first = tuple(own.get(value) or Value(aval=value.aval, manual=self.manual) for value in held)
            aligned.append(
                Program(
                    inputs=first + body.inputs[len(values) :],
                    consts=(),
                    ops=body.ops,
                    outputs=body.outputs,
                )
            )
        return held, tuple(aligned)


def _stays_put(eqn: Any) -> bool:
    """Tell a `device_put` that names no place, and a constraint on a scalar: they change nothing."""
    if eqn.primitive.name in ("reshard", "sharding_constraint"):
        return not eqn.outvars[0].aval.shape
    return eqn.primitive.name == "device_put" and all(d is None for d in eqn.params["devices"])


def _folded(eqn: Any, operands: tuple[Atom, ...]) -> Literal | None:
    """The scalar that arithmetic on literals comes to, or None where the op is anything else."""
    if eqn.primitive.name not in _SCALAR_OPS or eqn.outvars[0].aval.shape:
        return None
    if not all(isinstance(a, Literal) for a in operands):
        return None
    arrays = [np.asarray(a.val, aval_of(a).dtype) for a in operands if isinstance(a, Literal)]
    return Literal(np.asarray(eqn.primitive.bind(*arrays, **eqn.params)), eqn.outvars[0].aval)


def remove_dead_ops(program: Program) -> Program:
    """Drop ops whose results nothing reads and that have no effect, inside loops and branches too."""
    return _live_part(program, [True] * len(program.outputs))[0]


def _live_part(program: Program, wanted: Sequence[bool]) -> tuple[Program, list[bool]]:
    """Reduce a body to what its wanted outputs need; also say which inputs are still read."""
    live: set[Value] = {
        a for a, keep in zip(program.outputs, wanted, strict=True) if keep and isinstance(a, Value)
    }
    kept: list[Op] = []
    for op in reversed(program.ops):
        out_live = [v in live for v in op.outputs]
        if not any(out_live) and not _has_effect(op):
            continue
        trimmed = _trim(op, out_live)
        kept.append(trimmed)
        live.update(a for a in trimmed.inputs if isinstance(a, Value))
    kept.reverse()
    body = Program(
        inputs=program.inputs,
        consts=tuple((v, c) for v, c in program.consts if v in live),
        ops=tuple(kept),
        outputs=program.outputs,
        output_names=program.output_names,
    )
    return body, [v in live for v in program.inputs]


_EFFECTFUL = frozenset({"io_callback", "debug_callback", "debug_print", "check", "dce_sink"})


def _has_effect(op: Op) -> bool:
    """Tell whether an op, or one inside it, does something besides making its results."""
    if op.name in _EFFECTFUL or op.params.get("has_side_effect"):
        return True
    inside = any(_has_effect(inner) for block in op.blocks for inner in block.walk())
    return inside or any(map(_holds_effect, jaxprs_in_params(dict(op.params))))


def _holds_effect(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name in _EFFECTFUL
        or bool(eqn.params.get("has_side_effect"))
        or any(map(_holds_effect, jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )


def _trim(op: Op, out_live: list[bool]) -> Op:
    if op.name == "scan":
        return _trim_scan(op, out_live)
    if op.name == "while":
        return _trim_while(op, out_live)
    if op.name == "cond":
        return _trim_cond(op, out_live)
    if op.name == "shard_map":
        return _trim_mapped(op, out_live)
    if op.name == "optimization_barrier" and not all(out_live):
        pairs = [(i, o) for i, o, keep in zip(op.inputs, op.outputs, out_live, strict=True) if keep]
        return replace(op, inputs=tuple(i for i, _ in pairs), outputs=tuple(o for _, o in pairs))
    return op


def _select(items: Sequence[Any], keep: Sequence[bool]) -> tuple[Any, ...]:
    return tuple(item for item, kept in zip(items, keep, strict=True) if kept)


def _body_with(body: Program, inputs: Sequence[bool], outputs: Sequence[bool]) -> Program:
    return Program(
        inputs=_select(body.inputs, inputs),
        consts=body.consts,
        ops=body.ops,
        outputs=_select(body.outputs, outputs),
    )


def _trim_scan(op: Op, out_live: list[bool]) -> Op:
    consts, carries = op.params["num_consts"], op.params["num_carry"]
    carry_live = list(out_live[:carries])
    ys_live = out_live[carries:]
    while True:
        body, read = _live_part(op.blocks[0], carry_live + ys_live)
        wider = [a or b for a, b in zip(carry_live, read[consts : consts + carries], strict=True)]
        if wider == carry_live:
            break
        carry_live = wider
    in_keep = read[:consts] + carry_live + read[consts + carries :]
    if all(in_keep) and all(carry_live) and all(ys_live):
        return replace(op, blocks=(body,))
    params = dict(op.params) | {"num_consts": sum(read[:consts]), "num_carry": sum(carry_live)}
    return replace(
        op,
        params=params,
        inputs=_select(op.inputs, in_keep),
        outputs=_select(op.outputs, carry_live + ys_live),
        blocks=(_body_with(body, in_keep, carry_live + ys_live),),
    )


def _trim_while(op: Op, out_live: list[bool]) -> Op:
    cond_consts, body_consts = op.params["cond_nconsts"], op.params["body_nconsts"]
    cond, cond_read = _live_part(op.blocks[0], [True])
    carry_live = [a or b for a, b in zip(out_live, cond_read[cond_consts:], strict=True)]
    while True:
        body, read = _live_part(op.blocks[1], carry_live)
        wider = [a or b for a, b in zip(carry_live, read[body_consts:], strict=True)]
        if wider == carry_live:
            break
        carry_live = wider
    cond_keep, body_keep = cond_read[:cond_consts], read[:body_consts]
    params = dict(op.params) | {"cond_nconsts": sum(cond_keep), "body_nconsts": sum(body_keep)}
    return replace(
        op,
        params=params,
        inputs=_select(op.inputs, cond_keep + body_keep + carry_live),
        outputs=_select(op.outputs, carry_live),
        blocks=(
            _body_with(cond, cond_keep + carry_live, [True]),
            _body_with(body, body_keep + carry_live, carry_live),
        ),
    )


def _trim_mapped(op: Op, out_live: list[bool]) -> Op:
    body, read = _live_part(op.blocks[0], out_live)
    splits = {
        "in_splits": _select(op.params["in_splits"], read),
        "out_splits": _select(op.params["out_splits"], out_live),
    }
    return replace(
        op,
        params=dict(op.params) | splits,
        inputs=_select(op.inputs, read),
        outputs=_select(op.outputs, out_live),
        blocks=(_body_with(body, read, out_live),),
    )


def _trim_cond(op: Op, out_live: list[bool]) -> Op:
    parts = [_live_part(block, out_live) for block in op.blocks]
    reads = [any(read[i] for _, read in parts) for i in range(len(op.inputs) - 1)]
    return replace(
        op,
        inputs=(op.inputs[0],) + _select(op.inputs[1:], reads),
        outputs=_select(op.outputs, out_live),
        blocks=tuple(_body_with(body, reads, out_live) for body, _ in parts),
    )
