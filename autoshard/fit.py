"""Where a program would fit: the smallest slice with a plan within the memory of its devices.

Asked when nothing fits a given slice, so the answer has to be cheap: slices whose devices could not even hold
an even share of the arguments are skipped, and each other one is tried on a single mesh, the given one grown.
Several of the largest slice come after all single ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import cost_models as cm
from autoshard.plan import Plan
from autoshard.program import value_bytes
from autoshard.session import Source

__all__ = ["PlanOn", "grown", "smallest_fitting_slice"]

PlanOn = Callable[[cm.Topology, Mapping[str, int], float], Plan]
"""Makes the plan to judge a slice by: of the slice, the mesh, and the seconds that it may take."""


def smallest_fitting_slice(
    source: Source,
    topology: cm.Topology,
    mesh: Mapping[str, int],
    plan_on: PlanOn,
    *,
    memory_limit_bytes: float,
    time_limit_seconds: float = 30.0,
) -> tuple[str, dict[str, int]] | None:
    """Find the smallest slice of a generation on which a program fits.

    Args:
      source: the traced program.
      topology: the slice or slices that were too small; the generation and its figures are kept.
      mesh: axis name to size on that slice; larger slices get it grown.
      plan_on: makes a plan for a slice and a mesh, within the seconds given.
      memory_limit_bytes: HBM of one device that a plan may use.
      time_limit_seconds: of the whole search.

    Returns:
      The slice's name and the mesh that the program fits with; None when no slice was found in time.
    """
    least = least_bytes(source)
    deadline = time.monotonic() + time_limit_seconds
    devices = math.prod(mesh.values())
    for offered in cm.larger(topology.chip.name, devices):
        candidate = offered.with_chip(topology.chip)
        if least / candidate.num_devices > memory_limit_bytes:
            continue
        larger = grown(mesh, candidate.num_devices)
        if larger == dict(mesh):
            continue
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        plan = plan_on(candidate, larger, left)
        if plan.estimate.peak_bytes <= memory_limit_bytes:
            return str(candidate), larger
    return None


def least_bytes(source: Source) -> float:
    """Bytes of the arguments, each stored once: no plan holds less on all devices together."""
    return sum(value_bytes(v.shape, v.dtype) for v in source.block.inputs)


def grown(mesh: Mapping[str, int], devices: int) -> dict[str, int]:
    """Grow a mesh by the largest whole factor that `devices` hold, its smaller axes first.

    >>> grown({"data": 8, "model": 16}, 512)
    {'data': 32, 'model': 16}
    """
    sizes = dict(mesh)
    for prime in _primes(devices // math.prod(mesh.values())):
        axis = min(sizes, key=lambda a: sizes[a])
        sizes[axis] *= prime
    return sizes


def _primes(number: int) -> list[int]:
    """Prime factors, largest first."""
    found, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return found[::-1]
