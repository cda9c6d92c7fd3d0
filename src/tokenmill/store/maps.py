"""A bounded number of memory-mapped files, shared by all stores of a run."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TypeAlias

import numpy as np

from tokenmill.errors import StoreCorruptError, StoreMissingError
from tokenmill.store.layout import WAY_OUT
from tokenmill.types import Uint8Array

MAX_MAPS = 64
LOOK_SECONDS = 0.1
"""Between two looks at the sizes of files that are mapped."""
LARGE_BYTES = 1 << 28
"""Of a larger file only the pages that are used are read and mapped, not their neighbours as well: rows are read in
random order, and reading ahead would read and hold many times what they need."""
# No link is followed out of the store, and a pipe in place of a file does not make us wait for its other end.
_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


@dataclass(eq=False, slots=True)
class MappedFile:
    """One file in memory, read-only; stays mapped while this object lives."""

    path: Path
    data: Uint8Array
    address: int
    """Where `data` starts; 0 for an empty file."""
    mapping: mmap.mmap | None = None
    """What the system knows of the map; None for what is in memory or empty."""
    end: int = 0
    """How many bytes the file must keep."""
    borrowers: int = field(default=0)

    def check(self) -> None:
        """Refuse a file that became shorter after it was mapped: who reads what is gone is ended by the system."""
        if self.mapping is not None and self.mapping.size() < self.end:
            raise StoreCorruptError(
                f"{self.path}: must keep its {self.end} bytes while it is read, "
                f"got {self.mapping.size()}; {WAY_OUT}"
            )


@dataclass(frozen=True, slots=True)
class FileRequest:
    """A file or a part of one, and the size that the manifest promises."""

    path: Path
    bytes: int
    """Size of the whole file."""
    begin: int = 0
    size: int | None = None
    """How many bytes from `begin` on are wanted; None: all that there are."""

    @property
    def wanted(self) -> int:
        """How many bytes are wanted."""
        return self.bytes - self.begin if self.size is None else self.size


@dataclass(frozen=True, eq=False, slots=True)
class MemoryRequest:
    """What stands for a file of a store but is held in memory."""

    path: Path
    """The file it was made from, for messages."""
    data: Uint8Array

    @property
    def wanted(self) -> int:
        """How many bytes there are."""
        return self.data.size


Request: TypeAlias = FileRequest | MemoryRequest


class MapCache:
    """Keeps the most recently used maps, at most `limit` with those in use, for any number of threads.

    Maps are lent, so that none is closed under a reader. Idle ones make room for new ones. The limit
    is passed only while the borrowers of one moment need more than that together: waiting for one
    another could wait for ever.
    """

    def __init__(self, limit: int = MAX_MAPS) -> None:
        assert limit >= 2
        self.limit = limit
        self._maps: OrderedDict[FileRequest, MappedFile] = OrderedDict()
        self._lock = threading.Lock()
        self._next_look = 0.0

    def renew_lock(self) -> None:
        """Take a new lock, in a process that was forked: a thread that is not here may hold the old one."""
        self._lock = threading.Lock()

    @property
    def num_open(self) -> int:
        """How many files are mapped now."""
        return len(self._maps)

    def take(self, requests: Sequence[Request]) -> list[MappedFile]:
        """Lend the maps of some files, in the order asked for, until they are given back."""
        with self._lock:
            if monotonic() > self._next_look:
                self._look()
            files: list[MappedFile] = []
            try:
                for request in requests:
                    if isinstance(request, MemoryRequest):
                        files.append(map_file(request))
                        files[-1].borrowers += 1
                        continue
                    file = self._maps.get(request)
                    if file is None:
                        self._make_room()
                        file = self._maps[request] = map_file(request)
                    else:
                        self._maps.move_to_end(request)
                    file.borrowers += 1
                    files.append(file)
            except BaseException:
                self._return(files)
                raise
            return files

    def give_back(self, files: Sequence[MappedFile]) -> None:
        """End a loan; the maps stay open until their room is needed."""
        with self._lock:
            self._return(files)

    @contextmanager
    def borrow(self, requests: Sequence[Request]) -> Iterator[list[MappedFile]]:
        """Lend the maps of some files for the length of a `with` block."""
        files = self.take(requests)
        try:
            yield files
        finally:
            self.give_back(files)

    def _return(self, files: Sequence[MappedFile]) -> None:
        for file in files:
            file.borrowers -= 1
        while len(self._maps) > self.limit and self._close_idle():
            pass

    def _look(self) -> None:
        """Refuse files that became shorter; done now and then, as each look at a file is a system call."""
        for request, file in list(self._maps.items()):
            try:
                file.check()
            except StoreCorruptError:
                del self._maps[request]  # once the file is put back, it is mapped anew
                raise
        self._next_look = monotonic() + LOOK_SECONDS

    def _make_room(self) -> None:
        if len(self._maps) >= self.limit:
            self._close_idle()

    def _close_idle(self) -> bool:
        for request, file in self._maps.items():
            if not file.borrowers:
                del self._maps[request]
                return True
        return False


def map_file(request: Request) -> MappedFile:
    """Map a file or a part of it, after checking that it has the size that the manifest promises.

    What is in memory is handed out as if it were mapped.
    """
    if isinstance(request, MemoryRequest):
        return MappedFile(request.path, request.data, int(request.data.ctypes.data) if request.data.size else 0)
    with _open_checked(request) as descriptor:
        if request.wanted == 0:
            return MappedFile(request.path, np.empty(0, np.uint8), 0)
        before = request.begin % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(
            descriptor, before + request.wanted, access=mmap.ACCESS_READ, offset=request.begin - before
        )
        if request.wanted > LARGE_BYTES and hasattr(mmap, "MADV_RANDOM"):
            mapped.madvise(mmap.MADV_RANDOM)
        data = np.frombuffer(mapped, np.uint8, request.wanted, before)
    return MappedFile(request.path, data, int(data.ctypes.data), mapped, request.begin + request.wanted)


def read_range(request: Request, begin: int, size: int) -> Uint8Array:
    """Read bytes of a file without mapping it: what is read once should not stay in this process's memory."""
    if isinstance(request, MemoryRequest):
        return request.data[begin : begin + size]
    with _open_checked(request) as descriptor:
        data = os.pread(descriptor, size, request.begin + begin)
    if len(data) != size:
        raise StoreCorruptError(f"{request.path}: must have {request.bytes} bytes, got fewer; {WAY_OUT}")
    return np.frombuffer(data, np.uint8)


@contextmanager
def _open_checked(request: FileRequest) -> Iterator[int]:
    """Open a file that is what the manifest says: a plain file of the store, of that size."""
    try:
        # A part of a file lies in the store's own folder, which may be a link; a whole file in that of its shard.
        if request.size is None and request.path.parent.is_symlink():
            raise StoreCorruptError(f"{request.path.parent}: must be a folder of the store, got a link; {WAY_OUT}")
        descriptor = os.open(request.path, _FLAGS)
    except (FileNotFoundError, NotADirectoryError):
        raise StoreMissingError(
            f"{request.path}: must exist, as the manifest lists it, got nothing there; {WAY_OUT}"
        ) from None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise StoreCorruptError(f"{request.path}: must be a file of the store, got a link; {WAY_OUT}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise StoreCorruptError(f"{request.path}: must be a plain file, got another kind; {WAY_OUT}")
        if status.st_size != request.bytes:
            raise StoreCorruptError(
                f"{request.path}: must have {request.bytes} bytes, got {status.st_size}; {WAY_OUT}"
            )
        if request.begin + request.wanted > request.bytes:
            raise StoreCorruptError(
                f"{request.path}: a part must lie within its {request.bytes} bytes, "
                f"got {request.begin}:{request.begin + request.wanted}; {WAY_OUT}"
            )
        yield descriptor
    finally:
        os.close(descriptor)
