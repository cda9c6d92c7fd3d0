"""What rows of sequences hold, and how many labels the loss mask of a store leaves of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba
import numpy as np

from tokenmill.packing.distinct import distinct
from tokenmill.plan.rows import Held
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


def hold(rows: ConcatRows | PackedRows, numbers: npt.NDArray[np.int64]) -> Held:
    """Return what the rows of these numbers hold; reads their part of the loss mask where the store has one."""
    spans = rows.spans(numbers)
    ends = np.concatenate([[0], np.cumsum(spans.length)])
    used = ends[spans.first + spans.count] - ends[spans.first]
    # The first token of a span has nothing before it that predicts it, unless it goes on behind its BOS.
    skip = (~spans.joined).astype(np.int64)
    if rows.cross_document_labels:
        skip[:] = 0
        skip[spans.first[spans.count > 0]] = 1
    if LOSS_MASK in rows.store.keys:
        trained = count_ones(rows.store, LOSS_MASK, spans.shard, spans.token + skip, spans.length - skip)
    else:
        trained = int((spans.length - skip).sum())
    # A full row holds one more token than it has inputs: its last label.
    return Held(tokens=int(np.minimum(used, rows.seq_len).sum()), trained=trained)


def count_rows(rows: ConcatRows | PackedRows) -> int:
    """Return how many labels of an epoch the mask leaves; reads all of it, some rows at a time."""
    starts = range(0, rows.num_rows, _ROWS)
    return sum(hold(rows, np.arange(begin, min(begin + _ROWS, rows.num_rows))).trained for begin in starts)


def count_stream(rows: ConcatRows) -> int:
    """Return what `count_rows` does for rows cut from a stream without holes; faster, as it finds no spans."""
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
