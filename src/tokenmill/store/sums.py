"""Page sums: the checksum of every 4 KiB of a shard's files, by which a part of a file is verified.

The manifest has one checksum per file, which verifies all of the file or nothing. `.sums/shard-00007.bin` has the
XXH3-64 of every page of the files of shard 7. It also has the checksums of these files, so that it fits no other
shard. The writer of a shard computes page sums from the bytes that it writes.
`docs/reference/store-format.md` has the layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from tokenmill.errors import StoreCorruptError
from tokenmill.store.files import page_sums, write_parts
from tokenmill.store.layout import (
    PAGE_BYTES,
    SUMS_FOLDER,
    WAY_OUT,
    Count,
    Manifest,
    ShardInfo,
)
from tokenmill.store.maps import FileRequest, MappedFile
from tokenmill.store.ranges import FileRanges, RangeRequest, Request, merged, read_range, sparse_map
from tokenmill.store.sections import read_index, write_footed, write_section
from tokenmill.store.store import file_request
from tokenmill.types import Uint8Array, Uint64Array

SUMS_FORMAT = "tokenmill-sums-2"


@dataclass(frozen=True, kw_only=True, slots=True)
class _SumsFooter:
    """Footer of a file of page sums, as JSON."""

    format: str
    page_bytes: int
    files: Mapping[str, tuple[Count, Count, str, str]]
    """File of the shard -> first byte, size and XXH3-128 of its sums, and the XXH3-128 of the file itself."""


def sums_file(shard: str) -> str:
    """Return the path of the page sums of a shard, below the folder of the store.

    >>> sums_file("shard-00007")
    '.sums/shard-00007.bin'
    """
    return f"{SUMS_FOLDER}/{shard}.bin"


def write_sums(file: Path, shard: ShardInfo, sums: Mapping[str, Uint64Array]) -> None:
    """Write the page sums of a shard, given for each of its files; only the name is not durable yet."""

    def write(out: BinaryIO) -> _SumsFooter:
        files = {}
        for name, info in shard.files.items():
            section = write_section(out, [sums[name].astype("<u8").view(np.uint8)])
            files[name] = (*section, info.xxh3)
        return _SumsFooter(format=SUMS_FORMAT, page_bytes=PAGE_BYTES, files=files)

    out = BytesIO()
    write_footed(out, write)
    write_parts(file, (out.getvalue(),))


def read_sums(file: Path, shard: ShardInfo) -> dict[str, Uint64Array]:
    """Return the page sums of each file of a shard, by its path below the folder of the store.

    Raises StoreCorruptError if they are missing, damaged, or made from other files than the manifest lists.
    """
    if not file.exists():
        raise missing_sums(file)
    index = read_index(file, _SumsFooter)
    if index is None or (index[1].format, index[1].page_bytes) != (SUMS_FORMAT, PAGE_BYTES):
        raise _bad_sums(file, "damaged page sums")
    data, footer = index[0].data, index[1]
    if data.size != max((begin + size for begin, size, _, _ in footer.files.values()), default=0):
        raise _bad_sums(file, "damaged page sums")
    sums: dict[str, Uint64Array] = {}
    for name, info in shard.files.items():
        begin, sums_bytes, checksum, of = footer.files.get(name, (0, 0, "", ""))
        section = data[begin : begin + sums_bytes]
        if of != info.xxh3:
            raise _bad_sums(file, f"page sums of another {name}")
        if (
            section.size != -(-info.bytes // PAGE_BYTES) * 8
            or xxhash.xxh3_128_hexdigest(section.tobytes()) != checksum
        ):
            raise _bad_sums(file, f"damaged page sums of {name}")
        sums[f"{shard.name}/{name}"] = section.view("<u8")
    return sums


def wrong_page(sums: Uint64Array, begin: int, data: Uint8Array | bytes) -> int | None:
    """Return the first page of some bytes of a file that differs from its sum; None if all are right.

    `begin` is the place of the bytes in the file, at the start of a page.
    """
    first, extra = divmod(begin, PAGE_BYTES)
    assert not extra
    actual = page_sums(data)
    expected = sums[first : first + len(actual)].tolist()
    wrong = (page for page, pair in enumerate(zip(actual, expected, strict=True), first) if pair[0] != pair[1])
    return next(wrong, None)


def missing_sums(file: object) -> StoreCorruptError:
    """Return the error of page sums that do not exist."""
    return StoreCorruptError(f"{file}: page sums not found; {WAY_OUT}, or set verify_pages = false")


def _bad_sums(file: Path, problem: str) -> StoreCorruptError:
    return StoreCorruptError(f"{file}: {problem}; {WAY_OUT}")


# Pages of files on disk, verified when they are read: bit rot in the middle of a run gives no wrong token.
# Pages are copied into memory of this process first, so the bytes that are verified are the bytes that are used.


@dataclass(frozen=True, slots=True)
class _Ready:
    """Ranges that have been read."""

    files: list[MappedFile]
    is_here: bool = True

    def wait(self) -> list[MappedFile]:
        return self.files

    def release(self) -> None:
        self.files.clear()


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedFiles:
    """The files of a store on disk, each page of which is verified when it is read."""

    folder: Path
    manifest: Manifest
    _sums: dict[str, Uint64Array] = field(default_factory=dict)
    """Page sums of the files that were read so far."""

    def request(self, shard: int, name: str) -> Request:
        """Return the request for a file of a shard. An index is verified as a whole before its first use."""
        info = self.manifest.shards[shard]
        request = file_request(self.folder, info, name)
        if request.xxh3 is not None:
            return request
        return RangeRequest(str(request.path), self, f"{info.name}/{name}", request.bytes)

    def begin(self, ranges: Sequence[FileRanges], *, ahead: bool) -> _Ready:  # noqa: ARG002 - a disk is not waited for
        """Read ranges of some files, in whole pages, and verify them."""
        files = []
        for item in ranges:
            if item.to_mirror:
                continue
            request = item.file
            sums = self._sums_of(request.name)
            begins, ends = merged(item.begins, item.ends, PAGE_BYTES, request.bytes)
            mapped = sparse_map(request.path, request.bytes)
            whole = FileRequest(self.folder / request.name, request.bytes)
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
                data = read_range(whole, begin, end - begin)
                page = wrong_page(sums, begin, data)
                if page is not None:
                    raise StoreCorruptError(
                        f"{request.path}: bytes {begin}:{end} do not match their checksums, first in page {page}; "
                        f"{WAY_OUT}"
                    )
                mapped.data[begin:end] = data
            files.append(mapped)
        return _Ready(files)

    def _sums_of(self, name: str) -> Uint64Array:
        if name not in self._sums:
            folder = name.partition("/")[0]
            shard = next(shard for shard in self.manifest.shards if shard.name == folder)
            self._sums.update(read_sums(self.folder / sums_file(shard.name), shard))
        return self._sums[name]
