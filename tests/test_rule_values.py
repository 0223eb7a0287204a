"""Ops of every kind: their rule as text, and the op under splits of every factor of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.choices import assignments
from autoshard.grouping import PARTIAL
from autoshard.partition.emitter import Decisions
from autoshard.rules import Assignment, ShardingRule, rule_of
from autoshard.trace import trace
from tests.helpers.golden import CASES, Case
from tests.helpers.running import differences, run_spmd, session_of, whole_decisions
from tests.test_rules import CASES as NAMED

MESH = {"a": 2, "b": 2}
WASTE = 100.0  # every split counts, however much padding it makes


def _ids(cases: list[Any]) -> list[str]:
    return [f"{i}-{case[0]}" for i, case in enumerate(cases)]


@pytest.mark.parametrize("case", CASES, ids=_ids(CASES))
def test_a_rule_reads_as_expected(case: Case) -> None:
    op = [op for op in trace(case.fn, case.args).program.walk() if op.name == case.name][-1]
    rule = rule_of(op)
    assert str(rule) == case.text
    assert ShardingRule.parse(case.text, rule.sizes) == rule


def _splits(rule: ShardingRule) -> list[Assignment]:
    """Nothing split, each factor by one axis and by both, and two factors at once."""
    options = [a for a in assignments(rule, MESH, WASTE) if PARTIAL not in a]
    alone = [a for a in options if len(a) == 1 and ("a",) not in a.values()]
    return [{}, *alone, *[a for a in options if len(a) == 2][:3]]


def _check(case: Case) -> None:
    session = session_of(case.fn, case.args, MESH)
    expected = jax.tree.leaves(case.fn(*case.args))
    items = [g for g in session.source.block.walk() if any(op.name == case.name for op in g.ops)]
    whole = whole_decisions(session.source.block)
    for split in _splits(items[-1].rule):
        groups = {**whole.assignments, items[-1]: split}
        decisions = Decisions(assignments=groups, layouts=whole.layouts, outputs=whole.outputs)
        assert not differences(run_spmd(session, decisions, case.args), expected, rtol=1e-4), split


@pytest.mark.parametrize("case", CASES, ids=_ids(CASES))
def test_an_op_computes_the_same_however_it_is_split(case: Case) -> None:
    _check(case)


def _array(arg: Any, seed: int) -> Any:
    """Make an array of an abstract one: small integers that point into any dim of more than one."""
    if not isinstance(arg, jax.ShapeDtypeStruct):
        return arg
    if jnp.issubdtype(arg.dtype, jax.dtypes.prng_key):
        impl = "rbg" if "rbg" in str(arg.dtype) else "threefry2x32"
        return jax.random.split(jax.random.key(seed, impl=impl), arg.shape)
    rng = np.random.default_rng(seed)
    low, high = (0, 2) if jnp.issubdtype(arg.dtype, jnp.integer) else (-3, 4)
    return jnp.asarray(rng.integers(low, high, arg.shape), arg.dtype)


@pytest.mark.parametrize("case", NAMED, ids=_ids(NAMED))
def test_an_op_named_by_its_rule_computes_the_same_however_it_is_split(case: Any) -> None:
    name, fn, args, text = case
    _check(Case(name, fn, tuple(_array(a, i) for i, a in enumerate(args)), text))
