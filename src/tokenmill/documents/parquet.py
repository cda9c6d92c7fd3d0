"""Parquet files by row groups, a batch of rows in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tokenmill.documents.columns import column_groups, refuse_twins, rows_at_once, text_path, wanted_columns
from tokenmill.documents.opening import open_input
from tokenmill.documents.units import Group, InputFile, Piece, ReadOptions
from tokenmill.errors import DocumentError

if TYPE_CHECKING:
    import pyarrow.parquet as pq

_READ_BYTES = 1 << 20
_DICTIONARY_BYTES = 128 << 20


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
        path = piece.file.path
        with _open(piece.file) as opened:
            schema = opened.schema_arrow
            columns = wanted_columns(schema, options, path)
            refuse_twins(schema, path)
            leaves = columns
            if options.text_field is not None:
                leaves = [".".join(text_path(schema, options.text_field))]
            num_groups = piece.end - piece.begin
            for done, group in enumerate(range(piece.begin, piece.end), 1):
                rows = _rows_at_once(opened.metadata.row_group(group), leaves, options)
                position = piece.bytes * done // num_groups
                for batch in opened.iter_batches(
                    batch_size=rows, row_groups=[group], columns=leaves, use_threads=False
                ):
                    yield from column_groups(batch, options, path, position)


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


def _rows_at_once(group: pq.RowGroupMetaData, leaves: list[str], options: ReadOptions) -> int:
    """Return how many rows to read at a time, by the sizes that the footer gives.

    A column may have a dictionary, and every row its largest entry: so many rows are taken that even then they
    have some 128 MiB at most.
    """
    chunks = [group.column(index) for index in range(group.num_columns)]
    chunks = [chunk for chunk in chunks if _is_below(chunk.path_in_schema, leaves)]
    rows = rows_at_once(group.num_rows, sum(chunk.total_uncompressed_size for chunk in chunks), options)
    for chunk in chunks:
        if chunk.has_dictionary_page:
            entries = max(chunk.data_page_offset - (chunk.dictionary_page_offset or 0), 1)
            rows = min(rows, max(_DICTIONARY_BYTES // entries, 1))
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
    except (pa.ArrowException, OSError, EOFError) as error:
        raise DocumentError(
            f"{file.path}: must be an intact Parquet file, got {str(error).strip()}; "
            "copy or download it again, or fix its name"
        ) from None
