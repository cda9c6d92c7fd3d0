"""Running the units of a build, in this process or in others, and counting what came of them."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from tokenmill import __version__
from tokenmill.documents import Unit, cut_files
from tokenmill.errors import DocumentError, StoreCorruptError
from tokenmill.fingerprint import digest
from tokenmill.prepare.bench import Bench
from tokenmill.prepare.duplicates import fates_of
from tokenmill.prepare.journal import Journal, unit_key
from tokenmill.prepare.order import Order, stamp_of
from tokenmill.prepare.pool import run_here, run_in_processes
from tokenmill.prepare.progress import ProgressBar
from tokenmill.prepare.select import TAKEN
from tokenmill.prepare.tally import Tally
from tokenmill.prepare.task import Task
from tokenmill.prepare.unit import UnitResult, read_progress, read_result
from tokenmill.store.durable import write_atomically

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tokenmill.encode.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of the units of a build."""

    results: Sequence[UnitResult]
    """In input order."""
    resumed: int
    """How many of them an earlier try had finished."""
    tally: Tally
    scans: Sequence[str]
    """Hashes of the records, where duplicates were looked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Crew:
    """Who does the work."""

    bench: Bench
    """The tools of this process, which works itself where there is one worker."""
    workers: int
    lock: int
    """What keeps other builds away as long as a process has it."""
    progress: bool | None


def drive(order: Order, recipe: Recipe, crew: Crew) -> Outcome:
    """Run all units that are not done yet; results are those of an uninterrupted run in one process."""
    units = list(cut_files(order.files, chunk_bytes=order.chunk_bytes))
    how = digest([__version__, dict(order.identity)])
    chosen = recipe.preprocessing
    scans: list[str] = []
    fates: Sequence[npt.NDArray[np.uint8] | None] = [None] * len(units)
    if chosen.deduplicate or chosen.max_items is not None:
        scans = [unit_key(unit, order.digests, [how, "scan"]) for unit in units]
        _scan(order, units, scans, crew)
        fates = _fates(order, scans, recipe)
    tasks = _tasks(order, units, fates, how)
    _drop_others(order.journal, {task.key for task in tasks})
    tally = Tally(stop=crew.bench.job.options.on_error == "stop")
    done = {task.key: found for task in tasks if (found := read_result(order.journal.units, task.key)) is not None}
    bar = ProgressBar(sum(unit.bytes for unit in units), lambda: _so_far(tally, order), shown=crew.progress)
    results: list[UnitResult] = []
    pending = [task for task in tasks if task.key not in done]
    with bar, closing(_replies(crew, pending, bar.tick)) as replies:
        for task in tasks:
            new = task.key not in done
            result = UnitResult.from_json(next(replies)[1] if new else done[task.key])
            tally.add(task.unit, result, new=new)
            results.append(result)
            bar.tick()
    _refuse_changed(order, tasks, scans)
    tally.refuse_nothing(order.files[0], len(order.files), new=order.base is None)
    return Outcome(results=results, resumed=len(done), tally=tally, scans=scans)


def _replies(crew: Crew, tasks: Sequence[Task], tick: Callable[[], None]) -> Generator[tuple[Task, dict[str, Any]]]:
    workers = min(crew.workers, len(tasks))
    if workers <= 1:
        return run_here(crew.bench, tasks, tick)
    return run_in_processes(crew.bench.job, tasks, workers, tick, lock=crew.lock)


def _scan(order: Order, units: Sequence[Unit], keys: Sequence[str], crew: Crew) -> None:
    """Hash the records of all units that are not hashed yet."""
    folder = order.journal.scans
    missing = {key: unit for unit, key in zip(units, keys, strict=True) if not (folder / key).exists()}
    tasks = [Task(unit=unit, key=key, scan=True) for key, unit in missing.items()]
    done = 0
    bar = ProgressBar(
        sum(task.unit.bytes for task in tasks),
        lambda: (done, 0, 0),
        shown=crew.progress,
        what="look for duplicates",
    )
    with bar, closing(_replies(crew, tasks, bar.tick)) as replies:
        for task, _ in replies:
            done += task.unit.bytes
            bar.tick()


def _fates(order: Order, scans: Sequence[str], recipe: Recipe) -> list[npt.NDArray[np.uint8]]:
    """Return what becomes of the records of each unit, as if all files of the store were read again before it."""
    old = list(order.base.scans) if order.base is not None else []
    paths = [order.journal.scans / key for key in (*old, *scans)]
    if gone := [path for path in paths if not path.exists()]:
        raise StoreCorruptError(f"{gone[0]}: must be there to add files, got nothing; start over with --rebuild")
    chosen = recipe.preprocessing
    return fates_of(paths, deduplicate=chosen.deduplicate, max_items=chosen.max_items)[len(old) :]


def _tasks(
    order: Order, units: Sequence[Unit], fates: Sequence[npt.NDArray[np.uint8] | None], how: str
) -> list[Task]:
    """Return a task for each unit, each with a key of its own: of copies the second, third ... are numbered."""
    copies: Counter[str] = Counter()
    tasks: list[Task] = []
    for unit, each in zip(units, fates, strict=True):
        name = "" if each is None or bool((each == TAKEN).all()) else xxhash.xxh3_128_hexdigest(each.data)
        key = unit_key(unit, order.digests, [how, name])
        copies[key] += 1
        if copies[key] > 1:
            key = digest([key, copies[key]])
        file = order.journal.folder / "fates" / name
        if name and each is not None:
            file.parent.mkdir(exist_ok=True)
            write_atomically(file, each.tobytes())
        tasks.append(Task(unit=unit, key=key, fates=str(file.absolute()) if name else None))
    return tasks


def _refuse_changed(order: Order, tasks: Sequence[Task], scans: Sequence[str]) -> None:
    """Raise if a file was written to while it was read, and forget what was made from it."""
    changed = {file.path for file in order.files if stamp_of(file) != order.stamps[file.path]}
    if not changed:
        return
    for number, task in enumerate(tasks):
        if any(piece.file.path in changed for piece in task.unit.pieces):
            shutil.rmtree(order.journal.units / task.key)
            if scans:
                (order.journal.scans / scans[number]).unlink(missing_ok=True)
    raise DocumentError(
        f"{min(changed)}: must stay as it is while a build reads it, got another size or time of change; "
        "let nothing write to it, and run again: it goes on with the other files"
    )


def _drop_others(journal: Journal, keys: Iterable[str]) -> None:
    """Remove units of inputs that are no longer asked for, finished or not."""
    known = {name for key in keys for name in (key, f".tmp-{key}")}
    for folder in list(journal.units.iterdir()):
        if folder.name not in known:
            shutil.rmtree(folder)


def _so_far(tally: Tally, order: Order) -> tuple[int, int, int]:
    """Return (bytes, documents, tokens) of the finished units and of those under way."""
    ahead = [read_progress(folder) for folder in _under_way(order)]
    return (
        tally.done_bytes + sum(a[0] for a in ahead),
        tally.documents + sum(a[1] for a in ahead),
        tally.tokens + sum(a[2] for a in ahead),
    )


def _under_way(order: Order) -> Iterator[Any]:
    return order.journal.units.glob(".tmp-*")
