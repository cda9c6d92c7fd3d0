"""The worker process: tasks come in as lines of JSON, results go out as lines of JSON, until the input ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import orjson

from tokenmill import errors
from tokenmill.build.job import Job
from tokenmill.build.work import Bench, open_bench, run_unit, scan_unit, unit_from_json, unit_to_json
from tokenmill.documents import Unit
from tokenmill.errors import TokenmillError

# What a worker is asked to do with a unit: write its shards, or hash its records to find duplicates.


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One unit and what is to be done with it."""

    unit: Unit
    key: str
    """Name of what comes out."""
    scan: bool = False
    """Whether its records are hashed only."""
    fates: str | None = None
    """File that says what becomes of each record; None: all are taken."""

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {"unit": unit_to_json(self.unit), "key": self.key, "scan": self.scan, "fates": self.fates}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Task:
        """Read what `to_json` wrote."""
        return cls(**{**value, "unit": unit_from_json(value["unit"])})


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


def run_task(bench: Bench, task: Task, tick: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Do a task, and return what came out as a JSON object."""
    with seldom_collecting():
        if task.scan:
            return scan_unit(bench, task.unit, task.key, tick)
        fates = None if task.fates is None else np.frombuffer(Path(task.fates).read_bytes(), np.uint8)
        return run_unit(bench, task.unit, task.key, fates, tick).to_json()


def main() -> None:
    """Serve the process that started this one, and end with it."""
    # Results go through a descriptor of their own: what a library prints must not get between them.
    with os.fdopen(os.dup(1), "wb", buffering=0) as channel:
        os.dup2(2, 1)
        messages: SimpleQueue[dict[str, Any]] = SimpleQueue()
        Thread(target=_listen, args=(messages,), daemon=True).start()
        job = Job.from_json(messages.get())
        bench: Bench | None = None
        while True:
            task = Task.from_json(messages.get())
            try:
                bench = bench or open_bench(job)
                reply = orjson.dumps({"result": run_task(bench, task)})
            except TokenmillError as error:
                reply = orjson.dumps({"error": type(error).__name__, "message": str(error)})
            except Exception:  # a bug: the parent shows where
                reply = orjson.dumps({"error": "TokenmillError", "message": traceback.format_exc()})
            channel.write(reply + b"\n")


def _listen(messages: SimpleQueue[dict[str, Any]]) -> None:
    """Pass on what the parent sends; leave at once when it closes its end or dies, even amid a unit."""
    for line in sys.stdin.buffer:
        messages.put(orjson.loads(line))
    os._exit(0)


# Tasks in several processes, results in input order.
#
# Workers are fresh interpreters that are spoken to over pipes, and not a `ProcessPoolExecutor`: that one imports
# the user's main script again in each worker (which runs an unguarded script twice and loads all that it loads),
# leaves workers behind when the parent is killed, and cannot end one in the middle of its work.

TICK_SECONDS = 0.2
ONE_CORE = {
    **dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "FASTOKENS_BPE_THREADS": "1",  # fastokens has threads of its own beside Rayon's
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment that keeps the libraries of a process to one core: the parallelism is that of the processes."""


def run_here(
    bench: Bench, tasks: Iterable[Task], tick: Callable[[], None]
) -> Generator[tuple[Task, dict[str, Any]]]:
    """Do all tasks in this process, in order."""
    for task in tasks:
        yield task, run_task(bench, task, tick)


def run_in_processes(
    job: Job, tasks: Iterable[Task], workers: int, tick: Callable[[], None], *, lock: int
) -> Generator[tuple[Task, dict[str, Any]]]:
    """Do tasks in worker processes; results come in input order, errors too, so the first in order is raised.

    `tick` is called a few times a second. No process outlives the iterator: close it. Workers inherit `lock`, so
    that after a kill of this process no other build begins while one of them still writes.
    """
    pool = _Pool(job, lock)
    waiting: deque[tuple[Task, Future[dict[str, Any]]]] = deque()
    threads = ThreadPoolExecutor(workers, thread_name_prefix="tokenmill-prepare")
    try:
        # Tasks are handed over as workers are free; none waits for an earlier one that takes long.
        for task in tasks:
            waiting.append((task, threads.submit(pool.run, task)))
        while waiting:
            first, future = waiting.popleft()
            yield first, _wait(future, tick)
    finally:
        # Killed, not asked: a unit may be an hour's work. The threads then see the end of their pipes.
        pool.kill()
        threads.shutdown(cancel_futures=True)
        pool.close()


def _wait(future: Future[dict[str, Any]], tick: Callable[[], None]) -> dict[str, Any]:
    while True:
        try:
            return future.result(timeout=TICK_SECONDS)
        except TimeoutError:
            if future.done():
                raise
            tick()


class _Pool:
    """One process for each thread that asks."""

    def __init__(self, job: Job, lock: int) -> None:
        self._job = orjson.dumps(job.to_json()) + b"\n"
        self._inherited = lock
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closed = False

    def run(self, task: Task) -> dict[str, Any]:
        """Have this thread's process do a task."""
        process: subprocess.Popen[bytes] | None = getattr(self._mine, "process", None)
        message = orjson.dumps(task.to_json()) + b"\n"
        if process is None:
            process = self._mine.process = self._start()
            message = self._job + message
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(message)
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            raise _death(process, task)
        reply = orjson.loads(line)
        if "result" in reply:
            return dict(reply["result"])
        raise getattr(errors, reply["error"])(reply["message"])

    def kill(self) -> None:
        """End all processes, now."""
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.kill()

    def close(self) -> None:
        """Wait until all processes are gone, when no thread uses them any more."""
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):
                    pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        # The path is handed over as it is now, for a tokenmill that was found by changing it.
        program = f"import sys; sys.path[:] = {sys.path!r}; from tokenmill.build.worker import main; main()"
        with self._lock:
            if self._closed:
                raise TokenmillError("prepare: must be open to start a worker, got closed; run again")
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **ONE_CORE},
                pass_fds=(self._inherited,),
                # Ctrl-C reaches the parent alone, which ends the workers.
                process_group=0,
            )
            self._processes.append(process)
        return process


def _death(process: subprocess.Popen[bytes], task: Task) -> TokenmillError:
    code = process.wait()
    how = f"exit code {code}" if code >= 0 else f"an end by {signal.Signals(-code).name}"
    why = " (the system does this when memory runs out)" if code == -signal.SIGKILL else ""
    path = task.unit.pieces[0].file.path
    return TokenmillError(
        f"{path}: the worker process {process.pid} must live until its unit is done, got {how}{why}; "
        "run again, with fewer workers if memory is short"
    )
