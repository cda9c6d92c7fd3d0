"""From what a user names to the files it stands for, in an order that any machine agrees on."""

from __future__ import annotations

import os
import re
from glob import glob, has_magic
from pathlib import Path, PurePath

from tokenmill.errors import StoreError, StoreMissingError
from tokenmill.natural import natural_key
from tokenmill.store.layout import MANIFEST, is_shard_name

MAX_NAMED = 8
"""Stores that an error lists by name."""


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
        _refuse_stores(path, stores_below(path))
        return sorted(_below(path), key=lambda file: natural_key(os.path.relpath(file, path)))
    prefixed = [Path(f"{text}{ending}") for ending in (".bin", ".idx")]
    if all(file.is_file() for file in prefixed):
        return [prefixed[0]]
    matches = [Path(match) for match in glob(text, recursive=True)] if has_magic(text) else []
    stores = [store for match in matches if match.is_dir() for store in stores_below(match)]
    _refuse_stores(path, list(dict.fromkeys(stores)))
    found: dict[Path, None] = {}
    for match in matches:
        found.update(dict.fromkeys(_below(match) if match.is_dir() else [match]))
    if not found:
        raise StoreMissingError(_missing(path))
    folder = os.path.commonpath([file.parent.absolute() for file in found])
    return sorted(found, key=lambda file: natural_key(os.path.relpath(file.absolute(), folder)))


def stores_below(folder: Path) -> list[Path]:
    """List the stores of ours in a folder, at any depth; none within another, nor in hidden folders.

    Beside a finished one, those that were not finished count too: whoever looks at all must not pass them over.
    """
    finished: list[Path] = []
    unfinished: list[Path] = []
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if any(map(is_shard_name, [*folders, *names])):
            if MANIFEST in names:
                finished.append(Path(here))
            elif is_ours(Path(here)):
                unfinished.append(Path(here))
            else:
                continue
            folders.clear()
    stores = [*finished, *unfinished] if finished else []
    return sorted(stores, key=lambda store: natural_key(os.path.relpath(store, folder)))


def _missing(path: Path) -> str:
    if path.suffix or has_magic(os.fspath(path)):
        return f"{path}: must be a store, or a file, folder or glob of token files, got nothing there; fix the path"
    return (
        f"{path}: a store must be a folder with {MANIFEST}, or token files of another project, got nothing there; "
        "run `tokenmill prepare` or fix the path"
    )


def _refuse_stores(path: Path, stores: list[Path]) -> None:
    """Refuse to take stores of ours for files of other projects, or several for one."""
    if not stores:
        return
    names = [os.path.relpath(store, path) if path.is_dir() else os.fspath(store) for store in stores[:MAX_NAMED]]
    more = [f"{len(stores) - MAX_NAMED} more"] if len(stores) > MAX_NAMED else []
    raise StoreError(
        f"{path}: must be one store, got the store{'s' * (len(stores) > 1)} {', '.join(names + more)} in it; "
        f"name one of them, such as {stores[0]}"
    )


def _below(folder: Path) -> list[Path]:
    found: list[Path] = []
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found.extend(Path(here) / name for name in names if not name.startswith("."))
    return found


def names_of(files: list[Path]) -> list[str]:
    """Return what to call files: their paths below the folder that they share."""
    folder = os.path.commonpath([file.parent.absolute() for file in files])
    return [PurePath(os.path.relpath(file.absolute(), folder)).as_posix() for file in files]
