"""Locks and leases: which process may write to a folder, and whether that process is alive."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

from tokenmill.errors import StoreError, StoreExistsError, writing
from tokenmill.store.layout import LEASE


@contextmanager
def locked(file: Path, seconds: float | None = None) -> Iterator[bool]:
    """Keep other processes and threads out by a lock on a file, which ends with its process.

    Raises TimeoutError if another one holds the lock for more than `seconds`: it may have been stopped.
    Gives False where the file system has no locks: then nobody is kept out.
    """
    with file.open("wb") as lock:
        yield _flock(lock, seconds)


def _flock(lock: BinaryIO, seconds: float | None) -> bool:
    try:
        import fcntl
    except ImportError:
        return False
    end = time.monotonic() + (seconds or 0)
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if seconds is None else fcntl.LOCK_NB))
        except BlockingIOError:
            if time.monotonic() >= end:
                raise TimeoutError(
                    errno.ETIMEDOUT, "another process holds this lock for too long", lock.name
                ) from None
            time.sleep(0.005)
        except OSError:
            return False
        else:
            return True


# Leases: the right to write to a folder, held by one process of any number of machines.
#
# A lease is a file that only one process can create; the system need not know locks. Its holder touches it every
# few seconds. Whether a holder on this machine still lives, the system knows. For one on another machine, the file
# is watched, by the clock of the watching process alone: a lease that was not touched for a minute is stale.
#
# To take over from a stale holder is to create the file that is named after the holder's token, which again only
# one process can, and which counts only while the stale lease is still there. So there are never two heirs, and a
# late one cannot drive out the holder of another time. What a holder that lost its lease still does is not stopped
# by this: it asks before what must not be done twice; all else that it writes is the same bytes, or in a folder of
# its own.

BEAT_SECONDS = 5.0
"""How often a holder touches its lease."""
STALE_SECONDS = 60.0
"""After how long without a touch a lease of another machine is stale."""
_LOOK_SECONDS = 0.05
_WARN_SECONDS = 2.0
_log = logging.getLogger("tokenmill")
_held: set[str] = set()
"""Tokens of the leases that this process holds: one of its own that is not here was copied with its folder."""


# Processes, and whether they still live.


@cache
def this_machine() -> str:
    """Return what processes have in common that see each other: one boot, and one table of processes."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with suppress(OSError):
            parts.append(os.readlink(path) if path.endswith("pid") else Path(path).read_text(encoding="ascii"))
    return xxhash.xxh3_64_hexdigest("\n".join(parts).encode())


def this_process() -> str:
    """Return a name that no other process has, on any machine, at any time: as good a plain part of a path."""
    return _name_of(os.getpid())


@cache
def _name_of(this: int) -> str:
    return f"{this_machine()}-{this}-{_start_of(this)}"


def has_ended(process: str) -> bool:
    """Say whether a process, by its name, is known to have ended; of one on another machine that is never known."""
    machine, _, rest = process.partition("-")
    number, _, start = rest.partition("-")
    if machine != this_machine() or not number.isdigit():
        return False
    return _start_of(int(number)) != start


def _start_of(number: int) -> str:
    """Return when a process began, in ticks of the system: the number of one that ended may be given to another."""
    try:
        with open(f"/proc/{number}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
        return "" if state in (b"Z", b"X") else fields[18].decode()
    except FileNotFoundError:
        if os.path.isdir("/proc/self"):
            return ""
    except (OSError, IndexError):
        pass
    if os.name == "nt":  # where signal 0 is Ctrl-C
        return "alive"
    try:  # a system without /proc
        os.kill(number, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        pass  # it is another user's
    return "alive"


# Leases.


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Who holds a lease."""

    token: str
    process: str
    """As `this_process` names it."""
    host: str
    number: int
    """The process on that host, for people."""

    @property
    def is_local(self) -> bool:
        """Whether the process is on this machine."""
        return self.process.startswith(f"{this_machine()}-")

    def __str__(self) -> str:
        return f"process {self.number}" if self.is_local else f"process {self.number} on {self.host}"


class LeaseWatch:
    """Looks at the lease of a folder, time and again, and so learns whether its holder lives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: tuple[str, int] | None = None
        """Token and time of the last touch, when it was first seen."""
        self._since = 0.0

    def look(self) -> tuple[list[Holder], bool | None]:
        """Return the holder with those that it took over from, and whether it lives; None where that is not known.

        Nobody holds the lease where there is none. The holder is the last.
        """
        holders: list[Holder] = []
        name = LEASE
        touched = 0
        while (lease := _read(self.folder / name)) is not None:
            holder, touched = lease
            holders.append(holder)
            name = f"{LEASE}-{holder.token}"
        if not holders:
            return [], None
        last = holders[-1]
        if last.process == this_process():
            return holders, last.token in _held
        if last.is_local:
            return holders, not has_ended(last.process)
        if self._seen is None or self._seen[0] != last.token:
            self._seen, self._since = (last.token, touched), time.monotonic()
        elif self._seen[1] != touched:
            self._seen, self._since = (last.token, touched), time.monotonic()
            return holders, True
        return holders, False if time.monotonic() - self._since > STALE_SECONDS else None


class Lease:
    """The lease of a folder, held from here on until `release`, or until this process ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pid = os.getpid()
        holder = _this_holder()
        self._token = holder.token
        _held.add(self._token)
        try:
            self._chain = _take(folder, holder)
        except BaseException:
            _held.discard(self._token)
            raise
        self._file = next(reversed(self._chain))
        self._released = threading.Event()
        beat = threading.Thread(target=_beat, args=(self._file, self._token, self._released), daemon=True)
        beat.start()

    def check(self) -> None:
        """Raise if another process has taken over, as this one did not touch its lease for long."""
        lease = _read(self._file)
        if lease is None or lease[0].token != self._token or (self.folder / f"{LEASE}-{self._token}").exists():
            raise StoreError(
                f"{self.folder}: a build must keep its lease, got it taken over by another process after this one "
                f"had not touched it for {STALE_SECONDS:g} s; let that one finish, or run again"
            )

    def release(self) -> None:
        """Let others have it; done twice, or in a process that was forked, it does nothing."""
        if self._released.is_set() or self._pid != os.getpid():
            return
        self._released.set()
        # It is given back by being the heir of oneself: where another is it already, nothing here is ours.
        heir = _this_holder()
        _held.add(heir.token)
        end = self.folder / f"{LEASE}-{self._token}"
        try:
            if _create(end, heir):
                # The first goes first: a late heir finds then that it came too late.
                for file, token in [*self._chain.items(), (end, heir.token)]:
                    lease = _read(file)
                    if lease is not None and lease[0].token == token:
                        file.unlink(missing_ok=True)
        finally:
            _held.difference_update((self._token, heir.token))


@contextmanager
def leased_folder(folder: Path) -> Iterator[Lease]:
    """Keep other builds out of a folder for the length of a `with` block."""
    lease = Lease(folder)
    try:
        yield lease
    finally:
        lease.release()


def _this_holder() -> Holder:
    token = secrets.token_hex(8)
    return Holder(token=token, process=this_process(), host=socket.gethostname(), number=os.getpid())


def _take(folder: Path, holder: Holder) -> dict[Path, str]:
    """Take the lease; return its file and token, after those of the holders that it is taken over from."""
    watch = LeaseWatch(folder)
    begin, has_warned = time.monotonic(), False
    while True:
        holders, lives = watch.look()
        if not holders or lives is False:
            files = [folder / LEASE, *(folder / f"{LEASE}-{each.token}" for each in holders)]
            tokens = [each.token for each in (*holders, holder)]
            if _create(files[-1], holder):
                first = _read(files[0])
                if first is not None and first[0].token == tokens[0]:
                    if not holders:
                        _sweep(folder)
                    return dict(zip(files, tokens, strict=True))
                files[-1].unlink(missing_ok=True)  # what it was to be taken over from is gone already
        elif lives:
            raise StoreExistsError(
                f"{folder}: only one build may write to it at a time, got another under way in "
                f"{holders[-1]}; wait for it or stop it, or choose another path"
            )
        elif not has_warned and time.monotonic() - begin > _WARN_SECONDS:
            has_warned = True
            _log.warning(
                "%s: waiting up to %g s to see whether %s still builds here",
                folder,
                STALE_SECONDS,
                holders[-1],
            )
        time.sleep(_LOOK_SECONDS)


def _create(file: Path, holder: Holder) -> bool:
    """Create a lease, if nobody else has; durable, as an empty one would say nothing of its holder."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    try:
        with writing(file):
            os.write(descriptor, msgspec.json.encode(asdict(holder)))
            os.fsync(descriptor)
    except OSError:
        file.unlink()
        raise
    finally:
        os.close(descriptor)
    return True


def _read(file: Path) -> tuple[Holder, int] | None:
    """Return the holder of a lease and when it was touched last; None if there is none."""
    try:
        # Opened, not only looked at: then a file system of a network asks its server.
        with open(file, "rb") as opened:
            data, touched = opened.read(4096), os.fstat(opened.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
    try:
        holder = msgspec.json.decode(data, type=Holder)
        if not holder.token.isalnum():
            raise ValueError
    except ValueError:  # its holder was about to write it, or ended there
        holder = Holder(token="unreadable", process="", host="another machine", number=0)
    return holder, touched


def _sweep(folder: Path) -> None:
    """Remove what holders that ended amid a release have left."""
    for left in folder.glob(f"{LEASE}-*"):
        left.unlink(missing_ok=True)


def _beat(file: Path, token: str, released: threading.Event) -> None:
    """Touch a lease until it is released; it is never created anew."""
    while not released.wait(BEAT_SECONDS):
        with suppress(OSError):
            descriptor = os.open(file, os.O_RDWR)
            try:
                if msgspec.json.decode(os.read(descriptor, 4096), type=Holder).token == token:
                    os.utime(descriptor if os.utime in os.supports_fd else file)
            except ValueError:
                pass
            finally:
                os.close(descriptor)
