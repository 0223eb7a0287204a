"""The printed plan: complete, grouped so that many arrays stay readable, plain where there is no terminal."""

import dataclasses
import functools
import io
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import autoshard
import search
from autoshard.layout import Layout
from autoshard.report.comparison import comparison_view
from autoshard.report.page import Bar, plain
from autoshard.report.paths import collapse, keys_of
from autoshard.report.specs import spec_text
from autoshard.report.tables import ledger, summary
from autoshard.report.text import plan_text, plan_view
from autoshard.solving import UNFINISHED
from autoshard.zoo import convnet, dense

MESH = {"data": 4, "model": 2}
CONFIG = dense.scaled_down(dense.PRESETS["8b"])


def _float(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@functools.cache
def _plan() -> autoshard.Plan:
    fn, args = dense.train_step(CONFIG)
    return autoshard.suggest(fn, *args, topology="v3:2x2", mesh=MESH, donate_argnums=dense.DONATE)


@functools.cache
def _unrolled() -> autoshard.Plan:
    config = dataclasses.replace(CONFIG, scan=False, layers=12)
    fn, args = dense.forward(config)
    return autoshard.evaluate(fn, *args, topology="v3:2x2", mesh=MESH)


def _sections(text: str) -> dict[str, list[str]]:
    """Split at the lines that start in the first column."""
    found: dict[str, list[str]] = {}
    title = ""
    for line in text.splitlines():
        if line and not line.startswith(" "):
            title = line
            found[title] = []
        elif line:
            found[title].append(line)
    return found


# The whole ---------------------------------------------------------------------------------------------


def test_a_plan_prints_all_its_parts() -> None:
    plan = _plan()
    assert str(plan) == plan_text(plan)
    sections = _sections(str(plan))
    assert list(sections) == [
        "Plan: suggested",
        "Step time",
        "Where the time goes, by source line",
        next(title for title in sections if title.startswith("HBM of a device at its peak, in ")),
        "Largest buffers then",
        "Arguments",
        "Results",
    ]
    head = "\n".join(sections["Plan: suggested"])
    assert "slice   v3:2x2: 4 chips x 2 cores = 8 devices" in head
    assert "mesh    data=4 on y[2] x[2]; model=2 on core[2]" in head
    assert re.search(r"step    [\d.]+ us, HFU [\d.]+ %", head)
    assert re.search(r"memory  peak [\d.]+ [KM]iB of 1\d\.\d\d GiB \(0 %\): fits", head)
    assert "coverage  all " in str(plan)


def test_the_parts_of_the_step_add_up_to_it() -> None:
    plan = _plan()
    rows = _sections(str(plan))["Step time"][1:]
    kinds = {"compute-bound", "HBM-bound", "all-gather", "all-reduce", "reduce-scatter", "all-to-all"}
    assert {row.split()[0] for row in rows} <= kinds | {"collective-permute"}
    numbers = [float(re.search(r"([\d,.]+) +[\d.]+ %", row)[1].replace(",", "")) for row in rows]  # type: ignore[index]
    assert sum(numbers) == pytest.approx(1e6 * plan.step_seconds, abs=0.0005 * len(rows))


def test_every_collective_is_shown_with_its_axes_runs_and_bytes() -> None:
    plan = _plan()
    rows = [row.split() for row in _sections(str(plan))["Step time"][1:]]
    shown = {
        (row[0].replace("-", "_"), row[1]): float(row[2].replace(",", ""))
        for row in rows
        if "bound" not in row[0]
    }
    runs: dict[tuple[str, str], float] = {}
    for entry in plan.estimate.entries:
        if entry.kind == "collective":
            key = (entry.title, "*".join(entry.axes))
            runs[key] = runs.get(key, 0.0) + entry.count
    assert shown == runs


def test_utilization_of_the_model_is_shown_when_its_flops_are_known() -> None:
    flops = dense.model_flops(CONFIG)
    text = plan_text(_plan(), model_flops=flops)
    assert f"MFU {100 * _plan().mfu(flops):.1f} %" in text
    assert "MFU" not in plan_text(_plan())


def test_timings_are_shown_on_request() -> None:
    assert "Time to plan" not in plan_text(_plan())
    rows = _sections(plan_text(_plan(), timings=True))["Time to plan"]
    assert [row.split("  ")[1].strip() for row in rows[1:]] == [*_plan().timings, "total"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"gap": 0.0}, "search  proven best on this mesh under the model"),
        ({"gap": None}, "search  none: the given shardings were completed and priced"),
        (
            {"gap": 0.012, "lower_bound_seconds": None},
            "search  within 1.2 % of the best on this mesh under the model",
        ),
        (
            {
                "gap": 0.012,
                "lower_bound_seconds": None,
                "notes": UNFINISHED[search.Status.TIME_LIMIT],
            },
            "search  stopped at the time limit; within 1.2 % of the best on this mesh under the model",
        ),
        (
            {"gap": 0.01, "lower_bound_seconds": 0.5e-4},
            "of the best on this mesh under the model (at least 50.000 us)",
        ),
    ],
)
def test_the_gap_is_said_in_words(changes: dict[str, Any], expected: str) -> None:
    assert expected in str(_plan().replace(**changes))


def test_a_plan_that_does_not_fit_says_by_how_much() -> None:
    peak = _plan().estimate.peak_bytes
    text = str(_plan().replace(memory_limit_bytes=peak / 4))
    assert re.search(r"\(400 %\): DOES NOT FIT, by [\d.]+ [KM]iB", text)
    assert "search  found nothing on this mesh that fits; this has the least peak of what was tried" in text
    assert re.search(r"^  over the limit +[\d.]+ .*300\.0 %$", text, re.MULTILINE)


def test_the_categories_of_memory_add_up_to_the_peak() -> None:
    plan = _plan()
    title, rows = next(item for item in _sections(str(plan)).items() if item[0].startswith("HBM of a device"))
    assert title.startswith(f"HBM of a device at its peak, in {plan.estimate.peak.where}")
    shares = [float(re.search(r"([\d.]+) %", row)[1]) for row in rows[1:]]  # type: ignore[index]
    assert sum(shares) == pytest.approx(100.0, abs=0.05 * len(shares))


def test_notes_and_ops_without_rule_are_shown() -> None:
    coverage = autoshard.Coverage(ops=9, without_rule={"fft": 2}, flops_share=0.5)
    text = str(_plan().replace(notes=("dim 0 = 60 is left whole",), coverage=coverage))
    assert "  note      dim 0 = 60 is left whole" in text
    assert "without one, and so run whole" in text and re.search(r"fft\s+\(2\)", text)


def test_idle_devices_and_snakes_are_said() -> None:
    plan = autoshard.evaluate(lambda x: x + 1, _float(40, 8), topology="v3:2x2", mesh={"data": 5})
    text = str(plan)
    assert "8 devices, 5 of them used" in text
    assert "data=5 on line[5 of 8]" in text


# Where it is printed -----------------------------------------------------------------------------------


def test_lines_stay_within_100_columns_and_have_no_trailing_space() -> None:
    for plan in (_plan(), _unrolled()):
        for full in (False, True):
            lines = plan_text(plan, full=full).splitlines()
            assert max(map(len, lines)) <= 100
            assert all(line == line.rstrip() for line in lines)


def test_plain_text_has_no_escapes_even_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", Terminal())
    text = plan_text(_plan())
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_console_with_colours_shows_the_same_words() -> None:
    sink = io.StringIO()
    console = Console(
        file=sink, force_terminal=True, color_system="standard", width=100, legacy_windows=False
    )
    console.print(plan_view(_plan()))
    assert "\x1b[" in sink.getvalue()
    bare = re.sub(r"\x1b\[[\d;]*m", "", sink.getvalue())
    assert [line.rstrip() for line in bare.splitlines()] == plan_text(_plan()).splitlines()


def test_bars_are_ascii_where_the_terminal_has_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plain(Bar(share=0.5, width=8)) == "████"
    assert plain(Bar(share=0.3, width=10)) == "███"
    assert plain(Bar(share=7.0, width=3)) == "███"
    assert plain(Bar(share=1 / 16, width=2)) == "▏"

    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    assert plain(Bar(share=0.5, width=8)) == "####"
    plan_text(_plan()).encode("latin-1")


# Arrays ------------------------------------------------------------------------------------------------


def test_many_arrays_share_few_rows() -> None:
    plan = _unrolled()
    assert len(plan.inputs) == 12 * 9 + 4
    rows = _sections(str(plan))["Arguments"]
    assert len(rows) < 25
    counts = [int(m[1]) for row in rows if (m := re.match(r"    \S.*? +(\d+)  [a-z]+\d", row))]
    assert sum(counts) == len(plan.inputs)
    assert "['blocks'][0..11]" in "\n".join(rows)


def test_the_full_listing_has_a_row_for_each() -> None:
    plan = _unrolled()
    text = "\n".join(_sections(plan_text(plan, full=True))["Arguments"])
    assert "['blocks'][11]['wq']" in text
    assert len(re.findall(r"  1  f32\[", text)) == sum(leaf.dtype == "float32" for leaf in plan.inputs)


def test_the_rows_of_resnet_are_few() -> None:
    fn, args = convnet.resnet50()
    plan = autoshard.evaluate(fn, *args, topology="v3:2x2", mesh={"data": 8}, donate_argnums=convnet.DONATE)
    assert len(plan.inputs) > 300
    assert len(_sections(str(plan))["Arguments"]) < 70


def test_results_that_are_state_are_not_repeated() -> None:
    rows = _sections(str(_plan()))["Results"]
    assert len([row for row in rows if "[2]" in row]) == 1  # the loss
    assert (
        rows[-1 if "coverage" not in rows[-1] else -2]
        == "  every other result is split as the argument of the same path"
    )


def test_a_single_result_has_no_path() -> None:
    plan = autoshard.suggest(lambda x: jnp.tanh(x), _float(64, 64), topology="v3:2x2", mesh={"data": 8})
    text = str(plan)
    assert re.search(r"^Results\n.*\n  \(all of it\)  1  f32\[64,64\]  P\('data'\)", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ([], []),
        (["[0]"], ["[0]"]),
        (["[0]['a']", "[0]['b']", "[1]['a']"], ["[0]['a','b']", "[1]['a']"]),
        ([f"[0][{i}]['w']" for i in (0, 1, 2, 5)], ["[0][0..2,5]['w']"]),
        ([f"[0][{i}]['{n}']" for i in (0, 1) for n in "ab"], ["[0][0..1]['a','b']"]),
        (["[0]['m']['a']", "[0]['v']['a']", "[0]['n']"], ["[0]['m','v']['a']", "[0]['n']"]),
        (["[0].mu['a']", "[0].nu['a']"], ["[0].{mu,nu}['a']"]),
        ([f"[0]['net/block_{i}/conv']" for i in range(9)], ["[0]['net/block_*/conv']"]),
        ([f"[0]['{n}']" for n in "abcdef"], ["[0]['a','b','c',... 3 more]"]),
        (["[0]['a]b']['c']", "[0]['a]b']['d']"], ["[0]['a]b']['c','d']"]),
    ],
)
def test_paths_collapse(paths: list[str], expected: list[str]) -> None:
    found = collapse(paths, [0] * len(paths))
    assert [pattern for pattern, _ in found] == expected
    assert sorted(i for _, members in found for i in members) == list(range(len(paths)))


def test_paths_with_different_labels_stay_apart() -> None:
    assert collapse(["[0]['a']", "[0]['b']", "[0]['c']"], ["x", "y", "x"]) == [
        ("[0]['a','c']", [0, 2]),
        ("[0]['b']", [1]),
    ]


def test_a_path_that_cannot_be_split_is_one_key() -> None:
    assert keys_of("") == ("",)
    assert keys_of("odd <path>") == ("odd <path>",)


def test_specs_are_written_as_a_person_would() -> None:
    assert spec_text(Layout((("data",), (), ()))) == "P('data')"
    assert spec_text(Layout(((), ("data", "model")))) == "P(None, ('data','model'))"
    assert spec_text(Layout(((), ()), ("model",))) == "P(unreduced={'model'})"
    assert eval(spec_text(Layout(((), ("data", "model")))), {"P": jax.sharding.PartitionSpec}) == (
        jax.sharding.PartitionSpec(None, ("data", "model"))
    )


# Tables ------------------------------------------------------------------------------------------------


def test_the_ledger_adds_up_to_the_estimate() -> None:
    plan = _plan()
    table = ledger(plan)
    estimate = plan.estimate
    columns = ["group", "title", "source", "kind", "axes", "bound", "ms", "flops", "bytes", "count"]
    assert list(table.columns) == columns
    assert table.ms.sum() == pytest.approx(1e3 * estimate.serial_seconds)
    assert table.flops.sum() == pytest.approx(estimate.flops)
    sent = table[table.kind == "collective"]["bytes"].sum()
    assert sent == pytest.approx(sum(c.cost.ici_bytes * c.count for c in estimate.entries))
    by_bound = table.groupby("bound").ms.sum()
    assert by_bound["compute"] + by_bound["hbm"] == pytest.approx(
        1e3 * (estimate.breakdown()["compute"] + estimate.breakdown()["hbm"])
    )


def test_the_summary_is_json_and_says_what_the_plan_does() -> None:
    import json

    plan = _plan()
    found = json.loads(json.dumps(summary(plan, model_flops=1e9)))
    assert found["step_seconds"] == plan.step_seconds
    assert sum(found["step_seconds_by"].values()) == pytest.approx(plan.step_seconds)
    assert found["mfu"] == plan.mfu(1e9)
    assert [leaf["path"] for leaf in found["inputs"]] == [leaf.path for leaf in plan.inputs]
    spec = {leaf["path"]: leaf["spec"] for leaf in found["inputs"]}["[0]['embed']"]
    assert jax.sharding.PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in spec)) == plan.spec(
        "[0]['embed']"
    )


def test_a_comparison_lists_the_fastest_that_fits_first() -> None:
    from autoshard.compare import compare

    plan = _plan()
    slow = autoshard.evaluate(
        *dense.train_step(CONFIG)[:1], *dense.train_step(CONFIG)[1], topology="v3:2x2", mesh=MESH, name="slow"
    )
    tight = plan.replace(name="tight", memory_limit_bytes=1.0)
    rows = plain(comparison_view(compare([tight, slow, plan]))).splitlines()
    assert rows[0].split()[:6] == ["plan", "step", "ms", "slower", "compute", "HBM"]
    assert [row.split()[0] for row in rows[1:]] == ["suggested", "slow", "tight"]
    assert [row.split()[-1] for row in rows[1:]] == ["yes", "yes", "NO"]
