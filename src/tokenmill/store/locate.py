"""Where documents, or the items of any axis, are: shard, first token and length of many at once.

Not in `reader`: who writes or verifies a store need not wait for numba, which compiles this.
"""

from __future__ import annotations

import numpy as np

from tokenmill.compiled import kernel, read_int64
from tokenmill.store.layout import index_file
from tokenmill.store.reader import Store, bad_offsets
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
    size = store.maps.limit // 4
    addresses = np.zeros(store.num_shards, np.int64)
    for first in range(0, needed.size, size):
        group = needed[first : first + size]
        with store.maps.borrow([store.file(int(shard), name) for shard in group]) as files:
            addresses[group] = [file.address for file in files]
            wrong = _gather(documents, shards, addresses, items, values, begins, lengths)
            addresses[group] = 0
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
