"""From a path to an open store: ours, or a format of another project."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.errors import StoreError
from tokenmill.store.foreign.astrai import read_astrai_bin, read_astrai_h5
from tokenmill.store.foreign.files import (
    IMPORT,
    ForeignOptions,
    Part,
    Parts,
    check_ours,
    find,
    is_ours,
    stored_dtype,
)
from tokenmill.store.foreign.formats import read_datatrove, read_llmc, read_megatron, read_npy, read_olmo, read_raw
from tokenmill.store.foreign.index import (
    Facts,
    Kept,
    converted_masks,
    description,
    find_documents,
    in_memory,
    index_bytes,
    keep,
    mask_bytes,
    must_look,
    read_kept,
)
from tokenmill.store.layout import axis_of, document_file_bytes, index_file, key_file, token_keys
from tokenmill.store.manifest import FileInfo, Manifest, ShardInfo, read_manifest
from tokenmill.store.maps import FileRequest, MapCache, Request
from tokenmill.store.reader import Store, store_of
from tokenmill.types import Uint8Array

# From foreign files to an open store: a manifest is made up, and arrays stay where they are.

MAX_RECORDS = 4096
"""Datasets of HDF5 that are mapped one by one; more have to be imported."""
IN_MEMORY_BYTES = 1 << 16
"""A larger index goes to a file: there may be thousands of parts."""
CHEAP_BYTES = 1 << 20
"""What takes longer to look at is looked at once, and the result is kept."""
READERS: Mapping[str, Callable[[Sequence[Path], ForeignOptions], Parts]] = {
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


def read_parts(path: Path, options: ForeignOptions) -> tuple[str, Parts]:
    """Return the format of what is at a path, and its parts; no token is read."""
    found = find(path, options.format)
    return found.format, READERS[found.format](found.files, options)


def open_foreign(path: Path, options: ForeignOptions, maps: MapCache | None = None) -> Store:
    """Open foreign files as a store, without copying their tokens.

    The first time, ids are looked at where documents or a vocabulary have to be proven by them; what was found is
    kept, and later the cost grows with the number of files alone.
    """
    format, parts = read_parts(path, options)
    if format == "astrai-h5" and len(parts.parts) > MAX_RECORDS:
        raise StoreError(
            f"{path}: at most {MAX_RECORDS} datasets can be mapped one by one, got {len(parts.parts)}; {IMPORT}"
        )
    keys = keys_of(path, parts)
    shards, facts = [], []
    requests: dict[tuple[int, str], Request] = {}
    for number, part in enumerate(parts.parts):
        kept = documents_of(part, parts.kind, options)
        found = Facts(**kept.facts)
        check_vocabulary(part, found, options)
        facts.append(found)
        shard, places = _shard(part, parts.kind, kept, found)
        shards.append(shard)
        requests.update({(number, name): place for name, place in places.items()})
    manifest = Manifest(
        kind=parts.kind,
        keys=keys,
        tokenizer=tokenizer_of(keys, facts, options),
        recipe={"format": format, "options": options.given, **parts.facts},
        shards=tuple(shards),
        inputs=tuple(
            {"name": shard.name, "documents": shard.documents, "tokens": shard.tokens} for shard in shards
        ),
    )
    return store_of(path, manifest, maps, requests)


def keys_of(path: Path, parts: Parts) -> dict[str, str]:
    """Return key -> dtype for all parts; what cannot be mapped is refused with the way out."""
    keys: dict[str, str] = {}
    for part in parts.parts:
        for key, flat in part.arrays.items():
            dtype, obstacle = stored_dtype(key, flat)
            if obstacle and key not in converted_masks(part):
                raise StoreError(f"{flat.path}: {key} must be mapped as it is, but {obstacle}; {IMPORT}")
            if keys.setdefault(key, dtype) != dtype:
                raise StoreError(
                    f"{path}: all files must have one dtype for {key}, got {keys[key]} and {dtype} in {part.name}; "
                    "name them apart"
                )
    return keys


def documents_of(part: Part, kind: str, options: ForeignOptions) -> Kept:
    """Return the index of a part, and the masks that had to be copied: kept from before, or made now."""
    look = must_look(part, options)
    described = description(part, kind, options, look=look)
    beside = part.arrays[token_keys(part.arrays)[0]].path
    kept = read_kept(beside, described)
    if kept is not None and _fits(kept, part, kind):
        return kept
    found = find_documents(part, kind, options, look=look)
    facts = asdict(found.facts)
    indexes = {index_file(axis): index_bytes(offsets) for axis, offsets in found.offsets.items()}
    masks = converted_masks(part)
    tokens = sum(part.arrays[key].bytes for key in part.arrays)
    size = sum(data.size for data in indexes.values()) + sum(part.arrays[key].count for key in masks)
    if size <= IN_MEMORY_BYTES and tokens <= CHEAP_BYTES:
        copies = {key_file(key): _joined([*mask_bytes(part.arrays[key], key)]) for key in masks}
        return in_memory(beside, facts, {**indexes, **copies})
    blocks = {name: [data] for name, data in indexes.items()}
    return keep(beside, described, facts, {**blocks, **{key_file(k): mask_bytes(part.arrays[k], k) for k in masks}})


def _fits(kept: Kept, part: Part, kind: str) -> bool:
    """Whether what was kept has the sizes of the part: kernels read by address, so no other may get near them."""
    try:
        items = Facts(**kept.facts).items
        sizes = {key_file(key): part.arrays[key].count for key in converted_masks(part)}
        for key in token_keys(part.arrays):
            axis = axis_of(kind, key)
            sizes[index_file(axis)] = document_file_bytes(items[axis], part.arrays[key].count)
    except (TypeError, KeyError, AttributeError):
        return False
    return sizes == {name: _size(request) for name, request in kept.requests.items()}


def _joined(blocks: list[Uint8Array]) -> Uint8Array:
    return np.concatenate(blocks or [np.empty(0, np.uint8)])


def check_vocabulary(part: Part, facts: Facts, options: ForeignOptions) -> None:
    """Refuse ids outside the vocabulary that was given."""
    if options.vocab_size is not None and facts.largest >= options.vocab_size:
        raise StoreError(
            f"{part.name}: token ids must be below the vocabulary size {options.vocab_size}, got {facts.largest}; "
            "say the vocabulary and dtype that the file was written with"
        )


def _shard(part: Part, kind: str, kept: Kept, facts: Facts) -> tuple[ShardInfo, dict[str, Request]]:
    places: dict[str, Request] = dict(kept.requests)
    files = {
        name: FileInfo(bytes=_size(request), xxh3=kept.digests[name]) for name, request in kept.requests.items()
    }
    for key, flat in part.arrays.items():
        if key_file(key) not in places:
            places[key_file(key)] = FileRequest(flat.path, flat.file_bytes, flat.begin, flat.bytes)
            # No checksum, and it says so: reading all of a corpus to open it would take hours.
            files[key_file(key)] = FileInfo(bytes=flat.bytes, xxh3=f"sample:{flat.sample}")
    tokens = {axis_of(kind, key): part.arrays[key].count for key in token_keys(part.arrays)}
    axes = {axis: (facts.items[axis], values) for axis, values in tokens.items()}
    return (
        ShardInfo(
            name=part.name,
            documents=next(iter(facts.items.values())),
            tokens=sum(tokens.values()),
            files=files,
            axes={} if tuple(axes) == ("documents",) else axes,
        ),
        places,
    )


def _size(request: Request) -> int:
    return request.wanted if isinstance(request, FileRequest) else request.data.size


def tokenizer_of(keys: Mapping[str, str], facts: Sequence[Facts], options: ForeignOptions) -> dict[str, Any]:
    """Return what stands for the identity of a tokenizer: `given` if the user bounded the ids, else `unknown`."""
    key = token_keys(keys)[0]
    filled = [found for found in facts if any(found.items.values())]
    return {
        "kind": "unknown" if options.vocab_size is None else "given",
        "content": "",
        "vocab_size": options.vocab_size or 1 << 8 * np.dtype(keys[key]).itemsize,
        "bos_id": options.bos_id,
        "eos_id": options.eos_id,
        "pad_id": None,
        "add_bos": bool(filled) and all(found.starts_with_bos for found in filled),
        "add_eos": bool(filled) and all(found.ends_with_eos for found in filled),
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
        manifest = read_manifest(place)
        check_ours(place, manifest, options)
        return store_of(place, manifest, maps)
    return open_foreign(place, options, maps)
