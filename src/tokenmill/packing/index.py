"""The row index of a store: every window packed, in memory or in a file that is mapped.

Windows are packed on their own, in threads, in any order; the bytes do not depend on that. A window's
section holds the first piece of each row (4 bytes), the pieces (2 bytes) and the cuts (12 bytes).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import xxhash

from tokenmill.errors import ConfigError, StoreCorruptError
from tokenmill.fingerprint import digest
from tokenmill.packing.exclude import excluded_within
from tokenmill.packing.window import (
    EXCLUDED,
    MAX_DOCUMENTS,
    MAX_LENGTH,
    NUM_COUNTS,
    TOKENS,
    TOO_LONG,
    Fragments,
    make_output,
    whole_fragments,
)
from tokenmill.store.durable import private_folder, read_index, writable, write_index
from tokenmill.store.layout import ROWS_FOLDER
from tokenmill.types import BoolArray, Int32Array, Int64Array, Uint8Array, Uint16Array, Uint32Array

if TYPE_CHECKING:
    from tokenmill.packing.policy import Policy
    from tokenmill.store.reader import Store

ROW, BYTE, PIECES, CUTS, CHECK = range(5)
"""Columns of the table: first row and first byte of a window, how many pieces and cuts it has, its checksum."""

WindowFragments = Callable[[int], "tuple[Fragments, Int32Array]"]
"""Window -> what is to be packed of it, and the lengths of its documents."""


@dataclass(frozen=True, kw_only=True)
class WindowIndex:
    """All windows of a store, packed."""

    table: Int64Array
    """A line for each window, and one for the end."""
    data: Uint8Array
    counts: Int64Array
    """The sums over all windows of what a window counts."""

    checked: BoolArray | None = None
    """Which windows of a file have been proved by their checksum; None where the index was made by this process."""

    @property
    def num_rows(self) -> int:
        """Number of rows of all windows."""
        return int(self.table[-1, ROW])

    def section(self, window: int) -> tuple[Uint32Array, Uint16Array]:
        """Return (first piece of each row, pieces) of a window."""
        begin, num_pieces = (int(self.table[window, column]) for column in (BYTE, PIECES))
        middle = begin + 4 * int(self.table[window + 1, ROW] - self.table[window, ROW])
        return self.data[begin:middle].view(np.uint32), self.data[middle : middle + 2 * num_pieces].view(np.uint16)

    def broken(self, windows: Int64Array) -> int | None:
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
    counts: Int64Array


def whole_documents(store: Store) -> WindowFragments:
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


def num_windows(store: Store) -> int:
    """Return how many windows the documents of a store make."""
    return -(-store.num_documents // MAX_DOCUMENTS)


def pack_one(
    window: int,
    fragments_of: WindowFragments,
    seq_len: int,
    policy: Policy,
    where: str,
    excluded: Int64Array | None,
) -> PackedWindow:
    """Pack one window, without the documents that are excluded."""
    fragments, lengths = fragments_of(window)
    counts = np.zeros(NUM_COUNTS, np.int64)
    gone = excluded_within(excluded, window * MAX_DOCUMENTS, window * MAX_DOCUMENTS + lengths.size)
    if gone.size:
        is_gone = np.isin(fragments[0], gone)
        counts[EXCLUDED] = counts[TOKENS] = policy.count_tokens(fragments[:, is_gone])
        fragments = fragments[:, ~is_gone]
    out = make_output(fragments[2], seq_len)
    rows, pieces, cuts = policy.pack(fragments, lengths, seq_len, out, counts)
    if counts[TOO_LONG]:
        document = window * MAX_DOCUMENTS + int(counts[TOO_LONG]) - 1
        raise ConfigError(
            f"{where}: with split = {policy.split!r} and packing = {policy.name!r} a document must have at most "
            f"{seq_len + 1} tokens, got {int(lengths[counts[TOO_LONG] - 1])} in document {document}; "
            "raise seq_len, or use split = truncate_end or truncate_start"
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


# Row indexes kept in files: built once, by one of many processes, and mapped by all.
#
# The name of a file is a digest of everything that decides its content. A lock keeps other processes from
# building the same again; where locks do not work, they build it and the last rename wins, with the same bytes.
# The lock goes with its process, so a killed builder leaves nothing that needs to be cleaned up.

FORMAT = "tokenmill-rows-1"


def cached_index(
    store: Path, description: Mapping[str, Any], packed: Callable[[], Iterator[PackedWindow]]
) -> WindowIndex:
    """Return the index that `description` stands for, from its file; build the file if there is none."""
    name = f"{digest(dict(description))}.rows"
    for folder in (store / ROWS_FOLDER, private_folder("rows")):
        found = _read(folder / name, description)
        if found:
            return found
    folder = writable(store / ROWS_FOLDER) or private_folder("rows")
    file = folder / name
    with _lock(file) as alone:
        if not _read(file, description):
            if alone:
                for left in folder.glob(f".tmp-{file.stem}-*"):
                    left.unlink()  # what a killed builder left
            _build(file, description, packed)
    built = _read(file, description)
    if built is None:
        raise StoreCorruptError(f"{file}: must be a whole index of rows once it is built, got none; check the disk")
    return built


@dataclass(frozen=True, kw_only=True, slots=True)
class _Footer:
    """What stands at the end of a kept index, as JSON."""

    format: str
    description: Mapping[str, Any]
    windows: int
    counts: tuple[int, ...]
    table: str
    """XXH3-64 of the table, which stands before the footer."""


def _build(file: Path, description: Mapping[str, Any], packed: Callable[[], Iterator[PackedWindow]]) -> None:
    def write(out: BinaryIO) -> _Footer:
        table, counts = build_index(packed(), out.write)
        out.write(b"\0" * (-out.tell() % 8))
        out.write(table.tobytes())
        return _Footer(
            format=FORMAT,
            description=dict(description),
            windows=len(table) - 1,
            # The last count came later than the format: it is written only where it says something.
            counts=tuple(counts[: NUM_COUNTS if counts[EXCLUDED] else EXCLUDED].tolist()),
            table=xxhash.xxh3_64_hexdigest(table.tobytes()),
        )

    write_index(file, write)


def _read(file: Path, description: Mapping[str, Any]) -> WindowIndex | None:
    """Map an index; None where there is none, or one that is cut or changed: it is only a cache, and made again."""
    kept = read_index(file, _Footer)
    if kept is None or (kept[1].format, kept[1].description) != (FORMAT, dict(description)):
        return None
    data, footer = kept
    begin = data.size - 40 * (footer.windows + 1)
    raw = data[max(0, begin) :].tobytes()
    if begin < 0 or xxhash.xxh3_64_hexdigest(raw) != footer.table:
        return None
    table = np.frombuffer(raw, np.int64).reshape(-1, 5)
    if begin - int(table[-1, 1]) not in range(8):
        return None
    counts = np.zeros(NUM_COUNTS, np.int64)
    counts[: len(footer.counts)] = footer.counts
    return WindowIndex(
        table=table,
        data=data[:begin],
        counts=counts,
        checked=np.zeros(footer.windows, np.bool_),
    )


@contextmanager
def _lock(file: Path) -> Iterator[bool]:
    """Hold the right to build a file; False where the file system has no locks."""
    with (file.parent / f".{file.name}.lock").open("wb") as lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
            alone = True
        except (ImportError, OSError):
            alone = False
        yield alone
