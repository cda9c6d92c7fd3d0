"""What runs units elsewhere than in this process: worker processes of this machine, any executor, or Ray.

An engine is anything with `submit(function, *arguments) -> future`, as `concurrent.futures` has it. It runs
`run_unit` with bytes, in any order, and may do a unit more than once.

The workers of this machine are fresh interpreters that read from pipes, and not a `ProcessPoolExecutor`: that one
imports the user's main script again in each worker (which runs an unguarded script twice and loads all that it
loads), leaves workers behind when the parent is killed, and cannot end one in the middle of its work.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from types import TracebackType
from typing import Any, Protocol

import msgspec

from tokenmill.build.journal import UnitResult
from tokenmill.build.notes import read_notes
from tokenmill.build.tasks import ONE_CORE, Answer, Task, read_answer, run_unit
from tokenmill.encode.chat import tracked
from tokenmill.errors import ConfigError, MissingExtraError, TokenmillError, WorkerLostError, warn

TICK_SECONDS = 0.2
MAX_IN_FLIGHT = 4096
"""Most units that are submitted and not done: an engine may have as many workers, and its queue stays short."""
STALL_SECONDS = 60.0
"""After how long without progress there is a warning of a unit, and again each time that has doubled."""


class UnitFuture(Protocol):
    """What `submit` returns. One without `add_done_callback`, as of submitit, is polled."""

    def done(self) -> bool:
        """Tell whether there is a result, or an error."""

    def result(self) -> bytes:
        """Return the result, or raise the error."""

    def cancel(self) -> object:
        """Give up the result; a unit that runs already may go on."""


class Executor(Protocol):
    """Runs units somewhere: one of `concurrent.futures`, dask, mpi4py, loky, submitit, or Ray (`RayExecutor`)."""

    def submit(self, function: Callable[[bytes, bytes], bytes], job: bytes, task: bytes, /) -> UnitFuture:
        """Have a function called with these arguments, later and elsewhere."""


class UnitWatch:
    """Watches the units that are under way, and warns of those that make no progress, whatever engine runs them.

    It reads the files in which workers note how far they are. Before the first note of a unit, only the workers of
    this machine can tell that it was begun.
    """

    def __init__(self, folder: Path, timeout: float | None) -> None:
        """Watch the notes in a folder; `timeout` seconds without progress end the build, None: never."""
        self._folder = folder
        self._timeout = timeout
        self._old_notes = read_notes(folder)
        """Of workers of an earlier try."""
        self._seen: dict[str, tuple[object, float, float]] = {}
        """Key -> its last note, since when that is the last, and after how many seconds there is a warning next."""
        self._next_look = 0.0

    def look(self, tasks: Iterable[Task], is_running: Callable[[str], bool]) -> None:
        """Look at units under way, if the last look is a while ago."""
        begin = time.monotonic()
        if begin < self._next_look:
            return
        notes = read_notes(self._folder)
        now = time.monotonic()
        self._next_look = now + max(TICK_SECONDS, 50 * (now - begin))
        seen, self._seen = self._seen, {}
        for task in tasks:
            note = notes.get(task.key)
            if note == self._old_notes.get(task.key) and not is_running(task.key):
                continue
            last, since, warn_after = seen.get(task.key, (note, now, STALL_SECONDS))
            if last != note:
                since, warn_after = now, STALL_SECONDS
            silent = now - since
            if self._timeout is not None and silent > self._timeout:
                raise WorkerLostError(
                    f"{_named(task)}: a unit must make progress within {self._timeout:g} s, got none for "
                    f"{silent:.0f} s; see what its worker is at, and run again: it goes on from there"
                )
            if silent > warn_after:
                warn_after *= 2
                warn(f"{_named(task)}: no progress for {silent:.0f} s; unit_timeout=... ends a build that is stuck")
            self._seen[task.key] = note, since, warn_after


def _named(task: Task) -> str:
    """Name a unit by its file and where it begins there."""
    first = task.unit.pieces[0]
    return f"{first.file.path}, unit {task.unit.index + 1} from byte {first.begin:,} on"


def run_by(
    executor: Executor,
    job: bytes,
    tasks: Sequence[Task],
    tick: Callable[[], None],
    watch: UnitWatch | None = None,
) -> Iterator[tuple[UnitResult, ...] | None]:
    """Have tasks done by an engine; yield the results in their order, and raise the first error in order.

    No task waits for an earlier one that takes long. After an error the tasks behind it are cancelled, and at the
    end all that are under way; what cannot be cancelled is done in vain at worst.
    """
    is_running = getattr(executor, "is_running", lambda _: False)
    waiting = deque(tasks)
    under_way: dict[str, UnitFuture] = {}
    polled: dict[str, UnitFuture] = {}
    """Those of them that have no callback."""
    done_keys: SimpleQueue[str] = SimpleQueue()
    answers: dict[str, tuple[UnitResult, ...] | TokenmillError | None] = {}
    places = {task.key: index for index, task in enumerate(tasks)}
    try:
        for task in tasks:
            while task.key not in answers:
                while waiting and len(under_way) < MAX_IN_FLIGHT:
                    key, message = waiting[0].key, msgspec.json.encode(waiting.popleft())
                    future = under_way[key] = _submit(executor, job, message)
                    if hasattr(future, "add_done_callback"):
                        future.add_done_callback(lambda _, key=key: done_keys.put(key))
                    else:
                        polled[key] = future
                for key in [key for key, future in polled.items() if future.done()]:
                    del polled[key]
                    done_keys.put(key)
                with suppress(Empty):
                    key = done_keys.get(timeout=TICK_SECONDS)
                    first = tasks[places[key]].unit.pieces[0]
                    answers[key] = answer = _result(under_way.pop(key), first.file.path)
                    if isinstance(answer, TokenmillError):
                        waiting.clear()  # all of them come after it
                        _cancel(under_way[other] for other in under_way if places[other] > places[key])
                tick()
                if watch is not None:
                    watch.look((tasks[places[key]] for key in under_way), lambda key: is_running(under_way[key]))
            answer = answers.pop(task.key)
            if isinstance(answer, TokenmillError):
                raise answer
            yield answer
    finally:
        _cancel(under_way.values())


def _cancel(futures: Iterable[UnitFuture]) -> None:
    for future in list(futures):
        with suppress(Exception):  # of an engine that is gone
            future.cancel()


def _submit(executor: Executor, job: bytes, message: bytes) -> UnitFuture:
    try:
        return executor.submit(run_unit, job, message)
    except TokenmillError:
        raise
    except Exception as error:
        raise _lost("the executor", error) from error


def _result(future: UnitFuture, path: str) -> tuple[UnitResult, ...] | TokenmillError | None:
    try:
        return read_answer(future.result())
    except TokenmillError as error:
        return error
    except Exception as error:
        lost = _lost(path, error)
        lost.__cause__ = error
        return lost


def _lost(where: str, error: Exception) -> WorkerLostError:
    message = " ".join(str(error).split())[:500] or "no message"
    return WorkerLostError(
        f"{where}: a worker must live until its unit is done, got {type(error).__name__}: {message}; "
        "run again: it goes on from there"
    )


# Worker processes of this machine.


class LocalExecutor:
    """Worker processes of this machine: each gets units one by one, as lines of JSON, and answers in the same way.

    A unit whose worker is ended by a signal is tried once more, by another process.
    The workers end with it, and with the process that started them, however that ends.
    """

    sends_once = True
    """The job goes to each worker once, not with every unit."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[bytes, bytes, Future[bytes]] | None] = SimpleQueue()
        self._workers: list[_Worker] = []

    def grow(self, num_workers: int) -> None:
        """Start workers until there are so many."""
        while len(self._workers) < num_workers:
            self._workers.append(_Worker(self._waiting))

    def submit(self, function: Callable[[bytes, bytes], bytes], job: bytes, task: bytes, /) -> Future[bytes]:
        """Have a unit done by the first worker that is free; workers know no other function."""
        assert function is run_unit
        future: Future[bytes] = Future()
        self._waiting.put((job, task, future))
        return future

    def is_running(self, future: Future[bytes]) -> bool:
        """Tell whether a worker has got a unit and not answered yet."""
        return future.running()

    def close(self) -> None:
        """Kill all workers: a unit may be an hour's work, so they are not waited for."""
        for worker in self._workers:
            worker.kill()
            self._waiting.put(None)
        for worker in self._workers:
            worker.close()


class _Worker:
    """The parent's side of one worker process, with the thread that sends it units."""

    def __init__(self, waiting: SimpleQueue[tuple[bytes, bytes, Future[bytes]] | None]) -> None:
        self._lock = Lock()
        self._is_closed = False
        self._start()
        self._thread = Thread(target=self._serve, args=(waiting,), daemon=True)
        self._thread.start()

    def _start(self) -> None:
        # The worker gets the present path, in case the user changed it to find tokenmill.
        program = f"import sys; sys.path[:] = {sys.path!r}; from tokenmill.build.engines import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ONE_CORE},
            # Ctrl-C reaches the parent alone, which ends the workers.
            process_group=0,
        )
        self._job = b""

    def kill(self) -> None:
        """Kill the process; no other takes its place."""
        with self._lock:
            self._is_closed = True
            self.process.kill()

    def close(self) -> None:
        """Wait until a killed process is gone."""
        self._thread.join()
        self._reap()

    def _reap(self) -> None:
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()

    def _replace(self) -> bool:
        """Start another process in place of one that a signal ended; False where that is of no use."""
        with self._lock:
            code = self.process.returncode
            # A template that takes too long takes as long again.
            if self._is_closed or code is None or code >= 0 or code == -_SIGPROF:
                return False
            self._reap()
            self._start()
            return True

    def _serve(self, waiting: SimpleQueue[tuple[bytes, bytes, Future[bytes]] | None]) -> None:
        while (message := waiting.get()) is not None:
            job, task, future = message
            if not future.set_running_or_notify_cancel():
                continue
            try:
                try:
                    answer = self._ask(job, task)
                except WorkerLostError as lost:
                    if not self._replace():
                        raise
                    warn(f"{str(lost).partition('; run again')[0]}; its unit is tried once more")
                    answer = self._ask(job, task)
                future.set_result(answer)
            except Exception as error:
                future.set_exception(error)
                return

    def _ask(self, job: bytes, task: bytes) -> bytes:
        """Send the process a unit, after the job if that is another one; return the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # a process that is gone shows when it should answer
            if job != self._job:
                self.process.stdin.write(_JOB + job + b"\n")
                self._job = job
            self.process.stdin.write(task + b"\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self._death(msgspec.json.decode(task, type=Task))
        return line

    def _death(self, task: Task) -> WorkerLostError:
        code = self.process.wait()
        how = f"exit code {code}" if code >= 0 else f"an end by {signal.Signals(-code).name}"
        why = {
            -_SIGKILL: " (the system does this when memory runs out)",
            -_SIGPROF: f" (a chat template took {3 * tracked.MAX_SECONDS:g} s for one render)",
        }.get(code, "")
        path = task.unit.pieces[0].file.path
        return WorkerLostError(
            f"{path}: the worker process {self.process.pid} must live until its unit is done, got {how}{why}; "
            "run again, with fewer workers if memory is short"
        )


_JOB = b"job "
"""Starts a line that is a job, for the units that follow it."""
_SIGKILL, _SIGPROF = (getattr(signal, name, 0) for name in ("SIGKILL", "SIGPROF"))
"""Windows has neither: there a process ends with a code."""


def main() -> None:
    """Serve the process that started this one, and end with it."""
    tracked.is_worker = True
    _end_with_parent()
    # Results have a descriptor of their own: what a library prints must not get between them.
    with os.fdopen(os.dup(1), "wb", buffering=0) as channel:
        os.dup2(2, 1)
        messages: SimpleQueue[bytes] = SimpleQueue()
        Thread(target=_listen, args=(messages,), daemon=True).start()
        job = b""
        while True:
            message = messages.get()
            if message.startswith(_JOB):
                job = message.removeprefix(_JOB).removesuffix(b"\n")
                continue
            try:
                answer = run_unit(job, message)
            except Exception:  # a bug: the parent shows where
                answer = msgspec.json.encode(Answer(error=("TokenmillError", traceback.format_exc())))
            channel.write(answer + b"\n")


def _end_with_parent() -> None:
    """Have the system kill this process when its parent ends, even in the middle of a call that does not return."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


_SET_DEATH_SIGNAL = 1


def _listen(messages: SimpleQueue[bytes]) -> None:
    """Pass on what the parent sends; exit at once when it closes its end or dies, even in the middle of a unit."""
    for line in sys.stdin.buffer:
        messages.put(line)
    os._exit(0)


# Ray.


class RayExecutor:
    """Runs units as tasks of Ray, one core each, on the cluster at an address, or on one that it starts here.

    A unit whose worker or node is lost is done again by Ray, elsewhere; one with a bad record is not. Where the
    process has called `ray.init` already, that cluster is used. The job is put into Ray's store of objects once,
    and fetched once by every node. Workers must have tokenmill installed, and see inputs and output.
    """

    sends_once = True

    def __init__(self, address: str | None = None, *, num_cpus: int | None = None) -> None:
        try:
            import ray
        except ImportError:
            raise MissingExtraError(
                "engine 'ray': needs Ray, got no module named ray; pip install 'tokenmill[ray]'"
            ) from None
        self._ray = ray
        self._starts = not ray.is_initialized()
        if self._starts:
            self._connect(address, num_cpus)
        self._run = ray.remote(num_cpus=1, max_retries=RAY_RETRIES, retry_exceptions=False)(run_unit)
        self._job: tuple[bytes, Any] | None = None

    def __enter__(self) -> RayExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, function: Callable[[bytes, bytes], bytes], job: bytes, task: bytes, /) -> RayFuture:
        """Have a unit done by a task."""
        assert function is run_unit
        if self._job is None or self._job[0] != job:
            self._job = job, self._ray.put(job)
        return RayFuture(self._ray, self._run.remote(self._job[1], task))

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        if self._starts:
            self._ray.shutdown()
            self._starts = False

    def _connect(self, address: str | None, num_cpus: int | None) -> None:
        # Else Ray reports every cluster that it starts to its makers, and nobody asked for that.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        try:
            if address is None:
                self._ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **quiet)
            else:
                self._ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            message = " ".join(str(error).split())[:500]
            raise ConfigError(
                "address: must be that of a cluster of Ray, "
                f"got {address!r} and {type(error).__name__}: {message}; "
                "leave it out to start one on this machine"
            ) from error


RAY_RETRIES = 20
"""How often Ray does a unit again whose worker or node is lost: preemptible machines are lost often."""


class RayFuture:
    """A task of Ray, as `concurrent.futures` has it."""

    def __init__(self, ray: Any, reference: Any) -> None:  # noqa: ANN401 - Ray may not be there
        self._ray = ray
        self._reference = reference
        self._future: Future[bytes] = reference.future()

    def add_done_callback(self, call: Callable[[object], object]) -> None:
        """Call a function when it is done, in another thread."""
        self._future.add_done_callback(call)

    def done(self) -> bool:
        """Tell whether it is done."""
        return self._future.done()

    def result(self) -> bytes:
        """Return its result, or raise the error that Ray ended it with."""
        return self._future.result()

    def cancel(self) -> None:
        """End it, in the middle of its work if need be."""
        self._ray.cancel(self._reference, force=True)
