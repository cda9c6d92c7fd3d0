"""Files of lines, of JSON objects or of plain text, and how raw JSON values become documents."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from typing import Any, BinaryIO

import msgspec
import simdjson

from tokenmill.documents import streams, units
from tokenmill.fields import field_of, field_path, json_kind

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LARGE_BYTES = 8 << 20
_BRACE = ord("{")


# Blocks of bytes as lines, none of them kept in memory beyond a limit.


def split_lines(blocks: Iterator[bytes], max_bytes: int, *, is_start: bool = True) -> Iterator[list[bytes]]:
    """Yield the lines that end in each block, with their newline; an `Unread` for one above `max_bytes`.

    The byte order mark that some programs put at the start of a file is dropped. Anywhere else it is content, so
    pass `is_start` for blocks that begin within a file.
    """
    unended = PartialRecord(max_bytes)
    for block in blocks:
        lines = BytesIO(block).readlines()  # three times as fast as split, which looks at every byte by itself
        rest = b"" if block.endswith(b"\n") else lines.pop()
        if lines:
            lines[0] = unended.take(lines[0])
            if is_start:
                lines[0], is_start = _without_mark(lines[0]), False
            if len(block) > max_bytes:  # else no line within the block can be too long
                lines[1:] = map(PartialRecord(max_bytes).take, lines[1:])
            yield lines
        unended.add(rest)
    if unended.size:
        last = unended.take(b"")
        yield [_without_mark(last) if is_start else last]


def _without_mark(line: bytes) -> bytes:
    return line if isinstance(line, Unread) else line.removeprefix(BYTE_ORDER_MARK)


class Unread(bytes):
    """Placeholder for a raw record that was too long to keep. Its one byte is invalid UTF-8 and invalid JSON."""

    reason: str
    detail: str
    num_quotes: int
    """Number of `"` in it. If it is odd, a quoted cell continues after it."""

    def __new__(cls, reason: str, detail: str, *, num_quotes: int = 0) -> Unread:
        """Make the placeholder of a record that is bad for this reason."""
        self = super().__new__(cls, b"\xff")
        self.reason, self.detail, self.num_quotes = reason, detail, num_quotes
        return self


def refuse_unread(raw: bytes) -> None:
    """Raise RecordError if a raw record was not kept."""
    if isinstance(raw, Unread):
        raise units.RecordError(raw.reason, raw.detail)


class PartialRecord:
    """Parts of a record that continues in the next block. Above `max_bytes`, they are dropped and only counted."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._quotes = 0
        self.size = 0

    def add(self, part: bytes) -> None:
        """Append a part."""
        self.size += len(part)
        if self.size > self._max_bytes:
            self._quotes += sum(dropped.count(b'"') for dropped in (*self._parts, part))
            self._parts.clear()
        elif part:
            self._parts.append(part)

    def take(self, last: bytes) -> bytes:
        """Return the whole record that `last` ends, and start the next one."""
        if self.size + len(last) <= self._max_bytes:
            record = b"".join((*self._parts, last)) if self._parts else last
        else:
            self.add(last)
            record = Unread("too_long", f"{self.size} bytes", num_quotes=self._quotes)
        self._parts.clear()
        self._quotes = self.size = 0
        return record


# One JSON object a line.


def _line_ranges(file: units.InputFile, chunk_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Cut a plain file anywhere: a range owns the lines that start in it. A compressed one is one piece."""
    if file.compression:
        yield from units.whole(file, chunk_bytes)
        return
    for begin in range(0, file.bytes, chunk_bytes):
        end = min(begin + chunk_bytes, file.bytes)
        yield begin, end, end - begin


@contextmanager
def _open_lines(
    piece: units.Piece, options: units.ReadOptions
) -> Iterator[tuple[Iterator[bytes], Callable[[], int]]]:
    """Open the lines that start in the piece's range: their bytes in blocks, and how many have been read."""
    if piece.file.compression:
        with streams.open_blocks(piece, options.batch_bytes, options.max_expansion) as opened:
            yield opened
        return
    with streams.open_input(piece.file, exact=False) as stream:
        blocks = _line_blocks(stream, piece, min(streams.BLOCK_BYTES, options.batch_bytes))
        yield blocks, lambda: stream.tell() - piece.begin


def _read_json_lines(piece: units.Piece, options: units.ReadOptions) -> Iterator[units.Group]:
    """Read the lines that start in the piece's range."""
    with _open_lines(piece, options) as (blocks, tell):
        yield from line_groups(blocks, options, tell, is_start=not piece.begin)


JSON_LINES = units.Format(counts="line", read=_read_json_lines, ranges=_line_ranges)
ITEMS = units.Format(counts="item", read=_read_json_lines, ranges=_line_ranges)
"""Objects in memory that `prepare` writes as lines."""


def _line_blocks(stream: BinaryIO, piece: units.Piece, block_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of the lines that start in a byte range; the last one may reach beyond it."""
    file, begin, end = piece.file, piece.begin, piece.end
    last = b"\n"
    # From the byte before: if it ends a line, the next line starts right at `begin`.
    blocks = streams.file_blocks(stream, file, max(begin - 1, 0), end, block_bytes)
    if begin:
        for block in blocks:
            _, newline, last = block.partition(b"\n")
            if newline:
                break
        else:
            return  # a line that started earlier fills the whole range
        if last:
            yield last
        else:
            last = b"\n"
    for last in blocks:
        yield last
    if last.endswith(b"\n"):
        return
    for block in streams.file_blocks(stream, file, end, file.bytes, block_bytes):
        line_end = block.find(b"\n") + 1
        yield block[:line_end] if line_end else block
        if line_end:
            return


def line_groups(
    blocks: Iterator[bytes], options: units.ReadOptions, tell: Callable[[], int], *, is_start: bool = True
) -> Iterator[units.Group]:
    """Read the records of lines of JSON, a block at a time."""
    most = options.batch_documents
    for lines in split_lines(blocks, options.max_record_bytes, is_start=is_start):
        groups = [_read_lines(lines[begin : begin + most], options) for begin in range(0, len(lines), most)]
        lines.clear()  # a line may be as large as its text, which is what the caller works on now
        for group in groups:
            group.position = tell()
            yield group


def _read_lines(lines: Sequence[bytes], options: units.ReadOptions) -> units.Group:
    """Read lines of JSON: at once if each has a text, else one by one."""
    texts = None if options.text_field is None else _texts_of(lines, options.text_field)
    if texts is None:
        return read_values(lines, options)
    return units.Group(documents=texts, size=sum(map(len, texts)))


def _texts_of(lines: Sequence[bytes], text_field: str) -> list[str] | None:
    """Return the texts of lines, as `read_values` does; None unless each has one."""
    if max(map(len, lines)) > LARGE_BYTES:
        return None
    parse = simdjson.Parser().parse
    try:
        records: list[Any] = [parse(line, True) for line in lines if line[0] == _BRACE]
        values = [field_of(record, text_field) for record in records]
    except (ValueError, LookupError, TypeError, RuntimeError):
        return None
    return values if len(values) == len(lines) and {*map(type, values)} == {str} else None


# Raw JSON values as documents.


def read_values(raws: Sequence[bytes], options: units.ReadOptions, *, bare_strings: bool = False) -> units.Group:
    """Read raw JSON values one by one; with `bare_strings`, a value may be a text itself.

    If only the text of an object is needed, simdjson parses it, because it is faster for long texts. It needs many
    times the memory of a line, so msgspec parses large lines. It also parses whole records, which have many values.
    """
    parse_object = partial(simdjson.Parser().parse, recursive=True)

    def document(raw: bytes) -> str | Mapping[str, Any] | None:
        refuse_unread(raw)
        if not raw or raw.isspace():
            return None
        wants_text = options.text_field is not None and raw[0] == _BRACE and len(raw) <= LARGE_BYTES
        value, is_unicode = load(raw, parse_object if wants_text else msgspec.json.decode)
        is_text = bare_strings and isinstance(value, str) and options.text_field is not None
        read: str | Mapping[str, Any] = value if is_text else document_of(value, options)
        if not is_unicode:
            refuse_surrogates(read)
        return read

    group = units.read_each(raws, document)
    group.size = sum(map(len, raws if options.text_field is None else group.documents))
    return group


_JSON_WORDS = {
    "Expecting value": "unexpected character, expected a JSON value",
    "Extra data": "unexpected content after document",
    "Invalid control character at": "unexpected control character in string",
    "Unterminated string starting at": "string without an end",
}
"""Stable wording of JSON errors, because stores save these texts."""


def load(raw: bytes, parse: Callable[[bytes], Any] = msgspec.json.decode) -> tuple[Any, bool]:
    """Parse one JSON value: (value, whether its strings are known to be Unicode text); raises RecordError.

    If the fast parser fails, the standard library tries. It accepts lone surrogates, and the NaN, Infinity and huge
    numbers that many programs write.
    """
    try:
        return parse(raw), True
    except (ValueError, RuntimeError):  # nested too deeply, for one
        text = units.decode_utf8(raw)
    try:
        return json.loads(text), False
    except RecursionError:
        raise units.RecordError("json", "an object that is nested too deeply") from None
    except json.JSONDecodeError as error:
        at_end = error.msg.startswith("Expecting") and error.pos >= len(text.rstrip())
        words = "unexpected end of data" if at_end else _JSON_WORDS.get(error.msg, error.msg)
        raise units.RecordError("json", f"{words} at character {error.pos} of the record") from None
    except ValueError as error:  # a number of thousands of digits
        raise units.RecordError("json", str(error)) from None


def document_of(value: object, options: units.ReadOptions) -> str | Mapping[str, Any]:
    """Return the text, or the whole record, of a parsed value; raises RecordError."""
    if options.text_field is not None:
        return text_of(value, options.text_field)
    if not isinstance(value, dict):
        raise units.RecordError("not_object", json_kind(value))
    if options.fields is not None:
        return {name: value[name] for name in options.fields if name in value}
    return value


def text_of(value: object, text_field: str) -> str:
    """Return the string in a named field of a parsed value (`field_path`); raises RecordError."""
    for name in field_path(text_field, value if isinstance(value, dict) else ()):
        if not isinstance(value, dict):
            raise units.RecordError("missing_field", f"no field {name!r} in {json_kind(value)}")
        if name not in value:
            raise units.RecordError("missing_field", f"no field {name!r} but {_names(value)}")
        value = value[name]
    if not isinstance(value, str):
        raise units.RecordError("not_text", f"field {text_field!r} is {json_kind(value)}")
    return value


def _names(value: Mapping[str, object]) -> str:
    """Name the fields of an object, a few of them."""
    names = [repr(str(name))[:40] for name in list(value)[:6]]
    return (", ".join(names) + (", ..." if len(value) > 6 else "")) or "none at all"


def refuse_surrogates(value: object) -> None:
    """Raise RecordError if a string in a parsed value cannot be written as UTF-8."""
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(error.object[error.start]):04X}"
        raise units.RecordError("surrogate", f"a lone {half} in a string") from None


# Plain text: a file is a document, or each of its lines is one.

FIELD = "text"
"""Name of the text where whole records are read."""


def _read_text_file(piece: units.Piece, options: units.ReadOptions) -> Iterator[units.Group]:
    """Read a text file as one document. Newlines are kept, a byte order mark at the start is dropped."""
    group = units.read_each([piece], lambda piece: _contents(piece, options.max_record_bytes))
    yield _text_group(group, piece.bytes, options)


def _read_text_lines(piece: units.Piece, options: units.ReadOptions) -> Iterator[units.Group]:
    """Read the lines that start in the piece's range, each of them a document."""
    with _open_lines(piece, options) as (blocks, tell):
        for lines in split_lines(blocks, options.max_record_bytes, is_start=not piece.begin):
            for begin in range(0, len(lines), options.batch_documents):
                group = _line_texts(lines[begin : begin + options.batch_documents])
                yield _text_group(group, tell(), options)


TEXT_FILE = units.Format(counts="line", read=_read_text_file)
TEXT_LINES = units.Format(counts="line", read=_read_text_lines, ranges=_line_ranges)


def _contents(piece: units.Piece, max_bytes: int) -> str:
    if piece.file.compression:
        record = PartialRecord(max_bytes)
        with streams.open_blocks(piece, max_bytes) as (blocks, _):
            for block in blocks:
                record.add(block)
        raw = record.take(b"")
        refuse_unread(raw)
    elif piece.file.bytes > max_bytes:
        raise units.RecordError("too_long", f"{piece.file.bytes} bytes")
    else:
        with streams.open_input(piece.file, exact=False) as stream:
            raw = b"".join(streams.file_blocks(stream, piece.file, 0, piece.file.bytes, max_bytes))
    return units.decode_utf8(raw.removeprefix(BYTE_ORDER_MARK))


def _line_texts(lines: Sequence[bytes]) -> units.Group:
    """Read the texts of the lines that are not blank, without their newline."""
    try:
        texts = [line.decode().rstrip("\r\n") for line in lines]
    except UnicodeDecodeError:
        return units.read_each(lines, _line_text)
    blank = [index for index, text in enumerate(texts) if not text or text.isspace()]
    if blank:
        texts = [text for text in texts if text and not text.isspace()]
    return units.Group(documents=texts, blank=blank)


def _line_text(line: bytes) -> str | None:
    refuse_unread(line)
    text = units.decode_utf8(line).rstrip("\r\n")
    return text if text and not text.isspace() else None


def _text_group(group: units.Group, position: int, options: units.ReadOptions) -> units.Group:
    group.size, group.position = sum(map(len, group.documents)), position
    if options.text_field is None:
        group.documents = [{FIELD: text} for text in group.documents]
    return group
