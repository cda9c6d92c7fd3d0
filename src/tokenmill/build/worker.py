"""Worker processes: each is handed the units of a job one by one, as lines of JSON, and answers in kind.

Workers are fresh interpreters that are spoken to over pipes, and not a `ProcessPoolExecutor`: that one imports the
user's main script again in each worker (which runs an unguarded script twice and loads all that it loads), leaves
workers behind when the parent is killed, and cannot end one in the middle of its work.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from types import TracebackType

import msgspec

from tokenmill import errors
from tokenmill.build.job import OpenJob
from tokenmill.build.journal import UnitResult
from tokenmill.build.unit import Task, run_task, run_unit
from tokenmill.errors import TokenmillError

TICK_SECONDS = 0.2
_ERROR = b"error "
"""Begins an answer that is no result, but the name and message of an error."""
ONE_CORE = {
    **dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "FASTOKENS_BPE_THREADS": "1",  # fastokens has threads of its own beside Rayon's
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment that keeps the libraries of a process to one core: the parallelism is that of the processes."""


class WorkerPool:
    """Processes that run the tasks of a job; this process alone, where one worker is enough.

    No process outlives the `with` block. Workers inherit `lock`, so that after a kill of this process no other
    build begins while one of them still writes.
    """

    def __init__(self, opened: OpenJob, num_workers: int, lock: int) -> None:
        self.opened = opened
        self._job = msgspec.json.encode(opened.job)
        self._num_workers = num_workers
        self._lock = lock
        self._workers: list[_Worker] = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Killed, not asked: a unit may be an hour's work.
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.close()

    def run(self, tasks: Sequence[Task], tick: Callable[[], None]) -> Iterator[UnitResult | None]:
        """Yield the results of tasks in their order; of errors the first in order is raised.

        `tick` is called a few times a second.
        """
        num_workers = min(self._num_workers, len(tasks))
        if num_workers <= 1:
            return (run_task(self.opened, task, tick) for task in tasks)
        return self.run_in_processes(tasks, num_workers, tick)

    def run_in_processes(
        self, tasks: Sequence[Task], num_workers: int, tick: Callable[[], None]
    ) -> Iterator[UnitResult | None]:
        """Run tasks in so many processes, those of an earlier call first."""
        while len(self._workers) < num_workers:
            self._workers.append(_Worker(self._job, self._lock))
        idle, waiting = self._workers[:num_workers], deque(tasks)
        answers: dict[str, UnitResult | TokenmillError | None] = {}
        with selectors.DefaultSelector() as busy:
            for task in tasks:
                while task.key not in answers:
                    # Tasks are handed over as workers are free; none waits for an earlier one that takes long.
                    while idle and waiting:
                        worker = idle.pop()
                        worker.send(waiting.popleft())
                        busy.register(worker.answers, selectors.EVENT_READ, worker)
                    for ready, _ in busy.select(TICK_SECONDS):
                        worker = ready.data
                        busy.unregister(worker.answers)
                        answer = answers[worker.task.key] = worker.receive()
                        if isinstance(answer, TokenmillError):
                            waiting.clear()  # all of them come after it
                        else:
                            idle.append(worker)
                    tick()
                answer = answers.pop(task.key)
                if isinstance(answer, TokenmillError):
                    raise answer
                yield answer


class _Worker:
    """One worker process, seen from its parent."""

    def __init__(self, job: bytes, lock: int) -> None:
        # The path is handed over as it is now, for a tokenmill that was found by changing it.
        program = f"import sys; sys.path[:] = {sys.path!r}; from tokenmill.build.worker import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ONE_CORE},
            pass_fds=(lock,),
            # Ctrl-C reaches the parent alone, which ends the workers.
            process_group=0,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._messages, self.answers = self.process.stdin, self.process.stdout
        self._unsent = job + b"\n"
        self.task: Task
        """What it works at, or did last."""

    def send(self, task: Task) -> None:
        """Hand it a task; that a process is gone shows when it should answer."""
        self.task = task
        with suppress(BrokenPipeError):
            self._messages.write(self._unsent + msgspec.json.encode(task) + b"\n")
            self._messages.flush()
        self._unsent = b""

    def receive(self) -> UnitResult | TokenmillError | None:
        """Return what it answers, or the error that it ended with."""
        line = self.answers.readline()
        if not line.endswith(b"\n"):
            return self._death()
        if line.startswith(_ERROR):
            name, message = msgspec.json.decode(line.removeprefix(_ERROR), type=tuple[str, str])
            error: TokenmillError = getattr(errors, name)(message)
            return error
        return msgspec.json.decode(line, type=UnitResult | None)

    def close(self) -> None:
        """Wait until a killed process is gone."""
        self.process.wait()
        for pipe in (self._messages, self.answers):
            with suppress(BrokenPipeError):
                pipe.close()

    def _death(self) -> TokenmillError:
        code = self.process.wait()
        how = f"exit code {code}" if code >= 0 else f"an end by {signal.Signals(-code).name}"
        why = " (the system does this when memory runs out)" if code == -signal.SIGKILL else ""
        path = self.task.unit.pieces[0].file.path
        return TokenmillError(
            f"{path}: the worker process {self.process.pid} must live until its unit is done, got {how}{why}; "
            "run again, with fewer workers if memory is short"
        )


def main() -> None:
    """Serve the process that started this one, and end with it."""
    # Results go through a descriptor of their own: what a library prints must not get between them.
    with os.fdopen(os.dup(1), "wb", buffering=0) as channel:
        os.dup2(2, 1)
        messages: SimpleQueue[bytes] = SimpleQueue()
        Thread(target=_listen, args=(messages,), daemon=True).start()
        job = messages.get()
        while True:
            task = messages.get()
            try:
                answer = run_unit(job, task)
            except TokenmillError as error:
                answer = _ERROR + msgspec.json.encode((type(error).__name__, str(error)))
            except Exception:  # a bug: the parent shows where
                answer = _ERROR + msgspec.json.encode(("TokenmillError", traceback.format_exc()))
            channel.write(answer + b"\n")


def _listen(messages: SimpleQueue[bytes]) -> None:
    """Pass on what the parent sends; leave at once when it closes its end or dies, even amid a unit."""
    for line in sys.stdin.buffer:
        messages.put(line)
    os._exit(0)
