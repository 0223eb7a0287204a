"""Plots of plans side by side: lengths are the plans' figures, nothing covers anything, all is labelled."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import pytest
from jax.sharding import PartitionSpec as P

matplotlib.use("agg")

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402

import autoshard  # noqa: E402
from autoshard.report.plots import plot_memory, plot_step_time  # noqa: E402

PLOTS = [plot_step_time, plot_memory]
UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
SPECS = {
    "batch": (P(), P(), P(("data", "model"))),
    "features": (P(None, "model"), P("model"), P("data")),
    "sharded": (P(("data", "model")), P(None, ("data", "model")), P(("data", "model"))),
    "contracted": (P("model"), P("data"), P(None, "model")),
    "whole": (P(), P(), P()),
}


def _loss(up: jax.Array, down: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
    return jax.value_and_grad(lambda up, down: jnp.mean(jnp.tanh(x @ up) @ down), argnums=(0, 1))(up, down)


@functools.cache
def _plans() -> tuple[autoshard.Plan, ...]:
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((512, 2048), (2048, 512), (32768, 512))]
    found = [
        autoshard.evaluate(
            _loss, *shapes, topology="v3:2x2", mesh={"data": 4, "model": 2}, in_specs=specs, name=name
        )
        for name, specs in SPECS.items()
    ]
    return (
        *found,
        found[0].replace(name="a rather long name of a plan"),
        found[1],
        found[2].replace(name="x"),
    )


@pytest.fixture(autouse=True)
def close() -> Iterator[None]:
    yield
    plt.close("all")


def _drawn(ax: Axes) -> Any:
    canvas = ax.figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    canvas.draw()  # type: ignore[no-untyped-call]
    return canvas.get_renderer()  # type: ignore[no-untyped-call]


def _unit(ax: Axes) -> float:
    return UNITS[ax.get_xlabel().rpartition("(")[2].rstrip(")")]


def _lengths(ax: Axes) -> list[float]:
    rows = len(ax.get_yticks())
    found = [0.0] * rows
    for container in ax.containers:
        for row, bar in enumerate(container):
            found[row] += bar.get_width() * _unit(ax)
    return found


@pytest.mark.parametrize("plot", PLOTS)
def test_lengths_are_the_figures(plot: Any) -> None:
    plans = _plans()
    ax = plot(plans)
    values = [p.step_seconds if plot is plot_step_time else p.estimate.peak_bytes for p in plans]
    cut = [text.get_text().endswith("(cut)") for text in ax.texts]
    for length, value, is_cut in zip(_lengths(ax), values, cut, strict=True):
        assert length < value if is_cut else length == pytest.approx(value, rel=1e-6)


def test_a_bar_far_longer_than_the_best_is_cut() -> None:
    ax = plot_step_time(_plans())
    totals = [plan.step_seconds for plan in _plans()]
    assert [text.get_text().endswith("(cut)") for text in ax.texts] == [t > 5 * min(totals) for t in totals]
    assert any(text.get_text().endswith("(cut)") for text in ax.texts)  # the whole program on every device


@pytest.mark.parametrize("plot", PLOTS)
def test_nothing_covers_anything(plot: Any) -> None:
    ax = plot(_plans())
    renderer = _drawn(ax)
    legend = ax.get_legend().get_window_extent(renderer)
    texts = [text.get_window_extent(renderer) for text in ax.texts]
    bars = [bar.get_window_extent(renderer) for container in ax.containers for bar in container]
    assert not any(legend.overlaps(box) for box in (*bars, *texts))
    assert not any(a.overlaps(b) for a, b in zip(texts, texts[1:], strict=False))
    whole = ax.figure.bbox
    labels = [label.get_window_extent(renderer) for label in ax.get_yticklabels()]
    for box in (legend, *texts, *labels):
        assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1


@pytest.mark.parametrize("plot", PLOTS)
def test_segments_can_be_told_apart(plot: Any) -> None:
    ax = plot(_plans())
    styles = [(c[0].get_facecolor(), c[0].get_hatch()) for c in ax.containers]
    assert len(set(styles)) == len(styles)
    named = [text.get_text() for text in ax.get_legend().get_texts()]
    assert [c.get_label() for c in ax.containers] == [n for n in named if not n.startswith("limit")]


@pytest.mark.parametrize("plot", PLOTS)
def test_axis_and_figures_have_units(plot: Any) -> None:
    ax = plot(_plans()[:1])
    unit = ax.get_xlabel().rpartition("(")[2].rstrip(")")
    assert unit in UNITS and ax.get_title()
    assert all(text.get_text().split()[1] == unit for text in ax.texts)


def test_names_are_made_unique_and_a_mapping_gives_its_own() -> None:
    a, b = _plans()[:2]
    assert _names(plot_step_time([a, b, a])) == ["batch", "features", "batch (2)"]
    assert _names(plot_memory({"mine": a, "yours": b})) == ["mine", "yours"]


def test_meshes_are_named_where_they_differ() -> None:
    shape = jax.ShapeDtypeStruct((512, 512), "float32")
    plans = [
        autoshard.evaluate(lambda x: x @ x, shape, topology="v3:2x2", mesh=mesh, name="plan")
        for mesh in ({"data": 8}, {"data": 4, "model": 2})
    ]
    assert _names(plot_step_time(plans)) == ["plan\ndata=8", "plan\ndata=4, model=2"]


def _names(ax: Axes) -> list[str]:
    return [label.get_text() for label in ax.get_yticklabels()]


def test_limit_line() -> None:
    plan = _plans()[0]
    peak = plan.estimate.peak_bytes
    ax = plot_memory([plan.replace(memory_limit_bytes=peak / 2), plan.replace(memory_limit_bytes=2 * peak)])
    at = [float(line.get_xdata()[0]) * _unit(ax) for line in ax.lines if len(line.get_xdata()) == 2]  # type: ignore
    assert at == pytest.approx([peak / 2, 2 * peak])
    assert [text.get_fontweight() for text in ax.texts] == ["bold", "normal"]
    assert any(text.get_text().startswith("limit: ") for text in ax.get_legend().get_texts())  # type: ignore


def test_a_limit_far_away_is_named_only() -> None:
    plan = _plans()[0]
    ax = plot_memory([plan.replace(memory_limit_bytes=100 * plan.estimate.peak_bytes)])
    named = [text.get_text() for text in ax.get_legend().get_texts()]  # type: ignore[union-attr]
    assert any(name.startswith("limit: ") and "beyond the right edge" in name for name in named)
    assert ax.get_xlim()[1] * _unit(ax) < 2 * plan.estimate.peak_bytes


@pytest.mark.parametrize("plot", PLOTS)
def test_draws_into_given_axes(plot: Any) -> None:
    figure, ax = plt.subplots(figsize=(10, 4), layout="constrained")
    assert plot(_plans(), ax=ax) is ax
    assert figure.axes == [ax]
    _drawn(ax)


@pytest.mark.parametrize("plot", PLOTS)
@pytest.mark.parametrize("nothing", [[], {}])
def test_no_plans(plot: Any, nothing: Any) -> None:
    with pytest.raises(ValueError, match="no plans to plot; give at least one"):
        plot(nothing)
