"""Files in memory: mapped one by one, a bounded number at a time, and shared by all stores of a run."""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import xxhash

from tokenmill.errors import StoreCorruptError, StoreFileMissingError
from tokenmill.store import layout
from tokenmill.store.layout import WAY_OUT
from tokenmill.types import Uint8Array

if TYPE_CHECKING:
    from tokenmill.store.ranges import Request

MAX_MAPS = 1024
"""Enough for a store of 256 GiB of text: rows come from anywhere, and mapping files again takes much longer than
reading them (benchmarks/engines.py --shards). A map takes address space, no memory and no descriptor."""
LARGE_BYTES = 1 << 28
"""Size above which the read-ahead of the kernel is disabled. Rows are read in random order, and read-ahead would
read and hold many times the bytes that they need."""
_BLOCK_BYTES = 1 << 20
"""Bytes that are read and hashed at a time."""


@dataclass(eq=False, slots=True)
class MappedFile:
    """One file in memory, read-only; stays mapped while this object lives."""

    path: Path | str
    data: Uint8Array
    address: int
    """Where `data` starts; 0 for an empty file."""
    mapping: mmap.mmap | None = None
    """What the system knows of the map; None for what is in memory or empty."""
    end: int = 0
    """How many bytes the file must keep."""

    def check(self) -> None:
        """Raise if the file has become shorter: the last page of a truncated file reads as zeros.

        Call it after reading, too. Reading a page that is gone ends the process with SIGBUS.
        """
        if self.mapping is None:
            return
        size = self.mapping.size()
        if size < self.end:
            raise StoreCorruptError(
                f"{self.path}: must keep its {self.end} bytes while it is read, got {size}; {WAY_OUT}"
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
    xxh3: str | None = None
    """Checksum of these bytes, verified before their first use: an index has one, as a flipped byte in it changes
    which tokens a batch has. None: the file is too large, and page sums verify it where that is wanted."""
    way_out: str = WAY_OUT
    """How to repair the file if the checksum is another."""

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


LocalRequest: TypeAlias = FileRequest | MemoryRequest


class MapCache:
    """The most recently used maps, at most `limit`; any number of threads may use it.

    A file stays mapped while something refers to its map. So an evicted map stays valid for its readers, and more
    than `limit` maps are open only while readers refer to more.
    """

    def __init__(self, limit: int | None = None) -> None:
        limit = MAX_MAPS if limit is None else limit
        assert limit >= 2
        self.limit = limit
        self._maps: OrderedDict[FileRequest, MappedFile] = OrderedDict()
        self._verified: set[FileRequest] = set()
        """Files whose checksum was compared; a map that is closed and opened again is not read through again."""
        self._lock = threading.Lock()

    def renew_lock(self) -> None:
        """Take a new lock after a fork: a thread that does not exist in this process may hold the old one."""
        self._lock = threading.Lock()

    def open(self, requests: Sequence[Request]) -> list[MappedFile]:
        """Return the maps of some files, in the order of the requests.

        Refer to the maps until the last read, and call `check` after it.
        """
        with self._lock:
            return [self._open(request) for request in requests]

    def _open(self, request: Request) -> MappedFile:
        if not isinstance(request, FileRequest):
            return map_file(request)
        file = self._maps.get(request)
        if file is not None:
            self._check(file)
            self._maps.move_to_end(request)
            return file
        self._verify(request)
        file = map_file(request)
        while len(self._maps) >= self.limit:
            self._maps.popitem(last=False)
        self._maps[request] = file
        return file

    def verify(self, request: Request) -> None:
        """Raise if a file has another checksum than its request; each file is read through once per process."""
        if isinstance(request, FileRequest) and request.xxh3 is not None:
            with self._lock:
                self._verify(request)

    def _verify(self, request: FileRequest) -> None:
        if request.xxh3 is not None and request not in self._verified:
            verify_checksum(request)
            self._verified.add(request)

    def check(self, files: Iterable[MappedFile]) -> None:
        """Raise if a file was truncated since it was mapped. Such a file is mapped again once it is restored."""
        with self._lock:
            for file in files:
                self._check(file)

    def _check(self, file: MappedFile) -> None:
        try:
            file.check()
        except StoreCorruptError:
            for request in [request for request, mapped in self._maps.items() if mapped is file]:
                del self._maps[request]
                self._verified.discard(request)
            raise


def map_file(request: Request) -> MappedFile:
    """Map a file or a part of it, after checking that it has the size that the manifest promises.

    What is in memory is handed out as if it were mapped.
    """
    if isinstance(request, MemoryRequest):
        return MappedFile(request.path, request.data, int(request.data.ctypes.data) if request.data.size else 0)
    assert isinstance(request, FileRequest), "ranges are read by `in_memory`"
    with _open_checked(request) as descriptor:
        if request.wanted == 0:
            return MappedFile(request.path, np.empty(0, np.uint8), 0)
        before = request.begin % mmap.ALLOCATIONGRANULARITY
        try:
            mapped = mmap.mmap(
                descriptor, before + request.wanted, access=mmap.ACCESS_READ, offset=request.begin - before
            )
        except ValueError:  # cut since its size was checked
            raise StoreCorruptError(
                f"{request.path}: must keep its {request.bytes} bytes while it is read, got cut; {WAY_OUT}"
            ) from None
        if request.wanted > LARGE_BYTES and hasattr(mmap, "MADV_RANDOM"):
            mapped.madvise(mmap.MADV_RANDOM)
        data = np.frombuffer(mapped, np.uint8, request.wanted, before)
    return MappedFile(request.path, data, int(data.ctypes.data), mapped, request.begin + request.wanted)


def read_file(request: LocalRequest, begin: int, size: int) -> Uint8Array:
    """Read bytes of a file without mapping it: what is read once should not stay in this process's memory."""
    if isinstance(request, MemoryRequest):
        return request.data[begin : begin + size]
    data = np.empty(size, np.uint8)
    with _open_checked(request) as descriptor:
        filled = 0
        while filled < size:  # the system reads at most 2 GB at a time
            place = request.begin + begin + filled
            if hasattr(os, "preadv"):
                count = os.preadv(descriptor, [data[filled:].data], place)
            else:  # on Windows
                part = layout.read_at(descriptor, min(size - filled, _BLOCK_BYTES), place)
                count = len(part)
                data[filled : filled + count] = np.frombuffer(part, np.uint8)
            if count == 0:
                raise StoreCorruptError(f"{request.path}: must have {request.bytes} bytes, got fewer; {WAY_OUT}")
            filled += count
    return data


def verify_checksum(request: FileRequest) -> None:
    """Read a file through, and raise if its checksum is not the one that it must have."""
    state = xxhash.xxh3_128()
    for begin in range(0, request.wanted, _BLOCK_BYTES):
        state.update(read_file(request, begin, min(_BLOCK_BYTES, request.wanted - begin)).data)
    if state.hexdigest() != request.xxh3:
        raise StoreCorruptError(
            f"{request.path}: checksum must be {request.xxh3}, got {state.hexdigest()}; {request.way_out}"
        )


@contextmanager
def _open_checked(request: FileRequest) -> Iterator[int]:
    """Open a file that is what the manifest says: a plain file of the store, of that size."""
    try:
        # A part of a file lies in the store's own folder, which may be a link; a whole file in that of its shard.
        if request.size is None and request.path.parent.is_symlink():
            raise StoreCorruptError(f"{request.path.parent}: must be a folder of the store, got a link; {WAY_OUT}")
        descriptor, size = layout.open_plain(request.path)
    except (FileNotFoundError, NotADirectoryError):
        raise StoreFileMissingError(
            f"{request.path}: must exist, as the manifest lists it, got nothing there; {WAY_OUT}"
        ) from None
    try:
        if size != request.bytes:
            raise StoreCorruptError(f"{request.path}: must have {request.bytes} bytes, got {size}; {WAY_OUT}")
        if request.begin + request.wanted > request.bytes:
            raise StoreCorruptError(
                f"{request.path}: a part must lie within its {request.bytes} bytes, "
                f"got {request.begin}:{request.begin + request.wanted}; {WAY_OUT}"
            )
        yield descriptor
    finally:
        os.close(descriptor)
