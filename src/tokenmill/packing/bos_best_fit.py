"""The kernel of `bos_best_fit`: every row starts with BOS and is filled to the last token.

Into each row goes the longest fragment that still fits; when none does, the shortest is cropped to fill
the row. Its rest goes back to the others with BOS before it, or is discarded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenmill.compiled import kernel
from tokenmill.packing.best_fit import at_least, at_most, empty_set, insert, remove
from tokenmill.packing.window import BOS, CROPPED, CUT, CUT_DOCUMENTS, ID_MASK, emit
from tokenmill.types import Int32Array, Int64Array, Uint16Array, Uint32Array, Uint64Array

if TYPE_CHECKING:
    from tokenmill.packing.window import Fragments, Output, Written


@kernel
def pack_bos_best_fit(
    fragments: Fragments,
    lengths: Int32Array,
    shape: tuple[int, bool],
    out: Output,
    counts: Int64Array,
) -> Written:
    """Pack a window; shape is (seq_len, discard). The last row is padded, or discarded with what it holds."""
    seq_len, discard = shape
    documents, starts, sizes = fragments[0], fragments[1].copy(), fragments[2].copy()
    room = seq_len + 1
    stacks = np.full(room + 1, -1, np.int32)
    below = np.empty(sizes.size, np.int32)
    waiting = empty_set(room + 1)
    for i in range(sizes.size - 1, -1, -1):
        _put(i, sizes[i] + (starts[i] > 0), stacks, below, waiting)
    # The shortest of the long ones only gets shorter when it is cropped, so they are used up one after another.
    longs = np.argsort(sizes, kind="mergesort")
    long = 0
    while long < longs.size and sizes[longs[long]] + (starts[longs[long]] > 0) <= room:
        long += 1
    rows, pieces, cuts = out
    row = 0
    number = 0
    cut = 0
    while True:
        space = room
        before = (row, number, cut)
        rows[row] = number
        while space > 0:
            i = _choose(space, stacks, below, waiting)
            if i < 0:
                if long == longs.size:
                    break
                i = longs[long]
                long += 1
            added = starts[i] > 0
            taken = min(sizes[i], space - added)
            named = documents[i] | (BOS if added else 0)
            cut = emit(pieces, cuts, number, cut, (named, starts[i], taken, lengths[documents[i]]))
            number += 1
            space -= taken + added
            counts[CUT_DOCUMENTS] += not added and taken < sizes[i]
            starts[i] += taken
            sizes[i] -= taken
            if sizes[i] and discard:
                counts[CROPPED] += sizes[i]
            elif sizes[i] and not _put(i, sizes[i] + 1, stacks, below, waiting):
                long -= 1
        if space == room:
            return before
        if space and discard:
            counts[CROPPED] += _tokens(lengths, pieces, cuts, (before[1], number, before[2]))
            return before
        row += 1


@kernel
def _put(
    i: int,
    size: int,
    stacks: Int32Array,
    below: Int32Array,
    waiting: Uint64Array,
) -> bool:
    """Let a fragment that needs `size` slots wait for its turn; False if it is longer than a row."""
    if size >= stacks.size:
        return False
    if stacks[size] < 0:
        insert(waiting, size)
    below[i] = stacks[size]
    stacks[size] = i
    return True


@kernel
def _choose(space: int, stacks: Int32Array, below: Int32Array, waiting: Uint64Array) -> int:
    """Take the longest waiting fragment that fits, else the shortest, else none (-1)."""
    size = at_most(waiting, space)
    if size < 0:
        size = at_least(waiting, space + 1)
        if size < 0:
            return -1
    i: int = stacks[size]
    stacks[size] = below[i]
    if below[i] < 0:
        remove(waiting, size)
    return i


@kernel
def _tokens(
    lengths: Int32Array,
    pieces: Uint16Array,
    cuts: Uint32Array,
    run: tuple[int, int, int],
) -> int:
    """Return how many tokens a run of pieces (first, end, first cut) holds."""
    first, end, cut = run
    total = 0
    for number in range(first, end):
        if pieces[number] & CUT:
            total += int(np.int64(cuts[3 * cut + 2]))
            cut += 1
        else:
            total += lengths[pieces[number] & ID_MASK]
    return total
