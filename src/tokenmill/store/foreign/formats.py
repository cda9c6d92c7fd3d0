"""Readers of token files: raw, numpy's, llm.c's, OLMo's, Megatron's, datatrove's and AstrAI's."""

from __future__ import annotations

import csv
import gzip
import io
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tokenize import TokenError
from typing import Any, TextIO

import msgspec
import numpy as np

from tokenmill.errors import StoreCorruptError, StoreError, StoreFileMissingError, StoreMissingError
from tokenmill.store.foreign.files import (
    BLOCK,
    LLMC_HEADER,
    LLMC_MAGICS,
    MEGATRON_MAGIC,
    META,
    NPY_MAGIC,
    ForeignArray,
    ForeignFiles,
    ForeignOptions,
    ForeignShard,
    array_of,
    head,
    names_of,
    real_file,
    sample_blocks,
)
from tokenmill.store.hdf5 import import_h5py
from tokenmill.store.layout import axes_of, axis_of
from tokenmill.store.maps import FileRequest
from tokenmill.store.ranges import read_range
from tokenmill.store.writer import POSITION_IDS
from tokenmill.types import TRAINING_TYPES, AnyArray, Int64Array

_NPY_HEADER = 1 << 14
"""Bytes in which a header of numpy must end; its own reader takes no more either."""
_LINE = 1 << 16
"""Characters that a line of metadata may have."""
_WAY_OUT = "copy all its files again from where they are intact"


def _sequences(files: Sequence[Path], array: Callable[[Path], ForeignArray]) -> ForeignFiles:
    """Make a shard without boundaries of each file."""
    named = zip(files, names_of(files), strict=True)
    return ForeignFiles(
        shards=tuple(ForeignShard(name=name, arrays={"sequence": array(file)}) for file, name in named)
    )


# Tokens without a header.


def read_raw(files: Sequence[Path], options: ForeignOptions) -> ForeignFiles:
    """Read files of tokens without a header; the dtype is given, or proven by the vocabulary."""
    dtype = np.dtype(options.dtype).newbyteorder("<") if options.dtype else _proven_dtype(files, options.vocab_size)
    return _sequences(files, lambda file: array_of(file, dtype))


def _proven_dtype(files: Sequence[Path], vocab_size: int | None) -> np.dtype[Any]:
    """Return the one dtype that files can have if all ids are below `vocab_size`; refuse if it is not the only one.

    A size proves nothing: half the files of 16-bit ids are as long as a file of 32-bit ids. An id outside the
    vocabulary disproves a dtype; so does a vocabulary that it cannot hold. A sample of every file is looked at;
    that the whole obeys what is left is checked when documents are found.
    """
    where = files[0] if len(files) == 1 else files[0].parent
    if vocab_size is None:
        raise StoreError(
            f'{where}: the dtype of files without a header must be said, got none; say dtype="uint16" or '
            'dtype="uint32", or vocab_size=..., which may prove it'
        )
    bounds = {"uint8": 1 << 8, "uint16": 1 << 16, "uint32": 1 << 32}
    least = next(bound for bound in bounds.values() if vocab_size <= bound)
    disproofs: dict[str, str] = {}
    for name, bound in bounds.items():
        if bound < least:
            disproofs[name] = f"cannot hold {vocab_size} ids"
        else:
            disproofs[name] = next((why for file in files if (why := _disproof(file, name, vocab_size))), "")
    possible = [name for name, why in disproofs.items() if not why]
    if len(possible) != 1:
        reasons = "; ".join(f"{name} {why or 'is possible'}" for name, why in disproofs.items())
        raise StoreError(
            f"{where}: vocab_size {vocab_size} must leave one dtype possible to prove it, "
            f"got {len(possible)} ({reasons}); say dtype"
        )
    return np.dtype(possible[0]).newbyteorder("<")


def _disproof(file: Path, name: str, vocab_size: int) -> str:
    """Say why a file cannot hold ids of this dtype; nothing if it can."""
    real, size = real_file(file)
    dtype = np.dtype(name).newbyteorder("<")
    if size % dtype.itemsize:
        return f"does not divide the {size} bytes of {file.name}"
    for place, data in sample_blocks(real, 0, size):
        ids: AnyArray = np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype)
        if ids.size and int(ids.max()) >= vocab_size:
            return f"gives id {int(ids.max())} at byte {place + int(ids.argmax()) * dtype.itemsize} of {file.name}"
    return ""


def read_olmo(files: Sequence[Path], options: ForeignOptions) -> ForeignFiles:
    """Read raw files named .npy; where a .csv.gz stands beside one, its rows (start, end, ...) are documents."""
    for file in files:
        if head(file, 6) == NPY_MAGIC:
            raise StoreError(f"{file}: a file of OLMo must have no header, got one of numpy's; use format = npy")
    if (options.dtype, options.vocab_size, options.format) == (None, None, None):
        start = head(files[0], 16)
        raise StoreError(
            f"{files[0]}: must begin with the header of numpy, got {repr(start) if start else 'an empty file'}; "
            "save it with np.save, or, if it is raw ids as OLMo writes them, say dtype"
        )
    shards = []
    for file, shard in zip(files, read_raw(files, options).shards, strict=True):
        table = file.with_name(f"{file.name.removesuffix('.npy')}.csv.gz")
        if table.is_file():
            ends = {"documents": partial(_ends_of_table, table, shard.arrays["sequence"].count)}
            shard = replace(shard, ends=ends, beside=(table,))  # noqa: PLW2901
        shards.append(shard)
    return ForeignFiles(shards=tuple(shards))


def _ends_of_table(table: Path, count: int) -> Int64Array:
    """Read where documents end; they must lie one after the other."""
    ends: list[int] = []
    last = 0

    def refuse(got: object) -> StoreCorruptError:
        return StoreCorruptError(
            f"{table}: rows must be start, end, ... of documents one after the other within {count} tokens, "
            f"got {got} in row {len(ends)}; write it again, or remove it and give eos_id"
        )

    try:
        with gzip.open(table, "rt", encoding="utf-8", newline="") as opened:
            for row in csv.reader(_lines(opened)):
                if not ends and row[:2] == ["start", "end"]:
                    continue
                begin, end = (int(value) for value in row[:2])
                if begin != last or not begin <= end <= count or len(ends) > 2 * count + 1024:
                    raise refuse(f"{begin}, {end} after {last}")
                ends.append(end)
                last = end
    except (OSError, EOFError, zlib.error, ValueError, csv.Error) as error:
        if isinstance(error, StoreError):
            raise
        raise refuse(f"{type(error).__name__}: {error}") from None
    return np.array(ends, np.int64)


def _lines(opened: TextIO) -> Iterator[str]:
    while line := opened.readline(_LINE):
        if len(line) == _LINE:
            raise ValueError(f"a line of more than {_LINE} characters")
        yield line


# Tokens after a header: llm.c and numpy.


def read_llmc(files: Sequence[Path], options: ForeignOptions) -> ForeignFiles:
    """Read files with the header of llm.c: 256 numbers of 32 bits, of which magic, version and tokens are used."""

    def array(file: Path) -> ForeignArray:
        start = head(file, LLMC_HEADER)
        magic, version, count = (int.from_bytes(start[4 * i : 4 * i + 4], "little") for i in range(3))
        if len(start) < LLMC_HEADER or (magic, version) not in LLMC_MAGICS:
            raise StoreCorruptError(
                f"{file}: must begin with the header of llm.c, got magic {magic} version {version} "
                f"in {len(start)} bytes; copy the file again, or say another format"
            )
        dtype = np.dtype(LLMC_MAGICS[magic, version])
        options.check_dtype(file, dtype)
        return array_of(file, dtype, begin=LLMC_HEADER, count=count)

    return _sequences(files, array)


def read_npy(files: Sequence[Path], options: ForeignOptions) -> ForeignFiles:
    """Read arrays of numpy with one dimension, or two: then every row is a document."""
    named = zip(files, names_of(files), strict=True)
    return ForeignFiles(shards=tuple(_npy_shard(file, name, options) for file, name in named))


def _npy_shard(file: Path, name: str, options: ForeignOptions) -> ForeignShard:
    shape, fortran, dtype, begin = npy_header(file)
    options.check_dtype(file, dtype)
    if dtype.kind not in "iu" or len(shape) not in (1, 2):
        raise StoreError(
            f"{file}: must be whole numbers in one or two dimensions, got {dtype} of shape {shape}; save it anew"
        )
    count = int(np.prod([int(size) for size in shape], dtype=object))
    array = array_of(file, dtype, begin=begin, count=count)
    if len(shape) == 1:
        return ForeignShard(name=name, arrays={"sequence": array})
    rows, length = shape
    if fortran and min(shape) > 1:
        obstacle = "its columns come first (Fortran order)"
        array = replace(array, obstacle=obstacle, read=partial(_read_rows, array, rows, length))
    ends = {"documents": lambda: np.arange(1, rows + 1, dtype=np.int64) * length}
    return ForeignShard(name=name, arrays={"sequence": array}, ends=ends)


def npy_header(file: Path) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return shape, whether columns come first, dtype and size of a header; objects are never loaded."""
    opened = io.BytesIO(head(file, _NPY_HEADER))  # whatever length a header claims
    try:
        version = np.lib.format.read_magic(opened)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, fortran, dtype = readers[version](opened)
    except (ValueError, KeyError, EOFError, SyntaxError, TokenError, RecursionError, MemoryError) as error:
        raise StoreCorruptError(
            f"{file}: must begin with a header of numpy, version 1 or 2, got {type(error).__name__}: "
            f"{str(error)[:200]}; copy the file again, or say dtype and format if it has none"
        ) from None
    if min(shape, default=0) < 0:
        raise StoreCorruptError(f"{file}: sizes must not be negative, got {shape}; copy the file again")
    return tuple(shape), bool(fortran), dtype, opened.tell()


def _read_rows(array: ForeignArray, rows: int, length: int, begin: int, end: int) -> AnyArray:
    """Read numbers of an array in the order of its rows, where the file has that of its columns."""
    whole = np.memmap(array.path, array.dtype, "r", array.begin, (rows, length), "F")
    first = begin // length
    return whole[first : -(-end // length)].ravel()[begin - first * length : end - first * length]


# Megatron's indexed datasets: tokens in .bin, sequences and documents in .idx.

MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Index:
    """The header of an .idx, checked against the size of the file."""

    path: Path
    real: Path
    bytes: int
    dtype: np.dtype[Any]
    sequences: int
    marks: int
    """How many numbers say where documents begin and end: one more than documents."""

    def array(self, dtype: str, begin: int, count: int) -> AnyArray:
        size = count * np.dtype(dtype).itemsize
        return read_range(FileRequest(self.real, self.bytes, begin, size), 0, size).view(dtype)


def read_megatron(files: Sequence[Path], options: ForeignOptions) -> ForeignFiles:
    """Read pairs of .bin and .idx, named by their .bin; a document may be made of several sequences."""
    shards = []
    for file, name in zip(files, names_of(files), strict=True):
        index = _index(file.with_suffix(".idx"))
        options.check_dtype(index.path, index.dtype)
        if not file.is_file():
            raise StoreMissingError(
                f"{file}: must stand beside {index.path.name}, got nothing there; copy it as well"
            )
        array = array_of(file, index.dtype)
        ends = {"documents": partial(_sequence_ends, index, array.count)}
        shards.append(ForeignShard(name=name, arrays={"sequence": array}, ends=ends, beside=(index.real,)))
    return ForeignFiles(shards=tuple(shards))


def _index(path: Path) -> _Index:
    if not path.is_file():
        raise StoreMissingError(
            f"{path}: must stand beside the .bin, got nothing there; copy it as well, or say format = bin and dtype"
        )
    real, size = real_file(path)
    start = head(path, MEGATRON_HEADER.size)
    if len(start) < MEGATRON_HEADER.size or not start.startswith(MEGATRON_MAGIC):
        raise StoreCorruptError(f"{path}: must begin with the header of Megatron, got {start[:9]!r}; {_WAY_OUT}")
    _, version, code, sequences, marks = MEGATRON_HEADER.unpack(start)
    if version != 1 or code not in _MEGATRON_DTYPES:
        raise StoreCorruptError(
            f"{path}: must be version 1 with a known dtype, got version {version}, dtype code {code}; {_WAY_OUT}"
        )
    whole = MEGATRON_HEADER.size + 12 * sequences + 8 * marks
    if sequences and size == whole + sequences:
        raise StoreError(
            f"{path}: must be of text alone, got a mode for each sequence (multimodal); export the text by itself"
        )
    if size != whole:
        raise StoreCorruptError(
            f"{path}: must have {whole} bytes for {sequences} sequences and {marks} marks of documents, "
            f"got {size}; {_WAY_OUT}"
        )
    return _Index(
        path=path, real=real, bytes=size, dtype=np.dtype(_MEGATRON_DTYPES[code]), sequences=sequences, marks=marks
    )


def _sequence_ends(index: _Index, count: int) -> Int64Array:
    """Return where documents end, after proving that sequences lie one after the other in the .bin.

    Sequences after the last mark, which a writer leaves that did not end its last document, are one more document.
    """

    def refuse(rule: str, got: object) -> StoreCorruptError:
        return StoreCorruptError(f"{index.path}: {rule}, got {got}; {_WAY_OUT}")

    lengths = index.array("<i4", MEGATRON_HEADER.size, index.sequences)
    pointers = index.array("<i8", MEGATRON_HEADER.size + 4 * index.sequences, index.sequences)
    marks = index.array("<i8", MEGATRON_HEADER.size + 12 * index.sequences, index.marks)
    if index.sequences and int(lengths.min()) < 0:
        raise refuse("lengths of sequences must not be negative", int(lengths.min()))
    starts = np.zeros(index.sequences + 1, np.int64)
    np.cumsum(lengths, dtype=np.int64, out=starts[1:])
    if int(starts[-1]) != count:
        raise refuse(f"sequences must have the {count} tokens of the .bin together", int(starts[-1]))
    for begin in range(0, index.sequences, BLOCK):
        expected = starts[begin : min(begin + BLOCK, index.sequences)] * index.dtype.itemsize
        if not np.array_equal(pointers[begin : begin + BLOCK], expected):
            raise StoreError(
                f"{index.path}: sequences must lie one after the other to be read in place, got others; "
                "write the dataset anew with Megatron's own tools"
            )
    if not index.marks:
        return starts[1:]
    if int(marks[0]) != 0 or int(marks[-1]) > index.sequences or (marks[1:] < marks[:-1]).any():
        raise refuse(f"marks of documents must rise from 0 to at most {index.sequences}", marks[:4].tolist())
    ends: Int64Array = starts[marks[1:]]
    return ends


# The tokenized files of datatrove and nanotron: .ds with .ds.index, .ds.metadata and .ds.loss.

_TOKEN_SIZES = {"2": "<u2", "4": "<u4"}


def read_datatrove(files: Sequence[Path], options: ForeignOptions) -> ForeignFiles:
    """Read .ds files; the size of a token is in .metadata, else the dtype is given or proven by the vocabulary."""
    with_loss = [_beside(file, ".loss").is_file() for file in files]
    if len(set(with_loss)) > 1:
        without = files[with_loss.index(False)]
        raise StoreError(
            f"{without}: all files must have a .loss or none, got none here; name those with and without apart"
        )
    metadata = [_metadata(file) for file in files]
    silent = [file for file, known in zip(files, metadata, strict=True) if known is None]
    if silent and options.dtype is None:
        default = _proven_dtype(silent, options.vocab_size)
    else:
        default = np.dtype(options.dtype or "<u2").newbyteorder("<")
    shards, tokenizers = [], set()
    for file, name, known in zip(files, names_of(files), metadata, strict=True):
        dtype, count = default, None
        if known is not None:
            tokenizer, dtype, count = known
            tokenizers.add(tokenizer)
            options.check_dtype(file, dtype)
        shards.append(_datatrove_shard(file, name, array_of(file, dtype, count=count)))
    kind = "sft" if with_loss[0] else "seq"
    return ForeignFiles(kind=kind, shards=tuple(shards), facts={"tokenizers": sorted(tokenizers)})


def _datatrove_shard(file: Path, name: str, array: ForeignArray) -> ForeignShard:
    arrays = {"sequence": array}
    loss, index = _beside(file, ".loss"), _beside(file, ".index")
    if loss.is_file():
        arrays["loss_mask"] = array_of(loss, np.dtype("|u1"), count=array.count)
    if not index.is_file():
        return ForeignShard(name=name, arrays=arrays)
    ends = {"documents": partial(_document_ends, index, array_of(index, np.dtype("<u8")), array.count)}
    return ForeignShard(name=name, arrays=arrays, ends=ends, beside=(index,))


def _beside(file: Path, ending: str) -> Path:
    return file.with_name(f"{file.name}{ending}")


def _metadata(file: Path) -> tuple[str, np.dtype[Any], int] | None:
    """Return tokenizer, dtype and number of tokens; None where there is no .metadata."""
    path = _beside(file, ".metadata")
    if not path.is_file():
        return None
    text = head(path, 1 << 16).decode("utf-8", "replace")
    lines = text.splitlines()
    name, _, size = lines[0].rpartition("|") if lines else ("", "", "")
    if size not in _TOKEN_SIZES or len(lines) < 2 or not (lines[1].isascii() and lines[1].isdigit()):
        raise StoreCorruptError(
            f"{path}: must be TOKENIZER|2 or TOKENIZER|4, then the number of tokens, got {text[:80]!r}; {_WAY_OUT}"
        )
    return name, np.dtype(_TOKEN_SIZES[size]), int(lines[1][:20])


def _document_ends(path: Path, index: ForeignArray, count: int) -> Int64Array:
    if index.count > 2 * count + 1024:
        raise StoreCorruptError(
            f"{path}: there must not be many more documents than the {count} tokens, got {index.count}; {_WAY_OUT}"
        )
    ends = index.numbers(0, index.count)
    last = int(ends[-1]) if ends.size else 0
    if last != count or (ends[1:] < ends[:-1]).any():
        raise StoreCorruptError(
            f"{path}: ends of documents must rise to the {count} tokens of the .ds, got {last} at last; {_WAY_OUT}"
        )
    return ends.astype(np.int64)


# AstrAI's stores: .bin with meta.json, and .h5 with a group a key.

MAX_META = 1 << 28
"""Bytes that a meta.json may have."""
_ASTRAI_DTYPES = ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
_MAX_EXPANSION = 2000
"""Times its size on disk that an array may have: gzip, the best that HDF5 has by itself, comes to 1,032."""
_RESTORE = "copy the folder again from where it is intact"


def read_astrai_bin(files: Sequence[Path], options: ForeignOptions) -> ForeignFiles:
    """Read folders of a meta.json (key -> shape, dtype, and for records their offsets) and a KEY.bin a key."""
    kinds, shards = [], []
    for meta, name in zip(files, names_of(files), strict=True):
        table = _read_meta(meta)
        kind = _training_type(meta, table)
        arrays: dict[str, ForeignArray] = {}
        ends: dict[str, Int64Array] = {}
        for key in _read_keys(kind, table):
            arrays[key] = _bin_array(meta, key, table[key])
            if "offsets" in table[key]:
                axis, starts = axis_of(kind, key), _offsets(meta, key, table[key]["offsets"], arrays[key].count)
                if not np.array_equal(ends.setdefault(axis, starts[1:]), starts[1:]):
                    raise StoreCorruptError(
                        f"{meta}: offsets of {key!r} must be those of all arrays of {axis}, got others; {_RESTORE}"
                    )
        if kind == "dpo" and set(ends) != set(axes_of(kind, arrays)):
            raise StoreError(
                f"{meta}: records of DPO must have offsets for chosen and rejected, got {sorted(ends)}; "
                "write the store again with record_keys, or as .h5"
            )
        _check_arrays(meta, kind, arrays, options)
        kinds.append(kind)
        shards.append(
            ForeignShard(
                name=name.removesuffix("/meta.json"),
                arrays=arrays,
                ends={axis: partial(np.asarray, places) for axis, places in ends.items()},
                beside=(meta,),
            )
        )
    return _one_type(files, kinds, shards)


def _read_meta(meta: Path) -> dict[str, dict[str, Any]]:
    if not meta.is_file():
        raise StoreMissingError(f"{meta}: must stand beside the .bin files, got nothing there; copy it as well")
    _, size = real_file(meta)
    try:
        if size > MAX_META:
            raise ValueError(f"{size} bytes")
        return msgspec.json.decode(meta.read_bytes(), type=dict[str, dict[str, Any]])
    except (ValueError, RecursionError) as error:
        raise StoreCorruptError(f"{meta}: must be a JSON object of objects, got {error}; {_RESTORE}") from None


def _bin_array(meta: Path, key: str, info: Mapping[str, Any]) -> ForeignArray:
    shape, dtype = info.get("shape"), info.get("dtype")
    ok = isinstance(shape, list) and len(shape) == 1 and type(shape[0]) is int and shape[0] >= 0
    if not ok or dtype not in _ASTRAI_DTYPES:
        raise StoreCorruptError(
            f"{meta}: key {key!r} must have a shape of one dimension and a dtype of whole numbers, "
            f"got {str(shape)[:40]} and {dtype!r}; {_RESTORE}"
        )
    file = meta.with_name(f"{key}.bin")
    if not file.is_file():
        raise StoreFileMissingError(f"{file}: must exist, as {meta.name} lists it, got nothing there; {_RESTORE}")
    assert isinstance(shape, list)
    return array_of(file, np.dtype(dtype).newbyteorder("<"), count=shape[0])


def _offsets(meta: Path, key: str, value: object, count: int) -> Int64Array:
    numbers = value if isinstance(value, list) and all(type(item) is int for item in value) else []
    if numbers and numbers[0] == 0 and numbers[-1] == count and min(numbers) >= 0 and max(numbers) <= count:
        offsets = np.array(numbers, np.int64)
        if (np.diff(offsets) >= 0).all():
            return offsets
    raise StoreCorruptError(
        f"{meta}: offsets of {key!r} must rise from 0 to {count}, got {str(value)[:60]}; {_RESTORE}"
    )


def read_astrai_h5(files: Sequence[Path], options: ForeignOptions) -> ForeignFiles:
    """Read .h5 files with a group a key and a dataset a record: data_0, data_1, ..., in order of their numbers."""
    kinds, shards = [], []
    for file, name in zip(files, names_of(files), strict=True):
        kind, datasets = _h5_arrays(file)
        kinds.append(kind)
        for number, arrays in enumerate(datasets):
            _check_arrays(file, kind, arrays, options)
            shard_name = name if len(datasets) == 1 else f"{name}/data_{number}"
            shards.append(ForeignShard(name=shard_name, arrays=arrays))
    return _one_type(files, kinds, shards)


def _h5_arrays(file: Path) -> tuple[str, list[dict[str, ForeignArray]]]:
    with _h5_groups(file) as (groups, array):
        kind = _training_type(file, groups)
        keys = _read_keys(kind, groups)
        for key in keys:
            if groups[key] != groups[keys[0]] or [*map(_dataset_number, groups[key])] != [*range(len(groups[key]))]:
                raise StoreCorruptError(
                    f"{file}: every key must have datasets data_0, data_1, ..., as many as the others, "
                    f"got {len(groups[key])} of {key!r}; {_RESTORE}"
                )
        return kind, [{key: array(key, name) for key in keys} for name in groups[keys[0]]]


def written_positions(file: Path) -> list[ForeignArray]:
    """Return the position_ids of a part, which a meta.json or an .h5 file is; nothing where none were written.

    In an .h5 file they may be fewer arrays than those of the tokens.
    """
    if file.name == META:
        table = _read_meta(file)
        return [_bin_array(file, POSITION_IDS, table[POSITION_IDS])] if POSITION_IDS in table else []
    with _h5_groups(file) as (groups, array):
        return [array(POSITION_IDS, name) for name in groups.get(POSITION_IDS, ())]


@contextmanager
def _h5_groups(file: Path) -> Iterator[tuple[dict[str, list[str]], Callable[[str, str], ForeignArray]]]:
    """Open an .h5 file: key -> the names of its datasets in order, and what describes one of them."""
    h5py = import_h5py(file)
    real, size = real_file(file)
    with _damage_named(file), h5py.File(real, "r", locking=False) as opened:
        if opened.userblock_size:
            raise StoreError(f"{file}: must begin with HDF5, got a user block; write it without one")
        groups = {key: _members(h5py, opened, key, file) for key in opened}
        yield groups, lambda key, name: _h5_array(h5py, opened[key][name], real, size)


@contextmanager
def _damage_named(file: Path) -> Iterator[None]:
    """Turn what h5py raises over a damaged file, which can be almost anything, into an error of ours."""
    try:
        yield
    except StoreError:
        raise
    except (OSError, RuntimeError, LookupError, ValueError, TypeError, ArithmeticError, MemoryError) as error:
        raise StoreCorruptError(f"{file}: must be a whole HDF5 file, got {error}; {_RESTORE}") from None


def _members(h5py: Any, opened: Any, key: str, file: Path) -> list[str]:  # noqa: ANN401 - h5py ships no types
    """Return the names of a group's datasets in their order; links out of the file are refused."""

    def is_plain(parent: Any, name: str, kind: type) -> bool:  # noqa: ANN401
        return isinstance(parent.get(name, getlink=True), h5py.HardLink) and isinstance(parent[name], kind)

    names = list(opened[key]) if is_plain(opened, key, h5py.Group) else ["none"]
    if not all(re.fullmatch(r"data_[0-9]+", name) and is_plain(opened[key], name, h5py.Dataset) for name in names):
        raise StoreError(
            f"{file}: {key!r} must be a group of datasets data_0, data_1, ... in this file, got others or links; "
            "write it as AstrAI does"
        )
    return sorted(names, key=_dataset_number)


def _h5_array(h5py: Any, dataset: Any, real: Path, size: int) -> ForeignArray:  # noqa: ANN401 - h5py ships no types
    name, dtype = dataset.name, dataset.dtype
    if dataset.ndim != 1 or dtype.kind not in "iub" or dataset.is_virtual or dataset.external:
        raise StoreError(
            f"{real}: {name} must be whole numbers in one dimension inside the file, "
            f"got {dtype} of shape {dataset.shape}; write it as AstrAI does"
        )
    count = int(dataset.shape[0])
    begin = dataset.id.get_offset()
    obstacle, read = ("its numbers are big-endian" if dtype.byteorder == ">" else ""), None
    if count and begin is None:
        obstacle, read = "it is chunked or compressed", _h5_reader(h5py, real, name)
        if count * dtype.itemsize > _MAX_EXPANSION * dataset.id.get_storage_size():
            raise StoreCorruptError(
                f"{real}: {name} must hold what it declares, got {count} numbers in "
                f"{dataset.id.get_storage_size()} bytes; {_RESTORE}"
            )
    elif count and begin + count * dtype.itemsize > size:
        raise StoreCorruptError(
            f"{real}: {name} must lie within {size} bytes, got {count * dtype.itemsize} from {begin} on; {_RESTORE}"
        )
    return ForeignArray(
        path=real, file_bytes=size, begin=begin or 0, count=count, dtype=dtype, obstacle=obstacle, read=read
    )


def _h5_reader(h5py: Any, real: Path, name: str) -> Callable[[int, int], AnyArray]:  # noqa: ANN401
    def read(begin: int, end: int) -> AnyArray:
        with _damage_named(real), h5py.File(real, "r", locking=False) as opened:
            numbers: AnyArray = opened[name][begin:end]
        return numbers

    return read


def _dataset_number(name: str) -> int:
    return int(name.removeprefix("data_")[:12])


def _training_type(where: Path, keys: Mapping[str, object]) -> str:
    """Tell the training type by the keys."""
    if "sequence" in keys:
        kind = "sft" if "loss_mask" in keys else "seq"
    elif "chosen" in keys and "rejected" in keys:
        kind = "dpo"
    elif "responses" in keys:
        raise StoreError(
            f"{where}: must be of training type seq, sft or dpo, got grpo, whose responses are written without "
            "boundaries; prepare it from its records"
        )
    else:
        raise StoreError(
            f"{where}: must have the key sequence, or chosen and rejected, got {sorted(keys)[:8]}; "
            "say another format if AstrAI did not write it"
        )
    needed = _read_keys(kind, TRAINING_TYPES[kind])
    missing = [key for key in needed if key not in keys]
    if missing:
        raise StoreError(f"{where}: {kind} must have keys {needed}, got none of {missing}; write it again")
    return kind


def _read_keys(kind: str, keys: Mapping[str, object]) -> list[str]:
    """Return the keys that are read: positions are counted from the documents, so theirs are not."""
    arrays = TRAINING_TYPES[kind]
    return [key for key, array in arrays.items() if key in keys and array.holds != "positions"]


def _check_arrays(where: Path, kind: str, arrays: Mapping[str, ForeignArray], options: ForeignOptions) -> None:
    """Refuse arrays of one axis that are not equally long, and a dtype that contradicts the ids."""
    for axis in axes_of(kind, arrays):
        lengths = {key: array.count for key, array in arrays.items() if axis_of(kind, key) == axis}
        if len(set(lengths.values())) > 1:
            raise StoreCorruptError(f"{where}: arrays of {axis} must be equally long, got {lengths}; {_RESTORE}")
    options.check_dtype(where, next(iter(arrays.values())).dtype)


def _one_type(files: Sequence[Path], kinds: Sequence[str], shards: Sequence[ForeignShard]) -> ForeignFiles:
    """Join the shards of all files, which must be of one training type."""
    for file, kind in zip(files, kinds, strict=True):
        if kind != kinds[0]:
            raise StoreError(
                f"{file}: all parts must be of one training type, got {kind} after {kinds[0]}; name them apart"
            )
    return ForeignFiles(kind=kinds[0], shards=tuple(shards))
