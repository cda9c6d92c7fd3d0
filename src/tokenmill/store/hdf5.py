"""HDF5 copy of a shard's arrays, in the layout that AstrAI reads (`storage = "h5"`).

`arrays.h5` in the folder of a shard has a group per array. The group of an array has the values as one dataset
`data_0`; pairs have one dataset per record, `data_0`, `data_1`, and so on. tokenmill reads only the flat files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.errors import MissingExtraError, writing
from tokenmill.store import layout
from tokenmill.store.files import Checksums
from tokenmill.types import MASK_KEYS, AnyArray

_BLOCK = 1 << 24


def write_h5(folder: Path, kind: str, keys: Mapping[str, str], sizes: Mapping[str, tuple[int, int]]) -> Checksums:
    """Write the arrays in the folder of a shard as one HDF5 file; return the checksums of this file.

    `sizes` has the number of items and of values of each axis.
    """
    h5py = import_h5py("storage h5")
    path = folder / layout.H5_FILE
    with writing(path), h5py.File(path, "w", libver="v108", track_order=False) as file:
        for key, dtype in keys.items():
            stored, name = np.dtype(dtype), astrai_dtype(key, dtype)
            axis = layout.axis_of(kind, key)
            items, count = sizes[axis]
            values = _mapped(folder / layout.key_file(key), stored, count)
            bounds = [0, count]
            if kind == "dpo":
                bounds = _mapped(folder / layout.index_file(axis), layout.OFFSET_DTYPE, items + 1).tolist()
            for number, (begin, end) in enumerate(pairwise(bounds)):
                dataset = file.create_dataset(f"{key}/data_{number}", (end - begin,), name, track_times=False)
                for first in range(begin, end, _BLOCK):
                    last = min(end, first + _BLOCK)
                    dataset[first - begin : last - begin] = values[first:last].astype(name)
    checksums = Checksums()
    with open(path, "r+b") as written:
        while block := written.read(_BLOCK):
            checksums.update(memoryview(block))
        os.fsync(written.fileno())
    return checksums


def astrai_dtype(key: str, dtype: str) -> str:
    """Return the dtype of an array for AstrAI; torch has few operations for unsigned ids of 32 bits."""
    return "bool" if key in MASK_KEYS else "int32" if dtype == "<u4" else np.dtype(dtype).name


def _mapped(file: Path, dtype: np.dtype[Any], count: int) -> AnyArray:
    return np.memmap(file, dtype, "r", shape=(count,)) if count else np.empty(0, dtype)


def import_h5py(where: object) -> Any:  # noqa: ANN401 - h5py ships no types
    """Return the package h5py."""
    try:
        import h5py
    except ImportError as error:
        raise MissingExtraError(f"{where}: h5py is not installed ({error}); pip install 'tokenmill[h5]'") from None
    return h5py
