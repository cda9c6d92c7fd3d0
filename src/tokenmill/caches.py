"""Folders for data that can be made again: row indexes, indexes of foreign files, compiled kernels.

It is kept next to the data or the package if that is writable, otherwise in a private folder of this user. The
content is trusted, and kernels are even run. So a folder counts only if it belongs to this user and nobody else can
write to it. In a temporary folder that all users share, anyone may have made a folder of that name.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
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
