"""A part: the tokens of one unit on disk, until they are appended to the store."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

LENGTHS = "lengths"
PROGRESS = "progress"
BLOCK_BYTES = 1 << 20
"""Small enough for the caches of a core: checked, hashed and written while it is there."""
_LENGTHS_AT_ONCE = 1 << 17
_LENGTH_DTYPE = np.dtype("<i8")
_PROGRESS = struct.Struct("<3q")


class PartWriter:
    """Append documents to a part: a file a key, and the documents' lengths, all raw and little-endian.

    Nothing is synced: a part that a crash leaves is thrown away.
    """

    def __init__(self, folder: Path, keys: Mapping[str, str]) -> None:
        folder.mkdir()
        self._keys = keys
        self._files = {name: (folder / name).open("xb", buffering=0) for name in (*keys, LENGTHS, PROGRESS)}

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()

    def append(self, arrays: Mapping[str, npt.NDArray[Any]], offsets: npt.NDArray[np.int64]) -> None:
        """Add documents: for each key their values end to end, and where each starts (documents + 1 numbers)."""
        for key, values in arrays.items():
            assert values.dtype == np.dtype(self._keys[key])
            self._write(key, values)
        self._write(LENGTHS, np.diff(offsets).astype(_LENGTH_DTYPE, copy=False))

    def tell_progress(self, position: int, documents: int, tokens: int) -> None:
        """Leave word of how far the unit has come, for whoever shows progress."""
        file = self._files[PROGRESS]
        file.seek(0)
        file.write(_PROGRESS.pack(position, documents, tokens))

    def _write(self, name: str, values: npt.NDArray[Any]) -> None:
        view = np.ascontiguousarray(values).data.cast("B") if values.size else memoryview(b"")
        while view.nbytes:  # an unbuffered write may take less than it is given, at 2 GiB for one
            view = view[self._files[name].write(view) :]


def read_part(
    folder: Path, keys: Mapping[str, str], *, block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[dict[str, npt.NDArray[Any]], npt.NDArray[np.int64]]]:
    """Yield the documents of a part in order, as (arrays, offsets) of about `block_bytes` at a time.

    A block ends between documents, so one larger than `block_bytes` comes alone and whole. The arrays
    are overwritten when the next block is asked for.
    """
    with ExitStack() as stack:
        readers = {key: _Reader(stack.enter_context(_open(folder / key)), np.dtype(keys[key])) for key in keys}
        lengths_file = _Reader(stack.enter_context(_open(folder / LENGTHS)), _LENGTH_DTYPE)
        most_tokens = block_bytes // max(reader.dtype.itemsize for reader in readers.values())
        documents = os.stat(folder / LENGTHS).st_size // _LENGTH_DTYPE.itemsize
        for begin in range(0, documents, _LENGTHS_AT_ONCE):
            lengths = lengths_file.read(min(_LENGTHS_AT_ONCE, documents - begin))
            offsets = np.zeros(lengths.size + 1, np.int64)
            np.cumsum(lengths, out=offsets[1:])
            first = 0
            while first < lengths.size:
                last = int(np.searchsorted(offsets, offsets[first] + most_tokens, side="right")) - 1
                last = max(last, first + 1)
                block = offsets[first : last + 1] - offsets[first]
                yield {key: reader.read(int(block[-1])) for key, reader in readers.items()}, block
                first = last


class _Reader:
    """Values of a raw file in order, into memory that is used again: fresh pages cost as much as the reading."""

    def __init__(self, file: FileIO, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._file = file
        self._buffer = np.empty(0, dtype)

    def read(self, count: int) -> npt.NDArray[Any]:
        """Return the next `count` values."""
        if self._buffer.size < count:
            self._buffer = np.empty(count, self.dtype)
        values = self._buffer[:count]
        view = values.data.cast("B") if count else memoryview(b"")
        while view.nbytes:
            got = self._file.readinto(view)
            assert got, f"{self._file.name!r} must hold {count} more values"
            view = view[got:]
        return values


def _open(path: Path) -> FileIO:
    return FileIO(path, "rb")


def read_progress(folder: Path) -> tuple[int, int, int]:
    """Return (position, documents, tokens) that a unit has come to; zeros before its first batch."""
    try:
        data = (folder / PROGRESS).read_bytes()
    except FileNotFoundError:
        data = b""
    if len(data) != _PROGRESS.size:
        return 0, 0, 0
    position, documents, tokens = _PROGRESS.unpack(data)
    return position, documents, tokens
