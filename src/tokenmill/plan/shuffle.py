"""In which order the rows of one epoch are read: `full`, `block` or `none`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenmill.compiled import inlined, inner, int64, kernel, least
from tokenmill.errors import ConfigError, nearest
from tokenmill.plan.permute import derive, permute, unpermute
from tokenmill.types import Int64Array

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
