"""Status of a build as its folder shows it: while it runs, on whatever machines, and after it was killed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenmill.build.counts import add_counts
from tokenmill.build.journal import BUILD, STOPPED, Journal, unit_result
from tokenmill.build.notes import FAILED, read_failure, read_note
from tokenmill.build.state import state_name
from tokenmill.build.tasks import read_head
from tokenmill.store.lease import find_holder, has_ended

READ_UNITS = 1000
"""Number of results that are read. With more finished units, sums are estimated in proportion."""
SILENT_SECONDS = 30.0
"""Seconds without a note after which a worker counts as silent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStatus:
    """Progress of a worker with its unit."""

    name: str
    unit: str
    """Key of the unit."""
    bytes: int
    """Input that is done."""
    documents: int
    tokens: int
    unit_bytes: int
    """Input of the whole unit."""
    silent_seconds: float
    """Seconds since its last note."""
    state: Literal["at work", "silent", "ended"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildStatus:
    """Status of a build."""

    path: str
    state: Literal["empty", "running", "stopped", "publishing", "finished"]
    """`StateName`, or `stopped`: no process is at work. The same command resumes it."""
    reason: str | None
    """Error that ended it, or process that was killed; None if this is not known."""
    units: int | None
    """Number of units; None before they have been counted."""
    units_done: int
    units_under_way: int
    failed: dict[str, str]
    """Key of a unit whose last attempt failed -> why. The next build tries it again."""
    units_left_over: int
    """Units that were begun, are not done, and have no worker, because it was killed."""
    input_bytes: int | None
    documents: int
    """Documents of finished units, as are tokens and text."""
    tokens: int
    text_bytes: int
    exact: bool
    """True if these three are counted, False if they are estimated from some of the units."""
    skipped: dict[str, int]
    """Reason -> records that were left out of the units that were read."""
    seconds: float
    """Seconds from the beginning of the build to its latest unit."""
    seconds_left: float | None
    """Estimate from the rate so far."""
    workers: tuple[WorkerStatus, ...]


def build_status(out: str | os.PathLike[str]) -> BuildStatus:
    """Return the status of a build; at most `READ_UNITS` results are read."""
    journal = Journal(Path(out))
    now = time.time()
    begun = journal.time_of(BUILD) / 1e9  # 0 if no build was begun
    names = sorted(_names(journal.units))
    attempts = {name.removeprefix(".tmp-") for name in names if name.startswith(".tmp-")}
    # A unit with attempts is not done, though it may have finished segments.
    done = [name for name in names if not name.startswith(".") and "-" not in name and name not in attempts]
    read = done[:: -(-len(done) // READ_UNITS)] if done else []
    results = [result for name in read if (result := unit_result(journal.units, name)) is not None]
    scale = len(done) / max(len(results), 1)
    skipped: dict[str, int] = {}
    for result in results:
        add_counts(skipped, result.counts.skipped)
    workers = tuple(_workers(journal, now)) if begun else ()
    busy = {worker.unit for worker in workers if worker.state == "at work"}
    failed = {key: why for key, why in _failed(journal.workers) if key not in done} if begun else {}
    head = read_head(journal)
    seconds = max((_changed(journal.units / name) for name in read[-1:]), default=begun) - begun if begun else 0.0
    left = None
    if head is not None and done and seconds > 0:
        left = seconds * (head.units - len(done)) / len(done)
    recent = bool(busy) or (not failed and now - begun < SILENT_SECONDS)
    last_note = max((now - worker.silent_seconds for worker in workers if worker.state == "at work"), default=0.0)
    state, reason = _state(journal, last_note, recent=recent)
    return BuildStatus(
        path=str(journal.out),
        state=state,
        reason=reason,
        units=None if head is None else head.units,
        units_done=len(done),
        units_under_way=len(busy.difference(done)),
        failed=failed,
        units_left_over=len(attempts - busy - failed.keys()),
        input_bytes=None if head is None else head.bytes,
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
    journal: Journal, last_note: float, *, recent: bool
) -> tuple[Literal["empty", "running", "stopped", "publishing", "finished"], str | None]:
    """Return the state of a build, and why it stopped; `recent`: a worker may be at work.

    The process that runs a build holds the lease of its folder, and on this machine it is known whether it lives.
    Parts run without a lease. Their workers write notes after the build has ended.
    """
    state = state_name(journal)
    if state in ("empty", "finished"):
        return state, None
    holder, is_held = find_holder(journal.out)
    if is_held:
        return state, None
    if holder is not None and not last_note:
        return "stopped", f"{holder} was killed"
    stopped = journal.time_of(STOPPED) / 1e9
    if stopped and last_note <= stopped:
        return "stopped", _text(journal.folder / STOPPED)
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


def _failed(workers: Path) -> Iterator[tuple[str, str]]:
    for name in sorted(_names(workers)):
        if name.endswith(FAILED):
            key = name.removesuffix(FAILED)
            failure = read_failure(workers.parent, key)
            if failure is not None:
                yield key, failure.message


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
