"""How the command line speaks: results on standard output, progress and errors on standard error."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from rich.console import Console, RenderableType
from rich.text import Text

from autoshard.cli_input import InputError
from autoshard.report.page import plain

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["fail", "interruptible", "print_json", "print_view", "records", "say", "write"]


def print_view(view: RenderableType) -> None:
    """Print in colour on a terminal, as plain text elsewhere."""
    console = Console(markup=False, highlight=False, emoji=False)
    if console.is_terminal:
        console.print(view)
    else:
        click.echo(plain(view))


def print_json(content: Any) -> None:
    click.echo(json.dumps(content, indent=1, ensure_ascii=False))


def records(table: pd.DataFrame) -> Any:
    """Rows of a table as JSON values, a named index among them."""
    whole = table.reset_index() if table.index.name is not None else table
    return json.loads(whole.to_json(orient="records", double_precision=15))


def write(out: str, text: str) -> None:
    """Write a file whole or not at all."""
    draft = f"{out}.part"
    try:
        Path(draft).write_text(text, encoding="utf-8")
        os.replace(draft, out)
    except OSError as error:
        raise InputError(f"--out {out} cannot be written: {error.strerror}. Give another file.") from None


def say(message: str) -> None:
    click.echo(message, err=True)


def fail(message: str) -> NoReturn:
    say(f"error: {message}")
    raise SystemExit(2)


@contextmanager
def interruptible(what: str) -> Iterator[tuple[Callable[[str], None], list[int]]]:
    """Show progress on a terminal, and remember interrupts.

    The search ends with its best plan at the first interrupt; before another mesh would be tried, news come
    in, and the interrupt is raised then. Yields the receiver of news and the list of interrupts seen.
    """
    seen: list[int] = []
    console = Console(stderr=True, highlight=False)
    status = console.status(Text(what)) if console.is_terminal else None

    def news(text: str) -> None:
        if seen:
            raise KeyboardInterrupt
        if status is not None:
            status.update(Text(f"{what}: {' '.join(text.split())}", no_wrap=True, overflow="ellipsis"))

    def interrupt(number: int, frame: Any) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    try:
        before: Any = signal.signal(signal.SIGINT, interrupt)
    except ValueError:  # not the main thread
        before = None
    try:
        if status is not None:
            status.start()
        yield news, seen
    finally:
        if status is not None:
            status.stop()
        if before is not None:
            signal.signal(signal.SIGINT, before)
