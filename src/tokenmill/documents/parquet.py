"""Parquet files by row groups, a batch of rows in memory at a time."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, BinaryIO

from tokenmill.documents.columns import cell_groups, column_groups, rows_at_once, text_path, wanted_columns
from tokenmill.documents.opening import open_input
from tokenmill.documents.page_header import NotUnderstood
from tokenmill.documents.parquet_pages import CODECS, ColumnChunk, page_cells
from tokenmill.documents.units import Group, InputFile, Piece, ReadOptions
from tokenmill.errors import DocumentError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_READ_BYTES = 1 << 20
_UNFOLD_BYTES = 8 << 20
"""Unfolded at a time: for every batch Arrow reserves what is left of a page, often of a whole row group, and copies
what it then has. A fifth of the time to read such pages in batches of 1 MiB went there."""
_DICTIONARY_BYTES = 256 << 20


class Parquet:
    """Files of row groups, each of which can be read on its own."""

    counts = "row"

    def ranges(self, file: InputFile, chunk_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Cut a file into runs of row groups of about `chunk_bytes`; reads its footer."""
        with _open(file) as (opened, _):
            sizes = [
                max(opened.metadata.row_group(group).total_byte_size, 1)
                for group in range(opened.metadata.num_row_groups)
            ]
        return runs(sizes, file.bytes, chunk_bytes)

    def read(self, piece: Piece, options: ReadOptions) -> Iterator[Group]:
        """Read the rows of the piece's row groups, of the columns that are needed."""
        with _open(piece.file) as (opened, stream):
            schema = opened.schema_arrow
            leaves = wanted_columns(schema, options, piece.file.path)
            if options.text_field is not None:
                leaves = [".".join(text_path(schema, options.text_field))]
            column = _plain_column(opened, leaves[0]) if options.text_field is not None else None
            for group in range(piece.begin, piece.end):
                position = piece.bytes * (group + 1 - piece.begin) // (piece.end - piece.begin)
                chunk = None if column is None else _chunk(opened, group, column, piece.file.bytes)
                done = 0
                if chunk is not None:
                    with suppress(NotUnderstood):
                        for cells in page_cells(stream.fileno(), chunk):
                            yield from cell_groups(cells, options, position)
                            done += len(cells)
                    if done == chunk.values:
                        continue
                for batch in _from_row(done, _batches(opened, group, leaves, options)):
                    yield from column_groups(batch, options, position, unfolded=True)


def runs(sizes: list[int], total_bytes: int, chunk_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Join consecutive parts of a file into runs of about `chunk_bytes`, sizes scaled so that they sum to its own.

    >>> list(runs([1, 1, 1, 3], 60, 20))
    [(0, 2, 20), (2, 4, 40)]
    """
    whole = sum(sizes)
    begin = done = before = 0
    for end, size in enumerate(sizes, 1):
        done += size
        position = total_bytes * done // whole
        if position - before >= chunk_bytes or end == len(sizes):
            yield begin, end, position - before
            begin, before = end, position


def _plain_column(opened: pq.ParquetFile, leaf: str) -> int | None:
    """Return the number of a column of texts that are not nested; None if it is none."""
    import pyarrow as pa

    at = opened.schema_arrow.get_field_index(leaf)
    plain = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
    if at < 0 or opened.schema_arrow.field(at).type not in plain:
        return None
    found = [index for index in range(len(opened.schema)) if opened.schema.column(index).path == leaf]
    if len(found) != 1:
        return None
    about = opened.schema.column(found[0])
    flat = about.max_repetition_level == 0 and about.max_definition_level <= 1
    return found[0] if flat and about.physical_type == "BYTE_ARRAY" else None


def _chunk(opened: pq.ParquetFile, group: int, column: int, file_bytes: int) -> ColumnChunk | None:
    """Return where the pages of a column are in a row group; None if Arrow is to read them."""
    about = opened.schema.column(column)
    if not _is_sound(opened, group, about.path, file_bytes):
        return None
    rows = opened.metadata.row_group(group)
    told = rows.column(column)
    begin = told.data_page_offset
    if told.has_dictionary_page and 0 < (told.dictionary_page_offset or 0) < begin:
        begin = told.dictionary_page_offset
    end = begin + told.total_compressed_size
    if told.compression not in CODECS or told.file_path or not 0 <= begin <= end <= file_bytes:
        return None
    if told.num_values != rows.num_rows or told.physical_type != about.physical_type:
        return None
    nullable = about.max_definition_level > 0
    return ColumnChunk(begin=begin, end=end, values=told.num_values, codec=told.compression, nullable=nullable)


def _is_sound(opened: pq.ParquetFile, group: int, leaf: str, file_bytes: int) -> bool:
    """Whether Arrow takes what the footer says of a column: pyarrow's own look at a damaged one ends the process.

    Arrow is let to read the column from a file that has nothing but its size.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    source = pa.PythonFile(_NoFile(file_bytes), "r")
    with pq.ParquetFile(source, metadata=opened.metadata, buffer_size=4096, pre_buffer=False) as empty:
        try:
            next(empty.iter_batches(1, row_groups=[group], columns=[leaf], use_threads=False), None)
        except _WasRead:
            return True
        except (pa.ArrowException, OSError):
            pass
    return False


class _WasRead(Exception):
    """Something was read of a file that has only a size."""


class _NoFile(io.RawIOBase):
    """A file that has only a size."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, _size: int | None = -1, /) -> bytes:
        raise _WasRead


def _from_row(first: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Leave out the first rows of a row group."""
    for batch in batches:
        if first < batch.num_rows:
            yield batch.slice(first)
        first = max(first - batch.num_rows, 0)


def _batches(
    opened: pq.ParquetFile, group: int, leaves: list[str], options: ReadOptions
) -> Iterator[pa.RecordBatch]:
    """Read a row group: its first row, then as many rows at a time as its sizes allow."""
    batches = opened.iter_batches(1, row_groups=[group], columns=leaves, use_threads=False)
    first = next(batches, None)
    if first is None:
        return
    # Arrow has now checked what the footer says of these columns: pyarrow's own look at a damaged one ends the
    # process. The rows that follow are read on by the same reader; a second one would unfold the first page again.
    opened.reader.set_batch_size(_rows_at_once(opened, group, leaves, options))
    yield first
    yield from batches


def _rows_at_once(opened: pq.ParquetFile, group: int, leaves: list[str], options: ReadOptions) -> int:
    """Return how many rows to read at a time, by the sizes that the footer gives.

    A column may have a dictionary, and every row its largest entry: so many rows are taken that even then they
    have some 256 MiB at most.
    """
    about = opened.metadata.row_group(group)
    paths = [opened.schema.column(index).path for index in range(len(opened.schema))]
    chunks = [about.column(index) for index, path in enumerate(paths) if _is_below(path, leaves)]
    wanted = replace(options, batch_bytes=max(options.batch_bytes, _UNFOLD_BYTES))
    rows = rows_at_once(about.num_rows, sum(chunk.total_uncompressed_size for chunk in chunks), wanted)
    for chunk in chunks:
        if chunk.has_dictionary_page:
            stored = chunk.data_page_offset - (chunk.dictionary_page_offset or 0)
            unfolded = stored * chunk.total_uncompressed_size // max(chunk.total_compressed_size, 1)
            rows = min(rows, max(_DICTIONARY_BYTES // max(unfolded, 1), 1))
    return rows


def _is_below(path: str, leaves: list[str]) -> bool:
    return any(path == leaf or path.startswith(f"{leaf}.") for leaf in leaves)


@contextmanager
def _open(file: InputFile) -> Iterator[tuple[pq.ParquetFile, BinaryIO]]:
    """Open a file, for Arrow and as bytes; what Arrow finds wrong with it, now or later, raises DocumentError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open_input(file, exact=True) as stream:
        try:
            # Columns are read through a buffer, else a whole column of a row group would be in memory at once.
            with pq.ParquetFile(
                file.path, buffer_size=_READ_BYTES, pre_buffer=False, page_checksum_verification=True
            ) as opened:
                yield opened, stream
        except (pa.ArrowException, OSError, UnicodeDecodeError, MemoryError) as error:
            raise DocumentError(
                f"{file.path}: must be an intact Parquet file, got {' '.join(str(error).split())}; "
                "copy or download it again, or fix its name"
            ) from None
