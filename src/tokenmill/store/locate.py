"""Where documents are: shard, first token and length of many documents at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba
import numpy as np

from tokenmill.errors import StoreCorruptError
from tokenmill.store.layout import DOCUMENTS
from tokenmill.store.memory import view_uint64

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.store.reader import Store


def locate(
    store: Store, documents: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return (shard, first token within the shard, number of tokens) of each document."""
    shards = np.searchsorted(store.document_begins, documents, side="right") - 1
    begins = np.empty(documents.size, np.int64)
    lengths = np.empty(documents.size, np.int64)
    needed = np.unique(shards) if store.num_shards > 1 else np.zeros(1, np.int64)
    size = store.maps.limit // 4
    for first in range(0, needed.size, size):
        group = needed[first : first + size]
        with store.maps.borrow([store.file(int(shard), DOCUMENTS) for shard in group]) as files:
            addresses = np.array([file.address for file in files], np.uint64)
            _gather(documents, shards, group, addresses, store.document_begins, begins, lengths)
    tokens = np.diff(store.token_begins)[shards]
    wrong = (begins < 0) | (lengths < 0) | (begins + lengths > tokens)
    if bool(wrong.any()):
        shard = int(shards[np.flatnonzero(wrong)[0]])
        raise StoreCorruptError(
            f"{store.file(shard, DOCUMENTS).path}: offsets must not decrease nor pass the shard's end, got others; "
            "run `tokenmill verify`, then copy or prepare the store again"
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
