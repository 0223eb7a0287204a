"""Bad input of every kind: the message names what was given, where, the rule, and what to change."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
import cost_models as cm
from autoshard.errors import AutoshardError, PlanMismatchError, SpecError, TraceError

MESH = {"data": 4, "model": 2}


def _float(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def fn(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["up"]) @ params["down"]


ARGS = ({"up": _float(64, 128), "down": _float(128, 60)}, _float(32, 64))


def _suggest(*args: Any, function: Any = fn, **options: Any) -> autoshard.Plan:
    return autoshard.suggest(function, *(args or ARGS), **({"topology": "v3:2x2", "mesh": MESH} | options))


def _evaluate(**options: Any) -> autoshard.Plan:
    return autoshard.evaluate(fn, *ARGS, topology="v3:2x2", mesh=MESH, **options)


# Slices and meshes -------------------------------------------------------------------------------------

GRAMMAR = (
    "The grammar is [<slices>*]<generation>:<X>x<Y>[x<Z>], counted in chips, as v3:4x4 or 2*v5e:16x16 (two slices"
    " over DCN), and [<nodes>*]<generation>:<devices> for GPUs, as h100:8 or 4*h100:8; known generations, with"
    " examples: v2:8x8,"
)


@pytest.mark.parametrize("mesh", [MESH, None])
@pytest.mark.parametrize(
    ("topology", "reason", "cure"),
    [
        ("v9:2x2", "'v9' is no known generation", "Did you mean 'v6e:2x2'?"),
        ("v9", "it does not follow the grammar", "v3:8x16"),
        (
            "v3-32",
            "it does not follow the grammar",
            "The number in 'v3-32' counts cores. Did you mean 'v3:4x4'?",
        ),
        ("v3:4x4x4", "v3 slices have two axes, X and Y, not 3", "Did you mean 'v3:8x8'?"),
        (
            "v3:64x64",
            "64x64 (4096 chips) does not fit the v3 pod of 32x32 (1024 chips)",
            "Did you mean '4*v3:32x32'?",
        ),
        ("v3:0x4", "0x4 has an axis without chips", "Did you mean 'v3:2x2'?"),
        ("", "it does not follow the grammar", "v3:8x16"),
    ],
)
def test_unknown_topology(mesh: Any, topology: str, reason: str, cure: str) -> None:
    with pytest.raises(cm.TopologyError) as caught:
        _suggest(topology=topology, mesh=mesh)
    assert str(caught.value).startswith(f"Cannot read {topology!r} as a topology: {reason}. {GRAMMAR}")
    assert cure in str(caught.value)


def test_a_bare_generation_needs_a_mesh() -> None:
    with pytest.raises(
        cm.TopologyError, match="Cannot read 'v3' as a topology: it does not follow the grammar"
    ):
        _suggest(topology="v3", mesh=None)
    assert str(_suggest(topology="v3").topology) == "v3:2x2"


def test_a_topology_of_another_type() -> None:
    with pytest.raises(cm.TopologyError) as caught:
        _suggest(topology=32)
    assert str(caught.value) == (
        'topology 32 is of type int: give the name of a slice, such as "v3:4x4", or a cost_models.Topology.'
    )


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        (
            {"data": 3, "model": 5},
            "The mesh {'data': 3, 'model': 5} needs 15 devices, but v3:2x2 has 8 (4 chips x 2 cores). Shrink an axis,"
            " or use a larger slice: v3:4x4 has 32.",
        ),
        (
            {"x": 4096},
            "needs 4096 devices, but v3:2x2 has 8 (4 chips x 2 cores). Shrink an axis, or use a larger slice:"
            " 2*v3:32x32 has 4096.",
        ),
    ],
)
def test_a_mesh_larger_than_the_slice(mesh: dict[str, int], expected: str) -> None:
    for make in (_suggest, lambda **options: autoshard.evaluate(fn, *ARGS, topology="v3:2x2", **options)):
        with pytest.raises(cm.MeshError) as caught:
            make(mesh=mesh)
        assert expected in str(caught.value)


def test_a_mesh_larger_than_any_slice() -> None:
    with pytest.raises(cm.TopologyError) as caught:
        _suggest(topology="v3", mesh={"data": 4096})
    assert str(caught.value) == (
        "4096 devices were asked for, but the largest v3 slice, v3:32x32, has 2048. Ask for fewer devices or use"
        " several slices, such as 2*v3:32x32."
    )


@pytest.mark.parametrize("mesh", [{"data": 3}, {"data": 5}, {"data": 2, "model": 3}])
def test_a_mesh_that_does_not_multiply_out_to_the_slice_leaves_devices_idle_and_says_so(
    mesh: dict[str, int],
) -> None:
    count = 8 - autoshard.session.abstract_mesh(mesh).size
    notes = _suggest(mesh=mesh).notes
    assert any(f"{count} of 8 devices idle" in note for note in notes)
    assert any("factor along the axes of v3:2x2" in note for note in notes)


CURE = 'Give axes and sizes, such as {"data": 8, "model": 4}, or leave mesh out to have it chosen.'


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ({}, f"mesh {{}} has no axes and so no devices. {CURE}"),
        (8, f"mesh 8 is of type int, no mapping. {CURE}"),
        (
            {"data": 0, "model": 2.5, 3: 4, "x": 2},
            "mesh {'data': 0, 'model': 2.5, 3: 4, 'x': 2}: axis 'data' has size 0, axis 'model' has size 2.5, axis 3"
            f" has size 4; names are text and sizes whole numbers from 1. {CURE}",
        ),
    ],
)
def test_an_empty_or_odd_mesh(mesh: Any, expected: str) -> None:
    with pytest.raises(cm.MeshError) as caught:
        _suggest(mesh=mesh)
    assert str(caught.value) == expected


# Specs -------------------------------------------------------------------------------------------------


def test_all_wrong_specs_are_listed_with_path_shape_rule_and_cure() -> None:
    wrong = {
        "[0]['up']": P("data", None, "model"),
        "[0]['down']": P("who"),
        "[1]": P("data", ("model", "data")),
        "out": "data",
    }
    for make in (_suggest, _evaluate):
        with pytest.raises(SpecError) as caught:
            make(annotations=wrong)
        assert str(caught.value).splitlines() == [
            "PartitionSpecs that do not fit:",
            "  [0]['up'] [64, 128]: P('data', None, 'model') has 3 entries but the array has 2 dims; a spec may be"
            " shorter than the rank, never longer: drop 1",
            "  [0]['down'] [128, 60]: P('who',) names axis 'who', and the mesh has {'data': 4, 'model': 2}: use one"
            " of those axes",
            "  [1] [32, 64]: P('data', ('model', 'data')) uses axis 'data' twice; an axis can split one dim of an"
            " array only: drop one",
            "  out [32, 60]: 'data' is of type str: give a jax.sharding.PartitionSpec",
        ]


def test_an_axis_twice_in_one_dim() -> None:
    with pytest.raises(SpecError, match="uses axis 'data' twice; an axis can split one dim of an array only"):
        _suggest(annotations={"[1]": P(("data", "data"))})


def test_a_spec_of_evaluate_is_checked_alike() -> None:
    with pytest.raises(SpecError) as caught:
        _evaluate(in_specs=(None, P("data", "model", "data")), out_specs=P("who"))
    assert "  [1] [32, 64]: P('data', 'model', 'data') has 3 entries" in str(caught.value)
    assert "  out [32, 60]: P('who',) names axis 'who'" in str(caught.value)


def test_a_constraint_in_the_function_names_its_line() -> None:
    mesh = jax.sharding.AbstractMesh((8,), ("other",), axis_types=(jax.sharding.AxisType.Auto,))

    def constrained(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x * 2, jax.sharding.NamedSharding(mesh, P("other")))

    with pytest.raises(SpecError) as caught:
        _suggest(_float(64, 64), function=constrained)
    text = str(caught.value)
    assert "inside the function do not fit:\n  test_errors.py:" in text
    assert "(test_a_constraint_in_the_function_names_its_line.<locals>.constrained)" in text
    assert "the mesh has {'data': 4, 'model': 2}" in text


@pytest.mark.parametrize(
    ("path", "near"),
    [("[0]['ups']", "[0]['up'], "), ("[0]", "[1], [0]['up']"), ("params", "nothing"), ("out[0]", "out, ")],
)
def test_an_unknown_path(path: str, near: str) -> None:
    for make in (_suggest, _evaluate):
        with pytest.raises(SpecError) as caught:
            make(annotations={path: P("data")})
        head, offender, cure = str(caught.value).splitlines()
        assert head in ("annotations name no such array:", "specs name no such array:")
        assert offender.startswith(f"  {path!r}; near it: {near}")
        assert cure == (
            "Give the whole path of one array: [i]... in argument i, out... in the result; or name:... for a"
            " checkpoint_name, or file.py:line[:primitive] for what is made there."
        )


@pytest.mark.parametrize("make", [_suggest, _evaluate])
def test_an_indivisible_dim_is_left_whole_and_said(make: Any) -> None:
    plan = make(annotations={"[0]['down']": P(None, ("data", "model"))})
    assert plan.spec("[0]['down']") == P()
    assert (
        "[0]['down'] dim 1 = 60 is not divisible by data(4)*model(2): left whole (padding to 64 would cost 6.7 % more)"
        in plan.notes
    )
    assert "  note      [0]['down'] dim 1 = 60 is not divisible by data(4)*model(2)" in str(plan)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"in_specs": (P("data"),)},
            "in_specs has another structure than what it describes: different lengths of",
        ),
        (
            {"in_specs": ({"up": P(), "no": P()}, P())},
            "with metadata ('no', 'up') but at the same key path the full",
        ),
        ({"in_specs": ([P(), P()], P())}, "different types at key path in_specs[0]: "),
        (
            {"out_specs": (P(), P())},
            "out_specs has another structure than what it describes: different types",
        ),
    ],
)
def test_specs_of_another_structure(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        _evaluate(**options)
    assert expected in str(caught.value)
    what = "inputs" if "in_specs" in options else "outputs"
    cure = str(caught.value).splitlines()[1]
    assert cure.startswith(
        f"Give a pytree of PartitionSpec (None for open) like the {what}, or a prefix: PyTreeDef("
    )


# Functions and arguments -------------------------------------------------------------------------------


def test_a_function_that_does_not_trace() -> None:
    def branching(x: jax.Array) -> jax.Array:
        return x if x.sum() > 0 else -x

    with pytest.raises(TraceError) as caught:
        _suggest(_float(8, 4), function=branching)
    text = str(caught.value)
    assert text.startswith(
        "branching failed while it was traced with 1 array argument(s) ([0]: float32[8, 4]):\n"
        "TracerBoolConversionError: Attempted boolean conversion of traced array with shape bool[]"
    )
    assert text.endswith(
        "Check that jax.eval_shape(fn, *args) works with the same arguments: the argument structure and every shape"
        " must be what fn expects, and fn must be traceable by jax.jit."
    )
    assert isinstance(caught.value.__cause__, jax.errors.TracerBoolConversionError)


@pytest.mark.parametrize(
    ("args", "given", "said"),
    [
        (
            ARGS[:1],
            "2 array argument(s) ([0]['down']: float32[128, 60], [0]['up']",
            "missing 1 required positional",
        ),
        (ARGS[::-1], "3 array argument(s) ([0]: float32[32, 64], [1]['down']", "TypeError: "),
        (({"up": _float(64, 128)}, _float(32, 64)), "2 array argument(s) ([0]['up']", "KeyError: 'down'"),
        (
            (ARGS[0], _float(32, 63)),
            "[1]: float32[32, 63]",
            "TypeError: dot_general requires contracting dimensions",
        ),
    ],
)
def test_arguments_of_another_structure_than_the_function_takes(args: Any, given: str, said: str) -> None:
    with pytest.raises(TraceError) as caught:
        _suggest(*args)
    assert str(caught.value).startswith("fn failed while it was traced with ")
    assert given in str(caught.value)
    assert said in str(caught.value)


def test_arguments_that_are_no_arrays_are_all_named() -> None:
    with pytest.raises(TraceError) as caught:
        _suggest({"up": _float(64, 128), "down": "later"}, object)
    assert str(caught.value) == (
        "Every leaf of the arguments must be an array or a jax.ShapeDtypeStruct.\n"
        "  args[0]['down'] is a str: 'later'\n"
        "  args[1] is a type: <class 'object'>\n"
        "Close over static values (functools.partial, a lambda) instead of passing them."
    )


@pytest.mark.parametrize("numbers", [(2,), (-3, 0), (0, 7)])
def test_donated_arguments_out_of_range(numbers: tuple[int, ...]) -> None:
    wrong = [i for i in numbers if not -2 <= i < 2]
    with pytest.raises(ValueError) as caught:
        _suggest(donate_argnums=numbers)
    assert f"donate_argnums {list(numbers)} names argument(s) {wrong}" in str(caught.value)
    assert "the function was given 2" in str(caught.value)


# Plans -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan() -> autoshard.Plan:
    return autoshard.Plan.from_json(_suggest().to_json())


def _zeros(tree: Any) -> Any:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), tree)


@pytest.mark.parametrize("apply", ["jit", "spmd"])
def test_a_plan_for_other_shapes_is_refused(plan: autoshard.Plan, apply: str) -> None:
    with pytest.raises(PlanMismatchError) as caught:
        getattr(plan, apply)(fn).lower({"up": _float(64, 128), "down": _float(128, 64)}, _float(32, 64))
    assert str(caught.value).splitlines() == [
        "the arguments are not those that the plan was made for:",
        "  [0]['down']: given float32[128, 64], planned float32[128, 60]",
        "Pass arguments of the planned structure, or make a new plan with autoshard.suggest.",
    ]


@pytest.mark.parametrize("apply", ["jit", "spmd"])
def test_a_plan_for_other_types_and_structures_is_refused(plan: autoshard.Plan, apply: str) -> None:
    params = {"up": jax.ShapeDtypeStruct((64, 128), jnp.bfloat16), "extra": _float(3)}
    with pytest.raises(PlanMismatchError) as caught:
        getattr(plan, apply)(fn).lower(params, _float(32, 64))
    text = str(caught.value)
    assert "  [0]['down']: missing; the plan has float32[128, 60]" in text
    assert "  [0]['extra']: not in the plan" in text
    assert "  [0]['up']: given bfloat16[64, 128], planned float32[64, 128]" in text


@pytest.mark.parametrize("apply", ["jit", "spmd"])
def test_a_plan_for_another_function_is_refused(plan: autoshard.Plan, apply: str) -> None:
    def other(params: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ params["up"]) @ params["down"] + 1

    with pytest.raises(PlanMismatchError) as caught:
        getattr(plan, apply)(other).lower(*ARGS)
    text = str(caught.value)
    assert text.startswith(
        "the plan 'suggested' was made for another function: its 3 inputs have the same shapes,"
    )
    assert f"plan {plan.fingerprint[:8]}; 4 ops now, 3 then" in text
    assert text.endswith("Make a new plan with autoshard.suggest.")


def test_a_mesh_with_more_devices_than_there_are_is_refused() -> None:
    large = _suggest(topology="v3:4x4", mesh={"data": 16, "model": 2})
    with pytest.raises(ValueError) as caught:
        large.jit(fn)(*_zeros(ARGS))
    assert str(caught.value) == (
        "the plan's mesh {'data': 16, 'model': 2} needs 32 devices; 8 of kind cpu were given. Pass more devices, or"
        " for a test on one machine set XLA_FLAGS=--xla_force_host_platform_device_count=32 before JAX starts."
    )


def test_an_unknown_path_of_a_plan_lists_the_nearest(plan: autoshard.Plan) -> None:
    with pytest.raises(KeyError) as caught:
        plan.spec("[0]['ip']")
    assert caught.value.args[0] == "no input at \"[0]['ip']\"; near it: [0]['up'], [0]['down'], [1]"


def test_files_that_are_cut_off_or_of_another_version(plan: autoshard.Plan) -> None:
    text = plan.to_json()
    with pytest.raises(
        autoshard.PlanFileError, match=r"The plan file is cut off: .* at line \d+, column \d+"
    ):
        autoshard.Plan.from_json(text[: len(text) // 2])
    with pytest.raises(
        autoshard.PlanFileError, match="has format version 7; this autoshard reads version 1 only"
    ):
        autoshard.Plan.from_json(text.replace('"format_version": 1', '"format_version": 7'))


def test_every_error_of_ours_is_both_ours_and_a_value_error() -> None:
    for kind in (TraceError, SpecError, autoshard.PlanFileError, PlanMismatchError):
        assert issubclass(kind, AutoshardError)
        assert issubclass(kind, ValueError)


# The surroundings --------------------------------------------------------------------------------------


def test_a_file_search_py_beside_the_users_script_is_named_with_the_cure(tmp_path: Path) -> None:
    root = Path(autoshard.__file__).parent.parent
    (tmp_path / "search.py").write_text("raise SystemExit('the wrong module was run')\n")
    (tmp_path / "script.py").write_text("import autoshard\n")
    result = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        f"ImportError: autoshard needs its own package 'search' at {root / 'search'}, but the name would be imported"
        f" from {tmp_path / 'search.py'}, which hides it. Rename that file or folder, or take its folder off the"
        " import path: run from another directory, or with `python -P` (PYTHONSAFEPATH=1)."
    )


def test_without_libtpu_the_compile_check_says_what_to_install(
    plan: autoshard.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autoshard.validate import MissingLibtpuError

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "libtpu" else real(name, *more)
    )
    with pytest.raises(MissingLibtpuError) as caught:
        plan.validate(fn, *ARGS, level="compile")
    assert str(caught.value) == (
        "the TPU compiler was asked for, but the package libtpu is not installed here; it needs no TPU: pip"
        ' install "autoshard[tpu]" (Linux x86-64 or aarch64); or compile for CPU only, with platforms=("cpu",)'
    )
