"""Refuses to run when another module hides `cost_models` or `search`.

Both are plain import names, so a user's own `search.py` next to a script comes before ours on the import
path, and would fail much later with an AttributeError about a name that the user never wrote.
`autoshard/__init__.py` calls `check_import_names` before it imports either; nothing is imported to find out.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

__all__ = ["NAMES", "check_import_names"]

NAMES = ("cost_models", "search")
"""The top-level packages that are installed beside `autoshard`."""


def check_import_names(names: Sequence[str] = NAMES, *, beside: Path | None = None) -> None:
    """Check that each of `names` is, or would be imported as, the package beside `autoshard`.

    Args:
        names: top-level packages to check.
        beside: folder that holds them; by default the one that holds `autoshard`.

    Raises:
        ImportError: another module has the name, or none does. The message names its path, ours, and the
            cure, for all offenders at once.

    Example:
        >>> check_import_names()

    """
    root = Path(__file__).parent.parent if beside is None else beside
    faults = [fault for name in names if (fault := _fault(name, root / name))]
    if faults:
        raise ImportError("\n".join(faults))


def _fault(name: str, ours: Path) -> str | None:
    found, imported = _locate(name)
    if found is None:
        return (
            f"autoshard needs its package {name!r} at {ours}, and no module of that name can be found: "
            "the installation is incomplete; install autoshard again."
        )
    if _same(found, str(ours)):
        return None
    state = "has already been imported from" if imported else "would be imported from"
    return (
        f"autoshard needs its own package {name!r} at {ours}, but the name {state} {found}, which hides it. "
        f"Rename that file or folder, or take its folder off the import path: run from another directory, "
        f"or with `python -P` (PYTHONSAFEPATH=1)."
    )


def _locate(name: str) -> tuple[str | None, bool]:
    """Return the folder of package `name`, or the file if it is a module, and whether it is imported."""
    if name in sys.modules:
        return _path_of(sys.modules[name]), True
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None, False
    return _first(spec.submodule_search_locations) or spec.origin or "an unknown place", False


def _path_of(module: ModuleType) -> str:
    """Return where an imported module is from; a module made by hand has neither path nor file."""
    folder = _first(getattr(module, "__path__", None))
    return folder or getattr(module, "__file__", None) or "an unknown place (it has no file)"


def _first(folders: object) -> str | None:
    # a namespace package's path is iterable and no list; ours is a regular package with one folder
    return next(iter(folders), None) if hasattr(folders, "__iter__") else None


def _same(found: str, ours: str) -> bool:
    return os.path.normcase(os.path.realpath(found)) == os.path.normcase(os.path.realpath(ours))
