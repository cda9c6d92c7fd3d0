"""Verifying a store: every byte, every checksum, the order of offsets, ids and hashes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.errors import StoreCorruptError, StoreError
from tokenmill.store import layout
from tokenmill.store.files import Checksums
from tokenmill.store.hashes import bad_hashes, hash_items, hashes_file, join_hashes, read_hashes
from tokenmill.store.layout import MANIFEST, WAY_OUT, manifest_bytes
from tokenmill.store.maps import map_file
from tokenmill.store.opening import open_store, read_ours, store_of
from tokenmill.store.origins import check_origins
from tokenmill.store.ranges import RangeRequest, read_range
from tokenmill.store.store import Store
from tokenmill.store.sums import missing_sums, read_sums, sums_file
from tokenmill.tables import check_callable, check_instance, is_address, path_of
from tokenmill.types import AnyArray, Int64Array, RemoteOptions, Uint8Array, Uint64Array

if TYPE_CHECKING:
    from tokenmill.store.foreign.files import ForeignOptions

_BLOCK = 1 << 24
"""Bytes that are read at a time."""
MAX_LISTED = 20
"""Problems that the message of an error lists; the report has them all."""
Progress = Callable[[int], None]
"""Called with the number of bytes that were read since its last call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """Result of a verification: what was read, and what is wrong."""

    path: Path | str
    """A folder, or an address."""
    shards: int = 0
    files: int = 0
    bytes: int = 0
    documents: int = 0
    tokens: int = 0
    fingerprint: str = ""
    checked: str = "checksums, offsets and ids are right"
    """Checks that were made, in words."""
    format: str = "tokenmill"
    problems: tuple[StoreError, ...] = ()
    """Problems, at most one per file; counts are 0 if the store cannot be opened."""


def verify(
    path: str | os.PathLike[str],
    *,
    progress: Progress = lambda _bytes: None,
    options: ForeignOptions | None = None,
    remote: RemoteOptions | None = None,
) -> VerifyReport:
    """Check every byte of a store: checksums, sizes, offsets, hashes, and ids below the vocabulary size.

    Each byte is read once. Third-party token files have no checksums. The report describes the checks that were
    made instead. Memory depends on the largest shard and document, not on the size of the store.

    Args:
        path: Folder or address of the store, or third-party token files.
        progress: Function that is called with the number of bytes that were read.
        options: Facts that third-party token files do not record.
        remote: How an address is read.

    Returns:
        Counts of files, bytes, documents and tokens, and the fingerprint.

    Raises:
        StoreMissingError: There is no store at the path.
        StoreError: Something is wrong. The message names the file; with several problems it has one line for each.

    Examples:
        >>> import tokenmill as tm
        >>> report = tm.verify("stores/demo")
        >>> report.documents, report.checked
        (324, 'checksums, offsets and ids are right')
    """
    check_callable("progress", progress)
    if options is not None:
        from tokenmill.store.foreign.files import ForeignOptions

        check_instance("options", options, ForeignOptions, "leave it out for a store of tokenmill")
    report = check_store(path, progress=progress, options=options, remote=remote)
    _raise_first(report.problems)
    return report


def _raise_first(problems: Sequence[StoreError]) -> None:
    """Raise an error of the kind of the first problem, with a line for each."""
    if problems:
        lines = [str(problem) for problem in problems[:MAX_LISTED]]
        if len(problems) > MAX_LISTED:
            lines.append(f"and {len(problems) - MAX_LISTED} more")
        raise type(problems[0])("\n".join(lines))


def check_store(
    path: str | os.PathLike[str],
    *,
    progress: Progress = lambda _bytes: None,
    options: ForeignOptions | None = None,
    remote: RemoteOptions | None = None,
) -> VerifyReport:
    """Read every byte of a store as `verify` does, but return the problems instead of raising an error."""
    text, claims = path_of("store", path), options.given if options else {}
    place = Path(text)
    problems: list[StoreError] = []
    report = VerifyReport(path=text.partition("?")[0] if is_address(text) else place)
    with collected(problems, place):
        if is_address(text):
            # Files are verified as a whole, so their pages need not be.
            remote = replace(remote or RemoteOptions(), verify_pages=False)
            store = open_store(text, remote=remote, **(asdict(options) if options else {}))
            report = _check_files(store, progress, problems)
        elif layout.is_ours(place) or claims.get("format") == "tokenmill":
            report = _check_ours(place, claims, progress, problems)
        else:
            from tokenmill.store.foreign.files import ForeignOptions
            from tokenmill.store.foreign.open import check_foreign

            report = check_foreign(place, options or ForeignOptions(), progress, problems)
    return replace(report, problems=tuple(problems))


@contextmanager
def collected(problems: list[StoreError], path: Path) -> Iterator[None]:
    """Add an error to a list instead of raising it."""
    try:
        yield
    except StoreError as error:
        problems.append(error)
    except OSError as error:
        problems.append(StoreError(f"{error.filename or path}: must be readable, got {error}; check the disk"))


def bytes_to_read(store: Store) -> int:
    """Return the number of bytes that a verification of a store reads, as `progress` counts them."""
    shards = sum(info.bytes for shard in store.manifest.shards for info in shard.files.values())
    return shards + sum(_origins(store).values())


def _origins(store: Store) -> dict[str, int]:
    """Return the paths of the files of origins below the folder of a store, and their sizes."""
    folder = layout.ORIGINS_FOLDER
    if store._remotes:
        return store._remotes[0].listed(folder)
    return {f"{folder}/{file.name}": file.stat().st_size for file in sorted((store.path / folder).glob("*.bin"))}


def _check_ours(
    path: Path, claims: Mapping[str, object], progress: Progress, problems: list[StoreError]
) -> VerifyReport:
    manifest = read_ours(path, claims)
    if (path / MANIFEST).read_bytes() != manifest_bytes(manifest):
        problems.append(StoreCorruptError(f"{path / MANIFEST}: not formatted as tokenmill writes it; {WAY_OUT}"))
    listed = {shard.name for shard in manifest.shards}
    problems += [
        StoreCorruptError(
            f"{child}: not listed in {MANIFEST}; if `tokenmill prepare` was interrupted, run it again, otherwise "
            f"remove it, or {WAY_OUT}"
        )
        for child in sorted(path.iterdir())
        if child.is_symlink() or (layout.is_shard_name(child.name) and child.name not in listed)
    ]
    return _check_files(store_of(path, manifest, None), progress, problems)


def _check_files(store: Store, progress: Progress, problems: list[StoreError]) -> VerifyReport:
    """Check all files that a manifest lists, on disk or in object storage."""
    manifest = store.manifest
    for number in range(len(manifest.shards)):
        _check_shard(store, number, progress, problems)
    for name, size in _origins(store).items():
        with collected(problems, store.path):
            check_origins(store._local_copy(name))
        progress(size)
    listed = [info for shard in manifest.shards for info in shard.files.values()]
    return VerifyReport(
        path=store.where if store._remotes else store.path,
        shards=len(manifest.shards),
        files=len(listed),
        bytes=sum(info.bytes for info in listed),
        documents=manifest.documents,
        tokens=manifest.tokens,
        fingerprint=store.fingerprint,
    )


def _check_shard(store: Store, number: int, progress: Progress, problems: list[StoreError]) -> None:
    """Read each file of a shard once: its checksum, page sums, offsets, ids and hashes come from the same bytes."""
    manifest, shard = store.manifest, store.manifest.shards[number]
    kind, before = manifest.kind, len(problems)
    ids = {layout.key_file(key): key for key in layout.token_keys(manifest.keys)}
    offsets: dict[str, Int64Array] = {}
    sums: dict[str, Uint64Array] = {}
    item_hashes: dict[str, Uint64Array] = {}
    hashes: Uint64Array | None = None
    with collected(problems, store.path):
        hashes = read_hashes(store, number)
    indexes = {layout.index_file(axis): axis for axis in store.axes}
    found: dict[str, list[StoreError]] = {name: [] for name in shard.files}
    for name, info in sorted(shard.files.items(), key=lambda item: item[0] not in indexes):  # indexes first
        with collected(found[name], store.path):
            if name in indexes:
                starts, checksums = _check_index(store, number, name, progress)
                if checksums.info.xxh3 == info.xxh3:  # ids of a broken index are read without it
                    offsets[indexes[name]] = starts
            elif name in ids and layout.axis_of(kind, ids[name]) in offsets:
                key = ids[name]
                item_hashes[key], checksums = _check_ids(
                    store, number, key, offsets[layout.axis_of(kind, key)], progress, hashed=hashes is not None
                )
            else:
                checksums = _read(store, number, name, progress)
            _compare(store.file(number, name).path, info, checksums)
            sums[f"{shard.name}/{name}"] = checksums.pages
    problems += [problem for name in shard.files for problem in found[name]]
    with collected(problems, store.path):
        _check_meta(store, number)
    if len(problems) > before:
        return
    with collected(problems, store.path):
        _check_sums(store, shard, sums)
    with collected(problems, store.path):
        if hashes is not None and not np.array_equal(hashes, join_hashes(kind, item_hashes, offsets.get("groups"))):
            raise bad_hashes(hashes_file(store.path, number), "hashes of other documents")


def _check_meta(store: Store, number: int) -> None:
    """Raise if a `meta.json` in a shard, which AstrAI reads, differs from the manifest."""
    file = store.path / store.manifest.shards[number].name / "meta.json"
    if store._remotes or not file.is_file():
        return
    from tokenmill.store.foreign.export import meta_of  # late: it needs this module

    if file.read_bytes() != meta_of(store, number):
        raise StoreCorruptError(f"{file}: does not describe the arrays as {MANIFEST} does; run the Pipeline again")


def _check_sums(store: Store, shard: layout.ShardInfo, sums: Mapping[str, Uint64Array]) -> None:
    """Raise if the page sums of a shard are missing, or are not those of its files."""
    name = sums_file(shard.name)
    # A copy on this machine does not count if the object is gone.
    if not all(files.has(name) for files in store._remotes):
        raise missing_sums(f"{store.where}/{name}")
    file = store._local_copy(name)
    for path, expected in read_sums(file, shard).items():
        wrong = np.flatnonzero(expected != sums[path])
        if wrong.size:
            raise StoreCorruptError(f"{file}: wrong sum of page {int(wrong[0])} of {path}; {WAY_OUT}")


def _compare(path: object, info: layout.FileInfo, checksums: Checksums) -> None:
    """Raise if a file has another checksum than the manifest lists."""
    if checksums.info.xxh3 != info.xxh3:
        raise StoreCorruptError(f"{path}: checksum must be {info.xxh3}, got {checksums.info.xxh3}; {WAY_OUT}")


def _read(store: Store, number: int, name: str, progress: Progress) -> Checksums:
    """Return the checksums of a file of a shard."""
    checksums = Checksums()
    size = store.manifest.shards[number].files[name].bytes
    for block in _ranges(store, number, name, ((begin, begin + _BLOCK) for begin in range(0, size, _BLOCK))):
        checksums.update(block.data)
        progress(block.size)
    return checksums


def _ranges(store: Store, number: int, name: str, ranges: Iterable[tuple[int, int]]) -> Iterator[Uint8Array]:
    """Yield ranges of bytes of a file of a shard; a range may end after the end of the file."""
    request = store.file(number, name)
    if isinstance(request, RangeRequest):
        for begin, end in ranges:
            yield read_range(request, begin, min(end, request.bytes) - begin)
        return
    file = map_file(request)
    for begin, end in ranges:
        yield file.data[begin:end]
        file.check()


def _check_index(store: Store, number: int, name: str, progress: Progress) -> tuple[Int64Array, Checksums]:
    """Check where the items of an axis start; return these offsets, and the checksums of the file."""
    shard = store.manifest.shards[number]
    axis = next(axis for axis in store.axes if layout.index_file(axis) == name)
    items, values = shard.size_of(axis)
    request = store.file(number, name)
    file, checksums = map_file(request), Checksums()
    for begin in range(0, file.data.size, _BLOCK):
        checksums.update(file.data[begin : begin + _BLOCK].data)
        progress(min(_BLOCK, file.data.size - begin))
    _compare(request.path, shard.files[name], checksums)
    split = (items + 1) * layout.OFFSET_DTYPE.itemsize
    offsets, anchors = file.data[:split].view(layout.OFFSET_DTYPE), file.data[split:].view(layout.ANCHOR_DTYPE)

    def require(ok: bool, problem: str) -> None:
        file.check()
        if not ok:
            raise StoreCorruptError(f"{request.path}: {problem}; {WAY_OUT}")

    require(int(offsets[0]) == 0, f"offsets must start at 0, got {int(offsets[0])}")
    require(int(offsets[-1]) == values, f"offsets must end at {values}, got {int(offsets[-1])}")
    for begin in range(0, offsets.size, _BLOCK):
        block = offsets[begin : begin + _BLOCK + 1]
        require(bool((block[1:] >= block[:-1]).all()), "offsets must not decrease")
    right = np.array_equal(anchors, layout.anchors_of(offsets))
    require(right, "anchors must name the document of every 1,024th token")
    return offsets.astype(np.int64), checksums


def _check_ids(
    store: Store, number: int, key: str, offsets: Int64Array, progress: Progress, *, hashed: bool
) -> tuple[Uint64Array, Checksums]:
    """Check that the ids of an array are in the vocabulary; return the hashes of its items, and its checksums."""
    checksums, largest = Checksums(), 0
    dtype, name = store.dtype(key), layout.key_file(key)
    cuts = [*_item_ranges(offsets, _BLOCK // dtype.itemsize)]
    width = dtype.itemsize
    ranges = ((int(offsets[begin]) * width, int(offsets[end]) * width) for begin, end in cuts)
    hashes: list[AnyArray] = [np.empty(0, np.uint64)]
    for block, (begin, end) in zip(_ranges(store, number, name, ranges), cuts, strict=True):
        values = block.view(dtype)
        if hashed:
            hashes.append(hash_items(values, offsets[begin : end + 1] - offsets[begin], store.manifest.tokenizer))
        for first in range(0, block.size, _BLOCK):  # of an item that is larger than a block
            part = block[first : first + _BLOCK]
            checksums.update(part.data)
            largest = max(largest, int(part.view(dtype).max()))
            progress(part.size)
    vocab_size = int(store.manifest.tokenizer["vocab_size"])
    if largest >= vocab_size and checksums.info.xxh3 == store.manifest.shards[number].files[name].xxh3:
        raise StoreCorruptError(
            f"{store.file(number, name).path}: token ids must be below the vocabulary size {vocab_size}, got "
            f"{largest}; prepare the store again with the right tokenizer"
        )
    return np.concatenate(hashes), checksums


def _item_ranges(offsets: Int64Array, most: int) -> Iterator[tuple[int, int]]:
    """Cut items into ranges of at most `most` values, or of one item."""
    begin, count = 0, offsets.size - 1
    while begin < count:
        end = max(begin + 1, int(np.searchsorted(offsets, offsets[begin] + most, side="right")) - 1)
        yield begin, end
        begin = end
