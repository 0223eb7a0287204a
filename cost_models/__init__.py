"""Hardware data and analytical cost formulas for TPU slices and GPU nodes; knows no JAX.

A `Chip` holds the figures of one device, a `Topology` a grid of chips or several, a `Placement` a logical mesh
on that grid. On them stand the prices: `collective_seconds` for communication, `matmul_seconds`,
`convolution_seconds`, `vector_seconds` and `hbm_seconds` for one device's work, and `padded_bytes` for
memory.
"""

from cost_models.chip import Chip, UnknownChipError, chip, chip_tables, chip_text, chips, load_chip
from cost_models.collectives import (
    COLLECTIVES,
    CollectiveCost,
    CollectiveKind,
    collective_seconds,
    permutation_seconds,
    sent_bytes,
)
from cost_models.compute import (
    VECTOR_CLASSES,
    Precision,
    VectorClass,
    convolution_seconds,
    hbm_seconds,
    matmul_seconds,
    result_seconds,
    vector_operations,
    vector_seconds,
)
from cost_models.links import GroupLinks, Lane, PermutationLoad, group_links, permutation_load
from cost_models.memory import padded_bytes
from cost_models.placement import LINE, MeshError, Placement, Segment, place, placements
from cost_models.scheduler import scheduler_seconds
from cost_models.topology import GRAMMAR, Topology, TopologyError, larger, slices

__all__ = [
    "COLLECTIVES",
    "GRAMMAR",
    "LINE",
    "VECTOR_CLASSES",
    "Chip",
    "CollectiveCost",
    "CollectiveKind",
    "GroupLinks",
    "Lane",
    "MeshError",
    "PermutationLoad",
    "Placement",
    "Precision",
    "Segment",
    "Topology",
    "TopologyError",
    "UnknownChipError",
    "VectorClass",
    "chip",
    "chip_tables",
    "chip_text",
    "chips",
    "collective_seconds",
    "convolution_seconds",
    "group_links",
    "hbm_seconds",
    "larger",
    "load_chip",
    "matmul_seconds",
    "padded_bytes",
    "permutation_load",
    "permutation_seconds",
    "place",
    "result_seconds",
    "placements",
    "scheduler_seconds",
    "sent_bytes",
    "slices",
    "vector_operations",
    "vector_seconds",
]
