"""Rows of several windows as the arrays of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.errors import ConfigError, nearest
from tokenmill.loader.assemble import layout
from tokenmill.loader.buffers import BufferPool
from tokenmill.loader.kernels import SPAN_COLUMNS, copy_rows, find_segments
from tokenmill.types import Int64Array

if TYPE_CHECKING:
    from tokenmill.live.lanes import WindowRows
    from tokenmill.types import Batch

ARRAYS = ("input_ids", "labels", "position_ids", "doc_ids", "loss_mask", "cu_seqlens", "max_seqlen")
"""What a batch can deliver: all but what takes knowing other sources, or the rows of other ranks."""
_NOTHING = np.empty((0, 0), np.int64)
_NO_DOCUMENTS = np.empty((0, 0), np.int32)
_NO_MASK = np.empty((0, 0), np.bool_)


def check_arrays(arrays: Sequence[str]) -> None:
    """Refuse arrays that batches of live text do not have."""
    for name in arrays:
        if name not in ARRAYS:
            raise ConfigError(f"arrays: must be among {', '.join(ARRAYS)}, got {name!r}; {nearest(name, ARRAYS)}")
    if len(set(arrays)) != len(arrays) or not layout(arrays, 1, 1):
        raise ConfigError(
            f"arrays: must name each array once, and one that has a line for every row, got {list(arrays)}; "
            "name input_ids and labels at least"
        )


def join_rows(
    picked: Sequence[tuple[WindowRows, int]],
) -> tuple[Int64Array, Int64Array]:
    """Return (first span, number of spans) of rows of several windows, and their spans."""
    lines = [window.lines[row] for window, row in picked]
    spans = np.frombuffer(bytearray().join(lines), np.int64).reshape(-1, SPAN_COLUMNS)
    counts = [len(line) // (SPAN_COLUMNS * 8) for line in lines]
    ends = accumulate(counts)  # numbers of Python: there are few, and numpy takes longer to begin
    return np.array([(end - count, count) for end, count in zip(ends, counts, strict=True)], np.int64), spans


@dataclass(kw_only=True)
class Assembler:
    """Fills batches of one shape, in memory that is used again when nobody holds it any more."""

    arrays: tuple[str, ...]
    rows: int
    seq_len: int
    pad: int
    _buffers: BufferPool = field(init=False)

    def __post_init__(self) -> None:
        self._buffers = BufferPool(layout(self.arrays, self.rows, self.seq_len))

    def batch(self, picked: Sequence[tuple[WindowRows, int]]) -> Batch:
        """Return the given rows of windows as a batch."""
        rows, spans = join_rows(picked)
        out = self._buffers.batch()
        labels = out.get("labels", _NOTHING)
        if "loss_mask" in out and not labels.size:
            labels = np.empty(out["loss_mask"].shape, np.int64)
        copy_rows(
            rows,
            spans,
            (0, 0, 0, self.pad),
            out.get("input_ids", _NOTHING),
            labels,
            out.get("position_ids", _NOTHING),
            out.get("doc_ids", _NO_DOCUMENTS),
            out.get("loss_mask", _NO_MASK),
        )
        if "cu_seqlens" in self.arrays or "max_seqlen" in self.arrays:
            bounds, _, longest = find_segments(rows, spans, self.seq_len, self.rows)
            if "cu_seqlens" in self.arrays:
                out["cu_seqlens"] = bounds
            if "max_seqlen" in self.arrays:
                out["max_seqlen"] = longest[0, ...]
        return out
