"""A TPU slice: a grid of chips of one generation, and which of its axes close into rings.

Parsed from a name such as `"v3:4x4"`. Device ids count cores fastest, then x, y, z, which is how JAX numbers
them: `((z * Y + y) * X + x) * cores + core`.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

from cost_models.chip import Chip, UnknownChipError, chip, chips

__all__ = ["Topology", "TopologyError", "slices"]

_AXES = "xyz"
_NAME = re.compile(r"([^:=]+)[:=]\s*(\d+(?:x\d+)*)(?:\s+wrap=(none|[xyz]+))?", re.IGNORECASE)
_PRODUCT = re.compile(r"(?:tpu\s*)?(v\d+[a-z]*|tpu7x)-(\d+)", re.IGNORECASE)
_COUNTS_CORES = ("v2", "v3", "v4", "v5p")


class TopologyError(ValueError):
    """The name or the shape of a slice cannot be one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """A slice of chips on a mesh or torus.

    Attributes:
        chip: figures of one device.
        dims: chips along each physical axis, x first.
        wrap: per axis, whether its last chip is linked to its first; left empty it takes the generation's
            rule. The compiler assumes no wraparound on v2 and v3 unless told, at any size; there a pod's own
            length wraps.

    Raises:
        TopologyError: if the shape has the wrong rank, an axis below 1, or does not fit the pod.

    >>> topology = Topology.parse("v3:4x4")
    >>> topology.num_devices, topology.wrap
    (32, (False, False))
    >>> print(Topology.parse("tpu7x:4x4x8"))
    v7x:4x4x8

    """

    chip: Chip
    dims: tuple[int, ...]
    wrap: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        _check_dims(self.chip, self.dims)
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
            name: `<generation>:<X>x<Y>[x<Z>]`, in chips; optionally followed by ` wrap=` and the wrapped axes
                (`xy`, or `none`) where they differ from the generation's rule.

        Returns:
            The slice.

        Raises:
            TopologyError: with the grammar, examples of every generation, and the closest valid name.

        >>> Topology.parse("v5e:8x16").wrap
        (False, True)
        >>> str(Topology.parse("v3:4x4 wrap=xy"))
        'v3:4x4 wrap=xy'

        """
        match = _NAME.fullmatch(name.strip())
        if match is None:
            raise TopologyError(_explain(name, "it does not follow the grammar", _guess(name)))
        try:
            figures = chip(match[1])
        except UnknownChipError:
            raise TopologyError(
                _explain(name, f"{match[1]!r} is no known generation", _guess(name))
            ) from None
        dims = tuple(int(size) for size in match[2].lower().split("x"))
        wrap: tuple[bool, ...] = ()
        if match[3]:
            wrap = tuple(axis in match[3].lower().replace("none", "") for axis in _AXES[: len(dims)])
        try:
            return cls(chip=figures, dims=dims, wrap=wrap)
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
            f"has {largest.num_devices}. Ask for fewer devices or use several slices."
        )

    @property
    def num_chips(self) -> int:
        """Chips in the slice."""
        return math.prod(self.dims)

    @property
    def num_devices(self) -> int:
        """Devices in the slice, as JAX counts them."""
        return self.num_chips * self.chip.devices_per_chip

    @property
    def is_offered(self) -> bool:
        """Whether the generation is offered in this shape (axes in any order)."""
        return sorted(self.dims) in [sorted(dims) for dims in self.chip.slices]

    def coordinates(self, device: int) -> tuple[tuple[int, ...], int]:
        """Locate a device.

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

    def device(self, position: tuple[int, ...], core: int = 0) -> int:
        """Return the id of a device; the inverse of `coordinates`.

        >>> Topology.parse("v3:4x4").device((1, 1), 1)
        11
        """
        index = 0
        for at, size in zip(reversed(position), reversed(self.dims), strict=True):
            index = index * size + at
        return index * self.chip.devices_per_chip + core

    def __hash__(self) -> int:
        return hash((self.chip.name, self.dims, self.wrap))

    def __str__(self) -> str:
        plain = f"{self.chip.name}:{_by(self.dims)}"
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


def _default_wrap(figures: Chip, dims: tuple[int, ...]) -> tuple[bool, ...]:
    match figures.wrap_rule:
        case "pod":
            # Only a whole pod closes: half a pod's long axis has no documented wraparound.
            return (sorted(dims) == sorted(figures.pod_dims),) * len(dims)
        case "cube":
            return (all(size % 4 == 0 for size in dims),) * len(dims)
        case "length16":
            return tuple(size == 16 for size in dims)
    raise ValueError(f"{figures.name} has the unknown wraparound rule {figures.wrap_rule!r}.")


def _check_dims(figures: Chip, dims: tuple[int, ...]) -> None:
    if len(dims) != figures.torus_rank:
        axes = "two axes, X and Y" if figures.torus_rank == 2 else "three axes, X, Y and Z"
        raise TopologyError(f"{figures.name} slices have {axes}, not {len(dims)}")
    if min(dims) < 1:
        raise TopologyError(f"{_by(dims)} has an axis without chips")
    pod = sorted(figures.pod_dims)
    if any(size > limit for size, limit in zip(sorted(dims), pod, strict=True)):
        raise TopologyError(
            f"{_by(dims)} ({math.prod(dims)} chips) does not fit the {figures.name} pod of "
            f"{_by(figures.pod_dims)} ({math.prod(pod)} chips)"
        )


def _explain(name: str, reason: str, cure: str) -> str:
    examples = ", ".join(f"{each.name}:{_by(each.slices[len(each.slices) // 2])}" for each in chips())
    return (
        f"Cannot read {name!r} as a TPU slice: {reason}. The grammar is <generation>:<X>x<Y>[x<Z>], counted "
        f"in chips; known generations, with examples: {examples}.{cure}"
    )


def _guess(name: str) -> str:
    """Suggest a name for the usual near misses: product names, and a missing or strange separator."""
    product = _PRODUCT.fullmatch(name.strip().lower().replace("litepod", "e"))
    generation = re.match(r"\s*(?:tpu\s*)?(v\d+[a-z]*|tpu7x)", name, re.IGNORECASE)
    if product is not None:
        try:
            figures = chip(product[1])
        except UnknownChipError:
            return ""
        count = int(product[2])
        counts_cores = figures.name in _COUNTS_CORES
        wanted = max(1, count // 2) if counts_cores else count
        unit = "cores" if counts_cores else "chips"
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
    fits = [dims for dims in figures.slices if math.prod(dims) >= num_chips] or [figures.slices[-1]]
    return f" Did you mean '{figures.name}:{_by(fits[0])}'?"


def _by(dims: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in dims)
