"""Where the documents of a part are, and what one look at all its ids proves."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import xxhash

from tokenmill.errors import StoreCorruptError, StoreError
from tokenmill.fingerprint import digest
from tokenmill.store.durable import private_folder, private_path, sync_folder, writable
from tokenmill.store.foreign.files import (
    BLOCK,
    Flat,
    ForeignOptions,
    Part,
    real_file,
    sample_blocks,
    sample_digest,
    stored_dtype,
)
from tokenmill.store.layout import ANCHOR_DTYPE, ANCHOR_TOKENS, OFFSET_DTYPE, axis_of, token_keys
from tokenmill.store.maps import FileRequest, MemoryRequest, Request, map_file
from tokenmill.types import MASK_KEYS, AnyArray, Int64Array, Uint8Array

VERSION = 1
"""Of what is found and how it is kept; another one makes caches be built again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What is known of a part once its documents are found."""

    items: Mapping[str, int]
    """Axis -> documents."""
    largest: int
    """The largest id; -1 where nobody looked."""
    starts_with_bos: bool
    ends_with_eos: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """A part with its documents found."""

    offsets: Mapping[str, Int64Array]
    """Axis -> where each document starts, and the end of the last."""
    facts: Facts


def description(part: Part, kind: str, options: ForeignOptions, *, look: bool) -> dict[str, Any]:
    """Return all that decides what is found in a part: its bytes, by size and sample, and the options for that."""
    return {
        "version": VERSION,
        "kind": kind,
        "name": part.name.rsplit("/", 1)[-1],
        "arrays": {key: [flat.begin, flat.count, flat.dtype.str, flat.sample] for key, flat in part.arrays.items()},
        "beside": [
            [file.name, file.stat().st_size, sample_digest(file, 0, file.stat().st_size)] for file in part.beside
        ],
        "ids": [options.eos_id, options.bos_id],
        "look": look,
    }


def must_look(part: Part, options: ForeignOptions) -> bool:
    """Whether all ids of a part have to be looked at before it may be read."""
    signed = any(part.arrays[key].dtype.kind == "i" for key in token_keys(part.arrays))
    return signed or options.vocab_size is not None


def find_documents(part: Part, kind: str, options: ForeignOptions, *, look: bool) -> Documents:
    """Find the documents of a part: by its own boundaries, else by EOS, else by BOS, else it is one document.

    With `look` all ids are looked at, which costs one reading of the file; a negative one is refused.
    """
    offsets: dict[str, Int64Array] = {}
    largest = -1
    bos = eos = True
    for key in token_keys(part.arrays):
        flat, axis = part.arrays[key], axis_of(kind, key)
        by_ids = axis not in part.ends and kind in ("seq", "sft")
        cuts, found = (
            _look(flat, key, options, cut=by_ids)
            if look or (by_ids and options.given.keys() & _CUTS)
            else (None, -1)
        )
        largest = max(largest, found)
        ends = part.ends[axis]() if axis in part.ends else cuts
        offsets[axis] = _offsets(ends, flat.count)
        bos = bos and _all_are(flat, offsets[axis][:-1], offsets[axis], options.bos_id)
        eos = eos and _all_are(flat, offsets[axis][1:] - 1, offsets[axis], options.eos_id)
    counts = {axis: starts.size - 1 for axis, starts in offsets.items()}
    if len(set(counts.values())) > 1:
        raise StoreCorruptError(
            f"{part.name}: every axis must have as many records as the others, got {counts}; write the file again"
        )
    return Documents(
        offsets=offsets, facts=Facts(items=counts, largest=largest, starts_with_bos=bos, ends_with_eos=eos)
    )


_CUTS = {"eos_id", "bos_id"}


def _look(flat: Flat, key: str, options: ForeignOptions, *, cut: bool) -> tuple[Int64Array | None, int]:
    """Return where documents end by the ids alone, None if they do not say, and the largest id."""
    mark = options.eos_id if options.eos_id is not None else options.bos_id
    behind = 1 if options.eos_id is not None else 0
    found: list[Int64Array] = []
    begin, largest = 0, -1
    for block in flat.blocks():
        largest = max(largest, int(block.max()))
        if flat.dtype.kind == "i" and int(block.min()) < 0:
            place = begin + int(block.argmin())
            raise StoreError(
                f"{flat.path}: ids of {key} must not be negative, got {int(block.min())} at number {place}; "
                "replace padding such as -100 first"
            )
        if cut and mark is not None:
            found.append(np.flatnonzero(block == mark) + (begin + behind))
        begin += block.size
    if not cut or mark is None:
        return None, largest
    ends = np.concatenate(found or [np.empty(0, np.int64)])
    return ends[ends > 0], largest


def _offsets(ends: Int64Array | None, count: int) -> Int64Array:
    """Return the starts of documents and the end of the last; what stands behind that is one more document."""
    if ends is None:
        ends = np.empty(0, np.int64)
    last = int(ends[-1]) if ends.size else 0
    tail = [count] if last < count else []
    return np.concatenate([np.zeros(1, np.int64), ends, np.array(tail, np.int64)])


def _all_are(flat: Flat, places: Int64Array, offsets: Int64Array, wanted: int | None) -> bool:
    """Whether the ids at one place of each document that is not empty are all the wanted one."""
    chosen = places[offsets[1:] > offsets[:-1]]
    if wanted is None or not chosen.size:
        return False
    if flat.read is None:
        ids = flat.mapped
        parts = (chosen[begin : begin + BLOCK] for begin in range(0, chosen.size, BLOCK))
        return all(bool((ids[part] == wanted).all()) for part in parts)
    for begin in range(0, flat.count, BLOCK):
        inside = chosen[(chosen >= begin) & (chosen < begin + BLOCK)] - begin
        if not (flat.numbers(begin, min(flat.count, begin + BLOCK))[inside] == wanted).all():
            return False
    return True


def index_bytes(offsets: Int64Array) -> Uint8Array:
    """Return the bytes of `documents.bin`: offsets, and the document that holds every 1,024th token."""
    marks = np.arange(0, int(offsets[-1]), ANCHOR_TOKENS, dtype=np.int64)
    anchors = (np.searchsorted(offsets, marks, side="right") - 1).astype(ANCHOR_DTYPE)
    return np.concatenate([offsets.astype(OFFSET_DTYPE).view(np.uint8), anchors.view(np.uint8)])


def converted_masks(part: Part) -> list[str]:
    """Return the masks that have to be copied with a byte a token before they can be mapped."""
    return [key for key, flat in part.arrays.items() if key in MASK_KEYS and stored_dtype(key, flat)[1]]


def mask_bytes(flat: Flat, key: str) -> Iterator[Uint8Array]:
    """Yield a mask as bytes; anything but 0 and 1 is refused."""
    for block in flat.blocks():
        flags = block.astype(np.uint8)
        if not (flags == block).all() or int(flags.max(initial=0)) > 1:
            odd = block[(block != 0) & (block != 1)][:1]
            raise StoreError(
                f"{flat.path}: {key} must be 0 or 1, got {odd.tolist()}; write 1 where a token is trained on"
            )
        yield flags


# What was found in foreign files, kept in files of ours: found once, mapped ever after.
#
# A file is written under a name of its own, synced and renamed, so what has the final name is whole. Its name is a
# digest of everything that decides its content: of sizes, samples and options. Where two processes make it at once,
# the last rename wins, with the same bytes. Any of these files can be deleted at any time.

FORMAT = "tokenmill-foreign-1"
PURPOSE = "foreign"
FOLDER = ".tokenmill"
"""Stands beside the data, where that can be written to."""
CHECKED_BYTES = 1 << 26
"""A larger section is not read through when it is opened, so that opening costs the same for any corpus; `verify`
compares it with the data, and offsets are checked whenever they are used."""
_END = 16
"""Bytes at the end of a file: size of the footer, and its checksum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Sections of bytes, in memory or in a file, and what is known of them."""

    facts: Mapping[str, Any]
    requests: Mapping[str, Request]
    digests: Mapping[str, str]
    """XXH3-128 of each section."""


def in_memory(path: Path, facts: Mapping[str, Any], sections: Mapping[str, Uint8Array]) -> Kept:
    """Keep sections in this process alone."""
    return Kept(
        facts=facts,
        requests={name: MemoryRequest(path, data) for name, data in sections.items()},
        digests={name: xxhash.xxh3_128_hexdigest(data.data) for name, data in sections.items()},
    )


def read_kept(beside: Path, description: Mapping[str, Any]) -> Kept | None:
    """Return what is kept under a description; None where there is nothing, or something cut or changed."""
    name = f"{digest(dict(description))}.index"
    for folder in (beside.parent / FOLDER, private_path(PURPOSE)):
        found = _read(folder / name, description)
        if found is not None:
            return found
    return None


def keep(
    beside: Path,
    description: Mapping[str, Any],
    facts: Mapping[str, Any],
    sections: Mapping[str, Iterable[Uint8Array]],
) -> Kept:
    """Write sections, given in blocks, to a file beside the data or in a folder of this user's; return them."""
    folder = writable(beside.parent / FOLDER) or private_folder(PURPOSE)
    file = folder / f"{digest(dict(description))}.index"
    descriptor, temporary = tempfile.mkstemp(prefix=".tmp-", dir=folder)
    try:
        os.fchmod(descriptor, 0o644)  # others may read the data, so they may read its index
        with os.fdopen(descriptor, "wb", buffering=1 << 20) as out:
            places = {name: _write(out, blocks) for name, blocks in sections.items()}
            footer = msgspec.json.encode(
                {"format": FORMAT, "description": dict(description), "facts": dict(facts), "sections": places}
            )
            out.write(footer)
            out.write(len(footer).to_bytes(8, "little") + xxhash.xxh3_64_digest(footer))
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)
        sync_folder(folder)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    found = _read(file, description)
    if found is None:
        raise StoreError(f"{file}: must be a whole index once it is written, got none; check the disk")
    return found


def _write(out: BinaryIO, blocks: Iterable[Uint8Array]) -> list[int | str]:
    out.write(b"\0" * (-out.tell() % 8))
    begin = out.tell()
    state = xxhash.xxh3_128()
    for block in blocks:
        state.update(block.data)
        out.write(block.data)
    return [begin, out.tell() - begin, state.hexdigest()]


def _read(file: Path, description: Mapping[str, Any]) -> Kept | None:
    try:
        real = Path(os.path.realpath(file))
        size = real.stat().st_size
        data = map_file(FileRequest(real, size)).data
    except (OSError, StoreError):
        return None
    length = int.from_bytes(data[-_END : -_END + 8].tobytes(), "little") if size >= _END else size
    text = data[max(0, size - _END - length) : -_END].tobytes()
    if len(text) != length or xxhash.xxh3_64_digest(text) != data[-8:].tobytes():
        return None
    footer = msgspec.json.decode(text)
    if footer["format"] != FORMAT or footer["description"] != dict(description):
        return None
    for begin, wanted, checksum in footer["sections"].values():
        part = data[begin : begin + wanted]
        if part.size != wanted or (wanted <= CHECKED_BYTES and xxhash.xxh3_128_hexdigest(part.data) != checksum):
            return None
    return Kept(
        facts=footer["facts"],
        requests={
            name: FileRequest(real, size, begin, wanted) for name, (begin, wanted, _) in footer["sections"].items()
        },
        digests={name: checksum for name, (_, _, checksum) in footer["sections"].items()},
    )


# Proving what raw files hold by what their numbers can be.


def proven_dtype(files: Sequence[Path], vocab_size: int | None) -> np.dtype[Any]:
    """Return the one dtype that files can have if all ids are below `vocab_size`; refuse if it is not the only one.

    A size proves nothing: half the files of 16-bit ids are as long as a file of 32-bit ids. An id outside the
    vocabulary disproves a dtype; so does a vocabulary that it cannot hold. A sample of every file is looked at;
    that the whole obeys what is left is checked when documents are found.
    """
    where = files[0] if len(files) == 1 else files[0].parent
    if vocab_size is None:
        raise StoreError(
            f"{where}: the dtype of files without a header must be said, got none; add dtype = uint16 or uint32, "
            "or vocab_size, which may prove it"
        )
    widths = {"uint8": 1 << 8, "uint16": 1 << 16, "uint32": 1 << 32}
    least = next(bound for bound in widths.values() if vocab_size <= bound)
    found: dict[str, str] = {}
    for name, bound in widths.items():
        if bound < least:
            found[name] = f"cannot hold {vocab_size} ids"
        else:
            found[name] = next((why for file in files if (why := _disproof(file, name, vocab_size))), "")
    possible = [name for name, why in found.items() if not why]
    if len(possible) != 1:
        told = "; ".join(f"{name} {why or 'is possible'}" for name, why in found.items())
        raise StoreError(
            f"{where}: vocab_size {vocab_size} must leave one dtype possible to prove it, "
            f"got {len(possible)} ({told}); say dtype"
        )
    return np.dtype(possible[0]).newbyteorder("<")


def _disproof(file: Path, name: str, vocab_size: int) -> str:
    """Say why a file cannot hold ids of this dtype; nothing if it can."""
    real, size = real_file(file)
    dtype = np.dtype(name).newbyteorder("<")
    if size % dtype.itemsize:
        return f"does not divide the {size} bytes of {file.name}"
    for place, data in sample_blocks(real, 0, size):
        ids: AnyArray = np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype)
        if ids.size and int(ids.max()) >= vocab_size:
            return f"gives id {int(ids.max())} at byte {place + int(ids.argmax()) * dtype.itemsize} of {file.name}"
    return ""
