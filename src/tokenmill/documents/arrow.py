"""Arrow IPC files and streams by record batches, mapped and not copied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tokenmill.documents.columns import column_groups, wanted_columns
from tokenmill.documents.opening import open_input
from tokenmill.documents.parquet import runs
from tokenmill.documents.units import Group, InputFile, Piece, ReadOptions
from tokenmill.errors import DocumentError

if TYPE_CHECKING:
    import pyarrow as pa

_FILE_MARK = b"ARROW1"
_OLD_FEATHER_MARK = b"FEA1"
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class Arrow:
    """Files with an index of their record batches, and streams without, as Hugging Face datasets keep them."""

    counts = "row"

    def ranges(self, file: InputFile, chunk_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Cut a file into runs of record batches of about `chunk_bytes`; reads its index or its messages' heads."""
        with _mapped(file) as (source, is_file):
            sizes = _file_sizes(source) if is_file else _stream_sizes(source)
        return runs(sizes, file.bytes, chunk_bytes)

    def read(self, piece: Piece, options: ReadOptions) -> Iterator[Group]:
        """Read the rows of the piece's record batches, of the columns that are needed."""
        with _mapped(piece.file) as (source, is_file):
            batches = _file_batches if is_file else _stream_batches
            for done, batch in enumerate(batches(source, piece, options), 1):
                position = piece.bytes * done // (piece.end - piece.begin)
                yield from column_groups(batch, options, position)


def _file_sizes(source: pa.NativeFile) -> list[int]:
    import pyarrow as pa

    # The index of a file knows where its batches are, but pyarrow does not say; they are mostly of one size.
    return [1] * pa.ipc.open_file(source).num_record_batches


def _stream_sizes(source: pa.NativeFile) -> list[int]:
    """Return the bytes of each record batch of a stream, with the dictionaries before it."""
    import pyarrow as pa

    sizes: list[int] = []
    before = 0
    for message in pa.ipc.MessageReader.open_stream(source):
        if message.type == "record batch":
            sizes.append(source.tell() - before)
            before = source.tell()
    return sizes


def _file_batches(source: pa.NativeFile, piece: Piece, options: ReadOptions) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    chosen = _chosen(pa.ipc.open_file(source).schema, piece, options)
    reader = pa.ipc.open_file(source, options=chosen)
    for index in range(piece.begin, piece.end):
        yield reader.get_batch(index)


def _stream_batches(source: pa.NativeFile, piece: Piece, options: ReadOptions) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    chosen = _chosen(pa.ipc.open_stream(source).schema, piece, options)
    source.seek(0)
    reader = pa.ipc.open_stream(source, options=chosen)
    # Batches before the piece are passed over: they are mapped, so that costs their heads alone, unless they are
    # compressed, which streams hardly ever are.
    for index in range(piece.end):
        batch = next(reader, None)
        if batch is None:
            raise EOFError("a stream that ends too early")
        if index >= piece.begin:
            yield batch


def _chosen(schema: pa.Schema, piece: Piece, options: ReadOptions) -> pa.ipc.IpcReadOptions:
    import pyarrow as pa

    names = wanted_columns(schema, options, piece.file.path)
    return pa.ipc.IpcReadOptions(included_fields=[schema.names.index(name) for name in names], use_threads=False)


@contextmanager
def _mapped(file: InputFile) -> Iterator[tuple[pa.NativeFile, bool]]:
    """Map a file: (source, whether it has an index); what is wrong with it raises DocumentError, then or later."""
    import pyarrow as pa

    with open_input(file, exact=True) as stream:
        head = stream.read(len(_FILE_MARK))
        stream.seek(max(file.bytes - len(_STREAM_END), 0))
        tail = stream.read()
    is_file = head == _FILE_MARK
    if head.startswith(_OLD_FEATHER_MARK):
        raise DocumentError(
            f"{file.path}: must be Arrow IPC, got Feather version 1; read and write it again with pyarrow.feather"
        )
    # A stream may end without a mark, but then one that was cut off between two batches cannot be told from it.
    if not is_file and tail != _STREAM_END:
        raise _damaged(file, "a stream without its end")
    try:
        with pa.memory_map(file.path) as source:
            yield source, is_file
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError, MemoryError) as error:
        raise _damaged(file, " ".join(str(error).split())) from None


def _damaged(file: InputFile, what: str) -> DocumentError:
    return DocumentError(
        f"{file.path}: must be an intact Arrow file, got {what}; copy or download it again, or fix its name"
    )
