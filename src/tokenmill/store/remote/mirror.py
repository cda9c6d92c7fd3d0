"""The mirror: a folder on local disk with the pages of remote files that were read, shared by all processes.

One file has the pages of one object, with holes where pages are absent, then the states of all pages, and the steps
at which the run needs them again. A process that fetches pages holds a lock on them, which ends with the
process. A page is marked as present once all of it was written. Where the store has page sums, it is verified each
time it is read. When the limit is reached, the page whose next use is furthest away is evicted first (Belady's
algorithm, which is optimal because the plan knows all uses).

On a disk that is full or broken, pages are not stored: they are fetched, and training continues.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import logging
import os
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from tokenmill.errors import StoreError
from tokenmill.store.files import write_all, write_atomically
from tokenmill.store.layout import PAGE_BYTES
from tokenmill.store.lease import locked
from tokenmill.store.ranges import FileRanges
from tokenmill.store.remote.fetch import MAX_REQUEST_BYTES, Network, RemoteObjects, gathered, on_disk
from tokenmill.store.sums import wrong_page
from tokenmill.types import BoolArray, Int64Array, Uint8Array, Uint32Array

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("tokenmill")
ABSENT, HERE, UNVERIFIED = 0, 1, 2
"""States of a page. An unverified one was written before the machine was last started, so its bytes may never have
reached the disk: it is used only if its checksum is right."""
NEVER = 2**32 - 1
"""Next-use step of a page that is not needed again."""
SLACK = 50
"""The limit divided by this is made free at a time, or all pages would be looked at for each block."""
WHOLE_REQUESTS = 8
"""Requests under way for what goes to the disk alone: each is large."""
FOLDER, SUFFIX = "pages", ".pages"
PAGE_ROOM = PAGE_BYTES + 5
"""Bytes of a file of the mirror for each page: the page, its state, and its next use."""
SHORT_WAIT = 0.1
"""Seconds to wait for pages that others have locked, once a lock was waited for in vain."""
_FLOCK = struct.Struct("hhqqi4x" if struct.calcsize("P") == 8 else "hhqqi")
_NONE = np.empty(0, np.int64)
_PUNCH = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


def check_platform(address: str) -> None:
    """Raise `StoreError` on a system that lacks the locks of the mirror, which only Linux has."""
    if not hasattr(fcntl, "F_OFD_SETLK"):
        raise StoreError(
            f"{address}: stores in object storage can only be read on Linux, got {sys.platform}; copy the store "
            "to a local disk and open that copy"
        )


def prover(item: FileRanges, begin: int) -> Callable[[Uint8Array | bytes], int | None] | None:
    """Return a function that finds the first wrong page of bytes at `begin`; None if pages are not verified."""
    return None if item.sums is None else partial(wrong_page, item.sums, begin)


@dataclass(eq=False, slots=True)
class _Part:
    """What is under way of one object."""

    item: FileRanges
    pages: PageFile | None
    """None: it cannot be opened, so nothing of it is here."""
    missing: list[tuple[int, int]] = field(default_factory=list)
    """Runs of pages that are not here."""
    uses: list[Uint32Array] = field(default_factory=list)
    """When the pages of each of these runs are needed again."""
    kept: frozenset[int] | None = None
    """Those of them that are worth their room; None: all."""

    def states(self, first: int, end: int) -> bytes:
        return bytes(end - first) if self.pages is None else self.pages.states(first, end)


class PageFile:
    """An open file of the mirror: the pages of one object, then the state of each, then the next use of each.

    It is one file, so that whatever removes or cuts the pages takes their states with them. It is not mapped: on a
    full disk, or after a cut, a map would end the process.
    """

    def __init__(self, descriptor: int, pages: int) -> None:
        self.descriptor, self.pages = descriptor, pages
        self._states = pages * PAGE_BYTES
        self._uses = self._states + pages

    def states(self, first: int, end: int) -> bytes:
        """Return the state of each page; one that cannot be read is absent."""
        try:
            found = os.pread(self.descriptor, end - first, self._states + first)
        except OSError:
            found = b""
        return found.ljust(end - first, b"\0")

    def next_uses(self) -> Uint32Array:
        """Return when each page is needed again."""
        found = os.pread(self.descriptor, 4 * self.pages, self._uses)
        return np.frombuffer(found.ljust(4 * self.pages, b"\0"), "<u4")

    def mark(self, first: int, count: int, state: int) -> None:
        """Set the state of pages."""
        write_all(self.descriptor, bytes([state]) * count, self._states + first)

    def note_uses(self, first: int, uses: Uint32Array) -> None:
        """Set when pages are needed again."""
        with suppress(OSError):  # then they may go too early
            write_all(self.descriptor, uses.astype("<u4").data.cast("B"), self._uses + 4 * first)

    def drop(self, first: int, count: int) -> None:
        """Make a hole of pages."""
        self.mark(first, count, ABSENT)
        _punch(self.descriptor, first * PAGE_BYTES, count * PAGE_BYTES)

    def lock(self, first: int, count: int, kind: int) -> bool:
        """Try to lock pages against other openings of the file, in this process or another; or unlock them."""
        request = _FLOCK.pack(kind, os.SEEK_SET, first, count, 0)
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_OFD_SETLK, request)
        except OSError:
            return False
        return True


@contextmanager
def page_file(file: Path, pages: int) -> Iterator[PageFile]:
    """Open the file of an object; create it if it is missing or has another size."""
    size = pages * PAGE_ROOM
    descriptor = _opened(file, size)
    if descriptor is None:
        file.parent.mkdir(parents=True, exist_ok=True)
        new, name = tempfile.mkstemp(prefix=".tmp-", dir=file.parent)
        try:
            os.fchmod(new, 0o644)
            os.ftruncate(new, size)
            with suppress(FileExistsError):  # another process was faster
                os.link(name, file)
        finally:
            os.close(new)
            os.unlink(name)
        descriptor = _opened(file, size)
        if descriptor is None:
            raise OSError(errno.ESTALE, "file of the mirror was changed from outside", str(file))
    try:
        yield PageFile(descriptor, pages)
    finally:
        os.close(descriptor)


def _opened(file: Path, size: int) -> int | None:
    """Return a descriptor of a file of this size; one of another size is removed."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    if os.fstat(descriptor).st_size == size:
        return descriptor
    os.close(descriptor)
    file.unlink(missing_ok=True)
    return None


class Mirror:
    """The pages of one store that are on this disk."""

    def __init__(self, folder: Path, root: Path, network: Network) -> None:
        """Open the mirror of a store in its own folder, one of those below `root` that share a limit.

        Raises OSError where the disk has no room or no locks.
        """
        if sys.platform != "linux":
            raise OSError(errno.ENOTSUP, "a mirror needs the locks and holes of Linux", str(root))
        self.folder, self.root, self.network = folder / FOLDER, root, network
        self._lock, self._pin_lock = root / ".mirror.lock", self.folder / ".lock"
        self.limit = network.options.limit_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        self.keeps = True
        """Whether pages are still stored."""
        self._patience = network.options.deadline
        """Seconds to wait for pages that another process has locked."""
        self._room = threading.Lock()
        """Held by the thread of this process that makes room; the lock file is for other processes."""
        self._last, self._missed = NEVER, 0
        """When pages were last let go, those needed again after this step were not worth their room; and how many
        bytes had no room since."""
        with self._locked(self._lock, network.options.deadline):
            self._notice_restart()
            self._write_used(sum(int(np.count_nonzero(states)) for _, states, _ in self._all()) * PAGE_BYTES)
            with (self.folder / "boot").open("rb") as file:
                if not PageFile(file.fileno(), 0).lock(0, 1, fcntl.F_RDLCK):
                    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), str(self.folder))

    @contextmanager
    def _locked(self, file: Path, seconds: float) -> Iterator[None]:
        with locked(file, seconds) as is_locked:
            if not is_locked:
                raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), str(file))
            yield

    def _stop(self, error: OSError) -> None:
        """Store no more pages, as the disk or another process does not let us."""
        self.keeps = False
        warn_unused(self.network, self.root, error)

    # Versions of objects.

    def pins(self) -> dict[str, str]:
        """Return the versions of objects whose pages are here."""
        try:
            return dict(json.loads((self.folder / "versions.json").read_bytes()))
        except (OSError, ValueError, TypeError):
            return {}

    def pin(self, name: str, etag: str) -> str:
        """Note the version of an object, unless one is noted; return the one that counts."""
        # Requests wait for it, so not for long, and it is not synced: after a crash nothing is trusted anyway.
        try:
            with self._locked(self._pin_lock, self.network.options.deadline / 12):
                known = self.pins()
                if name not in known and self.keeps:
                    partial = self.folder / ".versions.tmp"
                    partial.write_text(json.dumps({**known, name: etag}))
                    partial.replace(self.folder / "versions.json")
                return known.get(name, etag)
        except OSError as error:
            self._stop(error)  # pages of an unknown version must not be stored
            return self.pins().get(name, etag)

    # Filling.

    def lacking(self, name: str, size: int, begins: Int64Array, ends: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the parts of ranges of whole pages that are not here, in order; none if nothing can be stored."""
        try:
            with self._page_file(name, size) as pages:
                runs = [
                    run
                    for first, end in zip(
                        (begins // PAGE_BYTES).tolist(), (-(-ends // PAGE_BYTES)).tolist(), strict=True
                    )
                    for run in _absent(pages.states(first, end), first)
                ]
        except OSError as error:
            self._stop(error)
            return _NONE, _NONE
        lacking = np.array(runs, np.int64).reshape(-1, 2) * PAGE_BYTES
        return lacking[:, 0], np.minimum(lacking[:, 1], size)

    async def fill(self, objects: RemoteObjects, wanted: Sequence[FileRanges]) -> None:
        """Read ranges into memory: pages in the mirror from disk, all others from the objects."""
        to_disk_alone = any(item.to_mirror for item in wanted)
        at_a_time = asyncio.Semaphore(WHOLE_REQUESTS if to_disk_alone else self.network.options.concurrency)
        with ExitStack() as stack:
            parts = [await on_disk(self._begin, item, stack) for item in wanted]
            await self._make_room(parts)
            missing = [(part, run) for part in parts for run in part.missing]
            await gathered([self._download(objects, part, run, at_a_time) for part, run in missing])

    def _begin(self, item: FileRanges, stack: ExitStack) -> _Part:
        """Read the pages of an object that are in the mirror, and record when each is needed again."""
        part, at = _Part(item, None), 0
        try:
            part.pages = stack.enter_context(self._page_file(item.file.name, item.file.bytes))
        except OSError as error:
            self._stop(error)
        all_uses = None if item.uses is None else np.minimum(item.uses, NEVER).astype(np.uint32)
        firsts, ends = item.begins // PAGE_BYTES, -(-item.ends // PAGE_BYTES)
        for first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
            # Where nobody knows when a page is needed again, it goes first.
            uses = np.full(end - first, NEVER, np.uint32) if all_uses is None else all_uses[at : at + end - first]
            at += end - first
            if all_uses is not None and part.pages is not None:
                part.pages.note_uses(first, uses)
            for begin, stop in _parts(part.states(first, end), first):
                if not self._read(part, begin, stop):
                    part.missing.append((begin, stop))
                    part.uses.append(uses[begin - first : stop - first])
                    if all_uses is None and self.limit is not None and part.pages is not None:
                        part.pages.note_uses(begin, part.uses[-1])
        return part

    async def _download(
        self, objects: RemoteObjects, part: _Part, run: tuple[int, int], at_a_time: asyncio.Semaphore
    ) -> None:
        """Download missing pages, unless another process does: then wait for it, or for its end."""
        first, end = run
        async with at_a_time:
            began, pause = monotonic(), 0.002
            while part.pages is not None and not part.pages.lock(first, end - first, fcntl.F_WRLCK):
                if await on_disk(self._read, part, first, end):
                    return
                if monotonic() - began > self._patience:
                    self._patience = min(SHORT_WAIT, self._patience)
                    _warn(
                        self.network,
                        "%s: another process keeps pages of this mirror locked, so they are not stored; if "
                        "it was stopped, continue or end it: `lslocks` names it",
                        self.root,
                    )
                    await self._fetch(objects, part, first, end, keep=False)
                    return
                await asyncio.sleep(pause)
                pause = min(0.05, 2 * pause)
            if part.pages is None:
                await self._fetch(objects, part, first, end, keep=False)
                return
            try:
                # The process that held the lock before may have downloaded some of them.
                for at, stop in _parts(part.states(first, end), first):
                    if not await on_disk(partial(self._read, lock=False), part, at, stop):
                        await self._fetch(objects, part, at, stop)
            finally:
                part.pages.lock(first, end - first, fcntl.F_UNLCK)

    async def _fetch(self, objects: RemoteObjects, part: _Part, first: int, end: int, *, keep: bool = True) -> None:
        item = part.item
        if item.out is None and not (keep and self.keeps):
            return
        begin, stop = first * PAGE_BYTES, min(end * PAGE_BYTES, item.file.bytes)
        data = np.frombuffer(await objects.get(item.file.name, begin, stop, prover(item, begin)), np.uint8)
        if item.out is not None:
            item.out[begin:stop] = data
        if keep:
            await on_disk(self._keep, part, data, first, end)

    def _read(self, part: _Part, first: int, end: int, *, lock: bool = True) -> bool:
        """Read pages from disk and verify them; return whether all of them are here, and right.

        A lock keeps them from leaving meanwhile.
        """
        pages, out = part.pages, part.item.out
        if pages is None or ABSENT in pages.states(first, end):
            return False
        if out is None:
            return True
        if lock and not pages.lock(first, end - first, fcntl.F_RDLCK):
            return False
        try:
            is_right = self._is_right(part.item, pages, out, first, end)
        except OSError:  # a bad place of the disk: the pages are fetched, and written again
            is_right = False
        finally:
            if lock:
                pages.lock(first, end - first, fcntl.F_UNLCK)
        return is_right

    def _is_right(self, item: FileRanges, pages: PageFile, out: Uint8Array, first: int, end: int) -> bool:
        states, begin, stop = pages.states(first, end), first * PAGE_BYTES, min(end * PAGE_BYTES, item.file.bytes)
        find_wrong = prover(item, begin)
        if ABSENT in states or (find_wrong is None and UNVERIFIED in states):
            return False
        if os.preadv(pages.descriptor, [out[begin:stop].data], begin) != stop - begin:
            return False
        wrong = None if find_wrong is None else find_wrong(out[begin:stop])
        if wrong is not None:
            self.network.count("corrupt")
            if states[wrong - first] == HERE:
                _warn(
                    self.network,
                    "%s: a page of this mirror is not what its checksum says, so it is fetched again; "
                    "look for errors of the disk",
                    self.root,
                )
            pages.mark(wrong, 1, ABSENT)
            return False
        if UNVERIFIED in states:
            pages.mark(first, end - first, HERE)
        self.network.count("hits", stop - begin)
        return True

    def _keep(self, part: _Part, data: Uint8Array, first: int, end: int) -> None:
        """Write pages that were fetched, unless they are not worth their room."""
        pages = part.pages
        if not self.keeps or pages is None:
            return
        runs = [(0, end - first)]
        if part.kept is not None:
            worth = [page in part.kept for page in range(first, end)]
            runs = runs if all(worth) else _runs(worth) if any(worth) else []
        for at, stop in runs:
            block = data[at * PAGE_BYTES : stop * PAGE_BYTES]
            try:
                write_all(pages.descriptor, block.data, (first + at) * PAGE_BYTES)
                # Only now: a process that dies before leaves nothing to trust.
                pages.mark(first + at, stop - at, HERE)
            except OSError as error:
                with suppress(OSError):
                    pages.drop(first + at, stop - at)  # the room of what was written of them
                self._stop(error)
                return

    # Room.

    async def _make_room(self, parts: Sequence[_Part]) -> None:
        """Choose which of the missing pages to store, and evict others if needed."""
        if self.limit is None or not any(part.missing for part in parts):
            return
        end, pause = monotonic() + self._patience, 0.002
        while self.keeps:
            try:
                await on_disk(self._settle_room, parts)
                return
            except TimeoutError as error:
                if monotonic() > end:
                    self._stop(error)
            except OSError as error:
                self._stop(error)
            await asyncio.sleep(pause)
            pause = min(0.05, 2 * pause)

    def _settle_room(self, parts: Sequence[_Part]) -> None:
        with self._room, self._locked(self._lock, 0):
            self._choose_pages(parts)

    def _choose_pages(self, parts: Sequence[_Part]) -> None:
        assert self.limit is not None
        pages = [np.concatenate([np.arange(*run) for run in part.missing] or [_NONE]) for part in parts]
        new: Uint32Array = np.concatenate([uses for part in parts for uses in part.uses])
        size = new.size * PAGE_BYTES
        used = self._read_used()
        if used + size <= self.limit:
            self._write_used(used + size)
            return
        self._missed += size
        worth = new < self._last
        if self._missed >= self.limit // SLACK or used + np.count_nonzero(worth) * PAGE_BYTES > self.limit:
            self._missed = 0
            used, worth = self._evict(new)
        self._write_used(used + int(np.count_nonzero(worth)) * PAGE_BYTES)
        edges = np.cumsum([0, *(each.size for each in pages)])
        for number, part in enumerate(parts):
            part.kept = frozenset(pages[number][worth[edges[number] : edges[number + 1]]].tolist())

    def _evict(self, new: Uint32Array) -> tuple[int, BoolArray]:
        """Let the pages go that are needed again last, of those here and those that come.

        Returns how many bytes stay here, and which of the new pages are worth their room.
        """
        assert self.limit is not None
        tables = list(self._all())
        present = [np.flatnonzero(states != ABSENT) for _, states, _ in tables]
        next_uses = [next_use[pages] for pages, (_, _, next_use) in zip(present, tables, strict=True)]
        steps = np.concatenate([*next_uses, new])
        room = max(1, (self.limit - self.limit // SLACK) // PAGE_BYTES)
        if steps.size <= room:
            self._last = NEVER
            return sum(pages.size for pages in present) * PAGE_BYTES, np.ones(new.size, np.bool_)
        # Of those needed at the last step that has room the first stay: those here before those that come.
        self._last = int(np.partition(steps, room - 1)[room - 1])
        stays = steps < self._last
        at_last = np.flatnonzero(steps == self._last)
        stays[at_last[: room - int(np.count_nonzero(stays))]] = True
        used, begin = 0, 0
        for pages, (file, states, _) in zip(present, tables, strict=True):
            gone = pages[~stays[begin : begin + pages.size]]
            begin += pages.size
            used += pages.size * PAGE_BYTES - self._drop(file, states.size, gone)
        return used, stays[begin:]

    def _drop(self, file: Path, num_pages: int, gone: Int64Array) -> int:
        """Make holes of pages that nobody reads now; return how many bytes went."""
        if not gone.size:
            return 0
        dropped = 0
        heads = np.flatnonzero(np.concatenate([[True], np.diff(gone) > 1]))
        counts = np.diff(np.append(heads, gone.size))
        with page_file(file, num_pages) as pages:
            for first, count in zip(gone[heads].tolist(), counts.tolist(), strict=True):
                if pages.lock(first, count, fcntl.F_WRLCK):
                    try:
                        pages.drop(first, count)
                    finally:
                        pages.lock(first, count, fcntl.F_UNLCK)
                    dropped += count * PAGE_BYTES
        self.network.count("evicted", dropped)
        return dropped

    # What all processes share.

    def _page_file(self, name: str, size: int) -> AbstractContextManager[PageFile]:
        return page_file(self.folder / f"{name}{SUFFIX}", -(-size // PAGE_BYTES))

    def _all(self) -> Iterator[tuple[Path, Uint8Array, Uint32Array]]:
        """Yield file, states and next uses of every object of every store below the root."""
        for file in sorted(self.root.glob(f"*/{FOLDER}/**/*{SUFFIX}")):
            with suppress(FileNotFoundError):
                num_pages, rest = divmod(file.stat().st_size, PAGE_ROOM)
                if not rest:
                    with page_file(file, num_pages) as pages:
                        states = np.frombuffer(pages.states(0, num_pages), np.uint8)
                        yield file, states, pages.next_uses()

    def _notice_restart(self) -> None:
        """Trust no page that was written before the machine was last started: its bytes may not be on the disk."""
        boot = _boot()
        mark = self.folder / "boot"
        before = mark.read_text(errors="replace") if mark.exists() else ""
        if before != boot:
            for file, states, _ in self._all():
                if self.folder in file.parents:
                    with page_file(file, states.size) as pages:
                        for first, end in _runs(states == HERE):
                            pages.mark(first, end - first, UNVERIFIED)
            write_atomically(mark, boot.encode())

    def _read_used(self) -> int:
        with suppress(OSError, ValueError):
            return int((self.root / ".used").read_text())
        return 0

    def _write_used(self, used: int) -> None:
        # In place and always of the same size: a full disk must not empty it.
        descriptor = os.open(self.root / ".used", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            write_all(descriptor, b"%020d" % used, 0)
        finally:
            os.close(descriptor)


def warn_unused(network: Network, root: Path, error: OSError) -> None:
    """Warn once a run that nothing more can be written to a mirror."""
    text = "%s: nothing more can be stored in this mirror: %s; training continues, and fetches what is not in it"
    _warn(network, text, root, error.strerror or error)


def _warn(network: Network, text: str, *values: object) -> None:
    if text not in network.told:
        network.told.add(text)
        logger.warning(text, *values)


def _absent(states: bytes, first: int) -> list[tuple[int, int]]:
    """Return the runs of absent pages, of pages from `first` on."""
    return [(first + begin, first + end) for begin, end in _runs(np.frombuffer(states, np.uint8) == ABSENT)]


def _parts(states: bytes, first: int) -> list[tuple[int, int]]:
    """Return pages from `first` on as runs that are each here or each absent, none longer than a request."""
    # A few, nearly always all alike: numpy would take ten times as long.
    num_absent, most = states.count(ABSENT), MAX_REQUEST_BYTES // PAGE_BYTES
    runs = [(0, len(states))]
    if num_absent not in (0, len(states)):
        absent = np.frombuffer(states, np.uint8) == ABSENT
        runs = [*_runs(absent), *_runs(~absent)]
    return [(first + at, first + min(at + most, stop)) for begin, stop in runs for at in range(begin, stop, most)]


def _runs(chosen: Any) -> list[tuple[int, int]]:  # noqa: ANN401 - flags
    """Return the runs of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _punch(descriptor: int, begin: int, size: int) -> None:
    """Give the room of a part of a file back to the disk."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(descriptor, _PUNCH, ctypes.c_longlong(begin), ctypes.c_longlong(size)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _boot() -> str:
    """Return what tells one start of the machine from another."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "unknown"
