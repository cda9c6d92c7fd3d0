"""Which documents are packed together, and which lane reads them when.

Files are cut into units as for a build, and large units into parts: document i belongs to part i % parts. Every
epoch puts all windows into an order of its own and deals them in turn: lane l of L reads those at l, l + L, l + 2L.

Windows are of about one size, so all lanes would come to the end of theirs at the same step, again and again. With
shuffling, a lane therefore begins an epoch with a share of its first window, (l + 1) / L of it, and reads the rest
of that window last: the ends are spread evenly over the steps, and a thread or two can keep up with them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenmill.documents import FORMATS, InputFile, Piece, Unit, cut_files, place
from tokenmill.errors import DocumentError
from tokenmill.fingerprint import key64
from tokenmill.plan.shuffle import permute
from tokenmill.types import Int64Array

WHOLE, HEAD, TAIL = "whole", "head", "tail"


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Documents that are packed together."""

    number: int
    """Among all windows of the source."""
    unit: Unit
    part: int
    parts: int
    take: str = WHOLE
    """Which of its documents: all, or the share that a lane begins or ends an epoch with."""
    head: int = 1
    of: int = 1
    """Of every `of` documents the first `head` are the share that comes first."""

    def members(self, first: int, count: int) -> Int64Array:
        """Return which of `count` documents of the unit belong to the window, counted from the `first` of them.

        >>> window = Window(number=0, unit=Unit(index=0, pieces=()), part=1, parts=2, take="head", head=2, of=3)
        >>> window.members(0, 14).tolist(), window.members(4, 10).tolist()
        ([1, 3, 7, 9, 13], [3, 5, 9])
        """
        index, part = np.divmod(np.arange(first, first + count), self.parts)
        mine = part == self.part
        if self.take != WHOLE:
            mine &= (index % self.of < self.head) == (self.take == HEAD)
        return np.flatnonzero(mine)

    def key(self, seed: int, epoch: int, what: str) -> np.uint64:
        """Return the key of an order of the things in this window, in one epoch."""
        return np.uint64(key64(seed, what, epoch, self.number, self.take))

    def __str__(self) -> str:
        first, last = self.unit.pieces[0], self.unit.pieces[-1]
        named = piece_name(first) if first is last else f"{piece_name(first)} to {piece_name(last)}"
        return named if self.parts == 1 else f"{named} (part {self.part + 1} of {self.parts})"


def piece_name(piece: Piece) -> str:
    """Name a part of a file for people."""
    path, counts = piece.file.path, FORMATS[piece.file.suffix].counts
    if piece.file.suffix == ".parquet":
        return f"{path} row groups {piece.begin}:{piece.end}"
    if piece.file.suffix == ".arrow":
        return f"{path} record batches {piece.begin}:{piece.end}"
    return f"{path} bytes {piece.begin}:{piece.end}" if counts == "line" and piece.end > 1 else path


def record_name(piece: Piece, line: int) -> str:
    """Name a record for people; `line` is counted from 0 at the start of the piece.

    How many lines or rows stand before a piece is not known without reading them.
    """
    if piece.begin == 0:
        return place(piece, line)
    return f"{piece_name(piece)}, {FORMATS[piece.file.suffix].counts} {line + 1} of these"


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """All windows of a source, and the lanes that read them."""

    files: tuple[InputFile, ...]
    pieces: Int64Array
    """(file, begin, end, bytes) of each piece: a corpus may have millions."""
    units: Int64Array
    """First piece of each unit, and the end."""
    begins: Int64Array
    """First window of each unit, and the end."""
    lanes: int
    seed: int
    shuffle: bool

    @property
    def num_windows(self) -> int:
        """How many windows there are; at least one for each lane."""
        return int(self.begins[-1])

    @property
    def max_parts(self) -> int:
        """How often the unit that is cut into most parts is read in an epoch."""
        return int(np.diff(self.begins).max())

    def num_turns(self, lane: int) -> int:
        """Return how many windows a lane reads in an epoch; the share that it begins with is one of its own."""
        return len(range(lane, self.num_windows, self.lanes)) + self._is_cut(lane)

    def at(self, lane: int, epoch: int, turn: int) -> Window:
        """Return what a lane reads at one turn of an epoch."""
        last = self.num_turns(lane) - 1
        assert 0 <= turn <= last
        cut = self._is_cut(lane)
        place = lane + self.lanes * (0 if cut and turn == last else turn)
        if self.shuffle:
            key = np.uint64(key64(self.seed, "windows", epoch))
            place = int(permute(place, self.num_windows, key))
        take = (HEAD if turn == 0 else TAIL if turn == last else WHOLE) if cut else WHOLE
        unit = int(np.searchsorted(self.begins, place, side="right")) - 1
        return Window(
            number=place,
            unit=self._unit(unit),
            part=place - int(self.begins[unit]),
            parts=int(self.begins[unit + 1] - self.begins[unit]),
            take=take,
            head=lane + 1,
            of=self.lanes,
        )

    def after(self, lane: int, epoch: int, turn: int) -> tuple[int, int]:
        """Return the turn that follows one, with its epoch."""
        return (epoch, turn + 1) if turn + 1 < self.num_turns(lane) else (epoch + 1, 0)

    def _is_cut(self, lane: int) -> bool:
        return self.shuffle and lane + 1 < self.lanes

    def _unit(self, index: int) -> Unit:
        pieces = self.pieces[self.units[index] : self.units[index + 1]].tolist()
        return Unit(
            index=index,
            pieces=tuple(
                Piece(file=self.files[file], begin=begin, end=end, bytes=size) for file, begin, end, size in pieces
            ),
        )


def cut_windows(files: Sequence[InputFile], *, window_bytes: int, lanes: int, seed: int, shuffle: bool) -> Windows:
    """Cut files into windows of about `window_bytes`, at least one for each lane; reads heads and footers only."""
    numbers = {file.path: number for number, file in enumerate(files)}
    pieces, units, sizes = array("q"), array("q", [0]), array("q")
    for unit in cut_files(files, chunk_bytes=window_bytes):
        for piece in unit.pieces:
            pieces.extend((numbers[piece.file.path], piece.begin, piece.end, piece.bytes))
        units.append(len(pieces) // 4)
        sizes.append(unit.bytes)
    if not sizes:
        raise DocumentError(f"{files[0].path}: the input must have records, got {len(files)} empty files; add some")
    parts = np.maximum(np.array(sizes, np.int64) // window_bytes, 1)
    parts *= -(-lanes // int(parts.sum()))
    return Windows(
        files=tuple(files),
        pieces=np.array(pieces, np.int64).reshape(-1, 4),
        units=np.array(units, np.int64),
        begins=np.concatenate([[0], np.cumsum(parts)]),
        lanes=lanes,
        seed=seed,
        shuffle=shuffle,
    )
