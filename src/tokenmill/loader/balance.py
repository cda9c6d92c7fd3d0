"""Balance: rows of a step assigned to ranks by their cost, so that no rank waits long for another.

The batch of a step is the same set of rows, whichever rank reads them. Neighbouring ranks form a group, which
shares the rows that its ranks would read in order. The work of a rank therefore does not grow with the number of
ranks. Within a group, rows are sorted by decreasing cost and assigned in a snake: to the first rank up to the last,
then back. The rows of all ranks at one micro-batch then cost about the same, and so do their sums over a step.

The cost of a row is the sum of the squares of its segments, padding among them, as of a model whose attention stays
within documents. Costs are counted when they are needed, from lengths alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.compiled import int64, kernel, least
from tokenmill.packing.stored import StoredRows, stored_rows
from tokenmill.plan.stages import rows_at
from tokenmill.types import BoolArray, Float64Array, Int64Array

if TYPE_CHECKING:
    from tokenmill.loader.layout import RankSlice
    from tokenmill.plan.plan import Plan
    from tokenmill.plan.stages import Stage

BALANCE_VERSION = 3
"""Version of the assignment. A state that was saved within a step by another version is rejected."""
NODE_RANKS = 8
"""Most ranks of a group under `shuffle = "window"`, often those of one machine. Batches are ordered by the windows
that are read together, and each machine keeps the rows that it would read without a balance."""


def count_costs(rows: StoredRows, numbers: Int64Array) -> Int64Array:
    """Return the cost of each row in squared tokens; only lengths are read."""
    spans = rows.spans(numbers)
    costs = np.empty(numbers.size, np.int64)
    _add_squares(spans.first, spans.count, spans.joined, spans.length, (rows.seq_len, rows.segment_multiple), costs)
    return costs


@kernel
def _add_squares(
    first: Int64Array,
    count: Int64Array,
    joined: BoolArray,
    length: Int64Array,
    sizes: tuple[int, int],
    out: Int64Array,
) -> None:
    seq_len, multiple = sizes
    for i in range(first.size):
        span = first[i]
        last = span + count[i]
        column = total = int64(0)
        while column < seq_len:
            # Padding after the last span is a segment of its own.
            end = seq_len
            if span < last:
                end = column + length[span]
                span += 1
                while span < last and joined[span]:
                    end += length[span]
                    span += 1
                end = least((end + multiple - 1) // multiple * multiple, seq_len)
            total += (end - column) * (end - column)
            column = end
        out[i] = total


def step_costs(plan: Plan, step: int) -> Int64Array:
    """Return the cost of each row of a step of stored rows, by slot; only lengths are read."""
    stored = {plan.sources.index(name): rows for name, rows in stored_rows(plan.stage(step)).items()}
    return _costs(stored, *plan.rows(step))


def _costs(rows: Mapping[int, StoredRows], sources: Int64Array, numbers: Int64Array) -> Int64Array:
    costs = np.empty(sources.size, np.int64)
    for source in np.unique(sources).tolist():
        chosen = sources == source
        costs[chosen] = count_costs(rows[source], numbers[chosen])
    return costs


def waiting(costs: Float64Array | Int64Array) -> float:
    """Return the duration of steps relative to steps without waiting; costs are by (step, rank, micro-batch)."""
    equal = float(costs.mean(axis=1).sum())
    return float(costs.max(axis=1).sum()) / equal if equal else 1.0


def group_edges(stage: Stage, ranks: int) -> list[int]:
    """Return the first rank of each group, and the number of ranks.

    Groups differ by at most one rank. Each rank finds and counts the rows of its whole group, so groups grow with
    the tokens of a row, which take longer to copy (benchmarks/balance.py).
    """
    levels = (len(stage.names) - 1).bit_length()  # of the mixture: each row is looked up through them
    most = max(2, stage.spec.seq_len // (1024 + 256 * levels))
    if stage.by_block:
        most = min(most, NODE_RANKS)
    groups = -(-ranks // most)
    return [group * ranks // groups for group in range(groups + 1)]


def balance(costs: Int64Array, edges: Sequence[int]) -> Int64Array:
    """Return, for each step, the slots in the order in which ranks read them: rank by rank.

    `costs` has a line per step. `edges` are the first ranks of groups, and the number of ranks.

    >>> balance(np.array([[1, 9, 2, 8]]), [0, 2]).tolist(), balance(np.array([[1, 9, 2, 8]]), [0, 1, 2]).tolist()
    ([[1, 0, 3, 2]], [[1, 0, 3, 2]])
    """
    rows = costs.shape[1] // edges[-1]
    orders = []
    for begin, end in pairwise(edges):
        # Rows of equal cost stay in order. A layer has one row for each rank of the group.
        order = np.argsort(-costs[:, begin * rows : end * rows], axis=1, kind="stable") + begin * rows
        layers = order.reshape(costs.shape[0], rows, end - begin)
        layers[:, 1::2] = layers[:, 1::2, ::-1].copy()
        orders.append(layers.transpose(0, 2, 1).reshape(costs.shape[0], -1))
    return np.concatenate(orders, axis=1)


class Balancer:
    """Rows of one rank, balanced; the steps assigned last are kept, because a step may take several blocks."""

    def __init__(self, part: RankSlice) -> None:
        self._part = part
        self._last: tuple[int, int, Int64Array] | None = None
        """First step, end and result of the last assignment."""

    def rows(self, stage: Stage, index: Mapping[int, StoredRows], begin: int, end: int) -> Int64Array:
        """Return slots, sources and rows of the rank, in order, each as a table with a line per step."""
        last = self._last  # another thread may replace it
        if last is not None and last[0] <= begin and end <= last[1]:
            return last[2][:, begin - last[0] : end - last[0]]
        rank, rows = self._part.rank, self._part.rows(stage)
        edges = group_edges(stage, self._part.world_size)
        group = bisect_right(edges, rank) - 1
        first, size = edges[group], edges[group + 1] - edges[group]
        slots = np.arange(first * rows, (first + size) * rows)
        steps = np.repeat(np.arange(begin, end), slots.size)
        sources, numbers = rows_at(stage, steps, np.tile(slots, end - begin))
        costs = _costs(index, sources, numbers).reshape(end - begin, slots.size)
        own = balance(costs, [0, size])[:, (rank - first) * rows : (rank - first + 1) * rows]
        places = own + np.arange(end - begin)[:, None] * slots.size
        self._last = begin, end, np.stack([own + first * rows, sources[places], numbers[places]])
        return self._last[2]
