"""Threads that make windows before they are needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from tokenmill.errors import DocumentError

if TYPE_CHECKING:
    from tokenmill.live.cursor import Cursor
    from tokenmill.live.options import Format
    from tokenmill.live.rows import Drawn, WindowRows
    from tokenmill.live.tokens import Skipped

LONGEST_JOIN_SECONDS = 5.0
_LOOK_SECONDS = 0.25
"""How often who waits looks whether the thread still lives."""

Show: TypeAlias = Callable[[str], None]
"""Says what is being worked on; called whenever some of it is done."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Found:
    """The next window of a lane that has rows, and where it is."""

    epoch: int
    turn: int
    window: WindowRows
    skipped: tuple[Skipped, ...]
    """What was left out, of windows without rows that were passed over too."""
    format: Format
    """How its rows were made."""
    before: tuple[Drawn, ...] = ()
    """Rows of it that were delivered before they were made so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What is asked for: the rows of a lane from a place on, made in one way."""

    lane: int
    cursor: Cursor
    format: Format


Find: TypeAlias = Callable[[Wanted, Show], Found]
"""Finds the first window with rows from a place on."""


@dataclass(kw_only=True, slots=True, eq=False)
class Task:
    """A window that was asked for."""

    wanted: Wanted
    cancelled: bool = False
    where: str = ""
    """What is being worked on; empty before the start."""
    beat: float = 0.0
    """When something was last done."""
    found: Found | None = None
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


class _Unwanted(Exception):
    """Nobody waits for this window any more."""


class Ahead:
    """A few threads, and what they are asked for, in the order of asking.

    They are daemons, so that one that hangs in a read does not keep the process from ending; those that can are
    waited for, as an extension that is still at work when the interpreter goes may crash it.
    """

    def __init__(self, find: Find, threads: int, timeout: float) -> None:
        self._find = find
        self._timeout = timeout
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, name=f"tokenmill-live-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, wanted: Wanted) -> Task:
        """Ask for the next window of a lane that has rows."""
        task = Task(wanted=wanted, beat=time.monotonic())
        self._queue.put(task)
        return task

    def wait(self, task: Task) -> Found:
        """Return what was asked for; raise what the thread raised, or that it is dead or hangs."""
        begun = time.monotonic()
        while not task.done.wait(min(_LOOK_SECONDS, self._timeout)):
            quiet = time.monotonic() - max(begun, task.beat if task.where else self._last_beat)
            if quiet >= self._timeout or not any(thread.is_alive() for thread in self._threads):
                task.cancelled = True
                where = task.where or self._last_where or f"lane {task.wanted.lane}"
                raise DocumentError(
                    f"{where}: the thread that reads and tokenizes it must go on within {self._timeout:g} s, got "
                    f"nothing for {quiet:.1f} s; look at the disk or network it is on, or raise timeout"
                )
        if task.error is not None:
            raise task.error
        assert task.found is not None
        return task.found

    def stop(self) -> None:
        """End the threads, and wait a while for those that are at work."""
        self._stopped.set()
        for _ in self._threads:
            self._queue.put(None)
        end = time.monotonic() + min(LONGEST_JOIN_SECONDS, self._timeout)
        for thread in self._threads:
            if thread is not threading.current_thread():  # the last reference may have gone in one of them
                thread.join(max(0.0, end - time.monotonic()))

    _last_beat = 0.0
    """When any thread last did something."""
    _last_where = ""

    def _work(self) -> None:
        while not self._stopped.is_set():
            task = self._queue.get()
            if task is None:
                return
            try:
                task.found = self._find(task.wanted, self._shows(task))
            except _Unwanted:
                pass
            except BaseException as error:  # handed on, whatever it is: the thread has no one else to tell
                task.error = error
            task.done.set()
            del task  # the window belongs to who asked for it

    def _shows(self, task: Task) -> Show:
        def show(where: str) -> None:
            if task.cancelled or self._stopped.is_set():
                raise _Unwanted
            task.where = self._last_where = where
            task.beat = self._last_beat = time.monotonic()

        return show
