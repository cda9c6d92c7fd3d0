"""A build without an engine: a list of units in a file, and any number of processes that each do a part of it.

`plan_units` writes the list, `run_part` does those units of a part that have no result yet, `prepare` does what is
left and publishes. Parts need no order, no lock and no knowledge of one another: they may be array jobs of Slurm,
indexed jobs of Kubernetes, or shells on some machines. A part may be done twice, also at the same time.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import xxhash

from tokenmill import __version__
from tokenmill.build.build import (
    CutInput,
    WorkerPool,
    bad_record,
    begun_build,
    check_timeout,
    cut_build,
    drop_others,
    finished_unit,
    missing_scans,
    num_workers_of,
    run_scans,
    write_tasks,
)
from tokenmill.build.job import (
    Job,
    MapRecord,
    PrepareOptions,
    RecipeSpec,
    identify,
    is_importable,
    open_job,
    open_setting,
)
from tokenmill.build.journal import UNITS, Journal, UnitResult
from tokenmill.build.progress import Progress, Show, shown_progress, units_done
from tokenmill.build.select import is_whole_scan
from tokenmill.build.tasks import JobFile, Task, read_job_file, write_job_file
from tokenmill.documents import Unit, read_unit
from tokenmill.encode.recipe.encoder import TOO_LONG
from tokenmill.errors import ConfigError, StoreBusyError, StoreCorruptError, StoreMissingError
from tokenmill.fingerprint import first_difference
from tokenmill.store.files import write_parts_atomically
from tokenmill.store.layout import MANIFEST
from tokenmill.store.lease import leased_folder
from tokenmill.tables import as_json, is_address, path_of

Phase = Literal["hash", "write", "finished"]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitsReport:
    """A list of units that was written."""

    path: Path
    phase: Phase
    """`hash`: records are hashed first, as with `deduplicate` or `max_items`; else `write`."""
    units: int
    """There can be no more parts than units."""
    done: int
    """Units that have a result already."""
    input_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {**asdict(self), "path": str(self.path)}


@dataclass(frozen=True, kw_only=True, slots=True)
class PartReport:
    """What a part has done."""

    path: Path
    phase: Phase
    """`write`: its units are done now; `hash`: run it again once all parts have hashed their records."""
    part: int
    parts: int
    units: int
    """Of this part."""
    resumed_units: int
    """Those among them that had a result already."""
    documents: int
    tokens: int
    text_bytes: int
    """Of what was done now."""
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {**asdict(self), "path": str(self.path)}


# The list of units.


@dataclass(frozen=True, kw_only=True, slots=True)
class _Head:
    """The first line of the list; the others are tasks."""

    version: str
    asked: Mapping[str, Any]
    phase: Literal["hash", "write"]
    job: JobFile
    cut: Mapping[str, Any]
    """Fields of `CutInput` but for the units."""
    checksum: str
    """Of all other lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _UnitList:
    head: _Head
    lines: Sequence[bytes]

    def tasks(self, first: int = 0, step: int = 1) -> list[Task]:
        """Return every `step`-th task."""
        return [msgspec.json.decode(line, type=Task) for line in self.lines[first::step]]

    def cut(self) -> CutInput:
        """Return how the input was cut."""
        return msgspec.convert({**self.head.cut, "units": [task.unit for task in self.tasks()]}, CutInput)


def _write_list(
    journal: Journal, asked: Mapping[str, Any], job: bytes, cut: CutInput, phase: Literal["hash", "write"]
) -> list[Task]:
    """Write the list of units for a phase; the lease of the folder must be held."""
    if phase == "hash":
        tasks = [Task(unit=unit, key=key, scan=True) for unit, key in zip(cut.units, cut.scans, strict=True)]
    else:
        tasks = write_tasks(journal, cut)
        drop_others(journal, tasks)
    checksum = xxhash.xxh3_128()
    for task in tasks:
        checksum.update(msgspec.json.encode(task) + b"\n")
    head = _Head(
        version=__version__,
        asked=asked,
        phase=phase,
        job=write_job_file(journal.folder, job),
        cut={field.name: getattr(cut, field.name) for field in fields(cut) if field.name != "units"},
        checksum=checksum.hexdigest(),
    )
    journal.scans.mkdir(exist_ok=True)
    lines: Iterator[bytes] = (msgspec.json.encode(line) + b"\n" for line in (head, *tasks))
    write_parts_atomically(journal.folder / UNITS, lines)
    return tasks


def _read_list(journal: Journal) -> _UnitList | None:
    """Read the list of units; None where there is none."""
    path = journal.folder / UNITS
    try:
        first, *lines = path.read_bytes().splitlines(keepends=True)
        head = msgspec.json.decode(first, type=_Head)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        head, lines = None, []
    checksum = xxhash.xxh3_128()
    for line in lines:
        checksum.update(line)
    if head is None or head.checksum != checksum.hexdigest():
        raise StoreCorruptError(
            f"{path}: must be as prepare wrote it, got other content; run `tokenmill prepare --plan-only` again"
        )
    if head.version != __version__:
        raise ConfigError(
            f"{path}: all parts must be done by one version of tokenmill, got {__version__} for a list of "
            f"{head.version}; install that one, or run `tokenmill prepare --plan-only` again"
        )
    return _UnitList(head=head, lines=lines)


def asked_for(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    tokenizer: str | os.PathLike[str],
    recipe: RecipeSpec,
    options: PrepareOptions,
    map: MapRecord | None = None,
) -> dict[str, Any]:
    """Return the arguments of a build as JSON, to compare them with those of a part."""
    items = [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)
    return {
        "inputs": [path_of("inputs", item) for item in items],
        "tokenizer": path_of("tokenizer", tokenizer),
        "recipe": dict(recipe) if isinstance(recipe, Mapping) else path_of("recipe", recipe),
        "options": as_json(options),
        **({} if map is None else {"map": as_json(identify(map))}),
    }


# Planning, and doing parts.


def plan_units(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str] = "bytes",
    recipe: RecipeSpec = "text",
    map: MapRecord | None = None,
    rebuild: bool = False,
    staging: str | os.PathLike[str] | None = None,
    options: PrepareOptions | None = None,
) -> UnitsReport:
    """Write the list of units of a build to the folder of the store; nothing of them is done.

    Arguments are those of `prepare`. A second call writes the list anew; units that are done stay done. Inputs that
    are addresses are copied to `staging` first, which parts must see under the same path.
    """
    options = PrepareOptions() if options is None else options
    show = partial(shown_progress, shown=None, on_progress=None)
    if map is not None and not is_importable(identify(map)):
        raise ConfigError(f"map: must be a function that parts can import, got {map!r}; put it into a module")
    folder = _folder_of(out, staging, rebuild=rebuild)
    items = [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)
    if any(is_address(item) for item in items):
        from tokenmill.build.staged import local_inputs

        items = list(local_inputs(items, staging, options, show))
    setting = open_setting(
        items,
        out=folder,
        tokenizer=tokenizer,
        recipe=recipe,
        map=map,
        options=options,
        show=show,
        rebuild=rebuild,
    )
    asked = asked_for(inputs, tokenizer, recipe, options, map)
    journal = setting.journal
    with begun_build(setting, rebuild=rebuild) as (build, _):
        if not build.files:
            return UnitsReport(path=journal.out, phase="finished", units=0, done=0, input_bytes=0)
        cut = cut_build(build, setting.opened)
        left = missing_scans(journal, cut)
        tasks = _write_list(journal, asked, msgspec.json.encode(setting.job), cut, "hash" if left else "write")
        finished = [task for task in tasks if not left and finished_unit(journal, task.key) is not None]
        return UnitsReport(
            path=journal.out,
            phase="hash" if left else "write",
            units=len(tasks),
            done=len(set(cut.scans)) - len(left) if left else len(finished),
            input_bytes=sum(unit.bytes for unit in cut.units),
        )


def _folder_of(
    out: str | os.PathLike[str], staging: str | os.PathLike[str] | None, *, rebuild: bool = False
) -> Path:
    """Return the folder in which units are done: `out`, or the staging folder of an address."""
    if not isinstance(out, str) or not is_address(out):
        return Path(path_of("out", out))
    from tokenmill.build.staged import staging_folder

    return staging_folder(out, staging, rebuild=rebuild)


def parse_part(text: str) -> tuple[int, int]:
    """Return the index of a part, and how many parts there are; parts may be counted from 0 or from 1.

    >>> parse_part("3/64"), parse_part("0/64") == parse_part("64/64")
    ((3, 64), True)
    """
    numbers = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    part, parts = (int(numbers[1]), int(numbers[2])) if numbers else (1, 0)
    if part > parts or parts < 1:
        raise ConfigError(f"part: must be a part of a number of parts, got {text!r}; write 3/64")
    return part % parts, parts


def run_part(
    out: str | os.PathLike[str],
    part: str,
    *,
    workers: int | None = None,
    progress: bool | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    staging: str | os.PathLike[str] | None = None,
    unit_timeout: float | None = None,
    asked: Mapping[str, Any] | None = None,
) -> PartReport:
    """Do the units of a part that have no result yet, of a list that `plan_units` wrote to `out`.

    `part` is such as `3/64`. Inputs and the store must have the paths that they were planned with; the tokenizer is
    in the list. Where records have to be hashed before units are written, a part stops after that unless it is the
    last to do so, and is to be run again. `asked` is what the list must have been asked for (`asked_for`).
    """
    begin = time.monotonic()
    journal = Journal(_folder_of(out, staging).expanduser())
    index, parts = parse_part(part)
    num_workers = num_workers_of(workers, None)
    check_timeout(unit_timeout)
    show = partial(shown_progress, shown=progress, on_progress=on_progress)
    units = _list_for(journal, asked)
    phase: Phase = "finished"
    tasks: list[Task] = []
    todo: list[Task] = []
    results: list[UnitResult] = []
    if units is not None:
        job = msgspec.json.decode(read_job_file(units.head.job), type=Job)
        with closing(WorkerPool(job, open_job(job), num_workers, unit_timeout=unit_timeout)) as pool:
            if units.head.phase == "hash":
                units = _hash_part(journal, units, units.tasks(index, parts), pool, show)
            phase, tasks = units.head.phase, units.tasks(index, parts)
            if phase == "write":
                todo = [task for task in tasks if finished_unit(journal, task.key) is None]
                results = _write_part(journal, units, todo, pool, show)
    return PartReport(
        path=journal.out,
        phase=phase,
        part=index,
        parts=parts,
        units=len(tasks),
        resumed_units=len(tasks) - len(todo) if phase == "write" else 0,
        documents=sum(result.counts.documents for result in results),
        tokens=sum(result.counts.tokens for result in results),
        text_bytes=sum(result.counts.text_bytes for result in results),
        seconds=time.monotonic() - begin,
    )


def _list_for(journal: Journal, asked: Mapping[str, Any] | None) -> _UnitList | None:
    """Return the list of units, None where the store is finished; refuse a list that was asked for otherwise."""
    units = _read_list(journal)
    if units is None:
        if (journal.out / MANIFEST).exists() or journal.ledger() is not None:
            return None
        raise StoreMissingError(
            f"{journal.out}: must hold a list of units to do a part of, got none; "
            "write it with `tokenmill prepare --plan-only` first"
        )
    difference = None if asked is None else first_difference(dict(units.head.asked), msgspec.to_builtins(asked))
    if difference is not None:
        path, before, after = difference
        raise ConfigError(
            f"{journal.out}: a part must be asked for as the list of units was, got {path} {before!r} -> "
            f"{after!r}; give what was given before, or write a new list with `tokenmill prepare --plan-only`"
        )
    return units


def _hash_part(
    journal: Journal, units: _UnitList, tasks: Sequence[Task], pool: WorkerPool, show: Show
) -> _UnitList:
    """Hash the records of a part; if those of all parts are hashed then, write the list for the next phase."""
    run_scans(journal, [task for task in tasks if not is_whole_scan(journal.scans / task.key)], pool, show)
    cut = units.cut()
    if missing_scans(journal, cut, is_done=Path.exists):
        return units
    try:
        with leased_folder(journal.out):
            now = _read_list(journal)
            if now is not None and now.head == units.head:
                _write_list(journal, units.head.asked, read_job_file(units.head.job), cut, "write")
    except StoreBusyError:
        pass  # another part is about to, or the build is being published
    return _read_list(journal) or units


def _write_part(
    journal: Journal, units: _UnitList, tasks: Sequence[Task], pool: WorkerPool, show: Show
) -> list[UnitResult]:
    results: list[UnitResult] = []
    left = {task.key for task in tasks}
    done = (0, 0, 0)
    with show(
        "prepare", sum(task.unit.bytes for task in tasks), lambda: units_done(journal.workers, left, done)
    ) as tick:
        for task, segments in zip(tasks, pool.run(tasks, tick), strict=True):
            assert segments is not None
            if not segments[-1].finished:
                listed = segments[-1].counts.bad
                bad = next(record for record in listed if pool.opened.stop or record.reason == TOO_LONG)
                line = _lines_before(journal, units, task, bad.piece, pool) + bad.line
                raise bad_record(task.unit, line, bad, pool.job.recipe)
            results += segments
            left.discard(task.key)
            done = (
                done[0] + task.unit.bytes,
                done[1] + sum(segment.counts.documents for segment in segments),
                done[2] + sum(segment.counts.tokens for segment in segments),
            )
            tick()
    return results


def _lines_before(journal: Journal, units: _UnitList, task: Task, piece: int, pool: WorkerPool) -> int:
    """Return how many lines of its file stand before a piece; units without a result are read to count them."""
    path = task.unit.pieces[piece].file.path
    total = 0
    for other in units.tasks():
        if other.unit.index > task.unit.index:
            break
        before = other.unit.pieces if other.unit.index < task.unit.index else task.unit.pieces[:piece]
        places = [number for number, other_piece in enumerate(before) if other_piece.file.path == path]
        results = finished_unit(journal, other.key) if places else None
        if results is not None:
            total += sum(result.counts.lines[number] for result in results for number in places)
        elif places:
            pieces = tuple(before[number] for number in places)
            reading = read_unit(Unit(index=0, pieces=pieces), pool.opened.reading)
            total += sum(run.num_lines for batch in reading for run in batch.runs)
    return total
