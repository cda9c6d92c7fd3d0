"""In which order the rows of one epoch are read: `full`, `block`, `window` or `none`, by a computed permutation.

The permutation is a keyed bijection on range(size), never stored, and invertible: an alternating Feistel network
over just as many bits as `size` needs, with cycle-walking: an image that falls outside the range is sent through
again until it falls inside, which keeps it a bijection and costs less than two passes on average. Six rounds: with
four, the statistical tests of `tests/plan/test_shuffle.py` fail for small ranges.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tokenmill.compiled import inlined, inner, int64, kernel, leading_zeros, least
from tokenmill.errors import ConfigError, StoreCorruptError, nearest
from tokenmill.types import Int64Array, Uint64Array

ROUNDS = 6
MIN_BITS = 6
"""Tiny ranges walk in 64 values: below that a Feistel network reaches too few permutations."""

# Odd constants of SplitMix64 and of its variants; any well-mixed odd numbers would do.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_ONE = np.uint64(1)


@inlined
def mix(value: np.uint64) -> np.uint64:
    """Scramble 64 bits (the finalizer of SplitMix64)."""
    value = (value ^ (value >> np.uint64(30))) * _M1
    value = (value ^ (value >> np.uint64(27))) * _M2
    return value ^ (value >> np.uint64(31))


@inlined
def derive(key: np.uint64, number: int) -> np.uint64:
    """Return the key of one epoch, window or step of many that share `key`."""
    return mix(key + (np.uint64(number) + _ONE) * _GOLDEN)


@kernel
def derived_key(key: np.uint64, number: int) -> np.uint64:
    """Return what `derive` does, outside of kernels."""
    return derive(key, number)


@inlined
def num_bits(size: int) -> np.uint64:
    """Return how many bits the numbers below `size` need, at least MIN_BITS."""
    bits = 64 - leading_zeros(np.uint64(size - 1))
    return np.uint64(bits if bits > MIN_BITS else MIN_BITS)


@inlined
def _round(half: np.uint64, key: np.uint64, number: int) -> np.uint64:
    value = half + (key ^ (_GOLDEN * np.uint64(number + 1)))
    value = (value ^ (value >> np.uint64(32))) * _M1
    value = (value ^ (value >> np.uint64(29))) * _M2
    return value >> np.uint64(32)


@kernel
def permute(index: int, size: int, key: np.uint64) -> int:
    """Return where `index` goes under the permutation of range(size) that `key` names."""
    bits = num_bits(size)
    low_bits = bits >> _ONE
    low_mask = (_ONE << low_bits) - _ONE
    high_mask = (_ONE << (bits - low_bits)) - _ONE
    value = np.uint64(index)
    while True:
        low = value & low_mask
        high = value >> low_bits
        for number in range(0, ROUNDS, 2):
            low ^= _round(high, key, number) & low_mask
            high ^= _round(low, key, number + 1) & high_mask
        value = (high << low_bits) | low
        if value < np.uint64(size):
            return int64(value)


@inner
def unpermute(image: int, size: int, key: np.uint64) -> int:
    """Return the index that `permute` sends to `image`."""
    bits = num_bits(size)
    low_bits = bits >> _ONE
    low_mask = (_ONE << low_bits) - _ONE
    high_mask = (_ONE << (bits - low_bits)) - _ONE
    value = np.uint64(image)
    while True:
        low = value & low_mask
        high = value >> low_bits
        for number in range(ROUNDS - 2, -1, -2):
            high ^= _round(low, key, number + 1) & high_mask
            low ^= _round(high, key, number) & low_mask
        value = (high << low_bits) | low
        if value < np.uint64(size):
            return int64(value)


@inner
def permute_many(room: Uint64Array, count: int, out: Int64Array) -> None:
    """Permute values, each below a size of its own and by its own key, and add them to what stands in `out`.

    `room` has four lines, values, sizes, keys and places in `out`, of which the first `count` columns are taken and
    overwritten. One pass is for all, the next for those that fell outside of their range: a pass has no branch, so
    that a processor takes several values at a time (benchmarks/order.py).
    """
    while count:
        for i in range(count):
            bits = num_bits(int64(room[1, i]))
            low_bits = bits >> _ONE
            low_mask = (_ONE << low_bits) - _ONE
            high_mask = (_ONE << (bits - low_bits)) - _ONE
            low = room[0, i] & low_mask
            high = room[0, i] >> low_bits
            for number in range(0, ROUNDS, 2):
                low ^= _round(high, room[2, i], number) & low_mask
                high ^= _round(low, room[2, i], number + 1) & high_mask
            room[0, i] = (high << low_bits) | low
        left = int64(0)
        for i in range(count):
            if room[0, i] < room[1, i]:
                out[room[3, i]] += int64(room[0, i])
            else:
                for line in range(4):
                    room[line, left] = room[line, i]
                left += 1
        count = left


@kernel
def permute_all(indices: Int64Array, size: int, key: np.uint64) -> Int64Array:
    """Permute many indices at once."""
    out = np.empty_like(indices)
    for i in range(indices.size):
        out[i] = permute(indices[i], size, key)
    return out


NONE, FULL, BLOCK, WINDOW = range(4)
MODES = {"none": NONE, "full": FULL, "block": BLOCK, "window": WINDOW}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shuffle:
    """How far a row may travel from its place on disk."""

    mode: str = "full"
    """`full`: anywhere. `none`: nowhere. `block`: blocks of neighbouring rows are read in a shuffled
    order, and rows are shuffled within a window of such blocks, so only a window is in use at a time.
    `window`: the same, but a block is a packing window, the documents of which are neighbours on disk, and the
    rows of a batch are ordered by block, so that ranks share few blocks."""
    block_rows: int = 1024
    """Rows that are neighbours on disk and stay in one window (mode `block`; `window` where nothing is packed)."""
    window_blocks: int = 64
    """Blocks that are shuffled together (modes `block` and `window`)."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(
                f"shuffle: must be full, block, window or none, got {self.mode!r}; {nearest(self.mode, MODES)}"
            )
        for name in ("block_rows", "window_blocks"):
            value = getattr(self, name)
            if not 1 <= value <= 1 << 30:
                raise ConfigError(f"{name}: must lie within 1 and 2^30, got {value}; leave it out for the default")

    def describe(self) -> dict[str, int | str]:
        """Return what decides the order, as JSON."""
        if MODES[self.mode] < BLOCK:
            return {"mode": self.mode}
        return {"mode": self.mode, "block_rows": self.block_rows, "window_blocks": self.window_blocks}

    @property
    def numbers(self) -> tuple[int, int, int]:
        """What kernels are told: mode, block_rows, window_blocks."""
        return MODES[self.mode], self.block_rows, self.window_blocks


# Many rows at once, of one epoch of each of several sources
#
# An epoch is a line of a table: what decides its order, and what was computed of it last. Rows of all sources wait
# side by side until there are enough of them, and then are shuffled together.

EPOCH_FIRST, EPOCH_SIZE, EPOCH_KEY, EPOCH_MODE, EPOCH_BLOCK_ROWS, EPOCH_WINDOW_BLOCKS = range(6)
EPOCH_NUM_BLOCKS, EPOCH_TURN, WINDOW_BEGIN, WINDOW_END, WINDOW_KEY = range(6, 11)
"""Columns of an epoch: its first row, then what decides its order, and the window that was met last, its places and
its key. Keys are the bits of their numbers."""
EPOCH_COLUMNS = 11
LINE, _INDEX = 4, 5
"""Lines of the room for waiting rows, behind those of `permute_many`: the epoch of a row, and its index."""
_BLOCKS = 1024
"""Blocks that are remembered: a call meets those of few windows."""


def waiting_room(rows: int) -> tuple[Uint64Array, Int64Array]:
    """Return memory for waiting rows, where so many are shuffled in all, and for blocks: slot, key and block."""
    # So many that what they take stays in the first cache of a processor.
    return np.empty((6, max(1, min(rows, 256))), np.uint64), np.zeros((3, _BLOCKS), np.int64)


@inner
def begin_epoch(epochs: Int64Array, line: int) -> None:
    """Complete the line of an epoch whose order is decided."""
    size, mode, key = epochs[line, EPOCH_SIZE], epochs[line, EPOCH_MODE], np.uint64(epochs[line, EPOCH_KEY])
    epochs[line, EPOCH_NUM_BLOCKS] = size // epochs[line, EPOCH_BLOCK_ROWS]
    epochs[line, EPOCH_TURN] = _turn(key, size, mode)
    epochs[line, WINDOW_BEGIN] = 0
    epochs[line, WINDOW_END] = size if mode < BLOCK else 0
    epochs[line, WINDOW_KEY] = epochs[line, EPOCH_KEY]


@inner
def enter_window(epochs: Int64Array, line: int, place: int) -> None:
    """Let the line of an epoch be about the window that holds a place."""
    if epochs[line, WINDOW_BEGIN] <= place < epochs[line, WINDOW_END]:
        return
    rows = epochs[line, EPOCH_BLOCK_ROWS] * epochs[line, EPOCH_WINDOW_BLOCKS]
    window = place // rows
    epochs[line, WINDOW_BEGIN] = window * rows
    epochs[line, WINDOW_END] = least((window + 1) * rows, epochs[line, EPOCH_SIZE])
    epochs[line, WINDOW_KEY] = int64(derive(np.uint64(epochs[line, EPOCH_KEY]), window))


@inlined
def add_row(room: Uint64Array, waiting: int, place: int, size: int, key: np.uint64, index: int) -> None:
    """Let a row wait that is at a place of its window, which has a size and a key."""
    room[0, waiting], room[1, waiting], room[2, waiting] = np.uint64(place), np.uint64(size), key
    room[3, waiting] = room[_INDEX, waiting] = np.uint64(index)


@inner
def settle_waiting(epochs: Int64Array, room: Uint64Array, count: int, blocks: Int64Array, out: Int64Array) -> None:
    """Put rows in the place of where they would stand if blocks, shuffled, were read one after another."""
    last = int64(-1)
    first = mode = size = block_rows = num_blocks = turn = key = int64(0)
    for i in range(count):
        line = int64(room[LINE, i])
        if line != last:
            # What a loop writes it must read again from a table: this takes half of the time (benchmarks/order.py).
            last, first, mode = line, epochs[line, EPOCH_FIRST], epochs[line, EPOCH_MODE]
            size, block_rows = epochs[line, EPOCH_SIZE], epochs[line, EPOCH_BLOCK_ROWS]
            num_blocks, turn, key = (
                epochs[line, EPOCH_NUM_BLOCKS],
                epochs[line, EPOCH_TURN],
                epochs[line, EPOCH_KEY],
            )
        row = out[room[_INDEX, i]]
        if mode >= BLOCK:
            slot = int64(np.uint64(row) // np.uint64(block_rows))
            row += turn
            # The last, shorter block keeps its slot; turning the rows gives it other rows in every epoch.
            if slot < num_blocks:
                cell = (slot ^ (line << 6)) & (_BLOCKS - 1)
                if blocks[0, cell] != slot + 1 or blocks[1, cell] != key:
                    blocks[0, cell], blocks[1, cell] = slot + 1, key
                    blocks[2, cell] = permute(slot, num_blocks, derive(np.uint64(key), -2))
                row += (blocks[2, cell] - slot) * block_rows
            if row >= size:
                row -= size
        out[room[_INDEX, i]] = first + row


@inner
def unshuffle_row(row: int, size: int, key: np.uint64, mode: int, block_rows: int, window_blocks: int) -> int:
    """Return the place of an epoch at which `row` stands."""
    if mode == NONE or size == 1:
        return row
    if mode == FULL:
        return unpermute(row, size, key)
    turned = (row - _turn(key, size, mode) + size) % size
    block = turned // block_rows
    offset = turned % block_rows
    num_blocks = size // block_rows
    slot = unpermute(block, num_blocks, derive(key, -2)) if block < num_blocks else block
    window_rows = block_rows * window_blocks
    inner = slot * block_rows + offset
    window = inner // window_rows
    base = window * window_rows
    return base + unpermute(inner - base, least(window_rows, size - base), derive(key, window))


@inlined
def _turn(key: np.uint64, size: int, mode: int) -> int:
    # Blocks of `window` begin at multiples of their size: who keeps some at hand need not know the epoch.
    return int64(derive(key, -3) % np.uint64(size)) if mode == BLOCK else int64(0)


# An epoch whose blocks are packing windows, each of as many rows as packing made of it.


@kernel
def _window_order(starts: Int64Array, key: np.uint64) -> Int64Array:
    """Return, in two lines, the windows in the order in which they are read, and where each begins then.

    The last column is the end of both.
    """
    order = np.empty((2, starts.size), np.int64)
    order[1, 0] = 0
    order[0, starts.size - 1] = starts.size - 1
    for slot in range(starts.size - 1):
        window = permute(slot, starts.size - 1, derive(key, -2))
        order[0, slot] = window
        order[1, slot + 1] = order[1, slot] + starts[window + 1] - starts[window]
    return order


@inner
def _run_of(edges: Int64Array, number: int) -> int:
    """Return which of the runs between ascending edges holds a number; empty runs hold none."""
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
    """Return which group of windows a slot lies in; groups differ by one window at most."""
    return ((slot + 1) * num_groups - 1) // num_windows


@kernel
def _arrange_in_windows(
    places: Int64Array, edges: Int64Array, key: np.uint64, room: Uint64Array, out: Int64Array
) -> None:
    """Write where the row at each place would stand if the windows were read one after another.

    `edges` are the places at which groups of windows begin, and the end.
    """
    begin = end = waiting = int64(0)
    group_key = key
    for i in range(places.size):
        place = places[i]
        if place < begin or place >= end:
            group = _run_of(edges, place)
            begin, end, group_key = edges[group], edges[group + 1], derive(key, group)
        out[i] = begin
        add_row(room, waiting, place - begin, end - begin, group_key, i)
        waiting += 1
        if waiting == room.shape[1]:
            permute_many(room, waiting, out)
            waiting = int64(0)
    permute_many(room, waiting, out)


@kernel
def _settle_in_windows(starts: Int64Array, order: Int64Array, out: Int64Array) -> None:
    """Put rows in the place of where they would stand if windows were read one after another."""
    windows, begins = order[0], order[1]
    slot = int64(0)
    for i in range(out.size):
        place = out[i]
        if place < begins[slot] or place >= begins[slot + 1]:
            slot += 1  # it is often the next
            if slot + 1 >= begins.size or place < begins[slot] or place >= begins[slot + 1]:
                slot = _run_of(begins, place)
        out[i] = starts[windows[slot]] + place - begins[slot]


@kernel
def _places_in_windows(
    rows: Int64Array, starts: Int64Array, order: Int64Array, key: np.uint64, num_groups: int
) -> Int64Array:
    begins = order[1]
    places = np.empty_like(rows)
    num_windows = starts.size - 1
    for i in range(rows.size):
        window = _run_of(starts, rows[i])
        slot = unpermute(window, num_windows, derive(key, -2))
        group = _group(slot, num_windows, num_groups)
        first = begins[group * num_windows // num_groups]
        count = begins[(group + 1) * num_windows // num_groups] - first
        places[i] = first + unpermute(begins[slot] + rows[i] - starts[window] - first, count, derive(key, group))
    return places


@kernel
def _arrange_in_blocks(places: Int64Array, epochs: Int64Array, room: Uint64Array, out: Int64Array) -> None:
    """Write where the row at each place would stand if blocks, shuffled, were read one after another."""
    begin_epoch(epochs, int64(0))
    begin = end = waiting = int64(0)
    key = np.uint64(0)
    for i in range(places.size):
        place = places[i]
        if place < begin or place >= end:
            enter_window(epochs, int64(0), place)
            begin, end, key = epochs[0, WINDOW_BEGIN], epochs[0, WINDOW_END], np.uint64(epochs[0, WINDOW_KEY])
        out[i] = begin
        add_row(room, waiting, place - begin, end - begin, key, i)
        waiting += 1
        if waiting == room.shape[1]:
            permute_many(room, waiting, out)
            waiting = int64(0)
    permute_many(room, waiting, out)


@kernel
def _settle_in_blocks(epochs: Int64Array, room: Uint64Array, blocks: Int64Array, out: Int64Array) -> None:
    """Put rows in the place of where they would stand if blocks, shuffled, were read one after another."""
    begin_epoch(epochs, int64(0))
    waiting = int64(0)
    for i in range(out.size):
        room[LINE, waiting], room[_INDEX, waiting] = np.uint64(0), np.uint64(i)
        waiting += 1
        if waiting == room.shape[1]:
            settle_waiting(epochs, room, waiting, blocks, out)
            waiting = int64(0)
    settle_waiting(epochs, room, waiting, blocks, out)


@kernel
def _places_of_rows(
    rows: Int64Array, size: int, key: np.uint64, mode: int, block_rows: int, window_blocks: int
) -> Int64Array:
    places = np.empty_like(rows)
    for i in range(rows.size):
        places[i] = unshuffle_row(rows[i], size, key, mode, block_rows, window_blocks)
    return places


@dataclass(frozen=True, kw_only=True, eq=False)
class EpochOrder:
    """The order in which the rows of one epoch are read."""

    size: int
    """Rows of the epoch."""
    key: np.uint64
    numbers: tuple[int, int, int]
    """Of its shuffle."""
    starts: Int64Array | None = None
    """The first row of each packing window, and the end; none where rows are not packed in windows."""

    def __post_init__(self) -> None:
        starts = self.starts
        if starts is not None and (starts[0] != 0 or starts[-1] != self.size or (np.diff(starts) < 0).any()):
            raise StoreCorruptError(
                f"row index: its windows must hold {self.size} rows, in ascending order, got {int(starts[0])} to "
                f"{int(starts[-1])}; delete the folder .rows of the store, it will be built again"
            )

    @cached_property
    def _windows(self) -> tuple[Int64Array, Int64Array, np.uint64, int] | None:
        """What kernels need where blocks are packing windows: 24 bytes for each of them."""
        if self.numbers[0] != WINDOW or self.starts is None:
            return None
        return (
            self.starts,
            _window_order(self.starts, self.key),
            self.key,
            -(-(self.starts.size - 1) // self.numbers[2]),
        )

    @cached_property
    def _edges(self) -> Int64Array:
        """The places at which groups of packing windows begin, and the end."""
        assert self._windows is not None
        starts, (_, begins), _, groups = self._windows
        edges: Int64Array = begins[np.arange(groups + 1) * (starts.size - 1) // groups]
        return edges

    def _epochs(self) -> Int64Array:
        """Return the table of this epoch alone."""
        line = np.zeros((1, EPOCH_COLUMNS), np.int64)
        line[0, EPOCH_SIZE], line[0, EPOCH_KEY] = self.size, self.key.astype(np.int64)
        line[0, EPOCH_MODE : EPOCH_WINDOW_BLOCKS + 1] = self.numbers
        return line

    def rows(self, places: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the rows at some places, and the place that each would have if blocks were read one by one."""
        arranged = self.arranged(places)
        return self.settled(arranged), arranged

    def arranged(self, places: Int64Array) -> Int64Array:
        """Return the place that the row at each of some places would have if blocks were read one by one."""
        if self.numbers[0] == NONE:
            return places
        out, room = np.empty_like(places), waiting_room(places.size)[0]
        if self._windows is not None:
            _arrange_in_windows(places, self._edges, self.key, room, out)
        else:
            _arrange_in_blocks(places, self._epochs(), room, out)
        return out

    def settled(self, arranged: Int64Array) -> Int64Array:
        """Return the rows that stand at some places if blocks are read one by one; quickest in ascending order."""
        if self.numbers[0] < BLOCK:
            return arranged
        out = arranged.copy()
        if self._windows is not None:
            _settle_in_windows(*self._windows[:2], out)
        else:
            _settle_in_blocks(self._epochs(), *waiting_room(out.size), out)
        return out

    def places(self, rows: Int64Array) -> Int64Array:
        """Return the places at which some rows are read."""
        if self._windows is not None:
            return _places_in_windows(rows, *self._windows)
        return _places_of_rows(rows, self.size, self.key, *self.numbers)

    def group_end(self, place: int) -> int:
        """Return up to which place the rows reach that are shuffled together with the one at `place`."""
        mode, block_rows, window_blocks = self.numbers
        if self._windows is None:
            group = block_rows * window_blocks
            return min(self.size, (place // group + 1) * group) if mode >= BLOCK else self.size
        return int(self._edges[np.searchsorted(self._edges, place, side="right")])
