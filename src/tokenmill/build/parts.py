"""Parts of a build, done by separate processes without an engine.

`plan_units` writes the list of tasks. `run_part` does those of a part that have no result yet. `prepare` does what
is left, and publishes. Parts need no order, no lock and no knowledge of each other. They may be array jobs of
Slurm, indexed jobs of Kubernetes, or shells on some machines. A part may be done twice, also at the same time.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from tokenmill.build.build import opened_build
from tokenmill.build.counts import Counts
from tokenmill.build.cut import cut_build, write_next_tasks, write_tasks
from tokenmill.build.job import (
    Job,
    MapRecord,
    PrepareOptions,
    RecipeSpec,
    asked_for,
    identify,
    is_importable,
    open_job,
    open_setting,
)
from tokenmill.build.journal import Journal
from tokenmill.build.progress import Progress, Show, shown_progress
from tokenmill.build.schedule import Outcome, WorkerPool, check_timeout, num_workers_of, run_tasks
from tokenmill.build.tasks import Phase, TaskList, is_done, read_job, read_list
from tokenmill.errors import ConfigError, StoreBusyError, StoreMissingError
from tokenmill.fingerprint import first_difference
from tokenmill.store.layout import MANIFEST
from tokenmill.store.lease import leased_folder
from tokenmill.tables import is_address, path_of


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitsReport:
    """Report of a list of units that was written."""

    path: Path
    phase: Phase | Literal["finished"]
    """`hash` if records are hashed first, as with `deduplicate` or `max_items`; `write` for all other builds."""
    units: int
    """Number of units, which is the useful maximum of parts."""
    done: int
    """Units that have a result already."""
    input_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {**asdict(self), "path": str(self.path)}


@dataclass(frozen=True, kw_only=True, slots=True)
class PartReport:
    """Report of a part."""

    path: Path
    phase: Phase | Literal["finished"]
    """`write`: its units are done. `hash`: run it again when all parts have hashed their records."""
    part: int
    parts: int
    units: int
    """Units of this part."""
    resumed_units: int
    """Units of this part that had a result already."""
    documents: int
    tokens: int
    text_bytes: int
    """Text of the units that were done by this call, as are documents and tokens."""
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {**asdict(self), "path": str(self.path)}


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

    Arguments are those of `prepare`. A second call writes the list again, and finished units stay. Inputs that
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
    with opened_build(setting, rebuild=rebuild) as (build, _):
        if not build.files:
            return UnitsReport(path=journal.out, phase="finished", units=0, done=0, input_bytes=0)
        tasks = write_tasks(journal, cut_build(build, setting.opened), msgspec.json.encode(setting.job), asked)
        return UnitsReport(
            path=journal.out,
            phase=tasks.head.phase,
            units=tasks.head.units,
            done=sum(is_done(journal, task) for task in tasks.tasks() if task.kind != "digest"),
            input_bytes=tasks.head.bytes,
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
    tasks = _list_for(journal, asked)
    outcomes: list[Outcome] = []
    if tasks is not None:
        job = msgspec.json.decode(read_job(journal, tasks.head), type=Job)
        with closing(WorkerPool(job, open_job(job), num_workers, unit_timeout=unit_timeout)) as pool:
            if tasks.head.phase == "hash":
                _run(journal, tasks, index, parts, pool, show)
                tasks = _next_tasks(journal, tasks)
            if tasks.head.phase == "write":
                outcomes = _run(journal, tasks, index, parts, pool, show)
    counts, done = Counts(), [outcome for outcome in outcomes if outcome.task.kind == "write"]
    for segment in (segment for outcome in done if not outcome.is_resumed for segment in outcome.segments):
        counts.merge(segment.counts)
    return PartReport(
        path=journal.out,
        phase="finished" if tasks is None else tasks.head.phase,
        part=index,
        parts=parts,
        units=len(done),
        resumed_units=sum(outcome.is_resumed for outcome in done),
        documents=counts.documents,
        tokens=counts.tokens,
        text_bytes=counts.text_bytes,
        seconds=time.monotonic() - begin,
    )


def _run(journal: Journal, tasks: TaskList, index: int, parts: int, pool: WorkerPool, show: Show) -> list[Outcome]:
    """Do every `parts`-th unit, and every `parts`-th task of digests."""
    is_digest = [task.kind == "digest" for task in tasks.tasks()]
    of_kind = [[i for i, digest in enumerate(is_digest) if digest == kind] for kind in (False, True)]
    indices = sorted(i for each in of_kind for i in each[index::parts])
    with closing(run_tasks(journal, tasks, indices, pool, show)) as outcomes:
        return list(outcomes)


def _list_for(journal: Journal, asked: Mapping[str, Any] | None) -> TaskList | None:
    """Return the list of tasks; None if the store is finished. Reject a list with other arguments."""
    tasks = read_list(journal)
    if tasks is None:
        if (journal.out / MANIFEST).exists() or journal.ledger() is not None:
            return None
        raise StoreMissingError(
            f"{journal.out}: there is no list of units; write it with `tokenmill prepare --plan-only` first"
        )
    difference = None if asked is None else first_difference(dict(tasks.head.asked), msgspec.to_builtins(asked))
    if difference is not None:
        path, before, after = difference
        raise ConfigError(
            f"{journal.out}: a part must be asked for as the list of units was, got {path} {before!r} -> "
            f"{after!r}; give what was given before, or write a new list with `tokenmill prepare --plan-only`"
        )
    return tasks


def _next_tasks(journal: Journal, tasks: TaskList) -> TaskList:
    """Return the list of the next phase if all records are hashed. The first part to see it writes the list."""
    if any(not (journal.scans / task.key).exists() for task in tasks.tasks()):
        return tasks
    try:
        with leased_folder(journal.out):
            now = read_list(journal)
            if now is not None and now.head == tasks.head:
                return write_next_tasks(journal, now)
    except StoreBusyError:
        pass  # another part is writing it, or the build is being published
    return read_list(journal) or tasks
