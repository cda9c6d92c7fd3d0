"""Checksums of pages, by which a part of a file can be proven: `.sums/shard-00000.bin` beside a shard.

The manifest has one checksum a file, which proves all of it or nothing. A sums file has the XXH3-64 of every 4 KiB
of each file of its shard, and the checksums of the whole files that they were made of, so that it fits no others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from tokenmill.errors import StoreCorruptError
from tokenmill.store import layout, maps
from tokenmill.store.durable import make_folder, read_index, write_index, write_section
from tokenmill.types import Uint8Array, Uint64Array

FORMAT = "tokenmill-sums-1"


@dataclass(frozen=True, kw_only=True, slots=True)
class PageSums:
    """The checksum of each page of a file; the last page may be shorter."""

    sums: Uint64Array

    def prover(self, begin: int) -> Callable[[Uint8Array | bytes], int | None]:
        """Return what gives the first page of some bytes that is not right, if any; `begin` is where they begin."""
        assert begin % layout.PAGE_BYTES == 0

        def prove(data: Uint8Array | bytes) -> int | None:
            view = memoryview(data)  # type: ignore[arg-type]
            first = begin // layout.PAGE_BYTES
            expected = self.sums[first : first - (-len(view) // layout.PAGE_BYTES)].tolist()
            for number, known in enumerate(expected):
                if (
                    xxhash.xxh3_64_intdigest(view[number * layout.PAGE_BYTES : (number + 1) * layout.PAGE_BYTES])
                    != known
                ):
                    return first + number
            return None

        return prove


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


class SumsBuilder:
    """Computes the page sums of a file that is given in blocks, each of whole pages but the last."""

    def __init__(self) -> None:
        self._parts: list[Uint64Array] = []

    def update(self, block: Uint8Array) -> None:
        """Add the next block."""
        view = memoryview(block)  # type: ignore[arg-type]
        pages = range(0, len(view), layout.PAGE_BYTES)
        sums = [xxhash.xxh3_64_intdigest(view[at : at + layout.PAGE_BYTES]) for at in pages]
        self._parts.append(np.array(sums, np.uint64))

    def result(self) -> Uint64Array:
        """Return the sums of all blocks."""
        return np.concatenate([*self._parts, np.empty(0, np.uint64)])


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


def read_sums(file: Path, shard: layout.ShardInfo) -> dict[str, PageSums | None]:
    """Read the page sums of a shard; those of other files than the manifest lists are refused."""
    kept = read_index(file, _Footer)
    if kept is None or (kept[1].format, kept[1].page_bytes) != (FORMAT, layout.PAGE_BYTES):
        raise _damaged(file, "a cut or changed one")
    data, footer = kept[0].data, kept[1]
    found: dict[str, PageSums | None] = {}
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
        found[name] = PageSums(sums=section.view("<u8"))
    return found


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

    files: list[maps.MappedFile]
    is_here: bool = True

    def wait(self) -> list[maps.MappedFile]:
        return self.files

    def release(self) -> None:
        self.files.clear()


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvenFiles:
    """The files of a store on disk that must have page sums."""

    folder: Path
    manifest: layout.Manifest
    _sums: dict[str, PageSums | None] = field(default_factory=dict)

    def request(self, shard: int, name: str) -> maps.Request:
        """Return where a file of a shard is; an index is proven as a whole, when it is first asked for."""
        info = self.manifest.shards[shard]
        part = info.files[name]
        place = f"{info.name}/{name}" if info.container is None else info.name
        size = part.bytes if info.container is None else info.container.bytes
        if name not in {layout.index_file(axis) for axis in layout.axes_of(self.manifest.kind, self.manifest.keys)}:
            return maps.RangeRequest(str(self.folder / place), self, place, size, part.begin, part.bytes)
        whole = None if info.container is None else part.bytes
        request = maps.FileRequest(self.folder / place, size, part.begin, whole)
        checksum = xxhash.xxh3_128_hexdigest(maps.map_file(request).data.data)
        if checksum != part.xxh3:
            raise StoreCorruptError(
                f"{request.path}: checksum must be {part.xxh3}, got {checksum}; {layout.WAY_OUT}"
            )
        return request

    def begin(self, ranges: Sequence[maps.Ranges], *, ahead: bool) -> _Ready:  # noqa: ARG002 - a disk is not waited for
        """Read ranges of some files, in whole pages, and prove them."""
        files = []
        for item in ranges:
            request = item.request
            proof = self._sums_of(request.name)
            begins, ends = maps.merged(
                item.begins + request.begin, item.ends + request.begin, layout.PAGE_BYTES, request.bytes
            )
            mapped = maps.sparse_map(request.path, request.bytes)
            whole = maps.FileRequest(self.folder / request.name, request.bytes)
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
                data = maps.read_range(whole, begin, end - begin)
                page = proof.prover(begin)(data)
                if page is not None:
                    raise StoreCorruptError(
                        f"{request.path}: bytes {begin}:{end} must be what their checksums say, got others in page "
                        f"{page}; {layout.WAY_OUT}"
                    )
                mapped.data[begin:end] = data
            files.append(maps.part_of(mapped, request))
        return _Ready(files)

    def _sums_of(self, name: str) -> PageSums:
        if name not in self._sums:
            number = {shard.name: shard for shard in self.manifest.shards}
            shard = number[name.partition(os.sep)[0]]
            self._sums.update(read_sums(self.folder / sums_file(shard.name), shard))
        found = self._sums[name]
        assert found is not None
        return found
