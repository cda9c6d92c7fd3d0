"""Folders for data that can be made again: row indexes, indexes of foreign files, compiled kernels.

It is kept next to the data or the package if that is writable, otherwise in a private folder of this user. The
content is trusted, and kernels are even run. So a folder counts only if it belongs to this user and nobody else can
write to it. In a temporary folder that all users share, anyone may have made a folder of that name.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path


def writable(folder: Path) -> Path | None:
    """Return a folder, made if need be, or None if nothing can be written there."""
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return None


def private_folder(purpose: str, *, make: bool = True) -> Path | None:
    """Return the first folder for a purpose that is this user's alone, made if need be; None if there is none."""
    for folder in _candidates(purpose):
        if make:
            with suppress(OSError):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_private(folder) and (not make or writable(folder)):
            return folder
    return None


def _candidates(purpose: str) -> Iterator[Path]:
    user = os.getuid() if hasattr(os, "getuid") else 0
    with suppress(OSError):
        yield Path(tempfile.gettempdir()) / f"tokenmill-{purpose}-{user}"
    with suppress(RuntimeError):
        yield Path.home() / ".cache" / "tokenmill" / purpose


def _is_private(folder: Path) -> bool:
    """Return whether a folder exists, belongs to this user, and is writable for nobody else."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    ours = not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & 0o022)
    return stat.S_ISDIR(status.st_mode) and ours


_IN_USE = ".in-use"
"""File in a shared folder that its users have locked."""


class SharedFolder:
    """A folder of temporary files that several processes use; the last user removes the files."""

    def __init__(self, path: Path, *, keep: Collection[str] = ()) -> None:
        """Make the folder, and empty those next to it that killed processes left. What `keep` names stays."""
        for left in path.parent.glob(f"*/{_IN_USE}"):
            with suppress(OSError):
                _leave(left.parent, os.open(left, os.O_RDWR | os.O_CLOEXEC), os.getpid(), keep)
        self.path = path
        weakref.finalize(self, _leave, path, _enter(path), os.getpid(), keep)


def _enter(folder: Path) -> int:
    """Lock a folder as one of its users; return the descriptor that holds the lock."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        _lock(descriptor, exclusive=False)
        with suppress(FileNotFoundError):  # the last user removed it before it was locked
            if os.path.samestat((folder / _IN_USE).stat(), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)


def _leave(folder: Path, descriptor: int, process: int, keep: Collection[str]) -> None:
    """Give up a lock on a folder, and empty the folder if nobody else has one."""
    if os.getpid() != process:
        return  # a forked process shares the lock, and must not change it
    try:
        if _lock(descriptor, exclusive=True):
            for child in folder.iterdir():
                if child.name not in (*keep, _IN_USE):
                    shutil.rmtree(child) if child.is_dir() else child.unlink()
            (folder / _IN_USE).unlink()
            folder.rmdir()
    except OSError:
        pass  # something stays, or another user removed it first
    finally:
        os.close(descriptor)


def _lock(descriptor: int, *, exclusive: bool) -> bool:
    """Lock an open file; an exclusive lock is not waited for. Return False without a lock."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH)
    except (ImportError, OSError):
        return False
    return True
