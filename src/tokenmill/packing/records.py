"""Rows of records with several arrays, as DPO and GRPO train on them: a record a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.errors import ConfigError
from tokenmill.packing.holes import (
    QUARANTINED,
    Holes,
    are_excluded,
    check_excluded,
    describe_excluded,
    digest_numbers,
    excluded_within,
    holes_of,
)
from tokenmill.packing.packers import DROP, FORBID
from tokenmill.packing.rows import describe_seen
from tokenmill.packing.stored import StoredRows, count_held, count_ones
from tokenmill.plan.rows import TokenCounts
from tokenmill.store.locate import items_within, locate
from tokenmill.types import NO_DOCUMENTS, AnyArray, BoolArray, Fates, Int64Array, Spans, counted_from, token_arrays

if TYPE_CHECKING:
    from tokenmill.packing.packers import Policy
    from tokenmill.plan.rows import EpochProgress, Rows
    from tokenmill.store.store import Store

_BLOCK = 1 << 18
"""Records that are looked at together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """Runs of values of one array in several rows: row i has runs `first[i]` to `first[i] + count[i]`."""

    first: Int64Array
    count: Int64Array
    shard: Int64Array
    token: Int64Array
    """First value of the run, counted from the shard's first."""
    length: Int64Array

    @property
    def joined(self) -> BoolArray:
        """Whether each run continues the one before it: none does."""
        return np.zeros(self.length.size, np.bool_)


@dataclass(frozen=True, kw_only=True)
class RecordRows(StoredRows):
    """The rows of a store of DPO pairs or GRPO groups: a record a row, in order, each array cut to `seq_len`.

    `spans` names the tokens of the first array, `chosen` or `prompts`; `fields` finds those of all.
    """

    store: Store
    seq_len: int
    """Maximum tokens of each array of a row; the policy cuts or rejects a longer one."""
    policy: Policy
    rest: Int64Array = field(default_factory=lambda: NO_DOCUMENTS)
    """Records that come before the first epoch: what a stage before, of another sequence length, has not drawn."""
    after: str = ""
    """After what the rest is left, for the description."""
    excluded: Int64Array = field(default_factory=lambda: NO_DOCUMENTS)
    """Records that no row holds, ascending."""
    chosen: Int64Array | None = None
    """Records that rows may hold, ascending; None: all."""

    def __post_init__(self) -> None:
        check_excluded(self.store, self.excluded)
        missing = [key for key in token_arrays(self.store.manifest.kind) if key not in self.store.keys]
        if missing:
            raise ConfigError(
                f"{self.store.path}: a store of {self.store.manifest.kind} must have {missing[0]}, "
                f"got only {', '.join(self.store.keys)}; prepare it again"
            )
        if self.policy.split_mode == FORBID:
            self._refuse_longer()

    @property
    def parts(self) -> Mapping[str, str | None]:
        """The arrays of token ids of a record, each with its mask, if it has one."""
        return {
            key: mask if mask in self.store.keys else None
            for key, mask in token_arrays(self.store.manifest.kind).items()
        }

    @property
    def num_rows(self) -> int:
        """Number of records."""
        return self.store.num_documents - self.holes.size

    @cached_property
    def holes(self) -> Holes:
        """Runs of records that no row holds: not chosen, excluded, or dropped as too long."""
        left_out = np.union1d(self.excluded, self._long) if self.policy.split_mode == DROP else self.excluded
        if self.chosen is None:
            return holes_of(left_out, np.ones_like(left_out))
        kept = self.chosen[~are_excluded(left_out, self.chosen)]
        begins = np.concatenate([np.zeros(1, np.int64), kept + 1])
        return holes_of(begins, np.append(kept, self.store.num_documents) - begins)

    @property
    def num_long(self) -> int:
        """Number of records with an array of more tokens than a row delivers; reads lengths."""
        return int(self._long.size)

    @cached_property
    def _long(self) -> Int64Array:
        """Records that have such an array, ascending."""
        return np.unique(np.concatenate([NO_DOCUMENTS, *(records for _, records, _ in self._longer())]))

    @property
    def num_rest(self) -> int:
        """Number of records of the rest."""
        return int(self.rest.size)

    @property
    def cross_document_labels(self) -> bool:
        """Records never reach into one another."""
        return False

    @cached_property
    def description(self) -> Mapping[str, int | str | bool]:
        """Description of the content of the rows."""
        return {**self.epoch_description, **({"rest": self.after} if self.num_rest else {})}

    @property
    def epoch_description(self) -> Mapping[str, int | str | bool]:
        """Description of the rows of a whole epoch."""
        return {
            "store": self.store.fingerprint,
            "packing": "records",
            "split": self.policy.describe()["split"],
            "seq_len": self.seq_len,
            "rows": self.num_rows,
            **describe_excluded(self.excluded),
            **({} if self.chosen is None else {"chosen": digest_numbers(self.chosen)}),
        }

    @property
    def index_arrays(self) -> tuple[tuple[AnyArray, bool], ...]:
        """The rest alone, in memory; a record is a row."""
        return ((self.rest, False),)

    @cached_property
    def largest_group(self) -> int:
        """The largest number of responses of a record; 0 where records have none. Reads where groups begin.

        Excluded records count, so that the shape of a batch does not change when one is quarantined.
        """
        if "groups" not in self.store.axes:
            return 0
        blocks = _blocks(self.store.num_documents)
        return max((int(np.diff(self.store.offsets("groups", *part)).max()) for part in blocks), default=0)

    @property
    def row_slots(self) -> int:
        """Number of tokens that fit a row, over all its arrays and the responses of the largest group."""
        return self.seq_len * (1 + self.largest_group if "responses" in self.parts else len(self.parts))

    @cached_property
    def _fates(self) -> Fates:
        """Fates of the tokens of all arrays; reads lengths and masks."""
        held = count_held(self)
        if self.chosen is None:
            tokens = sum(int(self.store.axes[self.store.axis(key)].values[-1]) for key in self.parts)
        else:
            tokens = self._count_tokens(self.chosen)
        quarantined = self._count_tokens(self.excluded)
        dropped = {self.policy.drop_reason: tokens - held.tokens - quarantined, QUARANTINED: quarantined}
        return Fates(
            rows=self.num_rows,
            tokens=tokens,
            trained=held.trained,
            masked=held.tokens - held.trained,
            dropped={reason: number for reason, number in dropped.items() if number},
            padding=self.num_rows * self.row_slots - held.tokens,
        )

    def _count_tokens(self, records: Int64Array) -> int:
        """Return how many tokens some records have, over all arrays."""
        tokens = 0
        for begin, end in _blocks(records.size):
            for key in self.parts:
                items, _ = self.items(key, records[begin:end])
                tokens += int(locate(self.store, items, self.store.axis(key))[2].sum())
        return tokens

    def held(self, rows: Int64Array) -> TokenCounts:
        """Return what the given rows hold, over all arrays; reads lengths, and the masks of their tokens."""
        records = self.records(rows)
        tokens = trained = 0
        follows = np.zeros(records.size, np.bool_)
        for key, mask in self.parts.items():
            items, owner = self.items(key, records)
            shard, first, length = self.locate(key, items)
            tokens += int(length.sum())
            if self.store.axis(key) == "prompts":
                follows = length > 0
                continue
            # A token is a label where another stands before it: a response follows its prompt.
            skip = np.where(follows[owner], 0, 1)
            labels = np.maximum(0, length - skip)
            trained += (
                int(labels.sum()) if mask is None else count_ones(self.store, mask, shard, first + skip, labels)
            )
        return TokenCounts(tokens=tokens, trained=trained)

    def following(self, previous: Rows, seen: EpochProgress) -> RecordRows:
        """Return these rows, preceded by the records that an earlier stage has not drawn of an epoch."""
        before = previous
        assert isinstance(before, RecordRows), "the rows of a source keep their kind from stage to stage"
        after = describe_seen(self, before, seen)
        left = np.flatnonzero(seen.unseen(np.arange(seen.size)))
        rest = before.records(left + before.num_rows if seen.rest else left)
        return replace(self, rest=rest[self._have_rows(rest)], after=after)

    def _have_rows(self, records: Int64Array) -> BoolArray:
        """Return whether a row of an epoch holds each record."""
        return np.equal(self.holes.opened(self.holes.closed(records)), records)

    def rows_of(self, documents: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the row of each record, and that of the rest which holds it, with the index in `documents`."""
        self.check_documents(documents)
        kept = np.flatnonzero(self._have_rows(documents))
        left, of_left = self._rest_of(documents)
        owner = np.concatenate([kept, of_left])
        order = np.argsort(owner, kind="stable")
        return np.concatenate([self.holes.closed(documents[kept]), left])[order], owner[order]

    def _rest_of(self, records: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the rows of the rest that hold records, and the index in `records` of each."""
        places = np.argsort(self.rest, kind="stable")
        left = np.searchsorted(self.rest, records, side="left", sorter=places)
        in_rest = left < self.rest.size
        in_rest[in_rest] = self.rest[places[left[in_rest]]] == records[in_rest]
        return places[left[in_rest]] + self.num_rows, np.flatnonzero(in_rest)

    def rows_within_shard(
        self, axis: str, shard: int, begins: Int64Array, ends: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Return the rows that hold values of runs, `begins` to `ends` of a shard, and the run of each."""
        first, last, _, _ = items_within(self.store, axis, shard, begins, ends)
        if axis == "responses":
            # Responses are cut into records by the groups of the same shard.
            base = int(self.store.axes["groups"].values[shard])
            first, last, _, _ = items_within(self.store, "groups", shard, first - base, last - base + 1)
        count = np.maximum(0, last - first + 1)
        records, owner = counted_from(first, count), np.repeat(np.arange(begins.size), count)
        kept = self._have_rows(records)
        left, of_left = self._rest_of(records)
        return np.concatenate([self.holes.closed(records[kept]), left]), np.concatenate(
            [owner[kept], owner[of_left]]
        )

    def records(self, rows: Int64Array) -> Int64Array:
        """Return the record that each row holds."""
        self.check_rows(rows)
        records = self.holes.opened(rows)
        left = rows >= self.num_rows
        records[left] = self.rest[rows[left] - self.num_rows]
        return records

    def spans(self, rows: Int64Array) -> Spans:
        """Return the tokens of the first array of each row, in the order given."""
        records = self.records(rows)
        key = next(iter(self.parts))
        shard, token, length = self.locate(key, records)
        begins = locate(self.store, records, self.store.axis(key))[1]
        return Spans(
            first=np.arange(rows.size),
            count=np.ones(rows.size, np.int64),
            document=records,
            start=token - begins,
            length=length,
            shard=shard,
            token=token,
        )

    def fields(self, rows: Int64Array) -> dict[str, Runs]:
        """Return where each array of the given rows is, in the order given; of a group, a run for each response."""
        records = self.records(rows)
        single = {"first": np.arange(rows.size), "count": np.ones(rows.size, np.int64)}
        arrays = {}
        for key in self.parts:
            items, owner = self.items(key, records)
            shard, token, length = self.locate(key, items)
            places = single
            if items is not records:
                count = np.bincount(owner, minlength=rows.size)
                places = {"first": np.cumsum(count) - count, "count": count}
            arrays[key] = Runs(**places, shard=shard, token=token, length=length)
        if "rewards" in self.store.keys:
            shard, token, length = locate(self.store, records, "groups")
            arrays["rewards"] = Runs(**single, shard=shard, token=token, length=length)
        return arrays

    def items(self, key: str, records: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the items of an array that records have, and which of the records each belongs to."""
        if self.store.axis(key) != "responses":
            return records, np.arange(records.size)
        return responses_of(self.store, records)

    def starts(self, row: int) -> dict[str, list[int]]:
        """Return the first token of each item of each array that a row delivers, counted from the item's first."""
        record, starts = self.records(np.array([row])), {}
        for key in self.parts:
            items, _ = self.items(key, record)
            begins = locate(self.store, items, self.store.axis(key))[1]
            starts[key] = (self.locate(key, items)[1] - begins).tolist()
        return starts

    def locate(self, key: str, items: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return (shard, first token within it, number of tokens) of what rows deliver of items of an array."""
        shard, first, length = locate(self.store, items, self.store.axis(key))
        kept = np.minimum(length, self.seq_len)
        if self.policy.split == "truncate_start":
            first = first + length - kept
        return shard, first, kept

    def same_rows(self, rows: Int64Array, other: StoredRows, other_rows: Int64Array) -> BoolArray:
        """Return whether rows hold the same records as rows at another length, cut at the same places."""
        assert isinstance(other, RecordRows), "rows of one store are of one kind"
        own_records, other_records = self.records(rows), other.records(other_rows)
        same: BoolArray = own_records == other_records
        if self.policy.describe() == other.policy.describe():
            return same
        both = np.flatnonzero(same)
        for key in self.parts:
            items, owner = self.items(key, own_records[both])
            (_, first, length), (_, other_first, other_length) = self.locate(key, items), other.locate(key, items)
            same[both[owner[(first != other_first) | (length != other_length)]]] = False
        return same

    def _longer(self) -> Iterator[tuple[str, Int64Array, Int64Array]]:
        """Yield (array, records, lengths) of the items that have more tokens than a row delivers; reads lengths."""
        for begin, end in _blocks(self.store.num_documents):
            records = np.arange(begin, end)
            if self.chosen is not None:
                records = excluded_within(self.chosen, begin, end) + begin
            records = records[~are_excluded(self.excluded, records)]
            for key in self.parts:
                items, owner = self.items(key, records)
                length = locate(self.store, items, self.store.axis(key))[2]
                long = np.flatnonzero(length > self.seq_len)
                if long.size:
                    yield key, records[owner[long]], length[long]

    def _refuse_longer(self) -> None:
        longer = next(self._longer(), None)
        if longer is not None:
            key, records, lengths = longer
            raise ConfigError(
                f"{self.store.path}: {key} must have at most seq_len = {self.seq_len} tokens, got "
                f"{int(lengths[0])} in record {int(records[0])}; raise seq_len, or set on_long = "
                '"drop" or "truncate_end"'
            )


def responses_of(store: Store, records: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the responses that groups have, and which of the records each belongs to."""
    shard, first, number = locate(store, records, "groups")
    begins = store.axes["groups"].values[shard] + first
    return counted_from(begins, number), np.repeat(np.arange(records.size), number)


def _blocks(number: int) -> Iterator[tuple[int, int]]:
    """Cut a number of records into runs that are looked at together."""
    for begin in range(0, number, _BLOCK):
        yield begin, min(begin + _BLOCK, number)
