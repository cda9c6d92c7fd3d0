"""Tasks of a build: the list of them in `units.jsonl`, and doing one by its index, in any process.

The list and the job file are all that a worker needs. What it does is in the folder of the build when it is done:
a unit, hashes, digests, or a note why the task failed. So it does not matter who does a task, or how often.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import xxhash

from tokenmill import __version__, errors
from tokenmill.build.job import Job, OpenJob, open_job
from tokenmill.build.journal import UNITS, Journal, UnitResult, read_signed, unit_results, write_signed
from tokenmill.build.notes import WorkerNotes, clear_failure, note_failure
from tokenmill.build.select import is_whole_scan
from tokenmill.build.unit import scan_unit, write_unit
from tokenmill.documents import Unit, content_digest
from tokenmill.documents.streams import is_changed
from tokenmill.errors import ConfigError, StoreCorruptError, StoreError, TokenmillError
from tokenmill.store.files import make_folder, write_atomically
from tokenmill.types import Uint8Array

Phase: TypeAlias = Literal["hash", "write"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A unit and what to do with it.

    `hash`: write the hashes of its records, to find duplicates. `write`: write its shards. `digest`: write the
    digests of its files.
    """

    kind: Literal["hash", "write", "digest"]
    unit: Unit
    key: str
    """Name of the result, unique in a list."""
    fates: str | None = None
    """Name of the file with the fates of its records; None if all are taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListHead:
    """First line of the list; all other lines are tasks."""

    version: str
    """Version of tokenmill that made the list; only this version does its tasks."""
    asked: Mapping[str, Any]
    """Arguments of the build, to compare with those of a part."""
    phase: Phase
    """`hash`: the list has the units whose records are hashed first; `write`: all other tasks."""
    job: str
    """Digest of the job, which names its file."""
    cut: Mapping[str, Any]
    """Fields of `CutInput` without the units."""
    units: int
    bytes: int
    """Size of the input in the units."""
    checksum: str
    """XXH3-128 of this line, without its checksum, and of all other lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskList:
    """The tasks of a phase; tasks are decoded when they are needed, because there may be 100,000."""

    head: ListHead
    lines: Sequence[bytes]

    def __len__(self) -> int:
        return len(self.lines)

    def task(self, index: int) -> Task:
        """Return a task."""
        return msgspec.json.decode(self.lines[index], type=Task)

    def tasks(self) -> Iterator[Task]:
        """Yield all tasks."""
        return (msgspec.json.decode(line, type=Task) for line in self.lines)


def write_list(
    journal: Journal,
    phase: Phase,
    tasks: Sequence[Task],
    job: bytes,
    cut: Mapping[str, Any],
    asked: Mapping[str, Any],
) -> TaskList:
    """Write the list of a phase and the job file; the lease of the folder must be held."""
    lines = [msgspec.json.encode(task) + b"\n" for task in tasks]
    units = [task.unit for task in tasks if task.kind != "digest"]
    head = ListHead(
        version=__version__,
        asked=asked,
        phase=phase,
        job=xxhash.xxh3_128_hexdigest(job),
        cut=cut,
        units=len(units),
        bytes=sum(unit.bytes for unit in units),
        checksum="",
    )
    head = replace(head, checksum=_checksum(head, lines))
    file = _job_file(journal, head)
    if not file.exists():
        write_atomically(file, job)
    if phase == "hash":
        make_folder(journal.scans)
    write_atomically(journal.folder / UNITS, (msgspec.json.encode(head) + b"\n", *lines))
    return TaskList(head=head, lines=lines)


def read_list(journal: Journal) -> TaskList | None:
    """Read the list; None if there is none."""
    path = journal.folder / UNITS
    try:
        first, *lines = path.read_bytes().splitlines(keepends=True)
        head = msgspec.json.decode(first, type=ListHead)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        head, lines = None, []
    if head is None or head.checksum != _checksum(head, lines):
        raise StoreCorruptError(
            f"{path}: its content is not what prepare wrote; run `tokenmill prepare --plan-only` again"
        )
    if head.version != __version__:
        raise ConfigError(
            f"{path}: all parts must be done by one version of tokenmill, got {__version__} for a list of "
            f"{head.version}; install that one, or run `tokenmill prepare --plan-only` again"
        )
    return TaskList(head=head, lines=lines)


def read_head(journal: Journal) -> ListHead | None:
    """Read the first line of the list; None if there is none, or it cannot be read."""
    with suppress(OSError, ValueError), (journal.folder / UNITS).open("rb") as file:
        return msgspec.json.decode(file.readline(), type=ListHead)
    return None


def read_job(journal: Journal, head: ListHead) -> bytes:
    """Return the job of a list as JSON."""
    file = _job_file(journal, head)
    try:
        job = file.read_bytes()
    except OSError as error:
        raise StoreError(
            f"{file}: a worker must find its job, got {error.strerror}; is the build over, and does this "
            "machine see the folder of the store under the same path?"
        ) from None
    if xxhash.xxh3_128_hexdigest(job) != head.job:
        raise StoreCorruptError(f"{file}: its content is not what prepare wrote; run again")
    return job


def _job_file(journal: Journal, head: ListHead) -> Path:
    return journal.folder / f"job-{head.job}.json"


def _checksum(head: ListHead, lines: Iterable[bytes]) -> str:
    """Return the checksum of a list. It covers the job, because a worker that has the list open has that job."""
    state = xxhash.xxh3_128(msgspec.json.encode(replace(head, checksum="")))
    for line in lines:
        state.update(line)
    return state.hexdigest()


# Results.


def finished_unit(journal: Journal, key: str) -> tuple[UnitResult, ...] | None:
    """Return the segments of a unit that is done; None if it is not."""
    results = unit_results(journal.units, key)
    return results if results and results[-1].is_last else None


def is_done(journal: Journal, task: Task) -> bool:
    """Return whether a task has a result that is whole."""
    if task.kind == "hash":
        return is_whole_scan(journal.scans / task.key)
    if task.kind == "digest":
        return read_digests(journal, task) is not None
    return finished_unit(journal, task.key) is not None


def read_digests(journal: Journal, task: Task) -> Mapping[str, str] | None:
    """Return path -> digest of the files of a task; None if it is not done, or its file is damaged."""
    try:
        table = read_signed(journal.digests / task.key)
    except StoreCorruptError:
        return None
    return None if table is None else dict(table["digests"])


# Doing a task.


def do_task(opened: OpenJob, task: Task, tick: Callable[[], None] = lambda: None) -> None:
    """Do a task. An error of tokenmill, such as a bad record, is written next to the results.

    It is not raised, because an engine would try the task again, as it does after a lost worker.
    """
    journal = opened.folder.parent
    try:
        with infrequent_gc():
            clear_failure(journal, task.key)
            if task.kind == "hash":
                scan_unit(opened, task.unit, task.key, tick)
            elif task.kind == "digest":
                _write_digests(journal, task, tick)
            else:
                fates = None if task.fates is None else _read_fates(journal / "fates" / task.fates)
                write_unit(opened, task.unit, task.key, fates, tick)
    except TokenmillError as error:
        if not note_failure(journal, task.key, type(error).__name__, str(error)):
            raise


def error_of(name: str, message: str) -> TokenmillError:
    """Return an error of tokenmill by the name of its class; unknown names become `TokenmillError`."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, TokenmillError):
        return kind(message)
    return TokenmillError(message)


def _write_digests(journal: Path, task: Task, tick: Callable[[], None]) -> None:
    """Write the digests of all bytes of files; empty for a file that has changed since it was listed."""
    notes = WorkerNotes(journal, task.key, task.unit.bytes)
    digests: dict[str, str] = {}
    before = 0

    def on_bytes(done: int) -> None:
        notes.write(before + done, 0, 0)
        tick()

    for file in (piece.file for piece in task.unit.pieces):
        digests[file.path] = "" if is_changed(file) else content_digest(file, on_bytes)
        before += file.bytes
    make_folder(journal / "digests")
    write_signed(journal / "digests" / task.key, {"digests": digests})


def _read_fates(file: Path) -> Uint8Array:
    """Read the fates of records, from a file named after the digest of its content."""
    data = file.read_bytes()
    if xxhash.xxh3_128_hexdigest(data) != file.name:
        raise StoreCorruptError(f"{file}: its content does not match its name; run the build again")
    return np.frombuffer(data, np.uint8)


@contextmanager
def infrequent_gc() -> Iterator[None]:
    """Raise the threshold of garbage collection, because records contain no cycles.

    Without it, collection takes a tenth of the time of a build (benchmarks/prepare.py).
    """
    before = gc.get_threshold()
    gc.set_threshold(100_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


ONE_CORE = {
    **dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "FASTOKENS_BPE_THREADS": "1",  # fastokens has threads of its own in addition to Rayon's
    "TOKENIZERS_PARALLELISM": "false",
    # Arrow's own pool returns memory between two batches and takes it again page by page. With it, a build from
    # Parquet is a twelfth slower (benchmarks/prepare.py).
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}
"""Environment of a worker: it keeps libraries to one core, because processes run in parallel."""
_open_list: tuple[str, TaskList] | None = None
"""List that this process read last, by its checksum."""
_open_job: tuple[str, OpenJob] | None = None
"""Job that this process opened last, by its digest."""


def run_index(out: str, checksum: str, index: int) -> None:
    """Do the task with an index of the list in `out`, in any process that sees its files.

    Its result is in the folder. Tasks may be done in any order, several times, and at once. A process reads a list
    and opens a job once.
    """
    global _open_list, _open_job  # noqa: PLW0603 - caches of one list and one job
    journal = Journal(Path(out))
    if _open_list is None or _open_list[0] != checksum:
        tasks = read_list(journal)
        if tasks is None or tasks.head.checksum != checksum:
            raise StoreError(f"{journal.folder / UNITS}: the build of this task is over; nothing is left to do")
        _open_list = checksum, tasks
    tasks = _open_list[1]
    if _open_job is None or _open_job[0] != tasks.head.job:
        for variable, value in ONE_CORE.items():
            os.environ.setdefault(variable, value)
        _open_job = tasks.head.job, open_job(msgspec.json.decode(read_job(journal, tasks.head), type=Job))
    do_task(_open_job[1], tasks.task(index))
