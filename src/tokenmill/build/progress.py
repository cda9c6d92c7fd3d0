"""How far a build is: told while it runs, by a bar, lines and a hook; and read off its folder at any time."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from tokenmill.build.journal import BUILD, PUBLISH, SIZE, BuildSize, Journal, UnitResult, unit_result
from tokenmill.build.unit import FAILED, read_worker_file, read_worker_files
from tokenmill.documents import Unit
from tokenmill.errors import StoreCorruptError, harmless
from tokenmill.store.durable import has_ended

_SECONDS_BETWEEN = 0.2
"""Two looks at how far a build has come."""
LINE_SECONDS = 30.0
"""How often a line says so, where no terminal shows a bar."""
SLOW_SECONDS = 2.0
"""How long the tokenizer is opened before a line says so."""
Show: TypeAlias = Callable[
    [str, int, Callable[[], tuple[int, int, int]]], AbstractContextManager[Callable[[], None]]
]
"""What shows how far a step of the build is: what it is, its bytes, and a look at those that are done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a build is."""

    what: str
    """`open the tokenizer`, `look for duplicates`, `prepare`, `note the inputs` or `upload`."""
    done_bytes: int
    """Of the input, as it is on disk; units that an earlier try had finished count at once."""
    total_bytes: int
    documents: int
    tokens: int
    seconds: float
    """Since this step began."""


def warn(message: str) -> None:
    """Print a warning on stderr, in bold where that is possible."""
    from rich.console import Console
    from rich.text import Text

    text = Text(harmless(f"warning: {message}"), style="bold yellow")
    Console(stderr=True).print(text, soft_wrap=True)


def _say(line: str) -> None:
    sys.stderr.write(harmless(line) + "\n")
    sys.stderr.flush()


@contextmanager
def shown_progress(
    what: str,
    total_bytes: int,
    look: Callable[[], tuple[int, int, int]],
    *,
    shown: bool | None,
    on_progress: Callable[[Progress], None] | None,
) -> Iterator[Callable[[], None]]:
    """Show how far a step of the build is: a bar on a terminal, else a line every 30 s; a hook is told as well.

    Gives a function that brings it up to date, if it has been a while: cheap enough to call at any time. `look`
    returns the bytes, documents and tokens that are done. A step without bytes has a line, if it is slow.
    """
    begin, last = time.monotonic(), 0.0
    with ExitStack() as stack:
        tell = (lambda _: None) if shown is False else stack.enter_context(_told(what, total_bytes, always=shown))

        def tick(seconds_between: float = _SECONDS_BETWEEN) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last < seconds_between:
                return
            last = now
            done_bytes, documents, tokens = look()
            progress = Progress(
                what=what,
                done_bytes=done_bytes,
                total_bytes=total_bytes,
                documents=documents,
                tokens=tokens,
                seconds=now - begin,
            )
            tell(progress)
            if on_progress is not None:
                on_progress(progress)

        tick()
        yield tick
        tick(0)


@contextmanager
def _told(what: str, total_bytes: int, *, always: bool | None) -> Iterator[Callable[[Progress], None]]:
    """Give what tells people on stderr how far a step is; a bar is shown on a terminal, or `always`."""
    if not total_bytes:
        line = threading.Timer(SLOW_SECONDS, _say, [f"{what}: this takes a while"])
        line.daemon = True
        line.start()
        try:
            yield lambda _: None
        finally:
            line.cancel()
        return
    if not (always or sys.stderr.isatty()):
        last = 0.0

        def tell(now: Progress) -> None:
            nonlocal last
            if now.seconds - last >= LINE_SECONDS:
                last = now.seconds
                done, total = now.done_bytes / 1e6, total_bytes / 1e6
                _say(
                    f"{what}: {done:,.0f} of {total:,.0f} MB, {done / total:.0%}; {now.documents:,} documents, "
                    f"{now.tokens:,} tokens, {done / now.seconds:,.1f} MB/s"
                )

        yield tell
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

        def show(now: Progress) -> None:
            seconds = max(now.seconds, 1e-3)
            bar.update(
                task,
                completed=now.done_bytes,
                documents=now.documents,
                megabytes=now.done_bytes / 1e6 / seconds,
                tokens=now.tokens / seconds,
            )

        yield show


# From the results and the files of workers.


class Look:
    """Counts the bytes of input, documents and tokens that are done, in finished units and in those under way.

    Workers say in a file each how far they are. These are read at most so often that it takes a fiftieth of the
    time, however slow the file system is and however many they are.
    """

    def __init__(self, journal: Journal, wanted: Container[str]) -> None:
        """Of units under way, those whose keys are `wanted` count."""
        self._folder = journal.workers
        self._wanted = wanted
        self._folder.mkdir(exist_ok=True)
        self._counted: set[str] = set()
        self._done = (0, 0, 0)
        self._ahead: Mapping[str, tuple[int, int, int]] = {}
        self._next = 0.0

    def count(self, unit: Unit, result: UnitResult) -> None:
        """Count a unit that is finished."""
        self._counted.add(result.key)
        bytes_, documents, tokens = self._done
        counts = result.counts
        self._done = bytes_ + unit.bytes, documents + counts.documents, tokens + counts.tokens

    def __call__(self) -> tuple[int, int, int]:
        """Return how much is done."""
        begin = time.monotonic()
        if begin >= self._next:
            self._ahead = read_worker_files(self._folder)
            now = time.monotonic()
            self._next = now + 50 * (now - begin)
        ahead = [place for key, place in self._ahead.items() if key not in self._counted and key in self._wanted]
        position, documents, tokens = map(sum, zip(self._done, *ahead, strict=True))
        return position, documents, tokens


# A build as its folder shows it: while it runs, on whatever machines, and after it was killed.

READ_UNITS = 1000
"""Results of finished units that are read; of more, the sums are in proportion to these."""
SILENT_SECONDS = 30.0
"""After how long without a word a worker counts as silent."""


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
    bytes_a_second: float | None
    """Of input, in this unit; None where that is not known yet."""
    seconds_left: float | None
    """Until its unit is done, at that rate."""
    silent_seconds: float
    """Since its last word."""
    state: Literal["at work", "silent", "ended"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildStatus:
    """A build as its folder shows it."""

    path: str
    state: Literal["under way", "stopped", "publishing", "finished", "none"]
    """`stopped`: begun, and no worker has said a word lately; the same command goes on."""
    units: int | None
    """That there are; None before they have been counted."""
    units_done: int
    units_under_way: int
    failed: dict[str, str]
    """Units whose last attempt failed -> why. They are tried again by the next start of the build."""
    units_left_over: int
    """Other units that were begun and are not done, and that no worker is at: their worker was killed."""
    input_bytes: int | None
    documents: int
    """Of finished units."""
    tokens: int
    text_bytes: int
    exact: bool
    """Whether these are counted, or in proportion to some units."""
    skipped: dict[str, int]
    """Records that were left out, by reason, of the units that were read."""
    seconds: float
    """From the beginning of the build to its latest unit."""
    seconds_left: float | None
    """At the rate so far."""
    workers: tuple[WorkerStatus, ...]


def build_status(out: str | os.PathLike[str]) -> BuildStatus:
    """Say how far the build of a store is. Reads the results of a bounded number of units."""
    journal = Journal(Path(out))
    now = time.time()
    begun = journal.time_of(BUILD) / 1e9
    names = sorted(_names(journal.units))
    done = [name for name in names if not name.startswith(".")]
    read = done[:: -(-len(done) // READ_UNITS)] if done else []
    results = [result for name in read if (result := unit_result(journal.units, name)) is not None]
    scale = len(done) / max(len(results), 1)
    skipped: dict[str, int] = {}
    for result in results:
        for reason, count in result.counts.skipped.items():
            skipped[reason] = skipped.get(reason, 0) + count
    workers = tuple(_workers(journal, now)) if begun else ()
    busy = {worker.unit for worker in workers if worker.state == "at work"}
    attempts = {name.removeprefix(".tmp-").split("-")[0] for name in names if name.startswith(".tmp-")}
    failed = {key: why for key, why in _failed(journal.workers) if key not in done} if begun else {}
    size = _size(journal)
    seconds = max((_changed(journal.units / name) for name in read[-1:]), default=begun) - begun if begun else 0.0
    left = None
    if size is not None and done and seconds > 0:
        left = seconds * (size.units - len(done)) / len(done)
    return BuildStatus(
        path=str(journal.out),
        state=_state(journal, begun=bool(begun), busy=bool(busy) or (not failed and now - begun < SILENT_SECONDS)),
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
        seconds_left=left,
        workers=workers,
    )


def _state(
    journal: Journal, *, begun: bool, busy: bool
) -> Literal["under way", "stopped", "publishing", "finished", "none"]:
    if journal.time_of(PUBLISH):
        return "publishing"
    if begun:
        return "under way" if busy else "stopped"
    with suppress(StoreCorruptError):
        return "finished" if journal.finished() is not None else "none"
    return "none"


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
            with suppress(OSError):
                why = (workers / name).read_text(encoding="utf-8", errors="replace")
                yield name.removesuffix(FAILED), why


def _workers(journal: Journal, now: float) -> Iterator[WorkerStatus]:
    for name in sorted(_names(journal.workers)):
        path = journal.workers / name
        found = read_worker_file(path)
        if found is None:
            continue
        silent = max(0.0, now - _changed(path))
        ended = has_ended(name.rpartition("-")[0])
        rate = 1000 * found.bytes / found.milliseconds if found.milliseconds > 0 else None
        yield WorkerStatus(
            name=name,
            unit=found.key,
            bytes=found.position,
            documents=found.documents,
            tokens=found.tokens,
            unit_bytes=found.unit_bytes,
            bytes_a_second=rate,
            seconds_left=(found.unit_bytes - found.position) / rate if rate else None,
            silent_seconds=silent,
            state="ended" if ended else "silent" if silent > SILENT_SECONDS else "at work",
        )
