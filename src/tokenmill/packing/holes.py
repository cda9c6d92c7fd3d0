"""What a quarantine leaves out of a store, and how the numbers of what stays close up over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from tokenmill.errors import ConfigError
from tokenmill.store.locate import locate

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.store.reader import Store

QUARANTINED = "quarantined"
"""Key of a description, and the reason for which tokens of excluded documents are dropped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holes:
    """Runs of numbers that are left out, so that the others close up over them.

    A number is open as the store counts it, and closed as if the holes had never been. A lookup is a binary search.

    >>> holes = holes_of(np.array([2, 3, 7]), np.array([1, 1, 2]))
    >>> holes.opened(np.arange(6)).tolist(), holes.closed(np.array([1, 4, 9])).tolist()
    ([0, 1, 4, 5, 6, 9], [1, 2, 5])
    """

    begins: npt.NDArray[np.int64]
    """First open number of each hole; between two holes there is at least one number."""
    places: npt.NDArray[np.int64]
    """The closed number that comes right behind each hole, ascending."""
    before: npt.NDArray[np.int64]
    """How many numbers the holes before each hole have, and all together: one more than there are holes."""

    @property
    def size(self) -> int:
        """How many numbers are left out."""
        return int(self.before[-1])

    def opened(self, closed: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the open number of each closed one."""
        return closed + self.before[np.searchsorted(self.places, closed, side="right")]

    def closed(self, opened: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the closed number of each open one; within a hole, that of the first number behind it."""
        if not self.begins.size:
            return opened
        hole = np.searchsorted(self.begins, opened, side="right") - 1
        inside = np.minimum(self.before[hole + 1], self.before[hole] + opened - self.begins[hole])
        return opened - np.where(hole < 0, 0, inside)

    def runs(
        self, begins: npt.NDArray[np.int64], length: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
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
        # A part begins behind a hole and ends before the next one, but for the first and the last of a run.
        start, end = self.places[hole - 1], self.places[np.minimum(hole, self.begins.size - 1)]
        start[heads] = begins
        end[heads + count - 1] = begins + length
        return start + self.before[hole], end - start, count


def holes_of(begins: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Holes:
    """Make holes of ascending runs (first number, length); those that touch become one, empty ones none."""
    begins, lengths = begins[lengths > 0], lengths[lengths > 0]
    heads = np.flatnonzero(np.concatenate([[True], begins[1:] != begins[:-1] + lengths[:-1]])[: begins.size])
    ends = np.concatenate([[0], np.cumsum(lengths)])
    before = ends[np.append(heads, begins.size)]
    return Holes(begins=begins[heads], places=begins[heads] - before[:-1], before=before)


def token_holes(store: Store, excluded: npt.NDArray[np.int64] | None) -> Holes:
    """Return what excluded documents leave out of the stream of tokens."""
    if excluded is None or not excluded.size:
        return NO_HOLES
    shard, first, length = locate(store, excluded)
    return holes_of(store.token_begins[shard] + first, length)


def record_holes(excluded: npt.NDArray[np.int64] | None) -> Holes:
    """Return what excluded records leave out of the numbers of all records."""
    if excluded is None or not excluded.size:
        return NO_HOLES
    return holes_of(excluded, np.ones_like(excluded))


NO_HOLES = holes_of(np.empty(0, np.int64), np.empty(0, np.int64))


def check_excluded(store: Store, excluded: npt.NDArray[np.int64] | None) -> None:
    """Refuse excluded documents that are not in the store, not in order, or named twice."""
    if excluded is None or not excluded.size:
        return
    assert excluded.dtype == np.int64, "their bytes are what the description of the rows is made of"
    size = store.num_documents
    outside = excluded[(excluded < 0) | (excluded >= size)]
    if outside.size:
        raise ConfigError(
            f"{store.path}: a quarantined document must be one of the store's {size}, 0:{size}, "
            f"got {int(outside[0])}; count from 0"
        )
    wrong = np.flatnonzero(excluded[1:] <= excluded[:-1])
    if wrong.size:
        before, after = excluded[wrong[0] : wrong[0] + 2].tolist()
        raise ConfigError(
            f"{store.path}: quarantined documents, of {size}, must be named once each, in ascending order, "
            f"got {after} after {before}; sort them, and leave repeated ones out"
        )


def describe_excluded(excluded: npt.NDArray[np.int64] | None) -> dict[str, int | str | bool]:
    """Return what tells rows without these documents from others, as JSON; nothing where there are none."""
    if excluded is None or not excluded.size:
        return {}
    numbers = np.ascontiguousarray(excluded, dtype="<i8")
    return {QUARANTINED: f"{excluded.size}:{xxhash.xxh3_128_hexdigest(numbers.data)}"}


def excluded_within(excluded: npt.NDArray[np.int64] | None, begin: int, end: int) -> npt.NDArray[np.int64]:
    """Return which of documents `begin` to `end` (exclusive) are excluded, counted from `begin`."""
    if excluded is None:
        return np.empty(0, np.int64)
    first, last = np.searchsorted(excluded, [begin, end])
    return excluded[first:last] - begin


def are_excluded(excluded: npt.NDArray[np.int64] | None, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Say of each document whether it is excluded."""
    if excluded is None or not excluded.size:
        return np.zeros(documents.size, np.bool_)
    place = np.minimum(np.searchsorted(excluded, documents), excluded.size - 1)
    found: npt.NDArray[np.bool_] = excluded[place] == documents
    return found
