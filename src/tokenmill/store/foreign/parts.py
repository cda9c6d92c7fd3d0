"""The nouns that all readers of foreign files speak in: flat arrays, and parts made of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from tokenmill.errors import StoreCorruptError
from tokenmill.store.maps import FileRequest, map_file

if TYPE_CHECKING:
    import numpy.typing as npt

BLOCK = 1 << 22
"""Numbers that are looked at together."""
SAMPLE_BLOCKS = 64
SAMPLE_BYTES = 4096
IMPORT = "convert it with `tokenmill import`"
MASKS = ("loss_mask", "chosen_mask", "rejected_mask")
"""Arrays of 0 and 1, one number a token."""


@dataclass(frozen=True, kw_only=True)
class Flat:
    """One array of a foreign file, in one dimension."""

    path: Path
    """The file itself, links resolved."""
    file_bytes: int
    begin: int
    """First byte of the array."""
    count: int
    dtype: np.dtype[Any]
    obstacle: str = ""
    """Why it cannot be mapped; empty if it can."""
    read: Callable[[int, int], npt.NDArray[Any]] | None = field(default=None, compare=False)
    """How to read numbers `begin` to `end` where mapping does not give them."""

    @property
    def bytes(self) -> int:
        """How many bytes the array has."""
        return self.count * self.dtype.itemsize

    @property
    def mapped(self) -> npt.NDArray[Any]:
        """The whole array, mapped anew: there may be more arrays than a process can map at once."""
        return map_file(FileRequest(self.path, self.file_bytes, self.begin, self.bytes)).data.view(self.dtype)

    def numbers(self, begin: int, end: int) -> npt.NDArray[Any]:
        """Return numbers `begin` to `end` (exclusive)."""
        return self.mapped[begin:end] if self.read is None else self.read(begin, end)

    def blocks(self) -> Iterator[npt.NDArray[Any]]:
        """Yield all numbers, a bounded number at a time."""
        for begin in range(0, self.count, BLOCK):
            yield self.numbers(begin, min(self.count, begin + BLOCK))

    @cached_property
    def sample(self) -> str:
        """Digest of up to 64 blocks of 4 KiB, evenly spread, the first and the last among them."""
        if self.read is not None:
            return sample_digest(self.path, 0, self.file_bytes)
        return sample_digest(self.path, self.begin, self.bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What becomes one shard: arrays of equal length on each axis, and where their documents end."""

    name: str
    """Path below the folder that was named."""
    arrays: Mapping[str, Flat]
    """Key -> array."""
    ends: Mapping[str, Callable[[], npt.NDArray[np.int64]]] = field(default_factory=dict)
    """Axis -> where each of its documents ends, ascending; an axis that is not here has no boundaries."""
    beside: tuple[Path, ...] = ()
    """Other files that say where documents end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a reader found."""

    kind: str
    parts: tuple[Part, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the files say of how they were made."""


def real_file(path: Path) -> tuple[Path, int]:
    """Return a file with its links resolved, and its size; data may be linked to, unlike files of our stores."""
    real = Path(os.path.realpath(path))
    if not real.is_file():
        raise StoreCorruptError(f"{path}: must be a plain file, got another kind or a broken link; restore it")
    return real, real.stat().st_size


def flat_of(path: Path, dtype: np.dtype[Any], *, begin: int = 0, count: int | None = None) -> Flat:
    """Describe an array that fills a file from `begin` on; `count` is what a header claims."""
    real, size = real_file(path)
    room = size - begin
    if room < 0 or room % dtype.itemsize or (count is not None and count * dtype.itemsize != room):
        claimed = f"{count} numbers" if count is not None else "whole numbers"
        raise StoreCorruptError(
            f"{path}: must hold {claimed} of {dtype.name} behind {begin} bytes of header, "
            f"got {room} bytes there; copy the file again, or fix dtype"
        )
    obstacle = "its numbers are big-endian" if dtype.byteorder == ">" else ""
    return Flat(
        path=real, file_bytes=size, begin=begin, count=room // dtype.itemsize, dtype=dtype, obstacle=obstacle
    )


def sample_digest(path: Path, begin: int, size: int) -> str:
    """Digest up to 64 blocks of 4 KiB of a part of a file, evenly spread, the first and the last among them."""
    state = xxhash.xxh3_128(size.to_bytes(8, "little"))
    for place, data in sample_blocks(path, begin, size):
        state.update(place.to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def sample_blocks(path: Path, begin: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield (place, bytes) of the blocks of a sample, all of what is small; places are multiples of 8."""
    last = max(0, size - SAMPLE_BYTES)
    places = [last * i // (SAMPLE_BLOCKS - 1) & ~7 for i in range(SAMPLE_BLOCKS)]
    if size <= SAMPLE_BLOCKS * SAMPLE_BYTES:
        places = list(range(0, size, SAMPLE_BYTES))
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        for place in places:
            # The last block may begin up to 7 bytes early, so it is read to the end.
            wanted = size - place if place >= last else SAMPLE_BYTES
            yield place, os.pread(descriptor, wanted, begin + place)
    finally:
        os.close(descriptor)


def stored_dtype(key: str, flat: Flat) -> tuple[str, str]:
    """Return the dtype under which a key is offered, and why it cannot be mapped under it, or nothing.

    A signed array is mapped as unsigned; that none of its numbers is negative is proven elsewhere.
    """
    kind, size = flat.dtype.kind, flat.dtype.itemsize
    if key in MASKS:
        return "|u1", flat.obstacle or ("" if size == 1 else "its mask has more than a byte a token")
    if kind not in "iu":
        return "", f"its ids are {flat.dtype.name}"
    if size > 4:
        return "", flat.obstacle or f"its ids are {flat.dtype.name}, 8 bytes each"
    dtype = {1: "|u1", 2: "<u2", 4: "<u4"}[size]
    if not flat.obstacle and flat.begin % size:
        return dtype, "its ids do not begin at a multiple of their size"
    return dtype, flat.obstacle
