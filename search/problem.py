"""The problem that a search solves: one strategy per node, costs on nodes and edges, memory over time.

It is plain data (numbers and arrays), so tests write it as literals, and it knows how to score a choice.
Every later stage of `search.solve` reads it and none changes it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from search.liveness import Intervals

Floats = npt.NDArray[np.float64]


class ProblemError(ValueError):
    """A `Problem` that breaks its own contract; the message lists every offender found."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A choose-one-per-node problem.

    Minimise `sum_i costs[i][s_i] + sum_e edge_costs[e][s_i, s_j]` over one strategy `s_i` per node, such
    that at every time the bytes in use stay within `usage_limit`. Strategies are listed in order of
    preference: between equal plans the lower index wins.

    Args:
        costs: per node i a float64 array `[S_i]`; `inf` forbids the strategy. The unit is the caller's
            (seconds in autoshard).
        edges: pairs (i, j) of node indices, i != j; parallel edges add up.
        edge_costs: per edge a float64 array `[S_i, S_j]`; `inf` forbids the pair.
        names: one label per node for messages; made up from the index when left out.
        usages: per node bytes `[S_i]`, finite and >= 0; left out means that there is no memory.
        edge_usages: for the edges that need a buffer, bytes `[S_i, S_j]`, by edge index.
        live: CSR `[T, N]`, how many tensors of node i are live at time t (a tied node stands for several); or
            one interval of times per node.
        edge_live: CSR `[T, E]`, the same for the edges' buffers.
        usage_limit: bytes, at every time; None means no limit.
        fixed_usage: bytes `[T]` that are in use whatever is chosen; zero when left out.

    Raises:
        ProblemError: shapes disagree, a number is NaN, or a node or edge has no permitted strategy.

    Example:
        >>> import numpy as np
        >>> p = Problem(
        ...     costs=(np.array([1.0, 2.0]), np.array([5.0, 0.0])),
        ...     edges=((0, 1),),
        ...     edge_costs=(np.array([[0.0, 9.0], [9.0, 0.0]]),),
        ... )
        >>> p.objective((1, 1))
        2.0
        >>> print(p)
        2 nodes, 4 strategies, 1 edge, no memory limit

    """

    costs: tuple[Floats, ...]
    edges: tuple[tuple[int, int], ...] = ()
    edge_costs: tuple[Floats, ...] = ()
    names: tuple[str, ...] = ()
    usages: tuple[Floats, ...] | None = None
    edge_usages: Mapping[int, Floats] = field(default_factory=dict)
    live: sp.csr_matrix | sp.csr_array | Intervals | None = None
    edge_live: sp.csr_matrix | sp.csr_array | None = None
    usage_limit: float | None = None
    fixed_usage: Floats | None = None

    def __post_init__(self) -> None:
        """Normalise the arrays to float64 and refuse a contradictory problem, naming all offenders."""
        put = object.__setattr__
        put(self, "costs", tuple(np.asarray(c, dtype=np.float64) for c in self.costs))
        put(self, "edges", tuple((int(i), int(j)) for i, j in self.edges))
        put(self, "edge_costs", tuple(np.asarray(c, dtype=np.float64) for c in self.edge_costs))
        put(self, "names", tuple(self.names) or tuple(f"node{i}" for i in range(len(self.costs))))
        if self.usages is not None:
            put(self, "usages", tuple(np.asarray(u, dtype=np.float64) for u in self.usages))
        used = {int(e): np.asarray(u, dtype=np.float64) for e, u in sorted(self.edge_usages.items())}
        put(self, "edge_usages", used)
        if self.live is not None and not isinstance(self.live, Intervals):
            put(self, "live", sp.csr_array(self.live))
        if self.edge_live is not None:
            put(self, "edge_live", sp.csr_array(self.edge_live))
        if self.fixed_usage is not None:
            put(self, "fixed_usage", np.asarray(self.fixed_usage, dtype=np.float64))
        problems = _faults(self)
        if problems:
            shown = "\n  ".join(problems[:20])
            more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
            raise ProblemError(f"This search problem cannot be solved as stated:\n  {shown}{more}")

    @property
    def num_times(self) -> int:
        """How many times the memory is looked at (T); 0 without memory."""
        for table in (self.live, self.edge_live):
            if table is not None:
                return int(table.shape[0])
        return 0 if self.fixed_usage is None else len(self.fixed_usage)

    def objective(self, choice: Sequence[int]) -> float:
        """Total cost of one strategy per node; `inf` where something forbidden was picked."""
        total = math.fsum(float(c[s]) for c, s in zip(self.costs, choice, strict=True))
        pairs = zip(self.edges, self.edge_costs, strict=True)
        return total + math.fsum(float(c[choice[i], choice[j]]) for (i, j), c in pairs)

    def usage(self, choice: Sequence[int]) -> Floats:
        """Bytes in use at every time, shape `[T]`."""
        total = np.zeros(self.num_times)
        if self.fixed_usage is not None:
            total += self.fixed_usage
        if self.usages is not None and self.live is not None:
            total += self.live @ np.array([u[s] for u, s in zip(self.usages, choice, strict=True)])
        if self.edge_usages and self.edge_live is not None:
            buffers = np.zeros(len(self.edges))
            for e, table in self.edge_usages.items():
                i, j = self.edges[e]
                buffers[e] = table[choice[i], choice[j]]
            total += self.edge_live @ buffers
        return total

    def __str__(self) -> str:
        """One line: sizes and the memory limit."""
        strategies = sum(len(c) for c in self.costs)
        text = (
            f"{_count(len(self.costs), 'node')}, {strategies} strategies, {_count(len(self.edges), 'edge')}"
        )
        if self.usage_limit is None or not self.num_times:
            return f"{text}, no memory limit"
        return f"{text}, at most {self.usage_limit:.6g} bytes at {_count(self.num_times, 'time')}"

    def __repr__(self) -> str:
        """Repeat the summary line; the arrays are too long to print."""
        return f"<Problem: {self}>"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _faults(p: Problem) -> list[str]:
    """Every way in which the problem contradicts itself, as sentences."""
    out: list[str] = []
    n = len(p.costs)
    if len(p.names) != n:
        out.append(f"names has {len(p.names)} entries for {n} nodes.")
        return out
    for i, cost in enumerate(p.costs):
        label = f"node {i} ({p.names[i]})"
        if cost.ndim != 1:
            out.append(f"{label}: costs has shape {cost.shape}; give one number per strategy.")
        elif np.isnan(cost).any() or np.isneginf(cost).any():
            out.append(f"{label}: costs contains NaN or -inf.")
        elif not np.isfinite(cost).any():
            out.append(f"{label}: all of its {len(cost)} strategies are forbidden; permit at least one.")
    if out:
        return out
    if len(p.edges) != len(p.edge_costs):
        out.append(f"{len(p.edges)} edges come with {len(p.edge_costs)} cost tables.")
        return out
    for e, ((i, j), cost) in enumerate(zip(p.edges, p.edge_costs, strict=True)):
        if not (0 <= i < n and 0 <= j < n) or i == j:
            out.append(f"edge {e} joins nodes {i} and {j}; give two different nodes in 0..{n - 1}.")
            continue
        label = f"edge {e} ({p.names[i]} -> {p.names[j]})"
        if cost.shape != (len(p.costs[i]), len(p.costs[j])):
            want = (len(p.costs[i]), len(p.costs[j]))
            out.append(f"{label}: costs has shape {cost.shape}; its nodes' strategies make {want}.")
        elif np.isnan(cost).any() or np.isneginf(cost).any():
            out.append(f"{label}: costs contains NaN or -inf.")
    return out or _memory_faults(p)


def _memory_faults(p: Problem) -> list[str]:
    out: list[str] = []
    n, e, t = len(p.costs), len(p.edges), p.num_times
    if (p.usages is None) != (p.live is None):
        out.append("usages and live go together; one of them is missing.")
    if bool(p.edge_usages) != (p.edge_live is not None):
        out.append("edge_usages and edge_live go together; one of them is missing.")
    if p.usages is not None and len(p.usages) != n:
        out.append(f"usages has {len(p.usages)} entries for {n} nodes.")
    elif p.usages is not None:
        for i, usage in enumerate(p.usages):
            if usage.shape != p.costs[i].shape:
                out.append(
                    f"node {i} ({p.names[i]}): usages has shape {usage.shape}, costs {p.costs[i].shape}."
                )
            elif not (np.isfinite(usage) & (usage >= 0)).all():
                out.append(f"node {i} ({p.names[i]}): usages must be finite and not negative.")
    for k, usage in p.edge_usages.items():
        if not 0 <= k < e:
            out.append(f"edge_usages names edge {k}; there are {e} edges.")
        elif usage.shape != p.edge_costs[k].shape:
            out.append(f"edge {k}: edge_usages has shape {usage.shape}, its costs {p.edge_costs[k].shape}.")
        elif not (np.isfinite(usage) & (usage >= 0)).all():
            out.append(f"edge {k}: edge_usages must be finite and not negative.")
    for name, table, width in (("live", p.live, n), ("edge_live", p.edge_live, e)):
        if table is None:
            continue
        if table.shape != (t, width):
            out.append(f"{name} has shape {table.shape}; {(t, width)} is needed.")
        elif isinstance(table, Intervals):
            if not ((table.first >= 0) & (table.first <= table.last) & (table.last <= t)).all():
                out.append(f"{name} must hold intervals within 0..{t}.")
        elif table.nnz and (np.isnan(table.data).any() or table.data.min() < 0):
            out.append(f"{name} must hold counts >= 0.")
    if p.fixed_usage is not None and p.fixed_usage.shape != (t,):
        out.append(f"fixed_usage has shape {p.fixed_usage.shape}; {(t,)} is needed.")
    elif p.fixed_usage is not None and not np.isfinite(p.fixed_usage).all():
        out.append("fixed_usage must be finite.")
    if p.usage_limit is not None and math.isnan(p.usage_limit):
        out.append("usage_limit is NaN.")
    return out
