"""Where the documents of a part are, and what one look at all its ids proves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import StoreCorruptError, StoreError
from tokenmill.store.foreign.options import ForeignOptions
from tokenmill.store.foreign.parts import BLOCK, MASKS, Flat, Part, sample_digest, stored_dtype
from tokenmill.store.layout import ANCHOR_DTYPE, ANCHOR_TOKENS, OFFSET_DTYPE, axis_of, token_keys

if TYPE_CHECKING:
    import numpy.typing as npt

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

    offsets: Mapping[str, npt.NDArray[np.int64]]
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
    offsets: dict[str, npt.NDArray[np.int64]] = {}
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


def _look(flat: Flat, key: str, options: ForeignOptions, *, cut: bool) -> tuple[npt.NDArray[np.int64] | None, int]:
    """Return where documents end by the ids alone, None if they do not say, and the largest id."""
    mark = options.eos_id if options.eos_id is not None else options.bos_id
    behind = 1 if options.eos_id is not None else 0
    found: list[npt.NDArray[np.int64]] = []
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


def _offsets(ends: npt.NDArray[np.int64] | None, count: int) -> npt.NDArray[np.int64]:
    """Return the starts of documents and the end of the last; what stands behind that is one more document."""
    if ends is None:
        ends = np.empty(0, np.int64)
    last = int(ends[-1]) if ends.size else 0
    tail = [count] if last < count else []
    return np.concatenate([np.zeros(1, np.int64), ends, np.array(tail, np.int64)])


def _all_are(flat: Flat, places: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64], wanted: int | None) -> bool:
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


def index_bytes(offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Return the bytes of `documents.bin`: offsets, and the document that holds every 1,024th token."""
    marks = np.arange(0, int(offsets[-1]), ANCHOR_TOKENS, dtype=np.int64)
    anchors = (np.searchsorted(offsets, marks, side="right") - 1).astype(ANCHOR_DTYPE)
    return np.concatenate([offsets.astype(OFFSET_DTYPE).view(np.uint8), anchors.view(np.uint8)])


def converted_masks(part: Part) -> list[str]:
    """Return the masks that have to be copied with a byte a token before they can be mapped."""
    return [key for key, flat in part.arrays.items() if key in MASKS and stored_dtype(key, flat)[1]]


def mask_bytes(flat: Flat, key: str) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield a mask as bytes; anything but 0 and 1 is refused."""
    for block in flat.blocks():
        flags = block.astype(np.uint8)
        if not (flags == block).all() or int(flags.max(initial=0)) > 1:
            odd = block[(block != 0) & (block != 1)][:1]
            raise StoreError(
                f"{flat.path}: {key} must be 0 or 1, got {odd.tolist()}; write 1 where a token is trained on"
            )
        yield flags
