"""Checksums of pages, by which a part of a file can be proven: `.sums/shard-00000.bin` beside a shard.

The manifest has one checksum a file, which proves all of it or nothing. A sums file has the XXH3-64 of every 4 KiB
of each file of its shard, and the checksums of the whole files that they were made of, so that it fits no others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from tokenmill.errors import StoreCorruptError
from tokenmill.store import layout
from tokenmill.store.durable import make_folder, read_index, write_index, write_section
from tokenmill.store.reader import (
    FileRequest,
    MappedFile,
    RangeRequest,
    Ranges,
    Request,
    map_file,
    merged,
    part_of,
    read_range,
    sparse_map,
)
from tokenmill.types import Uint8Array, Uint64Array

FORMAT = "tokenmill-sums-1"


def page_sums(data: Uint8Array | bytes) -> list[int]:
    """Return the checksum of each page of some bytes; the last page may be shorter."""
    view = memoryview(data)  # type: ignore[arg-type]
    pages = range(0, len(view), layout.PAGE_BYTES)
    return [xxhash.xxh3_64_intdigest(view[begin : begin + layout.PAGE_BYTES]) for begin in pages]


def wrong_page(sums: Uint64Array, begin: int, data: Uint8Array | bytes) -> int | None:
    """Return the first page of some bytes of a file that is not what its sums say; None where all are right.

    `begin` is where the bytes begin in the file: at a page.
    """
    first, extra = divmod(begin, layout.PAGE_BYTES)
    assert not extra
    actual = page_sums(data)
    expected = sums[first : first + len(actual)].tolist()
    wrong = (page for page, pair in enumerate(zip(actual, expected, strict=True), first) if pair[0] != pair[1])
    return next(wrong, None)


def sums_file(shard: str) -> str:
    """Return the name of the file with the page sums of a shard.

    >>> sums_file("shard-00007")
    '.sums/shard-00007.bin'
    """
    return f"{layout.SUMS_FOLDER}/{shard}.bin"


def files_of(shard: layout.ShardInfo) -> dict[str, tuple[int, str]]:
    """Return the size and checksum of each file of a shard, by its path in the store."""
    if shard.container is not None:
        return {shard.name: (shard.container.bytes, shard.container.xxh3)}
    return {f"{shard.name}/{name}": (info.bytes, info.xxh3) for name, info in shard.files.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Footer:
    """What stands at the end of a sums file, as JSON."""

    format: str
    page_bytes: int
    files: Mapping[str, tuple[layout.Count, layout.Count, str, str]]
    """File -> first byte and size of its sums, their XXH3-128, and the XXH3-128 of the file itself."""


def write_sums(store: Path, shard: layout.ShardInfo, sums: Mapping[str, Uint64Array]) -> Path:
    """Write the page sums of the files of a shard beside it."""

    def write(out: BinaryIO) -> _Footer:
        files = {}
        for name, (_, checksum) in files_of(shard).items():
            section = write_section(out, [sums[name].astype("<u8").view(np.uint8)])
            files[name] = (*section, checksum)
        return _Footer(format=FORMAT, page_bytes=layout.PAGE_BYTES, files=files)

    file = store / sums_file(shard.name)
    make_folder(file.parent)
    write_index(file, write)
    return file


def read_sums(file: Path, shard: layout.ShardInfo) -> dict[str, Uint64Array]:
    """Read the page sums of each file of a shard; those of other files than the manifest lists are refused."""
    index = read_index(file, _Footer)
    if index is None or (index[1].format, index[1].page_bytes) != (FORMAT, layout.PAGE_BYTES):
        raise _damaged(file, "a cut or changed one")
    data, footer = index[0].data, index[1]
    sums: dict[str, Uint64Array] = {}
    for name, (size, checksum) in files_of(shard).items():
        begin, sums_bytes, proof, of = footer.files.get(name, (0, 0, "", ""))
        section = data[begin : begin + sums_bytes]
        if of != checksum:
            raise _damaged(file, f"those of another {name}")
        if (
            section.size != -(-size // layout.PAGE_BYTES) * 8
            or xxhash.xxh3_128_hexdigest(section.tobytes()) != proof
        ):
            raise _damaged(file, f"other ones for {name}")
        sums[name] = section.view("<u8")
    return sums


def _damaged(file: Path, got: str) -> StoreCorruptError:
    return StoreCorruptError(
        f"{file}: must have the checksums of the pages of its shard, got {got}; delete it, and run "
        f"`tokenmill verify --add-page-sums`, or {layout.WAY_OUT}"
    )


# Files on disk that are proven when they are read: bit rot in the middle of a run gives no wrong token. Pages are
# copied into memory of this process before they are proven, so that what is proven is what is used.


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
class ProvenFiles:
    """The files of a store on disk that must have page sums."""

    folder: Path
    manifest: layout.Manifest
    _sums: dict[str, Uint64Array] = field(default_factory=dict)
    """Of each file of which ranges were read."""

    def request(self, shard: int, name: str) -> Request:
        """Return where a file of a shard is; an index is proven as a whole, when it is first asked for."""
        info = self.manifest.shards[shard]
        part = info.files[name]
        place = f"{info.name}/{name}" if info.container is None else info.name
        size = part.bytes if info.container is None else info.container.bytes
        if name not in {layout.index_file(axis) for axis in layout.axes_of(self.manifest.kind, self.manifest.keys)}:
            return RangeRequest(str(self.folder / place), self, place, size, part.begin, part.bytes)
        whole = None if info.container is None else part.bytes
        request = FileRequest(self.folder / place, size, part.begin, whole)
        checksum = xxhash.xxh3_128_hexdigest(map_file(request).data.data)
        if checksum != part.xxh3:
            raise StoreCorruptError(
                f"{request.path}: checksum must be {part.xxh3}, got {checksum}; {layout.WAY_OUT}"
            )
        return request

    def begin(self, ranges: Sequence[Ranges], *, ahead: bool) -> _Ready:  # noqa: ARG002 - a disk is not waited for
        """Read ranges of some files, in whole pages, and prove them."""
        files = []
        for item in ranges:
            request = item.request
            sums = self._sums_of(request.name)
            begins, ends = merged(
                item.begins + request.begin, item.ends + request.begin, layout.PAGE_BYTES, request.bytes
            )
            mapped = sparse_map(request.path, request.bytes)
            whole = FileRequest(self.folder / request.name, request.bytes)
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
                data = read_range(whole, begin, end - begin)
                page = wrong_page(sums, begin, data)
                if page is not None:
                    raise StoreCorruptError(
                        f"{request.path}: bytes {begin}:{end} must be what their checksums say, got others in page "
                        f"{page}; {layout.WAY_OUT}"
                    )
                mapped.data[begin:end] = data
            files.append(part_of(mapped, request))
        return _Ready(files)

    def _sums_of(self, name: str) -> Uint64Array:
        if name not in self._sums:
            folder = name.partition("/")[0]
            shard = next(shard for shard in self.manifest.shards if shard.name == folder)
            self._sums.update(read_sums(self.folder / sums_file(shard.name), shard))
        return self._sums[name]
