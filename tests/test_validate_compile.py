"""Compilation in a process of its own: what an artifact keeps, what the report says, how failures read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from autoshard import validate
from autoshard.validate import process

P = PartitionSpec
BATCH, MODEL, HIDDEN, LAYERS = 128, 256, 512, 7
MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
needs_libtpu = pytest.mark.skipif(not validate.is_libtpu_available(), reason="libtpu is not installed")


class Weights(NamedTuple):
    up: Any
    down: Any


def _train(weights: Weights, x: Any, unused: Any, key: Any) -> tuple[Weights, Any]:
    def layer(carry: Any, _: None) -> tuple[Any, None]:
        hidden = jax.nn.relu(carry @ weights.up)
        hidden = jax.lax.with_sharding_constraint(hidden, P("data", "model"))
        carry = carry + hidden @ weights.down
        return jax.lax.with_sharding_constraint(carry, P("data", None)), None

    x, _ = jax.lax.scan(layer, x, None, length=LAYERS)
    x = x + 0.01 * jax.random.normal(key, x.shape)
    total = jax.shard_map(
        lambda part: jax.lax.psum(part.sum(0), "data"), mesh=MESH, in_specs=P("data", None), out_specs=P(None)
    )(x)
    return jax.tree.map(lambda w: w * 0.5, weights), total


def _artifact(platform: str) -> validate.Artifact:
    shape = jax.ShapeDtypeStruct
    weights = Weights(shape((MODEL, HIDDEN), jnp.float32), shape((HIDDEN, MODEL), jnp.float32))
    shardings = Weights(P(None, "model"), P("model", None))
    return validate.export_artifact(
        _train,
        (
            weights,
            shape((BATCH, MODEL), jnp.float32),
            shape((3,), jnp.int32),
            jax.eval_shape(lambda: jax.random.key(0)),
        ),
        platform=platform,
        mesh=MESH,
        in_shardings=(shardings, P("data"), None, None),
        out_shardings=(shardings, None),
        donate_argnums=(0,),
    )


def _check(report: validate.CompiledReport) -> None:
    """Expect that the layer's reduction, the explicit sum and the donation have survived the way."""
    reductions = [c for c in report.collectives if c.kind == "all-reduce" and c.trips == LAYERS]
    assert [(c.axes, c.bytes, c.whole_axes) for c in reductions] == [
        (("model",), 4 * BATCH // 4 * MODEL, True)
    ]
    sums = [c for c in report.collectives if "shard_map" in c.op_name]
    assert [(c.axes, c.bytes, c.trips) for c in sums] == [(("data",), 4 * MODEL, 1)]
    assert reductions[0].source.startswith(__file__)
    assert report.flops == LAYERS * 2 * (2 * (BATCH // 4) * MODEL * (HIDDEN // 2))
    assert report.unknown_loops == ()
    assert report.memory is not None
    weight_bytes = 2 * 4 * MODEL * HIDDEN // 2
    assert report.memory.alias_bytes == weight_bytes
    # Weights, rows of x, the key; not the unused argument.
    assert weight_bytes + 4 * BATCH // 4 * MODEL <= report.memory.argument_bytes
    assert report.memory.argument_bytes < weight_bytes + 4 * BATCH // 4 * MODEL + 4096
    assert report.fits and not report.rematerialized


def test_an_artifact_names_its_leaves() -> None:
    artifact = _artifact("cpu")
    assert artifact.input_names == ("weights.up", "weights.down", "x", "unused", "key")
    assert artifact.output_names == ("result[0].up", "result[0].down", "result[1]")
    assert artifact.donated == (0, 1)
    assert repr(artifact).startswith("Artifact(_train, cpu, mesh {'data': 4, 'model': 2}, ")


def test_cpu_compilation() -> None:
    report = validate.compile_cpu(_artifact("cpu"))
    _check(report)
    assert report.target == "cpu:8"
    assert report.complete and report.estimated_cycles is None and report.estimated_seconds is None
    assert "all-reduce over model [2]" in str(report)


@needs_libtpu
def test_tpu_compilation() -> None:
    order = (7, 6, 5, 4, 3, 2, 1, 0)
    artifact = _artifact("tpu")
    report = validate.compile_tpu(artifact, topology="v3:2x2", device_order=order, wrap=(True, True, False))
    _check(report)
    assert report.complete and report.memory is not None and report.memory.generated_code_bytes > 0
    assert report.estimated_cycles is not None and report.estimated_cycles > LAYERS * 1000
    assert report.estimated_seconds == report.estimated_cycles / 940e6
    assert len(report.hlo_text) > 1000

    early = validate.compile_tpu(
        artifact, topology="v3:2x2", device_order=order, wrap=(True, True, False), stop_early=True
    )
    assert (early.collectives, early.flops) == (report.collectives, report.flops)
    assert early.memory is not None
    assert 0 <= report.memory.total_bytes - early.memory.total_bytes <= 2**17
    assert early.complete or early.estimated_cycles is None


@needs_libtpu
def test_a_program_that_does_not_fit_is_a_report() -> None:
    side = 40_000
    matrix = jax.ShapeDtypeStruct((side, side), jnp.float32)
    artifact = validate.export_artifact(
        lambda a, b: jnp.tanh(a @ b) @ b, (matrix, matrix), platform="tpu", mesh=MESH
    )
    report = validate.compile_tpu(artifact, topology="v3:2x2")
    assert not report.fits
    assert report.out_of_memory is not None and report.memory is not None
    assert report.memory.argument_bytes >= 2 * 4 * side * side
    assert report.out_of_memory.required_bytes is not None
    assert abs(report.out_of_memory.required_bytes - report.memory.total_bytes) < 2**20
    assert report.out_of_memory.available_bytes == round(15.48 * 2**30)
    assert "out of memory: needs 20.9" in str(report)


@needs_libtpu
def test_what_the_compiler_refuses() -> None:
    artifact = _artifact("tpu")
    with pytest.raises(validate.CompileError, match="compiling _train for v9:2x2 failed: .*Invalid TPU"):
        validate.compile_tpu(artifact, topology="v9:2x2")
    with pytest.raises(validate.CompileError, match="mesh .* needs 8 devices, up to number 7; v3:1x1 has 2"):
        validate.compile_tpu(artifact, topology="v3:1x1")


def test_without_libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = _artifact("tpu")
    monkeypatch.setattr("autoshard.validate.compiled.is_libtpu_available", lambda: False)
    with pytest.raises(validate.MissingLibtpuError, match=r'pip install "autoshard\[tpu\]"'):
        validate.compile_tpu(artifact, topology="v3:2x2")


def test_the_platform_must_match() -> None:
    with pytest.raises(
        validate.CompileError, match="was exported for 'tpu'; compile_cpu needs platform='cpu'"
    ):
        validate.compile_cpu(_artifact("tpu"))


def test_host_callbacks_cannot_be_exported() -> None:
    def noisy(x: Any) -> Any:
        jax.debug.print("{}", x)
        return x

    with pytest.raises(validate.ArtifactError, match="noisy: cannot hand this program .*Host callbacks"):
        validate.export_artifact(noisy, (jnp.ones(3),), platform="cpu")


def test_unsharded_program_on_a_mesh_is_replicated() -> None:
    artifact = validate.export_artifact(
        lambda x: x @ x, (jax.ShapeDtypeStruct((8, 8), jnp.float32),), platform="cpu", mesh=MESH
    )
    report = validate.compile_cpu(artifact)
    assert report.collectives == ()
    assert report.flops == 2 * 8 * 8 * 8


@pytest.mark.parametrize(
    ("script", "timeout", "message"),
    [
        ("import os; os.abort()", 60.0, "testing ended by SIGABRT: the compiler hit an internal check"),
        (
            "import os; os.write(2, b'F1 a.cc] Check failed: 32 <= 16\\n'); os.abort()",
            60.0,
            r"last words:\nF1 a.cc\] Check failed: 32 <= 16",
        ),
        ("raise SystemExit(3)", 60.0, "testing ended with exit code 3 and no report"),
        ("import time; time.sleep(60)", 0.5, "testing did not finish within 0.5 s and was stopped"),
    ],
)
def test_how_a_process_dies(
    script: str, timeout: float, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker.py").write_text(script)
    monkeypatch.setattr(process, "__file__", str(tmp_path / "process.py"))
    request: Mapping[str, Any] = {}
    with pytest.raises(validate.CompileError, match=message):
        process.run_worker(tmp_path, request, what="testing", timeout_seconds=timeout)
