"""Checks a plan: its programs against the original's numbers, the compilers, and measured times.

`validate` is what `Plan.validate` calls. It is the plan's referee, so it takes nothing from the estimate but
what it puts beside what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

import cost_models as cm
from autoshard.apply import flat_program, matching_source
from autoshard.errors import AutoshardError
from autoshard.session import Source, abstract_mesh
from autoshard.validate.artifact import Artifact, export_artifact
from autoshard.validate.compiled import CompiledReport, compile_cpu, compile_tpu, compiler_target
from autoshard.validate.inputs import draw
from autoshard.validate.match import (
    Match,
    by_kind,
    compiled_runs,
    levels_of,
    match,
    megabytes,
    predicted_runs,
)
from autoshard.validate.numerics import compare_numerics
from autoshard.validate.process import CompileError, MissingLibtpuError, is_libtpu_available
from autoshard.validate.validation import Table, Validation

if TYPE_CHECKING:
    from autoshard.plan import Plan

__all__ = ["LEVELS", "PARTITIONERS", "Validation", "validate"]

LEVELS = ("numerics", "compile", "profile")
PARTITIONERS: Mapping[str, str] = {"xla": "plan.jit", "autoshard": "plan.spmd"}
PLATFORMS = ("cpu", "tpu")
# Carries no annotations in JAX.
_STRUCT: Any = jax.ShapeDtypeStruct

# Numbers of the real sizes are compared on this machine: up to so many bytes of inputs.
_NUMERICS_BYTES = 2 * 2**30
_RTOL = {"f32": 1e-5, "narrow": 2e-2}
_NARROW = ("bfloat16", "float16")
# An output that is zero everywhere may differ by this much.
_ATOL = 1e-12


def validate(
    plan: Plan,
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    level: str = "compile",
    partitioners: Sequence[str] = ("xla", "autoshard"),
    platforms: Sequence[str] = PLATFORMS,
    timeout_seconds: float = 600.0,
    inputs: Mapping[str, Any] | None = None,
    int_bounds: int | Mapping[str, int] | None = None,
    seed: int = 0,
    rtol: float | None = None,
    full_compile: bool = False,
    memory_rtol: float = 0.15,
    traffic_rtol: float = 0.02,
    devices: Sequence[Any] | None = None,
    steps: int = 5,
) -> Validation:
    """Check what a plan predicts against what runs, compiles or is measured.

    Args:
      plan: the plan.
      fn: the function that it was made for.
      args: its arguments: arrays or shapes.
      level: "numerics" compares the values of both ways of applying the plan with the original's, on virtual
        CPU devices; "compile" compiles for CPU and, without a TPU, for the plan's slice; "profile" runs on
        the devices present.
      partitioners: "xla" for `plan.jit`, "autoshard" for `plan.spmd`.
      platforms: of "compile": "cpu", "tpu".
      timeout_seconds: wall time of each compilation or run.
      inputs: arrays by pytree path, in place of those in `args` or drawn ones.
      int_bounds: bounds of drawn integers, for all or by path; by default read off what they index.
      seed: of the drawn inputs.
      rtol: of "numerics", relative to the largest magnitude of an output; 1e-5, and 2e-2 where the program
        computes in bfloat16 or float16.
      full_compile: generate code too, for the compiler's own estimate of the time; slower.
      memory_rtol: share by which compiled HBM may exceed the predicted.
      traffic_rtol: share of the collectives' bytes that may remain unexplained.
      devices: of "profile"; by default `jax.devices()`.
      steps: of "profile", measured.

    Returns:
      The tables, the differences by name, and what failed.

    Raises:
      PlanMismatchError: the plan was made for another function or other shapes.
      AutoshardError: an option is unknown, or the arguments are too large to run here.
      CompileError: the TPU compiler is asked for, and the plan is for GPUs.
      MissingLibtpuError: the TPU compiler is asked for and not installed.

    Example:
      >>> import autoshard
      >>> shapes = [jax.ShapeDtypeStruct((64, 64), "float32")] * 2
      >>> product = lambda w, x: x @ w
      >>> plan = autoshard.suggest(product, *shapes, topology="v3", mesh={"data": 2})
      >>> validate(plan, product, shapes, level="numerics").ok
      True
    """
    _check_options(level, partitioners, platforms)
    if level == "numerics":
        return _numerics(
            plan,
            fn,
            args,
            partitioners=partitioners,
            inputs=inputs or {},
            int_bounds=int_bounds,
            seed=seed,
            rtol=rtol,
            timeout_seconds=timeout_seconds,
        )
    if level == "compile":
        return _compile(
            plan,
            fn,
            args,
            partitioners=partitioners,
            platforms=platforms,
            full=full_compile,
            memory_rtol=memory_rtol,
            traffic_rtol=traffic_rtol,
            timeout_seconds=timeout_seconds,
        )
    from autoshard.validate.measured import measure_plan

    source = matching_source(plan, fn, args)
    arrays = _arrays(source, args, inputs or {}, int_bounds, seed)
    return measure_plan(plan, fn, args, arrays, partitioners=partitioners, devices=devices, steps=steps)


def _check_options(level: str, partitioners: Sequence[str], platforms: Sequence[str]) -> None:
    for what, given, known in (
        ("level", [level], LEVELS),
        ("partitioners", partitioners, tuple(PARTITIONERS)),
        ("platforms", platforms, PLATFORMS),
    ):
        unknown = [name for name in given if name not in known]
        if unknown or not given or isinstance(given, str):
            raise AutoshardError(f"{what}: {given!r} is not among {', '.join(map(repr, known))}")


# Numerics -----------------------------------------------------------------------------------------


def _arrays(
    source: Source,
    args: Sequence[Any],
    inputs: Mapping[str, Any],
    int_bounds: int | Mapping[str, int] | None,
    seed: int,
) -> list[Any]:
    """Take the arrays that are given and draw the others."""
    traced = source.traced
    unknown = sorted(set(inputs) - set(traced.in_names))
    if isinstance(int_bounds, Mapping):
        unknown += sorted(set(int_bounds) - set(traced.in_names))
    if unknown:
        raise AutoshardError(
            f"no input has the path {', '.join(unknown)}; the inputs are {', '.join(traced.in_names[:12])}"
            + (" ..." if len(traced.in_names) > 12 else "")
        )
    leaves = jax.tree.leaves(tuple(args))
    need = sum(_nbytes(aval) for aval in traced.in_avals)
    if need > _NUMERICS_BYTES and any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        raise AutoshardError(
            f"the inputs take {need / 2**30:.1f} GiB, more than the {_NUMERICS_BYTES / 2**30:.0f} GiB that"
            " are drawn here: run a smaller sibling of the program under the same specs"
            " (autoshard.evaluate(small_fn, *small_args, in_specs=plan.in_specs, ...)), or pass arrays"
        )
    drawn = draw(traced.program, traced.in_avals, traced.in_names, bounds=int_bounds, seed=seed)
    return [
        inputs.get(name, made if isinstance(leaf, jax.ShapeDtypeStruct) else leaf)
        for name, leaf, made in zip(traced.in_names, leaves, drawn, strict=True)
    ]


def _nbytes(aval: Any) -> int:
    size = 8 if jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key) else np.dtype(aval.dtype).itemsize
    return int(np.prod(aval.shape, dtype=np.int64)) * size


def _numerics(
    plan: Plan,
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    partitioners: Sequence[str],
    inputs: Mapping[str, Any],
    int_bounds: int | Mapping[str, int] | None,
    seed: int,
    rtol: float | None,
    timeout_seconds: float,
) -> Validation:
    source = matching_source(plan, fn, args)
    arrays = _arrays(source, args, inputs, int_bounds, seed)
    narrow = _computes_in(source, _NARROW)
    if rtol is None:
        rtol = _RTOL["narrow" if narrow else "f32"]
    structure = jax.tree.structure(tuple(args))

    def original(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(fn(*jax.tree.unflatten(structure, leaves)))

    shapes = [_STRUCT(a.shape, a.dtype) for a in source.traced.in_avals]

    def named(artifact: Artifact, name: str) -> Artifact:
        traced = source.traced
        return replace(artifact, name=name, input_names=traced.in_names, output_names=traced.out_names)

    reference = named(export_artifact(original, shapes, platform="cpu"), "the original")
    candidates = {
        PARTITIONERS[p]: named(plan_artifact(plan, fn, args, p, "cpu", shapes), PARTITIONERS[p])
        for p in partitioners
    }
    report = compare_numerics(
        reference,
        candidates,
        inputs={name: _plain(x) for name, x in zip(source.traced.in_names, arrays, strict=True)},
        rtol=rtol,
        atol=_ATOL,
        timeout_seconds=timeout_seconds,
    )
    rows, failures = [], []
    for candidate in report.candidates:
        for out in candidate.outputs:
            rows.append((candidate.name, out.name or "result", out.max_abs, out.max_rel, out.ok))
        bad = [out for out in candidate.outputs if not out.ok]
        if bad:
            worst = max(bad, key=lambda out: out.max_rel)
            failures.append(
                f"{candidate.name}: {len(bad)} of {len(candidate.outputs)} outputs differ from the original's"
                f" by more than {rtol:g} of their largest magnitude; worst {worst.name or 'result'}, by"
                f" {worst.max_rel:.2e}"
            )
    given = sum(not isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tuple(args)))
    notes = [
        f"ran on {_size(plan.mesh)} virtual CPU devices as {dict(plan.mesh)}; {given} of {len(arrays)} inputs"
        f" were given, the others drawn; tolerance {rtol:g} of an output's largest magnitude"
        + (" (the program computes in a narrow type)" if narrow else "")
    ]
    table = Table(
        title="outputs against the original program, the farthest first",
        columns=("program", "output", "max_abs", "max_rel", "ok"),
        rows=tuple(sorted(rows, key=lambda row: (row[-1], -row[3], row[:2]))),
        formats={"max_abs": "{:.2e}", "max_rel": "{:.2e}"},
        shown=12,
    )
    return Validation(
        plan=_line(plan),
        level="numerics",
        tables={"outputs": table},
        failures=tuple(failures),
        notes=tuple(notes),
    )


def _computes_in(source: Source, dtypes: Sequence[str]) -> bool:
    return any(str(v.aval.dtype) in dtypes for op in source.traced.program.walk() for v in op.outputs)


def _plain(array: Any) -> Any:
    if hasattr(array, "dtype") and jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(array))
    return np.asarray(array)


def _size(mesh: Mapping[str, int]) -> int:
    return int(np.prod(list(mesh.values())))


def _line(plan: Plan) -> str:
    return (
        f"{plan.name} plan on {plan.topology} as {dict(plan.mesh)}, predicted"
        f" {1e3 * plan.step_seconds:.3f} ms, {plan.estimate.peak_bytes / 2**30:.2f} GiB"
    )


def plan_artifact(
    plan: Plan,
    fn: Callable[..., Any],
    args: Sequence[Any],
    partitioner: str,
    platform: str,
    shapes: Sequence[Any],
) -> Artifact:
    """Export a plan's program as one of `PARTITIONERS` applies it; `shapes` are those of the flat inputs."""
    mesh = abstract_mesh(plan.mesh)
    flat, ins, outs, donated = flat_program(plan, fn, args, partitioner, mesh)
    made = export_artifact(
        flat,
        shapes,
        platform=platform,
        mesh=mesh,
        in_shardings=ins,
        out_shardings=outs,
        donate_argnums=donated,
    )
    return replace(made, name=PARTITIONERS[partitioner])


# Compile ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Compiled:
    """A program as one compiler made it, beside the plan's prediction."""

    target: str
    program: str
    report: CompiledReport
    match: Match

    @property
    def label(self) -> str:
        return f"{self.program} for {self.target}"


def _compile(
    plan: Plan,
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    partitioners: Sequence[str],
    platforms: Sequence[str],
    full: bool,
    memory_rtol: float,
    traffic_rtol: float,
    timeout_seconds: float,
) -> Validation:
    source = matching_source(plan, fn, args)
    if "tpu" in platforms:
        compiler_target(cm.Topology.parse(plan.topology))  # refuses what no compiler here takes
    if "tpu" in platforms and not is_libtpu_available():
        missing = MissingLibtpuError()
        missing.args = (f'{missing}; or compile for CPU only, with platforms=("cpu",)',)
        raise missing
    shapes = [_STRUCT(a.shape, a.dtype) for a in source.traced.in_avals]
    sources = {e.group: e.source for e in plan.estimate.entries}
    done: list[_Compiled] = []
    failures: list[str] = []
    for platform in platforms:
        levels = levels_of(plan.estimate.machine.placement) if platform == "tpu" else {}
        predicted = predicted_runs(plan.estimate.collectives, widened=platform == "cpu", levels=levels)
        for partitioner in partitioners:
            artifact = plan_artifact(plan, fn, args, partitioner, platform, shapes)
            try:
                report = _ask(plan, artifact, platform, full, timeout_seconds)
            except CompileError as error:
                failures.append(f"{PARTITIONERS[partitioner]} for {platform}: {error}")
                continue
            done.append(
                _Compiled(
                    target=report.target,
                    program=PARTITIONERS[partitioner],
                    report=report,
                    match=match(predicted, compiled_runs(report.collectives, sources, levels)),
                )
            )
    differences: list[str] = []
    for compiled in done:
        failures += _traffic_failures(compiled, traffic_rtol)
        differences += _traffic_differences(compiled)
        if compiled.report.unknown_loops:
            loops = len(compiled.report.unknown_loops)
            differences.append(f"{compiled.label}: {loops} loops of unknown length, counted once")
        if not compiled.target.startswith("cpu"):
            failures += _memory_failures(plan, compiled, memory_rtol)
            differences += _memory_differences(plan, compiled)
    tables = {"collectives": _collectives_table(done)}
    on_tpu = [compiled for compiled in done if not compiled.target.startswith("cpu")]
    if on_tpu:
        tables |= {"memory": _memory_table(plan, on_tpu), "time": _time_table(plan, on_tpu)}
    seconds = sum(compiled.report.compile_seconds for compiled in done)
    targets = " and ".join(dict.fromkeys(compiled.target for compiled in done)) or "nothing"
    notes = [f"compiled for {targets} in {seconds:.0f} s" + ("" if full else ", code generation left out")]
    if any(compiled.target.startswith("cpu") for compiled in done):
        notes.append(
            "XLA's CPU compiler computes 16-bit floats in 32 bits, and so they count as predicted; it"
            " chooses other collectives and knows no limit of memory: a check of structure"
        )
    return Validation(
        plan=_line(plan),
        level="compile",
        tables=tables,
        differences=tuple(differences),
        failures=tuple(failures),
        notes=tuple(notes),
    )


def _ask(plan: Plan, artifact: Artifact, platform: str, full: bool, seconds: float) -> CompiledReport:
    if platform == "cpu":
        return compile_cpu(artifact, timeout_seconds=seconds)
    target = compiler_target(cm.Topology.parse(plan.topology))
    return compile_tpu(
        artifact, **target, device_order=plan.device_order, stop_early=not full, timeout_seconds=seconds
    )


def _traffic_failures(compiled: _Compiled, traffic_rtol: float) -> list[str]:
    share = compiled.match.unexplained_share
    # A program that does not fit is recomputed in pieces, collectives included, until the compiler gives up.
    if share <= traffic_rtol or compiled.report.out_of_memory is not None:
        return []
    odd = [str(d) for d in compiled.match.differences if not d.explained][:5]
    return [
        f"{compiled.label}: {100 * share:.1f} % of the collectives' bytes are on one side only and follow"
        " from no habit of the compiler:\n" + "\n".join(odd)
    ]


def _traffic_differences(compiled: _Compiled) -> list[str]:
    """One line per sort of difference, with its largest case."""
    sorts: dict[str, list[Any]] = {}
    for found in compiled.match.differences:
        sorts.setdefault(found.name, []).append(found)
    lines = []
    for name, cases in sorts.items():
        asked = sum(c.predicted_bytes for c in cases)
        got = sum(c.compiled_bytes for c in cases)
        count = f"{len(cases)} x " if len(cases) > 1 else ""
        first = "largest " if len(cases) > 1 else ""
        lines.append(
            f"{compiled.label}: {count}{name} ({megabytes(asked)} a step predicted, {megabytes(got)}"
            f" compiled): {first}{cases[0].detail}"
        )
    return lines


def _memory_failures(plan: Plan, compiled: _Compiled, memory_rtol: float) -> list[str]:
    report, peak = compiled.report, plan.estimate.peak
    if report.out_of_memory is not None and plan.fits:
        return [f"{compiled.label}: predicted to fit, but {report.out_of_memory}"]
    if report.memory is None:
        return []
    failures = []
    total, arguments = report.memory.total_bytes, report.memory.argument_bytes
    if abs(arguments - peak.argument_bytes) > 0.01 * arguments + 2**20:
        failures.append(
            f"{compiled.label}: arguments take {arguments / 2**30:.3f} GiB, predicted"
            f" {peak.argument_bytes / 2**30:.3f}"
        )
    # Programs of a few MiB differ by what the compiler needs for itself.
    if total > (1 + memory_rtol) * peak.total_bytes + 2**24:
        failures.append(
            f"{compiled.label}: needs {total / 2**30:.3f} GiB, {100 * (total / peak.total_bytes - 1):.0f} %"
            f" more than the {peak.total_bytes / 2**30:.3f} predicted (peak at {peak.where})"
        )
    return failures


def _memory_differences(plan: Plan, compiled: _Compiled) -> list[str]:
    report = compiled.report
    lines = []
    if report.out_of_memory is not None and not plan.fits:
        lines.append(f"{compiled.label}: does not fit, as predicted: {report.out_of_memory}")
    if report.memory is not None and report.out_of_memory is None and not plan.fits:
        lines.append(f"{compiled.label}: fits, though predicted not to")
    if report.rematerialized:
        lines.append(
            f"{compiled.label}: the compiler computes {len(report.rematerialized)} instructions twice to save"
            " memory"
        )
    return lines


def _collectives_table(done: Sequence[_Compiled]) -> Table:
    columns = (
        "target",
        "program",
        "kind",
        "axes",
        "predicted_runs",
        "compiled_runs",
        "predicted_bytes",
        "compiled_bytes",
    )
    return Table(
        title="collectives of a step (runs, and bytes of the larger side on one device)",
        columns=columns,
        rows=tuple(
            (compiled.target, compiled.program, *(row[c] for c in columns[2:]))
            for compiled in done
            for row in by_kind(compiled.match)
        ),
        formats={"predicted_bytes": "MB", "compiled_bytes": "MB"},
    )


def _memory_table(plan: Plan, done: Sequence[_Compiled]) -> Table:
    peak = plan.estimate.peak
    aliased = next((c.report.memory.alias_bytes for c in done if c.report.memory), 0)
    held = peak.argument_bytes + max(0.0, peak.output_bytes - aliased)
    rows: list[tuple[Any, ...]] = [
        (
            "predicted",
            peak.argument_bytes,
            peak.output_bytes,
            peak.total_bytes - held,
            peak.total_bytes,
            plan.fits,
        )
    ]
    for compiled in done:
        memory, full = compiled.report.memory, compiled.report.out_of_memory
        if memory is None:
            total = full.required_bytes if full else None
            rows.append((compiled.program, None, None, None, total, compiled.report.fits))
        else:
            rows.append(
                (
                    compiled.program,
                    memory.argument_bytes,
                    memory.output_bytes,
                    memory.temp_bytes,
                    memory.total_bytes,
                    compiled.report.fits,
                )
            )
    columns = ("program", "arguments_bytes", "outputs_bytes", "temporaries_bytes", "total_bytes", "fits")
    return Table(
        title=f"HBM of a device of {done[0].target} (limit {plan.memory_limit_bytes / 2**30:.2f} GiB; donated"
        " outputs take the arguments' place)",
        columns=columns,
        rows=tuple(rows),
        formats={name: "GiB" for name in columns if name.endswith("_bytes")},
    )


def _time_table(plan: Plan, done: Sequence[_Compiled]) -> Table:
    kernels = [e for e in plan.estimate.entries if e.kind != "collective"]
    seconds = sum(e.seconds for e in kernels)
    products = sum(e.cost.flops * e.count for e in kernels if e.cost.matrix_seconds)
    wire = plan.estimate.serial_seconds - seconds
    rows: list[tuple[Any, ...]] = [("predicted", seconds, wire, products)]
    rows += [(c.program, c.report.estimated_seconds, None, float(c.report.flops)) for c in done]
    return Table(
        title="time of a step (the compiler estimates kernels only, and only with full_compile=True)",
        columns=("program", "kernels_seconds", "collectives_seconds", "products_flops"),
        rows=tuple(rows),
        formats={"kernels_seconds": "ms", "collectives_seconds": "ms", "products_flops": "T"},
    )
