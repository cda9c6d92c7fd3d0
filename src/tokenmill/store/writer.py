"""Writing a store: shards first, each whole or not at all, the manifest last."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import xxhash

from tokenmill.errors import StoreError, StoreExistsError
from tokenmill.store.layout import (
    ANCHOR_DTYPE,
    ANCHOR_TOKENS,
    DOCUMENTS,
    MANIFEST,
    OFFSET_DTYPE,
    TOKEN_DTYPES,
    FileInfo,
    Manifest,
    ShardInfo,
    is_key,
    is_shard_name,
    key_file,
    manifest_bytes,
    shard_name,
)

if TYPE_CHECKING:
    import numpy.typing as npt

ROWS_FOLDER = ".rows"
"""Where row indexes of the store are kept; they can always be made again."""
MAX_TOKENS_PER_SHARD = 1 << 29
"""About a GiB of 16-bit ids: large enough that a big corpus needs few maps, small enough to copy about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreSpec:
    """What a store will hold, fixed before the first token is written."""

    keys: Mapping[str, str]
    tokenizer: Mapping[str, Any]
    recipe: Mapping[str, Any]
    kind: str = "seq"
    max_tokens_per_shard: int = MAX_TOKENS_PER_SHARD

    def __post_init__(self) -> None:
        odd = [key for key in self.keys if not is_key(key)]
        if odd:
            raise StoreError(f"store keys: must be plain names of files, got {odd[0]!r}; use letters, digits and _")
        bad = {key: dtype for key, dtype in self.keys.items() if dtype not in TOKEN_DTYPES}
        if bad or not self.keys:
            raise StoreError(
                f"store keys: dtypes must be among {TOKEN_DTYPES}, got {bad or 'no key'}; cast the ids first"
            )
        if self.max_tokens_per_shard < 1:
            raise StoreError(
                f"max_tokens_per_shard: must be at least 1, got {self.max_tokens_per_shard}; leave it out"
            )


class StoreWriter:
    """Append documents in order; `commit` makes them a store.

    The files depend on the documents and the spec alone, not on how documents were grouped into
    `append` calls: a shard ends before the document that would take it over its size.
    """

    def __init__(self, path: str | os.PathLike[str], spec: StoreSpec, *, rebuild: bool = False) -> None:
        self.path = Path(path)
        self.spec = spec
        if (self.path / MANIFEST).exists() and not rebuild:
            raise StoreExistsError(
                f"{self.path}: must not hold a finished store, got one; choose another path or --rebuild it"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self._unlock = weakref.finalize(self, os.close, _lock_folder(self.path))
        _clear(self.path)
        self._shards: list[ShardInfo] = []
        self._open: _ShardWriter | None = None

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is not None:
            self._open.abandon()
        self._unlock()

    def append(self, arrays: Mapping[str, npt.NDArray[Any]], offsets: npt.NDArray[np.integer[Any]]) -> None:
        """Add documents: for each key their values end to end, and where each starts (documents + 1 numbers)."""
        starts: npt.NDArray[np.int64] = np.asarray(offsets, np.int64)
        self._check(arrays, starts)
        begin, documents = 0, starts.size - 1
        while begin < documents:
            shard = self._open = self._open or self._new_shard()
            room = self.spec.max_tokens_per_shard - shard.tokens
            end = int(np.searchsorted(starts, starts[begin] + room, side="right")) - 1
            if end <= begin and shard.documents == 0:
                end = begin + 1  # a document larger than a shard has one to itself
            if end > begin:
                first, last = int(starts[begin]), int(starts[end])
                shard.append(
                    {key: values[first:last] for key, values in arrays.items()},
                    starts[begin : end + 1] - first,
                )
                begin = end
            if begin < documents:
                self._close_shard()

    def commit(
        self, *, inputs: Sequence[Mapping[str, Any]] = (), skipped: Mapping[str, Any] | None = None
    ) -> Manifest:
        """Close the last shard and write the manifest: from here on there is a store."""
        self._close_shard()
        manifest = Manifest(
            kind=self.spec.kind,
            keys=dict(self.spec.keys),
            tokenizer=dict(self.spec.tokenizer),
            recipe=dict(self.spec.recipe),
            shards=tuple(self._shards),
            inputs=tuple(inputs),
            skipped=dict(skipped or {}),
        )
        write_atomically(self.path / MANIFEST, manifest_bytes(manifest))
        self._unlock()
        return manifest

    def _check(self, arrays: Mapping[str, npt.NDArray[Any]], offsets: npt.NDArray[np.int64]) -> None:
        assert set(arrays) == set(self.spec.keys)
        assert offsets[0] == 0
        assert (np.diff(offsets) >= 0).all()
        for key, values in arrays.items():
            dtype = self.spec.keys[key]
            assert values.size == offsets[-1]
            if values.dtype != np.dtype(dtype):
                raise StoreError(f"key {key!r}: ids must be {dtype}, got {values.dtype}; cast them first")
        tokens = arrays["sequence" if "sequence" in arrays else min(arrays)]
        vocab_size = int(self.spec.tokenizer["vocab_size"])
        if tokens.size and int(tokens.max()) >= vocab_size:
            raise StoreError(
                f"{self.path}: token ids must be below the vocabulary size {vocab_size}, got {int(tokens.max())}; "
                "use the tokenizer that made them"
            )

    def _new_shard(self) -> _ShardWriter:
        return _ShardWriter(self.path, shard_name(len(self._shards)), self.spec.keys)

    def _close_shard(self) -> None:
        if self._open is not None:
            self._shards.append(self._open.commit())
            self._open = None


class _ShardWriter:
    """One shard under a temporary name until `commit` renames it."""

    def __init__(self, store: Path, name: str, keys: Mapping[str, str]) -> None:
        self.name = name
        self.documents = 0
        self.tokens = 0
        self._final = store / name
        self._folder = store / f".tmp-{name}"
        self._folder.mkdir()
        self._files = {key_file(key): _CheckedFile(self._folder / key_file(key)) for key in keys}
        self._files[DOCUMENTS] = _CheckedFile(self._folder / DOCUMENTS)
        self._anchors: list[npt.NDArray[np.uint32]] = []

    def append(self, arrays: Mapping[str, npt.NDArray[Any]], offsets: npt.NDArray[np.int64]) -> None:
        for key, values in arrays.items():
            self._files[key_file(key)].write(values)
        first_mark = -(-self.tokens // ANCHOR_TOKENS) * ANCHOR_TOKENS
        marks = np.arange(first_mark, self.tokens + int(offsets[-1]), ANCHOR_TOKENS) - self.tokens
        holders = np.searchsorted(offsets, marks, side="right") - 1 + self.documents
        self._anchors.append(holders.astype(ANCHOR_DTYPE))
        self._files[DOCUMENTS].write((offsets[:-1] + self.tokens).astype(OFFSET_DTYPE))
        self.documents += offsets.size - 1
        self.tokens += int(offsets[-1])

    def commit(self) -> ShardInfo:
        self._files[DOCUMENTS].write(np.array([self.tokens], OFFSET_DTYPE))
        for anchors in self._anchors:
            self._files[DOCUMENTS].write(anchors)
        infos = {name: file.commit() for name, file in self._files.items()}
        sync_folder(self._folder)
        os.rename(self._folder, self._final)
        sync_folder(self._final.parent)
        return ShardInfo(name=self.name, documents=self.documents, tokens=self.tokens, files=infos)

    def abandon(self) -> None:
        for file in self._files.values():
            file.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class _CheckedFile:
    """A file that knows the checksum of what was written to it."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("xb")
        self._hash = xxhash.xxh3_128()
        self._bytes = 0

    def write(self, values: npt.NDArray[Any]) -> None:
        view = np.ascontiguousarray(values).data.cast("B")
        self._file.write(view)
        self._hash.update(view)
        self._bytes += view.nbytes

    def commit(self) -> FileInfo:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileInfo(bytes=self._bytes, xxh3=self._hash.hexdigest())

    def close(self) -> None:
        self._file.close()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file so that a reader sees the old one or the whole new one, whatever happens."""
    temporary = path.with_name(f".tmp-{path.name}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock_folder(path: Path) -> int:
    """Keep other builds out of a folder until the descriptor that this returns is closed, if only by a kill."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise StoreExistsError(
            f"{path}: only one build may write to it at a time, got another under way; "
            "wait for it, or choose another path"
        ) from None
    except (ImportError, OSError):
        pass  # a file system without locks
    return descriptor


def _clear(path: Path) -> None:
    """Remove what an interrupted or replaced build left; the manifest first, so that no reader trusts the rest."""
    left = []
    for child in sorted(path.iterdir()):
        if child.name.startswith(".tmp-") or is_shard_name(child.name) or child.name == ROWS_FOLDER:
            left.append(child)
        elif child.name != MANIFEST:
            raise StoreExistsError(
                f"{path}: must be a folder of its own for the store, got {child.name!r} in it; choose another path"
            )
    for child in left:
        strangers = sorted(item.name for item in child.glob("*") if item.suffix != ".bin")
        if strangers and is_shard_name(child.name):
            raise StoreError(
                f"{child}: a folder of this name must be a shard, got {strangers[0]}; choose another path"
            )
    (path / MANIFEST).unlink(missing_ok=True)
    for child in left:
        shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
