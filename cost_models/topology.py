"""Slices of chips of one generation: their grid, and which of its axes close into rings.

Parsed from a name such as `"v3:4x4"`, or `"2*v5e:16x16"` for two slices that talk over the data centre network
(DCN). A node of GPUs is a slice with one axis, `"h100:8"`; `"4*h100:8"` are four nodes. Device ids count cores
fastest, then x, y, z and slices, which is how JAX numbers them:
`(((slice * Z + z) * Y + y) * X + x) * cores + core`.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator

from cost_models.chip import Chip, UnknownChipError, chip, chips

__all__ = ["GRAMMAR", "Topology", "TopologyError", "larger", "slices"]

GRAMMAR = (
    "The grammar is [<slices>*]<generation>:<X>x<Y>[x<Z>], counted in chips, as v3:4x4 or 2*v5e:16x16 (two slices "
    "over DCN), and [<nodes>*]<generation>:<devices> for GPUs, as h100:8 or 4*h100:8"
)
"""How topologies are named, in one sentence without its full stop."""

_AXES = "xyz"
_NAME = re.compile(
    r"(?:(\d+)\s*\*\s*)?([^:=*]+)[:=]\s*(\d+(?:x\d+)*)(?:\s+wrap=(none|[xyz]+))?", re.IGNORECASE
)
_GENERATION = r"(?:tpu\s*)?(v\d+[a-z]*|tpu7x|[a-z]\d{3})"
_PRODUCT = re.compile(rf"{_GENERATION}-(\d+)", re.IGNORECASE)
_COUNTS_CORES = ("v2", "v3", "v4", "v5p")


class TopologyError(ValueError):
    """The name or the shape of a slice cannot be one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Equal slices of chips, each on a mesh or torus or behind a switch.

    Attributes:
        chip: figures of one device.
        dims: chips of one slice along each physical axis, x first.
        wrap: per axis, whether its last chip is linked to its first; left empty it takes the generation's
            rule. The compiler assumes no wraparound on v2 and v3 unless told, at any size; there a pod's own
            length wraps.
        num_slices: slices, or nodes of GPUs, that talk over DCN.

    Raises:
        TopologyError: if the shape has the wrong rank, an axis below 1, or does not fit the pod, if there is no
            slice, or if axes behind a switch are to wrap.

    >>> topology = Topology.parse("v3:4x4")
    >>> topology.num_devices, topology.wrap
    (32, (False, False))
    >>> print(Topology.parse("tpu7x:4x4x8"))
    v7x:4x4x8

    """

    chip: Chip
    dims: tuple[int, ...]
    wrap: tuple[bool, ...] = ()
    num_slices: int = 1

    def __post_init__(self) -> None:
        _check_dims(self.chip, self.dims)
        if self.num_slices < 1:
            raise TopologyError(f"{self.num_slices} slices are none")
        if self.chip.has_switch and any(self.wrap):
            raise TopologyError(f"{self.chip.name} devices are behind a switch, which has no wraparound")
        if not self.wrap:
            object.__setattr__(self, "wrap", _default_wrap(self.chip, self.dims))
        elif len(self.wrap) != len(self.dims):
            raise TopologyError(
                f"{len(self.wrap)} wraparound flags {self.wrap} given for the {len(self.dims)} axes of "
                f"{self.chip.name}:{_by(self.dims)}. Give one flag per axis, x first."
            )

    @classmethod
    def parse(cls, name: str) -> "Topology":
        """Read a slice's name.

        Args:
            name: `[<slices>*]<generation>:<X>[x<Y>[x<Z>]]`, in chips; optionally followed by ` wrap=` and the
                wrapped axes (`xy`, or `none`) where they differ from the generation's rule.

        Returns:
            The slice or slices.

        Raises:
            TopologyError: with the grammar, examples of every generation, and the closest valid name.

        >>> Topology.parse("v5e:8x16").wrap
        (False, True)
        >>> str(Topology.parse("v3:4x4 wrap=xy"))
        'v3:4x4 wrap=xy'
        >>> Topology.parse("2*v5e:16x16").num_devices
        512

        """
        match = _NAME.fullmatch(name.strip())
        if match is None:
            raise TopologyError(_explain(name, "it does not follow the grammar", _guess(name)))
        try:
            figures = chip(match[2])
        except UnknownChipError:
            raise TopologyError(
                _explain(name, f"{match[2]!r} is no known generation", _guess(name))
            ) from None
        dims = tuple(int(size) for size in match[3].lower().split("x"))
        wrap: tuple[bool, ...] = ()
        if match[4]:
            wrap = tuple(axis in match[4].lower().replace("none", "") for axis in _AXES[: len(dims)])
        try:
            return cls(chip=figures, dims=dims, wrap=wrap, num_slices=int(match[1] or 1))
        except TopologyError as error:
            raise TopologyError(_explain(name, str(error), _closest(figures, math.prod(dims)))) from None

    @classmethod
    def smallest(cls, generation: str, num_devices: int) -> "Topology":
        """Find the smallest slice on offer with enough devices.

        Args:
            generation: such as `"v3"`.
            num_devices: devices wanted, as JAX counts them.

        Returns:
            The slice with the fewest chips that has at least `num_devices`.

        Raises:
            TopologyError: if not even the largest slice has as many.
            UnknownChipError: if the generation is unknown.

        >>> str(Topology.smallest("v3", 33))
        'v3:4x8'

        """
        largest = None
        for largest in slices(generation):
            if largest.num_devices >= num_devices:
                return largest
        assert largest is not None
        raise TopologyError(
            f"{num_devices} devices were asked for, but the largest {largest.chip.name} slice, {largest}, "
            f"has {largest.num_devices}. Ask for fewer devices or use several slices, such as "
            f"{dataclasses.replace(largest, num_slices=-(-num_devices // largest.num_devices))}."
        )

    def with_chip(self, figures: Chip) -> "Topology":
        """Return the same slice with other figures of its generation, such as calibrated ones.

        Args:
            figures: of a device of the generation; they may come from a file of any name (see `load_chip`).

        Raises:
            TopologyError: the figures are of another generation, or do not allow the slice.

        >>> faster = dataclasses.replace(chip("v3"), hbm_efficiency=0.95)
        >>> Topology.parse("v3:4x4").with_chip(faster).chip.hbm_efficiency
        0.95

        """
        if figures.device_kind != self.chip.device_kind:
            raise TopologyError(
                f"{self} has devices of the kind {self.chip.device_kind!r}, and the figures {figures.name!r} are of "
                f"{figures.device_kind!r}. Give figures of {self.chip.name}, or a slice of the other generation."
            )
        return dataclasses.replace(self, chip=dataclasses.replace(figures, name=self.chip.name))

    @property
    def num_chips(self) -> int:
        """Chips in all slices."""
        return math.prod(self.dims) * self.num_slices

    @property
    def num_devices(self) -> int:
        """Devices in all slices, as JAX counts them."""
        return self.num_chips * self.chip.devices_per_chip

    @property
    def grid(self) -> dict[str, int]:
        """Length of each physical axis, slowest first, as device ids count them; there may be axes of length 1.

        >>> Topology.parse("2*v3:4x8").grid
        {'slice': 2, 'y': 8, 'x': 4, 'core': 2}

        """
        inner = [*zip(_AXES, self.dims, strict=False)][::-1]
        return {"slice": self.num_slices, **dict(inner), "core": self.chip.devices_per_chip}

    @property
    def is_offered(self) -> bool:
        """Whether the generation is offered in this shape (axes in any order)."""
        return sorted(self.dims) in [sorted(dims) for dims in self.chip.slices]

    def coordinates(self, device: int) -> tuple[tuple[int, ...], int]:
        """Locate a device in its slice.

        Args:
            device: id, 0 to `num_devices - 1`.

        Returns:
            The chip's position, x first, and the core on it.

        >>> Topology.parse("v3:4x4").coordinates(11)
        ((1, 1), 1)

        """
        rest, core = divmod(device, self.chip.devices_per_chip)
        position = []
        for size in self.dims:
            rest, at = divmod(rest, size)
            position.append(at)
        return tuple(position), core

    def slice_of(self, device: int) -> int:
        """Return the number of the slice that a device is in.

        >>> Topology.parse("2*v3:4x4").slice_of(32)
        1
        """
        return device * self.num_slices // self.num_devices

    def device(self, position: tuple[int, ...], core: int = 0, slice_number: int = 0) -> int:
        """Return the id of a device; the inverse of `coordinates` and `slice_of`.

        >>> Topology.parse("v3:4x4").device((1, 1), 1)
        11
        """
        index = slice_number
        for at, size in zip(reversed(position), reversed(self.dims), strict=True):
            index = index * size + at
        return index * self.chip.devices_per_chip + core

    def __hash__(self) -> int:
        return hash((self.chip.name, self.dims, self.wrap, self.num_slices))

    def __str__(self) -> str:
        copies = f"{self.num_slices}*" if self.num_slices > 1 else ""
        plain = f"{copies}{self.chip.name}:{_by(self.dims)}"
        if self.wrap == _default_wrap(self.chip, self.dims):
            return plain
        axes = "".join(axis for axis, wraps in zip(_AXES, self.wrap, strict=False) if wraps)
        return f"{plain} wrap={axes or 'none'}"


@functools.cache
def _slices(generation: str) -> tuple[Topology, ...]:
    figures = chip(generation)
    return tuple(Topology(chip=figures, dims=dims) for dims in figures.slices)


def slices(generation: str) -> Iterator[Topology]:
    """Iterate over the slices in which a generation is offered, fewest chips first.

    >>> [str(topology) for topology in slices("v2")]
    ['v2:2x2', 'v2:4x4', 'v2:8x8', 'v2:8x16', 'v2:16x16']
    """
    return iter(_slices(chip(generation).name))


def larger(generation: str, num_devices: int) -> Iterator[Topology]:
    """Iterate over what has more devices: offered slices first, then 2, 4, ... 64 of the largest.

    Args:
        generation: such as `"v3"`.
        num_devices: devices that do not suffice, as JAX counts them.

    >>> [str(topology) for topology in larger("h100", 4)][:3]
    ['h100:8', '2*h100:8', '4*h100:8']

    """
    single = _slices(chip(generation).name)
    several = (dataclasses.replace(single[-1], num_slices=2**power) for power in range(1, 7))
    return (each for each in itertools.chain(single, several) if each.num_devices > num_devices)


def _default_wrap(figures: Chip, dims: tuple[int, ...]) -> tuple[bool, ...]:
    match figures.wrap_rule:
        case "pod":
            # Only a whole pod closes: half a pod's long axis has no documented wraparound.
            return (sorted(dims) == sorted(figures.pod_dims),) * len(dims)
        case "cube":
            return (all(size % 4 == 0 for size in dims),) * len(dims)
        case "length16":
            return tuple(size == 16 for size in dims)
        case "switch":
            return (False,) * len(dims)
    raise ValueError(f"{figures.name} has the unknown wraparound rule {figures.wrap_rule!r}.")


_RANKS = {1: "one number, their devices", 2: "two axes, X and Y", 3: "three axes, X, Y and Z"}


def _check_dims(figures: Chip, dims: tuple[int, ...]) -> None:
    whole = "node" if figures.has_switch else "slice"
    if len(dims) != figures.torus_rank:
        raise TopologyError(f"{figures.name} {whole}s have {_RANKS[figures.torus_rank]}, not {len(dims)}")
    if min(dims) < 1:
        raise TopologyError(f"{_by(dims)} has an axis without chips")
    pod = sorted(figures.pod_dims)
    if any(size > limit for size, limit in zip(sorted(dims), pod, strict=True)):
        if figures.has_switch:
            raise TopologyError(
                f"an {figures.name} node has {math.prod(pod)} devices, not {math.prod(dims)}; put several nodes together"
            )
        raise TopologyError(
            f"{_by(dims)} ({math.prod(dims)} chips) does not fit the {figures.name} pod of "
            f"{_by(figures.pod_dims)} ({math.prod(pod)} chips)"
        )


def _explain(name: str, reason: str, cure: str) -> str:
    examples = ", ".join(f"{each.name}:{_by(each.slices[len(each.slices) // 2])}" for each in chips())
    return f"Cannot read {name!r} as a topology: {reason}. {GRAMMAR}; known generations, with examples: {examples}.{cure}"


def _guess(name: str) -> str:
    """Suggest a name for the usual near misses: product names, and a missing or strange separator."""
    product = _PRODUCT.fullmatch(name.strip().lower().replace("litepod", "e"))
    generation = re.match(rf"\s*(?:\d+\s*\*\s*)?{_GENERATION}", name, re.IGNORECASE)
    if product is not None:
        try:
            figures = chip(product[1])
        except UnknownChipError:
            return ""
        count = int(product[2])
        counts_cores = figures.name in _COUNTS_CORES
        wanted = max(1, count // 2) if counts_cores else count
        unit = "cores" if counts_cores else "GPUs" if figures.has_switch else "chips"
        return f" The number in {name.strip()!r} counts {unit}.{_closest(figures, wanted)}"
    if generation is not None:
        try:
            figures = chip(generation[1])
        except UnknownChipError:
            return _neighbour(name[generation.end() :])
        sizes = [int(size) for size in re.findall(r"\d+", name[generation.end() :])]
        return _closest(figures, math.prod(sizes) if sizes else 1)
    return ""


def _neighbour(shape: str) -> str:
    """Suggest the newest generation whose slices have as many axes as the shape."""
    sizes = [int(size) for size in re.findall(r"\d+", shape)]
    fitting = [each for each in chips() if each.torus_rank == len(sizes)]
    return _closest(fitting[-1], math.prod(sizes)) if fitting else ""


def _closest(figures: Chip, num_chips: int) -> str:
    fits = [dims for dims in figures.slices if math.prod(dims) >= num_chips]
    if fits:
        return f" Did you mean '{figures.name}:{_by(fits[0])}'?"
    several = -(-num_chips // math.prod(figures.slices[-1]))
    return f" Did you mean '{several}*{figures.name}:{_by(figures.slices[-1])}'?"


def _by(dims: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in dims)
