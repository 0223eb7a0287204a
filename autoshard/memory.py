"""Peak HBM of a per-device program, by liveness in padded bytes.

A buffer lives from the kernel that makes it to the last one that reads it. What never leaves a kernel needs
none; views, barriers, in-place updates and loop carries share their operand's. An elementwise kernel and an
all-reduce may overwrite an operand that dies in it. Inputs stay unless donated. A kernel with a large result may
wait until the result is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import Literal

from autoshard.partition.price import COLLECTIVES, Machine

__all__ = ["Buffer", "Peak", "peak_memory"]


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """An array that is live at the peak."""

    name: str
    category: str
    bytes: float
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The fullest moment of a step: its total, where it is, and what is live then."""

    total_bytes: float
    where: str
    buffers: tuple[Buffer, ...]
    argument_bytes: float
    output_bytes: float

    def by_category(self) -> dict[str, float]:
        """Bytes per category at the peak."""
        parts: dict[str, float] = {}
        for buffer in self.buffers:
            parts[buffer.category] = parts.get(buffer.category, 0.0) + buffer.bytes
        return parts


_ALIASES = frozenset({"optimization_barrier", "pvary", "copy"})
_IN_PLACE = frozenset({"dynamic_update_slice", "scatter", "scatter-add", "scatter_add"})
_WRITES = _IN_PLACE | {"scan", "while"}


@dataclass
class _Root:
    bytes: float
    name: str
    category: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    end: int = -1
    keep: bool = False


def peak_memory(
    jaxpr: Any,
    machine: Machine,
    *,
    donated: Sequence[bool] | None,
    names: Sequence[str],
    categories: Sequence[str],
    kernels_of: Callable[[Any], list[tuple[Any, list[Any]]]],
    unstored: Mapping[Any, list[Any]],
) -> Peak:
    """Find the peak of a mapped body.

    `unstored` arrays have no buffer: who reads one computes it from what the equations given with it read.
    """
    walker = _Liveness(machine, kernels_of, unstored)
    count = len(jaxpr.invars)
    donated = donated if donated is not None else [False] * count
    names = list(names) + [f"input {i}" for i in range(len(names), count)]
    categories = list(categories) + ["input"] * (count - len(categories))
    return walker.program(jaxpr, donated, names, categories)


class _Liveness:
    def __init__(
        self,
        machine: Machine,
        kernels_of: Callable[[Any], list[tuple[Any, list[Any]]]],
        unstored: Mapping[Any, list[Any]],
    ) -> None:
        self.machine = machine
        self.kernels_of = kernels_of
        self.unstored = unstored
        self._sources: dict[Any, tuple[Any, ...]] = {}
        self._inner: dict[tuple[int, ...], tuple[float, str, list[_Root]]] = {}

    def program(
        self, jaxpr: Any, donated: Sequence[bool], names: Sequence[str], categories: Sequence[str]
    ) -> Peak:
        roots: dict[Any, _Root] = {}
        for var, gives, name, category in zip(
            jaxpr.invars, donated, names[: len(jaxpr.invars)], categories, strict=True
        ):
            roots[var] = self._root(var, name, category, 0)
            roots[var].keep = not gives
        arguments = sum(r.bytes for r in roots.values())
        total, where, live = self._body(jaxpr, roots, owns_inputs=True)
        outputs = {
            id(roots[v]): roots[v].bytes for v in jaxpr.outvars if not isinstance(v, Literal) and v in roots
        }
        buffers = sorted(live, key=lambda r: -r.bytes)
        return Peak(
            total_bytes=total,
            where=where,
            buffers=tuple(
                Buffer(name=r.name, category=r.category, bytes=r.bytes, shape=r.shape, dtype=r.dtype)
                for r in buffers
                if r.bytes
            ),
            argument_bytes=arguments,
            output_bytes=sum(outputs.values()),
        )

    def _stored(self, var: Any) -> tuple[Any, ...]:
        """The stored arrays that a kernel reads where its equations read `var`."""
        if isinstance(var, Literal):
            return ()
        if var not in self.unstored:
            return (var,)
        if var not in self._sources:
            eqns = self.unstored[var]
            made = {v for e in eqns for v in e.outvars}
            read = dict.fromkeys(
                v for e in eqns for v in e.invars if not isinstance(v, Literal) and v not in made
            )
            self._sources[var] = tuple(dict.fromkeys(s for v in read for s in self._stored(v)))
        return self._sources[var]

    def _reads(self, eqns: list[Any]) -> list[Any]:
        """The stored arrays that equations read."""
        return list(dict.fromkeys(s for e in eqns for v in e.invars for s in self._stored(v)))

    def _root(self, var: Any, name: str, category: str, start: int) -> _Root:
        aval = var.aval
        return _Root(
            bytes=float(self.machine.stored_bytes(aval)),
            name=name,
            category=category,
            shape=tuple(aval.shape),
            dtype=str(aval.dtype),
            start=start,
        )

    def _body(
        self, jaxpr: Any, roots: dict[Any, _Root], *, owns_inputs: bool
    ) -> tuple[float, str, list[_Root]]:
        """Peak of a body beyond what its caller counts: inputs count only at the top.

        Of the program's own order and one that puts large results off, the better counts, as a compiler
        schedules. `roots` is left as that order makes it.
        """
        own = self.kernels_of(jaxpr)
        late = self._late(jaxpr, own)
        attempts = []
        for kernels in (own, late) if late != own else (own,):
            copied = {var: replace(root) for var, root in roots.items()}
            attempts.append((self._ordered(jaxpr, kernels, copied, owns_inputs=owns_inputs), copied))
        found, made = min(attempts, key=lambda attempt: attempt[0][0])
        roots.update(made)
        return found

    def _ordered(
        self,
        jaxpr: Any,
        kernels: list[tuple[Any, list[Any]]],
        roots: dict[Any, _Root],
        *,
        owns_inputs: bool,
    ) -> tuple[float, str, list[_Root]]:
        """Peak of a body whose kernels run in the given order."""
        outside = {v for v in roots} if not owns_inputs else set()
        last: dict[Any, int] = {}
        for t, (_, eqns) in enumerate(kernels):
            last.update(dict.fromkeys(self._reads(eqns), t))
        end = len(kernels)
        for var in jaxpr.outvars:
            if not isinstance(var, Literal):
                last[var] = end
        inner: list[tuple[float, str, list[_Root]]] = []
        for t, (tag, eqns) in enumerate(kernels):
            inner.append(self._inner_peak(eqns))
            for eqn in eqns:
                for i, var in enumerate(eqn.outvars):
                    if last.get(var, -1) <= t or var in self.unstored:
                        continue
                    source = self._alias(eqn, i, eqns, last, t)
                    if source in roots and (eqn.primitive.name not in _WRITES or not roots[source].keep):
                        roots[var] = roots[source]
                        roots[var].end = max(roots[var].end, last[var])
                    else:
                        title = tag[1] if tag else eqn.primitive.name
                        category = "collective" if eqn.primitive.name in COLLECTIVES else "temporary"
                        roots[var] = self._root(var, title, category, t)
        for var, root in roots.items():
            root.end = max(root.end, last.get(var, -1))
        for var in jaxpr.invars:
            if var in roots and (roots[var].keep or not owns_inputs):
                roots[var].end = end
        unique = {id(r): r for v, r in roots.items()}
        excluded = {id(roots[v]) for v in outside}
        counted = [r for i, r in unique.items() if i not in excluded]
        return self._sweep(kernels, counted, inner, end)

    def _late(self, jaxpr: Any, kernels: list[tuple[Any, list[Any]]]) -> list[tuple[Any, list[Any]]]:
        """Put off kernels whose results are larger than what they alone keep alive, as a compiler would.

        Such a kernel runs just before the first that reads it, or at the end of the body.
        """
        end = len(kernels)
        readers: dict[Any, list[int]] = {}
        for t, (_, eqns) in enumerate(kernels):
            for var in self._reads(eqns):
                readers.setdefault(var, []).append(t)
        for var in jaxpr.outvars:
            if not isinstance(var, Literal):
                readers.setdefault(var, []).append(end)
        given = {*jaxpr.invars, *jaxpr.constvars}
        place = [float(t) for t in range(end)]
        for t in reversed(range(end)):
            tag, eqns = kernels[t]
            if tag is None or any(_bodies(eqn) for eqn in eqns):
                continue
            made = {v for eqn in eqns for v in eqn.outvars} - self.unstored.keys()
            first = min(
                (place[r] if r < end else float(end) for v in made for r in readers.get(v, []) if r != t),
                default=place[t],
            )
            if first <= place[t] + 1:
                continue
            held = set(self._reads(eqns)) - made - given
            prolonged = [v for v in held if all(place[r] < first for r in readers[v] if r < end and r != t)]
            gained = sum(self._bytes(v) for v in made if any(r != t for r in readers.get(v, [])))
            if gained > sum(self._bytes(v) for v in prolonged if end not in readers[v]):
                place[t] = first - 0.5
        order = sorted(range(end), key=lambda t: (place[t], t))
        return [kernels[t] for t in order]

    def _bytes(self, var: Any) -> float:
        return float(self.machine.stored_bytes(var.aval))

    def _sweep(
        self,
        kernels: list[tuple[Any, list[Any]]],
        counted: list[_Root],
        inner: list[tuple[float, str, list[_Root]]],
        end: int,
    ) -> tuple[float, str, list[_Root]]:
        starts: dict[int, list[_Root]] = {}
        stops: dict[int, list[_Root]] = {}
        for root in counted:
            starts.setdefault(root.start, []).append(root)
            stops.setdefault(root.end, []).append(root)
        live: dict[int, _Root] = {}
        now = best = 0.0
        where, snapshot = "arguments", [r for r in counted if r.start == 0]
        for t in range(end + 1):
            reuse = t < end and self._overwrites(kernels[t])
            if reuse:
                now -= sum(r.bytes for r in stops.get(t, []) if live.pop(id(r), None))
            for root in starts.get(t, []):
                live[id(root)] = root
                now += root.bytes
            extra, inner_where, inner_live = inner[t] if t < end else (0.0, "", [])
            if now + extra > best:
                best = now + extra
                where = inner_where or (_title(kernels[t]) if t < end else "outputs")
                snapshot = [*live.values(), *inner_live]
            if not reuse:
                now -= sum(r.bytes for r in stops.get(t, []) if live.pop(id(r), None))
        return best, where, snapshot

    def _overwrites(self, kernel: tuple[Any, list[Any]]) -> bool:
        """Tell whether a kernel, or an all-reduce, may write over an operand that dies in it."""
        tag, eqns = kernel
        if COLLECTIVES.get(eqns[0].primitive.name) == "all_reduce":
            return True
        heavy = ("dot_general", "conv_general_dilated", "gather", "sort", "transpose", "concatenate", "scan")
        return tag is not None and not any(e.primitive.name in heavy for e in eqns)

    def _inner_peak(self, eqns: list[Any]) -> tuple[float, str, list[_Root]]:
        """Peak inside the bodies of a loop or branch, beyond what the loop takes and returns."""
        key = tuple(map(id, eqns))
        if key not in self._inner:
            self._inner[key] = self._peak_of_bodies(eqns)
        return self._inner[key]

    def _peak_of_bodies(self, eqns: list[Any]) -> tuple[float, str, list[_Root]]:
        found: tuple[float, str, list[_Root]] = (0.0, "", [])
        for eqn in eqns:
            for body in _bodies(eqn):
                roots = {v: self._root(v, "loop input", "loop", 0) for v in body.invars}
                for v, written in zip(body.invars, _carried(eqn, len(body.invars)), strict=True):
                    roots[v].keep = not written
                peak = self._body(body, roots, owns_inputs=False)
                slices: list[_Root] = []
                if eqn.primitive.name == "scan":
                    first = eqn.params["num_consts"] + eqn.params["num_carry"]
                    copied = [v for v in body.invars[first:] if v not in self.unstored]
                    slices = [self._root(v, "slice of a scan", "loop", 0) for v in copied]
                total = peak[0] + sum(r.bytes for r in slices)
                if total > found[0]:
                    found = (total, f"{eqn.primitive.name}: {peak[1]}", [*peak[2], *slices])
        return found

    def _alias(self, eqn: Any, i: int, eqns: list[Any], last: dict[Any, int], t: int) -> Any:
        """The operand whose buffer result i takes over, if any."""
        name = eqn.primitive.name
        operands = eqn.invars
        if name in _ALIASES and not isinstance(operands[min(i, len(operands) - 1)], Literal):
            return operands[i]
        if (
            len(eqns) == 1
            and self.machine.is_view(eqns)
            and operands
            and not isinstance(operands[0], Literal)
        ):
            return operands[0]
        if name in _IN_PLACE and not isinstance(operands[0], Literal) and last.get(operands[0]) == t:
            return operands[0]
        if name in ("scan", "while"):
            first = (
                eqn.params["num_consts"]
                if name == "scan"
                else eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
            )
            count = eqn.params["num_carry"] if name == "scan" else len(eqn.outvars)
            if i < count and not isinstance(operands[first + i], Literal):
                carried = operands[first + i]
                if last.get(carried) == t:
                    return carried
        return None


def _bodies(eqn: Any) -> list[Any]:
    if eqn.primitive.name == "scan":
        return [eqn.params["jaxpr"].jaxpr]
    if eqn.primitive.name == "while":
        return [eqn.params["body_jaxpr"].jaxpr]
    if eqn.primitive.name == "cond":
        return [b.jaxpr for b in eqn.params["branches"]]
    return []


def _carried(eqn: Any, count: int) -> list[bool]:
    """Which inputs of the body a loop carries, and so may overwrite."""
    if eqn.primitive.name == "scan":
        first, carries = eqn.params["num_consts"], eqn.params["num_carry"]
        return [first <= i < first + carries for i in range(count)]
    if eqn.primitive.name == "while":
        return [i >= eqn.params["body_nconsts"] for i in range(count)]
    return [False] * count


def _title(kernel: tuple[Any, list[Any]]) -> str:
    tag, eqns = kernel
    return str(tag[1] if tag else eqns[0].primitive.name)
