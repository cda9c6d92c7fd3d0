"""Rows of a store: what all kinds have in common, what a quarantine leaves out, what a mask leaves to train on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np
import xxhash

from tokenmill.compiled import int64, kernel, read_int64, read_uint8
from tokenmill.errors import ConfigError, PlanError
from tokenmill.plan.stages import LAST_STEP, CountedRows, Held, Seen, next_steps
from tokenmill.store.layout import OFFSET_DTYPE, index_file
from tokenmill.store.reader import Store, bad_offsets
from tokenmill.types import AnyArray, BoolArray, Int64Array, distinct, run_sums

if TYPE_CHECKING:
    from tokenmill.packing.records import Runs
    from tokenmill.plan.plan import Plan
    from tokenmill.types import Fates, Spans

    Counted = CountedRows
else:
    Counted = object  # a property of a protocol would be the default of a field of its name

QUARANTINED = "quarantined"
"""Key of a description, and the reason for which tokens of excluded documents are dropped."""


class StoredRows(Counted):
    """Rows whose tokens stand in a store, so that all rows of an epoch are known."""

    if TYPE_CHECKING:

        @property
        def store(self) -> Store:
            """Where the tokens are."""

    @property
    def num_rest(self) -> int:
        """How many rows come before the first epoch."""
        return 0

    @property
    def counted(self) -> Self:
        """Themselves."""
        return self

    @property
    def row_slots(self) -> int:
        """How many input slots a row has."""
        return self.seq_len

    @property
    def num_long(self) -> int:
        """How many documents of an epoch are longer than a row, or are cut to fill one; 0 where nobody counted."""
        return 0

    @property
    def segment_multiple(self) -> int:
        """To a multiple of how many columns every segment is filled up."""
        return 1

    @property
    def epoch_description(self) -> Mapping[str, int | str | bool]:
        """What decides the rows of an epoch."""
        return self.description

    def whole_blocks(self, rows: Int64Array, block_rows: int) -> tuple[Int64Array, Int64Array] | None:  # noqa: ARG002
        """Return the tokens of the store, begins and ends, of the blocks of `shuffle = "window"` that hold rows.

        None where these are no runs of tokens.
        """
        return None

    def window_starts(self, *, rest: bool) -> Int64Array | None:  # noqa: ARG002 - as `PackedRows` has it
        """None: rows that follow each other are neighbours at rest."""
        return None

    @property
    def _fates(self) -> Fates:
        raise NotImplementedError

    def fates(self) -> Fates:
        """Return what becomes of every token of the source in an epoch; counted once."""
        return self._fates

    def fields(self, rows: Int64Array, ahead: int = 0) -> Mapping[str, Spans | Runs]:
        """Return where each array of the given rows is, in the order given; a row of a sequence has one.

        A full row has up to `ahead` tokens more, if its last document goes on: labels of inputs before them.
        """
        spans = self.spans(rows)
        if ahead and self._goes_on:
            spans = look_ahead(spans, self.seq_len, ahead, lambda documents: locate(self.store, documents)[2])
        return {self.store.manifest.token_key: spans}

    @property
    def _goes_on(self) -> bool:
        """Whether what a document has after the end of a row is trained on as well, and not dropped."""
        return True

    def held(self, rows: Int64Array) -> Held:
        """Return what the given rows hold; reads their part of the loss mask where the store has one."""
        spans = self.spans(rows)
        # The first token of a span has nothing before it that predicts it, unless it follows its BOS.
        skip = (~spans.joined).astype(np.int64)
        if self.cross_document_labels:
            skip[:] = 0
            skip[spans.first[spans.count > 0]] = 1
        if LOSS_MASK in self.store.keys:
            trained = count_ones(self.store, LOSS_MASK, spans.shard, spans.token + skip, spans.length - skip)
        else:
            trained = int((spans.length - skip).sum())
        # A full row holds one more token than it has inputs: its last label.
        used = np.minimum(run_sums(spans.first, spans.count, spans.length), self.seq_len)
        return Held(tokens=int(used.sum()), trained=trained)

    def rows_within_shard(
        self, axis: str, shard: int, begins: Int64Array, ends: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Return the rows that hold values of runs, `begins` to `ends` of a shard, and the run of each."""
        raise NotImplementedError

    def check_rows(self, rows: Int64Array) -> None:
        """Refuse rows that there are not."""
        end = self.num_rows + self.num_rest
        if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < end:
            raise PlanError(
                f"{self.store.path}: rows must lie within 0:{end}, "
                f"got {int(rows.min())} to {int(rows.max())}; use the rows that the plan names"
            )


@dataclass(frozen=True, kw_only=True)
class TakenRows(StoredRows):
    """Some rows of others, and after them rows that hold nothing: what an eval reads of a source."""

    rows: StoredRows
    taken: int
    """How many."""
    num_rows: int
    """With those that hold nothing, so that batches are full."""
    chosen: Int64Array | None = None
    """Which rows, ascending; None: from the first on."""

    @property
    def store(self) -> Store:
        """Where the tokens are."""
        return self.rows.store

    @property
    def seq_len(self) -> int:
        """How many tokens of a row are inputs."""
        return self.rows.seq_len

    @property
    def row_slots(self) -> int:
        """How many input slots a row has."""
        return self.rows.row_slots

    @property
    def cross_document_labels(self) -> bool:
        """Whether labels cross documents."""
        return self.rows.cross_document_labels

    @property
    def segment_multiple(self) -> int:
        """To a multiple of how many columns every segment is filled up."""
        return self.rows.segment_multiple

    @property
    def description(self) -> Mapping[str, int | str | bool]:
        """What decides the content of the rows."""
        chosen = {} if self.chosen is None else {"chosen": digest_numbers(self.chosen)}
        return {**self.rows.description, "rows": self.num_rows, "taken": self.taken, **chosen}

    @property
    def index_arrays(self) -> Sequence[tuple[AnyArray, bool]]:
        """Those of the rows that it takes from."""
        return self.rows.index_arrays

    @property
    def _fates(self) -> Fates:
        return self.rows.fates()

    def following(self, previous: CountedRows, seen: Seen) -> CountedRows:
        """Refuse: an eval has one stage."""
        raise NotImplementedError

    def _split(self, rows: Int64Array) -> tuple[BoolArray, Int64Array]:
        """Say which rows hold something, and which rows of the others these are."""
        self.check_rows(rows)
        full = rows < self.taken
        return full, rows[full] if self.chosen is None else self.chosen[rows[full]]

    def held(self, rows: Int64Array) -> Held:
        """Return what the given rows hold."""
        return self.rows.held(self._split(rows)[1])

    def rows_of(self, document: int) -> Int64Array:
        """Return the rows that hold a token of a document, in ascending order."""
        rows = self.rows.rows_of(document)
        if self.chosen is not None:
            rows = np.flatnonzero(np.isin(self.chosen, rows))
        return rows[rows < self.taken]

    def spans(self, rows: Int64Array) -> Spans:
        """Return what the given rows are made of, in the order given."""
        full, inner = self._split(rows)
        return _spread(self.rows.spans(inner), full)

    def fields(self, rows: Int64Array, ahead: int = 0) -> Mapping[str, Spans | Runs]:
        """Return where each array of the given rows is, in the order given."""
        full, inner = self._split(rows)
        return {key: _spread(spans, full) for key, spans in self.rows.fields(inner, ahead).items()}


SpansOrRuns = TypeVar("SpansOrRuns", bound="Spans | Runs")


def _spread(spans: SpansOrRuns, full: BoolArray) -> SpansOrRuns:
    """Return the spans of rows with rows between them that have none."""
    if full.all():
        return spans
    first, count = np.zeros((2, full.size), np.int64)
    first[full], count[full] = spans.first, spans.count
    return replace(spans, first=first, count=count)


# What a quarantine leaves out, and how the numbers of what stays close up over it.


@dataclass(frozen=True, kw_only=True, slots=True)
class Holes:
    """Runs of numbers that are left out, so that the others close up over them.

    A number is open as the store counts it, and closed as if the holes had never been. A lookup is a binary search.

    >>> holes = holes_of(np.array([2, 3, 7]), np.array([1, 1, 2]))
    >>> holes.opened(np.arange(6)).tolist(), holes.closed(np.array([1, 4, 9])).tolist()
    ([0, 1, 4, 5, 6, 9], [1, 2, 5])
    """

    begins: Int64Array
    """First open number of each hole; between two holes there is at least one number."""
    places: Int64Array
    """The closed number that comes right after each hole, ascending."""
    before: Int64Array
    """How many numbers the holes before each hole have, and all together: one more than there are holes."""

    @property
    def size(self) -> int:
        """How many numbers are left out."""
        return int(self.before[-1])

    def opened(self, closed: Int64Array) -> Int64Array:
        """Return the open number of each closed one."""
        return closed + self.before[np.searchsorted(self.places, closed, side="right")]

    def closed(self, opened: Int64Array) -> Int64Array:
        """Return the closed number of each open one; within a hole, that of the first number after it."""
        if not self.begins.size:
            return opened
        hole = np.searchsorted(self.begins, opened, side="right") - 1
        inside = np.minimum(self.before[hole + 1], self.before[hole] + opened - self.begins[hole])
        return opened - np.where(hole < 0, 0, inside)

    def runs(self, begins: Int64Array, length: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Cut runs of `length` closed numbers at the holes: first open number and length of each part, in order.

        The third array says of how many parts each run is made.
        """
        if not self.places.size:
            return begins, np.full(begins.size, length, np.int64), np.ones(begins.size, np.int64)
        first = np.searchsorted(self.places, begins, side="right")
        count = np.searchsorted(self.places, begins + length, side="left") - first + 1
        if int(count.sum()) == begins.size:
            return begins + self.before[first], np.full(begins.size, length, np.int64), count
        heads = np.cumsum(count) - count
        hole = np.arange(int(count.sum())) + np.repeat(first - heads, count)
        # A part begins after a hole and ends before the next one, but for the first and the last of a run.
        start, end = self.places[hole - 1], self.places[np.minimum(hole, self.begins.size - 1)]
        start[heads] = begins
        end[heads + count - 1] = begins + length
        return start + self.before[hole], end - start, count


def holes_of(begins: Int64Array, lengths: Int64Array) -> Holes:
    """Make holes of ascending runs (first number, length); those that touch become one, empty ones none."""
    begins, lengths = begins[lengths > 0], lengths[lengths > 0]
    heads = np.flatnonzero(np.concatenate([[True], begins[1:] != begins[:-1] + lengths[:-1]])[: begins.size])
    ends = np.concatenate([[0], np.cumsum(lengths)])
    before = ends[np.append(heads, begins.size)]
    return Holes(begins=begins[heads], places=begins[heads] - before[:-1], before=before)


def check_excluded(store: Store, excluded: Int64Array) -> None:
    """Refuse excluded documents that are not in the store, not in order, or named twice."""
    assert excluded.dtype == np.int64, "their bytes are what the description of the rows is made of"
    size = store.num_documents
    outside = excluded[(excluded < 0) | (excluded >= size)]
    if outside.size:
        raise ConfigError(
            f"{store.path}: documents that are quarantined or held out must be among the store's {size}, 0:{size}, "
            f"got {int(outside[0])}; count from 0"
        )
    wrong = np.flatnonzero(excluded[1:] <= excluded[:-1])
    if wrong.size:
        before, after = excluded[wrong[0] : wrong[0] + 2].tolist()
        raise ConfigError(
            f"{store.path}: documents that are quarantined or held out, of {size}, must be named once each, in "
            f"ascending order, got {after} after {before}; sort them, and leave repeated ones out"
        )


def describe_excluded(excluded: Int64Array) -> dict[str, int | str | bool]:
    """Return what tells rows without these documents from others, as JSON; nothing where there are none."""
    return {QUARANTINED: digest_numbers(excluded)} if excluded.size else {}


def digest_numbers(numbers: Int64Array) -> str:
    """Return what tells a list of documents from others: how many there are, and a digest."""
    plain = np.ascontiguousarray(numbers, dtype="<i8")
    return f"{numbers.size}:{xxhash.xxh3_128_hexdigest(plain.data)}"


def excluded_within(excluded: Int64Array, begin: int, end: int) -> Int64Array:
    """Return which of documents `begin` to `end` (exclusive) are excluded, counted from `begin`."""
    first, last = np.searchsorted(excluded, [begin, end])
    return excluded[first:last] - begin


def are_excluded(excluded: Int64Array, documents: Int64Array) -> BoolArray:
    """Say of each document whether it is excluded."""
    if not excluded.size:
        return np.zeros(documents.size, np.bool_)
    place = np.minimum(np.searchsorted(excluded, documents), excluded.size - 1)
    return np.equal(excluded[place], documents)


def look_ahead(spans: Spans, seq_len: int, ahead: int, lengths_of: Callable[[Int64Array], Int64Array]) -> Spans:
    """Let the last span of each full row go on by up to `ahead` tokens of its document, whose length is asked."""
    full = run_sums(spans.first, spans.count, spans.length) == seq_len + 1
    last = (spans.first + spans.count - 1)[full]
    left = lengths_of(spans.document[last]) - spans.start[last] - spans.length[last]
    length = spans.length.copy()
    length[last] += np.clip(left, 0, ahead)
    return replace(spans, length=length)


# What rows of sequences hold, and how many labels the loss mask of a store leaves of it.

LOSS_MASK = "loss_mask"
"""Array of a store whose zeros say which tokens are not to be trained on."""
_ROWS = 1 << 16
"""Rows whose labels are counted together."""


def count_rows(rows: StoredRows) -> int:
    """Return how many labels of an epoch the mask leaves; reads all of it, some rows at a time."""
    starts = range(0, rows.num_rows, _ROWS)
    return sum(rows.held(np.arange(begin, min(begin + _ROWS, rows.num_rows))).trained for begin in starts)


def count_ones(
    store: Store,
    key: str,
    shards: Int64Array,
    firsts: Int64Array,
    lengths: Int64Array,
) -> int:
    """Return how many values of a mask are not 0 in runs at (shard, first value within it, length)."""
    needed = distinct(shards)
    size = max(1, store.maps.limit // 4)
    addresses = np.zeros(store.num_shards, np.int64)
    ones = 0
    for first in range(0, needed.size, size):
        group = needed[first : first + size]
        with store.lent(key, group, (shards, firsts, firsts + lengths)) as files:
            addresses[group] = [file.address for file in files]
            ones += _count(addresses, shards, firsts, lengths)
            addresses[group] = 0
    return ones


@kernel
def _count(addresses: Int64Array, shards: Int64Array, firsts: Int64Array, lengths: Int64Array) -> int:
    """Return how many bytes are not 0 in runs whose shard has an address."""
    count = int64(0)
    for i in range(shards.size):
        address = addresses[shards[i]]
        if address:
            for k in range(firsts[i], firsts[i] + lengths[i]):
                count += read_uint8(address, k) != 0
    return count


def items_within(
    store: Store, axis: str, shard: int, begins: Int64Array, ends: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Return the first and last item (inclusive) of an axis that have values of runs, given within a shard.

    Then where each run begins within its first item, and where it ends within its last. Values that are no item's
    give a last item before the first.
    """
    items = store.axes[axis].items
    with store.maps.borrow([store.file(shard, index_file(axis))]) as (mapped,):
        offsets = mapped.data[: 8 * int(items[shard + 1] - items[shard] + 1)].view(OFFSET_DTYPE)
        first = np.searchsorted(offsets, begins.astype(OFFSET_DTYPE), side="right") - 1
        last = np.searchsorted(offsets, ends.astype(OFFSET_DTYPE), side="left") - 1
        first, last = np.maximum(first, 0), np.minimum(last, int(items[shard + 1] - items[shard]) - 1)
        inside = (begins - offsets[first].astype(np.int64), ends - offsets[np.maximum(last, 0)].astype(np.int64))
    return first + items[shard], last + items[shard], *inside


# Where documents are. It is not in the room of stores: numba compiles it, and what writes or verifies a store need
# not wait for numba.


def locate(
    store: Store, documents: Int64Array, axis: str = "documents"
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return (shard, first token within the shard, number of tokens) of each document, or item of another axis."""
    items, values = store.axes[axis].items, store.axes[axis].values
    name = index_file(axis)
    if store.num_shards == 1:
        shards, needed = np.zeros(documents.size, np.int64), np.zeros(1, np.int64)
    else:
        shards = np.searchsorted(items, documents, side="right") - 1
        needed = np.flatnonzero(np.bincount(shards))
    begins, lengths = np.empty((2, documents.size), np.int64)
    size = store.maps.limit // 4
    addresses = np.zeros(store.num_shards, np.int64)
    for first in range(0, needed.size, size):
        group = needed[first : first + size]
        with store.maps.borrow([store.file(int(shard), name) for shard in group]) as files:
            addresses[group] = [file.address for file in files]
            wrong = _gather(documents, shards, addresses, items, values, begins, lengths)
            addresses[group] = 0
        if wrong >= 0:
            raise bad_offsets(store.file(int(shards[wrong]), name))
    return shards, begins, lengths


@kernel
def _gather(
    documents: Int64Array,
    shards: Int64Array,
    addresses: Int64Array,
    items: Int64Array,
    values: Int64Array,
    begins: Int64Array,
    lengths: Int64Array,
) -> int:
    """Read where documents are whose shard has an address; return the first that cannot be there, or -1."""
    for i in range(documents.size):
        shard = shards[i]
        if addresses[shard]:
            document = documents[i] - items[shard]
            begin = read_int64(addresses[shard], document)
            end = read_int64(addresses[shard], document + 1)
            # Compared before they are subtracted: the difference of two wild numbers may look like a length.
            if begin < 0 or end < begin or end > values[shard + 1] - values[shard]:
                return i
            begins[i] = begin
            lengths[i] = end - begin
    return -1


def next_uses(
    plan: Plan, store: Store, axis: str, shard: int, values: tuple[Int64Array, Int64Array], after: int
) -> Int64Array:
    """Return for runs of values of a shard, (begins, ends), the first step after `after` that needs any of them.

    It is LAST_STEP where none does. All ranks count, as any of them may be on this machine.
    """
    begins, ends = values
    first_uses = np.full(begins.size, LAST_STEP, np.int64)
    for stage in plan.stages:
        if stage.end_step <= after + 1 or stage.spec.skipped is not None:
            continue
        unused = np.flatnonzero(first_uses == LAST_STEP)
        if not unused.size:
            break
        for name in stage.names:
            rows = stage.rows[name]
            if isinstance(rows, StoredRows) and rows.store is store:
                numbers, owner = rows.rows_within_shard(axis, shard, begins[unused], ends[unused])
                np.minimum.at(first_uses, unused[owner], next_steps(stage, name, numbers, after))
    return first_uses
