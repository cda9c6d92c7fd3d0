"""How the command line writes: tables for people, JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from tokenmill.config.dialects import Translation
    from tokenmill.encode.tokenizer import Tokenizer
    from tokenmill.store import Store
    from tokenmill.types import Span

console = Console()
errors = Console(stderr=True)


def print_json(value: Any) -> None:  # noqa: ANN401 - any JSON value
    """Write a value as indented JSON and nothing else."""
    text = msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2)
    sys.stdout.write(text.decode() + "\n")


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


# Tokens as text, where the tokenizer of a store can be found.

EXCERPT_TOKENS = 16


def tokenizer_of(store: Store) -> Tokenizer | None:
    """Open the tokenizer that made a store, if it is still where it was and still the same."""
    from tokenmill.encode.engines import open_tokenizer
    from tokenmill.errors import TokenizerError

    identity = store.manifest.tokenizer
    try:
        tokenizer = open_tokenizer(
            str(store.manifest.recipe.get("tokenizer", "bytes")),
            add_bos=bool(identity["add_bos"]),
            add_eos=bool(identity["add_eos"]),
            engine=str(store.manifest.recipe.get("engine", "auto")).split()[0],
        )
    except TokenizerError:
        return None
    return tokenizer if tokenizer.identity.content == identity["content"] else None


def excerpt(store: Store, span: Span, tokenizer: Tokenizer | None) -> str | None:
    """Return the beginning of a span as one line of text."""
    if tokenizer is None:
        return None
    begin, _ = store.document_bounds(span.document)
    length = min(span.length, EXCERPT_TOKENS)
    ids = store.fetch(begin + span.start, begin + span.start + length, store.manifest.token_key)
    more = "…" if span.length > length else ""
    text = tokenizer.decode(ids).replace("\n", "⏎").replace("\t", "→")
    # Documents are not to be trusted with the terminal: no escape sequences, no bells, no reversed text.
    return "".join(character if character.isprintable() else "\ufffd" for character in text) + more


# What all commands that read the config of a run share: its options, and what is told of a foreign one.

_NATIVE = "native"

WorldSize = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Data-parallel ranks, for a config of KempnerForge or torchtitan, which count rows by rank.",
    ),
]
"""Type of the option --world-size; its default is None."""
ToNative = Annotated[
    bool,
    typer.Option("--to-native", help="Print the config as native TOML and stop; no store is opened."),
]
"""Type of the option --to-native; its default is False."""


def tell(translation: Translation) -> None:
    """Say on stderr what a foreign config was taken for, a note a line; nothing of a native one."""
    if translation.dialect == _NATIVE:
        return
    lines = [f"taken as a {translation.dialect} config:", *(f"  - {note}" for note in translation.notes)]
    for line in lines:
        errors.print(Text(line), soft_wrap=True, highlight=False)


def print_native(translation: Translation) -> None:
    """Write a config as native TOML and nothing else, so that it can go to a file."""
    from tokenmill.config.run import to_toml

    sys.stdout.write(to_toml(translation.tables))
