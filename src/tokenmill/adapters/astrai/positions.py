"""The positions that AstrAI writes beside its tokens: the engine leaves them aside, AstrAI delivers them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from tokenmill.errors import StoreError
from tokenmill.store.foreign.detect import find
from tokenmill.store.foreign.parts import Flat, flat_of, real_file
from tokenmill.store.layout import key_file
from tokenmill.store.maps import FileRequest

if TYPE_CHECKING:
    from tokenmill.store.maps import Request
    from tokenmill.store.reader import Store

KEY = "position_ids"
_WAY_OUT = "write the store again, or prepare it from its records"


def with_positions(store: Store, path: Path, storage_type: str) -> Store:
    """Return the store of AstrAI at a path with its positions as one more key; as it is where none were written."""
    if store.manifest.kind != "sft":
        return store
    files = find(path, f"astrai-{storage_type}").files
    found = [_bin_positions(file) if storage_type == "bin" else _h5_positions(file) for file in files]
    if not any(found):
        return store
    flats = [flat for part in found for flat in part]
    dtypes = {flat.dtype for flat in flats}
    if not all(found) or len(dtypes) > 1:
        raise StoreError(
            f"{path}: all parts must have {KEY} of one dtype, got {len([part for part in found if part])} of "
            f"{len(files)} with {sorted(dtype.name for dtype in dtypes)}; {_WAY_OUT}"
        )
    requests: dict[tuple[int, str], Request] = {
        (shard, key_file(KEY)): request for shard, request in enumerate(_requests(store, flats, path))
    }
    keys = {**store.manifest.keys, KEY: flats[0].dtype.str}
    return replace(store, manifest=replace(store.manifest, keys=keys), requests={**store.requests, **requests})


def _requests(store: Store, flats: Sequence[Flat], path: Path) -> list[FileRequest]:
    """Find the positions of each shard, which is a dataset of the tokens: those of positions may be fewer."""
    begins = np.cumsum([0, *(flat.count for flat in flats)]).tolist()
    edges = store.token_begins.tolist()
    if begins[-1] != edges[-1]:
        raise StoreError(f"{path}: {KEY} must be as many as tokens, {edges[-1]}, got {begins[-1]}; {_WAY_OUT}")
    requests = []
    for begin, end in pairwise(edges):
        number = int(np.searchsorted(begins[1:-1], begin, side="right"))
        flat, size = flats[number], flats[number].dtype.itemsize
        if end > begins[number + 1]:
            raise StoreError(
                f"{path}: a dataset of {KEY} must hold those of whole datasets of tokens, "
                f"got one that ends at {begins[number + 1]} within {begin}:{end}; {_WAY_OUT}"
            )
        first = flat.begin + (begin - begins[number]) * size
        requests.append(FileRequest(flat.path, flat.file_bytes, first, (end - begin) * size))
    return requests


def _bin_positions(meta: Path) -> list[Flat]:
    # The engine has read this meta.json before: it is an object of objects, of a bounded size.
    info = orjson.loads(meta.read_bytes()).get(KEY)
    if info is None:
        return []
    shape, dtype = info.get("shape"), info.get("dtype")
    whole = isinstance(shape, list) and len(shape) == 1 and type(shape[0]) is int and shape[0] >= 0
    if not whole or dtype not in ("uint8", "uint16", "uint32", "int8", "int16", "int32", "int64"):
        raise StoreError(
            f"{meta}: {KEY} must be whole numbers in one dimension, got {dtype!r} of shape {shape}; {_WAY_OUT}"
        )
    return [flat_of(meta.with_name(key_file(KEY)), np.dtype(dtype).newbyteorder("<"), count=shape[0])]


def _h5_positions(file: Path) -> list[Flat]:
    import h5py

    real, size = real_file(file)
    with h5py.File(real, "r", locking=False) as opened:
        # The engine has looked at all groups before: datasets data_0, data_1, ... and no links.
        group = opened.get(KEY, {})
        return [_h5_flat(group[f"data_{number}"], real, size) for number in range(len(group))]


def _h5_flat(dataset: Any, real: Path, size: int) -> Flat:  # noqa: ANN401 - h5py ships no types
    count, begin, dtype = dataset.size, dataset.id.get_offset(), dataset.dtype
    if dataset.ndim != 1 or dtype.kind not in "iu" or dataset.external or (count and begin is None):
        raise StoreError(
            f"{real}: {dataset.name} must be whole numbers in one piece inside the file, "
            f"got {dtype.name} of shape {dataset.shape}; {_WAY_OUT}"
        )
    return Flat(path=real, file_bytes=size, begin=begin or 0, count=int(count), dtype=dtype)
