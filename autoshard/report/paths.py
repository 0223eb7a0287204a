"""Many pytree paths as few patterns, so that a plan of 600 arrays stays readable.

Arrays that agree in all that a table shows of them are merged where their paths differ in one key:
`[0]['blocks'][0]['wq']` and so on become `[0]['blocks'][0..31]['wk','wq','wv']`.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence

__all__ = ["collapse", "keys_of"]

_KEY = re.compile(r"""\[(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\]]*)\]|\.\w+""")
_SHOWN = 4

Keys = tuple[str, ...]


def keys_of(path: str) -> Keys:
    """Split a path as `jax.tree_util.keystr` writes it into its keys, brackets and dots kept.

    >>> keys_of("[1][0].mu['dense/~/w']")
    ('[1]', '[0]', '.mu', "['dense/~/w']")
    """
    keys = tuple(_KEY.findall(path))
    return keys if keys and "".join(keys) == path else (path,)


def collapse(paths: Sequence[str], labels: Sequence[Hashable]) -> list[tuple[str, list[int]]]:
    """Merge paths with equal labels into patterns; the first key, the argument, is never merged.

    Args:
      paths: pytree paths.
      labels: what has to agree for two paths to be merged, of each path.

    Returns:
      Patterns and the positions in `paths` that each stands for, in the order of the first of them.

    >>> collapse(["[0]['a']", "[0]['b']", "[1]['a']"], ["x", "x", "x"])
    [("[0]['a','b']", [0, 1]), ("[1]['a']", [2])]
    """
    groups: list[tuple[Hashable, tuple[Keys, ...], list[int]]] = [
        (label, tuple((key,) for key in keys_of(path)), [i])
        for i, (path, label) in enumerate(zip(paths, labels, strict=True))
    ]
    for position in range(max((len(keys) for _, keys, _ in groups), default=0) - 1, 0, -1):
        merged: dict[Hashable, tuple[Hashable, list[Keys], list[int]]] = {}
        for label, keys, members in groups:
            if position >= len(keys):
                merged[(label, keys)] = (label, list(keys), members)
                continue
            rest = (label, keys[:position], keys[position + 1 :], keys[position][0][:1])
            if rest in merged:
                _, known, others = merged[rest]
                known[position] = tuple(dict.fromkeys((*known[position], *keys[position])))
                others.extend(members)
            else:
                merged[rest] = (label, list(keys), list(members))
        groups = [(label, tuple(keys), members) for label, keys, members in merged.values()]
    ordered = sorted(groups, key=lambda group: min(group[2]))
    return [("".join(map(_pattern, keys)), sorted(members)) for _, keys, members in ordered]


def _pattern(keys: Keys) -> str:
    """Write alternatives for one key: a range of numbers, a few names, or their numbers as stars."""
    if len(keys) == 1:
        return keys[0]
    if keys[0].startswith("."):
        return ".{" + ",".join(_few([key[1:] for key in keys])) + "}"
    inner = [key[1:-1] for key in keys]
    if all(key.isdigit() for key in inner):
        return "[" + ",".join(_ranges(sorted(map(int, inner)))) + "]"
    return "[" + ",".join(_few(inner)) + "]"


def _few(names: Sequence[str]) -> list[str]:
    if len(names) <= _SHOWN:
        return list(names)
    starred = list(dict.fromkeys(re.sub(r"\d+", "*", name) for name in names))
    if len(starred) <= _SHOWN:
        return starred
    return [*starred[: _SHOWN - 1], f"... {len(starred) - _SHOWN + 1} more"]


def _ranges(numbers: Sequence[int]) -> list[str]:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs]
