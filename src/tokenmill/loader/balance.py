"""The rows of a step dealt to ranks and micro-batches by what they cost, so that none waits long for another.

The batch of a step is the same set of rows, whoever takes which. A micro-batch of a rank is a cell. Rows go,
dearest first, each to the cell with room that costs least so far. Cells go, dearest first, to the micro-batches in
turn, so that those of all ranks at one time are alike; and of these the dearest to the rank that has had least.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenmill.compiled import inner, int64, kernel
from tokenmill.packing.costs import RowCosts, row_costs
from tokenmill.packing.stored import StoredRows, distinct
from tokenmill.plan.stages import rows_at
from tokenmill.types import Int64Array

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenmill.plan.stages import Stage


ROOM_BITS = 20
ROOM = (1 << ROOM_BITS) - 1
"""Of the key of a cell that has room: how many rows it has. Before it stands what they cost."""


class Dealer:
    """Deals the steps of a plan; holds the costs of all rows that it has met."""

    def __init__(self, ranks: int, micro_batch: int) -> None:
        self._ranks, self._micro_batch = ranks, micro_batch
        self._costs: dict[int, tuple[StoredRows, RowCosts]] = {}
        self._last: tuple[int, int, Int64Array] | None = None
        """First step and end of what was dealt last, and how."""

    def slots(self, stage: Stage, index: Mapping[int, StoredRows], begin: int, end: int) -> Int64Array:
        """Return the slots of the batches of some steps, a line each, in the order in which ranks take them."""
        if self._last is not None and self._last[0] <= begin and end <= self._last[1]:
            return self._last[2][begin - self._last[0] : end - self._last[0]]
        dealt = deal(self.costs(stage, index, begin, end), self._ranks, self._micro_batch)
        self._last = begin, end, dealt
        return dealt

    def costs(self, stage: Stage, index: Mapping[int, StoredRows], begin: int, end: int) -> Int64Array:
        """Return what the rows of the batches of some steps cost, a line each, by slot."""
        slots = np.arange(stage.spec.global_batch_size)
        steps = np.arange(begin, end)
        sources, rows = rows_at(stage, np.repeat(steps, slots.size), np.tile(slots, steps.size))
        present = distinct(sources).tolist()
        costs = np.empty(rows.size, np.int64)
        for source in present:
            chosen = sources == source if len(present) > 1 else slice(None)
            costs[chosen] = self._of(index[source]).of(rows[chosen])
        return costs.reshape(steps.size, slots.size)

    def _of(self, rows: StoredRows) -> RowCosts:
        if id(rows) not in self._costs:
            self._costs[id(rows)] = rows, row_costs(rows)
        return self._costs[id(rows)][1]


def deal(costs: Int64Array, ranks: int, micro_batch: int) -> Int64Array:
    """Return the slots of each line of costs in the order in which ranks take them, `micro_batch` at a time.

    >>> deal(np.array([[1, 9, 2, 8]]), 2, 2).tolist(), deal(np.array([[1, 9, 2, 8]]), 2, 1).tolist()
    ([[1, 0, 3, 2]], [[1, 0, 3, 2]])
    """
    num_steps, num_rows = costs.shape
    cells = num_rows // micro_batch
    dearest = np.argsort((65535 - costs).astype(np.uint16), axis=1, kind="stable")  # of 16 bits: by radix
    if micro_batch == 1:
        members, loads = dearest, np.take_along_axis(costs, dearest, axis=1)
        order = np.broadcast_to(np.arange(cells), loads.shape).copy()
    else:
        loads = np.empty((num_steps, cells), np.int64)
        members = np.empty((num_steps, num_rows), np.int64)
        _fill_cells(costs, dearest, micro_batch, np.empty((2, cells), np.int64), loads, members)
        order = np.argsort(-loads, axis=1, kind="stable")
    out = np.empty((num_steps, num_rows), np.int64)
    _place_cells(loads, order, members, ranks, micro_batch, np.empty((3, ranks), np.int64), out)
    return out


@kernel
def _fill_cells(
    costs: Int64Array,
    dearest: Int64Array,
    micro_batch: int,
    heap: Int64Array,
    loads: Int64Array,
    members: Int64Array,
) -> None:
    """Deal the rows of each step to cells; write what each cell costs, and its rows side by side."""
    room = int64(micro_batch)
    for step in range(costs.shape[0]):
        size = loads.shape[1]
        for cell in range(size):
            heap[0, cell] = 0
            heap[1, cell] = cell
            loads[step, cell] = 0
        for k in range(costs.shape[1]):
            slot = dearest[step, k]
            cell = heap[1, 0]
            filled = heap[0, 0] & ROOM
            loads[step, cell] += costs[step, slot]
            members[step, cell * room + filled] = slot
            if filled + 1 == room:
                size -= 1
                heap[0, 0], heap[1, 0] = heap[0, size], heap[1, size]
            else:
                heap[0, 0] = loads[step, cell] << ROOM_BITS | (filled + 1)
            _sift(heap, 0, size)


@kernel
def _place_cells(
    loads: Int64Array,
    order: Int64Array,
    members: Int64Array,
    ranks: int,
    micro_batch: int,
    heap: Int64Array,
    out: Int64Array,
) -> None:
    """Give each micro-batch of a step its cells, one a rank, and write the rows of these, rank by rank."""
    rows = out.shape[1] // ranks
    totals = heap[2]
    for step in range(out.shape[0]):
        for rank in range(ranks):
            heap[0, rank] = totals[rank] = 0
            heap[1, rank] = rank
        for batch in range(rows // micro_batch):
            size = ranks
            for k in range(ranks):
                rank, cell = heap[1, 0], order[step, batch * ranks + k]
                totals[rank] += loads[step, cell]
                begin = rank * rows + batch * micro_batch
                for i in range(micro_batch):
                    out[step, begin + i] = members[step, cell * micro_batch + i]
                size -= 1
                heap[0, 0], heap[1, 0] = heap[0, size], heap[1, size]
                _sift(heap, 0, size)
            for rank in range(ranks):
                heap[0, rank], heap[1, rank] = totals[rank], rank
            for place in range(ranks // 2 - 1, -1, -1):
                _sift(heap, place, ranks)


@inner
def _sift(heap: Int64Array, place: int, size: int) -> None:
    """Let an item of a heap of (key, item) sink to its place."""
    key, item = heap[0, place], heap[1, place]
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and (
            heap[0, child + 1] < heap[0, child]
            or (heap[0, child + 1] == heap[0, child] and heap[1, child + 1] < heap[1, child])
        ):
            child += 1
        if heap[0, child] > key or (heap[0, child] == key and heap[1, child] > item):
            break
        heap[0, place], heap[1, place] = heap[0, child], heap[1, child]
        place = child
    heap[0, place], heap[1, place] = key, item
