"""Checks that sharded programs compute what the unsharded one computes, on virtual CPU devices.

All programs run in one worker process on the same inputs, which are drawn there from the shapes of the
arguments: the same seed gives the same inputs on any machine.
"""

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autoshard.validate.artifact import Artifact
from autoshard.validate.process import RunError, run_worker


@dataclass(frozen=True, kw_only=True)
class OutputError:
    """How far one output is from the reference.

    Attributes:
        name: the output's path.
        max_abs: largest absolute difference; infinity where shapes differ or a NaN stands on one side only.
        max_rel: `max_abs` divided by the largest magnitude in the reference.
        ok: whether `max_abs <= atol + rtol * largest magnitude`.

    """

    name: str
    max_abs: float
    max_rel: float
    ok: bool


@dataclass(frozen=True, kw_only=True)
class CandidateNumerics:
    """One program's outputs against the reference's.

    Attributes:
        name: the name under which it was given.
        outputs: one entry for each output.
        seconds: wall time of compiling and running it once.

    """

    name: str
    outputs: tuple[OutputError, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every output agrees."""
        return all(output.ok for output in self.outputs)

    @property
    def worst(self) -> OutputError | None:
        """The output with the largest relative error, or None without outputs."""
        return max(self.outputs, key=lambda output: (not output.ok, output.max_rel), default=None)


@dataclass(frozen=True, kw_only=True)
class NumericsReport:
    """The comparison of all programs with the reference.

    Attributes:
        reference: the reference program's name.
        candidates: one entry for each program.
        rtol: relative tolerance that was applied.
        atol: absolute tolerance that was applied.

    """

    reference: str
    candidates: tuple[CandidateNumerics, ...]
    rtol: float
    atol: float

    @property
    def ok(self) -> bool:
        """Whether every output of every program agrees."""
        return all(candidate.ok for candidate in self.candidates)

    def __str__(self) -> str:
        lines = [f"against {self.reference} (rtol {self.rtol:g}, atol {self.atol:g}):"]
        for candidate in self.candidates:
            bad = [output for output in candidate.outputs if not output.ok]
            worst = candidate.worst
            summary = "no outputs" if worst is None else f"worst {worst.name} rel {worst.max_rel:.2e}"
            lines.append(
                f"  {candidate.name}: {'ok' if candidate.ok else f'{len(bad)} outputs differ'}, {summary}"
            )
            lines += [
                f"    {output.name}: abs {output.max_abs:.3e} rel {output.max_rel:.3e}" for output in bad
            ]
        return "\n".join(lines)


def compare_numerics(
    reference: Artifact,
    candidates: Mapping[str, Artifact],
    *,
    inputs: Mapping[str, ArrayLike] | None = None,
    int_bounds: int | Mapping[str, int] = 4,
    float_scale: float = 0.02,
    seed: int = 0,
    rtol: float = 1e-3,
    atol: float = 1e-6,
    timeout_seconds: float = 600.0,
) -> NumericsReport:
    """Run programs on the same inputs and compare their outputs with those of the reference.

    An input that is not given is drawn: floats normal with standard deviation `float_scale`, integers uniform
    in `[0, bound)`, booleans fair, random keys from arbitrary key data.

    Args:
        reference: the program whose outputs are right, exported for the platform "cpu".
        candidates: programs with the same inputs and outputs, exported for "cpu" on any mesh.
        inputs: values by input name (`Artifact.input_names`); a key's value is its key data.
        int_bounds: the bound of all integer inputs, or bounds by input name (others get 4). A bound must be
            valid for what the program indexes with the input.
        float_scale: standard deviation of drawn floats.
        seed: of the generator.
        rtol: tolerance relative to the largest magnitude of the output. Reductions in another order differ by
            rounding: 1e-3 suits float32; give 2e-2 for bfloat16.
        atol: absolute tolerance.
        timeout_seconds: wall time after which the process is stopped.

    Returns:
        The comparison.

    Raises:
        ValueError: a name or a program does not match the reference; all of them are listed.
        RunError: a program cannot be compiled or run.

    """
    _check(reference, candidates, inputs or {}, int_bounds)
    programs = [reference, *candidates.values()]
    bounds = [
        int_bounds if isinstance(int_bounds, int) else int_bounds.get(name, 4)
        for name in reference.input_names
    ]
    with tempfile.TemporaryDirectory(prefix="autoshard-") as name:
        folder = Path(name)
        for number, program in enumerate(programs):
            (folder / f"{number}.bin").write_bytes(program.serialized)
        given = {
            str(reference.input_names.index(key)): np.asarray(value) for key, value in (inputs or {}).items()
        }
        with open(folder / "inputs.npz", "wb") as file:
            np.savez(file, allow_pickle=False, **given)
        request = {
            "task": "run",
            "platform": "cpu",
            "device_order": None,
            "programs": [{"mesh_shape": list(map(list, p.mesh_shape.items()))} for p in programs],
            "int_bounds": bounds,
            "float_scale": float_scale,
            "seed": seed,
        }
        report = run_worker(
            folder,
            request,
            what=f"running {', '.join([reference.name, *candidates])} on virtual CPU devices",
            timeout_seconds=timeout_seconds,
            cpu_devices=max(math.prod(p.mesh_shape.values()) for p in programs),
            error=RunError,
        )
        results = [_load(folder / f"{number}.npz") for number in range(len(programs))]
    return NumericsReport(
        reference=reference.name,
        candidates=tuple(
            CandidateNumerics(
                name=candidate,
                outputs=tuple(
                    compare_arrays(output, expected, actual, rtol=rtol, atol=atol)
                    for output, expected, actual in zip(
                        reference.output_names, results[0], result, strict=True
                    )
                ),
                seconds=float(seconds),
            )
            for candidate, result, seconds in zip(candidates, results[1:], report["seconds"][1:], strict=True)
        ),
        rtol=rtol,
        atol=atol,
    )


def compare_arrays(
    name: str, expected: NDArray[np.generic], actual: NDArray[np.generic], *, rtol: float, atol: float
) -> OutputError:
    """Compare one output with its reference.

    Args:
        name: the output's name.
        expected: the reference.
        actual: the output.
        rtol: tolerance relative to the largest magnitude in `expected`; integers must be equal.
        atol: absolute tolerance.

    Returns:
        The error. NaNs and infinities agree where both sides have the same.

    """
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return OutputError(name=name, max_abs=math.inf, max_rel=math.inf, ok=False)
    if expected.size == 0:
        return OutputError(name=name, max_abs=0.0, max_rel=0.0, ok=True)
    wide = np.complex128 if np.iscomplexobj(expected) else np.float64
    left, right = expected.astype(wide), actual.astype(wide)
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(left - right))
    difference = np.where(np.isnan(difference), math.inf, difference)
    magnitudes = np.abs(left[np.isfinite(left)])
    scale = float(magnitudes.max(initial=0.0))
    max_abs = float(difference.max())
    exact = not np.issubdtype(expected.dtype, np.inexact)
    limit = 0.0 if exact else atol + rtol * scale
    relative = max_abs / scale if scale > 0 else (0.0 if max_abs == 0 else math.inf)
    return OutputError(name=name, max_abs=max_abs, max_rel=relative, ok=max_abs <= limit)


def _load(file: Path) -> list[NDArray[np.generic]]:
    with np.load(file, allow_pickle=False) as arrays:
        return [arrays[str(index)] for index in range(len(arrays.files))]


def _check(
    reference: Artifact,
    candidates: Mapping[str, Artifact],
    inputs: Mapping[str, ArrayLike],
    int_bounds: int | Mapping[str, int],
) -> None:
    problems: list[str] = []
    for name, artifact in {reference.name: reference, **candidates}.items():
        if artifact.platform != "cpu":
            problems.append(f"{name} was exported for {artifact.platform!r}; export it with platform='cpu'")
    for name, artifact in candidates.items():
        for what, ours, theirs in (
            ("inputs", len(reference.input_names), len(artifact.input_names)),
            ("outputs", len(reference.output_names), len(artifact.output_names)),
        ):
            if ours != theirs:
                problems.append(f"{name} has {theirs} {what}, the reference has {ours}")
    named = set(inputs) | (set() if isinstance(int_bounds, int) else set(int_bounds))
    for name in sorted(named - set(reference.input_names)):
        problems.append(f"no input is called {name!r}; inputs: {', '.join(reference.input_names)}")
    if problems:
        raise ValueError(f"cannot compare with {reference.name}:\n  " + "\n  ".join(problems))
