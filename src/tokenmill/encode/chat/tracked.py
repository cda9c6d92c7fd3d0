"""A string that knows, of every character, whether the template wrote it or where in the record it stood."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

import numpy as np

from tokenmill.encode.chat.refusal import Refusal, charge, charge_size

if TYPE_CHECKING:
    import numpy.typing as npt

Marks: TypeAlias = "npt.NDArray[np.int64]"

AUTHORED = 0
"""The mark of a character that the template wrote. A positive mark is a place in the record."""
UNKNOWN = -1
"""The mark of a character that came out of an operation which is not followed."""
GENERATION = 1 << 48
"""Added to the mark of a character that was written inside a `{% generation %}` block."""


class Tracked(str):
    """A string with a mark a character.

    Operations that are not overridden give a plain `str`, and a plain `str` that meets a tracked one is marked
    `UNKNOWN`: nothing is ever taken for the template's own by mistake.
    """

    __slots__ = ("_marks",)
    _marks: Marks | None

    def __new__(cls, value: object = "") -> Tracked:
        """Make one of unknown origin, unless the value is one already; `marked` says the origin."""
        text = str(value)
        self = str.__new__(cls, text)
        self._marks = _marks_of(text)
        return self

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> Tracked:
        return join((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> Tracked:
        return join((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> Tracked:
        charge_size(len(self) * max(0, count.__index__()))
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
        if self._marks is None:
            return marked(text, None)
        if isinstance(key, slice):
            return marked(text, self._marks[key])
        at = key.__index__() % len(self)
        return marked(text, self._marks[at : at + 1])

    def __iter__(self) -> Iterator[str]:
        return (self[at] for at in range(len(self)))

    def lstrip(self, chars: str | None = None, /) -> Tracked:
        """As of `str`."""
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None, /) -> Tracked:
        """As of `str`."""
        return self[: len(str.rstrip(self, chars))]

    def strip(self, chars: str | None = None, /) -> Tracked:
        """As of `str`."""
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str, /) -> Tracked:
        """As of `str`."""
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> Tracked:
        """As of `str`."""
        return self[: len(self) - len(suffix)] if suffix and self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """As of `str`."""
        return self._located(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """As of `str`."""
        return self._located(str.rsplit(self, sep, maxsplit), sep)

    def _located(self, parts: list[str], sep: str | None) -> list[str]:
        charge_size(len(self))
        charge(len(parts))
        found: list[str] = []
        at = 0
        for part in parts:
            at = self.find(part, at) if sep is None else at
            found.append(self[at : at + len(part)])
            at += len(part) + (0 if sep is None else len(sep))
        return found

    def splitlines(self, keepends: bool = False) -> list[str]:
        """As of `str`."""
        found: list[str] = []
        at = 0
        for whole, bare in zip(str.splitlines(self, True), str.splitlines(self), strict=True):
            found.append(self[at : at + len(whole if keepends else bare)])
            at += len(whole)
        return found

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        """As of `str`."""
        at = self.find(sep)
        return (self, self[:0], self[:0]) if at < 0 else self._cut(at, sep)

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        """As of `str`."""
        at = self.rfind(sep)
        return (self[:0], self[:0], self) if at < 0 else self._cut(at, sep)

    def _cut(self, at: int, sep: str) -> tuple[str, str, str]:
        if not sep:
            raise ValueError("empty separator")
        return self[:at], self[at : at + len(sep)], self[at + len(sep) :]

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        """As of `str`."""
        times = self.count(old) if count.__index__() < 0 else min(count.__index__(), self.count(old))
        charge_size(len(self) + times * max(0, len(new) - len(old)))
        if not old:
            return str.replace(self, old, new, count)
        return join(_between(new, self.split(old, count)))

    def join(self, values: Iterable[str], /) -> Tracked:
        """As of `str`."""
        return join(_between(self, values))

    def lower(self) -> Tracked:
        """As of `str`."""
        return self._cased(str.lower(self), [str.lower(c) for c in str.__iter__(self)])

    def upper(self) -> Tracked:
        """As of `str`."""
        return self._cased(str.upper(self), [str.upper(c) for c in str.__iter__(self)])

    def casefold(self) -> Tracked:
        """As of `str`."""
        return self._cased(str.casefold(self), [str.casefold(c) for c in str.__iter__(self)])

    def capitalize(self) -> Tracked:
        """As of `str`."""
        return self._cased(str.capitalize(self), [])

    def title(self) -> Tracked:
        """As of `str`."""
        return self._cased(str.title(self), [])

    def swapcase(self) -> Tracked:
        """As of `str`."""
        return self._cased(str.swapcase(self), [])

    def _cased(self, text: str, pieces: list[str]) -> Tracked:
        """Mark the text that a change of case made, character by character where its length changed."""
        charge_size(len(text))
        if self._marks is None or len(text) == len(self):
            return marked(text, self._marks)
        if "".join(pieces) == text:
            return marked(text, np.repeat(self._marks, [len(piece) for piece in pieces]))
        return marked(text, np.full(len(text), UNKNOWN))


def marked(text: str, marks: Marks | None) -> Tracked:
    """Return a tracked string; None marks all of it as the template's own."""
    self = str.__new__(Tracked, text)
    self._marks = marks
    return self


def join(pieces: Iterable[str]) -> Tracked:
    """Lay strings end to end."""
    parts = list(pieces)
    size = sum(map(len, parts))
    charge_size(size)
    charge(len(parts))
    text = "".join(parts)
    marks = [_marks_of(part) for part in parts]
    if all(mark is None for mark in marks):
        return marked(text, None)
    whole = np.zeros(size, np.int64)
    at = 0
    for part, mark in zip(parts, marks, strict=True):
        if mark is not None:
            whole[at : at + len(part)] = mark
        at += len(part)
    return marked(text, whole)


def marks_of(text: str) -> Marks:
    """Return one mark a character; of a plain string nothing is known."""
    marks = _marks_of(text)
    return np.zeros(len(text), np.int64) if marks is None else marks


def generated(text: str) -> Tracked:
    """Mark a text as written inside a generation block."""
    marks = marks_of(text)
    return marked(text, np.where(marks == UNKNOWN, UNKNOWN, marks | GENERATION))


def text_of(value: object) -> Tracked:
    """Return what a template prints for a value: `str`, with the characters of strings inside followed."""
    from tokenmill.encode.chat.written import python_text

    return value if type(value) is Tracked else python_text(value)


def _marks_of(text: str) -> Marks | None:
    if type(text) is Tracked:
        return text._marks
    return np.full(len(text), UNKNOWN) if text else None


def _between(separator: str, values: Iterable[str]) -> Iterator[str]:
    for index, value in enumerate(values):
        if index:
            yield separator
        yield value
