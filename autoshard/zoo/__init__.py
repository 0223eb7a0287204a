"""Workloads to plan: train steps written in plain JAX, as people write them, with no sharding.

`programs()` names the ready-made ones, and each is also a factory for the command line
(`autoshard/zoo/dense.py:dense_8b`). The modules build others: `dense.train_step(dense.DenseConfig(...))`.
Everything returns `(fn, args)`, a function and the shapes of its arguments; nothing is allocated.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from autoshard.zoo import convnet, dense

__all__ = ["Builder", "build", "convnet", "dense", "programs"]

Builder: TypeAlias = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
"""Takes nothing, returns a function and its arguments as trees of `jax.ShapeDtypeStruct`."""


def programs() -> Mapping[str, Builder]:
    """Return the ready-made programs, name -> builder, in the order of families and then of sizes.

    Example:
        >>> list(programs())[:3]
        ['dense_100m', 'dense_1b', 'dense_8b']

    """
    return _PROGRAMS


def build(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Build the program called `name`.

    Args:
        name: a key of `programs()`.

    Returns:
        `(fn, args)`; what the arguments are is told by the family's `train_step`.

    Raises:
        KeyError: there is no such program; the message lists those that there are.

    """
    if name not in _PROGRAMS:
        raise KeyError(f"no program {name!r} in the zoo; choose one of: {', '.join(_PROGRAMS)}")
    return _PROGRAMS[name]()


def _table(*builders: Builder) -> Mapping[str, Builder]:
    table: dict[str, Builder] = {}
    for builder in builders:
        name = getattr(builder, "__name__", repr(builder))
        if name in table:
            raise ValueError(f"two programs in the zoo are called {name!r}; rename one")
        table[name] = builder
    return MappingProxyType(table)


_PROGRAMS = _table(
    dense.dense_100m,
    dense.dense_1b,
    dense.dense_8b,
    dense.dense_64b,
    dense.dense_128b,
    dense.dense_175b,
    dense.dense_256b,
    dense.dense_512b,
    dense.dense_1t,
    convnet.resnet50,
)
