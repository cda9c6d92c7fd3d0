"""Strings of JSON in memory, for kernels: where one ends, and what it says without its escapes.

Places are addresses; `end` is the one behind the last byte that may be read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenmill.documents.memory import (
    BACKSLASH,
    QUOTE,
    WIDTH,
    beyond_ascii,
    copy,
    get,
    lowest,
    part,
    put,
    string_stops,
)
from tokenmill.types import Int64Array, Uint8Array

if TYPE_CHECKING:
    from tokenmill.types import Whole

_UNICODE = 1
"""What stands for `u` among the escapes."""


def _escapes() -> Uint8Array:
    table = np.zeros(256, np.uint8)
    for letter, meaning in zip(b'"\\/bfnrt', b'"\\/\b\f\n\r\t', strict=True):
        table[letter] = meaning
    table[ord("u")] = _UNICODE
    return table


def _hex_digits() -> Int64Array:
    table = np.full(256, -1, np.int64)
    for digit in b"0123456789abcdefABCDEF":
        table[digit] = int(chr(digit), 16)
    return table


_ESCAPES = _escapes()
"""What a byte after a backslash stands for; 0 if for nothing."""
_HEX = _hex_digits()


@part
def at(i: Whole, end: Whole) -> Whole:
    """Return a byte; 0, which is nowhere in JSON, behind the end."""
    return get(i) if i < end else 0


@part
def _code_unit(i: Whole, end: Whole) -> Whole:
    r"""Return the number of `\uXXXX` at a place; -1 if it is not that."""
    if i + 6 > end or get(i) != BACKSLASH or get(i + 1) != 0x75:
        return -1
    a, b, c, d = _HEX[get(i + 2)], _HEX[get(i + 3)], _HEX[get(i + 4)], _HEX[get(i + 5)]
    return -1 if (a | b | c | d) < 0 else a << 12 | b << 8 | c << 4 | d


@part
def _character(i: Whole, end: Whole) -> tuple[Whole, Whole]:
    r"""Return the character of `\uXXXX`, or of two that are a surrogate pair, and where it ends; else -1."""
    code = _code_unit(i, end)
    if not 0xD800 <= code < 0xE000:
        return code, i + 6
    low = _code_unit(i + 6, end)
    if code >= 0xDC00 or not 0xDC00 <= low < 0xE000:
        return -1, i
    return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00), i + 12


@part
def _put_character(o: Whole, code: Whole) -> Whole:
    """Write a character as UTF-8, and return where it ends."""
    if code < 0x80:
        return put(o, code)
    if code < 0x800:
        o = put(o, 0xC0 | code >> 6)
    else:
        if code < 0x10000:
            o = put(o, 0xE0 | code >> 12)
        else:
            o = put(o, 0xF0 | code >> 18)
            o = put(o, 0x80 | code >> 12 & 0x3F)
        o = put(o, 0x80 | code >> 6 & 0x3F)
    return put(o, 0x80 | code & 0x3F)


@part
def _after_wide(i: Whole, end: Whole) -> Whole:
    """Return where the UTF-8 of a character that is not ASCII ends; -1 if it is none."""
    first, second = at(i, end), at(i + 1, end)
    if 0xC2 <= first < 0xE0:
        return i + 2 if second & 0xC0 == 0x80 else -1
    third = at(i + 2, end)
    if 0xE0 <= first < 0xF0:
        # Neither a shorter character written long, nor half of a surrogate pair.
        low, high = 0xA0 if first == 0xE0 else 0x80, 0x9F if first == 0xED else 0xBF
        return i + 3 if low <= second <= high and third & 0xC0 == 0x80 else -1
    if 0xF0 <= first < 0xF5:
        low, high = 0x90 if first == 0xF0 else 0x80, 0x8F if first == 0xF4 else 0xBF
        rest = third & 0xC0 == 0x80 and at(i + 3, end) & 0xC0 == 0x80
        return i + 4 if low <= second <= high and rest else -1
    return -1


@part
def after_string(i: Whole, end: Whole) -> tuple[Whole, bool]:
    """Return where a string ends that begins behind a quote, and whether it has escapes; -1 if it is none."""
    escaped = False
    while True:
        if i + WIDTH <= end:
            either = string_stops(i) | beyond_ascii(i)
            if either == 0:
                i += WIDTH
                continue
            i += lowest(either)
        c = at(i, end)
        if c == QUOTE:
            return i + 1, escaped
        if c < 0x20:
            return -1, escaped
        if c >= 0x80:
            i = _after_wide(i, end)
            if i < 0:
                return -1, escaped
        elif c != BACKSLASH:
            i += 1
        else:
            escaped = True
            meaning = _ESCAPES[at(i + 1, end)]
            if meaning > _UNICODE:
                i += 2
            else:
                code, i = _character(i, end)
                if code < 0:
                    return -1, escaped


@part
def _unescape_rest(i: Whole, end: Whole, o: Whole, wide: np.uint64) -> tuple[Whole, Whole, np.uint64]:
    """Do what `unescape` does, a byte at a time: for the end of the data, behind which nothing may be read."""
    while True:
        c = at(i, end)
        if c == QUOTE:
            return i + 1, o, wide
        if c < 0x20:
            return ~i, o, wide
        meaning = _ESCAPES[at(i + 1, end)]
        if c != BACKSLASH:
            o = put(o, c)
            i += 1
            wide |= np.uint64(c >> 7)
        elif meaning > _UNICODE:
            o = put(o, np.int64(meaning))
            i += 2
        else:
            code, after = _character(i, end)
            if code < 0:
                return ~i, o, wide
            o = _put_character(o, code)
            i = after
            wide |= np.uint64(code >> 7)


@part
def unescape(i: Whole, end: Whole, o: Whole) -> tuple[Whole, Whole, np.uint64]:
    """Copy a string that begins behind a quote, without its escapes.

    Returns where it ends in both, and something other than 0 if it may have characters that are not ASCII. The
    first number is ~i where it is no string, as was seen at i.
    """
    wide = np.uint64(0)
    while i + 2 * WIDTH <= end:
        # All that ends a run in these 64 bytes is found at once; a search after each escape would wait for it.
        stops = string_stops(i)
        wide |= beyond_ascii(i)
        begin = 0
        while stops:
            stop = lowest(stops)
            copy(i + begin, o)
            o += stop - begin
            c = get(i + stop)
            if c != BACKSLASH:
                return i + stop + 1 if c == QUOTE else ~(i + stop), o, wide
            meaning = _ESCAPES[get(i + stop + 1)]
            if meaning > _UNICODE:
                o = put(o, np.int64(meaning))
                begin = stop + 2
                stops &= ~(np.uint64(3) << np.uint64(stop))
                continue
            code, after = _character(i + stop, end)
            if code < 0:
                return ~(i + stop), o, wide
            o = _put_character(o, code)
            wide |= np.uint64(code >> 7)
            begin = after - i
            stops = stops >> np.uint64(begin) << np.uint64(begin) if begin < WIDTH else np.uint64(0)
        if begin < WIDTH:
            copy(i + begin, o)
            o += WIDTH - begin
            begin = WIDTH
        i += begin
    return _unescape_rest(i, end, o, wide)
