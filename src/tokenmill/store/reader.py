"""Reading a store: any run of tokens, any document, across shards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from tokenmill.errors import PlanError, StoreCorruptError, StoreError, nearest
from tokenmill.store.layout import DOCUMENTS, OFFSET_DTYPE, Manifest, key_file, read_manifest
from tokenmill.store.maps import FileRequest, MapCache, read_range

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """An open store: the manifest in memory, everything else read when asked for.

    Opening costs one small file whatever the number of shards, and memory grows with shards, never
    with documents. All reads return fresh arrays, so no map is kept open by a caller.
    """

    path: Path
    manifest: Manifest
    maps: MapCache
    token_begins: npt.NDArray[np.int64]
    """First token of each shard in the whole stream, and the end of the last."""
    document_begins: npt.NDArray[np.int64]
    """First document of each shard, and the end of the last."""
    fingerprint: str
    """Digest of what the tokens are, computed once."""
    _requests: dict[tuple[int, str], FileRequest] = field(default_factory=dict)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return int(self.document_begins[-1])

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return int(self.token_begins[-1])

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self.manifest.shards)

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the arrays; the first holds the token ids."""
        return tuple(self.manifest.keys)

    def dtype(self, key: str) -> np.dtype[Any]:
        """Return the dtype of an array on disk."""
        if key not in self.manifest.keys:
            raise StoreError(f"{self.path}: key must be one of the store's, got {key!r}; {nearest(key, self.keys)}")
        return np.dtype(self.manifest.keys[key])

    def file(self, shard: int, name: str) -> FileRequest:
        """Return where a file of a shard is, and the size it must have."""
        request = self._requests.get((shard, name))
        if request is None:
            info = self.manifest.shards[shard]
            request = FileRequest(self.path / info.name / name, info.files[name].bytes)
            self._requests[shard, name] = request
        return request

    @overload
    def fetch(self, begin: int, end: int, keys: str) -> npt.NDArray[Any]: ...
    @overload
    def fetch(self, begin: int, end: int, keys: list[str] | tuple[str, ...]) -> dict[str, npt.NDArray[Any]]: ...
    def fetch(
        self, begin: int, end: int, keys: str | list[str] | tuple[str, ...]
    ) -> npt.NDArray[Any] | dict[str, npt.NDArray[Any]]:
        """Return tokens `begin` to `end` (exclusive) of the whole stream, for one key or several."""
        if not 0 <= begin <= end <= self.num_tokens:
            raise PlanError(
                f"{self.path}: a range must lie within 0:{self.num_tokens}, got {begin}:{end}; shorten it"
            )
        if isinstance(keys, str):
            return self._fetch_key(begin, end, keys)
        return {key: self._fetch_key(begin, end, key) for key in keys}

    @overload
    def fetch_record(self, index: int, keys: str) -> npt.NDArray[Any]: ...
    @overload
    def fetch_record(self, index: int, keys: list[str] | tuple[str, ...]) -> dict[str, npt.NDArray[Any]]: ...
    def fetch_record(
        self, index: int, keys: str | list[str] | tuple[str, ...]
    ) -> npt.NDArray[Any] | dict[str, npt.NDArray[Any]]:
        """Return one document, for one key or several."""
        begin, end = self.document_bounds(index)
        return self.fetch(begin, end, keys)

    def document_bounds(self, document: int) -> tuple[int, int]:
        """Return where a document begins and ends (exclusive) in the whole stream."""
        offsets = self.document_offsets(document, document + 1)
        return int(offsets[0]), int(offsets[1])

    def document_offsets(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Return where documents `begin` to `end` (exclusive) start in the stream, and where the last one ends."""
        if not 0 <= begin < end <= self.num_documents:
            raise PlanError(
                f"{self.path}: documents must lie within 0:{self.num_documents}, got {begin}:{end}; count from 0"
            )
        parts = []
        for shard, first, last in _pieces(self.document_begins, begin, end):
            data = read_range(self.file(shard, DOCUMENTS), 8 * first, 8 * (last - first + 1))
            offsets = data.view(OFFSET_DTYPE).astype(np.int64)
            tokens = self.manifest.shards[shard].tokens
            if int(offsets[0]) < 0 or (np.diff(offsets) < 0).any() or int(offsets[-1]) > tokens:
                raise StoreCorruptError(
                    f"{self.file(shard, DOCUMENTS).path}: offsets must not decrease nor pass the shard, "
                    "got others; run `tokenmill verify`, then copy or prepare the store again"
                )
            parts.append(offsets + self.token_begins[shard])
        # The end of a shard's last document is the start of the next shard's first.
        return np.concatenate([*(part[:-1] for part in parts[:-1]), parts[-1]])

    def _fetch_key(self, begin: int, end: int, key: str) -> npt.NDArray[Any]:
        dtype = self.dtype(key)
        # Memory is taken piece by piece, after the map has proved that the file is as large as the manifest says.
        parts = []
        for shard, first, last in _pieces(self.token_begins, begin, end):
            with self.maps.borrow([self.file(shard, key_file(key))]) as (mapped,):
                parts.append(mapped.data.view(dtype)[first:last].copy())
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, dtype)])


def _pieces(begins: npt.NDArray[np.int64], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Cut a range of the stream at shard edges: (shard, first, last) with positions inside the shard."""
    shard = int(np.searchsorted(begins, begin, side="right")) - 1
    while begin < end:
        stop = min(end, int(begins[shard + 1]))
        if stop > begin:
            yield shard, begin - int(begins[shard]), stop - int(begins[shard])
        begin = stop
        shard += 1


def open_store(path: str | os.PathLike[str], *, maps: MapCache | None = None) -> Store:
    """Open the store at `path` by reading its manifest; `maps` is shared by the stores of a run."""
    manifest = read_manifest(path)
    tokens = np.cumsum([0, *(shard.tokens for shard in manifest.shards)], dtype=np.int64)
    documents = np.cumsum([0, *(shard.documents for shard in manifest.shards)], dtype=np.int64)
    return Store(
        path=Path(path),
        manifest=manifest,
        maps=maps or MapCache(),
        token_begins=tokens,
        document_begins=documents,
        fingerprint=manifest.fingerprint,
    )
