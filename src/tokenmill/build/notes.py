"""Notes that workers write about the unit they are at: how far it is, and why it failed."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tokenmill.documents import BadRecord
from tokenmill.store.lease import this_process

WORKERS = "workers"
FAILED = ".failed"
"""Ending of a file next to those of workers, named after the key of a task that failed."""
SECONDS_BETWEEN_NOTES = 0.2
MAX_CHARS = 10_000
"""Maximum number of characters of the message of a failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerNote:
    """Progress of a worker with its unit."""

    key: str
    bytes: int
    """Input that is done."""
    unit_bytes: int
    """Input of the whole unit."""
    documents: int
    tokens: int


class WorkerNotes:
    """Writes the note of this thread while it does a unit.

    A worker has one file for all its units, so whoever shows progress need not search among thousands.
    """

    def __init__(self, journal: Path, key: str, unit_bytes: int) -> None:
        self._path = journal / WORKERS / f"{this_process()}-{threading.get_native_id()}"
        self._key = key
        self._unit_bytes = unit_bytes
        self._last = 0.0

    def write(self, done_bytes: int, documents: int, tokens: int) -> None:
        """Write the note, if the last one is old. A note that cannot be written is left out."""
        now = time.monotonic()
        if now - self._last < SECONDS_BETWEEN_NOTES:
            return
        self._last = now
        note = WorkerNote(
            key=self._key, bytes=done_bytes, unit_bytes=self._unit_bytes, documents=documents, tokens=tokens
        )
        with suppress(OSError):
            self._path.write_bytes(msgspec.json.encode(note))


def read_note(path: Path) -> WorkerNote | None:
    """Return the note in a file; None if there is none, or it is being written."""
    with suppress(OSError, ValueError):
        return msgspec.json.decode(path.read_bytes(), type=WorkerNote)
    return None


def read_notes(folder: Path) -> dict[str, WorkerNote]:
    """Return the latest note of each unit that a worker is at, by its key."""
    notes: dict[str, WorkerNote] = {}
    with suppress(OSError):
        for entry in os.scandir(folder):
            note = read_note(Path(entry.path))
            if note is not None and (note.key not in notes or note.bytes > notes[note.key].bytes):
                notes[note.key] = note
    return notes


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Reason why a task failed."""

    error: str
    """Class of the error, in `tokenmill.errors`."""
    message: str
    bad: BadRecord | None = None
    """Bad record that stopped the unit. Only the parent knows its line in the file."""


def note_failure(journal: Path, key: str, error: str, message: str, bad: BadRecord | None = None) -> bool:
    """Write why a task failed; return whether this was possible."""
    failure = Failure(error=error, message=message[:MAX_CHARS], bad=bad)
    try:
        _failure_file(journal, key).write_bytes(msgspec.json.encode(failure))
    except OSError:
        return False
    return True


def read_failure(journal: Path, key: str) -> Failure | None:
    """Return why the last attempt at a task failed; None if it did not."""
    with suppress(OSError, ValueError):
        return msgspec.json.decode(_failure_file(journal, key).read_bytes(), type=Failure)
    return None


def clear_failure(journal: Path, key: str) -> None:
    """Remove the failure of an earlier attempt at a task."""
    with suppress(OSError):
        _failure_file(journal, key).unlink()


def _failure_file(journal: Path, key: str) -> Path:
    return journal / WORKERS / f"{key}{FAILED}"
