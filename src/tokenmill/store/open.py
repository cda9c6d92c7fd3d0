"""From a path to an open store: ours, or a format of another project."""

from __future__ import annotations

import os
from pathlib import Path

from tokenmill.store.foreign.files import is_ours
from tokenmill.store.foreign.options import ForeignOptions, check_ours
from tokenmill.store.foreign.place import open_foreign
from tokenmill.store.manifest import read_manifest
from tokenmill.store.maps import MapCache
from tokenmill.store.reader import Store, store_of


def open_store(
    path: str | os.PathLike[str],
    *,
    maps: MapCache | None = None,
    dtype: str | None = None,
    vocab_size: int | None = None,
    eos_id: int | None = None,
    bos_id: int | None = None,
    format: str | None = None,
) -> Store:
    """Open the store at `path` by reading its manifest, or files of another project in place.

    `maps` is shared by the stores of a run. The rest is for foreign files, which may be named as a file, a folder,
    a glob or a prefix, and say less than they should: see `ForeignOptions`. For a store of ours it must not
    contradict the manifest.
    """
    options = ForeignOptions(dtype=dtype, vocab_size=vocab_size, eos_id=eos_id, bos_id=bos_id, format=format)
    place = Path(path)
    if is_ours(place) or options.format == "tokenmill":
        manifest = read_manifest(place)
        check_ours(place, manifest, options)
        return store_of(place, manifest, maps)
    return open_foreign(place, options, maps)
