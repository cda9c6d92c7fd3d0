"""The row index of a store: every window packed, in memory or in a file that is mapped.

Windows are packed on their own, in threads, in any order; the bytes do not depend on that. A window's
section holds the first piece of each row (4 bytes), the pieces (2 bytes) and the cuts (12 bytes).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from tokenmill.errors import ConfigError
from tokenmill.packing.holes import excluded_within
from tokenmill.packing.policy import count_tokens, pack_window
from tokenmill.packing.window import (
    EXCLUDED,
    MAX_DOCUMENTS,
    MAX_LENGTH,
    NUM_COUNTS,
    TOKENS,
    TOO_LONG,
    document_fragments,
    needed_room,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.packing.policy import Policy
    from tokenmill.packing.window import Fragments
    from tokenmill.store.reader import Store

ROW, BYTE, PIECES, CUTS, CHECK = range(5)
"""Columns of the table: first row and first byte of a window, how many pieces and cuts it has, its checksum."""

WindowFragments = Callable[[int], "tuple[Fragments, npt.NDArray[np.int32]]"]
"""Window -> what is to be packed of it, and the lengths of its documents."""


@dataclass(frozen=True, kw_only=True)
class WindowIndex:
    """All windows of a store, packed."""

    table: npt.NDArray[np.int64]
    """A line for each window, and one for the end."""
    data: npt.NDArray[np.uint8]
    counts: npt.NDArray[np.int64]
    """The sums over all windows of what a window counts."""

    checked: npt.NDArray[np.bool_] | None = None
    """Which windows of a file have been proved by their checksum; None where the index was made by this process."""

    @property
    def num_rows(self) -> int:
        """Number of rows of all windows."""
        return int(self.table[-1, ROW])

    def broken(self, windows: npt.NDArray[np.int64]) -> int | None:
        """Return a window among those given whose bytes are not what its checksum says, each checked once."""
        if self.checked is None or self.checked[windows].all():
            return None
        for window in np.unique(windows[~self.checked[windows]]).tolist():
            section = self.data[self.table[window, BYTE] : self.table[window + 1, BYTE]]
            if (
                int.from_bytes(xxhash.xxh3_64_digest(section.data), "little", signed=True)
                != self.table[window, CHECK]
            ):
                return int(window)
            self.checked[window] = True
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedWindow:
    """One window, ready to be written."""

    rows: int
    pieces: int
    cuts: int
    data: bytes
    counts: npt.NDArray[np.int64]


def whole_documents(store: Store) -> WindowFragments:
    """Return what an epoch packs: every document of a window, whole."""

    def of(window: int) -> tuple[Fragments, npt.NDArray[np.int32]]:
        begin = window * MAX_DOCUMENTS
        offsets = store.document_offsets(begin, min(begin + MAX_DOCUMENTS, store.num_documents)).view(np.uint64)
        documents, starts, sizes, lengths = np.empty((4, offsets.size - 1), np.int32)
        number = int(document_fragments(offsets, (documents, starts, sizes), lengths))
        if number < 0:
            raise ConfigError(
                f"{store.path}: a document must have at most {MAX_LENGTH} tokens to be packed, "
                f"got more in document {begin - 1 - number}; use packing = concat"
            )
        return (documents[:number], starts[:number], sizes[:number]), lengths

    return of


def num_windows(store: Store) -> int:
    """Return how many windows the documents of a store make."""
    return -(-store.num_documents // MAX_DOCUMENTS)


def pack_one(
    window: int,
    fragments_of: WindowFragments,
    seq_len: int,
    policy: Policy,
    where: str,
    excluded: npt.NDArray[np.int64] | None,
) -> PackedWindow:
    """Pack one window, without the documents that are excluded."""
    fragments, lengths = fragments_of(window)
    counts = np.zeros(NUM_COUNTS, np.int64)
    gone = excluded_within(excluded, window * MAX_DOCUMENTS, window * MAX_DOCUMENTS + lengths.size)
    if gone.size:
        fragments, left_out = _split(fragments, gone, lengths.size)
        counts[EXCLUDED] = counts[TOKENS] = count_tokens(left_out, policy.numbers()[0])
    room = int(needed_room(fragments[2], seq_len))
    out = (np.empty(room, np.uint32), np.empty(room, np.uint16), np.empty(3 * room, np.uint32))
    rows, pieces, cuts = pack_window(fragments, lengths, (seq_len, *policy.numbers()), out, counts)
    if counts[TOO_LONG]:
        document = window * MAX_DOCUMENTS + int(counts[TOO_LONG]) - 1
        raise ConfigError(
            f"{where}: with split = {policy.split!r} and packing = {policy.name!r} a document must have at most "
            f"{seq_len + 1} tokens, got {int(lengths[counts[TOO_LONG] - 1])} in document {document}; "
            "raise seq_len, or use split = truncate_end or truncate_start"
        )
    # Sections are padded to 4 bytes, so that the numbers of the next one are aligned.
    data = b"".join(
        (out[0][:rows].tobytes(), out[1][:pieces].tobytes(), b"\0\0" * (pieces % 2), out[2][: 3 * cuts].tobytes())
    )
    return PackedWindow(rows=int(rows), pieces=int(pieces), cuts=int(cuts), data=data, counts=counts)


def _split(fragments: Fragments, excluded: npt.NDArray[np.int64], documents: int) -> tuple[Fragments, Fragments]:
    """Return the fragments that are to be packed, and those of excluded documents of the window."""
    gone = np.zeros(documents, np.bool_)
    gone[excluded] = True
    mine = gone[fragments[0]]
    number, start, size = fragments
    return (number[~mine], start[~mine], size[~mine]), (number[mine], start[mine], size[mine])


def pack_all(windows: int, pack: Callable[[int], PackedWindow], threads: int) -> Iterator[PackedWindow]:
    """Pack all windows in threads and yield them in order; few wait at a time, so memory is bounded."""
    waiting: deque[Future[PackedWindow]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="tokenmill-pack") as executor:
        for window in range(windows):
            waiting.append(executor.submit(pack, window))
            if len(waiting) > 4 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def build_index(
    packed: Iterator[PackedWindow], write: Callable[[bytes], object]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
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
