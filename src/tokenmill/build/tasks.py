"""The units of a build as tasks: how the input is cut, which records of a unit are taken, and the key of each.

All of it is a function of the input and the options. Where records depend on those before them, as duplicates do,
every unit is a task twice: its records are hashed first, and when all are, each is written.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from tokenmill import __version__
from tokenmill.build.engines import WorkerPool
from tokenmill.build.journal import SIZE, Build, BuildSize, Journal, UnitResult, unit_key
from tokenmill.build.progress import Show
from tokenmill.build.unit import TAKEN, OpenJob, fates_of, is_whole_scan, read_worker_files
from tokenmill.build.worker import Task
from tokenmill.documents import Unit, cut_files
from tokenmill.errors import StoreCorruptError
from tokenmill.fingerprint import digest
from tokenmill.store.durable import write_atomically
from tokenmill.types import Uint8Array


@dataclass(frozen=True, kw_only=True, slots=True)
class CutInput:
    """The input of a build in units, and all that decides what becomes of them."""

    units: Sequence[Unit]
    versions: Mapping[str, str]
    """Path -> what stands for its content."""
    how: str
    """Stands for the version, the tokenizer, the recipe and the options."""
    scans: tuple[str, ...] = ()
    """Names of the hashes of the records of each unit; none where no record depends on another."""
    old_scans: tuple[str, ...] = ()
    """Those of the files that are in the store already."""
    deduplicate: bool = False
    max_items: int | None = None


def cut_build(build: Build, opened: OpenJob) -> CutInput:
    """Cut the new files of a build into units."""
    chosen = opened.chosen
    units = list(cut_files(build.files, chunk_bytes=build.chunk_bytes, skip_broken=not opened.stop))
    how = digest([__version__, dict(build.identity)])
    needs_scan = chosen.deduplicate or chosen.max_items is not None
    return CutInput(
        units=units,
        versions=build.versions,
        how=how,
        scans=tuple(unit_key(unit, build.versions, [how, "scan"]) for unit in units) if needs_scan else (),
        old_scans=build.base.scans if build.base is not None and needs_scan else (),
        deduplicate=chosen.deduplicate,
        max_items=chosen.max_items,
    )


def missing_scans(journal: Journal, cut: CutInput, *, there: Callable[[Path], bool] = is_whole_scan) -> list[Task]:
    """Return the units whose records are still to be hashed; of copies one is."""
    missing = {
        key: unit
        for unit, key in zip(cut.units if cut.scans else (), cut.scans, strict=True)
        if not there(journal.scans / key)
    }
    return [Task(unit=unit, key=key, scan=True) for key, unit in missing.items()]


def run_scans(journal: Journal, tasks: Sequence[Task], pool: WorkerPool, show: Show) -> None:
    """Hash the records of units."""
    if not tasks:
        return
    journal.scans.mkdir(exist_ok=True)
    done = 0
    with show("look for duplicates", sum(task.unit.bytes for task in tasks), lambda: (done, 0, 0)) as tick:
        for task, _ in zip(tasks, pool.run(tasks, tick), strict=True):
            done += task.unit.bytes
            tick()


def write_tasks(journal: Journal, cut: CutInput) -> list[Task]:
    """Return a task for each unit, each with a key of its own: of copies the second, third ... are numbered.

    All records that have to be must be hashed.
    """
    fates: Sequence[Uint8Array | None] = _fates(journal, cut) if cut.scans else [None] * len(cut.units)
    copies: Counter[str] = Counter()
    tasks: list[Task] = []
    for unit, each in zip(cut.units, fates, strict=True):
        name = "" if each is None or bool((each == TAKEN).all()) else xxhash.xxh3_128_hexdigest(each.data)
        key = unit_key(unit, cut.versions, [cut.how, name])
        copies[key] += 1
        if copies[key] > 1:
            key = digest([key, copies[key]])
        file = journal.fates / name
        if name and each is not None:
            file.parent.mkdir(exist_ok=True)
            write_atomically(file, each.tobytes())
        tasks.append(Task(unit=unit, key=key, fates=str(file.absolute()) if name else None))
    size = BuildSize(units=len(tasks), bytes=sum(task.unit.bytes for task in tasks))
    write_atomically(journal.folder / SIZE, msgspec.json.encode(size))
    return tasks


def _fates(journal: Journal, cut: CutInput) -> list[Uint8Array]:
    """Return what becomes of the records of each unit, as if all files of the store were read again before it."""
    paths = [journal.scans / key for key in (*cut.old_scans, *cut.scans)]
    if broken := [path for path in paths if not is_whole_scan(path)]:
        raise StoreCorruptError(
            f"{broken[0]}: must hold what was found out of records, to add files, got "
            f"{'other bytes than were written' if broken[0].exists() else 'nothing'}; start over with --rebuild"
        )
    fates = fates_of(paths, deduplicate=cut.deduplicate, max_items=cut.max_items)
    return fates[len(cut.old_scans) :]


def drop_others(journal: Journal, tasks: Sequence[Task]) -> None:
    """Remove units of inputs that are no longer asked for, finished or not."""
    known = {name for task in tasks for name in (task.key, f".tmp-{task.key}")}
    for folder in list(journal.units.iterdir()):
        if folder.name not in known:
            shutil.rmtree(folder)


class Look:
    """Counts the bytes of input, documents and tokens that are done, in finished units and in those under way.

    Workers say in a file each how far they are. These are read at most so often that it takes a fiftieth of the
    time, however slow the file system is and however many they are.
    """

    def __init__(self, journal: Journal, wanted: Container[str] | None = None) -> None:
        """Of units under way, those whose keys are `wanted` count; None for all."""
        self._folder = journal.workers
        self._wanted = wanted
        self._folder.mkdir(exist_ok=True)
        self._counted: set[str] = set()
        self._done = (0, 0, 0)
        self._ahead: Mapping[str, tuple[int, int, int]] = {}
        self._next = 0.0

    def count(self, task: Task, result: UnitResult) -> None:
        """Count a unit that is finished."""
        self._counted.add(task.key)
        bytes_, documents, tokens = self._done
        counts = result.counts
        self._done = bytes_ + task.unit.bytes, documents + counts.documents, tokens + counts.tokens

    def __call__(self) -> tuple[int, int, int]:
        """Return how much is done."""
        begin = time.monotonic()
        if begin >= self._next:
            self._ahead = read_worker_files(self._folder)
            now = time.monotonic()
            self._next = now + 50 * (now - begin)
        ahead = [
            place
            for key, place in self._ahead.items()
            if key not in self._counted and (self._wanted is None or key in self._wanted)
        ]
        position, documents, tokens = map(sum, zip(self._done, *ahead, strict=True))
        return position, documents, tokens
