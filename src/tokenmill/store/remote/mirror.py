"""The mirror: a folder on local disk with the pages of remote files that were read, shared by all processes.

A file of the mirror has the size of its object, with holes where pages are not here. Its table says of each page
whether it is here, and the step at which the run needs it again. A process that fetches pages holds a lock on them,
which ends with the process; a page counts as here once all of it was written. When the limit is reached, those
pages go first that are needed again last, by the plan: Belady's rule, which nobody can better.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import json
import logging
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.store.durable import locked, write_atomically
from tokenmill.store.layout import PAGE_BYTES
from tokenmill.store.remote.fetch import MAX_REQUEST_BYTES, Network, RemoteObjects, gathered
from tokenmill.store.verify import wrong_page
from tokenmill.types import BoolArray, Int64Array, Uint8Array, Uint32Array, Uint64Array, counted_from

logger = logging.getLogger("tokenmill")
ABSENT, HERE, UNPROVEN = 0, 1, 2
"""What a page is; one that was written before the machine was last started is proven again before it is used."""
NEVER = 2**32 - 1
"""A step that does not come."""
SLACK = 50
"""The limit divided by this is made free at a time, or all pages would be looked at for each block."""
WHOLE_REQUESTS = 8
"""Requests under way for what goes to the disk alone: each is large."""
FOLDER = "pages"
_FLOCK = struct.Struct("hhqqi4x" if struct.calcsize("P") == 8 else "hhqqi")
_NONE = np.empty(0, np.int64)
_PUNCH = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


@dataclass(frozen=True, eq=False, slots=True)
class Wanted:
    """What a block of rows needs of one object."""

    name: str
    size: int
    """Of the whole object."""
    out: Uint8Array | None
    """Where its bytes go, at their own offsets; None: nowhere but to the mirror."""
    begins: Int64Array
    ends: Int64Array
    """Ranges of whole pages, ascending, that neither touch nor overlap."""
    sums: Uint64Array | None = None
    """The checksums of its pages; None: there are none."""
    next_use: Int64Array | None = None
    """The step at which each page of the ranges is needed again; None: nobody knows."""

    @property
    def pages(self) -> Int64Array:
        """The numbers of all pages, in the order of the ranges."""
        first = self.begins // PAGE_BYTES
        return counted_from(first, -(-self.ends // PAGE_BYTES) - first)

    def prover(self, begin: int) -> Callable[[Uint8Array | bytes], int | None] | None:
        """Return what finds the first wrong page of bytes that begin there; None where pages have no checksums."""
        return None if self.sums is None else partial(wrong_page, self.sums, begin)


@dataclass(eq=False, slots=True)
class _Part:
    """What is under way of one object."""

    item: Wanted
    table: PageTable
    descriptors: tuple[int, int]
    """Of the data, and of the table, whose locks are its own."""
    missing: list[tuple[int, int]] = field(default_factory=list)
    """Runs of pages that are not here."""
    kept: frozenset[int] | None = None
    """Those of them that are worth their room; None: all."""


class PageTable:
    """What is here of one object: the data with holes, and the state of each page."""

    def __init__(self, file: Path, size: int) -> None:
        self.file, self.pages = file, -(-size // PAGE_BYTES)
        file.parent.mkdir(parents=True, exist_ok=True)
        table = _table_of(file)
        for each, length in ((file, size), (table, 5 * self.pages)):
            descriptor = os.open(each, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if os.fstat(descriptor).st_size != length:
                    os.ftruncate(descriptor, length)  # a new one, or one that was cut: holes count as absent
            finally:
                os.close(descriptor)
        mapped = np.empty(0, np.uint8)
        if self.pages:  # as a plain array, of which a part is had in less time
            mapped = np.memmap(table, np.uint8, "r+", shape=(5 * self.pages,)).view(np.ndarray)
        self.state: Uint8Array = mapped[4 * self.pages :]
        self.next_use: Uint32Array = mapped[: 4 * self.pages].view("<u4")


@contextmanager
def _opened(file: Path) -> Iterator[tuple[int, int]]:
    """Give descriptors of the data and of its table, whose locks are those of this opening alone."""
    with file.open("r+b", buffering=0) as data, _table_of(file).open("r+b", buffering=0) as table:
        yield data.fileno(), table.fileno()


def lock_pages(table: int, first: int, count: int, kind: int) -> bool:
    """Try to lock pages against other openings of a table, in this process or another; or unlock them."""
    request = _FLOCK.pack(kind, os.SEEK_SET, first, count, 0)
    try:
        fcntl.fcntl(table, fcntl.F_OFD_SETLK if hasattr(fcntl, "F_OFD_SETLK") else fcntl.F_SETLK, request)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if kind == fcntl.F_UNLCK:
            return True
        raise
    return True


class Mirror:
    """The pages of one store that are on this disk."""

    def __init__(self, folder: Path, root: Path, network: Network) -> None:
        """Open the mirror of a store in its own folder, one of those below `root` that share a limit."""
        self.folder, self.root, self.network = folder / FOLDER, root, network
        self._lock = root / ".mirror.lock"
        self.limit = network.options.limit_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        self._tables: dict[str, PageTable] = {}
        self._keeps = self.limit != 0
        self._last, self._missed = NEVER, 0
        """When pages were last let go, those needed again after this step were not worth their room; and how many
        bytes had no room since."""
        with locked(self._lock):
            self._notice_restart()
            self._write_used(sum(int(np.count_nonzero(state)) for _, state, _ in self._all()) * PAGE_BYTES)

    # Versions of objects.

    def pins(self) -> dict[str, str]:
        """Return the versions of objects whose pages are here."""
        try:
            return dict(json.loads((self.folder / "versions.json").read_bytes()))
        except (OSError, ValueError):
            return {}

    def pin(self, name: str, etag: str) -> str:
        """Note the version of an object, unless one is noted; return the one that counts."""
        with locked(self._lock):
            known = self.pins()
            if name not in known:
                write_atomically(self.folder / "versions.json", json.dumps({**known, name: etag}).encode())
            return known.get(name, etag)

    # Filling.

    def lacking(self, name: str, size: int, begins: Int64Array, ends: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the parts of ranges of whole pages that are not here, in order."""
        state = self._table(name, size).state
        runs = [
            (first + begin, first + end)
            for first, last in zip((begins // PAGE_BYTES).tolist(), (-(-ends // PAGE_BYTES)).tolist(), strict=True)
            for begin, end in _runs(state[first:last] == ABSENT)
        ]
        pages = np.array(runs, np.int64).reshape(-1, 2) * PAGE_BYTES
        return pages[:, 0], np.minimum(pages[:, 1], size)

    async def fill(self, objects: RemoteObjects, wanted: Sequence[Wanted]) -> None:
        """Bring all that is wanted into memory: from disk what is here, from the object what is not."""
        to_disk_alone = any(item.out is None for item in wanted)
        at_a_time = asyncio.Semaphore(WHOLE_REQUESTS if to_disk_alone else self.network.options.concurrency)
        with ExitStack() as stack:
            parts = [self._begin(item, stack) for item in wanted]
            self._make_room(parts)
            await gathered([self._bring(objects, part, run, at_a_time) for part in parts for run in part.missing])

    def _begin(self, item: Wanted, stack: ExitStack) -> _Part:
        """Read what is here of an object, before anything leaves; and note when all of it is needed again."""
        table, pages = self._table(item.name, item.size), item.pages
        part = _Part(item, table, stack.enter_context(_opened(table.file)))
        if item.next_use is not None:
            table.next_use[pages] = np.minimum(item.next_use, NEVER)
        elif self.limit is not None:
            table.next_use[pages[table.state[pages] == ABSENT]] = NEVER  # nobody knows, so it goes first
        firsts, ends = item.begins // PAGE_BYTES, -(-item.ends // PAGE_BYTES)
        for first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
            for at, stop in _parts(table.state, first, end):
                if not self._read(part, at, stop):
                    part.missing.append((at, stop))
        return part

    async def _bring(
        self, objects: RemoteObjects, part: _Part, run: tuple[int, int], at_a_time: asyncio.Semaphore
    ) -> None:
        """Fetch pages that are not here, unless another process does: then wait for it, or for its end."""
        first, end = run
        pause = 0.002
        async with at_a_time:
            while not lock_pages(part.descriptors[1], first, end - first, fcntl.F_WRLCK):
                if self._read(part, first, end):
                    return
                await asyncio.sleep(pause)
                pause = min(0.05, 2 * pause)
            try:
                # The process that held the lock before may have brought some of them.
                for at, stop in _parts(part.table.state, first, end):
                    if not self._read(part, at, stop, lock=False):
                        await self._fetch(objects, part, at, stop)
            finally:
                lock_pages(part.descriptors[1], first, end - first, fcntl.F_UNLCK)

    async def _fetch(self, objects: RemoteObjects, part: _Part, first: int, end: int) -> None:
        item = part.item
        begin, stop = first * PAGE_BYTES, min(end * PAGE_BYTES, item.size)
        data = np.frombuffer(await objects.get(item.name, begin, stop, item.prover(begin)), np.uint8)
        if item.out is not None:
            item.out[begin:stop] = data
        self._keep(part, data, first, end)

    def _read(self, part: _Part, first: int, end: int, *, lock: bool = True) -> bool:
        """Read pages from disk, if all of them are here, with a lock that keeps them from leaving meanwhile."""
        table, item, (data, locks) = part.table, part.item, part.descriptors
        if not table.state[first:end].all():
            return False
        if item.out is None:
            return True
        if lock and not lock_pages(locks, first, end - first, fcntl.F_RDLCK):
            return False
        try:
            state = table.state[first:end].copy()
            begin, stop = first * PAGE_BYTES, min(end * PAGE_BYTES, item.size)
            if not state.all() or os.preadv(data, [item.out[begin:stop].data], begin) != stop - begin:
                return False
            if (state == UNPROVEN).any():
                prove = item.prover(begin)
                if prove is None or prove(item.out[begin:stop]) is not None:
                    table.state[first:end] = ABSENT
                    return False
                table.state[first:end] = HERE
            self.network.counters.hits += stop - begin
            return True
        finally:
            if lock:
                lock_pages(locks, first, end - first, fcntl.F_UNLCK)

    def _keep(self, part: _Part, data: Uint8Array, first: int, end: int) -> None:
        """Write pages that were fetched, unless they are not worth their room."""
        if not self._keeps:
            return
        runs = [(0, end - first)]
        if part.kept is not None:
            worth = [page in part.kept for page in range(first, end)]
            runs = runs if all(worth) else _runs(worth) if any(worth) else []
        try:
            for at, stop in runs:
                block = data[at * PAGE_BYTES : stop * PAGE_BYTES]
                os.pwrite(part.descriptors[0], block.data, (first + at) * PAGE_BYTES)
                # Only now: a process that dies before leaves nothing to trust.
                part.table.state[first + at : first + stop] = HERE
        except OSError as error:
            self._keeps = False
            logger.warning("%s: nothing more can be kept in this mirror: %s", self.root, error)

    # Room.

    def _make_room(self, parts: Sequence[_Part]) -> None:
        """Say which of the missing pages are kept, and let others go if need be."""
        if self.limit is None or not self._keeps or not parts:
            return
        pages = [np.concatenate([np.arange(*run) for run in part.missing] or [_NONE]) for part in parts]
        new = np.concatenate([part.table.next_use[each] for part, each in zip(parts, pages, strict=True)])
        size = new.size * PAGE_BYTES
        if not size:
            return
        with locked(self._lock):
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
        present = [np.flatnonzero(state != ABSENT) for _, state, _ in tables]
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
        for pages, (file, state, _) in zip(present, tables, strict=True):
            gone = pages[~stays[begin : begin + pages.size]]
            begin += pages.size
            used += pages.size * PAGE_BYTES - self._drop(file, state, gone)
        return used, stays[begin:]

    def _drop(self, file: Path, state: Uint8Array, pages: Int64Array) -> int:
        """Make holes of pages that nobody reads now; return how many bytes went."""
        if not pages.size:
            return 0
        dropped = 0
        heads = np.flatnonzero(np.concatenate([[True], np.diff(pages) > 1]))
        counts = np.diff(np.append(heads, pages.size))
        with _opened(file) as (data, table):
            for first, count in zip(pages[heads].tolist(), counts.tolist(), strict=True):
                if lock_pages(table, first, count, fcntl.F_WRLCK):
                    state[first : first + count] = ABSENT
                    _punch(data, first * PAGE_BYTES, count * PAGE_BYTES)
                    lock_pages(table, first, count, fcntl.F_UNLCK)
                    dropped += count * PAGE_BYTES
        self.network.counters.evicted += dropped
        return dropped

    # What all processes share.

    def _table(self, name: str, size: int) -> PageTable:
        if name not in self._tables:
            self._tables[name] = PageTable(self.folder / name, size)
        return self._tables[name]

    def _all(self) -> Iterator[tuple[Path, Uint8Array, Uint32Array]]:
        """Yield data file, states and steps of every object of every store below the root."""
        for table in sorted(self.root.glob(f"*/{FOLDER}/**/*.table")):
            data, size = table.with_suffix(""), table.stat().st_size // 5
            if size and data.exists():
                mapped = np.memmap(table, np.uint8, "r+", shape=(5 * size,))
                yield data, mapped[4 * size :], mapped[: 4 * size].view("<u4")

    def _notice_restart(self) -> None:
        """Trust no page that was written before the machine was last started: its bytes may not be on the disk."""
        boot = _boot()
        mark = self.folder / "boot"
        before = mark.read_text() if mark.exists() else ""
        if before != boot:
            for file, state, _ in self._all():
                if before and self.folder in file.parents:
                    state[state == HERE] = UNPROVEN
            write_atomically(mark, boot.encode())

    def _read_used(self) -> int:
        with suppress(OSError, ValueError):
            return int((self.root / ".used").read_text())
        return 0

    def _write_used(self, used: int) -> None:
        (self.root / ".used").write_text(str(used))


def _table_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.table")


def _parts(state: Uint8Array, first: int, end: int) -> list[tuple[int, int]]:
    """Return pages `first` to `end` as runs that are each here or each absent, none longer than a request."""
    pages = state[first:end].tobytes()  # a few, nearly always all alike: numpy would take ten times as long
    num_absent, most = pages.count(ABSENT), MAX_REQUEST_BYTES // PAGE_BYTES
    runs = [(0, len(pages))]
    if num_absent not in (0, len(pages)):
        absent = np.frombuffer(pages, np.uint8) == ABSENT
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
