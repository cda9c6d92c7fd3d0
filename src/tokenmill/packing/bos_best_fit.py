"""The packer of `bos_best_fit`: every row starts with BOS and is filled to the last token.

Into each row goes the longest fragment that still fits; when none does, the shortest is cropped to fill
the row. Its rest goes back to the others with BOS before it, or is discarded.
"""

from __future__ import annotations

import numpy as np

from tokenmill.compiled import inner, int64, kernel
from tokenmill.packing.best_fit import at_least, at_most, empty_set, insert, remove
from tokenmill.packing.window import BOS, CROPPED, CUT_DOCUMENTS, Fragments, Output, Written, emit
from tokenmill.types import Int32Array, Int64Array, Uint16Array, Uint32Array, Uint64Array


def pack_bos_best_fit(
    fragments: Fragments, lengths: Int32Array, seq_len: int, discard: bool, out: Output, counts: Int64Array
) -> Written:
    """Pack a window; the last row is padded, or discarded with what it holds."""
    room = seq_len + 1
    # The shortest of the long ones only gets shorter when it is cropped, so they are used up one after another.
    long = np.flatnonzero(fragments[2] + (fragments[1] > 0) > room).astype(np.int32)
    long = long[np.argsort(fragments[2, long], kind="stable")]
    stacks, below = np.full(room + 1, -1, np.int32), np.empty(fragments.shape[1], np.int32)
    waiting = (stacks, below, empty_set(room + 1))
    return _fill_rows(fragments.copy(), lengths, long, waiting, discard, out, counts)


@kernel
def _fill_rows(
    fragments: Fragments,
    lengths: Int32Array,
    long: Int32Array,
    waiting: tuple[Int32Array, Int32Array, Uint64Array],
    discard: bool,
    out: tuple[Uint32Array, Uint16Array, Uint32Array],
    counts: Int64Array,
) -> Written:
    """Write row after row; return the number of rows, pieces and cuts.

    `waiting` are the fragments that fit a row: a stack of them for each size, the one below each, and the sizes
    that occur, as a set. `fragments` is changed.
    """
    documents, starts, sizes = fragments[0], fragments[1], fragments[2]
    stacks, below, present = waiting
    rows, pieces, cuts = out
    room = stacks.size - 1
    for i in range(sizes.size - 1, -1, -1):
        _put(i, sizes[i] + (starts[i] > 0), stacks, below, present)
    next_long = row = number = cut = 0
    while True:
        space = room
        before = (row, number, cut)
        rows[row] = number
        held = 0
        while space > 0:
            i = _choose(space, stacks, below, present)
            if i < 0:
                if next_long == long.size:
                    break
                i = int64(long[next_long])
                next_long += 1
            document, start = int64(documents[i]), int64(starts[i])
            added = int64(start > 0)
            taken = min(int64(sizes[i]), space - added)
            cut = emit(pieces, cuts, number, cut, document | BOS * added, start, taken, int64(lengths[document]))
            number += 1
            held += taken
            space -= taken + added
            counts[CUT_DOCUMENTS] += not added and taken < sizes[i]
            starts[i] += taken
            sizes[i] -= taken
            if sizes[i] and discard:
                counts[CROPPED] += sizes[i]
            elif sizes[i] and not _put(i, sizes[i] + 1, stacks, below, present):
                next_long -= 1
        if space == room:
            return before
        if space and discard:
            counts[CROPPED] += held
            return before
        row += 1


@inner
def _put(i: int, size: int, stacks: Int32Array, below: Int32Array, present: Uint64Array) -> bool:
    """Let a fragment that needs `size` slots wait for its turn; False if it is longer than a row."""
    if size >= stacks.size:
        return False
    if stacks[size] < 0:
        insert(present, size)
    below[i] = stacks[size]
    stacks[size] = i
    return True


@inner
def _choose(space: int, stacks: Int32Array, below: Int32Array, present: Uint64Array) -> int:
    """Take the longest waiting fragment that fits, else the shortest, else none (-1)."""
    size = at_most(present, space)
    if size < 0:
        size = at_least(present, space + 1)
        if size < 0:
            return -1
    i = int64(stacks[size])
    stacks[size] = below[i]
    if below[i] < 0:
        remove(present, size)
    return i
