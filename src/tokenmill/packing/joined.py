"""Rows of several packings as one: the rest of an earlier epoch, and the first rows of a source for an eval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from tokenmill.packing.stored import StoredRows, count_held
from tokenmill.plan.rows import NOTHING, EpochProgress, Rows, TokenCounts
from tokenmill.store.store import Store
from tokenmill.types import AnyArray, Fates, Int64Array, Spans

if TYPE_CHECKING:
    from tokenmill.packing.records import Runs


@dataclass(frozen=True, kw_only=True)
class JoinedRows(StoredRows):
    """The first rows of some parts, one part after another, then rows without tokens.

    The first part decides sequence length and store. Later parts are the rest before the first epoch (`num_rest`).
    """

    parts: tuple[StoredRows, ...]
    sizes: tuple[int, ...]
    """Number of rows of each part."""
    joined: Mapping[str, int | str | bool]
    """Description of these rows."""
    num_empty: int = 0
    """Number of rows without tokens at the end, which fill the last batch of an eval."""
    num_rest: int = 0

    @property
    def _head(self) -> StoredRows:
        return self.parts[0]

    @property
    def store(self) -> Store:
        """Store of the tokens."""
        return self._head.store

    @property
    def seq_len(self) -> int:
        """Number of input tokens of a row."""
        return self._head.seq_len

    @property
    def row_slots(self) -> int:
        """Number of input slots of a row."""
        return self._head.row_slots

    @property
    def cross_document_labels(self) -> bool:
        """Whether labels cross documents."""
        return self._head.cross_document_labels

    @property
    def segment_multiple(self) -> int:
        """Number of columns: segments are padded to a multiple of it."""
        return self._head.segment_multiple

    @property
    def excluded(self) -> Int64Array:
        """Documents that no row holds, ascending."""
        return self._head.excluded

    @property
    def num_long(self) -> int:
        """Number of documents of an epoch that are longer than a row, or cut to fill one."""
        return self._head.num_long

    @property
    def num_rows(self) -> int:
        """Number of rows of an epoch."""
        return sum(self.sizes) + self.num_empty - self.num_rest

    @property
    def description(self) -> Mapping[str, int | str | bool]:
        """Description of the content of the rows."""
        return self.joined

    @property
    def epoch_description(self) -> Mapping[str, int | str | bool]:
        """Description of the rows of a whole epoch."""
        return self._head.description if self.num_rest else self.joined

    @property
    def whole_epoch(self) -> StoredRows:
        """These rows without a rest before the first epoch."""
        return self._head if self.num_rest else self

    @property
    def index_arrays(self) -> tuple[tuple[AnyArray, bool], ...]:
        """Arrays of all row indexes, each with whether it is mapped from a file."""
        return tuple(array for part in self.parts for array in part.index_arrays)

    @cached_property
    def _fates(self) -> Fates:
        """Fate of every token in an epoch; counts the rows of an eval, and reads their masks."""
        if self.num_rest:
            return self._head.fates()
        held = count_held(self)
        return Fates(
            rows=self.num_rows,
            tokens=held.tokens,
            trained=held.trained,
            masked=held.tokens - held.trained,
            dropped={},
            padding=self.num_rows * self.row_slots - held.tokens,
        )

    def window_starts(self, *, rest: bool) -> Int64Array | None:
        """Return the first row of each packing window of an epoch, or of the rest, and the end."""
        return self.parts[rest].window_starts(rest=False)

    def following(self, previous: Rows, seen: EpochProgress) -> Rows:
        """Return the rows of an epoch, preceded by what is left of another."""
        return self._head.following(previous, seen)

    def whole_blocks(self, rows: Int64Array, block_rows: int) -> tuple[Int64Array, Int64Array] | None:
        """Return the tokens of the blocks of an epoch, and of the windows of the rest, that hold rows."""
        found = [self.parts[number].whole_blocks(own, block_rows) for number, _, own in self._split(rows)]
        begins, ends = zip(*(blocks for blocks in found if blocks is not None), strict=True)
        return np.concatenate(begins), np.concatenate(ends)

    def _split(self, rows: Int64Array) -> list[tuple[int, Int64Array, Int64Array]]:
        """Return (part, indices in `rows`, rows of the part) for each part that has some of the rows."""
        self.check_rows(rows)
        edges = np.cumsum((0, *self.sizes))
        owners = np.searchsorted(edges, rows, side="right") - 1
        chosen = [(number, np.flatnonzero(owners == number)) for number in range(len(self.parts))]
        return [(number, places, rows[places] - edges[number]) for number, places in chosen if places.size]

    def _gather(self, found: list[tuple[Int64Array, Int64Array]]) -> tuple[Int64Array, Int64Array]:
        """Join (rows, owners) of all parts, without rows of a part beyond its first."""
        edges = np.cumsum((0, *self.sizes))
        kept = [rows < size for (rows, _), size in zip(found, self.sizes, strict=True)]
        rows = [each[keep] + edge for (each, _), keep, edge in zip(found, kept, edges[:-1], strict=True)]
        owners = [owner[keep] for (_, owner), keep in zip(found, kept, strict=True)]
        return np.concatenate(rows), np.concatenate(owners)

    def held(self, rows: Int64Array) -> TokenCounts:
        """Return the tokens and labels of some rows."""
        return sum((self.parts[number].held(own) for number, _, own in self._split(rows)), NOTHING)

    def rows_of(self, documents: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the rows that hold tokens of documents, and the index in `documents` of each row."""
        rows, owner = self._gather([part.rows_of(documents) for part in self.parts])
        order = np.argsort(owner, kind="stable")
        return rows[order], owner[order]

    def rows_within_shard(
        self, axis: str, shard: int, begins: Int64Array, ends: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Return the rows that hold values of runs, `begins` to `ends` of a shard, and the run of each."""
        return self._gather([part.rows_within_shard(axis, shard, begins, ends) for part in self.parts])

    def spans(self, rows: Int64Array) -> Spans:
        """Return the spans of some rows, in the order given."""
        found = [(places, self.parts[number].spans(own)) for number, places, own in self._split(rows)]
        return _join(rows.size, found or [(rows[:0], self._head.spans(rows[:0]))])

    def fields(self, rows: Int64Array) -> Mapping[str, Spans | Runs]:
        """Return the spans of each array of some rows, in the order given."""
        found = [(places, self.parts[number].fields(own)) for number, places, own in self._split(rows)]
        found = found or [(rows[:0], self._head.fields(rows[:0]))]
        return {key: _join(rows.size, [(places, each[key]) for places, each in found]) for key in found[0][1]}


def take_rows(rows: StoredRows, taken: int, num_rows: int) -> JoinedRows:
    """Return the first `taken` rows, then rows without tokens, `num_rows` in all: the rows of an eval."""
    description = {**rows.description, "rows": num_rows, "taken": taken}
    return JoinedRows(parts=(rows,), sizes=(taken,), num_empty=num_rows - taken, joined=description)


SpansOrRuns = TypeVar("SpansOrRuns", bound="Spans | Runs")


def _join(number: int, parts: list[tuple[Int64Array, SpansOrRuns]]) -> SpansOrRuns:
    """Join the spans of several sets of rows, given with their places among `number` rows; others have no span."""
    places, spans = parts[0]
    if places.size == number:
        return spans
    first, count = np.zeros((2, number), np.int64)
    filled = 0
    for places, spans in parts:
        first[places] = spans.first + filled
        count[places] = spans.count
        filled += spans.length.size
    names = [item.name for item in fields(spans) if item.name not in ("first", "count")]
    columns = {name: np.concatenate([getattr(each, name) for _, each in parts]) for name in names}
    return type(spans)(first=first, count=count, **columns)
