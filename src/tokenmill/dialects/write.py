"""Native tables as the text of a TOML file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tokenmill.errors import ConfigError

_ORDER = ("run", "sources", "stages", "skip", "quarantine")
_WIDTH = 100
"""Longer lists are written with an item a line."""
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def to_toml(tables: Mapping[str, Any]) -> str:
    """Write tables so that a TOML reader gives equal ones back; the usual ones first, in the order of the flow."""
    names = [*(name for name in _ORDER if name in tables), *(name for name in tables if name not in _ORDER)]
    inline = [name for name in names if not _has_header(tables[name])]
    # Before the first header, or they would belong to its table.
    blocks = ["".join(f"{_key(name)} = {_value(tables[name], name)}\n" for name in inline)] if inline else []
    for name in names:
        if isinstance(tables[name], Mapping):
            blocks.append(_block(f"[{_key(name)}]", tables[name], name))
        elif name not in inline:
            blocks += [_block(f"[[{_key(name)}]]", item, name) for item in tables[name]]
    return "\n".join(blocks)


def _has_header(value: object) -> bool:
    rows = isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)
    return rows or isinstance(value, Mapping)


def _block(header: str, table: Mapping[str, Any], where: str) -> str:
    lines = [f"{_key(name)} = {_value(value, f'{where}.{name}')}" for name, value in table.items()]
    return "\n".join([header, *lines]) + "\n"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _string(name)


def _string(text: str) -> str:
    return '"' + "".join(_ESCAPES.get(letter) or _letter(letter) for letter in text) + '"'


def _letter(letter: str) -> str:
    if letter.isprintable():
        return letter
    return f"\\u{ord(letter):04x}" if ord(letter) < 1 << 16 else f"\\U{ord(letter):08x}"


def _value(value: object, where: str, *, wide: bool = True) -> str:
    """Write a value in a line, or a list that is too long for one, where `wide` lines may be broken, in several."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, Mapping):
        # No line may be broken within: TOML 1.0 has an inline table end in its line.
        items = [f"{_key(name)} = {_value(item, where, wide=False)}" for name, item in value.items()]
        return f"{{ {', '.join(items)} }}" if items else "{}"
    if isinstance(value, list | tuple):
        items = [_value(item, where, wide=False) for item in value]
        line = f"[{', '.join(items)}]"
        return "[\n" + "".join(f"    {item},\n" for item in items) + "]" if wide and len(line) > _WIDTH else line
    raise ConfigError(
        f"{where}: must be a string, number, true or false, list or table, got {value!r}; leave it out"
    )
