"""AstrAI's stores: any range of values or any record, as tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from itertools import pairwise
from operator import index as as_index
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, overload

import numpy as np
import torch

from tokenmill.adapters.torch import read_windows
from tokenmill.errors import ConfigError, PlanError, StoreError, StoreMissingError, nearest
from tokenmill.store import Store as TokenStore
from tokenmill.store import open_store, read_manifest
from tokenmill.store.foreign.files import files_of, find_files
from tokenmill.store.foreign.formats import written_positions
from tokenmill.store.layout import GIVEN, UNKNOWN, is_ours, key_file
from tokenmill.store.locate import locate
from tokenmill.store.maps import FileRequest, MemoryRequest
from tokenmill.store.ranges import RangeRequest, read_range
from tokenmill.store.writer import POSITION_IDS
from tokenmill.tables import check_choice, check_positive, check_types
from tokenmill.types import STORED_ARRAYS, AnyArray, Int64Array

_WAY_OUT = "write the store again, or prepare it from its records"
Value: TypeAlias = "torch.Tensor | list[torch.Tensor]"
"""One array of a record; for a group of responses, a list of tensors."""


class Store:
    """A store that `load` opens; its files are mapped, and tokens are read on access.

    Values are int64, masks bool and rewards float32, whatever their size on disk. With a `window_size`, the items
    of the store are windows of its stream, `stride` apart. Without one, they are its records.
    """

    storage_type: ClassVar[str | None] = None
    """Required storage type; None for any."""

    def __init__(self, window_size: int = 0, stride: int | None = None, **unknown: object) -> None:
        refuse_unknown(type(self), unknown)
        self._store: TokenStore | None = None
        self._path = Path()
        self.window_size = window_size
        self.stride = window_size if stride is None else stride
        if window_size:
            check_positive(type(self).__name__, "window_size", window_size)
            check_positive(type(self).__name__, "stride", self.stride)

    def load(self, path: str | os.PathLike[str], *, share_memory: bool = True, **unknown: object) -> None:
        """Open a path: a tokenmill store, or AstrAI files in place.

        `share_memory` changes nothing: files are mapped, so all processes share their pages.
        """
        refuse_unknown(self.load, unknown)
        check_types(share_memory=(share_memory, bool))
        self._normalize(Path(path))

    def _normalize(self, path: Path) -> None:
        """Turn shards of any kind into one stream per key."""
        self._store = _open_as(path, self.storage_type or detect_format(path))
        self._path = path.absolute()

    @property
    def opened(self) -> TokenStore:
        """The tokenmill store."""
        if self._store is None:
            raise RuntimeError("Store not loaded")
        return self._store

    @property
    def path(self) -> Path:
        """Path of the store."""
        return self._path

    @property
    def keys(self) -> list[str]:
        """Names of the arrays; none before `load`."""
        return [] if self._store is None else list(self._store.keys)

    @property
    def fingerprint(self) -> str:
        """Digest of everything that decides the tokens."""
        return self.opened.fingerprint

    @property
    def num_records(self) -> int:
        """Number of documents, pairs or groups; 0 for a stream of AstrAI, which has no boundaries."""
        store = self._store
        return 0 if store is None or _is_stream(store) else store.num_documents

    @property
    def token_count(self) -> int:
        """Number of values of the shortest array: for seq and sft, of tokens."""
        return 0 if self._store is None else min(int(axis.values[-1]) for axis in self._store.axes.values())

    @property
    def num_samples(self) -> int:
        """Number of windows, or of records without a `window_size`."""
        if not self.window_size:
            return self.num_records
        return max(0, (self.token_count - 1 - self.window_size) // self.stride + 1)

    def sample_window(self, index: int) -> tuple[int, int]:
        """Return start and end (exclusive) of a window in the stream."""
        if not self.window_size:
            raise RuntimeError("sample_window: window_size must be given, got 0; pass it to the store")
        if not 0 <= index < self.num_samples:
            raise PlanError(
                f"{self._path}: an index must lie within 0:{self.num_samples}, got {index}; count from 0"
            )
        return index * self.stride, index * self.stride + self.window_size

    def __len__(self) -> int:
        """Return the number of windows; without a `window_size`, `token_count`."""
        return self.num_samples if self.window_size else self.token_count

    def __getitem__(self, index: int) -> dict[str, Value]:
        """Return a window or a record, with all arrays; a negative index counts from the end."""
        place = index + self.num_samples if index < 0 else index
        if not 0 <= place < self.num_samples:
            raise PlanError(
                f"{self._path}: an index must lie within 0:{self.num_samples}, got {index}; count from 0"
            )
        if not self.window_size:
            return self.fetch_record(place, self.keys)
        return dict(self.fetch(*self.sample_window(place), self.keys))

    @property
    def _cum(self) -> dict[str, list[int]]:
        """Key -> end of each shard in the stream."""
        store = self.opened
        return {key: store.axes[store.axis(key)].values[1:].tolist() for key in store.keys}

    @property
    def _data(self) -> dict[str, list[torch.Tensor]]:
        """Key -> its shards as on disk, mapped; writes to such a tensor stay in this process."""
        return {key: [self._segment(key, shard) for shard in range(self.opened.num_shards)] for key in self.keys}

    def _segment(self, key: str, shard: int) -> torch.Tensor:
        dtype, request = self.opened.dtype(key), self.opened.file(shard, key_file(key))
        if isinstance(request, MemoryRequest):
            return torch.from_numpy(request.data.view(dtype).copy())
        if isinstance(request, RangeRequest):
            return torch.from_numpy(read_range(request, 0, request.wanted).view(dtype))
        if not request.wanted:
            return torch.from_numpy(np.empty(0, dtype))
        shape = (request.wanted // dtype.itemsize,)
        return torch.from_numpy(np.memmap(request.path, dtype, "c", request.begin, shape))

    @overload
    def fetch(self, begin: int, end: int, keys: str) -> torch.Tensor: ...
    @overload
    def fetch(self, begin: int, end: int, keys: list[str] | tuple[str, ...]) -> dict[str, torch.Tensor]: ...
    def fetch(
        self, begin: int, end: int, keys: str | list[str] | tuple[str, ...]
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return values `begin` to `end` (exclusive) of the stream: a tensor for one key, a dict for several.

        A range outside the stream is a ValueError.
        """
        if isinstance(keys, str):
            store = self.opened
            size = int(store.axes[store.axis(keys)].values[-1])
            if not 0 <= begin <= end <= size or begin == size:
                raise StoreError(f"{self._path}: a range must lie within 0:{size}, got {begin}:{end}; shorten it")
            return to_tensor(keys, store.fetch(begin, end, keys))
        return {key: self.fetch(begin, end, key) for key in keys}

    def fetch_windows(self, begins: Sequence[int], length: int, key: str) -> torch.Tensor:
        """Return `length` values from each of several positions, one row each; a shard is opened once."""
        assert length > 0
        store, rows = self.opened, np.empty((len(begins), length), dtype_of(key))
        edges, starts = store.axes[store.axis(key)].values, np.array(begins, np.int64)
        for begin in starts[(starts < 0) | (starts + length > edges[-1])].tolist():
            raise PlanError(
                f"{self._path}: a window must lie within 0:{int(edges[-1])}, got {begin}:{begin + length}; move it"
            )
        for row, values in read_windows(store, key, begins, length):
            rows[row] = values
        return torch.from_numpy(rows)

    @overload
    def fetch_record(self, index: int, keys: str) -> Value: ...
    @overload
    def fetch_record(self, index: int, keys: list[str] | tuple[str, ...]) -> dict[str, Value]: ...
    def fetch_record(self, index: int, keys: str | list[str] | tuple[str, ...]) -> Value | dict[str, Value]:
        """Return one record, for one key or several; responses and their masks come as a list of tensors."""
        record = self.fetch_records([index], [keys] if isinstance(keys, str) else keys)[0]
        return record[keys] if isinstance(keys, str) else record

    def fetch_records(self, indices: Sequence[int], keys: list[str] | tuple[str, ...]) -> list[dict[str, Value]]:
        """Return several records; their positions are looked up together."""
        wanted = np.array([as_index(index) for index in indices], np.int64)
        size = self.num_records if self.opened else 0
        for index in wanted[(wanted < 0) | (wanted >= size)].tolist():
            raise StoreError(f"{self._path}: records must lie within 0:{size}, got {index}; count from 0")
        columns = {key: self._column(key, wanted) for key in keys}
        return [{key: columns[key][row] for key in keys} for row in range(wanted.size)]

    def _column(self, key: str, records: Int64Array) -> Sequence[Value]:
        store, axis = self.opened, self.opened.axis(key)
        if axis != "responses":
            begins, ends = _bounds(store, axis, records)
            return [to_tensor(key, store.fetch(begin, end, key)) for begin, end in zip(begins, ends, strict=True)]
        groups: list[list[torch.Tensor]] = []
        for first, last in zip(*_bounds(store, "groups", records), strict=True):
            begins, ends = _bounds(store, axis, np.arange(first, last))
            lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
            values = to_tensor(key, store.fetch(begins[0], ends[-1], key)) if lengths else torch.empty(0)
            groups.append(list(values.split(lengths)) if lengths else [])
        return groups

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker process needs to open the store; maps are not sent."""
        sizes = {"window_size": self.window_size, "stride": self.stride}
        if self._store is None:
            return sizes
        return {**sizes, "path": str(self._path), "fingerprint": self.fingerprint}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self._store, self._path = None, Path()
        self.window_size, self.stride = state["window_size"], state["stride"]
        if "path" in state:
            self._normalize(Path(state["path"]))
            if self.fingerprint != state["fingerprint"]:
                raise StoreError(
                    f"{self._path}: must be the store that was loaded, {state['fingerprint'][:8]}, "
                    f"got {self.fingerprint[:8]}; load it again"
                )


class H5Store(Store):
    """A store of HDF5 files."""

    storage_type = "h5"

    def share_memory_(self) -> H5Store:
        """Return the store: datasets are mapped in their file, so all workers share their pages."""
        return self


class MmapStore(Store):
    """A store of flat `.bin` files."""

    storage_type = "bin"


class JsonlStore(Store):
    """Records in `.jsonl` files: they are prepared into a store next to them, once, which is then opened."""

    storage_type = "jsonl"

    def load(  # type: ignore[override]
        self,
        path: str | os.PathLike[str],
        *,
        share_memory: bool = True,
        tokenizer_path: str | os.PathLike[str] | None = None,
        max_len: int = 2048,
        train_type: str = "sft",
        **unknown: object,
    ) -> None:
        """Prepare the records with the `dataset_config.json` next to them, or the recipe of the training type."""
        from tokenmill.adapters.astrai.pipeline import prepared  # imported here, because it imports this module

        refuse_unknown(self.load, unknown)
        check_types(share_memory=(share_memory, bool))
        records = records_at(Path(path))
        if not records:
            raise StoreMissingError(f"{path}: must be a .jsonl file or a folder with some, got none; fix the path")
        self._normalize(prepared(train_type, records, tokenizer_path, max_len))

    def _normalize(self, path: Path) -> None:
        self._store, self._path = open_store(path), path.absolute()


class StoreFactory:
    """Stores by their storage type."""

    stores: ClassVar[Mapping[str, type[Store]]] = {"h5": H5Store, "bin": MmapStore, "jsonl": JsonlStore}

    @classmethod
    def create(cls, storage_type: str, window_size: int = 0, stride: int | None = None, **unknown: object) -> Store:
        """Return a store to be loaded later."""
        check_choice("StoreFactory.create", "storage_type", storage_type, tuple(cls.stores))
        refuse_unknown(cls.create, unknown)
        return cls.stores[storage_type](window_size, stride)


def dtype_of(key: str) -> type[np.generic]:
    """Return the dtype of the delivered values of a key."""
    holds = STORED_ARRAYS[key].holds if key in STORED_ARRAYS else "ids"
    return np.bool_ if holds == "mask" else np.float32 if holds == "rewards" else np.int64


def to_tensor(key: str, values: AnyArray) -> torch.Tensor:
    """Return values of a key as a new tensor."""
    return torch.from_numpy(values.astype(dtype_of(key)))


def _bounds(store: TokenStore, axis: str, items: Int64Array) -> tuple[list[int], list[int]]:
    """Return start and end (exclusive) of the items of an axis in the stream."""
    shards, first, lengths = locate(store, items, axis)
    begins = store.axes[axis].values[shards] + first
    return begins.tolist(), (begins + lengths).tolist()


def detect_format(load_path: str | os.PathLike[str]) -> str:
    """Return `h5`, `bin` or `jsonl`: the storage type of a tokenmill or AstrAI store at a path, or of records.

    A folder is searched at any depth. As in AstrAI, `.h5` files come first: if both are there, set the storage type
    to `bin`. Records come last.
    """
    path = Path(load_path)
    if is_ours(path):
        return read_manifest(path).storage
    if records_at(path):
        return "jsonl"
    files = files_of(path)
    if any(file.suffix.lower() in (".h5", ".hdf5") for file in files):
        return "h5"
    if any(file.name == "meta.json" for file in files) and (
        path.is_file() or any(file.suffix == ".bin" for file in files)
    ):
        return "bin"
    endings = ", ".join(sorted({file.suffix or file.name for file in files})[:6])
    raise StoreMissingError(
        f"{path}: must hold .h5 files, or .bin files with a meta.json, or be a store of tokenmill, "
        f"got {endings or 'no files'}; make a store of records with Pipeline, or load them with a tokenizer_path"
    )


def records_at(path: Path) -> list[Path]:
    """Return the .jsonl files of a path; stores in the same path have priority, as in AstrAI."""
    if path.is_file():
        return [path] if path.suffix == ".jsonl" else []
    files = [] if is_ours(path) else files_of(path)
    stored = any(file.suffix.lower() in (".h5", ".hdf5") or file.name == "meta.json" for file in files)
    return [] if stored else [file for file in files if file.suffix == ".jsonl" and file.parent == path]


def _is_stream(store: TokenStore) -> bool:
    """Whether a store has AstrAI tokens without boundaries, so that each of its parts is one document."""
    foreign = store.manifest.tokenizer.get("kind") in (UNKNOWN, GIVEN)
    return foreign and store.manifest.kind in ("seq", "sft") and store.num_documents <= store.num_shards


def _open_as(path: Path, storage_type: str) -> TokenStore:
    """Open the store at a path, which must have that storage type."""
    check_choice(str(path), "storage_type", storage_type, ("h5", "bin"))
    if not is_ours(path):
        return _with_positions(open_store(path, format=f"astrai-{storage_type}"), path, storage_type)
    store = open_store(path)
    if store.manifest.storage != storage_type:
        raise StoreError(
            f"{path}: storage_type must be {store.manifest.storage!r}, as the store is kept, "
            f"got {storage_type!r}; leave it out"
        )
    return store


def refuse_unknown(called: Callable[..., object], unknown: Mapping[str, object]) -> None:
    """Reject options that a class or function does not have, which AstrAI ignores silently."""
    for name in unknown:
        kinds = signature(called).parameters
        known = [known for known, each in kinds.items() if each.kind is not each.VAR_KEYWORD and known != "self"]
        way_out = nearest(name, known) if known else "leave it out"
        raise ConfigError(f"{called.__qualname__}: options must be known, got {name!r}; {way_out}")


def _with_positions(store: TokenStore, path: Path, storage_type: str) -> TokenStore:
    """Return the AstrAI store at a path with its positions as one more key, if there are any."""
    if store.manifest.kind not in ("seq", "sft"):
        return store
    parts = [written_positions(file) for file in find_files(path, f"astrai-{storage_type}")[1]]
    arrays = [array for part in parts for array in part]
    if not arrays:
        return store
    for array in arrays:
        if array.obstacle or array.dtype.kind not in "iu":
            obstacle = array.obstacle or f"its numbers are {array.dtype.name}"
            raise StoreError(
                f"{array.path}: {POSITION_IDS} must be whole numbers as they are, but {obstacle}; {_WAY_OUT}"
            )
    dtypes = {array.dtype for array in arrays}
    if not all(parts) or len(dtypes) > 1:
        raise StoreError(
            f"{path}: all parts must have {POSITION_IDS} of one dtype, got {len([part for part in parts if part])} "
            f"of {len(parts)} with {sorted(dtype.name for dtype in dtypes)}; {_WAY_OUT}"
        )
    begins = np.cumsum([0, *(array.count for array in arrays)]).tolist()
    edges = store.token_begins.tolist()
    if begins[-1] != edges[-1]:
        raise StoreError(
            f"{path}: {POSITION_IDS} must be as many as tokens, {edges[-1]}, got {begins[-1]}; {_WAY_OUT}"
        )
    requests = dict(store._requests)
    # A shard is an array of the tokens; an array of positions may serve several.
    for shard, (begin, end) in enumerate(pairwise(edges)):
        number = int(np.searchsorted(begins[1:-1], begin, side="right"))
        array, size = arrays[number], arrays[number].dtype.itemsize
        if end > begins[number + 1]:
            raise StoreError(
                f"{path}: a dataset of {POSITION_IDS} must hold those of whole datasets of tokens, "
                f"got one that ends at {begins[number + 1]} within {begin}:{end}; {_WAY_OUT}"
            )
        first = array.begin + (begin - begins[number]) * size
        requests[shard, key_file(POSITION_IDS)] = FileRequest(
            array.path, array.file_bytes, first, (end - begin) * size
        )
    keys = {**store.manifest.keys, POSITION_IDS: arrays[0].dtype.str}
    return replace(store, manifest=replace(store.manifest, keys=keys), _requests=requests)
