"""Writing one shard: arrays that grow, each with its checksum, and where the items of each axis start."""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from tokenmill.errors import StoreCorruptError, StoreError
from tokenmill.store.durable import sync_folder
from tokenmill.store.layout import (
    ANCHOR_DTYPE,
    ANCHOR_TOKENS,
    DTYPES,
    OFFSET_DTYPE,
    TOKEN_DTYPES,
    axes_of,
    axis_of,
    index_file,
    is_key,
    key_file,
    token_keys,
)
from tokenmill.store.manifest import FileInfo, ShardInfo

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_TOKENS_PER_SHARD = 1 << 29
"""About a GiB of 16-bit ids: large enough that a big corpus needs few maps, small enough to copy about."""
STORAGES = ("bin", "h5")
POSITIONS = "position_ids"
_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreSpec:
    """What a store will hold, fixed before the first token is written."""

    keys: Mapping[str, str]
    tokenizer: Mapping[str, Any]
    recipe: Mapping[str, Any]
    kind: str = "seq"
    max_tokens_per_shard: int = MAX_TOKENS_PER_SHARD
    storage: str = "bin"
    """How shards are kept: `bin`, or `h5` for one HDF5 file a shard."""
    ids_checked: bool = False
    """Whether all ids that are written are known to be in the vocabulary, and BOS only where a document begins: as
    `frame` leaves bare ids, which have been looked at and hold no control ids."""

    def __post_init__(self) -> None:
        odd = [key for key in self.keys if not is_key(key)]
        if odd:
            raise StoreError(f"store keys: must be plain names of files, got {odd[0]!r}; use letters, digits and _")
        ids = token_keys(self.keys) if self.keys else ()
        bad = {
            key: dtype for key, dtype in self.keys.items() if dtype not in (TOKEN_DTYPES if key in ids else DTYPES)
        }
        if bad or not self.keys:
            raise StoreError(
                f"store keys: dtypes must be among {TOKEN_DTYPES}, got {bad or 'no key'}; cast the ids first"
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
                f"storage: must be one of {', '.join(STORAGES)}, got {self.storage!r}; leave it out for bin"
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of its arrays."""
        return axes_of(self.kind, self.keys)


class ShardWriter:
    """Appends records to the files of one shard in a folder that must not be there yet.

    Nothing is durable before `checkpoint` or `commit`. An array `position_ids` that is not given is numbered
    through the shard.
    """

    def __init__(self, folder: Path, spec: StoreSpec) -> None:
        folder.mkdir(parents=True)
        self._begin(folder, spec)
        for name in self._names():
            self._files[name] = CheckedFile(folder / name)

    def _begin(self, folder: Path, spec: StoreSpec) -> None:
        self.folder = folder
        self.spec = spec
        self.documents = 0
        self._sizes = dict.fromkeys(spec.axes, (0, 0))
        self._files: dict[str, CheckedFile] = {}
        self._ids = token_keys(spec.keys)

    def _names(self) -> list[str]:
        return [*map(key_file, self.spec.keys), *map(index_file, self.spec.axes)]

    @property
    def tokens(self) -> int:
        """Token ids so far, over all arrays that hold some."""
        return sum(self._sizes[axis_of(self.spec.kind, key)][1] for key in self._ids)

    def append(self, values: Mapping[str, npt.NDArray[Any]], offsets: Mapping[str, npt.NDArray[np.int64]]) -> None:
        """Add records: for each array its values end to end, for each axis where its items start."""
        if POSITIONS in self.spec.keys and POSITIONS not in values:
            values = {**values, POSITIONS: self._positions(offsets)}
        self._check(values, offsets)
        for key in self.spec.keys:
            self._files[key_file(key)].write(values[key])
        for axis, (items, size) in self._sizes.items():
            starts = offsets[axis]
            self._files[index_file(axis)].write((starts[:-1] + size).astype(OFFSET_DTYPE, copy=False))
            self._sizes[axis] = (items + starts.size - 1, size + int(starts[-1]))
        self.documents += num_records(offsets)

    def _positions(self, offsets: Mapping[str, npt.NDArray[np.int64]]) -> npt.NDArray[Any]:
        axis = axis_of(self.spec.kind, POSITIONS)
        first = self._sizes[axis][1]
        return np.arange(first, first + int(offsets[axis][-1])).astype(self.spec.keys[POSITIONS])

    def checkpoint(self) -> dict[str, Any]:
        """Make all that was written durable, and return what `reopen` needs to go on from here."""
        return {
            "documents": self.documents,
            "axes": {axis: list(size) for axis, size in self._sizes.items()},
            "files": {name: file.sync() for name, file in self._files.items()},
        }

    @classmethod
    def reopen(cls, folder: Path, spec: StoreSpec, checkpoint: Mapping[str, Any]) -> ShardWriter:
        """Go on from a checkpoint: what was written after it is cut off, what came before is proven by checksum."""
        writer = cls.__new__(cls)
        writer._begin(folder, spec)
        for name in writer._names():
            size, xxh3 = checkpoint["files"][name]
            writer._files[name] = CheckedFile.reopen(folder / name, size, xxh3)
        writer.documents = checkpoint["documents"]
        writer._sizes = {axis: (size[0], size[1]) for axis, size in checkpoint["axes"].items()}
        return writer

    def rest(self) -> None:
        """Keep no file open until more is appended."""
        for file in self._files.values():
            file.rest()

    def commit(self) -> ShardInfo:
        """Finish all files and make them durable; the shard is named after its folder."""
        for axis, (items, size) in self._sizes.items():
            file = self._files[index_file(axis)]
            file.write(np.array([size], OFFSET_DTYPE))
            file.write(_anchors(file.read_back(OFFSET_DTYPE, items + 1), size))
        files = {name: file.commit() for name, file in self._files.items()}
        sync_folder(self.folder)
        only_documents = tuple(self._sizes) == ("documents",)
        shard = ShardInfo(
            name=self.folder.name,
            documents=self.documents,
            tokens=self.tokens,
            files=files,
            axes={} if only_documents else dict(self._sizes),
        )
        if self.spec.storage == "h5":
            from tokenmill.store.h5 import to_h5

            return to_h5(self.folder, shard, self.spec)
        return shard

    def _check(self, values: Mapping[str, npt.NDArray[Any]], offsets: Mapping[str, npt.NDArray[np.int64]]) -> None:
        assert set(values) == set(self.spec.keys), (set(values), set(self.spec.keys))
        assert set(offsets) == set(self._sizes), (set(offsets), set(self._sizes))
        for starts in offsets.values():
            assert starts[0] == 0
            assert (starts[1:] >= starts[:-1]).all()
        for key, array in values.items():
            dtype = self.spec.keys[key]
            starts = offsets[axis_of(self.spec.kind, key)]
            assert array.size == starts[-1], key
            if array.dtype != np.dtype(dtype):
                raise StoreError(f"key {key!r}: ids must be {dtype}, got {array.dtype}; cast them first")
            if key in self._ids and not self.spec.ids_checked:
                self._check_ids(array, starts)

    def _check_ids(self, ids: npt.NDArray[Any], starts: npt.NDArray[np.int64]) -> None:
        vocab_size = int(self.spec.tokenizer["vocab_size"])
        if ids.size and int(ids.max()) >= vocab_size:
            raise StoreError(
                f"{self.folder}: token ids must be below the vocabulary size {vocab_size}, got {int(ids.max())}; "
                "use the tokenizer that made them"
            )
        bos = self.spec.tokenizer.get("bos_id") if self.spec.tokenizer.get("add_bos") else None
        if bos is None or bos == self.spec.tokenizer.get("eos_id"):
            return
        found = ids == bos
        begun = starts[:-1][starts[:-1] < starts[1:]]
        if np.count_nonzero(found) == np.count_nonzero(found[begun]):
            return  # none but where documents start, and to count them is much faster than to find them
        at = np.flatnonzero(found)
        twice = at[1:][at[1:] == at[:-1] + 1]
        twice = twice[~np.isin(twice, starts)] if twice.size else twice
        if twice.size:
            document = int(np.searchsorted(starts, twice[0], side="right")) - 1
            raise StoreError(
                f"{self.folder}: a document must not hold BOS twice in a row, got that in document {document} of "
                f"a batch at token {int(twice[0] - starts[document])}; let template or tokenizer add it"
            )


def num_records(offsets: Mapping[str, npt.NDArray[np.int64]]) -> int:
    """Return how many records there are; every axis but `responses` is cut into records."""
    axis = next(axis for axis in offsets if axis != "responses")
    return int(offsets[axis].size) - 1


def _anchors(offsets: npt.NDArray[np.uint64], size: int) -> npt.NDArray[np.uint32]:
    """Return the item that holds every 1,024th value."""
    marks = np.arange(0, size, ANCHOR_TOKENS, dtype=np.uint64)
    return (np.searchsorted(offsets, marks, side="right") - 1).astype(ANCHOR_DTYPE)


class CheckedFile:
    """A file that grows at its end and knows the checksum of all that it holds.

    It can `rest`, and is then not open: a build may have thousands of domains, each with files of its own, and a
    process may have but some hundred files open.
    """

    def __init__(self, path: Path, *, mode: str = "xb") -> None:
        self._path = path
        self._hash = xxhash.xxh3_128()
        self._bytes = 0
        self._stream: io.FileIO | None = None
        with open(path, mode):
            pass

    @classmethod
    def reopen(cls, path: Path, size: int, xxh3: str) -> CheckedFile:
        """Go on behind the first `size` bytes of a file, which must have this checksum."""
        if not path.is_file() or path.stat().st_size < size:
            raise StoreCorruptError(f"{path}: must have {size} bytes to go on, got fewer; the unit is done again")
        file = cls(path, mode="r+b")
        os.truncate(path, size)
        with open(path, "rb", buffering=0) as stream:
            while block := stream.read(_BLOCK):
                file._hash.update(block)
                file._bytes += len(block)
        if file._hash.hexdigest() != xxh3:
            raise StoreCorruptError(f"{path}: must be as it was left, got other bytes; the unit is done again")
        return file

    def write(self, values: npt.NDArray[Any]) -> None:
        """Add an array at the end."""
        if not values.size:
            return
        view = np.ascontiguousarray(values).data.cast("B")
        self._hash.update(view)
        self._bytes += view.nbytes
        self._stream = self._stream or open(self._path, "ab", buffering=0)  # noqa: SIM115 - closed by `rest`
        while view.nbytes:  # one write may take less than it is given, at 2 GiB for one
            view = view[self._stream.write(view) :]

    def rest(self) -> None:
        """Close it until it is written to again."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def sync(self) -> list[Any]:
        """Make it durable, and return its size and checksum so far."""
        self.rest()
        with open(self._path, "ab") as stream:
            os.fsync(stream.fileno())
        return [self._bytes, self._hash.hexdigest()]

    def read_back(self, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        """Map the first `count` numbers of the file."""
        if not count:
            return np.empty(0, dtype)
        with open(self._path, "rb") as stream:
            mapped = mmap.mmap(stream.fileno(), count * dtype.itemsize, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, dtype)

    def commit(self) -> FileInfo:
        """Make it durable, and return what a manifest says of it."""
        size, xxh3 = self.sync()
        return FileInfo(bytes=size, xxh3=xxh3)
