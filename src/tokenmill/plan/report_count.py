"""What the rows hold that a part of a stage draws from a source: whole epochs at once, the others row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numba
import numpy as np

from tokenmill.plan.permute import derive
from tokenmill.plan.rows import NOTHING, Held
from tokenmill.plan.shuffle import shuffle_row
from tokenmill.plan.stages import (
    BLOCK_ROWS,
    MODE,
    OLD_BLOCK_ROWS,
    OLD_EPOCH,
    OLD_MODE,
    OLD_WINDOW_BLOCKS,
    REST,
    SIZE,
    WINDOW_BLOCKS,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.plan.rows import RowIndex
    from tokenmill.plan.stages import Stage
    from tokenmill.types import Whole

COUNTED_ROWS = 1 << 20
"""Of the epochs that a stage does not draw whole, up to so many rows are counted; for more, the mean must do."""
COUNTED_IN_ALL = 1 << 24
"""Where many stages have many sources, each counts its part of so many."""
_BLOCK = 1 << 16


def most_counted(stages: Sequence[Sequence[Stage]], number: int) -> int:
    """Return how many rows a part of a stage may count of a source, so that a run of any shape is reported soon."""
    shares = sum(len({name for part in parts for name in part.names}) for parts in stages)
    return min(COUNTED_ROWS, COUNTED_IN_ALL // shares) // len(stages[number])


def held_rows(part: Stage, name: str, most: int) -> tuple[Held, bool]:
    """Return what the rows that a part draws from a source hold, and whether all of it was counted.

    If that takes more than `most` rows to be counted one by one, they are taken to be like those of an epoch; those
    of live text to be full.
    """
    index = part.rows[name]
    if "live" in index.description:
        return _mean(index, part.draws[name]), False
    epochs, pieces = _epochs(part, name)
    rows = sum(len(piece) for piece in pieces)
    if rows > most:
        return _mean(index, epochs * index.num_rows + rows), False
    held = _mean(index, epochs * index.num_rows) if epochs else NOTHING
    # In ascending order, so that neighbours on disk are read together.
    drawn = np.sort(np.concatenate([_rows(part, name, piece) for piece in pieces]))
    for begin in range(0, rows, _BLOCK):
        held += index.held(drawn[begin : begin + _BLOCK])
    return held, True


def _epochs(part: Stage, name: str) -> tuple[int, tuple[range, range]]:
    """Return how many whole epochs of a source a part draws, and its draws before and after them."""
    carry, drawn, index = part.carry(name), part.draws[name], part.rows[name]
    # Draws are counted from the first of the part, epochs from the end of the rest before them.
    first = index.num_rest - carry
    first += -(min(0, first) // index.num_rows) * index.num_rows
    epochs = max(0, (drawn - first) // index.num_rows)
    begin = min(first, drawn)
    return epochs, (range(begin), range(begin + epochs * index.num_rows, drawn))


def _mean(index: RowIndex, rows: int) -> Held:
    """Return what so many rows hold if they are like those of an epoch: exact for whole epochs."""
    fates = index.fates()
    tokens = fates.rows * index.row_slots - fates.padding
    return Held(tokens=rows * tokens // fates.rows, trained=rows * fates.trained // fates.rows)


def _rows(part: Stage, name: str, draws: range) -> npt.NDArray[np.int64]:
    """Return the rows of some draws of a source, counted from the first of the part.

    Which step draws them does not matter here, so the mixture is not asked: that of a long ramp would be slow.
    """
    line = part.names.index(name)
    rows = np.empty(len(draws), np.int64)
    _fill(part.carry(name) + draws.start, part.table[line], part.keys[line], rows)
    return rows


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _fill(
    first: Whole, facts: npt.NDArray[np.int64], keys: npt.NDArray[np.uint64], rows: npt.NDArray[np.int64]
) -> None:
    """Fill in the rows of a source from its `first`-th on, as the plan orders them."""
    for i in range(rows.size):
        ordinal = first + i
        start = np.int64(0)
        size = facts[SIZE]
        epoch = (ordinal - facts[REST]) // size
        place = ordinal - facts[REST] - epoch * size
        if ordinal < facts[REST]:
            start, size, epoch, place = size, facts[REST], np.int64(-1), ordinal
        if epoch == facts[OLD_EPOCH]:
            mode, block, window = facts[OLD_MODE], facts[OLD_BLOCK_ROWS], facts[OLD_WINDOW_BLOCKS]
            key = derive(keys[1], epoch)
        else:
            mode, block, window = facts[MODE], facts[BLOCK_ROWS], facts[WINDOW_BLOCKS]
            key = derive(keys[0], epoch)
        rows[i] = start + shuffle_row(place, size, key, mode, block, window)


def step_of(part: Stage, name: str, draw: int) -> int:
    """Return the step of a draw of a source, counted from the first of the part."""
    position = part.positions_of(name, np.array([draw]))[0]
    return int(position) // part.spec.global_batch_size + part.spec.start_step
