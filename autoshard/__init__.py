"""Plans, prices, explains and applies the sharding of an unannotated JAX function on a TPU slice."""

from autoshard._guard import check_import_names

check_import_names()

from autoshard.baselines import baseline, baselines  # noqa: E402
from autoshard.compare import compare, diff  # noqa: E402
from autoshard.errors import (  # noqa: E402
    AutoshardError,
    PlanFileError,
    PlanMismatchError,
    SpecError,
    TraceError,
)
from autoshard.front import Front, pareto  # noqa: E402
from autoshard.plan import Coverage, Leaf, Plan  # noqa: E402
from autoshard.planner import evaluate, suggest  # noqa: E402
from cost_models import MeshError, Topology, TopologyError  # noqa: E402

__all__ = [
    "AutoshardError",
    "Coverage",
    "Front",
    "Leaf",
    "MeshError",
    "Plan",
    "PlanFileError",
    "PlanMismatchError",
    "SpecError",
    "Topology",
    "TopologyError",
    "TraceError",
    "baseline",
    "baselines",
    "compare",
    "diff",
    "evaluate",
    "pareto",
    "suggest",
]
