"""Plan files: what is written comes back, prints and applies alike; what is damaged is refused with a cure."""

import collections
import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import plan_json
from autoshard.plan_json import dump, load
from autoshard.zoo import dense

MESH = {"data": 4, "model": 2}
Pair = collections.namedtuple("Pair", ["left", "right"])


def _float(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _mlp(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["up"]) @ params["down"]


MLP_ARGS = ({"up": _float(256, 1024), "down": _float(1024, 256)}, _float(512, 256))


@functools.cache
def _mlp_plan() -> autoshard.Plan:
    return autoshard.suggest(_mlp, *MLP_ARGS, topology="v3:2x2", mesh=MESH)


@functools.cache
def _dense_plan() -> autoshard.Plan:
    fn, args = dense.train_step(dense.scaled_down(dense.PRESETS["8b"]))
    return autoshard.suggest(fn, *args, topology="v3:2x2", mesh=MESH, donate_argnums=dense.DONATE)


def _evaluated_plan() -> autoshard.Plan:
    return autoshard.evaluate(_mlp, *MLP_ARGS, topology="v3", mesh={"data": 5}, memory_limit_bytes=1 << 20)


def _looping_plan() -> autoshard.Plan:
    def fn(x: jax.Array, key: jax.Array) -> tuple[Any, ...]:
        y = jax.lax.while_loop(lambda c: c.sum() < 1, lambda c: c * 2, x)
        return y, jax.random.normal(key, (64, 64)), None

    return autoshard.suggest(
        fn, _float(64, 64), jax.eval_shape(lambda: jax.random.key(0)), topology="v5e:2x4", mesh=MESH
    )


PLANS: list[Callable[[], autoshard.Plan]] = [_mlp_plan, _dense_plan, _evaluated_plan, _looping_plan]


@pytest.mark.parametrize("make", PLANS)
def test_everything_comes_back(make: Callable[[], autoshard.Plan]) -> None:
    plan = make()
    again = load(dump(plan))
    for field in dataclasses.fields(plan):
        if field.compare and field.name != "estimate":
            assert getattr(again, field.name) == getattr(plan, field.name), field.name
    for field in dataclasses.fields(plan.estimate):
        if field.name != "machine":
            assert getattr(again.estimate, field.name) == getattr(plan.estimate, field.name), field.name
    assert again.estimate.machine.placement == plan.estimate.machine.placement
    assert again.estimate.machine.mesh == plan.estimate.machine.mesh
    assert again.in_specs == plan.in_specs
    assert again.out_specs == plan.out_specs
    assert str(again) == str(plan)
    assert dump(again) == dump(plan)


@pytest.mark.parametrize("partitioner", ["jit", "spmd"])
def test_a_plan_that_came_back_applies_alike(partitioner: str) -> None:
    rng = np.random.default_rng(0)
    args = jax.tree.map(lambda s: rng.standard_normal(s.shape, dtype=np.float32), MLP_ARGS)
    plan = _mlp_plan()
    again = load(dump(plan))
    expected = getattr(plan, partitioner)(_mlp)(*args)
    result = getattr(again, partitioner)(_mlp)(*args)
    assert result.sharding.spec == expected.sharding.spec
    np.testing.assert_array_equal(result, expected)


def test_methods_of_the_plan_write_and_read() -> None:
    text = _mlp_plan().to_json()
    assert text == dump(_mlp_plan())
    assert autoshard.Plan.from_json(text).in_specs == _mlp_plan().in_specs


def test_the_file_is_json_with_its_version_first_and_rows_on_lines() -> None:
    text = dump(_dense_plan())
    content = json.loads(text)
    assert list(content)[:2] == ["format", "format_version"]
    assert (content["format"], content["format_version"]) == ("autoshard plan", 1)
    assert content["mesh"] == [["data", 4], ["model", 2]]
    assert text.endswith("}\n")
    inputs = [line for line in text.splitlines() if line.startswith("   [\"[0]['embed']\"")]
    assert inputs == ['   ["[0][\'embed\']", [128, 64], "float32", true, "parameters"],'] * 1 + [
        '   ["[0][\'embed\']", [128, 64], "float32", false, ""],'
    ]


def test_rewriting_the_file_keeps_the_order_of_mesh_axes() -> None:
    plan = autoshard.suggest(_mlp, *MLP_ARGS, topology="v3:2x2", mesh={"z": 4, "a": 2})
    again = load(json.dumps(json.loads(dump(plan)), sort_keys=True))
    assert list(again.mesh.items()) == [("z", 4), ("a", 2)]
    assert str(again) == str(plan)


def test_numbers_of_numpy_and_infinity_are_written() -> None:
    plan = _mlp_plan().replace(
        memory_limit_bytes=float("inf"), gap=np.float64(0.25), lower_bound_seconds=np.float32(0.5)
    )
    again = load(dump(plan))
    assert (again.memory_limit_bytes, again.gap, again.lower_bound_seconds) == (float("inf"), 0.25, 0.5)


# Pytrees -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tree",
    [
        lambda leaf: leaf,
        lambda leaf: {"b": leaf, "a": [leaf, (leaf, None)], "empty": ()},
        lambda leaf: [{}, {3: leaf, 1: [leaf]}],
    ],
)
def test_structures_of_plain_containers_come_back(tree: Callable[[Any], Any]) -> None:
    arg = tree(_float(64, 64))
    plan = autoshard.suggest(
        lambda arg: jax.tree.map(jnp.tanh, arg), arg, topology="v3:2x2", mesh={"data": 8}
    )
    again = load(dump(plan))
    assert again.in_tree == plan.in_tree == jax.tree.structure((arg,))
    assert again.out_tree == plan.out_tree == jax.tree.structure(arg)
    assert again.in_specs == plan.in_specs


def test_other_nodes_fall_back_to_paths_and_still_apply() -> None:
    def fn(pair: Any) -> Any:
        return Pair(pair.left @ pair.right, pair.right)

    args = Pair(_float(64, 64), _float(64, 64))
    plan = autoshard.suggest(fn, args, topology="v3:2x2", mesh={"data": 8})
    text = dump(plan)
    assert json.loads(text)["in_tree"] == {"tuple": [{"other": f"{__name__}.Pair"}]}
    again = load(text)
    assert (again.in_tree, again.out_tree) == (None, None)
    assert list(again.in_specs) == ["[0].left", "[0].right"]
    assert all(isinstance(spec, P) for spec in again.in_specs.values())
    given = Pair(np.ones((64, 64), np.float32), np.ones((64, 64), np.float32))
    result = again.jit(fn)(given)
    assert isinstance(result, Pair)
    np.testing.assert_array_equal(result.left, np.full((64, 64), 64.0, np.float32))


# Damage ------------------------------------------------------------------------------------------------


def _changed(**changes: Any) -> str:
    return json.dumps(json.loads(dump(_mlp_plan())) | changes)


def _without(name: str) -> str:
    content = json.loads(dump(_mlp_plan()))
    del content[name]
    return json.dumps(content)


def _in_inputs(row: int, column: int, value: Any) -> dict[str, Any]:
    table = json.loads(dump(_mlp_plan()))["inputs"]
    table["rows"][row][column] = value
    return table


def _message(text: str) -> str:
    with pytest.raises(autoshard.PlanFileError) as caught:
        load(text)
    return str(caught.value)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_said_to_be_cut_off(share: float) -> None:
    text = dump(_mlp_plan())
    message = _message(text[: int(share * len(text))])
    assert message.startswith("The plan file is cut off: ")
    assert " at line " in message
    assert "Make the plan again with `autoshard suggest ... --out FILE` or `plan.to_json()`." in message


def test_every_cut_is_refused() -> None:
    text = dump(_mlp_plan()).rstrip()
    for end in range(0, len(text) - 1, 97):
        with pytest.raises(autoshard.PlanFileError):
            load(text[:end])


def test_a_scar_in_the_middle_is_damage() -> None:
    text = dump(_mlp_plan())
    assert _message(text.replace('"mesh"', '"mesh', 1)).startswith("The plan file is damaged: ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" \n", "The plan file is empty; it should hold the JSON object of a plan. Make the plan again"),
        (
            "hello: world",
            "The file is no plan: it is not JSON (Expecting value at line 1, column 1; it begins",
        ),
        ("[1, 2]", "The file is JSON but no plan: it holds list [1, 2], and a plan is an object whose"),
        ('{"a": 1}', 'it holds an object whose "format" is None, and a plan is an object whose'),
    ],
)
def test_what_is_no_plan_is_told_from_a_damaged_one(text: str, expected: str) -> None:
    message = _message(text)
    assert expected in message
    assert "`autoshard suggest" in message


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_is_named_with_ours(version: Any) -> None:
    message = _message(_changed(format_version=version))
    assert message == (
        f"The plan file has format version {version!r}; this autoshard reads version 1 only. Read it with the"
        " autoshard that wrote it, or make the plan again with this one: `autoshard suggest ... --out FILE`."
    )


@pytest.mark.parametrize(
    ("make", "where", "problem"),
    [
        (lambda: _without("gap"), "the plan", "'gap' missing"),
        (lambda: _changed(colour="red"), "the plan", "'colour' unknown"),
        (lambda: _changed(name=3), "name", "text is expected, got 3"),
        (lambda: _changed(gap="small"), "gap", 'a number is expected, got "small"'),
        (lambda: _changed(gap=True), "gap", "a number is expected, got true"),
        (lambda: _changed(notes="none"), "notes", 'a list is expected, got "none"'),
        (lambda: _changed(timings={"trace": None}), "timings['trace']", "a number is expected, got null"),
        (lambda: _changed(mesh=[["data", 4], ["model"]]), "mesh[1]", "[axis name, size] is expected, got"),
        (lambda: _changed(mesh=[["data", 64]]), "topology or mesh", "The mesh {'data': 64} needs 64 devices"),
        (lambda: _changed(topology="v9:2x2"), "topology or mesh", "Cannot read 'v9:2x2' as a topology"),
        (
            lambda: _changed(device_order=[0] * 8),
            "device_order",
            "no placement of mesh {'data': 4, 'model': 2}",
        ),
        (lambda: _changed(in_tree={"set": []}), "in_tree", 'no pytree structure: {"set": []}'),
        (lambda: _changed(in_tree={"tuple": ["*"]}), "in_tree", "a structure of 1 leaves for 3 inputs"),
        (lambda: _changed(input_layouts=[[[], []]]), "input_layouts", "1 layouts for 3 inputs"),
        (
            lambda: _changed(output_layouts=[[["data"], ["data"]]]),
            "output_layouts, ",
            "P('data', 'data') uses axis 'data' twice",
        ),
        (
            lambda: _changed(output_layouts=[[["data"]]]),
            "output_layouts, ",
            "1 dims in the layout of an array",
        ),
        (lambda: _changed(output_layouts=[[["who"], []]]), "output_layouts, ", "names axis 'who'"),
        (
            lambda: _changed(inputs=_in_inputs(1, 1, "big")),
            "inputs[1].shape",
            'a list is expected, got "big"',
        ),
        (
            lambda: _changed(inputs=_in_inputs(2, 1, [4, 2.5])),
            "inputs[2].shape[1]",
            "a whole number is expected",
        ),
        (lambda: _changed(inputs={"columns": ["path"], "rows": []}), "inputs.columns", '["path", "shape",'),
        (
            lambda: _changed(inputs=_in_inputs(0, 3, False) | {"rows": [["x"]]}),
            "inputs[0]",
            "1 values in a row of 5",
        ),
    ],
)
def test_damage_is_located(make: Callable[[], str], where: str, problem: str) -> None:
    message = _message(make())
    assert message.startswith(f"The plan file is damaged at {where}")
    assert problem in message
    assert message.endswith(
        "Make the plan again with `autoshard suggest ... --out FILE` or `plan.to_json()`."
    )


def test_a_new_field_of_any_record_is_written_without_more_code() -> None:
    """The file follows the dataclasses: whoever adds a field gets it written, and the old files refused."""
    written = json.loads(dump(_mlp_plan()))
    names = {field.name for field in dataclasses.fields(autoshard.Plan)} - {"request"}
    assert set(written) == names | {"format", "format_version"}
    assert plan_json.FORMAT_VERSION == 1
