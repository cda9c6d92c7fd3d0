"""Rows to arrays: spans are copied from mapped shards into the arrays of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numba
import numpy as np

from tokenmill.packing.distinct import distinct
from tokenmill.plan.order import rows_at
from tokenmill.plan.rows import RowIndex
from tokenmill.store.layout import key_file
from tokenmill.store.memory import view_uint8, view_uint16, view_uint32

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.loader.buffers import Layout
    from tokenmill.plan.stages import Stage
    from tokenmill.store.maps import MapCache, MappedFile
    from tokenmill.store.reader import Store
    from tokenmill.types import Batch, Spans, Whole

ARRAYS = ("input_ids", "labels", "position_ids", "doc_ids", "source")
"""What a batch can deliver, in this order."""
IGNORE = -100
"""The label of a token that is not trained on; torch's cross entropy leaves it out by default."""

ADDRESS, WIDTH, LENGTH = range(3)


class StoredRows(RowIndex, Protocol):
    """A row index whose tokens stand in a store."""

    @property
    def store(self) -> Store:
        """Where the tokens are."""
        ...

    @property
    def cross_document_labels(self) -> bool:
        """Whether the first token of a document is the label of the last token of the one before it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """The spans of one source within a block."""

    store: Store
    spans: Spans
    offset: int
    """Where they begin in the arrays of the block."""


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
        places: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
        arrays: Sequence[str],
        max_maps: int,
    ) -> None:
        """Find the rows and spans at (steps, slots) of a stage; `index` is by source id."""
        self.seq_len = stage.spec.seq_len
        self.arrays = tuple(arrays)
        self.sources, row_ids = rows_at(stage, *places)
        self._crossing = int(any(rows.cross_document_labels for rows in index.values()))
        self._rows = np.empty((row_ids.size, 2), np.int64)
        self._held: list[tuple[MapCache, list[MappedFile]]] = []
        self._whole: Batch | None = None
        pieces = self._find(index, row_ids)
        self._spans = np.empty((sum(piece.spans.length.size for piece in pieces), 3), np.int64)
        needs = [(piece, distinct(piece.spans.shard)) for piece in pieces]
        if sum(shards.size for _, shards in needs) <= max_maps:
            for piece, shards in needs:
                self._point(piece, shards)
        else:
            self._copy_in_turns(needs, max_maps)

    @property
    def num_rows(self) -> int:
        """How many rows the block has."""
        return self._rows.shape[0]

    def copy(self, begin: int, out: Batch) -> Batch:
        """Fill the arrays of `out` with the rows from `begin` on, and return it."""
        if self._whole is not None:
            for name, array in out.items():
                array[:] = self._whole[name][begin : begin + array.shape[0]]
            return out
        self._fill(begin, out)
        return out

    def release(self) -> None:
        """Give the maps back; nothing can be copied afterwards."""
        for maps, files in self._held:
            maps.give_back(files)
        self._held.clear()

    def _find(self, index: Mapping[int, StoredRows], row_ids: npt.NDArray[np.int64]) -> list[_Piece]:
        pieces = []
        offset = 0
        present = distinct(self.sources)
        for source in present.tolist():
            chosen = np.flatnonzero(self.sources == source) if present.size > 1 else slice(None)
            spans = index[source].spans(row_ids[chosen])
            self._rows[chosen, 0] = spans.first + offset
            self._rows[chosen, 1] = spans.count
            pieces.append(_Piece(store=index[source].store, spans=spans, offset=offset))
            offset += spans.length.size
        return pieces

    def _point(self, piece: _Piece, shards: npt.NDArray[np.int64]) -> None:
        """Give the spans in these shards their addresses, and keep the shards mapped."""
        store, spans = piece.store, piece.spans
        name = key_file(store.keys[0])
        files = store.maps.take([store.file(int(shard), name) for shard in shards])
        self._held.append((store.maps, files))
        bases = np.array([file.address for file in files], np.int64)
        width = store.dtype(store.keys[0]).itemsize
        point_spans(self._spans[piece.offset :], spans.shard, spans.token, spans.length, shards, bases, width)

    def _copy_in_turns(self, needs: list[tuple[_Piece, npt.NDArray[np.int64]]], max_maps: int) -> None:
        whole = {
            name: np.empty(shape, dtype)
            for name, (shape, dtype) in layout(self.arrays, self.num_rows, self.seq_len).items()
        }
        nothing = np.empty(0, np.int64)
        for piece, _ in needs:
            self._point(piece, nothing)
        for piece, shards in needs:
            for group in _chunks(shards, max_maps):
                self._spans[:, ADDRESS] = 0
                self._point(piece, group)
                self._fill(0, whole)
                self.release()
        self._whole = whole

    def _fill(self, begin: int, out: Batch) -> None:
        copy_rows(
            self._rows,
            self._spans,
            (begin, self._crossing),
            out.get("input_ids", _NOTHING),
            out.get("labels", _NOTHING),
            out.get("position_ids", _NOTHING),
            out.get("doc_ids", _NO_DOCUMENTS),
        )
        if "source" in out:
            out["source"][:] = self.sources[begin : begin + out["source"].size]


def layout(arrays: Sequence[str], rows: int, seq_len: int) -> Layout:
    """Return shape and dtype of each array of a batch."""
    kinds: dict[str, tuple[tuple[int, ...], type[np.generic]]] = {
        "input_ids": ((rows, seq_len), np.int64),
        "labels": ((rows, seq_len), np.int64),
        "position_ids": ((rows, seq_len), np.int64),
        "doc_ids": ((rows, seq_len), np.int32),
        "source": ((rows,), np.int32),
    }
    return {name: kinds[name] for name in arrays}


_NOTHING = np.empty((0, 0), np.int64)
_NO_DOCUMENTS = np.empty((0, 0), np.int32)


def _chunks(shards: npt.NDArray[np.int64], size: int) -> Iterator[npt.NDArray[np.int64]]:
    for begin in range(0, shards.size, size):
        yield shards[begin : begin + size]


@numba.njit(cache=True, nogil=True)
def point_spans(
    out: npt.NDArray[np.int64],
    span_shards: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    shards: npt.NDArray[np.int64],
    bases: npt.NDArray[np.int64],
    width: int,
) -> None:
    """Write address, width and length of every span; the address is 0 where its shard is not among `shards`."""
    for i in range(lengths.size):
        local = np.searchsorted(shards, span_shards[i])
        here = local < shards.size and shards[local] == span_shards[i]
        out[i, ADDRESS] = bases[local] + tokens[i] * width if here else 0
        out[i, WIDTH] = width
        out[i, LENGTH] = lengths[i]


@numba.njit(cache=True, nogil=True)
def copy_rows(
    rows: npt.NDArray[np.int64],
    spans: npt.NDArray[np.int64],
    shape: tuple[int, int],
    input_ids: npt.NDArray[np.int64],
    labels: npt.NDArray[np.int64],
    position_ids: npt.NDArray[np.int64],
    doc_ids: npt.NDArray[np.int32],
) -> None:
    """Fill the arrays that are not empty; a span whose address is 0 leaves its tokens alone."""
    begin, crossing = shape
    count = max(input_ids.shape[0], labels.shape[0], position_ids.shape[0], doc_ids.shape[0])
    for i in range(count):
        first = rows[begin + i, 0]
        last = first + rows[begin + i, 1]
        column = 0
        span = first
        while span < last:
            # Neighbours in memory are copied as one run: a row of `concat` is one, whatever its documents.
            start = span
            length = spans[span, LENGTH]
            width = spans[span, WIDTH]
            address = spans[span, ADDRESS]
            span += 1
            while span < last and address and spans[span, ADDRESS] == address + length * width:
                length += spans[span, LENGTH]
                span += 1
            if address:
                _copy_run(np.uint64(address), width, length, _row(input_ids, i, column), _row(labels, i, column))
            if labels.size:
                _mark_joints(spans[start:span, LENGTH], labels[i], column, address, width, crossing)
            column += length
        if position_ids.size:
            _count_positions(spans[first:last, LENGTH], position_ids[i])
        if doc_ids.size:
            _count_documents(spans[first:last, LENGTH], doc_ids[i])


@numba.njit(cache=True, nogil=True, inline="always")
def _row(array: npt.NDArray[np.int64], row: Whole, column: Whole) -> npt.NDArray[np.int64]:
    return array[row, column:] if array.size else array[0:0].ravel()


@numba.njit(cache=True, nogil=True)
def _copy_run(
    address: np.uint64, width: Whole, length: Whole, ids: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]
) -> None:
    if width == 2:
        _widen(view_uint16(address, length), ids, labels)
    elif width == 4:
        _widen(view_uint32(address, length), ids, labels)
    else:
        _widen(view_uint8(address, length), ids, labels)


@numba.njit(cache=True, nogil=True)
def _widen(
    tokens: npt.NDArray[np.unsignedinteger], ids: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]
) -> None:
    for k in range(min(ids.size, tokens.size)):
        ids[k] = tokens[k]
    # Labels begin one token after the inputs do; the last token of a run has its label in the next run, if at all.
    following = tokens[1:]
    for k in range(min(labels.size, following.size)):
        labels[k] = following[k]


@numba.njit(cache=True, nogil=True)
def _mark_joints(
    lengths: npt.NDArray[np.int64],
    labels: npt.NDArray[np.int64],
    column: Whole,
    address: Whole,
    width: Whole,
    crossing: Whole,
) -> None:
    """Set the label of the last token before each span of a run: the next document's first token, or none."""
    if column:
        if not crossing:
            labels[column - 1] = IGNORE
        elif address:
            labels[column - 1] = _first_token(np.uint64(address), width)
    if not crossing:
        for k in range(lengths.size - 1):
            column += lengths[k]
            labels[column - 1] = IGNORE


@numba.njit(cache=True, nogil=True)
def _first_token(address: np.uint64, width: Whole) -> Whole:
    if width == 2:
        return np.int64(view_uint16(address, 1)[0])
    if width == 4:
        return np.int64(view_uint32(address, 1)[0])
    return np.int64(view_uint8(address, 1)[0])


@numba.njit(cache=True, nogil=True)
def _count_positions(lengths: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> None:
    column = 0
    for number in range(lengths.size):
        part = positions[column : column + lengths[number]]
        for k in range(part.size):
            part[k] = k
        column += lengths[number]


@numba.njit(cache=True, nogil=True)
def _count_documents(lengths: npt.NDArray[np.int64], documents: npt.NDArray[np.int32]) -> None:
    column = 0
    for number in range(lengths.size):
        documents[column : column + lengths[number]] = number
        column += lengths[number]
