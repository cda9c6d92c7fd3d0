"""Rows made by packing windows of documents: `best_fit`, `bos_best_fit` and `padded`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numba
import numpy as np

from tokenmill.errors import ConfigError, PlanError, StoreCorruptError
from tokenmill.packing.cache import cached_index
from tokenmill.packing.holes import QUARANTINED, check_excluded, describe_excluded
from tokenmill.packing.index import (
    BYTE,
    CUTS,
    PIECES,
    ROW,
    PackedWindow,
    WindowFragments,
    WindowIndex,
    build_index,
    num_windows,
    pack_all,
    pack_one,
    whole_documents,
)
from tokenmill.packing.masks import LOSS_MASK, count_rows, hold
from tokenmill.packing.window import (
    BOS,
    BOS_ADDED,
    CROPPED,
    CUT,
    EXCLUDED,
    FIRST,
    ID_MASK,
    MAX_DOCUMENTS,
    PADDING,
    ROWS,
    TOKENS,
    TRAINED,
    TRUNCATED,
)
from tokenmill.store.locate import locate
from tokenmill.types import Fates, Spans

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.packing.policy import Policy
    from tokenmill.plan.rows import Held, RowIndex, Seen
    from tokenmill.store.reader import Store
    from tokenmill.types import Whole

IN_MEMORY_DOCUMENTS = 1 << 21
"""Up to so many documents are packed anew by every process, in a fraction of a second; more are kept in a file."""


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """The rows of a store under a policy that packs windows."""

    store: Store
    seq_len: int
    policy: Policy
    index: WindowIndex
    description: Mapping[str, int | str | bool]
    cross_document_labels: bool = False
    excluded: npt.NDArray[np.int64] | None = None
    """Documents that no row holds, ascending."""
    num_rest: int = 0

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return self.index.num_rows

    @property
    def row_slots(self) -> int:
        """How many input slots a row has."""
        return self.seq_len

    @property
    def epoch_description(self) -> Mapping[str, int | str | bool]:
        """What decides the rows of an epoch."""
        return self.description

    def fates(self) -> Fates:
        """Return what becomes of every token in an epoch, as counted when the rows were packed.

        Where the store has a loss mask, it is read, once.
        """
        return self._fates

    @cached_property
    def _fates(self) -> Fates:
        counts = [int(number) for number in self.index.counts]
        dropped = {"truncated": counts[TRUNCATED], "cropped": counts[CROPPED], QUARANTINED: counts[EXCLUDED]}
        trained = count_rows(self) if LOSS_MASK in self.store.keys else counts[TRAINED]
        return Fates(
            rows=counts[ROWS],
            tokens=counts[TOKENS],
            trained=trained,
            masked=counts[FIRST] + counts[TRAINED] - trained,
            dropped={reason: number for reason, number in dropped.items() if number},
            padding=counts[PADDING],
            added=counts[BOS_ADDED],
        )

    def following(self, previous: RowIndex, seen: Seen) -> RowIndex:
        """Return these rows, preceded by what is left of an epoch of the rows that a stage before used."""
        from tokenmill.packing.following import follow

        return follow(self, previous, seen, self.policy)

    def rows_of(self, document: int) -> npt.NDArray[np.int64]:
        """Return the rows that hold a token of a document, in ascending order."""
        if not 0 <= document < self.store.num_documents:
            raise PlanError(
                f"{self.store.path}: a document must lie within 0:{self.store.num_documents}, got {document}; "
                "count from 0"
            )
        window, local = divmod(document, MAX_DOCUMENTS)
        if self.index.broken(np.array([window])) is not None:
            raise self._corrupt(f"other bytes than its checksum says in window {window}")
        begin, end = int(self.index.table[window, ROW]), int(self.index.table[window + 1, ROW])
        rows = np.arange(begin, end)
        return rows[_rows_with(self.index.table[window], end - begin, self.index.data, local)]

    def held(self, rows: npt.NDArray[np.int64]) -> Held:
        """Return what the given rows hold; reads their loss mask, where the store has one."""
        return hold(self, rows)

    def spans(self, rows: npt.NDArray[np.int64]) -> Spans:
        """Return what the given rows are made of, in the order given."""
        if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < self.num_rows:
            raise PlanError(
                f"{self.store.path}: rows must lie within 0:{self.num_rows}, "
                f"got {int(rows.min())} to {int(rows.max())}; use the rows that the plan names"
            )
        windows = np.searchsorted(self.index.table[:, ROW], rows, side="right") - 1
        broken = self.index.broken(windows)
        if broken is not None:
            raise self._corrupt(f"other bytes than its checksum says in window {broken}")
        first, count = np.empty((2, rows.size), np.int64)
        capacity = 4 * rows.size + 64
        while True:
            found = np.empty((3, capacity), np.int64)
            needed = int(_find_pieces(rows, windows, self.index.table, self.index.data, (first, count, found)))
            if needed < 0:
                raise self._corrupt(f"a broken window {-1 - needed}")
            if needed <= capacity:
                break
            capacity = needed
        document, start, length = found[0, :needed], found[1, :needed], found[2, :needed]
        if needed and int(document.max()) >= self.store.num_documents:
            raise self._corrupt("documents past the last one")
        shard, token, whole = locate(self.store, document)
        if not _finish(start, length, token, whole):
            raise self._corrupt("pieces past the ends of documents")
        return Spans(
            first=first, count=count, document=document, start=start, length=length, shard=shard, token=token
        )

    def _corrupt(self, problem: str) -> StoreCorruptError:
        return StoreCorruptError(
            f"{self.store.path}: the index of its rows must fit its documents, got {problem}; "
            "delete its folder .rows, it will be built again"
        )


def pack_rows(
    store: Store,
    *,
    seq_len: int,
    policy: Policy,
    cross_document_labels: bool = False,
    fragments_of: WindowFragments | None = None,
    after: str = "",
    excluded: npt.NDArray[np.int64] | None = None,
) -> PackedRows:
    """Pack a store, or what `fragments_of` leaves of it (`after` then says after what, for the description).

    `excluded` names documents, in ascending order, that are left out.
    """
    check_excluded(store, excluded)
    if policy.name == "bos_best_fit" and not store.manifest.tokenizer.get("add_bos"):
        raise ConfigError(
            f"{store.path}: packing bos_best_fit needs documents that start with BOS, got a store without; "
            "prepare it with --bos, or use packing = best_fit"
        )
    described: dict[str, int | str | bool] = {
        "store": store.fingerprint,
        **policy.describe(),
        "seq_len": seq_len,
        "cross_document_labels": cross_document_labels,
        **describe_excluded(excluded),
    }
    if after:
        described["after"] = after
    fragments = fragments_of or whole_documents(store)
    index = _index(
        store, described, lambda window: pack_one(window, fragments, seq_len, policy, str(store.path), excluded)
    )
    return PackedRows(
        store=store,
        seq_len=seq_len,
        policy=policy,
        index=index,
        description={**described, "rows": index.num_rows},
        cross_document_labels=cross_document_labels,
        excluded=excluded,
    )


def _index(
    store: Store, described: Mapping[str, int | str | bool], pack: Callable[[int], PackedWindow]
) -> WindowIndex:
    windows = num_windows(store)
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def packed() -> Iterator[PackedWindow]:
        return pack_all(windows, pack, threads)

    if store.num_documents > IN_MEMORY_DOCUMENTS:
        return cached_index(store.path, described, packed)
    parts: list[bytes] = []
    table, counts = build_index(packed(), parts.append)
    return WindowIndex(table=table, data=np.frombuffer(b"".join(parts), np.uint8), counts=counts)


@numba.njit(cache=True, nogil=True)
def _section(
    line: npt.NDArray[np.int64], num_rows: Whole, data: npt.NDArray[np.uint8]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16], npt.NDArray[np.uint32]]:
    """Return (first piece of each row, pieces, cuts) of a window."""
    begin = line[BYTE]
    rows = data[begin : begin + 4 * num_rows].view(np.uint32)
    begin += 4 * num_rows
    pieces = data[begin : begin + 2 * line[PIECES]].view(np.uint16)
    begin += 2 * (line[PIECES] + (line[PIECES] & 1))
    return rows, pieces, data[begin : begin + 12 * line[CUTS]].view(np.uint32)


@numba.njit(cache=True, nogil=True)
def _find_pieces(
    rows: npt.NDArray[np.int64],
    windows: npt.NDArray[np.int64],
    table: npt.NDArray[np.int64],
    data: npt.NDArray[np.uint8],
    out: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]],
) -> Whole:
    """Write (document, first token, number of tokens or -1 for all) of every piece; return how many there are.

    A negative number says that the section of a window cannot be right: -1 less the window.
    """
    first, count, found = out
    filled = 0
    for i in range(rows.size):
        window = windows[i]
        num_rows = table[window + 1, ROW] - table[window, ROW]
        starts, pieces, cuts = _section(table[window], num_rows, data)
        row = rows[i] - table[window, ROW]
        begin = np.int64(starts[row])
        end = np.int64(starts[row + 1]) if row + 1 < num_rows else pieces.size
        if begin > end or end > pieces.size:
            return -1 - window
        first[i] = filled
        cut = _first_cut(cuts, begin)
        for number in range(begin, end):
            piece = pieces[number]
            document = window * MAX_DOCUMENTS + (piece & ID_MASK)
            start, length = np.int64(0), np.int64(-1)
            if piece & CUT:
                if 3 * cut + 2 >= cuts.size or cuts[3 * cut] != number:
                    return -1 - window
                start, length = np.int64(cuts[3 * cut + 1]), np.int64(cuts[3 * cut + 2])
                cut += 1
            if piece & BOS:
                filled = _put(found, filled, document, 0, 1)
            if length:
                filled = _put(found, filled, document, start, length)
        count[i] = filled - first[i]
    return filled


@numba.njit(cache=True, nogil=True)
def _put(found: npt.NDArray[np.int64], filled: Whole, document: Whole, start: Whole, length: Whole) -> Whole:
    if filled < found.shape[1]:
        found[0, filled] = document
        found[1, filled] = start
        found[2, filled] = length
    return filled + 1


@numba.njit(cache=True, nogil=True)
def _finish(
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int64],
    documents: npt.NDArray[np.int64],
) -> bool:
    """Put whole documents for -1, and first tokens of pieces for those of documents; False if one is too long."""
    for i in range(starts.size):
        if lengths[i] < 0:
            lengths[i] = documents[i]
        if starts[i] + lengths[i] > documents[i]:
            return False
        tokens[i] += starts[i]
    return True


@numba.njit(cache=True, nogil=True)
def _first_cut(cuts: npt.NDArray[np.uint32], piece: Whole) -> Whole:
    """Return the index of the first cut whose piece is not before `piece`."""
    low, high = 0, cuts.size // 3
    while low < high:
        middle = (low + high) >> 1
        if cuts[3 * middle] < piece:
            low = middle + 1
        else:
            high = middle
    return low


@numba.njit(cache=True, nogil=True)
def _rows_with(
    line: npt.NDArray[np.int64], num_rows: Whole, data: npt.NDArray[np.uint8], document: Whole
) -> npt.NDArray[np.bool_]:
    """Say for each row of a window whether it holds a piece of a document."""
    starts, pieces, _ = _section(line, num_rows, data)
    found = np.zeros(num_rows, np.bool_)
    row = 0
    for number in range(pieces.size):
        while row + 1 < num_rows and starts[row + 1] <= number:
            row += 1
        if pieces[number] & ID_MASK == document:
            found[row] = True
    return found
