"""Fits the efficiency parameters of a chip to the TPU compiler's cycles, or to a profile of attached devices.

`calibrate` measures a fixed family of micro-programs, fits to one half of it and tests on the other. The result
writes a data file, and `Topology.with_chip(load_chip(file))` or `--chip FILE` plans with it.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence

import cost_models as cm
from autoshard.calibration.fitting import PARAMETERS, Parameter, Predictor, fit_chip
from autoshard.calibration.measuring import (
    CalibrationError,
    Measurement,
    compiled_times,
    compiler_source,
    profile_source,
    profiled_times,
)
from autoshard.calibration.programs import FAMILY, KINDS, MicroProgram, fit_set
from autoshard.calibration.result import Calibration, Errors, Outcome

__all__ = [
    "FAMILY",
    "KINDS",
    "PARAMETERS",
    "Calibration",
    "CalibrationError",
    "Errors",
    "Measurement",
    "MicroProgram",
    "Outcome",
    "Parameter",
    "Predictor",
    "calibrate",
    "calibrated",
    "fit_chip",
    "fit_set",
]


def calibrate(
    topology: str | cm.Topology,
    *,
    profile: bool = False,
    programs: Sequence[MicroProgram] = FAMILY,
    progress: Callable[[str], None] = lambda news: None,
) -> Calibration:
    """Measure micro-programs and fit a chip's efficiency parameters to them.

    Args:
      topology: a slice of the generation; each program runs on one device of it.
      profile: run on the devices attached, rather than ask the TPU compiler, which needs no TPU.
      programs: the family, of which every second program of a kind is a test.
      progress: called with a line of news now and then.

    Raises:
      CalibrationError: there is no compiler for the topology, the devices attached are of another kind, or the
        times cannot be fitted to.
      WorkerError, ProfileError: the compiler or the profiler failed.
      TopologyError: the name is no slice.
    """
    slice_ = topology if isinstance(topology, cm.Topology) else cm.Topology.parse(topology)
    if not profile and slice_.chip.platform != "tpu":
        raise CalibrationError(
            f"There is no ahead-of-time compiler for GPUs here, and {slice_} has GPUs. Calibrate where they are"
            " attached, with --profile."
        )
    if profile:
        measured, source = profiled_times(programs, slice_, progress), profile_source()
    else:
        measured, source = compiled_times(programs, slice_, progress), compiler_source()
    progress("fitting")
    return calibrated(measured, slice_, source)


def calibrated(measured: Sequence[Measurement], topology: cm.Topology, source: str) -> Calibration:
    """Fit a chip to the fit set among measured programs, and set all of them against what it predicts.

    Args:
      measured: times of programs, from whatever source.
      topology: the slice; its chip's figures are those to compare with.
      source: where the times come from, in words.

    Raises:
      CalibrationError: as `fit_chip`.
    """
    programs = [m.program for m in measured]
    predictor = Predictor(programs, topology)
    fitted = frozenset(fit_set(programs))
    chip = fit_chip([m for m in measured if m.program in fitted], topology, predictor)
    return Calibration(
        topology=topology,
        chip=chip,
        source=source,
        date=datetime.date.today().isoformat(),
        outcomes=tuple(
            Outcome(
                program=m.program,
                fitted=m.program in fitted,
                measured_seconds=m.seconds,
                before_seconds=predictor.seconds(m.program, topology.chip),
                after_seconds=predictor.seconds(m.program, chip),
            )
            for m in measured
        ),
    )
