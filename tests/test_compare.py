"""Plans side by side, where they differ, and where a program that does not fit would."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import cost_models as cm
from autoshard.baselines import baselines
from autoshard.compare import compare, diff
from autoshard.errors import PlanMismatchError
from autoshard.fit import grown, least_bytes, smallest_fitting_slice
from autoshard.plan import Plan
from autoshard.planner import suggest
from autoshard.session import Source
from autoshard.zoo import dense

CONFIG = dense.scaled_down(dense.PRESETS["8b"])
MESH = {"data": 2, "model": 4}


@functools.cache
def _plans() -> Mapping[str, Plan]:
    fn, args = dense.train_step(CONFIG)
    return baselines(fn, *args, topology="v3:2x2", mesh=MESH, donate_argnums=dense.DONATE)


def _shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)  # type: ignore[no-untyped-call]


def _product(rows: int) -> Plan:
    args = _shape(64, 64), _shape(rows, 64)
    return suggest(lambda w, x: x @ w, *args, topology="v3:2x2", mesh={"x": 8})


def test_a_row_per_plan_in_order() -> None:
    table = compare(_plans())
    assert list(table.index) == list(_plans())
    assert table.index.name == "plan"
    assert list(table["mesh"].unique()) == ["data=2 model=4"]
    assert list(table["topology"].unique()) == ["v3:2x2"]
    assert table["fits"].all() and table["fits"].dtype == bool
    assert table["gap"].isna().all()


def test_parts_add_up_to_the_step_and_to_the_peak() -> None:
    table = compare(_plans())
    collectives = [c for c in table.columns if " " in c]
    assert "all_gather data*model_ms" in collectives and "all_reduce model_ms" in collectives
    waits = table[collectives].sum(axis=1)
    for name, plan in _plans().items():
        row = table.loc[name]
        assert row["step_ms"] == pytest.approx(1e3 * plan.step_seconds)
        assert row["compute_ms"] + row["hbm_ms"] + waits[name] == pytest.approx(row["step_ms"])
        assert row["exposed_communication_ms"] == pytest.approx(waits[name], abs=1e-12)
        parts = ["parameters_gib", "optimizer_gib", "inputs_gib", "temporaries_gib"]
        assert row[parts].sum() == pytest.approx(row["peak_gib"])
        assert row["peak_gib"] == pytest.approx(plan.estimate.peak_bytes / 2**30)
    assert table.loc["replicated", "sent_gib"] == 0
    assert (table.drop("replicated")["sent_gib"] > 0).all()


def test_figures_are_numbers() -> None:
    table = compare(_plans(), model_flops=1e9)
    text = {"topology", "mesh", "fits"}
    assert {c for c in table.columns if table[c].dtype.kind != "f"} == text


def test_model_flops_utilization() -> None:
    flops = float(dense.model_flops(CONFIG))
    assert "mfu" not in compare(_plans())
    table = compare(_plans(), model_flops=flops)
    for name, plan in _plans().items():
        chip = plan.estimate.machine.chip
        share = flops / (8 * chip.matmul_flops_per_second * plan.step_seconds)
        assert table.loc[name, "mfu"] == pytest.approx(share)


def test_plans_of_one_name_are_numbered() -> None:
    plan = _plans()["fsdp"]
    assert list(compare([plan, plan, plan]).index) == ["fsdp", "fsdp (2)", "fsdp (3)"]
    assert list(compare({"mine": plan}).index) == ["mine"]


def test_a_searched_plan_shows_its_gap() -> None:
    table = compare([_product(64), _product(64)])
    assert (table["gap"] <= 1e-4).all()
    assert list(table.index) == ["suggested", "suggested (2)"]


def test_plans_for_different_shapes_are_refused_by_name() -> None:
    plans = {"short": _product(64), "long": _product(128), "also long": _product(128)}
    with pytest.raises(PlanMismatchError) as error:
        compare(plans)
    message = str(error.value)
    assert "made for different functions or shapes" in message
    assert "short: 2 arguments ([0] float32[64, 64], [1] float32[64, 64])" in message
    assert "long, also long: 2 arguments ([0] float32[64, 64], [1] float32[128, 64])" in message
    assert "allow_different=True" in message
    with pytest.raises(PlanMismatchError):
        diff(plans["short"], plans["long"])
    assert len(compare(plans, allow_different=True)) == 3
    assert "input" not in diff(plans["short"], plans["short"]).index.get_level_values(0)


def test_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match="no plans"):
        compare([])


def test_diff_lists_specs_and_work() -> None:
    a, b = _plans()["data_parallel"], _plans()["fsdp"]
    table = diff(a, b, lines=10**6)
    row = table.loc[("input", "[0]['blocks']['up']")]
    assert row["a_spec"] == "P()" and "('data', 'model')" in row["b_spec"]
    assert ("input", "[2]['tokens']") not in table.index
    assert ("output", "[0]['blocks']['up']") in table.index
    work = table.loc["work"]
    assert work["difference_ms"].sum() == pytest.approx(1e3 * (b.step_seconds - a.step_seconds))
    sizes = work["difference_ms"].abs().tolist()
    assert sizes == sorted(sizes, reverse=True)
    assert len(diff(a, b, lines=3).loc["work"]) == 3
    assert len(diff(a, a)) == 0


# The smallest slice that would do ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "devices", "larger"),
    [
        ({"data": 8, "model": 16}, 512, {"data": 32, "model": 16}),
        ({"data": 4, "model": 4}, 32, {"data": 8, "model": 4}),
        ({"x": 5}, 32, {"x": 30}),
        ({"x": 8}, 8, {"x": 8}),
    ],
)
def test_meshes_grow_by_their_smaller_axes(
    mesh: dict[str, int], devices: int, larger: dict[str, int]
) -> None:
    assert grown(mesh, devices) == larger


def _hungry(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A step whose state of 2 ** 38 bytes is most of what it needs."""
    total = jnp.sum(x)
    return w * jnp.tanh(total), total


def test_the_smallest_slice_holds_the_state() -> None:
    args = _shape(2**18, 2**18), _shape(128)
    source = Source.of(_hungry, args, (0,))
    assert least_bytes(source) == 4 * 2**36 + 4 * 128
    tried: list[str] = []

    def plan_on(slice_: cm.Topology, mesh: Mapping[str, int], seconds: float) -> Plan:
        tried.append(str(slice_))
        assert 0 < seconds <= 30
        return suggest(_hungry, *args, topology=slice_, mesh=mesh, donate_argnums=(0,))

    start = cm.Topology.parse("v3:2x2"), {"x": 8}, plan_on
    found = smallest_fitting_slice(source, *start, memory_limit_bytes=15 * 2.0**30)
    # 2 ** 38 bytes over 32 cores are 8 GiB each, over 8 cores 32 GiB
    assert found == ("v3:4x4", {"x": 32})
    assert tried == ["v3:4x4"]


def test_several_slices_come_after_the_largest() -> None:
    args = _shape(2**18, 2**18), _shape(128)
    source = Source.of(_hungry, args, (0,))

    def plan_on(slice_: cm.Topology, mesh: Mapping[str, int], seconds: float) -> Plan:
        return suggest(_hungry, *args, topology=slice_, mesh=mesh, donate_argnums=(0,))

    start = cm.Topology.parse("h100:4"), {"x": 4}, plan_on
    found = smallest_fitting_slice(source, *start, memory_limit_bytes=20 * 2.0**30)
    # 2 ** 38 bytes over 16 devices are 16 GiB each
    assert found == ("2*h100:8", {"x": 16})


def test_slices_that_cannot_hold_the_arguments_are_not_tried() -> None:
    source = Source.of(_hungry, (_shape(2**18, 2**18), _shape(128)), (0,))
    tried: list[str] = []

    def plan_on(slice_: cm.Topology, mesh: Mapping[str, int], seconds: float) -> Any:
        tried.append(str(slice_))
        raise LookupError

    limit = float(2**30)  # an even share of 2 ** 38 bytes, and 128 floats more, needs over 256 cores
    with pytest.raises(LookupError):
        smallest_fitting_slice(
            source, cm.Topology.parse("v3:2x2"), {"x": 8}, plan_on, memory_limit_bytes=limit
        )
    assert tried == ["v3:16x16"]
    assert math.prod((16, 16, 2)) == 512


def test_no_slice_is_found_in_no_time_or_beyond_the_largest() -> None:
    source = Source.of(_hungry, (_shape(2**18, 2**18), _shape(128)), (0,))

    def plan_on(slice_: cm.Topology, mesh: Mapping[str, int], seconds: float) -> Any:
        raise AssertionError("not to be tried")

    start = cm.Topology.parse("v3:2x2"), {"x": 8}, plan_on
    limit = 15 * 2.0**30
    assert smallest_fitting_slice(source, *start, memory_limit_bytes=limit, time_limit_seconds=0) is None
    assert smallest_fitting_slice(source, *start, memory_limit_bytes=2.0**20) is None
