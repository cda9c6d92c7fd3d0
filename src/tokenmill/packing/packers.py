"""Packing policies: the choices of a user, the packed window, and the packer of each policy.

A window has at most 2^14 documents, so 16 bits name a piece of a row: 14 for the document, and two flags. A piece
that is not a whole document has its place in `cuts`.

A document of more than T + 1 tokens is cut into pieces of T + 1 that overlap by one token. That token is the last
label of a piece and the first input of the next, so every token but the first is a label once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from tokenmill.compiled import inlined, inner, int64, kernel, leading_zeros, trailing_zeros
from tokenmill.errors import ConfigError, nearest
from tokenmill.types import CROPS, PACKINGS, Int32Array, Int64Array, Uint16Array, Uint32Array, Uint64Array

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
"""Number of (rows, pieces, cuts)."""


class Output(NamedTuple):
    """Arrays that a packer fills with the rows of a window."""

    rows: Uint32Array
    """First piece of each row."""
    pieces: Uint16Array
    """Document and flags of each piece."""
    cuts: Uint32Array
    """(piece, first token, number of tokens) of each piece that is not a whole document."""


SPLIT_MODES = {
    "allow": SPLIT,
    "forbid": FORBID,
    "truncate_start": TRUNCATE_START,
    "truncate_end": TRUNCATE_END,
    "drop": DROP,
}
"""Words of plans and states; a config says `split` for `allow` and `stop` for `forbid`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Packing policy: how documents become rows."""

    name: str = "best_fit"
    split: str = "allow"
    """What happens to a document longer than a row: it is cut into rows (`allow`), refused (`forbid`), or loses
    its beginning (`truncate_start`) or end (`truncate_end`), or is left out (`drop`). `padded` never cuts into
    rows: there `allow` means `forbid`."""
    crop: str = "return"
    """Fate of the rest of a cropped document under `bos_best_fit`: `return` to the pool, or `discard`."""
    multiple: int = 1
    """Every segment is filled up with padding to a multiple of this number of columns."""

    def __post_init__(self) -> None:
        for field, value, known in (
            ("packing", self.name, PACKINGS),
            ("split", self.split, tuple(SPLIT_MODES)),
            ("crop", self.crop, CROPS),
        ):
            if value not in known:
                raise ConfigError(
                    f"{field}: expected one of {', '.join(known)}, got {value!r}; {nearest(value, known)}"
                )

    @property
    def split_mode(self) -> int:
        """The number of `split` for the kernels."""
        return FORBID if self.name == "padded" and self.split == "allow" else SPLIT_MODES[self.split]

    @property
    def drop_reason(self) -> str:
        """Why tokens of documents longer than a row are in none."""
        return TOO_LONG_REASON if self.split_mode == DROP else "truncated"

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
    """Add up what the rows of a window hold; `later` pieces go on after a token that was trained before."""
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


# The packers


def pack_fragments(
    policy: Policy, fragments: Fragments, lengths: Int32Array, seq_len: int, out: Output, counts: Int64Array
) -> Written:
    """Pack the fragments of one window into `out`; only the kernels of this policy are compiled for it."""
    if policy.name == "bos_best_fit":
        written = _pack_bos_best_fit(fragments, lengths, seq_len, policy.crop == "discard", out, counts)
    elif policy.name == "concat":
        written = _pack_stream(fragments, lengths, seq_len, out)
    else:
        shape = (seq_len, policy.split_mode, policy.name == "padded", policy.multiple)
        written = _pack_best_fit(fragments, lengths, shape, out, counts)
    counts[TOKENS] += policy.count_tokens(fragments)
    # A later piece of a document begins with a token that an earlier one trained, unless its start was cut off.
    later = int(np.count_nonzero(out.cuts[: written[2], 1]))
    if policy.split_mode == TRUNCATE_START and policy.name in ("best_fit", "padded"):
        later = int(np.count_nonzero((fragments[1] > 0) & (fragments[2] <= seq_len + 1)))
    count_window(lengths, seq_len, later, out, written, counts)
    return written


@kernel
def _pack_stream(
    fragments: Fragments, lengths: Int32Array, seq_len: int, out: tuple[Uint32Array, Uint16Array, Uint32Array]
) -> Written:
    """Cut fragments end to end into rows of seq_len inputs; the last row of the window is filled with padding."""
    rows, pieces, cuts = out
    row = number = cut = 0
    column = seq_len
    for i in range(fragments.shape[1]):
        document, start, size = int64(fragments[0, i]), int64(fragments[1, i]), int64(fragments[2, i])
        while True:
            if column >= seq_len:
                rows[row] = number
                row += 1
                column = 0
            # A row takes the token after its last input as a label; it is the first input of the next row.
            taken = min(size, seq_len + 1 - column)
            cut = emit(pieces, cuts, number, cut, document, start, taken, int64(lengths[document]))
            number += 1
            column += taken
            if taken == size:
                break
            start += taken - 1
            size -= taken - 1
    return row, number, cut


# `best_fit` and `padded`: whole documents in rows, longest first, each where it leaves least.


def _pack_best_fit(
    fragments: Fragments, lengths: Int32Array, shape: tuple[int, int, bool, int], out: Output, counts: Int64Array
) -> Written:
    """Pack a window; shape is (seq_len, split, one fragment a row, multiple that each is filled up to).

    Row-filling pieces of long ones come first.
    """
    seq_len, split, alone, multiple = shape
    number, room = fragments.shape[1], seq_len + 1
    is_long = fragments[2] > room
    counts[CUT_DOCUMENTS] = np.count_nonzero(is_long)
    if counts[CUT_DOCUMENTS] and split == FORBID:
        counts[TOO_LONG] = fragments[0, np.argmax(is_long)] + 1
        return 0, 0, 0
    if counts[CUT_DOCUMENTS] and split == DROP:
        # The token before a later piece was trained elsewhere, and is not lost here.
        counts[TRUNCATED] += fragments[2, is_long].sum() - np.count_nonzero(fragments[1, is_long])
        fragments = np.ascontiguousarray(fragments[:, ~is_long])
        number = fragments.shape[1]
    elif counts[CUT_DOCUMENTS] and split != SPLIT:
        fragments = _truncate(fragments, room, split, counts)
    rests = fragments.copy()
    full = _cut_long(rests, seq_len, out) if counts[CUT_DOCUMENTS] and split == SPLIT else 0
    bins, order, below = np.empty((3, number), np.int32)
    if alone:
        bins[:], opened = np.arange(number), number
    else:
        sizes = rests[2]
        if multiple > 1:
            # A row that is one piece has its last label after the last column; others end with their last input.
            room, sizes = seq_len, np.minimum(-(-sizes // multiple) * multiple, seq_len)
        slots, free = np.zeros(room + 2, np.int32), empty_set(room + 1)
        opened = _fill_bins(sizes, bins, order, below, slots, free)
    return _emit_bins(rests, bins, order, np.zeros(opened + 1, np.int32), lengths, out, full)


def _truncate(fragments: Fragments, room: int, split: int, counts: Int64Array) -> Fragments:
    """Cut fragments to what a row has room for."""
    documents, starts, sizes = fragments
    kept = np.minimum(sizes, room)
    # Where the start goes, the token before a later piece goes with it; that was trained, and is not owed.
    context = np.count_nonzero((starts > 0) & (sizes > room)) if split == TRUNCATE_START else 0
    counts[TRUNCATED] += (sizes - kept).sum() - context
    return np.stack([documents, starts + (sizes - kept) * (split == TRUNCATE_START), kept])


@kernel
def _cut_long(fragments: Fragments, seq_len: int, out: tuple[Uint32Array, Uint16Array, Uint32Array]) -> int:
    """Give each row-filling piece of a long fragment a row, and leave what is after them; return their number."""
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
    """Write each bin as a row, its documents in the order of the store, after rows of one cut piece each.

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


# `bos_best_fit`: every row starts with BOS and is filled to the last token.
#
# Into each row goes the longest fragment that still fits; when none does, the shortest is cropped to fill the row.
# Its rest goes back to the others with BOS before it, or is discarded.


def _pack_bos_best_fit(
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
    """Queue a fragment that needs `size` slots; return False if it is longer than a row."""
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
