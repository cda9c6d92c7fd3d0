"""Progress of the steps of a build, shown on stderr and passed to a hook."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from tokenmill.build.notes import read_notes
from tokenmill.errors import harmless
from tokenmill.progress import Display, display, say_nothing

_SECONDS_BETWEEN = 0.2
"""Seconds between two looks at the work that is done."""
SLOW_SECONDS = 2.0
"""Seconds after which a step without bytes is reported."""
Step: TypeAlias = Literal[
    "copy the inputs", "read the records", "open the tokenizer", "look for duplicates", "prepare", "upload"
]
Look: TypeAlias = Callable[[], tuple[int, int, int]]
"""Returns the bytes of input, documents and tokens that are done."""


class Show(Protocol):
    """Shows a step of a build while a `with` block does it."""

    def __call__(
        self, what: Step, total_bytes: int | Callable[[], int], look: Look, /
    ) -> AbstractContextManager[Callable[[], None]]:
        """Yield a function that updates the display; `total_bytes` is 0 for a step that is not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Progress of a build."""

    what: Step
    """Step of the build."""
    done_bytes: int
    """Input that is done, as it is on disk; units that an earlier build had finished count at once."""
    total_bytes: int
    documents: int
    tokens: int
    seconds: float
    """Seconds since this step began."""


def _print_line(line: str) -> None:
    sys.stderr.write(harmless(line) + "\n")
    sys.stderr.flush()


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


@contextmanager
def shown_progress(
    what: Step,
    total_bytes: int | Callable[[], int],
    look: Look,
    *,
    shown: bool | None,
    on_progress: Callable[[Progress], None] | None,
) -> Iterator[Callable[[], None]]:
    """Show a step of the build on stderr, unless `shown` is False, and call a hook.

    The function that is yielded is cheap enough to call at any time. `look` takes at most a fiftieth of the time,
    however slow the file system is.
    """
    begin = time.monotonic()
    next_update = next_look = 0.0
    done = (0, 0, 0)
    with ExitStack() as stack:
        show: Display = say_nothing
        if shown is not False:
            show = stack.enter_context(_display(what, is_measured=total_bytes != 0, has_bar=shown))

        def tick() -> None:
            nonlocal next_update, next_look, done
            now = time.monotonic()
            if now < next_update:
                return
            next_update = now + _SECONDS_BETWEEN
            if now >= next_look:
                done = look()
                next_look = now + 50 * (time.monotonic() - now)
            done_bytes, documents, tokens = done
            total = total_bytes if isinstance(total_bytes, int) else total_bytes()
            seconds = max(now - begin, 1e-3)
            rates = f"{done_bytes / 1e6 / seconds:,.1f} MB/s"
            if documents:
                rates = f"{documents:,} documents, {rates}, {tokens / seconds:,.0f} tokens/s"
            show(what, done_bytes, total, rates)
            if on_progress is not None:
                on_progress(
                    Progress(
                        what=what,
                        done_bytes=done_bytes,
                        total_bytes=total,
                        documents=documents,
                        tokens=tokens,
                        seconds=now - begin,
                    )
                )

        tick()
        yield tick
        next_update = next_look = 0.0
        tick()


@contextmanager
def _display(what: Step, *, is_measured: bool, has_bar: bool | None) -> Iterator[Display]:
    """Yield a display on stderr: a bar on a terminal, or if `has_bar`; a step that is not measured has a line."""
    if not is_measured:
        line = threading.Timer(SLOW_SECONDS, _print_line, [f"{what}: this takes a while"])
        line.daemon = True
        line.start()
        try:
            yield say_nothing
        finally:
            line.cancel()
        return
    console = None
    if has_bar or sys.stderr.isatty():
        from rich.console import Console

        console = Console(stderr=True)
    with display(_megabytes, _print_line, console, is_transient=False) as show:
        yield show


def units_done(workers: Path, left: Container[str], done: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return the work that is done: `done` in finished units, and by workers in units whose keys are `left`."""
    notes = [note for key, note in read_notes(workers).items() if key in left]
    return (
        done[0] + sum(note.bytes for note in notes),
        done[1] + sum(note.documents for note in notes),
        done[2] + sum(note.tokens for note in notes),
    )
