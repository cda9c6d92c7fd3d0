"""One JSON object a line: plain files by byte ranges, compressed files as a whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any, NamedTuple

import orjson

from tokenmill.documents.opening import BLOCK_BYTES, Unfold, file_blocks, line_blocks, open_blocks, open_input
from tokenmill.documents.units import BadRecord, Group, InputFile, Piece, ReadOptions, whole

# Blocks of bytes as lines, none of them held in memory beyond a limit.

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LARGE_BYTES = 8 << 20
_BLOCK = 1 << 20


def text_memory(raw: bytes) -> int:
    """Return about how many bytes a text takes in memory: one rare character makes all of them four times as wide.

    >>> text_memory(b"ab"), text_memory("aЖ".encode()), text_memory("a🌾".encode())
    (2, 4, 8)
    """
    import numpy as np

    characters = largest = 0
    values = np.frombuffer(raw, np.uint8)
    for begin in range(0, values.size, _BLOCK):
        block = values[begin : begin + _BLOCK]
        characters += int(np.count_nonzero((block & 0xC0) != 0x80))
        largest = max(largest, int(block.max()))
    width = 4 if largest >= 0xF0 else 2 if largest >= 0xC4 else 1
    return characters * max(width, _escaped_width(raw))


def _escaped_width(raw: bytes) -> int:
    r"""Return how wide the characters are that JSON writes as \uXXXX; a backslash may itself be escaped."""
    width, at = 1, raw.find(b"\\u")
    while at >= 0 and width < 4:
        before = at
        while before and raw[before - 1] == 0x5C:
            before -= 1
        if (at - before) % 2 == 0 and raw[at + 2 : at + 4] != b"00":
            width = 4 if raw[at + 2 : at + 4].lower() in (b"d8", b"d9", b"da", b"db") else 2
        at = raw.find(b"\\u", at + 2)
    return width


class Unread(bytes):
    """Stands among raw records for one that was not kept: neither UTF-8 nor JSON, so that no parser takes it."""

    reason: str
    detail: str
    num_quotes: int
    """How many `"` it has: whether a quoted cell goes on after it."""

    def __new__(cls, reason: str, detail: str, *, num_quotes: int = 0) -> Unread:
        """Stand for a record that has this reason to be bad."""
        self = super().__new__(cls, b"\xff")
        self.reason, self.detail, self.num_quotes = reason, detail, num_quotes
        return self


class Held:
    """The parts of a record that goes on in the next block; what outgrows `max_bytes` is let go and counted."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._quotes = 0
        self.size = 0

    def add(self, part: bytes) -> None:
        """Append a part."""
        self.size += len(part)
        if self.size > self._max_bytes:
            self._quotes += sum(held.count(b'"') for held in (*self._parts, part))
            self._parts.clear()
        elif part:
            self._parts.append(part)

    def take(self, last: bytes) -> bytes:
        """Return the whole record that `last` ends, and begin anew."""
        if self.size + len(last) <= self._max_bytes:
            record = b"".join((*self._parts, last)) if self._parts else last
            self._parts.clear()
            if len(record) > LARGE_BYTES and (size := text_memory(record)) > self._max_bytes:
                detail = f"{len(record)} bytes that take {size} in memory as text"
                record = Unread("too_long", detail, num_quotes=record.count(b'"'))
        else:
            self.add(last)
            record = Unread("too_long", f"{self.size} bytes", num_quotes=self._quotes)
        self._parts.clear()
        self._quotes = self.size = 0
        return record


class LineRun(NamedTuple):
    """The lines that end in one block."""

    apart: list[bytes]
    """The first of them, where they do not stand in the block as they are; an `Unread` for one that is too long."""
    block: bytes
    begin: int
    end: int
    """The other lines are `block[begin:end]`, each with its newline."""

    def lines(self) -> list[bytes]:
        """Return all lines."""
        # Three times as fast as split, which looks at every byte by itself.
        return self.apart + BytesIO(self.block[self.begin : self.end]).readlines()


def split_lines(blocks: Iterator[bytes], max_bytes: int) -> Iterator[list[bytes]]:
    """Yield the lines that end in each block, with their newline; an `Unread` for one above `max_bytes`.

    The byte order mark that some programs put at the start of a file is dropped.
    """
    for run in line_runs(blocks, max_bytes):
        yield run.lines()


def line_runs(blocks: Iterator[bytes], max_bytes: int) -> Iterator[LineRun]:
    """Yield the lines that end in each block, as `split_lines` does, but most of them as they stand there."""
    held = Held(max_bytes)
    first = True
    for block in blocks:
        begin, end = 0, block.rfind(b"\n") + 1
        if end:
            apart: list[bytes] = []
            if first or held.size or len(block) > max_bytes:
                begin = block.find(b"\n") + 1
                apart.append(held.take(block[:begin]))
            if first:
                apart[0] = _without_mark(apart[0])
                first = False
            if len(block) > max_bytes:  # else no line within the block can be too long
                apart += [Held(max_bytes).take(line) for line in BytesIO(block[begin:end]).readlines()]
                begin = end
            yield LineRun(apart, block, begin, end)
        held.add(block[end:])
    if held.size:
        last = held.take(b"")
        yield LineRun([_without_mark(last) if first else last], b"", 0, 0)


def _without_mark(line: bytes) -> bytes:
    return line if isinstance(line, Unread) else line.removeprefix(BYTE_ORDER_MARK)


# Raw JSON values as documents: fast where all are good, one by one where some are not.


class Values(NamedTuple):
    """What raw values are: documents, bad ones by index, and the indices of blank ones, which are neither."""

    documents: list[str] | list[Mapping[str, Any]]
    bad: list[BadRecord]
    blank: list[int]


class RecordError(Exception):
    """Why one record is bad: caught where its line is known."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def at(self, line: int) -> BadRecord:
        """Return it as the bad record at a line."""
        return BadRecord(line=line, reason=self.reason, detail=self.detail)


def read_values(raws: list[bytes], options: ReadOptions, *, bare_strings: bool = False) -> Values:
    """Return the documents of raw JSON values; with `bare_strings`, a value may be a text itself."""
    try:
        if options.text_field is None:
            return Values(_records(raws), [], [])
        if bare_strings and raws and raws[0].lstrip()[:1] == b'"':
            return Values(_strings(raws), [], [])
        return Values(_texts(raws, options.text_field), [], [])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return _one_by_one(raws, options, bare_strings=bare_strings)


def _texts(raws: list[bytes], text_field: str) -> list[str]:
    """Return the texts of values that are all good, else raise; one loop in C, as short lines are many."""
    field, *rest = text_field.split(".")
    texts = [record[field] for record in map(orjson.loads, raws)]
    for name in rest:
        texts = [text[name] for text in texts]
    if not set(map(type, texts)) <= {str}:
        raise TypeError
    return texts


def _strings(raws: list[bytes]) -> list[str]:
    texts = list(map(orjson.loads, raws))
    if not set(map(type, texts)) <= {str}:
        raise TypeError
    return texts


def _records(raws: list[bytes]) -> list[Mapping[str, Any]]:
    records = list(map(orjson.loads, raws))
    if not set(map(type, records)) <= {dict}:
        raise TypeError
    return records


def _one_by_one(raws: list[bytes], options: ReadOptions, *, bare_strings: bool) -> Values:
    documents: list[Any] = []
    bad: list[BadRecord] = []
    blank: list[int] = []
    for line, raw in enumerate(raws):
        try:
            if isinstance(raw, Unread):
                raise RecordError(raw.reason, raw.detail)
            if not raw.strip():
                blank.append(line)
                continue
            value, checked = load(raw)
            if not (bare_strings and isinstance(value, str) and options.text_field is not None):
                value = document_of(value, options)
            if not checked:
                refuse_surrogates(value)
            documents.append(value)
        except RecordError as error:
            bad.append(error.at(line))
    return Values(documents, bad, blank)


def load(raw: bytes) -> tuple[Any, bool]:
    """Parse one JSON value: (value, whether its strings are known to be Unicode text); raises RecordError.

    What orjson refuses is tried with the standard library, which takes NaN, Infinity and huge numbers, as many
    programs write them, and halves of surrogate pairs.
    """
    try:
        return orjson.loads(raw), True
    except orjson.JSONDecodeError as error:
        try:
            text = raw.decode()
        except UnicodeDecodeError as utf8:
            raise RecordError("utf8", utf8_detail(utf8)) from None
        try:
            return json.loads(text), False
        except RecursionError:
            raise RecordError("json", "an object that is nested too deeply") from None
        except ValueError:
            raise RecordError("json", f"{error.msg} at character {error.pos} of the record") from None


def document_of(value: object, options: ReadOptions) -> str | Mapping[str, Any]:
    """Return the text, or the whole record, of a parsed value; raises RecordError."""
    if options.text_field is not None:
        return text_of(value, options.text_field)
    if not isinstance(value, dict):
        raise RecordError("not_object", kind_of(value))
    if options.fields is not None:
        return {name: value[name] for name in options.fields if name in value}
    return value


def text_of(value: object, text_field: str) -> str:
    """Return the string at a dotted path of a parsed value; raises RecordError."""
    for name in text_field.split("."):
        if not isinstance(value, dict):
            raise RecordError("missing_field", f"no field {name!r} in {kind_of(value)}")
        if name not in value:
            raise RecordError("missing_field", f"no field {name!r} but {_names(value)}")
        value = value[name]
    if not isinstance(value, str):
        raise RecordError("not_text", f"field {text_field!r} is {kind_of(value)}")
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
        raise RecordError("surrogate", f"a lone {half} in a string") from None


def utf8_detail(error: UnicodeDecodeError) -> str:
    """Say where bytes are not UTF-8."""
    return f"{error.reason} at byte {error.start} of the record"


def kind_of(value: object) -> str:
    """Say what a parsed JSON value is.

    >>> kind_of(None), kind_of([1])
    ('null', 'a list')
    """
    kinds: Sequence[tuple[type, str]] = (
        (dict, "an object"),
        (list, "a list"),
        (str, "a string"),
        (bool, "true or false"),
        (int, "a number"),
        (float, "a number"),
        (type(None), "null"),
    )
    return next((name for kind, name in kinds if isinstance(value, kind)), type(value).__name__)


class PlainJsonl:
    """A plain file, cut anywhere: a range owns the lines that start in it."""

    counts = "line"

    def ranges(self, file: InputFile, chunk_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Cut a file into byte ranges."""
        for begin in range(0, file.bytes, chunk_bytes):
            end = min(begin + chunk_bytes, file.bytes)
            yield begin, end, end - begin

    def read(self, piece: Piece, options: ReadOptions) -> Iterator[Group]:
        """Read the lines that start in the piece's range."""
        with open_input(piece.file, exact=False) as stream:
            blocks = line_blocks(stream, piece, min(BLOCK_BYTES, options.batch_bytes))
            yield from line_groups(blocks, options, lambda: stream.tell() - piece.begin)


class CompressedJsonl:
    """A file that can only be read from its start, as one piece."""

    counts = "line"

    def __init__(self, unfold: Unfold) -> None:
        self._unfold = unfold

    def ranges(self, file: InputFile, chunk_bytes: int) -> Iterator[tuple[int, int, int]]:  # noqa: ARG002
        """Take the file whole."""
        return whole(file)

    def read(self, piece: Piece, options: ReadOptions) -> Iterator[Group]:
        """Read all lines."""
        with open_blocks(piece, self._unfold) as (blocks, tell):
            yield from line_groups(_shorter(blocks, options.batch_bytes), options, tell)


def line_groups(blocks: Iterator[bytes], options: ReadOptions, tell: Callable[[], int]) -> Iterator[Group]:
    """Read the records of lines, those of a block at a time."""
    if options.compiled and options.text_field is not None and "." not in options.text_field:
        from tokenmill.documents.scanned import scanned_groups

        yield from scanned_groups(blocks, options, options.text_field, tell)
        return
    most = options.batch_documents
    for block in split_lines(blocks, options.max_record_bytes):
        for lines in [block] if len(block) <= most else [block[i : i + most] for i in range(0, len(block), most)]:
            group = value_group(read_values(lines, options), lines, options, tell())
            lines.clear()  # a line may be as large as its text, which is what the caller works on now
            yield group


def value_group(values: Values, raws: list[bytes], options: ReadOptions, position: int) -> Group:
    """Return what was read of raw values as a group."""
    size = sum(map(len, raws if options.text_field is None else values.documents))
    return Group(
        documents=values.documents,
        bad=values.bad,
        blank=values.blank,
        num_lines=len(raws),
        size=size,
        position=position,
    )


def _shorter(blocks: Iterator[bytes], most: int) -> Iterator[bytes]:
    """Yield blocks of at most so many bytes: a group is not cut, so it must not be much larger than a batch."""
    for block in blocks:
        if len(block) <= most:
            yield block
        else:
            for begin in range(0, len(block), most):
                yield block[begin : begin + most]


# Plain text: a file is a document, or each of its lines is one.

FIELD = "text"
"""What the text is called where whole records are asked for."""


class PlainText:
    """Text files; newlines are kept as they are, a byte order mark at the start is not."""

    counts = "line"

    def __init__(self, unfold: Unfold | None = None) -> None:
        self._unfold = unfold

    def ranges(self, file: InputFile, chunk_bytes: int) -> Iterator[tuple[int, int, int]]:  # noqa: ARG002
        """Take the file whole."""
        return whole(file)

    def read(self, piece: Piece, options: ReadOptions) -> Iterator[Group]:
        """Read the file, or its lines; `text_field` has no part in it."""
        if options.text_unit == "file":
            yield self._read_file(piece, options)
            return
        with open_blocks(piece, self._unfold, block_bytes=min(1 << 17, options.batch_bytes)) as (blocks, tell):
            for lines in split_lines(blocks, options.max_record_bytes):
                for begin in range(0, len(lines), options.batch_documents):
                    some = lines[begin : begin + options.batch_documents]
                    yield _group(_line_texts(some), len(some), tell(), options)

    def _read_file(self, piece: Piece, options: ReadOptions) -> Group:
        try:
            text = _decode(self._contents(piece, options.max_record_bytes).removeprefix(BYTE_ORDER_MARK))
            values = Values([text], [], []) if text else Values([], [], [0])
        except RecordError as error:
            values = Values([], [error.at(0)], [])
        return _group(values, 1, piece.bytes, options)

    def _contents(self, piece: Piece, max_bytes: int) -> bytes:
        if self._unfold is None:
            if piece.file.bytes > max_bytes:
                raise RecordError("too_long", f"{piece.file.bytes} bytes")
            with open_input(piece.file, exact=False) as stream:
                return b"".join(file_blocks(stream, piece.file, 0, piece.file.bytes, max_bytes))
        held = Held(max_bytes)
        with open_blocks(piece, self._unfold) as (blocks, _):
            for block in blocks:
                held.add(block)
        return _kept(held.take(b""))


def _line_texts(lines: list[bytes]) -> Values:
    """Return the texts of lines that are not blank, without the end of the line."""
    try:
        texts = [line.decode().rstrip("\r\n") for line in lines]
    except UnicodeDecodeError:
        return _texts_one_by_one(lines)
    blank = [index for index, text in enumerate(texts) if not text or text.isspace()]
    return Values([text for text in texts if text and not text.isspace()] if blank else texts, [], blank)


def _texts_one_by_one(lines: list[bytes]) -> Values:
    texts: list[str] = []
    bad: list[BadRecord] = []
    blank: list[int] = []
    for line, raw in enumerate(lines):
        try:
            text = _decode(_kept(raw)).rstrip("\r\n")
        except RecordError as error:
            bad.append(error.at(line))
            continue
        if text and not text.isspace():
            texts.append(text)
        else:
            blank.append(line)
    return Values(texts, bad, blank)


def _kept(raw: bytes) -> bytes:
    if isinstance(raw, Unread):
        raise RecordError(raw.reason, raw.detail)
    return raw


def _decode(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise RecordError("utf8", utf8_detail(error)) from None


def _group(values: Values, num_lines: int, position: int, options: ReadOptions) -> Group:
    texts = values.documents
    return Group(
        documents=texts if options.text_field is not None else [{FIELD: text} for text in texts],
        bad=values.bad,
        blank=values.blank,
        num_lines=num_lines,
        size=sum(map(len, texts)),
        position=position,
    )
