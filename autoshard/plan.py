"""The result: how everything is sharded, what that costs, and what to do with it.

A `Plan` is immutable. It prints, goes to JSON and back, applies itself to the function that it was made for
(through XLA's partitioner or as our own per-device program), and validates itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec

import cost_models as cm
from autoshard.estimate import Estimate
from autoshard.layout import Axes, Layout, to_spec

if TYPE_CHECKING:
    from autoshard.apply import Applied
    from autoshard.explain import Why
    from autoshard.front import Front
    from autoshard.minimal import Minimal
    from autoshard.validate.report import Validation
    from autoshard.what_if import ShadowPrices

__all__ = ["Coverage", "Leaf", "Plan"]


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array argument or result: its pytree path, shape and dtype.

    For an argument also whether its memory is donated, and what it is: "parameters", "optimizer state" or
    "inputs".
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    donated: bool = False
    category: str = ""


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """How much of the program has sharding rules.

    `without_rule` maps primitives that have none to how often they occur; they run replicated, at their true
    cost. `flops_share` is the share of the flops in ops with a rule.
    """

    ops: int
    without_rule: Mapping[str, int]
    flops_share: float

    @property
    def complete(self) -> bool:
        """Tell whether every op has a rule."""
        return not self.without_rule

    def __str__(self) -> str:
        if self.complete:
            return f"all {self.ops} ops have a sharding rule"
        named = ", ".join(f"{name} ({n})" for name, n in self.without_rule.items())
        return (
            f"{100 * self.flops_share:.1f} % of flops have a sharding rule; without one, and so run whole"
            f" on every device: {named}"
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Shardings for one function at given shapes on one mesh, with their price.

    Attributes:
      name: what made the plan: "suggested", "evaluated", or a baseline.
      topology: the slice, as the TPU compiler names it.
      mesh: axis name to size, in the order of `device_order`.
      device_order: device id (x fastest, then y, z; cores innermost) at each mesh position.
      inputs, outputs: the arrays of the function.
      input_layouts, output_layouts: how they are split.
      value_layouts: layouts of what loops and branches take and return, in program order.
      assignments: how each group of ops splits its factors, in program order.
      fingerprint: of the traced program; a plan applies only to the program that it was made for.
      estimate: the predicted step.
      gap: how far from the proven bound the plan's serial time may be (0: proven best); None where nothing was
        searched.
      lower_bound_seconds: no plan on this mesh costs less with nothing overlapped, among those that the search
        admits; the notes say where repeated layers are treated alike or memory decides.
      coverage: ops without a rule.
      notes: what a person should know: dims left whole, loops of unknown length, what does not fit.
      timings: seconds spent per stage.
      request: the `autoshard.solving.Request` that the plan answers, with the traced program: what
        `alternatives` and the like start from. It is not written to JSON; `attach` gives it to a plan without.
    """

    name: str
    topology: str
    mesh: Mapping[str, int]
    device_order: tuple[int, ...]
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    input_layouts: tuple[Layout, ...]
    output_layouts: tuple[Layout, ...]
    value_layouts: tuple[Layout, ...]
    assignments: tuple[Mapping[str, Axes], ...]
    fingerprint: str
    estimate: Estimate
    gap: float | None
    lower_bound_seconds: float | None
    memory_limit_bytes: float
    coverage: Coverage
    notes: tuple[str, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)
    in_tree: Any = None
    out_tree: Any = None
    request: Any = field(default=None, compare=False, repr=False)

    # Shardings ------------------------------------------------------------------------------------

    @property
    def in_specs(self) -> Any:
        """`PartitionSpec`s as a pytree like the arguments; a mapping by path if the structure is unknown."""
        return self._tree(self.in_tree, self.inputs, self.input_layouts)

    @property
    def out_specs(self) -> Any:
        """`PartitionSpec`s as a pytree like the results; a mapping by path if the structure is unknown."""
        return self._tree(self.out_tree, self.outputs, self.output_layouts)

    @staticmethod
    def _tree(tree: Any, leaves: Sequence[Leaf], layouts: Sequence[Layout]) -> Any:
        specs = [to_spec(x) for x in layouts]
        if tree is not None:
            return jax.tree.unflatten(tree, specs)
        return {leaf.path: spec for leaf, spec in zip(leaves, specs, strict=True)}

    def spec(self, path: str) -> PartitionSpec:
        """Return the spec of the input at a pytree path such as `[0]['embed']`.

        Raises:
          KeyError: no input has that path; the message lists the nearest.
        """
        import difflib

        by_path = {leaf.path: x for leaf, x in zip(self.inputs, self.input_layouts, strict=True)}
        if path not in by_path:
            near = difflib.get_close_matches(path, by_path, n=3, cutoff=0.3)
            raise KeyError(f"no input at {path!r}; near it: {', '.join(near) or 'nothing'}")
        return to_spec(by_path[path])

    @property
    def fits(self) -> bool:
        """Tell whether the predicted peak is within the memory limit."""
        return self.estimate.peak_bytes <= self.memory_limit_bytes

    @property
    def slice(self) -> cm.Topology:
        """The slice or slices with the figures of their chips; `topology` is its name."""
        return self.estimate.machine.placement.topology

    @property
    def step_seconds(self) -> float:
        """Predicted time of a step."""
        return self.estimate.step_seconds

    def mfu(self, model_flops: float) -> float:
        """Model FLOPs utilisation: `model_flops` (of a step, all devices, nothing recomputed) over peak."""
        machine = self.estimate.machine
        devices = machine.placement.num_devices
        return model_flops / (devices * machine.chip.matmul_flops_per_second * self.step_seconds)

    # Questions ------------------------------------------------------------------------------------

    def attach(
        self,
        fn: Callable[..., Any],
        *args: Any,
        annotations: Mapping[str, PartitionSpec] | None = None,
        loop_trips: int = 1,
        windowed_einsum: bool = False,
    ) -> Plan:
        """Return the plan with the program that it was made for, so that it answers questions.

        Plans that `suggest` returns can answer; plans read from a file cannot before.

        Args:
          fn: the function that the plan was made for.
          args: its arguments.
          annotations: what other plans must keep, as for `autoshard.suggest`.
          loop_trips: as for `autoshard.suggest`.
          windowed_einsum: as for `autoshard.suggest`.

        Raises:
          PlanMismatchError: `fn` or `args` are not what the plan was made for.
        """
        from autoshard.solving import attached

        return attached(
            self,
            fn,
            args,
            annotations=annotations or {},
            loop_trips=loop_trips,
            windowed_einsum=windowed_einsum,
        )

    def alternatives(
        self, count: int, among: Sequence[str] | None = None, by: str = "layouts"
    ) -> tuple[Plan, ...]:
        """Find the best plans after this one that split arguments otherwise, on its mesh.

        Args:
          count: how many to find; fewer come back where there are no more that fit.
          among: plans that differ only in other arguments count as one: paths, or beginnings of paths, such as
            `"[0]"`; by default any argument may differ.
          by: plans differ in the "layouts" of arguments, or only where arguments are split over other "axes", along
            whichever dims.

        Returns:
          Plans, fastest first. Each differs from this plan and all others; its `gap` says how far it may be, with
          nothing overlapped, from the best plan that differs from this one and from those found before it.

        Raises:
          PlanMismatchError: the plan does not hold its program; see `attach`.
        """
        from autoshard.alternatives import alternatives

        return alternatives(self, count, among, by)

    def why(self, key: str, rivals: int = 3) -> Why:
        """Explain a choice: its nearest rivals, what the step costs with each, and which term decides.

        With a rival held, everything else is decided anew, so a rival's figures are those of the best plan with it.

        Args:
          key: an argument's path such as `"[0]['embed']"`, `"out..."` for a result, a key as `autoshard.suggest`
            takes it for what is inside (`"name:attn_out"`, `"model.py:42"`, `"model.py:42:dot_general"`), or a group
            of ops as tables name it (`"g12"`).
          rivals: how many to try, the nearest first.

        Returns:
          An answer that prints and renders in notebooks; its `decisions` hold the rivals as plans.

        Raises:
          SpecError: nothing has that name.
          PlanMismatchError: the plan does not hold its program; see `attach`.
        """
        from autoshard.explain import why

        return why(self, key, rivals)

    def what_if(
        self,
        *,
        annotations: Mapping[str, PartitionSpec] | None = None,
        topology: str | cm.Topology | None = None,
        mesh: Mapping[str, int] | None = None,
        memory_limit_bytes: float | None = None,
    ) -> Plan:
        """Solve again with something changed; `autoshard.compare([plan, other])` puts both side by side.

        The program is not traced again. What is not given stays as it was.

        Args:
          annotations: more specs to keep, by key as for `autoshard.suggest`; they go before the plan's own.
          topology: another slice; without a `mesh` the plan's own grows to it. A name of the same generation keeps the
            figures of the plan's chip.
          mesh: another mesh.
          memory_limit_bytes: another limit.

        Returns:
          The plan that `autoshard.suggest` would find so.

        Raises:
          PlanMismatchError: the plan does not hold its program; see `attach`.
          SpecError, cost_models.TopologyError, cost_models.MeshError: what is given cannot be used.
        """
        from autoshard.what_if import what_if

        return what_if(self, annotations, topology, mesh, memory_limit_bytes)

    def shadow_prices(self, step_bytes: float = 2.0**30) -> ShadowPrices:
        """Say what a step gains by more of a resource and loses by less, everything decided anew each time.

        Args:
          step_bytes: how much HBM to take and to give; the other resources change by 10 %.

        Returns:
          A table by resource: HBM, bandwidth of the links between chips and of HBM, and the matrix unit.

        Raises:
          PlanMismatchError: the plan does not hold its program; see `attach`.
        """
        from autoshard.what_if import shadow_prices

        return shadow_prices(self, step_bytes)

    def front(self, points: int = 8) -> Front:
        """Find what memory buys on the plan's mesh: step time against peak, from this plan's limit down.

        Args:
          points: limits to try, spread evenly from the peak of the fastest plan to what nothing fits below.

        Returns:
          The plans that no other beats in both, fastest first; `autoshard.pareto` makes it for a function.

        Raises:
          PlanMismatchError: the plan does not hold its program; see `attach`.
        """
        from autoshard.front import front_of

        return front_of(self, points)

    def minimal(self) -> Minimal:
        """Find a few annotations from which completion (as by `autoshard.evaluate`) finds this plan again.

        Returns:
          Annotations of arguments, results and places inside the function, none of which can be left out. They
          print as code to paste; `found` says whether the plan comes out: arguments and results alike, and a step
          within 0.1 %.

        Raises:
          PlanMismatchError: the plan does not hold its program; see `attach`.
        """
        from autoshard.minimal import minimal

        return minimal(self)

    # Use ------------------------------------------------------------------------------------------

    def jit(self, fn: Callable[..., Any], devices: Sequence[Any] | None = None) -> Applied:
        """Apply the plan through XLA: `jax.jit` with shardings and constraints inside.

        XLA's partitioner has errors (docs/xla.md). Those that are known are kept from it: dims that windows slide
        over, as of convolutions, stay whole. `validate(level="numerics")` compares the values; `spmd` does without
        that partitioner.

        Args:
          fn: the function that the plan was made for.
          devices: the devices to use, in any order; by default `jax.devices()`.

        Returns:
          A callable with `.lower(*args)`.
        """
        from autoshard.apply import Applied

        return Applied(plan=self, fn=fn, devices=devices, partitioner="xla")

    def spmd(self, fn: Callable[..., Any], devices: Sequence[Any] | None = None) -> Applied:
        """Apply the plan as our own per-device program under `jax.shard_map`; as `jit` otherwise."""
        from autoshard.apply import Applied

        return Applied(plan=self, fn=fn, devices=devices, partitioner="autoshard")

    def validate(
        self, fn: Callable[..., Any], *args: Any, level: str = "compile", **options: Any
    ) -> Validation:
        """Check the plan's predictions.

        Args:
          fn: the function that the plan was made for.
          args: its arguments: shapes, or real arrays for "numerics" and "profile".
          level: "numerics" runs both ways of applying the plan on virtual CPU devices and compares values;
            "compile" compiles for CPU and for the TPU slice, ahead of time; "profile" runs on the devices
            present and compares with measured times.
          options: see `autoshard.validate.report.validate`.
        """
        from autoshard.validate.report import validate

        return validate(self, fn, args, level=level, **options)

    def to_json(self) -> str:
        """Write the plan as JSON text, versioned."""
        from autoshard.plan_json import dump

        return dump(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan that `to_json` wrote.

        Raises:
          PlanFileError: the text is no plan, is cut off, or is of another format version.
        """
        from autoshard.plan_json import load

        return load(text)

    def replace(self, **changes: Any) -> Plan:
        """Return a plan with some fields changed."""
        return dataclasses.replace(self, **changes)

    def __str__(self) -> str:
        from autoshard.report.text import plan_text

        return plan_text(self)

    def _repr_html_(self) -> str:
        from autoshard.report.html import plan_html

        return plan_html(self)

    def __repr__(self) -> str:
        return (
            f"<Plan {self.name} on {self.topology} {dict(self.mesh)}: {1e3 * self.step_seconds:.3f} ms,"
            f" {self.estimate.peak_bytes / 2**30:.2f} GiB>"
        )
