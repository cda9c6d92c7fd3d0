"""Rows of a store: what all kinds have in common, and those made by packing windows of documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol, Self, TypeVar, cast

import numpy as np

from tokenmill.compiled import int64, kernel, read_uint8
from tokenmill.errors import ConfigError, PlanError
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
from tokenmill.packing.packers import CUT_DOCUMENTS, MAX_DOCUMENTS
from tokenmill.plan.stages import NOTHING, CountedRows, Held, Seen
from tokenmill.store.layout import ROWS_FOLDER
from tokenmill.store.locate import items_within, locate
from tokenmill.store.store import Store
from tokenmill.types import (
    NO_DOCUMENTS,
    AnyArray,
    BoolArray,
    Fates,
    Int32Array,
    Int64Array,
    Spans,
    counted_from,
    distinct,
    run_sums,
)

if TYPE_CHECKING:
    from tokenmill.packing.concat import ConcatRows
    from tokenmill.packing.packers import Fragments, Policy
    from tokenmill.packing.records import Runs

    Counted = CountedRows
else:
    Counted = object  # a property of a protocol would be the default of a field of its name


class StoredRows(Counted):
    """Rows whose tokens stand in a store, so that all rows of an epoch are known."""

    if TYPE_CHECKING:

        @property
        def store(self) -> Store:
            """Where the tokens are."""

    @property
    def num_rest(self) -> int:
        """How many rows come before the first epoch."""
        return 0

    @property
    def counted(self) -> Self:
        """Themselves."""
        return self

    @property
    def row_slots(self) -> int:
        """How many input slots a row has."""
        return self.seq_len

    @property
    def num_long(self) -> int:
        """How many documents of an epoch are longer than a row, or are cut to fill one; 0 where nobody counted."""
        return 0

    @property
    def segment_multiple(self) -> int:
        """To a multiple of how many columns every segment is filled up."""
        return 1

    @property
    def epoch_description(self) -> Mapping[str, int | str | bool]:
        """What decides the rows of an epoch."""
        return self.description

    def whole_blocks(self, rows: Int64Array, block_rows: int) -> tuple[Int64Array, Int64Array] | None:  # noqa: ARG002
        """Return the tokens of the store, begins and ends, of the blocks of `shuffle = "window"` that hold rows.

        None where these are no runs of tokens.
        """
        return None

    def window_starts(self, *, rest: bool) -> Int64Array | None:  # noqa: ARG002 - as `PackedRows` has it
        """None: rows that follow each other are neighbours at rest."""
        return None

    @property
    def _fates(self) -> Fates:
        raise NotImplementedError

    def fates(self) -> Fates:
        """Return what becomes of every token of the source in an epoch; counted once."""
        return self._fates

    def fields(self, rows: Int64Array) -> Mapping[str, Spans | Runs]:
        """Return where each array of the given rows is, in the order given; a row of a sequence has one."""
        return {self.store.manifest.token_key: self.spans(rows)}

    def held(self, rows: Int64Array) -> Held:
        """Return what the given rows hold; reads their part of the loss mask where the store has one."""
        spans = self.spans(rows)
        # The first token of a span has nothing before it that predicts it, unless it follows its BOS.
        skip = (~spans.joined).astype(np.int64)
        if self.cross_document_labels:
            skip[:] = 0
            skip[spans.first[spans.count > 0]] = 1
        if LOSS_MASK in self.store.keys:
            trained = count_ones(self.store, LOSS_MASK, spans.shard, spans.token + skip, spans.length - skip)
        else:
            trained = int((spans.length - skip).sum())
        # A full row holds one more token than it has inputs: its last label.
        used = np.minimum(run_sums(spans.first, spans.count, spans.length), self.seq_len)
        return Held(tokens=int(used.sum()), trained=trained)

    def rows_within_shard(
        self, axis: str, shard: int, begins: Int64Array, ends: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Return the rows that hold values of runs, `begins` to `ends` of a shard, and the run of each."""
        raise NotImplementedError

    def holds(self, documents: Int64Array) -> BoolArray:
        """Return whether any row holds a token of each document."""
        return np.bincount(self.rows_of(documents)[1], minlength=documents.size) > 0

    def check_documents(self, documents: Int64Array) -> None:
        """Raise if a document is not in the store."""
        size = self.store.num_documents
        outside = documents[(documents < 0) | (documents >= size)]
        if outside.size:
            raise PlanError(
                f"{self.store.path}: a document must lie within 0:{size}, got {int(outside[0])}; count from 0"
            )

    def check_rows(self, rows: Int64Array) -> None:
        """Refuse rows that there are not."""
        end = self.num_rows + self.num_rest
        if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < end:
            raise PlanError(
                f"{self.store.path}: rows must lie within 0:{end}, "
                f"got {int(rows.min())} to {int(rows.max())}; use the rows that the plan names"
            )


# Rows made by packing windows: `best_fit`, `bos_best_fit` and `padded`.

IN_MEMORY_DOCUMENTS = 1 << 21
"""Every process packs up to this many documents itself, in a fraction of a second; of more, an index is kept."""


@dataclass(frozen=True, kw_only=True)
class PackedRows(StoredRows):
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
        """How many rows there are."""
        return self.index.num_rows

    @property
    def num_long(self) -> int:
        """How many documents of an epoch are longer than a row, or are cut to fill one."""
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

    def following(self, previous: CountedRows, seen: Seen) -> CountedRows:
        """Return these rows, preceded by what is left of an epoch of the rows that a stage before used."""
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
            files.bring(f"{ROWS_FOLDER}/{digest(dict(described))}.rows")  # if somebody built it beside the store
        return cached_index(store.path, described, packed, windows)
    return index_in_memory(packed())


# What a stage leaves of a source when the next one packs it otherwise: the rest, packed anew, then epochs.
#
# What counts is which tokens are labels. A row that was not drawn still owes those of its spans; the owed
# labels of a document that lie side by side are joined, and packed with the one token that must stand before them.


@dataclass(frozen=True, kw_only=True)
class FollowingRows(StoredRows):
    """The rest of an earlier epoch, then whole epochs: rows 0.. are those of an epoch, the rest is after them."""

    full: ConcatRows | PackedRows
    rest: PackedRows

    @property
    def store(self) -> Store:
        """Where the tokens are."""
        return self.full.store

    @property
    def seq_len(self) -> int:
        """How many tokens of a row are inputs."""
        return self.full.seq_len

    @property
    def cross_document_labels(self) -> bool:
        """Whether labels cross documents."""
        return self.full.cross_document_labels

    @property
    def segment_multiple(self) -> int:
        """To a multiple of how many columns every segment is filled up."""
        return self.full.segment_multiple

    @property
    def num_rows(self) -> int:
        """How many rows an epoch has."""
        return self.full.num_rows

    @property
    def num_long(self) -> int:
        """How many documents of an epoch are longer than a row, or are cut to fill one."""
        return self.full.num_long

    @property
    def num_rest(self) -> int:
        """How many rows the rest has."""
        return self.rest.num_rows

    @cached_property
    def description(self) -> Mapping[str, int | str | bool]:
        """What decides the content of the rows."""
        return {**self.full.description, "rest": digest(dict(self.rest.description))}

    @property
    def epoch_description(self) -> Mapping[str, int | str | bool]:
        """What decides the rows of a whole epoch."""
        return self.full.description

    @property
    def index_arrays(self) -> tuple[tuple[AnyArray, bool], ...]:
        """Arrays of both indexes, each with whether it is mapped from a file."""
        return (*self.full.index_arrays, *self.rest.index_arrays)

    @property
    def _fates(self) -> Fates:
        return self.full.fates()

    def whole_blocks(self, rows: Int64Array, block_rows: int) -> tuple[Int64Array, Int64Array] | None:
        """Return the tokens of the blocks of an epoch, and of the windows of the rest, that hold rows."""
        left = rows >= self.num_rows
        parts = [
            part.whole_blocks(own, block_rows)
            for part, own in ((self.full, rows[~left]), (self.rest, rows[left] - self.num_rows))
            if own.size
        ]
        begins, ends = zip(*(part for part in parts if part is not None), strict=True)
        return np.concatenate(begins), np.concatenate(ends)

    def window_starts(self, *, rest: bool) -> Int64Array | None:
        """Return the first row of each window of an epoch, or of the rest, and the end."""
        return (self.rest if rest else self.full).window_starts(rest=False)

    def following(self, previous: CountedRows, seen: Seen) -> CountedRows:
        """Return the rows of an epoch, preceded by what is left of another."""
        return self.full.following(previous, seen)

    def rows_of(self, documents: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the rows that hold tokens of documents, and the index in `documents` that each row is for."""
        rows, owner = self.full.rows_of(documents)
        left, of_left = self.rest.rows_of(documents)
        owner = np.concatenate([owner, of_left])
        order = np.argsort(owner, kind="stable")
        return np.concatenate([rows, left + self.num_rows])[order], owner[order]

    def rows_within_shard(
        self, axis: str, shard: int, begins: Int64Array, ends: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Return the rows that hold values of runs, `begins` to `ends` of a shard, and the run of each."""
        rows, owner = self.full.rows_within_shard(axis, shard, begins, ends)
        left, of_left = self.rest.rows_within_shard(axis, shard, begins, ends)
        return np.concatenate([rows, left + self.num_rows]), np.concatenate([owner, of_left])

    def spans(self, rows: Int64Array) -> Spans:
        """Return what the given rows are made of, in the order given."""
        left = rows >= self.num_rows
        if not left.any():
            return self.full.spans(rows)
        parts = [(np.flatnonzero(~left), self.full.spans(rows[~left])) if not left.all() else None]
        parts.append((np.flatnonzero(left), self.rest.spans(rows[left] - self.num_rows)))
        return _join(rows.size, [part for part in parts if part])


def _join(number: int, parts: list[tuple[Int64Array, Spans]]) -> Spans:
    """Put the spans of several sets of rows together."""
    first = np.empty(number, np.int64)
    count = np.empty(number, np.int64)
    filled = 0
    for chosen, spans in parts:
        first[chosen] = spans.first + filled
        count[chosen] = spans.count
        filled += spans.length.size
    columns = {
        name: np.concatenate([getattr(spans, name) for _, spans in parts])
        for name in ("document", "start", "length", "shard", "token")
    }
    return Spans(first=first, count=count, **columns)


def follow(full: ConcatRows | PackedRows, previous: CountedRows, seen: Seen, policy: Policy) -> CountedRows:
    """Return `full`, preceded by what is left of the epoch of `previous` that was under way."""
    before = cast("ConcatRows | PackedRows | FollowingRows", previous)
    if isinstance(before, FollowingRows):
        before = before.rest if seen.rest else before.full
    rest = pack_rows(
        full.store,
        seq_len=full.seq_len,
        policy=policy,
        after=describe_seen(full, before, seen),
        fragments_of=unseen(before, seen, policy),
        excluded=full.excluded,
    )
    return FollowingRows(full=full, rest=rest) if rest.num_rows else full


def describe_seen(rows: StoredRows, before: StoredRows, seen: Seen) -> str:
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
        """Where the documents are."""
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


def unseen(part: PackedDocuments, seen: Seen, policy: Policy) -> WindowFragments:
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


# Some rows of others.


@dataclass(frozen=True, kw_only=True)
class TakenRows(StoredRows):
    """The first rows of others, and after them rows that hold nothing: what an eval reads of a source."""

    rows: StoredRows
    taken: int
    """How many."""
    num_rows: int
    """With those that hold nothing, so that batches are full."""

    @property
    def store(self) -> Store:
        """Where the tokens are."""
        return self.rows.store

    @property
    def seq_len(self) -> int:
        """How many tokens of a row are inputs."""
        return self.rows.seq_len

    @property
    def row_slots(self) -> int:
        """How many input slots a row has."""
        return self.rows.row_slots

    @property
    def cross_document_labels(self) -> bool:
        """Whether labels cross documents."""
        return self.rows.cross_document_labels

    @property
    def segment_multiple(self) -> int:
        """To a multiple of how many columns every segment is filled up."""
        return self.rows.segment_multiple

    @property
    def description(self) -> Mapping[str, int | str | bool]:
        """What decides the content of the rows."""
        return {**self.rows.description, "rows": self.num_rows, "taken": self.taken}

    @property
    def index_arrays(self) -> Sequence[tuple[AnyArray, bool]]:
        """Those of the rows that it takes from."""
        return self.rows.index_arrays

    @cached_property
    def _fates(self) -> Fates:
        """Of the rows that it takes alone; reads their lengths and masks."""
        held = count_held(self)
        return Fates(
            rows=self.num_rows,
            tokens=held.tokens,
            trained=held.trained,
            masked=held.tokens - held.trained,
            dropped={},
            padding=self.num_rows * self.row_slots - held.tokens,
        )

    def following(self, previous: CountedRows, seen: Seen) -> CountedRows:
        """Refuse: an eval has one stage."""
        raise NotImplementedError

    def _split(self, rows: Int64Array) -> tuple[BoolArray, Int64Array]:
        """Say which rows hold something, and which rows of the others these are."""
        self.check_rows(rows)
        full = rows < self.taken
        return full, rows[full]

    def held(self, rows: Int64Array) -> Held:
        """Return what the given rows hold."""
        return self.rows.held(self._split(rows)[1])

    def rows_of(self, documents: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the rows that hold tokens of documents, and the index in `documents` that each row is for."""
        rows, owner = self.rows.rows_of(documents)
        return rows[rows < self.taken], owner[rows < self.taken]

    def rows_within_shard(
        self, axis: str, shard: int, begins: Int64Array, ends: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Return the rows that hold values of runs, `begins` to `ends` of a shard, and the run of each."""
        rows, owner = self.rows.rows_within_shard(axis, shard, begins, ends)
        return rows[rows < self.taken], owner[rows < self.taken]

    def spans(self, rows: Int64Array) -> Spans:
        """Return what the given rows are made of, in the order given."""
        full, inner = self._split(rows)
        return _spread(self.rows.spans(inner), full)

    def fields(self, rows: Int64Array) -> Mapping[str, Spans | Runs]:
        """Return where each array of the given rows is, in the order given."""
        full, inner = self._split(rows)
        return {key: _spread(spans, full) for key, spans in self.rows.fields(inner).items()}


SpansOrRuns = TypeVar("SpansOrRuns", bound="Spans | Runs")


def _spread(spans: SpansOrRuns, full: BoolArray) -> SpansOrRuns:
    """Return the spans of rows with rows between them that have none."""
    if full.all():
        return spans
    first, count = np.zeros((2, full.size), np.int64)
    first[full], count[full] = spans.first, spans.count
    return replace(spans, first=first, count=count)


# What rows of sequences hold, and how many labels the loss mask of a store leaves of it.

LOSS_MASK = "loss_mask"
"""Array of a store whose zeros say which tokens are not to be trained on."""
_ROWS = 1 << 16
"""Rows that are counted together."""


def count_held(rows: StoredRows) -> Held:
    """Return what all rows of an epoch hold, counted some at a time; reads masks."""
    starts = range(0, rows.num_rows, _ROWS)
    return sum((rows.held(np.arange(begin, min(begin + _ROWS, rows.num_rows))) for begin in starts), NOTHING)


def count_ones(
    store: Store,
    key: str,
    shards: Int64Array,
    firsts: Int64Array,
    lengths: Int64Array,
) -> int:
    """Return how many values of a mask are not 0 in runs at (shard, first value within it, length)."""
    needed = distinct(shards)
    size = max(1, store._maps.limit // 4)
    addresses = np.zeros(store.num_shards, np.int64)
    ones = 0
    for first in range(0, needed.size, size):
        group = needed[first : first + size]
        with store._in_memory(key, group, (shards, firsts, firsts + lengths)) as files:
            addresses[group] = [file.address for file in files]
            ones += _count(addresses, shards, firsts, lengths)
            addresses[group] = 0
    return ones


@kernel
def _count(addresses: Int64Array, shards: Int64Array, firsts: Int64Array, lengths: Int64Array) -> int:
    """Return how many bytes are not 0 in runs whose shard has an address."""
    count = int64(0)
    for i in range(shards.size):
        address = addresses[shards[i]]
        if address:
            for k in range(firsts[i], firsts[i] + lengths[i]):
                count += read_uint8(address, k) != 0
    return count
