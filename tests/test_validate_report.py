"""The plan's referee: what it compares, what it names, and that it catches a plan that is wrong."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.trace import trace
from autoshard.validate import inputs, match, measured, report
from autoshard.validate.validation import Table, Validation

MESH = {"data": 2, "model": 4}
BATCH, WIDTH, HIDDEN, VOCAB = 64, 256, 1024, 512
needs_libtpu = pytest.mark.skipif(not report.is_libtpu_available(), reason="libtpu is not installed")


def step(weights: Any, second: Any, batch: Any) -> Any:
    """Look up, two products, a loss over targets; a step with a root of the second moment."""

    def loss(weights: Any) -> Any:
        x = weights["embed"][batch["tokens"]]
        logits = jax.nn.relu(x @ weights["up"]) @ weights["down"]
        picked = jnp.take_along_axis(logits, batch["targets"][:, None], axis=-1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

    value, grads = jax.value_and_grad(loss)(weights)
    second = jax.tree.map(lambda v, g: 0.9 * v + 0.1 * g * g, second, grads)
    new = jax.tree.map(lambda w, g, v: w - 1e-2 * g / (jnp.sqrt(v) + 1e-3), weights, grads, second)
    return new, second, value


def _shapes() -> tuple[Any, ...]:
    weights = {
        "embed": jax.ShapeDtypeStruct((VOCAB, WIDTH), "float32"),
        "up": jax.ShapeDtypeStruct((WIDTH, HIDDEN), "float32"),
        "down": jax.ShapeDtypeStruct((HIDDEN, VOCAB), "float32"),
    }
    ids = jax.ShapeDtypeStruct((BATCH,), "int32")
    return weights, weights, {"tokens": ids, "targets": ids}


SPECS = {"embed": P(), "up": P(None, "model"), "down": P("model")}


@pytest.fixture(scope="module")
def plan() -> autoshard.Plan:
    batch = {"tokens": P("data"), "targets": P("data")}
    return autoshard.evaluate(
        step,
        *_shapes(),
        topology="v3",
        mesh=MESH,
        in_specs=(SPECS, SPECS, batch),
        out_specs=(SPECS, SPECS, P()),
        donate_argnums=(0, 1),
    )


# Inputs -------------------------------------------------------------------------------------------


def test_what_indexes_gets_the_smallest_dim_that_it_indexes() -> None:
    found = inputs.ranges(trace(step, _shapes()).program)
    names = trace(step, _shapes()).in_names
    bounds = {names[i]: bound for i, bound in found.bounds.items()}
    assert bounds == {"[2]['tokens']": VOCAB, "[2]['targets']": VOCAB}
    assert {names[i] for i in found.non_negative} == {f"[1]['{name}']" for name in SPECS}


def test_bounds_hold_inside_loops_and_for_slices() -> None:
    def body(table: Any, ids: Any, start: Any) -> Any:
        _, rows = jax.lax.scan(lambda c, i: (c, table[i]), 0, ids)
        return rows, jax.lax.dynamic_slice_in_dim(table, start, 8)

    shapes = [
        jax.ShapeDtypeStruct((50, 3), "float32"),
        jax.ShapeDtypeStruct((7,), "int32"),
        jax.ShapeDtypeStruct((), "int32"),
    ]
    assert dict(inputs.ranges(trace(body, shapes).program).bounds) == {1: 50, 2: 50 - 8 + 1}


def test_drawn_inputs_keep_their_ranges_and_a_bound_can_be_given() -> None:
    traced = trace(step, _shapes())
    drawn = inputs.draw(traced.program, traced.in_avals, traced.in_names, bounds={"[2]['tokens']": 3}, seed=1)
    by_name = dict(zip(traced.in_names, drawn, strict=True))
    assert by_name["[2]['tokens']"].max() == 2
    assert 3 < by_name["[2]['targets']"].max() < VOCAB
    assert all((by_name[f"[1]['{name}']"] >= 0).all() for name in SPECS)
    again = inputs.draw(traced.program, traced.in_avals, traced.in_names, seed=1)
    np.testing.assert_array_equal(by_name["[0]['up']"], again[traced.in_names.index("[0]['up']")])


# Matching -----------------------------------------------------------------------------------------


def run(kind: str, size: float, axes: str = "x", trips: float = 1.0, group: int = 0) -> match.Run:
    return match.Run(
        kind=kind, axes=tuple(axes), bytes=size, trips=trips, group=group, origin=f"model.py:{group}"
    )


@pytest.mark.parametrize(
    ("predicted", "compiled", "names"),
    [
        ([run("all-gather", 8e6)], [run("all-gather", 8.1e6)], []),
        (
            [run("reduce-scatter", 8e6)],
            [run("all-reduce", 8e6)],
            ["all-reduce instead of reduce-scatter"],
        ),
        (
            [run("all-reduce", 5e6), run("all-reduce", 3e6), run("all-reduce", 4.0)],
            [run("all-reduce", 8e6 + 4)],
            ["combined all-reduce"],
        ),
        (
            [run("all-gather", 1e6), run("reduce-scatter", 2e6)],
            [run("all-reduce", 3e6)],
            ["all-reduce instead of all-gather and reduce-scatter, combined"],
        ),
        (  # two of many, and what is left agrees by itself
            [run("all-reduce", float(n), group=n) for n in (4096, 8192, 8192, 524288, 2097152)]
            + [run("all-reduce", 8388608.0, group=n) for n in range(12)]
            + [run("reduce-scatter", 51466240.0)],
            [
                run("all-reduce", 51466240.0 + 9 * 8388608 + 2097152 + 12288),
                run("all-reduce", 3 * 8388608.0 + 532480),
            ],
            ["all-reduce instead of reduce-scatter, combined", "combined all-reduce"],
        ),
        (
            [run("reduce-scatter", 8e6, group=3)] * 3,
            [run("reduce-scatter", 8e6, group=3)],
            ["partial sums added before one reduce-scatter"] * 2,
        ),
        (
            [run("all-reduce", 8e6, group=g) for g in (3, 3, 4, 4, 4)],
            [run("all-reduce", 8e6, group=8), run("all-reduce", 8e6, group=9)],
            ["partial sums added before one all-reduce"] * 3,
        ),
        (
            [run("all-gather", 8e6, group=3), run("all-gather", 8e6, group=4)],
            [run("all-gather", 8e6, group=3)],
            ["one all-gather for several readers"],
        ),
        (
            [run("reduce-scatter", 64e6, trips=4)],
            [run("reduce-scatter", 66e6, trips=4), run("collective-permute", 2e6, trips=4)],
            ["widened reduce-scatter", "collective-permute behind a reduce-scatter"],
        ),
        (
            [run("all-gather", 8e6)],
            [run("all-gather", 4e6)],
            ["all-gather in another dtype (cast narrower before it)"],
        ),
    ],
)
def test_habits_of_the_compiler_are_named(
    predicted: list[match.Run], compiled: list[match.Run], names: list[str]
) -> None:
    found = match.match(predicted, compiled)
    assert [difference.name for difference in found.differences] == names
    assert found.unexplained_share == 0.0


@pytest.mark.parametrize(
    ("predicted", "compiled", "text"),
    [
        (
            [],
            [run("all-gather", 12e6, "xy", 32, 42)],
            "collective not predicted: all-gather 12 MB over x*y x 32 from model.py:42",
        ),
        (
            [run("all-gather", 12e6, group=42)],
            [],
            "predicted collective not compiled: all-gather 12 MB over x x 1 from model.py:42",
        ),
    ],
)
def test_what_nothing_explains_is_told_with_its_source(
    predicted: list[match.Run], compiled: list[match.Run], text: str
) -> None:
    found = match.match(predicted, compiled)
    assert list(map(str, found.differences)) == [text]
    assert found.unexplained_share == 1.0


@pytest.mark.parametrize(
    "other", [run("all-gather", 8e6, "y"), run("all-gather", 8e6, trips=2), run("all-gather", 10e6)]
)
def test_other_axes_runs_or_bytes_are_another_collective(other: match.Run) -> None:
    names = [d.name for d in match.match([run("all-gather", 8e6)], [other]).differences]
    assert sorted(names) == ["collective not predicted", "predicted collective not compiled"]


# Options ------------------------------------------------------------------------------------------


def test_options_are_checked(plan: autoshard.Plan) -> None:
    with pytest.raises(autoshard.AutoshardError, match="level: .*'numerics', 'compile', 'profile'"):
        plan.validate(step, *_shapes(), level="speed")
    with pytest.raises(autoshard.AutoshardError, match="partitioners: .*'gspmd'.* 'xla', 'autoshard'"):
        plan.validate(step, *_shapes(), partitioners=("gspmd",))
    with pytest.raises(autoshard.AutoshardError, match=r"no input has the path \[0\]\['gate'\]"):
        plan.validate(step, *_shapes(), level="numerics", inputs={"[0]['gate']": 0.0})


def test_another_function_is_refused(plan: autoshard.Plan) -> None:
    with pytest.raises(autoshard.PlanMismatchError, match="made for another function"):
        plan.validate(lambda w, v, b: (w, v, jnp.sum(w["up"])), *_shapes(), level="numerics")


def test_sizes_beyond_this_machine_are_refused_with_a_way_out() -> None:
    def product(w: Any) -> Any:
        return w * 2

    shape = jax.ShapeDtypeStruct((2**15, 2**15), "float32")
    large = autoshard.evaluate(product, shape, topology="v3", mesh=MESH)
    with pytest.raises(autoshard.AutoshardError, match="4.0 GiB, more than the 2 GiB .* smaller sibling"):
        large.validate(product, shape, level="numerics")


def test_without_libtpu_the_cure_is_named(plan: autoshard.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "is_libtpu_available", lambda: False)
    with pytest.raises(report.MissingLibtpuError, match=r'pip install.*platforms=\("cpu",\)'):
        plan.validate(step, *_shapes())


# Numerics -----------------------------------------------------------------------------------------


def test_both_programs_equal_the_original_on_given_and_drawn_arrays(plan: autoshard.Plan) -> None:
    weights, second, batch = _shapes()
    given = {name: np.full(w.shape, 0.01, "float32") for name, w in weights.items()}
    found = plan.validate(step, given, second, batch, level="numerics")
    assert found.ok, str(found)
    outputs = found.frame("outputs")
    assert len(outputs) == 2 * (3 + 3 + 1) and outputs.max_rel.max() < 1e-5
    assert "3 of 8 inputs were given, the others drawn; tolerance 1e-05" in found.notes[0]


def test_a_program_that_computes_something_else_is_caught(
    plan: autoshard.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = report.flat_program

    def tampered(*args: Any) -> Any:
        flat, *rest = honest(*args)
        return (lambda *leaves: tuple(x * (1 + 1e-4) for x in flat(*leaves)), *rest)

    monkeypatch.setattr(report, "flat_program", tampered)
    found = plan.validate(step, *_shapes(), level="numerics", partitioners=("xla",))
    assert not found.ok
    assert "plan.jit: 7 of 7 outputs differ from the original's by more than 1e-05" in found.failures[0]


# Compile ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled(plan: autoshard.Plan) -> dict[Any, Any]:
    """What the compilers made of the plan, by platform and program; two TPU compilations for all tests."""
    made: dict[Any, Any] = {}
    honest = report._ask

    def remember(plan: Any, artifact: Any, platform: str, *rest: Any) -> Any:
        made[platform, artifact.name] = honest(plan, artifact, platform, *rest)
        return made[platform, artifact.name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "_ask", remember)
        made["validation"] = plan.validate(step, *_shapes())
    return made


@pytest.fixture
def recompiled(compiled: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        report, "_ask", lambda plan, artifact, platform, *_: compiled[platform, artifact.name]
    )


@needs_libtpu
def test_an_honest_plan_compiles_as_predicted(compiled: dict[Any, Any]) -> None:
    found = compiled["validation"]
    assert found.ok, str(found)
    collectives = found.frame("collectives")
    assert set(collectives.target) == {"cpu:8", "v3:2x2"}
    assert set(collectives.program) == {"plan.jit", "plan.spmd"}
    memory = found.frame("memory").set_index("program")
    np.testing.assert_allclose(
        memory.arguments_bytes["plan.jit"], memory.arguments_bytes["predicted"], rtol=0.01
    )
    assert memory.fits.all()
    flops = found.frame("time").set_index("program").products_flops
    assert flops["plan.spmd"] == pytest.approx(flops["predicted"], rel=1e-6)


@needs_libtpu
@pytest.mark.usefixtures("recompiled")
def test_a_collective_that_the_estimate_leaves_out_is_caught(plan: autoshard.Plan) -> None:
    largest = max(plan.estimate.collectives, key=lambda c: c.full_bytes * c.count)
    others = tuple(c for c in plan.estimate.collectives if c is not largest)
    tampered = plan.replace(estimate=dataclasses.replace(plan.estimate, collectives=others))
    found = tampered.validate(step, *_shapes())
    assert not found.ok
    assert any("collective not predicted: " in text for text in found.failures), str(found)


@needs_libtpu
@pytest.mark.usefixtures("recompiled")
def test_memory_that_the_estimate_leaves_out_is_caught(plan: autoshard.Plan) -> None:
    peak = plan.estimate.peak
    tampered = plan.replace(
        estimate=dataclasses.replace(
            plan.estimate,
            peak=dataclasses.replace(
                peak, total_bytes=peak.total_bytes - 2**30, argument_bytes=peak.argument_bytes + 2**24
            ),
        )
    )
    texts = tampered.validate(step, *_shapes(), platforms=("tpu",)).failures
    assert any("arguments take" in text for text in texts)
    assert any("more than the" in text for text in texts)


@needs_libtpu
@pytest.mark.usefixtures("recompiled")
def test_a_plan_that_does_not_fit_after_all_is_caught(
    plan: autoshard.Plan, compiled: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = report.CompiledReport(
        **{
            **{
                f.name: getattr(compiled["tpu", "plan.jit"], f.name)
                for f in dataclasses.fields(report.CompiledReport)
            },
            "out_of_memory": autoshard.validate.OutOfMemory(
                required_bytes=17 * 2**30, available_bytes=15 * 2**30, message="too much"
            ),
        }
    )
    monkeypatch.setattr(report, "_ask", lambda *_: full)
    found = plan.validate(step, *_shapes(), platforms=("tpu",), partitioners=("xla",))
    assert found.failures[0] == (
        "plan.jit for v3:2x2: predicted to fit, but out of memory: needs 17.00 of 15.00 GiB"
    )


def test_a_compiler_that_fails_is_a_failure_and_no_crash(
    plan: autoshard.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise report.CompileError("compiling plan.jit for cpu:8 ended by SIGABRT")

    monkeypatch.setattr(report, "_ask", refuse)
    found = plan.validate(step, *_shapes(), platforms=("cpu",), partitioners=("xla",))
    assert found.failures == ("plan.jit for cpu: compiling plan.jit for cpu:8 ended by SIGABRT",)


# Profile ------------------------------------------------------------------------------------------


def test_a_profile_here_says_that_it_is_no_tpu(plan: autoshard.Plan) -> None:
    found = plan.validate(step, *_shapes(), level="profile", partitioners=("xla",), steps=2)
    assert found.ok, str(found)
    assert "8 x cpu, 2 steps: not the planned v3" in found.notes[0]
    ops = found.frame("ops plan.jit")
    both = ops[(ops.predicted_seconds > 0) & (ops.measured_seconds > 0)]
    assert "dot_general" in set(both.op)
    assert found.frame("step").set_index("program").matched_share["plan.jit"] > 0.5


def test_too_few_devices_are_told_how_to_get_more(plan: autoshard.Plan) -> None:
    with pytest.raises(autoshard.AutoshardError, match="needs 8 devices; 1 of kind cpu"):
        measured.measure_plan(
            plan, step, _shapes(), [], partitioners=("xla",), devices=jax.devices()[:1], steps=1
        )


# The result ---------------------------------------------------------------------------------------


def test_a_validation_prints_and_converts() -> None:
    table = Table(
        title="sizes",
        columns=("name", "total_bytes", "fits"),
        rows=(("a<b", 2**31, True), ("c", None, False), ("d", 0, True)),
        formats={"total_bytes": "GiB"},
        shown=2,
    )
    found = Validation(
        plan="a plan", level="compile", tables={"sizes": table}, differences=("x: y",), failures=("too big",)
    )
    assert str(found).splitlines() == [
        "compile: FAILED - a plan",
        "failed: too big",
        "",
        "sizes",
        "  name  total GiB  fits",
        "  a<b       2.000   yes",
        "  c             -    no",
        "  ... 1 more rows",
        "",
        "differences",
        "  x: y",
    ]
    assert found.frame("sizes").total_bytes[0] == 2**31
    assert json.loads(json.dumps(found.to_dict()))["tables"]["sizes"][1] == {
        "name": "c",
        "total_bytes": None,
        "fits": False,
    }
    assert "a&lt;b" in found._repr_html_()
    with pytest.raises(KeyError, match="there are: sizes"):
        found.frame("memory")
