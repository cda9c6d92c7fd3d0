"""An open store: its manifest, and all reads of tokens, documents and offsets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np

from tokenmill.errors import PlanError, StoreCorruptError, StoreError, nearest, whole
from tokenmill.store import layout
from tokenmill.store.maps import FileRequest, MapCache, MappedFile
from tokenmill.store.ranges import FileRanges, RangeRequest, Request, in_memory, read_range
from tokenmill.store.records import Records
from tokenmill.types import AnyArray, Int64Array

if TYPE_CHECKING:
    from tokenmill.store.origins import Origin
    from tokenmill.store.remote.files import RemoteFiles
    from tokenmill.store.sums import VerifiedFiles

Spanned: TypeAlias = tuple[Int64Array, Int64Array, Int64Array]
"""Shard, first value and end of each of some spans."""
Value: TypeAlias = "AnyArray | list[AnyArray]"
"""One array of a record; of a group of responses, a list of arrays."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """Where the shards of one axis begin in the whole stream."""

    items: Int64Array
    """First item of each shard, and the end of the last."""
    values: Int64Array
    """First value of each shard, and the end of the last."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Store(Records):
    """An open store: token ids and masks of documents. `open_store` opens one.

    Opening reads the manifest only. Memory grows with the number of shards, not with documents. All reads return
    new arrays.

    `len(store)` is the number of documents or records. `store[i]` is one of them, with `ids`, `text`, `origin` and
    `fields`; `store[a:b]` is a lazy slice.

    Args: those of `open_store`.

    Raises:
        StoreError: A file is missing or damaged; raised when it is read.

    Examples:
        >>> import tokenmill as tm
        >>> store = tm.open_store("stores/demo")
        >>> len(store), store.num_tokens
        (324, 134693)
        >>> store[258].text[:17], str(store[258].origin)
        ('<|bos|>Weather bo', 'prose.jsonl:259')
    """

    path: Path
    manifest: layout.Manifest
    _maps: MapCache
    axes: Mapping[str, Axis]
    fingerprint: str
    """Digest of what the tokens are, computed once."""
    _requests: dict[tuple[int, str], Request] = field(default_factory=dict)
    """Where each file of each shard is, filled as they are asked for; formats of others fill it at once."""
    _verified: VerifiedFiles | None = None
    """Reader of a store on disk that verifies each page it reads; None: files are mapped."""
    _remotes: tuple[RemoteFiles, ...] = ()
    """Where its files are in object storage; `path` is then the folder of this machine that has its small files."""
    _opened: dict[str, Any] = field(default_factory=dict, compare=False)
    """What was opened once to decode its ids."""

    def __repr__(self) -> str:
        """Say in a line what it holds: the manifest alone may have thousands of shards."""
        arrays = ", ".join(f"{key} {np.dtype(dtype).name}" for key, dtype in self.manifest.keys.items())
        return (
            f"<Store {self.where}: {self.manifest.kind}, {self.num_documents:,} documents, "
            f"{self.manifest.tokens:,} tokens, {self.num_shards:,} shards, {arrays}>"
        )

    @property
    def where(self) -> str:
        """The path or address that people know it by."""
        return str(self._remotes[0].address if self._remotes else self.path)

    @property
    def _by_ranges(self) -> bool:
        """Whether its arrays are read by ranges instead of mapped."""
        return bool(self._remotes) or self._verified is not None

    @property
    def token_begins(self) -> Int64Array:
        """First token of each shard in the whole stream, and the end of the last."""
        return self._main.values

    @property
    def document_begins(self) -> Int64Array:
        """First document of each shard, and the end of the last."""
        return self._main.items

    @property
    def _main(self) -> Axis:
        return self.axes[layout.axis_of(self.manifest.kind, self.manifest.token_key)]

    @property
    def num_documents(self) -> int:
        """Number of documents, or of records."""
        return int(self._main.items[-1])

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the stream that `fetch` reads."""
        return int(self._main.values[-1])

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self.manifest.shards)

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the arrays."""
        return tuple(self.manifest.keys)

    def dtype(self, key: str) -> np.dtype[Any]:
        """Return the dtype of an array on disk."""
        if key not in self.keys:
            raise StoreError(f"{self.path}: no such array: {key!r}; {nearest(key, self.keys)}")
        return np.dtype(self.manifest.keys[key])

    def axis(self, key: str) -> str:
        """Return the axis of an array."""
        self.dtype(key)
        return layout.axis_of(self.manifest.kind, key)

    def file(self, shard: int, name: str) -> Request:
        """Return where a file of a shard is, and the size it must have."""
        request = self._requests.get((shard, name))
        if request is None:
            if self._remotes:
                request = self._remotes[0].request(shard, name)
            elif self._verified is not None:
                request = self._verified.request(shard, name)
            else:
                request = file_request(self.path, self.manifest.shards[shard], name)
            self._requests[shard, name] = request
        return request

    @overload
    def fetch(self, begin: int, end: int, keys: str) -> AnyArray: ...
    @overload
    def fetch(self, begin: int, end: int, keys: list[str] | tuple[str, ...]) -> dict[str, AnyArray]: ...
    def fetch(
        self, begin: int, end: int, keys: str | list[str] | tuple[str, ...]
    ) -> AnyArray | dict[str, AnyArray]:
        """Return values `begin` to `end` (exclusive) of the whole stream, for one key or several."""
        if isinstance(keys, list | tuple):
            return {key: self.fetch(begin, end, key) for key in keys}
        begin, end = (whole("range", value, PlanError, "pass two numbers") for value in (begin, end))
        size = int(self.axes[self.axis(keys)].values[-1])
        if not 0 <= begin <= end <= size:
            raise PlanError(f"{self.path}: a range must lie within 0:{size}, got {begin}:{end}; shorten it")
        return self._fetch_key(begin, end, keys)

    @overload
    def fetch_record(self, index: int, keys: str) -> Value: ...
    @overload
    def fetch_record(self, index: int, keys: list[str] | tuple[str, ...] | None = None) -> dict[str, Value]: ...
    def fetch_record(
        self, index: int, keys: str | list[str] | tuple[str, ...] | None = None
    ) -> Value | dict[str, Value]:
        """Return one document or record, for one key, several, or all; responses come as a list of arrays."""
        if keys is None or isinstance(keys, list | tuple):
            return {key: self.fetch_record(index, key) for key in (self.keys if keys is None else keys)}
        index = whole("index", index, PlanError, "pass the number of a record")
        axis = self.axis(keys)
        if axis != "responses":
            begin, end = self.offsets(axis, index, index + 1).tolist()
            return self._fetch_key(begin, end, keys)
        first, last = self.offsets("groups", index, index + 1).tolist()
        if first == last:
            return []
        starts = self.offsets(axis, first, last)
        flat = self._fetch_key(int(starts[0]), int(starts[-1]), keys)
        return np.split(flat, starts[1:-1] - starts[0])

    def origin(self, document: int) -> Origin:
        """Return which input file, line and kept fields a document came from, as far as the store says."""
        from tokenmill.store.origins import find_origin, input_of  # late: it reads stores itself

        document = whole("document", document, PlanError, "pass its number")
        if not 0 <= document < self.num_documents:
            raise PlanError(
                f"{self.path}: document out of range: {document}; the store has {self.num_documents}, from 0 on"
            )
        shard = int(np.searchsorted(self.document_begins, document, side="right")) - 1
        place = self._shard_place(shard)
        if place is None:
            return input_of(self.manifest, document)
        for files in self._remotes:
            if place.parent == files.folder:
                files.download_origins(place.name)
        origin = find_origin(place, document, self.document_begins[: shard + 1])
        return origin or input_of(self.manifest, document)

    def _shard_place(self, shard: int) -> Path | None:
        """Return the folder or file of a shard in its own store; None for third-party token files.

        A store that was joined of several has shards of each.
        """
        info = self.manifest.shards[shard]
        name = layout.index_file(layout.axis_of(self.manifest.kind, self.manifest.token_key))
        if name not in info.files:
            return None
        return Path(self.file(shard, name).path).parent

    def document_bounds(self, document: int) -> tuple[int, int]:
        """Return where a document begins and ends (exclusive) in the whole stream."""
        document = whole("document", document, PlanError, "pass its number")
        begin, end = self.document_offsets(document, document + 1).tolist()
        return begin, end

    def document_offsets(self, begin: int, end: int) -> Int64Array:
        """Return where documents `begin` to `end` (exclusive) start in the stream, and where the last one ends."""
        return self.offsets(layout.axis_of(self.manifest.kind, self.manifest.token_key), begin, end)

    def offsets(self, axis: str, begin: int, end: int) -> Int64Array:
        """Return where items `begin` to `end` (exclusive) of an axis start in the stream, and where they end."""
        items, values = self.axes[axis].items, self.axes[axis].values
        if not 0 <= begin < end <= items[-1]:
            raise PlanError(
                f"{self.path}: documents must lie within 0:{int(items[-1])}, got {begin}:{end}; count from 0"
            )
        parts = []
        for shard, first, last in _pieces(items, begin, end):
            request = self.file(shard, layout.index_file(axis))
            self._maps.verify(request)
            offsets = (
                read_range(request, 8 * first, 8 * (last - first + 1)).view(layout.OFFSET_DTYPE).astype(np.int64)
            )
            size = int(values[shard + 1] - values[shard])
            if int(offsets[0]) < 0 or (offsets[1:] < offsets[:-1]).any() or int(offsets[-1]) > size:
                raise bad_offsets(request)
            parts.append(offsets + values[shard])
        # The end of a shard's last document is the start of the next shard's first.
        return np.concatenate([*(part[:-1] for part in parts[:-1]), parts[-1]])

    def _in_memory(self, key: str, shards: Int64Array, spans: Spanned) -> AbstractContextManager[list[MappedFile]]:
        """Give the files of an array in some shards, for reading spans (shard, first value, end) of them."""
        requests = [self.file(int(shard), layout.key_file(key)) for shard in shards]
        return in_memory(self._maps, wanted_of(requests, shards, spans, self.dtype(key).itemsize))

    def _local_copy(self, name: str) -> Path:
        """Return the path of a file next to the shards; from object storage it is downloaded first."""
        copies = [files.download(name) for files in self._remotes]
        return next((copy for copy in copies if copy is not None), self.path / name)

    def _fetch_key(self, begin: int, end: int, key: str) -> AnyArray:
        dtype = self.dtype(key)
        # Memory is taken piece by piece, after the map has proved that the file is as large as the manifest says.
        parts = []
        for shard, first, last in _pieces(self.axes[self.axis(key)].values, begin, end):
            with self._in_memory(
                key, np.array([shard]), (np.array([shard]), np.array([first]), np.array([last]))
            ) as files:
                parts.append(files[0].data.view(dtype)[first:last].copy())
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, dtype)])


def file_request(store: Path, shard: layout.ShardInfo, name: str) -> FileRequest:
    """Return where an array or an index of a shard is, in a store on disk."""
    info = shard.files[name]
    return FileRequest(store / shard.name / name, info.bytes, xxh3=info.xxh3 if name in shard.index_files else None)


def wanted_of(
    requests: Sequence[Request], shards: Int64Array, spans: Spanned, width: int
) -> list[FileRanges | Request]:
    """Return what spans (shard, first value, end) need of the files of some shards: ranges, or the whole."""
    of, firsts, lasts = spans
    wanted: list[FileRanges | Request] = []
    for request, shard in zip(requests, shards.tolist(), strict=True):
        if isinstance(request, RangeRequest):
            mine = of == shard
            wanted.append(FileRanges(file=request, begins=firsts[mine] * width, ends=lasts[mine] * width))
        else:
            wanted.append(request)
    return wanted


def _pieces(begins: Int64Array, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Cut a range of the stream at shard edges: (shard, first, last) with positions inside the shard."""
    shard = int(np.searchsorted(begins, begin, side="right")) - 1
    while begin < end:
        stop = min(end, int(begins[shard + 1]))
        if stop > begin:
            yield shard, begin - int(begins[shard]), stop - int(begins[shard])
        begin = stop
        shard += 1


def bad_offsets(request: Request) -> StoreCorruptError:
    """Return the error of an index whose offsets lead elsewhere."""
    return StoreCorruptError(
        f"{request.path}: offsets must not decrease nor pass the shard, "
        "got others; run `tokenmill verify`, then copy or prepare the store again"
    )
