"""JSON files: one object, a list of objects or of texts, or objects one after another, read as a stream."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

import msgspec

from tokenmill.documents.lines import BYTE_ORDER_MARK, PartialRecord, Unread, line_groups, read_values
from tokenmill.documents.units import Format, Group, Piece, ReadOptions, open_blocks

_HEAD_BYTES = 1 << 20
# A string with its escapes, or a bracket or comma. The pattern never goes back, so that no input is slow.
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+("?)|[{}\[\],]', re.DOTALL)
_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_FLAT = rb'[^"{}\[\]]++|' + _STRING
_INNER = rb"[{\[](?:" + _FLAT + rb")*+[}\]]"
_MIDDLE = rb"[{\[](?:" + _FLAT + rb"|" + _INNER + rb")*+[}\]]"
# A whole object of up to three levels, as most are: twice as fast as token by token.
_OBJECT = re.compile(rb"\{(?:" + _FLAT + rb"|" + _MIDDLE + rb")*+\}", re.DOTALL)
_REST_OF_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+("?)', re.DOTALL)


def _read(piece: Piece, options: ReadOptions) -> Iterator[Group]:
    """Read all records; JSON lines, which are often named `.json`, are read as such."""
    with open_blocks(piece, options.batch_bytes, options.max_expansion) as (blocks, tell):
        head: list[bytes] = []
        size = 0
        while size < _HEAD_BYTES and (block := next(blocks, None)) is not None:
            head.append(block)
            size += len(block)
        start = b"".join(head).removeprefix(BYTE_ORDER_MARK)
        if are_lines(start, whole=size < _HEAD_BYTES):
            yield from line_groups(chain(head, blocks), options, tell)
            return
        for values in _values(chain([start], blocks), options.max_record_bytes):
            for begin in range(0, len(values), options.batch_documents):
                group = read_values(values[begin : begin + options.batch_documents], options, bare_strings=True)
                group.position = tell()
                yield group


JSON_FILE = Format(counts="record", read=_read)


def are_lines(start: bytes, *, whole: bool) -> bool:
    r"""Tell by its first two lines whether a file holds JSON lines; the end of `start` may be cut off.

    >>> are_lines(b'{"a": 1}\n{"a": 2}', whole=True), are_lines(b'{"a": 1}\n{', whole=True)
    (True, False)
    """
    lines = start.split(b"\n")
    cut_off = None if whole else lines.pop()
    first_two = [line for line in lines if line.strip()][:2]
    if cut_off is not None and len(first_two) == 1 and cut_off.strip():
        return _is_object(first_two[0]) and cut_off.lstrip()[:1] == b"{"
    return bool(first_two) and all(map(_is_object, first_two))


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(line), dict)
    except (ValueError, RecursionError):
        return False


def _values(blocks: Iterator[bytes], max_bytes: int) -> Iterator[list[bytes]]:
    """Yield the raw records that end in each block."""
    scanner = Scanner(max_bytes)
    for block in blocks:
        if records := scanner.feed(block):
            yield records
    if records := scanner.finish():
        yield records


class Scanner:
    """Finds where the records of a JSON file begin and end, without parsing them.

    Anything between records that is no white space counts as a record too, for the parser to refuse.
    """

    def __init__(self, max_bytes: int) -> None:
        self._partial = PartialRecord(max_bytes)
        self._depth = 0
        self._level = 0
        """Depth at which records begin: 1 in a list."""
        self._begun = False
        self._in_string = False
        self._escape = b""
        self._records: list[bytes] = []

    def feed(self, block: bytes) -> list[bytes]:
        """Return the records that end in the next block of the file."""
        block = self._escape + block
        self._records = []
        start = self._begin(block)
        position = start
        if self._in_string:
            position = self._after_string(_REST_OF_STRING.match(block))
        while not self._in_string and (match := _TOKEN.search(block, position)):
            position = match.end()
            token = block[match.start()]
            if token == 0x22:  # "
                self._after_string(match)
            elif token == 0x7B and self._depth == self._level and (match := _OBJECT.match(block, match.start())):
                position = match.end()
                start = self._object(block, start, match)
            else:
                start = self._structure(block, token, start, position - 1)
        # A backslash at the end belongs with what follows it.
        self._escape = b"\\" if self._in_string and position < len(block) else b""
        self._partial.add(block[start : len(block) - len(self._escape)])
        return self._records

    def finish(self) -> list[bytes]:
        """Return what is left at the end of the file: nothing, if it is whole."""
        self._records = []
        if self._level:
            self._records.append(Unread("json", "a list that does not end"))
        else:
            self._cut(self._escape)
        return self._records

    def _begin(self, block: bytes) -> int:
        """Enter the list, if the file is one; return where records start."""
        if self._begun or not (stripped := block.lstrip()):
            return 0
        self._begun = True
        if stripped[:1] != b"[":
            return 0
        self._depth = self._level = 1
        return len(block) - len(stripped) + 1

    def _after_string(self, match: re.Match[bytes] | None) -> int:
        assert match is not None  # the rest of a string may be empty
        self._in_string = not match.group(1)
        return match.end()

    def _object(self, block: bytes, start: int, match: re.Match[bytes]) -> int:
        """Take a whole object; in a list, the comma after it ends the record."""
        if self._level:
            return start
        self._cut(block[start : match.start()])
        self._cut(match.group())
        return match.end()

    def _structure(self, block: bytes, token: int, start: int, place: int) -> int:
        """Follow a bracket or comma; return where the record that is being read starts in the block."""
        if token == 0x2C:  # ,
            if self._depth == self._level:
                self._cut(block[start:place])
                return place + 1
        elif token in b"{[":
            if self._depth == self._level == 0:
                self._cut(block[start:place])
                start = place
            self._depth += 1
        elif self._depth == self._level == 1:
            self._cut(block[start:place])
            self._depth = self._level = 0
            return place + 1
        elif self._depth:
            self._depth -= 1
            if self._depth == self._level == 0:
                self._cut(block[start : place + 1])
                return place + 1
        return start

    def _cut(self, last: bytes) -> None:
        record = self._partial.take(last)
        if record.strip():
            self._records.append(record)
