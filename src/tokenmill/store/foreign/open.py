"""Foreign files as a store: a manifest is made up, arrays stay where they are, and documents are found once.

What one look at all ids of a shard proves, and where its documents are, is kept beside the data.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from tokenmill.caches import private_folder, writable
from tokenmill.errors import ConfigError, StoreCorruptError, StoreError
from tokenmill.fingerprint import digest
from tokenmill.store import layout
from tokenmill.store.foreign.files import (
    BLOCK,
    IMPORT,
    ForeignArray,
    ForeignFiles,
    ForeignOptions,
    ForeignShard,
    find_files,
    head,
    sample_digest,
    stored_dtype,
)
from tokenmill.store.foreign.formats import (
    read_astrai_bin,
    read_astrai_h5,
    read_datatrove,
    read_llmc,
    read_megatron,
    read_npy,
    read_olmo,
    read_raw,
)
from tokenmill.store.foreign.titan import read_packed_memmap, read_preprocessed
from tokenmill.store.layout import (
    GIVEN,
    UNKNOWN,
    Count,
    FileInfo,
    Manifest,
    ShardInfo,
    axis_of,
    key_file,
    token_keys,
)
from tokenmill.store.maps import FileRequest, MapCache, MemoryRequest, map_file
from tokenmill.store.opening import store_of
from tokenmill.store.ranges import Request
from tokenmill.store.sections import read_index, write_index, write_section
from tokenmill.store.store import Store
from tokenmill.store.verify import Progress, VerifyReport, collected
from tokenmill.tables import read_json
from tokenmill.types import MASK_KEYS, Int64Array, Uint8Array

MAX_RECORDS = 4096
"""Datasets of HDF5, or record batches of Arrow, that are mapped one by one; more have to be imported."""
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
    "packed-memmap": read_packed_memmap,
    "preprocessed": read_preprocessed,
}
SIDECAR = "tokens.json"
"""Stands beside token files and says what they do not: any of `ForeignOptions`, as a JSON object."""
MAX_SIDECAR = 1 << 16
VERSION = 1
"""Of what is found and how it is kept; another one makes indexes be built again."""
IN_MEMORY_BYTES = 1 << 16
"""A larger index goes to a file: there may be thousands of shards."""
CHEAP_BYTES = 1 << 20
"""What takes longer to look at is looked at once, and the result is kept."""


def open_foreign(path: Path, options: ForeignOptions, maps: MapCache | None = None) -> Store:
    """Open foreign files as a store, without copying their tokens.

    The first time, ids are looked at where documents or a vocabulary have to be proven by them; what was found is
    kept, and later the cost grows with the number of files alone.
    """
    format, files, options = read_foreign(path, options)
    if format in ("astrai-h5", "preprocessed") and len(files.shards) > MAX_RECORDS:
        what = "datasets" if format == "astrai-h5" else "record batches"
        raise StoreError(
            f"{path}: at most {MAX_RECORDS} {what} can be mapped one by one, got {len(files.shards)}; {IMPORT}"
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


def read_foreign(path: Path, options: ForeignOptions) -> tuple[str, ForeignFiles, ForeignOptions]:
    """Return the format of what is at a path, its arrays, and all that is known of them; no token is read."""
    format, files = find_files(path, options.format)
    known = _with_sidecars(files, format, options)
    return format, READERS[format](files, known), known


def _with_sidecars(files: Sequence[Path], format: str, options: ForeignOptions) -> ForeignOptions:
    """Add what the `tokens.json` beside files says; it must not contradict the options, nor one the other."""
    known: dict[str, Any] = {**options.given, "format": format}
    for folder in dict.fromkeys(file.parent for file in files):
        sidecar = folder / SIDECAR
        if not sidecar.is_file():
            continue
        sidecar_options = read_json(ForeignOptions, head(sidecar, MAX_SIDECAR), f"{sidecar}:", error=StoreError)
        for name, value in sidecar_options.given.items():
            if known.setdefault(name, value) != value:
                raise ConfigError(
                    f"{sidecar}: {name} must be {known[name]!r}, as the options or other files say, got {value!r}; "
                    "correct the one that is wrong, or name the files apart"
                )
    return replace(options, **{name: value for name, value in known.items() if name != "format"})


def _keys_of(path: Path, files: ForeignFiles) -> dict[str, str]:
    """Return key -> dtype for all shards; what cannot be mapped is refused with the way out."""
    keys: dict[str, str] = {}
    for shard in files.shards:
        for key, array in shard.arrays.items():
            dtype, obstacle = stored_dtype(key, array)
            if obstacle and key not in _copied(shard):
                raise StoreError(f"{array.path}: {key} must be mapped as it is, but {obstacle}; {IMPORT}")
            if keys.setdefault(key, dtype) != dtype:
                raise StoreError(
                    f"{path}: all files must have one dtype for {key}, got {keys[key]} and {dtype} in "
                    f"{shard.name}; name them apart"
                )
    return keys


def check_vocabulary(shard: ForeignShard, facts: ShardFacts, options: ForeignOptions) -> None:
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


def tokenizer_of(keys: Mapping[str, str], facts: Sequence[ShardFacts], options: ForeignOptions) -> dict[str, Any]:
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


# Where the documents of a shard are.


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFacts:
    """What is known of a shard once its documents are found."""

    items: Mapping[str, Count]
    """Axis -> documents."""
    largest: int
    """The largest id; -1 where nobody looked."""
    starts_with_bos: bool
    ends_with_eos: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardDocuments:
    """Where the documents of a shard are."""

    offsets: Mapping[str, Int64Array]
    """Axis -> where each document starts, and the end of the last."""
    facts: ShardFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardIndex:
    """What a store needs beside the arrays of a shard: `documents.bin`, and copies of what is not mapped."""

    facts: ShardFacts
    requests: Mapping[str, Request]
    """File name -> its bytes, in memory or in a file of ours."""
    digests: Mapping[str, str]
    """File name -> XXH3-128."""


def index_of(shard: ForeignShard, kind: str, options: ForeignOptions) -> ShardIndex:
    """Return the index of a shard: kept from before, or made now."""
    # All ids have to be looked at before they may be read as unsigned numbers, or as below a vocabulary size.
    signed = any(shard.arrays[key].dtype.kind == "i" for key in token_keys(shard.arrays))
    look = signed or options.vocab_size is not None
    description = _description(shard, kind, options, look=look)
    beside = shard.arrays[token_keys(shard.arrays)[0]].path
    copied = _copied(shard)
    kept = _read_kept(shard, beside, description)
    if kept is not None and _fits(kept, shard, kind):
        return kept
    documents = find_documents(shard, kind, options, look=look)
    indexes = {layout.index_file(axis): index_bytes(offsets) for axis, offsets in documents.offsets.items()}
    sections: dict[str, Iterable[Uint8Array]] = {name: [data] for name, data in indexes.items()}
    sections |= {key_file(key): copied_bytes(array, key) for key, array in copied.items()}
    size = sum(data.size for data in indexes.values()) + sum(_copied_size(key, copied[key]) for key in copied)
    if size > IN_MEMORY_BYTES or sum(array.bytes for array in shard.arrays.values()) > CHEAP_BYTES:
        return _keep(beside, description, documents.facts, sections)
    data = {name: np.concatenate([np.empty(0, np.uint8), *blocks]) for name, blocks in sections.items()}
    return ShardIndex(
        facts=documents.facts,
        requests={name: MemoryRequest(beside, section) for name, section in data.items()},
        digests={name: xxhash.xxh3_128_hexdigest(section.data) for name, section in data.items()},
    )


def _fits(index: ShardIndex, shard: ForeignShard, kind: str) -> bool:
    """Whether what was kept has the sizes of the shard: kernels read by address, so no other may get near them."""
    sizes = {key_file(key): _copied_size(key, array) for key, array in _copied(shard).items()}
    for key in token_keys(shard.arrays):
        axis = axis_of(kind, key)
        items, values = index.facts.items.get(axis, -1), shard.arrays[key].count
        sizes[layout.index_file(axis)] = layout.document_file_bytes(items, values)
    return sizes == {name: request.wanted for name, request in index.requests.items()}


# Finding documents.


def find_documents(shard: ForeignShard, kind: str, options: ForeignOptions, *, look: bool) -> ShardDocuments:
    """Find the documents of a shard: by its own boundaries, else by EOS, else by BOS, else it is one document.

    With `look` all ids are looked at, which costs one reading of the file; a negative one is refused.
    """
    offsets: dict[str, Int64Array] = {}
    largest = -1
    bos = eos = True
    for key in token_keys(shard.arrays):
        array, axis = shard.arrays[key], axis_of(kind, key)
        cut = axis not in shard.ends and kind in ("seq", "sft") and (options.eos_id, options.bos_id) != (None, None)
        ends = np.empty(0, np.int64)
        if look or cut:
            ends, largest_id = _look(array, key, options, cut=cut)
            largest = max(largest, largest_id)
        if axis in shard.ends:
            ends = shard.ends[axis]()
        # What stands after the last end is one more document.
        last = int(ends[-1]) if ends.size else 0
        tail = np.array([array.count] if last < array.count else [], np.int64)
        offsets[axis] = np.concatenate([np.zeros(1, np.int64), ends, tail])
        bos = bos and _all_are(array, offsets[axis][:-1], offsets[axis], options.bos_id)
        eos = eos and _all_are(array, offsets[axis][1:] - 1, offsets[axis], options.eos_id)
    counts = {axis: starts.size - 1 for axis, starts in offsets.items()}
    if len(set(counts.values())) > 1:
        raise StoreCorruptError(
            f"{shard.name}: every axis must have as many records as the others, got {counts}; write the file again"
        )
    return ShardDocuments(
        offsets=offsets, facts=ShardFacts(items=counts, largest=largest, starts_with_bos=bos, ends_with_eos=eos)
    )


def _look(array: ForeignArray, key: str, options: ForeignOptions, *, cut: bool) -> tuple[Int64Array, int]:
    """Return where documents end by their EOS, or else by their BOS, if they are to be cut; and the largest id."""
    mark, after = (options.eos_id, 1) if options.eos_id is not None else (options.bos_id, 0)
    ends: list[Int64Array] = [np.empty(0, np.int64)]
    begin, largest = 0, -1
    for block in array.blocks():
        largest = max(largest, int(block.max()))
        if array.dtype.kind == "i" and int(block.min()) < 0:
            place = begin + int(block.argmin())
            raise StoreError(
                f"{array.path}: ids of {key} must not be negative, got {int(block.min())} at number {place}; "
                "replace padding such as -100 first"
            )
        if cut:
            ends.append(np.flatnonzero(block == mark) + (begin + after))
        begin += block.size
    joined = np.concatenate(ends)
    return joined[joined > 0], largest


def _all_are(array: ForeignArray, places: Int64Array, offsets: Int64Array, wanted: int | None) -> bool:
    """Whether the ids at one place of each document that is not empty are all the wanted one."""
    chosen = places[offsets[1:] > offsets[:-1]]
    if wanted is None or not chosen.size:
        return False
    if array.read is None:
        file = map_file(array.request)
        ids = file.data.view(array.dtype)
        parts = (chosen[begin : begin + BLOCK] for begin in range(0, chosen.size, BLOCK))
        all_are = all(bool((ids[part] == wanted).all()) for part in parts)
        file.check()
        return all_are
    for begin in range(0, array.count, BLOCK):
        inside = chosen[(chosen >= begin) & (chosen < begin + BLOCK)] - begin
        if not (array.numbers(begin, min(array.count, begin + BLOCK))[inside] == wanted).all():
            return False
    return True


def index_bytes(offsets: Int64Array) -> Uint8Array:
    """Return the bytes of `documents.bin`: offsets, and the document that holds every 1,024th token."""
    anchors = layout.anchors_of(offsets)
    return np.concatenate([offsets.astype(layout.OFFSET_DTYPE).view(np.uint8), anchors.view(np.uint8)])


def _copied(shard: ForeignShard) -> dict[str, ForeignArray]:
    """Return the arrays that have to be copied, masks with a byte per token, before they can be mapped."""
    arrays = shard.arrays.items()
    return {
        key: item for key, item in arrays if (key in MASK_KEYS or item.is_copied) and stored_dtype(key, item)[1]
    }


def _copied_size(key: str, array: ForeignArray) -> int:
    return array.count * np.dtype(stored_dtype(key, array)[0]).itemsize


def copied_bytes(array: ForeignArray, key: str) -> Iterator[Uint8Array]:
    """Yield the bytes under which an array is mapped: those of a mask, or of ids in the dtype that is offered."""
    if key in MASK_KEYS:
        yield from mask_bytes(array, key)
        return
    dtype = stored_dtype(key, array)[0]
    for block in array.blocks():
        ids = block.astype(dtype)
        if not (ids == block).all():
            raise StoreError(f"{array.path}: ids of {key} must be from 0 to below 2**32, got others; {IMPORT}")
        yield ids.view(np.uint8)


def mask_bytes(array: ForeignArray, key: str) -> Iterator[Uint8Array]:
    """Yield a mask as bytes; anything but 0 and 1 is refused."""
    for block in array.blocks():
        flags = block.astype(np.uint8)
        if not (flags == block).all() or int(flags.max(initial=0)) > 1:
            odd = block[(block != 0) & (block != 1)][:1]
            raise StoreError(
                f"{array.path}: {key} must be 0 or 1, got {odd.tolist()}; write 1 where a token is trained on"
            )
        yield flags


# Indexes kept in files. The name of a file is a digest of everything that decides its content: sizes, samples and
# options. Where two processes make it at once, the last rename wins, with the same bytes.

FORMAT = "tokenmill-foreign-1"
PURPOSE = "foreign"
FOLDER = ".tokenmill"
"""Stands beside the data, where that can be written to."""
CHECKED_BYTES = 1 << 26
"""A larger section is not read through when it is opened, so that opening costs the same for any corpus.

Its offsets are verified before their first use, and `verify` compares its masks with the data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Footer:
    """What stands at the end of a kept index, as JSON."""

    format: str
    description: Mapping[str, Any]
    facts: ShardFacts
    sections: Mapping[str, tuple[Count, Count, str]]
    """File name -> first byte, number of bytes, XXH3-128."""


def _description(shard: ForeignShard, kind: str, options: ForeignOptions, *, look: bool) -> dict[str, Any]:
    """Return all that decides what is found in a shard: its bytes, by size and sample, and the options for that."""
    sizes = [(file, file.stat().st_size) for file in shard.beside]
    return {
        "version": VERSION,
        "kind": kind,
        "name": shard.name.rsplit("/", 1)[-1],
        "arrays": {key: [a.begin, a.count, a.dtype.str, a.sample] for key, a in shard.arrays.items()},
        "beside": [[file.name, size, sample_digest(file, 0, size)] for file, size in sizes],
        "ids": [options.eos_id, options.bos_id],
        "look": look,
    }


def _read_kept(shard: ForeignShard, beside: Path, description: Mapping[str, Any]) -> ShardIndex | None:
    """Return what is kept under a description; None where there is nothing, or something cut or changed.

    A sample may miss what was written to the data since, so an index that is older than the data is not used.
    """
    newest = max(path.stat().st_mtime_ns for path in (*(a.path for a in shard.arrays.values()), *shard.beside))
    for folder in (beside.parent / FOLDER, private_folder(PURPOSE, make=False)):
        file = folder / f"{digest(description)}.index" if folder else None
        index = _read(file, description) if file else None
        if file is not None and index is not None and file.stat().st_mtime_ns >= newest:
            return index
    return None


def _keep(
    beside: Path, description: Mapping[str, Any], facts: ShardFacts, sections: Mapping[str, Iterable[Uint8Array]]
) -> ShardIndex:
    """Write sections, given in blocks, to a file beside the data or in a folder of this user's; return them."""
    folder = writable(beside.parent / FOLDER) or private_folder(PURPOSE)
    if folder is None:
        raise StoreError(
            f"{beside.parent / FOLDER}: an index must be kept there or in a temporary folder, got none that this "
            "user alone can write to; set TMPDIR to one"
        )
    file = folder / f"{digest(description)}.index"

    def write(out: BinaryIO) -> _Footer:
        places = {name: write_section(out, blocks) for name, blocks in sections.items()}
        return _Footer(format=FORMAT, description=description, facts=facts, sections=places)

    write_index(file, write)
    index = _read(file, description)
    if index is None:
        raise StoreError(f"{file}: must be a whole index once it is written, got none; check the disk")
    return index


def _read(file: Path, description: Mapping[str, Any]) -> ShardIndex | None:
    real = Path(os.path.realpath(file))
    kept = read_index(real, _Footer)
    if kept is None or (kept[1].format, kept[1].description) != (FORMAT, description):
        return None
    data, footer = kept[0].data, kept[1]
    for begin, size, checksum in footer.sections.values():
        section = data[begin : begin + size]
        if section.size != size or (size <= CHECKED_BYTES and xxhash.xxh3_128_hexdigest(section.data) != checksum):
            return None
    kept[0].check()
    indexes = {layout.index_file(axis) for axis in footer.facts.items}
    size = real.stat().st_size
    return ShardIndex(
        facts=footer.facts,
        requests={
            name: FileRequest(
                real, size, begin, wanted, checksum if name in indexes else None, "delete it, and it is made again"
            )
            for name, (begin, wanted, checksum) in footer.sections.items()
        },
        digests={name: checksum for name, (_, _, checksum) in footer.sections.items()},
    )


# Files of another project, which have no checksums.


def check_foreign(
    path: Path, options: ForeignOptions, progress: Progress, problems: list[StoreError]
) -> VerifyReport:
    """Read every id of foreign files: sizes, boundaries, masks, ids below the vocabulary if one is given.

    What is wrong is added to `problems`.

    Ids that were changed into other ids are not noticed: `tokenmill import` makes a store that has checksums.
    """
    store = open_foreign(path, options)
    format, files, options = read_foreign(path, options)
    for number, shard in enumerate(files.shards):
        with collected(problems, path):
            documents = find_documents(shard, files.kind, options, look=True)
            check_vocabulary(shard, documents.facts, options)
            for axis, offsets in documents.offsets.items():
                name = layout.index_file(axis)
                _compare(store.file(number, name), f"{name} of {shard.name}", [index_bytes(offsets)])
            for key, array in shard.arrays.items():
                if key in MASK_KEYS or key in _copied(shard):
                    name = key_file(key)
                    _compare(store.file(number, name), f"{name} of {shard.name}", copied_bytes(array, key))
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
    file = map_file(request)
    place = 0
    for block in expected:
        same = np.array_equal(file.data[place : place + block.size], block)
        file.check()
        if not same:
            raise StoreCorruptError(
                f"{request.path}: {what} must be what the data says, got other bytes; "
                "delete the folder .tokenmill beside the data"
            )
        place += block.size
