"""Published train steps are predicted within their bounds, from rows that are data."""

import math
from pathlib import Path

import pytest
from jax.sharding import PartitionSpec

from autoshard.zoo import dense
from benchmarks import published

ROWS = {row.name: row for row in published.rows()}


@pytest.mark.parametrize(
    "name", ["Llama 3.1 8B v6e-256", "MaxText 16B v5e-256", "DenseLm12kWide41BAdam16x16"]
)
def test_a_published_step_is_predicted_within_its_bound(name: str) -> None:
    result = published.Result(row=ROWS[name], plan=published.plan_of(ROWS[name]))
    assert abs(result.error) <= published.WORST_LIMIT
    parts = result.attention + result.products + result.rest
    assert parts + result.wire == pytest.approx(result.plan.estimate.serial_seconds)
    assert parts + result.exposed == pytest.approx(result.plan.step_seconds)


def test_the_models_of_the_rows_have_the_published_sizes() -> None:
    billions = {row.config.name: dense.parameter_count(row.config) / 1e9 for row in ROWS.values()}
    # validation points: 3.10 without the embedding table's rounding, 2.2, and the models' names
    expected = {
        "maxtext-16b": 15.8,
        "maxtext-32b": 31.7,
        "maxtext-64b": 62.8,
        "maxtext-128b": 125.1,
        "maxtext-1024b": 997.5,
        "lingvo-128b": 137.7,
        "lingvo-175b": 174.3,
        "llama3-8b": 8.03,
        "llama3-70b": 70.6,
        "llama3-405b": 405.9,
    }
    assert {name: billions[name] for name in expected} == pytest.approx(expected, rel=5e-3)


def test_figures_become_seconds_of_a_step() -> None:
    lingvo, maxtext = ROWS["DenseLm128B8x8"], ROWS["MaxText 16B v5e-256"]
    assert lingvo.seconds == 16 * 1024 / 3700
    assert maxtext.seconds == dense.model_flops(maxtext.config) / (120e12 * 256)
    assert maxtext.seconds == pytest.approx(10.31, rel=1e-3)


def test_every_row_fills_its_slice_and_splits_evenly() -> None:
    for row in ROWS.values():
        devices = math.prod(row.mesh.values())
        assert row.config.batch * row.config.seq % devices == 0, row.name
        if not published.refused(row):
            topology = published.cm.Topology.parse(row.topology)
            assert topology.num_devices == devices, row.name


def test_specs_follow_the_names_of_dims() -> None:
    row = ROWS["MaxText 32B v5p-128"]
    weights = dense.weight_dims(row.config)["blocks"]
    assert published.spec(weights["up"], row.parameters) == PartitionSpec(None, "fsdp", "tensor")
    assert published.spec(weights["wo"], row.parameters) == PartitionSpec(None, "tensor", None, "fsdp")
    kept = published.spec(dense.ACTIVATION_DIMS["up"], row.activations)
    assert kept == PartitionSpec("fsdp", None, "tensor")


def test_the_page_says_what_is_left_out_and_what_departs() -> None:
    row = ROWS["PaLM 540B decode, int8 weights"]
    result = published.Result(row=row, plan=published.plan_of(row))
    text = published.page([result], {"Another": "no such slice"}, " ROWS=PaLM")
    assert f"| 0.0285 | {result.plan.step_seconds:.3g} | {100 * result.error:+.1f} % |" in text
    assert "- PaLM 540B decode, int8 weights: heads are padded to 64." in text
    assert "- Another: no such slice." in text
    assert "make published ROWS=PaLM" in text


def test_a_row_with_two_figures_is_refused(tmp_path: Path) -> None:
    text = published.DATA.read_text().replace("seconds = 131.474", "seconds = 131.474\ntflops_per_device = 1")
    (tmp_path / "rows.toml").write_text(text)
    with pytest.raises(ValueError, match="Llama 3.1 405B v5p-1024.*gives .*; give one of seconds"):
        published.rows(tmp_path / "rows.toml")
