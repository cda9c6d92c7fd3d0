"""A shard as one HDF5 file, its arrays contiguous, so that they are mapped in place like any other."""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tokenmill.errors import StoreError
from tokenmill.store.durable import sync_folder
from tokenmill.store.layout import key_file
from tokenmill.store.manifest import FileInfo, ShardInfo

H5_MAGIC = b"\x89HDF\r\n\x1a\n"
INDEX_GROUP = "tokenmill"
"""Where a file keeps its indexes; every other group is an array, with its values in `data_0`."""
_ALIGNMENT = 64
_BLOCK = 1 << 24


def to_h5(folder: Path, shard: ShardInfo, keys: Mapping[str, str]) -> ShardInfo:
    """Turn the finished folder of a shard into a `.h5` file beside it, and remove the folder."""
    target = folder.with_name(f"{folder.name}.h5")
    datasets = {key_file(key): (f"{key}/data_0", np.dtype(dtype)) for key, dtype in keys.items()}
    begins: dict[str, int] = {}
    with import_h5py("storage h5", "write").File(
        target, "w", libver="v108", alignment_threshold=1, alignment_interval=_ALIGNMENT, track_order=False
    ) as file:
        for name, info in shard.files.items():
            index = f"{INDEX_GROUP}/{name.removesuffix('.bin')}"
            path, dtype = datasets.get(name, (index, np.dtype("|u1")))
            count = info.bytes // dtype.itemsize
            dataset = file.create_dataset(path, (count,), dtype, track_times=False)
            if count:
                source = np.memmap(folder / name, dtype, "r")
                for begin in range(0, count, _BLOCK):
                    dataset[begin : begin + _BLOCK] = source[begin : begin + _BLOCK]
                begins[name] = int(dataset.id.get_offset())
    container = _sync(target)
    sync_folder(target.parent)
    shutil.rmtree(folder)
    return replace(
        shard,
        name=target.name,
        files={name: replace(info, begin=begins.get(name, 0)) for name, info in shard.files.items()},
        container=container,
    )


def _sync(path: Path) -> FileInfo:
    """Make a file durable; return its size and checksum."""
    state = xxhash.xxh3_128()
    size = 0
    with path.open("rb") as file:
        os.fsync(file.fileno())
        while block := file.read(_BLOCK):
            state.update(block)
            size += len(block)
    return FileInfo(bytes=size, xxh3=state.hexdigest())


def is_container(file: Path) -> bool:
    """Whether a file was made by `to_h5`: it has the group that only ours have."""
    if not file.stat().st_size:
        return False
    with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data[:8] == H5_MAGIC and data.find(INDEX_GROUP.encode()) >= 0


def import_h5py(where: object, use: str) -> Any:  # noqa: ANN401 - h5py ships no types
    """Return the library, which is needed to write HDF5 and to find the arrays in files of others."""
    try:
        import h5py
    except ImportError as error:
        raise StoreError(
            f"{where}: h5py must be installed to {use} it, got {error}; pip install 'tokenmill[h5]'"
        ) from error
    return h5py
