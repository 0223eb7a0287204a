"""Times of the micro-programs: the TPU compiler's cycles, or a profile of the devices that are attached."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import cost_models as cm
from autoshard.calibration.programs import KINDS, MicroProgram
from autoshard.errors import AutoshardError
from autoshard.validate import CompiledReport, compile_tpu_each, export_artifact, profile

__all__ = [
    "CalibrationError",
    "Measurement",
    "compiled_times",
    "compiler_source",
    "profile_source",
    "profiled_times",
]

Progress = Callable[[str], None]


class CalibrationError(AutoshardError, ValueError):
    """A chip cannot be calibrated as asked."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """How long one run of a program takes, from whatever source."""

    program: MicroProgram
    seconds: float


def compiler_source() -> str:
    """Say where `compiled_times` come from."""
    return f"TPU compiler (libtpu {importlib.metadata.version('libtpu')}) ahead of time, estimated_cycles"


def profile_source() -> str:
    """Say where `profiled_times` come from."""
    return f"profile of one {jax.devices()[0].device_kind} (jax {jax.__version__})"


def compiled_times(
    programs: Sequence[MicroProgram], topology: cm.Topology, progress: Progress = lambda news: None
) -> tuple[Measurement, ...]:
    """Compile programs for one device of a slice, and take the compiler's cycles for their time.

    Copies between HBM and VMEM, which have no cycles, are added: they cross HBM once, at its nominal bandwidth.

    Args:
      programs: the programs.
      topology: the slice.
      progress: called with a line of news before each kind.

    Raises:
      CalibrationError: the compiler gives a program no cycles.
      MissingLibtpuError, CompileError: as of `validate.compile_tpu_each`.
    """
    found = []
    for kind in KINDS:
        wanted = [p for p in programs if p.kind == kind]
        if not wanted:
            continue
        progress(f"compiling {len(wanted)} {kind}")
        artifacts = [export_artifact(p.fn, p.args, platform="tpu") for p in wanted]
        reports = compile_tpu_each(artifacts, topology=topology)
        found += [
            Measurement(program=p, seconds=_seconds(p, report, topology.chip))
            for p, report in zip(wanted, reports, strict=True)
        ]
    return tuple(found)


def _seconds(program: MicroProgram, report: CompiledReport, chip: cm.Chip) -> float:
    copies = [work for work in report.unestimated if work.opcode == "copy-start"]
    unknown = [work.name for work in report.unestimated if work not in copies]
    if report.estimated_seconds is None or unknown:
        raise CalibrationError(
            f"{program} on {report.target}: the compiler estimates no cycles"
            + (f" of {', '.join(unknown)}." if unknown else ".")
            + " Such a program cannot calibrate; measure it on devices, with --profile."
        )
    # The bytes of a copy are those read and those written; one of the two is VMEM.
    return report.estimated_seconds + sum(work.bytes / 2 for work in copies) / chip.hbm_bytes_per_second


def profiled_times(
    programs: Sequence[MicroProgram],
    topology: cm.Topology,
    progress: Progress = lambda news: None,
    *,
    steps: int = 10,
) -> tuple[Measurement, ...]:
    """Run programs on one of the devices attached, and take the time that it is busy.

    Args:
      programs: the programs.
      topology: the slice; the devices attached are of its generation.
      progress: called with a line of news before each program.
      steps: runs to measure; their mean counts.

    Raises:
      CalibrationError: the devices attached are of another kind.
      ProfileError: the profiler cannot start, or names no instruction.
    """
    device = jax.devices()[0]
    if device.device_kind != topology.chip.device_kind:
        raise CalibrationError(
            f"--profile measures the devices attached, which are of the kind {device.device_kind!r}, and {topology} has"
            f" {topology.chip.device_kind!r}. Run it where such devices are, name the slice that is attached, or leave"
            " --profile out to ask the TPU compiler."
        )
    found = []
    for number, program in enumerate(programs):
        progress(f"program {number + 1} of {len(programs)}: {program}")
        args = [_filled(device, shape, seed) for seed, shape in enumerate(program.args)]
        compiled = jax.jit(program.fn).lower(*args).compile()
        found.append(Measurement(program=program, seconds=profile(compiled, args, steps=steps).busy_seconds))
    return tuple(found)


def _filled(device: Any, shape: Any, seed: int) -> Any:
    """Make an array of random numbers: a unit that multiplies zeros draws less power and runs faster."""
    with jax.default_device(device):
        return jax.random.normal(jax.random.key(seed), shape.shape, jnp.float32).astype(shape.dtype)
