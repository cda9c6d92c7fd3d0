"""Uses of rows and documents: which batches of a run hold them, as objects and as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby

import numpy as np

from tokenmill.errors import PlanError
from tokenmill.plan.rows import Rows
from tokenmill.plan.stages import Stage, uses_in_stage
from tokenmill.types import Int64Array, Span, counted_from, distinct

_WHOLE = np.iinfo(np.int64).max


@dataclass(frozen=True, kw_only=True, slots=True)
class RowUse:
    """One row of one batch."""

    step: int
    slot: int
    """Index of the row in the global batch of the step."""
    source: str
    row: int
    """Index of the row in its source."""
    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentUses:
    """Uses of token ranges of documents in a run, as arrays of equal length with one entry per span.

    Entries are ordered by query, step and slot, and within a row as the row has them.
    """

    query: Int64Array
    """Index of the range that was asked for."""
    step: Int64Array
    slot: Int64Array
    """Index of the row in the global batch of the step."""
    row: Int64Array
    """Index of the row in the source."""
    document: Int64Array
    start: Int64Array
    """First used token of the range, counted from the first token of the document."""
    length: Int64Array
    """Number of tokens of the range that the span holds."""

    def __len__(self) -> int:
        """Return the number of entries."""
        return int(self.query.size)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Queries:
    """Token ranges of documents, sorted by document."""

    number: Int64Array
    document: Int64Array
    start: Int64Array
    end: Int64Array

    @property
    def documents(self) -> Int64Array:
        return distinct(self.document)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entries:
    """Spans of rows that hold a part of a query, sorted by row."""

    rows: Int64Array
    """Distinct rows, ascending."""
    first: Int64Array
    """First entry of each row, and the number of entries."""
    query: Int64Array
    document: Int64Array
    start: Int64Array
    length: Int64Array


def find_uses(
    stages: Sequence[Stage],
    source: str,
    documents: Int64Array,
    starts: Int64Array | None = None,
    ends: Int64Array | None = None,
) -> DocumentUses:
    """Return every use of token ranges of documents in some stages."""
    queries = _sort_queries(documents, starts, ends)
    parts: list[tuple[Int64Array, ...]] = [(np.empty(0, np.int64),) * 7]
    index, entries = None, None
    for stage in stages:
        if source not in stage.names:
            continue
        if index is not stage.rows[source] or entries is None:
            index = stage.rows[source]
            entries = _find_entries(index, queries)
        steps, slots, rows = uses_in_stage(stage, source, entries.rows)
        place = np.searchsorted(entries.rows, rows)
        count = entries.first[place + 1] - entries.first[place]
        own = counted_from(entries.first[place], count)
        where = (np.repeat(column, count) for column in (steps, slots, rows))
        parts.append((entries.query[own], *where, entries.document[own], entries.start[own], entries.length[own]))
    query, step, slot, *columns = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((slot, step, query))
    names = [item.name for item in fields(DocumentUses)]
    return DocumentUses(
        **{name: column[order] for name, column in zip(names, (query, step, slot, *columns), strict=True)}
    )


def _sort_queries(documents: Int64Array, starts: Int64Array | None, ends: Int64Array | None) -> _Queries:
    """Check token ranges of documents and sort them; without `starts` and `ends`, documents are whole."""
    columns = [
        np.asarray(documents),
        np.zeros(np.shape(documents), np.int64) if starts is None else np.asarray(starts),
        np.full(np.shape(documents), _WHOLE) if ends is None else np.asarray(ends),
    ]
    for name, column in zip(("documents", "starts", "ends"), columns, strict=True):
        if column.ndim != 1 or column.size != columns[0].size or (column.size and column.dtype.kind not in "iu"):
            raise PlanError(
                f"{name}: expected {columns[0].size} integers in one dimension, got shape {column.shape} of "
                f"{column.dtype}; pass one entry per range"
            )
    document, start, end = (column.astype(np.int64) for column in columns)
    wrong = np.flatnonzero((start < 0) | (end <= start))
    if wrong.size:
        number = int(wrong[0])
        raise PlanError(
            f"documents: range {number} is not valid: tokens {int(start[number])}:{int(end[number])} of document "
            f"{int(document[number])}; count from 0, with starts below ends"
        )
    order = np.argsort(document, kind="stable")
    return _Queries(number=order, document=document[order], start=start[order], end=end[order])


def _find_entries(index: Rows, queries: _Queries) -> _Entries:
    """Return the spans of rows that hold a part of a query."""
    rows = distinct(index.rows_of(queries.documents)[0])
    spans = index.spans(rows)
    order = counted_from(spans.first, spans.count)
    row = np.repeat(np.arange(rows.size), spans.count)
    document, start, length = spans.document[order], spans.start[order], spans.length[order]
    # Each span meets the queries of its document.
    first, last = (np.searchsorted(queries.document, document, side=side) for side in ("left", "right"))
    meeting = counted_from(first, last - first)
    owner = np.repeat(np.arange(document.size), last - first)
    begin = np.maximum(start[owner], queries.start[meeting])
    end = np.minimum((start + length)[owner], queries.end[meeting])
    # An empty record has a span without tokens.
    kept = (end > begin) | ((length[owner] == 0) & (end == begin))
    owner, meeting, begin, end = owner[kept], meeting[kept], begin[kept], end[kept]
    return _Entries(
        rows=rows,
        first=np.searchsorted(row[owner], np.arange(rows.size + 1)),
        query=queries.number[meeting],
        document=document[owner],
        start=begin,
        length=end - begin,
    )


def as_row_uses(uses: DocumentUses, source: str) -> Iterator[RowUse]:
    """Yield the uses as objects, in their order: one per query and row, with its spans of the query's document."""
    columns = (uses.query, uses.step, uses.slot, uses.row, uses.document, uses.start, uses.length)
    entries = zip(*(column.tolist() for column in columns), strict=True)
    for (_, step, slot, row), spans in groupby(entries, key=lambda entry: entry[:4]):
        found = tuple(Span(document=document, start=start, length=length) for *_, document, start, length in spans)
        yield RowUse(step=step, slot=slot, source=source, row=row, spans=found)
