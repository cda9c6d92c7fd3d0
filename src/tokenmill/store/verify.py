"""Proving that a store is what its manifest says, byte for byte, and of foreign files what can be proven."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from tokenmill.errors import StoreCorruptError
from tokenmill.store import layout
from tokenmill.store.foreign.files import ForeignOptions
from tokenmill.store.foreign.index import find_documents, index_bytes, mask_bytes
from tokenmill.store.layout import MANIFEST, WAY_OUT
from tokenmill.store.manifest import Manifest, manifest_bytes
from tokenmill.store.maps import FileRequest, Request, map_file
from tokenmill.store.open import check_vocabulary, open_foreign, read_foreign, read_ours
from tokenmill.store.reader import store_of
from tokenmill.types import MASK_KEYS, AnyArray, Uint8Array

_BLOCK = 1 << 24
Progress = Callable[[int], None]
"""Told the bytes that were read since its last call."""


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
    progress: Progress = lambda _bytes: None,
    options: ForeignOptions | None = None,
) -> VerifyReport:
    """Read every byte of a store: checksums, sizes, order of offsets, ids below the vocabulary size.

    Files of another project, for which `options` are, have no checksums; the report says what was checked of them.

    Raises StoreCorruptError with the file's name at the first thing that is wrong. Memory does not grow with the
    store.
    """
    store, known = Path(path), options or ForeignOptions()
    ours = layout.is_ours(store) or known.format == "tokenmill"
    return (_verify_ours if ours else _verify_foreign)(store, known, progress)


def _verify_ours(path: Path, options: ForeignOptions, progress: Progress) -> VerifyReport:
    manifest = read_ours(path, options)
    if (path / MANIFEST).read_bytes() != manifest_bytes(manifest):
        raise StoreCorruptError(
            f"{path / MANIFEST}: must be as tokenmill writes it, got other white space; {WAY_OUT}"
        )
    _check_names(path, manifest)
    store = store_of(path, manifest, None)
    total = 0
    for number, shard in enumerate(manifest.shards):
        if shard.container is not None:
            whole = FileRequest(path / shard.name, shard.container.bytes, 0, shard.container.bytes)
            _check_checksum(whole, shard.container.xxh3, progress)
        for name, info in shard.files.items():
            total += info.bytes
            _check_checksum(store.file(number, name), info.xxh3, progress)
        for axis in layout.axes_of(manifest.kind, manifest.keys):
            _check_index(store.file(number, layout.index_file(axis)), *shard.size_of(axis))
        for key in layout.token_keys(manifest.keys):
            _check_ids(store.file(number, layout.key_file(key)), manifest.keys[key], manifest)
    return VerifyReport(
        path=path,
        shards=len(manifest.shards),
        files=sum(len(shard.files) for shard in manifest.shards),
        bytes=total,
        documents=manifest.documents,
        tokens=manifest.tokens,
        fingerprint=manifest.fingerprint,
    )


def _check_names(store: Path, manifest: Manifest) -> None:
    listed = {shard.name for shard in manifest.shards}
    for child in sorted(store.iterdir()):
        if child.is_symlink() or (layout.is_shard_name(child.name) and child.name not in listed):
            raise StoreCorruptError(
                f"{child}: must be listed in {MANIFEST}, got a stranger; "
                f"if `tokenmill prepare` was interrupted, run it again, else remove it, or {WAY_OUT}"
            )


def _check_checksum(request: Request, expected: str, progress: Progress) -> None:
    data = map_file(request).data
    state = xxhash.xxh3_128()
    for begin in range(0, data.size, _BLOCK):
        block = data[begin : begin + _BLOCK]
        state.update(block.data)
        progress(block.size)
    if state.hexdigest() != expected:
        raise StoreCorruptError(f"{request.path}: checksum must be {expected}, got {state.hexdigest()}; {WAY_OUT}")


def _check_index(request: Request, items: int, values: int) -> None:
    path = request.path
    data = map_file(request).data
    split = (items + 1) * layout.OFFSET_DTYPE.itemsize
    offsets, anchors = data[:split].view(layout.OFFSET_DTYPE), data[split:].view(layout.ANCHOR_DTYPE)

    def require(ok: bool, rule: str) -> None:
        if not ok:
            raise StoreCorruptError(f"{path}: {rule}; {WAY_OUT}")

    require(int(offsets[0]) == 0, f"offsets must start at 0, got {int(offsets[0])}")
    require(int(offsets[-1]) == values, f"offsets must end at {values}, got {int(offsets[-1])}")
    for begin in range(0, offsets.size, _BLOCK):
        block = offsets[begin : begin + _BLOCK + 1]
        require(bool((block[1:] >= block[:-1]).all()), "offsets must not decrease, got some that do")
    right = np.array_equal(anchors, layout.anchors_of(offsets))
    require(right, "anchors must name the document of every 1,024th token, got others")


def _check_ids(request: Request, dtype: str, manifest: Manifest) -> None:
    ids: AnyArray = map_file(request).data.view(dtype)
    vocab_size = int(manifest.tokenizer["vocab_size"])
    for begin in range(0, ids.size, _BLOCK):
        largest = int(ids[begin : begin + _BLOCK].max())
        if largest >= vocab_size:
            raise StoreCorruptError(
                f"{request.path}: token ids must be below the vocabulary size {vocab_size}, got {largest}; "
                "prepare the store again with the right tokenizer"
            )


# Files of another project, which have no checksums.


def _verify_foreign(path: Path, options: ForeignOptions, progress: Progress) -> VerifyReport:
    """Read every id of foreign files: sizes, boundaries, masks, ids below the vocabulary if one is given.

    Ids that were changed into other ids are not noticed: `tokenmill import` makes a store that has checksums.
    """
    store = open_foreign(path, options)
    format, files = read_foreign(path, options)
    for number, shard in enumerate(files.shards):
        documents = find_documents(shard, files.kind, options, look=True)
        check_vocabulary(shard, documents.facts, options)
        expected: dict[str, Iterable[Uint8Array]] = {
            layout.index_file(axis): [index_bytes(offsets)] for axis, offsets in documents.offsets.items()
        }
        masks = [key for key in shard.arrays if key in MASK_KEYS]
        expected |= {layout.key_file(key): mask_bytes(shard.arrays[key], key) for key in masks}
        for name, blocks in expected.items():
            _compare(store.file(number, name), f"{name} of {shard.name}", blocks)
        progress(sum(array.bytes for array in shard.arrays.values()))
    vocabulary = "ids below the vocabulary" if options.vocab_size is not None else "no vocabulary was given"
    return VerifyReport(
        path=path,
        shards=store.num_shards,
        files=sum(len(shard.arrays) + len(shard.beside) for shard in files.shards),
        bytes=sum(array.bytes for shard in files.shards for array in shard.arrays.values()),
        documents=store.num_documents,
        tokens=store.manifest.tokens,
        fingerprint=store.fingerprint,
        checked=f"the format has no checksums; sizes and boundaries are right, {vocabulary}",
        format=format,
    )


def _compare(request: Request, what: str, expected: Iterable[Uint8Array]) -> None:
    """Compare what a store would read with what the data says, given in blocks."""
    data = map_file(request).data
    place = 0
    for block in expected:
        if not np.array_equal(data[place : place + block.size], block):
            raise StoreCorruptError(
                f"{request.path}: {what} must be what the data says, got other bytes; "
                "delete the folder .tokenmill beside the data"
            )
        place += block.size
