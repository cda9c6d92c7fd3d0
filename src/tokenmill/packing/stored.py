"""Rows of a store: what packed documents and records have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.compiled import int64, kernel, read_uint8
from tokenmill.errors import PlanError
from tokenmill.plan.rows import NOTHING, TokenCounts
from tokenmill.store.store import Store
from tokenmill.types import BoolArray, Fates, Int64Array, Spans, counted_from, distinct, run_sums

if TYPE_CHECKING:
    from tokenmill.packing.records import Runs
    from tokenmill.plan.rows import Rows
    from tokenmill.plan.stages import Stage

    class _PlanRows(Rows, ABC):
        """Rows of a plan."""
else:
    _PlanRows = ABC  # a property of a protocol would be the default of a field of its name

LOSS_MASK = "loss_mask"
"""Array of a store whose zeros mark tokens that are not trained on."""
_ROWS = 1 << 16
"""Rows that are counted together."""


class StoredRows(_PlanRows):
    """Rows whose tokens are in a store, so that all rows of an epoch are known."""

    if TYPE_CHECKING:

        @property
        def excluded(self) -> Int64Array:
            """Documents that no row holds, ascending."""

        @property
        def store(self) -> Store:
            """Store of the tokens."""

    @property
    def num_rest(self) -> int:
        """Number of rows before the first epoch."""
        return 0

    @property
    def has_epochs(self) -> bool:
        """True: all rows are known before the first is read."""
        return True

    @property
    def whole_epoch(self) -> StoredRows:
        """These rows without a rest before the first epoch."""
        return self

    @property
    def row_slots(self) -> int:
        """Number of input slots of a row."""
        return self.seq_len

    @property
    def num_long(self) -> int:
        """Number of documents of an epoch that are longer than a row, or cut to fill one; 0 if not counted."""
        return 0

    @property
    def segment_multiple(self) -> int:
        """Number of columns: segments are padded to a multiple of it."""
        return 1

    @property
    def epoch_description(self) -> Mapping[str, int | str | bool]:
        """Description of the rows of a whole epoch."""
        return self.description

    def whole_blocks(self, rows: Int64Array, block_rows: int) -> tuple[Int64Array, Int64Array] | None:  # noqa: ARG002
        """Return the tokens of the store, begins and ends, of the blocks of `shuffle = "window"` that hold rows.

        None where blocks are not runs of tokens.
        """
        return None

    def window_starts(self, *, rest: bool) -> Int64Array | None:  # noqa: ARG002 - as `PackedRows` has it
        """None: consecutive rows are neighbors at rest."""
        return None

    @property
    @abstractmethod
    def _fates(self) -> Fates:
        """Fate of every token of the source in an epoch."""

    def fates(self) -> Fates:
        """Return the fate of every token of the source in an epoch; counted once."""
        return self._fates

    def fields(self, rows: Int64Array) -> Mapping[str, Spans | Runs]:
        """Return the spans of each array of some rows, in the order given; a row of a sequence has one array."""
        return {self.store.manifest.token_key: self.spans(rows)}

    def held(self, rows: Int64Array) -> TokenCounts:
        """Return the tokens and labels of some rows; reads their part of the loss mask where the store has one."""
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
        return TokenCounts(tokens=int(used.sum()), trained=trained)

    @abstractmethod
    def rows_within_shard(
        self, axis: str, shard: int, begins: Int64Array, ends: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Return the rows that hold values of runs, `begins` to `ends` of a shard, and the run of each."""

    def holds(self, documents: Int64Array) -> BoolArray:
        """Return whether any row holds a token of each document."""
        return np.bincount(self.rows_of(documents)[1], minlength=documents.size) > 0

    def check_documents(self, documents: Int64Array) -> None:
        """Raise if a document is not in the store."""
        size = self.store.num_documents
        outside = documents[(documents < 0) | (documents >= size)]
        if outside.size:
            raise PlanError(
                f"{self.store.path}: document out of range: {int(outside[0])}; count from 0 to {size - 1}"
            )

    def check_rows(self, rows: Int64Array) -> None:
        """Raise if a row does not exist."""
        end = self.num_rows + self.num_rest
        if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < end:
            raise PlanError(
                f"{self.store.path}: rows must lie within 0:{end}, "
                f"got {int(rows.min())} to {int(rows.max())}; use the rows that the plan names"
            )

    def same_rows(self, rows: Int64Array, other: StoredRows, other_rows: Int64Array) -> BoolArray:
        """Return whether rows have the same spans as rows of another packing of the same store."""
        left, right = self.spans(rows), other.spans(other_rows)
        same: BoolArray = left.count == right.count
        both = np.flatnonzero(same)
        left_order, right_order = (counted_from(spans.first[both], spans.count[both]) for spans in (left, right))
        differs = np.zeros(left_order.size, np.bool_)
        for name in ("document", "start", "length", "joined"):
            differs |= getattr(left, name)[left_order] != getattr(right, name)[right_order]
        same[np.repeat(both, left.count[both])[differs]] = False
        return same


def stored_rows(stage: Stage) -> dict[str, StoredRows]:
    """Return the sources of a stage whose rows are in stores, by name; the others are live text."""
    return {name: rows for name, rows in stage.rows.items() if isinstance(rows, StoredRows)}


def count_held(rows: StoredRows) -> TokenCounts:
    """Return the tokens and labels of all rows of an epoch; reads masks."""
    starts = range(0, rows.num_rows, _ROWS)
    return sum((rows.held(np.arange(begin, min(begin + _ROWS, rows.num_rows))) for begin in starts), NOTHING)


def count_ones(
    store: Store,
    key: str,
    shards: Int64Array,
    firsts: Int64Array,
    lengths: Int64Array,
) -> int:
    """Return the number of nonzero mask values in runs at (shard, first value within it, length)."""
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
    """Return the number of nonzero bytes in runs whose shard has an address."""
    count = int64(0)
    for i in range(shards.size):
        address = addresses[shards[i]]
        if address:
            for k in range(firsts[i], firsts[i] + lengths[i]):
                count += read_uint8(address, k) != 0
    return count
