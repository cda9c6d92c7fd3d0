"""One JSON object a line: plain files by byte ranges, compressed files as a whole."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
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
            lines = _range_lines(file, unit)
            yield from _batches(_without_mark(lines, unit), options, lambda: file.tell() - unit.begin)


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
            blocks = self._blocks(file, unit.file.path)
            with io.BufferedReader(BlockStream(blocks), _BUFFER_BYTES) as lines:
                yield from _batches(_without_mark(lines, unit), options, file.tell)


def _open(path: str) -> BinaryIO:
    try:
        return open(path, "rb", buffering=_BUFFER_BYTES)
    except OSError as error:
        raise DocumentError(f"{path}: must be readable, got {error.strerror}; fix the path or its rights") from None


def _range_lines(file: BinaryIO, unit: Unit) -> Iterator[bytes]:
    """Yield the lines that start in the unit's range, with their ends; the last one may reach beyond it."""
    position = unit.begin
    if position:
        # From the byte before: if it ends a line, the next line starts right at `begin`.
        file.seek(position - 1)
        earlier = file.readline(unit.end - position + 1)
        if not earlier.endswith(b"\n"):
            return  # a line that started earlier fills the whole range
        position += len(earlier) - 1
    readline, size = file.readline, unit.file.bytes
    while position < unit.end:
        line = readline(size - position)
        position += len(line)
        if position < size and not line.endswith(b"\n"):
            raise DocumentError(
                f"{unit.file.path}: must keep its {size} bytes while it is read, got fewer; "
                "let nothing write to it and start again"
            )
        yield line


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


def _without_mark(lines: Iterable[bytes], unit: Unit) -> Iterator[bytes]:
    """Drop the byte order mark that some programs put at the start of a file."""
    rest = iter(lines)
    if unit.begin > 0:
        return rest
    return chain((first.removeprefix(_BYTE_ORDER_MARK) for first in islice(rest, 1)), rest)


def _batches(lines: Iterator[bytes], options: ReadOptions, position: Callable[[], int]) -> Iterator[DocumentBatch]:
    texts: list[str] = []
    bad: list[BadRecord] = []
    size = first = line = 0
    loads = orjson.loads
    field, *rest = options.text_field.split(".")
    for line, raw in enumerate(lines, 1):
        try:
            text = loads(raw)[field]
            for name in rest:
                text = text[name]
        except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
            text = None
        if type(text) is str:
            texts.append(text)
            size += len(text)
        elif raw.strip():
            bad.append(_explain(raw, line - 1, options.text_field))
        if size >= options.batch_bytes or len(texts) + len(bad) >= options.batch_documents:
            yield DocumentBatch(texts=texts, bad=bad, num_lines=line - first, position=position())
            texts, bad, size, first = [], [], 0, line
    if line > first:
        yield DocumentBatch(texts=texts, bad=bad, num_lines=line - first, position=position())


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
