"""Positions of documents and other items in the shards of a store, read from offset files by a compiled kernel.

The module imports numba, so the rest of the store does not import it: writing and verifying a store need no kernel.
"""

from __future__ import annotations

import numpy as np

from tokenmill.compiled import kernel, read_int64
from tokenmill.store.layout import OFFSET_DTYPE, index_file
from tokenmill.store.store import Store, bad_offsets
from tokenmill.types import Int64Array


def locate(
    store: Store, documents: Int64Array, axis: str = "documents"
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return (shard, first token within the shard, number of tokens) of each document, or item of another axis."""
    items, values = store.axes[axis].items, store.axes[axis].values
    name = index_file(axis)
    if store.num_shards == 1:
        shards, needed = np.zeros(documents.size, np.int64), np.zeros(1, np.int64)
    else:
        shards = np.searchsorted(items, documents, side="right") - 1
        needed = np.flatnonzero(np.bincount(shards))
    begins, lengths = np.empty((2, documents.size), np.int64)
    size = store._maps.limit // 4
    addresses = np.zeros(store.num_shards, np.int64)
    for first in range(0, needed.size, size):
        group = needed[first : first + size]
        files = store._maps.open([store.file(int(shard), name) for shard in group])
        addresses[group] = [file.address for file in files]
        wrong = _gather(documents, shards, addresses, items, values, begins, lengths)
        addresses[group] = 0
        store._maps.check(files)
        if wrong >= 0:
            raise bad_offsets(store.file(int(shards[wrong]), name))
    return shards, begins, lengths


@kernel
def _gather(
    documents: Int64Array,
    shards: Int64Array,
    addresses: Int64Array,
    items: Int64Array,
    values: Int64Array,
    begins: Int64Array,
    lengths: Int64Array,
) -> int:
    """Read where documents are whose shard has an address; return the first that cannot be there, or -1."""
    for i in range(documents.size):
        shard = shards[i]
        if addresses[shard]:
            document = documents[i] - items[shard]
            begin = read_int64(addresses[shard], document)
            end = read_int64(addresses[shard], document + 1)
            # Compared before they are subtracted: the difference of two wild numbers may look like a length.
            if begin < 0 or end < begin or end > values[shard + 1] - values[shard]:
                return i
            begins[i] = begin
            lengths[i] = end - begin
    return -1


def items_within(
    store: Store, axis: str, shard: int, begins: Int64Array, ends: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Return the items of an axis that hold values of ranges, `begins` to `ends` of a shard.

    Four arrays: first item, last item (inclusive), start of the range within the first item, and end within the
    last. If no item holds a value of a range, its last item is before its first.
    """
    items = store.axes[axis].items
    files = store._maps.open([store.file(shard, index_file(axis))])
    offsets = files[0].data[: 8 * int(items[shard + 1] - items[shard] + 1)].view(OFFSET_DTYPE)
    first = np.searchsorted(offsets, begins.astype(OFFSET_DTYPE), side="right") - 1
    last = np.searchsorted(offsets, ends.astype(OFFSET_DTYPE), side="left") - 1
    first, last = np.maximum(first, 0), np.minimum(last, int(items[shard + 1] - items[shard]) - 1)
    inside = (begins - offsets[first].astype(np.int64), ends - offsets[np.maximum(last, 0)].astype(np.int64))
    store._maps.check(files)
    return first + items[shard], last + items[shard], *inside
