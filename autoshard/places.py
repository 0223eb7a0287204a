"""Where a value is decided, and how a person can name one: by a checkpoint name or by a source line.

A key of `annotations` that is no pytree path is `name:attn_out`, the name that
`jax.ad_checkpoint.checkpoint_name` gave (also without `name:`), or `model.py:42` or `model.py:42:dot_general`:
what is made at a source line, there by one primitive. Either may stand for many values, as a line in a loop over
layers does. Gradients made for a line are not meant.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.boundary import boundaries
from autoshard.errors import SpecError
from autoshard.groups import Block, Group
from autoshard.program import Op, Value
from autoshard.rules import Kind
from autoshard.rules.rule import Dims

__all__ = ["Places", "Site"]

_LINE = re.compile(r"(?P<file>.+):(?P<line>\d+)(?::(?P<primitive>[\w-]+))?")
_NAME = "name:"


@dataclass(frozen=True, eq=False, kw_only=True)
class Site:
    """Where a value is decided: by the group that makes it, through the factors of its dims, or by itself.

    `value` is the array as the decision knows it; `copies` are the groups that hold it for its readers.
    """

    value: Value
    group: Group | None = None
    dims: Dims = ()
    copies: tuple[Group, ...] = ()

    @property
    def text(self) -> str:
        """Shape and maker, for messages."""
        shape = f"{self.value.dtype}{list(self.value.shape)}"
        return f"{shape} of {self.group.title}" if self.group else shape


class Places:
    """The values of a grouped program, by what names them."""

    def __init__(self, block: Block) -> None:
        self._decider: dict[Value, Value] = {}
        self._op: dict[Value, Op] = {}
        self._maker: dict[Value, tuple[Group, Dims]] = {}
        self._copies: dict[Value, list[Group]] = defaultdict(list)
        self._readers: dict[Value, list[Op | None]] = defaultdict(list)  # None: a result of the body
        self._named: dict[str, list[Value]] = defaultdict(list)
        self._body(block)
        leaving: dict[Value, set[tuple[str, int] | None]] = defaultdict(set)
        for value, readers in self._readers.items():
            leaving[self._root(value)] |= {None if op is None else op.place for op in readers}
        self._lines: dict[int, list[tuple[Value, bool]]] = defaultdict(list)
        for value, op in self._op.items():
            if not op.transposed:
                self._lines[op.place[1]].append((value, bool(leaving[self._root(value)] - {op.place})))

    # Collecting -----------------------------------------------------------------------------------

    def _body(self, block: Block) -> None:
        self._label(block.inputs)
        for item in block.groups:
            if item.is_copy:
                self._decider[item.outputs[0]] = item.inputs[0]
                self._copies[item.inputs[0]].append(item)
            elif item.kind is Kind.IDENTITY:
                self._same(item.ops[0].outputs, item.ops[0].inputs)
            elif item.kind is Kind.CONTROL:
                self._control(item)
            else:
                self._group(item)
            for op in item.ops:
                self._label(op.outputs)
                if item.kind is not Kind.IDENTITY:
                    self._read(op.inputs, op)
                    self._op |= dict.fromkeys(op.outputs, op)
        self._read(block.outputs, None)

    def _control(self, item: Group) -> None:
        boundary = boundaries(item)
        self._same(item.ops[0].outputs, boundary.results)
        self._decider |= boundary.same
        for body in item.blocks:
            self._body(body)

    def _group(self, item: Group) -> None:
        for op, mapping, rule in zip(item.ops, item.factors, item.op_rules, strict=True):
            for value, dims in zip(op.outputs, rule.outputs, strict=True):
                self._maker[value] = item, tuple(tuple(mapping[f] for f in dim) for dim in dims)

    def _label(self, values: tuple[Value, ...]) -> None:
        for value in values:
            for label in value.labels:
                self._named[label].append(value)

    def _same(self, values: tuple[Value, ...], deciders: tuple[object, ...]) -> None:
        for value, decider in zip(values, deciders, strict=True):
            if isinstance(decider, Value) and decider is not value:
                self._decider[value] = decider

    def _read(self, atoms: tuple[object, ...], op: Op | None) -> None:
        for atom in atoms:
            if isinstance(atom, Value):
                self._readers[atom].append(op)

    def _root(self, value: Value) -> Value:
        while value in self._decider:
            value = self._decider[value]
        return value

    # Asking ---------------------------------------------------------------------------------------

    def find(self, key: str) -> list[Site]:
        """Return where the values that a key names are decided; nothing where it names none.

        Raises:
          SpecError: the key names lines of several files, or a line that makes no value of its own.
        """
        line = _LINE.fullmatch(key)
        if key.startswith(_NAME) or line is None or key in self._named:
            values = self._named.get(key.removeprefix(_NAME), [])
        else:
            values = self._at(key, line["file"], int(line["line"]), line["primitive"])
        return [self._site(v) for v in dict.fromkeys(map(self._root, values))]

    def _at(self, key: str, file: str, line: int, primitive: str | None) -> list[Value]:
        found = [(v, leaves) for v, leaves in self._lines.get(line, []) if _is_file(self._file(v), file)]
        files = sorted({self._file(v) for v, _ in found})
        if len(files) > 1:
            raise SpecError(f"{key!r} is a line of {' and of '.join(files)}: give more of the path.")
        if primitive is not None:
            return [v for v, _ in found if self._op[v].name == primitive]
        values = [v for v, leaves in found if leaves]
        if found and not values:
            made = ", ".join(f"{key}:{name}" for name in dict.fromkeys(self._op[v].name for v, _ in found))
            raise SpecError(f"{key!r}: nothing made at this line is read at another. Name one of {made}.")
        return values

    def _file(self, value: Value) -> str:
        return self._op[value].place[0]

    def _site(self, value: Value) -> Site:
        if value not in self._maker:
            return Site(value=value)
        group, dims = self._maker[value]
        return Site(value=value, group=group, dims=dims, copies=tuple(self._copies[value]))

    def keys(self) -> Iterator[str]:
        """Yield a key for each checkpoint name, and for each primitive at each line."""
        yield from (f"{_NAME}{label}" for label in self._named)
        files = {op.place[0] for op in self._op.values()}
        short = {file: file.rpartition("/")[2] for file in files}
        twice = {name for name in short.values() if list(short.values()).count(name) > 1}
        ops = ((line, self._op[v]) for line, made in self._lines.items() if line for v, _ in made)
        found = ((short[op.place[0]], op.place[0], line, op.name) for line, op in ops)
        yield from dict.fromkeys(
            f"{file if s in twice else s}:{line}:{name}" for s, file, line, name in found
        )

    def near(self, key: str) -> list[str]:
        """Return what exists and looks like a key that names nothing."""
        line = _LINE.fullmatch(key)
        if line is None:
            keys = [f"{_NAME}{label}" for label in self._named]
            return difflib.get_close_matches(f"{_NAME}{key.removeprefix(_NAME)}", keys, 3, 0.3)
        at = int(line["line"])
        lines = sorted(
            {
                n
                for n, made in self._lines.items()
                if any(_is_file(self._file(v), line["file"]) for v, _ in made)
            },
            key=lambda n: (abs(n - at), n),
        )
        return list(self._keys(line["file"], lines[:3], bool(line["primitive"])))

    def _keys(self, file: str, lines: list[int], primitives: bool) -> Iterator[str]:
        for n in lines:
            if not primitives:
                yield f"{file}:{n}"
                continue
            names = [self._op[v].name for v, _ in self._lines[n] if _is_file(self._file(v), file)]
            yield from (f"{file}:{n}:{name}" for name in dict.fromkeys(names))


def _is_file(path: str, file: str) -> bool:
    return path == file or path.endswith(f"/{file}")
