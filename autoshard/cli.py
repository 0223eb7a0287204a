"""The command line: `autoshard suggest | show | compare | why | alternatives | pareto | validate | calibrate | topologies`.

Results go to standard output, as text or with `--json` for machines; progress and errors to standard error,
progress on a terminal only. Exit codes: 0 done; 1 the plan does not fit, or the validation failed; 2 the
input cannot be used; 130 interrupted.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import jax

import autoshard
import cost_models as cm
from autoshard import cli_input
from autoshard.apply import matching_source
from autoshard.cli_input import InputError
from autoshard.cli_output import fail, interruptible, print_json, print_view, records, say, write
from autoshard.errors import AutoshardError, PlanMismatchError, TraceError
from autoshard.meshes import resolve_topology
from autoshard.plan import Plan
from autoshard.report.comparison import comparison_view
from autoshard.report.tables import summary
from autoshard.report.text import plan_view

if TYPE_CHECKING:
    pass

__all__ = ["main"]

_BAD_INPUT = (AutoshardError, cm.TopologyError, cm.MeshError, cm.UnknownChipError)
_PROGRAM_HELP = """\
FILE.py:factory names a function without arguments in a Python file (or package.module:factory) that returns
(fn, args), or (fn, args, donate_argnums): the function to shard, a tuple of its arguments (arrays or
jax.ShapeDtypeStruct, in any pytrees), and the positions of those whose memory the results may take."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="autoshard")
def main() -> None:
    r"""Plan, price, check and compare the sharding of an unannotated JAX function on a TPU slice.

    \b
    autoshard suggest train.py:step --topology v3:4x4 --mesh data=8,model=4 --out plan.json
    autoshard show plan.json
    autoshard compare train.py:step --plan plan.json
    autoshard why train.py:step plan.json "[0]['embed']"
    autoshard alternatives train.py:step plan.json --by axes
    autoshard pareto train.py:step --topology v3:4x4 --mesh data=8,model=4
    autoshard validate train.py:step plan.json --level compile
    autoshard calibrate --topology v3:4x4 --out v3.toml

    Exit codes: 0 done; 1 the plan does not fit, or the validation failed; 2 the input cannot be used;
    130 interrupted.
    """


# Options that several commands take --------------------------------------------------------------------

Command = Callable[..., Any]


def _reported(command: Command) -> Command:
    """Turn bad input into a message and exit code 2, and an interrupt into 130; both without traceback."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> Any:
        try:
            return command(*args, **options)
        except KeyboardInterrupt:
            say("interrupted")
            raise SystemExit(130) from None
        except TraceError as error:
            cause = error.__cause__
            frames = cli_input.users_frames(cause) if cause is not None else []
            fail("\n".join([str(error), *(["It failed at:", *frames] if frames else [])]))
        except _BAD_INPUT as error:
            fail(str(error))

    return run


_annotate = click.option(
    "--annotate",
    multiple=True,
    metavar="KEY=SPEC",
    help="A spec to keep, such as \"[0]['embed']=data,None\": a mesh axis, axes as (data,model), None (whole)"
    " or ? (open) per dim. Results are out[0]...; name:attn_out is a checkpoint_name, model.py:42 or"
    " model.py:42:dot_general what is made at a source line. May be repeated.",
)
_plan_path = click.argument("plan_path", metavar="PLAN.json")
_program = click.argument("program", metavar="FILE.py:factory")
_json = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON on standard output, and nothing else."
)
_flops = click.option(
    "--model-flops", type=float, help="Flops of a step on all devices, nothing recomputed; gives the MFU."
)
_donate = click.option(
    "--donate",
    metavar="0,1",
    help="Positions of the arguments whose memory the results may take; instead of the factory's.",
)
_limit = click.option(
    "--memory-limit-gib",
    type=click.FloatRange(min=0, min_open=True),
    help="HBM of a device that the plan may use; by default all that a program can.",
)
_chip = click.option(
    "--chip",
    "chip_path",
    metavar="FILE.toml",
    help="Figures of the devices, as calibrate writes them; instead of the generation's own.",
)
_full = click.option("--full", is_flag=True, help="List every array, buffer and source line.")
_timings = click.option("--timings", is_flag=True, help="Show how long each stage of planning took.")


# Commands ----------------------------------------------------------------------------------------------


@main.command(help=f"Find the fastest sharding that fits a slice.\n\n{_PROGRAM_HELP}")
@_program
@click.option(
    "--topology",
    required=True,
    help='Slice, as "v3:4x4" or "h100:8", or several, as "2*v5e:16x16"; with --mesh also a bare "v3". See:'
    " topologies.",
)
@click.option("--mesh", "mesh_text", metavar="data=8,model=4", help="Mesh axes; searched if left out.")
@_chip
@click.option("--out", type=click.Path(dir_okay=False), help="Write the plan to this file.")
@_annotate
@_donate
@_limit
@click.option("--time-limit", type=click.FloatRange(min=0), default=60.0, show_default=True, help="Seconds.")
@_flops
@_full
@_timings
@_json
@_reported
def suggest(
    program: str,
    topology: str,
    mesh_text: str | None,
    chip_path: str | None,
    out: str | None,
    annotate: Sequence[str],
    donate: str | None,
    memory_limit_gib: float | None,
    time_limit: float,
    model_flops: float | None,
    full: bool,
    timings: bool,
    as_json: bool,
) -> None:
    _require_folder(out)
    _stay_on_cpu()
    mesh, given = cli_input.read_mesh(mesh_text), cli_input.read_annotations(annotate)
    loaded = cli_input.read_program(program)
    with interruptible("planning") as (progress, interrupts):
        plan = autoshard.suggest(
            loaded.fn,
            *loaded.args,
            topology=_slice(topology, mesh, chip_path),
            mesh=mesh,
            annotations=given,
            donate_argnums=_donated(loaded, donate),
            memory_limit_bytes=None if memory_limit_gib is None else memory_limit_gib * 2**30,
            time_limit_seconds=time_limit,
            progress=progress,
        )
    if out is not None:
        write(out, plan.to_json())
    if as_json:
        print_json(summary(plan, model_flops=model_flops))
    else:
        _print_plan(plan, full=full, timings=timings, model_flops=model_flops)
        if out is not None and sys.stderr.isatty():
            say(f"written to {out}")
    if interrupts:
        say("interrupted: the plan is the best one so far")
        raise SystemExit(130)
    if not plan.fits:
        raise SystemExit(1)


@main.command()
@_plan_path
@_flops
@_full
@_timings
@_json
@_reported
def show(plan_path: str, model_flops: float | None, full: bool, timings: bool, as_json: bool) -> None:
    """Print a plan that `suggest --out` wrote."""
    plan = cli_input.read_plan(plan_path)
    if as_json:
        print_json(summary(plan, model_flops=model_flops))
    else:
        _print_plan(plan, full=full, timings=timings, model_flops=model_flops)


@main.command(
    help="Compare plans with the known ways to shard the same program.\n\n"
    "Without --plan, a suggested plan is made and compared. Slice and mesh are by default those of the first"
    f" --plan.\n\n{_PROGRAM_HELP}"
)
@_program
@click.option("--topology", help="Slice, as v3:4x4.")
@click.option("--mesh", "mesh_text", metavar="data=8,model=4", help="Mesh axes.")
@_chip
@click.option(
    "--baselines",
    "names",
    default="all",
    show_default=True,
    metavar="all|none|NAME,...",
    help="Known plans to compare with.",
)
@click.option("--plan", "plan_paths", multiple=True, metavar="PLAN.json", help="May be repeated.")
@_donate
@_limit
@_flops
@_json
@_reported
def compare(
    program: str,
    topology: str | None,
    mesh_text: str | None,
    chip_path: str | None,
    names: str,
    plan_paths: Sequence[str],
    donate: str | None,
    memory_limit_gib: float | None,
    model_flops: float | None,
    as_json: bool,
) -> None:
    from autoshard.baselines import baselines
    from autoshard.compare import compare as table_of

    _stay_on_cpu()
    plans = [cli_input.read_plan(path) for path in plan_paths]
    mesh = cli_input.read_mesh(mesh_text)
    where: str | cm.Topology | None = topology
    if plans:
        where, mesh = topology or plans[0].slice, mesh or dict(plans[0].mesh)
    if where is None or mesh is None:
        raise InputError("compare needs a slice and a mesh. Give --topology and --mesh, or a --plan.")
    loaded = cli_input.read_program(program)
    for path, plan in zip(plan_paths, plans, strict=True):
        _require_match(path, plan, loaded)
    options: dict[str, Any] = {
        "topology": _slice(where, mesh, chip_path),
        "mesh": mesh,
        "donate_argnums": _donated(loaded, donate),
        "memory_limit_bytes": None if memory_limit_gib is None else memory_limit_gib * 2**30,
    }
    left_out: Mapping[str, str] = {}
    with interruptible("planning") as (progress, _):
        if not plans:
            plans.append(autoshard.suggest(loaded.fn, *loaded.args, **options, progress=progress))
        if names != "none":
            wanted = None if names == "all" else [name.strip() for name in names.split(",")]
            progress("baselines")
            known = baselines(loaded.fn, *loaded.args, **options, names=wanted)
            plans += known.values()
            left_out = getattr(known, "left_out", {})
    table = table_of(plans, model_flops=model_flops)
    if as_json:
        print_json({"plans": records(table), "left_out": dict(left_out)})
    else:
        print_view(comparison_view(table))
        for name, why in left_out.items():
            click.echo(f"left out: {name}: {why}")


@main.command(
    help="Say why a plan splits an array or op as it does: the nearest rivals, and what decides.\n\n"
    "KEY is an argument's path such as \"[0]['embed']\", out... for a result, name:attn_out, model.py:42, or a group"
    f" of ops, g12.\n\n{_PROGRAM_HELP}"
)
@_program
@_plan_path
@click.argument("key")
@click.option("--rivals", type=click.IntRange(min=1), default=3, show_default=True, help="How many to try.")
@_annotate
@_json
@_reported
def why(program: str, plan_path: str, key: str, rivals: int, annotate: Sequence[str], as_json: bool) -> None:
    plan = _answering(program, plan_path, annotate)
    with interruptible("solving"):
        answer = plan.why(key, rivals)
    if as_json:
        print_json(answer.to_dict())
    else:
        click.echo(str(answer))


@main.command(
    help=f"Find the next best plans, which split arguments otherwise.\n\n{_PROGRAM_HELP}",
)
@_program
@_plan_path
@click.option("--count", type=click.IntRange(min=1), default=3, show_default=True, help="How many to find.")
@click.option("--among", multiple=True, metavar="PATH", help="Arguments that must differ. May be repeated.")
@click.option(
    "--by",
    type=click.Choice(["layouts", "axes"]),
    default="layouts",
    show_default=True,
    help="Whether plans differ that split over the same axes, along other dims.",
)
@_annotate
@_json
@_reported
def alternatives(
    program: str,
    plan_path: str,
    count: int,
    among: Sequence[str],
    by: str,
    annotate: Sequence[str],
    as_json: bool,
) -> None:
    from autoshard.compare import compare as table_of
    from autoshard.report.answers import alternative_tables

    plan = _answering(program, plan_path, annotate)
    with interruptible("solving"):
        found = plan.alternatives(count, among or None, by)
    if as_json:
        print_json(records(table_of([plan, *found])))
    else:
        click.echo("\n\n".join(map(str, alternative_tables(plan, found))))


@main.command(help=f"Sweep memory limits: step time against peak HBM.\n\n{_PROGRAM_HELP}")
@_program
@click.option("--topology", required=True, help="Slice, as v3:4x4.")
@click.option("--mesh", "mesh_text", metavar="data=8,model=4", help="Mesh axes; searched if left out.")
@_chip
@click.option("--points", type=click.IntRange(min=1), default=8, show_default=True, help="Limits to try.")
@_annotate
@_donate
@_json
@_reported
def pareto(
    program: str,
    topology: str,
    mesh_text: str | None,
    chip_path: str | None,
    points: int,
    annotate: Sequence[str],
    donate: str | None,
    as_json: bool,
) -> None:
    from autoshard.compare import compare as table_of

    _stay_on_cpu()
    mesh, given = cli_input.read_mesh(mesh_text), cli_input.read_annotations(annotate)
    loaded = cli_input.read_program(program)
    with interruptible("planning") as (progress, _):
        front = autoshard.pareto(
            loaded.fn,
            *loaded.args,
            topology=_slice(topology, mesh, chip_path),
            mesh=mesh,
            points=points,
            annotations=given,
            donate_argnums=_donated(loaded, donate),
            progress=progress,
        )
    if as_json:
        print_json(records(table_of(front.plans)))
    else:
        click.echo(str(front))
    if not front[0].fits:
        raise SystemExit(1)


@main.command(help=f"Check what a plan predicts, by running or compiling the program.\n\n{_PROGRAM_HELP}")
@_program
@_plan_path
@click.option(
    "--level",
    type=click.Choice(["numerics", "compile", "profile"]),
    default="compile",
    show_default=True,
    help="numerics: run on virtual CPU devices and compare the values. compile: compile for the CPU and for"
    " the TPU, which needs no TPU. profile: run on the devices present and compare the times.",
)
@_json
@_reported
def validate(program: str, plan_path: str, level: str, as_json: bool) -> None:
    from autoshard.validate import ArtifactError, ProfileError, WorkerError

    if level != "profile":
        _stay_on_cpu()
    plan = cli_input.read_plan(plan_path)
    loaded = cli_input.read_program(program)
    _require_match(plan_path, plan, loaded)
    try:
        with interruptible(f"validating: {level}"):
            report: Any = plan.validate(loaded.fn, *loaded.args, level=level)
    except (ArtifactError, ProfileError, WorkerError) as error:
        fail(f"The plan could not be validated at the level {level!r}: {error}")
    if as_json:
        print_json(report.to_dict())
    else:
        click.echo(str(report))
    if not report.ok:
        raise SystemExit(1)


@main.command()
@click.option("--topology", required=True, help="Slice of the generation to calibrate, as v3:4x4.")
@click.option("--out", type=click.Path(dir_okay=False), help="Write the figures to this file, for --chip.")
@click.option(
    "--profile", is_flag=True, help="Measure the devices attached, rather than ask the TPU compiler."
)
@_json
@_reported
def calibrate(topology: str, out: str | None, profile: bool, as_json: bool) -> None:
    """Fit the efficiency of a generation's devices to what its compiler, or a profile, says of small programs.

    A fixed family of programs of one kernel is measured: matrix products, streams through HBM, chains of vector
    operations, narrow results and tiny kernels. Half of each kind is fitted to, the other half tests. No TPU is
    needed without --profile.
    """
    from autoshard.calibration import calibrate as calibration_of
    from autoshard.validate import ProfileError, WorkerError

    _require_folder(out)
    if not profile:
        _stay_on_cpu()
    try:
        with interruptible("calibrating") as (progress, _):
            found = calibration_of(topology, profile=profile, progress=progress)
    except (ProfileError, WorkerError) as error:
        fail(f"{topology} could not be calibrated: {error}")
    if out is not None:
        write(out, found.to_toml())
    if as_json:
        print_json(found.to_dict())
    else:
        click.echo(str(found))
        if out is not None and sys.stderr.isatty():
            say(f"written to {out}")


@main.command()
@_json
@_reported
def topologies(as_json: bool) -> None:
    """List the slices of TPUs and nodes of GPUs that can be planned for, by generation."""
    found = {chip.name: list(cm.slices(chip.name)) for chip in cm.chips()}
    if as_json:
        print_json(
            {
                chip.name: {
                    "platform": chip.platform,
                    "devices_per_chip": chip.devices_per_chip,
                    "hbm_bytes_per_device": chip.hbm_capacity_bytes,
                    "matmul_flops_per_second_per_device": chip.matmul_flops_per_second,
                    "slices": [str(slice_) for slice_ in found[chip.name]],
                    "devices": [slice_.num_devices for slice_ in found[chip.name]],
                }
                for chip in cm.chips()
            }
        )
        return
    for chip in cm.chips():
        per_chip = f"{chip.devices_per_chip} device{'s' if chip.devices_per_chip > 1 else ''} per chip"
        click.echo(
            f"{chip.name}: {'GPUs' if chip.platform == 'gpu' else per_chip}, each"
            f" {chip.hbm_capacity_bytes / 2**30:.1f} GiB usable HBM and"
            f" {chip.matmul_flops_per_second / 1e12:.0f} TFLOP/s (bf16)"
        )
        names = "  ".join(f"{slice_} ({slice_.num_devices})" for slice_ in found[chip.name])
        click.echo(click.wrap_text(names, 100, "    ", "    "))
    click.echo(click.wrap_text(f"\nIn brackets: devices. {cm.GRAMMAR}.", 100))


# Checks ------------------------------------------------------------------------------------------------


def _donated(loaded: cli_input.Program, given: str | None) -> tuple[int, ...]:
    """Return the arguments to donate: the option's, else the factory's."""
    numbers = cli_input.read_integers(given, "--donate")
    source = "the factory" if numbers is None else "--donate"
    numbers = loaded.donate_argnums if numbers is None else numbers
    count = len(loaded.args)
    wrong = [i for i in numbers if not -count <= i < count]
    if wrong:
        raise InputError(
            f"{source} donates argument {', '.join(map(str, wrong))}, and the function takes {count}."
            f" Give positions from 0 to {count - 1}."
        )
    return numbers


def _slice(topology: str | cm.Topology, mesh: Mapping[str, int] | None, chip_path: str | None) -> cm.Topology:
    """Return the slice that was named, with the figures of a file if one was given."""
    found = resolve_topology(topology, mesh)
    return found if chip_path is None else found.with_chip(cli_input.read_chip(chip_path))


def _stay_on_cpu() -> None:
    """Keep JAX from starting an accelerator, or from looking for one: planning only traces."""
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")


def _require_match(path: str, plan: Plan, loaded: cli_input.Program) -> None:
    try:
        matching_source(plan, loaded.fn, loaded.args)
    except PlanMismatchError as error:
        raise PlanMismatchError(f"{path}: {error}") from error


def _answering(program: str, path: str, annotate: Sequence[str]) -> Plan:
    """Read a plan and its program, so that it answers questions."""
    _stay_on_cpu()
    plan, given = cli_input.read_plan(path), cli_input.read_annotations(annotate)
    loaded = cli_input.read_program(program)
    try:
        return plan.attach(loaded.fn, *loaded.args, annotations=given)
    except PlanMismatchError as error:
        raise PlanMismatchError(f"{path}: {error}") from error


def _require_folder(out: str | None) -> None:
    if out is not None and not Path(out).absolute().parent.is_dir():
        raise InputError(f"--out {out}: there is no folder {Path(out).absolute().parent}. Make it first.")


def _print_plan(plan: Plan, *, full: bool, timings: bool, model_flops: float | None) -> None:
    print_view(plan_view(plan, full=full, timings=timings, model_flops=model_flops))
