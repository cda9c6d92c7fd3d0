"""Rows cut from the stream of all documents end to end: closed form, no index.

Row r holds tokens r * seq_len to (r + 1) * seq_len of the stream, both included: one more than
seq_len, so that every input has a label; that token is also the first input of the next row. All
tokens are used but the last partial row, which `dropped_tokens` counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numba
import numpy as np

from tokenmill.errors import PlanError, StoreCorruptError
from tokenmill.packing.distinct import distinct
from tokenmill.packing.masks import LOSS_MASK, count_stream, hold
from tokenmill.packing.policy import Policy
from tokenmill.store.layout import ANCHOR_TOKENS, DOCUMENTS
from tokenmill.store.memory import view_uint32, view_uint64
from tokenmill.types import Fates, Spans

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.plan.rows import Held, RowIndex, Seen
    from tokenmill.store.reader import Store
    from tokenmill.types import Whole


@dataclass(frozen=True, kw_only=True)
class ConcatRows:
    """The rows of a store under the policy `concat`."""

    store: Store
    seq_len: int
    cross_document_labels: bool = False
    """Whether the first token of a document is a label of the last token of the one before it."""

    num_rest: ClassVar[int] = 0

    @property
    def num_rows(self) -> int:
        """How many whole rows the stream has."""
        return max(0, (self.store.num_tokens - 1) // self.seq_len)

    @property
    def dropped_tokens(self) -> int:
        """Tokens of the last partial row, which no row holds."""
        return self.store.num_tokens - (self.num_rows * self.seq_len + 1 if self.num_rows else 0)

    @property
    def row_slots(self) -> int:
        """How many input slots a row has."""
        return self.seq_len

    @property
    def epoch_description(self) -> Mapping[str, int | str | bool]:
        """What decides the rows of an epoch."""
        return self.description

    def fates(self) -> Fates:
        """Return what becomes of every token of the source in an epoch.

        Reads where documents begin, and the loss mask where the store has one, in parts, once.
        """
        return self._fates

    @cached_property
    def _fates(self) -> Fates:
        held = self.store.num_tokens - self.dropped_tokens
        if LOSS_MASK in self.store.keys:
            masked = held - count_stream(self)
        else:
            masked = 1 if held and self.cross_document_labels else _count_starts(self.store, held)
        return Fates(
            rows=self.num_rows,
            tokens=self.store.num_tokens,
            trained=held - masked,
            masked=masked,
            dropped={"last partial row": self.dropped_tokens} if self.dropped_tokens else {},
            padding=0,
        )

    @property
    def description(self) -> Mapping[str, int | str | bool]:
        """What decides the content of the rows."""
        return {
            "store": self.store.fingerprint,
            "packing": "concat",
            "seq_len": self.seq_len,
            "cross_document_labels": self.cross_document_labels,
            "rows": self.num_rows,
        }

    def following(self, previous: RowIndex, seen: Seen) -> RowIndex:
        """Return these rows, preceded by what is left of an epoch of the rows that a stage before used."""
        from tokenmill.packing.following import follow

        return follow(self, previous, seen, Policy(name="concat"))

    def rows_of(self, document: int) -> npt.NDArray[np.int64]:
        """Return the rows that hold a token of a document, in ascending order; none for an empty document."""
        begin, end = self.store.document_bounds(document)
        if begin == end:
            return np.empty(0, np.int64)
        first = max(0, -(-(begin - self.seq_len) // self.seq_len))
        last = min(self.num_rows - 1, (end - 1) // self.seq_len)
        return np.arange(first, last + 1, dtype=np.int64)

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
        begins = self.store.token_begins
        first_shard = np.searchsorted(begins, rows * self.seq_len, side="right") - 1
        last_shard = np.searchsorted(begins, rows * self.seq_len + self.seq_len, side="right") - 1
        first = np.empty(rows.size, np.int64)
        count = np.empty(rows.size, np.int64)
        parts: list[npt.NDArray[np.int64]] = []
        filled = 0
        for chosen, shards in _groups(first_shard, last_shard, self.store.maps.limit // 4):
            found = self._spans_of(rows[chosen], first_shard[chosen], shards, first, count, chosen)
            first[chosen] += filled
            filled += found.shape[0]
            parts.append(found)
        columns = parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty((0, 5), np.int64)])
        return Spans(
            first=first,
            count=count,
            document=columns[:, 0],
            start=columns[:, 1],
            length=columns[:, 2],
            shard=columns[:, 3],
            token=columns[:, 4],
        )

    def _spans_of(
        self,
        rows: npt.NDArray[np.int64],
        row_shards: npt.NDArray[np.int64],
        shards: npt.NDArray[np.int64],
        first: npt.NDArray[np.int64],
        count: npt.NDArray[np.int64],
        chosen: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        store = self.store
        with store.maps.borrow([store.file(int(shard), DOCUMENTS) for shard in shards]) as files:
            addresses = np.array([file.address for file in files], np.uint64)
            local = np.searchsorted(shards, row_shards)
            mean = store.num_tokens / max(1, store.num_documents)
            capacity = int(rows.size * (3 + 1.5 * self.seq_len / max(1.0, mean))) + 16
            while True:
                out = np.empty((capacity, 5), np.int64)
                needed = _find_spans(
                    (rows * self.seq_len, local, chosen),
                    self.seq_len + 1,
                    (shards, addresses, store.token_begins, store.document_begins),
                    first,
                    count,
                    out,
                )
                if needed < 0:
                    raise StoreCorruptError(
                        f"{store.file(-1 - needed, DOCUMENTS).path}: offsets and anchors must fit the shard, "
                        "got others; run `tokenmill verify`, then copy or prepare the store again"
                    )
                if needed <= capacity:
                    return out[:needed]
                capacity = int(needed)


def _count_starts(store: Store, end: int) -> int:
    """Return how many documents with tokens begin before token `end` of the stream."""
    found = 0
    for begin in range(0, store.num_documents, 1 << 20):
        offsets = store.document_offsets(begin, min(begin + (1 << 20), store.num_documents))
        found += int(((offsets[1:] > offsets[:-1]) & (offsets[:-1] < end)).sum())
        if int(offsets[-1]) >= end:
            break
    return found


def _groups(
    first: npt.NDArray[np.int64], last: npt.NDArray[np.int64], limit: int
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Cut rows into groups that need few shards at a time: (which rows, the shards they need, ascending).

    A row needs all shards from its first to its last; one row alone may need more than `limit`.
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


@numba.njit(cache=True, nogil=True)
def _find_spans(
    rows: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]],
    row_tokens: int,
    shards: tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64], npt.NDArray[np.int64], npt.NDArray[np.int64]],
    first: npt.NDArray[np.int64],
    count: npt.NDArray[np.int64],
    out: npt.NDArray[np.int64],
) -> Whole:
    """Write the spans of rows that begin at given tokens; return how many there are, even if `out` is too small.

    A negative number says that the documents of a shard cannot be right: -1 less the shard.
    """
    begins, locals_, chosen = rows
    numbers, addresses, token_begins, document_begins = shards
    filled: Whole = 0
    for i in range(begins.size):
        position = begins[i]
        end = position + row_tokens
        local = locals_[i]
        first[chosen[i]] = filled
        while position < end:
            shard = numbers[local]
            base = token_begins[shard]
            stop = min(end, token_begins[shard + 1]) - base
            token = position - base
            if token < stop:
                filled = _shard_spans(
                    addresses[local],
                    (document_begins[shard], document_begins[shard + 1] - document_begins[shard], shard),
                    (token, stop, token_begins[shard + 1] - base),
                    out,
                    filled,
                )
                if filled < 0:
                    return -1 - shard
                position = base + stop
            local += 1
        count[chosen[i]] = filled - first[chosen[i]]
    return filled


@numba.njit(cache=True, nogil=True)
def _shard_spans(
    address: np.uint64,
    shard: tuple[Whole, Whole, Whole],
    tokens: tuple[Whole, Whole, Whole],
    out: npt.NDArray[np.int64],
    filled: Whole,
) -> Whole:
    first_document, documents, number = shard
    token, stop, shard_tokens = tokens
    offsets = view_uint64(address, documents + 1)
    num_anchors = (shard_tokens + ANCHOR_TOKENS - 1) // ANCHOR_TOKENS
    anchors = view_uint32(address + np.uint64(8 * (documents + 1)), num_anchors)
    block = token // ANCHOR_TOKENS
    low = min(np.int64(anchors[block]), documents - 1)
    high = min(np.int64(anchors[block + 1]), documents - 1) if block + 1 < anchors.size else documents - 1
    while low < high:
        middle = (low + high + 1) >> 1
        if np.int64(offsets[middle]) <= token:
            low = middle
        else:
            high = middle - 1
    document = low
    if np.int64(offsets[document]) > token:
        return -1
    while token < stop:
        # A document begins where the one before it ends.
        if document == documents or (document > low and np.int64(offsets[document]) != token):
            return -1
        end = min(stop, np.int64(offsets[document + 1]))
        if end > token:
            if filled < out.shape[0]:
                out[filled, 0] = first_document + document
                out[filled, 1] = token - np.int64(offsets[document])
                out[filled, 2] = end - token
                out[filled, 3] = number
                out[filled, 4] = token
            filled += 1
            token = end
        document += 1
    return filled
