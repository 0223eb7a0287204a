"""One function at given shapes, on one mesh: traced, grouped and placed. What every plan is made from."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, AxisType

import cost_models as cm
from autoshard.boundary import deciding_values
from autoshard.errors import TraceError
from autoshard.estimate import Estimate, estimate
from autoshard.fusion import Fusions, fusions_of
from autoshard.grouping import Block, group
from autoshard.groups import group_signature
from autoshard.partition.emitter import Decisions, number_groups, spmd
from autoshard.partition.price import Machine
from autoshard.partition.reshard import Resharder
from autoshard.plan import Coverage, Leaf, Plan
from autoshard.program import Value, on_host
from autoshard.rules import Kind, family
from autoshard.rules.host import ONCE
from autoshard.rules.opaque import UNSPLIT
from autoshard.trace import Traced, trace

__all__ = ["Session", "Source", "abstract_mesh"]


def abstract_mesh(mesh: Mapping[str, int]) -> AbstractMesh:
    """Return a mesh without devices, its axes automatic."""
    return AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))


@dataclass(frozen=True, eq=False, kw_only=True)
class Source:
    """A traced and grouped function, before any mesh."""

    traced: Traced
    block: Block
    donated: tuple[bool, ...]
    timings: Mapping[str, float]

    @classmethod
    def of(cls, fn: Callable[..., Any], args: Sequence[Any], donate_argnums: Sequence[int] = ()) -> Source:
        """Trace and group `fn` at the shapes of `args`."""
        out_of_range = [i for i in donate_argnums if not -len(args) <= i < len(args)]
        if out_of_range:
            raise TraceError(
                f"donate_argnums {list(donate_argnums)} names argument(s) {out_of_range}; the function was given"
                f" {len(args)}, numbered from 0. Name positions among these, or leave donate_argnums out."
            )
        start = time.perf_counter()
        traced = trace(fn, args)
        middle = time.perf_counter()
        block = group(traced.program)
        end = time.perf_counter()
        given = {i % len(args) for i in donate_argnums}
        return cls(
            traced=traced,
            block=block,
            donated=tuple(i in given for i in traced.arg_of_input),
            timings={"trace": middle - start, "group": end - middle},
        )

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the program: ops, literals, shapes and how values flow."""
        digest = hashlib.sha256()
        places: dict[Any, int] = {}

        def place(atom: Any) -> Any:
            return places.setdefault(atom, len(places)) if isinstance(atom, Value) else repr(atom.val)

        for value in self.block.inputs:
            digest.update(f"{place(value)}{value.shape}{value.dtype}".encode())
        for item in self.block.walk():
            digest.update(repr(group_signature(item)).encode())
            for op in item.ops:
                flow = [place(a) for a in (*op.inputs, *op.outputs)]
                flow += [place(v) for body in item.blocks for v in (*body.inputs, *body.outputs)]
                digest.update(repr(flow).encode())
        digest.update(repr([place(a) for a in self.block.outputs]).encode())
        return digest.hexdigest()[:32]

    @cached_property
    def state(self) -> Mapping[int, int]:
        """Outputs that are the next step's inputs: output position -> input position.

        A result subtree with the same structure and shapes as an argument is that argument's next value;
        donated arguments are matched first, and each only once. A lone array must be donated to count.
        """
        traced = self.traced
        outs = [
            (name, tuple(a.shape), str(a.dtype))
            for name, a in zip(traced.out_names, traced.out_avals, strict=True)
        ]
        ins = [
            (name, tuple(a.shape), str(a.dtype))
            for name, a in zip(traced.in_names, traced.in_avals, strict=True)
        ]
        arguments: dict[str, list[int]] = {}
        for i, (name, _, _) in enumerate(ins):
            arguments.setdefault(name.split("]", 1)[0] + "]", []).append(i)
        results: dict[str, list[int]] = {}
        for j, (name, _, _) in enumerate(outs):
            head = name.split("]", 1)[0] + "]" if name.startswith("[") else ""
            results.setdefault(head, []).append(j)
        if len(traced.out_names) and all(n.startswith("[") for n in traced.out_names):
            results.setdefault("", list(range(len(outs))))
        found: dict[int, int] = {}
        order = sorted(arguments, key=lambda a: (not self.donated[arguments[a][0]], arguments[a][0]))
        taken: set[int] = set()
        for argument in order:
            members = arguments[argument]
            want = [(ins[i][0][len(argument) :], *ins[i][1:]) for i in members]
            if not any(ins[i][1] for i in members):
                continue
            if want[0][0] == "" and not self.donated[members[0]]:
                continue  # a lone array of the same shape is no state unless it is given away
            for head, candidates in results.items():
                have = [(outs[j][0][len(head) :], *outs[j][1:]) for j in candidates]
                if have == want and not taken & set(candidates):
                    found |= dict(zip(candidates, members, strict=True))
                    taken |= set(candidates)
                    break
        return found

    @cached_property
    def categories(self) -> tuple[str, ...]:
        """What each input is: a parameter, optimizer state, other state, or data.

        State is what comes back as a result; its floating-point arrays that a matrix product, convolution or
        lookup reads are parameters, the rest optimizer state.
        """
        state = set(self.state.values())
        weights = self._weights()
        kinds = []
        for i, value in enumerate(self.block.inputs):
            if value in weights and (i in state or not state):
                kinds.append("parameters")
            elif i in state:
                kinds.append("optimizer state")
            else:
                kinds.append("inputs")
        argument_kinds = {}
        for i, kind in enumerate(kinds):
            if kind == "parameters":
                argument_kinds[self.traced.in_names[i].rsplit("[", 1)[0]] = kind
        return tuple(
            argument_kinds.get(self.traced.in_names[i].rsplit("[", 1)[0], kind)
            if kind == "optimizer state"
            else kind
            for i, kind in enumerate(kinds)
        )

    def _weights(self) -> set[Any]:
        """Inputs whose values reach a product or lookup through casts, copies and loops only."""
        from autoshard.structure import roots_of_products

        return roots_of_products(self.block)

    @property
    def remarks(self) -> list[str]:
        """What ops do that run once, not once per device, and what is not counted of the host's memory."""
        ops = list(self.traced.program.walk())
        once = dict.fromkeys(f"{op.name} {family(op).about}" for op in ops if family(op).name in ONCE)
        away = sum(on_host(v.aval) for op in ops for v in op.outputs)
        hosted = [f"{away} arrays lie in the host's memory: the time of the link to it is not counted"]
        return [*once, *(hosted if away else [])]

    def coverage(self, found: Estimate) -> Coverage:
        """Return which ops have rules, and their share of the flops of an estimate."""
        missing: dict[str, int] = {}
        for op in self.traced.program.walk():
            if family(op).name in UNSPLIT:
                missing[op.name] = missing.get(op.name, 0) + 1
        numbers = number_groups(self.block)
        opaque = {n for item, n in numbers.items() if any(family(op).name in UNSPLIT for op in item.ops)}
        without = sum(e.cost.flops * e.count for e in found.entries if e.group in opaque)
        share = 1.0 - without / found.flops if found.flops else 1.0
        return Coverage(ops=self.traced.program.size, without_rule=missing, flops_share=share)


@dataclass(frozen=True, eq=False, kw_only=True)
class Session:
    """A `Source` on a mesh of a slice."""

    source: Source
    machine: Machine
    loop_trips: int = 1
    windowed_einsum: bool = False
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        source: Source,
        topology: cm.Topology,
        mesh: Mapping[str, int],
        loop_trips: int = 1,
        windowed_einsum: bool = False,
        async_collectives: Sequence[str] | None = None,
    ) -> Session:
        """Place a source on a mesh.

        Raises:
          ValueError: `async_collectives` names what is no kind of collective.
        """
        machine = Machine.of(topology, mesh, async_collectives)
        notes = [machine.placement.note] if machine.placement.note else []
        if async_collectives is not None:
            notes.append(
                f"run beside kernels, as asked: {', '.join(sorted(machine.beside)) or 'no collectives'}"
            )
        return cls(
            source=source,
            machine=machine,
            loop_trips=loop_trips,
            windowed_einsum=windowed_einsum,
            notes=notes,
        )

    @cached_property
    def fusions(self) -> Fusions:
        """Groups that share kernels, and values that are not stored."""
        source = self.source
        replaced = {j: i for j, i in source.state.items() if source.donated[i]}
        return fusions_of(source.block, tails=not self.windowed_einsum, replaced=replaced)

    @cached_property
    def resharder(self) -> Resharder:
        """Plans and prices of resharding."""
        return Resharder(self.machine)

    def program(self, decisions: Decisions, mesh: Any = None) -> Callable[..., tuple[Any, ...]]:
        """Return the per-device program as a function of flat inputs."""
        return spmd(self.source.block, decisions, self.resharder, mesh or abstract_mesh(self.machine.mesh))

    def estimate(self, decisions: Decisions) -> Estimate:
        """Emit the per-device program and price it."""
        return self.priced(self.emitted(decisions))

    def emitted(self, decisions: Decisions) -> ClosedJaxpr:
        """Emit the per-device program as a jaxpr."""
        avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self.source.traced.in_avals]
        return jax.make_jaxpr(self.program(decisions))(*avals)

    def priced(self, closed: ClosedJaxpr) -> Estimate:
        """Price a per-device program of this source on this machine."""
        numbers = number_groups(self.source.block)
        source = self.source
        return estimate(
            closed,
            self.machine,
            donated=[*source.donated, *(False for _ in source.block.consts)],
            names=[*source.traced.in_names, *(v.name for v, _ in source.block.consts)],
            categories=[*source.categories, *("constants" for _ in source.block.consts)],
            sources={n: item.source for item, n in numbers.items()},
            fused={numbers[item]: part for item, part in self.fusions.groups.items()},
            loop_trips=self.loop_trips,
        )

    def plan(self, name: str, decisions: Decisions, **fields: Any) -> Plan:
        """Make a Plan of decisions."""
        source, traced, machine = self.source, self.source.traced, self.machine
        found = fields.pop("estimate", None) or self.estimate(decisions)
        notes = [*self.notes, *fields.pop("notes", ()), *found.notes, *source.remarks]
        timings = {**source.timings, **fields.pop("timings", {})}
        limit = fields.pop("memory_limit_bytes", None) or machine.usable_bytes
        coverage = source.coverage(found)
        return Plan(
            name=name,
            topology=str(machine.placement.topology),
            mesh=dict(machine.mesh),
            device_order=machine.placement.device_order,
            inputs=tuple(
                Leaf(path=n, shape=tuple(a.shape), dtype=str(a.dtype), donated=d, category=c)
                for n, a, d, c in zip(
                    traced.in_names, traced.in_avals, source.donated, source.categories, strict=True
                )
            ),
            outputs=tuple(
                Leaf(path=n, shape=tuple(a.shape), dtype=str(a.dtype))
                for n, a in zip(traced.out_names, traced.out_avals, strict=True)
            ),
            input_layouts=tuple(decisions.layouts[v] for v in source.block.inputs),
            output_layouts=decisions.outputs,
            value_layouts=tuple(decisions.layouts[v] for v in deciding_values(source.block)),
            assignments=tuple(
                decisions.assignments.get(item, {}) for item in source.block.walk() if _decided(item)
            ),
            fingerprint=source.fingerprint,
            estimate=found,
            memory_limit_bytes=limit,
            coverage=coverage,
            notes=tuple(dict.fromkeys(notes)),
            timings=timings,
            in_tree=traced.in_tree,
            out_tree=traced.out_tree,
            **fields,
        )


def _decided(item: Any) -> bool:
    return item.kind not in (Kind.CONTROL, Kind.IDENTITY)


def decisions_of(plan: Plan, block: Block) -> Decisions:
    """Read a plan's decisions for the groups of the program that it was made for."""
    groups = [item for item in block.walk() if _decided(item)]
    return Decisions(
        assignments=dict(zip(groups, plan.assignments, strict=True)),
        layouts=dict(zip(deciding_values(block), plan.value_layouts, strict=True)),
        outputs=plan.output_layouts,
    )
