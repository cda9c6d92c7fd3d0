"""Blocks of rows: the spans of a run of rows are found once, then their tokens are copied batch by batch.

A row has one array of tokens or several: a pair has `chosen` and `rejected`, a group `prompts`, `responses` and
`rewards`. Each array of a row has spans, whose tokens are in mapped shards, or in memory for live text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tokenmill.errors import StoreCorruptError
from tokenmill.loader import kernels
from tokenmill.loader.buffers import (
    LENGTHS,
    REWARDS,
    BufferPool,
    Shapes,
    array_shapes,
    group_size,
    pad_id,
    record_shapes,
)
from tokenmill.loader.fetch import Fetches, FetchOptions, Piece, write_addresses
from tokenmill.loader.layout import Layout
from tokenmill.loader.options import LoaderOptions
from tokenmill.packing.stored import StoredRows
from tokenmill.plan.stages import rows_at
from tokenmill.store.layout import key_file
from tokenmill.store.ranges import RangeRequest
from tokenmill.types import (
    STORED_ARRAYS,
    AnyArray,
    Batch,
    Int32Array,
    Int64Array,
    Spans,
    counted_from,
    distinct,
    run_sums,
    token_arrays,
)

if TYPE_CHECKING:
    from tokenmill.packing.records import Runs
    from tokenmill.plan.stages import Stage
    from tokenmill.store.maps import MapCache, MappedFile

LOOK_EVERY = 200
"""Interval of checks of mapped file sizes, as a multiple of the time of the last check."""


class RowsInMemory(NamedTuple):
    """Rows of a batch whose tokens stand in memory."""

    rows: Int64Array
    """(first span, number of spans) of each."""
    spans: Int64Array
    """With addresses, as the kernels want them."""
    windows: object
    """Keeps the tokens alive until they are copied."""
    chosen: Int64Array | None = None
    """Indices of the rows in the batch, in order; None for all."""


class _Field(NamedTuple):
    """One array of tokens of the rows of a block."""

    rows: Int64Array
    """(first span, number of spans) of each row."""
    spans: Int64Array
    """As the kernels want them."""


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
        fetching: FetchOptions | None = None,
        source_rows: tuple[Int64Array, Int64Array] | None = None,
    ) -> None:
        """Find the rows and spans at (steps, slots) of a stage; `index` is by source id, others are drawn.

        `source_rows` are the sources and rows at these places, where the caller has computed them already.
        """
        self.stage = stage
        self.seq_len = stage.spec.seq_len
        self.arrays = tuple(arrays)
        self.steps, self.slots = places
        self.sources, self._row_ids = source_rows or rows_at(stage, *places)
        self._index = index
        stores = [source.store for source in index.values()]
        self._pad = pad_id(stores[0].manifest.tokenizer) if stores else 0
        self._maps: list[tuple[MapCache, list[MappedFile]]] = []
        self._next_look = 0.0
        """When the sizes of the mapped files are to be looked at."""
        self._fetches = Fetches(fetching or FetchOptions(), int(self.steps.max(initial=0)))
        self._whole: Batch | None = None
        """All rows, where they had to be copied at once."""
        self._fields: dict[str, _Field] = {}
        self._pieces = self._find_spans()

    @property
    def num_rows(self) -> int:
        """Number of rows of the block."""
        return int(self.sources.size)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Key of the shapes of its batches, for a given number of rows."""

    @abstractmethod
    def shapes(self, rows: int, arrays: Sequence[str] | None = None) -> Shapes:
        """Return shape and dtype of arrays of a batch of `rows` rows; None: of all with a line for every row."""

    def _row_shapes(self, rows: int, arrays: Sequence[str]) -> Shapes:
        """Return the shapes of whole rows, where a batch may have a part of each."""
        return self.shapes(rows, arrays)

    def batch(self, number: int, out: Batch, drawn: Sequence[RowsInMemory] = ()) -> Batch:
        """Fill the arrays of `out` with the `number`-th batch of as many rows as they have, and return it.

        Rows that do not stand in a store must have been `drawn`.
        """
        self._fetches.wait()
        self._fill(number, next(iter(out.values())).shape[0], out, drawn)
        if monotonic() > self._next_look:
            self._check_files()
        return out

    @abstractmethod
    def _fill(self, number: int, count: int, out: Batch, drawn: Sequence[RowsInMemory]) -> None:
        """Fill the arrays of `out` with the `number`-th batch of `count` rows, whose tokens are all here."""

    @abstractmethod
    def trimmed(self, number: int, batch: Batch) -> Batch:
        """Return the `number`-th batch padded to its longest row only."""

    @abstractmethod
    def _room(self, piece: Piece) -> tuple[int, int]:
        """Return how many values of an array a row, or a line of it, has at most, and room for."""

    def _check_lengths(self) -> None:
        """Raise if spans do not fit, because lengths come from files, which may change after packing."""
        for piece in self._pieces:
            most, room = self._room(piece)
            if most > room:
                raise StoreCorruptError(
                    f"{piece.store.path}: a row must have at most {room} values of {piece.key}, got {most}: its "
                    "documents are not those that rows were made of; run `tokenmill verify`, then copy the store "
                    "again, or delete its folder .rows"
                )

    def _check_files(self) -> None:
        """Raise if a file was truncated meanwhile."""
        begin = monotonic()
        for maps, files in self._maps:
            maps.check(files)
        # The last page of a truncated file reads as zeros. Only the size of the file shows that, and to look at it
        # is a system call of about a microsecond per file.
        self._next_look = monotonic() + LOOK_EVERY * (monotonic() - begin)

    @abstractmethod
    def _copy(self, begin: int, out: Batch) -> None:
        """Copy the rows from `begin` on; tokens of spans without an address stay as they are."""

    @property
    def is_here(self) -> bool:
        """Whether all tokens are on this machine."""
        return self._fetches.is_here

    def columns(self, number: int, count: int, names: Sequence[str]) -> Batch:
        """Return fields that stores keep of the records of the `number`-th batch of `count` rows, an array each.

        Numbers are an array of numbers, with NaN where a record has none; all else is an array of objects.
        """
        if not names:
            return {}
        chosen = slice(number * count, (number + 1) * count)
        kept = []
        for source, row in zip(self.sources[chosen].tolist(), self._row_ids[chosen], strict=True):
            rows = self._index[source]
            documents = rows.spans(row.reshape(1)).document  # none in a row that only fills a batch
            kept.append(rows.store.origin(int(documents[0])).kept if documents.size else {})
        return {name: _column([each.get(name) for each in kept]) for name in names}

    def finish(self) -> None:
        """Raise if a file was truncated while this block was read, and release the maps."""
        self._check_files()
        self.release()

    def release(self) -> None:
        """Give the maps back; nothing can be copied afterwards."""
        self._fetches.release()
        self._maps.clear()

    def _find_spans(self) -> list[Piece]:
        """Find the spans of each array of all rows that stand in stores."""
        tables: dict[str, Int64Array] = {}
        sizes: Counter[str] = Counter()
        parts: list[tuple[int, str, Spans | Runs, int]] = []
        around = {}
        present = distinct(self.sources).tolist()
        for source in present:
            if source not in self._index:
                continue
            rows = self._index[source]
            chosen = np.flatnonzero(self.sources == source) if len(present) > 1 else slice(None)
            if self.stage.by_block and rows.store._remotes:
                around[source] = rows.whole_blocks(self._row_ids[chosen], self.stage.spec.shuffle.block_rows)
            for key, spans in rows.fields(self._row_ids[chosen]).items():
                table = tables.setdefault(key, np.zeros((self.num_rows, 2), np.int64))
                table[chosen, 0] = spans.first + sizes[key]
                table[chosen, 1] = spans.count
                parts.append((source, key, spans, sizes[key]))
                sizes[key] += spans.length.size
        self._fields |= {
            key: _Field(table, np.empty((sizes[key], kernels.SPAN_COLUMNS), np.int64))
            for key, table in tables.items()
        }
        pieces = []
        for source, key, spans, begin in parts:
            store, mask = self._index[source].store, STORED_ARRAYS[key].mask
            table = self._fields[key].spans[begin : begin + spans.length.size]
            kernels.describe_spans(table, spans.joined, spans.length, store.dtype(key).itemsize)
            pieces.append(
                Piece(
                    store=store,
                    key=key,
                    mask=mask if mask in store.keys else None,
                    places=spans,
                    spans=table,
                    around=around.get(source),
                )
            )
        return pieces

    def _map(self) -> None:
        """Map the shards of all spans; or, where these are too many, copy all tokens now."""
        if not self._pieces:
            return
        # Half of all maps; the others are for offsets, which are held only briefly.
        most = self._pieces[0].store._maps.limit // 2
        needs = [(piece, distinct(piece.places.shard)) for piece in self._pieces]
        try:
            mapped = [(piece, shards) for piece, shards in needs if not piece.store._by_ranges]
            if sum(shards.size * (1 + (piece.mask is not None)) for piece, shards in mapped) <= most:
                for piece, shards in needs:
                    self._point(piece, shards)
            else:
                self._copy_in_turns(needs, max(1, most // 2))
        except BaseException:
            self.release()
            raise

    def _point(self, piece: Piece, shards: Int64Array) -> None:
        """Give the spans in these shards their addresses, and keep the shards mapped."""
        store = piece.store
        for key, column in ((piece.key, kernels.ADDRESS), (piece.mask, kernels.MASK)):
            if key is None:
                continue
            requests = [store.file(int(shard), key_file(key)) for shard in shards]
            if any(isinstance(request, RangeRequest) for request in requests):
                self._maps += self._fetches.begin(piece, key, column, shards, requests)
                continue
            files = store._maps.open(requests)
            self._maps.append((store._maps, files))
            bases = np.array([file.address for file in files], np.int64)
            write_addresses(piece, key, column, shards, bases)

    def _copy_in_turns(self, needs: Sequence[tuple[Piece, Int64Array]], most: int) -> None:
        # The loss mask is made of the labels, which must outlive the turns.
        arrays = (*self.arrays, "labels") if "loss_mask" in self.arrays else self.arrays
        whole = {name: np.empty(*kind) for name, kind in self._row_shapes(self.num_rows, arrays).items()}
        for piece, shards in needs:
            for begin in range(0, shards.size, most):
                self._point(piece, shards[begin : begin + most])
                self._fetches.wait()
                self._copy(0, whole)
                self._check_files()
                self.release()
                piece.spans[:, kernels.ADDRESS] = piece.spans[:, kernels.MASK] = 0
        self._whole = whole


SEGMENT_ARRAYS = ("cu_seqlens", "cu_seqlens_unpadded", "max_seqlen")
"""Bounds of segments, in columns and in tokens, and the longest."""


class SequenceBlock(Block):
    """A block of rows that are sequences, with everything that is made of their spans."""

    def __init__(  # noqa: PLR0913 - the options of a loader
        self,
        stage: Stage,
        index: Mapping[int, StoredRows],
        places: tuple[Int64Array, Int64Array],
        arrays: Sequence[str],
        *,
        options: LoaderOptions | None = None,
        pad: int | None = None,
        layout: Layout | None = None,
        fetching: FetchOptions | None = None,
        source_rows: tuple[Int64Array, Int64Array] | None = None,
    ) -> None:
        """Find the spans of rows; `pad` fills rows of a block without a store.

        `layout` says which columns of each row its batches have.
        """
        super().__init__(stage, index, places, arrays, fetching, source_rows)
        options = options or LoaderOptions()
        self.horizon = options.horizon
        self._layout = layout or Layout()
        self._multiple = stage.segment_multiple
        self._width = self._layout.width(self.seq_len)
        self._is_whole = self.horizon == 1 and self._width == self.seq_len
        """Whether batches have all columns, and no labels beyond the next token, which are made from whole rows."""
        self._rows: dict[int, BufferPool] = {}
        """Memory for whole rows, of which batches have a part; by their number."""
        self._pad = self._pad if pad is None else pad
        self._crossing = int(any(rows.cross_document_labels for rows in stage.rows.values()))
        self._continuous = int(options.positions == "row")
        empty = _Field(
            rows=np.zeros((self.num_rows, 2), np.int64), spans=np.empty((0, kernels.SPAN_COLUMNS), np.int64)
        )
        self._field = next(iter(self._fields.values()), empty)
        self._has_batch_arrays = len(self.shapes(1)) < len(self.arrays)
        """Whether some arrays are about the batch as a whole, and have no line for every row."""
        self._has_segments = any(name in self.arrays for name in SEGMENT_ARRAYS)
        self._loss_tokens: Mapping[int, Int64Array] = {}
        self._cuts: tuple[int, Int32Array, Int32Array, list[int], Int32Array] | None = None
        if set(self.arrays) & {"input_ids", "labels", "loss_mask"}:
            self._map()

    @property
    def shape(self) -> tuple[int, ...]:
        """Key of the shapes of its batches, for a given number of rows."""
        return (self._width,)

    def shapes(self, rows: int, arrays: Sequence[str] | None = None) -> Shapes:
        """Return shape and dtype of each array that has a line for every row."""
        return array_shapes(self.arrays if arrays is None else arrays, rows, self._width, self.horizon)

    def _row_shapes(self, rows: int, arrays: Sequence[str]) -> Shapes:
        if self.horizon > 1 and {"labels", "loss_mask"} & set(arrays):
            arrays = [*({*arrays} - {"loss_mask"} | {"labels", "doc_ids"})]
        return array_shapes(arrays, rows, self.seq_len)

    def _room(self, piece: Piece) -> tuple[int, int]:
        spans = piece.places
        return int(run_sums(spans.first, spans.count, spans.length).max(initial=0)), self.seq_len + 1

    def _fill(self, number: int, count: int, out: Batch, drawn: Sequence[RowsInMemory]) -> None:
        field, begin = self._field, number * count
        first = begin
        if drawn:
            field, first = self._with_drawn(begin, count, drawn), 0
        rows = out if self._is_whole else self._whole_rows(count)
        if self._whole is not None:
            for name, array in rows.items():
                array[:] = self._whole[name][begin : begin + count]
        if drawn or self._whole is None:
            self._copy_field(field, first, begin, rows)
        if self.horizon > 1 and "labels" in rows:
            labels = kernels.labels_ahead(rows["labels"], rows["doc_ids"], self.horizon)
            rows = {**rows, "labels": labels, "loss_mask": labels != kernels.IGNORE}
        if self._width < self.seq_len and self._layout.cut == "segments":
            columns = self._layout.segment_columns(self._segments(field, number, count, cached=not drawn)[0])
            self._take_columns(rows, columns, out)
        elif rows is not out:
            self._take_slices(rows, out)
        if self._has_batch_arrays:
            self._add_batch_arrays(field, number, count, out, cached=not drawn)

    def _whole_rows(self, count: int) -> Batch:
        """Return arrays for `count` whole rows."""
        if count not in self._rows:
            self._rows[count] = BufferPool(self._row_shapes(count, self.arrays))
        return self._rows[count].batch()

    def _take_slices(self, rows: Batch, out: Batch) -> None:
        """Take the columns of rows that the batches have: the same of each row."""
        for name, array in out.items():
            if array.ndim == 1:
                array[:] = rows[name]
                continue
            filled = 0
            for columns in self._layout.columns(self.seq_len):
                part = rows[name][:, columns]
                array[:, filled : filled + part.shape[1]] = part
                filled += part.shape[1]

    def _take_columns(self, rows: Batch, columns: Int64Array, out: Batch) -> None:
        """Take the columns that the batches have of rows laid end to end."""
        for name, array in out.items():
            if array.ndim == 1:
                array[:] = rows[name]
            else:
                array[:] = rows[name].reshape(-1, *array.shape[2:])[columns].reshape(array.shape)

    def trimmed(self, number: int, batch: Batch) -> Batch:
        """Return the `number`-th batch, of rows that all stand in stores, padded to its longest row only."""
        lined = self.shapes(1)
        count = next(array.shape[0] for name, array in batch.items() if name in lined)
        rows, spans = self._field.rows[number * count : (number + 1) * count], self._field.spans
        used = run_sums(rows[:, 0], rows[:, 1], spans[:, kernels.LENGTH])
        longest = max(1, min(self.seq_len, int(used.max(initial=0))))
        out = {
            name: np.ascontiguousarray(array[:, :longest]) if name in lined and array.ndim > 1 else array
            for name, array in batch.items()
        }
        if self._has_segments:
            bounds, tokens, _, longest_segment = kernels.find_segments(rows, spans, longest, count)
            out |= self._segment_arrays((bounds, tokens, longest_segment[0, ...]))
        return out

    def _add_batch_arrays(self, field: _Field, number: int, count: int, out: Batch, *, cached: bool) -> None:
        """Add the arrays that are about the batch as a whole."""
        if self._has_segments:
            out |= self._segment_arrays(self._segments(field, number, count, cached=cached))
        if "num_loss_tokens" in self.arrays:
            out["num_loss_tokens"] = self._loss_tokens[int(self.steps[number * count])].copy()

    def _segment_arrays(self, segments: tuple[Int32Array, Int32Array, Int32Array]) -> Batch:
        """Return those of `SEGMENT_ARRAYS` that are wanted."""
        return {name: array for name, array in zip(SEGMENT_ARRAYS, segments, strict=True) if name in self.arrays}

    def set_loss_tokens(self, counts: Mapping[int, Int64Array]) -> None:
        """Set the number of labels of the global batch of each step."""
        self._loss_tokens = counts

    def labels_by_step(self) -> dict[int, Int64Array]:
        """Return how many labels its rows have in each step; reads tokens only where a store has a loss mask.

        Where labels go beyond the next token there is a number for each of those that follow.
        """
        if any(piece.mask is not None for piece in self._pieces):
            self._fetches.wait()
            out = self._whole or {
                name: np.empty(*kind) for name, kind in self._row_shapes(self.num_rows, ("labels",)).items()
            }
            if self._whole is None:
                self._copy(0, out)
                self._check_files()
            labels = out["labels"]
            if self.horizon > 1:
                labels = kernels.labels_ahead(labels, out["doc_ids"], self.horizon)
            counts = (labels != kernels.IGNORE).sum(axis=1)
        elif self.horizon > 1:
            counts = kernels.count_ahead(self._field.rows, self._field.spans, self.horizon)
        else:
            counts = kernels.count_labels(self._field.rows, self._field.spans, self._crossing)
        first = np.flatnonzero(np.diff(self.steps, prepend=-1))  # rows are in the order of their steps
        sums = np.add.reduceat(counts, first, axis=0)
        return {int(step): np.asarray(number) for step, number in zip(self.steps[first], sums, strict=True)}

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
        longest = kernels.copy_rows(
            field.rows,
            field.spans,
            (first, self._crossing, self._continuous, self._pad, self._multiple),
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

    def _with_drawn(self, begin: int, count: int, drawn: Sequence[RowsInMemory]) -> _Field:
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

    def _segments(
        self, field: _Field, number: int, count: int, *, cached: bool
    ) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Return the bounds of the segments of a batch, in columns and in tokens, and its longest.

        Those of stored rows are found for all batches.
        """
        shape = (self.seq_len, count, self._multiple)
        if not cached:
            bounds, tokens, _, longest = kernels.find_segments(field.rows, field.spans, *shape)
            return bounds, tokens, longest[0, ...]
        if self._cuts is None or self._cuts[0] != count:
            bounds, tokens, first, longest = kernels.find_segments(field.rows, field.spans, *shape)
            self._cuts = count, bounds, tokens, first.tolist(), longest
        _, bounds, tokens, begins, longest = self._cuts
        part = slice(begins[number], begins[number + 1])
        return bounds[part], tokens[part], longest[number, ...]


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
        fetching: FetchOptions | None = None,
    ) -> None:
        """See `Block`; `kind` is the training type."""
        super().__init__(stage, index, places, arrays, fetching=fetching)
        self._kind = kind
        self._group = group_size(stage, kind)
        self._check_lengths()
        if {*self.arrays} - {*LENGTHS.values(), "group_size", "source"}:
            self._map()

    @property
    def shape(self) -> tuple[int, ...]:
        """Key of the shapes of its batches, for a given number of rows."""
        return self.seq_len, self._group

    def shapes(self, rows: int, arrays: Sequence[str] | None = None) -> Shapes:
        """Return shape and dtype of each array: all have a line for every row."""
        arrays = self.arrays if arrays is None else arrays
        return record_shapes(self._kind, arrays, (rows, self._group, self.seq_len))

    def _room(self, piece: Piece) -> tuple[int, int]:
        lengths, counts = (int(numbers.max(initial=0)) for numbers in (piece.places.length, piece.places.count))
        if counts > max(1, self._group):
            return counts, self._group
        return lengths, self._group if piece.key == REWARDS else self.seq_len

    def _fill(self, number: int, count: int, out: Batch, drawn: Sequence[RowsInMemory]) -> None:
        assert not drawn, "records stand in stores"
        if self._whole is None:
            self._copy(number * count, out)
        else:
            for name, array in out.items():
                array[:] = self._whole[name][number * count : (number + 1) * count]

    def trimmed(self, number: int, batch: Batch) -> Batch:
        """Return the `number`-th batch, each array padded to its longest row only."""
        out = dict(batch)
        count = next(iter(batch.values())).shape[0]
        for key, mask in token_arrays(self._kind).items():
            rows, spans = self._fields[key].rows[number * count : (number + 1) * count], self._fields[key].spans
            chosen = counted_from(rows[:, 0], rows[:, 1])
            longest = max(1, int(spans[chosen, kernels.LENGTH].max(initial=0)))
            for name in [name for name in (key, mask) if name is not None and name in out]:
                out[name] = np.ascontiguousarray(out[name][..., :longest])
        return out

    def _copy(self, begin: int, out: Batch) -> None:
        for key, mask in token_arrays(self._kind).items():
            lines = ... if key == "responses" else (slice(None), None)  # a group has several of each
            ids = out[key][lines] if key in out else _NO_LINES
            flags = out[mask][lines] if mask in out else _NO_LINE_FLAGS
            lengths = out[LENGTHS[key]][lines] if LENGTHS[key] in out else _NOTHING
            field = self._fields[key]
            kernels.copy_records(field.rows, field.spans, begin, self._pad, ids, flags, lengths)
        if REWARDS in out:
            field = self._fields[REWARDS]
            kernels.copy_words(field.rows, field.spans, begin, out[REWARDS].view(np.uint32))
        if "group_size" in out:
            out["group_size"][:] = self._fields["responses"].rows[begin : begin + out["group_size"].size, 1]
        if "source" in out:
            out["source"][:] = self.sources[begin : begin + out["source"].size]


def _column(values: list[Any]) -> AnyArray:
    """Return values of one field: as numbers, where all that are there are, and an array holds them exactly."""
    if any(value is not None for value in values) and all(
        value is None or isinstance(value, int | float) for value in values
    ):
        numbers = np.array([np.nan if value is None else value for value in values])
        pairs = zip(numbers.tolist(), values, strict=True)
        if numbers.dtype != object and all(value is None or number == value for number, value in pairs):
            return numbers
    column = np.empty(len(values), object)
    column[:] = values
    return column


_NOTHING = np.empty((0, 0), np.int64)
_NO_DOCUMENTS = np.empty((0, 0), np.int32)
_NO_FLAGS = np.empty((0, 0), np.bool_)
_NO_LINES = np.empty((0, 0, 0), np.int64)
_NO_LINE_FLAGS = np.empty((0, 0, 0), np.bool_)
