"""A part: the tokens of one unit on disk, until they are appended to the store."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
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
_MAPPED_BYTES = 32 << 20
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

    A block ends between documents, so one larger than `block_bytes` comes alone and whole.
    """
    with ExitStack() as stack:
        readers = {key: stack.enter_context(_MappedValues(folder / key, np.dtype(keys[key]))) for key in keys}
        all_lengths = stack.enter_context(_MappedValues(folder / LENGTHS, _LENGTH_DTYPE))
        most_tokens = block_bytes // max(reader.dtype.itemsize for reader in readers.values())
        for begin in range(0, all_lengths.size, _LENGTHS_AT_ONCE):
            lengths = all_lengths.take(min(_LENGTHS_AT_ONCE, all_lengths.size - begin))
            offsets = np.zeros(lengths.size + 1, np.int64)
            np.cumsum(lengths, out=offsets[1:])
            first = 0
            while first < lengths.size:
                last = int(np.searchsorted(offsets, offsets[first] + most_tokens, side="right")) - 1
                last = max(last, first + 1)
                block = offsets[first : last + 1] - offsets[first]
                yield {key: reader.take(int(block[-1])) for key, reader in readers.items()}, block
                first = last


class _MappedValues:
    """Values of a raw file in order, mapped some MiB at a time: a copy would cost a fifth of the appending."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._file = path.open("rb", buffering=0)
        self._bytes = os.fstat(self._file.fileno()).st_size
        self.size = self._bytes // dtype.itemsize
        self._position = self._begin = self._end = 0
        self._map: mmap.mmap | None = None

    def __enter__(self) -> _MappedValues:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def take(self, count: int) -> npt.NDArray[Any]:
        """Return the next `count` values; they stay mapped as long as the array lives."""
        begin, end = self._position, self._position + count * self.dtype.itemsize
        assert end <= self._bytes, f"{self._file.name!r} must hold {count} more values"
        if count == 0:
            return np.empty(0, self.dtype)
        if end > self._end:
            self._begin = begin - begin % mmap.ALLOCATIONGRANULARITY
            self._end = min(self._bytes, max(end, self._begin + _MAPPED_BYTES))
            self._map = mmap.mmap(
                self._file.fileno(), self._end - self._begin, access=mmap.ACCESS_READ, offset=self._begin
            )
        assert self._map is not None
        self._position = end
        return np.frombuffer(self._map, self.dtype, count, begin - self._begin)


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
