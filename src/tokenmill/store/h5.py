"""A shard as one HDF5 file, its arrays contiguous, so that they are mapped in place like any other."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from tokenmill.errors import StoreError
from tokenmill.store.durable import sync_folder
from tokenmill.store.layout import key_file
from tokenmill.store.manifest import FileInfo, ShardInfo

if TYPE_CHECKING:
    from tokenmill.store.writer import StoreSpec

INDEX_GROUP = "tokenmill"
"""Where a file keeps its indexes; every other group is an array, with its values in `data_0`."""
_ALIGNMENT = 64
_BLOCK = 1 << 24


def to_h5(folder: Path, shard: ShardInfo, spec: StoreSpec) -> ShardInfo:
    """Turn a finished folder into a `.h5` file beside it, and remove the folder."""
    target = folder.with_name(f"{folder.name}.h5")
    dtypes = {key_file(key): (f"{key}/data_0", np.dtype(dtype)) for key, dtype in spec.keys.items()}
    begins: dict[str, int] = {}
    with _library().File(
        target, "w", libver="v108", alignment_threshold=1, alignment_interval=_ALIGNMENT, track_order=False
    ) as file:
        for name, info in shard.files.items():
            path, dtype = dtypes.get(name, (f"{INDEX_GROUP}/{name.removesuffix('.bin')}", np.dtype("|u1")))
            count = info.bytes // dtype.itemsize
            dataset = file.create_dataset(path, (count,), dtype, track_times=False)
            if count:
                source = np.memmap(folder / name, dtype, "r")
                for begin in range(0, count, _BLOCK):
                    dataset[begin : begin + _BLOCK] = source[begin : begin + _BLOCK]
                begins[name] = int(dataset.id.get_offset())
    size, xxh3 = _synced(target)
    sync_folder(target.parent)
    shutil.rmtree(folder)
    return replace(
        shard,
        name=target.name,
        files={name: replace(info, begin=begins.get(name, 0)) for name, info in shard.files.items()},
        container=FileInfo(bytes=size, xxh3=xxh3),
    )


def _synced(path: Path) -> tuple[int, str]:
    """Make a file durable; return its size and checksum."""
    state = xxhash.xxh3_128()
    size = 0
    with path.open("rb") as file:
        os.fsync(file.fileno())
        while block := file.read(_BLOCK):
            state.update(block)
            size += len(block)
    return size, state.hexdigest()


def _library() -> Any:  # noqa: ANN401 - h5py ships no types
    try:
        import h5py
    except ImportError as error:
        raise StoreError(
            f"storage h5: h5py must be installed to write it, got {error}; pip install 'tokenmill[h5]'"
        ) from error
    return h5py
