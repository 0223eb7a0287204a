"""What one TPU device can do, read from `cost_models/hardware/<generation>.toml`.

Every other module of this layer takes a `Chip`; none of them holds a hardware number of its own. A device
is what JAX lists in `jax.devices()`: on v2, v3 and v7x that is one TensorCore, half of a chip, with its own
HBM; on v4 and v5p it is a whole two-core chip; on v5e and v6e chip and core are the same thing.
"""

import dataclasses
import functools
import pathlib
import tomllib
from collections.abc import Iterator
from typing import Any

__all__ = ["Chip", "UnknownChipError", "chip", "chips", "load_chip"]

_FOLDER = pathlib.Path(__file__).parent / "hardware"
_ORDER = ("v2", "v3", "v4", "v5e", "v5p", "v6e", "v7x")
_ALIASES = {"tpu7x": "v7x", "v5litepod": "v5e", "v5lite": "v5e", "v5": "v5p", "v6": "v6e", "v7": "v7x"}


class UnknownChipError(ValueError):
    """A generation was named that has no data file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Figures of one TPU generation, per device as JAX sees it, in SI units.

    Attributes:
        name: generation, such as `"v3"`; also the stem of the data file.
        compiler_name: what the TPU compiler calls the generation in a topology name.
        device_kind: what JAX calls a device of the generation.
        devices_per_chip: JAX devices on one chip; they share the chip's inter-chip links.
        clock_hz: TensorCore clock.
        matmul_flops_per_second: dense bfloat16 peak (a multiply-add counts two).
        int8_ops_per_second: dense int8 peak; 0 where the matrix unit has no int8 mode.
        fp8_flops_per_second: dense float8 peak; 0 where the matrix unit has no float8 mode.
        matmul_efficiency: fraction of the peak that large square matrix products reach (fitted).
        mxu_dim: rows and columns of one systolic array.
        mxu_count: systolic arrays per device.
        vector_flops_per_second: float32 elementwise operations per second.
        hbm_bytes_per_second: nominal HBM bandwidth.
        hbm_efficiency: fraction of it that long streams reach (fitted).
        hbm_capacity_bytes: HBM that a program may use, after the system's reserve.
        vmem_bytes: on-core vector memory.
        kernel_overhead_seconds: time of an op that has next to nothing to do.
        torus_rank: number of physical axes, 2 or 3.
        pod_dims: chips per axis of the largest machine, x first.
        wrap_rule: which axes of a slice close into a ring: `"pod"` (those as long as the pod's), `"cube"`
            (all, if every axis is a multiple of 4), `"length16"` (axes of 16).
        slices: shapes in which the generation is offered, x first, ascending in chips.
        link_bytes_per_second: one inter-chip link in one direction, as large transfers see it.
        line_efficiency: fraction of it that a one-axis collective reaches on an axis without wraparound.
        core_link_bytes_per_second: link between two devices of a chip in one direction; 0 if there is one.
        hop_latency_seconds: one hop between neighbouring chips.
        collective_start_seconds: fixed time of any collective.
        reduce_scatter_axes: mesh axes that a reduce-scatter may span; over more the compiler runs an all-reduce
            and keeps a part.
        async_collectives: kinds of collectives that the compiler runs beside kernels by default.
        lanes: minor dimension of a memory tile, in elements.
        sublanes: rows of a full memory tile.
        min_tile_rows: second-minor dimension of the smallest tile of 32-bit elements.

    """

    name: str
    compiler_name: str
    device_kind: str
    devices_per_chip: int
    clock_hz: float
    matmul_flops_per_second: float
    int8_ops_per_second: float
    fp8_flops_per_second: float
    matmul_efficiency: float
    mxu_dim: int
    mxu_count: int
    vector_flops_per_second: float
    hbm_bytes_per_second: float
    hbm_efficiency: float
    hbm_capacity_bytes: int
    vmem_bytes: int
    kernel_overhead_seconds: float
    torus_rank: int
    pod_dims: tuple[int, ...]
    wrap_rule: str
    slices: tuple[tuple[int, ...], ...]
    link_bytes_per_second: float
    line_efficiency: float
    core_link_bytes_per_second: float
    hop_latency_seconds: float
    collective_start_seconds: float
    reduce_scatter_axes: int
    async_collectives: tuple[str, ...]
    lanes: int
    sublanes: int
    min_tile_rows: int

    def __hash__(self) -> int:
        """Hash the name alone: a chip is part of the key of every cache here, and has many fields."""
        return hash(self.name)

    def __str__(self) -> str:
        return self.name


def load_chip(path: pathlib.Path) -> Chip:
    """Read one data file.

    Args:
        path: a TOML file in which every field of `Chip` but `name` is a table `{value, unit, source, date}`.

    Returns:
        The chip, named after the file's stem.

    Raises:
        ValueError: listing all fields that are missing, unknown, or lack one of the four keys.

    """
    with path.open("rb") as stream:
        tables: dict[str, Any] = tomllib.load(stream)
    wanted = [field.name for field in dataclasses.fields(Chip) if field.name != "name"]
    faults = [f"{name}: missing" for name in wanted if name not in tables]
    faults += [f"{name}: unknown" for name in tables if name not in wanted]
    for name, table in tables.items():
        keys = set(table) if isinstance(table, dict) else set()
        faults += [f"{name}: no {key}" for key in ("value", "unit", "source", "date") if key not in keys]
    if faults:
        raise ValueError(f"{path.name} does not describe a chip: {'; '.join(faults)}.")
    return Chip(name=path.stem, **{name: _frozen(tables[name]["value"]) for name in wanted})


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


@functools.cache
def _load(name: str) -> Chip:
    return load_chip(_FOLDER / f"{name}.toml")


def chips() -> Iterator[Chip]:
    """Iterate over the known generations, oldest first.

    >>> [chip.name for chip in chips()]
    ['v2', 'v3', 'v4', 'v5e', 'v5p', 'v6e', 'v7x']
    """
    return (_load(name) for name in _ORDER)


def chip(name: str) -> Chip:
    """Find a generation by name.

    Args:
        name: such as `"v3"`; case, a leading `"TPU "` and the compiler's own names (`"tpu7x"`) are accepted.

    Returns:
        The chip's figures; the same object at every call.

    Raises:
        UnknownChipError: naming all known generations.

    >>> chip("v3").devices_per_chip
    2
    >>> chip("tpu7x").name
    'v7x'

    """
    plain = name.strip().lower().removeprefix("tpu ").strip()
    plain = _ALIASES.get(plain, plain)
    if plain not in _ORDER:
        raise UnknownChipError(
            f"Unknown TPU generation {name!r}. Known generations: "
            f"{', '.join(_ORDER)} (v7x is also called tpu7x)."
        )
    return _load(plain)
