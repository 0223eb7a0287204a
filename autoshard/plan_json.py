"""A plan as JSON text, and back: what `Plan.to_json`, `Plan.from_json` and `autoshard show` use.

The text holds all that the plan says: shardings, the whole ledger of the estimate, the buffers at the peak,
notes and timings. A field of a dataclass is written under its own name, a tuple of dataclasses as a table of
columns and rows, a layout as the mesh axes of each dim. Two things are not written but rebuilt: the machine,
from topology, mesh, device order and, under "figures", what its chip has other than its generation's file; and
pytree structures, which are kept where they are made of dict, list, tuple and None, and replaced by the paths of
the leaves where a node is of any other type. The program that the plan was made for is left out.

The same plan gives the same bytes. Reading checks everything, and says what is wrong, where, and what to do.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

import jax

import cost_models as cm
from autoshard.errors import PlanFileError
from autoshard.estimate import Estimate
from autoshard.layout import Layout, spec_problems, to_spec
from autoshard.partition.price import Machine
from autoshard.plan import Leaf, Plan

__all__ = ["FORMAT", "FORMAT_VERSION", "dump", "load"]

FORMAT = "autoshard plan"
FORMAT_VERSION = 1
_WIDTH = 110
_AGAIN = "Make the plan again with `autoshard suggest ... --out FILE` or `plan.to_json()`."
_FIGURES = "figures"
_TREES = ("in_tree", "out_tree")
_NOT_WRITTEN = ("machine", "request")
_NOT_FINITE = ("inf", "-inf", "nan")


def dump(plan: Plan) -> str:
    """Write a plan as JSON text.

    Args:
      plan: any plan.

    Returns:
      The text, ending in a newline; the same plan gives the same text.

    Example:
      >>> import autoshard, jax
      >>> x = jax.ShapeDtypeStruct((64, 64), "float32")
      >>> plan = autoshard.suggest(lambda x: x + 1, x, topology="v3:2x2", mesh={"data": 8})
      >>> str(load(dump(plan))) == str(plan)
      True
    """
    content: dict[str, Any] = {"format": FORMAT, "format_version": FORMAT_VERSION}
    hints = _hints(Plan)
    for name in _names(Plan):
        value = getattr(plan, name)
        if name in _TREES:
            content[name] = None if value is None else _structure(value)
        elif name == "mesh":  # a list keeps the order of the axes whatever rewrites the file
            content[name] = [[axis, int(size)] for axis, size in value.items()]
        else:
            content[name] = _encode(value, hints[name])
    if changed := _changed_figures(plan.slice.chip):
        content[_FIGURES] = changed
    return "\n".join(_lines(content)) + "\n"


def load(text: str) -> Plan:
    """Read a plan that `dump` wrote.

    Args:
      text: the whole content of the file.

    Returns:
      The plan; it prints and applies as the one that was written.

    Raises:
      PlanFileError: the text is cut off, is no JSON, holds no plan, is of another format version, or misses
        or garbles some of it. The message names the place and the cure.
    """
    content = _parsed(text)
    figures = content.pop(_FIGURES, {})
    expected = ["format", "format_version", *_names(Plan)]
    _require_names(content, expected, "the plan")
    topology = _decode(content["topology"], str, "topology")
    mesh = _mesh(content["mesh"])
    order = _decode(content["device_order"], tuple[int, ...], "device_order")
    machine = _machine(topology, figures, mesh, order)
    hints = _hints(Plan)
    fields: dict[str, Any] = {"topology": topology, "mesh": mesh, "device_order": order}
    for name in _names(Plan):
        if name == "estimate":
            fields[name] = _decode_record(content[name], Estimate, name, {"machine": machine})
        elif name in _TREES:
            fields[name] = None if content[name] is None else _tree(content[name], name)
        elif name not in fields:
            fields[name] = _decode(content[name], hints[name], name)
    plan = Plan(**fields)
    _require_sound(plan)
    return plan


# Reading the text --------------------------------------------------------------------------------------


def _parsed(text: str) -> dict[str, Any]:
    """Return the JSON object in `text` after checking that it is a plan of this format version."""
    stripped = text.strip()
    if not stripped:
        raise PlanFileError(f"The plan file is empty; it should hold the JSON object of a plan. {_AGAIN}")
    try:
        content = json.loads(stripped)
    except json.JSONDecodeError as error:
        raise PlanFileError(_not_json(stripped, error)) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = (
            f'an object whose "format" is {content.get("format")!r}'
            if isinstance(content, dict)
            else f"{type(content).__name__} {json.dumps(content)[:40]}"
        )
        raise PlanFileError(
            f'The file is JSON but no plan: it holds {found}, and a plan is an object whose "format" is'
            f" {FORMAT!r}. Give a file that `autoshard suggest --out` or `plan.to_json()` wrote."
        )
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise PlanFileError(
            f"The plan file has format version {version!r}; this autoshard reads version {FORMAT_VERSION}"
            " only. Read it with the autoshard that wrote it, or make the plan again with this one:"
            " `autoshard suggest ... --out FILE`."
        )
    return content


def _not_json(text: str, error: json.JSONDecodeError) -> str:
    place = f"line {error.lineno}, column {error.colno}"
    if not text.startswith("{"):
        return (
            f"The file is no plan: it is not JSON ({error.msg} at {place}; it begins {text[:40]!r})."
            " Give a file that `autoshard suggest --out` or `plan.to_json()` wrote."
        )
    ends_early = error.pos >= len(text) - 5 or error.msg.startswith("Unterminated")
    what = "is cut off" if ends_early else "is damaged"
    return f"The plan file {what}: {error.msg} at {place}, of {text.count(chr(10)) + 1} lines. {_AGAIN}"


def _bad(where: str, problem: str) -> PlanFileError:
    return PlanFileError(f"The plan file is damaged at {where}: {problem}. {_AGAIN}")


def _require_names(content: Mapping[str, Any], expected: Sequence[str], where: str) -> None:
    missing = [name for name in expected if name not in content]
    unknown = [name for name in content if name not in expected]
    parts = [f"{', '.join(map(repr, missing))} missing"] if missing else []
    parts += [f"{', '.join(map(repr, unknown))} unknown"] if unknown else []
    if parts:
        raise _bad(where, "; ".join(parts))


def _require_sound(plan: Plan) -> None:
    """Check what types do not: that arrays, layouts, structures and mesh belong together."""
    for what in ("input", "output"):
        leaves: tuple[Leaf, ...] = getattr(plan, f"{what}s")
        layouts: tuple[Layout, ...] = getattr(plan, f"{what}_layouts")
        tree = plan.in_tree if what == "input" else plan.out_tree
        if len(leaves) != len(layouts):
            raise _bad(f"{what}_layouts", f"{len(layouts)} layouts for {len(leaves)} {what}s")
        if tree is not None and tree.num_leaves != len(leaves):
            raise _bad(
                f"{what[:-3]}_tree", f"a structure of {tree.num_leaves} leaves for {len(leaves)} {what}s"
            )
        for leaf, layout in zip(leaves, layouts, strict=True):
            problems = spec_problems(to_spec(layout), leaf.shape, plan.mesh)
            if len(layout.dims) != len(leaf.shape):
                problems = [f"{len(layout.dims)} dims in the layout of an array of shape {list(leaf.shape)}"]
            if problems:
                raise _bad(f"{what}_layouts, {leaf.path}", problems[0])


# Topology and mesh -------------------------------------------------------------------------------------


def _mesh(data: Any) -> dict[str, int]:
    pairs = _decode(data, tuple[tuple[Any, ...], ...], "mesh")
    for i, pair in enumerate(pairs):
        if len(pair) != 2 or not isinstance(pair[0], str) or type(pair[1]) is not int:
            raise _bad(f"mesh[{i}]", f"[axis name, size] is expected, got {list(pair)!r}")
    return {axis: size for axis, size in pairs}


def _changed_figures(chip: cm.Chip) -> dict[str, Any]:
    """Figures of a chip that are not those of its generation's file, as of a calibrated one."""
    usual, hints = cm.chip(chip.name), _hints(cm.Chip)
    values = {name: getattr(chip, name) for name in _names(cm.Chip)}
    return {
        name: _encode(value, hints[name]) for name, value in values.items() if value != getattr(usual, name)
    }


def _with_figures(topology: cm.Topology, figures: Any) -> cm.Topology:
    hints = _hints(cm.Chip)
    unknown = [name for name in _of(dict, figures, _FIGURES) if name not in hints or name == "name"]
    if unknown:
        raise _bad(_FIGURES, f"{', '.join(map(repr, unknown))} unknown")
    changed = {name: _decode(value, hints[name], f"{_FIGURES}.{name}") for name, value in figures.items()}
    return topology.with_chip(dataclasses.replace(topology.chip, **changed))


def _machine(name: str, figures: Any, mesh: Mapping[str, int], order: tuple[int, ...]) -> Machine:
    """Place the mesh as it was placed: the placement that visits the devices in the plan's order."""
    try:
        topology = _with_figures(cm.Topology.parse(name), figures)
        found = next((p for p in _placements(topology, mesh) if p.device_order == order), None)
    except (cm.TopologyError, cm.MeshError) as error:
        raise _bad("topology or mesh", str(error).rstrip(".")) from error
    if found is None:
        raise _bad("device_order", f"no placement of mesh {dict(mesh)} on {name} has that order")
    return Machine(placement=found, mesh=dict(mesh), beside=frozenset(topology.chip.async_collectives))


def _placements(topology: cm.Topology, mesh: Mapping[str, int]) -> Iterable[cm.Placement]:
    yield cm.place(topology, mesh)
    yield from cm.placements(topology, mesh)


# Pytree structures -------------------------------------------------------------------------------------


def _structure(tree: Any) -> Any:
    """Write a structure: "*" a leaf, null None, an object with the type's name any other node."""
    data = tree.node_data()
    if data is None:
        return "*"
    kind, keys = data
    children = [_structure(child) for child in tree.children()]
    if kind is type(None):
        return None
    if kind is dict and all(isinstance(key, str) for key in keys):
        return {"dict": dict(zip(keys, children, strict=True))}
    if kind is dict and all(type(key) is int for key in keys):
        return {"int dict": [[key, child] for key, child in zip(keys, children, strict=True)]}
    if kind in (list, tuple):
        return {kind.__name__: children}
    return {"other": f"{kind.__module__}.{kind.__qualname__}"}


def _tree(data: Any, where: str) -> Any:
    """Rebuild a structure; None where it holds a node of another type, so that specs go by path."""
    try:
        return jax.tree.structure(_skeleton(data, where), is_leaf=lambda x: x is _LEAF)
    except _OtherNode:
        return None


class _OtherNode(Exception):
    """A node that only its own library can make."""


_LEAF = object()


def _skeleton(data: Any, where: str) -> Any:
    if data is None:
        return None
    if data == "*":
        return _LEAF
    if isinstance(data, dict) and len(data) == 1:
        ((kind, inner),) = data.items()
        if kind == "other":
            raise _OtherNode
        if kind == "dict" and isinstance(inner, dict):
            return {key: _skeleton(child, where) for key, child in inner.items()}
        if kind == "int dict" and isinstance(inner, list):
            return {key: _skeleton(child, where) for key, child in inner}
        if kind in ("list", "tuple") and isinstance(inner, list):
            children = [_skeleton(child, where) for child in inner]
            return children if kind == "list" else tuple(children)
    raise _bad(where, f"no pytree structure: {json.dumps(data)[:60]}")


# Values by type ----------------------------------------------------------------------------------------


@cache
def _hints(record: Any) -> dict[str, Any]:
    return get_type_hints(record)


@cache
def _names(record: Any) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(record) if f.name not in _NOT_WRITTEN)


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _inner_of_optional(kind: Any) -> Any:
    """Return T of `T | None`, or None."""
    if get_origin(kind) in (Union, types.UnionType):
        inner = [each for each in get_args(kind) if each is not type(None)]
        return inner[0] if len(inner) == 1 else None
    return None


def _encode(value: Any, kind: Any) -> Any:
    """Write a value of the declared type `kind` in JSON types."""
    optional = _inner_of_optional(kind)
    if optional is not None:
        return None if value is None else _encode(value, optional)
    if kind is Layout:
        return _encode_layout(value)
    if _is_record(kind):
        hints = _hints(kind)
        return {name: _encode(getattr(value, name), hints[name]) for name in _names(kind)}
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple and _is_record(arguments[0]):
        return {"columns": _columns(arguments[0]), "rows": [_row(item) for item in value]}
    if origin is tuple:
        return [_encode(item, arguments[0]) for item in value]
    if origin is Mapping:
        return {key: _encode(item, arguments[1]) for key, item in value.items()}
    if kind is float:
        plain = value.item() if hasattr(value, "item") else value
        return plain if math.isfinite(plain) else str(plain)
    if kind is int:
        return int(value)
    return value


def _decode(data: Any, kind: Any, where: str) -> Any:
    """Read what `_encode` wrote for the declared type `kind`; `where` names the place for messages."""
    optional = _inner_of_optional(kind)
    if optional is not None:
        return None if data is None else _decode(data, optional, where)
    if kind is Layout:
        return _decode_layout(data, where)
    if _is_record(kind):
        return _decode_record(data, kind, where, {})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple and _is_record(arguments[0]):
        return _decode_table(data, arguments[0], where)
    if origin is tuple:
        return tuple(
            _decode(item, arguments[0], f"{where}[{i}]") for i, item in enumerate(_of(list, data, where))
        )
    if origin is Mapping:
        items = _of(dict, data, where).items()
        return {key: _decode(item, arguments[1], f"{where}[{key!r}]") for key, item in items}
    if kind is float:
        if isinstance(data, str) and data in _NOT_FINITE:
            return float(data)
        return _of((int, float), data, where)
    return data if kind is Any else _of(kind, data, where)


def _of(kind: Any, data: Any, where: str) -> Any:
    """Check that a JSON value has one of the given types; a boolean is no number."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if type(data) not in kinds:
        names = {
            str: "text",
            bool: "true or false",
            int: "a whole number",
            float: "a number",
            list: "a list",
            dict: "an object",
        }
        raise _bad(where, f"{names[kinds[-1]]} is expected, got {json.dumps(data)[:60]}")
    return data


def _decode_record(data: Any, kind: type, where: str, rebuilt: Mapping[str, Any]) -> Any:
    _require_names(_of(dict, data, where), _names(kind), where)
    hints = _hints(kind)
    fields = {name: _decode(data[name], hints[name], f"{where}.{name}") for name in _names(kind)}
    return kind(**fields, **rebuilt)


def _columns(kind: type) -> list[Any]:
    """Name the fields of a record; a field that is a record itself, with its own fields."""
    hints = _hints(kind)
    return [{c: _columns(hints[c])} if _is_record(hints[c]) else c for c in _names(kind)]


def _row(item: Any) -> list[Any]:
    kind: Any = type(item)
    hints = _hints(kind)
    values = {c: getattr(item, c) for c in _names(kind)}
    return [_row(x) if _is_record(hints[c]) else _encode(x, hints[c]) for c, x in values.items()]


def _decode_table(data: Any, kind: type, where: str) -> Any:
    _require_names(_of(dict, data, where), ("columns", "rows"), where)
    if data["columns"] != _columns(kind):
        found = json.dumps(data["columns"])[:80]
        raise _bad(f"{where}.columns", f"{json.dumps(_columns(kind))} are expected, got {found}")
    rows = _of(list, data["rows"], f"{where}.rows")
    return tuple(_decode_row(row, kind, f"{where}[{i}]") for i, row in enumerate(rows))


def _decode_row(row: Any, kind: type, where: str) -> Any:
    columns, hints = _names(kind), _hints(kind)
    if len(_of(list, row, where)) != len(columns):
        raise _bad(where, f"{len(row)} values in a row of {len(columns)}")
    fields = {}
    for name, value in zip(columns, row, strict=True):
        read = _decode_row if _is_record(hints[name]) else _decode
        fields[name] = read(value, hints[name], f"{where}.{name}")
    return kind(**fields)


def _encode_layout(layout: Layout) -> Any:
    dims = [list(axes) for axes in layout.dims]
    if layout == Layout(layout.dims):
        return dims
    return {"dims": dims, "unreduced": list(layout.unreduced), "monoid": layout.monoid}


def _decode_layout(data: Any, where: str) -> Layout:
    whole = data if isinstance(data, dict) else {"dims": data, "unreduced": [], "monoid": "sum"}
    _require_names(whole, Layout._fields, where)
    return Layout(
        dims=_decode(whole["dims"], tuple[tuple[str, ...], ...], where),
        unreduced=_decode(whole["unreduced"], tuple[str, ...], where),
        monoid=_decode(whole["monoid"], str, where),
    )


# Writing the text --------------------------------------------------------------------------------------


def _lines(value: Any, indent: str = "", head: str = "", tail: str = "") -> list[str]:
    """Lay JSON out: on one line a row, a pytree structure and what fits; of the rest, each child."""
    line = f"{indent}{head}{json.dumps(value, ensure_ascii=False, allow_nan=False)}{tail}"
    is_row = isinstance(value, list) and not any(isinstance(x, list) for x in value[:1])
    whole = not isinstance(value, (dict, list)) or is_row or any(f'"{name}"' in head for name in _TREES)
    if indent and (whole or len(line) <= _WIDTH):
        return [line]
    keys = [f"{json.dumps(key, ensure_ascii=False)}: " for key in value] if isinstance(value, dict) else None
    children = list(value.values()) if isinstance(value, dict) else value
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    lines = [f"{indent}{head}{opening}"]
    for i, child in enumerate(children):
        comma = "," if i < len(children) - 1 else ""
        lines += _lines(child, f"{indent} ", keys[i] if keys else "", comma)
    return [*lines, f"{indent}{closing}{tail}"]
