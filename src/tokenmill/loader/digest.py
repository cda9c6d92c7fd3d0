"""Digests by which two runs are compared, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from tokenmill.loader.assemble import RECORD_ARRAYS
from tokenmill.types import AnyArray

if TYPE_CHECKING:
    from tokenmill.types import Batch

DIGEST_ARRAYS = ("input_ids", "labels", "position_ids", "doc_ids")
"""What a row's digest covers; a loader whose digests are to be taken must deliver these, or all of `RECORD_ARRAYS`
for its training type."""


def row_digests(batch: Batch) -> list[bytes]:
    """Return a digest of every row: 8 bytes over all that the row delivers."""
    kind = next((kind for kind, names in RECORD_ARRAYS.items() if names[0] in batch), None)
    if kind is not None:
        return _record_digests([np.ascontiguousarray(batch[name]) for name in RECORD_ARRAYS[kind]])
    arrays = [np.ascontiguousarray(batch[name], dtype="<i8") for name in DIGEST_ARRAYS]
    digests = []
    for row in range(arrays[0].shape[0]):
        state = xxhash.xxh3_64()
        for array in arrays:
            state.update(array[row].data)
        digests.append(state.digest())
    return digests


def _record_digests(arrays: Sequence[AnyArray]) -> list[bytes]:
    """Return a digest of every row of arrays of any dtype and number of axes."""
    digests = []
    for row in range(arrays[0].shape[0]):
        state = xxhash.xxh3_64()
        for array in arrays:
            state.update(array[row : row + 1].astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
        digests.append(state.digest())
    return digests


def batch_digest(rows: Iterable[bytes]) -> str:
    """Return 16 hex digits for rows in order; those of all ranks in turn give that of the global batch."""
    state = xxhash.xxh3_64()
    for row in rows:
        state.update(row)
    return state.hexdigest()
