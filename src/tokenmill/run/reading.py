"""What it takes to read a run from object storage: requests, bytes, time and money, before step 0.

Counted from the plan and the row indexes alone, so that it can be asked of a store that is still on a local disk.
Of large sources a part is counted, and taken for all. How rows become requests is what `store/remote` does:
neighbours in a block of the loader are joined, gaps never. Packing windows that are shuffled by `window` come
whole, if a mirror has room for those that are shuffled together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tokenmill.errors import ConfigError
from tokenmill.loader.loader import block_rows, held_bytes
from tokenmill.packing.stored import LOSS_MASK, StoredRows, stored_rows
from tokenmill.plan.order import EpochOrder, Shuffle
from tokenmill.plan.stages import Stage
from tokenmill.run.run import Run
from tokenmill.store.layout import PAGE_BYTES
from tokenmill.store.remote.fetch import MAX_REQUEST_BYTES
from tokenmill.tables import as_json
from tokenmill.types import Int64Array, RemoteOptions

SHUFFLES = ("full", "window")
"""Shuffles that are always reported, in addition to that of the run."""
_SAMPLES = 16
"""Blocks of the loader that are counted, of rows that are shuffled far."""
_SAMPLE_ROWS = 1 << 20
"""Rows that are counted of groups of windows, at least one group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Network link to the stores."""

    nodes: int = 1
    """Machines that train; the ranks of one share a mirror."""
    latency_ms: float = 50.0
    """Milliseconds from a request to its first byte."""
    gbit: float = 10.0
    """Bandwidth of a node, in 10^9 bits a second."""
    concurrency: int = RemoteOptions().concurrency
    """Concurrent requests of a node."""

    def __post_init__(self) -> None:
        for name in ("nodes", "gbit", "concurrency"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: must be more than 0, got {getattr(self, name)}; leave it out")
        if self.latency_ms < 0:
            raise ConfigError(f"latency_ms: must not be negative, got {self.latency_ms}; leave it out")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """Prices in dollars. The defaults are those of S3 Standard in us-east-1, read within the region."""

    thousand_requests: float = 0.0004
    gigabyte: float = 0.0
    """Price per GB that leaves the region: about 0.02 to another region, 0.09 to the internet."""

    def __post_init__(self) -> None:
        for name in ("thousand_requests", "gigabyte"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative, got {getattr(self, name)}; leave it out")

    def dollars(self, requests: float, size: float) -> float:
        """Return what some requests for `size` bytes together cost."""
        return requests / 1000 * self.thousand_requests + size / 1e9 * self.gigabyte


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Requests of a stage to the store of one source under one shuffle, over all nodes. No epoch is cached."""

    stage: str
    source: str
    shuffle: str
    is_planned: bool
    """Whether the run uses this shuffle in this stage."""
    epochs: float
    rows: int
    requests: int
    bytes: int
    mirror_bytes: int
    """Size of a node's mirror that avoids reading anything twice."""
    seconds: float
    """Seconds that a node reads: the time of its bytes or of its requests, whichever is longer."""
    dollars: float
    counted_rows: int
    """Rows that were looked at; the other figures are in proportion to them."""

    @property
    def mean_request_bytes(self) -> float:
        """Mean size of a request."""
        return self.bytes / self.requests if self.requests else 0.0

    @property
    def an_epoch(self) -> Reading:
        """Requests of one epoch, or of the whole stage if it is less than one epoch."""
        epochs = max(self.epochs, 1.0)
        return replace(
            self,
            requests=round(self.requests / epochs),
            bytes=round(self.bytes / epochs),
            seconds=self.seconds / epochs,
            dollars=self.dollars / epochs,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadingReport:
    """Requests of a run to object storage."""

    link: Link
    prices: Prices
    readings: tuple[Reading, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        table = dict(as_json(self))
        for line, reading in zip(table["readings"], self.readings, strict=True):
            line["mean_request_bytes"] = reading.mean_request_bytes
            figures = ("requests", "bytes", "seconds", "dollars")
            line["an_epoch"] = {name: getattr(reading.an_epoch, name) for name in figures}
        return table


def report_reading(
    run: Run,
    *,
    link: Link | None = None,
    prices: Prices | None = None,
    verify_pages: bool | None = None,
    whole: tuple[str, ...] = ("window",),
) -> ReadingReport:
    """Count what each stage of a run asks of object storage, as if all of its stores were there.

    `verify_pages` is as the run says, unless it is given; `whole` are the shuffles whose blocks come whole, as
    those of `window` do through a mirror.
    """
    link, prices = link or Link(), prices or Prices()
    verify = run.config.remote.verify_pages if verify_pages is None else verify_pages
    counting = _Counting(
        link=link,
        prices=prices,
        page=PAGE_BYTES if verify else 1,
        whole=whole,
        horizon=run.config.remote.horizon_bytes,
    )
    readings: dict[tuple[str, str, str], Reading] = {}
    for stage in run.plan().trained_stages:
        for name, rows in stored_rows(stage).items():
            if not stage.draws[name]:
                continue
            for mode in dict.fromkeys((*SHUFFLES, stage.spec.shuffle.mode)):
                key = (stage.spec.name, name, mode)
                reading = counting.reading(stage, name, rows, mode)
                readings[key] = _together(readings[key], reading) if key in readings else reading
    return ReadingReport(link=link, prices=prices, readings=tuple(readings.values()))


def _together(first: Reading, second: Reading) -> Reading:
    """Add up two parts of a stage."""
    return replace(
        second,
        mirror_bytes=max(first.mirror_bytes, second.mirror_bytes),
        **{
            name: getattr(first, name) + getattr(second, name)
            for name in ("rows", "requests", "bytes", "seconds", "dollars", "counted_rows", "epochs")
        },
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counting:
    link: Link
    prices: Prices
    page: int
    """Bytes that are read as a whole."""
    whole: tuple[str, ...]
    horizon: int
    """Bytes that a loader prefetches. A block takes a quarter of them."""

    def reading(self, stage: Stage, name: str, rows: StoredRows, mode: str) -> Reading:
        """Return the requests of a source in a stage under one shuffle."""
        link, drawn = self.link, stage.draws[name]
        by_blocks = mode in self.whole and rows.whole_blocks(np.arange(1), 1) is not None
        counted = requests = size = largest = 0
        samples = self._of_blocks if by_blocks else self._of_loaders
        for number, parts in samples(stage, name, rows, replace(stage.spec.shuffle, mode=mode)):
            read = [_count(rows, part, self.page) for part in parts if part.size]
            counted += number
            requests += sum(each[0] for each in read)
            size += sum(each[1] for each in read)
            largest = max([largest, *(each[1] for each in read)])
        scale = drawn / counted
        requests, size = round(requests * scale), round(size * scale)
        epochs = drawn / rows.num_rows
        # Of what a node reads in some epochs, this share are other bytes than it has read before.
        distinct = 1 - (1 - 1 / link.nodes) ** epochs if link.nodes > 1 else min(1.0, epochs)
        again = round(distinct * size / epochs) if epochs > 1 else 0
        waiting = requests * link.latency_ms / 1e3 / link.concurrency
        return Reading(
            stage=stage.spec.name,
            source=name,
            shuffle=mode,
            is_planned=mode == stage.spec.shuffle.mode,
            epochs=epochs,
            rows=drawn,
            requests=requests,
            bytes=size,
            # With room for twice as much, a mirror brings blocks whole.
            mirror_bytes=max(again, 2 * largest if by_blocks else 0),
            seconds=max(size * 8 / (link.gbit * 1e9), waiting) / link.nodes,
            dollars=self.prices.dollars(requests, size),
            counted_rows=min(counted, drawn),
        )

    def _of_loaders(
        self, stage: Stage, name: str, rows: StoredRows, shuffle: Shuffle
    ) -> Iterator[tuple[int, list[Int64Array]]]:
        """Yield how many rows some blocks of a loader have, and which.

        A node has a part of every batch; which rows of it does not matter here, but for `window`.
        """
        order, drawn = self._order(stage, name, rows, shuffle)
        most = block_rows(stage.row_slots, held_bytes(rows.store, stage.row_slots), self.horizon)
        share = stage.draws[name] / sum(stage.draws.values())
        block = max(1, min(round(most * share), -(-drawn // self.link.nodes)))
        begins = range(0, drawn, block)
        for begin in begins[:: max(1, len(begins) // _SAMPLES)]:
            numbers = order.rows(np.arange(begin, min(begin + block, drawn)))
            yield numbers.size, [numbers]

    def _of_blocks(
        self, stage: Stage, name: str, rows: StoredRows, shuffle: Shuffle
    ) -> Iterator[tuple[int, list[Int64Array]]]:
        """Yield how many rows are shuffled together, and all rows of the blocks that each node needs for them."""
        order, drawn = self._order(stage, name, rows, shuffle)
        batch, nodes, begin = max(1, round(stage.draws[name] / stage.num_steps)), self.link.nodes, 0
        while begin < min(drawn, _SAMPLE_ROWS):
            end = order.group_end(begin)
            places = np.arange(begin, end)
            arranged = order.arranged(places)
            numbers = order.settled(arranged)
            starts = order.starts
            blocks = arranged // shuffle.block_rows
            if starts is not None:
                blocks = np.searchsorted(starts, numbers, side="right")
            batches = places // batch
            by_batch = np.lexsort((arranged, batches)) if shuffle.mode == "window" else np.arange(places.size)
            node = (places - batches * batch) * nodes // batch
            used = places < drawn
            touched = [np.unique(blocks[by_batch][used & (node == which)]) for which in range(nodes)]
            yield int(used.sum()), [numbers[np.isin(blocks, each)] for each in touched]
            begin = end

    def _order(self, stage: Stage, name: str, rows: StoredRows, shuffle: Shuffle) -> tuple[EpochOrder, int]:
        """Return the order of an epoch under a shuffle, and how many of its rows the stage draws."""
        starts = rows.window_starts(rest=False) if shuffle.mode == "window" else None
        key = stage.order(stage.names.index(name), 0).key
        order = EpochOrder(size=rows.num_rows, key=key, numbers=shuffle.numbers, starts=starts)
        return order, min(stage.draws[name], rows.num_rows)


def _count(rows: StoredRows, numbers: Int64Array, page: int) -> tuple[int, int]:
    """Return (requests, bytes) of some rows, neighbours joined, gaps not."""
    requests = size = 0
    fields = dict(rows.fields(numbers))
    token_key = rows.store.manifest.token_key
    if LOSS_MASK in rows.store.keys and token_key in fields:
        fields[LOSS_MASK] = fields[token_key]
    for key, runs in fields.items():
        width = np.dtype(rows.store.manifest.keys[key]).itemsize
        begin, end = runs.token * width, (runs.token + runs.length) * width
        filled = end > begin
        # Each shard is a file: add an offset to its places that is larger than any file.
        first = (begin // page * page + (runs.shard << 44))[filled]
        last = (-(-end // page) * page + (runs.shard << 44))[filled]
        if not first.size:
            continue
        by_place = np.argsort(first, kind="stable")
        first, last = first[by_place], np.maximum.accumulate(last[by_place])
        heads = np.flatnonzero(np.concatenate([[True], first[1:] > last[:-1]]))
        lengths = last[np.append(heads[1:], first.size) - 1] - first[heads]
        requests += int((-(-lengths // MAX_REQUEST_BYTES)).sum())
        size += int(lengths.sum())
    return requests, size
