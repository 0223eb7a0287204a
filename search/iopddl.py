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
import scipy.sparse as sp

from search.graph import Ints
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
    tables = tuple(
        _costs(c).reshape(len(costs[i]), len(costs[j]))
        for (i, j), c in zip(edges, links["costs"], strict=True)
    )
    intervals = np.array(nodes["intervals"], dtype=np.int64).reshape(-1, 2)
    return Problem(
        costs=costs,
        edges=edges,
        edge_costs=tables,
        usages=tuple(np.asarray(u, dtype=np.float64) for u in nodes["usages"]),
        live=live_counts(intervals),
        usage_limit=None if body.get("usage_limit") is None else float(body["usage_limit"]),
    )


def live_counts(intervals: Ints) -> sp.csr_array:
    """Say which nodes are live at each instant of greatest load.

    Args:
        intervals: `[N, 2]`, half-open; an empty one is never live.

    Returns:
        CSR `[T, N]` of ones.

    Example:
        >>> import numpy as np
        >>> live_counts(np.array([[0, 4], [1, 2], [3, 5], [7, 7]])).toarray().astype(int).tolist()
        [[1, 1, 0, 0], [1, 0, 1, 0]]

    """
    used = np.flatnonzero(intervals[:, 0] < intervals[:, 1])
    begin, end = intervals[used, 0], intervals[used, 1]
    starts = np.unique(begin)
    following = np.append(starts[1:], np.iinfo(np.int64).max)
    ends = np.sort(end)
    fewer = np.searchsorted(ends, following, side="right") > np.searchsorted(ends, starts, side="right")
    instants = starts[fewer]
    first = np.searchsorted(instants, begin, side="left")
    last = np.searchsorted(instants, end, side="left")
    spans = last - first
    columns = np.concatenate([[0], np.cumsum(spans)])
    rows = np.arange(columns[-1]) - np.repeat(columns[:-1] - first, spans)
    indptr = np.zeros(len(intervals) + 1, dtype=np.int64)
    indptr[used + 1] = spans
    table = sp.csc_array(
        (np.ones(len(rows)), rows.astype(np.int32), np.cumsum(indptr)), shape=(len(instants), len(intervals))
    )
    return sp.csr_array(table)


def _costs(values: list[float]) -> Floats:
    table = np.asarray(values, dtype=np.float64)
    return np.where(table >= FORBIDDEN, np.inf, table)
