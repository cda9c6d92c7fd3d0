"""Engines that run tasks in other processes: local workers, any executor of `concurrent.futures`, or Ray.

An engine is an object with `submit(function, *arguments) -> future`. It calls `run_index` with the folder of the
build, the checksum of the list and an index, in any order, and may do a task more than once.

Local workers are new interpreters, not a `ProcessPoolExecutor`. That one imports the user's main script again in
each worker, leaves workers behind when the parent is killed, and cannot end one in the middle of its work.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from tempfile import mkstemp
from threading import Lock, Thread
from types import TracebackType
from typing import Any, Protocol, TypeAlias

import msgspec

from tokenmill.build.journal import Journal
from tokenmill.build.tasks import ONE_CORE, error_of, read_list, run_index
from tokenmill.encode.chat import limits
from tokenmill.errors import ConfigError, MissingExtraError, TokenmillError, WorkerLostError, warn


class UnitFuture(Protocol):
    """Return value of `submit`. One without `add_done_callback`, as in submitit, is polled."""

    def done(self) -> bool:
        """Return whether the task is done, or its worker lost."""

    def result(self) -> object:
        """Return when the task is done, or raise the error that ended its worker."""

    def cancel(self) -> object:
        """Cancel the task; one that runs already may continue."""


class Executor(Protocol):
    """Runs tasks: an executor of `concurrent.futures`, dask, mpi4py, loky, submitit, or Ray (`RayExecutor`)."""

    def submit(
        self, function: Callable[[str, str, int], None], out: str, checksum: str, index: int, /
    ) -> UnitFuture:
        """Call a function with these arguments, later and in another process."""


# Worker processes of this machine.

_Work: TypeAlias = "tuple[tuple[str, str, int], Future[None]]"
"""Arguments of `run_index`, and the future of the task."""


class LocalExecutor:
    """Worker processes of this machine, which get tasks by their index, one at a time.

    A task whose worker is ended by a signal is tried once more, by another process. The workers end when it is
    closed, and when the process that started them ends in any way.
    """

    def __init__(self) -> None:
        self._waiting: SimpleQueue[_Work | None] = SimpleQueue()
        self._workers: list[_Worker] = []

    def grow(self, num_workers: int) -> None:
        """Start workers until there are `num_workers`."""
        while len(self._workers) < num_workers:
            self._workers.append(_Worker(self._waiting))

    def submit(
        self, function: Callable[[str, str, int], None], out: str, checksum: str, index: int, /
    ) -> Future[None]:
        """Do a task by the next worker that is free."""
        assert function is run_index
        future: Future[None] = Future()
        self._waiting.put(((out, checksum, index), future))
        return future

    def is_running(self, future: Future[None]) -> bool:
        """Return whether a worker is at a task."""
        return future.running()

    def close(self) -> None:
        """Kill all workers without waiting for their units."""
        for worker in self._workers:
            worker.kill()
            self._waiting.put(None)
        for worker in self._workers:
            worker.close()


class _Worker:
    """The parent's side of one worker process, with the thread that sends it tasks."""

    def __init__(self, waiting: SimpleQueue[_Work | None]) -> None:
        self._lock = Lock()
        self._is_closed = False
        file, name = mkstemp(prefix="tokenmill-")
        os.close(file)
        self._note = Path(name)
        """Names the record that the worker renders; see `limits.enable`."""
        self._start()
        self._thread = Thread(target=self._serve, args=(waiting,), daemon=True)
        self._thread.start()

    def _start(self) -> None:
        # The worker gets the present path, in case the user changed it to find tokenmill.
        start = f"from tokenmill.build.engines import main; main({str(self._note)!r})"
        program = f"import sys; sys.path[:] = {sys.path!r}; {start}"
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ONE_CORE},
            # Ctrl-C reaches the parent alone, which ends the workers.
            process_group=0,
        )

    def kill(self) -> None:
        """Kill the process; no other takes its place."""
        with self._lock:
            self._is_closed = True
            self.process.kill()

    def close(self) -> None:
        """Wait until a killed process is gone."""
        self._thread.join()
        self._reap()
        self._note.unlink(missing_ok=True)

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

    def _serve(self, waiting: SimpleQueue[_Work | None]) -> None:
        while (message := waiting.get()) is not None:
            work, future = message
            if not future.set_running_or_notify_cancel():
                continue
            try:
                try:
                    self._ask(work)
                except WorkerLostError as lost:
                    if not self._replace():
                        raise
                    warn(f"{str(lost).partition('; run again')[0]}; its unit is tried once more")
                    self._ask(work)
                future.set_result(None)
            except Exception as error:
                future.set_exception(error)
                if self.process.poll() is not None:
                    return

    def _ask(self, work: tuple[str, str, int]) -> None:
        """Send the process a task, and wait until it is done; raise the error that it could not write."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # a process that is gone shows when it should answer
            self.process.stdin.write(msgspec.json.encode(work) + b"\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self._death(work)
        error = msgspec.json.decode(line, type=tuple[str, str] | None)
        if error is not None:
            raise error_of(*error)

    def _death(self, work: tuple[str, str, int]) -> TokenmillError:
        code = self.process.wait()
        error = limits.error_of(self._note) if code == -_SIGPROF else None
        if error is not None:
            return error
        how = f"exit code {code}" if code >= 0 else f"an end by {signal.Signals(-code).name}"
        why = " (the system does this when memory runs out)" if code == -_SIGKILL else ""
        tasks = read_list(Journal(Path(work[0])))
        path = work[0] if tasks is None else tasks.task(work[2]).unit.pieces[0].file.path
        return WorkerLostError(
            f"{path}: the worker process {self.process.pid} must live until its unit is done, got {how}{why}; "
            "run again, with fewer workers if memory is short"
        )


_SIGKILL, _SIGPROF = (getattr(signal, name, 0) for name in ("SIGKILL", "SIGPROF"))
"""Windows has neither: there a process ends with a code."""


def main(note: str) -> None:
    """Serve the process that started this one, and end with it; `note` is for the limits of chat templates."""
    limits.enable(Path(note))
    _end_with_parent()
    # Answers have a descriptor of their own, so that no library prints between them.
    with os.fdopen(os.dup(1), "wb", buffering=0) as channel:
        os.dup2(2, 1)
        messages: SimpleQueue[bytes] = SimpleQueue()
        Thread(target=_listen, args=(messages,), daemon=True).start()
        while True:
            error = None
            try:
                run_index(*msgspec.json.decode(messages.get(), type=tuple[str, str, int]))
            except TokenmillError as raised:
                error = type(raised).__name__, str(raised)
            except Exception:  # a bug: the parent shows where
                error = "TokenmillError", traceback.format_exc()
            channel.write(msgspec.json.encode(error) + b"\n")


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
    """Runs tasks on Ray, one core each, on the cluster at an address, or on one that it starts here.

    A task whose worker or node is lost is done again by Ray; one with a bad record is not. If the process has
    called `ray.init` already, that cluster is used. Workers need tokenmill, and see inputs and output.
    """

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
        self._run = ray.remote(num_cpus=1, max_retries=RAY_RETRIES, retry_exceptions=False)(run_index)

    def __enter__(self) -> RayExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(
        self, function: Callable[[str, str, int], None], out: str, checksum: str, index: int, /
    ) -> RayFuture:
        """Do a task on the cluster."""
        assert function is run_index
        return RayFuture(self._ray, self._run.remote(out, checksum, index))

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        if self._starts:
            self._ray.shutdown()
            self._starts = False

    def _connect(self, address: str | None, num_cpus: int | None) -> None:
        # Otherwise Ray reports every cluster that it starts to its makers.
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
"""Times that Ray repeats a task whose worker or node is lost. Preemptible machines are lost often."""


class RayFuture:
    """Future of a Ray task, with the methods of `concurrent.futures`."""

    def __init__(self, ray: Any, reference: Any) -> None:  # noqa: ANN401 - Ray may not be there
        self._ray = ray
        self._reference = reference
        self._future: Future[None] = reference.future()

    def add_done_callback(self, call: Callable[[object], object]) -> None:
        """Call a function when it is done, in another thread."""
        self._future.add_done_callback(call)

    def done(self) -> bool:
        """Return whether it is done."""
        return self._future.done()

    def result(self) -> None:
        """Return when it is done, or raise the error with which Ray ended it."""
        self._future.result()

    def cancel(self) -> None:
        """End it, even in the middle of its work."""
        self._ray.cancel(self._reference, force=True)
