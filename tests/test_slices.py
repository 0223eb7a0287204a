"""Plans for several slices and for GPUs: suggested, printed, kept, applied and compiled."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
import cost_models as cm
from autoshard.apply import device_mesh
from autoshard.baselines import baseline
from autoshard.estimate import Collective
from autoshard.meshes import candidate_meshes
from autoshard.report.text import plan_text
from autoshard.validate import CompileError, is_libtpu_available
from autoshard.validate.match import levels_of, predicted_runs

needs_libtpu = pytest.mark.skipif(not is_libtpu_available(), reason="libtpu is not installed")


def _step(weights: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    def loss(w: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((jax.nn.relu(x @ w["up"]) @ w["down"]) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def _args(model: int = 512, hidden: int = 2048, batch: int = 1024) -> tuple[Any, Any]:
    shape = jax.ShapeDtypeStruct
    weights = {"up": shape((model, hidden), jnp.float32), "down": shape((hidden, model), jnp.float32)}
    return weights, shape((batch, model), jnp.float32)


@pytest.mark.parametrize("mesh", [None, {"data": 4, "model": 4}, {"pod": 2, "data": 2, "model": 4}])
@pytest.mark.parametrize("topology", ["2*v5e:2x4", "2*h100:8", "2*v3:2x2"])
def test_a_plan_for_two_slices(topology: str, mesh: dict[str, int] | None) -> None:
    plan = autoshard.suggest(_step, *_args(), topology=topology, mesh=mesh, donate_argnums=(0,))
    assert plan.topology == topology and plan.fits
    assert plan.device_order == tuple(range(16))
    assert plan.mesh == mesh or mesh is None
    back = autoshard.Plan.from_json(plan.to_json())
    assert back.estimate.step_seconds == plan.estimate.step_seconds


def test_what_is_slow_between_slices_stays_within() -> None:
    """With the same chips in two slices a step takes longer, and no weights or activations cross."""
    args = _args(4096, 16384, 16384)
    one, two = (
        autoshard.suggest(_step, *args, topology=topology, mesh={"data": 4, "model": 8}, donate_argnums=(0,))
        for topology in ("v5e:4x8", "2*v5e:4x4")
    )
    assert two.step_seconds > one.step_seconds
    plain = baseline("data_parallel", _step, *args, topology="2*v5e:4x4", mesh={"data": 32})
    assert two.step_seconds < plain.step_seconds


@pytest.mark.parametrize(
    ("topology", "mesh", "text"),
    [
        ("2*v3:2x2", {"data": 4, "model": 4}, "2*v3:2x2: 2 slices x 4 chips x 2 cores = 16 devices"),
        ("2*v5e:2x4", {"data": 2, "model": 8}, "data=2 on slice[2]; model=8 on y[4] x[2]"),
        ("2*h100:8", {"data": 16}, "2*h100:8: 2 nodes x 8 GPUs = 16 devices"),
        ("h100:4", {"data": 4}, "h100:4: 4 devices"),
    ],
)
def test_a_plan_says_where_it_is(topology: str, mesh: dict[str, int], text: str) -> None:
    plan = autoshard.suggest(_step, *_args(), topology=topology, mesh=mesh)
    assert text in plan_text(plan)


def test_a_bare_generation_of_gpus_takes_the_smallest_node() -> None:
    assert autoshard.suggest(_step, *_args(), topology="h100", mesh={"data": 4}).topology == "h100:4"


def test_meshes_of_slices_put_them_first() -> None:
    topology = cm.Topology.parse("2*v5e:2x2")
    meshes = list(candidate_meshes(topology))
    assert {"x": 2, "y": 4} in meshes and {"x": 8} in meshes
    for mesh in meshes:
        assert cm.place(topology, mesh).axis_segments("x")[0].axis == "slice"


@dataclasses.dataclass(frozen=True)
class Device:
    """As much of a JAX device as its place in a mesh depends on."""

    id: int
    slice_index: int
    platform: str
    process_index: int = 0
    device_kind: str = "imagined"


@dataclasses.dataclass(frozen=True)
class Chip(Device):
    coords: tuple[int, ...] = ()
    core_on_chip: int = 0


def test_devices_are_ordered_by_slice_and_place() -> None:
    plan = autoshard.suggest(_step, *_args(), topology="2*v3:2x2", mesh={"data": 16})
    places = itertools.product(range(2), range(2), range(2), range(2))
    chips = [
        Chip(
            id=100 * (number + 1) + at,
            slice_index=number,
            platform="tpu",
            coords=(x, y, 0),
            core_on_chip=core,
        )
        for at, (number, y, x, core) in enumerate(places)
    ]
    # JAX lists devices host by host; any order has to do.
    mesh = device_mesh(plan, chips[::-1])
    assert list(mesh.devices.flat) == chips


def test_gpus_are_ordered_by_node() -> None:
    plan = autoshard.suggest(_step, *_args(), topology="2*h100:8", mesh={"data": 16})
    gpus = [Device(id=at, slice_index=at // 8, platform="gpu", process_index=at // 8) for at in range(16)]
    assert list(device_mesh(plan, gpus[8:] + gpus[:8]).devices.flat) == gpus


def test_gpus_have_no_compiler_here() -> None:
    plan = autoshard.suggest(_step, *_args(), topology="h100:8", mesh={"data": 8})
    with pytest.raises(CompileError) as caught:
        plan.validate(_step, *_args(), level="compile")
    assert str(caught.value) == (
        "there is no ahead-of-time compiler for GPUs here, and h100:8 has GPUs. Compile for CPU only, with "
        'platforms=("cpu",), or validate at another level.'
    )
    assert plan.validate(_step, *_args(), level="compile", platforms=("cpu",), partitioners=("autoshard",)).ok


def _runs(kind: str, axes: tuple[str, ...], mesh: dict[str, int]) -> list[tuple[str, tuple[str, ...], float]]:
    levels = levels_of(cm.place(cm.Topology.parse("2*v5e:2x4"), mesh))
    unused: Any = {"sent_bytes": 0, "seconds": 0, "dtype": "float32", "shape": (), "group": 0, "source": ""}
    asked = Collective(kind=kind, axes=axes, full_bytes=800.0, count=1, **unused)
    return [(run.kind, run.axes, run.bytes) for run in predicted_runs([asked], levels=levels)]


def test_collectives_between_slices_are_runs_on_two_levels() -> None:
    spanning = {"data": 8, "model": 2}
    within, slices = ("data within",), ("slices",)
    assert _runs("all_reduce", ("data",), spanning) == [
        ("reduce-scatter", within, 800),
        ("all-reduce", slices, 800 / 4),
        ("all-gather", within, 800),
    ]
    assert _runs("all_gather", ("data", "model"), spanning) == [
        ("all-gather", slices, 800 / 8),
        ("all-gather", ("data within", "model"), 800),
    ]
    assert _runs("reduce_scatter", ("data",), spanning) == [
        ("reduce-scatter", within, 800),
        ("reduce-scatter", slices, 800 / 4),
    ]
    assert _runs("all_to_all", ("data",), spanning) == [("all-to-all", slices, 800)]
    assert _runs("collective_permute", ("data",), spanning) == [
        ("collective-permute", slices, 800),
        ("collective-permute", within, 800),
    ]
    assert _runs("all_reduce", ("model",), spanning) == [("all-reduce", ("model",), 800)]
    assert _runs("all_reduce", ("data",), {"data": 2, "model": 8}) == [("all-reduce", slices, 800)]


@needs_libtpu
@pytest.mark.parametrize("mesh", [{"data": 32}, {"pod": 2, "data": 16}])
def test_the_tpu_compiler_takes_slices(mesh: dict[str, int]) -> None:
    args = _args(2048, 8192, 4096)
    plan = baseline("data_parallel", _step, *args, topology="2*v5e:4x4", mesh=mesh, donate_argnums=(0,))
    found = plan.validate(_step, *args, level="compile", platforms=("tpu",), partitioners=("autoshard",))
    assert found.ok, str(found)
    assert "2*v5e:4x4" in str(found)
    table = found.tables["collectives"].frame().set_index(["kind", "axes"])
    # Two gradients of 64 MiB: a chip of 16 sends a sixteenth of each to its counterpart.
    assert table.loc[("all-reduce", "slices"), "compiled_bytes"] == 2 * 2048 * 8192 * 4 / 16
