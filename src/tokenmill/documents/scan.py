"""The texts of lines of JSON, found by a kernel that reads 64 bytes at a time and is sure of what it takes.

A line is taken only if all of it is JSON by the letter (RFC 8259) and holds the text field once, as a string: then
any parser gives the same text. Every other line is left to the parser, which also knows what is wrong with it. The
one thing that is not looked at here is whether the bytes of the text are UTF-8, as whoever decodes them sees it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenmill.documents.json_strings import after_string, at, unescape
from tokenmill.documents.memory import QUOTE, get, kernel, part
from tokenmill.types import BoolArray, Int64Array, Uint8Array

if TYPE_CHECKING:
    from tokenmill.types import Whole

_DEPTH = 64
"""How deep values may be nested: one bit each says whether it is an object."""
_DIGITS = 64
"""How long a number may be; a parser may refuse one of thousands of digits."""

_COMMA, _COLON, _NEWLINE = 0x2C, 0x3A, 0x0A
_OPEN_OBJECT, _CLOSE_OBJECT, _OPEN_LIST, _CLOSE_LIST = 0x7B, 0x7D, 0x5B, 0x5D


@part
def _after_space(i: Whole, end: Whole) -> Whole:
    """Return the next place without white space; a newline is none, as it ends the line."""
    c = at(i, end)
    while c in (0x20, 0x09, 0x0D):
        i += 1
        c = at(i, end)
    return i


@part
def _after_digits(i: Whole, end: Whole) -> Whole:
    while 0x30 <= at(i, end) <= 0x39:
        i += 1
    return i


@part
def _after_number(i: Whole, end: Whole) -> Whole:
    """Return where a number ends; -1 if it is none, or a very long one."""
    begin = i
    if at(i, end) == 0x2D:  # -
        i += 1
    whole = i
    i = _after_digits(i, end)
    if i == whole or (get(whole) == 0x30 and i > whole + 1):
        return -1
    if at(i, end) == 0x2E:  # .
        i += 1
        fraction = i
        i = _after_digits(i, end)
        if i == fraction:
            return -1
    if at(i, end) in (0x45, 0x65):  # E e
        i += 1
        if at(i, end) in (0x2B, 0x2D):  # + -
            i += 1
        exponent = i
        i = _after_digits(i, end)
        if i == exponent:
            return -1
    return i if i - begin <= _DIGITS else -1


@part
def _after_word(i: Whole, end: Whole) -> Whole:
    """Return where `true`, `false` or `null` ends; -1 if it is none of them."""
    a, b, c, d = at(i, end), at(i + 1, end), at(i + 2, end), at(i + 3, end)
    if a == 0x74 and b == 0x72 and c == 0x75 and d == 0x65:
        return i + 4
    if a == 0x6E and b == 0x75 and c == 0x6C and d == 0x6C:
        return i + 4
    if a == 0x66 and b == 0x61 and c == 0x6C and d == 0x73 and at(i + 4, end) == 0x65:
        return i + 5
    return -1


@part
def _after_plain(i: Whole, end: Whole) -> Whole:
    """Return where a string, a number or a word ends; -1 if it is none of them."""
    c = at(i, end)
    if c == QUOTE:
        return after_string(i + 1, end)[0]
    return _after_number(i, end) if c == 0x2D or 0x30 <= c <= 0x39 else _after_word(i, end)


@part
def _after_name(i: Whole, end: Whole) -> Whole:
    """Return where the value begins of a field whose name begins at a place; -1 if it is none."""
    if at(i, end) != QUOTE:
        return -1
    i = after_string(i + 1, end)[0]
    if i < 0:
        return -1
    i = _after_space(i, end)
    return _after_space(i + 1, end) if at(i, end) == _COLON else -1


@part
def _after_value(i: Whole, end: Whole) -> Whole:  # noqa: PLR0912 - one state machine
    """Return where any value ends that begins at a place; -1 if it is none, or nested deeply."""
    depth, objects = 0, np.uint64(0)
    while i >= 0:
        c = at(i, end)
        empty = False
        if c in (_OPEN_OBJECT, _OPEN_LIST):
            if depth == _DEPTH:
                return -1
            depth += 1
            objects = objects << np.uint64(1) | np.uint64(c == _OPEN_OBJECT)
            i = _after_space(i + 1, end)
            empty = at(i, end) == c + 2  # what closes a bracket is two behind what opens it
            if not empty:
                if c == _OPEN_OBJECT:
                    i = _after_name(i, end)
                continue
        else:
            i = _after_plain(i, end)
            if i < 0:
                return -1
        # A value has ended, or an empty one is about to: close what it was the last of.
        while depth:
            if not empty:
                i = _after_space(i, end)
            empty = False
            c = at(i, end)
            i += 1
            if c == _COMMA:
                i = _after_space(i, end)
                if objects & np.uint64(1):
                    i = _after_name(i, end)
                break
            if c != (_CLOSE_OBJECT if objects & np.uint64(1) else _CLOSE_LIST):
                return -1
            depth -= 1
            objects >>= np.uint64(1)
        else:
            return i
    return -1


@part
def _is_name(i: Whole, end: Whole, name: Uint8Array) -> bool:
    if end - i != name.size:
        return False
    for k in range(name.size):  # noqa: SIM110 - numba knows no `all`
        if get(i + k) != name[k]:
            return False
    return True


@part
def _scan_line(  # noqa: PLR0911 - at each place that a line may be left
    i: Whole, end: Whole, name: Uint8Array, o: Whole
) -> tuple[Whole, Whole, np.uint64, bool]:
    """Copy the text of a line; return a place in the line, where the text ends, as `unescape`, whether it is taken.

    No step here goes beyond a newline, so that the line ends at the next one after the place; at it if it is taken.
    """
    wide, found = np.uint64(0), False
    i = _after_space(i, end)
    if at(i, end) != _OPEN_OBJECT:
        return i, o, wide, False
    while True:
        i = _after_space(i + 1, end)
        if at(i, end) != QUOTE:
            return i, o, wide, False
        after, escaped = after_string(i + 1, end)
        if after < 0 or escaped:  # an escaped name may spell the text field
            return i, o, wide, False
        is_text = _is_name(i + 1, after - 1, name)
        i = _after_space(after, end)
        if at(i, end) != _COLON:
            return i, o, wide, False
        i = _after_space(i + 1, end)
        if is_text:
            if found or at(i, end) != QUOTE:
                return i, o, wide, False
            found = True
            i, o, wide = unescape(i + 1, end, o)
            if i < 0:
                return ~i, o, wide, False
        else:
            after = _after_value(i, end)
            if after < 0:
                return i, o, wide, False
            i = after
        i = _after_space(i, end)
        c = at(i, end)
        if c == _CLOSE_OBJECT:
            break
        if c != _COMMA:
            return i, o, wide, False
    i = _after_space(i + 1, end)
    return i, o, wide, found and (i == end or get(i) == _NEWLINE)


@kernel
def scan_lines(
    data: Uint8Array,
    begin: Whole,
    name: Uint8Array,
    out: Uint8Array,
    filled: Whole,
    lines: tuple[Int64Array, Int64Array, BoolArray],
    count: Whole,
) -> tuple[Whole, Whole, Whole, bool]:
    """Copy the texts of the lines from `begin` on to `out`, end to end, from `filled` on.

    Goes on until `data` or `lines` is at its end; line `count` is the first. `lines` get where each line ends in
    `data`, where its text ends in `out`, and whether it was taken. Returns the new `count`, `begin` and `filled`,
    and whether there may be characters that are not ASCII. `out` must have room for as many bytes as are read: a
    text is never longer than its line.
    """
    line_ends, text_ends, taken = lines
    source, target, wide = np.int64(data.ctypes.data), np.int64(out.ctypes.data), np.uint64(0)
    end = source + data.size
    while begin < data.size and count < line_ends.size:
        place, after, line_wide, is_taken = _scan_line(source + begin, end, name, target + filled)
        if is_taken:
            filled = after - target
            wide |= line_wide
        else:
            while place < end and get(place) != _NEWLINE:
                place += 1
        begin = min(place + 1, end) - source
        line_ends[count] = begin
        text_ends[count] = filled
        taken[count] = is_taken
        count += 1
    return count, begin, filled, wide != 0
