"""What the commands share: one JSON document on standard output, or tables for a person."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

#: ``--json`` as every command takes it.
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document and nothing else.")
]


def print_json(document: Any) -> None:
    """The one JSON document of a command with ``--json`` (standard JSON: no NaN, no Infinity)."""
    json.dump(document, sys.stdout, indent=2, allow_nan=False, ensure_ascii=False)
    sys.stdout.write("\n")
    sys.stdout.flush()


def stdout_console() -> Console:
    """Rich console for results; wide enough for tables where the output is not a terminal."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def stderr_console() -> Console:
    """Rich console for progress and warnings."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str = "",
    right: Sequence[int] = (),
) -> None:
    """A plain table; ``right`` numbers the columns that are aligned to the right."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for index, name in enumerate(columns):
        is_number = index in right
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    stdout_console().print(table)
