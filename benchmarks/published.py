"""Predicted beside published step times: writes docs/published.md.

Each row of published.toml is a train step that somebody ran and told the time of: a model, a slice, a mesh, and the
shardings of parameters and activations. The step is written by the zoo, constrained as the row says, completed and
priced (`autoshard.evaluate`); nothing is fitted to a row. Run it as `make published`; `--rows v5p,lingvo` picks those
whose name or source holds one of the words.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import autoshard
import cost_models as cm
from autoshard import Plan
from autoshard.estimate import Entry
from autoshard.zoo import dense

DATA = Path(__file__).with_suffix(".toml")
MEAN_LIMIT, WORST_LIMIT = 0.10, 0.25
"""What the errors of step time should stay within."""
_NOT_MODEL = frozenset("name source model scheme kernel program topology mesh note".split())
_PUBLISHED = ("seconds", "tokens_per_second", "tflops_per_device")
Axes = Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published step; `program` says of what: training, "forward" or "decode".

    `parameters` and `activations` list the mesh axes that split each dim, of those that the mesh has, and `overrides`
    those of single activations; `blocks` are
    the block sizes of the attention kernel, None where attention is plain. `seconds` is what was published, or
    follows from it.
    """

    name: str
    source: str
    config: dense.DenseConfig
    program: str
    topology: str
    mesh: Mapping[str, int]
    parameters: Axes
    activations: Axes
    overrides: Mapping[str, Axes]
    blocks: Mapping[str, Any] | None
    seconds: float
    note: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """A row beside its plan."""

    row: Row
    plan: Plan

    @property
    def error(self) -> float:
        """Predicted over published step time, less one."""
        return float(self.plan.step_seconds / self.row.seconds - 1)

    @property
    def attention(self) -> float:
        """Seconds of attention kernels."""
        return sum(e.seconds for e in self._kernels if e.title == "pallas_call")

    @property
    def products(self) -> float:
        """Seconds of other kernels with a product in them."""
        return sum(e.seconds for e in self._kernels if e.cost.matrix_seconds) - self.attention

    @property
    def rest(self) -> float:
        """Seconds of kernels without."""
        return sum(e.seconds for e in self._kernels if not e.cost.matrix_seconds)

    @property
    def wire(self) -> float:
        """Seconds of all collectives."""
        return float(sum(e.seconds for e in self.plan.estimate.entries if e.kind == "collective"))

    @property
    def exposed(self) -> float:
        """Seconds by which the collectives make the step longer."""
        return float(self.plan.step_seconds) - self.attention - self.products - self.rest

    @property
    def _kernels(self) -> list[Entry]:
        return [e for e in self.plan.estimate.entries if e.kind != "collective"]


def rows(path: Path = DATA) -> list[Row]:
    """Read the rows of a file.

    Raises:
      ValueError: a row does not say one published figure.
    """
    data = tomllib.loads(path.read_text())
    return [_row(entry, data) for entry in data["rows"]]


def _row(entry: Mapping[str, Any], data: Mapping[str, Any]) -> Row:
    sizes = {k: v for k, v in entry.items() if k not in _NOT_MODEL and k not in _PUBLISHED}
    sizes = {
        k: tuple(v) if isinstance(v, list) else v for k, v in (data["models"][entry["model"]] | sizes).items()
    }
    config = dense.DenseConfig(name=entry["model"], **sizes)
    scheme, mesh = data["schemes"][entry["scheme"]], entry["mesh"]

    def present(axes: Axes) -> Axes:
        return {dim: [a for a in names if a in mesh] for dim, names in axes.items()}

    return Row(
        name=entry["name"],
        source=entry["source"],
        config=config,
        program=entry.get("program", "train"),
        topology=entry["topology"],
        mesh=mesh,
        parameters=present(scheme["parameters"]),
        activations=present(scheme["activations"]),
        overrides={label: present(axes) for label, axes in scheme.get("overrides", {}).items()},
        blocks=data["kernels"][entry["kernel"]] if "kernel" in entry else None,
        seconds=_seconds(entry, config),
        note=entry.get("note", ""),
    )


def _seconds(entry: Mapping[str, Any], config: dense.DenseConfig) -> float:
    given = [key for key in _PUBLISHED if key in entry]
    if len(given) != 1:
        raise ValueError(
            f"row {entry['name']!r} gives {given or 'nothing'}; give one of {', '.join(_PUBLISHED)}"
        )
    value = float(entry[given[0]])
    if given[0] == "tokens_per_second":
        return config.batch * config.seq / value
    if given[0] == "tflops_per_device":
        devices = math.prod(int(n) for n in entry["mesh"].values())
        return dense.model_flops(config) / (value * 1e12 * devices)
    return value


def spec(dims: Sequence[str], axes: Axes) -> PartitionSpec:
    """Return the spec of an array whose dims have these names.

    >>> spec(("batch", "seq", "model"), {"batch": ["x"], "model": ["y"]})
    PartitionSpec('x', None, 'y')

    """
    return PartitionSpec(*(tuple(axes.get(dim, ())) or None for dim in dims))


def plan_of(row: Row) -> Plan:
    """Write the step, constrain it as the row says, complete it and price it."""
    mesh = AbstractMesh(
        tuple(row.mesh.values()), tuple(row.mesh), axis_types=(AxisType.Auto,) * len(row.mesh)
    )

    def placed(label: str) -> PartitionSpec:
        return spec(dense.ACTIVATION_DIMS[label], {**row.activations, **row.overrides.get(label, {})})

    def name(x: jax.Array, label: str) -> jax.Array:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, placed(label)))
        # The kernel names its own results: what is saved is what its backward pass reads.
        return x if label == "context" and row.blocks is not None else checkpoint_name(x, label)

    attend = dense.causal_attention
    if row.blocks is not None:
        attend = jax.shard_map(
            functools.partial(_splash, blocks=row.blocks),
            mesh=mesh,
            in_specs=tuple(placed(label) for label in ("query", "key", "value")),
            out_specs=placed("context"),
            check_vma=False,
        )
    parameters = jax.tree.map(
        lambda dims: spec(dims, row.parameters),
        dense.weight_dims(row.config),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    fn, args, in_specs, donated = _program(row, parameters, name, attend)
    return autoshard.evaluate(
        fn,
        *args,
        topology=row.topology,
        mesh=row.mesh,
        in_specs=in_specs,
        donate_argnums=donated,
        name=row.name,
    )


def _program(row: Row, parameters: Any, name: Any, attend: Any) -> tuple[Any, Any, Any, tuple[int, ...]]:
    """Return the function, its arguments, their specs, and which of them are donated."""
    batch = spec(("batch",), row.activations)
    if row.program == "decode":
        kept = spec(("layers", "batch"), row.overrides.get("key", row.activations))
        return (
            *dense.decode_step(row.config, name=name),
            (parameters, {"k": kept, "v": kept}, batch, None),
            (1,),
        )
    if row.program == "forward":
        return *dense.forward(row.config, name=name, attend=attend), (parameters, batch), ()
    moments = {"count": None, "m": parameters, "v": parameters}
    state = None if row.config.optimizer == "adafactor" else moments
    step = dense.train_step(row.config, name=name, attend=attend)
    return *step, (parameters, state, batch), dense.DONATE


def _splash(q: jax.Array, k: jax.Array, v: jax.Array, *, blocks: Mapping[str, Any]) -> jax.Array:
    """Attend by the public kernel for TPUs, from q [B, S, N, D] to k and v [B, S, K, D]."""
    _, seq, heads, size = q.shape
    kernel = splash.make_splash_mha(
        mask=masks.MultiHeadMask([masks.CausalMask((seq, seq))] * heads),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=splash.BlockSizes(**blocks),
        residual_checkpoint_name="context",
    )
    q, k, v = (x.swapaxes(1, 2) for x in (q * size**-0.5, k, v))
    context: jax.Array = jax.vmap(kernel)(q, k, v)
    return context.swapaxes(1, 2)


def refused(row: Row) -> str:
    """Return why the slice cannot be had, or nothing."""
    try:
        cm.Topology.parse(row.topology)
    except cm.TopologyError as error:
        return str(error).partition(". ")[0]
    return ""


_INTRODUCTION = """\
# Predicted beside published step times

Written by `make published{asked}`. Each row is a step that was run and published (`benchmarks/published.toml`), with
its model, mesh and shardings; the prediction comes from the cost model alone, and nothing is fitted to a row.
Seconds of a step: *serial* with nothing overlapped, *attention* the attention kernels, *products* other kernels with a
matrix product, *rest* all other kernels, *wire* all collectives and, of these, what is *exposed* in the step.
"""


def page(results: Sequence[Result], left_out: Mapping[str, str], asked: str) -> str:
    """Write the tables."""
    lines = [
        _INTRODUCTION.format(asked=asked),
        "| step | slice | mesh | published | predicted | error | serial | attention | products | rest | wire | exposed"
        " | peak GiB |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for r in results:
        mesh = " x ".join(f"{a} {n}" for a, n in r.row.mesh.items())
        figures = [r.plan.estimate.serial_seconds, r.attention, r.products, r.rest, r.wire, r.exposed]
        peak = f"{r.plan.estimate.peak_bytes / 2**30:.1f}{'' if r.plan.fits else ' (too much)'}"
        lines.append(
            f"| {r.row.name} | {r.row.topology} | {mesh} | {_short(r.row.seconds)} | {_short(r.plan.step_seconds)}"
            f" | {100 * r.error:+.1f} % | " + " | ".join(map(_short, figures)) + f" | {peak} |"
        )
    lines += ["", *summary(results)]
    if notes := [f"- {r.row.name}: {r.row.note}." for r in results if r.row.note]:
        lines += ["", "Notes:", "", *notes]
    if left_out:
        lines += ["", "Left out:", "", *(f"- {name}: {why}." for name, why in left_out.items())]
    return "\n".join(lines) + "\n"


def _short(seconds: float) -> str:
    """Seconds to a hundredth, or to three digits where that is finer."""
    return f"{seconds:.2f}" if seconds >= 1 or not seconds else f"{seconds:.3g}"


def summary(results: Sequence[Result]) -> list[str]:
    """The figures over all rows."""
    if not results:
        return ["No rows."]
    errors = [abs(r.error) for r in results]
    worst = max(results, key=lambda r: abs(r.error))
    return [
        f"- Mean absolute error {100 * statistics.fmean(errors):.1f} % (goal {100 * MEAN_LIMIT:.0f} %), over"
        f" {len(results)} steps.",
        f"- Worst {100 * worst.error:+.1f} % (goal {100 * WORST_LIMIT:.0f} %): {worst.row.name}.",
        f"- Within 10 %: {sum(e <= 0.1 for e in errors)} of {len(results)}.",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Predict, print progress and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rows", default="", help="words of names or sources, with commas; all rows when left out"
    )
    parser.add_argument("--output", type=Path, default=Path("docs/published.md"))
    options = parser.parse_args(argv)
    words = [w for w in options.rows.split(",") if w]
    wanted = [r for r in rows() if not words or any(w in r.name or w in r.source for w in words)]
    started = time.perf_counter()
    results, left_out = [], {}
    for row in wanted:
        if why := refused(row):
            left_out[row.name] = why
            continue
        begun = time.perf_counter()
        result = Result(row=row, plan=plan_of(row))
        results.append(result)
        print(
            f"{row.name}: published {_short(row.seconds)} s, predicted {_short(result.plan.step_seconds)} s"
            f" ({100 * result.error:+.1f} %); {time.perf_counter() - begun:.1f} s",
            flush=True,
        )
    options.output.write_text(page(results, left_out, f" ROWS={options.rows}" if words else ""))
    print("\n".join(summary(results)))
    print(f"{options.output}: {len(results)} rows in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
