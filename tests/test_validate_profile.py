"""Profiles: what is measured on the devices present, and how nested events are charged."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from autoshard.validate import ProfileError, profile
from autoshard.validate.profiler import _Event, own_times, summarize


def _event(name: str, start: float, end: float, lane: str = "ops", device: str = "/device:TPU:0") -> _Event:
    return _Event(device=device, lane=lane, name=name, start_ns=start, end_ns=end)


# A process of its own, because JAX must not have looked for a TPU in the one that starts a profile.
SCRIPT = """
import jax, jax.numpy as jnp
from autoshard.validate import profile

def step(x, w):
    return jnp.tanh(x @ w).sum(0) @ w

x = jnp.ones((512, 512))
report = profile(jax.jit(step).lower(x, x).compile(), (x, x), steps=4)
assert report.steps == 4 and report.devices == ("cpu:0",), report
assert 0 < report.busy_seconds < 10 and 0 < report.step_seconds < 10, report
assert abs(sum(op.seconds for op in report.ops) - report.busy_seconds) < 1e-9, report
assert {op.occurrences for op in report.ops} == {1.0}, report
assert any(op.op_name == "jit(step)/reduce_sum" and op.source == "<string>:6" for op in report.ops), report
assert "median of 4" in str(report), report

donating = jax.jit(lambda x: x @ x * 0.001, donate_argnums=0).lower(x).compile()
report = profile(donating, (x,), steps=2, next_args=lambda result, args: (result,))
assert report.ops
"""


def _run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "TPU_"))}
    # The worktree comes first on the path, as it does in this process.
    root = str(Path(__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-c", script],
        env=inherited | {"PYTHONPATH": root, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_profile_on_the_devices_present() -> None:
    done = _run(SCRIPT, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr


def test_where_a_profile_would_crash_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoshard.validate.profiler.is_libtpu_available", lambda: True)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with jax_platforms(None), pytest.raises(ProfileError, match="JAX_PLATFORMS=cpu before JAX starts"):
        profile(lambda x: x, (1,))


@contextlib.contextmanager
def jax_platforms(value: str | None) -> Iterator[None]:
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", value)
    try:
        yield
    finally:
        jax.config.update("jax_platforms", before)


def test_an_instruction_is_charged_with_its_own_time() -> None:
    events = [
        _event("while", 0, 100),
        _event("fusion", 10, 40),
        _event("copy", 15, 20),
        _event("fusion", 50, 90),
        _event("other", 0, 30, lane="second"),
        _event("after", 100, 130),
    ]
    own = {(event.name, event.start_ns): time for event, time in own_times(events)}
    assert own == {
        ("while", 0): 100 - 30 - 40,
        ("fusion", 10): 30 - 5,
        ("copy", 15): 5,
        ("fusion", 50): 40,
        ("other", 0): 30,
        ("after", 100): 30,
    }


def test_means_over_steps_and_devices() -> None:
    text = 'HloModule m\n\nENTRY %e {\n  ROOT %dot = f32[] add(), metadata={op_name="f/x"}\n}\n'
    events = [
        _event("dot", start, start + 10, device=device) for device in ("a", "b") for start in (0, 20, 40, 60)
    ]
    report = summarize(events, [2e-6, 1e-6], text)
    (op,) = report.ops
    assert (op.seconds, op.occurrences, op.op_name) == (pytest.approx(20e-9), 2.0, "f/x")
    assert report.step_seconds == pytest.approx(1.5e-6)
    assert report.busy_seconds == pytest.approx(20e-9)


def test_an_empty_profile_is_an_error() -> None:
    with pytest.raises(ProfileError, match="names no HLO instruction"):
        summarize([], [1.0], None)
