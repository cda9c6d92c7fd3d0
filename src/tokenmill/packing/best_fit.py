"""The kernels of `best_fit` and `padded`: whole documents in rows, longest first, each where it leaves least."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from tokenmill.compiled import inlined, kernel
from tokenmill.packing.window import CUT_DOCUMENTS, FORBID, SPLIT, TOO_LONG, TRUNCATE_START, TRUNCATED, emit
from tokenmill.types import Int32Array, Int64Array, Uint64Array

if TYPE_CHECKING:
    from tokenmill.packing.window import Fragments, Output, Written


# Sets of small whole numbers as bits, for kernels: the nearest member above or below in a few instructions.
#
# A set is an array: the number of its words, its words, and a second level with a bit for each word that is not 0,
# so that even a set of 10^5 numbers is searched in a few steps.


@intrinsic
def _trailing_zeros(typing_context: Any, value: Any) -> Any:  # noqa: ANN401, ARG001 - numba's own types
    """Return the index of the lowest set bit of a value that is not 0."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        return builder.cttz(arguments[0], _context.get_constant(types.boolean, True))

    return types.uint64(types.uint64), generate


@intrinsic
def _leading_zeros(typing_context: Any, value: Any) -> Any:  # noqa: ANN401, ARG001 - numba's own types
    """Return how many zeros stand before the highest set bit of a value that is not 0."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        return builder.ctlz(arguments[0], _context.get_constant(types.boolean, True))

    return types.uint64(types.uint64), generate


@kernel
def empty_set(size: int) -> Uint64Array:
    """Make an empty set for numbers below `size`."""
    words = (size + 63) >> 6
    members = np.zeros(1 + words + ((words + 63) >> 6), np.uint64)
    members[0] = words
    return members


@inlined
def insert(members: Uint64Array, number: int) -> None:
    """Add a number to a set."""
    word = number >> 6
    members[1 + word] |= np.uint64(1) << np.uint64(number & 63)
    members[1 + np.int64(members[0]) + (word >> 6)] |= np.uint64(1) << np.uint64(word & 63)


@inlined
def remove(members: Uint64Array, number: int) -> None:
    """Take a number out of a set."""
    word = number >> 6
    members[1 + word] &= ~(np.uint64(1) << np.uint64(number & 63))
    if not members[1 + word]:
        members[1 + np.int64(members[0]) + (word >> 6)] &= ~(np.uint64(1) << np.uint64(word & 63))


@kernel
def at_least(members: Uint64Array, number: int) -> int:
    """Return the smallest member that is not below `number`, or -1."""
    words = np.int64(members[0])
    word = number >> 6
    if word >= words:
        return -1
    shift = np.uint64(number & 63)
    value = (members[1 + word] >> shift) << shift
    if not value:
        word = _next(members[1 + words :], word + 1)
        if word < 0:
            return -1
        value = members[1 + word]
    return (word << 6) + int(np.int64(_trailing_zeros(value)))  # type: ignore[call-arg]


@kernel
def _next(words: Uint64Array, number: int) -> int:
    word = number >> 6
    if word >= words.size:
        return -1
    shift = np.uint64(number & 63)
    value = (words[word] >> shift) << shift
    while not value:
        word += 1
        if word >= words.size:
            return -1
        value = words[word]
    return (word << 6) + int(np.int64(_trailing_zeros(value)))  # type: ignore[call-arg]


@kernel
def at_most(members: Uint64Array, number: int) -> int:
    """Return the largest member that is not above `number`, or -1."""
    word = number >> 6
    shift = np.uint64(63 - (number & 63))
    value = (members[1 + word] << shift) >> shift
    if not value:
        word = _previous(members[1 + np.int64(members[0]) :], word - 1)
        if word < 0:
            return -1
        value = members[1 + word]
    return (word << 6) + 63 - int(np.int64(_leading_zeros(value)))  # type: ignore[call-arg]


@kernel
def _previous(words: Uint64Array, number: int) -> int:
    if number < 0:
        return -1
    word = number >> 6
    shift = np.uint64(63 - (number & 63))
    value = (words[word] << shift) >> shift
    while not value:
        word -= 1
        if word < 0:
            return -1
        value = words[word]
    return (word << 6) + 63 - int(np.int64(_leading_zeros(value)))  # type: ignore[call-arg]


@kernel
def pack_best_fit(
    fragments: Fragments,
    lengths: Int32Array,
    shape: tuple[int, int, bool],
    out: Output,
    counts: Int64Array,
) -> Written:
    """Pack a window; shape is (seq_len, split, one fragment a row). Row-filling pieces of long ones come first."""
    seq_len, split, alone = shape
    begins, sizes = fragments[1].copy(), fragments[2].copy()
    written = cut_long(fragments, lengths, (seq_len, split), (begins, sizes), out, counts)
    if counts[TOO_LONG]:
        return written
    bins = np.arange(sizes.size).astype(np.int32)
    opened: int = sizes.size
    if not alone:
        opened = fill_bins(sizes, seq_len + 1, bins)
    return _emit_bins(fragments[0], begins, sizes, (bins, opened), lengths, out, written)


@kernel
def cut_long(
    fragments: Fragments,
    lengths: Int32Array,
    shape: tuple[int, int],
    rests: tuple[Int32Array, Int32Array],
    out: Output,
    counts: Int64Array,
) -> Written:
    """Give each row-filling piece of a long fragment a row, and leave in `rests` what is still to be packed."""
    seq_len, split = shape
    documents, starts, sizes = fragments
    rows, pieces, cuts = out
    row = 0
    cut = 0
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


@kernel
def fill_bins(sizes: Int32Array, room: int, bins: Int32Array) -> int:
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


@kernel
def _longest_first(sizes: Int32Array, room: int) -> Int32Array:
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


@kernel
def _emit_bins(
    documents: Int32Array,
    begins: Int32Array,
    sizes: Int32Array,
    bins: tuple[Int32Array, int],
    lengths: Int32Array,
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
