"""How documents become rows: the choices of a user, and what a packed window is.

A window has at most 2^14 documents, so a piece of a row is named by 16 bits: 14 for the document, and
two flags. A piece that is not a whole document has its place in the `cuts` beside it.

A document of more than T + 1 tokens is cut into pieces of T + 1 that overlap by one token, which is the
last label of a piece and the first input of the next: every token but the first is a label once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from tokenmill.compiled import inner, int64, kernel
from tokenmill.errors import ConfigError, nearest
from tokenmill.types import CROPS, PACKINGS, SPLITS, Int32Array, Int64Array, Uint16Array, Uint32Array

MAX_DOCUMENTS = 1 << 14
ID_MASK = MAX_DOCUMENTS - 1
CUT = 1 << 15
"""The piece is a part of its document."""
BOS = 1 << 14
"""The document's first token, its BOS, stands before the piece."""
MAX_LENGTH = (1 << 31) - 1
"""Tokens of one document, so that places in it fit 32 bits."""

SPLIT, FORBID, TRUNCATE_START, TRUNCATE_END, DROP = range(5)

ROWS, TOKENS, TRAINED, FIRST, PADDING, TRUNCATED, CROPPED, CUT_DOCUMENTS, BOS_ADDED, TOO_LONG = range(10)
"""What a window counts. TOKENS = TRAINED + FIRST + TRUNCATED + CROPPED + EXCLUDED, where FIRST are the tokens
before which nothing stands. PADDING are input slots without a token; BOS_ADDED the BOS put before rests of
documents; TOO_LONG is one more than the first document that must not be cut, or 0. Where documents longer than a
row are dropped, TRUNCATED are their tokens, and CUT_DOCUMENTS their number."""
EXCLUDED = 10
"""Tokens of excluded documents that would have been packed."""
NUM_COUNTS = 11

TOO_LONG_REASON = "too_long"
"""Why tokens of documents that are dropped as a whole, as they are longer than a row, are in none."""

Fragments: TypeAlias = Int32Array
"""What is to be packed, in three lines: documents, first tokens, numbers of tokens. No token stands in two."""
Written: TypeAlias = tuple[int, int, int]
"""How many (rows, pieces, cuts) there are."""


class Output(NamedTuple):
    """Where a packer writes the rows of a window."""

    rows: Uint32Array
    """First piece of each row."""
    pieces: Uint16Array
    """Document and flags of each piece."""
    cuts: Uint32Array
    """(piece, first token, number of tokens) of each piece that is not a whole document."""


SPLIT_MODES = dict(zip((*SPLITS, "drop"), (SPLIT, FORBID, TRUNCATE_START, TRUNCATE_END, DROP), strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """How documents become rows."""

    name: str = "best_fit"
    split: str = "allow"
    """What happens to a document longer than a row: it is cut into rows (`allow`), refused (`forbid`), or loses
    its beginning (`truncate_start`) or end (`truncate_end`), or is left out (`drop`). `padded` never cuts into
    rows: there `allow` means `forbid`."""
    crop: str = "return"
    """What `bos_best_fit` does with the rest of a cropped document: `return` it to the pool, or `discard` it."""
    multiple: int = 1
    """Every segment is filled up with padding to so many columns, or a multiple of them."""

    def __post_init__(self) -> None:
        for field, value, known in (
            ("packing", self.name, PACKINGS),
            ("split", self.split, tuple(SPLIT_MODES)),
            ("crop", self.crop, CROPS),
        ):
            if value not in known:
                raise ConfigError(
                    f"{field}: must be one of {', '.join(known)}, got {value!r}; {nearest(value, known)}"
                )

    @property
    def split_mode(self) -> int:
        """The number of `split` for the kernels."""
        return FORBID if self.name == "padded" and self.split == "allow" else SPLIT_MODES[self.split]

    @property
    def drop_reason(self) -> str:
        """Why tokens of documents longer than a row are in none."""
        return TOO_LONG_REASON if self.split_mode == DROP else "truncated"

    @property
    def drops_ends(self) -> bool:
        """Whether what a document has behind the end of a row may be dropped."""
        if self.name == "bos_best_fit":
            return self.crop == "discard"
        return self.name != "concat" and self.split_mode == TRUNCATE_END

    def describe(self) -> dict[str, int | str | bool]:
        """Return what decides the rows, as JSON."""
        described: dict[str, int | str | bool] = {"packing": self.name}
        if self.name in ("best_fit", "padded"):
            described["split"] = next(name for name, mode in SPLIT_MODES.items() if mode == self.split_mode)
        if self.name == "bos_best_fit":
            described["crop"] = self.crop
        if self.multiple > 1:
            described["segment_multiple"] = self.multiple
        return described

    def count_tokens(self, fragments: Fragments) -> int:
        """Return how many tokens fragments bring to a window.

        A fragment from within a document begins with a token that was trained before, and is here for context;
        with BOS before it, it needs none.
        """
        context = 0 if self.name == "bos_best_fit" else np.count_nonzero(fragments[1])
        return int(fragments[2].sum() - context)


def whole_fragments(lengths: Int64Array) -> Fragments:
    """Make a fragment of every document that has tokens."""
    documents = np.arange(lengths.size) if lengths.all() else np.flatnonzero(lengths)
    fragments = np.zeros((3, documents.size), np.int32)
    fragments[0] = documents
    fragments[2] = lengths[lengths > 0] if documents.size < lengths.size else lengths
    return fragments


def make_output(sizes: Int32Array, seq_len: int) -> Output:
    """Make room that is enough for fragments of these sizes under any policy."""
    room = 1 + 2 * sizes.size + 2 * int(sizes.sum()) // max(1, seq_len - 1)
    return Output(np.empty(room, np.uint32), np.empty(room, np.uint16), np.empty((room, 3), np.uint32))


@inner
def emit(
    pieces: Uint16Array, cuts: Uint32Array, number: int, cut: int, document: int, start: int, size: int, length: int
) -> int:
    """Write a piece of a document, named with its flags, that has `length` tokens; return the number of cuts."""
    if start == 0 and size == length:
        pieces[number] = document
        return cut
    pieces[number] = document | CUT
    cuts[cut, 0] = number
    cuts[cut, 1] = start
    cuts[cut, 2] = size
    return cut + 1


def count_window(
    lengths: Int32Array, seq_len: int, later: int, out: Output, written: Written, counts: Int64Array
) -> None:
    """Add up what the rows of a window hold; `later` pieces go on behind a token that was trained before."""
    num_rows, num_pieces, num_cuts = written
    rows, pieces, cuts = out.rows[:num_rows], out.pieces[:num_pieces], out.cuts[:num_cuts]
    used, padding = _measure_rows(rows, pieces, cuts, lengths, seq_len)
    added = np.count_nonzero(pieces & BOS)
    counts[ROWS] += num_rows
    counts[TRAINED] += used - num_pieces
    counts[FIRST] += num_pieces - (added or later)
    counts[PADDING] += padding
    counts[BOS_ADDED] += added


@kernel
def _measure_rows(
    rows: Uint32Array, pieces: Uint16Array, cuts: Uint32Array, lengths: Int32Array, seq_len: int
) -> tuple[int, int]:
    """Return how many tokens rows hold, with the BOS that were added, and how many input slots are left."""
    cut = number = total = padding = int64(0)
    for row in range(rows.size):
        end = int64(rows[row + 1]) if row + 1 < rows.size else pieces.size
        used = int64(0)
        while number < end:
            piece = pieces[number]
            number += 1
            if piece & CUT:
                used += cuts[cut, 2]
                cut += 1
            else:
                used += lengths[piece & ID_MASK]
            if piece & BOS:
                used += 1
        total += used
        if used < seq_len:
            padding += seq_len - used
    return total, padding
