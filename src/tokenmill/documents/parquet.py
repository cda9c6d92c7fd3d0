"""Parquet files by row groups, a batch of rows in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from tokenmill.documents.columns import column_groups, rows_at_once, text_path, wanted_columns
from tokenmill.documents.opening import open_input
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
        with _open(file) as opened:
            sizes = [
                max(opened.metadata.row_group(group).total_byte_size, 1)
                for group in range(opened.metadata.num_row_groups)
            ]
        return runs(sizes, file.bytes, chunk_bytes)

    def read(self, piece: Piece, options: ReadOptions) -> Iterator[Group]:
        """Read the rows of the piece's row groups, of the columns that are needed."""
        with _open(piece.file) as opened:
            schema = opened.schema_arrow
            leaves = wanted_columns(schema, options, piece.file.path)
            if options.text_field is not None:
                leaves = [".".join(text_path(schema, options.text_field))]
            for group in range(piece.begin, piece.end):
                position = piece.bytes * (group + 1 - piece.begin) // (piece.end - piece.begin)
                for batch in _batches(opened, group, leaves, options):
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
def _open(file: InputFile) -> Iterator[pq.ParquetFile]:
    """Open a file; what Arrow finds wrong with it, now or while it is read, raises DocumentError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    open_input(file, exact=True).close()
    try:
        # Columns are read through a buffer, else a whole column of a row group would be in memory at once.
        with pq.ParquetFile(
            file.path, buffer_size=_READ_BYTES, pre_buffer=False, page_checksum_verification=True
        ) as opened:
            yield opened
    except (pa.ArrowException, OSError, UnicodeDecodeError, MemoryError) as error:
        raise DocumentError(
            f"{file.path}: must be an intact Parquet file, got {' '.join(str(error).split())}; "
            "copy or download it again, or fix its name"
        ) from None
