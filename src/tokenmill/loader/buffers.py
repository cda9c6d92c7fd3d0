"""Arrays of a batch: their shapes, and the memory that they are in."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.packing.stored import stored_rows
from tokenmill.types import RECORD_TYPES, AnyArray, Batch, Int64Array, token_arrays

if TYPE_CHECKING:
    from tokenmill.plan.stages import Stage

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


def record_type(stage: Stage) -> str | None:
    """Return the training type of a stage whose rows are records; None where they are sequences."""
    kinds = {rows.store.manifest.kind for rows in stored_rows(stage).values()}
    return next((kind for kind in kinds if kind in RECORD_TYPES), None)


def stage_shapes(stage: Stage, arrays: Sequence[str], rows: int, horizon: int = 1) -> Shapes:
    """Return shape and dtype of those arrays that have a line for every row, in a batch of `rows` rows."""
    kind = record_type(stage)
    if kind is None:
        return array_shapes(arrays, rows, stage.spec.seq_len, horizon)
    return record_shapes(kind, arrays, (rows, group_size(stage, kind), stage.spec.seq_len))


def group_size(stage: Stage, kind: str) -> int:
    """Return how many responses a batch has room for in each record: the largest group of the stage's sources."""
    # A group has room for its prompt and as many responses; a pair has no group.
    return stage.row_slots // stage.spec.seq_len - 1 if kind == "grpo" else 0


def pad_id(tokenizer: Mapping[str, Any]) -> int:
    """Return the id that fills rows, of a tokenizer as JSON: PAD, else EOS, else 0. It is never trained on."""
    return next((int(tokenizer[name]) for name in ("pad_id", "eos_id") if tokenizer.get(name) is not None), 0)


_HAS_GIL = bool(getattr(sys, "_is_gil_enabled", lambda: True)())
"""Whether reference counts are exact: not under free-threaded Python."""


class BufferPool:
    """Hands out the arrays of a batch over one buffer, never over one that an earlier batch still uses.

    A fresh array of half a megabyte goes back to the system when it is dropped, and faults in page
    by page when it is made again, which costs more than filling it (benchmarks/loader.py). Every
    view of an array and every tensor made of one keeps its buffer referenced, so the number of
    references tells which buffers are free. Without the GIL such numbers are not exact, and no buffer is reused.
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
            if _HAS_GIL and len(self._buffers) < MAX_BUFFERS:
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
