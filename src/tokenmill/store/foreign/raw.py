"""Readers of files that are nothing but tokens, or tokens behind a short header: raw, numpy's, llm.c's, OLMo's."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from tokenmill.errors import StoreCorruptError, StoreError
from tokenmill.store.foreign.detect import LLMC_HEADER, LLMC_MAGICS, NPY_MAGIC, head
from tokenmill.store.foreign.files import names_of
from tokenmill.store.foreign.options import ForeignOptions
from tokenmill.store.foreign.parts import Flat, Part, Parts, flat_of
from tokenmill.store.foreign.prove import proven_dtype

if TYPE_CHECKING:
    import numpy.typing as npt

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
    def read(begin: int, end: int) -> npt.NDArray[Any]:
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


def _ends_of_table(table: Path, count: int) -> npt.NDArray[np.int64]:
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
