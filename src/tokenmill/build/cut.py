"""Input of a build in units, and the lists of tasks that they become."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import msgspec
import xxhash

from tokenmill import __version__
from tokenmill.build.job import OpenJob
from tokenmill.build.journal import Journal, unit_key
from tokenmill.build.select import TAKEN, fates_of, is_whole_scan
from tokenmill.build.state import Build
from tokenmill.build.tasks import Task, TaskList, read_job, write_list
from tokenmill.documents import InputFile, Piece, Unit, cut_files
from tokenmill.errors import StoreCorruptError
from tokenmill.fingerprint import digest
from tokenmill.store.files import write_atomically
from tokenmill.types import Uint8Array

DIGEST_BYTES = 64 << 20
DIGEST_FILES = 4096
"""Files whose digests are one task: together at least so many bytes, and at most so many files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CutInput:
    """Units of a build, and what the keys of their tasks depend on."""

    units: Sequence[Unit]
    versions: Mapping[str, str]
    """Path -> digest that stands for its content."""
    build_digest: str
    """Digest of the version of tokenmill and of the identity of the build."""
    scans: tuple[str, ...] = ()
    """Name of the hashes of each unit; empty if no record depends on another."""
    old_scans: tuple[str, ...] = ()
    """Names of the hashes of the files that are in the store already."""
    deduplicate: bool = False
    max_items: int | None = None


def cut_build(build: Build, opened: OpenJob) -> CutInput:
    """Cut the new files of a build into units."""
    chosen = opened.chosen
    text_unit = opened.reading.text_unit
    units = list(
        cut_files(build.files, chunk_bytes=build.chunk_bytes, skip_broken=not opened.stop, text_unit=text_unit)
    )
    build_digest = digest([__version__, dict(build.identity)])
    needs_scan = chosen.deduplicate or chosen.max_items is not None
    return CutInput(
        units=units,
        versions=build.versions,
        build_digest=build_digest,
        scans=tuple(unit_key(unit, build.versions, [build_digest, "scan"]) for unit in units) if needs_scan else (),
        old_scans=build.base.scans if build.base is not None and needs_scan else (),
        deduplicate=chosen.deduplicate,
        max_items=chosen.max_items,
    )


def write_tasks(journal: Journal, cut: CutInput, job: bytes, asked: Mapping[str, object]) -> TaskList:
    """Write the list of the phase that is next: `hash` while hashes of a unit are missing, `write` after that.

    The lease of the folder must be held.
    """
    needs_scan = any(not is_whole_scan(journal.scans / key) for key in cut.scans)
    if needs_scan:
        tasks = [Task(kind="hash", unit=unit, key=key) for unit, key in zip(cut.units, cut.scans, strict=True)]
    else:
        tasks = list(_with_digests(cut, _unit_tasks(journal, cut)))
        journal.drop_other_units({task.key for task in tasks})
    rest = {field.name: getattr(cut, field.name) for field in fields(cut) if field.name != "units"}
    return write_list(journal, "hash" if needs_scan else "write", tasks, job, rest, asked)


def write_next_tasks(journal: Journal, tasks: TaskList) -> TaskList:
    """Write the list of the phase that follows the phase `hash`; the lease of the folder must be held."""
    cut = msgspec.convert({**tasks.head.cut, "units": [task.unit for task in tasks.tasks()]}, CutInput)
    return write_tasks(journal, cut, read_job(journal, tasks.head), tasks.head.asked)


def _unit_tasks(journal: Journal, cut: CutInput) -> Iterator[Task]:
    """Yield the task of writing each unit. Of units with equal content, the second, third ... are numbered."""
    unit_fates: Sequence[Uint8Array | None] = _fates(journal, cut) if cut.scans else [None] * len(cut.units)
    copies: Counter[str] = Counter()
    for unit, fates in zip(cut.units, unit_fates, strict=True):
        name = ""
        if fates is not None and not bool((fates == TAKEN).all()):
            name = xxhash.xxh3_128_hexdigest(fates.data)
            journal.fates.mkdir(exist_ok=True)
            write_atomically(journal.fates / name, fates.tobytes())
        key = unit_key(unit, cut.versions, [cut.build_digest, name])
        copies[key] += 1
        if copies[key] > 1:
            key = digest([key, copies[key]])
        yield Task(kind="write", unit=unit, key=key, fates=name or None)


def _with_digests(cut: CutInput, tasks: Iterator[Task]) -> Iterator[Task]:
    """Yield tasks, and before the first unit of each file the task of its digest.

    So the last units are not followed by digests, whose time depends on the size of a file.
    """
    files = list({piece.file.path: piece.file for unit in cut.units for piece in unit.pieces}.values())
    groups = _digest_tasks(cut, files)
    known: set[str] = set()
    for task in tasks:
        while any(piece.file.path not in known for piece in task.unit.pieces):
            group = next(groups)
            known.update(piece.file.path for piece in group.unit.pieces)
            yield group
        yield task


def _digest_tasks(cut: CutInput, files: Sequence[InputFile]) -> Iterator[Task]:
    """Yield tasks of digests; small files share one."""
    pieces: list[Piece] = []
    size = 0
    for number, file in enumerate(files, 1):
        pieces.append(Piece(file=file, begin=0, end=1, bytes=file.bytes))
        size += file.bytes
        if size >= DIGEST_BYTES or len(pieces) == DIGEST_FILES or number == len(files):
            unit = Unit(index=0, pieces=tuple(pieces))
            paths = [piece.file.path for piece in pieces]
            yield Task(kind="digest", unit=unit, key=unit_key(unit, cut.versions, ["digest", digest(paths)]))
            pieces, size = [], 0


def _fates(journal: Journal, cut: CutInput) -> list[Uint8Array]:
    """Return the fates of the records of each unit, as if all files of the store were read before them."""
    paths = [journal.scans / key for key in (*cut.old_scans, *cut.scans)]
    if broken := [path for path in paths if not is_whole_scan(path)]:
        raise StoreCorruptError(
            f"{broken[0]}: must hold the hashes of records, to add files, got "
            f"{'other bytes than were written' if broken[0].exists() else 'nothing'}; start over with rebuild=True"
        )
    fates = fates_of(paths, deduplicate=cut.deduplicate, max_items=cut.max_items)
    return fates[len(cut.old_scans) :]
