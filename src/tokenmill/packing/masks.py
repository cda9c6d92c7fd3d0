"""How many labels the loss mask of a store leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba
import numpy as np

from tokenmill.packing.distinct import distinct
from tokenmill.store.layout import key_file
from tokenmill.store.memory import view_uint8

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.packing.concat import ConcatRows
    from tokenmill.packing.packed import PackedRows
    from tokenmill.store.reader import Store
    from tokenmill.types import Whole

LOSS_MASK = "loss_mask"
"""Array of a store whose zeros say which tokens are not to be trained on."""
_ROWS = 1 << 16
_TOKENS = 1 << 24
_DOCUMENTS = 1 << 20


def count_packed(rows: PackedRows) -> int:
    """Return how many labels of an epoch the mask leaves; reads all of it, some rows at a time."""
    found = 0
    for begin in range(0, rows.num_rows, _ROWS):
        spans = rows.spans(np.arange(begin, min(begin + _ROWS, rows.num_rows)))
        # The first token of a span has nothing before it, unless it goes on behind its BOS.
        skip = (~spans.joined).astype(np.int64)
        found += count_ones(rows.store, LOSS_MASK, spans.shard, spans.token + skip, spans.length - skip)
    return found


def count_stream(rows: ConcatRows) -> int:
    """Return how many labels of an epoch the mask leaves where rows are cut from the stream."""
    store, end = rows.store, rows.store.num_tokens - rows.dropped_tokens
    found = sum(_ones_within(store, begin, min(begin + _TOKENS, end)) for begin in range(1, end, _TOKENS))
    if rows.cross_document_labels:
        return found
    for begin in range(0, store.num_documents, _DOCUMENTS):
        offsets = store.document_offsets(begin, min(begin + _DOCUMENTS, store.num_documents))
        starts = offsets[:-1][(offsets[1:] > offsets[:-1]) & (offsets[:-1] > 0) & (offsets[:-1] < end)]
        shards = np.searchsorted(store.token_begins, starts, side="right") - 1
        found -= count_ones(store, LOSS_MASK, shards, starts - store.token_begins[shards], np.ones_like(starts))
    return found


def _ones_within(store: Store, begin: int, end: int) -> int:
    return int(np.count_nonzero(store.fetch(begin, end, LOSS_MASK)))


def count_ones(
    store: Store,
    key: str,
    shards: npt.NDArray[np.int64],
    firsts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
) -> int:
    """Return how many values of a mask are not 0 in runs at (shard, first value within it, length)."""
    needed = distinct(shards)
    size = max(1, store.maps.limit // 4)
    found = 0
    for first in range(0, needed.size, size):
        group = needed[first : first + size]
        with store.maps.borrow([store.file(int(shard), key_file(key)) for shard in group]) as files:
            addresses = np.array([file.address for file in files], np.uint64)
            found += int(_count(addresses, group, shards, firsts, lengths))
    return found


@numba.njit(cache=True, nogil=True)
def _count(
    addresses: npt.NDArray[np.uint64],
    group: npt.NDArray[np.int64],
    shards: npt.NDArray[np.int64],
    firsts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
) -> Whole:
    found: Whole = 0
    for i in range(shards.size):
        local = np.searchsorted(group, shards[i])
        if local < group.size and group[local] == shards[i] and lengths[i] > 0:
            mask = view_uint8(addresses[local] + np.uint64(firsts[i]), lengths[i])
            for value in mask:
                found += value != 0
    return found
