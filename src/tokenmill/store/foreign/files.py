"""From what a user names to the files it stands for, in an order that any machine agrees on."""

from __future__ import annotations

import os
import re
from glob import glob, has_magic
from pathlib import Path, PurePath

from tokenmill.errors import StoreError
from tokenmill.natural import natural_key
from tokenmill.store.layout import MANIFEST, is_shard_name
from tokenmill.store.manifest import read_manifest


def is_ours(path: Path) -> bool:
    """Whether a path is, or was to become, a store of ours."""
    if os.path.lexists(path / MANIFEST):
        return True
    if not path.is_dir():
        return False
    # Without a manifest it may be one that was not finished: then nothing but shards can be seen in it.
    return all(is_shard_name(name) for name in os.listdir(path) if not name.startswith("."))


def files_of(path: Path) -> list[Path]:
    """List the files that a path stands for: itself, all below a folder, matches of a glob, or PREFIX.bin and .idx.

    Hidden files and folders are left alone.
    """
    text = os.fspath(path)
    if re.match(r"[a-z0-9]{2,}:/", text):
        raise StoreError(f"{path}: must be a path on this machine, got an address; download the files first")
    if path.is_file():
        return [path]
    if path.is_dir():
        return sorted(_below(path), key=lambda file: natural_key(os.path.relpath(file, path)))
    prefixed = [Path(f"{text}{ending}") for ending in (".bin", ".idx")]
    if all(file.is_file() for file in prefixed):
        return [prefixed[0]]
    matches = [Path(match) for match in glob(text, recursive=True)] if has_magic(text) else []
    found: dict[Path, None] = {}
    for match in matches:
        found.update(dict.fromkeys(_below(match) if match.is_dir() else [match]))
    if not found:
        read_manifest(path)  # says that there is nothing
    folder = os.path.commonpath([file.parent.absolute() for file in found])
    return sorted(found, key=lambda file: natural_key(os.path.relpath(file.absolute(), folder)))


def _below(folder: Path) -> list[Path]:
    found: list[Path] = []
    for here, folders, names in os.walk(folder):
        if MANIFEST in names and any(map(is_shard_name, folders)):
            raise StoreError(
                f"{folder}: must hold files of other projects, got a store of tokenmill in {here}; name that store"
            )
        folders[:] = [name for name in folders if not name.startswith(".")]
        found.extend(Path(here) / name for name in names if not name.startswith("."))
    return found


def names_of(files: list[Path]) -> list[str]:
    """Return what to call files: their paths below the folder that they share."""
    folder = os.path.commonpath([file.parent.absolute() for file in files])
    return [PurePath(os.path.relpath(file.absolute(), folder)).as_posix() for file in files]
