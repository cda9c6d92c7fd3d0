"""Running the units of a build, in this process or in others, and counting what came of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from tokenmill.documents import Unit, cut_files
from tokenmill.prepare.bench import Bench
from tokenmill.prepare.duplicates import fates_of
from tokenmill.prepare.journal import Journal, unit_key
from tokenmill.prepare.order import Order
from tokenmill.prepare.pool import run_here, run_in_processes
from tokenmill.prepare.progress import ProgressBar
from tokenmill.prepare.select import TAKEN
from tokenmill.prepare.tally import Tally
from tokenmill.prepare.task import Task
from tokenmill.prepare.unit import UnitResult, read_progress
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
    progress: bool | None


def drive(order: Order, recipe: Recipe, crew: Crew) -> Outcome:
    """Run all units that are not done yet; results are those of an uninterrupted run in one process."""
    units = list(cut_files(order.files, chunk_bytes=order.chunk_bytes))
    chosen = recipe.preprocessing
    scans: list[str] = []
    if chosen.deduplicate or chosen.max_items is not None:
        scans = [unit_key(unit, order.digests, "scan") for unit in units]
        _scan(order, units, scans, crew)
        tasks = _tasks_by_fate(order, units, scans, recipe)
    else:
        tasks = [Task(unit=unit, key=unit_key(unit, order.digests, "")) for unit in units]
    _drop_others(order.journal, {task.key for task in tasks})
    tally = Tally(stop=crew.bench.job.options.on_error == "stop")
    done = {task.key: found for task in tasks if (found := order.journal.result(task.key)) is not None}
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
    tally.refuse_nothing(order.files[0], len(order.files))
    return Outcome(results=results, resumed=len(done), tally=tally, scans=scans)


def _replies(crew: Crew, tasks: Sequence[Task], tick: Callable[[], None]) -> Generator[tuple[Task, dict[str, Any]]]:
    workers = min(crew.workers, len(tasks))
    if workers <= 1:
        return run_here(crew.bench, tasks, tick)
    return run_in_processes(crew.bench.job, tasks, workers, tick)


def _scan(order: Order, units: Sequence[Unit], keys: Sequence[str], crew: Crew) -> None:
    """Hash the records of all units that are not hashed yet."""
    folder = order.journal.scans
    tasks = [
        Task(unit=unit, key=key, scan=True)
        for unit, key in zip(units, keys, strict=True)
        if not (folder / key).exists()
    ]
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


def _tasks_by_fate(order: Order, units: Sequence[Unit], scans: Sequence[str], recipe: Recipe) -> list[Task]:
    """Return the tasks of units whose records do not all have the same fate."""
    chosen = recipe.preprocessing
    old = list(order.base.scans) if order.base is not None and chosen.deduplicate else []
    taken = sum(entry.documents for entry in order.base.inputs) if order.base is not None else 0
    fates = fates_of(
        [order.journal.scans / key for key in (*old, *scans)],
        len(old),
        deduplicate=chosen.deduplicate,
        room=None if chosen.max_items is None else chosen.max_items - taken,
    )
    return [_task(order, unit, each) for unit, each in zip(units, fates, strict=True)]


def _task(order: Order, unit: Unit, fates: npt.NDArray[np.uint8]) -> Task:
    if bool((fates == TAKEN).all()):
        return Task(unit=unit, key=unit_key(unit, order.digests, ""))
    name = xxhash.xxh3_128_hexdigest(fates.data)
    folder = order.journal.folder / "fates"
    folder.mkdir(exist_ok=True)
    write_atomically(folder / name, fates.tobytes())
    return Task(unit=unit, key=unit_key(unit, order.digests, name), fates=str((folder / name).absolute()))


def _drop_others(journal: Journal, keys: Iterable[str]) -> None:
    """Remove units of inputs that are no longer asked for, finished or not."""
    import shutil

    known = {name for key in keys for name in (key, f".tmp-{key}")}
    for folder in list(journal.units.iterdir()):
        if folder.name not in known:
            shutil.rmtree(folder)


def _so_far(tally: Tally, order: Order) -> tuple[int, int, int]:
    """Return (bytes, documents, tokens) of the finished units and of those under way."""
    ahead = [read_progress(folder) for folder in _under_way(order)]
    done = (tally.done_bytes, sum(tally.documents.values()), sum(tally.tokens.values()))
    return (
        done[0] + sum(a[0] for a in ahead),
        done[1] + sum(a[1] for a in ahead),
        done[2] + sum(a[2] for a in ahead),
    )


def _under_way(order: Order) -> Iterator[Any]:
    return order.journal.units.glob(".tmp-*")
