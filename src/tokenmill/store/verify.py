"""Proving that a store is what its manifest says, byte for byte, and of foreign files what can be proven."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from tokenmill.errors import StoreCorruptError, StoreError
from tokenmill.store import layout
from tokenmill.store.layout import MANIFEST, WAY_OUT, manifest_bytes
from tokenmill.store.maps import FileRequest, Request, map_file
from tokenmill.store.origins import check_origins
from tokenmill.store.reader import read_ours, store_of
from tokenmill.tables import path_of
from tokenmill.types import AnyArray

if TYPE_CHECKING:
    from tokenmill.store.foreign.files import ForeignOptions

_BLOCK = 1 << 24
MAX_TOLD = 20
"""Problems that the message of an error lists; the report has them all."""
Progress = Callable[[int], None]
"""Told the bytes that were read since its last call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """What was read, and what is wrong with it."""

    path: Path
    shards: int = 0
    files: int = 0
    bytes: int = 0
    documents: int = 0
    tokens: int = 0
    fingerprint: str = ""
    checked: str = "checksums, offsets and ids are right"
    """What was proven, in words, if nothing is wrong."""
    format: str = "tokenmill"
    problems: tuple[StoreError, ...] = ()
    """What is wrong, one for each file; counts are 0 where a store cannot even be opened."""


def verify(
    path: str | os.PathLike[str], *, progress: Progress = lambda _bytes: None, options: ForeignOptions | None = None
) -> VerifyReport:
    """Read every byte of a store: checksums, sizes, order of offsets, ids below the vocabulary size.

    Files of another project, for which `options` are, have no checksums; the report says what was checked of them.

    Raises the StoreError of what is wrong, with the file's name; where several things are, it has a line for each.
    Memory does not grow with the store.
    """
    report = check_store(path, progress=progress, options=options)
    if report.problems:
        first, told = report.problems[0], [str(problem) for problem in report.problems[:MAX_TOLD]]
        more = len(report.problems) - len(told)
        raise type(first)("\n".join([*told, f"and {more} more"] if more else told))
    return report


def check_store(
    path: str | os.PathLike[str], *, progress: Progress = lambda _bytes: None, options: ForeignOptions | None = None
) -> VerifyReport:
    """Read every byte of a store as `verify` does, but return what is wrong instead of raising it."""
    place, said = Path(path_of("store", path)), options.given if options else {}
    problems: list[StoreError] = []
    report = VerifyReport(path=place)
    with collected(problems, place):
        if layout.is_ours(place) or said.get("format") == "tokenmill":
            report = _check_ours(place, said, progress, problems)
        else:
            from tokenmill.store.foreign.files import ForeignOptions
            from tokenmill.store.foreign.open import check_foreign

            report = check_foreign(place, options or ForeignOptions(), progress, problems)
    return replace(report, problems=tuple(problems))


@contextmanager
def collected(problems: list[StoreError], path: Path) -> Iterator[None]:
    """Add what is wrong to a list instead of raising it."""
    try:
        yield
    except StoreError as error:
        problems.append(error)
    except OSError as error:
        problems.append(StoreError(f"{error.filename or path}: must be readable, got {error}; check the disk"))


def _check_ours(
    path: Path, said: Mapping[str, object], progress: Progress, problems: list[StoreError]
) -> VerifyReport:
    manifest = read_ours(path, said)
    if (path / MANIFEST).read_bytes() != manifest_bytes(manifest):
        problems.append(
            StoreCorruptError(
                f"{path / MANIFEST}: must be as tokenmill writes it, got other white space; {WAY_OUT}"
            )
        )
    listed = {shard.name for shard in manifest.shards}
    problems += [
        StoreCorruptError(
            f"{child}: must be listed in {MANIFEST}, got a stranger; "
            f"if `tokenmill prepare` was interrupted, run it again, else remove it, or {WAY_OUT}"
        )
        for child in sorted(path.iterdir())
        if child.is_symlink() or (layout.is_shard_name(child.name) and child.name not in listed)
    ]
    store = store_of(path, manifest, None)
    for number, shard in enumerate(manifest.shards):
        if shard.container is not None:
            whole = FileRequest(path / shard.name, shard.container.bytes, 0, shard.container.bytes)
            before = len(problems)
            with collected(problems, path):
                _check_checksum(whole, shard.container.xxh3, progress)
            if len(problems) > before:
                continue  # its arrays are as broken as it is
        indexes = {layout.index_file(axis): axis for axis in store.axes}
        ids = {layout.key_file(key): key for key in layout.token_keys(manifest.keys)}
        for name, info in shard.files.items():
            with collected(problems, path):
                request = store.file(number, name)
                _check_checksum(request, info.xxh3, progress)
                if name in indexes:
                    _check_index(request, *shard.size_of(indexes[name]))
                elif name in ids:
                    _check_ids(request, manifest.keys[ids[name]], int(manifest.tokenizer["vocab_size"]))
    for file in sorted((path / layout.ORIGINS_FOLDER).glob("*.bin")):
        with collected(problems, path):
            check_origins(file)
    files = [info for shard in manifest.shards for info in shard.files.values()]
    return VerifyReport(
        path=path,
        shards=len(manifest.shards),
        files=len(files),
        bytes=sum(info.bytes for info in files),
        documents=manifest.documents,
        tokens=manifest.tokens,
        fingerprint=store.fingerprint,
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


def _check_ids(request: Request, dtype: str, vocab_size: int) -> None:
    ids: AnyArray = map_file(request).data.view(dtype)
    for begin in range(0, ids.size, _BLOCK):
        largest = int(ids[begin : begin + _BLOCK].max())
        if largest >= vocab_size:
            raise StoreCorruptError(
                f"{request.path}: token ids must be below the vocabulary size {vocab_size}, got {largest}; "
                "prepare the store again with the right tokenizer"
            )
