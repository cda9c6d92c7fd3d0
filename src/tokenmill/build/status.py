"""How far a build has come, read off its folder: while it runs, on whatever machines, and after it was killed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from tokenmill.build.journal import BUILD, PUBLISH, SIZE, BuildSize, Journal, unit_result
from tokenmill.build.unit import read_worker_file
from tokenmill.errors import StoreCorruptError
from tokenmill.store.lease import has_ended

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
    units_left_over: int
    """Units that were begun and are not done, and that no worker is at: they failed, or were killed."""
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
    size = _size(journal)
    seconds = max((_changed(journal.units / name) for name in read[-1:]), default=begun) - begun if begun else 0.0
    left = None
    if size is not None and done and seconds > 0:
        left = seconds * (size.units - len(done)) / len(done)
    return BuildStatus(
        path=str(journal.out),
        state=_state(journal, begun=bool(begun), busy=bool(busy) or now - begun < SILENT_SECONDS),
        units=None if size is None else size.units,
        units_done=len(done),
        units_left_over=len(attempts - busy),
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


def _workers(journal: Journal, now: float) -> Iterator[WorkerStatus]:
    for name in sorted(_names(journal.workers)):
        path = journal.workers / name
        found = read_worker_file(path)
        if found is None:
            continue
        key, position, documents, tokens = found
        silent = max(0.0, now - _changed(path))
        ended = has_ended(name.rpartition("-")[0])
        yield WorkerStatus(
            name=name,
            unit=key,
            bytes=position,
            documents=documents,
            tokens=tokens,
            silent_seconds=silent,
            state="ended" if ended else "silent" if silent > SILENT_SECONDS else "at work",
        )
