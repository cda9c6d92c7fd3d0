"""What each row of a store costs a model whose attention stays within documents: 16 bits a row.

A row costs the squares of its segments, those of padding among them; in units of such a size that a row of one
document, which costs most, has a number of 16 bits. Costs are counted once, from lengths alone. Those of many rows
are kept in a file beside their index, which all processes map; each block of it has a checksum, as ranks that went
by other costs would not share out a batch alike.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from tokenmill.compiled import int64, kernel, least, read_uint16
from tokenmill.fingerprint import digest
from tokenmill.packing.index import compute_in_order, kept_file
from tokenmill.packing.rows import StoredRows
from tokenmill.store.durable import read_index, write_index
from tokenmill.store.maps import MappedFile
from tokenmill.types import BoolArray, Int64Array, Uint16Array

IN_MEMORY_ROWS = 1 << 17
"""Of no more rows than these, every process counts the costs itself, in a fraction of a second."""
BLOCK = 1 << 16
FORMAT = "tokenmill-costs-1"
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
        out[i] = least(total // unit, 65535)


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

    def of(self, numbers: Int64Array) -> Int64Array:
        """Return the costs of some rows."""
        return costs_of({0: self}, np.zeros_like(numbers), numbers)

    def prove(self, numbers: Int64Array) -> None:
        """Compare the bytes that hold the costs of some rows with their checksums, unless that was done."""
        if self.file is None or self.unchecked is None:
            return
        for block in np.flatnonzero(self.unchecked & np.isin(np.arange(self.unchecked.size), numbers // BLOCK)):
            part = self.data[block * BLOCK : (block + 1) * BLOCK]
            if xxhash.xxh3_64_hexdigest(np.ascontiguousarray(part).data) != self.sums[block]:
                logger.warning("%s: must hold what was written, got other bytes; it is not used", self.file.path)
                self.data, self.unchecked = np.concatenate(list(_blocks(self.rows))), None
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
            f"{digest({'format': FORMAT, **rows.description})}.costs",
            "a file of the costs of rows",
            read=lambda file: _read(file, rows),
            build=lambda file: write_index(file, lambda out: _write(out, rows)),
        )
    return kept or RowCosts(rows=rows, data=np.concatenate([np.empty(0, np.uint16), *_blocks(rows)]))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Footer:
    """What stands at the end of kept costs, as JSON."""

    format: str
    rows: int
    sums: tuple[str, ...]


def _blocks(rows: StoredRows) -> Iterator[Uint16Array]:
    """Count the costs of all rows, block by block, in threads."""
    total = rows.num_rows + rows.num_rest

    def block(number: int) -> Uint16Array:
        return count_costs(rows, np.arange(number * BLOCK, min((number + 1) * BLOCK, total)))

    return compute_in_order(-(-total // BLOCK), block)


def _write(out: BinaryIO, rows: StoredRows) -> _Footer:
    sums = []
    for block in _blocks(rows):
        out.write(block.data)
        sums.append(xxhash.xxh3_64_hexdigest(block.data))
    return _Footer(format=FORMAT, rows=rows.num_rows + rows.num_rest, sums=tuple(sums))


def _read(file: Path, rows: StoredRows) -> RowCosts | None:
    """Map kept costs; None where there are none, or a file that is cut or changed: it is made again."""
    index = read_index(file, _Footer)
    if index is None:
        return None
    mapped, footer = index
    total = rows.num_rows + rows.num_rest
    blocks = -(-total // BLOCK)
    if (footer.format, footer.rows, len(footer.sums), mapped.data.size) != (FORMAT, total, blocks, 2 * total):
        return None
    return RowCosts(
        rows=rows,
        data=mapped.data.view(np.uint16),
        sums=footer.sums,
        unchecked=np.ones(blocks, np.bool_),
        file=mapped,
    )
