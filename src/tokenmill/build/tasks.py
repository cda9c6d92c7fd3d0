"""The units of a build as tasks: how the input is cut, the key of each; and `run_unit`, which does one anywhere.

All of it is a function of the input and the options. Where records depend on those before them, as duplicates do,
every unit is a task twice: its records are hashed first, and when all are, each is written.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from tokenmill import __version__, errors
from tokenmill.build.job import ONE_CORE, Job, open_job
from tokenmill.build.journal import SIZE, Build, BuildSize, Journal, UnitResult, unit_key
from tokenmill.build.unit import TAKEN, OpenJob, fates_of, is_whole_scan, scan_unit, write_unit
from tokenmill.documents import Unit, cut_files
from tokenmill.errors import (
    StoreCorruptError,
    StoreError,
    TokenmillError,
)
from tokenmill.fingerprint import digest
from tokenmill.store.durable import write_atomically
from tokenmill.types import Uint8Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One unit and what is to be done with it."""

    unit: Unit
    key: str
    """Name of what comes out; no other task of a build has it."""
    scan: bool = False
    """Whether its records are hashed only."""
    fates: str | None = None
    """File that says what becomes of each record; None: all are taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CutInput:
    """The input of a build in units, and all that decides what becomes of them."""

    units: Sequence[Unit]
    versions: Mapping[str, str]
    """Path -> what stands for its content."""
    how: str
    """Stands for the version, the tokenizer, the recipe and the options."""
    scans: tuple[str, ...] = ()
    """Names of the hashes of the records of each unit; none where no record depends on another."""
    old_scans: tuple[str, ...] = ()
    """Those of the files that are in the store already."""
    deduplicate: bool = False
    max_items: int | None = None


def cut_build(build: Build, opened: OpenJob) -> CutInput:
    """Cut the new files of a build into units."""
    chosen = opened.chosen
    units = list(cut_files(build.files, chunk_bytes=build.chunk_bytes, skip_broken=not opened.stop))
    how = digest([__version__, dict(build.identity)])
    needs_scan = chosen.deduplicate or chosen.max_items is not None
    return CutInput(
        units=units,
        versions=build.versions,
        how=how,
        scans=tuple(unit_key(unit, build.versions, [how, "scan"]) for unit in units) if needs_scan else (),
        old_scans=build.base.scans if build.base is not None and needs_scan else (),
        deduplicate=chosen.deduplicate,
        max_items=chosen.max_items,
    )


def missing_scans(journal: Journal, cut: CutInput, *, there: Callable[[Path], bool] = is_whole_scan) -> list[Task]:
    """Return the units whose records are still to be hashed; of copies one is."""
    missing = {
        key: unit
        for unit, key in zip(cut.units if cut.scans else (), cut.scans, strict=True)
        if not there(journal.scans / key)
    }
    return [Task(unit=unit, key=key, scan=True) for key, unit in missing.items()]


def write_tasks(journal: Journal, cut: CutInput) -> list[Task]:
    """Return a task for each unit, each with a key of its own: of copies the second, third ... are numbered.

    All records that have to be must be hashed.
    """
    fates: Sequence[Uint8Array | None] = _fates(journal, cut) if cut.scans else [None] * len(cut.units)
    copies: Counter[str] = Counter()
    tasks: list[Task] = []
    for unit, each in zip(cut.units, fates, strict=True):
        name = "" if each is None or bool((each == TAKEN).all()) else xxhash.xxh3_128_hexdigest(each.data)
        key = unit_key(unit, cut.versions, [cut.how, name])
        copies[key] += 1
        if copies[key] > 1:
            key = digest([key, copies[key]])
        file = journal.fates / name
        if name and each is not None:
            file.parent.mkdir(exist_ok=True)
            write_atomically(file, each.tobytes())
        tasks.append(Task(unit=unit, key=key, fates=str(file.absolute()) if name else None))
    size = BuildSize(units=len(tasks), bytes=sum(task.unit.bytes for task in tasks))
    write_atomically(journal.folder / SIZE, msgspec.json.encode(size))
    return tasks


def _fates(journal: Journal, cut: CutInput) -> list[Uint8Array]:
    """Return what becomes of the records of each unit, as if all files of the store were read again before it."""
    paths = [journal.scans / key for key in (*cut.old_scans, *cut.scans)]
    if broken := [path for path in paths if not is_whole_scan(path)]:
        raise StoreCorruptError(
            f"{broken[0]}: must hold what was found out of records, to add files, got "
            f"{'other bytes than were written' if broken[0].exists() else 'nothing'}; start over with --rebuild"
        )
    fates = fates_of(paths, deduplicate=cut.deduplicate, max_items=cut.max_items)
    return fates[len(cut.old_scans) :]


def drop_others(journal: Journal, tasks: Sequence[Task]) -> None:
    """Remove units of inputs that are no longer asked for, finished or not."""
    known = {name for task in tasks for name in (task.key, f".tmp-{task.key}")}
    for folder in list(journal.units.iterdir()):
        if folder.name not in known:
            shutil.rmtree(folder)


# Doing a task, in any process.


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came of a task."""

    result: UnitResult | None = None
    """None where the unit was hashed only."""
    error: tuple[str, str] | None = None
    """Or an error of ours, by its class and message: another try would end with the same."""


def run_unit(job: bytes, task: bytes) -> bytes:
    """Do a task of a job, in any process that sees its files: JSON in, JSON out.

    What it writes is a function of the input and the options alone; it may be called in any order, several times,
    at once. A process opens a job once. A record that cannot be read, and all else that tokenmill refuses, is an
    answer and not raised: what an engine tries again, as it does with lost workers, cannot be mended that way.
    """
    try:
        answer = Answer(result=run_task(_opened(job), msgspec.json.decode(task, type=Task)))
    except TokenmillError as error:
        answer = Answer(error=(type(error).__name__, str(error)))
    return msgspec.json.encode(answer)


def read_answer(data: bytes) -> UnitResult | TokenmillError | None:
    """Return what `run_unit` answered: a result, or an error to be raised."""
    answer = msgspec.json.decode(data, type=Answer)
    if answer.error is None:
        return answer.result
    error: TokenmillError = getattr(errors, answer.error[0])(answer.error[1])
    return error


def run_task(opened: OpenJob, task: Task, tick: Callable[[], None] = lambda: None) -> UnitResult | None:
    """Do a task, and return what came of its unit; None where it was hashed only."""
    with seldom_collecting():
        if task.scan:
            scan_unit(opened, task.unit, task.key, tick)
            return None
        fates = None if task.fates is None else _read_fates(Path(task.fates))
        return write_unit(opened, task.unit, task.key, fates, tick)


def _read_fates(file: Path) -> Uint8Array:
    """Read what becomes of each record, from a file that is named by the digest of its content."""
    data = file.read_bytes()
    if xxhash.xxh3_128_hexdigest(data) != file.name:
        raise StoreCorruptError(f"{file}: must hold what its name says, got other bytes; run the build again")
    return np.frombuffer(data, np.uint8)


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """Let Python look for cycles seldom: records come and go by the thousand, and none is part of one.

    It takes a tenth of the time of a build else, much of it amid the tokenizer (benchmarks/prepare.py).
    """
    before = gc.get_threshold()
    gc.set_threshold(100_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


_last: tuple[str, OpenJob] | None = None
"""The job that this process has open, by its digest."""


def _opened(job: bytes) -> OpenJob:
    global _last  # noqa: PLW0603 - to open a tokenizer takes longer than many a unit
    name, before = xxhash.xxh3_128_hexdigest(job), _last
    if before is None or before[0] != name:
        for variable, value in ONE_CORE.items():
            os.environ.setdefault(variable, value)
        kind = msgspec.json.decode(job)
        if "file" in kind:
            job = read_job_file(msgspec.convert(kind, JobFile))
        before = _last = name, open_job(msgspec.json.decode(job, type=Job))
    return before[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFile:
    """Stands for a job that is in a file, for engines that would send it along with every unit."""

    file: str
    digest: str


def write_job_file(folder: Path, job: bytes) -> bytes:
    """Write a job to a file; return what stands for it in `run_unit`."""
    digest = xxhash.xxh3_128_hexdigest(job)
    file = folder / f"job-{digest}.json"
    if not file.exists():
        write_atomically(file, job)
    return msgspec.json.encode(JobFile(file=str(file.absolute()), digest=digest))


def read_job_file(reference: JobFile) -> bytes:
    """Return the job that a file holds."""
    try:
        job = Path(reference.file).read_bytes()
    except OSError as error:
        raise StoreError(
            f"{reference.file}: a worker must find its job, got {error.strerror}; is the build over, and does this "
            "machine see the folder of the store under the same path?"
        ) from None
    if xxhash.xxh3_128_hexdigest(job) != reference.digest:
        raise StoreCorruptError(f"{reference.file}: must be as prepare wrote it, got other content; run again")
    return job
