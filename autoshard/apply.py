"""A plan applied to its function: through XLA's partitioner, or as our per-device program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from autoshard.errors import PlanMismatchError
from autoshard.layout import to_spec
from autoshard.partition.emitter import constrained
from autoshard.session import Session, Source, abstract_mesh, decisions_of

if TYPE_CHECKING:
    from autoshard.plan import Plan

__all__ = ["Applied", "device_mesh"]


def device_mesh(plan: Plan, devices: Sequence[Any] | None = None) -> Mesh:
    """Arrange devices as the plan was priced: by slice and place in it, then in the plan's device order.

    Raises:
      ValueError: there are fewer devices than the mesh holds.
    """
    devices = list(jax.devices() if devices is None else devices)
    needed = int(np.prod(list(plan.mesh.values())))
    if len(devices) < needed:
        raise ValueError(
            f"the plan's mesh {dict(plan.mesh)} needs {needed} devices; {len(devices)} of kind"
            f" {devices[0].device_kind if devices else 'none'} were given. Pass more devices,"
            f" or for a test on one machine set XLA_FLAGS=--xla_force_host_platform_device_count={needed} before JAX starts."
        )
    if all(_place(d) for d in devices):
        devices.sort(key=_place)
        if len(devices) > max(plan.device_order):
            devices = [devices[i] for i in plan.device_order]
    array = np.array(devices[:needed], dtype=object).reshape(tuple(plan.mesh.values()))
    return Mesh(array, tuple(plan.mesh), axis_types=(AxisType.Auto,) * len(plan.mesh))


def _place(device: Any) -> tuple[int, ...]:
    """Return where a device is, slice or node first, as `cost_models.Topology` counts; () if it has no place."""
    number = getattr(device, "slice_index", None) or 0
    if hasattr(device, "coords"):
        return (number, *reversed(device.coords), getattr(device, "core_on_chip", 0))
    return (number, device.process_index, device.id) if device.platform == "gpu" else ()


class Applied:
    """The planned function: call it, or `.lower(*args)` it.

    It is a step to run, not to differentiate: take gradients inside the function before planning it.
    """

    def __init__(
        self, *, plan: Plan, fn: Callable[..., Any], devices: Sequence[Any] | None, partitioner: str
    ) -> None:
        self.plan, self.fn, self.devices, self.partitioner = plan, fn, devices, partitioner
        self._ready: Any = None

    def _prepare(self, args: Sequence[Any]) -> Any:
        if self._ready is None:
            mesh = device_mesh(self.plan, self.devices)
            flat, ins, outs, donated = flat_program(self.plan, self.fn, args, self.partitioner, mesh)
            in_tree = jax.tree.structure(tuple(args))
            out_tree = self.plan.out_tree
            if out_tree is None:  # a plan read from a file knows the paths of results, not their containers
                out_tree = jax.tree.structure(jax.eval_shape(self.fn, *args))
            owners = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]

            def planned(*trees: Any) -> Any:
                return jax.tree.unflatten(out_tree, flat(*jax.tree.leaves(trees)))

            self._ready = jax.jit(
                planned,
                in_shardings=jax.tree.unflatten(in_tree, ins),
                out_shardings=jax.tree.unflatten(out_tree, outs),
                donate_argnums=sorted({owners[i] for i in donated}),
            )
        _require_same_inputs(self.plan, args)
        return self._ready

    def __call__(self, *args: Any) -> Any:
        """Run the function on arrays; they are laid out as the plan says."""
        return self._prepare(args)(*args)

    def lower(self, *args: Any) -> Any:
        """Lower for the devices; the result has `.compile()` and `.as_text()`."""
        return self._prepare(args).lower(*args)


def flat_program(
    plan: Plan, fn: Callable[..., Any], args: Sequence[Any], partitioner: str, mesh: Any = None
) -> tuple[Callable[..., tuple[Any, ...]], tuple[Any, ...], tuple[Any, ...], tuple[int, ...]]:
    """Return the planned function over flat leaves, its shardings, and the leaves to donate.

    Raises:
      PlanMismatchError: `fn` or `args` are not what the plan was made for; the message says what differs.
    """
    source = matching_source(plan, fn, args)
    mesh = abstract_mesh(plan.mesh) if mesh is None else mesh
    decisions = decisions_of(plan, source.block)
    session = Session.of(source, plan.slice, plan.mesh)
    if partitioner == "xla":
        flat = constrained(source.block, decisions, session.resharder, mesh)
    else:
        flat = session.program(decisions, mesh)
    ins = tuple(NamedSharding(mesh, to_spec(x)) for x in plan.input_layouts)
    outs = tuple(NamedSharding(mesh, to_spec(x)) for x in plan.output_layouts)
    donated = tuple(i for i, leaf in enumerate(plan.inputs) if leaf.donated)
    return flat, ins, outs, donated


def matching_source(plan: Plan, fn: Callable[..., Any], args: Sequence[Any]) -> Source:
    """Trace `fn` again and check that it is the program of the plan."""
    _require_same_inputs(plan, args)
    source = Source.of(fn, args)
    if source.fingerprint != plan.fingerprint:
        raise PlanMismatchError(
            f"the plan {plan.name!r} was made for another function: its {len(plan.inputs)} inputs have"
            f" the same shapes, but the traced operations differ (program {source.fingerprint[:8]}, plan"
            f" {plan.fingerprint[:8]}; {source.traced.program.size} ops now, {plan.coverage.ops} then)."
            " Make a new plan with autoshard.suggest."
        )
    return source


def _require_same_inputs(plan: Plan, args: Sequence[Any]) -> None:
    from jax.tree_util import keystr, tree_flatten_with_path

    flat, _ = tree_flatten_with_path(tuple(args))
    have = {keystr(path): (tuple(jax.numpy.shape(x)), _dtype(x)) for path, x in flat}
    want = {leaf.path: (leaf.shape, leaf.dtype) for leaf in plan.inputs}
    differences = [f"{p}: missing; the plan has {w[1]}{list(w[0])}" for p, w in want.items() if p not in have]
    differences += [f"{p}: not in the plan" for p in have if p not in want]
    differences += [
        f"{p}: given {have[p][1]}{list(have[p][0])}, planned {w[1]}{list(w[0])}"
        for p, w in want.items()
        if p in have and have[p] != w
    ]
    if differences:
        more = f"\n  ... {len(differences) - 8} more" if len(differences) > 8 else ""
        raise PlanMismatchError(
            "the arguments are not those that the plan was made for:\n  "
            + "\n  ".join(differences[:8])
            + more
            + "\nPass arguments of the planned structure, or make a new plan with autoshard.suggest."
        )


def _dtype(leaf: Any) -> str:
    return str(leaf.dtype) if hasattr(leaf, "dtype") else str(jax.typeof(leaf).dtype)
