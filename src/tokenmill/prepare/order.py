"""What a build has to do, seen from what is there already: begin, go on, add files, replace, or nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.documents import InputFile, chunk_size
from tokenmill.errors import StoreExistsError
from tokenmill.fingerprint import first_difference
from tokenmill.prepare.journal import Journal, Ledger, digests_of, refuse_difference
from tokenmill.store.layout import MANIFEST


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What a build has to do."""

    journal: Journal
    identity: Mapping[str, Any]
    files: Sequence[InputFile]
    """Those that are not in the store yet."""
    num_files: int
    """All that were asked for."""
    digests: Mapping[str, str]
    """Path -> what tells a changed file from the same one."""
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
    stranger = ledger is None and (journal.out / MANIFEST).exists()
    if stranger and not rebuild and build is None:
        raise StoreExistsError(
            f"{journal.out}: must not hold a store that prepare cannot add to, got one without its journal; "
            "choose another path or --rebuild it"
        )
    going_on = build is not None and (build["rebuild"] or not rebuild)
    if build is not None and going_on and rebuild:
        going_on = first_difference(build["identity"], dict(identity)) is None
    if build is not None and going_on:
        refuse_difference(journal.out, build["identity"], identity, finished=False)
    elif ledger is not None and not rebuild:
        refuse_difference(journal.out, ledger.identity, identity, finished=True)
    replaces = rebuild or (build is not None and going_on and build["rebuild"])
    base = None if replaces else ledger
    digests = digests_of(files)
    new = _new_files(journal, files, digests, base)
    chunk = chunk_bytes or chunk_size(sum(file.bytes for file in new))
    if build is not None and going_on:
        chunk = build["chunk_bytes"]
    elif new:
        journal.begin(identity, chunk, rebuild=replaces)
    return Order(
        journal=journal,
        identity=identity,
        files=new,
        num_files=len(files),
        digests=digests,
        chunk_bytes=chunk,
        base=base,
        cleared=_cleared(ledger, stranger) if replaces else None,
    )


def _cleared(ledger: Ledger | None, stranger: bool) -> list[str]:
    return list(ledger.routes) if ledger is not None else [""] * stranger


def _new_files(
    journal: Journal, files: Sequence[InputFile], digests: Mapping[str, str], base: Ledger | None
) -> list[InputFile]:
    """Return the files that are not in the store; one that has changed since it was read is refused."""
    if base is None:
        return list(files)
    there = Counter(entry.digest for entry in base.inputs)
    names = {entry.name: entry for entry in base.inputs}
    new: list[InputFile] = []
    for file in files:
        if there[digests[file.path]] > 0:
            there[digests[file.path]] -= 1
            continue
        old = names.get(file.name)
        if old is not None:
            raise StoreExistsError(
                f"{journal.out}: files that are in a store must stay as they were, got {file.path} with other "
                f"content ({old.bytes} -> {file.bytes} bytes); put new records into new files, or --rebuild"
            )
        new.append(file)
    return new
