"""Attribution: which tokens of which documents are in the segments of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from tokenmill.packing.stored import StoredRows
from tokenmill.types import Int64Array, counted_from

NO_DOCUMENT = -1
"""Document of a row of live text: its documents have no numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attribution:
    """Documents in the rows of one rank in one step, as arrays of equal length with one entry per span.

    Entries are ordered by row, then as the spans of the row. Two spans are one segment where the rest of a document
    follows its BOS. The last token of a full row is a label only, so a segment may have no column in the batch.
    """

    batch_row: Int64Array
    """Index of the row in `loader.batch_at(step)`."""
    slot: Int64Array
    """Index of the row in the global batch of the step."""
    segment: Int64Array
    """Index of the segment in its row, as in `doc_ids`."""
    source: Int64Array
    """Index of the source in `plan.sources`."""
    document: Int64Array
    """Index of the document in its source. It is -1 in the one entry of a row of live text."""
    start: Int64Array
    """First token of the span, counted from the first token of the document."""
    length: Int64Array
    """Number of tokens of the span; 0 for live text."""


def attribute(
    stored: Mapping[int, StoredRows], slots: Int64Array, sources: Int64Array, rows: Int64Array
) -> Attribution:
    """Return the documents of rows, given by source and row; sources that are not `stored` are live text."""
    parts: list[tuple[Int64Array, ...]] = []
    for source in np.unique(sources).tolist():
        chosen = np.flatnonzero(sources == source)
        if source not in stored:
            none = np.zeros_like(chosen)
            parts.append((chosen, slots[chosen], none, none + source, none + NO_DOCUMENT, none, none))
            continue
        spans = stored[source].spans(rows[chosen])
        order, owner = counted_from(spans.first, spans.count), np.repeat(chosen, spans.count)
        begins = ~spans.joined[order]
        # The segments before each row are not its own.
        before: Int64Array = np.cumsum(begins) - begins
        heads = np.cumsum(spans.count) - spans.count
        first: Int64Array = np.repeat(before[heads[spans.count > 0]], spans.count[spans.count > 0])
        segment = np.cumsum(begins) - 1 - first
        parts.append(
            (
                owner,
                slots[owner],
                segment,
                np.full_like(owner, source),
                spans.document[order],
                spans.start[order],
                spans.length[order],
            )
        )
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    by_row = np.argsort(columns[0], kind="stable")
    names = [item.name for item in fields(Attribution)]
    return Attribution(**{name: column[by_row] for name, column in zip(names, columns, strict=True)})
