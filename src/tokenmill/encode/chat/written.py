"""JSON and Python text of values, with the characters of the strings inside followed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tokenmill.encode.chat.refusal import charge_size
from tokenmill.encode.chat.tracked import AUTHORED, Tracked, join, marked, runs_of, widened

_SCALARS = (bool, int, float, type(None))


def authored(text: str) -> Tracked:
    """Return a text as the template's own."""
    return marked(text, None)


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


def python_text(value: object) -> Tracked:
    """Return `str(value)` of a value that a template prints; one whose text would hold an address is refused."""
    from jinja2 import Undefined

    if isinstance(value, str):
        return Tracked(value)
    if isinstance(value, _SCALARS):
        return authored(str(value))
    if isinstance(value, Undefined):
        return authored(str(value))
    return join(_represented(value))


def _represented(value: object) -> Iterator[str]:
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
