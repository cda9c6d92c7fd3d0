"""AstrAI's `.bin` files, from tensors and to tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch

from tokenmill.errors import ConfigError, StoreCorruptError, StoreMissingError
from tokenmill.store.files import make_folder, write_atomically
from tokenmill.store.foreign.files import META
from tokenmill.store.layout import is_plain_name, key_file
from tokenmill.tables import MAX_LIST_BYTES, read_bytes

_DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")


class _Entry(msgspec.Struct):
    """Description of an array in a `meta.json`."""

    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    dtype: str


def save_bin(
    file_path: str | os.PathLike[str],
    tensor_group: Mapping[str, Sequence[torch.Tensor]],
    record_keys: Sequence[str] | None = None,
) -> None:
    """Write a folder with one `.bin` file per key, its tensors concatenated, and finally the `meta.json`.

    Keys of `record_keys` have offsets there, so that each of their tensors can be read as a record.
    """
    folder, meta = Path(file_path), dict[str, dict[str, Any]]()
    for key, tensors in tensor_group.items():
        if not is_plain_name(key) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors) or not tensors:
            raise ConfigError(f"save_bin: {key!r} must be the name of a list of tensors; keep groups as .jsonl")
    make_folder(folder)
    (folder / META).unlink(missing_ok=True)
    for key, tensors in tensor_group.items():
        whole = torch.cat(list(tensors)).cpu()
        whole.numpy().tofile(folder / key_file(key))
        meta[key] = {"shape": list(whole.shape), "dtype": str(whole.dtype).removeprefix("torch.")}
        if key in (record_keys or ()):
            meta[key]["offsets"] = [0, *np.cumsum([len(tensor) for tensor in tensors]).tolist()]
    write_atomically(folder / META, json.dumps(meta).encode())


def load_bin(file_path: str | os.PathLike[str]) -> dict[str, list[torch.Tensor]]:
    """Return key -> its single tensor, mapped from the file; writes to it stay in this process."""
    folder = Path(file_path)
    if not (folder / META).is_file():
        raise StoreMissingError(f"{folder}: must be a folder with a {META}, got none; fix the path")
    data = read_bytes(folder / META, MAX_LIST_BYTES)
    try:
        table = msgspec.json.decode(data, type=dict[str, _Entry])
    except (ValueError, RecursionError) as error:
        raise StoreCorruptError(
            f"{folder / META}: expected a table of arrays, got {error}; write it again"
        ) from None
    tensors = {}
    for key, entry in table.items():
        file = folder / key_file(key)
        if not is_plain_name(key) or entry.dtype not in _DTYPES or not file.is_file():
            raise StoreCorruptError(
                f"{file}: must hold an array of {', '.join(_DTYPES)}, got {entry.dtype!r}; write it again"
            )
        count = int(np.prod(entry.shape, dtype=object))
        size = file.stat().st_size
        if size != count * np.dtype(entry.dtype).itemsize:
            raise StoreCorruptError(
                f"{file}: must hold {count} numbers of {entry.dtype}, got {size} bytes; write it again"
            )
        values = (
            np.memmap(file, entry.dtype, "c", shape=entry.shape) if count else np.empty(entry.shape, entry.dtype)
        )
        tensors[key] = [torch.from_numpy(values)]
    return tensors
