"""Which part of a global batch a process gets: its rows, in which micro-batches, and which columns of them.

Ranks take equal runs of the rows of a step, or what they are dealt by cost, so that none waits long for another.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isqrt
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

import numpy as np
import xxhash

from tokenmill.compiled import inner, int64, kernel, least, read_uint16
from tokenmill.errors import ConfigError, nearest
from tokenmill.fingerprint import digest
from tokenmill.packing.index import compute_in_order, kept_file
from tokenmill.packing.rows import StoredRows
from tokenmill.plan.stages import rows_at
from tokenmill.store.maps import MappedFile
from tokenmill.store.sections import read_index, write_index
from tokenmill.types import BoolArray, Int32Array, Int64Array, Uint16Array, counted_from

if TYPE_CHECKING:
    from tokenmill.plan.plan import Plan
    from tokenmill.plan.stages import Stage

GroupRank: TypeAlias = tuple[int, int]
"""A rank among the members of a group, and how many there are."""
CUTS = ("zigzag", "contiguous", "segments")
"""How a row can be cut for the members of a context-parallel group."""
_LEFT_OUT = {
    "everything": frozenset[str](),
    "inputs": frozenset(("labels", "loss_mask")),
    "labels": frozenset(("input_ids",)),
}
NEEDS = (*_LEFT_OUT, "nothing")
"""What a process can need of a batch."""

MAX_MICRO_BATCH = 1 << 24
"""Rows of a micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where a process stands among all: its rank and the number of members in each kind of group."""

    dp: GroupRank = (0, 1)
    """Data parallel: members share out the rows of a batch."""
    cp: GroupRank = (0, 1)
    """Context parallel: each member has a part of every row."""
    tp: GroupRank = (0, 1)
    """Tensor parallel: all members have the same batch."""
    pp: GroupRank = (0, 1)
    """Pipeline parallel: all members have the same batch."""
    cut: str = "zigzag"
    """How a row is cut for `cp` of C members. `zigzag`: into 2 C chunks, of which member r gets the r-th from the
    head and the r-th from the tail, so that causal attention costs each the same; `contiguous`: into C chunks.
    `segments`: each segment as zigzag cuts a row; all must be multiples of 2 C. It is what Transformer Engine's
    `thd_get_partitioned_indices` gives (transformer_engine/common/fused_attn/context_parallel.cu)"""
    needs: str = "everything"
    """What the process needs of a batch: `everything`, `inputs` (no labels), `labels` (no inputs), or `nothing`:
    then batches are empty, and no store is read. What is left out is not read."""

    def __post_init__(self) -> None:
        for name in ("dp", "cp", "tp", "pp"):
            place = getattr(self, name)
            if (
                not isinstance(place, tuple | list)
                or [isinstance(number, Integral) for number in place] != [True] * 2
            ):
                raise ConfigError(
                    f"layout: {name} must be a rank and the number of members, got {place!r}; write {name}=(0, 2)"
                )
            rank, size = place
            if size < 1 or not 0 <= rank < size:
                what = "rank" if name == "dp" else name
                kind = {"dp": "data", "cp": "context", "tp": "tensor", "pp": "pipeline"}[name]
                raise ConfigError(
                    f"{what}: must lie within 0:world_size, got rank {rank} of {size}; "
                    f"pass the rank and size of the {kind}-parallel group"
                )
        for name, value, known in (("cut", self.cut, CUTS), ("needs", self.needs, NEEDS)):
            if value not in known:
                raise ConfigError(
                    f"layout: {name} must be one of {', '.join(known)}, got {value!r}; {nearest(value, known)}"
                )

    @property
    def leads(self) -> bool:
        """Whether it is the first of all processes: the one that logs and records."""
        return not any(rank for rank, _ in (self.dp, self.cp, self.tp, self.pp))

    def arrays(self, arrays: Sequence[str]) -> tuple[str, ...]:
        """Return those of the arrays of a batch that the process needs."""
        if self.needs == "nothing":
            return ()
        return tuple(name for name in arrays if name not in _LEFT_OUT[self.needs])

    def columns(self, seq_len: int) -> tuple[slice, ...]:
        """Return the columns of a row that the member of the context-parallel group has, in their order.

        >>> Layout(cp=(1, 2)).columns(16), Layout(cp=(1, 2), cut="contiguous").columns(16)
        ((slice(4, 8, None), slice(8, 12, None)), (slice(8, 16, None),))
        """
        rank, size = self.cp
        if size == 1:
            return (slice(0, seq_len),)
        chunk = seq_len // self._num_chunks
        chunks = (rank,) if self.cut == "contiguous" else (rank, 2 * size - 1 - rank)
        return tuple(slice(index * chunk, (index + 1) * chunk) for index in chunks)

    def segment_columns(self, bounds: Int32Array) -> Int64Array:
        """Return the columns that the member has of segments with these bounds, each cut in a zigzag."""
        rank, size = self.cp
        chunk = np.diff(bounds.astype(np.int64)) // (2 * size)
        first = bounds[:-1, None] + chunk[:, None] * np.array([rank, 2 * size - 1 - rank])
        return counted_from(first.ravel(), np.repeat(chunk, 2))

    def width(self, seq_len: int) -> int:
        """Return how many columns of a row the process has."""
        return seq_len // self.cp[1]

    @property
    def _num_chunks(self) -> int:
        return self.cp[1] * (1 if self.cut == "contiguous" else 2)

    def check(self, stage: Stage) -> None:
        """Refuse rows that cannot be cut into chunks of one length."""
        seq_len, chunks = stage.spec.seq_len, self._num_chunks
        if self.cp[1] > 1 and seq_len % chunks:
            below = seq_len // chunks * chunks
            nearby = " or ".join(str(size) for size in (below, below + chunks) if size)
            raise ConfigError(
                f"stage {stage.spec.name!r}: seq_len must be divisible by {chunks} to be cut for {self.cp[1]} "
                f"context-parallel ranks ({self.cut}), got {seq_len}; use seq_len {nearby}"
            )
        multiples = [rows.segment_multiple for rows in stage.rows.values()]
        if self.cp[1] > 1 and self.cut == "segments" and any(multiple % chunks for multiple in multiples):
            raise ConfigError(
                f"stage {stage.spec.name!r}: segments must be filled up to a multiple of {chunks} to be cut for "
                f"{self.cp[1]} context-parallel ranks each, got {min(multiples)}; say segment_multiple = {chunks}"
            )


def find_layout(layout: Layout | None, rank: int, world_size: int) -> Layout:
    """Return a layout, or the one of data-parallel ranks alone; refuse both at once."""
    if layout is not None and (rank, world_size) != (0, 1):
        raise ConfigError(
            f"loader: must have a layout, or rank and world_size, got both, rank {rank} of {world_size}; say "
            f"dp=({rank}, {world_size}) in the layout"
        )
    return layout or Layout(dp=(rank, world_size))


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSlice:
    """One rank's part: rank r of R takes the r-th of R equal runs of every global batch, or of how it was dealt."""

    layout: Layout = Layout()
    micro_batch: int = 1
    """Rows that are delivered at a time."""
    balance: bool = False
    """Whether the rows of a step are dealt by what they cost, in place of runs of them."""

    def __post_init__(self) -> None:
        if not isinstance(self.micro_batch, Integral) or self.micro_batch < 1:
            raise ConfigError(f"micro_batch: must be at least 1, got {self.micro_batch!r}; leave it out for 1")
        if self.micro_batch > MAX_MICRO_BATCH:
            raise ConfigError(
                f"micro_batch: must be at most {MAX_MICRO_BATCH} rows, which a process holds at once, got "
                f"{self.micro_batch}; lower it, a step has as many micro-batches as it takes"
            )

    @property
    def rank(self) -> int:
        """The data-parallel rank."""
        return self.layout.dp[0]

    @property
    def world_size(self) -> int:
        """How many data-parallel ranks there are."""
        return self.layout.dp[1]

    def of_rank(self, rank: int) -> RankSlice:
        """Return the part of another data-parallel rank."""
        return replace(self, layout=replace(self.layout, dp=(rank, self.world_size)))

    def check(self, plan: Plan) -> None:
        """Refuse a slicing that does not divide the batch of every stage, before the first step."""
        share = self.world_size * self.micro_batch
        for stage in plan.stages:
            batch = stage.spec.global_batch_size
            if batch % share:
                raise ConfigError(
                    f"stage {stage.spec.name!r}: global_batch_size must be divisible by world_size * micro_batch, "
                    f"got {batch} and {self.world_size} * {self.micro_batch}; {self._way_out(batch)}"
                )
            self.layout.check(stage)

    def _way_out(self, batch: int) -> str:
        share = self.world_size * self.micro_batch
        below, above = batch // share * share, -(-batch // share) * share
        batches = f"use global_batch_size {' or '.join(str(size) for size in (below, above) if size)}"
        name, fixed = (
            ("micro_batch", self.world_size) if batch % self.world_size == 0 else ("world_size", self.micro_batch)
        )
        legal = _divisors(batch // fixed) if batch % fixed == 0 else []
        wanted: int = getattr(self, name)
        near = [*[size for size in legal if size < wanted][-1:], *[size for size in legal if size > wanted][:1]]
        return f"{batches}, or {name} {' or '.join(map(str, near))}" if near else batches

    def rows(self, stage: Stage) -> int:
        """Return how many rows of a step this rank takes."""
        return stage.spec.global_batch_size // self.world_size

    def batches(self, stage: Stage) -> int:
        """Return how many micro-batches a step has."""
        return self.rows(stage) // self.micro_batch

    def places(self, stage: Stage, first: int, count: int) -> tuple[Int64Array, Int64Array]:
        """Return (step, slot) of every row of `count` micro-batches from the stage's `first`-th on.

        Where rows are dealt by cost, slots are places in the order in which ranks take the rows of the step.
        """
        rows = self.rows(stage)
        begin = first * self.micro_batch
        index = np.arange(begin, begin + count * self.micro_batch)
        return index // rows + stage.spec.start_step, index % rows + self.rank * rows


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending, after as many divisions as its square root.

    >>> _divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


# What rows cost: 16 bits each
#
# A row costs a model whose attention stays within documents the squares of its segments, those of padding among
# them; in units of such a size that a row of one document, which costs most, has a number of 16 bits. Costs are
# counted once, from lengths alone. Those of many rows are kept in a file beside their index, which all processes
# map; each block of it has a checksum, as ranks that went by other costs would not share out a batch alike.

IN_MEMORY_ROWS = 1 << 17
"""Of no more rows than these, every process counts the costs itself, in a fraction of a second."""
_DEAREST = 65535
"""What a row costs at most."""
COST_BLOCK = 1 << 16
"""Rows whose costs are counted together, and have one checksum."""
COSTS_FORMAT = "tokenmill-costs-1"
logger = logging.getLogger("tokenmill")


def cost_unit(seq_len: int) -> int:
    """Return what one unit stands for, in squared tokens.

    >>> cost_unit(16), 4096**2 // cost_unit(4096)
    (1, 65280)
    """
    return (seq_len * seq_len >> 16) + 1


def count_costs(rows: StoredRows, numbers: Int64Array) -> Uint16Array:
    """Return what some rows cost; only their lengths are read."""
    spans = rows.spans(numbers)
    out = np.empty(numbers.size, np.uint16)
    sizes = (rows.seq_len, cost_unit(rows.seq_len), rows.segment_multiple)
    _add_squares(spans.first, spans.count, spans.joined, spans.length, sizes, out)
    return out


@kernel
def _add_squares(
    first: Int64Array,
    count: Int64Array,
    joined: BoolArray,
    length: Int64Array,
    sizes: tuple[int, int, int],
    out: Uint16Array,
) -> None:
    seq_len, unit, multiple = sizes
    for i in range(first.size):
        span = first[i]
        last = span + count[i]
        column = total = int64(0)
        while column < seq_len:
            # After the last span stands the padding, a segment of its own.
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
        out[i] = least(total // unit, _DEAREST)


@dataclass(kw_only=True, slots=True)
class RowCosts:
    """The costs of all rows of a source."""

    rows: StoredRows
    data: Uint16Array
    sums: tuple[str, ...] = ()
    """XXH3-64 of each block of a file."""
    unchecked: BoolArray | None = None
    """Blocks whose bytes were not compared with their checksum yet; None of what is in memory."""
    file: MappedFile | None = None

    def prove(self, numbers: Int64Array) -> None:
        """Compare the bytes that hold the costs of some rows with their checksums, unless that was done."""
        if self.file is None or self.unchecked is None:
            return
        for block in np.flatnonzero(
            self.unchecked & np.isin(np.arange(self.unchecked.size), numbers // COST_BLOCK)
        ):
            part = self.data[block * COST_BLOCK : (block + 1) * COST_BLOCK]
            if xxhash.xxh3_64_hexdigest(np.ascontiguousarray(part).data) != self.sums[block]:
                logger.warning("%s: must hold what was written, got other bytes; it is not used", self.file.path)
                self.data, self.unchecked = np.concatenate(list(_cost_blocks(self.rows))), None
                return
            self.unchecked[block] = False


def costs_of(costs: Mapping[int, RowCosts], sources: Int64Array, numbers: Int64Array) -> Int64Array:
    """Return what rows of several sources cost, whose costs are given by the numbers that sources have."""
    table = np.zeros((max(costs) + 1, 2), np.int64)
    used = []
    for source, each in costs.items():
        if each.unchecked is not None and each.unchecked.any():
            each.prove(numbers[sources == source])
        used.append(each.data)  # another thread may take others: these stay until they are read
        table[source] = used[-1].__array_interface__["data"][0], used[-1].size
    out = np.empty(numbers.size, np.int64)
    known = _look_up(table, sources, numbers, out)
    assert known, "rows of a plan are those of its sources"
    for each in costs.values():
        if each.file is not None:
            each.file.check()
    return out


@kernel
def _look_up(table: Int64Array, sources: Int64Array, numbers: Int64Array, out: Int64Array) -> bool:
    """Write the costs of rows, given where those of each source lie in memory, and how many; say if all are there.

    One call for all sources: to choose the rows of each takes twice as long as to find them, where there are eight.
    """
    known = True
    for i in range(numbers.size):
        source, number = sources[i], numbers[i]
        if 0 <= source < table.shape[0] and 0 <= number < table[source, 1]:
            out[i] = read_uint16(table[source, 0], number)
        else:
            known = False
    return known


def row_costs(rows: StoredRows) -> RowCosts:
    """Return the costs of all rows of a source: from a file, which is built where there is none, or from memory."""
    kept = None
    if rows.num_rows + rows.num_rest > IN_MEMORY_ROWS:
        kept = kept_file(
            rows.store.path,
            f"{digest({'format': COSTS_FORMAT, **rows.description})}.costs",
            "a file of the costs of rows",
            read=lambda file: _read_costs(file, rows),
            build=lambda file: write_index(file, lambda out: _write_costs(out, rows)),
        )
    return kept or RowCosts(rows=rows, data=np.concatenate([np.empty(0, np.uint16), *_cost_blocks(rows)]))


@dataclass(frozen=True, kw_only=True, slots=True)
class _CostsFooter:
    """What stands at the end of kept costs, as JSON."""

    format: str
    rows: int
    sums: tuple[str, ...]


def _cost_blocks(rows: StoredRows) -> Iterator[Uint16Array]:
    """Count the costs of all rows, block by block, in threads."""
    total = rows.num_rows + rows.num_rest

    def block(number: int) -> Uint16Array:
        return count_costs(rows, np.arange(number * COST_BLOCK, min((number + 1) * COST_BLOCK, total)))

    return compute_in_order(-(-total // COST_BLOCK), block)


def _write_costs(out: BinaryIO, rows: StoredRows) -> _CostsFooter:
    sums = []
    for block in _cost_blocks(rows):
        out.write(block.data)
        sums.append(xxhash.xxh3_64_hexdigest(block.data))
    return _CostsFooter(format=COSTS_FORMAT, rows=rows.num_rows + rows.num_rest, sums=tuple(sums))


def _read_costs(file: Path, rows: StoredRows) -> RowCosts | None:
    """Map kept costs; None where there are none, or a file that is cut or changed: it is made again."""
    index = read_index(file, _CostsFooter)
    if index is None:
        return None
    mapped, footer = index
    total = rows.num_rows + rows.num_rest
    blocks = -(-total // COST_BLOCK)
    if (footer.format, footer.rows, len(footer.sums), mapped.data.size) != (COSTS_FORMAT, total, blocks, 2 * total):
        return None
    return RowCosts(
        rows=rows,
        data=mapped.data.view(np.uint16),
        sums=footer.sums,
        unchecked=np.ones(blocks, np.bool_),
        file=mapped,
    )


# The deal by cost
#
# The batch of a step is the same set of rows, whichever rank takes which. Neighbouring ranks are a group, which
# shares out the rows that they would take in order. No rank looks at the rows of other groups, so the cost of a
# deal does not grow with the number of ranks. A micro-batch of a rank is a cell. Rows go, dearest first, each to
# the cell with room that costs least so far. Cells go, dearest first, to the micro-batches in turn, so that those
# of all ranks at one time are alike; and of these the dearest to the rank that has had least.

NODE_RANKS = 8
"""Ranks of a group at most under `shuffle = "window"`: those of a machine, often. Its batches are ordered by what
is read together, and a deal leaves each machine the rows that it would read without."""
DEAL = 2
"""Of the rules below: a state that was saved within a step of another deal is refused."""
_ROWS_AT_ONCE = 1 << 14
"""Rows of a group that are dealt at a time, where steps are asked for one after another: many of them share what a
call takes, and all of it stays in the second cache of a processor."""


def group_edges(stage: Stage, ranks: int) -> list[int]:
    """Return the first ranks of the groups that rows of a stage are dealt within, and the number of ranks.

    Groups differ by one rank at most. To find and to deal a row takes 20 ns, with 8 sources 43, and each rank does
    so for the rows of all of its group; to copy a row of 2,048 tokens takes 1.4 us. With these sizes a deal takes
    less than a twentieth of what a loader does (benchmarks/balance.py).
    """
    levels = (len(stage.names) - 1).bit_length()  # of the mixture: each row goes through them
    most = max(2, stage.spec.seq_len // (1024 + 256 * levels))
    if stage.by_block:
        most = min(most, NODE_RANKS)
    groups = -(-ranks // most)
    return [group * ranks // groups for group in range(groups + 1)]


class Dealer:
    """Deals the steps of a plan to one rank; holds the costs of all rows that it has met."""

    def __init__(self, part: RankSlice) -> None:
        self._part = part
        self._costs: dict[int, tuple[StoredRows, RowCosts]] = {}
        self._last: tuple[int, int, Int64Array] | None = None
        """First step and end of what was dealt last, and how."""

    def rows(self, stage: Stage, index: Mapping[int, StoredRows], begin: int, end: int) -> Int64Array:
        """Return what the rank takes of the batches of some steps, in order: slots, sources and rows.

        Each is a table, with a line for each step.
        """
        wanted = end
        last = self._last  # another thread may set it meanwhile
        if last is not None and last[0] <= begin and end <= last[1]:
            return last[2][:, begin - last[0] : end - last[0]]
        rank, rows = self._part.rank, self._part.rows(stage)
        edges = group_edges(stage, self._part.world_size)
        group = bisect_right(edges, rank) - 1
        first, size = edges[group], edges[group + 1] - edges[group]
        if last is not None and last[0] <= begin <= last[1] and not stage.by_block:
            # By block, rows of whole batches are found: those that the loader asks for next, so no others.
            end = max(end, min(stage.end_step, begin + _ROWS_AT_ONCE // (size * rows)))
        slots = range(first * rows, (first + size) * rows)
        sources, numbers, costs = self._find(stage, index, range(begin, end), slots)
        own = deal(costs.reshape(end - begin, size * rows), [0, size], self._part.micro_batch)
        own = own[:, (rank - first) * rows : (rank - first + 1) * rows]
        places = own + np.arange(0, costs.size, size * rows)[:, None]
        self._last = begin, end, np.stack([own + first * rows, sources[places], numbers[places]])
        return self._last[2][:, : wanted - begin]

    def _find(
        self, stage: Stage, index: Mapping[int, StoredRows], steps: range, slots: range
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return the sources and rows at some slots of some steps, and what each costs, step by step."""
        each = np.repeat(np.arange(steps.start, steps.stop), len(slots))
        sources, rows = rows_at(stage, each, np.tile(np.arange(slots.start, slots.stop), len(steps)))
        costs = {source: self._of(stored) for source, stored in index.items()}
        return sources, rows, costs_of(costs, sources, rows)

    def _of(self, rows: StoredRows) -> RowCosts:
        if id(rows) not in self._costs:
            self._costs[id(rows)] = rows, row_costs(rows)
        return self._costs[id(rows)][1]


def deal(costs: Int64Array, edges: Sequence[int], micro_batch: int) -> Int64Array:
    """Return the slots of each line of costs in the order in which ranks take them, `micro_batch` at a time.

    `edges` are the first ranks of groups and the number of ranks; costs are of 16 bits.

    >>> deal(np.array([[1, 9, 2, 8]]), [0, 2], 2).tolist(), deal(np.array([[1, 9, 2, 8]]), [0, 1, 2], 1).tolist()
    ([[1, 0, 3, 2]], [[1, 0, 3, 2]])
    """
    rows = costs.shape[1] // edges[-1]
    dealt = [
        begin * rows + _deal(costs[:, begin * rows : end * rows], end - begin, micro_batch)
        for begin, end in pairwise(edges)
    ]
    return np.concatenate(dealt, axis=1) if len(dealt) > 1 else dealt[0]


def _deal(costs: Int64Array, ranks: int, micro_batch: int) -> Int64Array:
    """Deal the rows of one group."""
    num_steps, num_rows = costs.shape
    cells, bits = num_rows // micro_batch, num_rows.bit_length()
    # Dearest first, of equal ones that of the first slot: numbers without an equal are sorted fastest.
    keys = np.sort(_DEAREST - costs << bits | np.arange(num_rows), axis=1)
    out = np.empty((num_steps, num_rows), np.int64)
    members = out
    if micro_batch > 1:
        rows, keys = keys, np.empty((num_steps, cells), np.int64)
        members = np.empty((num_steps, num_rows), np.int64)
        _fill_cells(rows, (micro_batch, bits), np.empty((3, cells), np.int64), members, keys)
        keys.sort(axis=1)
    _place_cells(keys, members, (micro_batch, bits, ranks.bit_length()), np.empty(ranks, np.int64), out)
    return out


@kernel
def _fill_cells(
    rows: Int64Array, sizes: tuple[int, int], room: Int64Array, members: Int64Array, cells: Int64Array
) -> None:
    """Deal the rows of each step, dearest first, to cells.

    Write the rows of each cell side by side, and what it costs, counted down from the most that it could, followed
    by its number. `sizes` are the rows of a cell, and the bits of a number of rows or cells.
    """
    micro_batch, bits = sizes
    mask = (int64(1) << bits) - 1
    heap, loads, filled = room[0], room[1], room[2]
    for step in range(rows.shape[0]):
        # The first row of each cell: those of the last cost least.
        size = cells.shape[1]
        for cell in range(size):
            key = rows[step, cell]
            loads[cell], filled[cell] = _DEAREST - (key >> bits), 1
            members[step, cell * micro_batch] = key & mask
            heap[size - 1 - cell] = loads[cell] << bits | cell
        for k in range(size, rows.shape[1]):
            key = rows[step, k]
            cell = heap[0] & mask
            loads[cell] += _DEAREST - (key >> bits)
            members[step, cell * micro_batch + filled[cell]] = key & mask
            filled[cell] += 1
            item = loads[cell] << bits | cell
            if filled[cell] == micro_batch:
                size -= 1
                item = heap[size]
            place = int64(0)
            while True:
                child = 2 * place + 1
                if child >= size:
                    break
                if child + 1 < size and heap[child + 1] < heap[child]:
                    child += 1
                if heap[child] > item:
                    break
                heap[place] = heap[child]
                place = child
            heap[place] = item
        for cell in range(cells.shape[1]):
            cells[step, cell] = (_DEAREST * micro_batch - loads[cell]) << bits | cell


@kernel
def _place_cells(
    cells: Int64Array, members: Int64Array, sizes: tuple[int, int, int], totals: Int64Array, out: Int64Array
) -> None:
    """Give each micro-batch of a step its cells, one a rank, and write the rows of these, rank by rank.

    Cells come dearest first, as `_fill_cells` writes them; where they have one row each they are rows.
    """
    micro_batch, bits, rank_bits = sizes
    mask, rank_mask = (int64(1) << bits) - 1, (int64(1) << rank_bits) - 1
    ranks, num_rows = totals.size, out.shape[1] // totals.size
    for step in range(out.shape[0]):
        for rank in range(ranks):
            totals[rank] = rank  # what it has had, nothing yet, and then its number
        for batch in range(num_rows // micro_batch):
            if batch:
                _sort(totals)
            for k in range(ranks):
                key = cells[step, batch * ranks + k]
                rank, cell = totals[k] & rank_mask, key & mask
                totals[k] += (_DEAREST * micro_batch - (key >> bits)) << rank_bits
                begin = rank * num_rows + batch * micro_batch
                if micro_batch == 1:
                    out[step, begin] = cell
                else:
                    for i in range(micro_batch):
                        out[step, begin + i] = members[step, cell * micro_batch + i]


@inner
def _sort(values: Int64Array) -> None:
    """Sort a few numbers in place, by Shell's method."""
    gap = int64(1)
    while 3 * gap + 1 < values.size:
        gap = 3 * gap + 1
    while gap:
        for i in range(gap, values.size):
            value, place = values[i], int64(i)
            while place >= gap and values[place - gap] > value:
                values[place] = values[place - gap]
                place -= gap
            values[place] = value
        gap //= 3
