"""Annotations inside the function: values named by `checkpoint_name` or by a source line keep their spec."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.annotations import pins
from autoshard.errors import SpecError
from autoshard.layout import Layout, from_spec
from autoshard.places import Places, Site
from autoshard.plan import Plan
from autoshard.session import Source, decisions_of
from tests.helpers.running import differences

MESH = {"data": 2, "model": 4}
OPEN = P.UNCONSTRAINED


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def here(text: str) -> int:
    """Line of this file that holds a text, marked by a comment of its own."""
    lines = inspect.getsource(inspect.getmodule(f32)).splitlines()  # type: ignore[arg-type]
    (found,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {text}")]
    return found


def mlp(params: Any, x: Any) -> Any:
    for up, down in params:
        hidden = jax.nn.gelu(x @ up)  # hidden
        hidden = checkpoint_name(hidden, "hidden")
        x = x + hidden @ down  # residual
    return x


def scanned(params: Any, x: Any) -> Any:
    def layer(x: Any, weights: Any) -> tuple[Any, None]:
        return checkpoint_name(mlp([weights], x), "block"), None

    return lax.scan(layer, x, params)[0]


def gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, x: jax.grad(lambda p: jnp.square(fn(p, x)).mean())(params)


WEIGHTS = (f32(32, 64), f32(64, 32))
LAYERS = ([WEIGHTS, WEIGHTS], f32(16, 32))
STACKED = ((f32(3, 32, 64), f32(3, 64, 32)), f32(16, 32))


def sites(fn: Callable[..., Any], args: Any, key: str) -> list[Site]:
    return Places(Source.of(fn, args).block).find(key)


def layouts_of(plan: Plan, fn: Any, args: Any, key: str) -> list[Layout]:
    """Layouts that a plan gives to the values that a key names, partial sums included."""
    block = Source.of(fn, args).block
    decisions = decisions_of(plan, block)
    found = []
    for site in Places(block).find(key):
        if site.group is None:
            found.append(decisions.layouts[site.value])
        else:
            found.append(site.group.rule.layout(site.dims, decisions.assignments[site.group]))
    return found


def suggested(fn: Any, args: Any, annotations: Mapping[str, P]) -> Plan:
    return autoshard.suggest(fn, *args, topology="v3", mesh=MESH, annotations=annotations)


def evaluated(fn: Any, args: Any, annotations: Mapping[str, P]) -> Plan:
    return autoshard.evaluate(fn, *args, topology="v3", mesh=MESH, annotations=annotations)


# What a key names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["name:hidden", "hidden", f"test_places.py:{here('hidden')}"])
def test_every_layer_of_a_loop_is_named(key: str) -> None:
    assert [s.value.shape for s in sites(mlp, LAYERS, key)] == [(16, 64)] * 2


def test_gradients_at_the_line_are_not_meant() -> None:
    fn = gradients(mlp)
    for key in (
        "hidden",
        f"test_places.py:{here('hidden')}:dot_general",
        f"test_places.py:{here('residual')}",
    ):
        assert {s.value.shape[0] for s in sites(fn, LAYERS, key)} == {16}, key
    assert len(sites(fn, LAYERS, f"test_places.py:{here('hidden')}:dot_general")) == 2


def test_what_remat_computes_again_is_meant_too() -> None:
    fn = gradients(jax.checkpoint(mlp))
    assert len(sites(fn, LAYERS, "hidden")) == 4
    assert len(sites(fn, LAYERS, f"test_places.py:{here('hidden')}:dot_general")) == 4


def test_a_line_means_what_leaves_it_and_a_primitive_all_that_it_makes() -> None:
    line = f"test_places.py:{here('residual')}"
    assert [s.value.shape for s in sites(mlp, LAYERS, line)] == [(16, 32)] * 2
    assert [s.group.title for s in sites(mlp, LAYERS, f"{line}:dot_general") if s.group] == [
        "dot_general"
    ] * 2
    assert not sites(mlp, LAYERS, f"{line}:sort")


def test_a_name_in_a_scan_and_one_of_an_argument() -> None:
    assert [s.value.shape for s in sites(scanned, STACKED, "hidden")] == [(16, 64)]
    (site,) = sites(lambda x: checkpoint_name(x, "x") * 2, (f32(8, 8),), "x")
    assert site.group is None


def test_more_of_the_path_may_be_given() -> None:
    assert sites(mlp, LAYERS, f"tests/test_places.py:{here('hidden')}")
    assert sites(mlp, LAYERS, f"{__file__}:{here('hidden')}")
    assert not sites(mlp, LAYERS, f"other/test_places.py:{here('hidden')}")


# Pinned ------------------------------------------------------------------------------------------------

CASES = [
    (mlp, LAYERS, "hidden", P("data", "model")),
    (mlp, LAYERS, "hidden", P(None, ("model", "data"))),
    (mlp, LAYERS, f"test_places.py:{here('residual')}:dot_general", P("model")),
    (mlp, LAYERS, f"test_places.py:{here('hidden')}:dot_general", P("model", None)),
    (scanned, STACKED, "name:block", P(None, "data")),
    (scanned, STACKED, "name:hidden", P("model", "data")),
    (gradients(mlp), LAYERS, "hidden", P("model")),
    (gradients(jax.checkpoint(scanned)), STACKED, "hidden", P(None, "model")),
]


@pytest.mark.parametrize("make", [suggested, evaluated])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_what_is_pinned_is_kept(make: Any, case: int) -> None:
    fn, args, key, spec = CASES[case]
    plan = make(fn, args, {key: spec})
    found = layouts_of(plan, fn, args, key)
    assert found and {x.dims for x in found} == {from_spec(spec, 2).dims}
    assert any(note.startswith(f"{key} pins ") for note in plan.notes)


@pytest.mark.parametrize("make", [suggested, evaluated])
def test_open_dims_stay_open(make: Any) -> None:
    fn, args = mlp, LAYERS
    plan = make(fn, args, {"hidden": P(OPEN, "model"), "[1]": P("data", OPEN)})
    assert {x.dims for x in layouts_of(plan, fn, args, "hidden")} == {(("data",), ("model",))}
    assert plan.spec("[1]")[0] == "data"


def test_an_open_dim_of_an_argument_and_a_result_are_completed() -> None:
    """What GSPMD calls partial specification."""
    plan = evaluated(
        lambda x, y: x + y, (f32(16, 32), f32(16, 32)), {"[0]": P("data", OPEN), "[1]": P(OPEN, "model")}
    )
    assert plan.in_specs == (P("data", "model"),) * 2 and plan.out_specs == P("data", "model")
    plan = evaluated(lambda x: x * 2, (f32(16, 32),), {"[0]": P("data"), "out": P(OPEN, "model")})
    assert plan.out_specs == P("data", "model")


def test_partial_sums_of_a_pinned_product_are_reduced_before_they_are_split() -> None:
    """Unpinned, the reduction may scatter: that would be another layout than what is asked for."""

    def fn(x: Any, w: Any) -> Any:
        return checkpoint_name(x @ w, "y").T

    plan = suggested(
        fn, (f32(1024, 2048), f32(2048, 512)), {"[0]": P(None, "model"), "y": P(), "out": P("model")}
    )
    assert "reduce_scatter" not in {c.kind for c in plan.estimate.collectives}


def test_a_pinned_plan_runs_and_survives_a_file() -> None:
    args = jax.tree.map(lambda s: jnp.cos(jnp.arange(s.size, dtype=s.dtype)).reshape(s.shape), LAYERS)
    fn = gradients(mlp)
    given = {"hidden": P("model", "data"), f"test_places.py:{here('residual')}": P(None, "model")}
    expected = jax.tree.leaves(jax.jit(fn)(*args))
    for make in (suggested, evaluated):
        plan = Plan.from_json(make(fn, args, given).to_json())
        assert {x.dims for x in layouts_of(plan, fn, args, "hidden")} == {(("model",), ("data",))}
        for applied in (plan.spmd(fn), plan.jit(fn)):
            assert not differences(jax.tree.leaves(applied(*args)), expected)


# Refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("name:hiden", "name:hidden"),
        ("hiden", "name:hidden"),
        (f"test_places.py:{here('hidden') + 1}", f"test_places.py:{here('hidden')}, test_places.py:"),
        (f"test_places.py:{here('hidden')}:dot", f"test_places.py:{here('hidden')}:dot_general"),
        ("nowhere.py:3", "nothing"),
    ],
)
def test_what_names_nothing_lists_what_is_near(key: str, near: str) -> None:
    for make in (suggested, evaluated):
        with pytest.raises(SpecError) as caught:
            make(mlp, LAYERS, {key: P("data")})
        head, offender, _ = str(caught.value).splitlines()
        assert "name no such array" in head and offender.startswith(f"  {key!r}; near it: {near}"), offender


def refusal(annotations: Mapping[str, P], fn: Any = mlp, args: Any = LAYERS) -> str:
    source = Source.of(fn, args)
    with pytest.raises(SpecError) as caught:
        pins(source.traced, source.block, MESH, annotations)
    return str(caught.value)


def test_specs_inside_are_checked_like_those_of_arguments() -> None:
    text = refusal({"hidden": P("who", None, "data"), "[1]": P("what")})
    assert "hidden (float32[16, 64] of" in text and "has 3 entries but the array has 2 dims" in text
    assert "names axis 'who'" in text and "[1] [16, 32]: P('what',) names axis 'what'" in text


def test_two_specs_for_one_kernel() -> None:
    line = f"test_places.py:{here('hidden')}"
    assert "cannot be split both ways" in refusal({"hidden": P("data"), line: P("model")})


def test_a_dim_that_the_op_needs_whole() -> None:
    fn = lambda x: checkpoint_name(lax.linalg.lu(x)[0], "factor")  # noqa: E731
    text = refusal({"factor": P(None, "data")}, fn, (f32(8, 8),))
    assert "factor (float32[8, 8] of lu): lu cannot split that dim over data" in text


def test_a_line_that_only_its_own_gradient_reads() -> None:
    def fn(x: Any) -> Any:
        return jax.grad(lambda x: jnp.sin(x).sum())(x)  # sine

    line = f"test_places.py:{here('sine')}"
    text = refusal({line: P("data")}, fn, (f32(8, 8),))
    assert text == f"{line!r}: nothing made at this line is read at another. Name one of {line}:cos."
    assert sites(fn, (f32(8, 8),), f"{line}:cos")
