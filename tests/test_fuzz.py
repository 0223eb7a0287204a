"""Hypothesis looks for a program, a mesh and shardings under which the partitioned program computes something else.

`make fuzz N=10000` looks longer, on all cores.
"""

import os
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from tests.helpers.drawn import Drawn
from tests.helpers.programs import random_program
from tests.helpers.running import MESHES, differences, random_decisions, run_each, session_of

EXAMPLES = int(os.environ.get("AUTOSHARD_FUZZ", "500"))
SEED = int(os.environ.get("AUTOSHARD_FUZZ_SEED", "0"))
PARTS = max(10, EXAMPLES // 100)
SPLITS = 4  # of every program, compiled together
_seen = 0


def check(data: Any) -> None:
    """Draw a program, a mesh and some splits, and compare."""
    global _seen
    _seen += 1
    if _seen % 50 == 0:
        jax.clear_caches()
    rng = Drawn(data)
    made = random_program(rng, most=12)
    mesh = MESHES[rng.integers(len(MESHES))]
    session = session_of(made.fn, made.args, mesh)
    splits = [random_decisions(session.source.block, mesh, rng) for _ in range(SPLITS)]
    note(f"steps {made.names}\nmesh {mesh}\n{session.source.traced.program}")
    for decisions, found in zip(splits, run_each(session, splits, made.args), strict=True):
        wrong = differences(found, made.expected)
        if wrong:
            note("\n".join(f"{g}: {dict(a)}" for g, a in decisions.assignments.items()))
            note(f"layouts {decisions.layouts}\noutputs {decisions.outputs}")
        assert not wrong, (made.names, mesh, wrong)


@pytest.mark.parametrize("part", range(PARTS))
def test_partitioned_programs_equal_the_original(part: int) -> None:
    @seed(SEED + part)
    @settings(
        max_examples=-(-EXAMPLES // (PARTS * SPLITS)),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
    )
    @given(st.data())
    def run(data: Any) -> None:
        check(data)

    run()
