"""Files that survive a crash: written whole or not at all, or growing under a checksum."""

from __future__ import annotations

import glob
import io
import mmap
import os
import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from tokenmill.errors import StoreExistsError, writing
from tokenmill.store.layout import PAGE_BYTES, FileInfo
from tokenmill.store.lease import has_ended, this_process
from tokenmill.types import AnyArray, Uint8Array, Uint64Array

T = TypeVar("T")
Item = TypeVar("Item")


def write_atomically(path: Path, data: bytes | Iterable[bytes], *, writer: str = "") -> None:
    """Write a file so that a reader sees the old one or the whole new one, also after a crash.

    `data` may come in parts, of which only one is in memory. The temporary file has a fixed name, so that the next
    attempt overwrites what a killed one left. Processes that write one file at once must differ in `writer`.
    """
    temporary = path.with_name(f".tmp-{path.name}{writer}")
    write_parts(temporary, (data,) if isinstance(data, bytes) else data)
    os.replace(temporary, path)
    sync_folder(path.parent)


def write_parts(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file that survives a power cut, but for its name in the folder."""
    with writing(path), open(path, "wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def new_file(file: Path) -> Iterator[int]:
    """Give the descriptor of a new file, which is durable and has its name after the `with` block.

    After an error it is removed. Any number of processes may write the same file at once.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".tmp-{file.stem}-", dir=file.parent)
    try:
        try:
            os.chmod(temporary, 0o644)  # others may read the data, so they may read what is made of it
            with writing(file):
                yield descriptor
                os.fsync(descriptor)
        finally:
            os.close(descriptor)  # Windows renames no file that is open
        os.replace(temporary, file)
        sync_folder(file.parent)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Give a folder to fill, which gets the name `folder` after the `with` block; all its files are durable then.

    After an error it is removed. Several processes may make the same folder at once: the first one succeeds. What a
    killed process left is removed by the next one on the same machine.
    """
    make_folder(folder.parent)
    prefix = f".tmp-{folder.name}-"
    for left in folder.parent.glob(f"{glob.escape(prefix)}*"):
        if has_ended(left.name.removeprefix(prefix).rpartition("-")[0]):
            shutil.rmtree(left, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{prefix}{this_process()}-", dir=folder.parent))
    try:
        os.chmod(temporary, 0o755)
        yield temporary
        for place, _, names in os.walk(temporary):
            for path in (*(Path(place) / name for name in names), Path(place)):
                sync_folder(path)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.is_dir() or not any(folder.iterdir()):
                raise
            raise StoreExistsError(f"{folder}: another process filled this folder; choose another path") from None
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def sync_folder(path: Path) -> None:
    """Make the names in a folder, or the content of a file, survive a power cut."""
    opens_folders = hasattr(os, "O_DIRECTORY")  # Windows does not; there a file must be open for writing, too
    if not opens_folders and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if opens_folders else os.O_RDWR)
    try:
        with writing(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


_AT_ONCE, _BATCH = 16, 1000


def in_threads(do: Callable[[Item], T], items: Sequence[Item]) -> Iterator[T]:
    """Do something with each of many small files or folders, several at once; yield what comes of it, in order.

    A disk, and more so one behind a network, does many in the time of one (benchmarks/engines.py --units).
    """
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="tokenmill-files") as executor:
        for first in range(0, len(items), _BATCH):
            yield from executor.map(do, items[first : first + _BATCH])


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are not there, so that their names survive a power cut."""
    if path.is_dir():
        return
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


_LONGEST_WRITE = 1 << 30
"""Bytes of one write on Windows, where longer ones fail."""


def write_all(descriptor: int, data: bytes | memoryview, at: int) -> None:
    """Write bytes at a place of a file, all of them: one call may take fewer, as on a disk that fills up."""
    view = memoryview(data).cast("B")
    while view.nbytes:
        if hasattr(os, "pwrite"):
            written = os.pwrite(descriptor, view, at)
        else:  # on Windows
            os.lseek(descriptor, at, os.SEEK_SET)
            written = os.write(descriptor, view[:_LONGEST_WRITE])
        view, at = view[written:], at + written


def page_sums(data: Uint8Array | bytes | memoryview) -> list[int]:
    """Return the XXH3-64 of each page of some bytes; the last page may be shorter."""
    view = memoryview(data)  # type: ignore[arg-type]
    pages = range(0, len(view), PAGE_BYTES)
    return [xxhash.xxh3_64_intdigest(view[begin : begin + PAGE_BYTES]) for begin in pages]


class Checksums:
    """Checksums of a file whose bytes come one block after another: of the whole file, and of each page."""

    def __init__(self) -> None:
        self.bytes = 0
        self._whole = xxhash.xxh3_128()
        self._pages = array("Q")
        self._rest = b""
        """Bytes after the last full page."""

    def update(self, block: memoryview) -> None:
        """Add the next bytes of the file."""
        self._whole.update(block)
        self.bytes += block.nbytes
        if self._rest:
            missing = PAGE_BYTES - len(self._rest)
            self._rest += block[:missing]
            block = block[missing:]
            if len(self._rest) < PAGE_BYTES:
                return
            self._pages.extend(page_sums(self._rest))
        end = block.nbytes // PAGE_BYTES * PAGE_BYTES
        self._pages.extend(page_sums(block[:end]))
        self._rest = bytes(block[end:])

    @property
    def info(self) -> FileInfo:
        """Size and checksum of the bytes so far."""
        return FileInfo(bytes=self.bytes, xxh3=self._whole.hexdigest())

    @property
    def pages(self) -> Uint64Array:
        """Page sums of the bytes so far; the last page may be shorter."""
        return np.array(self._pages + array("Q", page_sums(self._rest)), np.uint64)


class CheckedFile:
    """A new file that grows at its end and knows the checksum of its content.

    It is opened when it is written to and can be closed in between: a build may have thousands of domains, each
    with files of its own, and a process may have only some hundred files open.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._checksums = Checksums()
        self._stream: io.FileIO | None = open(path, "xb", buffering=0)  # noqa: SIM115 - closed by `close`

    def write(self, values: AnyArray) -> None:
        """Add an array at the end."""
        if not values.size:
            return
        view = np.ascontiguousarray(values).data.cast("B")
        self._checksums.update(view)
        self._stream = self._stream or open(self._path, "ab", buffering=0)  # noqa: SIM115 - closed by `close`
        with writing(self._path):
            while view.nbytes:  # one write may take less than it is given, at 2 GiB for one
                view = view[self._stream.write(view) :]

    def close(self) -> None:
        """Close it until it is written to again."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    @property
    def info(self) -> FileInfo:
        """Size and checksum of the bytes so far."""
        return self._checksums.info

    @property
    def page_sums(self) -> Uint64Array:
        """Checksum of each page of the bytes so far."""
        return self._checksums.pages

    def sync(self) -> FileInfo:
        """Make it durable and close it; return its size and checksum so far."""
        with writing(self._path), self._stream or open(self._path, "ab") as stream:
            os.fsync(stream.fileno())
        self._stream = None
        return self.info

    def read_back(self, dtype: np.dtype[Any], count: int) -> AnyArray:
        """Map the first `count` numbers of the file, of which there is one at least."""
        with open(self._path, "rb") as stream:
            mapped = mmap.mmap(stream.fileno(), count * dtype.itemsize, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, dtype)
