"""Running tasks by their index: by worker processes, any executor, or in this process; results come in order."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from tokenmill.build.engines import Executor, LocalExecutor, UnitFuture
from tokenmill.build.job import Job, OpenJob
from tokenmill.build.journal import Journal, UnitResult
from tokenmill.build.notes import WorkerNote, read_failure, read_notes
from tokenmill.build.progress import Show, Step, units_done
from tokenmill.build.tasks import Task, TaskList, do_task, error_of, finished_unit, is_done, read_digests, run_index
from tokenmill.documents import BadRecord, Unit, place, read_unit
from tokenmill.encode.recipe import Recipe
from tokenmill.encode.recipe.encoder import TOO_LONG
from tokenmill.errors import ConfigError, DocumentError, TokenmillError, WorkerLostError, warn
from tokenmill.reasons import REASONS
from tokenmill.tables import check_types

TICK_SECONDS = 0.2
MAX_IN_FLIGHT = 4096
"""Number of tasks that are submitted and not yielded yet, which bounds the workers of an engine and its queue."""
STALL_SECONDS = 60.0
"""Seconds without progress of a unit after which there is a warning, and again each time they have doubled."""


def num_workers_of(workers: int | None, executor: Executor | None) -> int:
    """Return the number of processes to use, by default one per core; raise for an executor without `submit`."""
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise ConfigError(
            f"executor: must have submit(function, *args), as concurrent.futures has it, got {executor!r}; "
            "leave it out for the cores of this machine"
        )
    if workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers < 1:
        raise ConfigError(f"workers: must be at least 1, got {workers}; leave it out for one a core")
    return workers


def check_timeout(seconds: float | None) -> None:
    """Refuse what is no number of seconds."""
    check_types(unit_timeout=(seconds, int | float | None))
    if seconds is not None and not seconds > 0:
        raise ConfigError(
            f"unit_timeout: must be more than 0 seconds, got {seconds}; leave it out to wait for ever"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of a task."""

    task: Task
    is_resumed: bool
    """True if an earlier build had done it."""
    segments: tuple[UnitResult, ...] = ()
    """Segments of a unit that was written."""
    digests: Mapping[str, str] | None = None
    """Path -> digest of each file, of a task of digests."""


class WorkerPool:
    """Runs tasks by an engine, or in this process if one worker is enough.

    An executor of the user stays open when the pool is closed.
    """

    def __init__(
        self,
        job: Job,
        opened: OpenJob,
        num_workers: int,
        executor: Executor | None = None,
        unit_timeout: float | None = None,
        max_units: int = MAX_IN_FLIGHT,
    ) -> None:
        self.job = job
        self.opened = opened
        self._num_workers = num_workers
        self._executor = executor
        self._unit_timeout = unit_timeout
        self._max_units = max_units
        self._processes: LocalExecutor | None = None

    def close(self) -> None:
        """Kill the processes that it started."""
        if self._processes is not None:
            self._processes.close()

    def run(
        self, journal: Journal, tasks: TaskList, indices: Sequence[int], tick: Callable[[], None]
    ) -> Generator[int, None, None]:
        """Do tasks and yield their indices in order; stop after the first one that failed.

        `tick` is called several times per second.
        """
        num_workers = min(self._num_workers, len(indices))
        if self._executor is None and num_workers <= 1 and self._unit_timeout is None and not self._needs_process():
            for index in indices:
                do_task(self.opened, tasks.task(index), tick)
                yield index
            return
        executor: Executor
        if self._executor is None:
            executor = self._processes = self._processes or LocalExecutor()
            self._processes.grow(num_workers)
        else:
            executor = self._executor
        watch = UnitWatch(journal.workers, self._unit_timeout)
        yield from run_by(executor, journal, tasks, indices, tick, watch, max(self._max_units, 2 * num_workers))

    def _needs_process(self) -> bool:
        """Return whether records go through a chat template, whose limits only a worker can enforce."""
        return self.opened.encoder is not None and self.opened.encoder.chat is not None


def run_tasks(
    journal: Journal, tasks: TaskList, indices: Sequence[int], pool: WorkerPool, show: Show
) -> Generator[Outcome, None, None]:
    """Do the tasks with some indices that are not done yet; yield the outcome of all, in order.

    Raise the error of the first task, in order, that failed.
    """
    todo: list[int] = []
    left: set[str] = set()
    total, done = 0, (0, 0, 0)
    for index in indices:
        task = tasks.task(index)
        total += 0 if task.kind == "digest" else task.unit.bytes
        if not is_done(journal, task):
            todo.append(index)
            left.add(task.key)
    what: Step = "look for duplicates" if tasks.head.phase == "hash" else "prepare"
    is_new = set(todo)
    with (
        show(what, total, lambda: units_done(journal.workers, left, done)) as tick,
        closing(pool.run(journal, tasks, todo, tick)) as new,
    ):
        for index in indices:
            if index in is_new:
                next(new)
            outcome = _outcome(journal, tasks, index, pool, is_resumed=index not in is_new)
            left.discard(outcome.task.key)
            if outcome.task.kind != "digest":
                counts = [segment.counts for segment in outcome.segments]
                done = (
                    done[0] + outcome.task.unit.bytes,
                    done[1] + sum(each.documents for each in counts),
                    done[2] + sum(each.tokens for each in counts),
                )
            yield outcome
            tick()


def _outcome(journal: Journal, tasks: TaskList, index: int, pool: WorkerPool, *, is_resumed: bool) -> Outcome:
    """Return the outcome of a task; raise if it failed."""
    task = tasks.task(index)
    if task.kind == "hash" and (journal.scans / task.key).exists():
        return Outcome(task=task, is_resumed=is_resumed)
    if task.kind == "digest":
        digests = read_digests(journal, task)
        if digests is not None:
            return Outcome(task=task, is_resumed=is_resumed, digests=digests)
    if task.kind == "write":
        segments = finished_unit(journal, task.key)
        if segments is not None:
            return Outcome(task=task, is_resumed=is_resumed, segments=segments)
    raise _failure(journal, tasks, task, pool)


def _failure(journal: Journal, tasks: TaskList, task: Task, pool: WorkerPool) -> TokenmillError:
    """Return the error of a task that failed."""
    failure = read_failure(journal.folder, task.key)
    if failure is None:
        return WorkerLostError(f"{_named(task)}: its worker left no result; run again: it goes on from there")
    if failure.bad is not None:
        line = _lines_before(journal, tasks, task, failure.bad.piece, pool) + failure.bad.line
        return bad_record(task.unit, line, failure.bad, pool.job.recipe)
    return error_of(failure.error, failure.message)


def _lines_before(journal: Journal, tasks: TaskList, task: Task, piece: int, pool: WorkerPool) -> int:
    """Return the number of lines of a file before a piece; units without a result are read to count them."""
    path = task.unit.pieces[piece].file.path
    total = 0
    for other in tasks.tasks():
        if other.kind != task.kind:
            continue
        if other.unit.index > task.unit.index:
            break
        before = other.unit.pieces if other.unit.index < task.unit.index else task.unit.pieces[:piece]
        places = [number for number, other_piece in enumerate(before) if other_piece.file.path == path]
        segments = finished_unit(journal, other.key) if places else None
        if segments is not None:
            total += sum(segment.counts.lines[number] for segment in segments for number in places)
        elif places:
            unit = Unit(index=0, pieces=tuple(before[number] for number in places))
            total += sum(run.num_lines for batch in read_unit(unit, pool.opened.reading) for run in batch.runs)
    return total


def bad_record(unit: Unit, line: int, bad: BadRecord, recipe: Recipe) -> DocumentError:
    """Return the error that names a bad record by its file and line, the rule that it breaks, and the ways out."""
    reason = REASONS[bad.reason]
    skip = 'or skip bad ones with on_error="skip"'
    if bad.reason == TOO_LONG:  # it stops the build, whatever on_error says
        ways_out = 'raise max_seq_len=..., or say on_long="drop" or on_long="cut"'
    elif bad.reason in ("missing_field", "not_text") and recipe.name == "text":
        ways_out = (
            f"name the field of the text with text_field=..., or the recipe with recipe=... (chat, dpo), {skip}"
        )
    else:
        ways_out = f"{reason.way_out}, {skip}"
    where = place(unit.pieces[bad.piece], line)
    return DocumentError(f"{where}: {reason.rule}, got {bad.detail}; {ways_out}")


# Tasks by an engine.


class UnitWatch:
    """Watches units in progress, and warns of those that make none, whatever engine runs them.

    It reads the notes of workers. Before the first note of a unit, only local workers can tell that it was begun.
    """

    def __init__(self, folder: Path, timeout: float | None) -> None:
        """Watch the notes in a folder; after `timeout` seconds without progress, the build ends. None: never."""
        self._folder = folder
        self._timeout = timeout
        self._old_notes = read_notes(folder)
        """Notes of workers of an earlier build."""
        self._seen: dict[str, tuple[WorkerNote | None, float, float]] = {}
        """Key -> last note, its time, and the seconds after which a warning is next."""
        self._next_look = 0.0

    def check(self, tasks: Iterable[tuple[Task, UnitFuture]], is_running: Callable[[UnitFuture], bool]) -> None:
        """Check units in progress, if the last check is old."""
        begin = time.monotonic()
        if begin < self._next_look:
            return
        notes = read_notes(self._folder)
        now = time.monotonic()
        self._next_look = now + max(TICK_SECONDS, 50 * (now - begin))
        seen, self._seen = self._seen, {}
        for task, future in tasks:
            note = notes.get(task.key)
            if note == self._old_notes.get(task.key) and not is_running(future):
                continue
            last, since, warn_after = seen.get(task.key, (note, now, STALL_SECONDS))
            if last != note:
                since, warn_after = now, STALL_SECONDS
            silent = now - since
            if self._timeout is not None and silent > self._timeout:
                raise WorkerLostError(
                    f"{_named(task)}: no progress for {silent:.0f} s, and unit_timeout is {self._timeout:g} s; "
                    "find out why its worker is stuck, and run again: the build resumes"
                )
            if silent > warn_after:
                warn_after *= 2
                warn(f"{_named(task)}: no progress for {silent:.0f} s; unit_timeout=... ends a build that is stuck")
            self._seen[task.key] = note, since, warn_after


def _named(task: Task) -> str:
    """Return a name of a unit for people."""
    first = task.unit.pieces[0]
    return f"{first.file.path}, unit {task.unit.index + 1} from byte {first.begin:,} on"


def run_by(
    executor: Executor,
    journal: Journal,
    tasks: TaskList,
    indices: Sequence[int],
    tick: Callable[[], None],
    watch: UnitWatch | None = None,
    max_units: int = MAX_IN_FLIGHT,
) -> Iterator[int]:
    """Do tasks by an engine and yield their indices in order; raise if the worker of the next one was lost.

    No task waits for an earlier one, unless `max_units` are submitted or done and not yielded yet. After a failure,
    later tasks are cancelled, and at the end all. A task that cannot be cancelled may finish.
    """
    is_running = getattr(executor, "is_running", lambda _: False)
    out, checksum = str(journal.out.absolute()), tasks.head.checksum
    waiting = deque(indices)
    in_progress: dict[int, tuple[Task, UnitFuture]] = {}
    polled: dict[int, UnitFuture] = {}
    """Futures without a callback."""
    done_indices: SimpleQueue[int] = SimpleQueue()
    lost: dict[int, TokenmillError | None] = {}
    """Index of a task that is done -> error if its worker was lost."""
    try:
        for next_index in indices:
            while next_index not in lost:
                while waiting and len(in_progress) + len(lost) < max_units:
                    index = waiting.popleft()
                    future = _submit(executor, out, checksum, index)
                    in_progress[index] = tasks.task(index), future
                    if hasattr(future, "add_done_callback"):
                        future.add_done_callback(lambda _, index=index: done_indices.put(index))
                    else:
                        polled[index] = future
                for index in [index for index, future in polled.items() if future.done()]:
                    del polled[index]
                    done_indices.put(index)
                with suppress(Empty):
                    index = done_indices.get(timeout=TICK_SECONDS)
                    task, future = in_progress.pop(index)
                    lost[index] = error = _error_of_future(future, task.unit.pieces[0].file.path)
                    if error is not None or read_failure(journal.folder, task.key) is not None:
                        waiting.clear()  # all of them are later
                        _cancel(future for other, (_, future) in in_progress.items() if other > index)
                tick()
                if watch is not None:
                    watch.check(in_progress.values(), is_running)
            error = lost.pop(next_index)
            if error is not None:
                raise error
            yield next_index
    finally:
        _cancel(future for _, future in in_progress.values())


def _cancel(futures: Iterable[UnitFuture]) -> None:
    for future in list(futures):
        with suppress(Exception):  # of an engine that is gone
            future.cancel()


def _submit(executor: Executor, out: str, checksum: str, index: int) -> UnitFuture:
    try:
        return executor.submit(run_index, out, checksum, index)
    except TokenmillError:
        raise
    except Exception as error:
        raise _lost("the executor", error) from error


def _error_of_future(future: UnitFuture, path: str) -> TokenmillError | None:
    try:
        future.result()
    except TokenmillError as error:
        return error
    except Exception as error:
        lost = _lost(path, error)
        lost.__cause__ = error
        return lost
    return None


def _lost(where: str, error: Exception) -> WorkerLostError:
    message = " ".join(str(error).split())[:500] or "no message"
    return WorkerLostError(
        f"{where}: a worker must live until its unit is done, got {type(error).__name__}: {message}; "
        "run again: it goes on from there"
    )
