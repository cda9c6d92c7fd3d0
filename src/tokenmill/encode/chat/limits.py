"""Limits of time and memory for chat templates, which hold in worker processes only.

A template is a program from a file, and can loop forever or fill the memory. Python cannot stop a program in the
middle of an operation, but the operating system can. So the templates of a build run in worker processes, which are
limited by timers and resource limits. A limit never rejects a record, because the bytes of a store must not depend
on the speed of a machine: it ends the build with an error that names the template and the record.
"""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tokenmill.errors import ConfigError

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]

MAX_SECONDS = 6.0
"""Processor time for one record. After it the worker raises an error."""
HARD_SECONDS = 9.0
"""Processor time for one record after which the system ends the worker, in the middle of any operation."""
MAX_BYTES = 1 << 30
"""Memory for one record, in addition to the memory of the worker before it."""
MAX_CHARS = 1 << 24
"""Characters that one render may have. This limit holds in every process, and rejects the record."""

_NOTE_BYTES = 4096
_RECORDS_PER_LOOK = 8
"""Records per look at the memory in use. A look takes longer than some renders, and few records change it."""
_worker: _Worker | None = None


def enable(note: Path) -> None:
    """Limit the templates of this process, which must be a worker.

    `note` is a file of this worker alone. It names the record under way, for the parent of a worker that was ended.
    """
    global _worker  # noqa: PLW0603 - one process has one set of limits
    _worker = _Worker(note)


def is_enabled() -> bool:
    """Return whether this process is a worker with limits."""
    return _worker is not None


def error_of(note: Path) -> ConfigError | None:
    """Return the error of a worker that the system ended, or None if no template was at work."""
    try:
        lines = note.read_bytes().rstrip(b"\0").decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return None
    return _error(lines[0], lines[1], f"{HARD_SECONDS:g} s of processor time or too much memory") if lines else None


@contextmanager
def limited(template: str, place: str) -> Iterator[None]:
    """Limit the time and memory that a template takes for the record at a place; only in a worker."""
    if _worker is None:
        yield
        return
    _worker.start(template, place)
    try:
        yield
    except MemoryError as error:
        raise _error(template, place, f"{MAX_BYTES >> 20} MB of memory") from error
    finally:
        _worker.stop()


def _error(template: str, place: str, amount: str) -> ConfigError:
    return ConfigError(
        f"chat template {template}: takes more than {amount} for the record {place}; "
        "use a simpler template, or leave out the record"
    )


class _Worker:
    """The limits of a worker process."""

    def __init__(self, note: Path) -> None:
        note.write_bytes(bytes(_NOTE_BYTES))
        with note.open("r+b") as file:
            # A mapped page outlives the process, and is written without a system call.
            self._note = mmap.mmap(file.fileno(), _NOTE_BYTES)
        self._record = "", ""
        self._num_records = 0
        if resource is not None:
            self._memory = resource.getrlimit(resource.RLIMIT_DATA)
            signal.signal(signal.SIGVTALRM, self._raise)
            signal.signal(signal.SIGPROF, signal.SIG_DFL)

    def start(self, template: str, place: str) -> None:
        """Start the timers for a record."""
        self._record = template, place
        names = "\n".join(" ".join(name.split())[: _NOTE_BYTES // 8] for name in self._record).encode()
        self._note[: len(names)] = names
        if resource is None:
            return
        # The timer repeats, because code that the template calls may catch the first error.
        signal.setitimer(signal.ITIMER_VIRTUAL, MAX_SECONDS, 0.1)
        signal.setitimer(signal.ITIMER_PROF, HARD_SECONDS)
        if self._num_records % _RECORDS_PER_LOOK == 0:
            self._limit_memory()
        self._num_records += 1

    def stop(self) -> None:
        """Stop the timers."""
        if resource is not None:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
        self._note[:] = bytes(_NOTE_BYTES)

    def _limit_memory(self) -> None:
        soft, hard = self._memory
        used = _data_bytes()
        if used is not None:
            most = used + MAX_BYTES
            resource.setrlimit(
                resource.RLIMIT_DATA, (most if soft == resource.RLIM_INFINITY else min(soft, most), hard)
            )

    def _raise(self, _signal: int, _frame: FrameType | None) -> None:
        raise _error(*self._record, f"{MAX_SECONDS:g} s of processor time")


def _data_bytes() -> int | None:
    """Return the memory of this process that counts for the limit; None where the system does not say."""
    try:
        statm = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:  # not Linux
        return None
    try:
        return int(os.read(statm, 256).split()[5]) * resource.getpagesize()
    finally:
        os.close(statm)
