"""Excluded documents: the numbers of the other documents, or of their tokens, close up over them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from tokenmill.errors import ConfigError
from tokenmill.types import BoolArray, Int64Array

QUARANTINED = "quarantined"
"""Key of a description, and the reason for which tokens of excluded documents are dropped."""


class Documents(Protocol):
    """Documents to pack: those of a store, or of a window of live text."""

    @property
    def path(self) -> Path:
        """Path of the documents, for errors."""
        ...

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        ...

    def document_offsets(self, begin: int, end: int) -> Int64Array:
        """Return where documents `begin` to `end` (exclusive) start, and where the last one ends."""
        ...


def check_excluded(store: Documents, excluded: Int64Array) -> None:
    """Raise if excluded documents are not in the store, not in order, or repeated."""
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
    """Return whether each document is excluded."""
    if not excluded.size:
        return np.zeros(documents.size, np.bool_)
    place = np.minimum(np.searchsorted(excluded, documents), excluded.size - 1)
    return np.equal(excluded[place], documents)


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
    """Sum of the lengths of the holes before each hole, then of all holes."""

    @property
    def size(self) -> int:
        """Number of numbers that are left out."""
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
