"""Hypothesis looks for a program, a mesh and shardings under which the partitioned program computes something else.

`make fuzz N=10000` looks longer, on all cores.
"""

import os
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from autoshard.partition.emitter import constrained
from tests.helpers.drawn import Drawn
from tests.helpers.programs import random_program
from tests.helpers.running import (
    MESHES,
    cpu_mesh,
    differences,
    random_decisions,
    run,
    run_spmd,
    session_of,
)

EXAMPLES = int(os.environ.get("AUTOSHARD_FUZZ", "500"))
SEED = int(os.environ.get("AUTOSHARD_FUZZ_SEED", "0"))
PARTS = max(10, EXAMPLES // 100)
# One program in so many is also compiled by XLA's partitioner under the same shardings.
XLA_EVERY = 5
_seen = 0


def check(data: Any) -> None:
    """Draw a program and a split of it, and compare."""
    global _seen
    _seen += 1
    if _seen % 50 == 0:
        jax.clear_caches()
    rng = Drawn(data)
    made = random_program(rng, most=12)
    mesh = MESHES[rng.integers(len(MESHES))]
    session = session_of(made.fn, made.args, mesh)
    decisions = random_decisions(session.source.block, mesh, rng)
    note(f"steps {made.names}\nmesh {mesh}\n{session.source.traced.program}")
    note("\n".join(f"{g}: {dict(a)}" for g, a in decisions.assignments.items()))
    note(f"layouts {decisions.layouts}\noutputs {decisions.outputs}")
    wrong = differences(run_spmd(session, decisions, made.args), made.expected)
    assert not wrong, (made.names, mesh, wrong)
    if rng.integers(XLA_EVERY) == XLA_EVERY - 1:
        led = constrained(session.source.block, decisions, session.resharder, cpu_mesh(mesh))
        wrong = differences(run(led, jax.tree.leaves(made.args)), made.expected)
        assert not wrong, ("XLA", made.names, mesh, wrong)


@pytest.mark.parametrize("part", range(PARTS))
def test_partitioned_programs_equal_the_original(part: int) -> None:
    @seed(SEED + part)
    @settings(
        max_examples=-(-EXAMPLES // PARTS),
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
