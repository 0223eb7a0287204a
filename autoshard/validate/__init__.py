"""Checks plans against what compiles, runs and is measured: the referee of autoshard's predictions.

A function goes in as an `Artifact`, made by `export_artifact`. `compile_tpu` asks the production TPU
compiler, which needs no TPU; `compile_cpu` asks XLA's CPU compiler; `compare_numerics` runs programs on
virtual CPU devices; `profile` measures one on the devices that are present.
"""

from autoshard.validate.artifact import Artifact, ArtifactError, export_artifact
from autoshard.validate.collectives import Collective
from autoshard.validate.compiled import (
    CompiledReport,
    compile_cpu,
    compile_tpu,
    compile_tpu_each,
    compiler_target,
)
from autoshard.validate.hlo import HloParseError
from autoshard.validate.memory import Memory, OutOfMemory
from autoshard.validate.numerics import CandidateNumerics, NumericsReport, OutputError, compare_numerics
from autoshard.validate.process import (
    CompileError,
    MissingLibtpuError,
    RunError,
    WorkerError,
    is_libtpu_available,
)
from autoshard.validate.profiler import OpTime, ProfileError, ProfileReport, profile
from autoshard.validate.work import InstructionWork

__all__ = [
    "Artifact",
    "ArtifactError",
    "CandidateNumerics",
    "Collective",
    "CompileError",
    "CompiledReport",
    "HloParseError",
    "InstructionWork",
    "Memory",
    "MissingLibtpuError",
    "NumericsReport",
    "OpTime",
    "OutOfMemory",
    "OutputError",
    "ProfileError",
    "ProfileReport",
    "RunError",
    "WorkerError",
    "compare_numerics",
    "compile_cpu",
    "compile_tpu",
    "compile_tpu_each",
    "compiler_target",
    "export_artifact",
    "is_libtpu_available",
    "profile",
]
