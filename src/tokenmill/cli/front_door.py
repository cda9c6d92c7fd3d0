"""What all commands that read the config of a run share: its options, and what is told of a foreign one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from tokenmill.cli.console import errors

if TYPE_CHECKING:
    from tokenmill.dialects import Translation

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
    from tokenmill.dialects import to_toml

    sys.stdout.write(to_toml(translation.tables))
