"""What a build writes to disk while it runs, so that the next one can go on after any crash.

OUT/.prepare/
build.json        the build under way: what it was asked for, how inputs are cut
units/<key>/      a finished unit: its shards, and `result.json`; the key is a digest of what it was made from
units/.tmp-<key>/ a folder for each attempt at a unit, perhaps with a `checkpoint-2.json`
units.jsonl       the list of units, where separate processes do parts of it (see `parts`)
workers/<name>    how far a worker is with its unit
size.json         how many units there are, to show progress
job-<digest>.json what workers need beside their units, where they cannot be sent it
scans/<key>       hashes of the records of a unit, with `deduplicate` or `max_items`
fates/<digest>    what becomes of each record of a unit, where that is not the same for all
publish.json      units are being moved into the store: the next build finishes that first
inputs.json       the finished store: what it was asked for, and which files are in it
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import xxhash

from tokenmill.documents import BadRecord, InputFile, Unit, chunk_size, content_digest, file_digest
from tokenmill.documents.units import IN_MEMORY
from tokenmill.encode.hub import is_hub_name
from tokenmill.errors import StoreCorruptError, StoreExistsError, StoreMissingError, TokenmillError
from tokenmill.fingerprint import digest, first_difference
from tokenmill.store import layout, writer
from tokenmill.store.files import in_threads, make_folder, sync_folder, write_atomically
from tokenmill.store.origins import origins_file, publish_origins
from tokenmill.tables import as_json, read_table

MAX_LISTED = 1000
"""How many bad records are listed; all are counted."""
MAX_INPUTS = 1000
"""How many input files a manifest lists; `.prepare/inputs.json` has them all."""
BUILD = "build.json"
PUBLISH = "publish.json"
FINISHED = "inputs.json"
RESULT = "result.json"
ROUTES = "routes"
WORKERS = "workers"
UNITS = "units.jsonl"
SIZE = "size.json"
STOPPED = "stopped.txt"
"""Why the build under way ended before it was finished, for people; not there while one runs."""
_UNNAMED_ROUTE = "store"
"""Folder of the route without a name."""

T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class UnitCounts:
    """What became of the records of a unit so far."""

    batches: int = 0
    """Batches that are done; a unit is read in the same batches every time, so it goes on from there."""
    place: int = 0
    """Records that passed the filters by length."""
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    truncated: int = 0
    lines: list[int]
    """Lines of each piece."""
    taken: dict[str, list[list[int]]] = field(default_factory=dict)
    """Route -> [piece, documents, tokens] of each piece that gave some documents, in order."""
    skipped: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    """What happened to records that were taken, such as tools that the chat template does not write."""
    noted: dict[str, dict[str, int]] = field(default_factory=dict)
    """Route -> note -> the first document of the unit, there, of which it is true."""
    bad: list[BadRecord] = field(default_factory=list)
    """The first bad records: `MAX_LISTED` of them, and the first of every other reason."""

    def note_bad(self, bad: Sequence[BadRecord]) -> None:
        """Count the bad records of a batch, and list the first."""
        for record in bad:
            add_counts(self.skipped, {record.reason: record.count})
        reasons = {record.reason for record in self.bad} if len(self.bad) + len(bad) > MAX_LISTED else set()
        for record in sorted(bad, key=lambda record: (record.piece, record.line)):
            if len(self.bad) < MAX_LISTED or record.reason not in reasons:
                self.bad.append(record)
                reasons.add(record.reason)

    def note_taken(self, route: str, piece: int, documents: int, tokens: int) -> None:
        """Count documents that a piece gave to a route; pieces come in order."""
        rows = self.taken.setdefault(route, [])
        if not rows or rows[-1][0] != piece:
            rows.append([piece, 0, 0])
        rows[-1][1] += documents
        rows[-1][2] += tokens
        self.documents += documents
        self.tokens += tokens


def add_counts(total: dict[str, int], counts: Mapping[str, int]) -> None:
    """Add counts by name to a total; names that are new to it come last, in the order of `counts`."""
    for name, count in counts.items():
        total[name] = total.get(name, 0) + count


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitResult:
    """What became of a unit."""

    key: str
    counts: UnitCounts
    shards: Mapping[str, tuple[layout.ShardInfo, ...]]
    """Route -> its shards, named after their files in the unit's folder."""
    origins: Mapping[str, Mapping[str, layout.FileInfo]] = field(default_factory=dict)
    """Route -> files that say where its documents come from."""
    finished: bool = True
    """False where a bad record stopped the unit: nothing of it may be used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnfinishedBuild:
    """What the build under way was asked for."""

    identity: Mapping[str, Any]
    """What two builds must have in common to be one: tokenizer, recipe, options."""
    chunk_bytes: int
    rebuild: bool
    tokenizer: str = ""
    """Name of the tokenizer on the hub, with its commit; empty for others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildSize:
    """How much there is to do."""

    units: int
    bytes: int
    """Of input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenFile:
    """A file that is in a store."""

    name: str
    bytes: int
    digest: str
    """Of its name without folders, its size and a sample of its content."""
    taken: Mapping[str, tuple[int, int]]
    """Route -> documents and tokens that it gave; routes to which it gave none are left out."""
    content: str = ""
    """XXH3-128 of all its bytes; empty in journals from before this was noted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedBuild:
    """What the builds of a finished store were asked for, and what they took."""

    identity: Mapping[str, Any]
    routes: tuple[str, ...]
    """Stores below `out`; the empty name is `out` itself."""
    inputs: tuple[TakenFile, ...]
    counts: Mapping[str, int]
    """Records that were left out, by reason."""
    listed: tuple[Mapping[str, Any], ...]
    """The first bad ones of them."""
    truncated: int
    notes: Mapping[str, int]
    noted: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Route -> note -> the first document of the store of which it is true."""
    text_bytes: int
    scans: tuple[str, ...]
    """Names of the hashes of its records, in order, where duplicates are looked for or only so many are taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitShards:
    """The shards of a finished unit by route, to be moved into stores."""

    key: str
    shards: Mapping[str, tuple[layout.ShardInfo, ...]]
    pieces: tuple[tuple[str, str, int], ...] = ()
    """Of each piece of the unit the name of its file, what is counted there, and how many stand before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Publication:
    """All that it takes to make finished units stores, for whoever has to finish it."""

    phase: Literal["clear", "move"]
    """Whether the store that is replaced is still to be cleared."""
    cleared: tuple[str, ...]
    """Routes of that store."""
    units: tuple[UnitShards, ...]
    """In order."""
    base: Mapping[str, tuple[layout.ShardInfo, ...]]
    """Route -> shards that are there already, before those of the units."""
    manifest: Mapping[str, Any]
    """Fields of `Manifest` that all stores have in common."""
    ledger: FinishedBuild
    """What is in the stores then, but for their routes."""


class Journal:
    """The folder `.prepare` of a store or of a family of stores."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out / layout.JOURNAL_FOLDER
        self.units = self.folder / "units"
        self.scans = self.folder / "scans"
        self.fates = self.folder / "fates"
        self.workers = self.folder / WORKERS

    def unfinished(self) -> UnfinishedBuild | None:
        """Return what the build under way was asked for, None if there is none."""
        return read_record(UnfinishedBuild, self.folder / BUILD)

    def finished(self) -> FinishedBuild | None:
        """Return what is in the finished store, None if there is none that prepare made."""
        return read_record(FinishedBuild, self.folder / FINISHED)

    def hub_tokenizer(self) -> str | None:
        """Return the pinned hub name of the tokenizer that the folder is built with; None if it has another one."""
        unfinished, finished = self.unfinished(), self.finished()
        if unfinished is not None:
            return unfinished.tokenizer or None
        if finished is None or not finished.routes:
            return None
        try:
            name = layout.read_manifest(self.out / finished.routes[0]).recipe.get("tokenizer")
        except StoreMissingError:  # its publication was interrupted
            return None
        return name if isinstance(name, str) and is_hub_name(name) else None

    def time_of(self, name: str) -> int:
        """Return when one of its files was written, in nanoseconds; 0 if it is not there."""
        try:
            return (self.folder / name).stat().st_mtime_ns
        except OSError:
            return 0

    def begin(self, build: UnfinishedBuild) -> None:
        """Note a new build; what another left is removed."""
        self.drop()
        make_folder(self.units)
        make_folder(self.workers)
        write_signed(self.folder / BUILD, as_json(build))

    def drop(self) -> None:
        """Forget the build under way and its units, not the finished store."""
        for name in (BUILD, UNITS, SIZE, STOPPED):
            (self.folder / name).unlink(missing_ok=True)
        # Renamed first: a worker that still runs finds that its build is over.
        dropped = self.folder / ".tmp-units"
        shutil.rmtree(dropped, ignore_errors=True)
        with suppress(FileNotFoundError):
            os.rename(self.units, dropped)
        remove = partial(shutil.rmtree, ignore_errors=True)
        for _ in in_threads(remove, list(dropped.glob("*"))):
            pass
        for folder in (dropped, self.workers):
            remove(folder)
        for job in self.folder.glob("job-*.json"):
            job.unlink()

    @contextmanager
    def end_noted(self) -> Iterator[None]:
        """Write down why the build under way ends, if an error ends it; a killed process leaves its lease."""
        stopped = self.folder / STOPPED
        stopped.unlink(missing_ok=True)
        try:
            yield
        except BaseException as error:
            why = str(error) if isinstance(error, TokenmillError) else f"{type(error).__name__} {error}".strip()
            with suppress(OSError):
                stopped.write_text(why[:1000], encoding="utf-8")
            raise

    def has_finished_units(self) -> bool:
        """Tell whether the build under way has a unit to lose."""
        return self.units.is_dir() and any(not name.startswith(".") for name in os.listdir(self.units))

    def publish(self, publication: Publication) -> None:
        """Make finished units stores; if this is interrupted, the next build finishes it."""
        write_signed(self.folder / PUBLISH, as_json(publication))
        self._finish(publication)

    def finish_publishing(self) -> None:
        """Finish an earlier `publish` that was interrupted, if there is one."""
        publication = read_record(Publication, self.folder / PUBLISH)
        if publication is not None:
            self._finish(publication)

    def drop_unreadable(self) -> None:
        """Remove the damaged files of the journal, for a store that is built anew."""
        try:
            self.finish_publishing()
        except StoreCorruptError:
            (self.folder / PUBLISH).unlink(missing_ok=True)
        for name, kind in ((BUILD, UnfinishedBuild), (FINISHED, FinishedBuild)):
            try:
                read_record(kind, self.folder / name)
            except StoreCorruptError:
                (self.folder / name).unlink()

    def _finish(self, publication: Publication) -> None:
        """Publish, from wherever an earlier try stopped.

        Every step may be done twice. A reader sees the old store, none, or the new one; never a mixture.
        """
        if publication.phase == "clear":
            for route in publication.cleared:
                _clear_store(self.out, route)
            write_signed(self.folder / PUBLISH, as_json(replace(publication, phase="move")))
        shards = {route: list(base) for route, base in publication.base.items()}
        moves: list[tuple[UnitShards, str, int]] = []
        for unit in publication.units:
            for route, unit_shards in unit.shards.items():
                route_shards = shards.setdefault(route, [])
                moves.append((unit, route, len(route_shards)))
                route_shards.extend(unit_shards)
        for route in shards:
            make_folder(self.out / route)
        origins: list[Path] = []
        for (_, route, first), (moved, files) in zip(moves, in_threads(self._move, moves), strict=True):
            shards[route][first : first + len(moved)] = moved
            origins.extend(files)
        for _ in in_threads(sync_folder, origins):
            pass
        for route, route_shards in shards.items():
            _write_manifest(self.out / route, route, publication, route_shards)
        finished = replace(publication.ledger, routes=tuple(sorted(shards)))
        ledger = dict(as_json(finished))
        if not finished.noted:
            del ledger["noted"]  # as in journals from before there were notes
        write_signed(self.folder / FINISHED, ledger)
        self.drop()
        self._drop_scans(finished.scans)
        # What was dropped must be gone for good before the file that says so.
        sync_folder(self.folder)
        (self.folder / PUBLISH).unlink()
        sync_folder(self.folder)

    def _move(self, move: tuple[UnitShards, str, int]) -> tuple[list[layout.ShardInfo], list[Path]]:
        """Move the shards of a unit for one route into its store; the first gets the number that `move` says.

        Returns the shards under their new names, and the file of their origins, if any, which is not synced yet.
        """
        unit, route, first = move
        folder, store, shards = route_folder(self.units / unit.key, route), self.out / route, unit.shards[route]
        file = origins_file(store, first)
        has_origins = publish_origins(folder, file, sum(shard.documents for shard in shards), unit.pieces)
        moved = [writer.publish_shard(shard, folder, store, first + number) for number, shard in enumerate(shards)]
        return moved, [file] if has_origins else []

    def _drop_scans(self, kept: Sequence[str]) -> None:
        """Remove the scans and fates that only this build needed."""
        shutil.rmtree(self.fates, ignore_errors=True)
        for file in list(self.scans.iterdir()) if self.scans.is_dir() else []:
            if file.name not in kept:
                file.unlink()
        if self.scans.is_dir() and not kept:
            self.scans.rmdir()


def _write_manifest(store: Path, route: str, publication: Publication, shards: Sequence[layout.ShardInfo]) -> None:
    """Write the manifest of one store; its inputs say what each file gave to this store, not to the others."""
    writer.sync_names(store)
    finished = publication.ledger
    inputs = []
    for file in finished.inputs[:MAX_INPUTS]:
        documents, tokens = file.taken.get(route, (0, 0))
        inputs.append({"name": file.name, "bytes": file.bytes, "documents": documents, "tokens": tokens})
    skipped: dict[str, Any] = {}
    if finished.counts:
        skipped |= {"counts": finished.counts, "first": finished.listed}
    if finished.truncated:
        skipped["truncated"] = finished.truncated
    if finished.notes:
        skipped["notes"] = finished.notes
    if route in finished.noted:
        skipped["noted"] = finished.noted[route]
    manifest = layout.Manifest(**publication.manifest, shards=tuple(shards), inputs=tuple(inputs), skipped=skipped)
    write_atomically(store / layout.MANIFEST, layout.manifest_bytes(manifest))


def _clear_store(out: Path, route: str) -> None:
    """Remove the old store of a route; in `out` itself the journal stays."""
    store = out / route
    if store.is_dir():
        writer.clear(store, keep=(layout.JOURNAL_FOLDER,))
    if route:
        # Folders of routes that the new store may not have.
        for folder in (store, *store.parents):
            if folder == out or not folder.is_dir() or any(folder.iterdir()):
                break
            folder.rmdir()


def unit_result(units: Path, key: str) -> UnitResult | None:
    """Return the result of a finished unit; None if it is not finished, or its files are not as it says."""
    try:
        result = read_record(UnitResult, units / key / RESULT)
        if result is not None:
            check_unit(units / key, result)
    except StoreCorruptError:
        return None  # it is done again
    return result


def check_unit(folder: Path, result: UnitResult) -> None:
    """Raise StoreCorruptError if files of a unit are gone or of another size."""
    for route, shards in result.shards.items():
        for shard in shards:
            writer.check_sizes(route_folder(folder, route), shard.stored_files)
    for route, files in result.origins.items():
        writer.check_sizes(route_folder(folder, route), files)


def route_folder(unit: Path, route: str) -> Path:
    """Return where a unit keeps the shards of a route."""
    return unit / ROUTES / (route or _UNNAMED_ROUTE)


def write_signed(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object, as `as_json` gives it, with a checksum, whole or not at all."""
    write_atomically(path, signed(value))


def signed(value: Mapping[str, Any]) -> bytes:
    """Return a JSON object, as `as_json` gives it, with a checksum."""
    return msgspec.json.encode({**value, "checksum": _checksum(value)})


def _checksum(value: Mapping[str, Any]) -> str:
    # Not by `canonical`, whose checks a value that came from JSON does not need: they take a tenth of a small unit.
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(value, order="sorted"))


def read_signed(path: Path) -> dict[str, Any] | None:
    """Read what `write_signed` wrote, None if it is not there."""
    try:
        value = msgspec.json.decode(path.read_bytes())
        checksum = value.pop("checksum")
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, KeyError, AttributeError, TypeError):
        value, checksum = {}, ""
    if checksum != _checksum(value):
        raise StoreCorruptError(
            f"{path}: must be as prepare wrote it, got other content; "
            "start over with rebuild=True, or at another path"
        )
    return dict(value)


def read_record(kind: type[T], path: Path) -> T | None:
    """Read a record that was written as a signed file, None if it is not there."""
    value = read_signed(path)
    try:
        return None if value is None else read_table(kind, value, f"{path}:", error=StoreCorruptError)
    except StoreCorruptError as error:
        raise StoreCorruptError(
            f"{path}: must be of this version of tokenmill, got other fields ({error}); "
            "start over with rebuild=True"
        ) from None


def unit_key(unit: Unit, versions: Mapping[str, str], how: Sequence[str]) -> str:
    """Return the digest of the content of a unit and of `how` it is made; units with the same content share it."""
    pieces = [[versions[piece.file.path], piece.file.suffix, piece.begin, piece.end] for piece in unit.pieces]
    return digest([pieces, list(how)])


def entry_digest(name: str, content: str) -> str:
    """Return the digest of a file's name without folders, and of its `file_digest`: a changed file has another."""
    return digest([name.rsplit("/", 1)[-1], content])


# What a build has to do, after what the folder holds: begin, go on, add files, replace, or nothing.


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """What a build has to do."""

    journal: Journal
    identity: Mapping[str, Any]
    files: Sequence[InputFile]
    """Those that are not in the store yet."""
    digests: Mapping[str, str]
    """Path -> its `entry_digest`."""
    stamps: Mapping[str, tuple[int, int] | None]
    """Path -> size and time of change, to see at the end that nobody wrote to a file meanwhile."""
    versions: Mapping[str, str]
    """Path -> digest that stands for its content, by which an interrupted build finds its finished units again."""
    chunk_bytes: int
    base: FinishedBuild | None
    """What the finished store has that is added to; None for a new store or one that is replaced."""
    cleared: Sequence[str] | None
    """Routes of the store that is replaced; None where nothing is."""


def begin_build(
    journal: Journal,
    identity: Mapping[str, Any],
    files: Sequence[InputFile],
    *,
    chunk_bytes: int | None,
    rebuild: bool,
    same_names: bool = False,
    tokenizer: str = "",
) -> Build:
    """Find out what there is to do, and note its beginning in the journal; refuse what does not fit the folder."""
    finished, unfinished = journal.finished(), journal.unfinished()
    _refuse_strangers(journal.out, finished.routes if finished else ())
    if finished is None and (journal.out / layout.MANIFEST).exists() and not rebuild and unfinished is None:
        raise StoreExistsError(
            f"{journal.out}: must not hold a store that prepare cannot add to, got one without its journal; "
            "choose another path, or replace it with rebuild=True"
        )
    if unfinished is not None:
        same = first_difference(dict(unfinished.identity), dict(identity)) is None
        # An unfinished build that was asked for otherwise is dropped for a rebuild, and if it has no unit to lose.
        goes_on = unfinished.rebuild and same if rebuild else same or journal.has_finished_units()
        if not goes_on:
            unfinished = None
    if unfinished is not None:
        refuse_difference(journal.out, unfinished.identity, identity, finished=False)
    elif finished is not None and not rebuild:
        refuse_difference(journal.out, finished.identity, identity, finished=True)
    replaces = rebuild or (unfinished is not None and unfinished.rebuild)
    routes = finished.routes if finished is not None else ()
    if replaces:
        for route in {"", *routes}:
            writer.refuse_foreign_shards(journal.out / route)
    else:
        refuse_left_shards(journal.out, routes)
    base = None if replaces else finished
    digests = {file.path: file_digest(file) for file in files}
    new_files = _new_files(journal, files, digests, base, same_names=same_names)
    if unfinished is not None and chunk_bytes in (None, unfinished.chunk_bytes):
        chunk_bytes = unfinished.chunk_bytes
    else:
        chunk_bytes = chunk_bytes or chunk_size(new_files)
        if new_files:
            build = UnfinishedBuild(
                identity=identity,
                chunk_bytes=chunk_bytes,
                rebuild=replaces,
                tokenizer=tokenizer if is_hub_name(tokenizer) else "",
            )
            journal.begin(build)
    entries = {file.path: entry_digest(file.name, digests[file.path]) for file in new_files}
    return Build(
        journal=journal,
        identity=identity,
        files=new_files,
        digests=entries,
        stamps={file.path: stamp_of(file) for file in new_files},
        versions=_versions(journal, new_files, entries),
        chunk_bytes=chunk_bytes,
        base=base,
        # `out` itself comes last, after the stores below it.
        cleared=[*filter(None, routes), ""] if replaces else None,
    )


def _versions(journal: Journal, files: Sequence[InputFile], entries: Mapping[str, str]) -> dict[str, str]:
    """Return a digest that stands for the content of each file, by path.

    The sample of a file may miss what was written to it after the build began. So that units made before are not
    used, the time of the change is part of the digest then.
    """
    begun = journal.time_of(BUILD)
    changes = {file.path: changed_ns(file) for file in files}
    return {
        path: entry if changes[path] <= begun else digest([entry, changes[path]]) for path, entry in entries.items()
    }


def changed_ns(file: InputFile) -> int:
    """Return when a file was changed last, by the clock of the system, in nanoseconds; 0 if it is gone."""
    try:
        return os.stat(file.path).st_ctime_ns
    except OSError:
        return 0


def stamp_of(file: InputFile) -> tuple[int, int] | None:
    """Return the size and time of change of a file; None if it is gone."""
    try:
        status = os.stat(file.path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


class TakenFiles:
    """The files that are in a store; each is matched with one file of the input."""

    def __init__(self, journal: Journal, finished: FinishedBuild) -> None:
        self.left: dict[str, list[TakenFile]] = {}
        """Digest -> files with it, as copies share one; without those that are matched already."""
        for entry in finished.inputs:
            self.left.setdefault(entry.digest, []).append(entry)
        self._journal = journal.folder / FINISHED
        self._since = journal.time_of(FINISHED)
        self._now = time.time_ns()
        self._compared = False

    def find(self, file: InputFile, digest: str) -> bool:
        """Tell whether a file is one of them.

        A file may change and keep its name, size and samples: one that was written to since is read whole.
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
        """Note that no file has changed up to now, so that none is read whole again because of an older change."""
        if self._compared:
            with suppress(OSError):
                os.utime(self._journal, ns=(self._now, self._now))


def _new_files(
    journal: Journal,
    files: Sequence[InputFile],
    digests: Mapping[str, str],
    base: FinishedBuild | None,
    *,
    same_names: bool,
) -> list[InputFile]:
    """Return the files that are not in the store; refuse one that changed or was renamed since it was taken.

    With `same_names`, one that seems to have changed is another file.
    """
    if base is None:
        return list(files)
    taken = TakenFiles(journal, base)
    new_files = [file for file in files if not taken.find(file, entry_digest(file.name, digests[file.path]))]
    names = {entry.name: entry for entry in base.inputs}
    # Entries that no file matches, by size: a new file may be one of them, renamed.
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


def refuse_difference(out: Path, old: Mapping[str, Any], new: Mapping[str, Any], *, finished: bool) -> None:
    """Raise if a build is asked for otherwise than the one in the folder; the error names the first difference."""
    difference = first_difference(dict(old), dict(new))
    if difference is None:
        return
    path, before, after = difference
    what = "a store must be added to as it was made" if finished else "an unfinished build must go on as it began"
    raise StoreExistsError(
        f"{out}: {what}, got {path} {before!r} -> {after!r}; "
        "give what was given before, choose another path, or start over with rebuild=True"
    )


def _refuse_strangers(out: Path, routes: Sequence[str]) -> None:
    """Raise if the folder, or that of a route, holds files that no build wrote."""
    folders = {out: {layout.JOURNAL_FOLDER}} | {out / route: set() for route in routes if route}
    for route in routes:
        parts = route.split("/") if route else []
        for depth, part in enumerate(parts):
            folders.setdefault(out.joinpath(*parts[:depth]), set()).add(part)
    for folder, known in folders.items():
        if folder.is_dir():
            writer.refuse_strangers(folder, known)


def refuse_left_shards(out: Path, routes: Sequence[str]) -> None:
    """Raise if there are shards that no manifest lists: new ones would have their names."""
    for route in {"", *routes}:
        listed = {shard.name for shard in layout.read_manifest(out / route).shards} if route in routes else set()
        shards = {child.name for child in (out / route).iterdir() if layout.is_shard_name(child.name)}
        if unlisted := sorted(shards - listed):
            raise StoreExistsError(
                f"{out / route}: must hold no shards but those of its manifest, got {unlisted[0]!r}; "
                "choose another path, or say rebuild=True if it may be deleted"
            )
