"""A string that knows, of every character, whether the template wrote it or where in the record it stood.

Also how much work a template may do for one render: what makes or reads strings counts it.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any, SupportsIndex, TypeAlias, TypeVar

from tokenmill.encode import Refusal

try:
    import resource
except ImportError:  # on Windows, which has no limits of this kind
    resource = None  # type: ignore[assignment]

# How much work a template may do for one render.

MAX_STEPS = 2_000_000
"""Loop rounds and blocks of 256 characters that one render may take; a call counts as 16."""
MAX_CHARS = 1 << 24
"""Characters that one string of a render may have."""
LONG = 4096
"""Characters from which on a string counts wherever it is copied or looked through."""

MAX_SECONDS = 10.0
"""Processor time that one record may take: some steps take longer than others, so counting them is not enough."""
MAX_BYTES = 1 << 30
"""Memory that one record may take, beyond what the process has already."""
is_worker = False
"""Whether this process is a worker of a build, which nothing else uses. Only there may the system limit the memory
of the process, interrupt it by signals, and end it where a render does not stop."""
_STEPS_BETWEEN = 1 << 12
"""Steps between two checks of the time and memory that a render takes. A check takes some microseconds."""
_STEP_BYTES = 1 << 14
"""Memory that a step takes at most."""

T = TypeVar("T")

_left: ContextVar[list[int]] = ContextVar("steps until the next check, and after it")
_begun: ContextVar[list[float]] = ContextVar("time and memory at the start of a record, and its steps so far")


@contextmanager
def during(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Give a context variable a value for the time of a render."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def budget(steps: int = MAX_STEPS) -> AbstractContextManager[None]:
    """Allow a render so many steps, at most what is left of a budget around it; without one nothing is counted."""
    around = _left.get(None)
    if around is not None:
        steps = min(steps, sum(around))
    return during(_left, [min(steps, _STEPS_BETWEEN), max(0, steps - _STEPS_BETWEEN)])


@contextmanager
def limits() -> Iterator[Callable[[], None]]:
    """Refuse records that take too much time or memory, whatever a template does; the value starts the next record.

    In a worker of a build the system holds the main thread to both: nothing else can stop Python in the middle of
    one long operation. Elsewhere the process belongs to the user and is not changed. There the thread looks at its
    own time, and at the memory of the process, while it counts steps.
    """
    if _begun.get(None) is not None:
        yield lambda: None
        return
    begun = [math.inf, 0.0, 0.0]
    token = _begun.set(begun)
    try:
        if is_worker and threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
            with _limits_of_system() as start:
                yield start
        else:

            def start_here() -> None:
                begun[:] = time.thread_time(), 0.0, 0.0

            start_here()
            yield start_here
    except MemoryError as error:
        raise too_much_memory() from error
    finally:
        _begun.reset(token)


@contextmanager
def _limits_of_system() -> Iterator[Callable[[], None]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    signal.signal(signal.SIGVTALRM, _stop)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    records = 0

    def start() -> None:
        nonlocal records
        # Processor time is the same under load. The timer repeats, as code that the template calls may catch the
        # first error.
        signal.setitimer(signal.ITIMER_VIRTUAL, MAX_SECONDS, 0.1)
        signal.setitimer(signal.ITIMER_PROF, 3 * MAX_SECONDS)
        # Reading the memory in use takes longer than some renders, and it hardly grows in a few records.
        used = 0 if records % 8 else _memory(_DATA) or 0
        if used:
            resource.setrlimit(resource.RLIMIT_DATA, (min(soft % (1 << 64), used + MAX_BYTES), hard))
        records += 1

    try:
        start()
        yield start
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


_RESIDENT, _DATA = 1, 5
"""Columns of `/proc/self/statm`: pages in memory, and pages that count for the limit."""


def _memory(column: int) -> int | None:
    """Return the bytes that this process has; None where the system does not say."""
    try:
        statm = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:  # no Linux
        return None
    try:
        return int(os.read(statm, 256).split()[column]) * resource.getpagesize()
    finally:
        os.close(statm)


def too_much_memory() -> Refusal:
    """Return the refusal of a record whose render takes too much memory."""
    return Refusal("too_large", f"the template takes more than {MAX_BYTES >> 20} MB of memory")


def _too_slow() -> Refusal:
    return Refusal("too_slow", f"the template takes more than {MAX_SECONDS:g} s of the processor")


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise _too_slow()


def charge(steps: int = 1) -> None:
    """Take steps from the budget; refuse when it is used up."""
    # A list that is changed in place: to set a context variable costs more than the string that is counted.
    left = _left.get(None)
    if left is not None:
        left[0] -= steps
        if left[0] < 0:
            _check_limits(left)


def _check_limits(left: list[int]) -> None:
    """Go on with the budget, if some is left, unless the record has taken too much time or memory."""
    steps = min(left[1], _STEPS_BETWEEN - left[0])
    left[0] += steps
    left[1] -= steps
    if left[0] < 0:
        raise Refusal("too_many_steps", "the template takes more steps than a render may")
    begun = _begun.get(None)
    if begun is None or begun[0] == math.inf:
        return
    if time.thread_time() - begun[0] > MAX_SECONDS:
        raise _too_slow()
    memory = _memory(_RESIDENT) or 0
    begun[1] = begun[1] or memory
    begun[2] += _STEPS_BETWEEN
    # Other threads take memory as well: a record with few steps cannot have taken it.
    if memory - begun[1] > MAX_BYTES and begun[2] * _STEP_BYTES > MAX_BYTES:
        raise too_much_memory()


def charge_size(num_chars: int, num_parts: int = 0) -> None:
    """Take the cost of a string or list of this length, made of so many parts; refuse one that is too long."""
    if num_chars > MAX_CHARS:
        raise Refusal("too_large", f"the template makes {num_chars} characters or items, over {MAX_CHARS}")
    charge(1 + num_parts + num_chars // 256)


_SCALARS = (bool, int, float, type(None))


def charge_text(value: object) -> None:
    """Take the cost of writing a value as a text, before it is written: all strings in it, however deep.

    An object that is neither JSON nor undefined raises `TypeError`, as its text could have any length.
    """
    from jinja2 import Undefined  # late: conversations are marked where no template is opened

    pending, num_chars = [value], 0
    while pending:
        inner = pending.pop()
        if isinstance(inner, str):
            num_chars += len(inner)
        elif isinstance(inner, list | tuple | Mapping):
            charge(1 + len(inner))
            items = [*inner, *inner.values()] if isinstance(inner, Mapping) else inner
            pending += [item for item in items if not isinstance(item, _SCALARS)]
        elif not isinstance(inner, (*_SCALARS, Undefined)):
            raise TypeError(f"a template may not print a {type(inner).__name__}")
    charge_size(num_chars)


# Strings that are followed.

Run: TypeAlias = tuple[int, int, int]
"""Adjacent characters: how many, the mark of the first, and the step from one mark to the next: 0 or 1."""

AUTHORED = 0
"""The mark of a character that the template wrote. A positive mark is a place in the record."""
UNKNOWN = -1
"""The mark of a character that came out of an operation which is not followed."""
GENERATION = 1 << 48
"""Added to the mark of a character that was written inside a `{% generation %}` block."""


def _cased(change: Callable[[str], str]) -> Callable[[Tracked], Tracked]:
    """Return a method that changes case; where the length changes, each character is marked on its own."""

    def method(self: Tracked) -> Tracked:
        text = change(self)
        charge_size(len(text))
        if self._runs is None or len(text) == len(self):
            return marked(text, self._runs)
        pieces = [change(char) for char in str.__iter__(self)]
        if "".join(pieces) == text:
            return marked(text, widened(self._runs, [len(piece) for piece in pieces]))
        return marked(text, [(len(text), UNKNOWN, 0)])

    return method


class Tracked(str):
    """A string with a mark for each character, kept as runs: most texts are one run.

    Operations that are not overridden give a plain `str`, and a plain `str` that meets a tracked one is marked
    `UNKNOWN`: nothing is ever taken for the template's own by mistake.
    """

    __slots__ = ("_runs",)
    _runs: Sequence[Run] | None

    def __new__(cls, value: object = "") -> Tracked:
        """Make a string of unknown origin, unless the value is tracked; `marked` makes one of known origin."""
        text = str(value)
        self = str.__new__(cls, text)
        self._runs = _runs_of(text)
        return self

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> Tracked:
        return join((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> Tracked:
        return join((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> Tracked:
        charge_size(len(self) * max(0, count.__index__()))
        if self._runs is None:
            return authored(str.__mul__(self, count))
        return join([self] * count.__index__())

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:  # noqa: ANN401 - whatever a template formats
        if re.search(r"%[^a-zA-Z(]", self.replace("%%", "")):
            raise Refusal("template_error", f"a width in {str.__str__(self)!r} is not supported")
        if not isinstance(values, tuple):
            values = (values,)
        pieces = [self[match.start() : match.end()] for match in re.finditer(r"%[%s]|[^%]+|%", self)]
        if any(piece[0] == "%" and piece not in ("%s", "%%") for piece in pieces):
            charge_text(values)
            return str.__mod__(self, values)
        left = list(values)
        if sum(piece == "%s" for piece in pieces) != len(left):
            raise TypeError("not as many arguments as the format string has places")
        filled = [
            text_of(left.pop(0)) if piece == "%s" else piece[:1] if piece == "%%" else piece for piece in pieces
        ]
        return join(filled)

    def __rmod__(self, other: str) -> str:
        return Tracked(other) % (self,) if isinstance(other, str) else NotImplemented

    def __getitem__(self, key: SupportsIndex | slice) -> Tracked:
        text = str.__getitem__(self, key)
        if self._runs is None or not text:
            return authored(text)
        if not isinstance(key, slice):
            at = key.__index__() % len(self)
            return marked(text, _cut(self._runs, at, at + 1))
        begin, end, step = key.indices(len(self))
        if step == 1:
            return marked(text, _cut(self._runs, begin, end))
        charge(len(text))  # a run a character takes memory
        return marked(text, [run for at in range(begin, end, step) for run in _cut(self._runs, at, at + 1)])

    def __iter__(self) -> Iterator[str]:
        return (self[at] for at in range(len(self)))

    def lstrip(self, chars: str | None = None, /) -> Tracked:
        """Do what `str` does."""
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None, /) -> Tracked:
        """Do what `str` does."""
        return self[: len(str.rstrip(self, chars))]

    def strip(self, chars: str | None = None, /) -> Tracked:
        """Do what `str` does."""
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str, /) -> Tracked:
        """Do what `str` does."""
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> Tracked:
        """Do what `str` does."""
        return self[: len(self) - len(suffix)] if suffix and self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """Do what `str` does."""
        return self._located(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """Do what `str` does."""
        return self._located(str.rsplit(self, sep, maxsplit), sep)

    def _located(self, parts: list[str], sep: str | None) -> list[str]:
        charge_size(len(self), len(parts))
        located: list[str] = []
        at = 0
        for part in parts:
            at = self.find(part, at) if sep is None else at
            located.append(self[at : at + len(part)])
            at += len(part) + (0 if sep is None else len(sep))
        return located

    def splitlines(self, keepends: bool = False) -> list[str]:
        """Do what `str` does."""
        lines: list[str] = []
        at = 0
        wholes = str.splitlines(self, True)
        charge_size(len(self), len(wholes))
        for whole, bare in zip(wholes, str.splitlines(self), strict=True):
            lines.append(self[at : at + len(whole if keepends else bare)])
            at += len(whole)
        return lines

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        """Do what `str` does."""
        at = self.find(sep)
        return (self, self[:0], self[:0]) if at < 0 else self._cut(at, sep)

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        """Do what `str` does."""
        at = self.rfind(sep)
        return (self[:0], self[:0], self) if at < 0 else self._cut(at, sep)

    def _cut(self, at: int, sep: str) -> tuple[str, str, str]:
        if not sep:
            raise ValueError("empty separator")
        return self[:at], self[at : at + len(sep)], self[at + len(sep) :]

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        """Do what `str` does."""
        times = self.count(old) if count.__index__() < 0 else min(count.__index__(), self.count(old))
        charge_size(len(self) + times * max(0, len(new) - len(old)))
        if not old:
            return str.replace(self, old, new, count)
        return join(between(new, self.split(old, count)))

    def join(self, values: Iterable[str], /) -> Tracked:
        """Do what `str` does."""
        return join(between(self, values))

    lower = _cased(str.lower)
    upper = _cased(str.upper)
    casefold = _cased(str.casefold)
    capitalize = _cased(str.capitalize)
    title = _cased(str.title)
    swapcase = _cased(str.swapcase)


def marked(text: str, runs: Sequence[Run] | None) -> Tracked:
    """Return a string with these marks; None marks all of it as the template's own."""
    if len(text) > LONG:
        charge_size(len(text))
    self = str.__new__(Tracked, text)
    self._runs = runs
    return self


def authored(text: str) -> Tracked:
    """Return a text as the template's own."""
    return marked(text, None)


def placed(text: str, first: int) -> Tracked:
    """Return a string of the record, whose first character has this mark and each further one the next."""
    self = str.__new__(Tracked, text)
    self._runs = ((len(text), first, 1),)
    return self


def join(pieces: Iterable[str]) -> Tracked:
    """Lay strings end to end."""
    parts = list(pieces)
    charge_size(sum(map(len, parts)), len(parts))
    text = "".join(parts)
    runs: list[Run] = []
    own = 0
    for part in parts:
        inner = part._runs if type(part) is Tracked else _runs_of(part)
        if inner is None:
            own += len(part)
            continue
        if own:
            runs.append((own, AUTHORED, 0))
            own = 0
        runs += inner
    if not runs:
        return authored(text)
    if own:
        runs.append((own, AUTHORED, 0))
    return marked(text, runs)


def runs_of(text: str) -> Sequence[Run]:
    """Return the runs of a string, which cover all of it; a plain string is `UNKNOWN`."""
    runs = _runs_of(text)
    return ((len(text), AUTHORED, 0),) if runs is None and text else runs or ()


def generated(text: str) -> str:
    """Mark a text as written inside a generation block; a plain one has no marks."""
    if type(text) is not Tracked:
        return text
    return marked(
        text,
        [(size, first if first == UNKNOWN else first | GENERATION, step) for size, first, step in runs_of(text)],
    )


def widened(runs: Sequence[Run], widths: list[int]) -> list[Run]:
    """Return the runs of a text in which each character has become as many as its width."""
    charge(len(widths) - widths.count(1))
    wide: list[Run] = []
    at = 0
    for size, first, step in runs:
        if step == 0:
            wide.append((sum(widths[at : at + size]), first, 0))
        else:
            begin = at
            for index in range(at, at + size):
                if widths[index] != 1:
                    wide += [(index - begin, first + begin - at, 1)] if index > begin else []
                    wide += [(widths[index], first + index - at, 0)] if widths[index] else []
                    begin = index + 1
            wide += [(at + size - begin, first + begin - at, 1)] if at + size > begin else []
        at += size
    return wide


def _runs_of(text: str) -> Sequence[Run] | None:
    if type(text) is Tracked:
        return text._runs
    return ((len(text), UNKNOWN, 0),) if text else None


def _cut(runs: Sequence[Run], begin: int, end: int) -> Sequence[Run]:
    """Return the runs of the characters from `begin` to `end`, exclusive."""
    if len(runs) == 1:
        _, first, step = runs[0]
        return ((end - begin, first + begin * step, step),)
    cut: list[Run] = []
    at = 0
    for size, first, step in runs:
        low, high = max(begin, at), min(end, at + size)
        if low < high:
            cut.append((high - low, first + (low - at) * step, step))
        at += size
        if at >= end:
            break
    return cut


def between(separator: str, values: Iterable[Any]) -> Iterator[Any]:
    """Yield values with a separator between them."""
    for index, value in enumerate(values):
        if index:
            yield separator
        yield value


# JSON and Python text of values, with the characters of the strings inside followed.


def tojson(
    x: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> Tracked:
    """Write JSON as transformers' filter of that name does: `json.dumps`, nothing escaped for HTML."""
    default = (", ", ": ") if indent is None else (",", ": ")
    item, key = separators or default
    writer = _Json(ensure_ascii=ensure_ascii, indent=indent, item=item, key=key, sort_keys=sort_keys)
    return join(writer.pieces(x, 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Json:
    ensure_ascii: bool
    indent: int | None
    item: str
    key: str
    sort_keys: bool

    def pieces(self, value: object, depth: int) -> Iterator[str]:
        charge_size(1)
        if isinstance(value, str):
            yield _escaped(value, json.dumps(value, ensure_ascii=self.ensure_ascii), self._width)
        elif isinstance(value, _SCALARS):
            yield authored(json.dumps(value))
        elif isinstance(value, Mapping):
            pairs = sorted(value.items()) if self.sort_keys else list(value.items())
            yield from self._container("{}", [(self._key(name), item) for name, item in pairs], depth)
        elif isinstance(value, list | tuple):
            yield from self._container("[]", [(None, item) for item in value], depth)
        else:
            raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")

    def _width(self, char: str) -> int:
        return len(json.dumps(char, ensure_ascii=self.ensure_ascii)) - 2

    def _key(self, name: object) -> object:
        """Turn a key that is no string into one, as JSON does."""
        if isinstance(name, str):
            return name
        if isinstance(name, _SCALARS):
            return authored(json.dumps(name))
        raise TypeError(f"keys must be str, int, float, bool or None, not {type(name).__name__}")

    def _container(self, brackets: str, pairs: list[tuple[object, object]], depth: int) -> Iterator[str]:
        yield authored(brackets[0])
        for index, (name, item) in enumerate(pairs):
            yield authored((self.item if index else "") + self._line(depth + 1))
            if brackets == "{}":
                yield from self.pieces(name, depth)
                yield authored(self.key)
            yield from self.pieces(item, depth + 1)
        yield authored((self._line(depth) if pairs else "") + brackets[1])

    def _line(self, depth: int) -> str:
        if self.indent is None:
            return ""
        charge_size(self.indent * depth)
        return "\n" + " " * (self.indent * depth)


def text_of(value: object) -> Tracked:
    """Return what a template prints for a value: `str`, with the characters of strings inside followed.

    A value whose text would hold an address is refused.
    """
    if type(value) is Tracked:
        return value
    from jinja2 import Undefined  # late: conversations are marked where no template is opened

    if isinstance(value, str):
        return Tracked(value)
    if isinstance(value, (*_SCALARS, Undefined)):
        return authored(str(value))
    return join(_represented(value))


def _represented(value: object) -> Iterator[str]:
    """Yield the pieces of what `repr` writes."""
    charge_size(1)
    if isinstance(value, str):
        text = repr(str.__str__(value))
        yield _escaped(value, text, lambda char: 2 if char == text[0] else len(repr(char)) - 2)
    elif isinstance(value, _SCALARS):
        yield authored(repr(value))
    elif isinstance(value, Mapping):
        yield authored("{")
        for index, (name, item) in enumerate(value.items()):
            yield authored(", " if index else "")
            yield from _represented(name)
            yield authored(": ")
            yield from _represented(item)
        yield authored("}")
    elif isinstance(value, list | tuple):
        opening, closing = "[]" if isinstance(value, list) else "()"
        yield authored(opening)
        for index, item in enumerate(value):
            yield authored(", " if index else "")
            yield from _represented(item)
        yield authored(",)" if isinstance(value, tuple) and len(value) == 1 else closing)
    else:
        raise TypeError(f"a template may not print a {type(value).__name__}")


def _escaped(source: str, text: str, width: Callable[[str], int]) -> Tracked:
    """Mark a quoted text by the characters that it quotes; `width` says how many it makes of one."""
    runs = runs_of(source)
    if len(text) != len(source) + 2:
        bare = str.__str__(source)
        widths = {char: width(char) for char in set(bare)}
        runs = widened(runs, [widths[char] for char in bare])
    return marked(text, [(1, AUTHORED, 0), *runs, (1, AUTHORED, 0)])
