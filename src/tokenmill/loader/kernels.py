"""The kernels that fill the arrays of a batch, all from the spans of its rows.

A segment is what attends to itself: a span, the rest of a document with the BOS before it, or the padding of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenmill.compiled import inlined, kernel
from tokenmill.store.locate import view_uint8, view_uint16, view_uint32
from tokenmill.types import BoolArray, Int32Array, Int64Array

if TYPE_CHECKING:
    import numpy.typing as npt


IGNORE = -100
"""The label of a token that is not trained on; torch's cross entropy leaves it out by default."""

ADDRESS, WIDTH, LENGTH, JOINED, MASK = range(5)
"""Columns of a span: address and width of its tokens, their number, whether it is joined to the span before it in
its row, and the address of its loss mask or 0."""
SPAN_COLUMNS = 5


@kernel
def describe_spans(out: Int64Array, joined: BoolArray, lengths: Int64Array, width: int) -> None:
    """Write what is known of spans before their shards are mapped."""
    for i in range(lengths.size):
        out[i, ADDRESS] = 0
        out[i, WIDTH] = width
        out[i, LENGTH] = lengths[i]
        out[i, JOINED] = joined[i]
        out[i, MASK] = 0


@kernel
def point_spans(
    out: Int64Array,
    places: tuple[Int64Array, Int64Array],
    shards: Int64Array,
    bases: Int64Array,
    column: int,
    width: int,
) -> None:
    """Write the address of every span at (shard, token); 0 where its shard is not among `shards`."""
    span_shards, tokens = places
    for i in range(tokens.size):
        local = np.searchsorted(shards, span_shards[i])
        here = local < shards.size and shards[local] == span_shards[i]
        out[i, column] = bases[local] + tokens[i] * width if here else 0


@kernel
def copy_rows(
    rows: Int64Array,
    spans: Int64Array,
    shape: tuple[int, int, int, int],
    input_ids: Int64Array,
    labels: Int64Array,
    position_ids: Int64Array,
    doc_ids: Int32Array,
    loss_mask: BoolArray,
) -> None:
    """Fill the arrays that are not empty, from row `begin` on; loss_mask only beside labels.

    shape is (begin, labels cross documents, positions run through the row, pad id). A span whose address is 0
    leaves its tokens alone.
    """
    begin, crossing, continuous, pad = shape
    count = max(input_ids.shape[0], labels.shape[0], position_ids.shape[0], doc_ids.shape[0])
    for i in range(count):
        first = rows[begin + i, 0]
        last = first + rows[begin + i, 1]
        if input_ids.size or labels.size:
            _copy_tokens(spans[first:last], _row(input_ids, i), _row(labels, i), (crossing, pad))
        if loss_mask.size:
            flags, row_labels = loss_mask[i], labels[i]
            for k in range(flags.size):
                flags[k] = row_labels[k] != IGNORE
        if position_ids.size:
            _count_positions(spans[first:last] if not continuous else spans[:0], position_ids[i])
        if doc_ids.size:
            _count_documents(spans[first:last], doc_ids[i])


@inlined
def _row(array: Int64Array, row: int) -> Int64Array:
    return array[row] if array.size else array[0:0].ravel()


@kernel
def _copy_tokens(spans: Int64Array, ids: Int64Array, labels: Int64Array, shape: tuple[int, int]) -> None:
    crossing, pad = shape
    column = 0
    span = 0
    while span < spans.shape[0]:
        # Neighbours in memory are copied as one run: a row of `concat` is one, whatever its documents.
        start = span
        address = spans[span, ADDRESS]
        width = spans[span, WIDTH]
        length = spans[span, LENGTH]
        span += 1
        while span < spans.shape[0] and address and spans[span, ADDRESS] == address + length * width:
            length += spans[span, LENGTH]
            span += 1
        if address:
            copy_run(np.uint64(address), width, length, ids[column:], labels[column:])
        if labels.size:
            _mark_labels(spans, (start, span), labels, column, crossing)
        column += length
    for k in range(column, ids.size):
        ids[k] = pad
    for k in range(max(0, column - 1), labels.size):
        labels[k] = IGNORE


@kernel
def copy_run(address: np.uint64, width: int, length: int, ids: Int64Array, labels: Int64Array) -> None:
    """Copy a run of tokens as inputs, and as the labels of the tokens before them."""
    if width == 2:
        _widen(view_uint16(address, length), ids, labels)
    elif width == 4:
        _widen(view_uint32(address, length), ids, labels)
    else:
        _widen(view_uint8(address, length), ids, labels)


@kernel
def _widen(tokens: npt.NDArray[np.unsignedinteger], ids: Int64Array, labels: Int64Array) -> None:
    for k in range(min(ids.size, tokens.size)):
        ids[k] = tokens[k]
    # Labels begin one token after the inputs; the label of a run's last token is in the next run, if anywhere.
    following = tokens[1:]
    for k in range(min(labels.size, following.size)):
        labels[k] = following[k]


@kernel
def _mark_labels(
    spans: Int64Array,
    run: tuple[int, int],
    labels: Int64Array,
    column: int,
    crossing: int,
) -> None:
    """Correct the labels of a run of spans: at its joints, and where its loss mask says 0."""
    first, last = run
    for number in range(first, last):
        length = spans[number, LENGTH]
        joined = spans[number, JOINED]
        if column:
            if not (joined or crossing):
                labels[column - 1] = IGNORE
            elif number == first and spans[number, ADDRESS]:
                labels[column - 1] = _first_token(np.uint64(spans[number, ADDRESS]), spans[number, WIDTH])
        if spans[number, MASK]:
            mask = view_uint8(np.uint64(spans[number, MASK]), length)
            # The token at column c is the label at column c - 1.
            for k in range(0 if column else 1, min(length, labels.size + 1 - column)):
                if mask[k] == 0:
                    labels[column + k - 1] = IGNORE
        column += length


@kernel
def _first_token(address: np.uint64, width: int) -> int:
    if width == 2:
        return int(np.int64(view_uint16(address, 1)[0]))
    if width == 4:
        return int(np.int64(view_uint32(address, 1)[0]))
    return int(np.int64(view_uint8(address, 1)[0]))


@kernel
def _count_positions(spans: Int64Array, positions: Int64Array) -> None:
    """Count from 0 in every segment."""
    column = 0
    base = 0
    for number in range(spans.shape[0]):
        if not spans[number, JOINED]:
            base = column
        part = positions[column : column + spans[number, LENGTH]]
        begin = column - base
        for k in range(part.size):
            part[k] = begin + k
        column += spans[number, LENGTH]
    for k in range(column, positions.size):
        positions[k] = k - column


@kernel
def _count_documents(spans: Int64Array, documents: Int32Array) -> None:
    """Give the segments of a row their numbers; padding is -1."""
    column = 0
    document = -1
    for number in range(spans.shape[0]):
        if not spans[number, JOINED]:
            document += 1
        documents[column : column + spans[number, LENGTH]] = document
        column += spans[number, LENGTH]
    documents[column:] = -1


@kernel
def find_segments(
    rows: Int64Array, spans: Int64Array, seq_len: int, batch: int
) -> tuple[Int32Array, Int64Array, Int32Array]:
    """Cut rows into batches; return bounds of segments in each, where each batch starts in them, its longest."""
    number = rows.shape[0] // batch
    bounds = np.empty(rows[:, 1].sum() + rows.shape[0] + number, np.int32)
    first = np.empty(number + 1, np.int64)
    longest = np.zeros(number, np.int32)
    filled = 0
    for k in range(number):
        first[k] = filled
        for i in range(batch):
            line = rows[k * batch + i]
            column = 0
            for span in range(line[0], line[0] + line[1]):
                if not spans[span, JOINED] and column < seq_len:
                    bounds[filled] = i * seq_len + column
                    filled += 1
                column += spans[span, LENGTH]
            if column < seq_len:
                bounds[filled] = i * seq_len + column
                filled += 1
        bounds[filled] = batch * seq_len
        filled += 1
        for segment in range(first[k], filled - 1):
            longest[k] = max(longest[k], bounds[segment + 1] - bounds[segment])
    first[number] = filled
    return bounds[:filled], first, longest


@kernel
def count_labels(rows: Int64Array, spans: Int64Array, crossing: int) -> Int64Array:
    """Return how many labels each row has where no loss mask says otherwise."""
    counts = np.zeros(rows.shape[0], np.int64)
    for i in range(rows.shape[0]):
        for number in range(rows[i, 0], rows[i, 0] + rows[i, 1]):
            first = number == rows[i, 0]
            counts[i] += spans[number, LENGTH] - (first or not (spans[number, JOINED] or crossing))
    return counts
