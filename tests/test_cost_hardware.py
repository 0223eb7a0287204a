"""The hardware files, and the chips made of them."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import cost_models
from cost_models import Chip, UnknownChipError, chip, chips, load_chip

FILES = sorted((Path(cost_models.__file__).parent / "hardware").glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_value_has_unit_source_and_date(path: Path) -> None:
    tables = tomllib.loads(path.read_text())
    for name, table in tables.items():
        assert (
            {"value", "unit", "source", "date"} <= set(table) <= {"value", "unit", "source", "date", "note"}
        )
        assert all(isinstance(table[key], str) and table[key] for key in set(table) - {"value"}), name
        assert table["date"][:2] == "20" and table["date"][:4].isdigit(), name


def test_a_file_for_every_generation() -> None:
    assert {path.stem for path in FILES} == {each.name for each in chips()}


def test_v3_is_half_a_chip() -> None:
    v3 = chip("v3")
    assert v3.matmul_flops_per_second == 123e12 / 2
    assert v3.hbm_bytes_per_second == 900e9 / 2
    assert v3.link_bytes_per_second == 656e9 / 8
    assert v3.hbm_capacity_bytes == round(15.48 * 2**30)
    assert v3.devices_per_chip == 2


@pytest.mark.parametrize("each", list(chips()), ids=str)
def test_peak_agrees_with_clock_and_arrays(each: Chip) -> None:
    from_clock = 2 * each.mxu_count * each.mxu_dim**2 * each.clock_hz
    assert each.matmul_flops_per_second == pytest.approx(from_clock, rel=0.01)


@pytest.mark.parametrize("each", list(chips()), ids=str)
def test_figures_are_consistent(each: Chip) -> None:
    assert 0.5 < each.matmul_efficiency <= 1 and 0.5 < each.hbm_efficiency <= 1
    assert 0.5 < each.line_efficiency <= 1 and 0.5 < each.joint_efficiency <= 1
    assert 0.3 < each.dcn_efficiency <= 1
    assert each.dcn_bytes_per_second < each.link_bytes_per_second
    assert each.dcn_latency_seconds >= each.hop_latency_seconds
    assert 1 <= each.f32_passes[0] <= each.f32_passes[1] <= each.f32_passes[2]
    assert (each.platform == "gpu") == each.has_switch == (each.torus_rank == 1)
    assert (each.core_link_bytes_per_second > 0) == (each.devices_per_chip > 1)
    assert len(each.pod_dims) == each.torus_rank
    assert all(len(dims) == each.torus_rank for dims in each.slices)


def test_names_of_the_compiler_are_accepted() -> None:
    assert chip("tpu7x") is chip("v7x") is chip("TPU v7x")
    assert chip("v5litepod") is chip("v5e")
    assert chip("v7x").compiler_name == "tpu7x"


def test_an_unknown_generation_lists_the_known() -> None:
    with pytest.raises(UnknownChipError) as caught:
        chip("v9")
    assert str(caught.value) == (
        "Unknown generation 'v9'. Known generations: v2, v3, v4, v5e, v5p, v6e, v7x, a100, h100, h200 (v7x is "
        "also called tpu7x)."
    )
    assert isinstance(caught.value, ValueError)


def test_a_broken_file_names_all_faults(tmp_path: Path) -> None:
    text = FILES[0].read_text().replace("[clock_hz]", "[clock]").replace('unit = "axes"\n', "")
    path = tmp_path / "v1.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match="v1.toml does not describe a chip") as caught:
        load_chip(path)
    for fault in ("clock_hz: missing", "clock: unknown", "torus_rank: no unit"):
        assert fault in str(caught.value)


def test_the_layer_imports_neither_jax_nor_its_neighbours() -> None:
    code = "import cost_models, sys; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"jax", "numpy", "autoshard", "search"}.isdisjoint(run.stdout.split())
