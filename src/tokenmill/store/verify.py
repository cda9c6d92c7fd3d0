"""Proving that a store is what its manifest says, byte for byte."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from tokenmill.errors import StoreCorruptError
from tokenmill.store.foreign.files import ForeignOptions, check_ours, is_ours
from tokenmill.store.layout import (
    ANCHOR_DTYPE,
    ANCHOR_TOKENS,
    MANIFEST,
    OFFSET_DTYPE,
    WAY_OUT,
    axes_of,
    index_file,
    is_shard_name,
    key_file,
    token_keys,
)
from tokenmill.store.manifest import Manifest, ShardInfo, manifest_bytes, read_manifest
from tokenmill.store.maps import FileRequest, map_file
from tokenmill.types import AnyArray, Uint32Array, Uint64Array

_BLOCK = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """What was read and found right."""

    path: Path
    shards: int
    files: int
    bytes: int
    documents: int
    tokens: int
    fingerprint: str
    checked: str = "checksums, offsets and ids are right"
    """What was proven, in words."""
    format: str = "tokenmill"


def verify(
    path: str | os.PathLike[str],
    *,
    progress: Callable[[int], None] = lambda _bytes: None,
    options: ForeignOptions | None = None,
) -> VerifyReport:
    """Read every byte of a store: checksums, sizes, order of offsets, ids below the vocabulary size.

    Files of another project, for which `options` are, have no checksums; the report says what was checked of them.

    Raises StoreCorruptError with the file's name at the first thing that is wrong. `progress` is
    told the bytes read since its last call. Memory does not grow with the store.
    """
    store = Path(path)
    if not is_ours(store):
        from tokenmill.store.foreign.convert import verify_foreign

        return verify_foreign(store, options or ForeignOptions(), progress=progress)
    manifest = read_manifest(store)
    check_ours(store, manifest, options or ForeignOptions())
    if (store / MANIFEST).read_bytes() != manifest_bytes(manifest):
        raise StoreCorruptError(
            f"{store / MANIFEST}: must be as tokenmill writes it, got other white space; {WAY_OUT}"
        )
    _check_names(store, manifest)
    total = 0
    for shard in manifest.shards:
        if shard.container is not None:
            whole = FileRequest(store / shard.name, shard.container.bytes, 0, shard.container.bytes)
            _check_checksum(whole, shard.container.xxh3, progress)
        for name, info in shard.files.items():
            total += info.bytes
            _check_checksum(_request(store, shard, name), info.xxh3, progress)
        for axis in axes_of(manifest.kind, manifest.keys):
            _check_index(_request(store, shard, index_file(axis)), *shard.size_of(axis))
        for key in token_keys(manifest.keys):
            _check_ids(_request(store, shard, key_file(key)), manifest.keys[key], manifest)
    return VerifyReport(
        path=store,
        shards=len(manifest.shards),
        files=sum(len(shard.files) for shard in manifest.shards),
        bytes=total,
        documents=manifest.documents,
        tokens=manifest.tokens,
        fingerprint=manifest.fingerprint,
    )


def _request(store: Path, shard: ShardInfo, name: str) -> FileRequest:
    info = shard.files[name]
    if shard.container is None:
        return FileRequest(store / shard.name / name, info.bytes)
    return FileRequest(store / shard.name, shard.container.bytes, info.begin, info.bytes)


def _check_names(store: Path, manifest: Manifest) -> None:
    listed = {shard.name for shard in manifest.shards}
    for child in sorted(store.iterdir()):
        if child.is_symlink() or (is_shard_name(child.name) and child.name not in listed):
            raise StoreCorruptError(
                f"{child}: must be listed in {MANIFEST}, got a stranger; "
                f"if `tokenmill prepare` was interrupted, run it again, else remove it, or {WAY_OUT}"
            )


def _check_checksum(request: FileRequest, expected: str, progress: Callable[[int], None]) -> None:
    data = map_file(request).data
    state = xxhash.xxh3_128()
    for begin in range(0, data.size, _BLOCK):
        block = data[begin : begin + _BLOCK]
        state.update(block.data)
        progress(block.size)
    if state.hexdigest() != expected:
        raise StoreCorruptError(f"{request.path}: checksum must be {expected}, got {state.hexdigest()}; {WAY_OUT}")


def _check_index(request: FileRequest, items: int, values: int) -> None:
    path = request.path
    data = map_file(request).data
    split = (items + 1) * OFFSET_DTYPE.itemsize
    offsets, anchors = data[:split].view(OFFSET_DTYPE), data[split:].view(ANCHOR_DTYPE)

    def require(ok: bool, rule: str) -> None:
        if not ok:
            raise StoreCorruptError(f"{path}: {rule}; {WAY_OUT}")

    require(int(offsets[0]) == 0, f"offsets must start at 0, got {int(offsets[0])}")
    require(int(offsets[-1]) == values, f"offsets must end at {values}, got {int(offsets[-1])}")
    for begin in range(0, offsets.size, _BLOCK):
        block = offsets[begin : begin + _BLOCK + 1]
        require(bool((block[1:] >= block[:-1]).all()), "offsets must not decrease, got some that do")
    require(_anchors_hold(offsets, anchors), "anchors must name the document of every 1,024th token, got others")


def _anchors_hold(offsets: Uint64Array, anchors: Uint32Array) -> bool:
    for begin in range(0, anchors.size, _BLOCK):
        block = anchors[begin : begin + _BLOCK].astype(np.int64)
        marks = np.arange(begin, begin + block.size, dtype=np.uint64) * np.uint64(ANCHOR_TOKENS)
        if block.size and int(block.max()) + 1 >= offsets.size:
            return False
        if not ((offsets[block] <= marks) & (marks < offsets[block + 1])).all():
            return False
    return True


def _check_ids(request: FileRequest, dtype: str, manifest: Manifest) -> None:
    ids: AnyArray = map_file(request).data.view(dtype)
    vocab_size = int(manifest.tokenizer["vocab_size"])
    for begin in range(0, ids.size, _BLOCK):
        largest = int(ids[begin : begin + _BLOCK].max())
        if largest >= vocab_size:
            raise StoreCorruptError(
                f"{request.path}: token ids must be below the vocabulary size {vocab_size}, got {largest}; "
                "prepare the store again with the right tokenizer"
            )
