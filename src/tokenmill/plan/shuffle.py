"""In which order the rows of one epoch are read: `full`, `block` or `none`, by a permutation that is computed.

The permutation is a keyed bijection on range(size), never stored, and invertible: an alternating Feistel network
over just as many bits as `size` needs, with cycle-walking: an image that falls outside the range is sent through
again until it falls inside, which keeps it a bijection and costs less than two passes on average. Six rounds: with
four, the statistical tests of `tests/plan/test_shuffle.py` fail for small ranges.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenmill.compiled import inlined, inner, int64, kernel, leading_zeros, least
from tokenmill.errors import ConfigError, nearest
from tokenmill.types import Int64Array

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


@kernel
def permute_all(indices: Int64Array, size: int, key: np.uint64) -> Int64Array:
    """Permute many indices at once."""
    out = np.empty_like(indices)
    for i in range(indices.size):
        out[i] = permute(indices[i], size, key)
    return out


NONE, FULL, BLOCK = 0, 1, 2
MODES = {"none": NONE, "full": FULL, "block": BLOCK}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shuffle:
    """How far a row may travel from its place on disk."""

    mode: str = "full"
    """`full`: anywhere. `none`: nowhere. `block`: blocks of neighbouring rows are read in a shuffled
    order, and rows are shuffled within a window of such blocks, so only a window is in use at a time."""
    block_rows: int = 1024
    """Rows that are neighbours on disk and stay in one window (mode `block`)."""
    window_blocks: int = 64
    """Blocks that are shuffled together (mode `block`)."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(
                f"shuffle: must be full, block or none, got {self.mode!r}; {nearest(self.mode, MODES)}"
            )
        for name in ("block_rows", "window_blocks"):
            value = getattr(self, name)
            if not 1 <= value <= 1 << 30:
                raise ConfigError(f"{name}: must lie within 1 and 2^30, got {value}; leave it out for the default")

    def describe(self) -> dict[str, int | str]:
        """Return what decides the order, as JSON."""
        if self.mode != "block":
            return {"mode": self.mode}
        return {"mode": self.mode, "block_rows": self.block_rows, "window_blocks": self.window_blocks}


@inner
def shuffle_row(place: int, size: int, key: np.uint64, mode: int, block_rows: int, window_blocks: int) -> int:
    """Return the row that stands at `place` of an epoch."""
    if mode == NONE or size == 1:
        return place
    first, count, window_key = int64(0), size, key
    if mode == BLOCK:
        window = place // (block_rows * window_blocks)
        first = window * block_rows * window_blocks
        count = least(block_rows * window_blocks, size - first)
        window_key = derive(key, window)
    row = first + permute(place - first, count, window_key)
    if mode == FULL:
        return row
    slot, num_blocks = row // block_rows, size // block_rows
    # The last, shorter block keeps its slot; turning the rows gives it other rows in every epoch.
    block = permute(slot, num_blocks, derive(key, -2)) if slot < num_blocks else slot
    return (row + (block - slot) * block_rows + _turn(key, size)) % size


@inner
def unshuffle_row(row: int, size: int, key: np.uint64, mode: int, block_rows: int, window_blocks: int) -> int:
    """Return the place of an epoch at which `row` stands."""
    if mode == NONE or size == 1:
        return row
    if mode == FULL:
        return unpermute(row, size, key)
    turned = (row - _turn(key, size) + size) % size
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
def _turn(key: np.uint64, size: int) -> int:
    return int64(derive(key, -3) % np.uint64(size))


@kernel
def unshuffle_rows(
    rows: Int64Array, size: int, key: np.uint64, mode: int, block_rows: int, window_blocks: int
) -> Int64Array:
    """Return the places of many rows of one epoch."""
    out = np.empty_like(rows)
    for i in range(rows.size):
        out[i] = unshuffle_row(rows[i], size, key, mode, block_rows, window_blocks)
    return out
