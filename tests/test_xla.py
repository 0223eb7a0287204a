"""XLA's partitioner: the errors that are recorded, and programs that are led around them."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

import autoshard
from autoshard.partition.emitter import constrained
from autoshard.plan import Plan
from tests.helpers.programs import random_program
from tests.helpers.running import (
    MESHES,
    QUICK,
    cpu_mesh,
    differences,
    random_decisions,
    run,
    session_of,
)
from tests.xla_cases import CASES, Case, page

PAGE = Path(__file__).parent.parent / "docs" / "xla.md"
# All-reduces of these do not run on CPU devices (record "bitwise"), nor do Fourier transforms in some memory layouts.
NOT_ON_CPU = frozenset({"reduce_and", "reduce_or", "reduce_xor", "fft"})


def _xla(case: Case) -> Any:
    mesh = cpu_mesh(case.mesh)
    ins = tuple(NamedSharding(mesh, spec) for spec in case.ins)
    program = jax.jit(case.fn, in_shardings=ins, out_shardings=NamedSharding(mesh, case.out))
    return program.lower(*case.args).compile(compiler_options=QUICK)(*case.args)


def _plan(case: Case) -> Plan:
    given = {f"[{i}]": spec for i, spec in enumerate(case.ins)} | {"out": case.out}
    return autoshard.suggest(case.fn, *case.args, topology="v3", mesh=case.mesh, annotations=given)


@pytest.mark.parametrize("name", CASES)
def test_xla_still_fails(name: str) -> None:
    case = CASES[name]
    fixed = f"XLA gets {name!r} right now: remove the record, and what autoshard.partition does about it if it was the last"
    if case.refused:
        with pytest.raises(jax.errors.JaxRuntimeError, match=case.refused):
            _xla(case)
            pytest.fail(fixed)
    else:
        assert differences([_xla(case)], [case.fn(*case.args)]), fixed


@pytest.mark.parametrize("name", CASES)
def test_a_plan_for_the_same_shardings_is_right(name: str) -> None:
    case = CASES[name]
    plan, expected = _plan(case), [case.fn(*case.args)]
    assert not differences([plan.spmd(case.fn)(*case.args)], expected)
    assert not differences([plan.jit(case.fn)(*case.args)], expected)


def test_the_page_lists_the_records() -> None:
    assert PAGE.read_text() == page(), "python -m tests.xla_cases > docs/xla.md"


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(s, marks=pytest.mark.slow) for s in range(4, 40))]
)
def test_xla_led_by_constraints_equals_the_original(seed: int) -> None:
    """Under any splits; ops that do not run on CPU devices are left out."""
    made = random_program(seed, most=4)
    rng = np.random.default_rng(seed)
    mesh = MESHES[int(rng.integers(len(MESHES)))]
    session = session_of(made.fn, made.args, mesh)
    ops = {op.name for group in session.source.block.walk() for op in group.ops}
    if ops & NOT_ON_CPU:
        pytest.skip(f"not on CPU devices: {sorted(ops & NOT_ON_CPU)}")
    decisions = random_decisions(session.source.block, mesh, rng)
    led = constrained(session.source.block, decisions, session.resharder, cpu_mesh(mesh))
    assert not differences(run(led, jax.tree.leaves(made.args)), made.expected), (made.names, mesh)
