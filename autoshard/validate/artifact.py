"""Turns a JAX function into an artifact that another process can compile or run.

A user's function is a closure that cannot be pickled, and the process that holds it has one device while the
mesh may have thousands. So the function is lowered here against an `AbstractMesh` and exported; the bytes
carry shardings, sharding constraints and `shard_map`s. What an export does not carry, donation and the names
of arguments, is kept beside them. Pytrees are flattened first, so user-defined nodes need no serial form.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import export
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

_CUSTOM_CALL_TARGET = re.compile(r'custom_call @"?([^\s"(]+)|call_target_name = "([^"]+)"')

# These constructors carry no annotations in JAX.
_SPEC: Any = PartitionSpec
_STRUCT: Any = jax.ShapeDtypeStruct


class ArtifactError(ValueError):
    """A function cannot be handed to another process."""


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A lowered function in bytes.

    Attributes:
        name: the function's name.
        platform: "tpu" or "cpu".
        mesh_shape: axis name to size in the order of the mesh; empty for a program of one device.
        input_names: the path of each flat input, such as `params['w']`.
        output_names: the path of each flat output, such as `result[0]`.
        donated: indices of the flat inputs whose memory the outputs may take.
        serialized: what `jax.export.Exported.serialize` returned.

    """

    name: str
    platform: str
    mesh_shape: Mapping[str, int]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    donated: tuple[int, ...]
    serialized: bytes

    def __repr__(self) -> str:
        mesh = dict(self.mesh_shape)
        return f"Artifact({self.name}, {self.platform}, mesh {mesh}, {len(self.serialized):,} B)"


def export_artifact(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    platform: str,
    mesh: AbstractMesh | Mesh | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: Sequence[int] = (),
) -> Artifact:
    """Lower and export a function for a mesh that need not exist here.

    The mesh is also the context of the trace, so `with_sharding_constraint(x, PartitionSpec(...))` works.

    Args:
        function: what to export; it may be jitted and may contain `shard_map` over the mesh.
        args: its positional arguments, arrays or `jax.ShapeDtypeStruct`s.
        platform: "tpu" or "cpu".
        mesh: the mesh of the shardings; only names, sizes and axis types are used. None for one device.
        in_shardings: as for `jax.jit`, a prefix of `args` with a `PartitionSpec`, `NamedSharding` or None at
            each leaf. If nothing in the function names the mesh, None means replicated.
        out_shardings: the same for the result; None leaves the choice to the compiler.
        donate_argnums: positions of arguments to donate.

    Returns:
        The artifact.

    Raises:
        ArtifactError: the program holds something that has no serial form, such as a host callback.

    """
    name = getattr(function, "__name__", type(function).__name__)
    abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    arguments = tuple(args)
    paths, structure = jax.tree_util.tree_flatten_with_path(arguments)
    leaves = [_abstract(leaf) for _, leaf in paths]
    traced_once = jax.jit(function)

    def flat(*flat_leaves: Any) -> list[Any]:
        return jax.tree.leaves(traced_once(*jax.tree.unflatten(structure, flat_leaves)))

    # `hlo.Instruction.op_name` takes this name off again.
    flat.__name__ = flat.__qualname__ = "autoshard_artifact"
    inputs = _flat_shardings(in_shardings, arguments, abstract)
    with jax.sharding.use_abstract_mesh(abstract or AbstractMesh((), ())):
        result = jax.eval_shape(traced_once, *jax.tree.unflatten(structure, leaves))
        outputs = _flat_shardings(out_shardings, result, abstract)
        exported = _export(flat, leaves, inputs, outputs, platform, name)
        if abstract is not None and exported.nr_devices != abstract.size:
            replicated = NamedSharding(abstract, _SPEC())
            inputs = [replicated if sharding is None else sharding for sharding in inputs]
            exported = _export(flat, leaves, inputs, outputs, platform, name)
    return Artifact(
        name=name,
        platform=platform,
        mesh_shape={} if abstract is None else dict(abstract.shape),
        input_names=_input_names(function, [path for path, _ in paths]),
        output_names=tuple(
            "result" + jax.tree_util.keystr(path)
            for path, _ in jax.tree_util.tree_flatten_with_path(result)[0]
        ),
        donated=_donated(arguments, donate_argnums),
        serialized=bytes(exported.serialize()),
    )


def _export(
    flat: Callable[..., list[Any]],
    leaves: Sequence[Any],
    inputs: list[NamedSharding | None],
    outputs: list[NamedSharding | None],
    platform: str,
    name: str,
) -> export.Exported:
    # Donation is left to the process that compiles: an export does not hand it on.
    jitted = jax.jit(flat, in_shardings=tuple(inputs), out_shardings=outputs)
    allowed: set[str] = set()
    while True:
        checks = [export.DisabledSafetyCheck.custom_call(target) for target in sorted(allowed)]
        try:
            return export.export(jitted, platforms=[platform], disabled_checks=checks)(*leaves)
        except ValueError as error:
            # The artifact lives for seconds and is read by the same JAX: stability does not matter.
            if "no compatibility guarantees" not in str(error):
                raise
            targets = {first or second for first, second in _CUSTOM_CALL_TARGET.findall(str(error))}
            if targets <= allowed:
                raise ArtifactError(f"{name}: cannot export its custom calls: {error}") from error
            allowed |= targets
        except NotImplementedError as error:
            raise ArtifactError(
                f"{name}: cannot hand this program to the compiler in another process: {error} "
                "Host callbacks (jax.debug.print, io_callback, pure_callback) have no serial form: remove "
                "them, or stub them out while validating."
            ) from error


def _abstract(leaf: Any) -> Any:
    aval = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
    return _STRUCT(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _flat_shardings(prefix: Any, full: Any, mesh: AbstractMesh | None) -> list[NamedSharding | None]:
    def is_leaf(node: Any) -> bool:
        return node is None or isinstance(node, PartitionSpec)

    if prefix is None:
        return [None] * len(jax.tree.leaves(full))
    spread = jax.tree.leaves(jax.tree.broadcast(prefix, full, is_leaf=is_leaf), is_leaf=is_leaf)
    shardings: list[NamedSharding | None] = []
    for leaf in spread:
        if leaf is None:
            shardings.append(None)
        elif mesh is None:
            raise ArtifactError(f"sharding {leaf} was given without a mesh; pass mesh=")
        elif isinstance(leaf, PartitionSpec):
            shardings.append(NamedSharding(mesh, leaf))
        elif isinstance(leaf, NamedSharding):
            shardings.append(NamedSharding(mesh, leaf.spec))
        else:
            raise ArtifactError(f"a sharding must be a PartitionSpec, a NamedSharding or None, not {leaf!r}")
    return shardings


def _donated(arguments: tuple[Any, ...], donate_argnums: Sequence[int]) -> tuple[int, ...]:
    donated: list[int] = []
    start = 0
    for number, argument in enumerate(arguments):
        count = len(jax.tree.leaves(argument))
        if number in donate_argnums:
            donated += range(start, start + count)
        start += count
    return tuple(donated)


def _input_names(function: Callable[..., Any], paths: Sequence[tuple[Any, ...]]) -> tuple[str, ...]:
    try:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]
    except (TypeError, ValueError):
        names = []
    return tuple(
        (names[path[0].idx] if path[0].idx < len(names) else f"args[{path[0].idx}]")
        + jax.tree_util.keystr(path[1:])
        for path in paths
    )
