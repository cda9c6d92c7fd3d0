"""The kernels of `best_fit` and `padded`: whole documents in rows, longest first, each where it leaves least."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba
import numpy as np

from tokenmill.packing.bits import at_least, empty_set, insert, remove
from tokenmill.packing.window import (
    CUT_DOCUMENTS,
    FORBID,
    SPLIT,
    TOO_LONG,
    TRUNCATE_START,
    TRUNCATED,
    emit,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.packing.window import Fragments, Output, Written
    from tokenmill.types import Whole


@numba.njit(cache=True, nogil=True)
def pack_best_fit(
    fragments: Fragments,
    lengths: npt.NDArray[np.int32],
    shape: tuple[int, int, bool],
    out: Output,
    counts: npt.NDArray[np.int64],
) -> Written:
    """Pack a window; shape is (seq_len, split, one fragment a row). Row-filling pieces of long ones come first."""
    seq_len, split, alone = shape
    begins, sizes = fragments[1].copy(), fragments[2].copy()
    written = cut_long(fragments, lengths, (seq_len, split), (begins, sizes), out, counts)
    if counts[TOO_LONG]:
        return written
    bins = np.arange(sizes.size).astype(np.int32)
    opened: Whole = sizes.size
    if not alone:
        opened = fill_bins(sizes, seq_len + 1, bins)
    return _emit_bins(fragments[0], begins, sizes, (bins, opened), lengths, out, written)


@numba.njit(cache=True, nogil=True)
def cut_long(
    fragments: Fragments,
    lengths: npt.NDArray[np.int32],
    shape: tuple[int, int],
    rests: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]],
    out: Output,
    counts: npt.NDArray[np.int64],
) -> Written:
    """Give each row-filling piece of a long fragment a row, and leave in `rests` what is still to be packed."""
    seq_len, split = shape
    documents, starts, sizes = fragments
    rows, pieces, cuts = out
    row: Whole = 0
    cut: Whole = 0
    for i in range(sizes.size):
        size = sizes[i]
        if size <= seq_len + 1:
            continue
        counts[CUT_DOCUMENTS] += 1
        if split == FORBID:
            counts[TOO_LONG] = documents[i] + 1
            return 0, 0, 0
        if split == SPLIT:
            begin = starts[i]
            while size > seq_len + 1:
                rows[row] = row
                cut = emit(pieces, cuts, row, cut, (documents[i], begin, seq_len + 1, lengths[documents[i]]))
                row += 1
                begin += seq_len
                size -= seq_len
            rests[0][i] = begin
            rests[1][i] = size
        else:
            counts[TRUNCATED] += size - seq_len - 1
            rests[1][i] = seq_len + 1
            if split == TRUNCATE_START:
                rests[0][i] = starts[i] + size - seq_len - 1
    return row, row, cut


@numba.njit(cache=True, nogil=True)
def fill_bins(sizes: npt.NDArray[np.int32], room: int, bins: npt.NDArray[np.int32]) -> Whole:
    """Say for each size which bin of `room` it goes to; return the number of bins.

    The bins with the same free room form a stack, and the free rooms that occur a set of bits, so a
    size costs a few instructions whatever the number of open bins.
    """
    order = _longest_first(sizes, room)
    stacks = np.full(room + 1, -1, np.int32)
    below = np.empty(sizes.size, np.int32)
    free = empty_set(room + 1)
    opened = 0
    for i in order:
        size = sizes[i]
        space = at_least(free, size)
        if space < 0:
            chosen = np.int32(opened)
            opened += 1
            space = room
        else:
            chosen = stacks[space]
            stacks[space] = below[chosen]
            if below[chosen] < 0:
                remove(free, space)
        bins[i] = chosen
        space -= size
        if space:
            if stacks[space] < 0:
                insert(free, space)
            below[chosen] = stacks[space]
            stacks[space] = chosen
    return opened


@numba.njit(cache=True, nogil=True)
def _longest_first(sizes: npt.NDArray[np.int32], room: int) -> npt.NDArray[np.int32]:
    """Order sizes from the longest to the shortest, equal ones as they come."""
    starts = np.zeros(room + 2, np.int32)
    for size in sizes:
        starts[room + 1 - size] += 1
    for slot in range(room + 1):
        starts[slot + 1] += starts[slot]
    order = np.empty(sizes.size, np.int32)
    for i in range(sizes.size):
        slot = room - sizes[i]
        order[starts[slot]] = i
        starts[slot] += 1
    return order


@numba.njit(cache=True, nogil=True)
def _emit_bins(
    documents: npt.NDArray[np.int32],
    begins: npt.NDArray[np.int32],
    sizes: npt.NDArray[np.int32],
    bins: tuple[npt.NDArray[np.int32], Whole],
    lengths: npt.NDArray[np.int32],
    out: Output,
    written: Written,
) -> Written:
    """Write each bin as a row, its documents in the order of the store."""
    chosen, opened = bins
    ends = np.zeros(opened + 1, np.int32)
    for number in chosen:
        ends[number + 1] += 1
    for number in range(opened):
        ends[number + 1] += ends[number]
    members = np.empty(chosen.size, np.int32)
    for i in range(chosen.size):
        members[ends[chosen[i]]] = i
        ends[chosen[i]] += 1
    rows, pieces, cuts = out
    row, number, cut = written
    k = 0
    for end in ends[:opened]:
        rows[row] = number
        row += 1
        while k < end:
            i = members[k]
            cut = emit(pieces, cuts, number, cut, (documents[i], begins[i], sizes[i], lengths[documents[i]]))
            number += 1
            k += 1
    return row, number, cut
