"""The order in which the rows of one epoch are read: `full`, `window` or `none`, computed in both directions.

`full` permutes all rows. `window` permutes blocks of rows, and then the rows of each group of consecutive blocks.
A block is a packing window, whose documents are neighbours on disk; where rows are not packed in windows it is
`block_rows` rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tokenmill.compiled import inlined, inner, int64, kernel, least
from tokenmill.errors import ConfigError, StoreCorruptError, nearest
from tokenmill.plan.permute import derive, permute, permute_all, unpermute, unpermute_all
from tokenmill.types import Int64Array

NONE, FULL, WINDOW = range(3)
MODES = {"none": NONE, "full": FULL, "window": WINDOW}
_BLOCK_KEY = -2
"""Number that derives the key by which blocks are permuted; groups count from 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shuffle:
    """Distance that a row may travel from its place on disk."""

    mode: str = "full"
    """`full`: anywhere. `none`: nowhere. `window`: blocks of neighbouring rows are read in a shuffled order, and
    rows are shuffled within a group of blocks, so only one group is in use at a time. A block is a packing window.
    The rows of a batch are ordered by block, so that ranks share few blocks."""
    block_rows: int = 1024
    """Rows of a block, for `window` where rows are not packed in windows."""
    window_blocks: int = 64
    """Blocks that are shuffled together, for `window`."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(
                f"shuffle: must be full, window or none, got {self.mode!r}; {nearest(self.mode, MODES)}"
            )
        for name in ("block_rows", "window_blocks"):
            value = getattr(self, name)
            if not 1 <= value <= 1 << 30:
                raise ConfigError(f"{name}: must lie within 1 and 2^30, got {value}; leave it out for the default")

    def describe(self) -> dict[str, int | str]:
        """Return what decides the order, as JSON."""
        if self.mode != "window":
            return {"mode": self.mode}
        return {"mode": self.mode, "block_rows": self.block_rows, "window_blocks": self.window_blocks}

    @property
    def numbers(self) -> tuple[int, int, int]:
        """Mode, block_rows and window_blocks, for kernels."""
        return MODES[self.mode], self.block_rows, self.window_blocks


@dataclass(frozen=True, kw_only=True, eq=False)
class EpochOrder:
    """The order in which the rows of one epoch are read.

    With `window`, a row is found in two steps. `arranged` maps the place at which it is read to its place in the
    order of shuffled blocks, read one after another. `settled` maps that to the row.
    """

    size: int
    """Number of rows of the epoch."""
    key: np.uint64
    numbers: tuple[int, int, int]
    """Mode, block_rows and window_blocks of the shuffle."""
    starts: Int64Array | None = None
    """First row of each packing window, and the end; None where rows are not packed in windows."""

    def __post_init__(self) -> None:
        starts = self.starts
        if starts is not None and (starts[0] != 0 or starts[-1] != self.size or (np.diff(starts) < 0).any()):
            raise StoreCorruptError(
                f"row index: its windows must hold {self.size} rows, in ascending order, got {int(starts[0])} to "
                f"{int(starts[-1])}; delete the folder .rows of the store, it will be built again"
            )

    @cached_property
    def _windows(self) -> tuple[Int64Array, Int64Array] | None:
        """First row of each packing window, and the order in which windows are read: 24 bytes per window.

        None where blocks are not packing windows.
        """
        if self.numbers[0] != WINDOW or self.starts is None:
            return None
        return self.starts, _window_order(self.starts, self.key)

    @cached_property
    def _edges(self) -> Int64Array:
        """Place at which each group of packing windows begins, and the end."""
        assert self._windows is not None
        starts, (_, begins) = self._windows
        groups = self._num_groups
        edges: Int64Array = begins[np.arange(groups + 1) * (starts.size - 1) // groups]
        return edges

    @property
    def _num_groups(self) -> int:
        assert self.starts is not None
        return -(-(self.starts.size - 1) // self.numbers[2])

    def rows(self, places: Int64Array) -> Int64Array:
        """Return the row that is read at each place."""
        return self.settled(self.arranged(places))

    def arranged(self, places: Int64Array) -> Int64Array:
        """Return the place of each row in the order of shuffled blocks, read one after another."""
        mode, block_rows, window_blocks = self.numbers
        if mode == NONE:
            return places
        if mode == FULL:
            return permute_all(places, self.size, self.key)
        if self._windows is not None:
            return _arrange_in_windows(places, self._edges, self.key)
        return _arrange_in_blocks(places, self.size, self.key, block_rows * window_blocks)

    def settled(self, arranged: Int64Array) -> Int64Array:
        """Return the row at each place in the order of shuffled blocks; fastest in ascending order."""
        mode, block_rows, _ = self.numbers
        if mode != WINDOW:
            return arranged
        if self._windows is not None:
            return _settle_in_windows(arranged, *self._windows)
        return _settle_in_blocks(arranged, self.size, self.key, block_rows)

    def places(self, rows: Int64Array) -> Int64Array:
        """Return the place at which each row is read."""
        mode, block_rows, window_blocks = self.numbers
        if mode == NONE:
            return rows
        if mode == FULL:
            return unpermute_all(rows, self.size, self.key)
        if self._windows is not None:
            return _places_in_windows(rows, *self._windows, self.key, self._num_groups)
        return _places_in_blocks(rows, self.size, self.key, block_rows, window_blocks)

    def group_end(self, place: int) -> int:
        """Return the place after the last row that is shuffled together with the one at `place`."""
        mode, block_rows, window_blocks = self.numbers
        if self._windows is None:
            group = block_rows * window_blocks
            return min(self.size, (place // group + 1) * group) if mode == WINDOW else self.size
        return int(self._edges[np.searchsorted(self._edges, place, side="right")])


# Blocks of `block_rows` rows. The last, shorter one is never moved.


@kernel
def _arrange_in_blocks(places: Int64Array, size: int, key: np.uint64, group_rows: int) -> Int64Array:
    out = np.empty_like(places)
    for i in range(places.size):
        group = places[i] // group_rows
        begin = group * group_rows
        out[i] = begin + permute(places[i] - begin, least(group_rows, size - begin), derive(key, group))
    return out


@kernel
def _settle_in_blocks(arranged: Int64Array, size: int, key: np.uint64, block_rows: int) -> Int64Array:
    out = np.empty_like(arranged)
    num_blocks, block_key = size // block_rows, derive(key, _BLOCK_KEY)
    last, shift = int64(-1), int64(0)
    for i in range(arranged.size):
        slot = arranged[i] // block_rows
        if slot != last:
            last, shift = slot, int64(0)
            if slot < num_blocks:
                shift = (permute(slot, num_blocks, block_key) - slot) * block_rows
        out[i] = arranged[i] + shift
    return out


@kernel
def _places_in_blocks(
    rows: Int64Array, size: int, key: np.uint64, block_rows: int, window_blocks: int
) -> Int64Array:
    places = np.empty_like(rows)
    num_blocks, group_rows = size // block_rows, block_rows * window_blocks
    for i in range(rows.size):
        block = rows[i] // block_rows
        slot = unpermute(block, num_blocks, derive(key, _BLOCK_KEY)) if block < num_blocks else block
        place = rows[i] + (slot - block) * block_rows
        group = place // group_rows
        begin = group * group_rows
        places[i] = begin + unpermute(place - begin, least(group_rows, size - begin), derive(key, group))
    return places


# Blocks that are packing windows, each of as many rows as packing made of it.


@kernel
def _window_order(starts: Int64Array, key: np.uint64) -> Int64Array:
    """Return the windows in the order in which they are read, and the place at which each begins, in two lines.

    The last column is the end of both.
    """
    order = np.empty((2, starts.size), np.int64)
    order[1, 0] = 0
    order[0, starts.size - 1] = starts.size - 1
    for slot in range(starts.size - 1):
        window = permute(slot, starts.size - 1, derive(key, _BLOCK_KEY))
        order[0, slot] = window
        order[1, slot + 1] = order[1, slot] + starts[window + 1] - starts[window]
    return order


@inner
def _range_of(edges: Int64Array, number: int) -> int:
    """Return the index of the range between ascending edges that holds a number; empty ranges hold none."""
    low, high = int64(0), int64(edges.size - 2)
    while low < high:
        middle = (low + high + 1) >> 1
        if edges[middle] <= number:
            low = middle
        else:
            high = middle - 1
    return low


@inlined
def _group(slot: int, num_windows: int, num_groups: int) -> int:
    """Return the group that a slot belongs to; sizes of groups differ by one window at most."""
    return ((slot + 1) * num_groups - 1) // num_windows


@kernel
def _arrange_in_windows(places: Int64Array, edges: Int64Array, key: np.uint64) -> Int64Array:
    """Return `EpochOrder.arranged`; `edges` are the places at which groups of windows begin, and the end."""
    out = np.empty_like(places)
    begin = end = int64(0)
    group_key = key
    for i in range(places.size):
        place = places[i]
        if place < begin or place >= end:
            group = _range_of(edges, place)
            begin, end, group_key = edges[group], edges[group + 1], derive(key, group)
        out[i] = begin + permute(place - begin, end - begin, group_key)
    return out


@kernel
def _settle_in_windows(arranged: Int64Array, starts: Int64Array, order: Int64Array) -> Int64Array:
    out = np.empty_like(arranged)
    windows, begins = order[0], order[1]
    slot = int64(0)
    for i in range(arranged.size):
        place = arranged[i]
        if place < begins[slot] or place >= begins[slot + 1]:
            slot += 1  # it is often the next
            if slot + 1 >= begins.size or place < begins[slot] or place >= begins[slot + 1]:
                slot = _range_of(begins, place)
        out[i] = starts[windows[slot]] + place - begins[slot]
    return out


@kernel
def _places_in_windows(
    rows: Int64Array, starts: Int64Array, order: Int64Array, key: np.uint64, num_groups: int
) -> Int64Array:
    begins = order[1]
    places = np.empty_like(rows)
    num_windows = starts.size - 1
    for i in range(rows.size):
        window = _range_of(starts, rows[i])
        slot = unpermute(window, num_windows, derive(key, _BLOCK_KEY))
        group = _group(slot, num_windows, num_groups)
        first = begins[group * num_windows // num_groups]
        count = begins[(group + 1) * num_windows // num_groups] - first
        places[i] = first + unpermute(begins[slot] + rows[i] - starts[window] - first, count, derive(key, group))
    return places
