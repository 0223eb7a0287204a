"""What a calibration found: fitted figures with their errors, and the data file that holds them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import cost_models as cm
from autoshard.calibration.fitting import PARAMETERS, Parameter
from autoshard.calibration.programs import Kind, MicroProgram

__all__ = ["Calibration", "Errors", "Outcome"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One program: its measured time, and what the chip's figures predict before and after the fit.

    `fitted` tells whether it was in the fit set.
    """

    program: MicroProgram
    fitted: bool
    measured_seconds: float
    before_seconds: float
    after_seconds: float

    @property
    def error(self) -> float:
        """How far the prediction after the fit is off, relative and signed."""
        return self.after_seconds / self.measured_seconds - 1

    @property
    def error_before(self) -> float:
        """The same before the fit."""
        return self.before_seconds / self.measured_seconds - 1


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Absolute relative errors of some programs."""

    count: int
    median: float
    worst: float

    def __str__(self) -> str:
        return f"median {100 * self.median:.1f} %, worst {100 * self.worst:.1f} %" if self.count else "none"


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A chip fitted to measured times.

    Attributes:
      topology: the slice that was asked for, with the figures of its generation's file.
      chip: the fitted figures.
      source: where the times come from.
      date: of the measurement, ISO.
      outcomes: every program.
    """

    topology: cm.Topology
    chip: cm.Chip
    source: str
    date: str
    outcomes: tuple[Outcome, ...]

    @property
    def fitted(self) -> tuple[Parameter, ...]:
        """The parameters that programs were there for."""
        kinds = {o.program.kind for o in self.outcomes if o.fitted}
        return tuple(p for p in PARAMETERS if p.kind in kinds)

    def errors(self, kind: Kind, *, fitted: bool, before: bool = False) -> Errors:
        """Return the errors of the programs of a kind in the fit set, or in the test set; also `before` the fit."""
        found = [o for o in self.outcomes if o.program.kind == kind and o.fitted == fitted]
        sizes = [abs(o.error_before if before else o.error) for o in found]
        return Errors(
            count=len(sizes),
            median=statistics.median(sizes) if sizes else 0.0,
            worst=max(sizes, default=0.0),
        )

    def to_toml(self) -> str:
        """Write a data file as `cost_models.load_chip` reads it; what was not fitted keeps its source."""
        tables: dict[str, Mapping[str, Any]] = {**cm.chip_tables(self.chip.name)}
        for parameter in self.fitted:
            tables[parameter.name] = {
                "value": self.value(parameter),
                "unit": tables[parameter.name]["unit"],
                "source": f"autoshard calibrate --topology {self.topology}: {self.source}",
                "date": self.date,
                "note": self._note(parameter),
            }
        return f"# {self.chip.name}, calibrated by `autoshard calibrate`.\n\n{cm.chip_text(tables)}"

    def value(self, parameter: Parameter) -> float:
        """Return a fitted figure."""
        found = getattr(self.chip, parameter.name)
        assert isinstance(found, float)
        return found

    def _note(self, parameter: Parameter) -> str:
        fit, test = (self.errors(parameter.kind, fitted=fitted) for fitted in (True, False))
        before = self.errors(parameter.kind, fitted=False, before=True)
        value = self.value(parameter)
        return (
            f"fitted to {fit.count} {parameter.kind}: error {fit}; on {test.count} others: {test} ({before} with the"
            f" generation's file, which has {getattr(self.topology.chip, parameter.name):g})"
            + ("; at the end of its range" if value in (parameter.least, parameter.most) else "")
        )

    def table(self) -> Iterator[tuple[str, ...]]:
        """Yield a head and a row per parameter: what it was, what it is, and the errors on both sets."""
        yield "parameter", "unit", "was", "fitted", "to", "fit set", "test set", "test set before"
        units = cm.chip_tables(self.chip.name)
        for p in self.fitted:
            fit, test = (self.errors(p.kind, fitted=fitted) for fitted in (True, False))
            yield (
                p.name,
                units[p.name]["unit"],
                f"{getattr(self.topology.chip, p.name):g}",
                f"{self.value(p):g}",
                f"{fit.count} {p.kind}",
                str(fit),
                str(test),
                str(self.errors(p.kind, fitted=False, before=True)),
            )

    def __str__(self) -> str:
        rows = list(self.table())
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([f"{self.topology}: {self.source}, {self.date}", *lines, *self._untouched()])

    def _untouched(self) -> list[str]:
        """Tell of programs of a kind to which nothing is fitted."""
        kinds = dict.fromkeys(o.program.kind for o in self.outcomes)
        return [
            f"not fitted to: {errors.count} {kind}, {errors}"
            for kind in kinds
            if kind not in {p.kind for p in self.fitted}
            for errors in [self.errors(kind, fitted=False)]
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return everything in JSON types."""
        return {
            "topology": str(self.topology),
            "source": self.source,
            "date": self.date,
            "parameters": {
                p.name: {"was": getattr(self.topology.chip, p.name), "fitted": self.value(p), "kind": p.kind}
                for p in self.fitted
            },
            "programs": [
                {
                    "name": o.program.name,
                    "kind": o.program.kind,
                    "fitted": o.fitted,
                    "measured_seconds": o.measured_seconds,
                    "before_seconds": o.before_seconds,
                    "after_seconds": o.after_seconds,
                }
                for o in self.outcomes
            ],
        }
