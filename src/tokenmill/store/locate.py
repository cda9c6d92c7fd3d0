"""Where documents, or the items of any axis, are: shard, first token and length of many at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba
import numpy as np

from tokenmill.errors import StoreCorruptError
from tokenmill.store.layout import index_file
from tokenmill.store.memory import view_uint64

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.store.reader import Store
    from tokenmill.types import Whole


def locate(
    store: Store, documents: npt.NDArray[np.int64], axis: str = "documents"
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return (shard, first token within the shard, number of tokens) of each document, or item of another axis."""
    items, values = store.axes[axis].items, store.axes[axis].values
    name = index_file(axis)
    if store.num_shards == 1:
        shards = np.zeros(documents.size, np.int64)
    else:
        shards = np.searchsorted(items, documents, side="right") - 1
    begins = np.empty(documents.size, np.int64)
    lengths = np.empty(documents.size, np.int64)
    needed = np.unique(shards) if store.num_shards > 1 else np.zeros(1, np.int64)
    size = store.maps.limit // 4
    for first in range(0, needed.size, size):
        group = needed[first : first + size]
        with store.maps.borrow([store.file(int(shard), name) for shard in group]) as files:
            addresses = np.array([file.address for file in files], np.uint64)
            _gather(documents, shards, group, addresses, items, begins, lengths)
    wrong = int(_first_wrong(shards, begins, lengths, values))
    if wrong >= 0:
        raise StoreCorruptError(
            f"{store.file(int(shards[wrong]), name).path}: offsets must not decrease nor pass the shard, "
            "got others; run `tokenmill verify`, then copy or prepare the store again"
        )
    return shards, begins, lengths


@numba.njit(cache=True, nogil=True)
def _gather(
    documents: npt.NDArray[np.int64],
    shards: npt.NDArray[np.int64],
    group: npt.NDArray[np.int64],
    addresses: npt.NDArray[np.uint64],
    document_begins: npt.NDArray[np.int64],
    begins: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
) -> None:
    for i in range(documents.size):
        shard = shards[i]
        local = np.searchsorted(group, shard)
        if local < group.size and group[local] == shard:
            document = documents[i] - document_begins[shard]
            offsets = view_uint64(addresses[local], document + 2)
            begins[i] = np.int64(offsets[document])
            lengths[i] = np.int64(offsets[document + 1]) - begins[i]


@numba.njit(cache=True, nogil=True)
def _first_wrong(
    shards: npt.NDArray[np.int64],
    begins: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    token_begins: npt.NDArray[np.int64],
) -> Whole:
    """Return the first document that cannot be where its shard says, or -1."""
    for i in range(shards.size):
        tokens = token_begins[shards[i] + 1] - token_begins[shards[i]]
        if begins[i] < 0 or lengths[i] < 0 or begins[i] + lengths[i] > tokens:
            return i
    return -1
