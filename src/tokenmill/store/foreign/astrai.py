"""Readers of AstrAI's stores: .bin with meta.json, and .h5 with a group a key."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokenmill.errors import StoreCorruptError, StoreError, StoreMissingError
from tokenmill.store.foreign.files import (
    META,
    ForeignArray,
    ForeignFiles,
    ForeignOptions,
    ForeignShard,
    array_of,
    names_of,
    real_file,
)
from tokenmill.store.layout import axes_of, axis_of
from tokenmill.store.writer import import_h5py
from tokenmill.types import TRAINING_TYPES, AnyArray, Int64Array

POSITION_IDS = "position_ids"
"""What AstrAI writes beside the tokens and delivers; the engine counts positions itself."""
MAX_META = 1 << 28
"""Bytes that a meta.json may have."""
_DTYPES = ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
_MAX_EXPANSION = 2000
"""Times its size on disk that an array may have: gzip, the best that HDF5 has by itself, comes to 1,032."""
_WAY_OUT = "copy the folder again from where it is intact"


def read_astrai_bin(files: Sequence[Path], options: ForeignOptions) -> ForeignFiles:
    """Read folders of a meta.json (key -> shape, dtype, and for records their offsets) and a KEY.bin a key."""
    kinds, shards = [], []
    for meta, name in zip(files, names_of(files), strict=True):
        table = _read_meta(meta)
        kind = _training_type(meta, table)
        arrays: dict[str, ForeignArray] = {}
        ends: dict[str, Int64Array] = {}
        for key in _read_keys(kind, table):
            arrays[key] = _bin_array(meta, key, table[key])
            if "offsets" in table[key]:
                axis, starts = axis_of(kind, key), _offsets(meta, key, table[key]["offsets"], arrays[key].count)
                if not np.array_equal(ends.setdefault(axis, starts[1:]), starts[1:]):
                    raise StoreCorruptError(
                        f"{meta}: offsets of {key!r} must be those of all arrays of {axis}, got others; {_WAY_OUT}"
                    )
        if kind == "dpo" and set(ends) != set(axes_of(kind, arrays)):
            raise StoreError(
                f"{meta}: records of DPO must have offsets for chosen and rejected, got {sorted(ends)}; "
                "write the store again with record_keys, or as .h5"
            )
        _check(meta, kind, arrays, options)
        kinds.append(kind)
        shards.append(
            ForeignShard(
                name=name.removesuffix("/meta.json"),
                arrays=arrays,
                ends={axis: partial(np.asarray, places) for axis, places in ends.items()},
                beside=(meta,),
            )
        )
    return _one_type(files, kinds, shards)


def _read_meta(meta: Path) -> dict[str, dict[str, Any]]:
    if not meta.is_file():
        raise StoreMissingError(f"{meta}: must stand beside the .bin files, got nothing there; copy it as well")
    _, size = real_file(meta)
    try:
        if size > MAX_META:
            raise ValueError(f"{size} bytes")
        return msgspec.json.decode(meta.read_bytes(), type=dict[str, dict[str, Any]])
    except (ValueError, RecursionError) as error:
        raise StoreCorruptError(f"{meta}: must be a JSON object of objects, got {error}; {_WAY_OUT}") from None


def _bin_array(meta: Path, key: str, info: Mapping[str, Any]) -> ForeignArray:
    shape, dtype = info.get("shape"), info.get("dtype")
    ok = isinstance(shape, list) and len(shape) == 1 and type(shape[0]) is int and shape[0] >= 0
    if not ok or dtype not in _DTYPES:
        raise StoreCorruptError(
            f"{meta}: key {key!r} must have a shape of one dimension and a dtype of whole numbers, "
            f"got {str(shape)[:40]} and {dtype!r}; {_WAY_OUT}"
        )
    file = meta.with_name(f"{key}.bin")
    if not file.is_file():
        raise StoreMissingError(f"{file}: must exist, as {meta.name} lists it, got nothing there; {_WAY_OUT}")
    assert isinstance(shape, list)
    return array_of(file, np.dtype(dtype).newbyteorder("<"), count=shape[0])


def _offsets(meta: Path, key: str, value: object, count: int) -> Int64Array:
    numbers = value if isinstance(value, list) and all(type(item) is int for item in value) else []
    if numbers and numbers[0] == 0 and numbers[-1] == count and min(numbers) >= 0 and max(numbers) <= count:
        offsets = np.array(numbers, np.int64)
        if (np.diff(offsets) >= 0).all():
            return offsets
    raise StoreCorruptError(
        f"{meta}: offsets of {key!r} must rise from 0 to {count}, got {str(value)[:60]}; {_WAY_OUT}"
    )


def read_astrai_h5(files: Sequence[Path], options: ForeignOptions) -> ForeignFiles:
    """Read .h5 files with a group a key and a dataset a record: data_0, data_1, ..., in order of their numbers."""
    kinds, shards = [], []
    for file, name in zip(files, names_of(files), strict=True):
        kind, datasets = _h5_arrays(file)
        kinds.append(kind)
        for number, arrays in enumerate(datasets):
            _check(file, kind, arrays, options)
            shard_name = name if len(datasets) == 1 else f"{name}/data_{number}"
            shards.append(ForeignShard(name=shard_name, arrays=arrays))
    return _one_type(files, kinds, shards)


def _h5_arrays(file: Path) -> tuple[str, list[dict[str, ForeignArray]]]:
    with _h5_groups(file) as (groups, array):
        kind = _training_type(file, groups)
        keys = _read_keys(kind, groups)
        for key in keys:
            if groups[key] != groups[keys[0]] or [*map(_number, groups[key])] != [*range(len(groups[key]))]:
                raise StoreCorruptError(
                    f"{file}: every key must have datasets data_0, data_1, ..., as many as the others, "
                    f"got {len(groups[key])} of {key!r}; {_WAY_OUT}"
                )
        return kind, [{key: array(key, name) for key in keys} for name in groups[keys[0]]]


def written_positions(file: Path) -> list[ForeignArray]:
    """Return the position_ids of a part, which a meta.json or an .h5 file is; nothing where none were written.

    In an .h5 file they may be fewer arrays than those of the tokens.
    """
    if file.name == META:
        table = _read_meta(file)
        return [_bin_array(file, POSITION_IDS, table[POSITION_IDS])] if POSITION_IDS in table else []
    with _h5_groups(file) as (groups, array):
        return [array(POSITION_IDS, name) for name in groups.get(POSITION_IDS, ())]


@contextmanager
def _h5_groups(file: Path) -> Iterator[tuple[dict[str, list[str]], Callable[[str, str], ForeignArray]]]:
    """Open an .h5 file: key -> the names of its datasets in order, and what describes one of them."""
    h5py = import_h5py(file, "read")
    real, size = real_file(file)
    with _damage_named(file), h5py.File(real, "r", locking=False) as opened:
        if opened.userblock_size:
            raise StoreError(f"{file}: must begin with HDF5, got a user block; write it without one")
        groups = {key: _members(h5py, opened, key, file) for key in opened}
        yield groups, lambda key, name: _h5_array(h5py, opened[key][name], real, size)


@contextmanager
def _damage_named(file: Path) -> Iterator[None]:
    """Turn what h5py raises over a damaged file, which can be almost anything, into an error of ours."""
    try:
        yield
    except StoreError:
        raise
    except (OSError, RuntimeError, LookupError, ValueError, TypeError, ArithmeticError, MemoryError) as error:
        raise StoreCorruptError(f"{file}: must be a whole HDF5 file, got {error}; {_WAY_OUT}") from None


def _members(h5py: Any, opened: Any, key: str, file: Path) -> list[str]:  # noqa: ANN401 - h5py ships no types
    """Return the names of a group's datasets in their order; links out of the file are refused."""

    def is_plain(parent: Any, name: str, kind: type) -> bool:  # noqa: ANN401
        return isinstance(parent.get(name, getlink=True), h5py.HardLink) and isinstance(parent[name], kind)

    names = list(opened[key]) if is_plain(opened, key, h5py.Group) else ["none"]
    if not all(re.fullmatch(r"data_[0-9]+", name) and is_plain(opened[key], name, h5py.Dataset) for name in names):
        raise StoreError(
            f"{file}: {key!r} must be a group of datasets data_0, data_1, ... in this file, got others or links; "
            "write it as AstrAI does"
        )
    return sorted(names, key=_number)


def _h5_array(h5py: Any, dataset: Any, real: Path, size: int) -> ForeignArray:  # noqa: ANN401 - h5py ships no types
    name, dtype = dataset.name, dataset.dtype
    if dataset.ndim != 1 or dtype.kind not in "iub" or dataset.is_virtual or dataset.external:
        raise StoreError(
            f"{real}: {name} must be whole numbers in one dimension inside the file, "
            f"got {dtype} of shape {dataset.shape}; write it as AstrAI does"
        )
    count = int(dataset.shape[0])
    begin = dataset.id.get_offset()
    obstacle, read = ("its numbers are big-endian" if dtype.byteorder == ">" else ""), None
    if count and begin is None:
        obstacle, read = "it is chunked or compressed", _h5_reader(h5py, real, name)
        if count * dtype.itemsize > _MAX_EXPANSION * dataset.id.get_storage_size():
            raise StoreCorruptError(
                f"{real}: {name} must hold what it declares, got {count} numbers in "
                f"{dataset.id.get_storage_size()} bytes; {_WAY_OUT}"
            )
    elif count and begin + count * dtype.itemsize > size:
        raise StoreCorruptError(
            f"{real}: {name} must lie within {size} bytes, got {count * dtype.itemsize} from {begin} on; {_WAY_OUT}"
        )
    return ForeignArray(
        path=real, file_bytes=size, begin=begin or 0, count=count, dtype=dtype, obstacle=obstacle, read=read
    )


def _h5_reader(h5py: Any, real: Path, name: str) -> Callable[[int, int], AnyArray]:  # noqa: ANN401
    def read(begin: int, end: int) -> AnyArray:
        with _damage_named(real), h5py.File(real, "r", locking=False) as opened:
            numbers: AnyArray = opened[name][begin:end]
        return numbers

    return read


def _number(name: str) -> int:
    return int(name.removeprefix("data_")[:12])


def _training_type(where: Path, keys: Mapping[str, object]) -> str:
    """Tell the training type by the keys."""
    if "sequence" in keys:
        kind = "sft" if "loss_mask" in keys else "seq"
    elif "chosen" in keys and "rejected" in keys:
        kind = "dpo"
    elif "responses" in keys:
        raise StoreError(
            f"{where}: must be of training type seq, sft or dpo, got grpo, whose responses are written without "
            "boundaries; prepare it from its records"
        )
    else:
        raise StoreError(
            f"{where}: must have the key sequence, or chosen and rejected, got {sorted(keys)[:8]}; "
            "say another format if AstrAI did not write it"
        )
    needed = _read_keys(kind, TRAINING_TYPES[kind])
    missing = [key for key in needed if key not in keys]
    if missing:
        raise StoreError(f"{where}: {kind} must have keys {needed}, got none of {missing}; write it again")
    return kind


def _read_keys(kind: str, keys: Mapping[str, object]) -> list[str]:
    """Return the keys that are read: positions are counted from the documents, so theirs are not."""
    arrays = TRAINING_TYPES[kind]
    return [key for key, array in arrays.items() if key in keys and array.holds != "positions"]


def _check(where: Path, kind: str, arrays: Mapping[str, ForeignArray], options: ForeignOptions) -> None:
    """Refuse arrays of one axis that are not equally long, and a dtype that contradicts the ids."""
    for axis in axes_of(kind, arrays):
        lengths = {key: array.count for key, array in arrays.items() if axis_of(kind, key) == axis}
        if len(set(lengths.values())) > 1:
            raise StoreCorruptError(f"{where}: arrays of {axis} must be equally long, got {lengths}; {_WAY_OUT}")
    options.check_dtype(where, next(iter(arrays.values())).dtype)


def _one_type(files: Sequence[Path], kinds: Sequence[str], shards: Sequence[ForeignShard]) -> ForeignFiles:
    """Join the shards of all files, which must be of one training type."""
    for file, kind in zip(files, kinds, strict=True):
        if kind != kinds[0]:
            raise StoreError(
                f"{file}: all parts must be of one training type, got {kind} after {kinds[0]}; name them apart"
            )
    return ForeignFiles(kind=kinds[0], shards=tuple(shards))
