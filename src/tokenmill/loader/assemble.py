"""Rows to arrays: where the tokens of a run of rows are is found once, then they are copied batch by batch.

A row has one array of tokens or several: a pair has `chosen` and `rejected`, a group `prompts`, `responses` and
`rewards`. Of each array a row has some spans, whose tokens lie in mapped shards, or in memory where rows are drawn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tokenmill.errors import StoreCorruptError
from tokenmill.loader.batch import LENGTHS, REWARDS, Layout, layout, record_layout
from tokenmill.loader.kernels import (
    ADDRESS,
    IGNORE,
    MASK,
    SPAN_COLUMNS,
    copy_records,
    copy_rows,
    copy_words,
    count_labels,
    describe_spans,
    find_segments,
    point_spans,
)
from tokenmill.packing.stored import StoredRows, distinct, is_stored
from tokenmill.plan.stages import rows_at
from tokenmill.store.layout import key_file
from tokenmill.store.maps import LOOK_SECONDS
from tokenmill.types import (
    RECORD_TYPES,
    STORED_ARRAYS,
    Batch,
    Int32Array,
    Int64Array,
    Spans,
    counted_from,
    run_sums,
    token_arrays,
)

if TYPE_CHECKING:
    from tokenmill.packing.records import Runs
    from tokenmill.plan.stages import Stage
    from tokenmill.store.maps import MapCache, MappedFile
    from tokenmill.store.reader import Store


def record_type(stage: Stage) -> str | None:
    """Return the training type of a stage whose rows are records; None where they are sequences."""
    kinds = {rows.store.manifest.kind for rows in stage.rows.values() if is_stored(rows)}
    return next((kind for kind in kinds if kind in RECORD_TYPES), None)


def stage_layout(stage: Stage, arrays: Sequence[str], rows: int) -> Layout:
    """Return shape and dtype of those arrays that have a line for every row, in a batch of so many rows."""
    kind = record_type(stage)
    if kind is None:
        return layout(arrays, rows, stage.spec.seq_len)
    return record_layout(kind, arrays, (rows, _group_size(stage, kind), stage.spec.seq_len))


def _group_size(stage: Stage, kind: str) -> int:
    """Return how many responses a batch has room for in each record: the largest group of the stage's sources."""
    # A group has room for its prompt and as many responses; a pair has no group.
    return stage.row_slots // stage.spec.seq_len - 1 if kind == "grpo" else 0


def pad_id(tokenizer: Mapping[str, Any]) -> int:
    """Return the id that fills rows, of a tokenizer as JSON: PAD, else EOS, else 0. It is never trained on."""
    return next((int(tokenizer[name]) for name in ("pad_id", "eos_id") if tokenizer.get(name) is not None), 0)


class Drawn(NamedTuple):
    """Rows of a batch whose tokens stand in memory."""

    rows: Int64Array
    """(first span, number of spans) of each."""
    spans: Int64Array
    """With addresses, as the kernels want them."""
    windows: object
    """What holds the memory, and must not go before the rows are copied."""
    chosen: Int64Array | None = None
    """Which rows of the batch they are, in order; None: all of them."""


class _Field(NamedTuple):
    """One array of tokens of the rows of a block."""

    rows: Int64Array
    """(first span, number of spans) of each row."""
    spans: Int64Array
    """As the kernels want them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """What one source has of one array of a block."""

    store: Store
    key: str
    mask: str | None
    """The array that says which tokens are trained on, if the store has it."""
    places: Spans | Runs
    """Where its spans are in the store."""
    spans: Int64Array
    """The lines of the field's table that are its."""


class Block(ABC):
    """A run of rows of one stage, ready to be copied into batches.

    Finding rows and spans has a price per call, copying has one per token: a block pays the first
    once for many batches. It holds the maps of its shards until `release`. Where it needs more of
    them than it may hold, it copies everything at once, some shards at a time.
    """

    def __init__(
        self,
        stage: Stage,
        index: Mapping[int, StoredRows],
        places: tuple[Int64Array, Int64Array],
        arrays: Sequence[str],
    ) -> None:
        """Find the rows and spans at (steps, slots) of a stage; `index` is by source id, others are drawn."""
        self.stage = stage
        self.seq_len = stage.spec.seq_len
        self.arrays = tuple(arrays)
        self.steps, self.slots = places
        self.sources, rows = rows_at(stage, *places)
        stores = [source.store for source in index.values()]
        self._pad = pad_id(stores[0].manifest.tokenizer) if stores else 0
        self._maps: list[tuple[MapCache, list[MappedFile]]] = []
        self._next_look = monotonic() + LOOK_SECONDS
        """When the sizes of the mapped files are to be looked at."""
        self._whole: Batch | None = None
        self._fields: dict[str, _Field] = {}
        self._pieces = self._find(index, rows)

    @property
    def num_rows(self) -> int:
        """How many rows the block has."""
        return int(self.sources.size)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """What decides the shapes of its batches, beside their number of rows."""

    @abstractmethod
    def layout(self, rows: int, arrays: Sequence[str] | None = None) -> Layout:
        """Return shape and dtype of arrays of a batch of so many rows; of all that have a line for every row."""

    @abstractmethod
    def batch(self, number: int, out: Batch, drawn: Sequence[Drawn] = ()) -> Batch:
        """Fill the arrays of `out` with the `number`-th batch of as many rows as they have, and return it.

        Rows that do not stand in a store must have been `drawn`.
        """

    @abstractmethod
    def _room(self, piece: _Piece) -> tuple[int, int]:
        """Return how many values of an array a row, or a line of it, has at most, and room for."""

    def _check_lengths(self) -> None:
        """Refuse spans that do not fit: lengths come from files, which may change after rows were made of them."""
        for piece in self._pieces:
            most, room = self._room(piece)
            if most > room:
                raise StoreCorruptError(
                    f"{piece.store.path}: a row must have at most {room} values of {piece.key}, got {most}: its "
                    "documents are not those that rows were made of; run `tokenmill verify`, then copy the store "
                    "again, or delete its folder .rows"
                )

    def _check_files(self) -> None:
        """Refuse files that became shorter: to read what is gone would end the process."""
        for _, files in self._maps:
            for file in files:
                file.check()
        self._next_look = monotonic() + LOOK_SECONDS

    @abstractmethod
    def _copy(self, begin: int, out: Batch) -> None:
        """Copy the rows from `begin` on; tokens of spans without an address stay as they are."""

    def release(self) -> None:
        """Give the maps back; nothing can be copied afterwards."""
        for maps, files in self._maps:
            maps.give_back(files)
        self._maps.clear()

    def _find(self, index: Mapping[int, StoredRows], rows: Int64Array) -> list[_Piece]:
        """Find the spans of each array of all rows that stand in stores."""
        lines: dict[str, Int64Array] = {}
        sizes: Counter[str] = Counter()
        parts: list[tuple[Store, str, Spans | Runs, int]] = []
        present = distinct(self.sources).tolist()
        for source in present:
            if source not in index:
                continue
            chosen = np.flatnonzero(self.sources == source) if len(present) > 1 else slice(None)
            for key, spans in index[source].fields(rows[chosen]).items():
                table = lines.setdefault(key, np.zeros((rows.size, 2), np.int64))
                table[chosen, 0] = spans.first + sizes[key]
                table[chosen, 1] = spans.count
                parts.append((index[source].store, key, spans, sizes[key]))
                sizes[key] += spans.length.size
        self._fields |= {
            key: _Field(table, np.empty((sizes[key], SPAN_COLUMNS), np.int64)) for key, table in lines.items()
        }
        pieces = []
        for store, key, spans, begin in parts:
            table = self._fields[key].spans[begin : begin + spans.length.size]
            describe_spans(table, spans.joined, spans.length, store.dtype(key).itemsize)
            mask = STORED_ARRAYS[key].mask
            mask = mask if mask in store.keys else None
            pieces.append(_Piece(store=store, key=key, mask=mask, places=spans, spans=table))
        return pieces

    def _map(self) -> None:
        """Map the shards of all spans; or, where these are too many, copy all tokens now."""
        if not self._pieces:
            return
        # Half of all maps; the others are for offsets, which are held only briefly.
        most = self._pieces[0].store.maps.limit // 2
        needs = [(piece, distinct(piece.places.shard)) for piece in self._pieces]
        try:
            if sum(shards.size * (1 + (piece.mask is not None)) for piece, shards in needs) <= most:
                for piece, shards in needs:
                    self._point(piece, shards)
            else:
                self._copy_in_turns(needs, max(1, most // 2))
        except BaseException:
            self.release()
            raise

    def _point(self, piece: _Piece, shards: Int64Array) -> None:
        """Give the spans in these shards their addresses, and keep the shards mapped."""
        store, places = piece.store, (piece.places.shard, piece.places.token)
        for key, column in ((piece.key, ADDRESS), (piece.mask, MASK)):
            if key is not None:
                files = store.maps.take([store.file(int(shard), key_file(key)) for shard in shards])
                self._maps.append((store.maps, files))
                bases = np.array([file.address for file in files], np.int64)
                point_spans(piece.spans, places, shards, bases, column, store.dtype(key).itemsize)

    def _copy_in_turns(self, needs: Sequence[tuple[_Piece, Int64Array]], most: int) -> None:
        # The loss mask is made of the labels, which must outlive the turns.
        arrays = (*self.arrays, "labels") if "loss_mask" in self.arrays else self.arrays
        whole = {name: np.empty(*kind) for name, kind in self.layout(self.num_rows, arrays).items()}
        for piece, shards in needs:
            for begin in range(0, shards.size, most):
                self._point(piece, shards[begin : begin + most])
                self._copy(0, whole)
                self.release()
                piece.spans[:, ADDRESS] = piece.spans[:, MASK] = 0
        self._whole = whole


class SequenceBlock(Block):
    """A block of rows that are sequences, with everything that is made of their spans."""

    def __init__(
        self,
        stage: Stage,
        index: Mapping[int, StoredRows],
        places: tuple[Int64Array, Int64Array],
        arrays: Sequence[str],
        *,
        continuous: bool = False,
        pad: int | None = None,
    ) -> None:
        """See `Block`; `continuous` positions run through the row, `pad` is for a block without a store."""
        super().__init__(stage, index, places, arrays)
        self._pad = self._pad if pad is None else pad
        self._crossing = int(any(rows.cross_document_labels for rows in stage.rows.values()))
        self._continuous = int(continuous)
        empty = _Field(rows=np.zeros((self.num_rows, 2), np.int64), spans=np.empty((0, SPAN_COLUMNS), np.int64))
        self._field = next(iter(self._fields.values()), empty)
        self._others = len(self.layout(1)) < len(self.arrays)
        """Whether there are arrays that have no line for every row."""
        self._loss_tokens: Mapping[int, int] = {}
        self._cuts: tuple[int, Int32Array, list[int], Int32Array] | None = None
        if set(self.arrays) & {"input_ids", "labels", "loss_mask"}:
            self._map()

    @property
    def shape(self) -> tuple[int, ...]:
        """What decides the shapes of its batches, beside their number of rows."""
        return (self.seq_len,)

    def layout(self, rows: int, arrays: Sequence[str] | None = None) -> Layout:
        """Return shape and dtype of each array that has a line for every row."""
        return layout(self.arrays if arrays is None else arrays, rows, self.seq_len)

    def _room(self, piece: _Piece) -> tuple[int, int]:
        spans = piece.places
        return int(run_sums(spans.first, spans.count, spans.length).max(initial=0)), self.seq_len + 1

    def batch(self, number: int, out: Batch, drawn: Sequence[Drawn] = ()) -> Batch:
        """Fill the arrays of `out` with the `number`-th batch of as many rows as they have, and return it."""
        if monotonic() > self._next_look:
            self._check_files()
        count = next(iter(out.values())).shape[0]
        begin = number * count
        if self._whole is not None:
            for name, array in out.items():
                array[:] = self._whole[name][begin : begin + count]
        field = self._joined(begin, count, drawn) if drawn else self._field
        if drawn:
            self._copy_field(field, 0, begin, out)
        elif self._whole is None:
            self._copy_field(field, begin, begin, out)
        if self._others:
            self._add_others(field, number, count, out, cached=not drawn)
        return out

    def _add_others(self, field: _Field, number: int, count: int, out: Batch, *, cached: bool) -> None:
        """Add the arrays that have no line for every row."""
        if "cu_seqlens" in self.arrays or "max_seqlen" in self.arrays:
            bounds, longest = self._segments(field, number, count, cached=cached)
            if "cu_seqlens" in self.arrays:
                out["cu_seqlens"] = bounds
            if "max_seqlen" in self.arrays:
                out["max_seqlen"] = longest
        if "num_loss_tokens" in self.arrays:
            out["num_loss_tokens"] = np.array(self._loss_tokens[int(self.steps[number * count])], np.int64)

    def set_loss_tokens(self, counts: Mapping[int, int]) -> None:
        """Say how many labels the global batch of each step has."""
        self._loss_tokens = counts

    def labels_by_step(self) -> dict[int, int]:
        """Return how many labels its rows have in each step; reads tokens only where a store has a loss mask."""
        if any(piece.mask is not None for piece in self._pieces):
            out = self._whole or {"labels": np.empty((self.num_rows, self.seq_len), np.int64)}
            if self._whole is None:
                self._copy(0, out)
            counts = (out["labels"] != IGNORE).sum(axis=1)
        else:
            counts = count_labels(self._field.rows, self._field.spans, self._crossing)
        first = self.steps[0]
        sums = np.bincount(self.steps - first, weights=counts)
        return {step: int(sums[step - first]) for step in distinct(self.steps).tolist()}

    def _copy(self, begin: int, out: Batch) -> None:
        self._copy_field(self._field, begin, begin, out)

    def _copy_field(self, field: _Field, first: int, begin: int, out: Batch) -> None:
        """Copy the rows of a field from `first` on, which are those of the block from `begin` on."""
        labels = out.get("labels", _NOTHING)
        if "loss_mask" in out and not labels.size:
            count = out["loss_mask"].shape[0]
            labels = np.empty(out["loss_mask"].shape, np.int64)
            if self._whole is not None:
                labels[:] = self._whole["labels"][begin : begin + count]
        longest = copy_rows(
            field.rows,
            field.spans,
            (first, self._crossing, self._continuous, self._pad),
            out.get("input_ids", _NOTHING),
            labels,
            out.get("position_ids", _NOTHING),
            out.get("doc_ids", _NO_DOCUMENTS),
            out.get("loss_mask", _NO_FLAGS),
        )
        if longest > self.seq_len + 1:
            self._check_lengths()
        if "source" in out:
            out["source"][:] = self.sources[begin : begin + out["source"].size]

    def _joined(self, begin: int, count: int, drawn: Sequence[Drawn]) -> _Field:
        """Return the rows of a batch, those of stores and those that were drawn."""
        if drawn[0].chosen is None:
            return _Field(drawn[0].rows, drawn[0].spans)
        rows = self._field.rows[begin : begin + count].copy()
        stored = counted_from(rows[:, 0], rows[:, 1])
        rows[:, 0] = np.cumsum(rows[:, 1]) - rows[:, 1]
        spans = [self._field.spans[stored]]
        size = stored.size
        for part in drawn:
            rows[part.chosen] = part.rows
            rows[part.chosen, 0] += size
            spans.append(part.spans)
            size += len(part.spans)
        return _Field(rows=rows, spans=np.concatenate(spans))

    def _segments(self, field: _Field, number: int, count: int, *, cached: bool) -> tuple[Int32Array, Int32Array]:
        """Return the bounds of the segments of a batch, and its longest; of stored rows found for all batches."""
        if not cached:
            bounds, _, longest = find_segments(field.rows, field.spans, self.seq_len, count)
            return bounds, longest[0, ...]
        if self._cuts is None or self._cuts[0] != count:
            bounds, first, longest = find_segments(field.rows, field.spans, self.seq_len, count)
            self._cuts = count, bounds, first.tolist(), longest
        _, bounds, begins, longest = self._cuts
        return bounds[begins[number] : begins[number + 1]], longest[number, ...]


class RecordBlock(Block):
    """A block of rows that are records: DPO pairs or GRPO groups, every array padded to one shape.

    Its shapes are those of the stage: `seq_len` tokens, and as many responses as its sources' largest group has.
    """

    def __init__(
        self,
        stage: Stage,
        index: Mapping[int, StoredRows],
        places: tuple[Int64Array, Int64Array],
        arrays: Sequence[str],
        kind: str,
    ) -> None:
        """See `Block`; `kind` is the training type."""
        super().__init__(stage, index, places, arrays)
        self._kind = kind
        self._group = _group_size(stage, kind)
        self._check_lengths()
        self._map()

    @property
    def shape(self) -> tuple[int, ...]:
        """What decides the shapes of its batches, beside their number of rows."""
        return self.seq_len, self._group

    def layout(self, rows: int, arrays: Sequence[str] | None = None) -> Layout:
        """Return shape and dtype of each array: all have a line for every row."""
        arrays = self.arrays if arrays is None else arrays
        return record_layout(self._kind, arrays, (rows, self._group, self.seq_len))

    def _room(self, piece: _Piece) -> tuple[int, int]:
        lengths, counts = (int(numbers.max(initial=0)) for numbers in (piece.places.length, piece.places.count))
        if counts > max(1, self._group):
            return counts, self._group
        return lengths, self._group if piece.key == REWARDS else self.seq_len

    def batch(self, number: int, out: Batch, drawn: Sequence[Drawn] = ()) -> Batch:
        """Fill the arrays of `out` with the `number`-th batch of as many rows as they have, and return it."""
        assert not drawn, "records stand in stores"
        if monotonic() > self._next_look:
            self._check_files()
        count = next(iter(out.values())).shape[0]
        if self._whole is None:
            self._copy(number * count, out)
        else:
            for name, array in out.items():
                array[:] = self._whole[name][number * count : (number + 1) * count]
        return out

    def _copy(self, begin: int, out: Batch) -> None:
        for key, mask in token_arrays(self._kind).items():
            lines = ... if key == "responses" else (slice(None), None)  # a group has several of each
            ids = out[key][lines] if key in out else _NO_LINES
            flags = out[mask][lines] if mask in out else _NO_LINE_FLAGS
            lengths = out[LENGTHS[key]][lines] if LENGTHS[key] in out else _NOTHING
            field = self._fields[key]
            copy_records(field.rows, field.spans, begin, self._pad, ids, flags, lengths)
        if REWARDS in out:
            field = self._fields[REWARDS]
            copy_words(field.rows, field.spans, begin, out[REWARDS].view(np.uint32))
        if "group_size" in out:
            out["group_size"][:] = self._fields["responses"].rows[begin : begin + out["group_size"].size, 1]
        if "source" in out:
            out["source"][:] = self.sources[begin : begin + out["source"].size]


_NOTHING = np.empty((0, 0), np.int64)
_NO_DOCUMENTS = np.empty((0, 0), np.int32)
_NO_FLAGS = np.empty((0, 0), np.bool_)
_NO_LINES = np.empty((0, 0, 0), np.int64)
_NO_LINE_FLAGS = np.empty((0, 0, 0), np.bool_)
