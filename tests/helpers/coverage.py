"""The table of primitives: to which family each belongs, an example of its rule, and what tests it.

`make coverage` prints it and writes `docs/coverage.md`.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import jax.extend.core.primitives
import jax.extend.random
import jax.lax
import jax.lax.linalg
from jax.extend.core import Primitive

from autoshard.calls import BODIES
from autoshard.rules import ShardingRule, families
from autoshard.trace import IDENTITIES
from tests.helpers.elementwise import CALLS
from tests.helpers.golden import CASES as SPLIT
from tests.test_rules import CASES as NAMED

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coverage.md"
CENSUS = ROOT / "tests" / "data" / "primitives.csv"

# Primitives of JAX and of equinox whose implementation, traced, takes their place.
_IMPLEMENTED = frozenset(
    """composite custom_linear_solve custom_vmap_call linear_call nonbatchable select_if_vmap unvmap_any
    unvmap_max vprim""".split()
)
_REFERENCES = frozenset({"addupdate", "get", "new_ref", "swap"})
_PLACES = (jax.extend.core.primitives, jax.lax, jax.lax.linalg, jax.extend.random)


class Row(NamedTuple):
    """One primitive of the table."""

    primitive: str
    family: str
    rule: str
    how: str
    tested: str


def census() -> dict[str, int]:
    """Return the primitives of third-party programs, and the number of programs that hold each."""
    lines = [line for line in CENSUS.read_text().splitlines() if not line.startswith("#")]
    return {row["primitive"]: int(row["programs"]) for row in csv.DictReader(lines)}


def known() -> set[str]:
    """Return the primitives that JAX names in public, those with a family, and those of the census."""
    public = {
        value.name for place in _PLACES for value in vars(place).values() if isinstance(value, Primitive)
    }
    return public | {name for name in families if name.isidentifier() or "-" in name} | set(census())


def _treatment(name: str) -> tuple[str, str]:
    """Return the family of a primitive, or what stands for one, and how it is partitioned."""
    if name in families:
        return families[name].name, families[name].about
    if name in BODIES:
        return "call", "inlined"
    if name in IDENTITIES:
        return "none", "dropped: it returns its operand"
    if name in _IMPLEMENTED:
        return "call", "inlined: its implementation is traced in its place"
    if name in _REFERENCES:
        return families["references"].name, families["references"].about
    return families["<opaque>"].name, families["<opaque>"].about


def rows() -> list[Row]:
    """Return the table."""
    texts: dict[str, str] = {}
    examples: dict[str, tuple[str, str]] = {}
    for name, _, _, text in [*NAMED, *SPLIT]:
        texts.setdefault(name, text)
        examples.setdefault(_treatment(name)[0], (name, text))
    found = []
    for name in sorted(known()):
        family, about = _treatment(name)
        like, text = (name, texts[name]) if name in texts else examples.get(family, ("", ""))
        if name not in families and name not in texts:
            like, text = "", ""
        example = f"`{text}`" if like == name else f"as {like}: `{text}`" if text else ""
        found.append(Row(name, family, example, _words(text, about), _tests(name)))
    return found


def _words(text: str, about: str) -> str:
    """Say how a primitive is partitioned: what its rule shows, and what it does not."""
    rule = ShardingRule.parse(text, {})
    words = []
    parallel = [f for f in rule.factors if f not in rule.reduce and f not in rule.exchange]
    if parallel:
        words.append(f"parallel: {' '.join(parallel)}")
    for monoid in dict.fromkeys(rule.reduce.values()):
        words.append(f"partial {monoid}: {' '.join(f for f, m in rule.reduce.items() if m == monoid)}")
    for way in dict.fromkeys(rule.exchange.values()):
        words.append(f"{way}: {' '.join(f for f, w in rule.exchange.items() if w == way)}")
    return "; ".join([*words, *filter(None, [about])]) or ("whole" if text else "")


def _tests(name: str) -> str:
    kinds = []
    if name in {case[0] for case in [*NAMED, *SPLIT]}:
        kinds.append("rule")
    if name in {case[0] for case in [*NAMED, *SPLIT]} | set(CALLS):
        kinds.append("values")
    return ", ".join(kinds)


def page() -> str:
    """Return the table as a page of Markdown."""
    programs = census()
    table = rows()
    lines = [
        "# Primitives",
        "",
        "Every primitive that JAX names in public, and every one that third-party programs were found to use"
        " (`tests/data/primitives.csv`): the family whose rule it follows, its rule for an example, how it is"
        " partitioned, and what tests it: its rule as text, its values under every split. Made by `make coverage`.",
        "",
        "A primitive that is not here, of a package or of one's own, is inlined where its implementation is"
        " written in JAX; else it is opaque: it runs whole on every device, and the plan names it.",
        "",
        "| Primitive | Programs of 62 | Family | Rule of an example | How it is partitioned | Tested |",
        "|---|---|---|---|---|---|",
    ]
    for row in table:
        cells = (row.primitive, str(programs.get(row.primitive, "")), *row[1:])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
