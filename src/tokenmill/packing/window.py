"""What a packed window is: rows of pieces of its documents, and what they count to.

A window has at most 2^14 documents, so a piece of a row is named by 16 bits: 14 for the document, and
two flags. A piece that is not a whole document has its place in the `cuts` beside it.

A document of more than T + 1 tokens is cut into pieces of T + 1 that overlap by one token, which is the
last label of a piece and the first input of the next: every token but the first is a label once.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from tokenmill.compiled import kernel
from tokenmill.types import Int32Array, Int64Array, Uint16Array, Uint32Array, Uint64Array

Fragments: TypeAlias = tuple[Int32Array, Int32Array, Int32Array]
"""What is to be packed: (document, first token, number of tokens), and no document twice for the same token."""
Output: TypeAlias = tuple[Uint32Array, Uint16Array, Uint32Array]
"""Room for (first piece of each row, pieces, cuts of (piece, first token, number of tokens))."""
Piece: TypeAlias = tuple[int, int, int, int]
Written: TypeAlias = tuple[int, int, int]
"""How many (rows, pieces, cuts) there are."""

MAX_DOCUMENTS = 1 << 14
ID_MASK = MAX_DOCUMENTS - 1
CUT = 1 << 15
"""The piece is a part of its document."""
BOS = 1 << 14
"""The document's first token, its BOS, stands before the piece."""
MAX_LENGTH = (1 << 31) - 1
"""Tokens of one document, so that places in it fit 32 bits."""

SPLIT, FORBID, TRUNCATE_START, TRUNCATE_END = range(4)

ROWS, TOKENS, TRAINED, FIRST, PADDING, TRUNCATED, CROPPED, CUT_DOCUMENTS, BOS_ADDED, TOO_LONG = range(10)
"""What a window counts. TOKENS = TRAINED + FIRST + TRUNCATED + CROPPED + EXCLUDED, where FIRST are the tokens
before which nothing stands. PADDING are input slots without a token; BOS_ADDED the BOS put before rests of
documents; TOO_LONG is one more than the first document that must not be cut, or 0."""
EXCLUDED = 10
"""Tokens of excluded documents that would have been packed."""
NUM_COUNTS = 11


@kernel
def document_fragments(offsets: Uint64Array, fragments: Fragments, lengths: Int32Array) -> int:
    """Make a fragment of every document that has tokens, and note all lengths; return the number of fragments."""
    documents, starts, sizes = fragments
    filled = 0
    for document in range(offsets.size - 1):
        length = int(np.int64(offsets[document + 1] - offsets[document]))
        if length > MAX_LENGTH:
            return -1 - document
        lengths[document] = length
        documents[filled] = document
        starts[filled] = 0
        sizes[filled] = length
        filled += length > 0
    return filled


@kernel
def needed_room(sizes: Int32Array, seq_len: int) -> int:
    """Return a number of rows, pieces and cuts that is enough for a window under any policy."""
    pieces = 1
    for size in sizes:
        pieces += 2
        if size > seq_len:
            pieces += 2 * (size // max(1, seq_len - 1))
    return pieces


@kernel
def emit(pieces: Uint16Array, cuts: Uint32Array, number: int, cut: int, piece: Piece) -> int:
    """Write a piece (document and flags, first token, number of tokens, document's tokens); return the cuts."""
    document, start, size, length = piece
    if start == 0 and size == length:
        pieces[number] = document
        return cut
    pieces[number] = document | CUT
    cuts[3 * cut] = number
    cuts[3 * cut + 1] = start
    cuts[3 * cut + 2] = size
    return cut + 1


@kernel
def count_window(
    shape: tuple[int, int],
    lengths: Int32Array,
    out: Output,
    written: Written,
    counts: Int64Array,
) -> None:
    """Add up what the rows of a window hold; shape is (seq_len, split)."""
    seq_len, split = shape
    rows, pieces, cuts = out
    cut = 0
    trained = 0
    first_tokens = 0
    padding = 0
    for row in range(written[0]):
        used = 0
        end = rows[row + 1] if row + 1 < written[0] else written[1]
        for number in range(rows[row], end):
            piece = pieces[number]
            size = int(np.int64(lengths[piece & ID_MASK]))
            first = True
            if piece & CUT:
                size = int(np.int64(cuts[3 * cut + 2]))
                # A later piece of a split document begins with the token that the piece before it ended with.
                first = cuts[3 * cut + 1] == 0 or split == TRUNCATE_START
                cut += 1
            used += size
            if piece & BOS:
                counts[BOS_ADDED] += 1
                trained += size
                used += 1
            else:
                trained += size - 1
                first_tokens += first
        padding += max(0, seq_len - used)
    counts[ROWS] += written[0]
    counts[TRAINED] += trained
    counts[FIRST] += first_tokens
    counts[PADDING] += padding
