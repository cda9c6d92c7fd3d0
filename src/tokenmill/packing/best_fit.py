"""The packer of `best_fit` and `padded`: whole documents in rows, longest first, each where it leaves least."""

from __future__ import annotations

import numpy as np

from tokenmill.compiled import inlined, inner, int64, kernel, leading_zeros, trailing_zeros
from tokenmill.packing.window import (
    CUT,
    CUT_DOCUMENTS,
    FORBID,
    SPLIT,
    TOO_LONG,
    TRUNCATE_START,
    TRUNCATED,
    Fragments,
    Output,
    Written,
    emit,
)
from tokenmill.types import Int32Array, Int64Array, Uint16Array, Uint32Array, Uint64Array


def pack_best_fit(
    fragments: Fragments, lengths: Int32Array, shape: tuple[int, int, bool], out: Output, counts: Int64Array
) -> Written:
    """Pack a window; shape is (seq_len, split, one fragment a row). Row-filling pieces of long ones come first."""
    seq_len, split, alone = shape
    number, room = fragments.shape[1], seq_len + 1
    is_long = fragments[2] > room
    counts[CUT_DOCUMENTS] = np.count_nonzero(is_long)
    if counts[CUT_DOCUMENTS] and split == FORBID:
        counts[TOO_LONG] = fragments[0, np.argmax(is_long)] + 1
        return 0, 0, 0
    if counts[CUT_DOCUMENTS] and split != SPLIT:
        fragments = _truncate(fragments, room, split, counts)
    rests = fragments.copy()
    full = _cut_long(rests, seq_len, out) if counts[CUT_DOCUMENTS] and split == SPLIT else 0
    bins, order, below = np.empty((3, number), np.int32)
    if alone:
        bins[:], opened = np.arange(number), number
    else:
        slots, free = np.zeros(room + 2, np.int32), empty_set(room + 1)
        opened = _fill_bins(rests[2], bins, order, below, slots, free)
    return _emit_bins(rests, bins, order, np.zeros(opened + 1, np.int32), lengths, out, full)


def _truncate(fragments: Fragments, room: int, split: int, counts: Int64Array) -> Fragments:
    """Cut fragments to what a row has room for."""
    documents, starts, sizes = fragments
    kept = np.minimum(sizes, room)
    counts[TRUNCATED] += (sizes - kept).sum()
    return np.stack([documents, starts + (sizes - kept) * (split == TRUNCATE_START), kept])


@kernel
def _cut_long(fragments: Fragments, seq_len: int, out: tuple[Uint32Array, Uint16Array, Uint32Array]) -> int:
    """Give each row-filling piece of a long fragment a row, and leave what is behind them; return their number."""
    rows, pieces, cuts = out
    row = int64(0)
    for i in range(fragments.shape[1]):
        while fragments[2, i] > seq_len + 1:
            rows[row] = row
            pieces[row] = fragments[0, i] | CUT
            cuts[row, 0] = row
            cuts[row, 1] = fragments[1, i]
            cuts[row, 2] = seq_len + 1
            fragments[1, i] += seq_len
            fragments[2, i] -= seq_len
            row += 1
    return row


@kernel
def _fill_bins(
    sizes: Int32Array, bins: Int32Array, order: Int32Array, below: Int32Array, slots: Int32Array, free: Uint64Array
) -> int:
    """Say for each size which bin it goes to, the longest first; return the number of bins.

    The bins with the same free room form a stack, and the free rooms that occur a set of bits, so a size costs a
    few instructions whatever the number of open bins. `slots` has two more than the room of a bin, all 0.
    """
    room = slots.size - 2
    _sort_longest_first(sizes, order, slots)
    stacks = slots
    for space in range(room + 1):
        stacks[space] = -1
    opened = int64(0)
    for k in range(order.size):
        i = order[k]
        size = int64(sizes[i])
        space = at_least(free, size)
        if space < 0:
            chosen = opened
            opened += 1
            space = room
        else:
            chosen = int64(stacks[space])
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


@inlined
def _sort_longest_first(sizes: Int32Array, order: Int32Array, slots: Int32Array) -> None:
    """Order sizes from the longest to the shortest, equal ones as they come."""
    room = slots.size - 2
    for i in range(sizes.size):
        slots[room + 1 - sizes[i]] += 1
    for slot in range(room + 1):
        slots[slot + 1] += slots[slot]
    for i in range(sizes.size):
        slot = room - sizes[i]
        order[slots[slot]] = i
        slots[slot] += 1


@kernel
def _emit_bins(
    fragments: Fragments,
    bins: Int32Array,
    members: Int32Array,
    ends: Int32Array,
    lengths: Int32Array,
    out: tuple[Uint32Array, Uint16Array, Uint32Array],
    row: int,
) -> Written:
    """Write each bin as a row, its documents in the order of the store, behind rows of one cut piece each.

    `ends` has one more than there are bins, all 0.
    """
    rows, pieces, cuts = out
    documents, starts, sizes = fragments[0], fragments[1], fragments[2]
    for i in range(bins.size):
        ends[bins[i] + 1] += 1
    for opened in range(1, ends.size):
        ends[opened] += ends[opened - 1]
    for i in range(bins.size):
        members[ends[bins[i]]] = i
        ends[bins[i]] += 1
    number = cut = row
    k = int64(0)
    for opened in range(ends.size - 1):
        rows[row] = number
        row += 1
        while k < ends[opened]:
            i = members[k]
            document, size = int64(documents[i]), int64(sizes[i])
            cut = emit(pieces, cuts, number, cut, document, int64(starts[i]), size, int64(lengths[document]))
            number += 1
            k += 1
    return row, number, cut


# Sets of small whole numbers as bits, for kernels: the nearest member above or below in a few instructions.
#
# A set is an array: the number of its words, its words, and a second level with a bit for each word that is not 0,
# so that even a set of 10^5 numbers is searched in a few steps.


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
    members[1 + int64(members[0]) + (word >> 6)] |= np.uint64(1) << np.uint64(word & 63)


@inlined
def remove(members: Uint64Array, number: int) -> None:
    """Take a number out of a set."""
    word = number >> 6
    members[1 + word] &= ~(np.uint64(1) << np.uint64(number & 63))
    if not members[1 + word]:
        members[1 + int64(members[0]) + (word >> 6)] &= ~(np.uint64(1) << np.uint64(word & 63))


@inner
def at_least(members: Uint64Array, number: int) -> int:
    """Return the smallest member that is not below `number`, or -1."""
    words = int64(members[0])
    word = number >> 6
    if word >= words:
        return -1
    shift = np.uint64(number & 63)
    value = (members[1 + word] >> shift) << shift
    if not value:
        # The next word that is not 0, by the second level.
        number = word + 1
        at = 1 + words + (number >> 6)
        if at >= members.size:
            return -1
        shift = np.uint64(number & 63)
        value = (members[at] >> shift) << shift
        while not value:
            at += 1
            if at >= members.size:
                return -1
            value = members[at]
        word = ((at - 1 - words) << 6) + trailing_zeros(value)
        value = members[1 + word]
    return (word << 6) + trailing_zeros(value)


@inner
def at_most(members: Uint64Array, number: int) -> int:
    """Return the largest member that is not above `number`, or -1."""
    words = int64(members[0])
    word = number >> 6
    shift = np.uint64(63 - (number & 63))
    value = (members[1 + word] << shift) >> shift
    if not value:
        if word == 0:
            return -1
        # The last word before it that is not 0, by the second level.
        number = word - 1
        at = 1 + words + (number >> 6)
        shift = np.uint64(63 - (number & 63))
        value = (members[at] << shift) >> shift
        while not value:
            at -= 1
            if at <= words:
                return -1
            value = members[at]
        word = ((at - 1 - words) << 6) + 63 - leading_zeros(value)
        value = members[1 + word]
    return (word << 6) + 63 - leading_zeros(value)
