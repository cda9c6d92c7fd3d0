"""A window as rows: its documents are read, tokenized, put in order and packed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from tokenmill.compiled import kernel
from tokenmill.documents import read_unit
from tokenmill.encode.tokenizer import Tokenizer, frame, token_dtype
from tokenmill.errors import DocumentError, ResumeError
from tokenmill.live.source import LiveOptions, Window, record_name
from tokenmill.loader.drawn import Skipped
from tokenmill.loader.kernels import ADDRESS, SPAN_COLUMNS, describe_spans, point_spans
from tokenmill.loader.state import CHECK_DIGITS, DrawnRows
from tokenmill.packing.index import (
    WindowFragments,
    WindowIndex,
    index_in_memory,
    num_windows,
    pack_one,
    whole_documents,
)
from tokenmill.packing.packers import DROP, FORBID, MAX_DOCUMENTS
from tokenmill.packing.rows import unseen
from tokenmill.plan.order import Shuffle
from tokenmill.plan.permute import permute_all
from tokenmill.plan.rows import EpochProgress
from tokenmill.reasons import REASONS
from tokenmill.types import NO_DOCUMENTS, Encoded, Fates, Int64Array, Spans, UnsignedArray

BROKEN = "broken"
"""Why a window is left out, beside the reasons of records."""
EMPTY = "empty"
"""Why a text without a character is left out."""
Beat = Callable[[], None]
"""Called whenever some work is done: it shows that a thread lives, and ends work that nobody wants any more."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokenized:
    """The documents of a window as tokens, in the order of an epoch."""

    window: Window
    epoch: int
    encoded: Encoded
    places: Int64Array
    """(piece, line) of each document."""
    skipped: tuple[Skipped, ...]

    @cached_property
    def check(self) -> str:
        """Digest of the tokens: a state has it, so that other text is not taken for that of a window."""
        return xxhash.xxh3_64_hexdigest(self.encoded.ids.data)[:CHECK_DIGITS]


def tokenize_window(
    window: Window, epoch: int, tokenizer: Tokenizer, options: LiveOptions, beat: Beat = lambda: None
) -> Tokenized:
    """Read the documents of a window, tokenize them and put them in order, for any packing.

    A batch is tokenized while it is in the caches of the core that read it. Tokens are sorted, not texts, so texts
    can be freed.
    """
    skipped: list[Skipped] = []
    if options.fim is not None:
        tokenizer = options.fim.wrap(tokenizer, epoch)
    parts = _encode_parts(window, tokenizer, options, skipped, beat)
    places = np.concatenate([np.empty((0, 2), np.int64), *(places for _, places in parts)])
    order = np.arange(len(places))
    if options.shuffle and order.size:
        order = permute_all(order, order.size, window.key(options.seed, epoch, "documents"))
    return Tokenized(
        window=window,
        epoch=epoch,
        encoded=in_order([no_documents(tokenizer), *(encoded for encoded, _ in parts)], order),
        places=places[order],
        skipped=tuple(skipped),
    )


def _encode_parts(
    window: Window, tokenizer: Tokenizer, options: LiveOptions, skipped: list[Skipped], beat: Beat
) -> list[tuple[Encoded, Int64Array]]:
    """Read and tokenize the documents of a window; each part comes with (piece, line) of its documents.

    A missing file, or one of another size, ends the run for any `on_error`, because states of the run belong to the
    same files.
    """
    _check_sizes(window)
    try:
        return [
            (frame(tokenizer.encode(texts), tokenizer.identity), places)
            for texts, places in _read_texts(window, options, skipped, beat)
            if texts
        ]
    except DocumentError as error:
        _check_sizes(window)
        if options.on_error == "stop":
            raise _placed(error, window) from None
        skipped[:] = [Skipped(reason=BROKEN, place=str(window))]
        return []


def _read_texts(
    window: Window, options: LiveOptions, skipped: list[Skipped], beat: Beat
) -> Iterator[tuple[list[str], Int64Array]]:
    """Yield the texts of a window, some at a time, with (piece, line) of each; note what is left out."""
    pieces = window.unit.pieces
    documents = bad = 0
    for batch in read_unit(window.unit, options.reading):
        beat()
        for record in batch.bad:
            where = record_name(pieces[record.piece], record.line)
            if options.on_error == "stop":
                raise DocumentError(
                    f"{where}: {REASONS[record.reason].rule}, got {record.detail}; "
                    f"{REASONS[record.reason].way_out}, or skip it with on_error='skip'"
                )
            if window.members(bad, 1).size:  # so that each is counted by one of the parts of its unit
                skipped += [Skipped(reason=record.reason, place=where)] * record.count
            bad += 1
        texts: list[str] = batch.documents
        places = np.array([batch.pieces, batch.lines], np.int64).T
        members = window.members(documents, len(texts))
        documents += len(texts)
        if members.size < len(texts):
            texts, places = [texts[number] for number in members.tolist()], places[members]
        if not options.keep_empty and "" in texts:
            skipped += [
                Skipped(reason=EMPTY, place=record_name(pieces[piece], line))
                for text, (piece, line) in zip(texts, places.tolist(), strict=True)
                if not text
            ]
            filled = [number for number, text in enumerate(texts) if text]
            texts, places = [texts[number] for number in filled], places[filled]
        yield texts, places


def no_documents(tokenizer: Tokenizer) -> Encoded:
    """Return no document at all, with ids as the tokenizer's are kept."""
    return Encoded(ids=np.empty(0, token_dtype(tokenizer.identity.vocab_size)), offsets=np.zeros(1, np.int64))


def in_order(parts: Sequence[Encoded], order: Int64Array) -> Encoded:
    """Put documents in an order; those of all parts are counted through, from 0."""
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    offsets = np.zeros(order.size + 1, np.int64)
    np.cumsum(lengths[order], out=offsets[1:])
    targets = np.empty(order.size, np.int64)
    targets[order] = offsets[:-1]
    ids = np.empty(int(offsets[-1]), parts[0].ids.dtype)
    first = 0
    for part in parts:
        source = part.ids.view()
        source.flags.writeable = False  # as that of some engines is: one kernel for all
        _copy_documents(source, part.offsets, targets[first : first + part.num_documents], ids)
        first += part.num_documents
    return Encoded(ids=ids, offsets=offsets)


@kernel
def _copy_documents(ids: UnsignedArray, offsets: Int64Array, targets: Int64Array, copied: UnsignedArray) -> None:
    """Copy each document of `ids` to its place in `copied`."""
    for document in range(targets.size):
        source = ids[offsets[document] : offsets[document + 1]]
        target = copied[targets[document] : targets[document] + source.size]
        for k in range(source.size):
            target[k] = source[k]


def _check_sizes(window: Window) -> None:
    for file in {piece.file.path: piece.file for piece in window.unit.pieces}.values():
        try:
            size = os.stat(file.path).st_size
        except OSError as error:
            raise DocumentError(
                f"{file.path}: must stay readable while it is trained on, got {error.strerror}; put it back"
            ) from None
        if size != file.bytes:
            raise DocumentError(
                f"{file.path}: must keep its {file.bytes} bytes while it is trained on, got {size}; "
                "let nothing write to it, and put it back as it was"
            )


def _placed(error: DocumentError, window: Window) -> DocumentError:
    """Add the part of the file that was read to an error that names the file only."""
    for path in {piece.file.path for piece in window.unit.pieces}:
        if str(error).startswith(f"{path}: "):
            return DocumentError(f"{window}{str(error).removeprefix(path)}")
    return error


# Packing.

TOO_LONG = "too_many_tokens"
"""Why a document that must not be cut is left out, beside the reasons of records."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, weakref_slot=True)
class WindowRows:
    """The rows of a window, in the order in which they are delivered."""

    lines: list[bytes]
    """The spans of each row, as the kernels of the loader want them; they hold addresses within `ids`."""
    ids: UnsignedArray
    fates: Fates
    skipped: tuple[Skipped, ...]
    """Items that are left out in addition to those of earlier formats."""
    tokenized: Tokenized
    first: int = 0
    """The first of them that was not delivered yet."""

    @property
    def num_rows(self) -> int:
        """Number of rows; 0 if no document has a token."""
        return len(self.lines)


class _Documents(NamedTuple):
    """The documents of a window, to be packed."""

    path: Path
    encoded: Encoded

    @property
    def num_documents(self) -> int:
        return self.encoded.num_documents

    def document_offsets(self, begin: int, end: int) -> Int64Array:
        return self.encoded.offsets[begin : end + 1]

    def locate(self, documents: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return (shard, first token, number of tokens) of each document; there is one shard."""
        offsets = self.encoded.offsets
        begins = offsets[documents]
        return np.zeros_like(begins), begins, offsets[documents + 1] - begins


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packed:
    """The documents of a window, packed in one format."""

    store: _Documents
    index: WindowIndex
    excluded: Int64Array

    def spans(self, rows: Int64Array) -> Spans:
        return self.index.spans(rows, self.store.num_documents, self.store.locate, str(self.store.path))

    def rows_of_window(self, window: int, offsets: Int64Array) -> Int64Array:  # noqa: ARG002 - the index knows them
        return self.index.rows_of_window(window)


def pack_window(tokenized: Tokenized, options: LiveOptions, drawn: Sequence[DrawnRows] = ()) -> WindowRows:
    """Pack the documents of a window; or, where rows of it were drawn, those that are left.

    Where they were made in another format, what they have left is packed anew; the rows of `drawn` before the last
    are of formats before that one. The same documents and options always give the same rows.
    """
    formats = [options.in_format(format) for format, _ in drawn]
    if not formats or formats[-1] != options:
        formats.append(options)
    skipped = list(tokenized.skipped)
    encoded, kept = tokenized.encoded, np.arange(tokenized.encoded.num_documents)
    if formats[0].policy.split_mode in (FORBID, DROP):
        long = _too_long(kept, np.diff(encoded.offsets), tokenized, formats[0], skipped)
        encoded, kept = _without(encoded, long), np.delete(kept, long)
    documents = _Documents(Path(tokenized.window.unit.pieces[0].file.path), encoded)
    packed = _pack(documents, whole_documents(documents), formats[0], str(tokenized.window))
    for turn, format in enumerate(formats[1:]):
        seen = _seen(packed, tokenized, options, drawn[turn].rows, turn)
        skipped = []  # those of formats before this one were counted
        packed = _pack_rest(packed, seen, format, tokenized, kept, skipped)
    order = np.arange(packed.index.num_rows)
    if options.shuffle and order.size:
        order = permute_all(order, order.size, _row_key(tokenized, options, len(formats) - 1))
    first = 0
    if len(drawn) == len(formats):
        first, skipped = drawn[-1].rows, []
        _check_row(first, packed, tokenized)
    ids = np.ascontiguousarray(encoded.ids)
    return WindowRows(
        lines=_lines(packed, order, ids),
        ids=ids,
        fates=packed.index.fates(formats[-1].policy),
        skipped=tuple(skipped),
        tokenized=tokenized,
        first=first,
    )


def _pack(
    documents: _Documents,
    fragments: WindowFragments,
    options: LiveOptions,
    where: str,
    excluded: Int64Array = NO_DOCUMENTS,
) -> _Packed:
    """Pack documents, or what is left of them. `concat` pads its last row, so that no token is lost."""
    windows = range(num_windows(documents))
    index = index_in_memory(
        pack_one(number, fragments, options.seq_len, options.policy, where, excluded) for number in windows
    )
    return _Packed(store=documents, index=index, excluded=excluded)


def _pack_rest(
    packed: _Packed,
    seen: EpochProgress,
    options: LiveOptions,
    tokenized: Tokenized,
    kept: Int64Array,
    skipped: list[Skipped],
) -> _Packed:
    """Pack what is left of documents in another format."""
    fragments, excluded = unseen(packed, seen, options.policy), packed.excluded
    if options.policy.split_mode in (FORBID, DROP):
        left = [(window * MAX_DOCUMENTS, fragments(window)[0]) for window in range(num_windows(packed.store))]
        documents = np.concatenate([NO_DOCUMENTS, *(begin + pieces[0] for begin, pieces in left)])
        lengths = np.concatenate([NO_DOCUMENTS, *(pieces[2] for _, pieces in left)])
        long = documents[_too_long(kept[documents], lengths, tokenized, options, skipped)]
        excluded = np.union1d(long, excluded)
    return _pack(packed.store, fragments, options, str(tokenized.window), excluded)


def _seen(packed: _Packed, tokenized: Tokenized, options: LiveOptions, drawn: int, turn: int) -> EpochProgress:
    """Return which rows of a window were drawn before its rows were made in another format."""
    _check_row(drawn, packed, tokenized)
    return EpochProgress(
        rest=turn > 0,
        size=packed.index.num_rows,
        drawn=drawn,
        key=int(_row_key(tokenized, options, turn)),
        shuffle=Shuffle(mode="full" if options.shuffle else "none"),
    )


def _check_row(row: int, packed: _Packed, tokenized: Tokenized) -> None:
    """Raise if a position is after the last row of a window."""
    if not 0 < row < packed.index.num_rows:
        raise ResumeError(
            f"state: a lane must be at a row of {tokenized.window}, got row {row} of {packed.index.num_rows} in "
            f"epoch {tokenized.epoch}; use a state that was not edited"
        )


def _row_key(tokenized: Tokenized, options: LiveOptions, turn: int) -> np.uint64:
    """Return the key of the order of rows; each time that they are packed they have one of their own."""
    return tokenized.window.key(options.seed, tokenized.epoch, f"rows {turn}" if turn else "rows")


def _too_long(
    documents: Int64Array,
    lengths: Int64Array,
    tokenized: Tokenized,
    options: LiveOptions,
    skipped: list[Skipped],
) -> Int64Array:
    """Return which of some documents do not fit a row, to be left out, or refuse them; they must not be cut."""
    long = np.flatnonzero(lengths > options.seq_len + 1)
    for index in long.tolist():
        piece, line = tokenized.places[documents[index]].tolist()
        where = record_name(tokenized.window.unit.pieces[piece], line)
        if options.policy.split_mode == FORBID and options.on_error == "stop":
            raise DocumentError(
                f"{where}: with packing = {options.packing!r} and on_long = 'stop' a document must have at most "
                f"{options.seq_len + 1} tokens, got {lengths[index]}; raise seq_len, or set on_long = "
                '"drop" or "truncate_end", or on_error = "skip"'
            )
        skipped.append(Skipped(reason=TOO_LONG, place=where))
    return long


def _without(encoded: Encoded, documents: Int64Array) -> Encoded:
    """Leave out some documents."""
    if not documents.size:
        return encoded
    lengths = np.diff(encoded.offsets)
    kept = np.ones(lengths.size, np.bool_)
    kept[documents] = False
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[kept])])
    return Encoded(ids=encoded.ids[np.repeat(kept, lengths)], offsets=offsets)


def _lines(packed: _Packed, order: Int64Array, ids: UnsignedArray) -> list[bytes]:
    """Find the spans of rows, and where their tokens are in memory; those of a row are one piece of bytes."""
    if not order.size:
        return []
    places = packed.spans(order)
    spans = np.empty((places.length.size, SPAN_COLUMNS), np.int64)
    describe_spans(spans, places.joined, places.length, ids.dtype.itemsize)
    address = np.array([ids.ctypes.data], np.int64)
    point_spans(spans, (places.shard, places.token), np.zeros(1, np.int64), address, ADDRESS, ids.dtype.itemsize)
    data, each = spans.tobytes(), spans.strides[0]
    begins, ends = (each * places.first).tolist(), (each * (places.first + places.count)).tolist()
    return [data[begin:end] for begin, end in zip(begins, ends, strict=True)]
