"""Ops of every kind: their rule as text, and the op under splits of every factor of it."""

import jax
import pytest

from autoshard.choices import assignments
from autoshard.grouping import PARTIAL
from autoshard.partition.emitter import Decisions
from autoshard.rules import Assignment, ShardingRule, rule_of
from autoshard.trace import trace
from tests.helpers.golden import CASES, Case
from tests.helpers.running import differences, run_spmd, session_of, whole_decisions

IDS = [f"{i}-{case.name}" for i, case in enumerate(CASES)]
MESH = {"a": 2, "b": 2}
WASTE = 100.0  # every split counts, however much padding it makes


@pytest.mark.parametrize("case", CASES, ids=IDS)
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


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_an_op_computes_the_same_however_it_is_split(case: Case) -> None:
    session = session_of(case.fn, case.args, MESH)
    expected = jax.tree.leaves(case.fn(*case.args))
    items = [g for g in session.source.block.walk() if any(op.name == case.name for op in g.ops)]
    whole = whole_decisions(session.source.block)
    for split in _splits(items[-1].rule):
        groups = {**whole.assignments, items[-1]: split}
        decisions = Decisions(assignments=groups, layouts=whole.layouts, outputs=whole.outputs)
        assert not differences(run_spmd(session, decisions, case.args), expected, rtol=1e-4), split
