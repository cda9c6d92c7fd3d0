"""From a path to an open store: ours, or files of another project in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.errors import ConfigError, StoreError
from tokenmill.store.foreign.astrai import read_astrai_bin, read_astrai_h5
from tokenmill.store.foreign.files import (
    IMPORT,
    ForeignFiles,
    ForeignOptions,
    ForeignShard,
    find_files,
    stored_dtype,
)
from tokenmill.store.foreign.formats import read_datatrove, read_llmc, read_megatron, read_npy, read_olmo, read_raw
from tokenmill.store.foreign.index import Facts, ShardIndex, index_of
from tokenmill.store.layout import axis_of, is_ours, key_file, token_keys
from tokenmill.store.manifest import GIVEN, UNKNOWN, FileInfo, Manifest, ShardInfo, read_manifest
from tokenmill.store.maps import FileRequest, MapCache, Request
from tokenmill.store.reader import Store, store_of
from tokenmill.types import MASK_KEYS

MAX_RECORDS = 4096
"""Datasets of HDF5 that are mapped one by one; more have to be imported."""
READERS: Mapping[str, Callable[[Sequence[Path], ForeignOptions], ForeignFiles]] = {
    "npy": read_npy,
    "bin": read_raw,
    "nanogpt": read_raw,
    "llmc": read_llmc,
    "megatron": read_megatron,
    "datatrove": read_datatrove,
    "olmo": read_olmo,
    "astrai-bin": read_astrai_bin,
    "astrai-h5": read_astrai_h5,
}


def open_store(
    path: str | os.PathLike[str],
    *,
    maps: MapCache | None = None,
    dtype: str | None = None,
    vocab_size: int | None = None,
    eos_id: int | None = None,
    bos_id: int | None = None,
    format: str | None = None,
) -> Store:
    """Open the store at `path` by reading its manifest, or files of another project in place.

    `maps` is shared by the stores of a run. The rest is for foreign files, which may be named as a file, a folder,
    a glob or a prefix, and say less than they should: see `ForeignOptions`. For a store of ours it must not
    contradict the manifest.
    """
    options = ForeignOptions(dtype=dtype, vocab_size=vocab_size, eos_id=eos_id, bos_id=bos_id, format=format)
    place = Path(path)
    if is_ours(place) or options.format == "tokenmill":
        return store_of(place, read_ours(place, options), maps)
    return open_foreign(place, options, maps)


def read_ours(path: Path, options: ForeignOptions) -> Manifest:
    """Read the manifest of a store of ours; options that contradict it are refused."""
    manifest = read_manifest(path)
    known: dict[str, object] = {
        "format": "tokenmill",
        "dtype": np.dtype(manifest.keys[manifest.token_key]).name,
        **{name: manifest.tokenizer.get(name) for name in ("vocab_size", "eos_id", "bos_id")},
    }
    for name, value in options.given.items():
        if value != known[name]:
            raise ConfigError(
                f"{path}: {name} must be as the manifest says, {known[name]!r}, got {value!r}; leave it out"
            )
    return manifest


# Files of another project: a manifest is made up, and arrays stay where they are.


def open_foreign(path: Path, options: ForeignOptions, maps: MapCache | None = None) -> Store:
    """Open foreign files as a store, without copying their tokens.

    The first time, ids are looked at where documents or a vocabulary have to be proven by them; what was found is
    kept, and later the cost grows with the number of files alone.
    """
    format, files = read_foreign(path, options)
    if format == "astrai-h5" and len(files.shards) > MAX_RECORDS:
        raise StoreError(
            f"{path}: at most {MAX_RECORDS} datasets can be mapped one by one, got {len(files.shards)}; {IMPORT}"
        )
    keys = _keys_of(path, files)
    shards, facts = [], []
    requests: dict[tuple[int, str], Request] = {}
    for number, shard in enumerate(files.shards):
        index = index_of(shard, files.kind, options)
        check_vocabulary(shard, index.facts, options)
        facts.append(index.facts)
        info, places = _shard_info(shard, files.kind, index)
        shards.append(info)
        requests.update({(number, name): place for name, place in places.items()})
    manifest = Manifest(
        kind=files.kind,
        keys=keys,
        tokenizer=tokenizer_of(keys, facts, options),
        recipe={"format": format, "options": options.given, **files.facts},
        shards=tuple(shards),
        inputs=tuple({"name": info.name, "documents": info.documents, "tokens": info.tokens} for info in shards),
    )
    return store_of(path, manifest, maps, requests)


def read_foreign(path: Path, options: ForeignOptions) -> tuple[str, ForeignFiles]:
    """Return the format of what is at a path, and its arrays; no token is read."""
    format, files = find_files(path, options.format)
    return format, READERS[format](files, options)


def _keys_of(path: Path, files: ForeignFiles) -> dict[str, str]:
    """Return key -> dtype for all shards; what cannot be mapped is refused with the way out."""
    keys: dict[str, str] = {}
    for shard in files.shards:
        for key, array in shard.arrays.items():
            dtype, obstacle = stored_dtype(key, array)
            if obstacle and key not in MASK_KEYS:
                raise StoreError(f"{array.path}: {key} must be mapped as it is, but {obstacle}; {IMPORT}")
            if keys.setdefault(key, dtype) != dtype:
                raise StoreError(
                    f"{path}: all files must have one dtype for {key}, got {keys[key]} and {dtype} in "
                    f"{shard.name}; name them apart"
                )
    return keys


def check_vocabulary(shard: ForeignShard, facts: Facts, options: ForeignOptions) -> None:
    """Refuse ids outside the vocabulary that was given."""
    if options.vocab_size is not None and facts.largest >= options.vocab_size:
        raise StoreError(
            f"{shard.name}: token ids must be below the vocabulary size {options.vocab_size}, got {facts.largest}; "
            "say the vocabulary and dtype that the file was written with"
        )


def _shard_info(shard: ForeignShard, kind: str, index: ShardIndex) -> tuple[ShardInfo, dict[str, Request]]:
    """Return what a manifest says of a foreign shard, and where its files are."""
    places: dict[str, Request] = dict(index.requests)
    files = {name: FileInfo(bytes=place.wanted, xxh3=index.digests[name]) for name, place in places.items()}
    for key, array in shard.arrays.items():
        if key_file(key) not in places:
            places[key_file(key)] = FileRequest(array.path, array.file_bytes, array.begin, array.bytes)
            # No checksum, and it says so: reading all of a corpus to open it would take hours.
            files[key_file(key)] = FileInfo(bytes=array.bytes, xxh3=f"sample:{array.sample}")
    tokens = {axis_of(kind, key): shard.arrays[key].count for key in token_keys(shard.arrays)}
    axes = {axis: (index.facts.items[axis], values) for axis, values in tokens.items()}
    info = ShardInfo(
        name=shard.name,
        documents=next(iter(index.facts.items.values())),
        tokens=sum(tokens.values()),
        files=files,
        axes={} if tuple(axes) == ("documents",) else axes,
    )
    return info, places


def tokenizer_of(keys: Mapping[str, str], facts: Sequence[Facts], options: ForeignOptions) -> dict[str, Any]:
    """Return what stands for the identity of a tokenizer: `given` if the user bounded the ids, else `unknown`."""
    key = token_keys(keys)[0]
    filled = [shard for shard in facts if any(shard.items.values())]
    return {
        "kind": UNKNOWN if options.vocab_size is None else GIVEN,
        "content": "",
        "vocab_size": options.vocab_size or 1 << 8 * np.dtype(keys[key]).itemsize,
        "bos_id": options.bos_id,
        "eos_id": options.eos_id,
        "pad_id": None,
        "add_bos": bool(filled) and all(shard.starts_with_bos for shard in filled),
        "add_eos": bool(filled) and all(shard.ends_with_eos for shard in filled),
    }
