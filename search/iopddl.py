"""The file format of the ASPLOS 2025 / EuroSys 2025 contest on intra-operator parallelism.

Node i uses `usages[i][s]` bytes during the half-open `intervals[i]`; edge costs are flat, row by row; a cost
of 1e18 or more forbids. Times are only the instants of greatest load: a start after which something ends
before the next start, since every other instant holds a subset of a later one's nodes.

Reference: https://github.com/google/iopddl (2025).
"""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from search.liveness import Intervals, Ints
from search.problem import Floats, Problem

FORBIDDEN = 1e18


def read(path: Path) -> Problem:
    """Read one instance.

    Args:
        path: a `.json` or `.json.gz` file.

    Returns:
        The problem, with one time per instant of greatest load.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not such a file; the message names the path and what is missing.

    """
    raw = path.read_bytes()
    try:
        document = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        return from_document(document)
    except (KeyError, TypeError, ValueError) as error:
        said = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} is not an IOPDDL instance: {said}") from error


def from_document(document: dict[str, Any]) -> Problem:
    """Turn the parsed JSON into a problem.

    Args:
        document: with `problem`, or its content.

    Returns:
        The problem.

    """
    body = document.get("problem", document)
    nodes, links = body["nodes"], body["edges"]
    costs = tuple(_costs(c) for c in nodes["costs"])
    edges = tuple((int(i), int(j)) for i, j in links["nodes"])
    # equal tables are one array, as a program repeats its layers
    known: dict[tuple[int, tuple[float, ...]], Floats] = {}
    tables = []
    for (i, j), values in zip(edges, links["costs"], strict=True):
        key = (len(costs[i]), tuple(values))
        if key not in known:
            known[key] = _costs(values).reshape(len(costs[i]), len(costs[j]))
        tables.append(known[key])
    intervals = np.array(nodes["intervals"], dtype=np.int64).reshape(-1, 2)
    return Problem(
        costs=costs,
        edges=edges,
        edge_costs=tuple(tables),
        usages=tuple(np.asarray(u, dtype=np.float64) for u in nodes["usages"]),
        live=live_times(intervals),
        usage_limit=None if body.get("usage_limit") is None else float(body["usage_limit"]),
    )


def live_times(intervals: Ints) -> Intervals:
    """Say at which instants of greatest load each node is live.

    Args:
        intervals: `[N, 2]`, half-open; an empty one is never live.

    Returns:
        One interval of instants per node.

    Example:
        >>> import numpy as np
        >>> times = live_times(np.array([[0, 4], [1, 2], [3, 5], [7, 7]]))
        >>> times.counts().toarray().astype(int).tolist()
        [[1, 1, 0, 0], [1, 0, 1, 0]]

    """
    used = intervals[:, 0] < intervals[:, 1]
    begin, end = intervals[used, 0], intervals[used, 1]
    starts = np.unique(begin)
    following = np.append(starts[1:], np.iinfo(np.int64).max)
    ends = np.sort(end)
    fewer = np.searchsorted(ends, following, side="right") > np.searchsorted(ends, starts, side="right")
    instants = starts[fewer]
    first, last = np.searchsorted(instants, intervals.T, side="left")
    return Intervals(first=np.where(used, first, 0), last=np.where(used, last, 0), num_times=len(instants))


def _costs(values: list[float]) -> Floats:
    table = np.asarray(values, dtype=np.float64)
    return np.where(table >= FORBIDDEN, np.inf, table)
