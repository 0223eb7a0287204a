# ruff: noqa: E501 (HLO text has long lines)
"""Bytes that compiled steps send: reduce-scatters that were not formed, rings, and the page about them."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from autoshard.validate import compile_cpu, export_artifact
from autoshard.validate.collectives import find_collectives
from autoshard.validate.hlo import parse_module
from autoshard.validate.loops import schedule
from autoshard.validate.traffic import Sent, sent, sent_by_kind
from benchmarks.partition import LED, OURS, XLA, Row, geometric_mean, page

MESH = {"x": 4}

HEAD = """\
HloModule step, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%cut (p: f32[64,32], i: s32[]) -> f32[32,16] {
  %p = f32[64,32]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %own = f32[16,32]{1,0} dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={16,32}
  ROOT %turned = f32[32,16]{1,0} transpose(%own), dimensions={1,0}
}

ENTRY %main (x: f32[64,32], y: f32[64,32]) -> f32[16,32] {
  %x = f32[64,32]{1,0} parameter(0)
  %y = f32[64,32]{1,0} parameter(1)
  %me = u32[] partition-id()
  %number = s32[] convert(%me)
  %rows = s32[] constant(16)
  %start = s32[] multiply(%number, %rows)
  %none = s32[] constant(0)
"""
ONE = "  %total = f32[64,32]{1,0} all-reduce(%x), replica_groups=[1,4]<=[4], to_apply=%add\n"
TWO = """\
  %both = (f32[64,32]{1,0}, f32[64,32]{1,0}) all-reduce(%x, %y), replica_groups=[1,4]<=[4], to_apply=%add
  %first = f32[64,32]{1,0} get-tuple-element(%both), index=0
  %second = f32[64,32]{1,0} get-tuple-element(%both), index=1
"""
ROOT = "  ROOT %out = f32[16,32]{1,0} broadcast(%none)\n}\n"
FULL = 4 * 64 * 32


def sliced(body: str) -> int:
    module = parse_module(HEAD + body + ROOT)
    (found,) = find_collectives(module, schedule(module), MESH)
    return found.sliced_bytes


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (ONE, 0),
        (
            ONE
            + "  %own = f32[16,32]{1,0} dynamic-slice(%total, %start, %none), dynamic_slice_sizes={16,32}\n",
            FULL,
        ),
        (ONE + "  %own = f32[32,16]{1,0} fusion(%total, %start), kind=kLoop, calls=%cut\n", FULL),
        (ONE + "  %own = f32[32,16]{1,0} fusion(%total, %none), kind=kLoop, calls=%cut\n", 0),
        (
            ONE
            + "  %half = f32[32,32]{1,0} dynamic-slice(%total, %start, %none), dynamic_slice_sizes={32,32}\n",
            0,
        ),
        (
            ONE
            + "  %own = f32[16,32]{1,0} dynamic-slice(%total, %start, %none), dynamic_slice_sizes={16,32}\n"
            + "  %more = f32[64,32]{1,0} negate(%total)\n",
            0,
        ),
        (TWO + "  %own = f32[32,16]{1,0} fusion(%second, %start), kind=kLoop, calls=%cut\n", FULL),
    ],
)
def test_an_all_reduce_that_is_only_sliced_is_a_reduce_scatter(body: str, expected: int) -> None:
    assert sliced(body) == expected


def test_combined_reductions_are_counted_one_by_one() -> None:
    module = parse_module(
        HEAD + TWO + "  %own = f32[32,16]{1,0} fusion(%first, %start), kind=kLoop, calls=%cut\n" + ROOT
    )
    found = find_collectives(module, schedule(module), MESH)
    assert sent_by_kind(found) == {
        ("reduce-scatter", ("x",)): FULL * 3 / 4,
        ("all-reduce", ("x",)): 2 * FULL * 3 / 4,
    }


def test_both_partitioners_are_counted_alike() -> None:
    """A sum that stays split is a reduce-scatter per trip, whether we write it or XLA an all-reduce and slices."""
    mesh = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))
    rows, trips = 64, 5
    scales = jnp.arange(trips, dtype=jnp.float32)

    def ours(x: Any) -> Any:
        def step(total: Any, scale: Any) -> tuple[Any, None]:
            return total + jax.lax.psum_scatter(jnp.sin(x * scale), "x", scatter_dimension=1, tiled=True)[
                0
            ], None

        return jax.lax.scan(step, jnp.zeros(rows // 4), scales)[0]

    def global_(x: Any) -> Any:
        def step(total: Any, scale: Any) -> tuple[Any, None]:
            part = jax.lax.with_sharding_constraint(jnp.sin(x * scale).sum(0), P("x"))
            return jax.lax.with_sharding_constraint(total + part, P("x")), None

        return jax.lax.scan(step, jnp.zeros(rows), scales)[0]

    mapped: Any = jax.shard_map(ours, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    shape = jax.ShapeDtypeStruct((4, rows), jnp.float32)
    for function in (mapped, global_):
        artifact = export_artifact(
            function, (shape,), platform="cpu", mesh=mesh, in_shardings=(P("x"),), out_shardings=P("x")
        )
        found = sent_by_kind(compile_cpu(artifact).collectives)
        assert found == {("reduce-scatter", ("x",)): trips * 4 * rows * 3 / 4}


def _part(kind: str, size: float, op_name: str = "jit(f)/r7/all_gather") -> Sent:
    return Sent(kind=kind, axes=("x",), bytes=size, op_name=op_name, source="/home/me/zoo/model.py:3")


def test_the_page_explains_rows_above_the_limit() -> None:
    rows = [
        Row(
            program="net",
            plan="fsdp",
            mesh={"x": 4},
            sent={OURS: (_part("all-gather", mine),), XLA: (_part("all-reduce", 4e6),), LED: ()},
            sources={7: "/home/me/benchmarks/net.py:12"},
        )
        for mine in (4e6, 16e6)
    ]
    assert [row.ratio(XLA) for row in rows] == [1.0, 4.0]
    assert rows[0].reason == ""
    assert (
        rows[1].reason
        == "+16 MB all-gather over x (most at net.py:12); -4 MB all-reduce over x (most at model.py:3)"
    )
    assert geometric_mean([row.ratio(XLA) for row in rows]) == pytest.approx(2.0)
    assert "| net | fsdp | x=4 | 16 MB | 4 MB | 4.000 | 0 B | inf |" in page(rows, "a compiler")


def test_nothing_sent_is_nothing() -> None:
    assert list(sent(())) == [] and sent_by_kind(()) == {}
