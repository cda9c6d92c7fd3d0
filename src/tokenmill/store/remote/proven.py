"""Local files of which every page is proven when it is read: bit rot in the middle of a run gives no wrong token.

Pages are copied into memory of this process before they are proven, so that what is proven is what is used.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from tokenmill.errors import StoreCorruptError
from tokenmill.store.layout import (
    PAGE_BYTES,
    WAY_OUT,
    Manifest,
    axes_of,
    index_file,
)
from tokenmill.store.maps import FileRequest, MappedFile, RangeRequest, Ranges, Request, map_file, read_range
from tokenmill.store.remote.files import merged, part_of, sparse_map
from tokenmill.store.remote.sums import PageSums, read_sums, sums_file


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
    manifest: Manifest
    _sums: dict[str, PageSums | None] = field(default_factory=dict)

    def request(self, shard: int, name: str) -> Request:
        """Return where a file of a shard is; an index is proven as a whole, when it is first asked for."""
        info = self.manifest.shards[shard]
        part = info.files[name]
        place = f"{info.name}/{name}" if info.container is None else info.name
        size = part.bytes if info.container is None else info.container.bytes
        if name not in {index_file(axis) for axis in axes_of(self.manifest.kind, self.manifest.keys)}:
            return RangeRequest(str(self.folder / place), self, place, size, part.begin, part.bytes)
        whole = None if info.container is None else part.bytes
        request = FileRequest(self.folder / place, size, part.begin, whole)
        checksum = xxhash.xxh3_128_hexdigest(map_file(request).data.data)
        if checksum != part.xxh3:
            raise StoreCorruptError(f"{request.path}: checksum must be {part.xxh3}, got {checksum}; {WAY_OUT}")
        return request

    def begin(self, ranges: Sequence[Ranges], *, ahead: bool) -> _Ready:  # noqa: ARG002 - a disk is not waited for
        """Read ranges of some files, in whole pages, and prove them."""
        files = []
        for item in ranges:
            request = item.request
            proof = self._sums_of(request.name)
            begins, ends = merged(item.begins + request.begin, item.ends + request.begin, PAGE_BYTES, request.bytes)
            mapped = sparse_map(request.path, request.bytes)
            whole = FileRequest(self.folder / request.name, request.bytes)
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
                data = read_range(whole, begin, end - begin)
                page = proof.prover(begin)(data)
                if page is not None:
                    raise StoreCorruptError(
                        f"{request.path}: bytes {begin}:{end} must be what their checksums say, got others in page "
                        f"{page}; {WAY_OUT}"
                    )
                mapped.data[begin:end] = data
            files.append(part_of(mapped, request))
        return _Ready(files)

    def _sums_of(self, name: str) -> PageSums:
        if name not in self._sums:
            number = {shard.name: shard for shard in self.manifest.shards}
            shard = number[name.partition(os.sep)[0]]
            self._sums.update(read_sums(self.folder / sums_file(shard.name), shard))
        found = self._sums[name]
        assert found is not None
        return found
