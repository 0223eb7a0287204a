"""What one TPU or GPU device can do, read from `cost_models/hardware/<generation>.toml`.

Every other module of this layer takes a `Chip`; none of them holds a hardware number of its own. A device
is what JAX lists in `jax.devices()`: on v2, v3 and v7x that is one TensorCore, half of a chip, with its own
HBM; on v4 and v5p it is a whole two-core chip; on v5e and v6e chip and core are the same thing, as on a GPU.

A GPU has the same fields. A node of GPUs is a slice whose one axis only numbers the devices on its switch, and
InfiniBand between nodes takes the place of the data centre network (DCN) between slices.
"""

import dataclasses
import functools
import json
import pathlib
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["Chip", "UnknownChipError", "chip", "chip_tables", "chip_text", "chips", "load_chip"]

_FOLDER = pathlib.Path(__file__).parent / "hardware"
_ORDER = ("v2", "v3", "v4", "v5e", "v5p", "v6e", "v7x", "a100", "h100", "h200")
_ALIASES = {"tpu7x": "v7x", "v5litepod": "v5e", "v5lite": "v5e", "v5": "v5p", "v6": "v6e", "v7": "v7x"}


class UnknownChipError(ValueError):
    """A generation was named that has no data file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Figures of one generation, per device as JAX sees it, in SI units.

    Attributes:
        name: generation, such as `"v3"`; also the stem of the data file.
        compiler_name: what the TPU compiler calls the generation in a topology name, XLA a GPU's architecture.
        device_kind: what JAX calls a device of the generation.
        platform: `"tpu"` or `"gpu"`.
        devices_per_chip: JAX devices on one chip; they share the chip's inter-chip links.
        clock_hz: clock of the matrix units.
        matmul_flops_per_second: dense bfloat16 peak (a multiply-add counts two).
        int8_ops_per_second: dense int8 peak; 0 where the matrix unit has no int8 mode.
        fp8_flops_per_second: dense float8 peak; 0 where the matrix unit has no float8 mode.
        matmul_efficiency: fraction of the peak that large square matrix products reach (fitted).
        f32_passes: time of a float32 product over that of a bfloat16 one, at default, high and highest precision.
        mxu_dim: rows and columns of one systolic array; on a GPU, the granularity of its tiles.
        mxu_count: systolic arrays per device, or as many as make a GPU's peak.
        vector_flops_per_second: float32 elementwise operations per second.
        hbm_bytes_per_second: nominal HBM bandwidth.
        hbm_efficiency: fraction of it that long streams reach (fitted).
        narrow_result_bytes: bytes that an element of 1 or 2 bytes takes where a product leaves it, if more (fitted).
        hbm_capacity_bytes: HBM that a program may use, after the system's reserve.
        vmem_bytes: on-core vector memory; on a GPU, the shared memory of all its SMs.
        kernel_overhead_seconds: time of an op that has next to nothing to do.
        torus_rank: number of physical axes: 2 or 3, 1 on a GPU.
        pod_dims: chips per axis of the largest machine, x first.
        wrap_rule: which axes of a slice close into a ring: `"pod"` (those as long as the pod's), `"cube"`
            (all, if every axis is a multiple of 4), `"length16"` (axes of 16); or `"switch"` (there are no links
            between neighbours: every device has one link to a switch that joins them all).
        slices: shapes in which the generation is offered, x first, ascending in chips.
        link_bytes_per_second: one inter-chip link in one direction, as large transfers see it.
        line_efficiency: fraction of it that a one-axis collective reaches on an axis without wraparound.
        joint_efficiency: fraction of their links' rate that several axes reach when a collective uses them together.
        core_link_bytes_per_second: link between two devices of a chip in one direction; 0 if there is one.
        hop_latency_seconds: one hop between neighbouring chips, or one pass through a switch.
        collective_start_seconds: fixed time of any collective.
        dcn_bytes_per_second: a chip's share of the network between slices, in one direction, nominal.
        dcn_efficiency: fraction of it that large transfers reach.
        dcn_latency_seconds: one pass through that network.
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
    platform: str
    devices_per_chip: int
    clock_hz: float
    matmul_flops_per_second: float
    int8_ops_per_second: float
    fp8_flops_per_second: float
    matmul_efficiency: float
    f32_passes: tuple[float, float, float]
    mxu_dim: int
    mxu_count: int
    vector_flops_per_second: float
    hbm_bytes_per_second: float
    hbm_efficiency: float
    narrow_result_bytes: float
    hbm_capacity_bytes: int
    vmem_bytes: int
    kernel_overhead_seconds: float
    torus_rank: int
    pod_dims: tuple[int, ...]
    wrap_rule: str
    slices: tuple[tuple[int, ...], ...]
    link_bytes_per_second: float
    line_efficiency: float
    joint_efficiency: float
    core_link_bytes_per_second: float
    hop_latency_seconds: float
    collective_start_seconds: float
    dcn_bytes_per_second: float
    dcn_efficiency: float
    dcn_latency_seconds: float
    reduce_scatter_axes: int
    async_collectives: tuple[str, ...]
    lanes: int
    sublanes: int
    min_tile_rows: int

    @property
    def has_switch(self) -> bool:
        """Whether a switch joins the devices of a slice, rather than links between neighbours."""
        return self.wrap_rule == "switch"

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
        ValueError: it is no TOML file; or listing all fields that are missing, unknown, lack one of the four
            keys, or have a value of another type.
        OSError: the file cannot be read.

    """
    tables = _tables(path)
    fields = {field.name: field.type for field in dataclasses.fields(Chip) if field.name != "name"}
    faults = [f"{name}: missing" for name in fields if name not in tables]
    faults += [f"{name}: unknown" for name in tables if name not in fields]
    for name, table in tables.items():
        keys = set(table) if isinstance(table, dict) else set()
        faults += [f"{name}: no {key}" for key in ("value", "unit", "source", "date") if key not in keys]
        if name in fields and "value" in keys and not isinstance(table["value"], _accepted(fields[name])):
            faults.append(f"{name}: {table['value']!r} is of type {type(table['value']).__name__}")
    if faults:
        raise ValueError(f"{path.name} does not describe a chip: {'; '.join(faults)}.")
    return Chip(name=path.stem, **{name: _frozen(tables[name]["value"]) for name in fields})


def _tables(path: pathlib.Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        try:
            return tomllib.load(stream)
        except ValueError as error:
            raise ValueError(f"{path.name} is no TOML file: {error}.") from None


def _accepted(kind: Any) -> Any:
    """Types that TOML may give for a field."""
    return {str: str, int: int, float: (int, float)}.get(kind, list)


def chip_tables(name: str) -> dict[str, dict[str, Any]]:
    """Return what a generation's data file says of each field: value, unit, source, date and maybe a note.

    Args:
        name: as for `chip`.

    Raises:
        UnknownChipError: as `chip`.

    >>> chip_tables("v3")["clock_hz"]["unit"]
    'Hz'

    """
    return _tables(_FOLDER / f"{chip(name).name}.toml")


def chip_text(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Write tables as a data file that `load_chip` reads.

    >>> print(chip_text({"clock_hz": {"value": 9.4e8, "unit": "Hz"}}), end="")
    [clock_hz]
    value = 940000000.0
    unit = "Hz"

    """
    # A number, a text and a list are written alike in JSON and TOML.
    return "\n".join(
        "".join([f"[{name}]\n", *(f"{key} = {json.dumps(value)}\n" for key, value in table.items())])
        for name, table in tables.items()
    )


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


@functools.cache
def _load(name: str) -> Chip:
    return load_chip(_FOLDER / f"{name}.toml")


def chips() -> Iterator[Chip]:
    """Iterate over the known generations: TPUs, then GPUs, oldest first.

    >>> [chip.name for chip in chips()]
    ['v2', 'v3', 'v4', 'v5e', 'v5p', 'v6e', 'v7x', 'a100', 'h100', 'h200']
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
            f"Unknown generation {name!r}. Known generations: {', '.join(_ORDER)} (v7x is also called tpu7x)."
        )
    return _load(plain)
