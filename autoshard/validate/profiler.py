"""Measures a compiled program on the devices that are present: seconds per step and per instruction.

The profile is taken with `jax.profiler` and read with `jax.profiler.ProfileData`. On a TPU each core has a
plane `/device:TPU:<i>` whose line `XLA Ops` lists the instructions; on CPU the instructions are events of the
host's threads, marked with the statistic `hlo_op`. Instructions nest (a loop spans its body), so each is
charged with its own time only: the seconds of all instructions add up to the time that the device was busy.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

from autoshard.validate.hlo import HloParseError, Module, parse_module
from autoshard.validate.process import is_libtpu_available

# Carries no annotations in JAX.
_WAIT: Any = jax.block_until_ready


class ProfileError(RuntimeError):
    """A program cannot be profiled here, or its profile holds no instruction."""


@dataclass(frozen=True, kw_only=True)
class OpTime:
    """The time of one HLO instruction.

    Attributes:
        name: the instruction's name.
        seconds: its own time in a step, without instructions inside it; the mean over steps and devices.
        occurrences: executions in a step; the mean over steps and devices.
        op_name: JAX's path of the operation; empty if the module's text is not at hand.
        source: `file:line`, or empty.

    """

    name: str
    seconds: float
    occurrences: float
    op_name: str
    source: str


@dataclass(frozen=True, kw_only=True)
class ProfileReport:
    """What a profile says about one step.

    Attributes:
        step_seconds: median wall time of a step, dispatch included.
        steps: number of steps that were measured.
        devices: names of the devices that ran instructions.
        ops: the instructions, slowest first.
        busy_seconds: time that a device spent in instructions in a step; the mean over devices.

    """

    step_seconds: float
    steps: int
    devices: tuple[str, ...]
    ops: tuple[OpTime, ...] = field(repr=False)
    busy_seconds: float

    def __str__(self) -> str:
        lines = [
            f"{1e3 * self.step_seconds:.3f} ms a step (median of {self.steps}), busy "
            f"{1e3 * self.busy_seconds:.3f} ms, on {len(self.devices)} devices"
        ]
        for op in self.ops[:20]:
            lines.append(
                f"  {1e3 * op.seconds:9.3f} ms  x{op.occurrences:<6.4g} {op.name}  {op.op_name} {op.source}"
            )
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class _Event:
    device: str
    lane: str
    name: str
    start_ns: float
    end_ns: float


def profile(
    compiled: Callable[..., Any],
    args: Sequence[Any],
    *,
    steps: int = 5,
    warmup: int = 1,
    hlo_text: str | None = None,
    next_args: Callable[[Any, tuple[Any, ...]], Sequence[Any]] | None = None,
) -> ProfileReport:
    """Run a program a few times under the profiler.

    Args:
        compiled: a `jax.stages.Compiled`, or a jitted function.
        args: its arguments.
        steps: number of steps to measure, at least 1.
        warmup: number of steps before that.
        hlo_text: the optimised module, to find names and sources of instructions; None to ask `compiled`.
        next_args: makes the arguments of the next step from the outputs and the arguments of this one; needed
            for a program that donates. None to use `args` each time.

    Returns:
        The report.

    Raises:
        ProfileError: the profile names no instruction, or JAX's profiler cannot start in this process.

    """
    _check_platform()
    arguments = tuple(args)

    def step() -> None:
        nonlocal arguments
        result = _WAIT(compiled(*arguments))
        if next_args is not None:
            arguments = tuple(next_args(result, arguments))

    for _ in range(max(warmup, 1)):
        step()
    walls: list[float] = []
    with tempfile.TemporaryDirectory(prefix="autoshard-") as name:
        options = jax.profiler.ProfileOptions()
        # Python frames would fill the trace and slow the step.
        options.python_tracer_level = 0
        with jax.profiler.trace(name, profiler_options=options):
            for number in range(steps):
                with jax.profiler.StepTraceAnnotation("step", step_num=number):
                    started = time.perf_counter()
                    step()
                    walls.append(time.perf_counter() - started)
        files = sorted(Path(name).rglob("*.xplane.pb"))
        events = [event for file in files for event in _events(ProfileData.from_file(str(file)))]
    if hlo_text is None and isinstance(compiled, jax.stages.Compiled):
        hlo_text = compiled.as_text()
    return summarize(events, walls, hlo_text)


def _check_platform() -> None:
    """Refuse where starting a trace ends the process by a segmentation fault, with jax 0.10.2."""
    config: Any = jax.config
    platforms = config.jax_platforms or ""
    tried_tpu = not platforms or "tpu" in platforms.split(",")
    if tried_tpu and is_libtpu_available() and jax.default_backend() != "tpu":
        raise ProfileError(
            "libtpu is installed here and JAX tried to use it, but there is no TPU: starting a profile now "
            "would crash this process. Set the environment variable JAX_PLATFORMS=cpu before JAX starts."
        )


def summarize(events: Sequence[_Event], walls: Sequence[float], hlo_text: str | None) -> ProfileReport:
    """Add up the events of a profile.

    Args:
        events: the instructions that ran.
        walls: wall time of each step in seconds.
        hlo_text: the optimised module, or None.

    Returns:
        The report.

    Raises:
        ProfileError: there are no events.

    """
    devices = tuple(sorted({event.device for event in events}))
    if not devices:
        raise ProfileError(
            "the profile names no HLO instruction: the program ran on a device that JAX does not trace"
        )
    seconds: dict[str, float] = {}
    counts: dict[str, int] = {}
    for event, own_ns in own_times(events):
        seconds[event.name] = seconds.get(event.name, 0.0) + own_ns * 1e-9
        counts[event.name] = counts.get(event.name, 0) + 1
    share = len(devices) * len(walls)
    origins = _origins(hlo_text)
    ops = [
        OpTime(
            name=name,
            seconds=total / share,
            occurrences=counts[name] / share,
            op_name=origins.get(name, ("", ""))[0],
            source=origins.get(name, ("", ""))[1],
        )
        for name, total in seconds.items()
    ]
    return ProfileReport(
        step_seconds=statistics.median(walls),
        steps=len(walls),
        devices=devices,
        ops=tuple(sorted(ops, key=lambda op: (-op.seconds, op.name))),
        busy_seconds=sum(seconds.values()) / share,
    )


def own_times(events: Iterable[_Event]) -> list[tuple[_Event, float]]:
    """Return each event with its own nanoseconds: its duration less that of the events inside it."""
    lanes: dict[tuple[str, str], list[_Event]] = {}
    for event in events:
        lanes.setdefault((event.device, event.lane), []).append(event)
    result: list[tuple[_Event, float]] = []
    for lane in lanes.values():
        lane.sort(key=lambda event: (event.start_ns, -event.end_ns))
        own = [event.end_ns - event.start_ns for event in lane]
        open_events: list[int] = []
        for index, event in enumerate(lane):
            while open_events and lane[open_events[-1]].end_ns <= event.start_ns:
                open_events.pop()
            if open_events:
                parent = open_events[-1]
                own[parent] -= max(0.0, min(event.end_ns, lane[parent].end_ns) - event.start_ns)
            open_events.append(index)
        result += zip(lane, own, strict=True)
    return result


def _events(data: ProfileData) -> Iterable[_Event]:
    for plane in data.planes:
        on_device = plane.name.startswith("/device:")
        for number, line in enumerate(plane.lines):
            if on_device and line.name != "XLA Ops":
                continue
            for event in line.events:
                stats = {key: value for key, value in event.stats if key in ("hlo_op", "device_ordinal")}
                if not on_device and "hlo_op" not in stats:
                    continue
                # A TPU event is named by the whole text of its instruction.
                name = str(stats.get("hlo_op") or event.name.split(" = ")[0].lstrip("%"))
                yield _Event(
                    device=plane.name if on_device else f"cpu:{stats.get('device_ordinal', 0)}",
                    lane=f"{number}:{line.name}",
                    name=name,
                    start_ns=event.start_ns,
                    end_ns=event.start_ns + event.duration_ns,
                )


def _origins(hlo_text: str | None) -> Mapping[str, tuple[str, str]]:
    if not hlo_text:
        return {}
    try:
        module: Module = parse_module(hlo_text)
    except HloParseError:
        return {}
    return {
        instruction.name: (instruction.op_name, module.source(instruction))
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
    }
