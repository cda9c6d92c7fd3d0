"""Memory for batches, used again once nobody holds the batch that lived in it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.types import AnyArray, Int64Array

if TYPE_CHECKING:
    from tokenmill.types import Batch

MAX_BUFFERS = 64
"""Buffers of one shape that the pool remembers; a caller who keeps more batches gets ordinary memory."""

Layout = Mapping[str, tuple[tuple[int, ...], type[np.generic]]]
"""Array name -> shape and dtype."""


class BufferPool:
    """Hands out the arrays of a batch over one buffer, never over one that an earlier batch still uses.

    A fresh array of half a megabyte goes back to the system when it is dropped, and faults in page
    by page when it is made again, which costs more than filling it (benchmarks/loader.py). Every
    view of an array and every tensor made of one keeps its buffer referenced, so the number of
    references tells which buffers are free.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
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
        sizes = [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in self._layout.values()]
        # Each array starts on a boundary of 64 bytes, a cache line.
        begins = np.cumsum([0, *(-(-size // 64) * 64 for size in sizes)])
        buffer = np.empty(int(begins[-1]) // 8, np.int64)
        arrays: dict[str, AnyArray] = {}
        for (name, (shape, dtype)), begin, size in zip(self._layout.items(), begins[:-1], sizes, strict=True):
            part = buffer[begin // 8 : -(-(begin + size) // 8)].view(dtype)
            arrays[name] = part[: int(np.prod(shape))].reshape(shape)
        return buffer, arrays


def _references(buffers: list[Int64Array], number: int) -> int:
    """Count the references to a buffer, always in the same way, so that counts can be compared."""
    return sys.getrefcount(buffers[number])
