"""How far a build is: shown while it runs, by a bar, lines and a hook; and read from its folder at any time."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from tokenmill.build.counts import add_counts
from tokenmill.build.journal import (
    BUILD,
    SIZE,
    STOPPED,
    BuildSize,
    Journal,
    unit_result,
)
from tokenmill.build.notes import FAILED, read_note, read_notes
from tokenmill.build.state import state_name
from tokenmill.errors import harmless
from tokenmill.store.lease import find_holder, has_ended

_SECONDS_BETWEEN = 0.2
"""Between two looks at how far a build is."""
LINE_SECONDS = 30.0
"""Between two lines of text, where no terminal shows a bar."""
SLOW_SECONDS = 2.0
"""How long the tokenizer may take to open before a line says so."""
Look: TypeAlias = Callable[[], tuple[int, int, int]]
"""Returns the bytes of input, documents and tokens that are done."""
Show: TypeAlias = Callable[[str, int, Look], AbstractContextManager[Callable[[], None]]]
"""Shows how far a step of the build is, by its name, its bytes and a look at what is done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a build is."""

    what: str
    """`read the records`, `open the tokenizer`, `look for duplicates`, `prepare`, `note the inputs` or `upload`."""
    done_bytes: int
    """Of the input, as it is on disk; units that an earlier try had finished count at once."""
    total_bytes: int
    documents: int
    tokens: int
    seconds: float
    """Since this step began."""


def _print_line(line: str) -> None:
    sys.stderr.write(harmless(line) + "\n")
    sys.stderr.flush()


@contextmanager
def shown_progress(
    what: str,
    total_bytes: int,
    look: Look,
    *,
    shown: bool | None,
    on_progress: Callable[[Progress], None] | None,
) -> Iterator[Callable[[], None]]:
    """Show how far a step of the build is: a bar on a terminal, else a line every 30 s; call a hook as well.

    Gives a function that brings it up to date, if it has been a while: cheap enough to call at any time. `look` is
    called at most so often that it takes a fiftieth of the time, however slow the file system is. A step without
    bytes has a line, if it is slow.
    """
    begin = time.monotonic()
    next_update = next_look = 0.0
    done = (0, 0, 0)
    with ExitStack() as stack:
        print_progress: Callable[[Progress], None] = lambda _: None  # noqa: E731
        if shown is not False:
            print_progress = stack.enter_context(_printer(what, total_bytes, always=shown))

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
            progress = Progress(
                what=what,
                done_bytes=done_bytes,
                total_bytes=total_bytes,
                documents=documents,
                tokens=tokens,
                seconds=now - begin,
            )
            print_progress(progress)
            if on_progress is not None:
                on_progress(progress)

        tick()
        yield tick
        next_update = next_look = 0.0
        tick()


@contextmanager
def _printer(what: str, total_bytes: int, *, always: bool | None) -> Iterator[Callable[[Progress], None]]:
    """Give a function that prints on stderr how far a step is; with a bar on a terminal, or `always`."""
    if not total_bytes:
        line = threading.Timer(SLOW_SECONDS, _print_line, [f"{what}: this takes a while"])
        line.daemon = True
        line.start()
        try:
            yield lambda _: None
        finally:
            line.cancel()
        return
    if not (always or sys.stderr.isatty()):
        last_line = 0.0

        def print_progress(progress: Progress) -> None:
            nonlocal last_line
            if progress.seconds - last_line >= LINE_SECONDS:
                last_line = progress.seconds
                done, total = progress.done_bytes / 1e6, total_bytes / 1e6
                _print_line(
                    f"{what}: {done:,.0f} of {total:,.0f} MB, {done / total:.0%}; "
                    f"{progress.documents:,} documents, {progress.tokens:,} tokens, "
                    f"{done / progress.seconds:,.1f} MB/s"
                )

        yield print_progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn(what),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[documents]:,} documents"),
        TextColumn("{task.fields[megabytes]:,.1f} MB/s"),
        TextColumn("{task.fields[tokens]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total_bytes, documents=0, megabytes=0.0, tokens=0.0)

        def update_bar(progress: Progress) -> None:
            seconds = max(progress.seconds, 1e-3)
            bar.update(
                task,
                completed=progress.done_bytes,
                documents=progress.documents,
                megabytes=progress.done_bytes / 1e6 / seconds,
                tokens=progress.tokens / seconds,
            )

        yield update_bar


def units_done(workers: Path, left: Container[str], done: tuple[int, int, int]) -> tuple[int, int, int]:
    """Add to what is done in finished units what workers have done of the units that are `left`, by their keys."""
    notes = [note for key, note in read_notes(workers).items() if key in left]
    return (
        done[0] + sum(note.bytes for note in notes),
        done[1] + sum(note.documents for note in notes),
        done[2] + sum(note.tokens for note in notes),
    )


# A build as its folder shows it: while it runs, on whatever machines, and after it was killed.

READ_UNITS = 1000
"""How many results of finished units are read; of more units, the sums are estimated in proportion."""
SILENT_SECONDS = 30.0
"""After how long without a note a worker counts as silent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStatus:
    """A worker, and how far it is with its unit."""

    name: str
    unit: str
    """Key of the unit."""
    bytes: int
    """Of its input."""
    documents: int
    tokens: int
    unit_bytes: int
    """Of all the input of its unit."""
    silent_seconds: float
    """Since its last note."""
    state: Literal["at work", "silent", "ended"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildStatus:
    """A build as its folder shows it."""

    path: str
    state: Literal["empty", "running", "stopped", "publishing", "finished"]
    """`StateName`, or `stopped`: no process is at work. The same command resumes it."""
    reason: str | None
    """Why it stopped: the error that ended it, or the process that was killed; None if that is not known."""
    units: int | None
    """How many there are; None before they have been counted."""
    units_done: int
    units_under_way: int
    failed: dict[str, str]
    """Units whose last attempt failed -> why. They are tried again by the next start of the build."""
    units_left_over: int
    """Other units that were begun, are not done and have no worker now: theirs was killed."""
    input_bytes: int | None
    documents: int
    """Of finished units."""
    tokens: int
    text_bytes: int
    exact: bool
    """Whether these three are counted, or estimated from some of the units."""
    skipped: dict[str, int]
    """Records that were left out, by reason, of the units that were read."""
    seconds: float
    """From the beginning of the build to its latest unit."""
    seconds_left: float | None
    """At the rate so far."""
    workers: tuple[WorkerStatus, ...]


def build_status(out: str | os.PathLike[str]) -> BuildStatus:
    """Return how far the build of a store is; reads the results of a bounded number of units."""
    journal = Journal(Path(out))
    now = time.time()
    begun = journal.time_of(BUILD) / 1e9  # 0 if there is no build under way
    names = sorted(_names(journal.units))
    done = [name for name in names if not name.startswith(".")]
    read = done[:: -(-len(done) // READ_UNITS)] if done else []
    results = [result for name in read if (result := unit_result(journal.units, name)) is not None]
    scale = len(done) / max(len(results), 1)
    skipped: dict[str, int] = {}
    for result in results:
        add_counts(skipped, result.counts.skipped)
    workers = tuple(_workers(journal, now)) if begun else ()
    busy = {worker.unit for worker in workers if worker.state == "at work"}
    attempts = {name.removeprefix(".tmp-").split("-")[0] for name in names if name.startswith(".tmp-")}
    failed = {key: why for key, why in _failed(journal.workers) if key not in done} if begun else {}
    size = _size(journal)
    seconds = max((_changed(journal.units / name) for name in read[-1:]), default=begun) - begun if begun else 0.0
    left = None
    if size is not None and done and seconds > 0:
        left = seconds * (size.units - len(done)) / len(done)
    recent = bool(busy) or (not failed and now - begun < SILENT_SECONDS)
    state, reason = _state(journal, busy=bool(busy), recent=recent)
    return BuildStatus(
        path=str(journal.out),
        state=state,
        reason=reason,
        units=None if size is None else size.units,
        units_done=len(done),
        units_under_way=len(busy.difference(done)),
        failed=failed,
        units_left_over=len(attempts - busy - failed.keys()),
        input_bytes=None if size is None else size.bytes,
        documents=round(sum(result.counts.documents for result in results) * scale),
        tokens=round(sum(result.counts.tokens for result in results) * scale),
        text_bytes=round(sum(result.counts.text_bytes for result in results) * scale),
        exact=len(results) == len(done),
        skipped=skipped,
        seconds=seconds,
        seconds_left=None if state == "stopped" else left,
        workers=workers,
    )


def _state(
    journal: Journal, *, busy: bool, recent: bool
) -> tuple[Literal["empty", "running", "stopped", "publishing", "finished"], str | None]:
    """Return the state of a build, and why it stopped; `recent`: workers wrote a note lately.

    The process that runs a build holds the lease of its folder, and on this machine it is known whether it lives.
    Parts of a build run without a lease.
    """
    state = state_name(journal)
    if state in ("empty", "finished"):
        return state, None
    holder, is_held = find_holder(journal.out)
    if is_held:
        return state, None
    if not busy:
        if holder is not None:
            return "stopped", f"{holder} was killed"
        reason = _text(journal.folder / STOPPED)
        if reason is not None:
            return "stopped", reason
    return (state, None) if state == "publishing" or recent else ("stopped", _text(journal.folder / STOPPED))


def _text(path: Path) -> str | None:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return None


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(journal: Journal) -> BuildSize | None:
    with suppress(OSError, ValueError):
        return msgspec.json.decode((journal.folder / SIZE).read_bytes(), type=BuildSize)
    return None


def _failed(workers: Path) -> Iterator[tuple[str, str]]:
    for name in sorted(_names(workers)):
        if name.endswith(FAILED):
            why = _text(workers / name)
            if why is not None:
                yield name.removesuffix(FAILED), why


def _workers(journal: Journal, now: float) -> Iterator[WorkerStatus]:
    for name in sorted(_names(journal.workers)):
        path = journal.workers / name
        note = read_note(path)
        if note is None:
            continue
        silent = max(0.0, now - _changed(path))
        ended = has_ended(name.rpartition("-")[0])
        yield WorkerStatus(
            name=name,
            unit=note.key,
            bytes=note.bytes,
            documents=note.documents,
            tokens=note.tokens,
            unit_bytes=note.unit_bytes,
            silent_seconds=silent,
            state="ended" if ended else "silent" if silent > SILENT_SECONDS else "at work",
        )
