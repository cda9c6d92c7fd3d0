"""A bounded number of memory-mapped files, shared by all stores of a run."""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.errors import StoreCorruptError, StoreMissingError

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_MAPS = 64


@dataclass(eq=False, slots=True)
class MappedFile:
    """One file in memory, read-only; stays mapped while this object lives."""

    path: Path
    data: npt.NDArray[np.uint8]
    address: int
    """Where `data` starts; 0 for an empty file."""
    borrowers: int = field(default=0)


@dataclass(frozen=True, slots=True)
class FileRequest:
    """A file, and the size that the manifest promises."""

    path: Path
    bytes: int


class MapCache:
    """Keeps the most recently used maps, never more than `limit`, for any number of threads.

    Maps are lent for the length of a `with` block, so that none is closed under a reader, and a
    thread that needs more than are free waits for the others instead of going over the limit.
    """

    def __init__(self, limit: int = MAX_MAPS) -> None:
        assert limit >= 4
        self.limit = limit
        self._maps: OrderedDict[Path, MappedFile] = OrderedDict()
        self._changed = threading.Condition()

    @property
    def num_open(self) -> int:
        """How many files are mapped now."""
        return len(self._maps)

    @property
    def group_size(self) -> int:
        """How many files one borrower may ask for at once; half, so that two can always work."""
        return self.limit // 2

    @contextmanager
    def borrow(self, requests: Sequence[FileRequest]) -> Iterator[list[MappedFile]]:
        """Lend the maps of at most `group_size` files, in the order asked for."""
        files = self._take(requests)
        try:
            yield files
        finally:
            with self._changed:
                for file in files:
                    file.borrowers -= 1
                self._changed.notify_all()

    def _take(self, requests: Sequence[FileRequest]) -> list[MappedFile]:
        assert len(requests) <= self.group_size
        with self._changed:
            # All or nothing: holding some while waiting for others could wait for ever.
            while not self._make_room(requests):
                self._changed.wait()
            files = []
            for request in requests:
                file = self._maps.get(request.path)
                if file is None:
                    file = self._maps[request.path] = map_file(request)
                self._maps.move_to_end(request.path)
                files.append(file)
            for file in files:
                file.borrowers += 1
            return files

    def _make_room(self, requests: Sequence[FileRequest]) -> bool:
        wanted = {request.path for request in requests}
        missing = sum(path not in self._maps for path in wanted)
        surplus = len(self._maps) + missing - self.limit
        if surplus <= 0:
            return True
        idle = [path for path, file in self._maps.items() if not file.borrowers and path not in wanted]
        if len(idle) < surplus:
            return False
        for path in idle[:surplus]:
            del self._maps[path]
        return True


def map_file(request: FileRequest) -> MappedFile:
    """Map a whole file, after checking that it has the size that the manifest promises."""
    try:
        descriptor = os.open(request.path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        raise StoreMissingError(
            f"{request.path}: must exist, as the manifest lists it, got nothing there; "
            "copy the store again from where it is intact, or prepare it again"
        ) from None
    try:
        size = os.fstat(descriptor).st_size
        if size != request.bytes:
            raise StoreCorruptError(
                f"{request.path}: must have {request.bytes} bytes, got {size}; "
                "copy the store again from where it is intact, or prepare it again"
            )
        if size == 0:
            return MappedFile(request.path, np.empty(0, np.uint8), 0)
        data = np.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ), np.uint8)
    finally:
        os.close(descriptor)
    return MappedFile(request.path, data, int(data.ctypes.data))
