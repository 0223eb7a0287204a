"""Runs `worker.py` in a process of its own and turns every way in which it can fail into a typed error.

The TPU compiler can abort its process, JAX reads `XLA_FLAGS` once when it starts, and libtpu serves one
process at a time unless told otherwise: so only `profile` runs anything in the user's process.
The protocol is a temporary folder: artifacts and `request.json` in, `report.json` and files out.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Without the lockfile switch, libtpu aborts whenever any other process has it loaded.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v3-32",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_STDERR_LINES = 12


class WorkerError(RuntimeError):
    """A process that compiles or runs a program failed."""


class CompileError(WorkerError):
    """The compiler refused, aborted or did not finish."""


class MissingLibtpuError(CompileError):
    """The TPU compiler is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "the TPU compiler was asked for, but the package libtpu is not installed here; it needs no TPU: "
            'pip install "autoshard[tpu]" (Linux x86-64 or aarch64)'
        )


class RunError(WorkerError):
    """A program could not be run on virtual CPU devices."""


def is_libtpu_available() -> bool:
    """Return whether the TPU compiler can be loaded: whether `libtpu` is installed."""
    return importlib.util.find_spec("libtpu") is not None


def run_worker(
    folder: Path,
    request: Mapping[str, Any],
    *,
    what: str,
    timeout_seconds: float,
    cpu_devices: int = 1,
    error: type[WorkerError] = CompileError,
) -> dict[str, Any]:
    """Run the worker on a folder and return its report.

    Args:
        folder: holds the artifacts already; the request and the report are written there.
        request: what to do, in JSON types.
        what: the task in words, for error messages.
        timeout_seconds: wall time after which the process is killed.
        cpu_devices: number of virtual CPU devices that the process has.
        error: the type of error to raise.

    Returns:
        The report, whose status is "ok" or "out_of_memory".

    Raises:
        WorkerError: the process reported an error, crashed, or ran out of time (as the type `error`).

    """
    (folder / "request.json").write_text(json.dumps(dict(request)))
    worker = Path(__file__).with_name("worker.py")
    # -P keeps the worker's own folder off the import path: its neighbours are no top-level modules.
    command = [sys.executable, "-P", str(worker), str(folder)]
    # A new session, so that a timeout reaches everything that the compiler started.
    process = subprocess.Popen(
        command,
        env=_environment(cpu_devices),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _, stderr = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        raise error(
            f"{what} did not finish within {timeout_seconds:g} s and was stopped; raise timeout_seconds, or "
            "ask for optimisation only (stop_early=True)"
        ) from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    report_file = folder / "report.json"
    if not report_file.exists():
        raise error(f"{what} {_death(process.returncode)}\n{_tail(stderr)}")
    report: dict[str, Any] = json.loads(report_file.read_text())
    if report["status"] == "error":
        raise error(f"{what} failed: {report['type']}: {report['message']}")
    return report


def _environment(cpu_devices: int) -> dict[str, str]:
    environment = dict(os.environ) | _TPU_ENVIRONMENT
    environment["JAX_PLATFORMS"] = "cpu"
    environment["TF_CPP_MIN_LOG_LEVEL"] = "2"
    # Many devices share few cores: a device that waits for the others has not hung.
    environment["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={cpu_devices} "
        "--xla_cpu_collective_call_terminate_timeout_seconds=3600 "
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=3600"
    )
    # What the caller's process dumps, logs or caches is not this one's business.
    for name in ("LIBTPU_INIT_ARGS", "TPU_LIBRARY_PATH", "JAX_DUMP_IR_TO", "JAX_NUM_CPU_DEVICES"):
        environment.pop(name, None)
    return environment


def _death(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code} and no report; its last words:"
    name = signal.Signals(-code).name
    cause = "the compiler hit an internal check" if name == "SIGABRT" else "the process was killed"
    if name == "SIGKILL":
        cause = "the process was killed, most likely for lack of memory on this machine"
    return f"ended by {name}: {cause}; its last words:"


def _tail(stderr: bytes) -> str:
    lines = [line for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    checks = [line for line in lines if "Check failed" in line or line.startswith("F0")]
    chosen = list(dict.fromkeys(checks)) or lines[-_STDERR_LINES:]
    return "\n".join(line[:500] for line in chosen[:_STDERR_LINES]) or "(nothing)"
