"""Tokens of a block that are read by ranges from object storage, and the next use of what a mirror holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.loader import kernels
from tokenmill.packing.stored import stored_rows
from tokenmill.plan.stages import LAST_STEP, next_steps
from tokenmill.store.layout import PAGE_BYTES
from tokenmill.store.ranges import FileRanges
from tokenmill.store.store import wanted_of
from tokenmill.types import Int64Array, Spans

if TYPE_CHECKING:
    from tokenmill.packing.records import Runs
    from tokenmill.plan.plan import Plan
    from tokenmill.store.maps import MapCache, MappedFile
    from tokenmill.store.ranges import Loan, Request
    from tokenmill.store.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Spans of one array of a block that come from one source."""

    store: Store
    key: str
    mask: str | None
    """The array that says which tokens are trained on, if the store has it."""
    places: Spans | Runs
    """Places of its spans in the store."""
    spans: Int64Array
    """The lines of the field's table that are its."""
    around: tuple[Int64Array, Int64Array] | None = None
    """Tokens of the store, begins and ends, that are shuffled together with its rows in one block each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchOptions:
    """Options for tokens that are not on this machine."""

    ahead: bool = False
    """Whether it is fetched ahead of training, and waits until there is room for it."""
    plan: Plan | None = None
    """By which a mirror knows what to let go; None: there is no mirror, or it keeps all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Arriving:
    """Spans whose tokens are on their way into memory."""

    piece: Piece
    key: str
    column: int
    """Column of the address that they set."""
    shards: Int64Array
    bases: Int64Array
    """Address of the file of each shard, once it is known."""
    loans: tuple[tuple[list[int], Loan], ...]
    """Indices of the shards, and the request, of each reader."""


class Fetches:
    """Requests of one block: begun together, waited for before the first row is copied."""

    def __init__(self, options: FetchOptions, last_step: int) -> None:
        """Begin with no request; `last_step` is the last step of the block."""
        self._options, self._last_step = options, last_step
        self._arriving: list[_Arriving] = []
        self._loans: list[Loan] = []
        self._lock = threading.Lock()

    @property
    def is_here(self) -> bool:
        """Whether all tokens are on this machine."""
        return all(loan.is_here for arriving in self._arriving for _, loan in arriving.loans)

    def begin(
        self, piece: Piece, key: str, column: int, shards: Int64Array, requests: Sequence[Request]
    ) -> list[tuple[MapCache, list[MappedFile]]]:
        """Request the tokens of spans; return the files that are mapped instead."""
        store, places = piece.store, piece.places
        mapped: list[tuple[MapCache, list[MappedFile]]] = []
        bases = np.zeros(shards.size, np.int64)
        spans = (places.shard, places.token, places.token + places.length)
        by_reader: dict[int, tuple[list[int], list[FileRanges]]] = {}
        for number, wanted in enumerate(wanted_of(requests, shards, spans, store.dtype(key).itemsize)):
            if isinstance(wanted, FileRanges):
                numbers, ranges = by_reader.setdefault(id(wanted.file.reader), ([], []))
                numbers.append(number)
                shard = int(shards[number])
                known = replace(wanted, next_use=self._next_use(store, key, shard))
                ranges.append(known)
                if piece.around is not None:
                    begins, ends = _bytes_within(store, key, shard, piece.around)
                    ranges.append(replace(known, begins=begins, ends=ends, to_mirror=True))
            else:
                mapped.append((store._maps, store._maps.open([wanted])))
                bases[number] = mapped[-1][1][0].address
        loans = tuple(
            (numbers, ranges[0].file.reader.begin(ranges, ahead=self._options.ahead))
            for numbers, ranges in by_reader.values()
        )
        self._arriving.append(
            _Arriving(piece=piece, key=key, column=column, shards=shards, bases=bases, loans=loans)
        )
        return mapped

    def wait(self) -> None:
        """Wait for all tokens, and write the addresses of their spans."""
        if not self._arriving:
            return
        with self._lock:
            while self._arriving:
                first = self._arriving[0]
                for numbers, loan in first.loans:
                    first.bases[numbers] = [file.address for file in loan.wait()]
                write_addresses(first.piece, first.key, first.column, first.shards, first.bases)
                self._loans += [loan for _, loan in first.loans]
                del self._arriving[0]

    def release(self) -> None:
        """Return the memory of all requests."""
        for loan in (*self._loans, *(loan for arriving in self._arriving for _, loan in arriving.loans)):
            loan.release()
        self._loans, self._arriving = [], []

    def _next_use(self, store: Store, key: str, shard: int) -> Callable[[Int64Array], Int64Array] | None:
        """Return a function from first bytes of pages to the first step after the block that needs each page."""
        if self._options.plan is None:
            return None
        plan, axis, width = self._options.plan, store.axis(key), store.dtype(key).itemsize

        def steps(begins: Int64Array) -> Int64Array:
            size = int(store.axes[axis].values[shard + 1] - store.axes[axis].values[shard])
            values = np.maximum(begins, 0) // width, np.minimum(-(-(begins + PAGE_BYTES) // width), size)
            return next_uses(plan, store, axis, shard, values, self._last_step)

        return steps


def write_addresses(piece: Piece, key: str, column: int, shards: Int64Array, bases: Int64Array) -> None:
    """Write the addresses of spans in some shards, whose files begin at `bases`."""
    places = (piece.places.shard, piece.places.token)
    kernels.point_spans(piece.spans, places, shards, bases, column, piece.store.dtype(key).itemsize)


def _bytes_within(
    store: Store, key: str, shard: int, tokens: tuple[Int64Array, Int64Array]
) -> tuple[Int64Array, Int64Array]:
    """Return the bytes of an array of a shard, begins and ends, of runs of tokens of the store."""
    base, end = store.axes[store.axis(key)].values[shard : shard + 2].tolist()
    begins, ends = (np.clip(each, base, end) - base for each in tokens)
    width = store.dtype(key).itemsize
    return begins[ends > begins] * width, ends[ends > begins] * width


def next_uses(
    plan: Plan, store: Store, axis: str, shard: int, values: tuple[Int64Array, Int64Array], after: int
) -> Int64Array:
    """Return for runs of values of a shard, (begins, ends), the first step after `after` that needs any of them.

    It is LAST_STEP where none does. All ranks count, as any of them may be on this machine.
    """
    begins, ends = values
    first_uses = np.full(begins.size, LAST_STEP, np.int64)
    for stage in plan.trained_stages:
        if stage.end_step <= after + 1:
            continue
        unused = np.flatnonzero(first_uses == LAST_STEP)
        if not unused.size:
            break
        for name, rows in stored_rows(stage).items():
            if rows.store is store:
                numbers, owner = rows.rows_within_shard(axis, shard, begins[unused], ends[unused])
                np.minimum.at(first_uses, unused[owner], next_steps(stage, name, numbers, after))
    return first_uses
