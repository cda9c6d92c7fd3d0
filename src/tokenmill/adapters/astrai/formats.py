"""Which of AstrAI's two storage types is at a path, and how it is opened."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.adapters.astrai.positions import with_positions
from tokenmill.errors import ConfigError, StoreError, StoreMissingError, nearest
from tokenmill.store import open_store, read_manifest
from tokenmill.store.foreign.files import files_of, is_ours

if TYPE_CHECKING:
    from tokenmill.store.reader import Store

STORAGE_TYPES = ("h5", "bin")
_H5 = (".h5", ".hdf5")


def detect_format(load_path: str | os.PathLike[str]) -> str:
    """Return `h5` or `bin`: how the store at a path is kept, ours or AstrAI's.

    A folder is looked through at any depth. As in AstrAI, `.h5` files come first: where both are, `bin` has to be
    said as the storage type.
    """
    path = Path(load_path)
    if is_ours(path):
        return read_manifest(path).storage
    files = files_of(path)
    if any(file.suffix.lower() in _H5 for file in files):
        return "h5"
    if any(file.name == "meta.json" for file in files) and (
        path.is_file() or any(file.suffix == ".bin" for file in files)
    ):
        return "bin"
    raise StoreMissingError(
        f"{path}: must hold .h5 files, or .bin files with a meta.json, or be a store of tokenmill, "
        f"got {_endings(files)}; make a store of records with Pipeline"
    )


def open_as(path: Path, storage_type: str) -> Store:
    """Open the store at a path, which must be of that storage type."""
    check_name("storage_type", storage_type, STORAGE_TYPES)
    if not is_ours(path):
        return with_positions(open_store(path, format=f"astrai-{storage_type}"), path, storage_type)
    store = open_store(path)
    if store.manifest.storage != storage_type:
        raise StoreError(
            f"{path}: storage_type must be {store.manifest.storage!r}, as the store is kept, "
            f"got {storage_type!r}; leave it out"
        )
    return store


def check_name(where: str, name: str, known: Iterable[str]) -> None:
    """Refuse a name that is not known, with the nearest that is."""
    names = tuple(known)
    if name not in names:
        raise ConfigError(f"{where}: must be one of {', '.join(names)}, got {name!r}; {nearest(name, names)}")


def refuse_unknown(where: str, unknown: Mapping[str, object], known: Iterable[str] = ()) -> None:
    """Refuse options that are not known: AstrAI drops them in silence."""
    names = tuple(known)
    for name in unknown:
        way_out = nearest(name, names) if names else "leave it out"
        raise ConfigError(f"{where}: options must be known, got {name!r}; {way_out}")


def _endings(files: Iterable[Path]) -> str:
    return ", ".join(sorted({file.suffix or file.name for file in files})[:6]) or "no files"
