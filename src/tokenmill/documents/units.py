"""Input files, the pieces and units they are cut into, and the batches read from a unit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from tokenmill.errors import ConfigError
from tokenmill.tables import check_option
from tokenmill.types import Int64Array

BATCH_BYTES = 1 << 20
"""Texts and ids of a batch stay in the caches of a core: a tenth faster than 4 MiB (benchmarks/prepare.py)."""
BATCH_DOCUMENTS = 4096
MAX_RECORD_BYTES = 64 << 20
"""Keeps a worker below 1 GB, even if a tokenizer makes a token of every byte of a record."""
MAX_EXPANSION = 256
TEXT_UNITS = ("file", "line")
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
IN_MEMORY = (".items", ".table")
"""Suffixes of files that `prepare` writes from objects in memory; no file of the user's is one."""

Raw = TypeVar("Raw")


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """One file to read."""

    path: str
    """Absolute."""
    name: str
    """Path below the folder that all inputs share, with `/`. It does not depend on where that folder is."""
    bytes: int
    """Size on disk when the inputs were listed. Bytes added later are not read; a shorter file is an error."""
    suffix: str
    """Says how it is read, such as `.jsonl.gz` (see `inputs`)."""

    @property
    def label(self) -> str:
        """Name for messages: its path, or `records` for objects in memory."""
        return self.name if self.suffix in IN_MEMORY else self.path

    @property
    def compression(self) -> str:
        """Compression of the whole file, such as `.gz`; empty if there is none."""
        return next((ending for ending in COMPRESSED if self.suffix.endswith(ending)), "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of one file that is read on its own."""

    file: InputFile
    begin: int
    end: int
    """What is read, end exclusive, in the measure of the format: bytes of lines, row groups, record batches; 0 to 1
    for a whole file."""
    bytes: int
    """Its share of the file's bytes; the pieces of a file sum to its size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Consecutive pieces that are read together, as one unit of work."""

    index: int
    """Place in the input order, from 0."""
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        """Share of the bytes of the input."""
        return sum(piece.bytes for piece in self.pieces)


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRecord:
    """A record that cannot be read or encoded."""

    piece: int = 0
    """Index into the pieces of the unit."""
    line: int
    """Counted from 0 at the first line, row or record of the piece."""
    reason: str
    """A word to count by; where it cannot be read, one of `reasons.REASONS`."""
    detail: str
    count: int = 1
    """How many are lost: of CSV, all lines from a quote that does not end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """How records become documents."""

    text_field: str | None = "text"
    """Field of the text in a record. `a.b` is the field of that name, else field b of the object in field a. None:
    documents are whole records."""
    fields: tuple[str, ...] | None = None
    """With whole records: the fields that are needed, None for all. Columnar files read no others."""
    batch_bytes: int = BATCH_BYTES
    """A batch ends when its texts have this many characters; lines are taken some at a time, so it may have twice
    that, and more if one line has."""
    batch_documents: int = BATCH_DOCUMENTS
    """A batch ends when it has this many lines or rows; it has less than twice that."""
    max_record_bytes: int = MAX_RECORD_BYTES
    """Size limit of a line, cell, member or text file. A larger one is a bad record and is not kept in memory."""
    max_expansion: int = MAX_EXPANSION
    """How many times its size a file may hold of text, compressed or encoded; 4 GiB are always allowed."""
    text_unit: str = "file"
    """Document of a plain text file: the whole `file`, or each `line` that is not blank."""
    delimiter: str | None = None
    """Separator of the cells in CSV and TSV files. None: a comma, a tab."""
    skip_broken: bool = False
    """Whether a file that cannot be read to its end is a bad record where it breaks off; else it raises
    DocumentError."""

    def __post_init__(self) -> None:
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n'):
            raise ConfigError(
                f"delimiter: must be one character, no quote or newline, got {self.delimiter!r}; for example ';'"
            )
        if self.text_field is not None and not all(self.text_field.split(".")):
            raise ConfigError(
                f"text_field: must be a name or names joined by dots, got {self.text_field!r}; for example 'text'"
            )
        if self.text_field is not None and self.fields is not None:
            raise ConfigError(
                f"fields: must be given for whole records only, got {self.fields} and text_field "
                f"{self.text_field!r}; leave one of the two out"
            )
        if self.max_expansion < 1:
            raise ConfigError(f"max_expansion: must be at least 1, got {self.max_expansion}; leave it out")
        if self.batch_bytes < 1 or self.batch_documents < 1 or self.max_record_bytes < 1:
            raise ConfigError(
                "batch_bytes, batch_documents, max_record_bytes: must be at least 1, "
                f"got {self.batch_bytes}, {self.batch_documents}, {self.max_record_bytes}; leave them out"
            )
        check_option("text_unit", self.text_unit, TEXT_UNITS)


@dataclass(kw_only=True, slots=True)
class Group:
    """Consecutive records as a format reads them, before they are joined into batches.

    Each line, row or record is a document, bad or blank.
    """

    documents: list[Any] = field(default_factory=list)
    """Texts or whole records, as the options ask."""
    bad: list[BadRecord] = field(default_factory=list)
    """Lines are counted from the first of the group."""
    blank: list[int] = field(default_factory=list)
    """Lines that are neither documents nor bad, counted so too."""
    size: int = 0
    """Characters of the texts, or bytes of the records."""
    position: int = 0
    """Bytes of the piece that have been read so far."""

    @property
    def num_lines(self) -> int:
        """How many lines, rows or records there are."""
        return len(self.documents) + len(self.bad) + len(self.blank)

    def lines(self, first: int) -> Sequence[int]:
        """Return the line of each document, if that of the group is `first`."""
        lines = range(first, first + self.num_lines)
        if len(self.documents) == len(lines):
            return lines
        others = {*(record.line for record in self.bad), *self.blank}
        return [line for line in lines if line - first not in others]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Consecutive records of a batch that come from one piece."""

    begin: int
    """Index of its first document in the batch."""
    piece: int
    """Index into the pieces of the unit."""
    lines: Sequence[int]
    """Of each document: where it is in the piece, counted as bad records are."""
    num_lines: int
    """Lines, rows or records that were read: documents, bad records and blank lines."""

    @property
    def line_numbers(self) -> Int64Array:
        """The same lines as an array."""
        if isinstance(self.lines, range):  # as nearly always; numpy takes a range number by number
            return np.arange(self.lines.start, self.lines.stop)
        return np.array(self.lines, np.int64)


@dataclass(kw_only=True, slots=True)
class DocumentBatch:
    """Consecutive records of a unit: enough for one call of a tokenizer, whatever the sizes of files."""

    documents: list[Any] = field(default_factory=list)
    """Texts or whole records, as the options ask."""
    bad: list[BadRecord] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    """Origin of the documents, in order."""
    num_lines: int = 0
    """Lines, rows or records that were read."""
    size: int = 0
    """Characters of the texts, or bytes of the records."""
    position: int = 0
    """Bytes of the unit that have been read so far; for progress, not exact."""

    @property
    def pieces(self) -> list[int]:
        """The piece of each document."""
        return [run.piece for run in self.runs for _ in run.lines]

    @property
    def lines(self) -> list[int]:
        """The line of each document in its piece."""
        return [line for run in self.runs for line in run.lines]

    def places(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the piece of each of some documents, and its line in the piece."""
        begins = np.array([run.begin for run in self.runs])
        runs = np.searchsorted(begins, indices, side="right") - 1
        lines = np.concatenate([run.line_numbers for run in self.runs])
        return np.array([run.piece for run in self.runs])[runs], lines[indices]

    def place(self, index: int) -> tuple[int, int]:
        """Return piece and line of one document."""
        run = self.runs[bisect_right(self.runs, index, key=lambda run: run.begin) - 1]
        return run.piece, run.lines[index - run.begin]

    def add(self, group: Group, piece: int, first: int) -> None:
        """Append a group whose first record is at line `first` of piece `piece`."""
        num_lines = group.num_lines
        run = Run(begin=len(self.documents), piece=piece, lines=group.lines(first), num_lines=num_lines)
        self.runs.append(run)
        self.documents += group.documents
        self.bad += [replace(record, piece=piece, line=first + record.line) for record in group.bad]
        self.num_lines += num_lines
        self.size += group.size


class RecordError(Exception):
    """Why one record is bad: caught where its line is known."""

    def __init__(self, reason: str, detail: str, *, count: int = 1) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail
        self.count = count

    def at(self, line: int) -> BadRecord:
        """Return it as the bad record at a line."""
        return BadRecord(line=line, reason=self.reason, detail=self.detail, count=self.count)


def read_each(raws: Iterable[Raw], read: Callable[[Raw], object]) -> Group:
    """Read raw records one by one: those that raise RecordError are bad, those that are None are blank."""
    group = Group()
    for line, raw in enumerate(raws):
        try:
            document = read(raw)
        except RecordError as error:
            group.bad.append(error.at(line))
            continue
        if document is None:
            group.blank.append(line)
        else:
            group.documents.append(document)
    return group


def decode_utf8(raw: bytes) -> str:
    """Return the text of a raw record; raises RecordError."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise RecordError("utf8", f"{error.reason} at byte {error.start} of the record") from None


def whole(file: InputFile, chunk_bytes: int) -> Iterator[tuple[int, int, int]]:  # noqa: ARG001
    """Take a file as one piece, whatever its size."""
    yield 0, 1, file.bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A kind of file: how it is cut and read."""

    counts: str
    """Noun for its records in messages: `line`, `row`, `record`, `member`."""
    read: Callable[[Piece, ReadOptions], Iterator[Group]]
    """Reads a piece as a stream of groups; raises DocumentError where the file itself is broken."""
    ranges: Callable[[InputFile, int], Iterator[tuple[int, int, int]]] = whole
    """Cuts a file into pieces of about `chunk_bytes`: (begin, end, bytes) of each, in order."""
