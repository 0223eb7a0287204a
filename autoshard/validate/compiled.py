"""Compiles an artifact with the production TPU compiler, or for virtual CPU devices, and reads the answer.

`compile_tpu` needs the package libtpu and no TPU. The report lists what the compiler decided: the
collectives, the memory, its own cycle estimates, each weighted with the trip counts of the loops around it.
"""

import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cost_models as cm
from autoshard.validate.artifact import Artifact
from autoshard.validate.collectives import Collective, find_collectives, step_bytes_by_kind
from autoshard.validate.hlo import parse_module
from autoshard.validate.loops import schedule
from autoshard.validate.memory import Memory, OutOfMemory, memory_of_buffers, parse_out_of_memory
from autoshard.validate.process import CompileError, MissingLibtpuError, is_libtpu_available, run_worker
from autoshard.validate.work import InstructionWork, measure

_DEFAULT_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class CompiledReport:
    """What a compiler made of a program on a mesh; all sizes are for one device.

    Attributes:
        program: the artifact's name.
        target: the topology, such as "v3:8x8", or "cpu:8".
        mesh_shape: axis name to size.
        collectives: every collective that a step runs.
        memory: the memory plan; None if the compiler did not get that far.
        out_of_memory: what the compiler said when the program does not fit, else None. The other fields then
            describe the program that does not fit, as far as it was optimised.
        estimated_cycles: the compiler's estimate summed over a step, without collectives; None where it gives
            none (on CPU, and when code generation was not run).
        clock_hz: cycles per second of the target; None if not known.
        flops: floating-point operations of the matrix products in a step.
        instructions: the work of each instruction that runs.
        trip_counts: by the name of the loop.
        unknown_loops: loops whose trip count could not be solved; they count as one trip.
        rematerialized: names of instructions that the compiler runs twice to save memory.
        complete: whether the compiler ran to its end, code generation included.
        compile_seconds: wall time of the compiler.
        hlo_text: the optimised module.

    """

    program: str
    target: str
    mesh_shape: Mapping[str, int]
    collectives: tuple[Collective, ...]
    memory: Memory | None
    out_of_memory: OutOfMemory | None
    estimated_cycles: int | None
    clock_hz: float | None
    flops: int
    instructions: tuple[InstructionWork, ...] = field(repr=False)
    trip_counts: Mapping[str, int] = field(repr=False)
    unknown_loops: tuple[str, ...]
    rematerialized: tuple[str, ...] = field(repr=False)
    complete: bool
    compile_seconds: float
    hlo_text: str = field(repr=False)

    @property
    def fits(self) -> bool:
        """Whether the program fits in the memory of a device."""
        return self.out_of_memory is None

    @property
    def estimated_seconds(self) -> float | None:
        """`estimated_cycles` by the clock: a step's time without collectives and `unestimated` work."""
        if self.estimated_cycles is None or self.clock_hz is None:
            return None
        return self.estimated_cycles / self.clock_hz

    @property
    def step_bytes_by_kind(self) -> Mapping[str, int]:
        """Bytes of the collectives in a step, by kind."""
        return step_bytes_by_kind(self.collectives)

    @property
    def unestimated(self) -> tuple[InstructionWork, ...]:
        """The instructions without a cycle estimate, such as gathers, sorts and custom calls."""
        return tuple(work for work in self.instructions if work.cycles is None)

    def __str__(self) -> str:
        mesh = " ".join(f"{axis}={size}" for axis, size in self.mesh_shape.items())
        lines = [f"{self.program} on {self.target}, mesh {mesh}: compiled in {self.compile_seconds:.1f} s"]
        if self.out_of_memory is not None:
            lines.append(f"  {self.out_of_memory}")
        if self.memory is not None:
            lines.append(f"  {self.memory}")
        if self.estimated_seconds is not None:
            lines.append(f"  {1e3 * self.estimated_seconds:.3f} ms estimated without collectives")
        if self.rematerialized:
            lines.append(f"  {len(self.rematerialized)} instructions rematerialised to save memory")
        if self.unknown_loops:
            lines.append(f"  unknown trip counts: {', '.join(self.unknown_loops)}")
        lines += [f"  {collective}" for collective in self.collectives]
        return "\n".join(lines)


def compile_tpu(
    artifact: Artifact,
    *,
    topology: str,
    device_order: Sequence[int] | None = None,
    mesh_shape: Mapping[str, int] | None = None,
    wrap: tuple[bool, bool, bool] | None = None,
    num_slices: int = 1,
    chip_config_name: str | None = None,
    stop_early: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    timeout_seconds: float = _DEFAULT_TIMEOUT_SECONDS,
) -> CompiledReport:
    """Compile a program with the TPU compiler for a slice that need not exist.

    Args:
        artifact: a program exported for the platform "tpu".
        topology: generation and chips of a slice, "v3:8x8" or "v4:4x4x4".
        device_order: for each position of the mesh in row-major order, the number of the device, counted over
            the slices by slice, z, y, x and then core; None for 0, 1, 2 ...
        mesh_shape: axis name to size; None for the artifact's own.
        wrap: whether the x, y and z axes of the slice have wrap-around links; None for none of them.
        num_slices: equal slices, which talk over the data centre network.
        chip_config_name: "megacore" for v4 chips that act as one device.
        stop_early: skip code generation. Collectives, loops and flops are the same; memory lacks the
            compiler's own scratch (15 KiB with libtpu 0.0.52, 107 KiB with 0.0.42.1), and cycles are missing.
        compiler_options: further options for XLA.
        timeout_seconds: wall time after which the compiler is stopped.

    Returns:
        The report; a program that does not fit in memory is a report too.

    Raises:
        MissingLibtpuError: libtpu is not installed.
        CompileError: the compiler refused the program or the topology, aborted, or took too long.

    """
    _require_tpu([artifact])
    generation = re.split("[:_=]", topology)[0].removeprefix("TPU ").strip()
    return _compile(
        artifact,
        target=f"{num_slices}*{topology}" if num_slices > 1 else topology,
        request=_tpu_request(
            topology=topology,
            wrap=wrap,
            num_slices=num_slices,
            chip_config_name=chip_config_name,
            device_order=device_order,
            stop_early=stop_early,
            compiler_options=compiler_options,
        ),
        mesh_shape=artifact.mesh_shape if mesh_shape is None else mesh_shape,
        clock_hz=_clock(generation),
        cpu_devices=1,
        timeout_seconds=timeout_seconds,
    )


def _tpu_request(
    *,
    topology: str,
    wrap: tuple[bool, bool, bool] | None,
    num_slices: int,
    chip_config_name: str | None,
    device_order: Sequence[int] | None = None,
    stop_early: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if wrap is not None:
        options["wrap"] = wrap
    if num_slices > 1:
        options["num_slices"] = num_slices
    if chip_config_name is not None:
        options["chip_config_name"] = chip_config_name
    return {
        "platform": "tpu",
        "topology": topology,
        "topology_options": options,
        "device_order": None if device_order is None else [int(i) for i in device_order],
        "stop_early": stop_early,
        "compiler_options": dict(compiler_options or {}),
    }


def _require_tpu(artifacts: Sequence[Artifact]) -> None:
    if not is_libtpu_available():
        raise MissingLibtpuError
    for artifact in artifacts:
        if artifact.platform != "tpu":
            raise CompileError(
                f"{artifact.name} was exported for {artifact.platform!r}; compile_tpu needs platform='tpu'"
            )


def compile_tpu_each(
    artifacts: Sequence[Artifact],
    *,
    topology: cm.Topology,
    timeout_seconds: float = _DEFAULT_TIMEOUT_SECONDS,
) -> tuple[CompiledReport, ...]:
    """Compile several programs with the TPU compiler, one after the other in one process, which saves its starts.

    Args:
        artifacts: programs exported for the platform "tpu".
        topology: the slice; the programs run on its first devices.
        timeout_seconds: wall time of all together.

    Returns:
        A report for each, as `compile_tpu` would return it.

    Raises:
        MissingLibtpuError: libtpu is not installed.
        CompileError: as of `compile_tpu`, for the first program that fails; or the topology is of GPUs.

    """
    request = _tpu_request(**compiler_target(topology))
    _require_tpu(artifacts)
    programs = [
        {"name": a.name, "mesh_shape": _pairs(a.mesh_shape), "donated": list(a.donated)} for a in artifacts
    ]
    with tempfile.TemporaryDirectory(prefix="autoshard-") as name:
        folders = [Path(name) / str(number) for number in range(len(artifacts))]
        for folder, artifact in zip(folders, artifacts, strict=True):
            folder.mkdir()
            (folder / "program.bin").write_bytes(artifact.serialized)
        answer = run_worker(
            Path(name),
            {"task": "compile_each", "programs": programs, **request},
            what=f"compiling {len(artifacts)} programs for {topology}",
            timeout_seconds=timeout_seconds,
        )
        clock = topology.chip.clock_hz
        return tuple(
            _read(a, str(topology), a.mesh_shape, topology.num_slices, clock, report, _texts(folder))
            for a, folder, report in zip(artifacts, folders, answer["reports"], strict=True)
        )


def compiler_target(topology: cm.Topology) -> dict[str, Any]:
    """Return the arguments by which `compile_tpu` takes a topology.

    Raises:
        CompileError: the topology is of GPUs.

    >>> compiler_target(cm.Topology.parse("2*v5e:8x16"))
    {'topology': 'v5e:8x16', 'wrap': (False, True, False), 'num_slices': 2, 'chip_config_name': None}

    """
    if topology.chip.platform != "tpu":
        raise CompileError(
            f"there is no ahead-of-time compiler for GPUs here, and {topology} has GPUs. Compile for CPU only, with "
            'platforms=("cpu",), or validate at another level.'
        )
    x, y, z = (*topology.wrap, False, False, False)[:3]
    return {
        "topology": str(replace(topology, num_slices=1)).split()[0],
        "wrap": (x, y, z) if x or y or z else None,
        "num_slices": topology.num_slices,
        # By default the compiler takes the two cores of a v4 chip for two devices.
        "chip_config_name": "megacore" if topology.chip.name == "v4" else None,
    }


def compile_cpu(
    artifact: Artifact,
    *,
    mesh_shape: Mapping[str, int] | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    timeout_seconds: float = _DEFAULT_TIMEOUT_SECONDS,
) -> CompiledReport:
    """Compile a program with XLA's CPU compiler for as many virtual devices as its mesh has.

    Args:
        artifact: a program exported for the platform "cpu".
        mesh_shape: axis name to size; None for the artifact's own.
        compiler_options: further options for XLA.
        timeout_seconds: wall time after which the compiler is stopped.

    Returns:
        The report, without cycle estimates.

    Raises:
        CompileError: the compiler refused the program, aborted, or took too long.

    """
    if artifact.platform != "cpu":
        raise CompileError(
            f"{artifact.name} was exported for {artifact.platform!r}; compile_cpu needs platform='cpu'"
        )
    shape = artifact.mesh_shape if mesh_shape is None else mesh_shape
    devices = math.prod(shape.values())
    return _compile(
        artifact,
        target=f"cpu:{devices}",
        request={
            "platform": "cpu",
            "topology": None,
            "topology_options": {},
            "device_order": None,
            "stop_early": False,
            "compiler_options": dict(compiler_options or {}),
        },
        mesh_shape=shape,
        clock_hz=None,
        cpu_devices=devices,
        timeout_seconds=timeout_seconds,
    )


def _clock(generation: str) -> float | None:
    """Return the clock by which `estimated_cycles` count, of a generation as the compiler names it."""
    known = (c.clock_hz for c in cm.chips() if generation in (c.name, c.compiler_name))
    return next(known, None)


def _compile(
    artifact: Artifact,
    *,
    target: str,
    request: Mapping[str, Any],
    mesh_shape: Mapping[str, int],
    clock_hz: float | None,
    cpu_devices: int,
    timeout_seconds: float,
) -> CompiledReport:
    with tempfile.TemporaryDirectory(prefix="autoshard-") as name:
        folder = Path(name)
        (folder / "program.bin").write_bytes(artifact.serialized)
        shape = _pairs(mesh_shape)
        report = run_worker(
            folder,
            {"task": "compile", "mesh_shape": shape, "donated": list(artifact.donated), **request},
            what=f"compiling {artifact.name} for {target}",
            timeout_seconds=timeout_seconds,
            cpu_devices=cpu_devices,
        )
        texts = _texts(folder)
    num_slices = request["topology_options"].get("num_slices", 1)
    return _read(artifact, target, mesh_shape, num_slices, clock_hz, report, texts)


def _pairs(mesh_shape: Mapping[str, int]) -> list[list[Any]]:
    """Write a mesh in JSON: objects keep their order here, but a list says so."""
    return [[axis, size] for axis, size in mesh_shape.items()]


def _texts(folder: Path) -> Mapping[str, str]:
    """Read what a worker left beside its report."""
    return {
        file: (folder / file).read_text() if (folder / file).exists() else ""
        for file in ("hlo.txt", "buffers.txt", "usage.txt")
    }


def _read(
    artifact: Artifact,
    target: str,
    mesh_shape: Mapping[str, int],
    num_slices: int,
    clock_hz: float | None,
    report: Mapping[str, Any],
    texts: Mapping[str, str],
) -> CompiledReport:
    text = texts["hlo.txt"]
    collectives: tuple[Collective, ...] = ()
    instructions: tuple[InstructionWork, ...] = ()
    trip_counts: Mapping[str, int] = {}
    unknown: tuple[str, ...] = ()
    if text:
        module = parse_module(text)
        steps = schedule(module)
        trip_counts, unknown = steps.trip_counts, steps.unknown_loops
        collectives = find_collectives(module, steps, mesh_shape, num_slices)
        instructions = measure(module, steps)
    complete = bool(report.get("complete"))
    if complete:
        numbers = report["memory"]
        memory: Memory | None = Memory(
            argument_bytes=numbers["argument"],
            output_bytes=numbers["output"],
            alias_bytes=numbers["alias"],
            temp_bytes=numbers["temp"],
            generated_code_bytes=numbers["generated_code"],
        )
    else:
        memory = memory_of_buffers(texts["buffers.txt"]) if texts["buffers.txt"] else None
    estimated = [work.cycles * work.trips for work in instructions if work.cycles is not None]
    return CompiledReport(
        program=artifact.name,
        target=target,
        mesh_shape=dict(mesh_shape),
        collectives=collectives,
        memory=memory,
        out_of_memory=(
            parse_out_of_memory(report["message"], texts["usage.txt"])
            if report["status"] == "out_of_memory"
            else None
        ),
        estimated_cycles=sum(estimated) if complete and estimated else None,
        clock_hz=clock_hz,
        flops=sum(work.flops * work.trips for work in instructions),
        instructions=instructions,
        trip_counts=trip_counts,
        unknown_loops=unknown,
        rematerialized=tuple(work.name for work in instructions if ".remat" in work.name),
        complete=complete,
        compile_seconds=float(report["compile_seconds"]),
        hlo_text=text,
    )
