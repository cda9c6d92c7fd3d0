"""Records to arrays: DPO pairs and GRPO groups, a record a row, every array padded to one shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numba
import numpy as np

from tokenmill.loader.assemble import chunks, pad_id
from tokenmill.loader.kernels import copy_run
from tokenmill.packing.distinct import distinct
from tokenmill.packing.records import PARTS, RecordRows, Runs
from tokenmill.plan.order import rows_at
from tokenmill.store.layout import key_file
from tokenmill.store.locate import locate
from tokenmill.store.memory import view_uint8, view_uint32

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.loader.buffers import Layout
    from tokenmill.plan.stages import Stage
    from tokenmill.store.maps import MapCache, MappedFile
    from tokenmill.store.reader import Store
    from tokenmill.types import Batch, Whole

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

ADDRESS, WIDTH, LENGTH, MASK = range(4)
"""Columns of a line: address and width of its values, their number, and the address of its mask or 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """The values of one array of one source within a block."""

    store: Store
    key: str
    mask: str | None
    runs: Runs
    lines: npt.NDArray[np.int64]
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
        places: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
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
        heights = {key: self.group if key == "responses" else 1 for key in PARTS[self.kind]}
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

    def _find(self, index: Mapping[int, RecordRows], row_ids: npt.NDArray[np.int64]) -> list[_Piece]:
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
                pieces.append(_Piece(store=rows.store, key=key, mask=mask, runs=rows.runs(key, items), lines=lines))
            if REWARDS in self._lines:
                shard, first, length = locate(rows.store, records, "groups")
                runs = Runs(shard=shard, first=first, length=length)
                self._sizes[chosen] = runs.length
                pieces.append(_Piece(store=rows.store, key=REWARDS, mask=None, runs=runs, lines=chosen))
        return pieces

    def _map(self, pieces: list[_Piece], max_maps: int) -> None:
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
                    lines[:, ADDRESS] = lines[:, MASK] = 0
                self._point(piece, group)
                self._fill(0, whole)
                self.release()
        self._whole = whole

    def _point(self, piece: _Piece, shards: npt.NDArray[np.int64]) -> None:
        """Give the lines in these shards their addresses, and keep the shards mapped."""
        store, runs = piece.store, piece.runs
        local = np.searchsorted(shards, runs.shard)
        here = np.flatnonzero((local < shards.size) & (shards[np.minimum(local, shards.size - 1)] == runs.shard))
        for key, column in ((piece.key, ADDRESS), (piece.mask, MASK)):
            if key is not None:
                files = store.maps.take([store.file(int(shard), key_file(key)) for shard in shards])
                self._held.append((store.maps, files))
                bases = np.array([file.address for file in files], np.int64)
                begins = bases[local[here]] + runs.first[here] * store.dtype(key).itemsize
                self._lines[piece.key][piece.lines[here], column] = begins

    def _fill(self, begin: int, out: Batch) -> None:
        for key in PARTS[self.kind]:
            height = self.group if key == "responses" else 1
            lines = self._lines[key][begin * height :]
            mask = PARTS[self.kind][key]
            ids = out[key].reshape(-1, self.seq_len) if key in out else _NOTHING
            flags = out[mask].reshape(-1, self.seq_len) if mask in out else _NO_MASK
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
    for key, mask in PARTS[kind].items():
        lines = (rows, group) if key == "responses" else (rows,)
        kinds |= {key: ((*lines, seq_len), np.int64), _LENGTHS[key]: (lines, np.int64)}
        if mask is not None:
            kinds[mask] = ((*lines, seq_len), np.bool_)
    if kind == "grpo":
        kinds |= {REWARDS: ((rows, group), np.float32), "group_size": ((rows,), np.int64)}
    return {name: kinds[name] for name in arrays}


@numba.njit(cache=True, nogil=True)
def copy_records(
    lines: npt.NDArray[np.int64], pad: int, ids: npt.NDArray[np.int64], flags: npt.NDArray[np.bool_]
) -> None:
    """Fill the arrays that are not empty, a line of each for a line of the table.

    A line whose address is 0 leaves its values alone; one without a mask is trained on whole.
    """
    nothing = ids[0:0].ravel()
    for i in range(ids.shape[0]):
        if lines[i, ADDRESS]:
            copy_run(np.uint64(lines[i, ADDRESS]), lines[i, WIDTH], lines[i, LENGTH], ids[i], nothing)
        ids[i, lines[i, LENGTH] :] = pad
    for i in range(flags.shape[0]):
        length = lines[i, LENGTH]
        if lines[i, MASK]:
            mask = view_uint8(np.uint64(lines[i, MASK]), length)
            for k in range(length):
                flags[i, k] = mask[k] != 0
        elif lines[i, ADDRESS]:
            flags[i, :length] = True
        flags[i, length:] = False


@numba.njit(cache=True, nogil=True)
def copy_words(lines: npt.NDArray[np.int64], out: npt.NDArray[np.uint32]) -> None:
    """Copy values of 32 bits, whatever they mean, and put 0 behind them."""
    for i in range(out.shape[0]):
        length: Whole = lines[i, LENGTH]
        if lines[i, ADDRESS]:
            words = view_uint32(np.uint64(lines[i, ADDRESS]), length)
            for k in range(length):
                out[i, k] = words[k]
        out[i, length:] = 0


_NOTHING = np.empty((0, 0), np.int64)
_NO_MASK = np.empty((0, 0), np.bool_)
