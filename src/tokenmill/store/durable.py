"""Files and names that survive a crash, and indexes that are kept."""

from __future__ import annotations

import io
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
import numpy as np
import xxhash

from tokenmill.errors import StoreCorruptError, StoreError
from tokenmill.store.layout import FileInfo
from tokenmill.store.maps import FileRequest, MappedFile, map_file
from tokenmill.tables import read_json
from tokenmill.types import AnyArray, Uint8Array

T = TypeVar("T")


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file so that a reader sees the old one or the whole new one, whatever happens."""
    write_parts_atomically(path, (data,))


def write_parts_atomically(path: Path, parts: Iterable[bytes], *, writer: str = "") -> None:
    """Write a file part by part, as `write_atomically` does; one part is held in memory at a time.

    Where several may write the same file at once, each names itself as its `writer`.
    """
    temporary = path.with_name(f".tmp-{path.name}{writer}")
    with temporary.open("wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are not there, so that their names survive a power cut."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


class CheckedFile:
    """A file that grows at its end and knows the checksum of all that it holds: new, or as it was at a checkpoint.

    It is opened when it is written to and can be closed in between: a build may have thousands of domains, each
    with files of its own, and a process may have but some hundred files open.
    """

    def __init__(self, path: Path, saved: FileInfo | None = None) -> None:
        self._path = path
        self._hash = xxhash.xxh3_128()
        self._bytes = saved.bytes if saved else 0
        self._stream: io.FileIO | None = None
        if saved is None:
            path.open("xb").close()
            return
        if not path.is_file() or path.stat().st_size < saved.bytes:
            raise StoreCorruptError(
                f"{path}: must have {saved.bytes} bytes to go on, got fewer; the unit is done again"
            )
        os.truncate(path, saved.bytes)
        if saved.bytes:
            self._hash.update(self.read_back(np.dtype(np.uint8), saved.bytes).data)
        if self._hash.hexdigest() != saved.xxh3:
            raise StoreCorruptError(f"{path}: must be as it was left, got other bytes; the unit is done again")

    def write(self, values: AnyArray) -> None:
        """Add an array at the end."""
        if not values.size:
            return
        view = np.ascontiguousarray(values).data.cast("B")
        self._hash.update(view)
        self._bytes += view.nbytes
        self._stream = self._stream or open(self._path, "ab", buffering=0)  # noqa: SIM115 - closed by `close`
        while view.nbytes:  # one write may take less than it is given, at 2 GiB for one
            view = view[self._stream.write(view) :]

    def close(self) -> None:
        """Close it until it is written to again."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def sync(self) -> FileInfo:
        """Make it durable, and return its size and checksum so far."""
        self.close()
        with open(self._path, "ab") as stream:
            os.fsync(stream.fileno())
        return FileInfo(bytes=self._bytes, xxh3=self._hash.hexdigest())

    def read_back(self, dtype: np.dtype[Any], count: int) -> AnyArray:
        """Map the first `count` numbers of the file, of which there is one at least."""
        with open(self._path, "rb") as stream:
            mapped = mmap.mmap(stream.fileno(), count * dtype.itemsize, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, dtype)


# Indexes that can always be made again, kept in files beside the data or in a folder of the user's.
#
# A file holds bytes, then a footer in JSON that says what they are, its size and its checksum. It is written
# under a name of its own, synced and renamed, so what has the final name is whole. Any of them can be deleted.

_END = 16
"""Bytes behind a footer: its size, and its checksum."""


def write_index(file: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write an index: `write` writes its bytes, and returns its footer, a record or another JSON value."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".tmp-{file.stem}-", dir=file.parent)
    try:
        os.fchmod(descriptor, 0o644)  # others may read the data, so they may read its index
        with os.fdopen(descriptor, "wb", buffering=1 << 20) as out:
            footer = msgspec.json.encode(write(out))
            out.write(footer + len(footer).to_bytes(8, "little") + xxhash.xxh3_64_digest(footer))
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)
        sync_folder(file.parent)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_section(out: BinaryIO, blocks: Iterable[Uint8Array]) -> tuple[int, int, str]:
    """Write a part of an index, given in blocks, at a multiple of 8; return first byte, size and XXH3-128."""
    out.write(b"\0" * (-out.tell() % 8))
    begin = out.tell()
    state = xxhash.xxh3_128()
    for block in blocks:
        state.update(block.data)
        out.write(block.data)
    return begin, out.tell() - begin, state.hexdigest()


def read_index(file: Path, kind: type[T]) -> tuple[MappedFile, T] | None:
    """Map an index: its bytes, and its footer as a record; None where there is none, or one cut or changed."""
    try:
        mapped = map_file(FileRequest(file, file.stat().st_size))
        data = mapped.data
        size = int.from_bytes(data[-_END : -_END + 8].tobytes(), "little") if data.size >= _END else data.size
        end = max(0, data.size - _END - size)
        footer = data[end:-_END].tobytes()
        if len(footer) != size or xxhash.xxh3_64_digest(footer) != data[-8:].tobytes():
            return None
        mapped.check()
        mapped.data = data[:end]
        return mapped, read_json(kind, footer, f"{file}:", error=StoreCorruptError)
    except (OSError, StoreError):
        return None
