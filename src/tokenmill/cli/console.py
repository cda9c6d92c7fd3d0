"""How the command line writes: tables for people, JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import orjson
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

console = Console()
errors = Console(stderr=True)


def print_json(value: Any) -> None:  # noqa: ANN401 - any JSON value
    """Write a value as indented JSON and nothing else."""
    sys.stdout.write(orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode() + "\n")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Make a table; numbers stand to the right, other cells to the left, and none is read as markup."""
    lines = [list(row) for row in rows]
    made = Table(title=escape(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        numeric = bool(lines) and all(isinstance(line[index], int | float | None) for line in lines)
        # Names must not give way to numbers on a narrow terminal.
        least = None if numeric else min(12, max([len(name), *(len(cell(line[index])) for line in lines)]))
        made.add_column(
            name, justify="right" if numeric else "left", overflow="fold", no_wrap=numeric, min_width=least
        )
    for line in lines:
        made.add_row(*(value if isinstance(value, Text) else Text(cell(value)) for value in line))
    return made


def cell(value: object) -> str:
    """Show a value: thousands with a comma, None as a dash.

    >>> cell(1234567), cell(None), cell(0.5)
    ('1,234,567', '–', '0.5')
    """
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def megabytes(count: int) -> str:
    """Show a number of bytes.

    >>> megabytes(1_500_000)
    '1.5 MB'
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
