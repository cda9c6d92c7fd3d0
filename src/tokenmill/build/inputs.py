"""Input files: which of them are new to a store, and whether one changes while it is read."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from tokenmill.build.journal import BUILD, FINISHED, Journal, Ledger, TakenFile
from tokenmill.documents import InputFile, content_digest
from tokenmill.documents.units import IN_MEMORY
from tokenmill.errors import StoreExistsError
from tokenmill.fingerprint import digest


def entry_digest(name: str, content: str) -> str:
    """Return a digest of a file's name without folders and of its `file_digest`."""
    return digest([name.rsplit("/", 1)[-1], content])


def versions_of(journal: Journal, files: Sequence[InputFile], entries: Mapping[str, str]) -> dict[str, str]:
    """Return path -> digest that stands for the content of the file.

    The sample of a file may miss what was written to it after the build began. In this case the digest covers the
    ctime, so that units made before the change are not used.
    """
    begun = journal.time_of(BUILD)
    changes = {file.path: changed_ns(file) for file in files}
    return {
        path: entry if changes[path] <= begun else digest([entry, changes[path]]) for path, entry in entries.items()
    }


def changed_ns(file: InputFile) -> int:
    """Return the ctime of a file in nanoseconds; 0 if it is gone."""
    try:
        return os.stat(file.path).st_ctime_ns
    except OSError:
        return 0


def stamp_of(file: InputFile) -> tuple[int, int] | None:
    """Return size and mtime of a file; None if it is gone."""
    try:
        status = os.stat(file.path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


class TakenFiles:
    """Files of a finished store; each is matched with one file of the input."""

    def __init__(self, journal: Journal, finished: Ledger) -> None:
        self.left: dict[str, list[TakenFile]] = {}
        """Digest -> files with it that are not matched yet; copies share a digest."""
        for entry in finished.inputs:
            self.left.setdefault(entry.digest, []).append(entry)
        self._journal = journal.folder / FINISHED
        self._since = journal.time_of(FINISHED)
        self._now = time.time_ns()
        self._compared = False

    def find(self, file: InputFile, digest: str) -> bool:
        """Return whether a file is in the store.

        A file may change and keep its name, size and samples. So a file with a later ctime is read whole.
        """
        entries = self.left.get(digest, [])
        if entries and entries[0].content and changed_ns(file) > self._since:
            self._compared = True
            content = content_digest(file)
            entry = next((entry for entry in entries if entry.content == content), None)
        else:
            entry = next(iter(entries), None)
        if entry is not None:
            entries.remove(entry)
        return entry is not None

    def confirm(self) -> None:
        """Record that no file has changed up to now, so that the next build reads none whole for an old ctime."""
        if self._compared:
            with suppress(OSError):
                os.utime(self._journal, ns=(self._now, self._now))


def new_files_of(
    journal: Journal,
    files: Sequence[InputFile],
    digests: Mapping[str, str],
    base: Ledger | None,
    *,
    same_names: bool,
) -> list[InputFile]:
    """Return the files that are not in the store; reject one that was changed or renamed since.

    With `same_names`, a file with a known name and other content is another file.
    """
    if base is None:
        return list(files)
    taken = TakenFiles(journal, base)
    new_files = [file for file in files if not taken.find(file, entry_digest(file.name, digests[file.path]))]
    names = {entry.name: entry for entry in base.inputs}
    # Entries that no file matches, by size. A new file may be one of them under another name.
    unmatched: dict[int, list[TakenFile]] = {}
    for entry in (entry for entries in taken.left.values() for entry in entries if entry.taken):
        unmatched.setdefault(entry.bytes, []).append(entry)
    for file in new_files:
        old = names.get(file.name)
        if old is not None and not same_names and file.suffix in IN_MEMORY:
            raise StoreExistsError(
                f"{journal.out}: contains other records from memory than these; pass rebuild=True to replace them, "
                "or options=tm.PrepareOptions(same_names=True) to add these"
            )
        if old is not None and not same_names:
            raise StoreExistsError(
                f"{journal.out}: files that are in a store must stay as they were, got {file.path} with other "
                f"content than {old.name} had ({old.bytes} -> {file.bytes} bytes); put new records into files "
                "with new names, say same_names=True if it is another file, or rebuild=True"
            )
        for entry in unmatched.get(file.bytes, ()):
            if entry_digest(entry.name, digests[file.path]) == entry.digest:
                raise StoreExistsError(
                    f"{journal.out}: a file must be added once, got {file.path} with the content of {entry.name}, "
                    "which is in the store; leave it out or give it its old name, or say rebuild=True"
                )
    taken.confirm()
    return new_files
