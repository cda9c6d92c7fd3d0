"""Every exception that tokenmill raises on purpose, and how it warns.

    TokenmillError
    ├── ConfigError(ValueError)        a run, recipe or option that cannot be right
    ├── DocumentError(ValueError)      an input record that cannot be read
    │   └── InputMissingError(FileNotFoundError)   no input at that path
    ├── TokenizerError(ValueError)     a tokenizer that cannot be loaded or trusted
    │   └── TokenizerMissingError(FileNotFoundError)   no tokenizer at that path
    ├── StoreError(ValueError)         a store that cannot be used
    │   ├── StoreMissingError(FileNotFoundError)   nothing, or nothing finished, at that path
    │   ├── StoreExistsError(FileExistsError)      something finished is already there
    │   ├── StoreBusyError(BlockingIOError)        another process writes to it now
    │   ├── StoreCorruptError                      its files do not match its manifest
    │   │   └── StoreFileMissingError(StoreMissingError)   a file that its manifest lists does not exist
    │   └── StoreUnreachableError(ConnectionError) object storage did not answer in time
    ├── PlanError(IndexError)          a step, row or document outside the plan
    ├── ResumeError(ValueError)        a state that this run must not continue
    ├── WorkerLostError(RuntimeError)  work that was lost with a process or a machine: to try again may help
    └── MissingExtraError(ImportError) a framework that an adapter needs is not installed

A message states the problem, its value, and the way out. It names options as arguments of Python, such as
`workers=1` or `text_field=...`; the command line prints them as its flags.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from operator import index
from unicodedata import category

_SECRETS = re.compile(
    r"""(\w\w:/{1,2})(?:[^/\s'"]*@|[^/\s:@'"]*:(?!\d*(?:[/\s'"]|$))[^\s@'"]*@)"""
    r"""|(\bhf:)(?!(?!hf_)[\w.-]+(?:/[\w.-]+)?@[\w./-]+(?!:?[\w.@/-]))[^\s'"]*@"""
)
"""User and password of an address, also if `Path` removed a slash or a key contains slashes, and the text before
the @ of a dataset written like an address. NAME@REVISION is not a secret, unless it begins like a token."""


def without_secrets(text: str) -> str:
    """Return a text whose addresses have neither users nor passwords.

    >>> without_secrets("s3://KEY:SEC/RET@bucket/a: no file, got https://me:SECRET@host:80/b@c")
    's3://bucket/a: no file, got https://host:80/b@c'
    >>> without_secrets("hf:me:SEC/RET@data: no dataset")
    'hf:data: no dataset'
    >>> without_secrets("hf:org/name@main exists, hf:me:SECRET@main does not")
    'hf:org/name@main exists, hf:main does not'
    """
    return _SECRETS.sub(r"\1\2", text) if "@" in text else text


def harmless(text: str) -> str:
    r"""Return a text that cannot control a terminal: no escape sequences, no reversed text; and without secrets.

    >>> harmless("a\x1b[31m b\u202e").count("\ufffd")
    2
    """
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c in "\n\t" or category(c) == "Zs" else "\ufffd" for c in text)
    return without_secrets(text)


wording: Callable[[str], str] = str
"""What `warn` makes of a message before it prints it. The command line sets it while it runs, to print flags."""


def warn(message: str) -> None:
    """Print a warning on stderr, unless the logger `tokenmill` has a higher level."""
    if not logging.getLogger("tokenmill").isEnabledFor(logging.WARNING):
        return
    from rich.console import Console
    from rich.text import Text

    text = Text(harmless(f"warning: {wording(message)}"), style="bold yellow")
    Console(stderr=True).print(text, soft_wrap=True)


class TokenmillError(Exception):
    """Base of all errors that tokenmill raises on purpose. Passwords in addresses are removed from messages.

    Args:
        args: The message, with the problem, its value, and the way out.

    Examples:
        >>> import tokenmill as tm
        >>> try:
        ...     tm.open_store("nowhere")
        ... except tm.TokenmillError as error:
        ...     print(type(error).__name__)
        StoreMissingError
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(without_secrets(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(TokenmillError, ValueError):
    """A config, recipe, option or argument is wrong. It is a ValueError as well.

    Examples:
        >>> import tokenmill as tm
        >>> try:
        ...     tm.RunConfig(steps=10, global_batch_size=8, seq_len=-1)
        ... except tm.ConfigError as error:
        ...     print(str(error).partition(";")[0])
        run: seq_len must be at least 1, got -1
    """


class DocumentError(TokenmillError, ValueError):
    """An input record that cannot be read."""


class InputMissingError(DocumentError, FileNotFoundError):
    """No input file, folder or match of a glob at a path."""


class TokenizerError(TokenmillError, ValueError):
    """A tokenizer that cannot be loaded or trusted."""


class TokenizerMissingError(TokenizerError, FileNotFoundError):
    """No tokenizer at a path."""


class StoreError(TokenmillError, ValueError):
    """A store cannot be used, or not be written. It is a ValueError as well.

    Subclasses separate missing, existing, busy and corrupt stores: see `tokenmill.errors`.

    Examples:
        >>> import tokenmill as tm
        >>> try:
        ...     tm.import_store("stores/demo", out="stores/copy")
        ... except tm.StoreError as error:
        ...     print(type(error).__name__)
        StoreError
    """


class StoreMissingError(StoreError, FileNotFoundError):
    """Nothing, or nothing finished, at the path of a store."""


class StoreExistsError(StoreError, FileExistsError):
    """A finished store exists at the path of a new one."""


class StoreBusyError(StoreError, BlockingIOError):
    """Another process writes to the folder of a store now."""


class StoreCorruptError(StoreError):
    """The files of a store do not match its manifest."""


class StoreFileMissingError(StoreCorruptError, StoreMissingError):
    """A file that the manifest of a store lists does not exist."""


class StoreUnreachableError(StoreError, ConnectionError):
    """Object storage did not answer, or not in time."""


class PlanError(TokenmillError, IndexError):
    """A step, row or document outside the plan."""


class ResumeError(TokenmillError, ValueError):
    """A saved state belongs to another run, or is damaged. It is a ValueError as well.

    Examples:
        >>> import tokenmill as tm
        >>> loader = tm.Run.from_toml("run.toml").loader()
        >>> loader.seek(66)
        >>> other = tm.Run.build("stores/demo", seq_len=128, global_batch_size=8, steps=132, seed=1)
        >>> try:
        ...     other.loader().load_state_dict(loader.state_dict())
        ... except tm.ResumeError:
        ...     print("the state is of another run")
        the state is of another run
    """


class WorkerLostError(TokenmillError, RuntimeError):
    """Work that was lost with a process or a machine, for no fault of the data: to try again may help."""


class MissingExtraError(TokenmillError, ImportError):
    """A framework that an adapter needs is not installed."""


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors of the system that say that a file cannot grow."""


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name a file in an error of the system that names none: a failed write on a full disk does not."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise


def met_in(where: str, error: TokenmillError) -> TokenmillError:
    """Return an error of the same kind that also says where it was met: it keeps its own rule and way out.

    >>> met_in("a.parquet: row group 3", TokenizerError("id 7: must be below 5, got 7; use its own ids"))
    TokenizerError('a.parquet: row group 3: id 7: must be below 5, got 7; use its own ids')
    """
    return type(error)(f"{where}: {error}")


def whole(what: str, value: object, error: type[TokenmillError], way_out: str) -> int:
    """Return a whole number, of Python or of numpy, as one of Python; reject all other values."""
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        raise error(f"{what}: expected a whole number, got {value!r}; {way_out}") from None


def nearest(name: object, known: Iterable[str], otherwise: str | None = None) -> str:
    """Return the end of an error message: the known name that is nearest; if none is near, all, or `otherwise`.

    >>> nearest("seqlen", ["seq_len", "seed"])
    "did you mean 'seq_len'?"
    """
    options = list(known)
    close = get_close_matches(str(name), options, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else otherwise or f"known: {', '.join(options)}"
