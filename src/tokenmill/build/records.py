"""Records that are Python objects or Arrow data in memory, written to one file that an ordinary build reads.

The file is next to the store, and exists while the build runs. So every recipe, filter and number of workers works
as for files, and memory does not grow with the number of records.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape, glob
from itertools import chain
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeAlias, cast

from tokenmill.documents import InputFile
from tokenmill.documents.hugging_face import PREFIX
from tokenmill.documents.inputs import suffix_of
from tokenmill.errors import ConfigError, DocumentError
from tokenmill.store.files import make_folder
from tokenmill.store.lease import has_ended, this_process
from tokenmill.tables import is_address

if TYPE_CHECKING:
    import pyarrow as pa

    from tokenmill.build.progress import Show

Paths: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"


class ArrowData(Protocol):
    """Data of any library that has the Arrow PyCapsule interface, such as a DataFrame of pandas or polars."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return a capsule with a stream of Arrow."""


NAME = "records"
"""Name of the records in the list of a store's inputs, and in origins."""
_BATCH_BYTES = 16 << 20
_DATASET_ROWS = 1000
_NONE = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class Records:
    """Texts and records to prepare."""

    items: Iterable[object]
    is_arrow: bool = False
    """True if the items are record batches or tables of Arrow."""
    column: str | None = None
    """Type of the values of Arrow data that is a single column; None for a table."""


def paths_or_records(inputs: object) -> Paths | Records:
    """Return what `prepare` was passed, as paths or as records.

    A string, a path, and a list, tuple or set of these are paths. A list of dicts, and everything else that can be
    iterated over, yields texts and records; strings that look like paths are rejected there.
    """
    if _is_arrow(inputs):
        return _arrow_records(inputs)
    if isinstance(inputs, str | bytes | bytearray | os.PathLike) or not isinstance(inputs, Iterable):
        return cast("Paths", inputs)  # what is not a path is rejected where paths are read
    if isinstance(inputs, Mapping) and inputs:
        raise ConfigError(
            f"inputs: expected paths or an iterable of records, got one {type(inputs).__name__} with the keys "
            f"{', '.join(map(repr, list(inputs)[:4]))}; put a record into a list, or choose a split of a dataset"
        )
    if (batches := _dataset_batches(inputs)) is not None:
        return Records(items=batches, is_arrow=True)
    if hasattr(inputs, "__dataframe__"):
        raise ConfigError(
            f"inputs: {type(inputs).__name__} does not export Arrow, as it has no __arrow_c_stream__; "
            "update its library, or pass a pyarrow.Table"
        )
    iterator = iter(inputs)
    first = next(iterator, _NONE)
    items = chain([first], iterator) if iterator is inputs else inputs
    if isinstance(inputs, list | tuple | set | frozenset | dict) and not isinstance(first, Mapping):
        return list(inputs)
    if isinstance(first, os.PathLike):
        return cast("Paths", list(items))
    if isinstance(first, str) and _is_like_path(first):
        raise ConfigError(
            f"inputs: expected texts or records from {type(inputs).__name__}, got a path: {first!r}; "
            "pass a list of paths to read the files, or records such as {'text': ...} if these are the texts"
        )
    return Records(items=() if first is _NONE else items)


def _is_like_path(text: str) -> bool:
    """Return whether a string names a file, as far as can be seen."""
    if len(text) > 4096 or "\n" in text or "\0" in text:
        return False
    if is_address(text) or text.startswith(PREFIX) or os.path.exists(os.path.expanduser(text)):
        return True
    has_ending = not any(map(str.isspace, text)) and suffix_of(text) is not None
    return has_ending or bool(glob(os.path.expanduser(text), recursive=True))


# Data that is columns in memory.


def _is_arrow(value: object) -> bool:
    return hasattr(value, "__arrow_c_stream__") or hasattr(value, "__arrow_c_array__")


def _arrow_records(inputs: Any) -> Records:  # noqa: ANN401 - any object with a method of the Arrow PyCapsule interface
    """Return the batches of a table or stream, or those of a single column."""
    import pyarrow as pa

    try:
        if hasattr(inputs, "__arrow_c_stream__"):
            try:
                return Records(items=pa.RecordBatchReader.from_stream(inputs), is_arrow=True)
            except pa.ArrowInvalid:  # one column: only a table is a stream of structs
                column = pa.chunked_array(inputs)
        else:
            column = pa.chunked_array([pa.array(inputs)])
            if pa.types.is_struct(column.type):
                return Records(items=map(pa.RecordBatch.from_struct_array, column.chunks), is_arrow=True)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise DocumentError(
            f"inputs: {type(inputs).__name__} cannot be converted to Arrow: {' '.join(str(error).split())}; "
            "convert the column, or pass an iterable of records"
        ) from error
    return Records(items=column.chunks, is_arrow=True, column=str(column.type))


def _dataset_batches(inputs: object) -> Iterator[pa.Table] | None:
    """Return the rows of a Hugging Face dataset as Arrow has them; None for other objects.

    As Python objects, every row would have the fields of all rows, null where it has none. A dataset with a format
    or transform of the user is read by iterating over it.
    """
    library = sys.modules.get("datasets")
    if library is None or not isinstance(inputs, library.Dataset) or inputs.format["type"] is not None:
        return None
    batches: Iterator[pa.Table] = inputs.with_format("arrow", columns=inputs.format["columns"]).iter(_DATASET_ROWS)
    return batches


# Writing them to a file.


@contextmanager
def written_records(
    records: Records, folder: Path, name: str, *, text_field: str | None, fields: tuple[str, ...] | None, show: Show
) -> Iterator[InputFile]:
    """Write records to a file in `folder`, and remove it at the end; what killed processes left is removed first.

    A string is the text in the field `text_field`. Only `fields` must have values of JSON; None means all.
    """
    prefix = f".{name}.{NAME}-"
    make_folder(folder)
    for left in folder.glob(f"{escape(prefix)}*"):
        if has_ended(left.name.removeprefix(prefix).rpartition("-")[0]):
            shutil.rmtree(left, ignore_errors=True)
    own = Path(mkdtemp(prefix=f"{prefix}{this_process()}-", dir=folder))
    count = 0
    try:
        path = own / NAME
        with open(path, "wb") as file, show("read the records", 0, lambda: (file.tell(), count, 0)) as tick:
            if records.is_arrow:
                counts = _write_batches(records, file, text_field)
            else:
                counts = _write_items(records.items, file, text_field, fields)
            for added in counts:
                count += added
                tick()
        if not count:
            raise DocumentError("inputs: the iterable has no records; pass at least one")
        suffix = ".table" if records.is_arrow else ".items"
        yield InputFile(path=str(path.absolute()), name=NAME, bytes=path.stat().st_size, suffix=suffix)
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _write_batches(records: Records, file: BinaryIO, text_field: str | None) -> Iterator[int]:
    """Write batches of Arrow as a stream; yield the rows of each."""
    import pyarrow as pa

    items: Any = records.items
    if records.column is not None:
        if text_field is None:
            raise DocumentError(
                f"inputs: the recipe needs records, got one column of {records.column}; pass a table"
            )
        items = (pa.RecordBatch.from_arrays([chunk], names=[text_field]) for chunk in items)
    writer = None
    try:
        for item in items:
            writer = writer or pa.ipc.new_stream(file, item.schema)
            rows = max(1, _BATCH_BYTES // max(item.nbytes // max(item.num_rows, 1), 1))
            for begin in range(0, item.num_rows, rows):
                part = item.slice(begin, rows)
                writer.write(part)
                yield part.num_rows
    finally:
        if writer is not None:
            writer.close()


def _write_items(
    items: Iterable[object], file: BinaryIO, text_field: str | None, fields: tuple[str, ...] | None
) -> Iterator[int]:
    """Write texts and records as lines of JSON; yield 1 for each."""
    for number, item in enumerate(items, 1):
        record: object = item
        if isinstance(item, str) and text_field is not None:
            record = {text_field: item}
        elif isinstance(item, Mapping):
            record = dict(item)
        if not isinstance(record, dict):
            texts = "a text (str) or a record (dict)" if text_field is not None else "a record (dict)"
            raise DocumentError(
                f"item {number}: expected {texts}, got {_type_name(item)}: {_shown(item)}; convert it first"
            )
        unfit = _unfit(record, "")
        if unfit and fields is not None:  # a field that is not read may have any value
            record = {name: value for name, value in record.items() if name in fields or not isinstance(name, str)}
            unfit = _unfit(record, "")
        if unfit:
            raise DocumentError(f"item {number}: {unfit[0]}; {unfit[1]}")
        file.write(_json(record, number))
        yield 1


def _json(record: dict[Any, Any], number: int) -> bytes:
    try:
        return json.dumps(record, separators=(",", ":")).encode() + b"\n"
    except (ValueError, TypeError, RecursionError) as error:
        raise DocumentError(f"item {number}: cannot be written as JSON: {error}; convert it first") from None


_PLAIN = frozenset((str, int, float, bool, type(None)))
_HINTS: Mapping[str, str] = {
    "bytes": "decode it",
    "datetime": "use isoformat()",
    "date": "use isoformat()",
    "Decimal": "use str() or float()",
    "ndarray": "use tolist()",
    "Tensor": "use tolist()",
}
_MOST_DEPTH = 200


def _unfit(value: object, field: str, depth: int = 0) -> tuple[str, str] | None:  # noqa: PLR0911 - one for each kind of value
    """Return why a value would not be the same as JSON, and the way out; None if it is the same."""
    if type(value) in _PLAIN or isinstance(value, str | int | float):
        return None
    if depth > _MOST_DEPTH:
        return f"field {field[:80]!r}: nested too deeply, or contains itself", "flatten it"
    if isinstance(value, dict):
        for name, inner in value.items():
            path = f"{field}.{name}" if field else str(name)
            if not isinstance(name, str):
                return f"field {path!r}: a key must be a str in JSON, got {_type_name(name)}", "use str()"
            if unfit := _unfit(inner, path, depth + 1):
                return unfit
        return None
    if isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            if type(inner) not in _PLAIN and (unfit := _unfit(inner, f"{field}[{index}]", depth + 1)):
                return unfit
        return None
    hint = _HINTS.get(type(value).__name__, "use item()" if hasattr(value, "item") else "convert it first")
    return f"field {field!r}: JSON has no {_type_name(value)}, got {_shown(value)}", hint


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
