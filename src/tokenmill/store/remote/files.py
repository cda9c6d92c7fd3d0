"""The files of a store in object storage: small ones are downloaded once, large ones are read by ranges.

What rows need of a file lands at its own offset in a mapping of the file's size, of which only the pages that were
written to take memory. So a span has an address as it has one in a local file, and kernels see no difference.
"""

from __future__ import annotations

import errno
import logging
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from hashlib import file_digest
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tokenmill.caches import SharedFolder, private_folder
from tokenmill.errors import ConfigError, StoreCorruptError, StoreError, StoreMissingError, TokenmillError
from tokenmill.store import layout
from tokenmill.store.files import new_file, write_all, write_atomically
from tokenmill.store.lease import locked, this_process
from tokenmill.store.maps import FileRequest, MappedFile
from tokenmill.store.ranges import FileRanges, RangeRequest, Request, merged, sparse_map
from tokenmill.store.remote.client import Address, Client, ObjectInfo, parse_address
from tokenmill.store.remote.fetch import Loop, Network, RemoteObjects, gathered, on_disk, split
from tokenmill.store.remote.mirror import Mirror, check_platform, prover, warn_unused
from tokenmill.store.sums import missing_sums, read_sums, sums_file
from tokenmill.types import Uint64Array

logger = logging.getLogger("tokenmill")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NEAR_BYTES = 64 << 20
"""Bytes of indexes of neighbouring shards that are downloaded together, so that their requests run in parallel."""


class RangeLoan:
    """Ranges of objects on their way into memory."""

    def __init__(self, network: Network, files: list[MappedFile], size: int, fill: Callable[[], Any]) -> None:
        self._network, self._files, self.bytes, self._fill = network, files, size, fill
        self._work: Future[None] | None = None
        self._begun = threading.Event()
        self._released = False

    def start(self) -> None:
        """Begin; called when there is room."""
        if not self._released:
            self._work = Loop.current().start(self._fill())
        self._begun.set()

    @property
    def is_here(self) -> bool:
        """Whether all ranges have arrived."""
        return self._work is not None and self._work.done()

    def wait(self) -> list[MappedFile]:
        """Return the files once all ranges have arrived; raise the error of one that failed."""
        if not self._begun.is_set():
            self._network.prioritize(self.start)
            self._begun.wait()  # another thread gave it room, and is about to begin
        assert self._work is not None, "it was released"
        self._work.result()
        return self._files

    def release(self) -> None:
        """Release the memory; requests under way are cancelled."""
        if self._released:
            return
        self._released = True
        if self._work is not None and self._work.cancel():
            with suppress(CancelledError, Exception):
                self._work.result(5)
        self._files = []
        self._network.release(self.bytes, self.start)


class RemoteFiles:
    """The files of one store in object storage."""

    def __init__(
        self,
        address: Address,
        network: Network,
        folder: Path,
        manifest: layout.Manifest,
        listings: dict[str, Future[list[ObjectInfo]]],
        temporary: SharedFolder | None = None,
    ) -> None:
        """Read a store; `temporary` is its folder if no mirror is named, or if the mirror has no room."""
        self.address = address
        self.network = network
        self.folder = folder
        """Where the small files are, once they were asked for."""
        self._spare: Path | None = None
        """Folder for them if the disk of the other one is full."""
        self._temporary = [temporary] if temporary is not None else []
        """Folders of temporary copies, which are removed when no process uses them."""
        self._checked: set[Path] = set()
        """Small files that this process has verified."""
        self.manifest = manifest
        self.objects = RemoteObjects(address, network)
        self.mirror: Mirror | None = None
        if network.options.mirror is not None and network.options.limit_bytes != 0 and temporary is None:
            try:
                self.mirror = Mirror(folder, folder.parent, network)
                self.objects.etags |= self.mirror.pins()
                self.objects.pin = self._pin
            except OSError as error:
                warn_unused(network, folder.parent, error)
        self._numbers = {shard.name: number for number, shard in enumerate(manifest.shards)}
        self._sums: dict[str, Uint64Array] = {}
        self._listed: dict[str, dict[str, int]] = {}
        self._listings = listings
        """Folder -> what is in it, as it was asked for with the manifest."""
        self._indexes = {layout.index_file(axis) for axis in layout.axes_of(manifest.kind, manifest.keys)}
        for shard in manifest.shards:
            self.objects.sizes |= {name: info.bytes for name, info in shard.stored_files.items()}

    def request(self, shard: int, name: str) -> Request:
        """Return the request for a file of a shard. Indexes are downloaded first, arrays are read by ranges."""
        info = self.manifest.shards[shard]
        part = info.files[name]
        if name in self._indexes:
            self._discard_wrong(self._small(f"{info.name}/{name}"), part)
            if not self._small(f"{info.name}/{name}").exists():
                self.download_indexes(shard)
            return FileRequest(
                self._small(f"{info.name}/{name}"),
                part.bytes,
                xxh3=part.xxh3,
                way_out="delete it, and it is downloaded again",
            )
        path = f"{info.name}/{name}"
        return RangeRequest(str(self.address / path), self, path, part.bytes)

    def upload(self, name: str, file: Path) -> None:
        """Upload a local file next to the shards."""
        Client(self.address, self.network.options).put(name, file)
        self._listed.pop(name.rpartition("/")[0], None)

    def _pin(self, name: str, etag: str) -> str:
        """Record the version of an object for all processes that share the mirror."""
        assert self.mirror is not None
        return self.objects.etags.setdefault(name, self.mirror.pin(name, etag))

    # Ranges.

    def begin(self, ranges: Sequence[FileRanges], *, ahead: bool) -> RangeLoan:
        """Begin to read ranges of some files."""
        files, size = [], 0
        to_mirror = self._blocks_to_mirror([item for item in ranges if item.to_mirror])
        wanted = []
        for item in ranges:
            if item.to_mirror:
                continue
            sums = self.sums_of(item.file.name)
            page = layout.PAGE_BYTES if sums is not None or self.mirror is not None else 1
            begins, ends = merged(item.begins, item.ends, page, item.file.bytes)
            mapped = sparse_map(item.file.path, item.file.bytes)
            wanted.append(self._with_uses(replace(item, begins=begins, ends=ends, out=mapped.data, sums=sums)))
            files.append(mapped)
            size += wanted[-1].pages.size * layout.PAGE_BYTES
        loan = RangeLoan(self.network, files, size, lambda: self._fill(to_mirror, wanted))
        self.network.reserve(size, loan.start, ahead=ahead)
        return loan

    def _with_uses(self, item: FileRanges) -> FileRanges:
        """Add when each page is needed again, if a mirror may have to evict pages."""
        if item.next_use is None or self.mirror is None or self.mirror.limit is None:
            return item
        return replace(item, uses=item.next_use(item.pages * layout.PAGE_BYTES))

    def _blocks_to_mirror(self, ranges: Sequence[FileRanges]) -> list[FileRanges]:
        """Return the pages of some ranges that the mirror lacks; none if it has no room for all of them."""
        mirror = self.mirror
        if mirror is None or not mirror.keeps:
            return []
        if mirror.limit is not None and 2 * sum(int((r.ends - r.begins).sum()) for r in ranges) > mirror.limit:
            return []
        lacking = []
        for item in ranges:
            pages = merged(item.begins, item.ends, layout.PAGE_BYTES, item.file.bytes)
            begins, ends = mirror.lacking(item.file.name, item.file.bytes, *pages)
            if begins.size:
                sums = self.sums_of(item.file.name)
                lacking.append(self._with_uses(replace(item, begins=begins, ends=ends, sums=sums)))
        return lacking

    async def _fill(self, to_mirror: Sequence[FileRanges], wanted: Sequence[FileRanges]) -> None:
        if self.mirror is not None:
            await self.mirror.fill(self.objects, to_mirror)
            await self.mirror.fill(self.objects, wanted)
            return
        tasks = [
            self._one(item, at, stop)
            for item in wanted
            for begin, end in zip(item.begins.tolist(), item.ends.tolist(), strict=True)
            for at, stop in split(begin, end)
        ]
        await gathered(tasks)

    async def _one(self, item: FileRanges, begin: int, end: int) -> None:
        assert item.out is not None
        data = await self.objects.get(item.file.name, begin, end, prover(item, begin))
        item.out[begin:end] = np.frombuffer(data, np.uint8)

    # Page sums.

    def sums_of(self, name: str) -> Uint64Array | None:
        """Return the page sums of a file, downloaded once; None if pages are not verified."""
        if not self.network.options.verify_pages:
            return None
        if name not in self._sums:
            number = self._numbers[name.partition("/")[0]]
            shard = self.manifest.shards[number]
            file = sums_file(shard.name)
            is_copied = self._small(file).exists()
            if not is_copied:
                self.download_indexes(number)
            if not self._small(file).exists():
                raise missing_sums(self.address / file)
            try:
                self._sums.update(read_sums(self._small(file), shard))
            except StoreCorruptError:
                if not is_copied:
                    raise
                self._small(file).unlink(missing_ok=True)  # it rotted on this disk
                return self.sums_of(name)
        return self._sums[name]

    # Small files.

    def listed(self, folder: str) -> dict[str, int]:
        """Return the names and sizes of the files in a folder next to the shards; listed once."""
        if folder not in self._listed:
            begun = self._listings.pop(folder, None)
            objects = begun.result() if begun else Client(self.address, self.network.options).list(folder)
            self.network.counters.requests += 1
            self._listed[folder] = {item.name: item.bytes for item in objects}
        return self._listed[folder]

    def has(self, name: str) -> bool:
        """Return whether a file next to the shards exists in object storage; it is listed only once."""
        return name in self.listed(name.rpartition("/")[0])

    def download(self, name: str) -> Path | None:
        """Return the local copy of a file next to the shards, downloaded if needed; None if it does not exist."""
        if not self._small(name).exists():
            size = self.listed(name.rpartition("/")[0]).get(name)
            if size is None:
                return None
            self._copy([_Copy(name, size)])
        return self._small(name)

    def download_origins(self, shard: str) -> None:
        """Download the file with the origins of the documents of a shard: that of its unit, if there is one."""
        if not layout.is_shard_name(shard):
            return
        # As numbers: from 100,000 shards on, names do not sort as they do.
        firsts = {
            int(found[1]): name
            for name in self.listed(layout.ORIGINS_FOLDER)
            if (found := re.fullmatch(r"[^/]+/(\d+)\.bin", name))
        }
        first = max((first for first in firsts if first <= layout.shard_number(shard)), default=None)
        if first is not None:
            self.download(firsts[first])

    def download_folder(self, folder: str) -> Path:
        """Download a folder next to the shards; return its local copy, which is empty if there is none."""
        for name in self.listed(folder):
            self.download(name)
        return self.folder / folder

    def _small(self, name: str) -> Path:
        """Return the path of the copy of a small file."""
        file = self.folder / name
        return file if self._spare is None or file.exists() else self._spare / name

    def _discard_wrong(self, file: Path, info: layout.FileInfo) -> None:
        """Remove the copy of an index that is not what the manifest says; done once a process."""
        if file in self._checked or not self.network.options.verify_pages or not file.exists():
            return
        with file.open("rb") as copied:
            is_right = file_digest(copied, xxhash.xxh3_128).hexdigest() == info.xxh3
        if is_right:
            self._checked.add(file)
        else:
            logger.warning("%s: is not what its checksum says; it is fetched again; check the disk", file)
            file.unlink(missing_ok=True)

    def download_indexes(self, number: int = 0) -> None:
        """Download indexes and page sums of a shard, and of shards after it, because they are needed soon."""
        sums = self.listed(layout.SUMS_FOLDER) if self.network.options.verify_pages else {}
        jobs: list[_Copy] = []
        total = 0
        for shard in self.manifest.shards[number:]:
            file = sums_file(shard.name)
            mine = [_Copy(file, sums[file])] if file in sums else []
            mine += [
                _Copy(f"{shard.name}/{name}", shard.files[name].bytes, shard.files[name].xxh3)
                for name in sorted(self._indexes & shard.files.keys())
            ]
            total += sum(job.bytes for job in mine)
            if jobs and total > NEAR_BYTES:
                break
            jobs += mine
        self._copy(jobs)

    def _copy(self, jobs: Sequence[_Copy]) -> None:
        """Copy objects to files; one process of a machine does it, the others wait.

        If the disk of the folder has no room, they go to a folder of this user's.
        """
        missing = [job for job in jobs if not self._small(job.name).exists()]
        if not missing:
            return
        try:
            self._copy_to(self._spare or self.folder, missing)
        except OSError as error:
            if isinstance(error, TokenmillError):
                raise
            spare = private_folder("remote")
            if self._spare is None and spare is not None and spare != self.folder.parent:
                self._spare = spare / self.folder.name
                self._temporary.append(_shared(self._spare))
                warn_unused(self.network, self.folder.parent, error)
                self._copy(missing)
                return
            raise StoreError(
                f"{self._spare or self.folder}: no room for the offsets and page sums of {self.address}: "
                f"{error.strerror}; free some, or name another mirror under [remote]"
            ) from error

    def _copy_to(self, folder: Path, jobs: Sequence[_Copy]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            with suppress(TimeoutError):  # the other one was stopped, and any number may copy the same
                stack.enter_context(locked(folder / ".lock", self.network.options.deadline))
            missing = [job for job in jobs if not (folder / job.name).exists()]
            if missing:
                Loop.current().start(gathered([self._copy_one(folder / job.name, job) for job in missing])).result()

    async def _copy_one(self, file: Path, job: _Copy) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with new_file(file) as descriptor:

            async def part(at: int, stop: int) -> None:
                await on_disk(write_all, descriptor, await self.objects.get(job.name, at, stop), at)

            await gathered([part(at, stop) for at, stop in split(0, job.bytes)])
            checksum = await on_disk(_checksum, descriptor) if job.xxh3 is not None else None
            if checksum != job.xxh3:
                raise StoreCorruptError(
                    f"{self.address / job.name}: checksum must be {job.xxh3}, got {checksum}; {layout.WAY_OUT}"
                )
        self._checked.add(file)


def _checksum(descriptor: int) -> str:
    with open(descriptor, "rb", closefd=False) as copied:
        return file_digest(copied, xxhash.xxh3_128).hexdigest()


@dataclass(frozen=True, slots=True)
class _Copy:
    """An object that becomes a file of the same name on this machine."""

    name: str
    bytes: int
    xxh3: str | None = None
    """What its checksum must be; None: it is checked by what reads it."""


# From an address to the files of a store.


def open_remote(text: str, network: Network) -> RemoteFiles:
    """Open the store at an address by reading its manifest, which is downloaded each time."""
    options = network.options
    address = parse_address(text, options)
    check_platform(str(address))
    client = Client(address, options)
    try:
        with ThreadPoolExecutor(3) as pool:  # with it what is wanted next, for a round trip less
            body_read = pool.submit(client.get, layout.MANIFEST)
            probe = pool.submit(client.check_redirect, layout.MANIFEST)
            listings = (
                {layout.SUMS_FOLDER: pool.submit(client.list, layout.SUMS_FOLDER)} if options.verify_pages else {}
            )
            try:
                probe.result()
                body = body_read.result()
            except BaseException:
                client.stop()
                raise
    except StoreMissingError:
        raise StoreMissingError(
            f"{address}: a store must be an address with {layout.MANIFEST} below it, got none; check the address, "
            "or upload a store with `tokenmill upload`; files of other projects are read from disk alone"
        ) from None
    network.counters.requests += 1 + (address.endpoint is not None)
    network.counters.bytes += len(body)
    known = xxhash.xxh3_128_hexdigest(f"{address} {address.endpoint}".encode() + body)
    name = f"{re.sub(r'[^A-Za-z0-9._-]', '-', address.name)[:40]}-{known[:16]}"
    folder, temporary = _store_folder(address, network, name, body)
    return RemoteFiles(address, network, folder, layout.read_manifest(folder), listings, temporary)


def _store_folder(
    address: Address, network: Network, name: str, manifest: bytes
) -> tuple[Path, SharedFolder | None]:
    """Return a folder with the manifest of a store; and the same as a temporary one if it is not in a mirror."""
    mirror = network.options.mirror
    if mirror is not None:
        place = Path(mirror).expanduser()
        try:
            return _with_manifest(place / name, manifest), None
        except OSError as error:
            if error.errno not in _FULL:
                raise ConfigError(
                    f"{address}: mirror must be a folder that can be written to, got {mirror}: {error.strerror}; "
                    "name another one under [remote]"
                ) from error
            warn_unused(network, place, error)
    private = private_folder("remote")
    if private is not None:
        with suppress(OSError):
            temporary = _shared(private / name)
            return _with_manifest(private / name, manifest), temporary
    raise ConfigError(
        f"{address}: there must be a folder for its small files, got none that can be written to; name one as "
        "mirror under [remote]"
    )


def _shared(folder: Path) -> SharedFolder:
    """Use a folder of temporary copies. Row indexes stay, because it takes long to compute them."""
    return SharedFolder(folder, keep=(layout.ROWS_FOLDER,))


def _with_manifest(folder: Path, manifest: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / layout.MANIFEST
    if not file.exists() or file.read_bytes() != manifest:
        write_atomically(file, manifest, writer=f"-{this_process()}-{threading.get_ident()}")
    return folder
