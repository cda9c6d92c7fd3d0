"""Origins: the input file and line of each document, and the fields of its record that were kept.

A build records them for each unit as it runs (`OriginWriter`), in the folder of the unit, and publishes them with
the shards of the unit. `.origins/00007.bin` in a store describes the documents from shard 7 up to the next such
file: those of one unit. Documents of consecutive lines are one run, so the file grows with the records that were
left out, not with those that were taken. Kept fields take space for each document, as JSON.
`docs/reference/store-format.md` has the layout.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
import numpy as np
import xxhash

from tokenmill.errors import StoreCorruptError
from tokenmill.store import layout
from tokenmill.store.files import CheckedFile, make_folder
from tokenmill.store.layout import ORIGINS_FOLDER, WAY_OUT, Count, FileInfo, Manifest, is_shard_name
from tokenmill.store.maps import MappedFile
from tokenmill.store.sections import read_index, write_footed, write_section
from tokenmill.types import AnyArray, Int64Array, Uint8Array

if TYPE_CHECKING:
    from tokenmill.store.store import Store

ORIGINS_FORMAT = "tokenmill-origins-1"


RUNS, ENDS, KEPT = "runs", "kept-ends", "kept"
"""Files in the folder of a unit, and sections of what is published: runs of lines, where the kept fields of each
document end, and those fields."""
RUN = np.dtype([("document", "<u8"), ("line", "<u8"), ("input", "<u8")])
"""From this document on, counted from the first of the unit, documents are the lines from this one on of an input:
a piece of the unit while it is built, a file when it is published."""
_BLOCK = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a document came from."""

    file: str | None = None
    """Path of the input file below the folder that all inputs shared; None: the store does not say."""
    place: int | None = None
    """Its line, row, record or member in that file, counted from 1; None: the store does not say."""
    counts: str = "line"
    """What the place is counted in."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its record that were kept (`prepare --keep`)."""

    def __str__(self) -> str:
        """Name it for people: `web.jsonl:17`, `web.parquet row 17`, or the file alone."""
        if self.file is None or self.place is None:
            return self.file or "unknown"
        return f"{self.file}:{self.place}" if self.counts == "line" else f"{self.file} {self.counts} {self.place}"


class OriginWriter:
    """Writes where the documents of a unit come from, into an existing folder."""

    def __init__(self, folder: Path, *, keeps: bool) -> None:
        names = (RUNS, ENDS, KEPT) if keeps else (RUNS,)
        self._files = {name: CheckedFile(folder / name) for name in names}
        self._documents = self._kept_bytes = 0
        self._next = (-1, 0)

    def append(self, pieces: Int64Array, lines: Int64Array, kept: Sequence[bytes]) -> None:
        """Add documents, one at least: the piece and line of each, and the JSON of what is kept of it."""
        same_run = np.empty(pieces.size, np.bool_)
        same_run[0] = (int(pieces[0]), int(lines[0])) == self._next
        same_run[1:] = (np.diff(pieces) == 0) & (np.diff(lines) == 1)
        first = np.flatnonzero(~same_run)
        runs = np.empty(first.size, RUN)
        runs["document"], runs["line"], runs["input"] = first + self._documents, lines[first], pieces[first]
        self._files[RUNS].write(runs)
        self._documents += pieces.size
        self._next = int(pieces[-1]), int(lines[-1]) + 1
        if ENDS in self._files:
            ends = self._kept_bytes + np.cumsum([len(text) for text in kept])
            self._files[ENDS].write(ends.astype("<u8"))
            self._files[KEPT].write(np.frombuffer(b"".join(kept), np.uint8))
            self._kept_bytes = int(ends[-1])

    def close_files(self) -> None:
        """Keep no file open until more is appended."""
        for file in self._files.values():
            file.close()

    def sync(self) -> dict[str, FileInfo]:
        """Make all that was written durable; return size and checksum of each file."""
        return {name: file.sync() for name, file in self._files.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class _OriginsFooter:
    """What stands at the end of a published file, as JSON."""

    format: str
    inputs: tuple[tuple[str, str], ...]
    """Name of each input, and what its records are counted in."""
    documents: Count
    sections: Mapping[str, tuple[Count, Count, str]]
    """Section -> first byte, number of bytes, XXH3-128."""


def origins_file(store: Path, shard: int) -> Path:
    """Return the file that speaks of the documents of a unit whose first shard this is."""
    return store / ORIGINS_FOLDER / f"{shard:05d}.bin"


def publish_origins(folder: Path, file: Path, documents: int, pieces: Sequence[tuple[str, str, int]]) -> bool:
    """Publish what was noted in the folder of a unit: pieces become files, lines are counted from their start.

    Of each piece, `pieces` says the name of its file, what is counted there, and how many lines stand before it.
    It may be done twice; a unit that noted nothing gets nothing, and False is returned. The file is neither synced
    nor written under another name first: it is one among very many, and no manifest lists its shard yet.
    """
    if not os.path.exists(os.path.join(folder, RUNS)):
        return False
    numbers = {
        kind: number for number, kind in enumerate(dict.fromkeys((name, counts) for name, counts, _ in pieces))
    }
    inputs = np.array([numbers[name, counts] for name, counts, _ in pieces], np.uint64)
    begins = np.array([begin for _, _, begin in pieces], np.uint64)

    def resolved() -> Iterator[Uint8Array]:
        for block in _blocks(os.path.join(folder, RUNS), _BLOCK * RUN.itemsize):
            runs = block.view(RUN).copy()
            runs["line"] += begins[runs["input"]]
            runs["input"] = inputs[runs["input"]]
            yield runs.view(np.uint8)

    def write(out: BinaryIO) -> _OriginsFooter:
        sections = {RUNS: write_section(out, resolved())}
        for name in (ENDS, KEPT):
            if os.path.exists(noted := os.path.join(folder, name)):
                sections[name] = write_section(out, _blocks(noted, _BLOCK << 4))
        return _OriginsFooter(format=ORIGINS_FORMAT, inputs=tuple(numbers), documents=documents, sections=sections)

    make_folder(file.parent)
    with open(file, "wb") as out:
        write_footed(out, write)
    return True


def _blocks(file: str, size: int) -> Iterator[Uint8Array]:
    with open(file, "rb") as stream:
        while block := stream.read(size):
            yield np.frombuffer(block, np.uint8)


# Origins that are published.


def find_origin(shard: Path, document: int, begins: Int64Array) -> Origin | None:
    """Return where a document of a shard came from, in O(log n); None where nobody noted it.

    `begins` are the first documents of the shards up to this one, counted as the document is.
    """
    noted = _noted(shard, begins)
    return _find(noted[0], document - noted[1]) if noted else None


def _noted(shard: Path, begins: Int64Array) -> tuple[Path, int] | None:
    """Return the file that says where the documents of a shard came from, and the first document of its unit."""
    folder = shard.parent / ORIGINS_FOLDER
    if not is_shard_name(shard.name) or not folder.is_dir():
        return None
    number = layout.shard_number(shard.name)
    # Most often the very first: a unit has several shards only if it is larger than one may be.
    for back in range(min(number + 1, begins.size)):
        file = origins_file(shard.parent, number - back)
        if file.exists():
            return file, int(begins[-1 - back])
    return None


def kept_fields(store: Store, begin: int, end: int) -> Iterator[Mapping[str, Any]]:
    """Yield the fields that were kept of the records of documents `begin` to `end` (exclusive)."""
    shards = np.searchsorted(store.document_begins, [begin, end - 1], side="right") - 1
    for shard in range(int(shards[0]), int(shards[1]) + 1):
        first, last = (int(document) for document in store.document_begins[shard : shard + 2])
        first, last = max(begin, first), min(end, last)
        place = store._shard_place(shard)
        for files in store._remotes:
            if place is not None and place.parent == files.folder:
                files.download_origins(place.name)
        noted = _noted(place, store.document_begins[: shard + 1]) if place is not None else None
        if noted is None:
            yield from repeat({}, last - first)
            continue
        status = noted[0].stat()
        mapped, sections, footer = _open(noted[0], status.st_size, status.st_mtime_ns)
        known = max(first, min(last, noted[1] + footer.documents)) if ENDS in sections else first
        ends = sections[ENDS].view("<u8") if known > first else np.empty(0, np.uint64)
        for document in range(first - noted[1], known - noted[1]):
            start = int(ends[document - 1]) if document else 0
            yield _decoded(noted[0], sections[KEPT][start : int(ends[document])])
        mapped.check()
        yield from repeat({}, last - known)


def input_of(manifest: Manifest, document: int) -> Origin:
    """Return the input file of a document by how many each gave, in order: of stores that do not say more.

    Those of an earlier tokenmill and files of other projects do not; nor do all files of very many.
    """
    if sum(int(entry.get("documents", 0)) for entry in manifest.inputs) == manifest.documents:
        for entry in manifest.inputs:
            document -= int(entry.get("documents", 0))
            if document < 0:
                return Origin(file=str(entry.get("name")))
    return Origin()


def _find(file: Path, document: int) -> Origin | None:
    """Return where a document of a unit came from; None where the file speaks of fewer documents."""
    status = file.stat()
    mapped, sections, footer = _open(file, status.st_size, status.st_mtime_ns)
    if document >= footer.documents:
        return None
    runs = sections[RUNS].view(RUN)
    run = runs[max(0, int(np.searchsorted(runs["document"], document, side="right")) - 1)] if runs.size else None
    if run is None or run["input"] >= len(footer.inputs) or run["document"] > document:
        raise _bad_origins(file, "runs of other documents")
    name, counts = footer.inputs[int(run["input"])]
    kept: dict[str, Any] = {}
    if ENDS in sections:
        ends = sections[ENDS].view("<u8")
        begin, end = (int(ends[document - 1]) if document else 0), int(ends[document])
        kept = _decoded(file, sections[KEPT][begin:end])
    mapped.check()
    return Origin(file=name, place=int(run["line"]) + document - int(run["document"]) + 1, counts=counts, kept=kept)


def _decoded(file: Path, text: Uint8Array) -> dict[str, Any]:
    try:
        kept: dict[str, Any] = msgspec.json.decode(text.tobytes(), type=dict[str, Any])
    except ValueError as error:
        raise _bad_origins(file, error) from None
    return kept


@lru_cache(maxsize=4)
def _open(file: Path, _bytes: int, _time: int) -> tuple[MappedFile, dict[str, Uint8Array], _OriginsFooter]:
    """Map a file once for many documents; size and time are there to notice another under its name."""
    return _map(file)


def _map(file: Path) -> tuple[MappedFile, dict[str, Uint8Array], _OriginsFooter]:
    kept = read_index(file, _OriginsFooter)
    if kept is None or kept[1].format != ORIGINS_FORMAT:
        raise _bad_origins(file, "a cut or changed one")
    data, footer = kept[0].data, kept[1]
    sections = {name: data[begin : begin + size] for name, (begin, size, _) in footer.sections.items()}
    sizes = {RUNS: sections[RUNS].size // RUN.itemsize * RUN.itemsize} if RUNS in sections else {}
    if ENDS in sections or KEPT in sections:
        sizes |= {ENDS: 8 * footer.documents, KEPT: footer.sections.get(KEPT, (0, 0, ""))[1]}
    if {name: section.size for name, section in sections.items()} != sizes or RUNS not in sizes:
        raise _bad_origins(file, "sections of other sizes")
    # The kept fields are of any size: `verify` reads them.
    for name in {RUNS, ENDS} & sections.keys():
        if xxhash.xxh3_128_hexdigest(sections[name].data) != footer.sections[name][2]:
            raise _bad_origins(file, f"a flipped byte in {name}")
    kept[0].check()
    return kept[0], sections, footer


def _bad_origins(file: Path, got: object) -> StoreCorruptError:
    return StoreCorruptError(f"{file}: must say where documents came from, got {got}; {WAY_OUT}")


def check_origins(file: Path) -> None:
    """Read a published file through: checksums, and the order of what it says."""
    mapped, sections, footer = _map(file)
    if KEPT in sections:
        checksum = xxhash.xxh3_128_hexdigest(sections[KEPT].data)
        mapped.check()
        if checksum != footer.sections[KEPT][2]:
            raise _bad_origins(file, f"a flipped byte in {KEPT}")
    runs: AnyArray = sections[RUNS].view(RUN)
    ordered: Iterable[AnyArray] = (runs["document"], sections.get(ENDS, np.empty(0, np.uint8)).view("<u8"))
    if any((values[1:] < values[:-1]).any() for values in ordered) or (runs["input"] >= len(footer.inputs)).any():
        raise _bad_origins(file, "numbers out of order")
