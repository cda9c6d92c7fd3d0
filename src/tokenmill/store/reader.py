"""Reading a store: from a path to any run of tokens and any document, across shards."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from glob import has_magic, iglob
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np

from tokenmill.errors import ConfigError, PlanError, StoreCorruptError, StoreError, nearest
from tokenmill.store import layout
from tokenmill.store.maps import FileRequest, MapCache, MappedFile, RangeRequest, Ranges, Request, lent, read_range
from tokenmill.store.notes import Origin, find_origin, input_of
from tokenmill.tables import is_address, path_of
from tokenmill.types import AnyArray, Int64Array, RemoteOptions, natural_key

if TYPE_CHECKING:
    from tokenmill.store.remote.fetch import Network
    from tokenmill.store.remote.files import RemoteFiles
    from tokenmill.store.sums import ProvenFiles

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
class Store:
    """An open store: the manifest in memory, everything else read when asked for.

    Opening costs one small file whatever the number of shards, and memory grows with shards, never
    with documents. All reads return fresh arrays, so no map is kept open by a caller.
    """

    path: Path
    manifest: layout.Manifest
    maps: MapCache
    axes: Mapping[str, Axis]
    fingerprint: str
    """Digest of what the tokens are, computed once."""
    requests: dict[tuple[int, str], Request] = field(default_factory=dict)
    """Where each file of each shard is, filled as they are asked for; formats of others fill it at once."""
    proven: ProvenFiles | None = None
    """What proves every page of its files when it is read, if that is wanted of a store on disk."""
    remotes: tuple[RemoteFiles, ...] = ()
    """Where its files are in object storage; `path` is then the folder of this machine that has its small files."""

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
        return str(self.remotes[0].address if self.remotes else self.path)

    @property
    def by_ranges(self) -> bool:
        """Whether its arrays are not mapped, but ranges of them brought into memory."""
        return bool(self.remotes) or self.proven is not None

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
        if key not in self.manifest.keys:
            raise StoreError(f"{self.path}: key must be one of the store's, got {key!r}; {nearest(key, self.keys)}")
        return np.dtype(self.manifest.keys[key])

    def axis(self, key: str) -> str:
        """Return the axis of an array."""
        self.dtype(key)
        return layout.axis_of(self.manifest.kind, key)

    def file(self, shard: int, name: str) -> Request:
        """Return where a file of a shard is, and the size it must have."""
        request = self.requests.get((shard, name))
        if request is None:
            info = self.manifest.shards[shard]
            part = info.files[name]
            if self.remotes:
                request = self.remotes[0].request(shard, name)
            elif self.proven is not None:
                request = self.proven.request(shard, name)
            elif info.container is None:
                request = FileRequest(self.path / info.name / name, part.bytes)
            else:
                request = FileRequest(self.path / info.name, info.container.bytes, part.begin, part.bytes)
            self.requests[shard, name] = request
        return request

    @overload
    def fetch(self, begin: int, end: int, keys: str) -> AnyArray: ...
    @overload
    def fetch(self, begin: int, end: int, keys: list[str] | tuple[str, ...]) -> dict[str, AnyArray]: ...
    def fetch(
        self, begin: int, end: int, keys: str | list[str] | tuple[str, ...]
    ) -> AnyArray | dict[str, AnyArray]:
        """Return values `begin` to `end` (exclusive) of the whole stream, for one key or several."""
        if not isinstance(keys, str):
            return {key: self.fetch(begin, end, key) for key in keys}
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
        if not isinstance(keys, str):
            return {key: self.fetch_record(index, key) for key in (self.keys if keys is None else keys)}
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
        if not 0 <= document < self.num_documents:
            raise PlanError(
                f"{self.path}: a document must lie within 0:{self.num_documents}, got {document}; count from 0"
            )
        shard = int(np.searchsorted(self.document_begins, document, side="right")) - 1
        name = layout.index_file(layout.axis_of(self.manifest.kind, self.manifest.token_key))
        file = Path(self.file(shard, name).path)
        # By the shard itself and not by the path of the store, which may be several that were joined.
        place = file.parent if file.name == name else file
        for files in self.remotes:
            if place.parent == files.folder:
                files.bring_origins(place.name)
        origin = find_origin(place, document, self.document_begins[: shard + 1])
        return origin or input_of(self.manifest, document)

    def document_bounds(self, document: int) -> tuple[int, int]:
        """Return where a document begins and ends (exclusive) in the whole stream."""
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
            offsets = (
                read_range(request, 8 * first, 8 * (last - first + 1)).view(layout.OFFSET_DTYPE).astype(np.int64)
            )
            size = int(values[shard + 1] - values[shard])
            if int(offsets[0]) < 0 or (offsets[1:] < offsets[:-1]).any() or int(offsets[-1]) > size:
                raise bad_offsets(request)
            parts.append(offsets + values[shard])
        # The end of a shard's last document is the start of the next shard's first.
        return np.concatenate([*(part[:-1] for part in parts[:-1]), parts[-1]])

    @contextmanager
    def lent(self, key: str, shards: Int64Array, spans: Spanned) -> Iterator[list[MappedFile]]:
        """Lend the files of an array in some shards, of which spans (shard, first value, end) are to be read."""
        requests = [self.file(int(shard), layout.key_file(key)) for shard in shards]
        if not any(isinstance(request, RangeRequest) for request in requests):
            with self.maps.borrow(requests) as files:
                yield files
            return
        with lent(self.maps, wanted_of(requests, shards, spans, self.dtype(key).itemsize)) as files:
            yield files

    def bring(self, name: str) -> Path:
        """Return where a file beside the shards is; from object storage it is copied first, if it is there."""
        for files in self.remotes:
            files.bring(name)
        return self.path / name

    def _fetch_key(self, begin: int, end: int, key: str) -> AnyArray:
        dtype = self.dtype(key)
        # Memory is taken piece by piece, after the map has proved that the file is as large as the manifest says.
        parts = []
        for shard, first, last in _pieces(self.axes[self.axis(key)].values, begin, end):
            with self.lent(
                key, np.array([shard]), (np.array([shard]), np.array([first]), np.array([last]))
            ) as files:
                parts.append(files[0].data.view(dtype)[first:last].copy())
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, dtype)])


def wanted_of(
    requests: Sequence[Request], shards: Int64Array, spans: Spanned, width: int
) -> list[Ranges | Request]:
    """Return what spans (shard, first value, end) need of the files of some shards: ranges, or the whole."""
    of, firsts, lasts = spans
    wanted: list[Ranges | Request] = []
    for request, shard in zip(requests, shards.tolist(), strict=True):
        if isinstance(request, RangeRequest):
            mine = of == shard
            wanted.append(Ranges(request, firsts[mine] * width, lasts[mine] * width))
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


# From a path to an open store.


def open_store(  # noqa: PLR0913 - what files of others do not say of themselves
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    maps: MapCache | None = None,
    dtype: str | None = None,
    vocab_size: int | None = None,
    eos_id: int | None = None,
    bos_id: int | None = None,
    format: str | None = None,
    remote: RemoteOptions | Network | None = None,
    verify_pages: bool = False,
) -> Store:
    """Open the store at `path` by reading its manifest, or files of another project in place.

    A list, or a glob that stands for stores of ours alone, is opened as one store: their documents in that order.
    `maps` is shared by the stores of a run, and so is `remote`, which says how an address such as `s3://bucket/web`
    is read. With `verify_pages` every page of a store on disk is proven by its checksum when it is read.
    The rest is for foreign files, which may be named as a file, a folder, a glob or a prefix, and say less than
    they should: see `ForeignOptions`. For a store of ours it must not contradict the manifest.
    """
    items = path if isinstance(path, Sequence) and not isinstance(path, str) else [path]
    places = [place for item in items for place in _places(item)]
    claims: dict[str, Any] = {
        "dtype": dtype,
        "vocab_size": vocab_size,
        "eos_id": eos_id,
        "bos_id": bos_id,
        "format": format,
    }
    if len(places) != 1:
        maps = maps or MapCache()
        return join_stores(
            [open_store(place, maps=maps, remote=remote, verify_pages=verify_pages, **claims) for place in places]
        )
    place = places[0]
    if isinstance(place, str):
        return _open_remote(place, claims, maps, remote)
    if layout.is_ours(place) or format == "tokenmill":
        store = store_of(place, read_ours(place, claims), maps)
        return _proven(store) if verify_pages else store
    if verify_pages:
        raise ConfigError(f"{place}: verify_pages is for stores of ours, got files of another project; import them")
    from tokenmill.store.foreign.files import ForeignOptions
    from tokenmill.store.foreign.open import open_foreign

    return open_foreign(place, ForeignOptions(**claims), maps)


def _proven(store: Store) -> Store:
    """Return a store whose pages are proven when they are read."""
    if not (store.path / layout.SUMS_FOLDER).is_dir():
        raise StoreError(
            f"{store.path}: must have page sums for verify_pages, got none; run `tokenmill verify --add-page-sums`"
        )
    from tokenmill.store.sums import ProvenFiles

    return replace(store, proven=ProvenFiles(folder=store.path, manifest=store.manifest))


def _open_remote(
    text: str, claims: Mapping[str, object], maps: MapCache | None, remote: RemoteOptions | Network | None
) -> Store:
    """Open the store at an address by reading its manifest."""
    from tokenmill.store.remote.fetch import Network
    from tokenmill.store.remote.files import open_remote

    files, manifest = open_remote(text, remote if isinstance(remote, Network) else Network(remote))
    _check_claims(str(files.address), manifest, claims)
    return replace(store_of(files.folder, manifest, maps), remotes=(files,))


def _places(path: str | os.PathLike[str]) -> Sequence[Path | str]:
    """Return the stores of ours that a glob stands for, in the natural order of their names; else the path.

    An address stays a string.
    """
    text = path_of("store", path)
    if is_address(text):
        return [text]
    is_glob = has_magic(text) and not os.path.lexists(text)
    # One match tells whether it is for files of others, of which there may be very many.
    if not is_glob or not any(layout.is_ours(Path(match)) for match in islice(iglob(text, recursive=True), 1)):
        return [Path(path)]
    stores = [Path(match) for match in sorted(iglob(text, recursive=True), key=natural_key)]
    return stores if all(map(layout.is_ours, stores)) else [Path(path)]


def join_stores(stores: Sequence[Store]) -> Store:
    """Return several stores of one tokenizer and training type as one: the documents of each after those before it.

    It stands for the same tokens as one store with all their shards would; only manifests are read.
    """
    if not stores:
        raise ConfigError("store: must name at least one, got an empty list; add the folder of a store")
    places = [store.path.resolve() for store in stores]
    for number, place in enumerate(places):
        if place in places[:number]:
            raise ConfigError(f"{place}: a store must be named once in a source, got it twice; leave one out")
    for store in stores[1:]:
        _check_alike(stores[0], store)
    shards: list[layout.ShardInfo] = []
    requests: dict[tuple[int, str], Request] = {}
    for store in stores:
        for number, shard in enumerate(store.manifest.shards):
            requests.update({(len(shards), name): store.file(number, name) for name in shard.files})
            shards.append(replace(shard, name=f"{store.path.name}/{shard.name}"))
    # Of token files of other projects, whether all their documents have BOS and EOS is found out file by file.
    framed = {name: all(store.manifest.tokenizer.get(name) for store in stores) for name in ("add_bos", "add_eos")}
    tokenizers = [store.manifest.tokenizer for store in stores]
    identity = next((known for known in tokenizers if known.get("kind") != layout.GIVEN), tokenizers[0])
    manifest = replace(
        stores[0].manifest,
        tokenizer={**identity, **framed},
        shards=tuple(shards),
        inputs=tuple(item for store in stores for item in store.manifest.inputs),
        skipped={},
    )
    joined = store_of(stores[0].path, manifest, stores[0].maps, requests)
    return replace(joined, remotes=tuple(files for store in stores for files in store.remotes))


def _check_alike(first: Store, other: Store) -> None:
    """Refuse a store of another tokenizer or training type, or with other arrays, than the first of its source."""
    ours, theirs = first.manifest, other.manifest
    difference = layout.tokenizer_difference(ours.tokenizer, theirs.tokenizer)
    for name, left, right in (("training type", ours.kind, theirs.kind), ("keys", ours.keys, theirs.keys)):
        if left != right:
            difference = (name, left, right, "make a source of each")
    if difference:
        name, left, right, way_out = difference
        raise ConfigError(
            f"{other.path}: stores of one source must be alike, got {right!r} as its {name} where "
            f"{first.path} has {left!r}; {way_out}"
        )


def read_ours(path: Path, claims: Mapping[str, object]) -> layout.Manifest:
    """Read the manifest of a store of ours; claims of the caller that contradict it are refused."""
    manifest = layout.read_manifest(path)
    _check_claims(str(path), manifest, claims)
    return manifest


def _check_claims(where: str, manifest: layout.Manifest, claims: Mapping[str, object]) -> None:
    facts = {**manifest.tokenizer, "dtype": np.dtype(manifest.keys[manifest.token_key]).name, "format": "tokenmill"}
    for name, value in claims.items():
        if value not in (None, facts.get(name)):
            raise ConfigError(
                f"{where}: {name} must be as the manifest says, {facts.get(name)!r}, got {value!r}; leave it out"
            )


def store_of(
    path: Path,
    manifest: layout.Manifest,
    maps: MapCache | None,
    requests: dict[tuple[int, str], Request] | None = None,
) -> Store:
    """Make an open store of a manifest, read or made up; `requests` says where files are that it does not name."""
    sizes = {
        axis: [shard.size_of(axis) for shard in manifest.shards]
        for axis in layout.axes_of(manifest.kind, manifest.keys)
    }
    return Store(
        path=path,
        manifest=manifest,
        maps=maps or MapCache(),
        axes={
            axis: Axis(
                items=np.cumsum([0, *(items for items, _ in size)], dtype=np.int64),
                values=np.cumsum([0, *(values for _, values in size)], dtype=np.int64),
            )
            for axis, size in sizes.items()
        },
        fingerprint=manifest.fingerprint,
        requests=requests or {},
    )
