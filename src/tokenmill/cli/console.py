"""How the command line reads and writes: shared options, tables for people, JSON for programs."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any
from unicodedata import category

import msgspec
import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from tokenmill import errors as messages
from tokenmill.errors import (
    ConfigError,
    MissingExtraError,
    PlanError,
    StoreCorruptError,
    harmless,
    nearest,
    warn,
    without_secrets,
)
from tokenmill.tables import is_address
from tokenmill.view.tables import Bar, Table, cell, is_numeric
from tokenmill.view.tables import megabytes as megabytes  # noqa: PLC0414 - commands have it from here

if TYPE_CHECKING:
    from rich.progress import TaskID
    from typer.core import TyperCommand

    from tokenmill.config.run import Translation
    from tokenmill.encode.tokenizer import Tokenizer
    from tokenmill.run.run import Run
    from tokenmill.store import Store


class Screen(Console):
    """Prints all that people read: no text in it is taken for markup or an emoji code, or controls the terminal."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - as of `Console`
        super().__init__(markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render something; its texts are made harmless, what styles and moves is rich's own."""
        for segment in super().render(renderable, options):
            shown = segment.control or segment.text.isprintable()
            yield segment if shown else segment._replace(text=harmless(segment.text))


console = Screen()
errors = Screen(stderr=True)


LOGGER = "tokenmill"
"""Name of the logger of the package; loggers of its parts are children."""
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_VARIABLE = "TOKENMILL_LOG"
"""Environment variable with the level of the command line."""


def set_log_level(level: str, *, where: str = LOG_VARIABLE) -> None:
    """Print messages of tokenmill from a level on, one of `LOG_LEVELS`; errors name `where` it was specified."""
    if level.strip().lower() not in LOG_LEVELS:
        raise ConfigError(
            f"{where}: expected one of {', '.join(LOG_LEVELS)}, got {level!r}; {nearest(level, LOG_LEVELS)}"
        )
    logging.getLogger(LOGGER).setLevel(level.strip().upper())


def apply_log_variable() -> None:
    """Set the level that TOKENMILL_LOG asks for; without it, or if it is empty, warnings and errors are printed."""
    level = os.environ.get(LOG_VARIABLE, "")
    if level.strip():
        set_log_level(level)


class _LogPrinter(logging.Handler):
    """Prints what is logged on stderr; of other packages only warnings and errors, as Python does by default."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Pass records of tokenmill at any level that its logger has, and warnings of others."""
        is_ours = record.name.partition(".")[0] == LOGGER
        return (is_ours or record.levelno >= logging.WARNING) and bool(super().filter(record))

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        print_note(self.format(record))


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print_note("".join(traceback.format_exception(kind, error, trace)).rstrip())


def take_over() -> None:
    """Print all that reaches the terminal by these consoles: log lines, warnings of Python, tracebacks."""
    logging.basicConfig(handlers=[_LogPrinter()], format="%(message)s")
    logging.captureWarnings(True)
    sys.excepthook = _show_traceback
    threading.excepthook = lambda lost: _show_traceback(
        lost.exc_type, lost.exc_value or lost.exc_type(), lost.exc_traceback
    )


_ARGUMENT = re.compile(
    r"""\b([a-z][a-z_]*)=(?:\.\.\.|\[["']([^"']*)["']\]|"([^"]*)"|'([^']*)'|(True|False|N|[0-9]+)\b)"""
)
_FLAG_NAMES = {"add_bos": "bos", "add_eos": "eos", "engine": "tokenizer_engine"}
"""Argument of Python -> parameter of `prepare`, where they have different names."""


def in_flags(message: str, *commands: TyperCommand) -> str:
    """Return a message whose arguments of Python are flags, where the first of some commands that has them has one.

    A value that is left open (`text_field=...`) is left out.
    """

    def flag(match: re.Match[str]) -> str:
        name, *values = match.groups()
        value = next((value for value in values if value is not None), "")
        for command in commands:
            for option in command.params:
                if option.name not in (name, _FLAG_NAMES.get(name)) or not option.opts[0].startswith("--"):
                    continue
                if value == "False":
                    return option.secondary_opts[0] if option.secondary_opts else match.group()
                return " ".join((option.opts[0], *([value] if value not in ("", "True") else ())))
        return match.group()

    return _ARGUMENT.sub(flag, message)


MIN_NAME = 12
"""Characters to which a column of names may shrink."""

RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="Config of a run.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON.")]
Rebuild = Annotated[bool, typer.Option("--rebuild", help="Replace a finished store at OUT.")]
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
    bool, typer.Option("--to-native", help="Print the config as native TOML and stop; no store is opened.")
]
"""Type of the option --to-native; its default is False."""
# Facts that token files of other projects may lack.
Dtype = Annotated[str | None, typer.Option(help="Type of ids, where files do not say it: uint16, uint32, ...")]
VocabSize = Annotated[int | None, typer.Option(help="Number of ids that there are, where files do not say it.")]
EosId = Annotated[int | None, typer.Option(help="Id that ends a document, where the format has no boundaries.")]
BosId = Annotated[int | None, typer.Option(help="Id that starts a document.")]
Format = Annotated[str | None, typer.Option(help="Format of files of other projects; default: recognised.")]
TextsBy = Annotated[
    str | None,
    typer.Option("--tokenizer", "-t", help="What to show texts with; default: the copy kept with the store."),
]
Find = Annotated[
    str | None, typer.Option(metavar="FIELD=VALUE", help="Look for documents by a kept field, such as url=...")
]


def exit_code(error: Exception) -> int:
    """Return 2 for usage, a config, or a path that does not exist; 1 for anything that failed."""
    usage = (ConfigError, PlanError, MissingExtraError, FileNotFoundError, NotADirectoryError, IsADirectoryError)
    return 2 if isinstance(error, usage) and not isinstance(error, StoreCorruptError) else 1


# Options that were renamed

RENAMED = {("fork", "--to"): "--out", ("verify", "--hashes"): "--add-hashes", ("view", "--i-know"): "--expose"}
"""Command and old spelling -> new spelling; the old one is accepted with a warning until release 0.2."""


def with_new_names(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command line with new spellings of options; print a warning for each old one."""
    renamed = list(arguments)
    command = next(iter(arguments), "")
    end = renamed.index("--") if "--" in renamed else len(renamed)
    for place, argument in enumerate(renamed[:end]):
        old, equals, value = argument.partition("=")
        new = RENAMED.get((command, old))
        if new is not None:
            warn(f"{old} is deprecated; use {new}")
            renamed[place] = f"{new}{equals}{value}"
    return renamed


# What commands read


def find_documents(store: Store, text: str) -> list[int]:
    """Return the documents that --find means."""
    from tokenmill.store.records import keys_of_text, matches

    field, equals, value = text.partition("=")
    if not equals or not field:
        raise ConfigError(f"--find: expected FIELD=VALUE, got {text!r}; for example url=https://example.org")
    return [document for document, _ in matches(store, {field: keys_of_text(field, value)})]


def tokenizer_for(store: Store, spec: str | None) -> Tokenizer | None:
    """Open the tokenizer that made a store, to show its texts; where there is none, print why on stderr."""
    from tokenmill.run.inspect import tokenizer_of, why_no_texts

    tokenizer = tokenizer_of(store, spec)
    reason = why_no_texts(store) if tokenizer is None else None
    if reason is not None:
        warn(reason)
    return tokenizer


def open_run(file: Path, world_size: int | None = None) -> Run:
    """Read the config of a run, and print on stderr how a foreign one was read."""
    from tokenmill.config.run import logger
    from tokenmill.run.run import Run

    logger.disabled = True  # `show_notes` prints all of it
    try:
        run = Run.from_toml(file, world_size=world_size)
    finally:
        logger.disabled = False
    if run.translation:
        show_notes(run.translation)
    return run


def show_notes(translation: Translation) -> None:
    """Print on stderr how a foreign config was read, a note a line; nothing for a native one."""
    if translation.dialect == "native":
        return
    for line in (f"taken as a {translation.dialect} config:", *(f"  - {note}" for note in translation.notes)):
        print_note(messages.wording(line))


def check_file(option: str, file: Path | None) -> None:
    """Refuse a file that cannot be written, before anything is read; None: no file was asked for."""
    if file is None:
        return
    if file.is_dir():
        name = f"report{'.svg' if option == '--svg' else '.html'}"
        raise ConfigError(f"{option}: must be a file, got the folder {file}; name a file in it, such as {name}")
    if not file.absolute().parent.is_dir():
        raise ConfigError(
            f"{option}: must be a file in a folder that is there, got {file}; make {file.parent} first"
        )


# What commands write


def write_file(file: Path, text: str) -> None:
    """Write a page or a picture; an older one of that name stays until the new one is whole."""
    if file.exists() and not file.is_file():  # a pipe or a terminal
        file.write_text(text, encoding="utf-8")
    else:
        from tokenmill.store.durable import new_file

        with new_file(file.resolve()) as descriptor, open(descriptor, "wb", closefd=False) as out:
            out.write(text.encode())


LINE_SECONDS = 30.0
"""Seconds between lines of progress where no terminal shows a bar."""


@contextmanager
def progress(amount: Callable[[int], str] = "{:,}".format) -> Iterator[Callable[[str, int, int | None], None]]:
    """Show on stderr how far a command is: a bar on a terminal, else a line every 30 s.

    Yields a function to be called with what is done, how much of it, and how much there is, if that is known.
    """
    if not errors.is_terminal:
        last = time.monotonic()

        def tell(what: str, done: int, total: int | None) -> None:
            nonlocal last
            if time.monotonic() - last >= LINE_SECONDS:
                last = time.monotonic()
                share = f" of {amount(total)}, {done / total:.0%}" if total else ""
                print_note(f"{what}: {amount(done)}{share}")

        yield tell
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[of]}", markup=False),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=errors, transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int | None) -> None:
            of = f"{amount(done)} of {amount(total)}" if total else amount(done)
            if what not in tasks:
                tasks[what] = bar.add_task(what, of=of)
            bar.update(tasks[what], completed=done, total=total, of=of)

        yield show


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Show on stderr that a command is at work, where no end is known: on a terminal at once, else every 30 s."""
    if errors.is_terminal:
        with errors.status(Text(what)):
            yield
        return
    done, begin = threading.Event(), time.monotonic()

    def tell() -> None:
        while not done.wait(LINE_SECONDS):
            print_note(f"{what}: {time.monotonic() - begin:.0f} s so far")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def print_json(value: Any) -> None:  # noqa: ANN401 - any JSON value
    """Write a value as indented JSON and nothing else."""
    text = msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2)
    sys.stdout.write(escaped(text.decode()) + "\n")


def escaped(text: str) -> str:
    r"""Return JSON or TOML that means the same, but cannot control a terminal and holds no secret.

    >>> print(escaped('["\x9b1m \u202e"]'))
    ["\u009b1m \u202e"]
    """
    if not text.isprintable():
        odd = {c for c in text if category(c) in ("Cc", "Cf", "Zl", "Zp") and c != "\n" and c <= "\uffff"}
        text = text.translate({ord(c): f"\\u{ord(c):04x}" for c in odd})
    return without_secrets(text)


def print_native(translation: Translation) -> None:
    """Write a config as native TOML and nothing else, so that it can go to a file."""
    from tokenmill.config.run import to_toml

    sys.stdout.write(escaped(to_toml(translation.tables)))


def print_line(line: str) -> None:
    """Write a line as it is: no markup, no colours, not broken."""
    console.print(Text(without_secrets(line)), soft_wrap=True, highlight=False)


def print_note(line: str) -> None:
    """Write a line to stderr as it is."""
    errors.print(Text(without_secrets(line)), soft_wrap=True, highlight=False)


def show_error(message: str) -> None:
    """Write what is wrong to stderr."""
    text = Text.assemble(("error:", "bold red"), " ", without_secrets(message))
    errors.print(text, highlight=False, soft_wrap=True)


def printable(text: str) -> str:
    """Return a text that cannot control the terminal: no escape sequences, no bells, no reversed text."""
    return "".join(c if c.isprintable() else "⏎\n" if c == "\n" else "→" if c == "\t" else "\ufffd" for c in text)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table that only a command has."""
    console.print(_rich(title, columns, rows))


INDENT = 6
"""Of what stands below an entry."""


def print_entries(
    title: str, columns: Sequence[str], entries: Sequence[tuple[Sequence[object], Sequence[str]]]
) -> None:
    """Print a line for each entry, and below it texts that no column has room for."""
    texts = [list(columns), *([cell(value) for value in values] for values, _ in entries)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    numeric = [is_numeric(column) for column in zip(*(values for values, _ in entries), strict=True)]

    def line(values: Sequence[str]) -> Text:
        padded = zip(values, widths, numeric, strict=True)
        words = (text.rjust(width) if right else text.ljust(width) for text, width, right in padded)
        return Text(without_secrets("  ".join(words).rstrip()))

    console.print(Text(title, "bold"))
    for number, text in enumerate(texts):
        shown = line(text)
        if not number:
            shown.stylize("bold")
        console.print(shown, soft_wrap=True, highlight=False)
        for below in entries[number - 1][1] if number else ():
            console.print(Text(f"{' ' * INDENT}{without_secrets(below)}", "dim"), soft_wrap=True, highlight=False)


def show_table(data: Table) -> None:
    """Print a table of a report, which a page may have as well; its texts cannot control the terminal."""
    data = replace(data, rows=[[_shown(value) for value in row] for row in data.rows])
    if data.folded:
        print_table(data.title, data.columns, data.rows)
        return
    for part in fitting_tables(data, console.width):
        console.print(part)


def _shown(value: object) -> object:
    if isinstance(value, Bar):
        return "█" * round(40 * value.share)
    return printable(value) if isinstance(value, str) else value


def _rich(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> RichTable:
    """Make a table as rich has it; numbers stand to the right, other cells to the left."""
    lines = [list(row) for row in rows]
    filled = RichTable(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        numeric = is_numeric([line[index] for line in lines])
        # Names must not give way to numbers on a narrow terminal.
        least = None if numeric else min(MIN_NAME, max([len(name), *(len(cell(line[index])) for line in lines)]))
        filled.add_column(
            name, justify="right" if numeric else "left", overflow="fold", no_wrap=numeric, min_width=least
        )
    for line in lines:
        filled.add_row(*(value if isinstance(value, Text) else Text(cell(value)) for value in line))
    return filled


def fitting_tables(data: Table, width: int) -> list[RichTable]:
    """Return a table of which no number is cut: as several below each other, where not all columns fit a width.

    The first columns may be folded and stand in every one.
    """
    texts = [[name, *(cell(row[index]) for row in data.rows)] for index, name in enumerate(data.columns)]
    least = [_least(column, folded=index < data.names) for index, column in enumerate(texts)]
    fitting: list[RichTable] = []
    first = data.names
    while first < len(data.columns):
        last = first + 1
        while last < len(least) and _needed([*least[: data.names], *least[first : last + 1]]) <= width:
            last += 1
        chosen = [*range(data.names), *range(first, last)]
        part = _rich(
            f"{data.title}, continued" if fitting else data.title,
            [data.columns[index] for index in chosen],
            [[row[index] for index in chosen] for row in data.rows],
        )
        room = max(0, width - _needed([least[index] for index in chosen]))
        # All widths are set: where room is scarce, rich would take some from numbers as well. Names come last.
        for column, index in [*zip(part.columns, chosen, strict=True)][::-1]:
            column.width = min(max(map(cell_len, texts[index])), least[index] + room)
            column.min_width, column.no_wrap = None, False
            room -= column.width - least[index]
            if _is_estimate(texts[index]):
                column.justify = "right"
        fitting.append(part)
        first = last
    return fitting


def _least(texts: Sequence[str], *, folded: bool) -> int:
    """Return how narrow a column may be: a name may be folded, else it holds its longest word."""
    whole = max(map(cell_len, texts))
    if folded:
        return min(MIN_NAME, whole)
    return whole if _is_estimate(texts) else max(cell_len(word) for text in texts for word in text.split() or [""])


def _is_estimate(texts: Sequence[str]) -> bool:
    return any(text.startswith("about ") for text in texts)


def _needed(widths: Sequence[int]) -> int:
    """Return the width of a table whose columns have these widths, with a blank and a line around each."""
    return sum(widths) + 3 * len(widths) - 1


def place(text: str) -> Path | str:
    """Return a path that was given as an argument; an address of object storage stays a string."""
    return text if is_address(text) else Path(text)
