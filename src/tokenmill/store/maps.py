"""Files in memory: a bounded number of maps that all stores of a run share.

Of what cannot be mapped, ranges are brought into memory of the file's size, of which only the pages that were
written to take room. So a span has an address as it has one in a local file, and kernels see no difference.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np

from tokenmill.errors import StoreCorruptError, StoreMissingError
from tokenmill.faults import forget, num_faults, watch
from tokenmill.store.layout import WAY_OUT, open_plain
from tokenmill.types import Int64Array, Uint8Array

MAX_MAPS = 1024
"""Enough for a store of 256 GiB of text: rows come from anywhere, and to map files anew for them takes much longer
than to read them (benchmarks/engines.py --shards). A map takes address space, no memory and no descriptor."""
LARGE_BYTES = 1 << 28
"""Of a larger file only the pages that are used are read and mapped, not their neighbours as well: rows are read in
random order, and reading ahead would read and hold many times what they need."""
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


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
    watched: int | None = None
    """Where the pages are counted that were missing when they were read."""
    borrowers: int = field(default=0)

    def check(self) -> None:
        """Refuse what was read of a file that became shorter meanwhile: zeros stand where bytes are gone.

        To be called after reading. Where missing pages cannot be watched, reading them ends the process.
        """
        if self.mapping is None:
            return
        size = self.mapping.size()
        if size < self.end or num_faults(self.watched):
            raise StoreCorruptError(
                f"{self.path}: must keep its {self.end} bytes while it is read, got {size}"
                f"{' after it was cut' if size >= self.end else ''}; {WAY_OUT}"
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


class Loan(Protocol):
    """Ranges of files that are on their way into memory."""

    @property
    def is_here(self) -> bool:
        """Whether all of them have arrived."""

    def wait(self) -> Sequence[MappedFile]:
        """Return the files once all ranges are there; between the ranges they hold nothing."""

    def release(self) -> None:
        """Let go of the memory, or of what is still on its way."""


class RangeReader(Protocol):
    """Where files are that are not mapped but read by ranges: object storage, or a disk that is not trusted."""

    def begin(self, ranges: Sequence[Ranges], *, ahead: bool) -> Loan:
        """Begin to read ranges of some files; those that are `ahead` of training wait for room in memory."""


@dataclass(frozen=True, eq=False, slots=True)
class RangeRequest:
    """A file, or a part of one, of which only ranges can be had."""

    path: str
    """Its address, for messages."""
    reader: RangeReader
    name: str
    """By which the reader knows the file."""
    bytes: int
    """Size of the whole file."""
    begin: int
    wanted: int
    """How many bytes from `begin` on the request is for."""


@dataclass(frozen=True, eq=False, slots=True)
class Ranges:
    """What is wanted of a file."""

    request: RangeRequest
    begins: Int64Array
    """First byte of each range, counted from where the request begins."""
    ends: Int64Array
    """End of each range, exclusive."""
    next_use: Callable[[Int64Array], Int64Array] | None = None
    """First bytes of pages -> the step at which the run needs each page again; None: nobody knows."""
    around: tuple[Int64Array, Int64Array] | None = None
    """Ranges around these, begins and ends, all of which the run soon needs: a mirror brings them whole."""


Request: TypeAlias = FileRequest | MemoryRequest | RangeRequest


class MapCache:
    """Keeps the most recently used maps, at most `limit` with those in use, for any number of threads.

    Maps are lent, so that none is closed under a reader. Idle ones make room for new ones. The limit
    is passed only while the borrowers of one moment need more than that together: waiting for one
    another could wait for ever.
    """

    def __init__(self, limit: int | None = None) -> None:
        limit = MAX_MAPS if limit is None else limit
        assert limit >= 2
        self.limit = limit
        self._maps: OrderedDict[FileRequest, MappedFile] = OrderedDict()
        self._lock = threading.Lock()

    def renew_lock(self) -> None:
        """Take a new lock, in a process that was forked: a thread that is not here may hold the old one."""
        self._lock = threading.Lock()

    def take(self, requests: Sequence[Request]) -> list[MappedFile]:
        """Lend the maps of some files, in the order asked for, until they are given back."""
        with self._lock:
            files: list[MappedFile] = []
            try:
                for request in requests:
                    assert not isinstance(request, RangeRequest), "its ranges are borrowed by `lent`"
                    if isinstance(request, MemoryRequest):
                        files.append(map_file(request))
                        files[-1].borrowers += 1
                        continue
                    file = self._maps.get(request)
                    if file is None:
                        if len(self._maps) >= self.limit:
                            self._close_idle()
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
        """Lend the maps of some files for the length of a `with` block; what was read of a cut one is refused."""
        files = self.take(requests)
        try:
            yield files
            for file in files:
                self.check(file)
        finally:
            self.give_back(files)

    def check(self, file: MappedFile) -> None:
        """Refuse what was read of a file that was cut; once it is put back, it is mapped anew."""
        try:
            file.check()
        except StoreCorruptError:
            with self._lock:
                for request in [request for request, mapped in self._maps.items() if mapped is file]:
                    del self._maps[request]
            raise

    def _return(self, files: Sequence[MappedFile]) -> None:
        for file in files:
            file.borrowers -= 1
        while len(self._maps) > self.limit and self._close_idle():
            pass

    def _close_idle(self) -> bool:
        """Close the map that was used longest ago and that nobody uses now; False where there is none."""
        for request, file in self._maps.items():
            if not file.borrowers:
                del self._maps[request]
                return True
        return False


def map_file(request: Request) -> MappedFile:
    """Map a file or a part of it, after checking that it has the size that the manifest promises.

    What is in memory is handed out as if it were mapped.
    """
    assert not isinstance(request, RangeRequest), "its ranges are borrowed by `lent`"
    if isinstance(request, MemoryRequest):
        return MappedFile(request.path, request.data, int(request.data.ctypes.data) if request.data.size else 0)
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
    address = int(data.ctypes.data)
    place = watch(address - before, len(mapped))
    weakref.finalize(mapped, forget, place).atexit = False
    return MappedFile(request.path, data, address, mapped, request.begin + request.wanted, place)


def read_range(request: Request, begin: int, size: int) -> Uint8Array:
    """Read bytes of a file without mapping it: what is read once should not stay in this process's memory."""
    if isinstance(request, MemoryRequest):
        return request.data[begin : begin + size]
    if isinstance(request, RangeRequest):
        with lent(MapCache(), [Ranges(request, np.array([begin]), np.array([begin + size]))]) as (file,):
            return file.data[begin : begin + size].copy()
    data = np.empty(size, np.uint8)
    with _open_checked(request) as descriptor:
        filled = 0
        while filled < size:  # the system reads at most 2 GB at a time
            count = os.preadv(descriptor, [data[filled:].data], request.begin + begin + filled)
            if count == 0:
                raise StoreCorruptError(f"{request.path}: must have {request.bytes} bytes, got fewer; {WAY_OUT}")
            filled += count
    return data


@contextmanager
def lent(maps: MapCache, ranges: Sequence[Ranges | Request]) -> Iterator[list[MappedFile]]:
    """Lend files for the length of a `with` block: whole ones by their maps, of others the ranges."""
    whole = [item for item in ranges if not isinstance(item, Ranges)]
    loans = [item.request.reader.begin([item], ahead=False) for item in ranges if isinstance(item, Ranges)]
    try:
        with maps.borrow(whole) as mapped:
            files, parts = iter(mapped), iter(loans)
            yield [next(parts).wait()[0] if isinstance(item, Ranges) else next(files) for item in ranges]
    finally:
        for loan in loans:
            loan.release()


@contextmanager
def _open_checked(request: FileRequest) -> Iterator[int]:
    """Open a file that is what the manifest says: a plain file of the store, of that size."""
    try:
        # A part of a file lies in the store's own folder, which may be a link; a whole file in that of its shard.
        if request.size is None and request.path.parent.is_symlink():
            raise StoreCorruptError(f"{request.path.parent}: must be a folder of the store, got a link; {WAY_OUT}")
        descriptor, size = open_plain(request.path)
    except (FileNotFoundError, NotADirectoryError):
        raise StoreMissingError(
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


# Ranges in memory of the file's size.


def sparse_map(path: str, size: int) -> MappedFile:
    """Return memory of a file's size, of which nothing is taken before it is written to."""
    if not size:
        return MappedFile(path, np.empty(0, np.uint8), 0)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    mapping = mmap.mmap(-1, size, flags=flags)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):
            mapping.madvise(mmap.MADV_NOHUGEPAGE)  # or a page of 4 KiB would take 2 MiB
    data = np.frombuffer(mapping, np.uint8)
    return MappedFile(path, data, int(data.ctypes.data))


def merged(begins: Int64Array, ends: Int64Array, page: int, size: int) -> tuple[Int64Array, Int64Array]:
    """Return ranges in ascending order, widened to whole pages; those that touch or overlap become one, gaps stay.

    >>> [part.tolist() for part in merged(np.array([8, 0, 4]), np.array([9, 4, 6]), 1, 100)]
    [[0, 8], [6, 9]]
    """
    kept = ends > begins
    begins, ends = begins[kept] // page * page, np.minimum(-(-ends[kept] // page) * page, size)
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    heads = np.flatnonzero(np.concatenate([[True], begins[1:] > ends[:-1]])[: begins.size])
    return begins[heads], ends[np.append(heads[1:], begins.size) - 1] if begins.size else ends


def part_of(mapped: MappedFile, request: RangeRequest) -> MappedFile:
    """Return the part of a file that a request is for, as if it were mapped alone."""
    data = mapped.data[request.begin : request.begin + request.wanted]
    return MappedFile(request.path, data, mapped.address + request.begin if data.size else 0)
