"""Writing a store in this process: shards first, each whole or not at all, the manifest last."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tokenmill.errors import StoreCorruptError, StoreError, StoreExistsError
from tokenmill.store import layout
from tokenmill.store.files import CheckedFile, make_folder, sync_folder, write_atomically
from tokenmill.store.hashes import finish_hashes, hash_records, hashes_file
from tokenmill.store.hdf5 import write_h5
from tokenmill.store.layout import MANIFEST, FileInfo, Manifest, ShardInfo, manifest_bytes
from tokenmill.store.lease import Lease
from tokenmill.store.opening import store_of
from tokenmill.store.store import Store
from tokenmill.store.sums import sums_file, write_sums
from tokenmill.types import AnyArray, Int64Array, IntegerArray

MAX_TOKENS_PER_SHARD = 1 << 29
"""About a GiB of 16-bit ids: large enough that a big corpus needs few maps, small enough to copy about."""
STORAGES = ("bin", "h5")
POSITION_IDS = "position_ids"
"""Numbered through a shard where it is not given, as AstrAI writes it; the engine counts positions itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreSpec:
    """What a store will hold, fixed before the first token is written."""

    keys: Mapping[str, str]
    tokenizer: Mapping[str, Any]
    recipe: Mapping[str, Any]
    kind: str = "seq"
    max_tokens_per_shard: int = MAX_TOKENS_PER_SHARD
    storage: str = "bin"
    """Storage format: `bin`, or `h5` to write the arrays of each shard as HDF5, too."""
    ids_checked: bool = False
    """Whether all ids that are written are known to be in the vocabulary, and BOS only where a document begins: as
    `frame` leaves bare ids, which have been looked at and hold no control ids."""

    def __post_init__(self) -> None:
        odd = [key for key in self.keys if not layout.is_key(key)]
        if odd:
            raise StoreError(f"store keys: must be plain names of files, got {odd[0]!r}; use letters, digits and _")
        allowed = layout.allowed_dtypes(self.keys)
        bad = {key: dtype for key, dtype in self.keys.items() if dtype not in allowed[key]}
        if bad or not self.keys:
            raise StoreError(
                f"store keys: dtypes must be among {layout.TOKEN_DTYPES}, got {bad or 'no key'}; cast the ids first"
            )
        if "responses" in self.axes and "groups" not in self.axes:
            raise StoreError(
                f"store keys: responses need rewards, which cut them into records, got {[*self.keys]}; add them"
            )
        if self.max_tokens_per_shard < 1:
            raise StoreError(
                f"max_tokens_per_shard: must be at least 1, got {self.max_tokens_per_shard}; leave it out"
            )
        if self.storage not in STORAGES:
            raise StoreError(
                f"storage: expected one of {', '.join(STORAGES)}, got {self.storage!r}; leave it out for bin"
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of its arrays."""
        return layout.axes_of(self.kind, self.keys)


class StoreWriter:
    """Append documents in order; `commit` makes them a store.

    With `rebuild` a finished store at the path stays, and can be read, until `commit` replaces it.
    """

    def __init__(self, path: str | os.PathLike[str], spec: StoreSpec, *, rebuild: bool = False) -> None:
        self.path = Path(path)
        self.spec = spec
        if (self.path / MANIFEST).exists() and not rebuild:
            raise StoreExistsError(
                f"{self.path}: must not hold a finished store, got one; "
                "choose another path, or replace it with rebuild=True"
            )
        make_folder(self.path)
        self._unlock = weakref.finalize(self, Lease(self.path).release)
        try:
            if rebuild and (self.path / MANIFEST).exists():
                check_no_unknown_files(self.path, {layout.JOURNAL_FOLDER})
                check_no_foreign_shards(self.path)
                shutil.rmtree(self.path / layout.SHARDS_FOLDER, ignore_errors=True)
            else:
                clear(self.path)
        except BaseException:
            self._unlock()
            raise
        self._series = ShardSeries(self.path / layout.SHARDS_FOLDER, spec)

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._series.close_files()
        if self._unlock.alive:
            shutil.rmtree(self.path / layout.SHARDS_FOLDER, ignore_errors=True)
        self._unlock()

    def append(self, arrays: Mapping[str, AnyArray], offsets: IntegerArray | Mapping[str, IntegerArray]) -> None:
        """Add documents: for each key their values end to end, and where each starts (documents + 1 numbers).

        Where arrays have several axes, `offsets` names them.
        """
        starts = offsets if isinstance(offsets, Mapping) else {"documents": offsets}
        self._series.append(arrays, {axis: np.asarray(values, np.int64) for axis, values in starts.items()})

    def commit(
        self,
        *,
        inputs: Sequence[Mapping[str, Any]] = (),
        skipped: Mapping[str, Any] | None = None,
        check: Callable[[Store], None] = lambda _store: None,
    ) -> Manifest:
        """Close the last shard and write the manifest: from here on there is a store.

        `check` may read the documents before they replace a store at the path, and stop that by an error.
        """
        manifest = Manifest(
            kind=self.spec.kind,
            keys=dict(self.spec.keys),
            tokenizer=dict(self.spec.tokenizer),
            recipe=dict(self.spec.recipe),
            shards=tuple(self._series.finish()),
            inputs=tuple(inputs),
            skipped=dict(skipped or {}),
        )
        check(store_of(self._series.folder, manifest, None))
        if (self.path / MANIFEST).exists():
            clear(self.path, keep=(layout.SHARDS_FOLDER,))
        shards = [
            publish_shard(shard, self._series.folder, self.path, index)
            for index, shard in enumerate(manifest.shards)
        ]
        sync_names(self.path)
        manifest = replace(manifest, shards=tuple(shards))
        write_atomically(self.path / MANIFEST, manifest_bytes(manifest))
        shutil.rmtree(self._series.folder, ignore_errors=True)
        self._unlock()
        return manifest


class ShardSeries:
    """Appends records to shards `0`, `1`, ... in a folder.

    The files depend on the records and the spec alone, not on how records were grouped into `append` calls: a
    shard ends before the record that would take it over its size.
    """

    def __init__(self, folder: Path, spec: StoreSpec) -> None:
        self.folder = folder
        self.spec = spec
        self.shards: list[ShardInfo] = []
        self._open: _ShardWriter | None = None

    def append(self, values: Mapping[str, AnyArray], offsets: Mapping[str, Int64Array]) -> None:
        """Add records: for each array its values end to end, for each axis where its items start."""
        starts = token_starts(self.spec, offsets)
        begin, records = 0, _num_records(offsets)
        while begin < records:
            shard = self._open = self._open or _ShardWriter(self.folder / str(len(self.shards)), self.spec)
            room = self.spec.max_tokens_per_shard - shard.tokens
            end = int(np.searchsorted(starts, starts[begin] + room, side="right")) - 1
            if end <= begin and shard.documents == 0:
                end = begin + 1  # a record larger than a shard has one to itself
            if end > begin:
                shard.append(*self._cut(values, offsets, begin, end))
                begin = end
            if begin < records:
                self._close_shard()

    def close_files(self) -> None:
        """Keep no file open until more is appended."""
        if self._open is not None:
            self._open.close_files()

    def finish(self) -> list[ShardInfo]:
        """Close the last shard; return all, named after their files in the folder."""
        self._close_shard()
        return self.shards

    def _cut(
        self, values: Mapping[str, AnyArray], offsets: Mapping[str, Int64Array], begin: int, end: int
    ) -> tuple[dict[str, AnyArray], dict[str, Int64Array]]:
        """Return records `begin` to `end` (exclusive)."""
        items = dict.fromkeys(offsets, (begin, end))
        if "responses" in offsets:
            groups = offsets["groups"]
            items["responses"] = int(groups[begin]), int(groups[end])
        starts = {axis: offsets[axis][first : last + 1] for axis, (first, last) in items.items()}
        arrays = {}
        for key, array in values.items():
            inside = starts[layout.axis_of(self.spec.kind, key)]
            arrays[key] = array[int(inside[0]) : int(inside[-1])]
        return arrays, {axis: start - start[0] for axis, start in starts.items()}

    def _close_shard(self) -> None:
        if self._open is not None:
            self.shards.append(self._open.commit())
            self._open = None


class _ShardWriter:
    """Appends records to the files of one shard, in a new folder.

    Nothing is durable before `commit`. An array `position_ids` that is not given is numbered through the shard.
    """

    def __init__(self, folder: Path, spec: StoreSpec) -> None:
        self.folder = folder
        self.spec = spec
        self.documents = 0
        self._sizes = dict.fromkeys(spec.axes, (0, 0))
        self._ids = layout.token_keys(spec.keys)
        folder.mkdir(parents=True)
        names = [*map(layout.key_file, spec.keys), *map(layout.index_file, spec.axes)]
        self._files = {name: CheckedFile(folder / name) for name in names}
        self.hashes = CheckedFile(_hashes_beside(folder))

    @property
    def tokens(self) -> int:
        """Token ids so far, over all arrays that hold some."""
        return sum(self._sizes[layout.axis_of(self.spec.kind, key)][1] for key in self._ids)

    def append(self, values: Mapping[str, AnyArray], offsets: Mapping[str, Int64Array]) -> None:
        """Add records: for each array its values end to end, for each axis where its items start."""
        if POSITION_IDS in self.spec.keys and POSITION_IDS not in values:
            values = {**values, POSITION_IDS: self._positions(offsets)}
        self._check(values, offsets)
        for key in self.spec.keys:
            self._files[layout.key_file(key)].write(values[key])
        for axis, (items, size) in self._sizes.items():
            starts = offsets[axis]
            self._files[layout.index_file(axis)].write((starts[:-1] + size).astype(layout.OFFSET_DTYPE, copy=False))
            self._sizes[axis] = (items + starts.size - 1, size + int(starts[-1]))
        hashes = hash_records(self.spec.kind, self.spec.tokenizer, values, offsets)
        self.hashes.write(hashes.astype("<u8", copy=False))
        self.documents += _num_records(offsets)

    def close_files(self) -> None:
        """Keep no file open until more is appended."""
        for file in (*self._files.values(), self.hashes):
            file.close()

    def _sync(self) -> ShardInfo:
        """Make all that was written durable, and return sizes and checksums."""
        only_documents = tuple(self._sizes) == ("documents",)
        return ShardInfo(
            name=self.folder.name,
            documents=self.documents,
            tokens=self.tokens,
            files={name: file.sync() for name, file in self._files.items()},
            axes={} if only_documents else dict(self._sizes),
        )

    def commit(self) -> ShardInfo:
        """Finish all files and make them durable; the shard is named after its folder."""
        for axis, (items, size) in self._sizes.items():
            file = self._files[layout.index_file(axis)]
            file.write(np.array([size], layout.OFFSET_DTYPE))
            file.write(layout.anchors_of(file.read_back(layout.OFFSET_DTYPE, items + 1)))
        shard = self._sync()
        sums = {name: file.page_sums for name, file in self._files.items()}
        if self.spec.storage == "h5":
            h5 = write_h5(self.folder, self.spec.kind, self.spec.keys, self._sizes)
            shard = replace(shard, files={**shard.files, layout.H5_FILE: h5.info})
            sums[layout.H5_FILE] = h5.pages
        sync_folder(self.folder)
        finish_hashes(self.hashes, shard)
        write_sums(_sums_beside(self.folder), shard, sums)
        return shard

    def _positions(self, offsets: Mapping[str, Int64Array]) -> AnyArray:
        axis = layout.axis_of(self.spec.kind, POSITION_IDS)
        first = self._sizes[axis][1]
        return np.arange(first, first + int(offsets[axis][-1])).astype(self.spec.keys[POSITION_IDS])

    def _check(self, values: Mapping[str, AnyArray], offsets: Mapping[str, Int64Array]) -> None:
        assert set(values) == set(self.spec.keys), (set(values), set(self.spec.keys))
        assert set(offsets) == set(self._sizes), (set(offsets), set(self._sizes))
        for starts in offsets.values():
            assert starts[0] == 0
            assert (starts[1:] >= starts[:-1]).all()
        for key, array in values.items():
            dtype = self.spec.keys[key]
            starts = offsets[layout.axis_of(self.spec.kind, key)]
            assert array.size == starts[-1], key
            if array.dtype != np.dtype(dtype):
                raise StoreError(f"key {key!r}: ids must be {dtype}, got {array.dtype}; cast them first")
            if key in self._ids and not self.spec.ids_checked:
                self._check_ids(array, starts)

    def _check_ids(self, ids: AnyArray, starts: Int64Array) -> None:
        vocab_size = int(self.spec.tokenizer["vocab_size"])
        if ids.size and int(ids.max()) >= vocab_size:
            raise StoreError(
                f"{self.folder}: token ids must be below the vocabulary size {vocab_size}, got {int(ids.max())}; "
                "use the tokenizer that made them"
            )
        bos = self.spec.tokenizer.get("bos_id") if self.spec.tokenizer.get("add_bos") else None
        if bos is None or bos == self.spec.tokenizer.get("eos_id"):
            return
        is_bos = ids == bos
        begun = starts[:-1][starts[:-1] < starts[1:]]
        if np.count_nonzero(is_bos) == np.count_nonzero(is_bos[begun]):
            return  # none but where documents start, and to count them is much faster than to find them
        places = np.flatnonzero(is_bos)
        twice = places[1:][places[1:] == places[:-1] + 1]
        twice = twice[~np.isin(twice, starts)] if twice.size else twice
        if twice.size:
            document = int(np.searchsorted(starts, twice[0], side="right")) - 1
            raise StoreError(
                f"{self.folder}: a document must not hold BOS twice in a row, got that in document {document} of "
                f"a batch at token {int(twice[0] - starts[document])}; let template or tokenizer add it"
            )


def _hashes_beside(shard: Path) -> Path:
    """Return the file with the hashes of a shard that is not published yet."""
    return shard.with_name(f"{shard.name}.hashes")


def _sums_beside(shard: Path) -> Path:
    """Return the file with the page sums of a shard that is not published yet."""
    return shard.with_name(f"{shard.name}.sums")


def token_starts(spec: StoreSpec, offsets: Mapping[str, Int64Array]) -> Int64Array:
    """Return how many token ids stand before each record, over all arrays, and how many there are."""
    total: Int64Array = np.zeros(_num_records(offsets) + 1, np.int64)
    for key in layout.token_keys(spec.keys):
        axis = layout.axis_of(spec.kind, key)
        total += offsets[axis][offsets["groups"]] if axis == "responses" else offsets[axis]
    return total


def _num_records(offsets: Mapping[str, Int64Array]) -> int:
    """Return how many records there are; every axis but `responses` is cut into records."""
    axis = next(axis for axis in offsets if axis != "responses")
    return int(offsets[axis].size) - 1


def check_sizes(folder: Path, files: Mapping[str, FileInfo]) -> None:
    """Raise StoreCorruptError if files below a folder, which were finished, are gone or of another size."""
    for file, info in ((folder / name, info) for name, info in files.items()):
        if not file.is_file() or file.stat().st_size != info.bytes:
            raise StoreCorruptError(
                f"{file}: must have {info.bytes} bytes to go on, got others; the unit is done again"
            )


def published_files(shard: ShardInfo, folder: Path, index: int) -> list[tuple[Path, str]]:
    """Return the files of a finished shard in a folder, each with its name in the store for a shard number."""
    stored = zip(shard.stored_files, replace(shard, name=layout.shard_name(index)).stored_files, strict=True)
    return [*((folder / local, name) for local, name in stored), *_published_beside(folder / shard.name, index)]


def _published_beside(shard: Path, index: int) -> list[tuple[Path, str]]:
    """Return the files next to a finished shard, each with its name in the store."""
    return [
        (_hashes_beside(shard), hashes_file(Path(), index).as_posix()),
        (_sums_beside(shard), sums_file(layout.shard_name(index))),
    ]


def publish_shard(shard: ShardInfo, folder: Path, store: Path, index: int) -> ShardInfo:
    """Move a finished shard from a folder into the store under its number; a no-op if it was moved before.

    The store must hold no shard of another build under that number. Call `sync_names` after the last shard.
    """
    named = replace(shard, name=layout.shard_name(index))
    source, target = folder / shard.name, store / named.name
    for beside, name in _published_beside(source, index):
        if beside.exists():
            make_folder((store / name).parent)
            os.rename(beside, store / name)
    try:
        os.rename(source, target)
    except FileNotFoundError:
        if not target.exists():
            raise StoreCorruptError(
                f"{source}: a finished shard must be there, got nothing; start over with rebuild=True"
            ) from None
    return named


def sync_names(store: Path) -> None:
    """Make the names of shards, and of the files next to them, survive a power cut."""
    folders = (layout.HASHES_FOLDER, layout.SUMS_FOLDER, layout.ORIGINS_FOLDER)
    for folder in (*(store / name for name in folders), store):
        if folder.is_dir():
            sync_folder(folder)


def clear(path: Path, *, keep: Sequence[str] = ()) -> None:
    """Remove what an interrupted or replaced build left; the manifest first, so that no reader trusts the rest."""
    kept = {MANIFEST, *keep}
    children = sorted(path.iterdir())
    ours = [child for child in children if child.name not in kept and not layout.is_lease_name(child.name)]
    check_no_unknown_files(path, {layout.JOURNAL_FOLDER, *keep})
    check_no_foreign_shards(path)
    (path / MANIFEST).unlink(missing_ok=True)
    sync_folder(path)
    for child in ours:
        _remove(child)
    sync_folder(path)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def check_no_unknown_files(folder: Path, known: Collection[str]) -> None:
    """Raise if a folder holds files that no build wrote: they must not be lost, or taken for part of a store."""
    for name in sorted(os.listdir(folder)):
        if name not in known and not layout.is_store_name(name):
            raise StoreExistsError(
                f"{folder}: must be a folder of its own for the store, got {name!r} in it; choose another path"
            )


def check_no_foreign_shards(path: Path) -> None:
    """Raise if something has the name of a shard and is none: it must not be deleted."""
    for child in sorted(path.iterdir()):
        if not layout.is_shard_name(child.name) or child.is_symlink():
            continue
        if not child.is_dir():
            raise StoreError(f"{child}: a file with the name of a shard; choose another path")
        strangers = sorted(
            item.name for item in child.glob("*") if item.suffix != ".bin" and item.name != layout.H5_FILE
        )
        if strangers:
            raise StoreError(
                f"{child}: unknown file in a folder with the name of a shard: {strangers[0]}; choose another path"
            )
