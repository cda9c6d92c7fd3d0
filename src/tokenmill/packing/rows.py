"""Rows made by packing windows of documents, and the rest of an epoch packed again by a later stage."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tokenmill.errors import ConfigError
from tokenmill.fingerprint import digest
from tokenmill.packing.cache import cached_index
from tokenmill.packing.holes import Documents, check_excluded, describe_excluded, excluded_within
from tokenmill.packing.index import (
    ROW,
    PackedWindow,
    WindowFragments,
    WindowIndex,
    compute_in_order,
    index_in_memory,
    num_windows,
    pack_one,
    whole_documents,
)
from tokenmill.packing.joined import JoinedRows
from tokenmill.packing.packers import CUT_DOCUMENTS, MAX_DOCUMENTS
from tokenmill.packing.stored import LOSS_MASK, StoredRows, count_held
from tokenmill.plan.rows import EpochProgress, Rows
from tokenmill.store.layout import ROWS_FOLDER
from tokenmill.store.locate import items_within, locate
from tokenmill.store.store import Store
from tokenmill.types import NO_DOCUMENTS, AnyArray, BoolArray, Fates, Int32Array, Int64Array, Spans, counted_from

if TYPE_CHECKING:
    from tokenmill.packing.packers import Fragments, Policy


class DocumentRows(StoredRows):
    """Rows of packed documents, which a later stage may pack again from where this one stopped."""

    @abstractmethod
    def rows_of_window(self, window: int, offsets: Int64Array) -> Int64Array:
        """Return the rows that hold the documents of a window, which start at these offsets."""


IN_MEMORY_DOCUMENTS = 1 << 21
"""Every process packs up to this many documents itself, in a fraction of a second; of more, an index is kept."""


@dataclass(frozen=True, kw_only=True)
class PackedRows(DocumentRows):
    """The rows of a store under a policy that packs windows."""

    store: Store
    seq_len: int
    policy: Policy
    index: WindowIndex
    description: Mapping[str, int | str | bool]
    cross_document_labels: bool = False
    excluded: Int64Array = field(default_factory=lambda: NO_DOCUMENTS)
    """Documents that no row holds, ascending."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.index.num_rows

    @property
    def num_long(self) -> int:
        """Number of documents of an epoch that are longer than a row, or cut to fill one."""
        return int(self.index.counts[CUT_DOCUMENTS])

    @property
    def index_arrays(self) -> tuple[tuple[AnyArray, bool], ...]:
        """Arrays of the index, each with whether it is mapped from a file."""
        mapped = self.index.checked is not None
        return (self.index.table, mapped), (self.index.data, mapped)

    @cached_property
    def _fates(self) -> Fates:
        """As counted when the rows were packed; where the store has a loss mask, it is read."""
        return self.index.fates(self.policy, count_held(self).trained if LOSS_MASK in self.store.keys else None)

    def whole_blocks(self, rows: Int64Array, block_rows: int) -> tuple[Int64Array, Int64Array] | None:  # noqa: ARG002
        """Return the tokens of the windows that hold rows: of all their documents."""
        windows = np.unique(np.searchsorted(self.index.table[:, ROW], rows, side="right") - 1)
        ends = np.minimum((windows + 1) * MAX_DOCUMENTS, self.store.num_documents)
        edges = [
            self.store.document_offsets(begin, end)[[0, -1]]
            for begin, end in zip((windows * MAX_DOCUMENTS).tolist(), ends.tolist(), strict=True)
        ]
        begins, ends = np.array(edges, np.int64).reshape(-1, 2).T
        return begins, ends

    def window_starts(self, *, rest: bool) -> Int64Array | None:
        """Return the first row of each window, and the end; there is no rest before the rows of one index."""
        return None if rest else np.ascontiguousarray(self.index.table[:, ROW])

    @property
    def segment_multiple(self) -> int:
        """To a multiple of how many columns every segment is filled up."""
        return self.policy.multiple

    def following(self, previous: Rows, seen: EpochProgress) -> StoredRows:
        """Return these rows, preceded by what is left of an epoch of the rows of an earlier stage."""
        return follow(self, previous, seen, self.policy)

    def rows_of_window(self, window: int, offsets: Int64Array) -> Int64Array:  # noqa: ARG002 - as `ConcatRows` has it
        """Return the rows that hold the documents of a window."""
        return self.index.rows_of_window(window)

    def rows_of(self, documents: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the rows that hold tokens of documents, and the index in `documents` that each row is for."""
        self.check_documents(documents)
        return self.index.rows_of(documents, str(self.store.path))

    def rows_within_shard(
        self, axis: str, shard: int, begins: Int64Array, ends: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Return the rows that hold values of runs, `begins` to `ends` of a shard, and the run of each."""
        return self.index.rows_of_runs(items_within(self.store, axis, shard, begins, ends), self.store.where)

    def spans(self, rows: Int64Array) -> Spans:
        """Return what the given rows are made of, in the order given."""
        self.check_rows(rows)
        return self.index.spans(rows, self.store.num_documents, partial(locate, self.store), str(self.store.path))


def pack_rows(
    store: Store,
    *,
    seq_len: int,
    policy: Policy,
    cross_document_labels: bool = False,
    fragments_of: WindowFragments | None = None,
    after: str = "",
    excluded: Int64Array = NO_DOCUMENTS,
) -> PackedRows:
    """Pack a store, or what `fragments_of` leaves of it (`after` then says after what, for the description).

    `excluded` names documents, in ascending order, that are left out.
    """
    check_excluded(store, excluded)
    if policy.name == "bos_best_fit" and not store.manifest.starts_with_bos:
        raise ConfigError(
            f"{store.path}: packing bos_best_fit needs documents that start with BOS, got a store without; "
            "prepare it with add_bos=True, or use packing = best_fit"
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

    def packed() -> Iterator[PackedWindow]:
        return compute_in_order(windows, pack)

    if store.num_documents > IN_MEMORY_DOCUMENTS:
        for files in store._remotes:
            files.download(f"{ROWS_FOLDER}/{digest(dict(described))}.rows")  # if somebody built it beside the store
        return cached_index(store.path, described, packed, windows)
    return index_in_memory(packed())


# What a stage leaves of a source when the next one packs it otherwise: the rest, packed anew, then epochs.
#
# What counts is which tokens are labels. A row that was not drawn still owes those of its spans; the owed
# labels of a document that lie side by side are joined, and packed with the one token that must stand before them.


def follow(full: DocumentRows, previous: Rows, seen: EpochProgress, policy: Policy) -> StoredRows:
    """Return `full`, preceded by what is left of the current epoch of `previous`."""
    before = previous.parts[seen.rest] if isinstance(previous, JoinedRows) else previous
    assert isinstance(before, DocumentRows), "the rows of a source keep their kind from stage to stage"
    rest = pack_rows(
        full.store,
        seq_len=full.seq_len,
        policy=policy,
        after=describe_seen(full, before, seen),
        fragments_of=unseen(before, seen, policy),
        excluded=full.excluded,
    )
    if not rest.num_rows:
        return full
    description = {**full.description, "rest": digest(dict(rest.description))}
    return JoinedRows(
        parts=(full, rest), sizes=(full.num_rows, rest.num_rows), num_rest=rest.num_rows, joined=description
    )


def describe_seen(rows: StoredRows, before: StoredRows, seen: EpochProgress) -> str:
    """Return a digest of what a rest is left of: rows of a stage before, and what was seen of them.

    Refuse those of another store.
    """
    if before.store.fingerprint != rows.store.fingerprint:
        raise ConfigError(
            f"{rows.store.path}: a source must keep its store from stage to stage, got another than "
            f"{before.store.path}; give the new store a name of its own, or use on_change = restart"
        )
    return digest({"rows": dict(before.description), "seen": dict(seen.describe())})


class PackedDocuments(Protocol):
    """Rows of packed documents, as far as it takes to know what is left of them."""

    @property
    def store(self) -> Documents:
        """Store of the documents."""
        ...

    @property
    def excluded(self) -> Int64Array:
        """Documents that no row holds, ascending."""
        ...

    def spans(self, rows: Int64Array) -> Spans:
        """Return what the given rows are made of, in the order given."""
        ...

    def rows_of_window(self, window: int, offsets: Int64Array) -> Int64Array:
        """Return the rows that hold the documents of a window, which start at these offsets."""
        ...


def unseen(part: PackedDocuments, seen: EpochProgress, policy: Policy) -> WindowFragments:
    """Return what is still to be packed of each window of an epoch under way, or of the rest of one."""
    store = part.store
    context = policy.name != "bos_best_fit"  # or a piece begins with the token before its first label

    def of(window: int) -> tuple[Fragments, Int32Array]:
        begin = window * MAX_DOCUMENTS
        end = min(begin + MAX_DOCUMENTS, store.num_documents)
        offsets = store.document_offsets(begin, end)
        lengths = np.diff(offsets)
        # A row of `concat` may reach into the windows beside this one; each takes its own documents from it.
        rows = part.rows_of_window(window, offsets)
        left = seen.unseen(rows)
        # What is no part of a rest was used up before it; of a whole epoch, what was not drawn is still to come.
        touched = np.full(lengths.size, seen.rest)
        # Excluded documents were no part of that epoch, so they are not left of it.
        touched[excluded_within(part.excluded, begin, end)] = True
        drawn = part.spans(rows[~left]).document
        touched[drawn[(drawn >= begin) & (drawn < end)] - begin] = True
        documents, first, last = _merge(_owed(part.spans(rows[left]), begin, end, lengths), touched, lengths)
        start = np.where(first > 1, first - context, 0)
        return np.stack([documents, start, last - start]).astype(np.int32), lengths.astype(np.int32)

    return of


def _owed(spans: Spans, begin: int, end: int, lengths: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return (document of the window, first label, end of labels) for the spans that lie in it."""
    order = counted_from(spans.first, spans.count)
    document, start, length = spans.document[order], spans.start[order], spans.length[order]
    # After the BOS that was put before it, all tokens of a rest are labels.
    joined = spans.joined[order]
    inside = (document >= begin) & (document < end)
    local = document[inside] - begin
    first = (start + ~joined)[inside].astype(np.int64)
    last = (start + length)[inside]
    # No label is owed by a lone first token, unless it is all of its document.
    owing = (last > first) | (lengths[local] == 1)
    return local[owing], first[owing], last[owing]


def _merge(
    labels: tuple[Int64Array, Int64Array, Int64Array],
    touched: BoolArray,
    lengths: Int64Array,
) -> tuple[AnyArray, AnyArray, AnyArray]:
    """Join labels that lie side by side in a document; of a document that was never drawn all are owed.

    The latter matters where rows do not hold whole documents: what truncation or cropping would have dropped of a
    document need not be dropped at another length.
    """
    whole = np.flatnonzero(~touched & (lengths > 0))
    mine = touched[labels[0]]
    added = (whole, np.ones_like(whole), np.maximum(1, lengths[whole]))
    document, first, last = (np.concatenate([a[mine], b]) for a, b in zip(labels, added, strict=True))
    order = np.lexsort((first, document))
    document, first, last = document[order], first[order], last[order]
    if not document.size:
        return document, first, last
    new = np.ones(document.size, np.bool_)
    new[1:] = (document[1:] != document[:-1]) | (first[1:] > last[:-1])
    starts = np.flatnonzero(new)
    return document[starts], first[starts], np.maximum.reduceat(last, starts)
