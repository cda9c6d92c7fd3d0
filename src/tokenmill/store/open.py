"""From a path to an open store: ours, or a format of another project."""

from __future__ import annotations

import os
from pathlib import Path

from tokenmill.store.manifest import read_manifest
from tokenmill.store.maps import MapCache
from tokenmill.store.reader import Store, store_of


def open_store(path: str | os.PathLike[str], *, maps: MapCache | None = None) -> Store:
    """Open the store at `path` by reading its manifest; `maps` is shared by the stores of a run."""
    return store_of(Path(path), read_manifest(path), maps)
