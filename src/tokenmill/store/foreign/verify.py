"""Proving what can be proven of foreign files, which have no checksums."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.errors import StoreCorruptError
from tokenmill.store.foreign.index import find_documents, index_bytes, mask_bytes
from tokenmill.store.foreign.options import ForeignOptions
from tokenmill.store.foreign.parts import MASKS, Part
from tokenmill.store.foreign.place import check_vocabulary, open_foreign, read_parts
from tokenmill.store.layout import index_file, key_file
from tokenmill.store.reader import Store
from tokenmill.store.verify import VerifyReport

if TYPE_CHECKING:
    import numpy.typing as npt


def verify_foreign(
    path: Path, options: ForeignOptions, *, progress: Callable[[int], None] = lambda _bytes: None
) -> VerifyReport:
    """Read every id of foreign files: sizes, boundaries, masks, ids below the vocabulary if one is given.

    There are no checksums to compare with, so ids that were changed into other ids are not noticed:
    `tokenmill import` makes a store that has some.
    """
    store = open_foreign(path, options)
    format, parts = read_parts(path, options)
    for number, part in enumerate(parts.parts):
        found = find_documents(part, parts.kind, options, look=True)
        check_vocabulary(part, found.facts, options)
        for axis, offsets in found.offsets.items():
            _compare(store, number, part, index_file(axis), [index_bytes(offsets)])
        for key in [key for key in MASKS if key in part.arrays]:
            _compare(store, number, part, key_file(key), mask_bytes(part.arrays[key], key))
        progress(sum(flat.bytes for flat in part.arrays.values()))
    vocabulary = "ids below the vocabulary" if options.vocab_size is not None else "no vocabulary was given"
    return VerifyReport(
        path=path,
        shards=store.num_shards,
        files=sum(len(part.arrays) + len(part.beside) for part in parts.parts),
        bytes=sum(flat.bytes for part in parts.parts for flat in part.arrays.values()),
        documents=store.num_documents,
        tokens=store.manifest.tokens,
        fingerprint=store.fingerprint,
        checked=f"the format has no checksums; sizes and boundaries are right, {vocabulary}",
        format=format,
    )


def _compare(store: Store, shard: int, part: Part, name: str, expected: Iterable[npt.NDArray[np.uint8]]) -> None:
    """Compare what a store would read with what the data says, given in blocks."""
    request = store.file(shard, name)
    place = 0
    with store.maps.borrow([request]) as (mapped,):
        for block in expected:
            if not np.array_equal(mapped.data[place : place + block.size], block):
                raise StoreCorruptError(
                    f"{request.path}: {name} of {part.name} must be what the data says, got other bytes; "
                    "delete the folder .tokenmill beside the data"
                )
            place += block.size
