"""What a person types on the command line, read into what the API takes.

Every function here raises `InputError` with one paragraph that says what was given, what is wrong with it and
what to type instead.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from jax.sharding import PartitionSpec

import cost_models as cm
from autoshard.errors import AutoshardError, PlanFileError
from autoshard.plan import Plan

__all__ = [
    "InputError",
    "Program",
    "read_annotations",
    "read_chip",
    "read_integers",
    "read_mesh",
    "read_plan",
    "read_program",
    "users_frames",
]

_FRAMES = 4


class InputError(AutoshardError, ValueError):
    """What was typed on the command line cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a factory returned: a function, its arguments, and which of them to donate."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donate_argnums: tuple[int, ...] = ()


# Programs ----------------------------------------------------------------------------------------------


def read_program(reference: str) -> Program:
    """Import a file or module and call a factory in it.

    Args:
      reference: `FILE.py:factory`, or `package.module:factory`.

    Raises:
      InputError: there is no such file or factory, either fails, or the factory returns something else.
    """
    file, _, name = reference.rpartition(":")
    if not file:
        file, name = reference, ""
    module = _module(file)
    choices = _factories(module)
    listed = ", ".join(choices) if choices else "none that can be called without arguments"
    if not name:
        raise InputError(
            f"{reference!r} names no factory. Give FILE.py:factory, with one of those in {file}: {listed}."
        )
    factory = getattr(module, name, None)
    if factory is None:
        raise InputError(f"{file} has no factory {name!r}. There are: {listed}.")
    if not callable(factory):
        raise InputError(
            f"{name} in {file} is of type {type(factory).__name__}, no factory: it should be a function"
            f" without arguments that returns (fn, args). There are: {listed}."
        )
    try:
        result = factory()
    except Exception as error:
        raise InputError(f"The factory {name} in {file} failed:\n{_users_words(error)}") from error
    return _checked(result, name, file)


def _module(file: str) -> ModuleType:
    path = Path(file)
    if path.suffix != ".py" and not path.exists() and re.fullmatch(r"[\w.]+", file):
        try:
            return importlib.import_module(file)
        except ModuleNotFoundError as error:
            if error.name is not None and not file.startswith(error.name):
                raise InputError(f"{file} failed while it was imported:\n{_users_words(error)}") from error
            raise InputError(
                f"There is no file and no module {file!r}. Give FILE.py:factory, or package.module:factory."
            ) from None
        except Exception as error:
            raise InputError(f"{file} failed while it was imported:\n{_users_words(error)}") from error
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise InputError(f"{file} {what}. Give the Python file that holds the factory, as FILE.py:factory.")
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(
            f"{file} is no Python file. Give the one that holds the factory, as FILE.py:factory."
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python FILE.py` has it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{file} failed while it was imported:\n{_users_words(error)}") from error
    return module


def _module_name(path: Path) -> str:
    return "autoshard_input_" + re.sub(r"\W", "_", path.stem)


def _factories(module: ModuleType) -> list[str]:
    """Names of the functions of a module, public and its own, that can be called without arguments."""
    found = []
    for name, value in vars(module).items():
        if name.startswith("_") or not inspect.isfunction(value) or value.__module__ != module.__name__:
            continue
        parameters = inspect.signature(value).parameters.values()
        if all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
            found.append(name)
    return found


def _checked(result: Any, name: str, file: str) -> Program:
    """Read `(fn, args)` or `(fn, args, donate_argnums)`."""
    wanted = (
        "a factory returns (fn, args) or (fn, args, donate_argnums), args a tuple with one entry per argument"
    )
    head = f"The factory {name} in {file} returned"
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        size = f" of {len(result)} entries" if isinstance(result, (tuple, list)) else ""
        raise InputError(f"{head} something of type {type(result).__name__}{size}; {wanted}.")
    fn, args, *more = result
    if not callable(fn):
        raise InputError(
            f"{head} something of type {type(fn).__name__} as fn, which cannot be called; {wanted}."
        )
    if not isinstance(args, (tuple, list)) or hasattr(args, "_fields"):
        raise InputError(f"{head} args of type {type(args).__name__}; {wanted}: (fn, (x,)) for one argument.")
    donated = more[0] if more else ()
    if isinstance(donated, int) and not isinstance(donated, bool):
        donated = (donated,)
    if not isinstance(donated, (tuple, list)) or any(type(i) is not int for i in donated):
        raise InputError(f"{head} {donated!r} as donate_argnums; {wanted}, and donate_argnums whole numbers.")
    return Program(fn=fn, args=tuple(args), donate_argnums=tuple(donated))


def _users_words(error: BaseException) -> str:
    """Write an error of the user's code: its last frames there, and what it says."""
    said = "".join(traceback.format_exception_only(error)).rstrip()
    return "\n".join([*users_frames(error), said])


def users_frames(error: BaseException) -> list[str]:
    """List the last frames of an error in code that is neither ours nor installed, as tracebacks do."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    return [
        line
        for frame in frames[-_FRAMES:]
        for line in (
            f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}',
            *([f"    {frame.line}"] if frame.line else []),
        )
    ]


def _is_users(file: str) -> bool:
    path, ours = Path(file), Path(__file__).parent
    if file.startswith("<") or "site-packages" in path.parts:
        return False
    if ours in path.parents:
        return ours / "zoo" in path.parents
    return Path(sysconfig.get_path("stdlib")) not in path.parents


# Options -----------------------------------------------------------------------------------------------


def read_mesh(text: str | None) -> dict[str, int] | None:
    """Read `data=8,model=4`; None stays None.

    >>> read_mesh("data=8,model=4")
    {'data': 8, 'model': 4}
    """
    if text is None:
        return None
    found: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*(\d+)\s*", part)
        if match is None:
            raise InputError(
                f"--mesh {text!r}: {part.strip()!r} is no axis. Give names and sizes, such as"
                " --mesh data=8,model=4."
            )
        if match[1] in found:
            raise InputError(
                f"--mesh {text!r} names the axis {match[1]!r} twice. Give each axis its own name."
            )
        found[match[1]] = int(match[2])
    return found


def read_integers(text: str | None, option: str) -> tuple[int, ...] | None:
    """Read `0,1`; None stays None, and empty text is no number at all.

    >>> read_integers("0,1", "--donate")
    (0, 1)
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [part for part in parts if not re.fullmatch(r"-?\d+", part)]
    if wrong:
        raise InputError(
            f"{option} {text!r}: {wrong[0]!r} is no number. Give positions, such as {option} 0,1."
        )
    return tuple(map(int, parts))


def read_annotations(texts: Sequence[str]) -> Mapping[str, PartitionSpec]:
    """Read `KEY=ENTRY,ENTRY...`: an entry is an axis, axes in brackets, `None` (whole) or `?` (open).

    >>> read_annotations(["[0]['embed']=(data,model),None", "[2]=?"])
    {"[0]['embed']": P(('data', 'model'), None), '[2]': P(UNCONSTRAINED,)}
    """
    found: dict[str, PartitionSpec] = {}
    for text in texts:
        path, equals, spec = text.rpartition("=")
        if not equals or not path:
            raise InputError(
                f"--annotate {text!r} has no spec. Give a path and an entry per dim, such as"
                " --annotate \"[0]['embed']=data,None\"."
            )
        if path.strip() in found:
            raise InputError(f"--annotate gives {path.strip()!r} two specs. Give one per path.")
        found[path.strip()] = PartitionSpec(*_entries(text, spec))
    return found


def _entries(text: str, spec: str) -> list[Any]:
    plain = re.sub(r"^\s*(?:P|PartitionSpec)\((.*)\)\s*$", r"\1", spec)
    entries: list[Any] = []
    for part in re.findall(r"\s*\([^)]*\)\s*|[^,]+", plain):
        names = [name.strip().strip("'\"") for name in part.strip().strip("()").split(",") if name.strip()]
        wrong = [name for name in names if not re.fullmatch(r"[A-Za-z_]\w*|\?", name)]
        if wrong or not names:
            raise InputError(
                f"--annotate {text!r}: {(wrong or [part.strip()])[0]!r} is no entry. An entry is a mesh axis,"
                " axes in brackets as (data,model), None for a whole dim, or ? for an open one."
            )
        if part.strip().startswith("("):
            entries.append(tuple(names))
        else:
            special = {"None": None, "?": PartitionSpec.UNCONSTRAINED}
            entries.append(special.get(names[0], names[0]))
    return entries


def read_chip(path: str) -> cm.Chip:
    """Read the figures of a device.

    Raises:
      InputError: the file cannot be read, or does not describe a chip.
    """
    try:
        return cm.load_chip(Path(path))
    except OSError as error:
        raise InputError(
            f"--chip {path} cannot be read: {error.strerror}. Give a file that `autoshard calibrate --out` wrote."
        ) from None
    except ValueError as error:
        raise InputError(f"--chip {path}: {error}") from None


def read_plan(path: str) -> Plan:
    """Read a plan; the message of what is wrong names the file.

    Raises:
      InputError: the file cannot be read.
      PlanFileError: it holds no plan, or is damaged.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise PlanFileError(
            f"{path}: The file is no plan: it is not text. Give a file that `autoshard suggest --out` wrote."
        ) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}. Give a plan file.") from None
    try:
        return Plan.from_json(text)
    except PlanFileError as error:
        raise PlanFileError(f"{path}: {error}") from None
