"""Reading a store: its files in memory, by a bounded number of maps, and the store from a path to any document.

All stores of a run share their maps. Of what cannot be mapped, as it is in object storage, ranges are brought into
memory of the file's size, of which only the pages that were written to take room. So a span has an address as it
has one in a local file, and kernels see no difference.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from glob import has_magic, iglob
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, overload

import numpy as np
import xxhash

from tokenmill.errors import ConfigError, PlanError, StoreCorruptError, StoreError, StoreFileMissingError, nearest
from tokenmill.store import layout
from tokenmill.store.layout import WAY_OUT
from tokenmill.store.records import Records
from tokenmill.tables import is_address, path_of
from tokenmill.types import AnyArray, Int64Array, RemoteOptions, Uint8Array, natural_key

if TYPE_CHECKING:
    from tokenmill.store.notes import Origin
    from tokenmill.store.remote.fetch import Network
    from tokenmill.store.remote.files import RemoteFiles
    from tokenmill.store.verify import ProvenFiles

# Files in memory.

MAX_MAPS = 1024
"""Enough for a store of 256 GiB of text: rows come from anywhere, and to map files anew for them takes much longer
than to read them (benchmarks/engines.py --shards). A map takes address space, no memory and no descriptor."""
LARGE_BYTES = 1 << 28
"""Of a larger file only the pages that are used are read and mapped, not their neighbours as well: rows are read in
random order, and reading ahead would read and hold many times what they need."""
_BLOCK_BYTES = 1 << 20
"""Bytes that are read and hashed at a time."""
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


@dataclass(eq=False, slots=True)
class MappedFile:
    """One file in memory, read-only; stays mapped while this object lives."""

    path: Path | str
    data: Uint8Array
    address: int
    """Where `data` starts; 0 for an empty file."""
    mapping: mmap.mmap | None = None
    """What the system knows of the map; None for what is in memory or empty."""
    end: int = 0
    """How many bytes the file must keep."""
    borrowers: int = 0

    def check(self) -> None:
        """Raise if the file has become shorter: the last page of a truncated file reads as zeros.

        Call it after reading, too. Reading a page that is gone ends the process with SIGBUS.
        """
        if self.mapping is None:
            return
        size = self.mapping.size()
        if size < self.end:
            raise StoreCorruptError(
                f"{self.path}: must keep its {self.end} bytes while it is read, got {size}; {WAY_OUT}"
            )


@dataclass(frozen=True, slots=True)
class FileRequest:
    """A file or a part of one, and the size that the manifest promises."""

    path: Path
    bytes: int
    """Size of the whole file."""
    begin: int = 0
    size: int | None = None
    """How many bytes from `begin` on are wanted; None: all that there are."""
    xxh3: str | None = None
    """Checksum of these bytes, verified before their first use: an index has one, as a flipped byte in it changes
    which tokens a batch has. None: the file is too large, and page sums verify it where that is wanted."""
    way_out: str = WAY_OUT
    """How to repair the file if the checksum is another."""

    @property
    def wanted(self) -> int:
        """How many bytes are wanted."""
        return self.bytes - self.begin if self.size is None else self.size


@dataclass(frozen=True, eq=False, slots=True)
class MemoryRequest:
    """What stands for a file of a store but is held in memory."""

    path: Path
    """The file it was made from, for messages."""
    data: Uint8Array

    @property
    def wanted(self) -> int:
        """How many bytes there are."""
        return self.data.size


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

    def begin(self, ranges: Sequence[Ranges], *, ahead: bool) -> Loan:
        """Begin to read ranges of some files; those that are `ahead` of training wait for room in memory."""


@dataclass(frozen=True, eq=False, slots=True)
class RangeRequest:
    """A file, or a part of one, of which only ranges can be had."""

    path: str
    """Its address, for messages."""
    reader: RangeReader
    name: str
    """By which the reader knows the file."""
    bytes: int
    """Size of the whole file."""
    begin: int
    wanted: int
    """How many bytes from `begin` on the request is for."""


@dataclass(frozen=True, eq=False, slots=True)
class Ranges:
    """What is wanted of a file."""

    request: RangeRequest
    begins: Int64Array
    """First byte of each range, counted from where the request begins."""
    ends: Int64Array
    """End of each range, exclusive."""
    next_use: Callable[[Int64Array], Int64Array] | None = None
    """First bytes of pages -> the step at which the run needs each page again; None: nobody knows."""
    around: tuple[Int64Array, Int64Array] | None = None
    """Ranges around these, begins and ends, all of which the run soon needs: a mirror brings them whole."""


Request: TypeAlias = FileRequest | MemoryRequest | RangeRequest


class MapCache:
    """Keeps the most recently used maps, at most `limit` with those in use, for any number of threads.

    Maps are lent, so that none is closed under a reader. Idle ones make room for new ones. The limit
    is passed only while the borrowers of one moment need more than that together: waiting for one
    another could wait for ever.
    """

    def __init__(self, limit: int | None = None) -> None:
        limit = MAX_MAPS if limit is None else limit
        assert limit >= 2
        self.limit = limit
        self._maps: OrderedDict[FileRequest, MappedFile] = OrderedDict()
        self._verified: set[FileRequest] = set()
        """Files whose checksum was compared; a map that is closed and opened again is not read through again."""
        self._lock = threading.Lock()

    def renew_lock(self) -> None:
        """Take a new lock, in a process that was forked: a thread that is not here may hold the old one."""
        self._lock = threading.Lock()

    def take(self, requests: Sequence[Request]) -> list[MappedFile]:
        """Lend the maps of some files, in the order asked for, until they are given back."""
        with self._lock:
            files: list[MappedFile] = []
            try:
                for request in requests:
                    assert not isinstance(request, RangeRequest), "its ranges are borrowed by `lent`"
                    file = map_file(request) if isinstance(request, MemoryRequest) else self._mapped(request)
                    file.borrowers += 1
                    files.append(file)
            except BaseException:
                self._return(files)
                raise
            return files

    def _mapped(self, request: FileRequest) -> MappedFile:
        """Return the map of a file, which is now the one that was used last; the lock must be held."""
        file = self._maps.get(request)
        if file is not None:
            self._check(file)
            self._maps.move_to_end(request)
            return file
        if len(self._maps) >= self.limit:
            self._close_idle()
        self._verify(request)
        file = self._maps[request] = map_file(request)
        return file

    def verify(self, request: Request) -> None:
        """Raise if a file that has a checksum has another one; it is read through once for all its readers."""
        if isinstance(request, FileRequest) and request.xxh3 is not None:
            with self._lock:
                self._verify(request)

    def _verify(self, request: FileRequest) -> None:
        if request.xxh3 is not None and request not in self._verified:
            verify_checksum(request)
            self._verified.add(request)

    def give_back(self, files: Sequence[MappedFile]) -> None:
        """End a loan; the maps stay open until their room is needed."""
        with self._lock:
            self._return(files)

    @contextmanager
    def borrow(self, requests: Sequence[Request]) -> Iterator[list[MappedFile]]:
        """Lend the maps of some files for the length of a `with` block; what was read of a cut one is refused."""
        files = self.take(requests)
        try:
            yield files
            for file in files:
                self.check(file)
        finally:
            self.give_back(files)

    def check(self, file: MappedFile) -> None:
        """Refuse what was read of a file that was cut; once it is put back, it is mapped anew."""
        with self._lock:
            self._check(file)

    def _check(self, file: MappedFile) -> None:
        try:
            file.check()
        except StoreCorruptError:
            for request in [request for request, mapped in self._maps.items() if mapped is file]:
                del self._maps[request]
                self._verified.discard(request)
            raise

    def _return(self, files: Sequence[MappedFile]) -> None:
        for file in files:
            file.borrowers -= 1
        while len(self._maps) > self.limit and self._close_idle():
            pass

    def _close_idle(self) -> bool:
        """Close the map that was used longest ago and that nobody uses now; False where there is none."""
        for request, file in self._maps.items():
            if not file.borrowers:
                del self._maps[request]
                return True
        return False


def map_file(request: Request) -> MappedFile:
    """Map a file or a part of it, after checking that it has the size that the manifest promises.

    What is in memory is handed out as if it were mapped.
    """
    assert not isinstance(request, RangeRequest), "its ranges are borrowed by `lent`"
    if isinstance(request, MemoryRequest):
        return MappedFile(request.path, request.data, int(request.data.ctypes.data) if request.data.size else 0)
    with _open_checked(request) as descriptor:
        if request.wanted == 0:
            return MappedFile(request.path, np.empty(0, np.uint8), 0)
        before = request.begin % mmap.ALLOCATIONGRANULARITY
        try:
            mapped = mmap.mmap(
                descriptor, before + request.wanted, access=mmap.ACCESS_READ, offset=request.begin - before
            )
        except ValueError:  # cut since its size was checked
            raise StoreCorruptError(
                f"{request.path}: must keep its {request.bytes} bytes while it is read, got cut; {WAY_OUT}"
            ) from None
        if request.wanted > LARGE_BYTES and hasattr(mmap, "MADV_RANDOM"):
            mapped.madvise(mmap.MADV_RANDOM)
        data = np.frombuffer(mapped, np.uint8, request.wanted, before)
    return MappedFile(request.path, data, int(data.ctypes.data), mapped, request.begin + request.wanted)


def read_range(request: Request, begin: int, size: int) -> Uint8Array:
    """Read bytes of a file without mapping it: what is read once should not stay in this process's memory."""
    if isinstance(request, MemoryRequest):
        return request.data[begin : begin + size]
    if isinstance(request, RangeRequest):
        with lent(MapCache(), [Ranges(request, np.array([begin]), np.array([begin + size]))]) as (file,):
            return file.data[begin : begin + size].copy()
    data = np.empty(size, np.uint8)
    with _open_checked(request) as descriptor:
        filled = 0
        while filled < size:  # the system reads at most 2 GB at a time
            place = request.begin + begin + filled
            if hasattr(os, "preadv"):
                count = os.preadv(descriptor, [data[filled:].data], place)
            else:  # on Windows
                part = layout.read_at(descriptor, min(size - filled, _BLOCK_BYTES), place)
                count = len(part)
                data[filled : filled + count] = np.frombuffer(part, np.uint8)
            if count == 0:
                raise StoreCorruptError(f"{request.path}: must have {request.bytes} bytes, got fewer; {WAY_OUT}")
            filled += count
    return data


def verify_checksum(request: FileRequest) -> None:
    """Read a file through, and raise if its checksum is not the one that it must have."""
    state = xxhash.xxh3_128()
    for begin in range(0, request.wanted, _BLOCK_BYTES):
        state.update(read_range(request, begin, min(_BLOCK_BYTES, request.wanted - begin)).data)
    if state.hexdigest() != request.xxh3:
        raise StoreCorruptError(
            f"{request.path}: checksum must be {request.xxh3}, got {state.hexdigest()}; {request.way_out}"
        )


@contextmanager
def lent(maps: MapCache, ranges: Sequence[Ranges | Request]) -> Iterator[list[MappedFile]]:
    """Lend files for the length of a `with` block: whole ones by their maps, of others the ranges."""
    whole = [item for item in ranges if not isinstance(item, Ranges)]
    loans = [item.request.reader.begin([item], ahead=False) for item in ranges if isinstance(item, Ranges)]
    try:
        with maps.borrow(whole) as mapped:
            files, parts = iter(mapped), iter(loans)
            yield [next(parts).wait()[0] if isinstance(item, Ranges) else next(files) for item in ranges]
    finally:
        for loan in loans:
            loan.release()


@contextmanager
def _open_checked(request: FileRequest) -> Iterator[int]:
    """Open a file that is what the manifest says: a plain file of the store, of that size."""
    try:
        # A part of a file lies in the store's own folder, which may be a link; a whole file in that of its shard.
        if request.size is None and request.path.parent.is_symlink():
            raise StoreCorruptError(f"{request.path.parent}: must be a folder of the store, got a link; {WAY_OUT}")
        descriptor, size = layout.open_plain(request.path)
    except (FileNotFoundError, NotADirectoryError):
        raise StoreFileMissingError(
            f"{request.path}: must exist, as the manifest lists it, got nothing there; {WAY_OUT}"
        ) from None
    try:
        if size != request.bytes:
            raise StoreCorruptError(f"{request.path}: must have {request.bytes} bytes, got {size}; {WAY_OUT}")
        if request.begin + request.wanted > request.bytes:
            raise StoreCorruptError(
                f"{request.path}: a part must lie within its {request.bytes} bytes, "
                f"got {request.begin}:{request.begin + request.wanted}; {WAY_OUT}"
            )
        yield descriptor
    finally:
        os.close(descriptor)


# Ranges in memory of the file's size.


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


def part_of(mapped: MappedFile, request: RangeRequest) -> MappedFile:
    """Return the part of a file that a request is for, as if it were mapped alone."""
    data = mapped.data[request.begin : request.begin + request.wanted]
    return MappedFile(request.path, data, mapped.address + request.begin if data.size else 0)


# An open store.

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
    opened: dict[str, Any] = field(default_factory=dict, compare=False)
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
            if self.remotes:
                request = self.remotes[0].request(shard, name)
            elif self.proven is not None:
                request = self.proven.request(shard, name)
            else:
                request = file_request(self.path, self.manifest.shards[shard], name)
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
        from tokenmill.store.notes import find_origin, input_of  # late: notes are read by maps themselves

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
            self.maps.verify(request)
            offsets = (
                read_range(request, 8 * first, 8 * (last - first + 1)).view(layout.OFFSET_DTYPE).astype(np.int64)
            )
            size = int(values[shard + 1] - values[shard])
            if int(offsets[0]) < 0 or (offsets[1:] < offsets[:-1]).any() or int(offsets[-1]) > size:
                raise bad_offsets(request)
            parts.append(offsets + values[shard])
        # The end of a shard's last document is the start of the next shard's first.
        return np.concatenate([*(part[:-1] for part in parts[:-1]), parts[-1]])

    def lent(self, key: str, shards: Int64Array, spans: Spanned) -> AbstractContextManager[list[MappedFile]]:
        """Lend the files of an array in some shards, of which spans (shard, first value, end) are to be read."""
        requests = [self.file(int(shard), layout.key_file(key)) for shard in shards]
        return lent(self.maps, wanted_of(requests, shards, spans, self.dtype(key).itemsize))

    def bring(self, name: str) -> Path:
        """Return where a file beside the shards is; from object storage it is copied first, if it is there."""
        copies = [files.bring(name) for files in self.remotes]
        return next((copy for copy in copies if copy is not None), self.path / name)

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


def file_request(store: Path, shard: layout.ShardInfo, name: str) -> FileRequest:
    """Return where an array or an index of a shard is, in a store on disk."""
    place, size = shard.place(name)
    part = shard.files[name]
    return FileRequest(
        store / place,
        size,
        part.begin,
        None if shard.container is None else part.bytes,
        part.xxh3 if name in shard.index_files else None,
    )


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
    from tokenmill.store.verify import ProvenFiles

    return replace(store, proven=ProvenFiles(folder=store.path, manifest=store.manifest))


def _open_remote(
    text: str, claims: Mapping[str, object], maps: MapCache | None, remote: RemoteOptions | Network | None
) -> Store:
    """Open the store at an address by reading its manifest."""
    from tokenmill.store.remote.fetch import Network
    from tokenmill.store.remote.files import open_remote

    files = open_remote(text, remote if isinstance(remote, Network) else Network(remote))
    _check_claims(str(files.address), files.manifest, claims)
    return replace(store_of(files.folder, files.manifest, maps), remotes=(files,))


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
        if name == "content":
            name = "tokenizer"
            left, right = (
                layout.describe_tokenizer(each.tokenizer, each.recipe.get("tokenizer")) for each in (ours, theirs)
            )
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
