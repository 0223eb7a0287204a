"""Which chips, and so which links, each axis of a logical mesh lies on.

A logical mesh such as `{"data": 8, "model": 16}` is cut into the physical axes of a topology, from the core as
the fastest to the slice as the slowest, by comparing sizes from the fastest axis to the slowest. The result says
for every logical axis which stretches of which physical axes it covers: that is all the collectives' prices
depend on.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping

from cost_models.topology import Topology, larger

__all__ = ["LINE", "MeshError", "Placement", "Segment", "place", "placements"]

LINE = "line"
"""Name of the physical axis of a mesh that is laid along a snake through the slice."""


class MeshError(ValueError):
    """A logical mesh that the slice cannot hold."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of one physical axis that a logical axis covers.

    Attributes:
        axis: `"x"`, `"y"`, `"z"`, `"core"`, `"slice"`, or `"line"` (devices along a snake, cores of a chip
            adjacent, slice after slice).
        size: length of that physical axis.
        extent: positions of it that the logical axis visits.
        stride: distance between two visited positions; so many groups interleave and share links.
        wrapped: whether the visited positions close into a ring.

    >>> print(Segment(axis="x", size=8, extent=4, stride=2, wrapped=False))
    x[4 of 8, stride 2]

    """

    axis: str
    size: int
    extent: int
    stride: int
    wrapped: bool

    def __str__(self) -> str:
        notes = [f"{self.extent} of {self.size}" if self.extent < self.size else f"{self.extent}"]
        notes += [f"stride {self.stride}"] if self.stride > 1 else []
        notes += ["ring"] if self.wrapped else []
        return f"{self.axis}[{', '.join(notes)}]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """A logical mesh laid on a slice.

    Attributes:
        topology: the slice.
        mesh: (name, size) of each logical axis, slowest first.
        segments: per logical axis, the stretches it covers, slowest first; none for an axis of size 1.
        device_order: device id at each position of the mesh, row-major as `mesh.devices.flat`.
        note: what a reader should know: that devices stay idle, that the mesh follows a snake, or "".

    >>> print(place(Topology.parse("v3:8x8"), {"data": 8, "model": 16}))
    v3:8x8: data=8 on y[8]; model=16 on x[8] core[2]

    """

    topology: Topology
    mesh: tuple[tuple[str, int], ...]
    segments: tuple[tuple[Segment, ...], ...]
    device_order: tuple[int, ...]
    note: str = ""

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the logical axes, slowest first."""
        return tuple(name for name, _ in self.mesh)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Size of each logical axis by name."""
        return dict(self.mesh)

    @property
    def num_devices(self) -> int:
        """Devices in the mesh, which may be fewer than in the slice."""
        return math.prod(size for _, size in self.mesh)

    def axis_segments(self, name: str) -> tuple[Segment, ...]:
        """Stretches that one logical axis covers, slowest first.

        Raises:
            KeyError: if the mesh has no such axis.

        """
        return self.segments[self.axis_names.index(name)] if name in self.axis_names else _no_axis(self, name)

    def __hash__(self) -> int:
        return hash((self.topology.dims, self.mesh, self.device_order[1:2], self.note))

    def __str__(self) -> str:
        axes = [
            f"{name}={size} on {' '.join(map(str, segments)) or 'nothing'}"
            for (name, size), segments in zip(self.mesh, self.segments, strict=True)
        ]
        note = f" ({self.note})" if self.note else ""
        return f"{self.topology}: {'; '.join(axes)}{note}"


def place(topology: Topology, mesh: Mapping[str, int]) -> Placement:
    """Lay a logical mesh on a slice in the natural order.

    The last logical axis goes to the fastest physical ones: cores, then x, y, z, then slices. Where sizes do not nest in
    that order, the first of `placements` is taken that does; where none does, the mesh follows a snake
    through the chips.

    Args:
        topology: the slice.
        mesh: size of each logical axis by name, slowest first.

    Returns:
        The placement; its `note` names any departure from the natural order.

    Raises:
        MeshError: if the mesh is empty, has a size below 1, or more devices than the slice.

    >>> print(place(Topology.parse("v3:4x4"), {"data": 2, "model": 16}))
    v3:4x4: data=2 on y[2 of 4, stride 2]; model=16 on y[2 of 4] x[4] core[2]
    >>> print(place(Topology.parse("2*v5e:16x16"), {"data": 32, "model": 16}))
    2*v5e:16x16: data=32 on slice[2] y[16, ring]; model=16 on x[16, ring]
    >>> place(Topology.parse("v3:2x2"), {"data": 5}).note
    'snake through the chips: 5 does not factor along the axes of v3:2x2; 3 of 8 devices idle'

    """
    return _place(topology, tuple(mesh.items()))


def placements(topology: Topology, mesh: Mapping[str, int]) -> Iterator[Placement]:
    """Iterate over the distinct ways to lay a logical mesh on the physical axes.

    They are the permutations of the logical axes over those of the slice; two that give every logical axis
    the same stretches count once.

    Args:
        topology: the slice.
        mesh: size of each logical axis by name, slowest first.

    Yields:
        Placements, the natural one first, in an order that depends on the arguments only.

    Raises:
        MeshError: as `place`.

    >>> for placement in placements(Topology.parse("v5e:4x4"), {"data": 4, "model": 4}):
    ...     print(placement)
    v5e:4x4: data=4 on y[4]; model=4 on x[4]
    v5e:4x4: data=4 on x[4]; model=4 on y[4]

    """
    return iter(_placements(topology, tuple(mesh.items())))


@functools.lru_cache(maxsize=4096)
def _place(topology: Topology, mesh: tuple[tuple[str, int], ...]) -> Placement:
    _check_mesh(topology, mesh)
    cut = next(_assignments(topology, mesh), None)
    return _snake(topology, mesh) if cut is None else _assemble(topology, mesh, cut)


@functools.lru_cache(maxsize=256)
def _placements(topology: Topology, mesh: tuple[tuple[str, int], ...]) -> tuple[Placement, ...]:
    _check_mesh(topology, mesh)
    distinct: dict[tuple[frozenset[tuple[str, int, int]], ...], _Cut] = {}
    for cut in _assignments(topology, mesh):
        distinct.setdefault(tuple(frozenset(cut[name]) for name, _ in mesh), cut)
    return tuple(_assemble(topology, mesh, cut) for cut in distinct.values()) or (_snake(topology, mesh),)


def _check_mesh(topology: Topology, mesh: tuple[tuple[str, int], ...]) -> None:
    text = _show(mesh)
    if not mesh:
        raise MeshError(f"The mesh for {topology} has no axes. Name at least one, such as {{'data': 1}}.")
    below = [f"{name!r} is {size}" for name, size in mesh if size < 1]
    if below:
        raise MeshError(f"The mesh {text} has axes without devices: {', '.join(below)}. Sizes start at 1.")
    wanted = math.prod(size for _, size in mesh)
    if wanted > topology.num_devices:
        cores = topology.chip.devices_per_chip
        each = f" x {cores} cores" if cores > 1 else ""
        raise MeshError(
            f"The mesh {text} needs {wanted} devices, but {topology} has {topology.num_devices} "
            f"({topology.num_chips} chips{each}). {_cure(topology, wanted)}"
        )


def _cure(topology: Topology, wanted: int) -> str:
    enough = next(larger(topology.chip.name, wanted - 1), None)
    if enough is None:
        return f"No {topology.chip.name} slice is large enough: shrink an axis."
    return f"Shrink an axis, or use a larger slice: {enough} has {enough.num_devices}."


_IDLE = "\0idle"

_Cut = dict[str, list[tuple[str, int, int]]]


def _assignments(topology: Topology, mesh: tuple[tuple[str, int], ...]) -> Iterator[_Cut]:
    """Try every order of the logical axes on every order of the physical axes, the natural one first."""
    grid = [(axis, size) for axis, size in topology.grid.items() if size > 1]
    spare, rest = divmod(topology.num_devices, math.prod(size for _, size in mesh))
    if rest:
        return
    empty: _Cut = {name: [] for name, _ in mesh}
    for physical in _natural_first(grid):
        for logical in itertools.permutations((name, size) for name, size in mesh if size > 1):
            # Idle devices are the slowest axis, so that those in use form a compact block.
            cut = _nest(((_IDLE, spare), *logical), physical)
            if cut is not None:
                yield empty | cut


def _natural_first(grid: list[tuple[str, int]]) -> list[tuple[tuple[str, int], ...]]:
    """Order the physical axes' permutations: first those which keep slices and a chip's cores together."""

    def departures(order: tuple[tuple[str, int], ...]) -> tuple[bool, bool]:
        names = [axis for axis, _ in order]
        return "slice" in names[1:], "core" in names[:-1]

    return sorted(itertools.permutations(grid), key=departures)


def _nest(logical: tuple[tuple[str, int], ...], physical: tuple[tuple[str, int], ...]) -> _Cut | None:
    """Split two lists of sizes, slowest first, into common factors; None where they do not nest.

    Both lists have the same product. Returns for each logical axis its (physical axis, extent, stride),
    slowest first.
    """
    cut: _Cut = {name: [] for name, _ in logical}
    left = [size for _, size in logical]
    spare = [size for _, size in physical]
    row, column = len(left) - 1, len(spare) - 1
    while row >= 0:
        if left[row] == 1:
            row -= 1
            continue
        if spare[column] == 1:
            column -= 1
            continue
        extent = min(left[row], spare[column])
        if left[row] % extent or spare[column] % extent:
            return None
        axis, size = physical[column]
        cut[logical[row][0]].insert(0, (axis, extent, size // spare[column]))
        left[row] //= extent
        spare[column] //= extent
    return cut


def _assemble(topology: Topology, mesh: tuple[tuple[str, int], ...], cut: _Cut) -> Placement:
    sizes = topology.grid
    wraps = dict(zip("xyz", topology.wrap, strict=False))
    segments = tuple(
        tuple(
            Segment(
                axis=axis,
                size=sizes[axis],
                extent=extent,
                stride=stride,
                wrapped=wraps.get(axis, False) and extent * stride == sizes[axis],
            )
            for axis, extent, stride in cut[name]
        )
        for name, _ in mesh
    )
    order = _device_order(topology, segments)
    idle = topology.num_devices - len(order)
    return Placement(
        topology=topology,
        mesh=mesh,
        segments=segments,
        device_order=order,
        note=f"{idle} of {topology.num_devices} devices idle" if idle else "",
    )


def _device_order(topology: Topology, segments: tuple[tuple[Segment, ...], ...]) -> tuple[int, ...]:
    step = {}
    width = 1
    for axis, size in reversed(topology.grid.items()):
        step[axis] = width
        width *= size
    order = [0]
    for segment in itertools.chain.from_iterable(segments):
        jump = step[segment.axis] * segment.stride
        order = [base + jump * at for base in order for at in range(segment.extent)]
    return tuple(order)


def _snake(topology: Topology, mesh: tuple[tuple[str, int], ...]) -> Placement:
    """Lay the mesh along a line in which consecutive chips of a slice are neighbours (a boustrophedon)."""
    wanted = math.prod(size for _, size in mesh)
    positions: list[tuple[int, ...]] = [()]
    for size in reversed(topology.dims):
        positions = [
            (at, *rest) if index % 2 == 0 else (size - 1 - at, *rest)
            for index, rest in enumerate(positions)
            for at in range(size)
        ]
    places = itertools.product(range(topology.num_slices), positions, range(topology.chip.devices_per_chip))
    order = tuple(topology.device(position, core, number) for number, position, core in places)[:wanted]
    segments = []
    stride = wanted
    for _, size in mesh:
        stride //= size
        segment = Segment(axis=LINE, size=topology.num_devices, extent=size, stride=stride, wrapped=False)
        segments.append((segment,) if size > 1 else ())
    idle = topology.num_devices - wanted
    product = " x ".join(str(size) for _, size in mesh)
    verb = "does" if len(mesh) == 1 else "do"
    note = f"snake through the chips: {product} {verb} not factor along the axes of {topology}"
    note += f"; {idle} of {topology.num_devices} devices idle" if idle else ""
    return Placement(topology=topology, mesh=mesh, segments=tuple(segments), device_order=order, note=note)


def _no_axis(placement: Placement, name: str) -> tuple[Segment, ...]:
    raise KeyError(f"The mesh {_show(placement.mesh)} has no axis {name!r}.")


def _show(mesh: tuple[tuple[str, int], ...]) -> str:
    return "{" + ", ".join(f"{name!r}: {size}" for name, size in mesh) + "}"
