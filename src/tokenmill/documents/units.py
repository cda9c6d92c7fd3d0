"""Input files, the units of work they are cut into, and the batches read from a unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenmill.errors import ConfigError

REASONS = ("json", "utf8", "missing_field", "not_text")
"""Why a record cannot be read: broken JSON, not UTF-8, no such field, a field that is not a string."""

BATCH_BYTES = 1 << 20
"""Texts and ids of a batch stay in the caches of a core: a tenth faster than 4 MiB (benchmarks/prepare.py)."""
BATCH_DOCUMENTS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """One file to read."""

    path: str
    """Absolute."""
    name: str
    """Path below the folder that all inputs share, with `/`: the same wherever that folder stands."""
    bytes: int
    """Size on disk when the inputs were listed; more is not read, less is an error."""
    suffix: str
    """The known ending that says what is in it, such as `.jsonl.gz`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A part of a file that is read on its own."""

    index: int
    """Place in the input order, from 0."""
    file: InputFile
    begin: int
    end: int
    """What is read of the file, end exclusive, in the measure of its format: bytes for lines, later row groups."""
    bytes: int
    """Its share of the file's bytes; the units of a file sum to its size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRecord:
    """A record that cannot be read."""

    line: int
    """Counted from 0 at the first line of the unit."""
    reason: str
    """One of `REASONS`."""
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentBatch:
    """Some consecutive records of a unit."""

    texts: Sequence[str]
    bad: Sequence[BadRecord]
    num_lines: int
    """Lines that were read for this batch: documents, bad records and blank lines."""
    position: int
    """Bytes of the file that have been read so far for this unit; for progress, not exact."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """How records become texts."""

    text_field: str = "text"
    """Where the text is in a record; dots go down: `a.b` is field b of the object in field a."""
    batch_bytes: int = BATCH_BYTES
    """A batch ends when its texts have this many characters; lines are taken some at a time, so it may have twice
    that, and more if one line has."""
    batch_documents: int = BATCH_DOCUMENTS
    """A batch ends when it has this many records; it has less than twice that."""

    def __post_init__(self) -> None:
        if not all(self.text_field.split(".")):
            raise ConfigError(
                f"text_field: must be a name or names joined by dots, got {self.text_field!r}; for example 'text'"
            )
        if self.batch_bytes < 1 or self.batch_documents < 1:
            raise ConfigError(
                "batch_bytes, batch_documents: must be at least 1, "
                f"got {self.batch_bytes}, {self.batch_documents}; leave them out"
            )


class Format(Protocol):
    """What is known of one kind of file."""

    def ranges(self, file: InputFile, chunk_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Cut a file: (begin, end, bytes) of each unit, in order."""

    def read(self, unit: Unit, options: ReadOptions) -> Iterator[DocumentBatch]:
        """Read a unit as a stream of batches; raises DocumentError where the file itself is broken."""
