"""Hashes: 8 bytes per document, by which equal documents of two stores are found.

`.hashes/00007.bin` has those of shard 7. They are written with the shard; `write_hashes` adds missing ones. A BOS
at the start and an EOS at the end of a document do not count, nor does the width of ids. So the same text has the
same hash in every store of one tokenizer. `docs/reference/store-format.md` has the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import xxhash

from tokenmill.errors import StoreCorruptError, StoreError
from tokenmill.store import layout
from tokenmill.store.files import CheckedFile, make_folder
from tokenmill.store.layout import HASHES_FOLDER, Count, ShardInfo, is_shard_name
from tokenmill.store.sections import footer_bytes, read_index, write_index, write_section
from tokenmill.types import AnyArray, Int64Array, Uint64Array

if TYPE_CHECKING:
    from tokenmill.store.store import Store

HASHES_FORMAT = "tokenmill-hashes-1"


HASHES = "hashes"
EMPTY = np.uint64(xxhash.xxh3_64_intdigest(b""))
"""The hash of a document that has no token but BOS and EOS."""
_RECORDS = 1 << 14
_TOKENS = 1 << 20
"""Records and tokens that are hashed at a time; a record that is larger is hashed alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _HashesFooter:
    """What stands at the end of a file, as JSON."""

    format: str
    documents: Count
    of: Mapping[str, str]
    """File of the shard -> its XXH3-128."""
    sections: Mapping[str, tuple[Count, Count, str]]
    """Section -> first byte, number of bytes, XXH3-128."""


def hash_records(
    kind: str, tokenizer: Mapping[str, Any], values: Mapping[str, AnyArray], offsets: Mapping[str, Int64Array]
) -> Uint64Array:
    """Return the hash of each record: of its tokens, or of the hashes of its arrays where it has several."""
    keys = layout.token_keys(values)
    items = {key: hash_items(values[key], offsets[layout.axis_of(kind, key)], tokenizer) for key in keys}
    return join_hashes(kind, items, offsets.get("groups"))


def join_hashes(kind: str, items: Mapping[str, Uint64Array], groups: Int64Array | None) -> Uint64Array:
    """Return the hash of each record, given the hashes of the items of its arrays.

    `groups` has where the responses of each record start; None if there are no responses.
    """
    columns = []
    for key, hashes in items.items():
        if layout.axis_of(kind, key) == "responses":  # a record has several: the hash of their hashes
            assert groups is not None
            columns.append(_hash_runs(hashes, groups))
        else:
            columns.append(hashes)
    if len(columns) == 1:
        return columns[0]
    joined = np.ascontiguousarray(np.stack(columns, axis=1))
    return _hash_runs(joined.reshape(-1), np.arange(len(joined) + 1) * len(columns))


def hash_items(ids: AnyArray, offsets: Int64Array, tokenizer: Mapping[str, Any]) -> Uint64Array:
    """Return the hash of each item, without a BOS at its start and an EOS at its end."""
    begins, ends = offsets[:-1].copy(), offsets[1:].copy()
    bos, eos = tokenizer.get("bos_id"), tokenizer.get("eos_id")
    if bos is not None:
        some = np.flatnonzero(ends > begins)
        begins[some] += ids[begins[some]] == bos
    if eos is not None:
        some = np.flatnonzero(ends > begins)
        ends[some] -= ids[ends[some] - 1] == eos
    return _hash_bytes(np.ascontiguousarray(ids, "<u4"), begins, ends)


def _hash_runs(values: AnyArray, offsets: Int64Array) -> Uint64Array:
    return _hash_bytes(np.ascontiguousarray(values, "<u8"), offsets[:-1], offsets[1:])


def _hash_bytes(values: AnyArray, begins: Int64Array, ends: Int64Array) -> Uint64Array:
    """Return XXH3-64 of runs of values; about a microsecond a run."""
    width, hash_of = values.itemsize, xxhash.xxh3_64_intdigest
    data = values.data.cast("B") if values.size else memoryview(b"")
    runs = zip((begins * width).tolist(), (ends * width).tolist(), strict=True)
    return np.fromiter((hash_of(data[begin:end]) for begin, end in runs), np.uint64, begins.size)


# The hashes of a store.


def hashes_file(store: Path, shard: int) -> Path:
    """Return the file with the hashes of a shard."""
    return store / HASHES_FOLDER / f"{shard:05d}.bin"


def finish_hashes(file: CheckedFile, shard: ShardInfo) -> None:
    """Write behind the hashes of a shard which shard they are of, and make all of it durable."""
    section = (0, file.info.bytes, file.info.xxh3)
    file.write(np.frombuffer(footer_bytes(_hashes_footer(shard, section)), np.uint8))
    file.sync()


def _hashes_footer(shard: ShardInfo, section: tuple[int, int, str]) -> _HashesFooter:
    return _HashesFooter(
        format=HASHES_FORMAT, documents=shard.documents, of=_made_of(shard), sections={HASHES: section}
    )


def _made_of(shard: ShardInfo) -> dict[str, str]:
    return {name: info.xxh3 for name, info in shard.files.items()}


def compute_hashes(store: Store, shard: int) -> Iterator[Uint64Array]:
    """Read the tokens of a shard, and yield the hashes of its documents."""
    first, last = (int(begin) for begin in store.document_begins[shard : shard + 2])
    return _compute(store, range(first, last))


def hash_documents(store: Store, begin: int, end: int) -> Uint64Array:
    """Read the tokens of documents `begin` to `end` (exclusive), and return their hashes."""
    return np.concatenate([np.empty(0, np.uint64), *_compute(store, range(begin, end))])


def _compute(store: Store, records: range) -> Iterator[Uint64Array]:
    """Yield the hashes of documents, read in blocks of bounded size."""
    kind, keys = store.manifest.kind, layout.token_keys(store.keys)
    begin, count = records.start, _RECORDS
    while begin < records.stop:
        end = min(begin + count, records.stop)
        starts: dict[str, Int64Array] = {}
        for axis in dict.fromkeys(layout.axis_of(kind, key) for key in keys):
            items = (begin, end)
            if axis == "responses":
                starts["groups"] = store.offsets("groups", begin, end)
                items = int(starts["groups"][0]), int(starts["groups"][-1])
            starts[axis] = store.offsets(axis, *items) if items[1] > items[0] else np.zeros(1, np.int64)
        tokens = sum(int(s[-1] - s[0]) for axis, s in starts.items() if axis != "groups")
        if tokens > _TOKENS and end - begin > 1:
            count = max(1, (end - begin) // 2)
            continue
        spans = {key: starts[layout.axis_of(kind, key)] for key in keys}
        values = {key: store.fetch(int(span[0]), int(span[-1]), key) for key, span in spans.items()}
        yield hash_records(kind, store.manifest.tokenizer, values, {axis: s - s[0] for axis, s in starts.items()})
        begin, count = end, min(2 * count, _RECORDS)


def read_hashes(store: Store, shard: int) -> Uint64Array | None:
    """Map the hashes of the documents of a shard; None where the store has none of it.

    A file that is not whole, or not of this shard, is refused.
    """
    place = store._shard_place(shard)
    if place is None or not is_shard_name(place.name):
        return None
    file = hashes_file(place.parent, layout.shard_number(place.name))
    for files in store._remotes:
        files.download(f"{HASHES_FOLDER}/{file.name}")
    if not file.exists():
        return None
    kept = read_index(file, _HashesFooter)
    info = store.manifest.shards[shard]
    if kept is None or kept[1].format != HASHES_FORMAT or HASHES not in kept[1].sections:
        raise bad_hashes(file, "damaged hashes")
    data, footer = kept[0].data, kept[1]
    begin, size, checksum = footer.sections[HASHES]
    if dict(footer.of) != _made_of(info) or (footer.documents, size) != (info.documents, 8 * info.documents):
        raise bad_hashes(file, "hashes of another shard")
    if begin + size != data.size:
        raise bad_hashes(file, "damaged hashes")
    if xxhash.xxh3_128_hexdigest(data[begin:].data) != checksum:
        raise bad_hashes(file, "damaged hashes")
    kept[0].check()
    hashes: Uint64Array = data[begin:].view("<u8")
    return hashes


def write_hashes(store: Store, *, progress: Callable[[int], None] = lambda _tokens: None) -> int:
    """Add the hashes that a store of ours lacks, and return of how many shards; it may be done at any time.

    Those of a store in object storage are uploaded.

    `progress` is told the tokens that were read since its last call.
    """
    if not layout.is_ours(store.path) or any(
        store._shard_place(shard) != store.path / info.name for shard, info in enumerate(store.manifest.shards)
    ):
        raise StoreError(
            f"{store.path}: hashes can be added to one store of ours, got files of another project, or several "
            "stores; `tokenmill import` them, or name each store"
        )
    added = 0
    make_folder(store.path / HASHES_FOLDER)
    for number, shard in enumerate(store.manifest.shards):
        file = hashes_file(store.path, number)
        try:
            missing = read_hashes(store, number) is None
        except StoreCorruptError:
            missing = True
        if missing:
            _write_shard_hashes(store, number)
        lacking = [files for files in store._remotes if missing or not files.has(f"{HASHES_FOLDER}/{file.name}")]
        for files in lacking:
            files.upload(f"{HASHES_FOLDER}/{file.name}", file)
        added += missing or bool(lacking)
        progress(shard.tokens)
    return added


def _write_shard_hashes(store: Store, shard: int) -> None:
    def write(out: BinaryIO) -> _HashesFooter:
        blocks = (block.astype("<u8", copy=False).view(np.uint8) for block in compute_hashes(store, shard))
        return _hashes_footer(store.manifest.shards[shard], write_section(out, blocks))

    write_index(hashes_file(store.path, shard), write)


def bad_hashes(file: Path, problem: str) -> StoreCorruptError:
    """Return the error of a file of hashes."""
    return StoreCorruptError(f"{file}: {problem}; delete it, then run `tokenmill verify --add-hashes`")
