"""AstrAI's layout in the folder of a store: one set of files for its readers and for tokenmill's.

A shard is readable by AstrAI if a `meta.json` describes its `.bin` files; an `.h5` shard always is. AstrAI has no
file that marks a folder as complete. So before a build changes a folder, its shards are hidden from AstrAI's
readers, and they all return when the build is done. In between, an unreadable file makes those readers fail.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tokenmill.build.journal import Journal
from tokenmill.build.state import state_name
from tokenmill.store import open_store
from tokenmill.store.files import make_folder, sync_folder, write_atomically
from tokenmill.store.foreign.export import meta_of
from tokenmill.store.foreign.files import META
from tokenmill.store.layout import JOURNAL_FOLDER, is_shard_name, stores_below

_UNFINISHED = json.dumps({"unfinished - run the Pipeline again": {"shape": [1], "dtype": "int32"}}).encode()
"""A `meta.json` whose array does not exist: loading the folder raises FileNotFoundError with that name."""
_TEMPORARY = f".tmp-{META}"
"""Name of the rest of a `meta.json` that a killed process may leave."""
_UNFINISHED_H5 = "unfinished.h5"
"""An empty file in the journal, where AstrAI's reader of `.h5` files looks too: it is not HDF5."""


@contextmanager
def withheld(out: Path, storage: str) -> Iterator[None]:
    """Hide a folder from AstrAI's readers while a build changes it; then they find all of it, or nothing."""
    _withdraw(out)
    guard = out / JOURNAL_FOLDER / _UNFINISHED_H5
    if storage == "h5":
        make_folder(guard.parent)
        guard.touch()
        sync_folder(guard.parent)
    try:
        yield
    finally:
        if not _is_under_way(out):
            _restore(out)
            guard.unlink(missing_ok=True)
            with suppress(OSError):  # of a build that did not start
                guard.parent.rmdir()
                out.rmdir()


def _is_under_way(out: Path) -> bool:
    """Return whether a build was begun and its store is not finished."""
    return state_name(Journal(out)) in ("running", "publishing")


def _withdraw(out: Path) -> None:
    """Remove every `meta.json` that `_restore` wrote, at once for readers."""
    stores = stores_below(out)
    shards = [child for store in stores for child in store.iterdir() if is_shard_name(child.name)]
    metas = [shard / name for shard in shards for name in (META, _TEMPORARY) if (shard / name).is_file()]
    folders = dict.fromkeys([out, *stores])
    if metas:
        _bar(folders)
        _remove(metas)
    _admit(folders)


def _restore(out: Path) -> None:
    """Describe every shard of a finished store, or of the stores of all domains, at once for readers."""
    stores = [open_store(path) for path in stores_below(out)]
    stores = [store for store in stores if store.manifest.storage == "bin"]
    folders = dict.fromkeys([out, *(store.path for store in stores)])
    if not stores:
        return
    _bar(folders)
    for store in stores:
        for number, shard in enumerate(store.manifest.shards):
            write_atomically(store.path / shard.name / META, meta_of(store, number))
    _admit(folders)


def _bar(folders: Iterable[Path]) -> None:
    """Make AstrAI's readers of `.bin` files fail in these folders, and in those that contain them."""
    for folder in folders:
        write_atomically(folder / META, _UNFINISHED)


def _admit(folders: Iterable[Path]) -> None:
    """Remove the files of `_bar`, those of the outermost folder last."""
    for folder in reversed(list(folders)):
        (folder / _TEMPORARY).unlink(missing_ok=True)
        if (folder / META).is_file() and (folder / META).read_bytes() == _UNFINISHED:
            _remove([folder / META])


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        os.unlink(file)
        sync_folder(file.parent)
