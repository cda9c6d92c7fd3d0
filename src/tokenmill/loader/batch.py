"""The arrays of a batch: their shapes, the memory they live in, and digests by which batches are compared."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import xxhash

from tokenmill.types import AnyArray, Batch, Int64Array, token_arrays

RECORD_ARRAYS: Mapping[str, tuple[str, ...]] = {
    "dpo": ("chosen", "rejected", "chosen_mask", "rejected_mask", "chosen_len", "rejected_len"),
    "grpo": ("prompts", "prompt_len", "responses", "masks", "response_len", "rewards", "group_size"),
}
"""Training type -> what a batch delivers; beside these there is `source`."""
LENGTHS = {
    "chosen": "chosen_len",
    "rejected": "rejected_len",
    "prompts": "prompt_len",
    "responses": "response_len",
}
"""Array of token ids -> the array of a batch that says how many there are."""
REWARDS = "rewards"

Shapes = Mapping[str, tuple[tuple[int, ...], type[np.generic]]]
"""Array name -> shape and dtype."""
MAX_BUFFERS = 64
"""Buffers of one shape that a pool remembers; a caller who keeps more batches gets ordinary memory."""


def array_shapes(arrays: Sequence[str], rows: int, columns: int, horizon: int = 1) -> Shapes:
    """Return shape and dtype of each array of a batch of sequences that has a line for every row."""
    labels = (rows, columns) if horizon == 1 else (rows, columns, horizon)
    kinds: dict[str, tuple[tuple[int, ...], type[np.generic]]] = {
        "input_ids": ((rows, columns), np.int64),
        "labels": (labels, np.int64),
        "position_ids": ((rows, columns), np.int64),
        "doc_ids": ((rows, columns), np.int32),
        "loss_mask": (labels, np.bool_),
        "source": ((rows,), np.int32),
    }
    return {name: kinds[name] for name in arrays if name in kinds}


def record_shapes(kind: str, arrays: Sequence[str], shape: tuple[int, int, int]) -> Shapes:
    """Return shape and dtype of each array of a batch of records; shape is (rows, largest group, seq_len)."""
    rows, group, seq_len = shape
    kinds: dict[str, tuple[tuple[int, ...], type[np.generic]]] = {"source": ((rows,), np.int32)}
    for key, mask in token_arrays(kind).items():
        lines = (rows, group) if key == "responses" else (rows,)
        kinds |= {key: ((*lines, seq_len), np.int64), LENGTHS[key]: (lines, np.int64)}
        if mask is not None:
            kinds[mask] = ((*lines, seq_len), np.bool_)
    if kind == "grpo":
        kinds |= {REWARDS: ((rows, group), np.float32), "group_size": ((rows,), np.int64)}
    return {name: kinds[name] for name in arrays}


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


class BufferPool:
    """Hands out the arrays of a batch over one buffer, never over one that an earlier batch still uses.

    A fresh array of half a megabyte goes back to the system when it is dropped, and faults in page
    by page when it is made again, which costs more than filling it (benchmarks/loader.py). Every
    view of an array and every tensor made of one keeps its buffer referenced, so the number of
    references tells which buffers are free.
    """

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._buffers: list[Int64Array] = []
        self._arrays: list[Batch] = []
        self._idle: list[int] = []
        """References to each buffer that are the pool's own, as `_references` counts them on this Python."""
        self._lock = threading.Lock()

    def batch(self) -> Batch:
        """Return arrays with undefined content."""
        with self._lock:
            for number, idle in enumerate(self._idle):
                if _references(self._buffers, number) == idle:
                    return {name: array[:] for name, array in self._arrays[number].items()}
            buffer, arrays = self._make()
            if len(self._buffers) < MAX_BUFFERS:
                self._buffers.append(buffer)
                self._arrays.append(arrays)
                del buffer
                self._idle.append(_references(self._buffers, len(self._buffers) - 1))
            return {name: array[:] for name, array in arrays.items()}

    def _make(self) -> tuple[Int64Array, Batch]:
        sizes = [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in self._shapes.values()]
        # Each array starts on a boundary of 64 bytes, a cache line.
        begins = np.cumsum([0, *(-(-size // 64) * 64 for size in sizes)])
        buffer = np.empty(int(begins[-1]) // 8, np.int64)
        arrays: dict[str, AnyArray] = {}
        for (name, (shape, dtype)), begin, size in zip(self._shapes.items(), begins[:-1], sizes, strict=True):
            part = buffer[begin // 8 : -(-(begin + size) // 8)].view(dtype)
            arrays[name] = part[: int(np.prod(shape))].reshape(shape)
        return buffer, arrays


def _references(buffers: list[Int64Array], number: int) -> int:
    """Count the references to a buffer, always in the same way, so that counts can be compared."""
    return sys.getrefcount(buffers[number])


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
