"""Batches of all ranks: counted, joined, and compared by digests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import xxhash

from tokenmill.loader import buffers
from tokenmill.types import Batch


def count_tokens(batch: Batch) -> tuple[int, int]:
    """Return how many tokens a batch has room for, and how many are trained on; of a batch with all its arrays.

    Where labels go further than the next token, those of the next one are counted.
    """
    if "labels" in batch:
        shape = batch["input_ids"].shape
        return batch["input_ids"].size, int((batch["labels"].reshape(*shape, -1)[..., 0] >= 0).sum())
    if "chosen" in batch:
        # The first token of a sequence is no label, whatever its mask says.
        trained = sum(int(batch[name][:, 1:].sum()) for name in ("chosen_mask", "rejected_mask"))
        return batch["chosen"].size + batch["rejected"].size, trained
    unprompted = batch["masks"][batch["prompt_len"] == 0]
    trained = int(batch["masks"].sum()) - int(unprompted[..., 0].sum())
    return batch["prompts"].size + batch["responses"].size, trained


def stack(batches: Sequence[Batch]) -> Batch:
    """Join batches row by row, as the slices of all ranks make up the global batch."""
    joined: Batch = {}
    for name in batches[0]:
        parts = [batch[name] for batch in batches]
        if name in ("cu_seqlens", "cu_seqlens_unpadded"):
            ends = np.cumsum([0, *(int(part[-1]) for part in parts)])
            shifted = [part[:-1] + end for part, end in zip(parts, ends[:-1], strict=True)]
            joined[name] = np.concatenate([*shifted, ends[-1:]]).astype(np.int32)
        elif name == "max_seqlen":
            joined[name] = np.max(parts)
        elif name == "num_loss_tokens":
            joined[name] = parts[0]
        else:
            joined[name] = np.concatenate(parts)
    return joined


DIGEST_ARRAYS = ("input_ids", "labels", "position_ids", "doc_ids")
"""What a row's digest covers; a loader whose digests are to be taken must deliver these, or all of `RECORD_ARRAYS`
for its training type."""


def row_digests(batch: Batch, names: Sequence[str] | None = None) -> list[bytes]:
    """Return an 8-byte digest of each row over some arrays; by default those of `DIGEST_ARRAYS`, or of a record."""
    if names is None:
        names = next((names for names in buffers.RECORD_ARRAYS.values() if names[0] in batch), DIGEST_ARRAYS)
    dtypes = ["<i8" if name in DIGEST_ARRAYS else batch[name].dtype.newbyteorder("<") for name in names]
    arrays = [np.ascontiguousarray(batch[name], dtype) for name, dtype in zip(names, dtypes, strict=True)]
    digests = []
    for row in range(arrays[0].shape[0]):
        state = xxhash.xxh3_64()
        for array in arrays:
            state.update(array[row : row + 1].data)
        digests.append(state.digest())
    return digests


def batch_digest(rows: Iterable[bytes]) -> str:
    """Return 16 hex digits for rows in order; those of all ranks in turn give that of the global batch."""
    state = xxhash.xxh3_64()
    for row in rows:
        state.update(row)
    return state.hexdigest()
