"""The headers of Parquet pages, which are structs of Thrift's compact protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DATA, INDEX, DICTIONARY, DATA_V2 = range(4)
"""Kinds of pages."""
PLAIN, PLAIN_DICTIONARY, RLE, RLE_DICTIONARY = 0, 2, 3, 8
"""Encodings of the values, or levels, of a page."""
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _STRUCT = 1, 2, 3, 7, 8, 12
_SHORT, _NUMBER, _LONG = 4, 5, 6
"""Whole numbers of 16, 32 and 64 bits; those of the headers have 32, and Arrow passes over others."""
_MAX_DEPTH = 4


class NotUnderstood(Exception):
    """A page is not of the kinds that are read here; Arrow is to read it, and to say what is wrong with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageHeader:
    """What stands before a page."""

    kind: int
    stored: int
    """Bytes in the file."""
    unfolded: int
    crc: int | None
    """Of the bytes in the file."""
    values: int
    """Nulls are counted."""
    encoding: int
    levels: int | None
    """Bytes of levels before the values, which are not compressed; None where the page itself says so."""
    compressed: bool


def read_header(data: bytes) -> tuple[PageHeader, int]:
    """Return the header at the start of `data`, and its size; raise IndexError if it goes on after that."""
    fields, size = _struct(data, 0, 0)
    kind = _number(fields, 1, most=DATA_V2)
    about = fields.get({DATA: 5, INDEX: 6, DICTIONARY: 7, DATA_V2: 8}[kind])
    if not isinstance(about, dict):
        raise NotUnderstood
    second, levels = kind == DATA_V2, None
    if second:
        nulls, _rows, levels, repetition = (_number(about, field) for field in (2, 3, 5, 6))
        usual = not repetition and nulls <= _number(about, 1) and type(about.get(7, True)) is bool
    elif kind == DATA:
        usual = _number(about, 3) == RLE and _number(about, 4) in range(10)
    else:
        usual = kind == INDEX or _number(about, 2) in (PLAIN, PLAIN_DICTIONARY)
    if not usual:
        raise NotUnderstood
    header = PageHeader(
        kind=kind,
        unfolded=_number(fields, 2),
        stored=_number(fields, 3),
        crc=None if 4 not in fields else _number(fields, 4, least=-(2**31)) % 2**32,
        values=0 if kind == INDEX else _number(about, 1),
        encoding=PLAIN if kind == INDEX else _number(about, 4 if second else 2),
        levels=levels,
        compressed=not second or about.get(7, True) is True,
    )
    return header, size


def varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return the number at a place, of 7 bits a byte with the lowest first, and where it ends."""
    value = shift = 0
    while shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise NotUnderstood


def _struct(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    if depth > _MAX_DEPTH:
        raise NotUnderstood
    fields: dict[int, Any] = {}
    field = 0
    while True:
        head = data[at]
        at += 1
        if not head:
            return fields, at
        step, kind = head >> 4, head & 15
        if step:
            field += step
        else:
            field, at = _signed(data, at)
        fields[field], at = _value(data, at, kind, depth)


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind == _NUMBER:
        return _signed(data, at)
    if kind in (_SHORT, _LONG):
        return None, _signed(data, at)[1]
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, at
    if kind == _STRUCT:
        return _struct(data, at, depth + 1)
    if kind == _BINARY:  # of statistics: passed over
        size, at = varint(data, at)
        return None, at + size
    if kind in (_BYTE, _DOUBLE):
        return None, at + (1 if kind == _BYTE else 8)
    raise NotUnderstood


def _signed(data: bytes, at: int) -> tuple[int, int]:
    value, at = varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _number(fields: dict[int, Any], field: int, *, least: int = 0, most: int = 2**31 - 1) -> int:
    value = fields.get(field)
    if type(value) is not int or not least <= value <= most:
        raise NotUnderstood
    return value
