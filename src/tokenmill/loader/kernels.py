"""The kernels that fill the arrays of a batch, all from the spans of its rows.

A segment is what attends to itself: a span, the rest of a document with the BOS before it, or the padding of a row.

Lengths come from files. Whatever they are, no kernel writes past the end of a row; blocks refuse a longer one.
"""

from __future__ import annotations

import numpy as np

from tokenmill.compiled import (
    address_of,
    inlined,
    inner,
    int64,
    kernel,
    least,
    read_uint8,
    read_uint16,
    read_uint32,
    write_int8,
    write_int32,
    write_int64,
)
from tokenmill.types import BoolArray, Int32Array, Int64Array, Uint32Array, counted_from, run_sums

IGNORE = -100
"""The label of a token that is not trained on; torch's cross entropy leaves it out by default."""

ADDRESS, WIDTH, LENGTH, JOINED, MASK = range(5)
"""Columns of a span: address and width of its tokens, their number, whether it is joined to the span before it in
its row, and the address of its loss mask or 0."""
SPAN_COLUMNS = 5


def describe_spans(out: Int64Array, joined: BoolArray, lengths: Int64Array, width: int) -> None:
    """Write what is known of spans before their shards are mapped."""
    out[:, ADDRESS] = out[:, MASK] = 0
    out[:, WIDTH] = width
    out[:, LENGTH] = lengths
    out[:, JOINED] = joined


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
    if not tokens.size:
        return
    local = np.minimum(np.searchsorted(shards, span_shards), shards.size - 1) if shards.size > 1 else 0
    here = shards[local] == span_shards
    out[: tokens.size, column] = np.where(here, bases[local] + tokens * width, 0)


def copy_rows(
    rows: Int64Array,
    spans: Int64Array,
    shape: tuple[int, int, int, int, int],
    input_ids: Int64Array,
    labels: Int64Array,
    position_ids: Int64Array,
    doc_ids: Int32Array,
    loss_mask: BoolArray,
) -> int:
    """Fill the arrays that are not empty, from row `begin` on; loss_mask only beside labels.

    shape is (begin, labels cross documents, positions run through the row, pad id, number of columns of which every
    segment begins at a multiple). A span whose address is 0 leaves its tokens alone. Returns how many tokens the
    longest row has: more than there is room for are left out.
    """
    begin, crossing, continuous, pad, multiple = shape
    longest = 0
    if input_ids.size or labels.size:
        longest = _copy_tokens(rows, spans, begin, crossing, pad, multiple, input_ids, labels)
    if loss_mask.size:
        np.not_equal(labels, IGNORE, out=loss_mask)
    if position_ids.size or doc_ids.size:
        _number_tokens(rows, spans, begin, continuous, multiple, position_ids, doc_ids)
    return longest


@kernel
def _copy_tokens(
    rows: Int64Array,
    spans: Int64Array,
    begin: int,
    crossing: int,
    pad: int,
    multiple: int,
    input_ids: Int64Array,
    labels: Int64Array,
) -> int:
    """Fill inputs and labels, or one of them; the label of a column is the token of the next one.

    Returns how many tokens the longest row has.
    """
    longest = int64(0)
    with_ids, with_labels = input_ids.size > 0, labels.size > 0
    num_rows, seq_len = input_ids.shape if with_ids else labels.shape
    ids_address, labels_address = address_of(input_ids), address_of(labels)
    for i in range(num_rows):
        span = rows[begin + i, 0]
        last = span + rows[begin + i, 1]
        column = int64(0)
        while span < last:
            if multiple > 1 and 0 < column < seq_len and not spans[span, JOINED]:
                begins = least(padded_to(column, multiple), seq_len)
                _fill(ids_address, column, begins * with_ids, pad)
                _fill(labels_address, column - 1, (begins - 1) * with_labels, IGNORE)
                column = begins
            # Neighbours in memory are copied as one run: a row of `concat` is one, whatever its documents.
            first = span
            address, width, length = spans[span, ADDRESS], spans[span, WIDTH], spans[span, LENGTH]
            span += 1
            while span < last and address and spans[span, ADDRESS] == address + length * width and multiple == 1:
                length += spans[span, LENGTH]
                span += 1
            if address and with_ids:
                _widen(address, width, least(length, seq_len - column), ids_address + 8 * column)
            if address and with_labels:
                skipped = int64(column == 0)  # the first token of a row is no label
                count = least(length, seq_len + 1 - column) - skipped
                _widen(address + skipped * width, width, count, labels_address + 8 * (column + skipped - 1))
            if with_labels:
                _mark_labels(spans, first, span, labels_address, column, seq_len, crossing)
            column += length
        longest = column if column > longest else longest
        if with_ids:
            for k in range(column, seq_len):
                write_int64(ids_address, k, pad)
            ids_address += 8 * seq_len
        if with_labels:
            for k in range(column - (column > 0), seq_len):
                write_int64(labels_address, k, IGNORE)
            labels_address += 8 * seq_len
    return longest


@inner
def _fill(target: int, begin: int, end: int, value: int) -> None:
    """Write a number of 64 bits to some columns; to none where `end` is not after `begin`."""
    for k in range(begin, end):
        write_int64(target, k, value)


@inlined
def padded_to(columns: int, multiple: int) -> int:
    """Return the first multiple that is not below a number of columns."""
    return (columns + multiple - 1) // multiple * multiple


@inner
def _widen(source: int, width: int, count: int, target: int) -> None:
    """Copy so many tokens of `width` bytes each as numbers of 64 bits."""
    if width == 2:
        for k in range(count):
            write_int64(target, k, read_uint16(source, k))
    elif width == 4:
        for k in range(count):
            write_int64(target, k, read_uint32(source, k))
    else:
        for k in range(count):
            write_int64(target, k, read_uint8(source, k))


@inner
def _mark_labels(
    spans: Int64Array, first: int, last: int, labels: int, column: int, seq_len: int, crossing: int
) -> None:
    """Take back the labels of a run of spans at its joints, and where its loss mask says 0."""
    for number in range(first, last):
        length, mask = spans[number, LENGTH], spans[number, MASK]
        if 0 < column <= seq_len and not (spans[number, JOINED] or crossing):
            write_int64(labels, column - 1, IGNORE)
        if mask:
            for k in range(column == 0, least(length, seq_len + 1 - column)):
                if read_uint8(mask, k) == 0:
                    write_int64(labels, column + k - 1, IGNORE)
        column += length


@kernel
def _number_tokens(
    rows: Int64Array,
    spans: Int64Array,
    begin: int,
    continuous: int,
    multiple: int,
    position_ids: Int64Array,
    doc_ids: Int32Array,
) -> None:
    """Count positions from 0 in every segment or in the row, and give segments their numbers; padding is -1.

    Padding that fills a segment up to a multiple belongs to it, so that positions go on there.
    """
    with_positions, with_documents = position_ids.size > 0, doc_ids.size > 0
    num_rows, seq_len = position_ids.shape if with_positions else doc_ids.shape
    positions, documents = address_of(position_ids), address_of(doc_ids)
    for i in range(num_rows):
        column = base = int64(0)
        document = int64(-1)
        first = rows[begin + i, 0]
        for number in range(first, first + rows[begin + i, 1] + 1):
            end = seq_len
            begins = column
            if number == first + rows[begin + i, 1] or not spans[number, JOINED]:
                begins = least(padded_to(column, multiple), seq_len)
            # What fills a segment up goes on with its positions, and is of no document.
            if begins > column:
                _number(positions * with_positions, documents * with_documents, column, begins, base, int64(-1))
                column = begins
            if number < first + rows[begin + i, 1]:
                end = least(seq_len, column + spans[number, LENGTH])
                if not spans[number, JOINED]:
                    base = column
                    document += 1
            else:
                base = column
                document = int64(-1)
            if continuous:
                base = int64(0)
            _number(positions * with_positions, documents * with_documents, column, end, base, document)
            column = end
        positions += 8 * seq_len
        documents += 4 * seq_len


@inner
def _number(positions: int, documents: int, column: int, end: int, base: int, document: int) -> None:
    """Write positions and document of some columns, each where there is an address."""
    if positions:
        for k in range(column, end):
            write_int64(positions, k, k - base)
    if documents:
        for k in range(column, end):
            write_int32(documents, k, document)


def find_segments(
    rows: Int64Array, spans: Int64Array, seq_len: int, batch: int, multiple: int = 1
) -> tuple[Int32Array, Int32Array, Int64Array, Int32Array]:
    """Cut rows into batches; return bounds of segments, also in tokens, where batches start in them, the longest.

    A segment has what fills it up to a multiple; that is no token.
    """
    number = rows.shape[0] // batch
    bounds = np.empty((2, int(rows[:, 1].sum()) + rows.shape[0] + number), np.int32)
    first = np.empty(number + 1, np.int64)
    longest = np.zeros(number, np.int32)
    _find_segments(rows, spans, (seq_len, batch, multiple), bounds, first, longest)
    return bounds[0, : first[number]], bounds[1, : first[number]], first, longest


@kernel
def _find_segments(
    rows: Int64Array,
    spans: Int64Array,
    shape: tuple[int, int, int],
    bounds: Int32Array,
    first: Int64Array,
    longest: Int32Array,
) -> None:
    seq_len, batch, multiple = shape
    filled = int64(0)
    for k in range(longest.size):
        first[k] = filled
        total = int64(0)
        for i in range(batch):
            span = rows[k * batch + i, 0]
            last = span + rows[k * batch + i, 1]
            column = int64(0)
            while span <= last and column < seq_len:
                # After the last span stands the padding, a segment of its own.
                if span == last or not spans[span, JOINED]:
                    column = padded_to(column, multiple)
                    if column >= seq_len:
                        break
                    bounds[0, filled] = i * seq_len + column
                    bounds[1, filled] = total
                    filled += 1
                if span < last:
                    total += least(spans[span, LENGTH], seq_len - column)
                column += spans[span, LENGTH] if span < last else seq_len
                span += 1
        bounds[0, filled] = batch * seq_len
        bounds[1, filled] = total
        filled += 1
        for segment in range(first[k], filled - 1):
            longest[k] = max(longest[k], bounds[0, segment + 1] - bounds[0, segment])
    first[longest.size] = filled


def count_labels(rows: Int64Array, spans: Int64Array, crossing: int) -> Int64Array:
    """Return how many labels each row has where no loss mask says otherwise."""
    # The first span of a row has one less than tokens, and so has every other that nothing before it predicts.
    labels = spans[:, LENGTH] - (0 if crossing else spans[:, JOINED] == 0)
    counts = run_sums(rows[:, 0], rows[:, 1], labels)
    if crossing:
        counts -= rows[:, 1] > 0
    return counts


def count_ahead(rows: Int64Array, spans: Int64Array, horizon: int) -> Int64Array:
    """Return the number of labels of each row for each of the next `horizon` tokens, without loss masks."""
    order = counted_from(rows[:, 0], rows[:, 1])
    begins = np.flatnonzero(spans[order, JOINED] == 0)
    lengths = np.add.reduceat(spans[order, LENGTH], begins) if begins.size else begins
    labels = np.maximum(lengths[:, None] - 1 - np.arange(horizon), 0)
    before = np.concatenate([np.zeros((1, horizon), np.int64), np.cumsum(labels, axis=0)])
    owner = np.repeat(np.arange(rows.shape[0]), rows[:, 1])[begins]
    edges = before[np.searchsorted(owner, np.arange(rows.shape[0] + 1))]
    return np.diff(edges, axis=0)


def labels_ahead(labels: Int64Array, doc_ids: Int32Array, horizon: int) -> Int64Array:
    """Return labels of the next `horizon` tokens, with one more axis, from whole rows of labels and document ids.

    A label of an input belongs to the segment of the input. The label k tokens ahead is the ordinary label of the
    input k - 1 columns later, so the last k - 1 columns of a row have none.

    >>> labels_ahead(np.array([[5, 6, -100, 8]]), np.array([[0, 0, 0, 1]], np.int32), 2)[0].tolist()
    [[5, 6], [6, -100], [-100, -100], [8, -100]]
    """
    out = np.full((*labels.shape, horizon), IGNORE, np.int64)
    for ahead in range(min(horizon, labels.shape[1])):
        end = labels.shape[1] - ahead
        is_same = doc_ids[:, ahead:] == doc_ids[:, :end]
        out[:, :end, ahead] = np.where(is_same, labels[:, ahead:], IGNORE)
    return out


# Records: several lines of one array in a row, each padded to one length.


@kernel
def copy_records(
    rows: Int64Array,
    spans: Int64Array,
    begin: int,
    pad: int,
    ids: Int64Array,
    flags: BoolArray,
    lengths: Int64Array,
) -> None:
    """Fill the arrays that are not empty, from row `begin` on, a line for each span of a row.

    A span whose address is 0 leaves its values alone; one without a mask is trained on whole. A row that has fewer
    spans than the arrays have lines is filled up with empty ones.
    """
    num_rows, num_lines = lengths.shape
    line_size = int64(1) << 62
    if ids.size:
        num_rows, num_lines, line_size = ids.shape
    elif flags.size:
        num_rows, num_lines, line_size = flags.shape
    line, flag_line = address_of(ids), address_of(flags)
    for i in range(num_rows):
        for k in range(num_lines):
            address = width = length = mask = int64(0)
            if k < rows[begin + i, 1]:
                span = rows[begin + i, 0] + k
                address, width = spans[span, ADDRESS], spans[span, WIDTH]
                length, mask = least(spans[span, LENGTH], line_size), spans[span, MASK]
            if lengths.size:
                lengths[i, k] = length
            if ids.size:
                if address:
                    _widen(address, width, length, line)
                for j in range(length, ids.shape[2]):
                    write_int64(line, j, pad)
                line += 8 * ids.shape[2]
            if flags.size:
                _copy_flags(mask, address, length, flag_line, flags.shape[2])
                flag_line += flags.shape[2]


@inner
def _copy_flags(mask: int, address: int, length: int, target: int, size: int) -> None:
    """Write what a mask says, or True where there is none; False after it. Without an address nothing is known."""
    if mask:
        for k in range(length):
            write_int8(target, k, int64(read_uint8(mask, k) != 0))
    elif address:
        for k in range(length):
            write_int8(target, k, int64(1))
    for k in range(length, size):
        write_int8(target, k, int64(0))


@kernel
def copy_words(rows: Int64Array, spans: Int64Array, begin: int, out: Uint32Array) -> None:
    """Copy values of 32 bits, whatever they mean, one span a row or none, and put 0 after them."""
    line = address_of(out)
    for i in range(out.shape[0]):
        address = length = int64(0)
        if rows[begin + i, 1]:
            span = rows[begin + i, 0]
            address, length = spans[span, ADDRESS], least(spans[span, LENGTH], out.shape[1])
        if address:
            for k in range(length):
                write_int32(line, k, read_uint32(address, k))
        for k in range(length, out.shape[1]):
            write_int32(line, k, int64(0))
        line += 4 * out.shape[1]
