"""What a build has to do, seen from what is there already: begin, go on, add files, replace, or nothing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.documents import InputFile, chunk_size, file_digest
from tokenmill.errors import StoreExistsError
from tokenmill.fingerprint import first_difference
from tokenmill.prepare.journal import Entry, Journal, Ledger, entry_digest, refuse_difference, refuse_left_shards
from tokenmill.store.layout import MANIFEST
from tokenmill.store.writer import refuse_foreign_shards


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What a build has to do."""

    journal: Journal
    identity: Mapping[str, Any]
    files: Sequence[InputFile]
    """Those that are not in the store yet."""
    digests: Mapping[str, str]
    """Path -> what tells a changed file from the same one."""
    stamps: Mapping[str, tuple[int, int] | None]
    """Path -> size and time of change, to see at the end that nobody wrote to a file meanwhile."""
    chunk_bytes: int
    base: Ledger | None
    """What the finished store has that is added to; None for a new store or one that is replaced."""
    cleared: Sequence[str] | None
    """Routes of the store that is replaced; None where nothing is."""


def place_order(
    journal: Journal,
    identity: Mapping[str, Any],
    files: Sequence[InputFile],
    *,
    chunk_bytes: int | None,
    rebuild: bool,
) -> Order:
    """Find out what there is to do, and note in the journal that it has begun; refuse what does not fit."""
    ledger, build = journal.ledger(), journal.build()
    if ledger is None and (journal.out / MANIFEST).exists() and not rebuild and build is None:
        raise StoreExistsError(
            f"{journal.out}: must not hold a store that prepare cannot add to, got one without its journal; "
            "choose another path or --rebuild it"
        )
    if build is not None and rebuild and not (build["rebuild"] and _same(build["identity"], identity)):
        build = None  # begun in another way, and given up for this
    if build is not None and not journal.has_finished_units() and not _same(build["identity"], identity):
        build = None  # nothing is lost by beginning anew
    if build is not None:
        refuse_difference(journal.out, build["identity"], identity, finished=False)
    elif ledger is not None and not rebuild:
        refuse_difference(journal.out, ledger.identity, identity, finished=True)
    replaces = rebuild or (build is not None and build["rebuild"])
    routes = list(ledger.routes) if ledger is not None else []
    if replaces:
        for route in {"", *routes}:
            refuse_foreign_shards(journal.out / route)
    else:
        refuse_left_shards(journal.out, routes)
    base = None if replaces else ledger
    contents = {file.path: file_digest(file) for file in files}
    new = _new_files(journal, files, contents, base)
    if build is not None and chunk_bytes in (None, build["chunk_bytes"]):
        chunk = build["chunk_bytes"]
    else:
        chunk = chunk_bytes or chunk_size(new)
        if new:
            journal.begin(identity, chunk, rebuild=replaces)
    return Order(
        journal=journal,
        identity=identity,
        files=new,
        digests={file.path: entry_digest(file.name, contents[file.path]) for file in new},
        stamps={file.path: stamp_of(file) for file in new},
        chunk_bytes=chunk,
        base=base,
        # Those below `out` first: what is left there then is no part of a store.
        cleared=[*filter(None, routes), ""] if replaces else None,
    )


def _same(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return first_difference(dict(old), dict(new)) is None


def stamp_of(file: InputFile) -> tuple[int, int] | None:
    """Return what changes when a file is written to: its size and time; None if it is gone."""
    try:
        found = os.stat(file.path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _new_files(
    journal: Journal, files: Sequence[InputFile], contents: Mapping[str, str], base: Ledger | None
) -> list[InputFile]:
    """Return the files that are not in the store; one that changed or was renamed since it was read is refused."""
    if base is None:
        return list(files)
    there = Counter(entry.digest for entry in base.inputs)
    unknown: list[InputFile] = []
    for file in files:
        digest = entry_digest(file.name, contents[file.path])
        if there[digest] > 0:
            there[digest] -= 1
        else:
            unknown.append(file)
    names = {entry.name: entry for entry in base.inputs}
    # Entries whose file was not given, by size: one of the new files may be it.
    gone: dict[int, list[Entry]] = {}
    for entry in base.inputs:
        if there[entry.digest] > 0 and entry.taken:
            gone.setdefault(entry.bytes, []).append(entry)
    for file in unknown:
        old = names.get(file.name)
        if old is not None:
            raise StoreExistsError(
                f"{journal.out}: files that are in a store must stay as they were, got {file.path} with other "
                f"content than {old.name} had ({old.bytes} -> {file.bytes} bytes); put new records into files "
                "with new names, or --rebuild"
            )
        for entry in gone.get(file.bytes, ()):
            if entry_digest(entry.name, contents[file.path]) == entry.digest:
                raise StoreExistsError(
                    f"{journal.out}: a file must be added once, got {file.path} with the content of {entry.name}, "
                    "which is in the store; leave it out or give it its old name, or --rebuild"
                )
    return unknown
