"""Fits the efficiency parameters of a chip to measured times of micro-programs.

Each parameter has a kind of programs whose time it decides, and is set so that their median ratio of predicted to
measured time is 1: that ratio is monotone in the parameter, and no single odd program moves it far. Parameters touch
each other's programs a little, so all are set in turn until none moves. Predictions are the estimate's own.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr
from scipy import optimize

import cost_models as cm
from autoshard.calibration.measuring import CalibrationError, Measurement
from autoshard.calibration.programs import Kind, MicroProgram
from autoshard.partition.price import Machine
from autoshard.propagate import complete
from autoshard.session import Session, Source

__all__ = ["PARAMETERS", "Parameter", "Predictor", "fit_chip"]

_MESH = {"device": 1}
_ROUNDS = 50
_DIGITS = 5


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A field of `Chip` that is fitted: to which kind of programs, and between which values.

    `slows` tells whether a larger value makes programs slower.
    """

    name: str
    kind: Kind
    least: float
    most: float
    slows: bool


PARAMETERS: tuple[Parameter, ...] = (
    Parameter(name="kernel_overhead_seconds", kind="tiny kernels", least=1e-9, most=1e-3, slows=True),
    Parameter(name="hbm_efficiency", kind="streams", least=0.01, most=1.0, slows=False),
    Parameter(name="matmul_efficiency", kind="products", least=0.01, most=1.0, slows=False),
    Parameter(name="vector_flops_per_second", kind="chains", least=1e9, most=1e16, slows=False),
    # From the 2 bytes of the programs' results on.
    Parameter(name="narrow_result_bytes", kind="narrow results", least=2.0, most=64.0, slows=True),
)


class Predictor:
    """What the cost model says of micro-programs on a slice, whatever its chip's figures."""

    def __init__(self, programs: Sequence[MicroProgram], topology: cm.Topology) -> None:
        """Trace the programs once: on one device no figure changes what is emitted."""
        self._topology = topology
        self._emitted: dict[MicroProgram, tuple[Session, ClosedJaxpr]] = {}
        for program in programs:
            session = Session.of(Source.of(program.fn, program.args), topology, _MESH)
            decisions, _ = complete(session, {})
            self._emitted[program] = session, session.emitted(decisions)

    def seconds(self, program: MicroProgram, chip: cm.Chip) -> float:
        """Predict one run."""
        session, emitted = self._emitted[program]
        machine = Machine.of(self._topology.with_chip(chip), _MESH)
        return dataclasses.replace(session, machine=machine).priced(emitted).step_seconds


def fit_chip(measured: Sequence[Measurement], topology: cm.Topology, predictor: Predictor) -> cm.Chip:
    """Return the slice's chip with every parameter fitted that the measurements allow.

    Args:
      measured: times of programs, of one kind at least; a parameter without programs of its kind stays as it is.
      topology: the slice; its chip's figures are where the fit starts.
      predictor: knows the programs.

    Raises:
      CalibrationError: a time is not positive, a parameter does not move its programs' times, or no fit is found.
    """
    wrong = [
        f"{m.program}: {m.seconds} s" for m in measured if not (m.seconds > 0 and math.isfinite(m.seconds))
    ]
    if wrong:
        raise CalibrationError(f"These are no times to fit to: {'; '.join(wrong)}. Measure again.")
    of_kind = {p: [m for m in measured if m.program.kind == p.kind] for p in PARAMETERS}
    fitted = {p: found for p, found in of_kind.items() if found}
    chip = topology.chip
    for _ in range(_ROUNDS):
        before = chip
        for parameter, found in fitted.items():
            chip = _fitted(chip, parameter, found, predictor)
        if chip == before:
            return chip
    moving = [p.name for p in fitted if getattr(chip, p.name) != getattr(before, p.name)]
    raise CalibrationError(
        f"No fit was found in {_ROUNDS} rounds: {', '.join(moving)} still move. The measured times contradict each"
        " other; measure again."
    )


def _fitted(
    chip: cm.Chip, parameter: Parameter, measured: Sequence[Measurement], predictor: Predictor
) -> cm.Chip:
    """Set one parameter where the median ratio is 1, or at the end of its range that is nearest."""
    sign = 1.0 if parameter.slows else -1.0

    def excess(value: float) -> float:
        trial = _with(chip, parameter, value)
        return sign * statistics.median(
            math.log(predictor.seconds(m.program, trial) / m.seconds) for m in measured
        )

    low, high = parameter.least, parameter.most
    at_low, at_high = excess(low), excess(high)
    if at_low == at_high:
        raise CalibrationError(
            f"{parameter.name} cannot be fitted: from {low:g} to {high:g} it does not change the time predicted for"
            f" {', '.join(str(m.program) for m in measured)}. Fit it to programs whose time it decides."
        )
    if at_low >= 0 or at_high <= 0:
        return _with(chip, parameter, low if at_low >= 0 else high)
    root = optimize.brentq(lambda x: excess(math.exp(x)), math.log(low), math.log(high), xtol=1e-7)
    return _with(chip, parameter, math.exp(root))


def _with(chip: cm.Chip, parameter: Parameter, value: float) -> cm.Chip:
    """Set one figure, to the digits that are written to a file."""
    changes: dict[str, Any] = {parameter.name: float(f"{value:.{_DIGITS}g}")}
    return dataclasses.replace(chip, **changes)
