"""One JSON object a line: plain files by byte ranges, compressed files as a whole."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO

import orjson

from tokenmill.documents.units import BadRecord, DocumentBatch, InputFile, ReadOptions, Unit
from tokenmill.errors import DocumentError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_BUFFER_BYTES = 1 << 17
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ABSENT = object()


class PlainJsonl:
    """A plain file, cut anywhere: a range owns the lines that start in it."""

    def ranges(self, file: InputFile, chunk_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Cut a file into byte ranges."""
        for begin in range(0, file.bytes, chunk_bytes):
            end = min(begin + chunk_bytes, file.bytes)
            yield begin, end, end - begin

    def read(self, unit: Unit, options: ReadOptions) -> Iterator[DocumentBatch]:
        """Read the lines that start in the unit's range."""
        with _open(unit.file.path) as file:
            blocks = _range_lines(file, unit, min(_BUFFER_BYTES, options.batch_bytes))
            yield from _batches(_without_mark(blocks, unit), options, lambda: file.tell() - unit.begin)


class CompressedJsonl:
    """A file that can only be read from its start, as one unit."""

    def __init__(self, blocks: Callable[[BinaryIO, str], Iterator[bytes]]) -> None:
        self._blocks = blocks

    def ranges(self, file: InputFile, chunk_bytes: int) -> Iterator[tuple[int, int, int]]:  # noqa: ARG002
        """Take the file whole."""
        yield 0, file.bytes, file.bytes

    def read(self, unit: Unit, options: ReadOptions) -> Iterator[DocumentBatch]:
        """Read all lines."""
        with _open(unit.file.path) as file:
            stream = BlockStream(self._blocks(file, unit.file.path))
            with io.BufferedReader(stream, _BUFFER_BYTES) as lines:
                blocks = iter(partial(lines.readlines, min(_BUFFER_BYTES, options.batch_bytes)), [])
                yield from _batches(_without_mark(blocks, unit), options, file.tell)


def _open(path: str) -> BinaryIO:
    try:
        return open(path, "rb", buffering=_BUFFER_BYTES)
    except OSError as error:
        raise DocumentError(f"{path}: must be readable, got {error.strerror}; fix the path or its rights") from None


def _range_lines(file: BinaryIO, unit: Unit, block_bytes: int) -> Iterator[list[bytes]]:
    """Yield the lines that start in the unit's range, some at a time; the last one may reach beyond it."""
    position, size = unit.begin, unit.file.bytes
    if position:
        # From the byte before: if it ends a line, the next line starts right at `begin`.
        file.seek(position - 1)
        earlier = file.readline(unit.end - position + 1)
        if not earlier.endswith(b"\n"):
            return  # a line that started earlier fills the whole range
        position += len(earlier) - 1
    while position < unit.end:
        # `readlines` stops once it has more bytes than it is asked for, and takes 0 for no limit.
        most = min(block_bytes, unit.end - position) - 1
        lines = file.readlines(most) if most else [file.readline()]
        position += sum(map(len, lines))
        if position > size:  # the file has grown at the end of its last line
            lines[-1] = lines[-1][: size - position]
        elif not lines or (position < size and not lines[-1].endswith(b"\n")):
            raise DocumentError(
                f"{unit.file.path}: must keep its {size} bytes while it is read, got fewer; "
                "let nothing write to it and start again"
            )
        yield lines


class BlockStream(io.RawIOBase):
    """Blocks of any sizes as one file, for `io.BufferedReader` to find the lines in."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """Say that this can be read."""
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        """Fill the buffer as far as the current block goes; 0 at the end."""
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = memoryview(block)
        target = memoryview(buffer)
        size = min(len(target), len(self._rest))
        target[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


def _without_mark(blocks: Iterator[list[bytes]], unit: Unit) -> Iterator[list[bytes]]:
    """Drop the byte order mark that some programs put at the start of a file."""
    if unit.begin == 0:
        for lines in islice(blocks, 1):
            lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
            yield lines
    yield from blocks


def _batches(
    blocks: Iterator[list[bytes]], options: ReadOptions, position: Callable[[], int]
) -> Iterator[DocumentBatch]:
    texts: list[str] = []
    bad: list[BadRecord] = []
    size = first = line = 0
    most = options.batch_documents
    for block in blocks:
        for lines in [block] if len(block) <= most else [block[i : i + most] for i in range(0, len(block), most)]:
            try:
                found = _texts(lines, options.text_field)
            except (orjson.JSONDecodeError, KeyError, TypeError):
                found = _good_texts(lines, line, options.text_field, bad)
            texts += found
            size += sum(map(len, found))
            line += len(lines)
            if size >= options.batch_bytes or len(texts) + len(bad) >= most:
                yield DocumentBatch(texts=texts, bad=bad, num_lines=line - first, position=position())
                texts, bad, size, first = [], [], 0, line
    if line > first:
        yield DocumentBatch(texts=texts, bad=bad, num_lines=line - first, position=position())


def _texts(lines: list[bytes], text_field: str) -> list[str]:
    """Return the texts of lines that are all good, else raise; one loop in C, as short lines are many."""
    field, *rest = text_field.split(".")
    texts = [record[field] for record in map(orjson.loads, lines)]
    for name in rest:
        texts = [text[name] for text in texts]
    if not set(map(type, texts)) <= {str}:
        raise TypeError
    return texts


def _good_texts(lines: list[bytes], first: int, text_field: str, bad: list[BadRecord]) -> list[str]:
    """Return the texts of the good lines, and list the others; blank lines are neither."""
    texts: list[str] = []
    for line, raw in enumerate(lines, first):
        try:
            texts += _texts([raw], text_field)
        except (orjson.JSONDecodeError, KeyError, TypeError):
            if raw.strip():
                bad.append(_explain(raw, line, text_field))
    return texts


def _explain(raw: bytes, line: int, text_field: str) -> BadRecord:
    """Say why a line gives no text; it has been tried, so speed does not matter."""
    try:
        value: Any = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        try:
            raw.decode()
        except UnicodeDecodeError as utf8:
            return BadRecord(line=line, reason="utf8", detail=f"{utf8.reason} at byte {utf8.start} of the line")
        return BadRecord(line=line, reason="json", detail=f"{error.msg} at character {error.pos} of the line")
    for name in text_field.split("."):
        if not isinstance(value, dict):
            detail = f"no field {name!r} in {_kind(value)}"
            return BadRecord(line=line, reason="missing_field", detail=detail)
        value = value.get(name, _ABSENT)
        if value is _ABSENT:
            return BadRecord(line=line, reason="missing_field", detail=f"no field {name!r} in the object")
    return BadRecord(line=line, reason="not_text", detail=f"field {text_field!r} is {_kind(value)}")


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
