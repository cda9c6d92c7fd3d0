"""Readers of token files: raw, numpy's, llm.c's, OLMo's, Megatron's and datatrove's."""

from __future__ import annotations

import csv
import gzip
import io
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tokenize import TokenError
from typing import Any, TextIO

import numpy as np

from tokenmill.errors import StoreCorruptError, StoreError, StoreMissingError
from tokenmill.store.foreign.files import (
    BLOCK,
    LLMC_HEADER,
    LLMC_MAGICS,
    MEGATRON_MAGIC,
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
from tokenmill.store.reader import FileRequest, read_range
from tokenmill.types import AnyArray, Int64Array

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
            f"{where}: the dtype of files without a header must be said, got none; add dtype = uint16 or uint32 "
            "(--dtype on the command line), or vocab_size, which may prove it"
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
    shape, fortran, dtype, begin = _npy_header(file)
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


def _npy_header(file: Path) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
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
_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


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
    if version != 1 or code not in _DTYPES:
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
    return _Index(path=path, real=real, bytes=size, dtype=np.dtype(_DTYPES[code]), sequences=sequences, marks=marks)


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
