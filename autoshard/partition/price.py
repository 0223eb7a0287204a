"""What the parts of a per-device program cost on a machine: kernels and collectives.

There is one set of prices. The search prices a candidate from the equations that its emission traces to, the
estimate walks the equations of the whole program, and both ask the `Machine` here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from jax.extend.core import Literal

import cost_models as cm
from autoshard.fusion import PLAIN, Fused, Rider, Tail
from autoshard.layout import Axes, MeshShape, coordinates, mesh_size, position
from autoshard.partition.nested import bodies
from autoshard.partition.vector import vector_work
from autoshard.program import Equation, itemsize, on_host

__all__ = ["COLLECTIVES", "Cost", "Machine"]

# Collective primitives of JAX, and the kind that each is priced as.
COLLECTIVES: Mapping[str, str] = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ppermute": "collective_permute",
}
# Ops that only rename or count: addresses and positions, worked out by the scalar unit.
_FREE = frozenset(
    "axis_index copy empty empty2 optimization_barrier platform_index pvary random_unwrap random_wrap".split()
)


# Share of the HBM that is left free by default: a predicted peak is that uncertain, and a compiler that runs
# short recomputes in silence.
HEADROOM = 0.05


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of each unit, and the bytes and flops behind them. `seconds` is what the step pays."""

    seconds: float = 0.0
    matrix_seconds: float = 0.0
    vector_seconds: float = 0.0
    hbm_seconds: float = 0.0
    ici_seconds: float = 0.0
    flops: float = 0.0
    hbm_bytes: float = 0.0
    ici_bytes: float = 0.0


FREE = Cost()


@dataclass(frozen=True, eq=False, kw_only=True)
class Machine:
    """A logical mesh placed on a slice: all that prices depend on.

    `beside` are the kinds of collectives that run beside kernels.
    """

    placement: cm.Placement
    mesh: MeshShape
    beside: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, topology: cm.Topology, mesh: Mapping[str, int], async_collectives: Iterable[str] | None = None
    ) -> Machine:
        """Place `mesh` on `topology` in the natural order.

        Raises:
          ValueError: `async_collectives` names what is no kind of collective.
        """
        beside = topology.chip.async_collectives if async_collectives is None else async_collectives
        unknown = sorted(set(beside) - set(cm.COLLECTIVES))
        if unknown:
            raise ValueError(
                f"async_collectives names {', '.join(map(repr, unknown))}; the kinds are {', '.join(cm.COLLECTIVES)}."
            )
        return cls(placement=cm.place(topology, mesh), mesh=dict(mesh), beside=frozenset(beside))

    @cached_property
    def chip(self) -> cm.Chip:
        """Figures of one device."""
        return self.placement.topology.chip

    @cached_property
    def usable_bytes(self) -> float:
        """HBM of one device that a plan may use by default."""
        return (1 - HEADROOM) * self.chip.hbm_capacity_bytes

    def bytes_of(self, shape: Sequence[int], dtype: Any) -> int:
        """Bytes of a local array in HBM, tiles padded."""
        return cm.padded_bytes(self.chip, tuple(shape), itemsize(dtype))

    def stored_bytes(self, aval: Any) -> int:
        """Bytes that a local array takes in HBM; none of one in the host's memory.

        What is put there or fetched crosses HBM once, and the link to the host beside other work: that takes no time.
        """
        return 0 if on_host(aval) else self.bytes_of(aval.shape, aval.dtype)

    # Collectives ------------------------------------------------------------------------------

    def collective_cost(
        self, kind: Any, before: Sequence[int], after: Sequence[int], dtype: Any, axes: Axes
    ) -> Cost:
        """Price a collective by the local shapes that it takes and returns."""
        ways = mesh_size(axes, self.mesh)
        taken, returned = (math.prod(s) * itemsize(dtype) for s in (before, after))
        full = {
            "all_gather": returned,
            "all_to_all": taken * ways,
            "collective_permute": taken,
        }.get(kind, taken)
        found = cm.collective_seconds(kind, full, tuple(axes), self.placement)
        return self._wire(found, before, after, dtype)

    def permute_cost(
        self, shape: Sequence[int], dtype: Any, axes: Axes, pairs: Iterable[tuple[int, int]]
    ) -> Cost:
        """Price a permute between positions along `axes`, alike in every group."""
        key = (tuple(shape), dtype, axes, tuple(pairs))
        if key not in self._permutes:
            size = math.prod(shape) * itemsize(dtype)
            route = axes, key[3]
            if route not in self._routes:
                self._routes[route] = tuple(self._global_pairs(*route))
            found = cm.permutation_seconds(size, self._routes[route], self.placement)
            self._permutes[key] = self._wire(found, shape, shape, dtype)
        return self._permutes[key]

    @cached_property
    def _permutes(self) -> dict[Any, Cost]:
        return {}

    @cached_property
    def _routes(self) -> dict[Any, tuple[tuple[int, int], ...]]:
        return {}

    def _global_pairs(self, axes: Axes, pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        names, others = tuple(self.mesh), tuple(a for a in self.mesh if a not in axes)
        along = [tuple(coordinates(p, axes, self.mesh) for p in pair) for pair in pairs]
        result = []
        for rest in range(mesh_size(others, self.mesh)):
            fixed = coordinates(rest, others, self.mesh)
            for a, b in along:
                result.append((position(fixed | a, names, self.mesh), position(fixed | b, names, self.mesh)))
        return result

    def _wire(
        self, found: cm.CollectiveCost, before: Sequence[int], after: Sequence[int], dtype: Any
    ) -> Cost:
        touched = self.bytes_of(before, dtype) + self.bytes_of(after, dtype)
        hbm = cm.hbm_seconds(self.chip, touched) if found.seconds else 0.0
        return Cost(
            seconds=max(found.seconds, hbm),
            ici_seconds=max(found.seconds, hbm),
            hbm_bytes=touched if found.seconds else 0.0,
            ici_bytes=found.sent_bytes,
        )

    def slice_cost(self, after: Sequence[int], dtype: Any) -> Cost:
        """Price of cutting this device's part out of a local array."""
        touched = 2 * self.bytes_of(after, dtype)
        seconds = cm.hbm_seconds(self.chip, touched)
        return Cost(seconds=seconds, hbm_seconds=seconds, hbm_bytes=touched)

    # Kernels ----------------------------------------------------------------------------------

    def eqn_collective(self, eqn: Equation) -> Cost:
        """Price a collective equation."""
        kind = COLLECTIVES[eqn.primitive.name]
        axes = eqn.params.get("axes") or eqn.params.get("axis_name")
        names: Axes = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
        before = eqn.invars[0].aval
        if kind == "collective_permute":
            return self.permute_cost(before.shape, before.dtype, names, eqn.params["perm"])
        total = [
            self.collective_cost(kind, a.aval.shape, b.aval.shape, a.aval.dtype, names)
            for a, b in zip(eqn.invars, eqn.outvars, strict=True)
        ]
        return add_costs(total)

    def kernel(
        self,
        eqns: Sequence[Equation],
        outputs: Iterable[Any],
        fused: Fused = PLAIN,
        riders: Mapping[Any, Rider] = MappingProxyType({}),
    ) -> Cost:
        """Price equations that run as one kernel.

        Operands from outside are read from HBM once, `outputs` written once; in between nothing is stored. Of
        operands in `riders` the kernel reads what they are computed from. The slowest unit counts.
        """
        if not fused.runs or self.is_view(eqns):
            return FREE
        made = {v: e for e in eqns for v in e.outvars}
        matrix = vector = flops = 0.0
        reads: dict[Any, float] = {}
        in_place = 0.0
        for eqn in eqns:
            work = self._work(eqn)
            matrix += work.matrix_seconds
            vector += work.vector_seconds
            flops += work.flops
            for i, var in enumerate(eqn.invars):
                if not isinstance(var, Literal) and var not in made and var not in riders:
                    reads[var] = max(reads.get(var, 0.0), self._read_bytes(eqn, i))
            in_place += self._in_place_bytes(eqn)
        inputs = dict.fromkeys(v for e in eqns for v in e.invars if not isinstance(v, Literal))
        for var in (v for v in inputs if v in riders and v not in made):
            rider = riders[var]
            for base, size in rider.reads:
                reads[base] = max(reads.get(base, 0.0), self._per_element(var, size))
            vector += self._vector(var, rider.work)
        written = [v for v in dict.fromkeys(outputs) if v in made]
        touched = sum(reads.values())
        stores: list[tuple[float, float]] = [
            (self.stored_bytes(v.aval), itemsize(v.aval.dtype)) for v in written
        ]
        if fused.tail is not None:
            (result,) = written
            touched += self._per_element(result, fused.tail.read_bytes)
            vector += self._vector(result, fused.tail.work)
            stores = stores if fused.tail.stored else []
            stores += [(self._per_element(result, size), size) for size in fused.tail.written]
        if matrix:
            leaving = sum(cm.result_seconds(self.chip, total, size) for total, size in stores)
            return self._kernel_cost(matrix, vector, touched, flops, leaving, sum(n for n, _ in stores))
        touched += max(0.0, sum(n for n, _ in stores) - in_place)
        return self._kernel_cost(matrix, vector, touched, flops)

    def _kernel_cost(
        self,
        matrix: float,
        vector: float,
        touched: float,
        flops: float = 0.0,
        leaving: float = 0.0,
        results: float = 0.0,
    ) -> Cost:
        """Price a kernel; `leaving` are the seconds that the `results` of a product take, in bytes, if it is one."""
        hbm = cm.hbm_seconds(self.chip, touched) + leaving
        touched += results
        return Cost(
            seconds=max(matrix, vector, hbm) + self.chip.kernel_overhead_seconds,
            matrix_seconds=matrix,
            vector_seconds=vector,
            hbm_seconds=hbm,
            flops=flops,
            hbm_bytes=touched,
        )

    def _per_element(self, var: Any, size: float) -> float:
        """Bytes of an array like `var` with elements of `size` bytes."""
        return self.bytes_of(var.aval.shape, var.aval.dtype) * size / itemsize(var.aval.dtype)

    def _vector(self, var: Any, work: float) -> float:
        """Seconds of `work` cheap operations on every element of an array like `var`."""
        return cm.vector_seconds(self.chip, elements=math.prod(var.aval.shape) * work)

    def copying_cost(self, var: Any) -> Cost:
        """Price of copying an array, such as a turn of a scan does with what it slices or stacks."""
        size = self.stored_bytes(var.aval)
        return self._kernel_cost(0.0, 0.0, 2 * size) if size else FREE

    def storing_cost(self, var: Any, rider: Rider) -> Cost:
        """Price of computing and storing a value, for a reshard, that readers else compute on the spot."""
        touched = self._per_element(var, itemsize(var.aval.dtype) + rider.read_bytes)
        return self._kernel_cost(0.0, self._vector(var, rider.work), touched)

    def parting_cost(self, var: Any, tail: Tail) -> Cost:
        """Price of storing a product's result, for a reshard between the product and what ends its kernel."""
        return (
            FREE
            if tail.stored
            else self._kernel_cost(0.0, 0.0, self._per_element(var, itemsize(var.aval.dtype)))
        )

    def apart_cost(self, var: Any, tail: Tail) -> Cost:
        """Price of what else ends a product's kernel as a kernel of its own, which reads the result `var`."""
        touched = self._per_element(var, itemsize(var.aval.dtype) + tail.read_bytes + sum(tail.written))
        return self._kernel_cost(0.0, self._vector(var, tail.work), touched)

    def is_view(self, eqns: Sequence[Equation]) -> bool:
        """Tell a kernel that moves nothing: free ops, and reshapes that keep rows of whole lanes."""
        return all(e.primitive.name in _FREE or self._is_bitcast(e) for e in eqns)

    def _is_bitcast(self, eqn: Equation) -> bool:
        if eqn.primitive.name not in ("reshape", "squeeze", "expand_dims", "broadcast_in_dim"):
            return False
        if (
            isinstance(eqn.invars[0], Literal)
            or eqn.params.get("dimensions")
            and eqn.primitive.name == "reshape"
        ):
            return False
        before = [n for n in eqn.invars[0].aval.shape if n > 1]
        after = [n for n in eqn.outvars[0].aval.shape if n > 1]
        if before == after:
            return True
        if eqn.primitive.name != "reshape" or not before or not after:
            return False
        lanes = self.chip.lanes
        return bool(before[-1] == after[-1] or (before[-1] % lanes == 0 and after[-1] % lanes == 0))

    def _read_bytes(self, eqn: Equation, i: int) -> float:
        """Bytes that an equation reads of one operand."""
        name = eqn.primitive.name
        aval = eqn.invars[i].aval
        if i == 0 and name in ("gather", "dynamic_slice", "slice"):
            out = eqn.outvars[0].aval
            return min(self.bytes_of(out.shape, out.dtype), self.bytes_of(aval.shape, aval.dtype))
        if i == 0 and name == "dynamic_update_slice":
            return 0.0
        if i == 0 and name.startswith("scatter"):
            updates = eqn.invars[2].aval
            return self.bytes_of(updates.shape, updates.dtype)
        return self.stored_bytes(aval)

    def _in_place_bytes(self, eqn: Equation) -> float:
        """Bytes of the result that stay where they are."""
        name = eqn.primitive.name
        if name == "dynamic_update_slice" or name.startswith("scatter"):
            out = eqn.outvars[0].aval
            update = eqn.invars[1 if name == "dynamic_update_slice" else 2].aval
            return max(0.0, self.bytes_of(out.shape, out.dtype) - self.bytes_of(update.shape, update.dtype))
        return 0.0

    def _work(self, eqn: Equation, resident: bool = False) -> Cost:
        """Price what the units do; the operands are `resident` in VMEM inside a kernel of Pallas.

        Such a kernel keeps the units busy side by side, as any other: the compiler's schedules of flash attention
        on v5e and v6e take as long as the busier unit within 15 %. On v7x they take a third less for a forward pass;
        for a backward pass on v5p they say less than the matrix unit needs, so they are no proof.
        """
        name = eqn.primitive.name
        if name in _FREE:
            return FREE
        inner = bodies(eqn)
        if inner:
            within = resident or name == "pallas_call"
            return add_costs(
                add_costs((self._work(e, within) for e in body.eqns), times) for body, times in inner
            )
        if name == "dot_general":
            return self._dot(eqn, resident)
        if name == "ragged_dot_general":
            return self._ragged_dot(eqn)
        if name == "conv_general_dilated":
            return self._convolution(eqn)
        elements, op_class, flops = vector_work(eqn)
        return Cost(
            vector_seconds=cm.vector_seconds(self.chip, elements=elements, op_class=op_class), flops=flops
        )

    def _dot(self, eqn: Equation, resident: bool) -> Cost:
        left, right = eqn.invars[0].aval, eqn.invars[1].aval
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
        batch = math.prod(left.shape[i] for i in lhs_batch)
        k = math.prod(left.shape[i] for i in lhs_contract)
        m = math.prod(n for i, n in enumerate(left.shape) if i not in (*lhs_contract, *lhs_batch))
        n = math.prod(n for i, n in enumerate(right.shape) if i not in (*rhs_contract, *rhs_batch))
        if 1 in (m, k, n):
            return self._vector_product(batch, m, k, n)
        return self._product(eqn, batch, m, k, n, resident)

    def _vector_product(self, batch: int, m: int, k: int, n: int) -> Cost:
        """Price the multiplications and sums that XLA makes of products with a vector, or of two."""
        elements = batch * m * k * n
        seconds = cm.vector_seconds(self.chip, elements=elements)
        if k > 1:
            seconds += cm.vector_seconds(self.chip, elements=elements, op_class="reduce_minor")
        return Cost(vector_seconds=seconds, flops=2.0 * elements)

    def _ragged_dot(self, eqn: Equation) -> Cost:
        """Price all rows that are there: how many lie in the groups that a device has is not known."""
        left, right = eqn.invars[0].aval, eqn.invars[1].aval
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
        groups = numbers.rhs_group_dimensions
        batch = math.prod(left.shape[i] for i in lhs_batch)
        k = math.prod(left.shape[i] for i in lhs_contract)
        m = math.prod(n for i, n in enumerate(left.shape) if i not in (*lhs_contract, *lhs_batch))
        n = math.prod(n for i, n in enumerate(right.shape) if i not in (*rhs_contract, *rhs_batch, *groups))
        return self._product(eqn, batch, m, k, n)

    def _product(self, eqn: Equation, batch: int, m: int, k: int, n: int, resident: bool = False) -> Cost:
        size = max(itemsize(eqn.invars[0].aval.dtype), itemsize(eqn.invars[1].aval.dtype))
        precision = _precision(eqn, size)
        seconds = cm.matmul_seconds(
            self.chip, batch=batch, m=m, k=k, n=n, dtype_bytes=size, precision=precision, resident=resident
        )
        return Cost(matrix_seconds=seconds, flops=2.0 * batch * m * k * n)

    def _convolution(self, eqn: Equation) -> Cost:
        numbers = eqn.params["dimension_numbers"]
        left, right, out = eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0].aval
        groups = eqn.params["feature_group_count"]
        batch_groups = eqn.params["batch_group_count"]
        window = tuple(right.shape[i] for i in numbers.rhs_spec[2:])
        spatial = tuple(out.shape[i] for i in numbers.out_spec[2:])
        dilation = math.prod(eqn.params["lhs_dilation"])
        taps = math.prod(window) / dilation  # taps that fall between dilated elements multiply nothing
        in_features = left.shape[numbers.lhs_spec[1]]
        out_features = out.shape[numbers.out_spec[1]]
        batch = out.shape[numbers.out_spec[0]]
        size = max(itemsize(left.dtype), itemsize(right.dtype))
        seconds = cm.convolution_seconds(
            self.chip,
            batch=batch,
            out_spatial=spatial,
            in_features=in_features * batch_groups,
            out_features=out_features,
            window=window,
            groups=groups * batch_groups,
            dtype_bytes=size,
            precision=_precision(eqn, size),
        )
        flops = 2.0 * batch * math.prod(spatial) * out_features * (in_features / groups) * taps
        return Cost(matrix_seconds=seconds / dilation, flops=flops)


def _precision(eqn: Equation, size: float) -> Any:
    given = eqn.params.get("precision")
    if given is None or size < 4:
        return "default"
    first = given[0] if isinstance(given, tuple) else given
    return {"HIGH": "high", "HIGHEST": "highest"}.get(getattr(first, "name", ""), "default")


def add_costs(costs: Iterable[Cost], times: float = 1.0) -> Cost:
    """Add costs up, each multiplied by `times`."""
    fields = Cost.__dataclass_fields__
    total = dict.fromkeys(fields, 0.0)
    for cost in costs:
        for name in fields:
            total[name] += times * getattr(cost, name)
    return Cost(**total)
