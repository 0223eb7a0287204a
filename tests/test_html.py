"""The card that a notebook shows of a plan: complete, well formed, escaped, and with nothing to load."""

import functools
import re
from collections.abc import Mapping
from html import unescape
from html.parser import HTMLParser
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.report.arrays import argument_rows, result_rows
from autoshard.report.html import plan_html
from autoshard.report.parts import memory_parts, ms_text, step_parts, step_styles

EVIL = '<script>alert("1")</script>&\''
MESH = {"data": 4, "model": 2}


def _step(params: Mapping[str, Any], x: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    def loss(params: Mapping[str, Any]) -> jax.Array:
        return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def _float(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@functools.cache
def _plan() -> autoshard.Plan:
    params = {"down": _float(1024, 256), "up": _float(256, 1024)}
    return autoshard.suggest(
        _step, params, _float(512, 256), topology="v3:2x2", mesh=MESH, donate_argnums=(0,)
    )


@functools.cache
def _evil() -> autoshard.Plan:
    def fn(args: Mapping[str, Any]) -> Any:
        return args[EVIL] @ args["w"]

    plan = autoshard.evaluate(
        fn,
        {EVIL: _float(64, 64), "w": _float(64, 64)},
        topology="v3:2x2",
        mesh={"data": 8},
        in_specs=({EVIL: P("data"), "w": None},),
        name=EVIL,
    )
    coverage = autoshard.Coverage(ops=2, without_rule={EVIL: 1}, flops_share=0.5)
    return plan.replace(notes=(EVIL,), coverage=coverage)


class _Page(HTMLParser):
    """Collects text, tags and attributes; every tag has to be closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


@pytest.mark.parametrize("make", [_plan, _evil])
def test_well_formed_and_self_contained(make: Any) -> None:
    page = _Page(plan_html(make()))
    assert not page.open
    assert not page.tags & {"script", "img", "link", "iframe", "object", "svg"}
    assert not page.attributes & {"src", "href", "onclick", "id"}
    assert "url(" not in plan_html(make()) and "http" not in plan_html(make())


def test_everything_is_escaped() -> None:
    text = plan_html(_evil())
    assert "<script" not in text
    page = _Page(text).text
    assert page.count(EVIL) >= 3  # name, note and path
    assert f"{EVIL} (1)" in page  # coverage


def test_repr_html_is_the_card() -> None:
    assert _plan()._repr_html_() == plan_html(_plan())


def test_says_what_the_plan_says() -> None:
    plan = _plan()
    text = _Page(plan_html(plan)).text
    assert f"{ms_text(plan.step_seconds, plan.step_seconds)} ms" in text
    assert "data 4 × model 2" in text
    assert "v3:2x2" in text and "8 devices" in text
    assert f"Arguments ({len(plan.inputs)} arrays)" in text
    assert "Coverage: all" in text
    for row in argument_rows(plan):
        assert row.spec in text and row.array in text
    for name in plan.estimate.peak.by_category():
        assert name in text


@pytest.mark.parametrize(
    ("gap", "said"),
    [
        (None, "nothing searched"),
        (0.0, "proven best on this mesh"),
        (1e-15, "proven best on this mesh"),
        (1e-6, "< 0.01 % at most, from the best"),
        (0.034, "3.4 % at most, from the best"),
    ],
)
def test_gap(gap: float | None, said: str) -> None:
    assert said in re.sub(r"\s+", " ", _Page(plan_html(_plan().replace(gap=gap))).text)


def test_what_does_not_fit_is_said_and_marked() -> None:
    plan = _plan()
    assert "DOES NOT FIT" not in plan_html(plan) and '"asp-limit"' not in plan_html(plan)
    tight = plan.replace(memory_limit_bytes=plan.estimate.peak_bytes / 2)
    assert "DOES NOT FIT" in plan_html(tight)
    mark = re.search(r'class="asp-limit" style="left:([\d.]+)%', plan_html(tight))
    assert mark is not None and float(mark[1]) == pytest.approx(50.0)


def test_bars_are_full() -> None:
    plan = _plan().replace(memory_limit_bytes=_plan().estimate.peak_bytes)
    bars = re.findall(r'<div class="asp-bar">(.*?)</div>', plan_html(plan))
    assert len(bars) == 2
    for bar in bars:
        assert sum(map(float, re.findall(r"width:([\d.]+)%", bar))) == pytest.approx(100.0, abs=1e-2)


def test_pointer_tells_figures() -> None:
    titles = [unescape(title) for title in re.findall(r'title="([^"]*)"', plan_html(_plan()))]
    assert any(re.fullmatch(r"HBM-bound kernels: [\d.,]+ ms", title) for title in titles)
    assert any(re.fullmatch(r"parameters: [\d.,]+ [KMG]iB", title) for title in titles)


def test_parts_add_up() -> None:
    plan = _plan()
    parts = step_parts(plan)
    assert sum(p.seconds for p in parts) == pytest.approx(plan.estimate.serial_seconds, rel=1e-9)
    assert sum(p.sent_bytes for p in parts) == pytest.approx(
        sum(c.sent_bytes * c.count for c in plan.estimate.collectives), rel=1e-9
    )
    assert sum(memory_parts(plan).values()) == pytest.approx(plan.estimate.peak_bytes, rel=1e-9)


def test_styles_tell_parts_apart() -> None:
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_permute")
    keys = ["compute", "hbm", *(f"{kind} {axes}" for kind in kinds for axes in ("x", "y", "x*y"))]
    styles = step_styles(reversed(keys))
    assert list(styles) == keys
    assert len({(style.colour, style.stripes) for style in styles.values()}) == len(keys)


def test_rows_group_what_is_split_alike() -> None:
    def fn(layers: list[Any], x: jax.Array) -> tuple[list[Any], jax.Array]:
        for layer in layers:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return layers, x

    layers = [{"b": _float(64), "w": _float(64, 64)} for _ in range(3)]
    spec = {"b": P("data"), "w": P(None, "data")}
    plan = autoshard.evaluate(
        fn, layers, _float(32, 64), topology="v3:2x2", mesh={"data": 8}, in_specs=(spec_of(spec, 3), P())
    )
    rows = {row.pattern: row for row in argument_rows(plan)}
    weights = rows["[0..2]['w']"]
    assert (weights.count, weights.array, weights.spec) == (3, "f32[64,64]", "P(None, 'data')")
    assert weights.device_bytes == 3 * 8 * 128 * 4  # 64 x 8 lies on its side, padded to tiles of 8 x 128
    results, alike = result_rows(plan)
    assert alike + sum(row.count for row in results) == len(plan.outputs)


def spec_of(layer: Mapping[str, P], count: int) -> list[Mapping[str, P]]:
    return [layer] * count
