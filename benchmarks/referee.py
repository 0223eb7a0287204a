"""What the TPU compiler makes of plans, remembered: the same program is compiled once.

Compiling takes from seconds to minutes, so the reports are kept in `.cache/compiled`, by a hash of the program, the
slice and the compiler's version.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

import cost_models as cm
from autoshard import Plan
from autoshard.validate import CompiledReport, compile_tpu, compiler_target
from autoshard.validate.report import plan_artifact

CACHE = Path(".cache/compiled")
PEERS = Path("../shared/peers/programs.py")


@dataclass(frozen=True, eq=False, kw_only=True)
class Workload:
    """A step to plan: a function, the shapes of its arguments, and which of them it may overwrite."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donated: tuple[int, ...]


def compiled(
    plan: Plan, work: Workload, *, stop_early: bool = False, partitioner: str = "autoshard"
) -> CompiledReport:
    """Compile a plan's program, as we partition it or as XLA does under our constraints."""
    leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in plan.inputs]
    artifact = plan_artifact(plan, work.fn, work.args, partitioner, "tpu", leaves)
    target = compiler_target(cm.Topology.parse(plan.topology))
    asked = (
        importlib.metadata.version("libtpu"),
        plan.topology,
        tuple(plan.mesh.items()),
        tuple(plan.device_order or ()),
        target["wrap"] or (False, False, False),
        stop_early,
        *filter(None, [target["chip_config_name"]]),
    )
    key = hashlib.sha256(repr(asked).encode() + artifact.serialized).hexdigest()[:32]
    kept = CACHE / f"{key}.pickle"
    if kept.exists():
        with kept.open("rb") as file:
            found = pickle.load(file)
            assert isinstance(found, CompiledReport)
            return found
    report = compile_tpu(
        artifact,
        **target,
        device_order=plan.device_order,
        stop_early=stop_early,
        timeout_seconds=1800,
    )
    CACHE.mkdir(parents=True, exist_ok=True)
    with kept.open("wb") as file:
        pickle.dump(report, file)
    return report


def peer_programs(path: Path = PEERS) -> dict[str, Callable[[], Workload]]:
    """Read the peers' programs; none where their file is not there."""
    if not path.exists():
        return {}
    cases = _module(path).CASES

    def made(name: str) -> Callable[[], Workload]:
        def make() -> Workload:
            case = cases[name]()
            return Workload(name=name, fn=case.fn, args=case.args, donated=tuple(case.donate))

        return make

    return {name: made(name) for name in cases}


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("peer_programs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
