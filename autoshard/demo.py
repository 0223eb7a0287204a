"""The whole path on one real program: `python -m autoshard.demo`.

An 8-billion-parameter Transformer train step, with no sharding anywhere in it, is planned for 64 TPU v3 chips
(128 cores), held against the ways in which people shard by hand, compiled for that slice by the TPU compiler,
and then a small sibling trains under the same specs on eight virtual CPU devices, equal to the unsharded run.
No TPU is needed. It takes two to four minutes on two CPU cores, most of it in the compiler.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.plan import Plan
from autoshard.planner import evaluate, suggest
from autoshard.report.text import plan_text
from autoshard.validate.process import is_libtpu_available
from autoshard.validate.report import validate
from autoshard.validate.validation import Table
from autoshard.zoo import dense

__all__ = ["main"]

TOPOLOGY = "v3:8x8"
MESH = {"data": 8, "model": 16}
SMALL_MESH = {"data": 2, "model": 4}
_RTOL = 1e-5
_STEPS = 3
_WIDTH = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Args:
      argv: the command line without the program; `--fast` leaves code generation out of the compilation.

    Returns:
      The exit code: 0 if everything agrees, else 1.
    """
    parser = argparse.ArgumentParser(prog="python -m autoshard.demo", description=__doc__)
    parser.add_argument("--fast", action="store_true", help="leave code generation out of the compilation")
    options = parser.parse_args(argv)
    # Before JAX looks for devices.
    configure: Any = jax.config.update
    configure("jax_platforms", "cpu")
    configure("jax_num_cpu_devices", int(np.prod(list(SMALL_MESH.values()))))

    started = time.perf_counter()
    plan = _plan()
    _baselines(plan)
    compiled = _compile(plan, fast=options.fast)
    equal = _train_small(plan)
    _heading("Done")
    _say(
        f"{time.perf_counter() - started:.0f} s. The plan "
        + ("compiles as predicted" if compiled else "does not compile as predicted")
        + ", and training under it "
        + ("equals" if equal else "differs from")
        + " the unsharded run."
    )
    return 0 if compiled and equal else 1


def _heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


def _say(text: str) -> None:
    import textwrap

    print(textwrap.fill(text, _WIDTH), flush=True)


def _plan() -> Plan:
    config = dense.PRESETS["8b"]
    fn, args = dense.train_step(config)
    _heading(f"1. A plan for an unannotated train step on {TOPOLOGY}")
    _say(
        f"{dense.parameter_count(config) / 1e9:.1f} billion parameters, {len(jax.tree.leaves(args))} arrays in"
        f" all, {config.layers} layers under jax.lax.scan, {config.batch} sequences of {config.seq} tokens, Adam;"
        f" 128 cores as the mesh {MESH}. Nothing is allocated: the arguments are shapes."
    )
    start = time.perf_counter()
    plan = suggest(fn, *args, topology=TOPOLOGY, mesh=MESH, donate_argnums=dense.DONATE)
    _say(f"Planned in {time.perf_counter() - start:.1f} s.")
    print()
    print(plan_text(plan, model_flops=dense.model_flops(config), timings=True), flush=True)
    return plan


def _baselines(plan: Plan) -> None:
    from autoshard.baselines import baselines
    from autoshard.compare import compare

    config = dense.PRESETS["8b"]
    fn, args = dense.train_step(config)
    _heading("2. Beside the ways in which people shard by hand")
    plans = {
        "suggested": plan,
        **baselines(fn, *args, topology=TOPOLOGY, mesh=MESH, donate_argnums=dense.DONATE),
    }
    frame = compare(plans, model_flops=dense.model_flops(config))
    rows = [
        (
            str(name),
            float(row["step_ms"]),
            float(row["compute_ms"]),
            float(row["hbm_ms"]),
            float(row["exposed_communication_ms"]),
            float(row["mfu"]),
            float(row["peak_gib"]),
            bool(row["fits"]),
        )
        for name, row in sorted(frame.iterrows(), key=lambda item: float(item[1]["step_ms"]))
    ]
    limit = f"{plan.memory_limit_bytes / 2**30:.2f}"
    columns = ("plan", "step ms", "compute ms", "HBM ms", "ICI ms", "MFU", "peak GiB", f"fits {limit} GiB")
    milliseconds = dict.fromkeys(columns[1:5], "{:,.0f}")
    table = Table(
        title="predicted, of a step; each is completed by the same search at the same prices",
        columns=columns,
        rows=tuple(rows),
        formats={**milliseconds, "MFU": "{:.1%}", "peak GiB": "{:,.2f}"},
    )
    print(table, flush=True)


def _compile(plan: Plan, *, fast: bool) -> bool:
    fn, args = dense.train_step(dense.PRESETS["8b"])
    _heading(f"3. Compiled for {TOPOLOGY} by the TPU compiler")
    if not is_libtpu_available():
        _say('Left out: libtpu is not installed. It needs no TPU: pip install "autoshard[tpu]"')
        return True
    _say(
        "plan.jit is the function under jax.jit with the plan's shardings and constraints, partitioned by XLA."
        + ("" if fast else " Compiling it to machine code takes a minute or two ...")
    )
    xla = validate(plan, fn, args, platforms=("tpu",), partitioners=("xla",), full_compile=not fast)
    print(f"\n{xla}\n", flush=True)
    _say("plan.spmd is the same plan as autoshard's own per-device program, with explicit collectives:")
    own = validate(plan, fn, args, platforms=("tpu",), partitioners=("autoshard",))
    sorts = sorted({text.split(" (")[0].split(": ", 1)[1] for text in own.differences})
    print(f"\n{own.tables['memory']}\n", flush=True)
    _say(f"It {'agrees' if own.ok else 'FAILS'}; the compiler's differences: {'; '.join(sorts) or 'none'}.")
    for text in own.failures:
        _say(text)
    return xla.ok and own.ok


def _train_small(plan: Plan) -> bool:
    config = dense.scaled_down(dense.PRESETS["8b"])
    fn, shapes = dense.train_step(config)
    _heading("4. A small sibling trains under the same specs on eight virtual CPU devices")
    small = evaluate(
        fn, *shapes, topology="v3", mesh=SMALL_MESH, in_specs=plan.in_specs, name="of the same specs"
    )
    kinds = {c.kind for c in small.estimate.collectives}
    _say(
        f"The same program with {config.layers} layers of width {config.d_model}, in float32, on the mesh"
        f" {SMALL_MESH}, each array split as in the plan above; its step runs"
        f" {len(small.estimate.collectives)} collectives of {len(kinds)} kinds. Real numbers, {_STEPS} steps:"
    )
    params = dense.init(config, jax.random.key(0))
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = {"count": jnp.zeros((), jnp.int32), "m": zeros, "v": zeros}
    tokens = jax.random.randint(jax.random.key(1), (config.batch, config.seq + 1), 0, config.vocab)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    runs = {"unsharded": jax.jit(fn), "plan.jit": small.jit(fn), "plan.spmd": small.spmd(fn)}
    results = {name: _train(run, params, state, batch) for name, run in runs.items()}
    reference = results["unsharded"]
    rows, equal = [], True
    for name, (losses, weights) in results.items():
        farthest = _farthest(weights, reference[1])
        equal = equal and farthest <= _RTOL and np.allclose(losses, reference[0], rtol=_RTOL)
        rows.append((name, *losses, farthest))
    table = Table(
        title="loss before each step, and the updated parameter that is farthest from the unsharded run's",
        columns=("run", *(f"loss {i + 1}" for i in range(_STEPS)), "farthest parameter"),
        rows=tuple(rows),
        formats={f"loss {i + 1}": "{:.6f}" for i in range(_STEPS)} | {"farthest parameter": "{:.1e}"},
    )
    print(f"\n{table}", flush=True)
    _say(f"Equal within {_RTOL:g} of each array's largest magnitude." if equal else "NOT equal.")
    return equal


def _train(run: Any, params: Any, state: Any, batch: Any) -> tuple[list[float], Any]:
    """Take the steps; return the losses, and the parameters after the last."""
    losses = []
    for _ in range(_STEPS):
        params, state, loss = run(params, state, batch)
        losses.append(float(loss))
    return losses, params


def _farthest(weights: Any, reference: Any) -> float:
    """Largest difference between two trees of arrays, each relative to its array's largest magnitude."""
    pairs = zip(jax.tree.leaves(weights), jax.tree.leaves(reference), strict=True)
    return max(
        float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max()) for a, b in pairs
    )


if __name__ == "__main__":
    sys.exit(main())
