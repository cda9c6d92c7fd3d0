"""Where indexes are kept that can always be made again: beside the data, or in a folder of the user's."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tokenmill.errors import StoreError


def writable(folder: Path) -> Path | None:
    """Return the folder, made if need be, or None if nothing can be written there."""
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return None


def private_folder(purpose: str) -> Path:
    """Return a folder of this user's for what cannot be kept beside the data."""
    folder = private_path(purpose)
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != _user():
        raise StoreError(f"{folder}: must be a folder of this user's, got another's; remove it, or set TMPDIR")
    return folder


def private_path(purpose: str) -> Path:
    """Return where that folder is, whether or not it is there."""
    return Path(tempfile.gettempdir()) / f"tokenmill-{purpose}-{_user()}"


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0
