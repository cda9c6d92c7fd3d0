"""Rows cut from the stream of all documents end to end: closed form, no index.

Row r holds tokens r * seq_len to (r + 1) * seq_len of the stream, both included. That is one more than seq_len, so
every input has a label; the last token is also the first input of the next row. All tokens are used but the last
partial row, which `dropped_tokens` counts. The stream closes up over excluded documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tokenmill.compiled import inner, int64, kernel, least, read_int64, read_uint32
from tokenmill.errors import StoreCorruptError
from tokenmill.packing.holes import (
    QUARANTINED,
    Holes,
    are_excluded,
    check_excluded,
    describe_excluded,
    excluded_within,
    holes_of,
)
from tokenmill.packing.packers import Policy
from tokenmill.packing.rows import DocumentRows, follow
from tokenmill.packing.stored import LOSS_MASK, StoredRows, count_held, count_ones
from tokenmill.store.layout import ANCHOR_TOKENS, DOCUMENTS
from tokenmill.store.locate import locate
from tokenmill.types import NO_DOCUMENTS, AnyArray, Fates, Int64Array, Spans, counted_from, distinct

if TYPE_CHECKING:
    from tokenmill.plan.rows import EpochProgress, Rows
    from tokenmill.store.store import Store

    TokenRuns: TypeAlias = tuple[Int64Array, Int64Array, Int64Array, Int64Array]
    """Runs of tokens of the store: (first token, length, which of the mapped shards has it, number of the run)."""

_DOCUMENTS, _TOKENS = 1 << 20, 1 << 24
"""Documents, and values of a mask, that are read together."""


@dataclass(frozen=True, kw_only=True)
class ConcatRows(DocumentRows):
    """The rows of a store under the policy `concat`."""

    store: Store
    seq_len: int
    cross_document_labels: bool = False
    """Whether the first token of a document is a label of the last token of the one before it."""
    excluded: Int64Array = field(default_factory=lambda: NO_DOCUMENTS)
    """Documents that no row holds, ascending."""

    def __post_init__(self) -> None:
        check_excluded(self.store, self.excluded)

    @cached_property
    def holes(self) -> Holes:
        """Runs of tokens that excluded documents leave out of the stream."""
        if not self.excluded.size:
            return holes_of(NO_DOCUMENTS, NO_DOCUMENTS)
        shard, first, length = locate(self.store, self.excluded)
        return holes_of(self.store.token_begins[shard] + first, length)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the stream."""
        return self.store.num_tokens - self.holes.size

    @property
    def num_rows(self) -> int:
        """Number of whole rows of the stream."""
        return max(0, (self.num_tokens - 1) // self.seq_len)

    @property
    def dropped_tokens(self) -> int:
        """Tokens of the last partial row, which no row holds."""
        return self.num_tokens - (self.num_rows * self.seq_len + 1 if self.num_rows else 0)

    @property
    def index_arrays(self) -> tuple[tuple[AnyArray, bool], ...]:
        """None: where a row begins is computed."""
        return ()

    @cached_property
    def _fates(self) -> Fates:
        """Reads where documents begin, and the loss mask where the store has one, in parts."""
        held = self.num_tokens - self.dropped_tokens
        if LOSS_MASK in self.store.keys:
            masked = held - (count_held(self).trained if self.holes.size else self._count_labels(held))
        else:
            masked = 1 if held and self.cross_document_labels else self._count_starts(held)
        dropped = {"last partial row": self.dropped_tokens, QUARANTINED: self.holes.size}
        return Fates(
            rows=self.num_rows,
            tokens=self.store.num_tokens,
            trained=held - masked,
            masked=masked,
            dropped={reason: number for reason, number in dropped.items() if number},
            padding=0,
        )

    def _count_starts(self, held: int) -> int:
        """Return how many documents with tokens begin in the first `held` tokens of the stream."""
        store, count = self.store, 0
        end = int(self.holes.opened(np.array([held - 1]))[0]) + 1 if held else 0
        for begin in range(0, store.num_documents, _DOCUMENTS):
            last = min(begin + _DOCUMENTS, store.num_documents)
            offsets = store.document_offsets(begin, last)
            starts = (offsets[1:] > offsets[:-1]) & (offsets[:-1] < end)
            starts[excluded_within(self.excluded, begin, last)] = False
            count += int(starts.sum())
            if int(offsets[-1]) >= end:
                break
        return count

    def _count_labels(self, held: int) -> int:
        """Return how many labels a stream without holes has, whose rows have its first `held` tokens.

        It finds no spans, so it is faster than `count_held`.
        """
        store, labels = self.store, 0
        for begin in range(1, held, _TOKENS):
            labels += int(np.count_nonzero(store.fetch(begin, min(begin + _TOKENS, held), LOSS_MASK)))
        if self.cross_document_labels:
            return labels
        for begin in range(0, store.num_documents, _DOCUMENTS):
            offsets = store.document_offsets(begin, min(begin + _DOCUMENTS, store.num_documents))
            starts = offsets[:-1][(offsets[1:] > offsets[:-1]) & (offsets[:-1] > 0) & (offsets[:-1] < held)]
            shards = np.searchsorted(store.token_begins, starts, side="right") - 1
            firsts = starts - store.token_begins[shards]
            labels -= count_ones(store, LOSS_MASK, shards, firsts, np.ones_like(starts))
        return labels

    @cached_property
    def description(self) -> Mapping[str, int | str | bool]:
        """Description of the content of the rows."""
        return {
            "store": self.store.fingerprint,
            "packing": "concat",
            "seq_len": self.seq_len,
            "cross_document_labels": self.cross_document_labels,
            "rows": self.num_rows,
            **describe_excluded(self.excluded),
        }

    def following(self, previous: Rows, seen: EpochProgress) -> StoredRows:
        """Return these rows, preceded by what is left of an epoch of the rows of an earlier stage."""
        return follow(self, previous, seen, Policy(name="concat"))

    def whole_blocks(self, rows: Int64Array, block_rows: int) -> tuple[Int64Array, Int64Array] | None:
        """Return the tokens of the blocks of so many rows that hold rows."""
        blocks = np.unique(rows // block_rows) * block_rows
        last = np.minimum(blocks + block_rows, self.num_rows) * self.seq_len
        return self.holes.opened(blocks * self.seq_len), self.holes.opened(last) + 1

    def rows_of(self, documents: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the rows that hold tokens of documents, and the index in `documents` that each row is for."""
        self.check_documents(documents)
        shard, token, length = locate(self.store, documents)
        begin = self.store.token_begins[shard] + token
        first = np.maximum(0, -(-(self.holes.closed(begin) - self.seq_len) // self.seq_len))
        last = np.minimum(self.num_rows - 1, (self.holes.closed(begin + length) - 1) // self.seq_len)
        held = (length > 0) & ~are_excluded(self.excluded, documents)
        count = np.maximum(0, last - first + 1) * held
        return counted_from(first, count), np.repeat(np.arange(documents.size), count)

    def rows_of_window(self, window: int, offsets: Int64Array) -> Int64Array:  # noqa: ARG002 - as `PackedRows` has it
        """Return the rows that hold documents with these offsets; they may hold others beside them."""
        return self.rows_within(int(offsets[0]), int(offsets[-1]))

    def rows_within(self, begin: int, end: int) -> Int64Array:
        """Return the rows that hold tokens `begin` to `end` (exclusive) of the store, in ascending order."""
        begin, end = self.holes.closed(np.array([begin, end])).tolist()
        first = max(0, -(-(begin - self.seq_len) // self.seq_len))
        last = min(self.num_rows - 1, (end - 1) // self.seq_len)
        return np.arange(first, last + 1, dtype=np.int64)

    def rows_within_shard(
        self, axis: str, shard: int, begins: Int64Array, ends: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Return the rows that hold values of runs, `begins` to `ends` of a shard, and the run of each."""
        base = int(self.store.axes[axis].values[shard])
        first = -(-(self.holes.closed(begins + base) - self.seq_len) // self.seq_len)
        last = (self.holes.closed(ends + base) - 1) // self.seq_len
        first, last = np.maximum(0, first), np.minimum(self.num_rows - 1, last)
        count = np.maximum(0, last - first + 1)
        return counted_from(first, count), np.repeat(np.arange(begins.size), count)

    def spans(self, rows: Int64Array) -> Spans:
        """Return what the given rows are made of, in the order given."""
        self.check_rows(rows)
        begins, sizes, runs = self.holes.runs(rows * self.seq_len, self.seq_len + 1)
        first_shard = np.searchsorted(self.store.token_begins, begins, side="right") - 1
        last_shard = np.searchsorted(self.store.token_begins, begins + sizes - 1, side="right") - 1
        first = np.empty(begins.size, np.int64)
        count = np.empty(begins.size, np.int64)
        parts: list[Int64Array] = []
        filled = 0
        for chosen, shards in _groups(first_shard, last_shard, self.store._maps.limit // 4):
            local = np.searchsorted(shards, first_shard[chosen])
            parts.append(self._spans_of((begins[chosen], sizes[chosen], local, chosen), shards, first, count))
            first[chosen] += filled
            filled += parts[-1].shape[1]
        columns = parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty((5, 0), np.int64)], axis=1)
        if begins.size > rows.size:
            columns, first, count = _join_runs(columns, first, count, runs)
        document, start, length, shard, token = columns
        return Spans(
            first=first, count=count, document=document, start=start, length=length, shard=shard, token=token
        )

    def _spans_of(
        self,
        runs: TokenRuns,
        shards: Int64Array,
        first: Int64Array,
        count: Int64Array,
    ) -> Int64Array:
        store = self.store
        files = store._maps.open([store.file(int(shard), DOCUMENTS) for shard in shards])
        addresses = np.array([file.address for file in files], np.int64)
        mean = store.num_tokens / max(1, store.num_documents)
        capacity = int(3 * runs[0].size + 1.5 * int(runs[1].sum()) / max(1.0, mean)) + 16
        mapped = (shards, addresses, store.token_begins, store.document_begins)
        while True:
            out = np.empty((5, capacity), np.int64)
            needed = _find_spans(runs, mapped, first, count, out)
            if needed < 0:
                raise StoreCorruptError(
                    f"{store.file(-1 - needed, DOCUMENTS).path}: offsets and anchors must fit the shard, "
                    "got others; run `tokenmill verify`, then copy or prepare the store again"
                )
            if needed <= capacity:
                store._maps.check(files)
                return np.ascontiguousarray(out[:, :needed])
            capacity = int(needed)


def _join_runs(
    columns: Int64Array,
    first: Int64Array,
    count: Int64Array,
    runs: Int64Array,
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Put the spans of rows that are made of several runs side by side; return them, and (first, count) of rows."""
    heads = np.cumsum(runs) - runs
    begins = np.cumsum(count) - count
    return columns[:, counted_from(first, count)], begins[heads], np.add.reduceat(count, heads)


def _groups(first: Int64Array, last: Int64Array, limit: int) -> Iterator[tuple[Int64Array, Int64Array]]:
    """Cut runs into groups that need few shards at a time: (which runs, the shards they need, ascending).

    A run needs all shards from its first to its last; one run alone may need more than `limit`.
    """
    shards = distinct(np.concatenate([first, last]))
    if bool((last - first <= 1).all()) and shards.size <= limit:
        yield np.arange(first.size), shards
        return
    order = np.argsort(first, kind="stable")
    begin = 0
    while begin < order.size:
        needed: set[int] = set()
        end = begin
        while end < order.size:
            more = range(int(first[order[end]]), int(last[order[end]]) + 1)
            if end > begin and len(needed.union(more)) > limit:
                break
            needed.update(more)
            end += 1
        yield order[begin:end], np.array(sorted(needed), np.int64)
        begin = end


@kernel
def _find_spans(
    runs: TokenRuns,
    shards: tuple[Int64Array, Int64Array, Int64Array, Int64Array],
    first: Int64Array,
    count: Int64Array,
    out: Int64Array,
) -> int:
    """Write the spans of runs of tokens; return how many there are, even if `out` is too small.

    A negative number says that the documents of a shard cannot be right: -1 less the shard.
    """
    begins, sizes, locals_, chosen = runs
    numbers, addresses, token_begins, document_begins = shards
    filled = int64(0)
    for i in range(begins.size):
        position = begins[i]
        end = position + sizes[i]
        local = locals_[i]
        first[chosen[i]] = filled
        while position < end:
            shard = int64(numbers[local])
            base = token_begins[shard]
            tokens = token_begins[shard + 1] - base
            token, stop = position - base, least(end - base, tokens)
            if token < stop:
                first_document = document_begins[shard]
                documents = document_begins[shard + 1] - first_document
                low = document = _document_at(addresses[local], documents, tokens, token)
                while token < stop:
                    if low < 0 or document == documents:
                        return -1 - shard
                    begin = read_int64(addresses[local], document)
                    if begin < 0 or (document > low and begin != token):
                        return -1 - shard  # a document begins where the one before it ends
                    end_of = read_int64(addresses[local], document + 1)
                    if end_of > token:  # compared before it is subtracted: the difference may wrap around
                        size = least(stop, end_of) - token
                        if filled < out.shape[1]:
                            out[0, filled] = first_document + document
                            out[1, filled] = token - begin
                            out[2, filled] = size
                            out[3, filled] = shard
                            out[4, filled] = token
                        filled += 1
                        token += size
                    document += 1
                position = base + stop
            local += 1
        count[chosen[i]] = filled - first[chosen[i]]
    return filled


@inner
def _document_at(address: int, documents: int, tokens: int, token: int) -> int:
    """Return the last document of a shard that begins at a token or before it; -1 where none does."""
    if documents < 1:
        return int64(-1)
    anchors = address + 8 * (documents + 1)
    block = token // ANCHOR_TOKENS
    low, high = least(read_uint32(anchors, block), documents - 1), documents - 1
    if (block + 1) * ANCHOR_TOKENS < tokens:
        high = least(read_uint32(anchors, block + 1), high)
    while low < high:
        middle = (low + high + 1) >> 1
        if read_int64(address, middle) <= token:
            low = middle
        else:
            high = middle - 1
    return low if read_int64(address, low) <= token else int64(-1)
