"""Proving that a store is what its manifest says, byte for byte, and of foreign files what can be proven."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from tokenmill.errors import StoreCorruptError
from tokenmill.store import layout
from tokenmill.store.layout import MANIFEST, WAY_OUT, Manifest, manifest_bytes
from tokenmill.store.maps import FileRequest, Request, map_file
from tokenmill.store.reader import read_ours, store_of
from tokenmill.types import AnyArray

if TYPE_CHECKING:
    from tokenmill.store.foreign.files import ForeignOptions

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
    place, said = Path(path), options.given if options else {}
    if layout.is_ours(place) or said.get("format") == "tokenmill":
        return _verify_ours(place, said, progress)
    from tokenmill.store.foreign.files import ForeignOptions
    from tokenmill.store.foreign.open import verify_foreign

    return verify_foreign(place, options or ForeignOptions(), progress)


def _verify_ours(path: Path, said: Mapping[str, object], progress: Progress) -> VerifyReport:
    manifest = read_ours(path, said)
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
