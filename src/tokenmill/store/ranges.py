"""Ranges of files in memory: of what cannot be mapped as a whole, such as objects in object storage.

Ranges land at their own offsets in memory of the file's size, of which only the pages that are written take room.
So a span has an address as in a mapped file, and kernels see no difference.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from tokenmill.store.layout import PAGE_BYTES
from tokenmill.store.maps import LocalRequest, MapCache, MappedFile, read_file
from tokenmill.types import Int64Array, Uint8Array, Uint64Array, counted_from

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


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

    def begin(self, ranges: Sequence[FileRanges], *, ahead: bool) -> Loan:
        """Begin to read ranges of some files; those that are `ahead` of training wait for room in memory.

        The loan has the files in this order, without those that go to a mirror alone.
        """


@dataclass(frozen=True, eq=False, slots=True)
class RangeRequest:
    """A file that is not mapped but read by ranges."""

    path: str
    """Its address, for messages."""
    reader: RangeReader
    name: str
    """By which the reader knows the file."""
    bytes: int
    """Size of the file."""

    @property
    def wanted(self) -> int:
        """Size of the file."""
        return self.bytes


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class FileRanges:
    """Ranges of a file that are read into memory, and the memory."""

    file: RangeRequest
    begins: Int64Array
    """First byte of each range."""
    ends: Int64Array
    """End of each range, exclusive."""
    next_use: Callable[[Int64Array], Int64Array] | None = None
    """First bytes of pages -> step at which the run needs each page again; None if this is unknown."""
    to_mirror: bool = False
    """Download these ranges to a mirror alone, because the run soon reads all of them."""
    out: Uint8Array | None = None
    """Memory of the file's size, in which each byte has its own offset; the reader allocates it."""
    sums: Uint64Array | None = None
    """Page sums of the file; None if pages are not verified."""
    uses: Int64Array | None = None
    """Step at which each page is needed again."""

    @property
    def pages(self) -> Int64Array:
        """Numbers of all pages, in the order of the ranges."""
        first = self.begins // PAGE_BYTES
        return counted_from(first, -(-self.ends // PAGE_BYTES) - first)


Request: TypeAlias = LocalRequest | RangeRequest


@contextmanager
def in_memory(maps: MapCache, wanted: Sequence[FileRanges | Request]) -> Iterator[list[MappedFile]]:
    """Give files for the length of a `with` block: mapped whole, or with the ranges that were fetched."""
    whole = [item for item in wanted if not isinstance(item, FileRanges)]
    loans = [item.file.reader.begin([item], ahead=False) for item in wanted if isinstance(item, FileRanges)]
    try:
        mapped = maps.open(whole)
        files, parts = iter(mapped), iter(loans)
        yield [next(parts).wait()[0] if isinstance(item, FileRanges) else next(files) for item in wanted]
        maps.check(mapped)
    finally:
        for loan in loans:
            loan.release()


def read_range(request: Request, begin: int, size: int) -> Uint8Array:
    """Read bytes of a file without mapping it, wherever it is."""
    if not isinstance(request, RangeRequest):
        return read_file(request, begin, size)
    wanted = FileRanges(file=request, begins=np.array([begin]), ends=np.array([begin + size]))
    with in_memory(MapCache(), [wanted]) as (file,):
        return file.data[begin : begin + size].copy()


# Memory of the file's size.


def sparse_map(path: str, size: int) -> MappedFile:
    """Return memory of a file's size, of which nothing is taken before it is written to."""
    if not size:
        return MappedFile(path, np.empty(0, np.uint8), 0)
    if hasattr(mmap, "MAP_ANONYMOUS"):
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    else:  # on Windows
        mapping = mmap.mmap(-1, size)
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
