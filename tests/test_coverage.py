"""Every primitive has a rule or a stated treatment, and the page that says so is current."""

import jax
import numpy as np
import pytest

from autoshard.rules import families
from autoshard.rules.elementwise import NARY, UNARY
from autoshard.trace import trace
from tests.helpers import coverage
from tests.helpers.elementwise import CALLS, Operands, everything, operands
from tests.helpers.running import MESHES, differences, random_decisions, run_spmd, session_of


def test_no_primitive_of_the_census_is_opaque() -> None:
    opaque = families["<opaque>"].name
    rows = {row.primitive: row for row in coverage.rows()}
    assert not [name for name in coverage.census() if rows[name].family == opaque]


def test_every_family_says_how_it_is_partitioned() -> None:
    assert not [row.primitive for row in coverage.rows() if not row.how]


def test_the_page_is_current() -> None:
    assert coverage.PAGE.read_text() == coverage.page(), "run `make coverage`"


@pytest.mark.parametrize("name", CALLS)
def test_a_call_binds_its_primitive(name: str) -> None:
    jaxpr = jax.make_jaxpr(lambda *arrays: CALLS[name](Operands(*arrays)))(*operands((2, 3)))
    assert name in str(jaxpr)


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
def test_elementwise_ops_split_at_random(seed: int) -> None:
    arrays = operands((6, 5), seed)
    names = {op.name for op in trace(everything, arrays).program.walk()}
    assert names >= set(CALLS) - {"stop_gradient"}
    rng = np.random.default_rng(seed)
    mesh = MESHES[seed]
    session = session_of(everything, arrays, mesh)
    decisions = random_decisions(session.source.block, mesh, rng)
    assert not differences(run_spmd(session, decisions, arrays), everything(*arrays), rtol=1e-4)


def test_elementwise_ops_without_a_call_are_few() -> None:
    """JAX gives no public way to bind these, or XLA none to compile them for several CPU devices (mulhi)."""
    rare = {"bitcast", "layout_constraint", "mulhi", "philox2x32", "philox4x32", "random_gamma_grad"}
    rare |= {"reciprocal", "threefry4x32"}
    assert set(UNARY + NARY) - set(CALLS) == rare
