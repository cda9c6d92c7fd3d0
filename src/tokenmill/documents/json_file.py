"""JSON files: one object, a list of objects or of texts, or objects one after another.

JSON lines that are named `.json` are read as a stream. Any other JSON file is read whole, so its size has a limit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain

import msgspec

from tokenmill.documents.lines import BYTE_ORDER_MARK, Unread, line_groups, read_values
from tokenmill.documents.streams import open_blocks
from tokenmill.documents.units import Format, Group, Piece, ReadOptions
from tokenmill.errors import DocumentError

MAX_BYTES = 1 << 30
"""Largest JSON file that is not JSON lines, decompressed. A worker holds all of it in memory."""
_HEAD_BYTES = 1 << 20
_SPACE = re.compile(r"[ \t\n\r]*")
_BETWEEN_OBJECTS = re.compile(r"[ \t\n\r,]*")
_BETWEEN_ITEMS = re.compile(r"[ \t\n\r]*(?:,[ \t\n\r]*|(?=\]))")


def _read(piece: Piece, options: ReadOptions) -> Iterator[Group]:
    """Read all records."""
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
        data = _whole(chain([start], blocks), piece.file.path)
    yield from _groups(data, piece, options)


JSON_FILE = Format(counts="record", read=_read)


def are_lines(start: bytes, *, whole: bool) -> bool:
    r"""Return whether a file holds JSON lines, by its first two lines; the end of `start` may be cut off.

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


def _whole(blocks: Iterator[bytes], path: str) -> bytes:
    """Return the content of a file."""
    parts: list[bytes] = []
    size = 0
    for block in blocks:
        size += len(block)
        if size > MAX_BYTES:
            raise DocumentError(
                f"{path}: this JSON file is larger than {MAX_BYTES} bytes and must be read whole; "
                "convert it to JSONL, one object per line"
            )
        parts.append(block)
    return b"".join(parts)


def _groups(data: bytes, piece: Piece, options: ReadOptions) -> Iterator[Group]:
    """Read the records of a file, a batch of them at a time; those before damage come first, then its error."""
    raws: list[bytes] = []
    size = position = 0
    damage: DocumentError | None = None
    records = _records(data, piece.file.path)
    while damage is None:
        try:
            raw = next(records, None)
        except DocumentError as error:
            raw, damage = None, error
        if raw is not None:
            is_long = len(raw) > options.max_record_bytes
            raws.append(Unread("too_long", f"{len(raw)} bytes") if is_long else bytes(raw))
            size += len(raw)
        if raws and (raw is None or len(raws) == options.batch_documents or size >= options.batch_bytes):
            position += size
            yield _group(raws, piece.bytes * position // len(data), options)
            raws, size = [], 0
        if raw is None and damage is None:
            return
    raise damage


def _group(raws: list[bytes], position: int, options: ReadOptions) -> Group:
    group = read_values(raws, options, bare_strings=True)
    group.position = position
    return group


def _records(data: bytes, path: str) -> Iterator[bytes | memoryview[int]]:
    """Yield the raw records of a file."""
    try:
        items = msgspec.json.decode(data, type=list[msgspec.Raw])
    except (ValueError, RecursionError):
        yield from _records_of_other(data, path)  # several objects, or numbers such as NaN
    else:
        yield from (memoryview(item) for item in items)


def _records_of_other(data: bytes, path: str) -> Iterator[bytes]:
    """Yield the raw records of a file that is not one list of standard JSON; the standard library finds their ends.

    Raises DocumentError where a record cannot be parsed. The records after it have no certain start.
    """
    try:
        text = data.decode(errors="surrogateescape")  # a record that is not UTF-8 is bad by itself
        begin = _match_end(_SPACE, text, 0)
        is_list = text.startswith("[", begin)
        between = _BETWEEN_ITEMS if is_list else _BETWEEN_OBJECTS
        at = _match_end(_SPACE, text, begin + is_list)
        parse = json.JSONDecoder().raw_decode
        while at < len(text) and not (is_list and text[at] == "]"):
            end = parse(text, at)[1]
            yield text[at:end].encode(errors="surrogateescape")
            at = _match_end(between, text, end)
        if is_list and text[at:].strip() != "]":
            raise json.JSONDecodeError("Expecting ']' and nothing after it", text, at)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise DocumentError(
            f"{path}: not valid JSON: {reason}; fix the file, or convert it to JSONL, where a broken line costs "
            "only that line"
        ) from None


def _match_end(pattern: re.Pattern[str], text: str, begin: int) -> int:
    match = pattern.match(text, begin)
    if match is None:
        raise json.JSONDecodeError("Expecting ',' delimiter", text, begin)
    return match.end()
