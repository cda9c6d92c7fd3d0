"""Locks and leases: which process may write to a folder, and whether that process is alive."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO

import msgspec
import xxhash

from tokenmill.errors import StoreBusyError, StoreError, writing
from tokenmill.store.layout import LEASE


@contextmanager
def locked(file: Path, seconds: float | None = None) -> Iterator[bool]:
    """Hold a lock on a file, which ends with its process; other processes and threads wait.

    Raises TimeoutError if another process holds the lock for more than `seconds`: it may be paused.
    Yields False on a file system without locks, where nobody waits.
    """
    with file.open("wb") as lock:
        yield _flock(lock, seconds)


def _flock(lock: IO[bytes], seconds: float | None) -> bool:
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


# IDs of processes.


@cache
def this_machine() -> str:
    """Return an ID that processes share if they can see each other: of the boot and the PID namespace."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with suppress(OSError):
            parts.append(os.readlink(path) if path.endswith("pid") else Path(path).read_text(encoding="ascii"))
    return xxhash.xxh3_64_hexdigest("\n".join(parts).encode())


def this_process() -> str:
    """Return an ID that is unique across machines and reboots, and safe in file names."""
    return _name_of(os.getpid())


@cache
def _name_of(this: int) -> str:
    return f"{this_machine()}-{this}-{_start_of(this)}"


def has_ended(process: str) -> bool:
    """Return whether a process, by its ID, is known to have ended; for another machine this is never known."""
    machine, _, rest = process.partition("-")
    number, _, start = rest.partition("-")
    if machine != this_machine() or not number.isdigit():
        return False
    return _start_of(int(number)) != start


def _start_of(number: int) -> str:
    """Return the start time of a process in clock ticks, because PIDs are reused; empty if it has ended."""
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


# Leases: the right to write to a folder, held by one process of any number of machines.
#
# A lease is a file. Where the file system has locks, its holder keeps an `flock` on it. The lock ends with the
# process, however that ends, so nothing has to be cleaned up. Elsewhere only one process can create the file
# (O_EXCL), and touches it every few seconds. A killed process then leaves the file behind, and the error of the
# next one says how to remove it: without a lock, nobody can take it over and be sure to be the only one.

BEAT_SECONDS = 5.0
"""How often a holder touches its lease on a file system without locks."""
STALE_SECONDS = 60.0
"""Age of the last touch from which on a lease without a lock counts as stale."""
_PATIENCE_SECONDS = 0.3
"""How long to try for a lock: whoever looks whether a lease is held locks it for a moment."""
_held: weakref.WeakSet[Lease] = weakref.WeakSet()
"""Leases of this process: a forked process must close its copies, or it would keep them locked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """The process that holds a lease."""

    token: str
    """Differs for each time that a lease is taken."""
    process: str
    """Name of the process, as `this_process` returns it."""
    host: str
    number: int
    """Process ID on that host."""
    is_locked: bool
    """Return whether the file is locked; otherwise it is touched every few seconds."""

    @property
    def is_local(self) -> bool:
        """Return whether the process is on this machine."""
        return self.process.startswith(f"{this_machine()}-")

    def __str__(self) -> str:
        return f"process {self.number}" if self.is_local else f"process {self.number} on {self.host}"


class Lease:
    """The lease of a folder, held until `release`, or until this process ends.

    Raises StoreBusyError if another process has it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / LEASE
        self._pid = os.getpid()
        self._token = secrets.token_hex(8)
        self._released = threading.Event()
        self._descriptor: int | None = None
        self._has_locks = _has_locks(folder)
        if self._has_locks:
            self._descriptor = self._lock()
            _held.add(self)
        else:
            self._create()
            threading.Thread(target=_beat, args=(self._file, self._token, self._released), daemon=True).start()

    def check(self) -> None:
        """Raise StoreError if the lease is no longer ours, because somebody removed its file."""
        lease = _read(self._file)
        if lease is None or lease[0].token != self._token:
            raise StoreError(
                f"{self.folder}: the lease of this build was removed while it ran; "
                "wait until no other process writes to the folder, then run again"
            )

    def release(self) -> None:
        """Let other processes have the lease. A second call, or one in a forked process, does nothing."""
        if self._released.is_set() or self._pid != os.getpid():
            return
        self._released.set()
        lease = _read(self._file)
        if lease is not None and lease[0].token == self._token:
            self._file.unlink(missing_ok=True)  # before the lock ends: who waits for it finds the file gone
        self.close()

    def close(self) -> None:
        """Close the locked file; in a forked process the lock stays with the parent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _lock(self) -> int:
        """Lock the file and write our name into it; return its descriptor."""
        import fcntl

        end = time.monotonic() + _PATIENCE_SECONDS
        while True:
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(self._file, descriptor):
                    self._check_unlocked_holder()
                    os.ftruncate(descriptor, 0)
                    with writing(self._file):
                        os.pwrite(descriptor, self._record(is_locked=True), 0)
                    return descriptor
                os.close(descriptor)  # its holder removed the file before we had the lock
            except BlockingIOError:
                os.close(descriptor)
                if time.monotonic() > end:
                    raise self._busy() from None
                time.sleep(0.01)
            except BaseException:
                os.close(descriptor)
                raise

    def _check_unlocked_holder(self) -> None:
        """Raise if the file belongs to a process that has the folder mounted without locks."""
        lease = _read(self._file)
        if lease is not None and lease[0].token != _UNKNOWN and not lease[0].is_locked:
            raise self._busy()

    def _create(self) -> None:
        """Create the file, which only one process can."""
        try:
            descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            raise self._busy() from None
        try:
            with writing(self._file):
                os.write(descriptor, self._record(is_locked=False))
        except OSError:
            self._file.unlink()
            raise
        finally:
            os.close(descriptor)

    def _record(self, *, is_locked: bool) -> bytes:
        holder = Holder(
            token=self._token,
            process=this_process(),
            host=socket.gethostname(),
            number=os.getpid(),
            is_locked=is_locked,
        )
        return msgspec.json.encode(asdict(holder))

    def _busy(self) -> StoreBusyError:
        holder, touched = _read(self._file) or (_UNKNOWN_HOLDER, time.time_ns())
        message = f"{self.folder}: another build writes to it: {holder}"
        if self._has_locks and holder.is_locked:
            return StoreBusyError(f"{message}; wait for it or stop it, or choose another path")
        age = max(0, round(time.time() - touched / 1e9))
        state = "has ended" if has_ended(holder.process) else f"wrote its last heartbeat {age} s ago"
        return StoreBusyError(
            f"{message}, which {state}; wait for it or stop it. "
            f"There are no locks on this file system: if that process is gone, remove {self._file} and run again"
        )


@contextmanager
def leased_folder(folder: Path) -> Iterator[Lease]:
    """Hold the lease of a folder for the length of a `with` block."""
    lease = Lease(folder)
    try:
        yield lease
    finally:
        lease.release()


def find_holder(folder: Path) -> tuple[Holder | None, bool]:
    """Return the process that took the lease of a folder last, and whether it holds it now.

    A holder that was killed leaves its name. A holder that released its lease does not: None.
    """
    lease = _read(folder / LEASE)
    if lease is None:
        return None, False
    holder, touched = lease
    if holder.is_locked:
        return holder, _is_locked(folder / LEASE)
    if holder.is_local:
        return holder, not has_ended(holder.process)
    return holder, time.time() - touched / 1e9 < STALE_SECONDS


def _has_locks(folder: Path) -> bool:
    """Return whether the file system of a folder has locks."""
    with tempfile.TemporaryFile(dir=folder, prefix=f"{LEASE}-") as file:
        return _flock(file, None)


def _is_locked(file: Path) -> bool:
    """Return whether a process holds the lock on a file."""
    try:
        import fcntl
    except ImportError:
        return False
    with suppress(FileNotFoundError), file.open("rb") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _is_at(file: Path, descriptor: int) -> bool:
    """Return whether a path still leads to an open file."""
    try:
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


_UNKNOWN = "unknown"
_UNKNOWN_HOLDER = Holder(token=_UNKNOWN, process="", host="another machine", number=0, is_locked=True)
"""Stands for the process of a lease that cannot be read: it is being written, or was damaged."""


def _read(file: Path) -> tuple[Holder, int] | None:
    """Return the holder of a lease and the mtime of its file in nanoseconds; None if there is no file."""
    try:
        with open(file, "rb") as opened:  # opened, because a network file system then asks its server
            data, touched = opened.read(4096), os.fstat(opened.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(data, type=Holder), touched
    except ValueError:
        return _UNKNOWN_HOLDER, touched


def _beat(file: Path, token: str, released: threading.Event) -> None:
    """Touch a lease until it is released. A file of another holder is left alone."""
    while not released.wait(BEAT_SECONDS):
        with suppress(OSError):
            lease = _read(file)
            if lease is not None and lease[0].token == token:
                os.utime(file)


def _close_inherited() -> None:
    for lease in list(_held):
        lease.close()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_close_inherited)
