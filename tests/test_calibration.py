"""Calibration: what is fitted to what, the file that it writes, and plans with the figures of a file."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

import autoshard
import cost_models as cm
from autoshard import validate
from autoshard.calibration import (
    FAMILY,
    KINDS,
    PARAMETERS,
    Calibration,
    CalibrationError,
    Measurement,
    Predictor,
    calibrate,
    calibrated,
    fit_chip,
    fit_set,
    measuring,
)
from autoshard.cli import main
from benchmarks.calibration import page

V3 = cm.Topology.parse("v3:2x2")
NAMES = tuple(p.name for p in PARAMETERS)
needs_libtpu = pytest.mark.skipif(not validate.is_libtpu_available(), reason="libtpu is not installed")


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor(FAMILY, V3)


def _times(predictor: Predictor, chip: cm.Chip) -> tuple[Measurement, ...]:
    return tuple(Measurement(program=p, seconds=predictor.seconds(p, chip)) for p in FAMILY)


def _chip(values: Sequence[float]) -> cm.Chip:
    changes: dict[str, Any] = dict(zip(NAMES, values, strict=True))
    return dataclasses.replace(V3.chip, **changes)


# The family --------------------------------------------------------------------------------------------


def test_fit_set_and_test_set_are_disjoint_halves_of_each_kind() -> None:
    fitted = fit_set(FAMILY)
    assert len({p.name for p in FAMILY}) == len(FAMILY) == len(set(fitted) | (set(FAMILY) - set(fitted)))
    assert {p.kind for p in FAMILY} == set(KINDS)
    for kind in KINDS:
        ours = [p for p in FAMILY if p.kind == kind]
        assert [p for p in ours if p in fitted] == ([] if kind == "reductions" else ours[::2])
    assert {p.kind for p in PARAMETERS} == set(KINDS) - {"reductions"}


def test_every_program_is_one_kernel_of_its_parameters_resource(predictor: Predictor) -> None:
    """A kind's parameter decides the time of its programs, and no other of the parameters does."""
    for parameter in PARAMETERS:
        value = getattr(V3.chip, parameter.name)
        slower = value * 1.05 if parameter.slows else value / 1.05
        changes: dict[str, Any] = {parameter.name: slower}
        trial = dataclasses.replace(V3.chip, **changes)
        for program in FAMILY:
            growth = predictor.seconds(program, trial) / predictor.seconds(program, V3.chip)
            if program.kind == parameter.kind:
                assert growth > 1.025, (parameter.name, program.name)
            elif parameter.name != "hbm_efficiency":
                assert growth < 1.02, (parameter.name, program.name)


# The fit -----------------------------------------------------------------------------------------------


@settings(max_examples=5, deadline=None)
@given(
    st.tuples(
        st.floats(1e-7, 3e-6),
        st.floats(0.6, 1.0),
        st.floats(0.6, 1.0),
        st.floats(1e12, 2.2e12),
        st.floats(4.0, 7.0),
    )
)
def test_the_fit_recovers_the_figures_behind_the_times(
    predictor: Predictor, values: tuple[float, ...]
) -> None:
    true = _chip(values)
    fitted = [m for m in _times(predictor, true) if m.program in fit_set(FAMILY)]
    found = fit_chip(fitted, V3, predictor)
    assert [getattr(found, name) for name in NAMES] == pytest.approx(values, rel=2e-4)
    untouched = {name: getattr(V3.chip, name) for name in NAMES}
    assert dataclasses.replace(found, **untouched) == V3.chip


def test_one_odd_time_does_not_move_the_fit_far(predictor: Predictor) -> None:
    true = _chip((4e-7, 0.8, 0.7, 1.5e12, 5.0))
    times = [m for m in _times(predictor, true) if m.program in fit_set(FAMILY)]
    first = next(i for i, m in enumerate(times) if m.program.kind == "products")
    times[first] = dataclasses.replace(times[first], seconds=3 * times[first].seconds)
    assert fit_chip(times, V3, predictor).matmul_efficiency == pytest.approx(0.7, rel=0.01)


def test_a_figure_ends_at_its_range_and_the_file_says_so(predictor: Predictor) -> None:
    faster = [dataclasses.replace(m, seconds=m.seconds / 2) for m in _times(predictor, V3.chip)]
    found = calibrated(faster, V3, "synthetic")
    assert found.chip.matmul_efficiency == found.chip.hbm_efficiency == 1.0
    assert found.to_toml().count("at the end of its range") == 2


def test_a_kind_that_was_not_measured_leaves_its_parameter(predictor: Predictor) -> None:
    streams = [
        dataclasses.replace(m, seconds=1.1 * m.seconds)
        for m in _times(predictor, V3.chip)
        if m.program.kind == "streams"
    ]
    found = calibrated(streams, V3, "synthetic")
    assert found.chip == dataclasses.replace(V3.chip, hbm_efficiency=found.chip.hbm_efficiency)
    assert found.chip.hbm_efficiency == pytest.approx(0.92 / 1.1, rel=0.01)
    assert "matmul_efficiency" not in str(found)


def test_a_parameter_that_does_not_move_its_programs_is_refused(predictor: Predictor) -> None:
    class Still(Predictor):
        def seconds(self, program: Any, chip: cm.Chip) -> float:
            return 1.0

    times = [m for m in _times(predictor, V3.chip) if m.program.kind == "tiny kernels"][:1]
    with pytest.raises(
        CalibrationError, match="^kernel_overhead_seconds cannot be fitted: from 1e-09 to 0.001"
    ):
        fit_chip(times, V3, Still([], V3))


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_time_is_refused(predictor: Predictor, seconds: float) -> None:
    with pytest.raises(CalibrationError, match="These are no times to fit to: bf16"):
        fit_chip([Measurement(program=FAMILY[0], seconds=seconds)], V3, predictor)


# The file ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def synthetic(predictor: Predictor) -> Calibration:
    return calibrated(_times(predictor, _chip((4e-7, 0.8, 0.7, 1.5e12, 5.0))), V3, "synthetic times")


def test_the_file_holds_the_figures_and_where_all_are_from(synthetic: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "v3.toml"
    path.write_text(synthetic.to_toml())
    assert cm.load_chip(path) == synthetic.chip
    text = path.read_text()
    before = synthetic.errors("streams", fitted=False, before=True)
    assert before.worst == pytest.approx(1 - 0.8 / 0.92, rel=0.01)
    assert (
        '[hbm_efficiency]\nvalue = 0.8\nunit = "fraction"\nsource = "autoshard calibrate --topology v3:2x2: synthetic'
        f' times"\ndate = "{synthetic.date}"\nnote = "fitted to 3 streams: error median 0.0 %, worst 0.0 %; on 3'
        f" others: median 0.0 %, worst 0.0 % ({before} with the generation's file, which has 0.92)\"\n"
        in text
    )
    usual = cm.chip_tables("v3")["clock_hz"]
    assert f'[clock_hz]\nvalue = 940000000.0\nunit = "Hz"\nsource = "{usual["source"]}"\n' in text


@pytest.mark.parametrize("chip", list(cm.chips()), ids=str)
def test_every_data_file_survives_writing(chip: cm.Chip, tmp_path: Path) -> None:
    path = tmp_path / f"{chip.name}.toml"
    path.write_text(cm.chip_text(cm.chip_tables(chip.name)))
    assert cm.load_chip(path) == chip


def test_a_file_with_values_of_another_type_is_refused(tmp_path: Path) -> None:
    tables = cm.chip_tables("v3")
    tables["hbm_efficiency"]["value"] = "0.9"
    tables["slices"]["value"] = 4
    path = tmp_path / "odd.toml"
    path.write_text(cm.chip_text(tables))
    with pytest.raises(ValueError, match="hbm_efficiency: '0.9' is of type str; slices: 4 is of type int"):
        cm.load_chip(path)
    path.write_text("[hbm_efficiency")
    with pytest.raises(ValueError, match="odd.toml is no TOML file"):
        cm.load_chip(path)


def test_the_page_lists_every_parameter_and_program(synthetic: Calibration) -> None:
    text = page([synthetic])
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(PARAMETERS) + 1 + len(FAMILY)
    assert {len(row) for row in rows} == {8, 6}
    assert "Written by `make calibration TOPOLOGIES=v3:2x2`" in text


# Plans with the figures of a file ----------------------------------------------------------------------


def _product() -> tuple[Callable[..., Any], Any]:
    return (lambda x: x @ x), jax.ShapeDtypeStruct((8192, 8192), "bfloat16")


def test_figures_change_the_estimate_and_share_no_cache() -> None:
    """Chips of one name hash alike; what is remembered for one must not be given for another."""
    slower = V3.with_chip(dataclasses.replace(V3.chip, matmul_efficiency=V3.chip.matmul_efficiency / 2))
    assert slower != V3 and hash(slower) == hash(V3) and str(slower) == str(V3)
    fn, x = _product()
    seconds = {}
    for name, topology in [("usual", V3), ("slower", slower), ("usual again", V3)]:
        plan = autoshard.evaluate(fn, x, topology=topology, mesh={"data": 8})
        seconds[name] = plan.step_seconds
        assert plan.slice == topology
    assert seconds["usual"] == seconds["usual again"]
    assert seconds["slower"] == pytest.approx(2 * seconds["usual"], rel=0.02)
    placements = [cm.place(topology, {"x": 8}) for topology in (V3, slower)]
    assert placements[0] != placements[1]
    links = [dataclasses.replace(V3.chip, link_bytes_per_second=rate) for rate in (8.2e10, 4.1e10)]
    full, half = (
        cm.collective_seconds("all_reduce", 1e9, ("x",), cm.place(V3.with_chip(c), {"x": 8})).seconds
        for c in links
    )
    assert half > 1.5 * full


def test_a_plan_keeps_its_figures_in_its_file() -> None:
    fn, x = _product()
    slower = V3.with_chip(dataclasses.replace(V3.chip, matmul_efficiency=0.5, f32_passes=(1.0, 3.0, 5.5)))
    plan = autoshard.suggest(fn, x, topology=slower, mesh={"data": 8})
    assert plan.what_if(topology="v3:4x4").slice.chip == slower.chip
    assert plan.what_if(topology="v5e:4x4").slice.chip == cm.chip("v5e")
    text = plan.to_json()
    read = autoshard.Plan.from_json(text)
    assert read.slice == plan.slice == slower and read.to_json() == text
    assert '"figures"' not in autoshard.suggest(fn, x, topology=V3, mesh={"data": 8}).to_json()
    for found, message in [
        ('"matmul_eff"', "figures: 'matmul_eff' unknown"),
        ('"device_kind": "x", "matmul_efficiency"', "v3:2x2 has devices of the kind 'TPU v3'"),
    ]:
        with pytest.raises(autoshard.PlanFileError, match=message):
            autoshard.Plan.from_json(text.replace('"matmul_efficiency"', found))


def test_figures_of_another_generation_are_refused() -> None:
    with pytest.raises(cm.TopologyError) as caught:
        V3.with_chip(cm.chip("v5e"))
    assert str(caught.value) == (
        "v3:2x2 has devices of the kind 'TPU v3', and the figures 'v5e' are of 'TPU v5 lite'. Give figures of v3, or a"
        " slice of the other generation."
    )


# The command line --------------------------------------------------------------------------------------


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


PROGRAM = """
import jax
def product():
    x = jax.ShapeDtypeStruct((8192, 8192), "bfloat16")
    return (lambda x: x @ x), (x,)
"""


def test_calibrate_writes_a_file_that_suggest_and_compare_take(
    predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = dataclasses.replace(V3.chip, matmul_efficiency=0.5)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autoshard.calibration.compiled_times", lambda *_: _times(predictor, slow))
    monkeypatch.setattr("autoshard.calibration.compiler_source", lambda: "synthetic times")
    result = _run("calibrate", "--topology", "v3:2x2", "--out", "mine.toml")
    assert (result.exit_code, result.stderr) == (0, "")
    head, columns, *rows = result.stdout.splitlines()
    assert head.startswith("v3:2x2: synthetic times, 20")
    assert columns.split()[:4] == ["parameter", "unit", "was", "fitted"]
    assert rows[-1] == "not fitted to: 4 reductions, median 0.0 %, worst 0.0 %"
    assert ["matmul_efficiency", "fraction", "0.965", "0.5"] in [row.split()[:4] for row in rows]
    assert '"fitted": 0.5' in _run("calibrate", "--topology", "v3:2x2", "--json").stdout

    Path("programs.py").write_text(PROGRAM)
    arguments = ["suggest", "programs.py:product", "--topology", "v3", "--mesh", "data=8"]
    usual = _run(*arguments, "--out", "usual.json")
    mine = _run(*arguments, "--chip", "mine.toml", "--out", "mine.json")
    assert usual.exit_code == mine.exit_code == 0
    times = [
        autoshard.Plan.from_json(Path(f"{name}.json").read_text()).step_seconds for name in ("usual", "mine")
    ]
    assert times[1] > 1.8 * times[0]
    table = _run(
        "compare", "programs.py:product", "--plan", "mine.json", "--baselines", "replicated", "--json"
    )
    assert table.exit_code == 0, table.output
    (replicated,) = [row for row in json.loads(table.stdout)["plans"] if row["plan"] == "replicated"]
    peak_ms = 1e3 * 2 * 8192**3 / V3.chip.matmul_flops_per_second
    assert replicated["step_ms"] == pytest.approx(
        peak_ms / 0.5, rel=0.01
    )  # the plan's figures, not the generation's


def test_what_calibrate_and_chip_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("programs.py").write_text(PROGRAM)
    Path("broken.toml").write_text("[clock_hz]\nvalue = 1\n")
    suggest = ["suggest", "programs.py:product", "--topology", "v3:2x2", "--chip"]
    for arguments, message in [
        (
            ["calibrate", "--topology", "h100:8"],
            "There is no ahead-of-time compiler for GPUs here, and h100:8 has GPUs. Calibrate where they are attached,"
            " with --profile.",
        ),
        (
            ["calibrate", "--topology", "v3:2x2", "--profile"],
            "--profile measures the devices attached, which are of the kind 'cpu', and v3:2x2 has 'TPU v3'. Run it"
            " where such devices are, name the slice that is attached, or leave --profile out to ask the TPU compiler.",
        ),
        (
            ["calibrate", "--topology", "v3:2x2", "--out", "no/v3.toml"],
            "--out no/v3.toml: there is no folder",
        ),
        (["calibrate", "--topology", "v9"], "Cannot read 'v9' as a topology"),
        ([*suggest, "none.toml"], "--chip none.toml cannot be read: No such file or directory."),
        (
            [*suggest, "broken.toml"],
            "--chip broken.toml: broken.toml does not describe a chip: compiler_name: missing",
        ),
    ]:
        result = _run(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith(f"error: {message}")


# Measuring ---------------------------------------------------------------------------------------------


def test_a_profile_times_every_program(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands in for the devices: what is run, with which arguments, and what is read of the profile."""
    small = [p for p in FAMILY if p.kind == "tiny kernels"]
    seen = []

    def profile(compiled: Any, args: Any, *, steps: int) -> Any:
        compiled(*args)
        seen.append(([a.shape for a in args], steps))
        return validate.ProfileReport(
            step_seconds=1.0, steps=steps, devices=("cpu:0",), ops=(), busy_seconds=2e-6
        )

    monkeypatch.setattr(measuring, "profile", profile)
    here = V3.with_chip(V3.chip)
    object.__setattr__(here, "chip", dataclasses.replace(V3.chip, device_kind=jax.devices()[0].device_kind))
    found = measuring.profiled_times(small, here)
    assert [(m.program, m.seconds) for m in found] == [(p, 2e-6) for p in small]
    assert seen == [([a.shape for a in p.args], 10) for p in small]


@needs_libtpu
@pytest.mark.slow
def test_the_compilers_cycles_give_figures_near_the_files() -> None:
    chosen = [p for p in FAMILY if p.kind == "streams"][:2] + [p for p in FAMILY if p.kind == "products"][2:4]
    news: list[str] = []
    found = calibrate("v3:1x1", programs=chosen, progress=news.append)
    assert news == ["compiling 2 products", "compiling 2 streams", "fitting"]
    assert [p.name for p in found.fitted] == ["hbm_efficiency", "matmul_efficiency"]
    assert found.chip.hbm_efficiency == pytest.approx(V3.chip.hbm_efficiency, rel=0.03)
    assert found.chip.matmul_efficiency == pytest.approx(V3.chip.matmul_efficiency, rel=0.03)
    assert all(abs(o.error) < 0.02 for o in found.outcomes)


@needs_libtpu
@pytest.mark.slow
def test_the_first_program_that_the_compiler_refuses_is_named() -> None:
    def too_large(x: Any) -> Any:
        return x + 1

    shapes = [jax.ShapeDtypeStruct((8, 128), "float32")] * 2
    fine = validate.export_artifact(lambda x: x + 1, shapes[:1], platform="tpu")
    broken = dataclasses.replace(
        validate.export_artifact(too_large, shapes[:1], platform="tpu"), serialized=b""
    )
    with pytest.raises(validate.CompileError, match="compiling 2 programs for v3:2x2 failed: .*too_large: "):
        validate.compile_tpu_each([fine, broken], topology=V3)
