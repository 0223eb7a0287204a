"""Small programs that XLA's partitioner computes wrongly or refuses: the records behind docs/xla.md.

Every record holds a function, its arguments, a mesh and shardings, with even splits only. tests/test_xla.py checks that
XLA still fails and that our program, given the same, is right. `python -m tests.xla_cases` prints the page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

__all__ = ["CASES", "Case", "page"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A function under shardings that XLA fails on.

    `refused` holds part of XLA's message where it makes no program; else its numbers are wrong.
    """

    code: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    mesh: Mapping[str, int]
    ins: tuple[P, ...]
    out: P
    what: str
    refused: str = ""


def _count(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.arange(1, 1 + np.prod(shape)).reshape(shape).astype(dtype)


def _correlated(x: jax.Array, g: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, g, (1,), [(1, 1)], dimension_numbers=("CWN", "IWO", "NWC"))


def _convolved(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


def _pooled(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (3,), (1,), [(1, 1)])


CUBE = {"a": 2, "b": 2, "c": 2}
SQUARE = {"a": 2, "b": 2}
CASES = {
    "product": Case(
        code="x[4,2] @ w[2,2]",
        fn=lambda x, w: x @ w,
        args=(_count(4, 2), _count(2, 2)),
        mesh=CUBE,
        ins=(P(None, "c"), P("c")),
        out=P(("b", "a"), "c"),
        what="A product whose sums over `c` are scattered over `c` while rows are split otherwise: the partitioner"
        " permutes the devices of the left operand and does not permute the result back.",
    ),
    "filter_gradient": Case(
        code="conv(x[C=1,W=4,N=1], g[I=1,W=4,O=1], padding=1)",
        fn=_correlated,
        args=(_count(1, 4, 1), _count(1, 4, 1)),
        mesh=SQUARE,
        ins=(P(None, "a"), P(None, "a")),
        out=P(),
        what="The gradient of a filter over a split image: the parts are summed over all devices, not over `a` only,"
        " so that the sum is as many times too large as there are copies.",
    ),
    "convolution": Case(
        code="conv(x[N=2,W=8,C=1], w[W=3,I=1,O=2], SAME)",
        fn=_convolved,
        args=(_count(2, 8, 1), _count(3, 1, 2)),
        mesh=SQUARE,
        ins=(P(None, "a"), P(None, None, "b")),
        out=P(None, "a", "b"),
        what="A convolution split over space along one axis and over features along another.",
    ),
    "slice": Case(
        code="lax.slice(x[4], (3,), (4,), (5,))",
        fn=lambda x: lax.slice(x, (3,), (4,), (5,)),
        args=(_count(4),),
        mesh={"a": 4},
        ins=(P("a"),),
        out=P(),
        what="A slice with a stride, along a split dim: another element.",
    ),
    "slice_refused": Case(
        code="lax.slice(x[4], (3,), (4,), (3,))",
        fn=lambda x: lax.slice(x, (3,), (4,), (3,)),
        args=(_count(4),),
        mesh=SQUARE,
        ins=(P(("a", "b")),),
        out=P(),
        what="The same with another stride: the partitioner makes a program that XLA's verifier refuses.",
        refused="hlo verifier",
    ),
    "pad": Case(
        code="lax.pad(x[2], 0, [(1, 0, 1)])",
        fn=lambda x: lax.pad(x, np.float32(0), [(1, 0, 1)]),
        args=(_count(2),),
        mesh={"a": 2},
        ins=(P(),),
        out=P("a"),
        what="A pad between elements whose result is split: elements stand at other places. The gradient of a strided"
        " slice, and so the gradient of `associative_scan`, holds such pads.",
    ),
    "pad_refused": Case(
        code="lax.pad(x[1], 0, [(1, 2, 3)])",
        fn=lambda x: lax.pad(x, np.float32(0), [(1, 2, 3)]),
        args=(_count(1),),
        mesh={"a": 2},
        ins=(P(),),
        out=P("a"),
        what="The same with more zeros: refused by the verifier.",
        refused="hlo verifier",
    ),
    "pool_gradient": Case(
        code="vjp(max_pool(x[8], window=3))",
        fn=lambda x, t: jax.vjp(_pooled, x)[1](t)[0],
        args=(jnp.asarray([3.0, 1, 4, 1, 5, 9, 2, 6]), _count(8)),
        mesh={"a": 2},
        ins=(P("a"), P("a")),
        out=P("a"),
        what="The gradient of pooling by maximum along a split dim: what some windows give is lost.",
    ),
    "bitwise": Case(
        code="lax.reduce_xor(x[4], (0,))",
        fn=lambda x: lax.reduce_xor(x, axes=(0,)),
        args=(_count(4, dtype=jnp.int32),),
        mesh={"a": 2},
        ins=(P("a"),),
        out=P(),
        what="Bitwise reductions across devices: XLA for CPUs has no such all-reduce.",
        refused="Unsupported reduction computation",
    ),
}

_HEAD = """# What XLA's partitioner computes wrongly

`plan.spmd` emits its own collectives; `plan.jit` leaves them to XLA's partitioner, under constraints on the values.
Constraints can not change what a program computes, but XLA's partitioner has errors: these are those of jaxlib 0.10.2 on CPU
devices. They were found by random programs under random shardings (as in tests/test_xla.py) and reduced constraint by
constraint. All occur with even splits, with Shardy and without it (`jax_use_shardy_partitioner=False`). All but *bitwise* are
the partitioner's own: the program that it makes is wrong before any later pass (`--xla_dump_hlo_pass_re=spmd.*`).

tests/xla_cases.py holds these records as programs. tests/test_xla.py fails when an XLA gets one right: remove it then.

| record | function | mesh | operands | result | XLA |
|---|---|---|---|---|---|
"""

_TAIL = """
## What `plan.jit` does about it

- Dims that the windows of pooling and of its gradients slide over stay whole, those of a convolution where its filter or
  features are split, too, and those that a slice cuts with strides or that a pad fills between elements
  (`autoshard.partition.misread`). `plan.spmd` splits them; under `plan.jit` such a plan sends more than estimated, which
  `validate(level="compile")` shows.
- A partial sum is constrained, without the axes that it is partial over, before the constraint that scatters it.

Slices without strides, pads at the ends only, concatenations, tiles, reversals, reshapes, dynamic slices, sorts, top_k and
cumulative ops came out right under all splits that were tried, also uneven ones.

## What remains

Bitwise reductions of split dims do not run on CPU devices. XLA may have errors that no random program has met, and uneven
splits of chains of strided slices and pads, as `associative_scan` makes them, are still refused now and then by the verifier
(1 of 67 random programs of 4 steps).
`validate(level="numerics")` runs both ways of applying a plan and compares them with the original; use `plan.spmd` where
they differ. Ops that `plan.jit` now keeps whole make the partitioner abort the process (`Check failed`) when they are split
by hand: the forward derivative of pooling, pooling of pairs, unevenly, and pads between elements of a split dim.

The starts of dynamic slices and updates are clamped by `autoshard.rules.dynamic` itself: XLA forgets to in some programs.
"""


def page() -> str:
    """Return docs/xla.md."""
    rows, notes = [], []
    for name, case in CASES.items():
        mesh = " ".join(f"{a}={n}" for a, n in case.mesh.items())
        ins = ", ".join(map(_spec, case.ins))
        found = "refuses" if case.refused else "wrong"
        rows.append(f"| {name} | `{case.code}` | {mesh} | {ins} | {_spec(case.out)} | {found} |")
        notes.append(f"- *{name}*: {case.what}")
    return _HEAD + "\n".join(rows) + "\n\n" + "\n".join(notes) + "\n" + _TAIL


def _spec(spec: P) -> str:
    return "`P(" + ", ".join(map(repr, tuple(spec))) + ")`"


if __name__ == "__main__":
    print(page(), end="")
