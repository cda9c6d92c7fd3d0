"""Arrow columns as documents, for the formats that hold columns."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

from tokenmill.documents.json_values import RecordError, utf8_detail
from tokenmill.documents.units import BadRecord, Group, ReadOptions
from tokenmill.errors import DocumentError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

_MAX_ROWS = 4096


def wanted_columns(schema: pa.Schema, options: ReadOptions, path: str) -> list[str]:
    """Return the top-level columns to read; raise where there is no column of texts, or two of one name."""
    twins = [name for name in dict.fromkeys(schema.names) if schema.names.count(name) > 1]
    if twins:
        raise DocumentError(f"{path}: must name each column once, got {twins[0]!r} twice; rename one of them")
    if options.text_field is None:
        return [name for name in schema.names if options.fields is None or name in options.fields]
    _refuse_other_types(schema, options.text_field, path)
    return text_path(schema, options.text_field)[:1]


def _refuse_other_types(schema: pa.Schema, text_field: str, path: str) -> None:
    import pyarrow as pa

    kind = pa.struct(list(schema))
    for name in text_path(schema, text_field):
        known = [kind.field(index).name for index in range(kind.num_fields)] if pa.types.is_struct(kind) else []
        if name not in known:
            raise DocumentError(
                f"{path}: must have a column {text_field!r}, got {', '.join(map(repr, known)) or kind}; "
                f"name it with text_field{f', {nearest(name, known)}' if known else ''}"
            )
        kind = kind.field(name).type
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not any(is_kind(inner) for is_kind in _text_kinds()):
        raise DocumentError(
            f"{path}: must have strings in column {text_field!r}, got {kind}; name another text_field"
        )


def text_path(schema: pa.Schema, text_field: str) -> list[str]:
    """Return the names to go down by: a column may have a dot in its own name."""
    return [text_field] if text_field in schema.names else text_field.split(".")


def rows_at_once(num_rows: int, num_bytes: int, options: ReadOptions) -> int:
    """Return how many rows together have about the size of a batch."""
    each = max(num_bytes // max(num_rows, 1), 1)
    return max(1, min(options.batch_bytes // each, options.batch_documents, _MAX_ROWS))


def column_groups(
    batch: pa.RecordBatch, options: ReadOptions, position: int, *, unfolded: bool = False
) -> Iterator[Group]:
    """Read the documents of a record batch, a slice of rows at a time.

    Nothing is taken from a column before it has been validated: a hostile offset would point anywhere in memory.
    Where Arrow has made the offsets itself, as it `unfolded` a file, there is none; what is no UTF-8 shows when it
    is decoded, and need not be looked for before.
    """
    batch.validate()
    if options.text_field is None:
        intact = _is_valid(batch)
        step = rows_at_once(batch.num_rows, batch.nbytes if intact else 0, options)
        for begin in range(0, batch.num_rows, step):
            rows = batch.slice(begin, step)
            records, bad = _records(rows, options.max_record_bytes, intact=intact)
            size = rows.nbytes if intact else 0
            yield Group(documents=records, bad=bad, blank=(), num_lines=rows.num_rows, size=size, position=position)
        return
    column = _text_column(batch, options.text_field)
    if not unfolded and not _is_valid(column):
        column = _as_bytes(column)
        column.validate(full=True)
    step = rows_at_once(len(column), _num_bytes(column), options)
    for begin in range(0, len(column), step):
        cells = column.slice(begin, step)
        texts, bad = _texts(cells, options)
        size = sum(map(len, texts))
        yield Group(documents=texts, bad=bad, blank=(), num_lines=len(cells), size=size, position=position)


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

    top, *rest = text_path(batch.schema, text_field)
    column = batch.column(batch.schema.names.index(top))
    return pc.struct_field(column, rest) if rest else column


def _text_kinds() -> tuple[Any, ...]:
    from pyarrow import types

    return (
        *(types.is_string, types.is_large_string, types.is_string_view),
        *(types.is_binary, types.is_large_binary, types.is_binary_view, types.is_null),
    )


def _texts(cells: pa.Array, options: ReadOptions) -> tuple[list[str], list[BadRecord]]:
    """Return the texts of cells; nulls, cells that are not UTF-8 and those that are too long are bad."""
    if cells.nbytes <= options.max_record_bytes:  # else one of them may be too long
        with suppress(UnicodeDecodeError):
            texts = _values(cells)
            if set(map(type, texts)) <= {str}:
                return texts, []
    return _texts_one_by_one(_values(_as_bytes(cells)), options)


def cell_groups(cells: Sequence[memoryview | None], options: ReadOptions, position: int) -> Iterator[Group]:
    """Read the documents of the cells of a page, about a batch at a time."""
    sizes = map(len, cast("Sequence[memoryview]", cells)) if all(cells) else (len(cell or b"") for cell in cells)
    ends = list(accumulate(sizes))
    begin = before = 0
    while begin < len(cells):
        end = bisect_left(ends, before + options.batch_bytes, begin) + 1
        end = min(end, begin + options.batch_documents, len(cells))
        some = cells[begin:end]
        texts, bad = _cell_texts(some, options, ends[end - 1] - before)
        size = sum(map(len, texts))
        yield Group(documents=texts, bad=bad, blank=(), num_lines=len(some), size=size, position=position)
        begin, before = end, ends[end - 1]


def _cell_texts(
    cells: Sequence[memoryview | None], options: ReadOptions, num_bytes: int
) -> tuple[list[str], list[BadRecord]]:
    if num_bytes <= options.max_record_bytes:
        with suppress(UnicodeDecodeError, TypeError):  # the second for nulls
            return [str(cell, "utf-8") for cell in cast("Sequence[memoryview]", cells)], []
    return _texts_one_by_one(cells, options)


def _texts_one_by_one(
    cells: Sequence[bytes | memoryview | None], options: ReadOptions
) -> tuple[list[str], list[BadRecord]]:
    good: list[str] = []
    bad: list[BadRecord] = []
    for line, value in enumerate(cells):
        try:
            good.append(_text(value, options))
        except RecordError as error:
            bad.append(error.at(line))
    return good, bad


def _text(value: bytes | memoryview | None, options: ReadOptions) -> str:
    if value is None:
        raise RecordError("not_text", f"field {options.text_field!r} is null")
    if len(value) > options.max_record_bytes:
        raise RecordError("too_long", f"{len(value)} bytes")
    try:
        return str(value, "utf-8")
    except UnicodeDecodeError as error:
        raise RecordError("utf8", utf8_detail(error)) from None


def _values(cells: pa.Array) -> list[Any]:
    import pyarrow as pa

    if not pa.types.is_dictionary(cells.type):
        values: list[Any] = cells.to_pylist()
        return values
    # Rows share the strings of the dictionary: a few bytes may stand for a gigabyte of equal rows.
    words = _Words(cells.dictionary)
    return [None if index is None else words[index] for index in cells.indices.to_pylist()]


class _Words(dict[int, Any]):
    """The entries of a dictionary that are asked for, each made once."""

    def __init__(self, dictionary: pa.Array) -> None:
        super().__init__()
        self._dictionary = dictionary

    def __missing__(self, index: int) -> object:
        value = self[index] = self._dictionary[index].as_py()
        return value


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


def _records(
    rows: pa.RecordBatch, max_bytes: int, *, intact: bool
) -> tuple[list[Mapping[str, Any]], list[BadRecord]]:
    if intact and rows.nbytes <= max_bytes:
        try:
            return rows.to_pylist(), []
        except (ValueError, OverflowError):  # a time that Python has no object for
            pass
    good: list[Mapping[str, Any]] = []
    bad: list[BadRecord] = []
    for line in range(rows.num_rows):
        try:
            good += _record(rows.slice(line, 1), max_bytes)
        except RecordError as error:
            bad.append(error.at(line))
    return good, bad


def _record(row: pa.RecordBatch, max_bytes: int) -> list[Mapping[str, Any]]:
    import pyarrow as pa

    try:
        row.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
        raise RecordError("utf8", str(error).strip()) from None
    if row.nbytes > max_bytes:
        raise RecordError("too_long", f"{row.nbytes} bytes")
    try:
        record: list[Mapping[str, Any]] = row.to_pylist()
    except (ValueError, OverflowError) as error:
        raise RecordError("value", str(error)) from None
    return record
