"""Readers of files that are nothing but tokens, or tokens behind a short header: raw, numpy's, llm.c's, OLMo's."""

from __future__ import annotations

import csv
import gzip
import io
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
    Flat,
    ForeignOptions,
    Part,
    Parts,
    flat_of,
    head,
    names_of,
    real_file,
)
from tokenmill.store.foreign.index import proven_dtype
from tokenmill.store.maps import FileRequest, map_file
from tokenmill.types import AnyArray, Int64Array

_HEADER = 1 << 14
"""Bytes in which a header of numpy must end; its own reader takes no more either."""
_LINE = 1 << 16
"""Characters that a line of metadata may have."""


def read_raw(files: Sequence[Path], options: ForeignOptions) -> Parts:
    """Read files of tokens without a header; the dtype is given, or proven by the vocabulary."""
    dtype = np.dtype(options.dtype).newbyteorder("<") if options.dtype else proven_dtype(files, options.vocab_size)
    return _parts(files, lambda file: flat_of(file, dtype))


def read_olmo(files: Sequence[Path], options: ForeignOptions) -> Parts:
    """Read raw files named .npy; where a .csv.gz stands beside one, its rows (start, end, ...) are documents."""
    real = next((file for file in files if head(file, 6) == NPY_MAGIC), None)
    if real is not None:
        raise StoreError(f"{real}: a file of OLMo must have no header, got one of numpy's; use format = npy")
    raw = read_raw(files, options)
    parts = []
    for file, part in zip(files, raw.parts, strict=True):
        table = file.with_name(f"{file.name.removesuffix('.npy')}.csv.gz")
        if table.is_file():
            count = part.arrays["sequence"].count
            ends = {"documents": lambda table=table, count=count: _ends_of_table(table, count)}
            part = Part(name=part.name, arrays=part.arrays, ends=ends, beside=(table,))  # noqa: PLW2901
        parts.append(part)
    return Parts(kind="seq", parts=tuple(parts))


def read_llmc(files: Sequence[Path], options: ForeignOptions) -> Parts:
    """Read files with the header of llm.c: 256 numbers of 32 bits, of which magic, version and tokens are used."""

    def flat(file: Path) -> Flat:
        start = head(file, LLMC_HEADER)
        magic, version, count = (int.from_bytes(start[4 * i : 4 * i + 4], "little") for i in range(3))
        if len(start) < LLMC_HEADER or (magic, version) not in LLMC_MAGICS:
            raise StoreCorruptError(
                f"{file}: must begin with the header of llm.c, got magic {magic} version {version} "
                f"in {len(start)} bytes; copy the file again, or say another format"
            )
        dtype = np.dtype(LLMC_MAGICS[magic, version])
        options.check_dtype(file, dtype)
        return flat_of(file, dtype, begin=LLMC_HEADER, count=count)

    return _parts(files, flat)


def read_npy(files: Sequence[Path], options: ForeignOptions) -> Parts:
    """Read arrays of numpy with one dimension, or two: then every row is a document."""
    names = names_of(list(files))
    parts = [_npy_part(file, name, options) for file, name in zip(files, names, strict=True)]
    return Parts(kind="seq", parts=tuple(parts))


def _npy_part(file: Path, name: str, options: ForeignOptions) -> Part:
    shape, fortran, dtype, begin = _npy_header(file)
    options.check_dtype(file, dtype)
    if dtype.kind not in "iu" or len(shape) not in (1, 2):
        raise StoreError(
            f"{file}: must be whole numbers in one or two dimensions, got {dtype} of shape {shape}; save it anew"
        )
    count = int(np.prod([int(size) for size in shape], dtype=object))
    flat = flat_of(file, dtype, begin=begin, count=count)
    if fortran and min(shape, default=0) > 1 and len(shape) == 2:
        flat = _rows_of_columns(flat, shape[0], shape[1])
    if len(shape) == 1:
        return Part(name=name, arrays={"sequence": flat})
    rows, length = shape
    ends = {"documents": lambda: np.arange(1, rows + 1, dtype=np.int64) * length}
    return Part(name=name, arrays={"sequence": flat}, ends=ends)


def _npy_header(file: Path) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return shape, whether columns come first, dtype and size of a header; objects are never loaded."""
    opened = io.BytesIO(head(file, _HEADER))  # whatever length a header claims
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


def _rows_of_columns(flat: Flat, rows: int, length: int) -> Flat:
    def read(begin: int, end: int) -> AnyArray:
        whole = np.memmap(flat.path, flat.dtype, "r", flat.begin, (rows, length), "F")
        first = begin // length
        return whole[first : -(-end // length)].ravel()[begin - first * length : end - first * length]

    return Flat(
        path=flat.path,
        file_bytes=flat.file_bytes,
        begin=flat.begin,
        count=flat.count,
        dtype=flat.dtype,
        obstacle="its columns come first (Fortran order)",
        read=read,
    )


def _parts(files: Sequence[Path], flat: Callable[[Path], Flat]) -> Parts:
    names = names_of(list(files))
    return Parts(
        kind="seq",
        parts=tuple(
            Part(name=name, arrays={"sequence": flat(file)}) for file, name in zip(files, names, strict=True)
        ),
    )


def _ends_of_table(table: Path, count: int) -> Int64Array:
    """Read where documents end; they must lie one behind the other."""
    ends: list[int] = []
    last = 0

    def refuse(got: object) -> StoreCorruptError:
        return StoreCorruptError(
            f"{table}: rows must be start, end, ... of documents one behind the other within {count} tokens, "
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


# Reader of Megatron's indexed datasets: tokens in .bin, sequences and documents in .idx.

_INDEX_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_WAY_OUT = "copy both files again from where they are intact"


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
        return map_file(FileRequest(self.real, self.bytes, begin, size)).data.view(dtype)


def read_megatron(files: Sequence[Path], options: ForeignOptions) -> Parts:
    """Read pairs of .bin and .idx, named by their .bin; a document may be made of several sequences."""
    parts = []
    for file, name in zip(files, names_of(list(files)), strict=True):
        index = _index(file.with_suffix(".idx"))
        options.check_dtype(index.path, index.dtype)
        if not file.is_file():
            raise StoreMissingError(
                f"{file}: must stand beside {index.path.name}, got nothing there; copy it as well"
            )
        flat = flat_of(file, index.dtype)
        ends = {"documents": lambda index=index, count=flat.count: _ends(index, count)}
        parts.append(Part(name=name, arrays={"sequence": flat}, ends=ends, beside=(index.real,)))
    return Parts(kind="seq", parts=tuple(parts))


def _index(path: Path) -> _Index:
    if not path.is_file():
        raise StoreMissingError(
            f"{path}: must stand beside the .bin, got nothing there; copy it as well, or say format = bin and dtype"
        )
    real, size = real_file(path)
    start = head(path, _INDEX_HEADER.size)
    if len(start) < _INDEX_HEADER.size or not start.startswith(MEGATRON_MAGIC):
        raise StoreCorruptError(f"{path}: must begin with the header of Megatron, got {start[:9]!r}; {_WAY_OUT}")
    _, version, code, sequences, marks = _INDEX_HEADER.unpack(start)
    if version != 1 or code not in _DTYPES:
        raise StoreCorruptError(
            f"{path}: must be version 1 with a known dtype, got version {version}, dtype code {code}; {_WAY_OUT}"
        )
    whole = _INDEX_HEADER.size + 12 * sequences + 8 * marks
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


def _ends(index: _Index, count: int) -> Int64Array:
    """Return where documents end, after proving that sequences lie one behind the other in the .bin.

    Sequences behind the last mark, which a writer leaves that did not end its last document, are one more document.
    """

    def refuse(rule: str, got: object) -> StoreCorruptError:
        return StoreCorruptError(f"{index.path}: {rule}, got {got}; {_WAY_OUT}")

    lengths = index.array("<i4", _INDEX_HEADER.size, index.sequences)
    pointers = index.array("<i8", _INDEX_HEADER.size + 4 * index.sequences, index.sequences)
    marks = index.array("<i8", _INDEX_HEADER.size + 12 * index.sequences, index.marks)
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
                f"{index.path}: sequences must lie one behind the other to be read in place, got others; "
                "write the dataset anew with Megatron's own tools"
            )
    if not index.marks:
        return starts[1:]
    if int(marks[0]) != 0 or int(marks[-1]) > index.sequences or (np.diff(marks) < 0).any():
        raise refuse(f"marks of documents must rise from 0 to at most {index.sequences}", marks[:4].tolist())
    ends: Int64Array = starts[marks[1:]]
    return ends


# Reader of the tokenized files of datatrove and nanotron: .ds with .ds.index, .ds.metadata and .ds.loss.

_SIZES = {"2": "<u2", "4": "<u4"}
_INDEX_WAY_OUT = "copy the files again from where they are intact"


def read_datatrove(files: Sequence[Path], options: ForeignOptions) -> Parts:
    """Read .ds files; the size of a token is in .metadata, else the dtype is given or proven by the vocabulary."""
    names = names_of(list(files))
    losses = [_beside(file, ".loss").is_file() for file in files]
    if len(set(losses)) > 1:
        without = files[losses.index(False)]
        raise StoreError(
            f"{without}: all files must have a .loss or none, got none here; name those with and without apart"
        )
    known = [_metadata(file) for file in files]
    unsaid = [file for file, said in zip(files, known, strict=True) if said is None]
    if unsaid and options.dtype is None:
        default = proven_dtype(unsaid, options.vocab_size)
    else:
        default = np.dtype(options.dtype or "<u2").newbyteorder("<")
    parts = [
        _part(file, name, said, default, options) for file, name, said in zip(files, names, known, strict=True)
    ]
    tokenizers = sorted({said[0] for said in known if said is not None})
    return Parts(kind="sft" if losses[0] else "seq", parts=tuple(parts), facts={"tokenizers": tokenizers})


def _part(
    file: Path,
    name: str,
    said: tuple[str, np.dtype[Any], int] | None,
    default: np.dtype[Any],
    options: ForeignOptions,
) -> Part:
    if said is not None:
        options.check_dtype(file, said[1])
    flat = flat_of(file, said[1] if said else default, count=said[2] if said else None)
    arrays: dict[str, Flat] = {"sequence": flat}
    loss = _beside(file, ".loss")
    if loss.is_file():
        arrays["loss_mask"] = flat_of(loss, np.dtype("|u1"), count=flat.count)
    index = _beside(file, ".index")
    if not index.is_file():
        return Part(name=name, arrays=arrays)
    ends = flat_of(index, np.dtype("<u8"))
    return Part(
        name=name,
        arrays=arrays,
        ends={"documents": lambda: _document_ends(index, ends, flat.count)},
        beside=(index,),
    )


def _beside(file: Path, ending: str) -> Path:
    return file.with_name(f"{file.name}{ending}")


def _metadata(file: Path) -> tuple[str, np.dtype[Any], int] | None:
    """Return tokenizer, dtype and number of tokens; None where the file does not exist."""
    path = _beside(file, ".metadata")
    if not path.is_file():
        return None
    text = head(path, 1 << 16).decode("utf-8", "replace")
    lines = text.splitlines()
    name, _, size = lines[0].rpartition("|") if lines else ("", "", "")
    if size not in _SIZES or len(lines) < 2 or not (lines[1].isascii() and lines[1].isdigit()):
        raise StoreCorruptError(
            f"{path}: must be TOKENIZER|2 or TOKENIZER|4, then the number of tokens, got {text[:80]!r}; {_WAY_OUT}"
        )
    return name, np.dtype(_SIZES[size]), int(lines[1][:20])


def _document_ends(path: Path, index: Flat, count: int) -> Int64Array:
    ends = index.mapped
    last = int(ends[-1]) if ends.size else 0
    if last != count or (ends[1:] < ends[:-1]).any():
        raise StoreCorruptError(
            f"{path}: ends of documents must rise to the {count} tokens of the .ds, got {last} at last; {_WAY_OUT}"
        )
    return ends.astype(np.int64)
