"""Plain text: a file is a document, or each of its lines is one."""

from __future__ import annotations

from collections.abc import Iterator

from tokenmill.documents.compressed import Unfold
from tokenmill.documents.json_values import RecordError, Values, utf8_detail
from tokenmill.documents.lines import BYTE_ORDER_MARK, Held, Unread, split_lines
from tokenmill.documents.opening import file_blocks, open_blocks, open_input
from tokenmill.documents.units import BadRecord, Group, InputFile, Piece, ReadOptions, whole

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
        return _one_by_one(lines)
    blank = [index for index, text in enumerate(texts) if not text or text.isspace()]
    return Values([text for text in texts if text and not text.isspace()] if blank else texts, [], blank)


def _one_by_one(lines: list[bytes]) -> Values:
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
