"""The row index of a store: which documents are packed, and every window of them, in memory or in a mapped file.

Windows are packed on their own, in threads, in any order; the bytes do not depend on that. A window's
section holds the first piece of each row (4 bytes), the pieces (2 bytes) and the cuts (12 bytes).
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import xxhash

from tokenmill.compiled import inner, int64, kernel
from tokenmill.errors import ConfigError, StoreCorruptError
from tokenmill.packing.holes import QUARANTINED, Documents, excluded_within
from tokenmill.packing.packers import (
    BOS,
    BOS_ADDED,
    CROPPED,
    CUT,
    EXCLUDED,
    FIRST,
    ID_MASK,
    MAX_DOCUMENTS,
    MAX_LENGTH,
    NUM_COUNTS,
    PADDING,
    ROWS,
    TOKENS,
    TOO_LONG,
    TRAINED,
    TRUNCATED,
    Fragments,
    Policy,
    make_output,
    pack_fragments,
    whole_fragments,
)
from tokenmill.store.maps import MappedFile
from tokenmill.types import (
    BoolArray,
    Fates,
    Int32Array,
    Int64Array,
    Spans,
    Uint8Array,
    Uint16Array,
    Uint32Array,
    counted_from,
    distinct,
)

T = TypeVar("T")
logger = logging.getLogger("tokenmill")
ROW, BYTE, PIECES, CUTS, CHECK = range(5)
"""Columns of the table: first row and first byte of a window, how many pieces and cuts it has, its checksum."""

Locate = Callable[[Int64Array], tuple[Int64Array, Int64Array, Int64Array]]
"""Documents -> (shard, first token within the shard, number of tokens) of each."""
WindowFragments = Callable[[int], "tuple[Fragments, Int32Array]"]
"""Window -> what is to be packed of it, and the lengths of its documents."""


def whole_documents(store: Documents) -> WindowFragments:
    """Return what an epoch packs: every document of a window, whole."""

    def of(window: int) -> tuple[Fragments, Int32Array]:
        begin = window * MAX_DOCUMENTS
        lengths = np.diff(store.document_offsets(begin, min(begin + MAX_DOCUMENTS, store.num_documents)))
        if int(lengths.max()) > MAX_LENGTH:
            raise ConfigError(
                f"{store.path}: a document must have at most {MAX_LENGTH} tokens to be packed, "
                f"got more in document {begin + int(np.argmax(lengths > MAX_LENGTH))}; use packing = concat"
            )
        return whole_fragments(lengths), lengths.astype(np.int32)

    return of


def chosen_documents(store: Documents, chosen: Int64Array) -> WindowFragments:
    """Return what is packed of some documents, in ascending order: those of a window, whole."""
    whole = whole_documents(store)

    def of(window: int) -> tuple[Fragments, Int32Array]:
        begin = window * MAX_DOCUMENTS
        own = excluded_within(chosen, begin, begin + MAX_DOCUMENTS)
        if not own.size:  # most windows of a large store: not even their offsets are read
            return np.empty((3, 0), np.int32), np.empty(0, np.int32)
        fragments, lengths = whole(window)
        return fragments[:, np.isin(fragments[0], own)], lengths

    return of


def num_windows(store: Documents) -> int:
    """Return how many windows the documents make."""
    return -(-store.num_documents // MAX_DOCUMENTS)


# The index, and how it is made.


@dataclass(kw_only=True, eq=False)
class WindowIndex:
    """All windows of a store, packed."""

    table: Int64Array
    """A line for each window, and one for the end."""
    data: Uint8Array
    counts: Int64Array
    """The sums over all windows of what a window counts."""

    checked: BoolArray | None = None
    """Windows of a file whose checksum was verified; None for an index made by this process."""
    file: MappedFile | None = None
    build_again: Callable[[], WindowIndex] | None = None
    """Makes the index of a file whose bytes are not what its checksums say."""

    @property
    def num_rows(self) -> int:
        """Number of rows of all windows."""
        return int(self.table[-1, ROW])

    def rows_of_window(self, window: int) -> Int64Array:
        """Return the rows that hold the documents of a window."""
        return np.arange(int(self.table[window, ROW]), int(self.table[window + 1, ROW]))

    def rows_of(self, documents: Int64Array, where: str) -> tuple[Int64Array, Int64Array]:
        """Return the rows that hold tokens of documents, and the index in `documents` that each row is for."""
        order = np.argsort(documents, kind="stable")
        windows = documents[order] // MAX_DOCUMENTS
        self._prove(windows, where)
        rows, owners = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for window in distinct(windows).tolist():
            inside = order[slice(*np.searchsorted(windows, [window, window + 1]))]
            starts, pieces = self._pieces(window)
            # Pieces in the order of documents; those of one document ascend.
            by_document = np.argsort(pieces, kind="stable")
            local = documents[inside] - window * MAX_DOCUMENTS
            first, last = (np.searchsorted(pieces[by_document], local, side=side) for side in ("left", "right"))
            holding = np.searchsorted(starts, by_document[counted_from(first, last - first)], side="right") - 1
            owner = np.repeat(inside, last - first)
            # A row may hold several pieces of a document.
            new = np.ones(owner.size, np.bool_)
            new[1:] = (owner[1:] != owner[:-1]) | (holding[1:] != holding[:-1])
            rows.append(int(self.table[window, ROW]) + holding[new])
            owners.append(owner[new])
        self._check_file()
        owner = np.concatenate(owners)
        by_owner = np.argsort(owner, kind="stable")
        return np.concatenate(rows)[by_owner], owner[by_owner]

    def _pieces(self, window: int) -> tuple[Uint32Array, Uint16Array]:
        """Return the first piece of each row of a window, and the document of each piece, within the window."""
        begin, num_pieces = (int(self.table[window, column]) for column in (BYTE, PIECES))
        middle = begin + 4 * int(self.table[window + 1, ROW] - self.table[window, ROW])
        pieces = self.data[middle : middle + 2 * num_pieces].view(np.uint16)
        return self.data[begin:middle].view(np.uint32), pieces & np.uint16(ID_MASK)

    def rows_of_runs(
        self, runs: tuple[Int64Array, Int64Array, Int64Array, Int64Array], where: str
    ) -> tuple[Int64Array, Int64Array]:
        """Return the rows that hold tokens of runs, and the run of each.

        A run is given by its first and last document (inclusive), where it begins in the one and ends in the other.
        """
        first, last, begin, end = runs
        count = np.maximum(0, last // MAX_DOCUMENTS - first // MAX_DOCUMENTS + 1) * (last >= first)
        windows, owner = counted_from(first // MAX_DOCUMENTS, count), np.repeat(np.arange(first.size), count)
        low, high = (part[owner] - windows * MAX_DOCUMENTS for part in (first, last))
        bounds = (low, high, begin[owner], end[owner])
        self._prove(windows, where)
        words, halves = self.data.view(np.uint32), self.data.view(np.uint16)
        capacity = 4 * windows.size + 64
        while True:
            out = np.empty((2, capacity), np.int64)
            needed = _find_holders(windows, bounds, self.table, words, halves, out)
            if needed < 0:
                raise _corrupt(where, f"a broken window {-1 - needed}")
            if needed <= capacity:
                return out[0, :needed], owner[out[1, :needed]]
            capacity = int(needed)

    def spans(self, rows: Int64Array, num_documents: int, locate: Locate, where: str) -> Spans:
        """Return what the given rows are made of, in the order given; `where` names the documents in errors."""
        windows = np.searchsorted(self.table[:, ROW], rows, side="right") - 1
        self._prove(windows, where)
        first, count = np.empty((2, rows.size), np.int64)
        words, halves = self.data.view(np.uint32), self.data.view(np.uint16)
        capacity = 4 * rows.size + 64
        while True:
            pieces = np.empty((3, capacity), np.int64)
            needed = _find_pieces(rows, windows, self.table, words, halves, first, count, pieces)
            self._check_file()
            if needed < 0:
                raise _corrupt(where, f"a broken window {-1 - needed}")
            if needed <= capacity:
                break
            capacity = needed
        document, start, length = pieces[0, :needed], pieces[1, :needed], pieces[2, :needed]
        if needed and int(document.max()) >= num_documents:
            raise _corrupt(where, "documents past the last one")
        shard, token, whole = locate(document)
        length = np.where(length < 0, whole, length)
        if (start + length > whole).any():
            raise _corrupt(where, "pieces past the ends of documents")
        token += start
        return Spans(
            first=first, count=count, document=document, start=start, length=length, shard=shard, token=token
        )

    def fates(self, policy: Policy, trained: int | None = None) -> Fates:
        """Return what becomes of every token in an epoch; `trained` is what a loss mask leaves of the labels."""
        counts = [int(number) for number in self.counts]
        dropped = {policy.drop_reason: counts[TRUNCATED], "cropped": counts[CROPPED], QUARANTINED: counts[EXCLUDED]}
        trained = counts[TRAINED] if trained is None else trained
        return Fates(
            rows=counts[ROWS],
            tokens=counts[TOKENS],
            trained=trained,
            masked=counts[FIRST] + counts[TRAINED] - trained,
            dropped={reason: number for reason, number in dropped.items() if number},
            padding=counts[PADDING],
            added=counts[BOS_ADDED],
        )

    def _prove(self, windows: Int64Array, where: str) -> None:
        """Build an index again that has a window of other bytes than its checksum says; each is checked once."""
        if self.checked is None or self.file is None:
            return
        for window in np.unique(windows[~self.checked[windows]]).tolist():
            section = self.data[self.table[window, BYTE] : self.table[window + 1, BYTE]]
            check = int.from_bytes(xxhash.xxh3_64_digest(section.data), "little", signed=True)
            if check != self.table[window, CHECK]:
                self._mend(f"other bytes than its checksum says in window {window}", where)
                self._prove(windows, where)
                return
            self.checked[window] = True

    def _check_file(self) -> None:
        """Raise if the index file was truncated meanwhile."""
        if self.file is not None:
            self.file.check()

    def _mend(self, problem: str, where: str) -> None:
        if self.build_again is None:
            raise _corrupt(where, problem)
        logger.warning("%s: the index of its rows has %s; it is built again", where, problem)
        fresh, self.build_again = self.build_again(), None
        if not np.array_equal(fresh.table, self.table):
            raise StoreCorruptError(
                f"{where}: documents must be those that the index of its rows was made of, got others; "
                "run `tokenmill verify`, then copy or prepare the store again"
            )
        self.data, self.checked, self.file = fresh.data, fresh.checked, fresh.file


def _corrupt(where: str, problem: str) -> StoreCorruptError:
    return StoreCorruptError(
        f"{where}: the index of its rows must fit its documents, got {problem}; "
        "delete its folder .rows, it will be built again"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedWindow:
    """One window, ready to be written."""

    rows: int
    pieces: int
    cuts: int
    data: bytes
    counts: Int64Array


def pack_one(
    window: int,
    fragments_of: WindowFragments,
    seq_len: int,
    policy: Policy,
    where: str,
    excluded: Int64Array,
) -> PackedWindow:
    """Pack one window, without the documents that are excluded."""
    fragments, lengths = fragments_of(window)
    counts = np.zeros(NUM_COUNTS, np.int64)
    if excluded.size:
        begin = window * MAX_DOCUMENTS
        is_excluded = np.isin(fragments[0], excluded_within(excluded, begin, begin + lengths.size))
        counts[EXCLUDED] = counts[TOKENS] = policy.count_tokens(fragments[:, is_excluded])
        fragments = fragments[:, ~is_excluded]
    out = make_output(fragments[2], seq_len)
    rows, pieces, cuts = pack_fragments(policy, fragments, lengths, seq_len, out, counts)
    if counts[TOO_LONG]:
        document = window * MAX_DOCUMENTS + int(counts[TOO_LONG]) - 1
        raise ConfigError(
            f"{where}: with packing = {policy.name!r} and on_long = 'stop' a document must have at most "
            f"{seq_len + 1} tokens, got {int(lengths[counts[TOO_LONG] - 1])} in document {document}; "
            'raise seq_len, or set on_long = "drop" or "truncate_end"'
        )
    # Sections are padded to 4 bytes, so that the numbers of the next one are aligned.
    data = b"".join(
        (
            out.rows[:rows].tobytes(),
            out.pieces[:pieces].tobytes(),
            b"\0\0" * (pieces % 2),
            out.cuts[:cuts].tobytes(),
        )
    )
    return PackedWindow(rows=int(rows), pieces=int(pieces), cuts=int(cuts), data=data, counts=counts)


def compute_in_order(count: int, compute: Callable[[int], T]) -> Iterator[T]:
    """Compute things 0 to `count` in threads and yield them in order; few wait at a time, so memory is bounded."""
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="tokenmill-pack") as executor:
        for number in range(count):
            waiting.append(executor.submit(compute, number))
            if len(waiting) > 4 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def build_index(packed: Iterator[PackedWindow], write: Callable[[bytes], object]) -> tuple[Int64Array, Int64Array]:
    """Write the sections one after another; return the table and the counts."""
    lines = []
    counts = np.zeros(NUM_COUNTS, np.int64)
    row = byte = 0
    for window in packed:
        check = int.from_bytes(xxhash.xxh3_64_digest(window.data), "little", signed=True)
        lines.append((row, byte, window.pieces, window.cuts, check))
        write(window.data)
        row += window.rows
        byte += len(window.data)
        counts += window.counts
    lines.append((row, byte, 0, 0, 0))
    return np.array(lines, np.int64), counts


def index_in_memory(packed: Iterator[PackedWindow]) -> WindowIndex:
    """Return the index of some windows, in the memory of this process."""
    parts: list[bytes] = []
    table, counts = build_index(packed, parts.append)
    return WindowIndex(table=table, data=np.frombuffer(b"".join(parts), np.uint8), counts=counts)


# Finding the pieces of rows.


@kernel
def _find_pieces(
    rows: Int64Array,
    windows: Int64Array,
    table: Int64Array,
    words: Uint32Array,
    halves: Uint16Array,
    first: Int64Array,
    count: Int64Array,
    found: Int64Array,
) -> int:
    """Write (document, first token, number of tokens or -1 for all) of every piece; return how many there are.

    `words` and `halves` are the index as numbers of 32 and of 16 bits. A negative number says that the section of a
    window cannot be right: -1 less the window.
    """
    filled = int64(0)
    for i in range(rows.size):
        window = int64(windows[i])
        row, num_rows = rows[i] - table[window, ROW], table[window + 1, ROW] - table[window, ROW]
        num_pieces, num_cuts = table[window, PIECES], table[window, CUTS]
        starts = table[window, BYTE] >> 2
        pieces = 2 * (starts + num_rows)
        cuts = (pieces + num_pieces + 1) >> 1
        if row < 0 or row >= num_rows or starts < 0 or num_pieces < 0 or cuts + 3 * num_cuts > words.size:
            return -1 - window
        begin = int64(words[starts + row])
        end = int64(words[starts + row + 1]) if row + 1 < num_rows else num_pieces
        if begin > end or end > num_pieces:
            return -1 - window
        first[i] = filled
        cut = cuts + 3 * _first_cut(words, cuts, num_cuts, begin)
        for number in range(begin, end):
            piece = int64(halves[pieces + number])
            document = window * MAX_DOCUMENTS + (piece & ID_MASK)
            start, length = int64(0), int64(-1)
            if piece & CUT:
                if cut >= cuts + 3 * num_cuts or words[cut] != number:
                    return -1 - window
                start, length = int64(words[cut + 1]), int64(words[cut + 2])
                cut += 3
            if piece & BOS:
                filled = _put(found, filled, document, int64(0), int64(1))
            if length:
                filled = _put(found, filled, document, start, length)
        count[i] = filled - first[i]
    return filled


@kernel
def _find_holders(
    windows: Int64Array,
    bounds: tuple[Int64Array, Int64Array, Int64Array, Int64Array],
    table: Int64Array,
    words: Uint32Array,
    halves: Uint16Array,
    found: Int64Array,
) -> int:
    """Write (row, number of the window) of every row that has a piece of the tokens within the bounds of a window.

    Returns how many there are, even if `found` is too small; a negative number is that of `_find_pieces`.
    """
    low, high, first, last = bounds
    filled = int64(0)
    for i in range(windows.size):
        window = int64(windows[i])
        if window < 0 or window + 1 >= table.shape[0]:
            return -1 - window
        num_rows = table[window + 1, ROW] - table[window, ROW]
        num_pieces, num_cuts = table[window, PIECES], table[window, CUTS]
        starts = table[window, BYTE] >> 2
        pieces = 2 * (starts + num_rows)
        cut = (pieces + num_pieces + 1) >> 1
        end_of_cuts = cut + 3 * num_cuts
        if starts < 0 or num_rows < 0 or num_pieces < 0 or num_cuts < 0 or end_of_cuts > words.size:
            return -1 - window
        for row in range(num_rows):
            begin = int64(words[starts + row])
            end = int64(words[starts + row + 1]) if row + 1 < num_rows else num_pieces
            if begin > end or end > num_pieces:
                return -1 - window
            holds = False
            for number in range(begin, end):
                piece = int64(halves[pieces + number])
                document = piece & ID_MASK
                start, stop = int64(0), int64(MAX_LENGTH)
                if piece & CUT:
                    if cut >= end_of_cuts or words[cut] != number:
                        return -1 - window
                    start, stop = int64(words[cut + 1]), int64(words[cut + 1]) + int64(words[cut + 2])
                    cut += 3
                if piece & BOS:
                    start = int64(0)
                # Of the first and the last document only the part within the bounds counts.
                holds |= (
                    low[i] <= document <= high[i]
                    and (document != low[i] or stop > first[i])
                    and (document != high[i] or start < last[i])
                )
            if holds:
                if filled < found.shape[1]:
                    found[0, filled] = table[window, ROW] + row
                    found[1, filled] = i
                filled += 1
    return filled


@inner
def _put(found: Int64Array, filled: int, document: int, start: int, length: int) -> int:
    if filled < found.shape[1]:
        found[0, filled] = document
        found[1, filled] = start
        found[2, filled] = length
    return filled + 1


@inner
def _first_cut(words: Uint32Array, cuts: int, num_cuts: int, piece: int) -> int:
    """Return the index of the first cut whose piece is not before `piece`."""
    low, high = int64(0), num_cuts
    while low < high:
        middle = (low + high) >> 1
        if int64(words[cuts + 3 * middle]) < piece:
            low = middle + 1
        else:
            high = middle
    return low
