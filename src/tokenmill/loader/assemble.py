"""Rows to arrays: the spans of a run of rows are found once and copied batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tokenmill.compiled import kernel
from tokenmill.loader.kernels import (
    ADDRESS,
    IGNORE,
    MASK,
    copy_rows,
    copy_run,
    count_labels,
    describe_spans,
    find_segments,
    point_spans,
)
from tokenmill.packing.exclude import LOSS_MASK, distinct
from tokenmill.packing.records import RecordRows, Runs
from tokenmill.plan.order import rows_at
from tokenmill.plan.stages import CountedRows
from tokenmill.store.layout import key_file
from tokenmill.store.locate import locate, view_uint8, view_uint32
from tokenmill.types import BoolArray, Int32Array, Int64Array, Uint32Array, token_arrays

if TYPE_CHECKING:
    from tokenmill.loader.buffers import Layout
    from tokenmill.plan.stages import Stage
    from tokenmill.store.maps import MapCache, MappedFile
    from tokenmill.store.reader import Store
    from tokenmill.types import Batch, Spans


class StoredRows(CountedRows, Protocol):
    """Rows whose tokens stand in a store."""

    @property
    def store(self) -> Store:
        """Where the tokens are."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """Rows whose tokens stand in memory."""

    rows: Int64Array
    """(first span, number of spans) of each."""
    spans: Int64Array
    """With addresses, as the kernels want them."""
    held: object
    """What must not go before the rows are copied."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """Sources of a block that have no store."""

    draw: Callable[[int, Int64Array], Drawn]
    """(source, slots of the global batch) -> their rows; called once a source and block."""
    pad: int
    crossing: bool
    """Whether labels cross documents."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """The spans of one source within a block."""

    store: Store
    spans: Spans
    offset: int
    """Where they begin in the arrays of the block."""

    @property
    def masked(self) -> bool:
        """Whether the store says which tokens are not to be trained on."""
        return LOSS_MASK in self.store.keys


class Block:
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
        max_maps: int,
        *,
        continuous: bool = False,
        given: Given | None = None,
    ) -> None:
        """Find the rows and spans at (steps, slots) of a stage; `index` is by source id, the others are `given`."""
        self.seq_len = stage.spec.seq_len
        self.arrays = tuple(arrays)
        self.continuous = continuous
        self.sources, row_ids = rows_at(stage, *places)
        self._steps = places[0]
        self._crossing = int(given.crossing if given else any(r.cross_document_labels for r in index.values()))
        self._pad = given.pad if given else pad_id(next(iter(index.values())).store)
        self._rows = np.empty((row_ids.size, 2), np.int64)
        self._held: list[tuple[MapCache, list[MappedFile]]] = []
        self._whole: Batch | None = None
        self._loss_tokens: Mapping[int, int] = {}
        self._found: tuple[int, tuple[Int32Array, list[int], Int32Array]] | None = None
        pieces = self._find(index, row_ids)
        drawn = self._draw(index, places[1], given, sum(piece.spans.length.size for piece in pieces))
        self._stored = sum(piece.spans.length.size for piece in pieces)
        self._spans = np.empty((self._stored + sum(len(one.spans) for one in drawn), 5), np.int64)
        self._drawn = [one.held for one in drawn]
        if drawn:
            self._spans[self._stored :] = np.concatenate([one.spans for one in drawn])
        for piece in pieces:
            width = piece.store.dtype(piece.store.manifest.token_key).itemsize
            end = piece.offset + piece.spans.length.size
            describe_spans(self._spans[piece.offset : end], piece.spans.joined, piece.spans.length, width)
        self._masked = any(piece.masked for piece in pieces)
        if set(self.arrays) & {"input_ids", "labels", "loss_mask"}:
            try:
                self._map(pieces, max_maps)
            except BaseException:
                self.release()
                raise

    @property
    def num_rows(self) -> int:
        """How many rows the block has."""
        return self._rows.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """What decides the shapes of its batches, beside their number of rows."""
        return (self.seq_len,)

    def layout(self, rows: int) -> Layout:
        """Return shape and dtype of each array of a batch of so many rows."""
        return layout(self.arrays, rows, self.seq_len)

    @property
    def steps(self) -> list[int]:
        """The steps that its rows belong to."""
        return [int(step) for step in distinct(self._steps)]

    def fill(self, begin: int, out: Batch) -> Batch:
        """Fill the arrays of `out` with the rows from `begin` on, and return it."""
        if self._whole is None:
            self._fill(begin, out)
        else:
            for name, array in out.items():
                array[:] = self._whole[name][begin : begin + array.shape[0]]
        return out

    def complete(self, number: int, rows: int, out: Batch) -> Batch:
        """Add the arrays that have no line for every row to a batch, the `number`-th of so many rows; return it."""
        if "cu_seqlens" in self.arrays or "max_seqlen" in self.arrays:
            bounds, first, longest = self._segments(rows)
            if "cu_seqlens" in self.arrays:
                out["cu_seqlens"] = bounds[first[number] : first[number + 1]]
            if "max_seqlen" in self.arrays:
                out["max_seqlen"] = longest[number, ...]
        if "num_loss_tokens" in self.arrays:
            out["num_loss_tokens"] = np.array(self._loss_tokens[int(self._steps[number * rows])], np.int64)
        return out

    def set_loss_tokens(self, counts: Mapping[int, int]) -> None:
        """Say how many labels the global batch of each step has."""
        self._loss_tokens = counts

    def labels_by_step(self) -> dict[int, int]:
        """Return how many labels its rows have in each step; reads tokens only where a store has a loss mask."""
        if self._masked:
            out = {"labels": np.empty((self.num_rows, self.seq_len), np.int64)}
            self._fill(0, out) if self._whole is None else out.update(labels=self._whole["labels"])
            counts = (out["labels"] != IGNORE).sum(axis=1)
        else:
            counts = count_labels(self._rows, self._spans, self._crossing)
        sums = np.bincount(self._steps - self._steps[0], weights=counts)
        return {step: int(sums[step - self._steps[0]]) for step in self.steps}

    def release(self) -> None:
        """Give the maps back; nothing can be copied afterwards."""
        for maps, files in self._held:
            maps.give_back(files)
        self._held.clear()

    def _find(self, index: Mapping[int, StoredRows], row_ids: Int64Array) -> list[_Piece]:
        pieces = []
        offset = 0
        present = distinct(self.sources)
        for source in present.tolist():
            if source not in index:
                continue
            chosen = np.flatnonzero(self.sources == source) if present.size > 1 else slice(None)
            spans = index[source].spans(row_ids[chosen])
            self._rows[chosen, 0] = spans.first + offset
            self._rows[chosen, 1] = spans.count
            pieces.append(_Piece(store=index[source].store, spans=spans, offset=offset))
            offset += spans.length.size
        return pieces

    def _draw(
        self, index: Mapping[int, StoredRows], slots: Int64Array, given: Given | None, offset: int
    ) -> list[Drawn]:
        """Take the rows of sources without a store; their spans stand behind those of the others."""
        found = []
        for source in distinct(self.sources).tolist() if given else []:
            if source in index:
                continue
            assert given is not None
            chosen = np.flatnonzero(self.sources == source)
            found.append(given.draw(source, slots[chosen]))
            self._rows[chosen] = found[-1].rows
            self._rows[chosen, 0] += offset
            offset += len(found[-1].spans)
        return found

    def _map(self, pieces: list[_Piece], max_maps: int) -> None:
        needs = [(piece, distinct(piece.spans.shard)) for piece in pieces]
        if sum(shards.size * (1 + piece.masked) for piece, shards in needs) <= max_maps:
            for piece, shards in needs:
                self._point(piece, shards)
        else:
            self._copy_in_turns(needs, max(1, max_maps // 2))

    def _point(self, piece: _Piece, shards: Int64Array) -> None:
        """Give the spans in these shards their addresses, and keep the shards mapped."""
        store, spans = piece.store, piece.spans
        for key, column in ((store.manifest.token_key, ADDRESS), (LOSS_MASK, MASK)):
            if key in store.keys:
                files = store.maps.take([store.file(int(shard), key_file(key)) for shard in shards])
                self._held.append((store.maps, files))
                bases = np.array([file.address for file in files], np.int64)
                out = self._spans[piece.offset :]
                point_spans(out, (spans.shard, spans.token), shards, bases, column, store.dtype(key).itemsize)

    def _copy_in_turns(self, needs: list[tuple[_Piece, Int64Array]], max_maps: int) -> None:
        # The loss mask is made of the labels, which must outlive the turns.
        kept = (*self.arrays, "labels") if "loss_mask" in self.arrays else self.arrays
        shapes = layout(kept, self.num_rows, self.seq_len)
        whole = {name: np.empty(shape, dtype) for name, (shape, dtype) in shapes.items()}
        for piece, shards in needs:
            for group in chunks(shards, max_maps):
                self._spans[: self._stored, ADDRESS] = 0
                self._spans[: self._stored, MASK] = 0
                self._point(piece, group)
                self._fill(0, whole)
                self.release()
        self._whole = whole

    def _fill(self, begin: int, out: Batch) -> None:
        labels = out.get("labels", _NOTHING)
        if "loss_mask" in out and not labels.size:
            labels = np.empty(out["loss_mask"].shape, np.int64)
        copy_rows(
            self._rows,
            self._spans,
            (begin, self._crossing, int(self.continuous), self._pad),
            out.get("input_ids", _NOTHING),
            labels,
            out.get("position_ids", _NOTHING),
            out.get("doc_ids", _NO_DOCUMENTS),
            out.get("loss_mask", _NO_MASK),
        )
        if "source" in out:
            out["source"][:] = self.sources[begin : begin + out["source"].size]

    def _segments(self, rows: int) -> tuple[Int32Array, list[int], Int32Array]:
        """Return the segments of all batches of so many rows, found once."""
        if self._found is None or self._found[0] != rows:
            bounds, first, longest = find_segments(self._rows, self._spans, self.seq_len, rows)
            self._found = rows, (bounds, first.tolist(), longest)
        return self._found[1]


def layout(arrays: Sequence[str], rows: int, seq_len: int) -> Layout:
    """Return shape and dtype of each array of a batch that has a fixed shape; at least one."""
    kinds: dict[str, tuple[tuple[int, ...], type[np.generic]]] = {
        "input_ids": ((rows, seq_len), np.int64),
        "labels": ((rows, seq_len), np.int64),
        "position_ids": ((rows, seq_len), np.int64),
        "doc_ids": ((rows, seq_len), np.int32),
        "loss_mask": ((rows, seq_len), np.bool_),
        "source": ((rows,), np.int32),
    }
    return {name: kinds[name] for name in arrays if name in kinds}


def pad_id(store: Store) -> int:
    """Return the id that fills rows: PAD, else EOS, else 0. It is never trained on."""
    for name in ("pad_id", "eos_id"):
        number = store.manifest.tokenizer.get(name)
        if number is not None:
            return int(number)
    return 0


_NOTHING = np.empty((0, 0), np.int64)
_NO_DOCUMENTS = np.empty((0, 0), np.int32)
_NO_MASK = np.empty((0, 0), np.bool_)


def chunks(shards: Int64Array, size: int) -> Iterator[Int64Array]:
    """Cut shards into groups of at most `size`."""
    for begin in range(0, shards.size, size):
        yield shards[begin : begin + size]


# Records to arrays: DPO pairs and GRPO groups, a record a row, every array padded to one shape.

RECORD_ARRAYS: Mapping[str, tuple[str, ...]] = {
    "dpo": ("chosen", "rejected", "chosen_mask", "rejected_mask", "chosen_len", "rejected_len"),
    "grpo": ("prompts", "prompt_len", "responses", "masks", "response_len", "rewards", "group_size"),
}
"""Training type -> what a batch delivers; beside these there is `source`."""
_LENGTHS = {
    "chosen": "chosen_len",
    "rejected": "rejected_len",
    "prompts": "prompt_len",
    "responses": "response_len",
}
"""Array of token ids -> the array of a batch that says how many there are."""
REWARDS = "rewards"

RUN_ADDRESS, WIDTH, LENGTH, RUN_MASK = range(4)
"""Columns of a line: address and width of its values, their number, and the address of its mask or 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _RecordPart:
    """The values of one array of one source within a block."""

    store: Store
    key: str
    mask: str | None
    runs: Runs
    lines: Int64Array
    """Which lines of the array's table they are."""

    @property
    def num_files(self) -> int:
        """How many files of a shard hold it."""
        return 1 + (self.mask is not None)


class RecordBlock:
    """A run of rows of one stage, ready to be copied into batches; the counterpart of `Block` for records.

    Its shapes are those of the stage: `seq_len` tokens, and as many responses as its sources' largest group has.
    """

    def __init__(
        self,
        stage: Stage,
        index: Mapping[int, RecordRows],
        places: tuple[Int64Array, Int64Array],
        arrays: Sequence[str],
        max_maps: int,
    ) -> None:
        """Find the records at (steps, slots) of a stage; `index` is by source id."""
        first = next(iter(index.values()))
        self.kind = first.store.manifest.kind
        self.arrays = tuple(arrays)
        self.seq_len = first.seq_len
        self.group = group_size(stage)
        self.sources, row_ids = rows_at(stage, *places)
        self._pad = pad_id(first.store)
        self._held: list[tuple[MapCache, list[MappedFile]]] = []
        self._whole: Batch | None = None
        self._sizes = np.zeros(row_ids.size, np.int64)
        heights = {key: self.group if key == "responses" else 1 for key in token_arrays(self.kind)}
        heights |= {REWARDS: 1} if self.group else {}
        self._lines = {key: np.zeros((row_ids.size * height, 4), np.int64) for key, height in heights.items()}
        pieces = self._find(index, row_ids)
        for piece in pieces:
            self._lines[piece.key][piece.lines, LENGTH] = piece.runs.length
            self._lines[piece.key][piece.lines, WIDTH] = piece.store.dtype(piece.key).itemsize
        try:
            self._map(pieces, max_maps)
        except BaseException:
            self.release()
            raise

    @property
    def num_rows(self) -> int:
        """How many rows the block has."""
        return int(self.sources.size)

    @property
    def shape(self) -> tuple[int, ...]:
        """What decides the shapes of its batches, beside their number of rows."""
        return self.seq_len, self.group

    def layout(self, rows: int) -> Layout:
        """Return shape and dtype of each array of a batch of so many rows."""
        return record_layout(self.kind, self.arrays, (rows, self.group, self.seq_len))

    def fill(self, begin: int, out: Batch) -> Batch:
        """Fill the arrays of `out` with the rows from `begin` on, and return it."""
        if self._whole is None:
            self._fill(begin, out)
        else:
            for name, array in out.items():
                array[:] = self._whole[name][begin : begin + array.shape[0]]
        return out

    def complete(self, number: int, rows: int, out: Batch) -> Batch:  # noqa: ARG002 - as `Block` has it
        """Return the batch: every array has a line for every row."""
        return out

    def release(self) -> None:
        """Give the maps back; nothing can be copied afterwards."""
        for maps, files in self._held:
            maps.give_back(files)
        self._held.clear()

    def _find(self, index: Mapping[int, RecordRows], row_ids: Int64Array) -> list[_RecordPart]:
        pieces = []
        for source in distinct(self.sources).tolist():
            chosen = np.flatnonzero(self.sources == source)
            rows = index[source]
            records = rows.records(row_ids[chosen])
            for key, mask in rows.parts.items():
                items, owner = rows.items(key, records)
                lines = chosen[owner]
                if key == "responses":
                    # Within its group a response has the number of those of the same record before it.
                    lines = lines * self.group + np.arange(owner.size) - np.searchsorted(owner, owner)
                pieces.append(
                    _RecordPart(store=rows.store, key=key, mask=mask, runs=rows.runs(key, items), lines=lines)
                )
            if REWARDS in self._lines:
                shard, first, length = locate(rows.store, records, "groups")
                runs = Runs(shard=shard, first=first, length=length)
                self._sizes[chosen] = runs.length
                pieces.append(_RecordPart(store=rows.store, key=REWARDS, mask=None, runs=runs, lines=chosen))
        return pieces

    def _map(self, pieces: list[_RecordPart], max_maps: int) -> None:
        shards = [distinct(piece.runs.shard) for piece in pieces]
        if sum(part.size * piece.num_files for piece, part in zip(pieces, shards, strict=True)) <= max_maps:
            for piece, part in zip(pieces, shards, strict=True):
                self._point(piece, part)
            return
        whole = {name: np.empty(shape, dtype) for name, (shape, dtype) in self.layout(self.num_rows).items()}
        self._fill(0, whole)  # with no address yet: lengths and padding
        for piece, part in zip(pieces, shards, strict=True):
            for group in chunks(part, max(1, max_maps // 2)):
                for lines in self._lines.values():
                    lines[:, RUN_ADDRESS] = lines[:, RUN_MASK] = 0
                self._point(piece, group)
                self._fill(0, whole)
                self.release()
        self._whole = whole

    def _point(self, piece: _RecordPart, shards: Int64Array) -> None:
        """Give the lines in these shards their addresses, and keep the shards mapped."""
        store, runs = piece.store, piece.runs
        local = np.searchsorted(shards, runs.shard)
        here = np.flatnonzero((local < shards.size) & (shards[np.minimum(local, shards.size - 1)] == runs.shard))
        for key, column in ((piece.key, RUN_ADDRESS), (piece.mask, RUN_MASK)):
            if key is not None:
                files = store.maps.take([store.file(int(shard), key_file(key)) for shard in shards])
                self._held.append((store.maps, files))
                bases = np.array([file.address for file in files], np.int64)
                begins = bases[local[here]] + runs.first[here] * store.dtype(key).itemsize
                self._lines[piece.key][piece.lines[here], column] = begins

    def _fill(self, begin: int, out: Batch) -> None:
        for key, mask in token_arrays(self.kind).items():
            height = self.group if key == "responses" else 1
            lines = self._lines[key][begin * height :]
            ids = out[key].reshape(-1, self.seq_len) if key in out else _NO_IDS
            flags = out[mask].reshape(-1, self.seq_len) if mask in out else _NO_FLAGS
            copy_records(lines, self._pad, ids, flags)
            if _LENGTHS[key] in out:
                lengths = out[_LENGTHS[key]].reshape(-1)
                lengths[:] = lines[: lengths.size, LENGTH]
        if REWARDS in out and self.group:
            copy_words(self._lines[REWARDS][begin:], out[REWARDS].view(np.uint32))
        for name, values in (("group_size", self._sizes), ("source", self.sources)):
            if name in out:
                out[name][:] = values[begin : begin + out[name].size]


def group_size(stage: Stage) -> int:
    """Return how many responses a batch has room for in each record: the largest group of the stage's sources."""
    return max(rows.largest_group for rows in stage.rows.values() if isinstance(rows, RecordRows))


def row_slots(stage: Stage) -> int:
    """Return how many tokens a row of a stage has room for, over all its arrays."""
    return stage.spec.seq_len * max(2, 1 + group_size(stage))


def record_layout(kind: str, arrays: Sequence[str], shape: tuple[int, int, int]) -> Layout:
    """Return shape and dtype of each array of a batch; shape is (rows, largest group, seq_len)."""
    rows, group, seq_len = shape
    kinds: dict[str, tuple[tuple[int, ...], type[np.generic]]] = {"source": ((rows,), np.int32)}
    for key, mask in token_arrays(kind).items():
        lines = (rows, group) if key == "responses" else (rows,)
        kinds |= {key: ((*lines, seq_len), np.int64), _LENGTHS[key]: (lines, np.int64)}
        if mask is not None:
            kinds[mask] = ((*lines, seq_len), np.bool_)
    if kind == "grpo":
        kinds |= {REWARDS: ((rows, group), np.float32), "group_size": ((rows,), np.int64)}
    return {name: kinds[name] for name in arrays}


@kernel
def copy_records(lines: Int64Array, pad: int, ids: Int64Array, flags: BoolArray) -> None:
    """Fill the arrays that are not empty, a line of each for a line of the table.

    A line whose address is 0 leaves its values alone; one without a mask is trained on whole.
    """
    nothing = ids[0:0].ravel()
    for i in range(ids.shape[0]):
        if lines[i, RUN_ADDRESS]:
            copy_run(np.uint64(lines[i, RUN_ADDRESS]), lines[i, WIDTH], lines[i, LENGTH], ids[i], nothing)
        ids[i, lines[i, LENGTH] :] = pad
    for i in range(flags.shape[0]):
        length = lines[i, LENGTH]
        if lines[i, RUN_MASK]:
            mask = view_uint8(np.uint64(lines[i, RUN_MASK]), length)
            for k in range(length):
                flags[i, k] = mask[k] != 0
        elif lines[i, RUN_ADDRESS]:
            flags[i, :length] = True
        flags[i, length:] = False


@kernel
def copy_words(lines: Int64Array, out: Uint32Array) -> None:
    """Copy values of 32 bits, whatever they mean, and put 0 behind them."""
    for i in range(out.shape[0]):
        length: int = lines[i, LENGTH]
        if lines[i, RUN_ADDRESS]:
            words = view_uint32(np.uint64(lines[i, RUN_ADDRESS]), length)
            for k in range(length):
                out[i, k] = words[k]
        out[i, length:] = 0


_NO_IDS = np.empty((0, 0), np.int64)
_NO_FLAGS = np.empty((0, 0), np.bool_)
