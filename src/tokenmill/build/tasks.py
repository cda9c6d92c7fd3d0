"""Tasks: a unit and what to do with it, done in any process that has the job and sees the files."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from tokenmill import errors
from tokenmill.build.job import Job, OpenJob, open_job
from tokenmill.build.journal import UnitResult
from tokenmill.build.unit import scan_unit, write_unit
from tokenmill.documents import Unit
from tokenmill.errors import StoreCorruptError, StoreError, TokenmillError
from tokenmill.store.files import write_atomically
from tokenmill.types import Uint8Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One unit and what is to be done with it.

    Where records depend on those before them, as duplicates do, every unit is a task twice: its records are hashed
    first, and when those of all units are, it is written.
    """

    unit: Unit
    key: str
    """Name of the result; no other task of a build has it."""
    scan: bool = False
    """Whether the records are only hashed."""
    fates: str | None = None
    """File that says what becomes of each record; None: all are taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The result of a task, or its error."""

    result: tuple[UnitResult, ...] | None = None
    """None where the records were only hashed."""
    error: tuple[str, str] | None = None
    """Class and message of an error of tokenmill: another try would end with the same."""


def run_unit(job: bytes, task: bytes) -> bytes:
    """Do a task of a job, in any process that sees its files: JSON in, JSON out.

    What it writes depends on the input and the options alone; tasks may be done in any order, several times, and at
    once. A process opens a job once. What tokenmill refuses, such as a record that cannot be read, is an answer and
    is not raised: an engine would try it again, as it does after a lost worker, and get the same.
    """
    try:
        answer = Answer(result=run_task(_opened(job), msgspec.json.decode(task, type=Task)))
    except TokenmillError as error:
        answer = Answer(error=(type(error).__name__, str(error)))
    return msgspec.json.encode(answer)


def read_answer(data: bytes) -> tuple[UnitResult, ...] | TokenmillError | None:
    """Return what `run_unit` answered: a result, or an error to be raised."""
    answer = msgspec.json.decode(data, type=Answer)
    if answer.error is None:
        return answer.result
    error: TokenmillError = getattr(errors, answer.error[0])(answer.error[1])
    return error


def run_task(opened: OpenJob, task: Task, tick: Callable[[], None] = lambda: None) -> tuple[UnitResult, ...] | None:
    """Do a task and return its result; None where records were only hashed."""
    with seldom_collecting():
        if task.scan:
            scan_unit(opened, task.unit, task.key, tick)
            return None
        fates = None if task.fates is None else _read_fates(Path(task.fates))
        return write_unit(opened, task.unit, task.key, fates, tick)


def _read_fates(file: Path) -> Uint8Array:
    """Read what becomes of each record, from a file named after the digest of its content."""
    data = file.read_bytes()
    if xxhash.xxh3_128_hexdigest(data) != file.name:
        raise StoreCorruptError(f"{file}: must hold what its name says, got other bytes; run the build again")
    return np.frombuffer(data, np.uint8)


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """Let Python seldom look for reference cycles: records come and go by the thousand, and none is part of one.

    Else that takes a tenth of the time of a build (benchmarks/prepare.py).
    """
    before = gc.get_threshold()
    gc.set_threshold(100_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


ONE_CORE = {
    **dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "FASTOKENS_BPE_THREADS": "1",  # fastokens has threads of its own beside Rayon's
    "TOKENIZERS_PARALLELISM": "false",
    # Its own pool gives memory back between two batches, and takes it again page by page: a build from Parquet is
    # a twelfth slower (benchmarks/prepare.py).
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}
"""Environment of a worker: it keeps libraries to one core, as the parallelism is that of the processes."""
_last_opened: tuple[str, OpenJob] | None = None
"""The job that this process has open, by its digest."""


def _opened(job: bytes) -> OpenJob:
    """Open a job, unless this process has it open: opening a tokenizer takes longer than many a unit."""
    global _last_opened  # noqa: PLW0603 - the cache of one job
    digest = xxhash.xxh3_128_hexdigest(job)
    if _last_opened is None or _last_opened[0] != digest:
        for variable, value in ONE_CORE.items():
            os.environ.setdefault(variable, value)
        table = msgspec.json.decode(job)
        if "file" in table:
            job = read_job_file(msgspec.convert(table, JobFile))
        _last_opened = digest, open_job(msgspec.json.decode(job, type=Job))
    return _last_opened[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFile:
    """A file that holds a job, for engines that would send the job along with every task."""

    file: str
    digest: str


def write_job_file(folder: Path, job: bytes) -> JobFile:
    """Write a job to a file; `run_unit` takes the reference to it, as JSON, in place of the job."""
    digest = xxhash.xxh3_128_hexdigest(job)
    file = folder / f"job-{digest}.json"
    if not file.exists():
        write_atomically(file, job)
    return JobFile(file=str(file.absolute()), digest=digest)


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
