"""Publication, which makes stores of finished units, as a redo log, because it may be interrupted anywhere.

`publish.json` lists every move, so whoever starts next finishes it first. A reader sees the old store, none, or the
new one, and never a mixture, because each manifest is written last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tokenmill.build.journal import (
    FINISHED,
    PUBLISH,
    UPLOADED,
    Journal,
    Ledger,
    read_record,
    route_folder,
    write_signed,
)
from tokenmill.errors import StoreCorruptError
from tokenmill.store import layout, writer
from tokenmill.store.files import in_threads, make_folder, sync_folder, write_atomically
from tokenmill.store.origins import origins_file, publish_origins
from tokenmill.tables import as_json

MAX_INPUTS = 1000
"""Number of input files that a manifest lists; `.prepare/inputs.json` lists all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitShards:
    """Shards of a segment of a unit, to be moved into stores."""

    key: str
    """Name of its folder."""
    shards: Mapping[str, tuple[layout.ShardInfo, ...]]
    """Route -> shards."""
    pieces: tuple[tuple[str, str, int], ...] = ()
    """For each piece of the unit: name of its file, noun for its records, and number of lines before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadedUnit:
    """Record of a segment whose files are in object storage and no longer here."""

    shards: Mapping[str, tuple[layout.ShardInfo, ...]]
    """Route -> shards under their names in the store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Publication:
    """All that is needed to make finished units stores, also for another process."""

    is_cleared: bool
    """False while the store that is replaced is still to be removed."""
    cleared: tuple[str, ...]
    """Routes of that store."""
    units: tuple[UnitShards, ...]
    """In order."""
    base: Mapping[str, tuple[layout.ShardInfo, ...]]
    """Route -> shards of the store that is added to, which come before those of the units."""
    manifest: Mapping[str, Any]
    """Fields of `Manifest` that all stores share."""
    ledger: Ledger
    """Ledger of the finished stores, without their routes."""


def publish(journal: Journal, publication: Publication) -> None:
    """Make finished units stores. If this is interrupted, the next build finishes it."""
    write_signed(journal.folder / PUBLISH, as_json(publication))
    _finish(journal, publication)


def finish_publishing(journal: Journal) -> None:
    """Finish an earlier publication that was interrupted, if there is one."""
    publication = read_publication(journal)
    if publication is not None:
        _finish(journal, publication)


def read_publication(journal: Journal) -> Publication | None:
    """Return the publication that was begun; None if there is none."""
    return read_record(Publication, journal.folder / PUBLISH)


def drop_unreadable(journal: Journal) -> None:
    """Remove damaged files of the journal, for a store that is rebuilt."""
    try:
        finish_publishing(journal)
    except StoreCorruptError:
        (journal.folder / PUBLISH).unlink(missing_ok=True)
    journal.drop_unreadable()


def _finish(journal: Journal, publication: Publication) -> None:
    """Publish, from wherever an earlier attempt stopped: every step may be repeated."""
    if not publication.is_cleared:
        for route in publication.cleared:
            _clear_store(journal.out, route)
        write_signed(journal.folder / PUBLISH, as_json(replace(publication, is_cleared=True)))
    shards = {route: list(base) for route, base in publication.base.items()}
    moves: list[tuple[UnitShards, str, int]] = []
    for unit in publication.units:
        for route, unit_shards in unit.shards.items():
            route_shards = shards.setdefault(route, [])
            moves.append((unit, route, len(route_shards)))
            route_shards.extend(unit_shards)
    for route in shards:
        make_folder(journal.out / route)
    origins: list[Path] = []
    for (_, route, first), (moved, files) in zip(moves, in_threads(partial(_move, journal), moves), strict=True):
        shards[route][first : first + len(moved)] = moved
        origins.extend(files)
    for _ in in_threads(sync_folder, origins):
        pass
    for route, route_shards in shards.items():
        _write_manifest(journal.out / route, route, publication, route_shards)
    ledger = replace(publication.ledger, routes=tuple(sorted(shards)))
    write_signed(journal.folder / FINISHED, ledger.to_json())
    journal.drop()
    journal.drop_scans(ledger.scans)
    # What was dropped must be durable before the redo log goes.
    sync_folder(journal.folder)
    (journal.folder / PUBLISH).unlink()
    sync_folder(journal.folder)


def _move(journal: Journal, move: tuple[UnitShards, str, int]) -> tuple[list[layout.ShardInfo], list[Path]]:
    """Move the shards of a unit for one route into its store, from the shard number in `move` on.

    Return the shards under their new names, and the file of their origins if there is one, which is not synced.
    """
    unit, route, first = move
    uploaded = read_record(UploadedUnit, journal.units / unit.key / UPLOADED)
    if uploaded is not None:
        return list(uploaded.shards[route]), []
    folder, store, shards = route_folder(journal.units / unit.key, route), journal.out / route, unit.shards[route]
    file = origins_file(store, first)
    has_origins = publish_origins(folder, file, sum(shard.documents for shard in shards), unit.pieces)
    moved = [writer.publish_shard(shard, folder, store, first + number) for number, shard in enumerate(shards)]
    return moved, [file] if has_origins else []


def _write_manifest(store: Path, route: str, publication: Publication, shards: Sequence[layout.ShardInfo]) -> None:
    """Write the manifest of one store. Its inputs count the documents of each file in this store."""
    writer.sync_names(store)
    ledger = publication.ledger
    inputs = []
    for file in ledger.inputs[:MAX_INPUTS]:
        documents, tokens = file.taken.get(route, (0, 0))
        inputs.append({"name": file.name, "bytes": file.bytes, "documents": documents, "tokens": tokens})
    counts = ledger.counts
    skipped: dict[str, Any] = {}
    if counts.skipped:
        skipped |= {"counts": dict(sorted(counts.skipped.items())), "first": as_json(counts.listed)}
    if counts.truncated:
        skipped["truncated"] = counts.truncated
    if counts.notes:
        skipped["notes"] = dict(sorted(counts.notes.items()))
    if route in counts.noted:
        skipped["noted"] = dict(sorted(counts.noted[route].items()))
    manifest = layout.Manifest(**publication.manifest, shards=tuple(shards), inputs=tuple(inputs), skipped=skipped)
    write_atomically(store / layout.MANIFEST, layout.manifest_bytes(manifest))


def _clear_store(out: Path, route: str) -> None:
    """Remove the old store of a route, without the journal."""
    store = out / route
    if store.is_dir():
        writer.clear(store, keep=(layout.JOURNAL_FOLDER,))
    if route:
        # The new build may not have these routes.
        for folder in (store, *store.parents):
            if folder == out or not folder.is_dir() or any(folder.iterdir()):
                break
            folder.rmdir()
