"""Tasks in several processes, results in input order.

Workers are fresh interpreters that are spoken to over pipes, and not a `ProcessPoolExecutor`: that one imports
the user's main script again in each worker (which runs an unguarded script twice and loads all that it loads),
leaves workers behind when the parent is killed, and cannot end one in the middle of its work.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import orjson

from tokenmill import errors
from tokenmill.errors import TokenmillError
from tokenmill.prepare.task import Task, run_task

if TYPE_CHECKING:
    from tokenmill.prepare.bench import Bench
    from tokenmill.prepare.job import Job

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
        program = f"import sys; sys.path[:] = {sys.path!r}; from tokenmill.prepare.worker import main; main()"
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
