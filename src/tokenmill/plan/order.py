"""From steps to rows, and from rows back to steps: the kernels that join mixture and shuffle."""

from __future__ import annotations

import numpy as np

from tokenmill.compiled import inner, int64, kernel
from tokenmill.plan.mixture import draw
from tokenmill.plan.permute import derive, derived_key
from tokenmill.plan.shuffle import shuffle_row, unshuffle_rows
from tokenmill.plan.stages import (
    BLOCK_ROWS,
    CARRY,
    MODE,
    OLD_BLOCK_ROWS,
    OLD_EPOCH,
    OLD_MODE,
    OLD_WINDOW_BLOCKS,
    REST,
    SIZE,
    SOURCE,
    WINDOW_BLOCKS,
    Stage,
)
from tokenmill.types import Int64Array, Uint64Array


def rows_at(
    stage: Stage, steps: Int64Array, slots: Int64Array, *, rotate: bool = True
) -> tuple[Int64Array, Int64Array]:
    """Return (source, row) for many (step, slot of the global batch) of one stage.

    Without `rotate`, slots are in the order in which the mixture draws them.
    """
    out = np.empty((2, steps.size), np.int64)
    if not steps.size:
        return out[0], out[1]
    batch = stage.spec.global_batch_size
    first, last = (
        stage.origin + (int(step) - stage.spec.start_step) * batch for step in (steps.min(), steps.max() + 1)
    )
    found = stage.mixture.segments(first, last)
    nodes = found.nodes.reshape(-1, found.nodes.shape[2])
    shape = (stage.spec.start_step, batch, int(rotate and stage.rotate), stage.origin)
    _rows(steps, slots, shape, (found.starts, nodes, found.bases), stage.table, stage.keys, stage.rotation_key, out)
    return out[0], out[1]


@kernel
def _rows(
    steps: Int64Array,
    slots: Int64Array,
    shape: tuple[int, int, int, int],
    segments: tuple[Int64Array, Int64Array, Int64Array],
    table: Int64Array,
    keys: Uint64Array,
    rotation_key: np.uint64,
    out: Int64Array,
) -> None:
    start_step, batch, rotate, origin = shape
    starts, nodes, bases = segments
    tree_nodes = nodes.shape[0] // starts.size
    turned_step = int64(-1)
    turn = segment = int64(0)
    for i in range(steps.size):
        step, slot = steps[i], slots[i]
        if rotate:
            if step != turned_step:
                turned_step = step
                turn = int64(derive(rotation_key, step) % np.uint64(batch))
            slot += turn
            if slot >= batch:
                slot -= batch
        position = origin + (step - start_step) * batch + slot
        while segment > 0 and position < starts[segment]:
            segment -= 1
        while segment + 1 < starts.size and position >= starts[segment + 1]:
            segment += 1
        line, drawn = draw(position - starts[segment], nodes, segment * tree_nodes, tree_nodes)
        out[0, i] = table[line, SOURCE]
        out[1, i] = _row_of(table[line, CARRY] + bases[segment, line] + drawn, line, table, keys)


@inner
def _row_of(ordinal: int, line: int, table: Int64Array, keys: Uint64Array) -> int:
    """Return the row of a source that is drawn after so many others."""
    size, rest = table[line, SIZE], table[line, REST]
    if size == 0:
        return ordinal
    first = int64(0)
    epoch = (ordinal - rest) // size
    place = ordinal - rest - epoch * size
    if ordinal < rest:
        first, size, epoch, place = size, rest, int64(-1), ordinal
    old = int64(epoch == table[line, OLD_EPOCH])
    shift = old * (OLD_MODE - MODE)
    mode, block, window = (
        table[line, MODE + shift],
        table[line, BLOCK_ROWS + shift],
        table[line, WINDOW_BLOCKS + shift],
    )
    return first + shuffle_row(place, size, derive(keys[line, old], epoch), mode, block, window)


def drawn_rows(stage: Stage, name: str, draws: range) -> Int64Array:
    """Return the rows of some draws of a source, counted from the first of the stage.

    Which step draws them does not matter, so the mixture is not asked: that of a long ramp would be slow.
    """
    line = stage.names.index(name)
    rows = np.empty(len(draws), np.int64)
    _source_rows(stage.carry(name) + draws.start, line, stage.table, stage.keys, rows)
    return rows


@kernel
def _source_rows(first: int, line: int, table: Int64Array, keys: Uint64Array, rows: Int64Array) -> None:
    for i in range(rows.size):
        rows[i] = _row_of(first + i, line, table, keys)


def uses_in_stage(stage: Stage, name: str, rows: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return (step, slot, row) of every use of the given rows of one source in a stage, by step and slot."""
    line = stage.names.index(name)
    carry = stage.carry(name)
    rest, size = (int(stage.table[line, column]) for column in (REST, SIZE))
    end = carry + stage.draws[name]
    epochs = range(max(0, carry - rest) // size, max(0, -(-(end - rest) // size)))
    full, left = rows[rows < size], rows[rows >= size]
    found = [(_places(stage, line, epoch, full, size) + rest + epoch * size, full) for epoch in epochs if full.size]
    if left.size:
        found.append((_places(stage, line, -1, left - size, rest), left))
    if not found:
        empty = np.empty(0, np.int64)
        return empty, empty, empty
    ordinals = np.concatenate([ordinal for ordinal, _ in found])
    used = np.concatenate([row for _, row in found])
    inside = (ordinals >= carry) & (ordinals < end)
    positions = stage.positions_of(name, ordinals[inside] - carry)
    used = used[inside]
    batch = stage.spec.global_batch_size
    steps = positions // batch + stage.spec.start_step
    slots = positions % batch
    if stage.rotate:
        slots = (slots - turns(stage.rotation_key, steps, batch)) % batch
    order = np.lexsort((slots, steps))
    return steps[order], slots[order], used[order]


def _places(stage: Stage, line: int, epoch: int, rows: Int64Array, size: int) -> Int64Array:
    old = epoch == stage.table[line, OLD_EPOCH]
    columns = (OLD_MODE, OLD_BLOCK_ROWS, OLD_WINDOW_BLOCKS) if old else (MODE, BLOCK_ROWS, WINDOW_BLOCKS)
    mode, block, window = (int(stage.table[line, column]) for column in columns)
    key = np.uint64(derived_key(stage.keys[line, 1 if old else 0], epoch))
    places: Int64Array = unshuffle_rows(rows, size, key, mode, block, window)
    return places


@kernel
def turns(rotation_key: np.uint64, steps: Int64Array, batch: int) -> Int64Array:
    """Return by how many places the batch of each step is turned."""
    out = np.empty_like(steps)
    for i in range(steps.size):
        out[i] = np.int64(derive(rotation_key, steps[i]) % np.uint64(batch))
    return out
