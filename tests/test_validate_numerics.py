"""Sharded programs against the unsharded one on virtual CPU devices."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from autoshard import validate
from autoshard.validate.numerics import compare_arrays

P = PartitionSpec
MESH = AbstractMesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
VOCABULARY = 50
SHAPES = {
    "table": jax.ShapeDtypeStruct((VOCABULARY, 16), jnp.bfloat16),
    "weight": jax.ShapeDtypeStruct((16, 32), jnp.float32),
}
TOKENS = jax.ShapeDtypeStruct((8, 6), jnp.int32)
MASK = jax.ShapeDtypeStruct((8, 6), jnp.bool_)
RAW_KEY = jax.ShapeDtypeStruct((2,), jnp.uint32)


def _model(params: dict[str, Any], tokens: Any, mask: Any, key: Any, raw_key: Any) -> dict[str, Any]:
    embedded = params["table"][tokens].astype(jnp.float32)
    noise = jax.random.normal(key, embedded.shape) + jax.random.normal(raw_key, embedded.shape)
    hidden = (embedded + 0.01 * noise) @ params["weight"]
    hidden = jnp.where(mask[..., None], hidden, 0)
    return {"hidden": hidden, "table": params["table"] * 2, "key": jax.random.split(key), "count": mask.sum()}


def _export(function: Callable[..., Any], mesh: AbstractMesh | None, shardings: Any) -> validate.Artifact:
    key = jax.eval_shape(lambda: jax.random.key(0))
    return validate.export_artifact(
        function,
        (SHAPES, TOKENS, MASK, key, RAW_KEY),
        platform="cpu",
        mesh=mesh,
        in_shardings=shardings,
        donate_argnums=(0,),
    )


def test_right_and_wrong_programs() -> None:
    def wrong(params: dict[str, Any], *rest: Any) -> dict[str, Any]:
        result = _model(params, *rest)
        return result | {"hidden": result["hidden"] * 1.01}

    by_batch = (None, P("x"), P("x"), None, None)
    by_features = ({"table": P(None, "y"), "weight": P("y", "x")}, P("x"), P("x"), None, None)
    report = validate.compare_numerics(
        _export(_model, None, None),
        {
            "batch": _export(_model, MESH, by_batch),
            "features": _export(_model, MESH, by_features),
            "wrong": _export(wrong, MESH, by_batch),
        },
        inputs={"raw_key": np.array([1, 2])},
        int_bounds={"tokens": VOCABULARY},
        rtol=1e-4,
    )
    ok = {candidate.name: candidate.ok for candidate in report.candidates}
    assert ok == {"batch": True, "features": True, "wrong": False}
    assert not report.ok
    bad = [output for output in report.candidates[2].outputs if not output.ok]
    assert [output.name for output in bad] == ["result['hidden']"]
    assert bad[0].max_rel == pytest.approx(0.01, rel=1e-3)
    assert "  batch: ok" in str(report)
    assert "  wrong: 1 outputs differ, worst result['hidden'] rel 1.00e-02" in str(report)


def test_a_written_out_program_agrees_with_the_original() -> None:
    def original(a: Any, b: Any) -> Any:
        return jnp.tanh(a @ b)

    def explicit(a: Any, b: Any) -> Any:
        return jax.shard_map(
            lambda left, right: jnp.tanh(jax.lax.psum(left @ right, "y")),
            mesh=MESH,
            in_specs=(P("x", "y"), P("y", None)),
            out_specs=P("x", None),
        )(a, b)

    args = (jax.ShapeDtypeStruct((8, 64), jnp.float32), jax.ShapeDtypeStruct((64, 4), jnp.float32))
    report = validate.compare_numerics(
        validate.export_artifact(original, args, platform="cpu"),
        {"explicit": validate.export_artifact(explicit, args, platform="cpu", mesh=MESH)},
        float_scale=1.0,
    )
    assert report.ok
    assert "running" not in str(report)


def test_every_mismatch_is_named() -> None:
    one = validate.export_artifact(lambda a: a, (jnp.ones(3),), platform="cpu")
    two = validate.export_artifact(lambda a, b: (a, b), (jnp.ones(3), jnp.ones(3)), platform="tpu")
    with pytest.raises(ValueError) as caught:
        validate.compare_numerics(one, {"two": two}, inputs={"z": np.ones(3)})
    assert str(caught.value).splitlines() == [
        "cannot compare with <lambda>:",
        "  two was exported for 'tpu'; export it with platform='cpu'",
        "  two has 2 inputs, the reference has 1",
        "  two has 2 outputs, the reference has 1",
        "  no input is called 'z'; inputs: a",
    ]


@pytest.mark.parametrize(
    ("expected", "actual", "max_abs", "ok"),
    [
        ([1.0, 2.0], [1.0, 2.001], 0.001, True),
        ([1.0, 2.0], [1.0, 2.1], 0.1, False),
        ([1.0, math.nan], [1.0, math.nan], 0.0, True),
        ([1.0, math.nan], [1.0, 2.0], math.inf, False),
        ([1.0, -math.inf], [1.0, -math.inf], 0.0, True),
        ([0.0, 0.0], [0.0, 0.0], 0.0, True),
        ([3, 4], [3, 5], 1.0, False),
        ([True, False], [True, False], 0.0, True),
        ([], [], 0.0, True),
    ],
)
def test_compare_arrays(expected: list[Any], actual: list[Any], max_abs: float, ok: bool) -> None:
    error = compare_arrays("out", np.array(expected), np.array(actual), rtol=1e-3, atol=1e-6)
    assert error.max_abs == pytest.approx(max_abs)
    assert error.ok is ok


def test_shapes_must_agree() -> None:
    assert not compare_arrays("out", np.ones(2), np.ones(3), rtol=1, atol=1).ok
