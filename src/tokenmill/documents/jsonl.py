"""One JSON object a line: plain files by byte ranges, compressed files as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tokenmill.documents.compressed import Unfold
from tokenmill.documents.json_values import Values, read_values
from tokenmill.documents.lines import split_lines
from tokenmill.documents.opening import BLOCK_BYTES, line_blocks, open_blocks, open_input
from tokenmill.documents.units import Group, InputFile, Piece, ReadOptions, whole


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
