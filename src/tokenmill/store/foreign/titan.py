"""Readers of the torchtitan fork's own files: `packed_memmap` and `preprocessed`.

Both have labels beside ids: the id where a token is trained on, else -100. They are not shifted: label i is that of
token i. So they are a loss mask, and a label that is neither raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tokenmill.errors import StoreCorruptError, StoreError, StoreMissingError, TokenmillError
from tokenmill.store.foreign.files import (
    BLOCK,
    FORMATS,
    ForeignArray,
    ForeignFiles,
    ForeignOptions,
    ForeignShard,
    array_of,
    head,
    names_of,
    real_file,
)
from tokenmill.store.foreign.formats import npy_header
from tokenmill.types import Int64Array, Uint8Array

if TYPE_CHECKING:
    import pyarrow as pa

IGNORE = -100
"""Label of a token that is not trained on."""


def _mask_of(labels: ForeignArray, tokens: ForeignArray) -> ForeignArray:
    """Return labels as a loss mask; a label that is neither -100 nor the id of its token raises when it is read."""

    def read(begin: int, end: int) -> Uint8Array:
        values, ids = labels.numbers(begin, end), tokens.numbers(begin, end)
        trained = values != IGNORE
        odd = np.flatnonzero(trained & (values != ids))
        if odd.size:
            place = int(odd[0])
            raise StoreError(
                f"{labels.path}: a label must be the id of its token, or -100 where it is not trained on, "
                f"got label {values[place]} for id {ids[place]} at number {begin + place}; write the labels again"
            )
        mask: Uint8Array = trained.view(np.uint8)
        return mask

    return replace(labels, obstacle="it is made of labels", read=read)


# packed_memmap: X_token.npy, X_mask.npy with the labels, X_index.npy with the ends of sequences.

_TOKEN, _MASK, _INDEX = FORMATS["packed-memmap"]


def read_packed_memmap(files: Sequence[Path], options: ForeignOptions) -> ForeignFiles:
    """Read triples of files named by their X_token.npy; ids after the last end belong to no sequence."""
    shards = []
    for file, name in zip(files, names_of(files), strict=True):
        prefix = file.name.removesuffix(_TOKEN)
        tokens, labels, index = (_flat(file.with_name(f"{prefix}{part}")) for part in FORMATS["packed-memmap"])
        options.check_dtype(file, tokens.dtype)
        if labels.count != tokens.count:
            raise StoreCorruptError(
                f"{labels.path}: must have a label for each of {tokens.count} ids, got {labels.count}; copy the "
                "files again"
            )
        last = int(index.numbers(index.count - 1, index.count)[0]) if index.count else 0
        if not 0 <= last <= tokens.count:
            raise _odd_ends(index, tokens.count, last)
        tokens, labels = (replace(array, count=last) for array in (tokens, labels))
        arrays = {"sequence": replace(tokens, is_copied=True), "loss_mask": _mask_of(labels, tokens)}
        ends = {"documents": partial(_memmap_ends, index, last)}
        shards.append(
            ForeignShard(name=name.removesuffix(_TOKEN) or name, arrays=arrays, ends=ends, beside=(index.path,))
        )
    return ForeignFiles(kind="sft", shards=tuple(shards))


def _flat(file: Path) -> ForeignArray:
    if not file.is_file():
        raise StoreMissingError(
            f"{file}: a packed_memmap has X{_TOKEN}, X{_MASK} and X{_INDEX}, but it is missing; copy it as well"
        )
    shape, _, dtype, begin = npy_header(file)
    if dtype.kind not in "iu" or len(shape) != 1:
        raise StoreError(
            f"{file}: must be whole numbers in one dimension, got {dtype} of shape {shape}; save it anew"
        )
    return array_of(file, dtype, begin=begin, count=int(shape[0]))


def _memmap_ends(index: ForeignArray, count: int) -> Int64Array:
    if index.count > 2 * count + 1024:
        raise _odd_ends(index, count, f"{index.count} ends")
    ends = index.numbers(0, index.count)
    if ends.size and (int(ends.min()) < 0 or int(ends.max()) > count or (ends[1:] < ends[:-1]).any()):
        raise _odd_ends(index, count, f"{int(ends.min())} to {int(ends.max())}")
    return ends.astype(np.int64)


def _odd_ends(index: ForeignArray, count: int, got: object) -> StoreCorruptError:
    return StoreCorruptError(
        f"{index.path}: ends of sequences must rise within {count} ids, got {got}; copy the files again"
    )


# preprocessed: a Hugging Face dataset in Arrow files, with inputs, labels, position_ids and sequence_lengths.

INPUTS, LABELS, POSITIONS, LENGTHS = "inputs", "labels", "position_ids", "sequence_lengths"
_STATE, _SPLITS = "state.json", "dataset_dict.json"
_FILE_MARK = b"ARROW1"
_MAX_STATE = 1 << 24
_SPLIT = re.compile(r"(?:^|[-._/ ])(train|test|eval|val|valid|validation|dev)(?=[-._/ ])")


def is_preprocessed(file: Path) -> bool:
    """Whether an Arrow or Parquet file has lists of ids as its column `inputs`.

    A damaged Arrow file counts as one, so that it raises when it is read and is not left out.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if file.suffix.lower() == ".parquet":
            fields = list(pq.read_schema(file))
        else:
            with _opened(file) as (batches, _, _):
                fields = list(batches.schema)
        return any(field.name == INPUTS and _is_list(field.type) for field in fields)
    except (pa.ArrowException, StoreError, OSError, UnicodeDecodeError):
        return file.suffix.lower() != ".parquet"


def _is_list(kind: pa.DataType) -> bool:
    from pyarrow import types

    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(lists and types.is_integer(kind.value_type))


def read_preprocessed(files: Sequence[Path], options: ForeignOptions) -> ForeignFiles:
    """Read the record batches of Arrow files, each one shard; each sequence of a row is a document."""
    files = _of_dataset(files)
    kinds, shards = set(), []
    for file, name in zip(files, names_of(files), strict=True):
        if file.suffix.lower() == ".parquet":
            raise StoreError(
                f"{file}: must be an Arrow file to be read in place, got Parquet; name the folder as "
                f'store = "hf:{file.parent}", or save the dataset with save_to_disk'
            )
        with _opened(file) as (batches, columns_of, check_whole):
            for number in range(len(batches)):
                columns = columns_of(number)
                check_whole()
                shards.append(_preprocessed_shard(f"{name}/{number}", columns, options))
                kinds.add(tuple(shards[-1].arrays))
    if len(kinds) > 1:
        raise StoreError(
            f"{files[0].parent}: all files must have {LABELS} or none, but some have them; name the others apart"
        )
    return ForeignFiles(kind="sft" if any(len(keys) > 1 for keys in kinds) else "seq", shards=tuple(shards))


def _of_dataset(files: Sequence[Path]) -> list[Path]:
    """Return the files of one split of a dataset, in its order; files that a later save left over are no part."""
    chosen: list[Path] = []
    for folder in dict.fromkeys(file.parent for file in files):
        own = [file for file in files if file.parent == folder]
        listed = _saved_files(folder)
        missing = [file for file in listed if not file.is_file()]
        if missing:
            raise StoreMissingError(f"{missing[0]}: listed in {_STATE}, but missing; copy it as well")
        chosen += [file for file in listed if file in own] if listed else own
    if not chosen:
        raise StoreError(
            f"{files[0]}: must be listed in {_STATE} next to it, but is not; name the folder, or another file"
        )
    # That of the file, or else of the nearest folder that is named like a split.
    found = [_SPLIT.findall(name.lower()) for name in names_of(chosen)]
    splits = sorted({matches[-1] if matches else "" for matches in found})
    folders = sorted({file.parent.name for file in chosen if file.parent.parent.joinpath(_SPLITS).is_file()})
    if len(splits) > 1 or len(folders) > 1:
        got = ", ".join(folders or filter(None, splits))
        raise StoreError(
            f"{chosen[0].parent}: must be one split of a dataset, got {got}; "
            "name the folder, or a glob of the files, of one"
        )
    return chosen


def _saved_files(folder: Path) -> list[Path]:
    """Return the files that `save_to_disk` notes in a folder, in order; none where it has no note."""
    state = folder / _STATE
    if not state.is_file():
        return []
    try:
        note = msgspec.json.decode(head(state, _MAX_STATE), type=dict[str, Any])
        names = [item["filename"] for item in note["_data_files"]]
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ValueError("a name that is not plain")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreCorruptError(
            f"{state}: must list the files of the dataset, got {type(error).__name__}: {str(error)[:80]}; save it "
            "again"
        ) from None
    if any(note.get(name) for name in ("_indices_files", "_indices_data_files")):
        raise StoreError(
            f"{folder}: must be all rows of its files, got a selection of rows; call flatten_indices() and save it "
            "again"
        )
    return [folder / name for name in names]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lists:
    """A column of lists of whole numbers, where it lies in the file."""

    name: str
    rows: int
    offsets: ForeignArray | None
    """Where each list begins, and the end of the last; None where all have `length`."""
    length: int
    values: ForeignArray
    """Of all lists of the record batch."""

    def starts(self) -> Int64Array:
        """Return where each list begins in `values`, and the end of the last."""
        if self.offsets is None:
            return np.arange(self.rows + 1, dtype=np.int64) * self.length
        starts = self.offsets.numbers(0, self.rows + 1).astype(np.int64)
        starts -= starts[0]
        if int(starts[-1]) != self.values.count or (starts[1:] < starts[:-1]).any():
            raise _odd_lists(self.values.path, self.name, f"{int(starts[-1])} values of {self.values.count}")
        return starts


def _odd_lists(file: Path, name: str, got: object) -> StoreCorruptError:
    return StoreCorruptError(
        f"{file}: the lists of column {name!r} must follow one another within their values, got {got}; "
        "copy the file again"
    )


def _preprocessed_shard(name: str, columns: dict[str, _Lists], options: ForeignOptions) -> ForeignShard:
    inputs, labels = columns[INPUTS], columns.get(LABELS)
    options.check_dtype(inputs.values.path, inputs.values.dtype)
    arrays = {"sequence": replace(inputs.values, is_copied=True)}
    if labels is not None:
        if labels.values.count != inputs.values.count:
            raise StoreCorruptError(
                f"{inputs.values.path}: rows must have a label for each id, got {labels.values.count} {LABELS} for "
                f"{inputs.values.count} {INPUTS}; write the dataset again"
            )
        arrays["loss_mask"] = _mask_of(labels.values, inputs.values)
    return ForeignShard(name=name, arrays=arrays, ends={"documents": partial(_sequence_ends, columns)})


def _sequence_ends(columns: dict[str, _Lists]) -> Int64Array:
    """Return where sequences end: by their lengths, else where positions start again, else with their rows."""
    inputs = columns[INPUTS]
    file, rows = inputs.values.path, inputs.starts()
    for name in (LABELS, POSITIONS):
        if name in columns and not np.array_equal(columns[name].starts(), rows):
            raise StoreCorruptError(
                f"{file}: rows must have as many {name} as {INPUTS}, but some differ; write the dataset again"
            )
    if LENGTHS in columns:
        lengths = columns[LENGTHS]
        values, starts = lengths.values, lengths.starts()
        if values.count > 2 * inputs.values.count + 1024 + inputs.rows:
            raise _odd_lists(file, LENGTHS, f"{values.count} for {inputs.values.count} ids")
        numbers = values.numbers(0, values.count)
        if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) <= inputs.values.count:
            raise _odd_lists(file, LENGTHS, f"a length of {int(numbers.min())} or {int(numbers.max())}")
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(numbers.astype(np.int64))])
        if not np.array_equal(sums[starts], rows):
            row = int(np.flatnonzero(np.diff(sums[starts]) != np.diff(rows))[0])
            raise StoreCorruptError(
                f"{file}: {LENGTHS} of a row must sum to its ids, got {int(np.diff(sums[starts])[row])} for "
                f"{int(np.diff(rows)[row])} in row {row}; write the dataset again"
            )
        return sums[1:]
    if POSITIONS not in columns:
        return rows[1:]
    positions, breaks, last = columns[POSITIONS].values, [rows[1:]], 0
    for begin in range(0, positions.count, BLOCK):
        block = positions.numbers(begin, min(begin + BLOCK, positions.count)).astype(np.int64)
        steps = np.diff(block, prepend=last)
        breaks.append(np.flatnonzero(steps != 1) + begin)
        last = int(block[-1])
    ends: Int64Array = np.unique(np.concatenate(breaks))
    return ends[ends > 0]


@contextmanager
def _opened(file: Path) -> Iterator[tuple[_Batches, Callable[[int], dict[str, _Lists]], Callable[[], None]]]:
    """Map an Arrow file: its record batches, where the columns of one lie, and a check that it was not cut.

    No list is read through Arrow: where buffers lie is checked against the file, and numbers are read from there.
    """
    import pyarrow as pa

    real, size = real_file(file)
    is_file = head(real, len(_FILE_MARK)) == _FILE_MARK
    try:
        with pa.memory_map(str(real)) as source:
            whole = source.read_buffer()  # a part of the map, so that its address is that of the file
            source.seek(0)

            def check_whole() -> None:
                if whole.size != size or real.stat().st_size < size:
                    raise OSError("a file that was truncated while it was read")

            reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
            batches = _Batches(reader, is_file=is_file)
            yield batches, partial(_columns, real, size, whole.address, batches), check_whole
    except TokenmillError:
        raise
    except (pa.ArrowException, OSError, EOFError, ValueError, OverflowError, MemoryError) as error:
        raise StoreCorruptError(
            f"{file}: must be an intact Arrow file, got {' '.join(str(error).split())[:200]}; copy it again"
        ) from None


class _Batches:
    """The record batches of a file with an index, or of a stream, whose headers are all read."""

    def __init__(self, reader: Any, *, is_file: bool) -> None:  # noqa: ANN401 - pyarrow ships no types
        self.schema: pa.Schema = reader.schema
        self._reader, self._is_file = reader, is_file
        self._read: list[pa.RecordBatch] | None = None

    def __len__(self) -> int:
        """Return how many there are."""
        return int(self._reader.num_record_batches) if self._is_file else len(self._stream)

    def __getitem__(self, number: int) -> pa.RecordBatch:
        """Return one of them, of which no value is read."""
        return self._reader.get_batch(number) if self._is_file else self._stream[number]

    @property
    def _stream(self) -> list[pa.RecordBatch]:
        if self._read is None:
            self._read = list(self._reader)
        return self._read


def _columns(real: Path, size: int, address: int, batches: _Batches, number: int) -> dict[str, _Lists]:
    """Return where the columns of a record batch lie that are read."""
    batch = batches[number]
    batch.validate()
    names = batch.schema.names
    return {
        name: _lists(real, size, address, name, batch.column(names.index(name)))
        for name in (INPUTS, LABELS, POSITIONS, LENGTHS)
        if name in names or name == INPUTS
    }


def _lists(real: Path, size: int, address: int, name: str, column: pa.Array) -> _Lists:
    from pyarrow import types

    kind = column.type
    if not _is_list(kind) or column.null_count or column.values.null_count:
        raise StoreError(
            f"{real}: column {name!r} must have lists of whole numbers without nulls, got {kind}; "
            "write the dataset again"
        )

    def array(buffer: pa.Buffer | None, dtype: np.dtype[Any], begin: int, count: int) -> ForeignArray:
        if not count:
            return ForeignArray(path=real, file_bytes=size, begin=0, count=0, dtype=dtype)
        place = -1 if buffer is None else buffer.address - address
        if buffer is None or not 0 <= place <= place + buffer.size <= size:
            raise StoreError(
                f"{real}: column {name!r} must be uncompressed, but is not; save the dataset with save_to_disk"
            )
        if begin < 0 or (begin + count) * dtype.itemsize > buffer.size:
            raise _odd_lists(real, name, f"{begin + count} numbers in {buffer.size} bytes")
        return ForeignArray(
            path=real, file_bytes=size, begin=place + begin * dtype.itemsize, count=count, dtype=dtype
        )

    rows, dtype, buffers = (
        len(column),
        np.dtype(kind.value_type.to_pandas_dtype()).newbyteorder("<"),
        column.buffers(),
    )
    if types.is_fixed_size_list(kind):
        first = column.offset * kind.list_size + column.values.offset
        values = array(buffers[-1], dtype, first, rows * kind.list_size)
        return _Lists(name=name, rows=rows, offsets=None, length=kind.list_size, values=values)
    width = np.dtype("<i8" if types.is_large_list(kind) else "<i4")
    if not rows:
        none = array(None, dtype, 0, 0)
        return _Lists(name=name, rows=0, offsets=None, length=0, values=none)
    offsets = array(buffers[1], width, column.offset, rows + 1)
    begin, end = (int(offsets.numbers(place, place + 1)[0]) for place in (0, rows))
    if not 0 <= begin <= end:
        raise _odd_lists(real, name, f"{begin} to {end}")
    values = array(buffers[-1], dtype, column.values.offset + begin, end - begin)
    return _Lists(name=name, rows=rows, offsets=offsets, length=0, values=values)
