"""Files of a build in `OUT/.prepare`, from which any later call continues after a crash.

inputs.json       ledger of the finished store: its arguments, input files and counts
build.json        the build that was begun: its arguments, and how inputs are cut
units.jsonl       the list of tasks; workers, executors and parts take indices from it (see `tasks`)
job-<digest>.json all that workers need in addition to the list
digests/<key>     digests of input files, over all their bytes
scans/<key>       hashes of the records of a unit, with `deduplicate` or `max_items`
fates/<digest>    fates of the records of a unit, if not all are taken
units/<key>/      a finished segment of a unit: its shards, and `result.json`; the key is a digest of its content
units/.tmp-<key>/ a folder for each attempt at a unit
workers/<name>    progress of a worker with its unit; `<key>.failed`: why a unit failed
stopped.txt       why the build ended before it was finished
publish.json      redo log: finished units are being moved into the store
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import xxhash

from tokenmill.build.counts import Counts, UnitCounts
from tokenmill.build.notes import WORKERS
from tokenmill.documents import Unit
from tokenmill.encode.hub import is_hub_name
from tokenmill.errors import StoreCorruptError, StoreMissingError, TokenmillError
from tokenmill.fingerprint import digest
from tokenmill.store import layout, writer
from tokenmill.store.files import in_threads, make_folder, write_atomically
from tokenmill.tables import as_json, read_table

BUILD = "build.json"
PUBLISH = "publish.json"
FINISHED = "inputs.json"
RESULT = "result.json"
ROUTES = "routes"
UPLOADED = "uploaded.json"
"""Record of a unit whose arrays were uploaded and removed (see `uploads`)."""
UNITS = "units.jsonl"
STOPPED = "stopped.txt"
"""File with the error that ended the build, for people."""
_UNNAMED_ROUTE = "store"
"""Folder of the route without a name."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitResult:
    """Result of a segment of a unit; most units have one segment (see `unit`)."""

    key: str
    """Name of its folder."""
    counts: UnitCounts
    shards: Mapping[str, tuple[layout.ShardInfo, ...]]
    """Route -> its shards, named after their files in the folder."""
    origins: Mapping[str, Mapping[str, layout.FileInfo]] = field(default_factory=dict)
    """Route -> files with the origins of its documents."""
    is_last: bool = True
    batches: int = 0
    """Number of batches of the unit up to the end of this segment; 0 for the last one."""
    place: int = 0
    """Number of records up to the end of this segment that passed the filters by length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningBuild:
    """Arguments of the build that was begun."""

    identity: Mapping[str, Any]
    """Tokenizer, recipe and options: what all builds of a store must share."""
    chunk_bytes: int
    rebuild: bool
    tokenizer: str = ""
    """Name of the tokenizer on the hub, with its commit; empty for others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenFile:
    """An input file of a finished store."""

    name: str
    bytes: int
    digest: str
    """Digest of its name without folders, its size and a sample of its content."""
    taken: Mapping[str, tuple[int, int]]
    """Route -> its documents and tokens; routes without any are left out."""
    content: str = ""
    """XXH3-128 of all its bytes; empty if it had changed when the build ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """Record of a finished store: the arguments of its builds, its input files, and counts."""

    identity: Mapping[str, Any]
    routes: tuple[str, ...]
    """Stores below `out`; the empty name is `out` itself."""
    inputs: tuple[TakenFile, ...]
    counts: Counts
    scans: tuple[str, ...]
    """Names of the hashes of its records, in order, for a build with `deduplicate` or `max_items`."""

    def to_json(self) -> dict[str, Any]:
        """Return the content of `inputs.json`, in which the counts are not nested."""
        counts = self.counts
        return {
            "identity": as_json(dict(self.identity)),
            "routes": list(self.routes),
            "inputs": as_json(self.inputs),
            "counts": dict(sorted(counts.skipped.items())),
            "listed": as_json(counts.listed),
            "truncated": counts.truncated,
            "notes": dict(sorted(counts.notes.items())),
            **({"noted": _sorted(counts.noted)} if counts.noted else {}),
            "text_bytes": counts.text_bytes,
            "scans": list(self.scans),
        }

    @classmethod
    def read(cls, path: Path) -> Ledger | None:
        """Read a file that was written from `to_json`; None if it does not exist."""
        table = read_signed(path)
        if table is None:
            return None
        names = ("truncated", "notes", "noted", "text_bytes", "listed")
        counts = {"skipped": table.pop("counts", {}), **{name: table.pop(name) for name in names if name in table}}
        ledger = _typed(cls, {**table, "counts": counts}, path)
        for file in ledger.inputs:
            for route, (documents, tokens) in file.taken.items():
                ledger.counts.take(route, documents, tokens)
        return ledger


def _sorted(noted: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    return {route: dict(sorted(firsts.items())) for route, firsts in sorted(noted.items())}


class Journal:
    """The folder `.prepare` of a store or of a family of stores."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out / layout.JOURNAL_FOLDER
        self.units = self.folder / "units"
        self.digests = self.folder / "digests"
        self.scans = self.folder / "scans"
        self.fates = self.folder / "fates"
        self.workers = self.folder / WORKERS

    def running(self) -> RunningBuild | None:
        """Return the build that was begun; None if there is none."""
        return read_record(RunningBuild, self.folder / BUILD)

    def ledger(self) -> Ledger | None:
        """Return the ledger of the finished store; None if there is none that prepare made."""
        return Ledger.read(self.folder / FINISHED)

    def hub_tokenizer(self) -> str | None:
        """Return the pinned hub name of the tokenizer of the build or store; None if it has none from the hub."""
        running, ledger = self.running(), self.ledger()
        if running is not None:
            return running.tokenizer or None
        if ledger is None or not ledger.routes:
            return None
        try:
            name = layout.read_manifest(self.out / ledger.routes[0]).recipe.get("tokenizer")
        except StoreMissingError:  # its publication was interrupted
            return None
        return name if isinstance(name, str) and is_hub_name(name) else None

    def time_of(self, name: str) -> int:
        """Return the mtime of one of its files in nanoseconds; 0 if it does not exist."""
        try:
            return (self.folder / name).stat().st_mtime_ns
        except OSError:
            return 0

    def begin(self, build: RunningBuild) -> None:
        """Begin a build; everything of an earlier one is removed."""
        self.drop()
        make_folder(self.units)
        make_folder(self.workers)
        write_signed(self.folder / BUILD, as_json(build))

    def drop(self) -> None:
        """Remove the running build and its units, not the finished store."""
        for name in (BUILD, UNITS, STOPPED):
            (self.folder / name).unlink(missing_ok=True)
        # Renamed first, so that a worker that still runs finds its build is over.
        dropped = self.folder / ".tmp-units"
        shutil.rmtree(dropped, ignore_errors=True)
        with suppress(FileNotFoundError):
            os.rename(self.units, dropped)
        remove = partial(shutil.rmtree, ignore_errors=True)
        for _ in in_threads(remove, list(dropped.glob("*"))):
            pass
        for folder in (dropped, self.workers, self.digests):
            remove(folder)
        for job in self.folder.glob("job-*.json"):
            job.unlink()

    @contextmanager
    def recorded_end(self) -> Iterator[None]:
        """Write why the running build ends, if an error ends it. A killed process leaves its lease."""
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
        """Return whether the running build has a finished unit."""
        return self.units.is_dir() and any(not name.startswith(".") for name in os.listdir(self.units))

    def drop_other_units(self, keys: Set[str]) -> None:
        """Remove units of inputs that are no longer part of the build, finished or not."""
        for folder in list(self.units.iterdir()):
            if folder.name.removeprefix(".tmp-").partition("-")[0] not in keys:
                shutil.rmtree(folder)

    def drop_unit(self, key: str) -> None:
        """Remove a finished unit."""
        for folder in (self.units / key, *self.units.glob(f"{key}-*")):
            shutil.rmtree(folder)

    def drop_unreadable(self) -> None:
        """Remove damaged records, for a store that is rebuilt."""
        for name, read in ((BUILD, self.running), (FINISHED, self.ledger)):
            try:
                read()
            except StoreCorruptError:
                (self.folder / name).unlink()

    def drop_scans(self, kept: Sequence[str]) -> None:
        """Remove fates, and scans that later builds do not need."""
        shutil.rmtree(self.fates, ignore_errors=True)
        for file in list(self.scans.iterdir()) if self.scans.is_dir() else []:
            if file.name not in kept:
                file.unlink()
        if self.scans.is_dir() and not kept:
            self.scans.rmdir()


def segment_name(key: str, index: int) -> str:
    """Return the name of the folder of a segment of a unit."""
    return key if index == 0 else f"{key}-{index}"


def unit_results(units: Path, key: str) -> tuple[UnitResult, ...]:
    """Return the finished segments of a unit up to the first that is missing; the unit is done if one `is_last`."""
    results: list[UnitResult] = []
    while not (results and results[-1].is_last):
        result = unit_result(units, segment_name(key, len(results)))
        if result is None:
            break
        results.append(result)
    return tuple(results)


def unit_result(units: Path, key: str) -> UnitResult | None:
    """Return the result of a finished segment; None if it is not finished, or a file is missing or cut."""
    try:
        result = read_record(UnitResult, units / key / RESULT)
        if result is not None and not (units / key / UPLOADED).exists():
            check_unit(units / key, result)
    except StoreCorruptError:
        return None  # it is done again
    return result


def check_unit(folder: Path, result: UnitResult) -> None:
    """Raise StoreCorruptError if files of a segment are missing or have another size."""
    for route, shards in result.shards.items():
        for shard in shards:
            writer.check_sizes(route_folder(folder, route), shard.stored_files)
    for route, files in result.origins.items():
        writer.check_sizes(route_folder(folder, route), files)


def route_folder(unit: Path, route: str) -> Path:
    """Return the folder of the shards of a route in that of a segment."""
    return unit / ROUTES / (route or _UNNAMED_ROUTE)


def write_signed(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object from `as_json` atomically, with a checksum."""
    write_atomically(path, signed(value))


def signed(value: Mapping[str, Any]) -> bytes:
    """Return a JSON object from `as_json` as bytes with a checksum."""
    return msgspec.json.encode({**value, "checksum": _checksum(value)})


def _checksum(value: Mapping[str, Any]) -> str:
    # Not by `canonical`, whose checks a value that came from JSON does not need: they take a tenth of a small unit.
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(value, order="sorted"))


def read_signed(path: Path) -> dict[str, Any] | None:
    """Read a file of `write_signed`; None if it does not exist."""
    try:
        value = msgspec.json.decode(path.read_bytes())
        checksum = value.pop("checksum")
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, KeyError, AttributeError, TypeError):
        value, checksum = {}, ""
    if checksum != _checksum(value):
        raise StoreCorruptError(
            f"{path}: its content is not what prepare wrote; start over with rebuild=True, or at another path"
        )
    return dict(value)


def read_record(kind: type[T], path: Path) -> T | None:
    """Read a record from a signed file; None if it does not exist."""
    value = read_signed(path)
    return None if value is None else _typed(kind, value, path)


def _typed(kind: type[T], value: Mapping[str, Any], path: Path) -> T:
    try:
        return read_table(kind, value, f"{path}:", error=StoreCorruptError)
    except StoreCorruptError as error:
        raise StoreCorruptError(
            f"{path}: it was written by another version of tokenmill ({error}); start over with rebuild=True"
        ) from None


def unit_key(unit: Unit, versions: Mapping[str, str], how: Sequence[str]) -> str:
    """Return the digest of the content of a unit and of `how` it is made. Units with equal content share it."""
    pieces = [[versions[piece.file.path], piece.file.suffix, piece.begin, piece.end] for piece in unit.pieces]
    return digest([pieces, list(how)])
