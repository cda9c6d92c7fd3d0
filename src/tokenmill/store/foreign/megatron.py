"""Reader of Megatron's indexed datasets: tokens in .bin, sequences and documents in .idx."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import StoreCorruptError, StoreError, StoreMissingError
from tokenmill.store.foreign.detect import MEGATRON_MAGIC, head
from tokenmill.store.foreign.files import names_of
from tokenmill.store.foreign.options import ForeignOptions
from tokenmill.store.foreign.parts import BLOCK, Part, Parts, flat_of, real_file
from tokenmill.store.maps import FileRequest, map_file

if TYPE_CHECKING:
    import numpy.typing as npt

_HEADER = struct.Struct("<9sQBQQ")
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

    def array(self, dtype: str, begin: int, count: int) -> npt.NDArray[Any]:
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
    start = head(path, _HEADER.size)
    if len(start) < _HEADER.size or not start.startswith(MEGATRON_MAGIC):
        raise StoreCorruptError(f"{path}: must begin with the header of Megatron, got {start[:9]!r}; {_WAY_OUT}")
    _, version, code, sequences, marks = _HEADER.unpack(start)
    if version != 1 or code not in _DTYPES:
        raise StoreCorruptError(
            f"{path}: must be version 1 with a known dtype, got version {version}, dtype code {code}; {_WAY_OUT}"
        )
    whole = _HEADER.size + 12 * sequences + 8 * marks
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


def _ends(index: _Index, count: int) -> npt.NDArray[np.int64]:
    """Return where documents end, after proving that sequences lie one behind the other in the .bin.

    Sequences behind the last mark, which a writer leaves that did not end its last document, are one more document.
    """

    def refuse(rule: str, got: object) -> StoreCorruptError:
        return StoreCorruptError(f"{index.path}: {rule}, got {got}; {_WAY_OUT}")

    lengths = index.array("<i4", _HEADER.size, index.sequences)
    pointers = index.array("<i8", _HEADER.size + 4 * index.sequences, index.sequences)
    marks = index.array("<i8", _HEADER.size + 12 * index.sequences, index.marks)
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
    ends: npt.NDArray[np.int64] = starts[marks[1:]]
    return ends
