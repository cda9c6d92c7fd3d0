"""How the command line reads and writes: shared options, tables for people, JSON for programs."""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any
from unicodedata import category

import msgspec
import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from tokenmill import errors as messages
from tokenmill.cli.tables import printable as printable  # noqa: PLC0414 - commands have it from here
from tokenmill.cli.tables import table_lines, wrapped
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
from tokenmill.progress import Display, display, lines_while_busy, say_nothing
from tokenmill.tables import is_address
from tokenmill.view.tables import FACTS, Table
from tokenmill.view.tables import megabytes as megabytes  # noqa: PLC0414 - commands have it from here

if TYPE_CHECKING:
    from typer.core import TyperCommand

    from tokenmill.cli.summary import Part
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


def is_quiet() -> bool:
    """Return whether only errors and results are printed, as after --quiet."""
    return not logging.getLogger(LOGGER).isEnabledFor(logging.WARNING)


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only results and errors")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print debug messages")]


def with_loudness(command: Callable[..., None]) -> Callable[..., None]:
    """Add --quiet and --verbose to a command; they override TOKENMILL_LOG."""
    signature = inspect.signature(command, eval_str=True)

    @wraps(command)
    def run(*, quiet: bool, verbose: bool, **values: Any) -> None:  # noqa: ANN401 - those of the command
        if quiet and verbose:
            raise ConfigError("--quiet: cannot be combined with --verbose; remove one")
        if quiet or verbose:
            set_log_level("error" if quiet else "debug")
        command(**values)

    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in (("quiet", Quiet), ("verbose", Verbose))
    ]
    own = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in signature.parameters.values()]
    run.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in (*own, *added)}
    return run


class _LogPrinter(logging.Handler):
    """Prints log records on stderr, and only warnings and errors of other packages, as Python does by default."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Pass records of tokenmill at any level that its logger has, and warnings of others."""
        is_ours = record.name.partition(".")[0] == LOGGER
        return (is_ours or record.levelno >= logging.WARNING) and bool(super().filter(record))

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        _print_plain(self.format(record))


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _print_plain("".join(traceback.format_exception(kind, error, trace)).rstrip())


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

    A value that is left open (`text_field=...`) is left out. A message that begins with the name of an option, such
    as `on_error: expected ...`, begins with its flag.
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

    name, colon, rest = message.partition(": expected ")
    long = f"--{name.replace('_', '-')}"
    if (
        colon
        and name not in _FLAG_NAMES
        and any(long in param.opts for each in commands[:1] for param in each.params)
    ):
        message = f"{long}{colon}{rest}"
    return _ARGUMENT.sub(flag, message)


RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="Config of a run")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON")]
Full = Annotated[bool, typer.Option("--full", help="Print all tables, not a summary")]
Rebuild = Annotated[bool, typer.Option("--rebuild", help="Replace a finished store at OUT")]
WorldSize = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Number of ranks, for KempnerForge and torchtitan configs",
    ),
]
"""Type of the option --world-size; its default is None."""
ToNative = Annotated[bool, typer.Option("--to-native", help="Print the config as native TOML and stop")]
"""Type of the option --to-native; its default is False."""
# Facts that token files of other projects may lack.
TOKEN_FILES = "Third-party token files"
Dtype = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Type of the ids, such as uint16", rich_help_panel=TOKEN_FILES),
]
VocabSize = Annotated[
    int | None, typer.Option(metavar="N", help="Size of the vocabulary", rich_help_panel=TOKEN_FILES)
]
EosId = Annotated[
    int | None, typer.Option(metavar="ID", help="Id at the end of each document", rich_help_panel=TOKEN_FILES)
]
BosId = Annotated[
    int | None, typer.Option(metavar="ID", help="Id at the start of each document", rich_help_panel=TOKEN_FILES)
]
Format = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Format of the files", show_default="detected", rich_help_panel=TOKEN_FILES),
]
TextsBy = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        "-t",
        metavar="SPEC",
        help="Tokenizer for the texts",
        show_default="the copy in the store",
    ),
]
Find = Annotated[
    str | None, typer.Option(metavar="FIELD=VALUE", help="Documents with a kept field, such as url=ADDRESS")
]


def listed(texts: Sequence[str] | None) -> list[str]:
    """Return the items of an option that may be repeated, each time with a list that has commas.

    >>> listed(["id,url", "date"]), listed(None), listed([""])
    (['id', 'url', 'date'], [], [])
    """
    return [item for text in texts or () if text for item in text.split(",")]


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
    """Open the tokenizer that made a store, to show its texts; print a warning if it is missing."""
    from tokenmill.inspect.stores import tokenizer_of, why_no_texts

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
        raise ConfigError(f"{option}: expected a file, got the folder {file}; name a file in it, such as {name}")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"{option}: folder not found: {file.parent}; create it first")


# What commands write


def write_file(file: Path, text: str) -> None:
    """Write a page or a picture; an older one of that name stays until the new one is whole."""
    if file.exists() and not file.is_file():  # a pipe or a terminal
        file.write_text(text, encoding="utf-8")
    else:
        from tokenmill.store.files import new_file

        with new_file(file.resolve()) as descriptor, open(descriptor, "wb", closefd=False) as out:
            out.write(text.encode())


@contextmanager
def progress(amount: Callable[[int], str] = "{:,}".format) -> Iterator[Display]:
    """Show the progress of a command on stderr: a bar on a terminal, a line every 30 s elsewhere."""
    if is_quiet():
        yield say_nothing
        return
    with display(amount, print_note, errors if errors.is_terminal else None) as show:
        yield show


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Show on stderr that a command is at work, where no end is known: on a terminal at once, else every 30 s."""
    if is_quiet():
        yield
        return
    if errors.is_terminal:
        with errors.status(Text(what)):
            yield
        return
    with lines_while_busy(what, print_note):
        yield


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
    """Write a line to stderr as it is, unless --quiet leaves it out."""
    if not is_quiet():
        _print_plain(line)


def _print_plain(line: str) -> None:
    errors.print(Text(without_secrets(line)), soft_wrap=True, highlight=False)


def show_error(message: str) -> None:
    """Print an error on stderr."""
    text = Text.assemble(("error:", "bold red"), " ", without_secrets(message))
    errors.print(text, highlight=False, soft_wrap=True)


def print_sentence(sentence: str, kind: str = "") -> None:
    """Print a sentence, wrapped between words; it begins with its kind, such as a warning, if it has one."""
    text = without_secrets(f"{kind}: {sentence}" if kind else sentence)
    first, *more = wrapped(text, console.width - INDENT)
    start = Text(first)
    start.stylize("bold yellow" if kind == "warning" else "bold", 0, len(kind) + 1 if kind else 0)
    for line in (start, *(Text(" " * INDENT + line) for line in more)):
        console.print(line, soft_wrap=True, highlight=False)


INDENT = 2
"""Of the second line of a sentence."""
BELOW = 6
"""Of texts below a row of a table."""


def print_parts(parts: Iterable[Part]) -> None:
    """Print tables and sentences, with a blank line before and after each table."""
    before: Part | None = None
    for part in parts:
        if before is not None and (isinstance(before, Table) or isinstance(part, Table)):
            console.print()
        if isinstance(part, Table):
            show_table(part)
        else:
            print_sentence(part[1], part[0])
        before = part


def facts_table(title: str, facts: Iterable[tuple[str, object]]) -> Table:
    """Return a table of names and values."""
    return Table(title=title, columns=FACTS, rows=list(facts))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table that only a command has."""
    show_table(Table(title=title, columns=columns, rows=list(rows)))


def show_table(data: Table, below: Sequence[Sequence[str]] = ()) -> None:
    """Print a table of a report; its texts cannot control the terminal.

    `below` has texts for each row, which are printed below it.
    """
    for text in wrapped(without_secrets(printable(data.title)), console.width) if data.title else ():
        console.print(Text(text, "bold"), soft_wrap=True, highlight=False)
    header = tuple(data.columns) != FACTS
    for number, lines in enumerate(table_lines(data, console.width)):
        for line in lines:
            console.print(line, soft_wrap=True, highlight=False)
        for text in below[number - header] if header <= number < len(below) + header else ():
            for words in wrapped(without_secrets(text), console.width - BELOW):
                console.print(Text(" " * BELOW + words, "dim"), soft_wrap=True, highlight=False)


def place(text: str) -> Path | str:
    """Return a path that was given as an argument; an address of object storage stays a string."""
    return text if is_address(text) else Path(text)
