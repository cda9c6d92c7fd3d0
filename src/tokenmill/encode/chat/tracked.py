"""A string that records the origin of every character: the template, or a place in the record."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeAlias

from tokenmill.encode import Refusal

_SCALARS = (bool, int, float, type(None))


# Tracked strings.

Run: TypeAlias = tuple[int, int, int]
"""Adjacent characters: how many, the mark of the first, and the step from one mark to the next: 0 or 1."""

AUTHORED = 0
"""Mark of a character that the template wrote. A positive mark is a place in the record."""
UNKNOWN = -1
"""Mark of a character from an operation that is not tracked."""
GENERATION = 1 << 48
"""Added to the mark of a character within a `{% generation %}` block."""


def _cased(change: Callable[[str], str]) -> Callable[[Tracked], Tracked]:
    """Return a method that changes case; where the length changes, each character is marked on its own."""

    def method(self: Tracked) -> Tracked:
        text = change(self)
        if self._runs is None or len(text) == len(self):
            return marked(text, self._runs)
        pieces = [change(char) for char in str.__iter__(self)]
        if "".join(pieces) == text:
            return marked(text, widened(self._runs, [len(piece) for piece in pieces]))
        return marked(text, [(len(text), UNKNOWN, 0)])

    return method


class Tracked(str):
    """A string with a mark for each character, stored as runs: most texts are one run.

    Operations that are not overridden return a plain `str`. A plain `str` that is joined with a tracked one is
    marked `UNKNOWN`, so no text is mistaken for text of the template.
    """

    __slots__ = ("_runs",)
    _runs: Sequence[Run] | None

    def __new__(cls, value: object = "") -> Tracked:
        """Return a string of unknown origin, unless the value is tracked; `marked` returns one of known origin."""
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
    self = str.__new__(Tracked, text)
    self._runs = runs
    return self


def authored(text: str) -> Tracked:
    """Return a string that the template wrote."""
    return marked(text, None)


def placed(text: str, first: int) -> Tracked:
    """Return a string of the record, whose first character has this mark and each further one the next."""
    self = str.__new__(Tracked, text)
    self._runs = ((len(text), first, 1),)
    return self


def join(pieces: Iterable[str]) -> Tracked:
    """Join strings."""
    parts = list(pieces)
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
    """Return the runs of a whole string; a plain string is `UNKNOWN`."""
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
    """Return the runs of a text in which each character was replaced by as many characters as its width."""
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


# JSON and Python text of values, in which the characters of strings are tracked.


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
