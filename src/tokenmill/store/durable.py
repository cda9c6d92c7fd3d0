"""Files and names that survive a crash, and folders that only one process writes to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenmill.errors import StoreExistsError

OWNER = ".tmp-pid"
"""Who writes to a folder, for the message that refuses a second one; the lock is on the folder itself."""


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file so that a reader sees the old one or the whole new one, whatever happens."""
    temporary = path.with_name(f".tmp-{path.name}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_folder(path: Path) -> int:
    """Keep other builds out of a folder until the descriptor that this returns is closed, if only by a kill."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise StoreExistsError(
            f"{path}: only one build may write to it at a time, got another under way in {_owner(path)}; "
            "wait for it or stop it, or choose another path"
        ) from None
    except (ImportError, OSError):
        pass  # a file system without locks
    (path / OWNER).write_text(f"{os.getpid()}", encoding="ascii")
    return descriptor


def unlock_folder(path: Path, descriptor: int) -> None:
    """Let others write to a folder."""
    try:
        (path / OWNER).unlink(missing_ok=True)
    finally:
        os.close(descriptor)


@contextmanager
def locked_folder(path: Path) -> Iterator[None]:
    """Keep other builds out of a folder for the length of a `with` block."""
    descriptor = lock_folder(path)
    try:
        yield
    finally:
        unlock_folder(path, descriptor)


def _owner(path: Path) -> str:
    try:
        return f"process {int((path / OWNER).read_bytes())}"
    except (OSError, ValueError):
        return "another process"
