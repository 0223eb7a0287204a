"""Why a plan is as it is: a rival's figures are those of the plan that is solved with the rival pinned."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.choices import layouts
from autoshard.layout import to_spec
from autoshard.plan import Plan
from autoshard.report.arrays import spec_text

MESH = {"data": 2, "model": 4}


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mlp(params: Any, x: Any) -> Any:
    hidden = checkpoint_name(jax.nn.gelu(x @ params["up"]), "hidden")
    return hidden @ params["down"]  # the second product


ARGS = ({"up": f32(1024, 4096), "down": f32(4096, 1024)}, f32(2048, 1024))
LINE = 1 + next(
    i
    for i, line in enumerate(inspect.getsource(inspect.getmodule(f32)).splitlines())
    if "# the second" in line  # type: ignore[arg-type]
)


def plan_of(**options: Any) -> Plan:
    return autoshard.suggest(mlp, *ARGS, topology="v3:2x2", mesh=MESH, gap=0.0, **options)


@pytest.mark.parametrize("key", ["[0]['up']", "[1]", "out"])
def test_rivals_cost_what_the_best_plan_with_them_costs(key: str) -> None:
    plan = plan_of()
    shape = {"[0]['up']": (1024, 4096)}.get(key, (2048, 1024))
    (decision,) = plan.why(key, rivals=100).decisions
    every = {
        spec_text(x): plan_of(annotations={key: to_spec(x)}).step_seconds
        for x in layouts(shape, MESH, even=True)
    }
    found = {r.strategy: r.plan.step_seconds for r in decision.rivals}
    found[decision.chosen] = plan.step_seconds
    assert found == pytest.approx(every, rel=1e-9)
    seconds = [r.plan.step_seconds for r in decision.rivals]
    assert seconds == pytest.approx(sorted(seconds), rel=1e-9)


def test_terms_add_up_and_the_largest_decides() -> None:
    plan = plan_of()
    (decision,) = plan.why("[0]['up']", rivals=30).decisions
    for rival in decision.rivals:
        assert rival.extra_seconds == pytest.approx(rival.plan.step_seconds - plan.step_seconds)
        assert sum(rival.terms.values()) == pytest.approx(rival.extra_seconds, rel=1e-6, abs=1e-12)
        if rival.extra_seconds > 1e-9:
            assert rival.decides in rival.terms and rival.terms[rival.decides] > 0
    assert {r.decides.split(" ")[0] for r in decision.rivals} >= {"all_to_all", "compute"}


def test_memory_decides_where_a_rival_is_faster_without_the_limit() -> None:
    free = plan_of()
    limit = 0.5 * free.estimate.peak_bytes
    plan = plan_of(memory_limit_bytes=limit)
    assert plan.fits and plan.step_seconds > free.step_seconds
    changed = [
        leaf.path
        for leaf, a, b in zip(plan.inputs, plan.input_layouts, free.input_layouts, strict=True)
        if a != b
    ]
    rivals = [r for key in changed for r in plan.why(key, rivals=30).decisions[0].rivals]
    by_memory = [r for r in rivals if r.decides == "memory"]
    assert by_memory
    whole = [r for r in rivals if not r.plan.fits]
    assert all(r.decides == "memory" for r in whole)


@pytest.mark.parametrize(
    "key", [f"test_explain.py:{LINE}", f"test_explain.py:{LINE}:dot_general", "name:hidden", "hidden"]
)
def test_what_is_inside_is_named_as_annotations_name_it(key: str) -> None:
    answer = plan_of().why(key)
    assert len(answer.decisions) == 1 and answer.decisions[0].rivals
    assert answer.more == 0


def test_groups_by_number() -> None:
    plan = plan_of()
    (product,) = plan.why(f"test_explain.py:{LINE}").decisions
    number = product.name.partition(".")[0]
    assert plan.why(number).decisions[0].name == product.name
    held = {r.strategy: r.plan.step_seconds for r in product.rivals}
    assert held == {r.strategy: r.plan.step_seconds for r in plan.why(number).decisions[0].rivals}


def test_it_prints() -> None:
    answer = plan_of().why("[0]['up']", rivals=2)
    text, page = str(answer), answer._repr_html_()
    assert text.splitlines()[0] == "[0]['up'] float32[1024, 4096]"
    assert "chosen" in text and "slower" in text
    for rival in answer.decisions[0].rivals:
        assert rival.strategy in text
        assert (
            f"{1e3 * rival.plan.step_seconds:,.3f}" in text or f"{1e6 * rival.plan.step_seconds:,.3f}" in text
        )
    assert page.count("<tr>") == 4 and "&#x27;up&#x27;" in page


def test_pinned_arrays_have_no_rivals() -> None:
    answer = plan_of(annotations={"[1]": P("data")}).why("[1]")
    assert answer.decisions[0].rivals == ()
    assert "nothing else can be chosen here" in str(answer)


def test_a_key_that_names_nothing() -> None:
    with pytest.raises(
        autoshard.SpecError, match=r"nothing in the program is called \"\[0\]\['upp'\]\".*\[0\]\['up'\]"
    ):
        plan_of().why("[0]['upp']")
