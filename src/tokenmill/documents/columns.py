"""Parquet and Arrow files: columns of Arrow as documents."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from tokenmill.documents import streams, units
from tokenmill.errors import DocumentError, nearest
from tokenmill.fields import field_path

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_MAX_ROWS = 4096


def wanted_columns(schema: pa.Schema, options: units.ReadOptions, path: str) -> list[str]:
    """Return the top-level columns to read; raise if no column holds texts, or two have the same name."""
    twins = [name for name in dict.fromkeys(schema.names) if schema.names.count(name) > 1]
    if twins:
        raise DocumentError(f"{path}: must name each column once, got {twins[0]!r} twice; rename one of them")
    if options.text_field is None:
        return [name for name in schema.names if options.fields is None or name in options.fields]
    _refuse_other_types(schema, options.text_field, path)
    return field_path(options.text_field, schema.names)[:1]


def _refuse_other_types(schema: pa.Schema, text_field: str, path: str) -> None:
    import pyarrow as pa

    kind = pa.struct(list(schema))
    for name in field_path(text_field, schema.names):
        known = [kind.field(index).name for index in range(kind.num_fields)] if pa.types.is_struct(kind) else []
        if name not in known:
            raise DocumentError(
                f"{path}: no column {text_field!r}, only {', '.join(map(repr, known)) or kind}; "
                f"name it with text_field=...{f', {nearest(name, known)}' if known else ''}"
            )
        kind = kind.field(name).type
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not any(is_kind(inner) for is_kind in _text_kinds()):
        raise DocumentError(
            f"{path}: must have strings in column {text_field!r}, got {kind}; name another text_field"
        )


def rows_at_once(num_rows: int, num_bytes: int, options: units.ReadOptions) -> int:
    """Return how many rows together have about the size of a batch."""
    row_bytes = max(num_bytes // max(num_rows, 1), 1)
    return max(1, min(options.batch_bytes // row_bytes, options.batch_documents, _MAX_ROWS))


def column_groups(
    batch: pa.RecordBatch, options: units.ReadOptions, position: int, *, decompressed: bool = False
) -> Iterator[units.Group]:
    """Read the documents of a record batch, a slice of rows at a time.

    Nothing is read from a column before it has been validated: a hostile offset would point anywhere in memory.
    If Arrow made the offsets itself, because it `decompressed` a file, no offset is hostile. Invalid UTF-8 is found
    when texts are decoded.
    """
    batch.validate()
    if options.text_field is None:
        intact = _is_valid(batch)
        step = rows_at_once(batch.num_rows, batch.nbytes if intact else 0, options)
        for begin in range(0, batch.num_rows, step):
            group = _records(batch.slice(begin, step), options.max_record_bytes, intact=intact)
            group.position = position
            yield group
        return
    column = _text_column(batch, options.text_field)
    if not decompressed and not _is_valid(column):
        column = _as_bytes(column)
        column.validate(full=True)
    step = rows_at_once(len(column), _num_bytes(column), options)
    for begin in range(0, len(column), step):
        group = _texts(column.slice(begin, step), options)
        group.size, group.position = sum(map(len, group.documents)), position
        yield group


def _num_bytes(column: pa.Array) -> int:
    """Return the bytes of all texts; many rows may share an entry of a dictionary."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_dictionary(column.type):
        return int(column.nbytes)
    lengths = pc.binary_length(_as_bytes(column.dictionary).cast(pa.large_binary()))
    return int(pc.sum(lengths.take(column.indices)).as_py() or 0)


def _is_valid(values: pa.Array | pa.RecordBatch) -> bool:
    import pyarrow as pa

    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _text_column(batch: pa.RecordBatch, text_field: str) -> pa.Array:
    import pyarrow.compute as pc

    top, *rest = field_path(text_field, batch.schema.names)
    column = batch.column(batch.schema.names.index(top))
    return pc.struct_field(column, rest) if rest else column


def _text_kinds() -> tuple[Any, ...]:
    from pyarrow import types

    return (
        *(types.is_string, types.is_large_string, types.is_string_view),
        *(types.is_binary, types.is_large_binary, types.is_binary_view, types.is_null),
    )


def _texts(cells: pa.Array, options: units.ReadOptions) -> units.Group:
    """Read the texts of cells. Nulls and cells that are too long or not UTF-8 are bad."""
    if cells.nbytes <= options.max_record_bytes:  # else one of them may be too long
        with suppress(UnicodeDecodeError):
            texts = _values(cells)
            if set(map(type, texts)) <= {str}:
                return units.Group(documents=texts)

    def text(value: bytes | None) -> str:
        if value is None:
            raise units.RecordError("not_text", f"field {options.text_field!r} is null")
        if len(value) > options.max_record_bytes:
            raise units.RecordError("too_long", f"{len(value)} bytes")
        return units.decode_utf8(value)

    return units.read_each(_values(_as_bytes(cells)), text)


def _values(cells: pa.Array) -> list[Any]:
    import pyarrow as pa

    if not pa.types.is_dictionary(cells.type):
        values: list[Any] = cells.to_pylist()
        return values
    # Rows share the strings of the dictionary: a few bytes may stand for a gigabyte of equal rows.
    entry = cache(lambda index: cells.dictionary[index].as_py())
    return [None if index is None else entry(index) for index in cells.indices.to_pylist()]


def _as_bytes(cells: pa.Array) -> pa.Array:
    import pyarrow as pa

    if pa.types.is_dictionary(cells.type):
        return pa.DictionaryArray.from_arrays(cells.indices, _as_bytes(cells.dictionary))
    kinds = (
        (pa.string(), pa.binary()),
        (pa.large_string(), pa.large_binary()),
        (pa.string_view(), pa.binary_view()),
    )
    return next((cells.view(raw) for text, raw in kinds if cells.type == text), cells)


def _records(rows: pa.RecordBatch, max_bytes: int, *, intact: bool) -> units.Group:
    """Read rows as whole records."""
    restore = {
        name: restored for name in rows.schema.names if (restored := _restored(rows.schema.field(name).type))
    }
    if intact and rows.nbytes <= max_bytes:
        with suppress(units.RecordError, ValueError, OverflowError):  # a time that Python has no object for
            return units.Group(
                documents=[_restore(record, restore) for record in rows.to_pylist()], size=rows.nbytes
            )
    slices = (rows.slice(line, 1) for line in range(rows.num_rows))
    group = units.read_each(slices, partial(_record, restore=restore, max_bytes=max_bytes))
    group.size = rows.nbytes if intact else 0
    return group


def _record(row: pa.RecordBatch, restore: Mapping[str, Callable[[Any], Any]], max_bytes: int) -> Mapping[str, Any]:
    import pyarrow as pa

    try:
        row.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
        raise units.RecordError("utf8", str(error).strip()) from None
    if row.nbytes > max_bytes:
        raise units.RecordError("too_long", f"{row.nbytes} bytes")
    try:
        (record,) = row.to_pylist()
    except (ValueError, OverflowError) as error:
        raise units.RecordError("value", str(error)) from None
    return _restore(record, restore)


def _restore(record: dict[str, Any], restore: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Return a record in which some columns have the values that they had before they became Arrow."""
    return {**record, **{name: restored(record[name]) for name, restored in restore.items()}} if restore else record


def _restored(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """Return a function from a value of Arrow to the one it was made of; None where they are the same.

    A struct has the fields of all rows, null where a row lacks one; a JSON column has its values as text.
    """
    import pyarrow as pa

    if isinstance(kind, getattr(pa, "JsonType", ())):
        return _parsed
    if pa.types.is_struct(kind):
        inner = {field.name: restored for field in kind if (restored := _restored(field.type))}
        return partial(_without_nulls, inner=inner)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        restored = _restored(kind.value_type)
        return None if restored is None else partial(_restored_items, restored=restored)
    return None


def _restored_items(values: list[Any] | None, restored: Callable[[Any], Any]) -> list[Any] | None:
    return None if values is None else [restored(value) for value in values]


def _without_nulls(
    value: dict[str, Any] | None, inner: Mapping[str, Callable[[Any], Any]]
) -> dict[str, Any] | None:
    if value is None:
        return None
    return {name: inner[name](item) if name in inner else item for name, item in value.items() if item is not None}


def _parsed(text: str | None) -> Any:  # noqa: ANN401 - any JSON value
    try:
        return None if text is None else msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise units.RecordError("json", str(error)) from None


# Parquet files by row groups, a batch of rows in memory at a time.

_READ_BYTES = 1 << 20
_DECOMPRESS_BYTES = 1 << 19
"""Decompressed at a time, so that texts are copied out of memory that is still in the caches: 8 MiB take a fifth
longer to read (benchmarks/prepare.py)."""
_DICTIONARY_BYTES = 256 << 20
_MAX_CUT_FILES = 1 << 14
"""Files whose part sizes are kept in memory; about 1 KB each."""


def _row_group_sizes(file: units.InputFile) -> Iterable[int]:
    """Return the bytes of each row group, from the footer of a file."""
    with _open_parquet(file) as opened:
        footer = opened.metadata
        return [max(footer.row_group(group).total_byte_size, 1) for group in range(footer.num_row_groups)]


def _read_parquet(piece: units.Piece, options: units.ReadOptions) -> Iterator[units.Group]:
    """Read the rows of the piece's row groups, of the columns that are needed."""
    with _open_parquet(piece.file) as opened:
        schema = opened.schema_arrow
        leaves = wanted_columns(schema, options, piece.file.path)
        if options.text_field is not None:
            leaves = [options.text_field]
        for group in range(piece.begin, piece.end):
            position = piece.bytes * (group + 1 - piece.begin) // (piece.end - piece.begin)
            for batch in _batches(opened, group, leaves, options):
                yield from column_groups(batch, options, position, decompressed=True)


def _ranges_by(
    sizes_of: Callable[[units.InputFile], Iterable[int]],
) -> Callable[[units.InputFile, int], Iterator[tuple[int, int, int]]]:
    """Return a function that cuts a file into consecutive parts of about `chunk_bytes`.

    The sizes of the parts are kept, so that each file is opened once however often it is cut: a build samples its
    input and then cuts it. The mtime and inode are part of the key, because a file may be replaced in between.
    """

    @lru_cache(maxsize=_MAX_CUT_FILES)
    def kept(file: units.InputFile, mtime_ns: int, inode: int) -> array[int]:  # noqa: ARG001 - parts of the key
        return array("q", sizes_of(file))

    def ranges(file: units.InputFile, chunk_bytes: int) -> Iterator[tuple[int, int, int]]:
        status = streams.status_of(file)
        return runs(kept(file, status.st_mtime_ns, status.st_ino), file.bytes, chunk_bytes)

    return ranges


PARQUET = units.Format(counts="row", read=_read_parquet, ranges=_ranges_by(_row_group_sizes))


def runs(sizes: Sequence[int], total_bytes: int, chunk_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Join consecutive parts of a file into runs of about `chunk_bytes`, sizes scaled so that they sum to its own.

    >>> list(runs([1, 1, 1, 3], 60, 20))
    [(0, 2, 20), (2, 4, 40)]
    """
    total = sum(sizes)
    begin = done = begin_bytes = 0
    for end, size in enumerate(sizes, 1):
        done += size
        end_bytes = total_bytes * done // total
        if end_bytes - begin_bytes >= chunk_bytes or end == len(sizes):
            yield begin, end, end_bytes - begin_bytes
            begin, begin_bytes = end, end_bytes


def _batches(
    opened: pq.ParquetFile, group: int, leaves: list[str], options: units.ReadOptions
) -> Iterator[pa.RecordBatch]:
    """Read a row group: its first row, then the number of rows at a time that its sizes allow."""
    num_rows = 0
    for batch in opened.iter_batches(1, row_groups=[group], columns=leaves, use_threads=False):
        if not num_rows:
            # Arrow has now checked what the footer says of these columns; to ask for it earlier ends the process if
            # it is damaged. The same reader goes on, as a new one would decompress the first page again.
            opened.reader.set_batch_size(_rows_at_once(opened, group, leaves, options))
        num_rows += batch.num_rows
        yield batch
    if num_rows != (wanted := opened.metadata.row_group(group).num_rows):  # a damaged page may end a column
        raise OSError(f"{num_rows} of the {wanted} rows of row group {group}")


def _rows_at_once(opened: pq.ParquetFile, group: int, leaves: list[str], options: units.ReadOptions) -> int:
    """Return how many rows to read at a time, by the sizes that the footer gives.

    Where a column has a dictionary, every row may be its largest entry: even then the rows have some 256 MiB at
    most.
    """
    row_group = opened.metadata.row_group(group)
    paths = [opened.schema.column(index).path for index in range(len(opened.schema))]
    chunks = [row_group.column(index) for index, path in enumerate(paths) if _is_below(path, leaves)]
    small_batches = replace(options, batch_bytes=min(options.batch_bytes, _DECOMPRESS_BYTES))
    rows = rows_at_once(row_group.num_rows, sum(chunk.total_uncompressed_size for chunk in chunks), small_batches)
    for chunk in chunks:
        if chunk.has_dictionary_page:
            stored = chunk.data_page_offset - (chunk.dictionary_page_offset or 0)
            size = stored * chunk.total_uncompressed_size // max(chunk.total_compressed_size, 1)
            rows = min(rows, max(_DICTIONARY_BYTES // max(size, 1), 1))
    return rows


def _is_below(path: str, leaves: list[str]) -> bool:
    return any(path == leaf or path.startswith(f"{leaf}.") for leaf in leaves)


@contextmanager
def _open_parquet(file: units.InputFile) -> Iterator[pq.ParquetFile]:
    """Open a file; what Arrow finds wrong with it, now or while it is read, raises DocumentError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with streams.open_input(file, exact=True):
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


# Arrow IPC files and streams by record batches, mapped and not copied.

_FILE_MARK = b"ARROW1"
_OLD_FEATHER_MARK = b"FEA1"
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def _batch_sizes(file: units.InputFile) -> Iterable[int]:
    """Return the sizes of the record batches of a file, from its index or the headers of its messages."""
    import pyarrow as pa

    with _mapped(file) as (source, is_file, check_whole):
        if is_file:
            # The index has the places of the batches, but pyarrow does not return them; most are of one size.
            sizes = [1] * pa.ipc.open_file(source).num_record_batches
        else:
            # Bytes of each record batch, with the dictionaries before it.
            reader = pa.ipc.MessageReader.open_stream(source)
            ends = [0, *(source.tell() for message in reader if message.type == "record batch")]
            sizes = [end - begin for begin, end in pairwise(ends)]
        check_whole()
    return sizes


def _read_arrow(piece: units.Piece, options: units.ReadOptions) -> Iterator[units.Group]:
    """Read the rows of the piece's record batches, of the columns that are needed."""
    with _mapped(piece.file) as (source, is_file, check_whole):
        batches = _file_batches if is_file else _stream_batches
        for done, batch in enumerate(batches(source, piece, options), 1):
            position = piece.bytes * done // (piece.end - piece.begin)
            for group in column_groups(batch, options, position):
                check_whole()
                yield group


_arrow_ranges = _ranges_by(_batch_sizes)
ARROW = units.Format(counts="row", read=_read_arrow, ranges=_arrow_ranges)
"""Files with an index of their record batches, and streams without, as Hugging Face datasets keep them."""
TABLE = units.Format(counts="item", read=_read_arrow, ranges=_arrow_ranges)
"""Tables in memory that `prepare` writes as a stream."""


def _file_batches(
    source: pa.NativeFile, piece: units.Piece, options: units.ReadOptions
) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    chosen = _chosen(pa.ipc.open_file(source).schema, piece, options)
    reader = pa.ipc.open_file(source, options=chosen)
    for index in range(piece.begin, piece.end):
        yield reader.get_batch(index)


def _stream_batches(
    source: pa.NativeFile, piece: units.Piece, options: units.ReadOptions
) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    chosen = _chosen(pa.ipc.open_stream(source).schema, piece, options)
    source.seek(0)
    reader = pa.ipc.open_stream(source, options=chosen)
    # Batches before the piece are skipped. As they are mapped, that costs their headers alone, unless they are
    # compressed, which streams hardly ever are.
    for index in range(piece.end):
        batch = next(reader, None)
        if batch is None:
            raise EOFError("a stream that ends too early")
        if index >= piece.begin:
            yield batch


def _chosen(schema: pa.Schema, piece: units.Piece, options: units.ReadOptions) -> pa.ipc.IpcReadOptions:
    import pyarrow as pa

    names = wanted_columns(schema, options, piece.file.label)
    return pa.ipc.IpcReadOptions(included_fields=[schema.names.index(name) for name in names], use_threads=False)


@contextmanager
def _mapped(file: units.InputFile) -> Iterator[tuple[pa.NativeFile, bool, Callable[[], None]]]:
    """Map a file: the source, whether it has an index, and a function that raises if the file was cut meanwhile.

    What Arrow finds wrong with it, now or while it is read, raises DocumentError.
    """
    import pyarrow as pa

    with streams.open_input(file, exact=True) as stream:
        head = stream.read(len(_FILE_MARK))
        stream.seek(max(file.bytes - len(_STREAM_END), 0))
        tail = stream.read()
    is_file = head == _FILE_MARK
    if head.startswith(_OLD_FEATHER_MARK):
        raise DocumentError(
            f"{file.path}: must be Arrow IPC, got Feather version 1; read and write it again with pyarrow.feather"
        )
    # A stream may end without a mark, but so does one that was cut off between two batches.
    if not is_file and tail != _STREAM_END:
        raise _damaged(file, "a stream without its end")
    try:
        with pa.memory_map(file.path) as source:
            yield source, is_file, partial(_check_whole, file)
    except DocumentError:
        raise
    except (pa.ArrowException, OSError, EOFError, ValueError, MemoryError) as error:
        raise _damaged(file, " ".join(str(error).split())) from None


def _check_whole(file: units.InputFile) -> None:
    """Raise if the file was truncated while it was mapped: its last page reads as zeros."""
    if streams.is_changed(file):
        raise _damaged(file, "a file whose size changed while it was read")


def _damaged(file: units.InputFile, what: str) -> DocumentError:
    return DocumentError(
        f"{file.path}: must be an intact Arrow file, got {what}; copy or download it again, or fix its name"
    )
