"""Counts of documents, tokens and skipped records: of a unit, a build or a store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from tokenmill.documents import BadRecord

MAX_LISTED = 1000
"""Number of bad records that are listed; all are counted."""


class _HasReason(Protocol):
    @property
    def reason(self) -> str: ...


T = TypeVar("T", bound=_HasReason)


def extend_listed(listed: list[T], later: Iterable[T]) -> None:
    """List later bad records: the first `MAX_LISTED` of all, and after them one example per reason."""
    reasons = {record.reason for record in listed}
    for record in later:
        if len(listed) < MAX_LISTED or record.reason not in reasons:
            listed.append(record)
            reasons.add(record.reason)


def add_counts(total: dict[str, int], counts: Mapping[str, int]) -> None:
    """Add counts by name to a total."""
    for name, count in counts.items():
        total[name] = total.get(name, 0) + count


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedRecord:
    """A bad record as a manifest lists it."""

    file: str
    line: int
    """Number of the line, row or record in its file, from 1."""
    reason: str
    detail: str


@dataclass(kw_only=True, slots=True)
class Counts:
    """Totals over records in input order."""

    taken: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Route -> documents and tokens."""
    text_bytes: int = 0
    """Size of the documents' text as UTF-8."""
    truncated: int = 0
    """Records that were cut to `max_seq_len`."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Reason -> records that were left out."""
    notes: dict[str, int] = field(default_factory=dict)
    """Note -> documents for which it is true, such as tools that the chat template does not write."""
    noted: dict[str, dict[str, int]] = field(default_factory=dict)
    """Route -> note -> first document for which it is true."""
    listed: list[ListedRecord] = field(default_factory=list)
    """The first bad records; empty in the counts of a unit (see `UnitCounts.bad`)."""

    @property
    def documents(self) -> int:
        """Documents of all routes."""
        return sum(documents for documents, _ in self.taken.values())

    @property
    def tokens(self) -> int:
        """Tokens of all routes, including BOS and EOS."""
        return sum(tokens for _, tokens in self.taken.values())

    def take(self, route: str, documents: int, tokens: int) -> None:
        """Count documents of a route."""
        before = self.taken.get(route, (0, 0))
        self.taken[route] = before[0] + documents, before[1] + tokens

    def note_first(self, route: str, firsts: Mapping[str, int]) -> None:
        """Record for each note the first document for which it is true; numbers start at the next document."""
        before = self.taken.get(route, (0, 0))[0]
        noted = self.noted.setdefault(route, {})
        for name, document in firsts.items():
            noted.setdefault(name, before + document)

    def merge(self, later: Counts) -> None:
        """Add the counts of the records that follow."""
        for route, firsts in sorted(later.noted.items()):
            self.note_first(route, firsts)
        for route, (documents, tokens) in sorted(later.taken.items()):
            self.take(route, documents, tokens)
        self.text_bytes += later.text_bytes
        self.truncated += later.truncated
        add_counts(self.skipped, later.skipped)
        add_counts(self.notes, later.notes)
        extend_listed(self.listed, later.listed)


@dataclass(kw_only=True, slots=True)
class UnitCounts(Counts):
    """Counts of a unit, also by its pieces."""

    lines: list[int]
    """Lines of each piece."""
    pieces: dict[str, list[list[int]]] = field(default_factory=dict)
    """Route -> [piece, documents, tokens] of each piece that has documents there, in order."""
    bad: list[BadRecord] = field(default_factory=list)
    """The first bad records, as `extend_listed` selects them."""

    def add_bad(self, bad: Sequence[BadRecord]) -> None:
        """Count the bad records of a batch, and list the first."""
        for record in bad:
            add_counts(self.skipped, {record.reason: record.count})
        extend_listed(self.bad, sorted(bad, key=lambda record: (record.piece, record.line)))

    def take_from(self, piece: int, route: str, documents: int, tokens: int) -> None:
        """Count documents of a piece; pieces come in order."""
        self.take(route, documents, tokens)
        rows = self.pieces.setdefault(route, [])
        if not rows or rows[-1][0] != piece:
            rows.append([piece, 0, 0])
        rows[-1][1] += documents
        rows[-1][2] += tokens
