"""Writing a store in this process: shards first, each whole or not at all, the manifest last."""

from __future__ import annotations

import mmap
import os
import shutil
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import StoreCorruptError, StoreError, StoreExistsError
from tokenmill.store.durable import (
    OWNER,
    lock_folder,
    make_folder,
    sync_folder,
    unlock_folder,
    write_atomically,
)
from tokenmill.store.h5 import INDEX_GROUP
from tokenmill.store.layout import MANIFEST, is_shard_name, shard_name
from tokenmill.store.manifest import Manifest, ShardInfo, manifest_bytes
from tokenmill.store.series import ShardSeries
from tokenmill.store.shard import MAX_TOKENS_PER_SHARD, StoreSpec

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = [
    "MAX_TOKENS_PER_SHARD",
    "ROWS_FOLDER",
    "StoreSpec",
    "StoreWriter",
    "publish_shard",
    "refuse_foreign_shards",
]

ROWS_FOLDER = ".rows"
"""Where row indexes of the store are kept; they can always be made again."""
JOURNAL_FOLDER = ".prepare"
"""Where prepare keeps what it needs to add to the store later."""
SHARDS_FOLDER = ".tmp-shards"
TEMPORARY = frozenset({OWNER, SHARDS_FOLDER, f".tmp-{MANIFEST}"})
"""What a build that was killed may leave in the folder of a store beside its shards."""


class StoreWriter:
    """Append documents in order; `commit` makes them a store."""

    def __init__(self, path: str | os.PathLike[str], spec: StoreSpec, *, rebuild: bool = False) -> None:
        self.path = Path(path)
        self.spec = spec
        if (self.path / MANIFEST).exists() and not rebuild:
            raise StoreExistsError(
                f"{self.path}: must not hold a finished store, got one; choose another path or --rebuild it"
            )
        make_folder(self.path)
        self._unlock = weakref.finalize(self, unlock_folder, self.path, lock_folder(self.path))
        try:
            clear(self.path)
        except BaseException:
            self._unlock()
            raise
        self._series = ShardSeries(self.path / SHARDS_FOLDER, spec)

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._series.rest()
        if self._unlock.alive:
            shutil.rmtree(self.path / SHARDS_FOLDER, ignore_errors=True)
        self._unlock()

    def append(
        self,
        arrays: Mapping[str, npt.NDArray[Any]],
        offsets: npt.NDArray[np.integer[Any]] | Mapping[str, npt.NDArray[np.integer[Any]]],
    ) -> None:
        """Add documents: for each key their values end to end, and where each starts (documents + 1 numbers).

        Where arrays have several axes, `offsets` names them.
        """
        starts = offsets if isinstance(offsets, Mapping) else {"documents": offsets}
        self._series.append(arrays, {axis: np.asarray(values, np.int64) for axis, values in starts.items()})

    def commit(
        self, *, inputs: Sequence[Mapping[str, Any]] = (), skipped: Mapping[str, Any] | None = None
    ) -> Manifest:
        """Close the last shard and write the manifest: from here on there is a store."""
        shards = [
            publish_shard(shard, self._series.folder, self.path, index)
            for index, shard in enumerate(self._series.finish())
        ]
        sync_folder(self.path)
        manifest = Manifest(
            kind=self.spec.kind,
            keys=dict(self.spec.keys),
            tokenizer=dict(self.spec.tokenizer),
            recipe=dict(self.spec.recipe),
            shards=tuple(shards),
            inputs=tuple(inputs),
            skipped=dict(skipped or {}),
        )
        write_atomically(self.path / MANIFEST, manifest_bytes(manifest))
        shutil.rmtree(self._series.folder, ignore_errors=True)
        self._unlock()
        return manifest


def publish_shard(shard: ShardInfo, folder: Path, store: Path, index: int) -> ShardInfo:
    """Move a finished shard from a folder into the store under its number; done already is as good.

    The store must hold no shard of another build under that number.
    """
    named = replace(shard, name=f"{shard_name(index)}{'.h5' if shard.container else ''}")
    source, target = folder / shard.name, store / named.name
    if source.exists():
        os.rename(source, target)
    elif not target.exists():
        raise StoreCorruptError(f"{source}: a finished shard must be there, got nothing; start over with --rebuild")
    return named


def clear(path: Path, *, keep: Sequence[str] = ()) -> None:
    """Remove what an interrupted or replaced build left; the manifest first, so that no reader trusts the rest."""
    left = []
    for child in sorted(path.iterdir()):
        if child.name == OWNER or child.name in keep:
            continue
        ours = child.name in (ROWS_FOLDER, JOURNAL_FOLDER) or is_shard_name(child.name)
        if ours or child.name in TEMPORARY:
            left.append(child)
        elif child.name != MANIFEST:
            raise StoreExistsError(
                f"{path}: must be a folder of its own for the store, got {child.name!r} in it; choose another path"
            )
    refuse_foreign_shards(path)
    (path / MANIFEST).unlink(missing_ok=True)
    sync_folder(path)
    for child in left:
        shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
    sync_folder(path)


def refuse_foreign_shards(path: Path) -> None:
    """Raise if something has the name of a shard and is none: it must not be deleted."""
    for child in sorted(path.iterdir()):
        if not is_shard_name(child.name) or child.is_symlink():
            continue
        strangers = sorted(item.name for item in child.glob("*") if item.suffix != ".bin") if child.is_dir() else []
        if strangers:
            raise StoreError(
                f"{child}: a folder of this name must be a shard, got {strangers[0]}; choose another path"
            )
        if child.is_file() and not _is_container(child):
            raise StoreError(f"{child}: a file of this name must be a shard, got another's; choose another path")


def _is_container(file: Path) -> bool:
    """Whether a file was made by `to_h5`: it has the group that only ours have."""
    if not file.stat().st_size:
        return False
    with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data[:8] == b"\x89HDF\r\n\x1a\n" and data.find(INDEX_GROUP.encode()) >= 0
