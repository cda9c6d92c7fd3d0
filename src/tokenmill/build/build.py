"""`prepare`: inputs are cut into units, units become shards in worker processes, shards become stores."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from tokenmill import __version__
from tokenmill.build.counts import Counts, ListedRecord, extend_listed
from tokenmill.build.engines import Executor, LocalExecutor, UnitWatch, run_by
from tokenmill.build.inputs import stamp_of
from tokenmill.build.job import (
    Job,
    MapIdentity,
    MapRecord,
    OpenJob,
    PrepareOptions,
    RecipeSpec,
    Setting,
    build_identity,
    field_of_strings,
    identify,
    is_importable,
    open_setting,
    record_setting,
)
from tokenmill.build.journal import SIZE, BuildSize, Journal, Ledger, TakenFile, UnitResult, unit_key, unit_results
from tokenmill.build.notes import WORKERS
from tokenmill.build.progress import Progress, Show, shown_progress, units_done
from tokenmill.build.publish import Publication, UnitShards, drop_unreadable, finish_publishing, publish
from tokenmill.build.records import ArrowData, Paths, Records, paths_or_records, written_records
from tokenmill.build.select import LEFT_OUT, TAKEN, fates_of, is_whole_scan
from tokenmill.build.staged import build_remote, staging_parent
from tokenmill.build.state import Build, Request, open_build
from tokenmill.build.tasks import Task, run_task, write_job_file
from tokenmill.documents import RULES, BadRecord, InputFile, Unit, content_digest, cut_files, format_of, place
from tokenmill.documents.units import is_changed
from tokenmill.encode.recipe import RULES as RECIPE_RULES
from tokenmill.encode.recipe import WAYS_OUT, Recipe
from tokenmill.encode.recipe.encoder import ANSWERS_CUT, TOO_LONG
from tokenmill.errors import ConfigError, DocumentError, StoreCorruptError, StoreError, TokenmillError, warn
from tokenmill.fields import top_fields
from tokenmill.fingerprint import digest
from tokenmill.store.files import make_folder, write_atomically
from tokenmill.store.layout import TOKENIZER_FOLDER, read_manifest
from tokenmill.store.lease import Lease, leased_folder
from tokenmill.tables import check_callable, check_types, is_address, path_of
from tokenmill.types import Uint8Array


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreReport:
    """One store of a build."""

    route: str
    """Its name below `out`: a domain, `train` or `val`; empty for `out` itself."""
    path: Path | str
    """Its folder, or its address in object storage."""
    documents: int
    tokens: int
    shards: int
    fingerprint: str
    """The same for the same documents and options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareReport:
    """The numbers of a finished build; documents and tokens are those of the whole store."""

    path: Path | str
    kind: str
    """Training type: `seq`, `sft`, `dpo` or `grpo`."""
    stores: Sequence[StoreReport]
    documents: int
    tokens: int
    shards: int
    files: int
    new_files: int
    """Files that this build took; the others were in the store already."""
    new_documents: int
    new_tokens: int
    units: int
    """Units of work of this build."""
    resumed_units: int
    """Those among them that an earlier, interrupted try had finished."""
    input_bytes: int
    """Size of the new files as they are on disk, compressed or not."""
    text_bytes: int
    """Size of the new documents' text as UTF-8."""
    worked_bytes: int
    """Text of the units that were done now."""
    skipped: Mapping[str, int]
    """Records that were left out, by reason."""
    truncated: int
    """Records that were cut to `max_seq_len`."""
    notes: Mapping[str, int]
    """What else was done to records, and to how many: tools or reasoning that the chat template does not write."""
    engine: str
    """What ran the tokenizer."""
    framing: str
    """Which strings are BOS and EOS, and what says so."""
    seconds: float
    opening_seconds: float
    """How much of that went into finding the files and opening and proving the tokenizer."""

    @property
    def fingerprint(self) -> str:
        """Of the store, or of all of them."""
        if len(self.stores) == 1:
            return self.stores[0].fingerprint
        return digest([[store.route, store.fingerprint] for store in self.stores])

    @property
    def tokens_per_byte(self) -> float:
        """New tokens, BOS and EOS among them, for a byte of text."""
        return self.new_tokens / self.text_bytes if self.text_bytes else 0.0

    @property
    def megabytes_per_second(self) -> float:
        """Text a second, in 10⁶ bytes, over all workers, once the tokenizer was open."""
        return self.worked_bytes / 1e6 / max(self.seconds - self.opening_seconds, 1e-9)

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            **asdict(self),
            "path": str(self.path),
            "stores": [{**asdict(store), "path": str(store.path)} for store in self.stores],
            "fingerprint": self.fingerprint,
            "tokens_per_byte": self.tokens_per_byte,
            "megabytes_per_second": self.megabytes_per_second,
        }


def prepare(  # noqa: PLR0913 - the front door
    inputs: str | os.PathLike[str] | Iterable[str | os.PathLike[str] | Mapping[str, Any]] | ArrowData,
    *,
    out: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str] = "bytes",
    recipe: RecipeSpec = "text",
    map: MapRecord | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    rebuild: bool = False,
    progress: bool | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    options: PrepareOptions | None = None,
    staging: str | os.PathLike[str] | None = None,
    unit_timeout: float | None = None,
) -> PrepareReport:
    """Turn text or records, from files or from memory, into the token store `out`.

    An interrupted build of files resumes when you call it again with the same arguments. A finished store is
    extended: files that are in it already are skipped. Records from memory are read again from the first one.

    Args:
        inputs: Paths, or records in memory.
            Paths are one path, or a list of paths, globs, folders, `hf:` datasets and addresses, read in natural
            order. A list of strings is a list of paths.
            Records are an iterable of dicts, an iterator of strings and dicts, a Hugging Face dataset, or a table
            or column that exports Arrow (pandas, polars, pyarrow).
        out: Folder of the store, or an address such as `s3://bucket/path`.
        tokenizer: `bytes`, a `tokenizer.json`, a `.model`, a folder with one of them,
            `tiktoken:RANKFILE`, or `hf:NAME` of the Hugging Face hub.
        recipe: Name of a preset (`text`, `chat`, `instruction`, `dpo`, ...), path of a recipe, or the recipe.
        map: Function that is called with every record first. It returns the record to use, a list of records, True
            to keep the record, or None or False to leave it out, counted as `map`. The manifest contains its name
            and a hash of its source. Workers import it by its module; a function that they cannot import runs in
            this process alone.
        workers: Number of processes, by default one per core. The store is the same for any number.
        executor: Object with `submit`, as in `concurrent.futures`, that runs units elsewhere. Its workers need
            access to inputs and `out`.
        rebuild: Replace a finished store at the end of the build. Without it, another tokenizer, recipe or option
            than the store was made with is an error.
        progress: False for no output. By default, a bar on a terminal, or a line on stderr every 30 s elsewhere.
        on_progress: Function that is called with the same figures, about five times per second. An exception in it
            stops the build.
        options: Filters, special tokens and limits; see `PrepareOptions`.
        staging: Folder where a store for an address is built before its upload, by default `.tokenmill/staging`.
            All workers need access to it.
        unit_timeout: Seconds without progress of a unit after which the build stops. Its finished units are kept.

    Returns:
        Numbers of documents, tokens and records left out, and the fingerprint of each store.

    Raises:
        ConfigError: An argument or option is wrong.
        DocumentError: A file was not found, or a record cannot be read. What an iterable raises is passed on.
        StoreExistsError: `out` was made with other options, or contains other content of the same file.
        StoreError: `out` cannot be written to.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> records = [{"text": "one"}, {"text": "two"}]
        >>> with TemporaryDirectory() as folder:
        ...     report = prepare(records, out=f"{folder}/web", tokenizer="bytes", workers=1, progress=False)
        >>> report.documents, report.tokens
        (2, 10)
    """
    check_types(rebuild=(rebuild, bool), progress=(progress, bool | None), workers=(workers, int | None))
    if on_progress is not None:
        check_callable("on_progress", on_progress)
    options = PrepareOptions() if options is None else options
    show = _show_of(progress, on_progress)
    build = partial(
        _build_store,
        tokenizer=tokenizer,
        recipe=recipe,
        map=map,
        workers=workers,
        executor=executor,
        show=show,
        options=options,
        unit_timeout=unit_timeout,
    )
    taken = paths_or_records(inputs)
    if isinstance(taken, Records):
        check_timeout(unit_timeout)
        num_workers_of(workers, executor)
        settled = record_setting(tokenizer, recipe, options)
        with written_records(
            taken,
            staging_parent(out, staging),
            Path(path_of("out", out)).name,
            text_field=field_of_strings(settled),
            fields=None if map is not None else (*settled.fields, *top_fields(options.keep)),
            show=show,
        ) as file:
            if not is_address(out):
                return build(file, out=out, rebuild=rebuild)
            return build_remote(build, file, out, staging, options, show, rebuild=rebuild)
    items = [taken] if isinstance(taken, str) or not isinstance(taken, Sequence) else taken
    if not any(is_address(path) for path in (out, *items)):
        return build(taken, out=out, rebuild=rebuild)
    return build_remote(build, items, out, staging, options, show, rebuild=rebuild)


def _show_of(progress: bool | None, on_progress: Callable[[Progress], None] | None) -> Show:
    """Return what shows the steps of a build; where nobody looks, nothing is counted for it either."""
    if progress is False and on_progress is None:
        return _not_shown
    return partial(shown_progress, shown=progress, on_progress=on_progress)


@contextmanager
def _not_shown(what: str, total_bytes: int, look: Callable[[], object]) -> Iterator[Callable[[], None]]:  # noqa: ARG001
    """Show nothing of a step of the build."""
    yield lambda: None


def _build_store(  # noqa: PLR0913 - the arguments of `prepare`
    inputs: Paths | InputFile,
    *,
    out: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str],
    recipe: RecipeSpec,
    map: MapRecord | None,
    workers: int | None,
    executor: Executor | None,
    rebuild: bool,
    show: Show,
    options: PrepareOptions,
    unit_timeout: float | None,
) -> PrepareReport:
    """Build a store, or add to it, in a folder."""
    begin = time.monotonic()
    check_timeout(unit_timeout)
    num_workers = num_workers_of(workers, executor)
    if map is not None and not is_importable(function := identify(map)):
        num_workers = _one_worker(function, workers, executor)
    setting = open_setting(
        inputs, out=out, tokenizer=tokenizer, recipe=recipe, map=map, options=options, show=show, rebuild=rebuild
    )
    opening_seconds = time.monotonic() - begin
    result, job, opened = None, setting.job, setting.opened
    with begun_build(setting, rebuild=rebuild) as (build, lease):
        if build.files:
            with closing(WorkerPool(job, opened, num_workers, executor, unit_timeout)) as pool:
                result = run_build(build, pool, show)
            lease.check()
            _publish(build, result, job, opened, setting.warning)
        report = _report(build, result, opened, setting.framing, opening_seconds, begin)
        _warn_of_cut_answers(report, job.recipe)
        keep_tokenizer(job.files, [Path(store.path) for store in report.stores])
        return report


@contextmanager
def begun_build(setting: Setting, *, rebuild: bool) -> Iterator[tuple[Build, Lease]]:
    """Find out what there is to do in the folder of the store, and hold its lease for as long as that takes."""
    journal, options = setting.journal, setting.job.options
    with _system_errors_explained(journal.out):
        make_folder(journal.out)
        with leased_folder(journal.out) as lease:
            if rebuild:
                drop_unreadable(journal)
            finish_publishing(journal)
            build = open_build(
                journal,
                Request(identity=build_identity(setting.job, setting.opened), rebuild=rebuild),
                setting.files,
                chunk_bytes=options.chunk_bytes,
                same_names=options.same_names,
                tokenizer=setting.job.tokenizer,
            )
            with journal.recorded_end():
                yield build, lease


def num_workers_of(workers: int | None, executor: Executor | None) -> int:
    """Return how many processes to use, by default one a core; refuse what is no executor."""
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise ConfigError(
            f"executor: must have submit(function, *args), as concurrent.futures has it, got {executor!r}; "
            "leave it out for the cores of this machine"
        )
    if workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers < 1:
        raise ConfigError(f"workers: must be at least 1, got {workers}; leave it out for one a core")
    return workers


def check_timeout(seconds: float | None) -> None:
    """Refuse what is no number of seconds."""
    check_types(unit_timeout=(seconds, int | float | None))
    if seconds is not None and not seconds > 0:
        raise ConfigError(
            f"unit_timeout: must be more than 0 seconds, got {seconds}; leave it out to wait for ever"
        )


def _one_worker(function: MapIdentity, workers: int | None, executor: Executor | None) -> int:
    """Return 1, for this process, as no other one can import the function; refuse more if they were asked for."""
    if executor is not None or (workers or 1) > 1:
        raise ConfigError(
            "map: must be a function of a module that workers can import, "
            f"got {function.name} of {function.module}; "
            "put it at the top of a file of its own, or use workers=1"
        )
    return 1


def _warn_of_cut_answers(report: PrepareReport, recipe: Recipe) -> None:
    """Warn if records lost something that they were to be trained on."""
    cut = report.notes.get(ANSWERS_CUT)
    if cut:
        end = "end" if recipe.preprocessing.truncation_mode == "keep_start" else "beginning"
        warn(
            f"{cut:,} of {report.new_documents:,} records lost trained tokens at their {end} to max_seq_len = "
            f'{recipe.preprocessing.max_seq_len}; raise it, on_long="drop" leaves such records out, '
            'on_long="stop" refuses them'
        )


@contextmanager
def _system_errors_explained(out: Path) -> Iterator[None]:
    """Raise an error of the system, such as a full disk, as one that names the folder and the way out."""
    try:
        yield
    except TokenmillError:
        raise
    except OSError as error:
        raise StoreError(
            f"{out}: must be a folder that can be written to, got {error}; "
            "make room or mend the path or its rights, and run again: it goes on from there"
        ) from error


# What came of the units.


@dataclass(kw_only=True, slots=True)
class BuildResult:
    """Results of the units so far; they are added in input order, because lines are counted through a file."""

    counts: Counts = field(default_factory=Counts)
    units: list[UnitShards] = field(default_factory=list)
    """Segments of the units, in order."""
    num_units: int = 0
    resumed: int = 0
    """Units that an earlier, interrupted build had finished."""
    scans: Sequence[str] = ()
    """Names of the hashes of the records, for a build with `deduplicate` or `max_items`."""
    contents: dict[str, str] = field(default_factory=dict)
    """Path -> digest of all bytes of each input file."""
    new_text_bytes: int = 0
    """Text of the units that were not resumed."""
    lines: Counter[str] = field(default_factory=Counter)
    """Path -> lines of the units so far."""
    taken: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    """Path -> route -> documents and tokens."""

    def add(self, unit: Unit, segments: Sequence[UnitResult], recipe: Recipe, *, resumed: bool, stop: bool) -> None:
        """Count a unit; where bad records `stop` a build of a recipe, raise the first."""
        # For each piece: its file, the noun for its records, and the lines before it in the file.
        pieces_begin: list[tuple[str, str, int]] = []
        for index, piece in enumerate(unit.pieces):
            file = piece.file
            pieces_begin.append((file.name, format_of(file.suffix).counts, self.lines[file.path]))
            self.lines[file.path] += sum(segment.counts.lines[index] for segment in segments)
        for segment in segments:
            counts = segment.counts
            listed = []
            for bad in counts.bad:
                name, _, first_line = pieces_begin[bad.piece]
                line = first_line + bad.line
                if stop or bad.reason == TOO_LONG:
                    raise bad_record(unit, line, bad, recipe)
                listed.append(ListedRecord(file=name, line=line + 1, reason=bad.reason, detail=bad.detail))
            self.counts.merge(counts)
            extend_listed(self.counts.listed, listed)
            for route, pieces in sorted(counts.pieces.items()):
                for index, documents, tokens in pieces:
                    taken = self.taken.setdefault(unit.pieces[index].file.path, {})
                    earlier = taken.get(route, (0, 0))
                    taken[route] = (earlier[0] + documents, earlier[1] + tokens)
            self.new_text_bytes += 0 if resumed else counts.text_bytes
            self.units.append(UnitShards(key=segment.key, shards=segment.shards, pieces=tuple(pieces_begin)))
        self.num_units += 1
        self.resumed += resumed


def bad_record(unit: Unit, line: int, bad: BadRecord, recipe: Recipe) -> DocumentError:
    """Return the error that names a bad record by its file and line, the rule that it breaks, and the ways out."""
    rules = {"domain": "the domain must be a name", **RECIPE_RULES, **RULES}
    # A chat without messages lacks no text field: the recipe knows better which fields it wants.
    rules["missing_field"] = RECIPE_RULES["missing_field"]
    skip = 'or skip bad ones with on_error="skip"'
    if bad.reason == TOO_LONG:  # it stops the build, whatever on_error says
        ways_out = 'raise max_seq_len=..., or say on_long="drop" or on_long="cut"'
    elif bad.reason in ("missing_field", "not_text") and recipe.name == "text":
        ways_out = (
            f"name the field of the text with text_field=..., or the recipe with recipe=... (chat, dpo), {skip}"
        )
    elif bad.reason == "too_long":
        ways_out = f"cut the record, allow it with max_record_bytes=..., {skip}"
    else:
        ways_out = f"{WAYS_OUT.get(bad.reason, 'mend the record')}, {skip}"
    where = place(unit.pieces[bad.piece], line)
    return DocumentError(f"{where}: {rules[bad.reason]}, got {bad.detail}; {ways_out}")


# The units of a build as tasks, and running them.


@dataclass(frozen=True, kw_only=True, slots=True)
class CutInput:
    """The input of a build in units, and what their keys are made of."""

    units: Sequence[Unit]
    versions: Mapping[str, str]
    """Path -> digest that stands for its content."""
    build_digest: str
    """Of the version, the tokenizer, the recipe and the options."""
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
    build_digest = digest([__version__, dict(build.identity)])
    needs_scan = chosen.deduplicate or chosen.max_items is not None
    return CutInput(
        units=units,
        versions=build.versions,
        build_digest=build_digest,
        scans=tuple(unit_key(unit, build.versions, [build_digest, "scan"]) for unit in units) if needs_scan else (),
        old_scans=build.base.scans if build.base is not None and needs_scan else (),
        deduplicate=chosen.deduplicate,
        max_items=chosen.max_items,
    )


def missing_scans(
    journal: Journal, cut: CutInput, *, is_done: Callable[[Path], bool] = is_whole_scan
) -> list[Task]:
    """Return the tasks of hashing that are not done; units with the same content need one."""
    missing = {
        key: unit
        for unit, key in zip(cut.units if cut.scans else (), cut.scans, strict=True)
        if not is_done(journal.scans / key)
    }
    return [Task(unit=unit, key=key, scan=True) for key, unit in missing.items()]


def write_tasks(journal: Journal, cut: CutInput) -> list[Task]:
    """Return the task of writing each unit; none of the scans of its input may be missing.

    Each has a key of its own: of units with the same content the second, third ... are numbered.
    """
    unit_fates: Sequence[Uint8Array | None] = _fates(journal, cut) if cut.scans else [None] * len(cut.units)
    copies: Counter[str] = Counter()
    tasks: list[Task] = []
    for unit, fates in zip(cut.units, unit_fates, strict=True):
        name, file = "", None
        if fates is not None and not bool((fates == TAKEN).all()):
            name = xxhash.xxh3_128_hexdigest(fates.data)
            file = journal.fates / name
            file.parent.mkdir(exist_ok=True)
            write_atomically(file, fates.tobytes())
        key = unit_key(unit, cut.versions, [cut.build_digest, name])
        copies[key] += 1
        if copies[key] > 1:
            key = digest([key, copies[key]])
        tasks.append(Task(unit=unit, key=key, fates=None if file is None else str(file.absolute())))
    size = BuildSize(units=len(tasks), bytes=sum(task.unit.bytes for task in tasks))
    write_atomically(journal.folder / SIZE, msgspec.json.encode(size))
    return tasks


def _fates(journal: Journal, cut: CutInput) -> list[Uint8Array]:
    """Return what becomes of the records of each unit, as if all files of the store were read again before it."""
    paths = [journal.scans / key for key in (*cut.old_scans, *cut.scans)]
    if broken := [path for path in paths if not is_whole_scan(path)]:
        raise StoreCorruptError(
            f"{broken[0]}: must hold the hashes of records, to add files, got "
            f"{'other bytes than were written' if broken[0].exists() else 'nothing'}; start over with rebuild=True"
        )
    fates = fates_of(paths, deduplicate=cut.deduplicate, max_items=cut.max_items)
    return fates[len(cut.old_scans) :]


class WorkerPool:
    """Runs the tasks of a job by an engine, or in this process where one worker is enough.

    An executor of the user's stays open when it is closed.
    """

    def __init__(
        self,
        job: Job,
        opened: OpenJob,
        num_workers: int,
        executor: Executor | None = None,
        unit_timeout: float | None = None,
    ) -> None:
        self.job = job
        self.opened = opened
        self._num_workers = num_workers
        self._executor = executor
        self._unit_timeout = unit_timeout
        self._processes: LocalExecutor | None = None

    def close(self) -> None:
        """End the processes that it started."""
        if self._processes is not None:
            self._processes.close()

    def run(self, tasks: Sequence[Task], tick: Callable[[], None]) -> Iterator[Segments | None]:
        """Yield the results of tasks in their order; of errors the first in order is raised.

        `tick` is called a few times a second.
        """
        if self._executor is not None:
            job = msgspec.json.encode(self.job)
            if not getattr(self._executor, "sends_once", False):
                job = msgspec.json.encode(write_job_file(Path(self.job.folder).parent, job))
            return run_by(self._executor, job, tasks, tick, self._watch())
        num_workers = min(self._num_workers, len(tasks))
        if num_workers <= 1 and self._unit_timeout is None and not self._needs_process():
            return (run_task(self.opened, task, tick) for task in tasks)
        return self.run_in_processes(tasks, num_workers, tick)

    def _needs_process(self) -> bool:
        """Whether records go through a chat template, which only a worker can hold to all its limits.

        A function of the user that no worker can import keeps the build in this process even so.
        """
        encoder, map = self.opened.encoder, self.job.map
        return encoder is not None and encoder.chat is not None and (map is None or is_importable(map))

    def run_in_processes(
        self, tasks: Sequence[Task], num_workers: int, tick: Callable[[], None]
    ) -> Iterator[Segments | None]:
        """Run tasks in so many processes; those of an earlier call are used again."""
        self._processes = self._processes or LocalExecutor()
        self._processes.grow(num_workers)
        return run_by(self._processes, msgspec.json.encode(self.job), tasks, tick, self._watch())

    def _watch(self) -> UnitWatch:
        return UnitWatch(Path(self.job.folder).with_name(WORKERS), self._unit_timeout)


Segments = tuple[UnitResult, ...]


def finished_unit(journal: Journal, key: str) -> Segments | None:
    """Return the results of a unit that is done; None if it is not."""
    results = unit_results(journal.units, key)
    return results if results and results[-1].is_last else None


def drop_others(journal: Journal, tasks: Sequence[Task]) -> None:
    """Remove units of inputs that are no longer asked for, finished or not."""
    wanted = {task.key for task in tasks}
    for folder in list(journal.units.iterdir()):
        if folder.name.removeprefix(".tmp-").partition("-")[0] not in wanted:
            shutil.rmtree(folder)


def run_scans(journal: Journal, tasks: Sequence[Task], pool: WorkerPool, show: Show) -> None:
    """Hash the records of units."""
    if not tasks:
        return
    journal.scans.mkdir(exist_ok=True)
    done_bytes = 0
    with show("look for duplicates", sum(task.unit.bytes for task in tasks), lambda: (done_bytes, 0, 0)) as tick:
        for task, _ in zip(tasks, pool.run(tasks, tick), strict=True):
            done_bytes += task.unit.bytes
            tick()


def run_build(build: Build, pool: WorkerPool, show: Show) -> BuildResult:
    """Run all units that are not done yet; the result is that of an uninterrupted run in one process."""
    journal, stop = build.journal, pool.opened.stop
    cut = cut_build(build, pool.opened)
    result = BuildResult(scans=cut.scans)
    run_scans(journal, missing_scans(journal, cut), pool, show)
    tasks = write_tasks(journal, cut)
    drop_others(journal, tasks)
    # As JSON, which takes a tenth of the memory: there may be a hundred thousand.
    earlier = {
        task.key: msgspec.json.encode(known) for task in tasks if (known := finished_unit(journal, task.key))
    }
    left = {task.key for task in tasks}
    done_bytes = 0

    def look() -> tuple[int, int, int]:
        return units_done(journal.workers, left, (done_bytes, result.counts.documents, result.counts.tokens))

    with show("prepare", sum(unit.bytes for unit in cut.units), look) as tick:
        new = pool.run([task for task in tasks if task.key not in earlier], tick)
        for task in tasks:
            resumed = task.key in earlier
            segments = msgspec.json.decode(earlier.pop(task.key), type=Segments) if resumed else next(new)
            assert segments is not None
            result.add(task.unit, segments, pool.job.recipe, resumed=resumed, stop=stop)
            left.discard(task.key)
            done_bytes += task.unit.bytes
            tick()
    _note_contents(build, result, show)
    _refuse_changed(build, tasks, result.scans)
    _refuse_nothing(build, result)
    return result


def _note_contents(build: Build, result: BuildResult, show: Show) -> None:
    """Hash all bytes of the files, so that a change of any of them is seen when files are added."""
    done_bytes = 0
    with show("note the inputs", sum(file.bytes for file in build.files), lambda: (done_bytes, 0, 0)) as tick:
        for file in build.files:
            result.contents[file.path] = "" if is_changed(file) else content_digest(file)
            done_bytes += file.bytes
            tick()


def _refuse_changed(build: Build, tasks: Sequence[Task], scans: Sequence[str]) -> None:
    """Raise if a file was written to while it was read, and forget what was made from it."""
    changed = {file.path for file in build.files if stamp_of(file) != build.stamps[file.path]}
    if not changed:
        return
    for number, task in enumerate(tasks):
        if any(piece.file.path in changed for piece in task.unit.pieces):
            for segment in build.journal.units.glob(f"{task.key}*"):
                shutil.rmtree(segment)
            if scans:
                (build.journal.scans / scans[number]).unlink(missing_ok=True)
    raise DocumentError(
        f"{min(changed)}: must stay as it is while a build reads it, got another size or time of change; "
        "let nothing write to it, and run again: it goes on with the other files"
    )


def _refuse_nothing(build: Build, result: BuildResult) -> None:
    """Raise if there is not one document: an empty store is a mistake that would show much later.

    Files may add nothing to a store that exists, unless all their records are bad.
    """
    skipped = result.counts.skipped
    all_bad = skipped and not skipped.keys() & LEFT_OUT
    if not result.counts.documents and (build.base is None or all_bad):
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(skipped.items()))
        more = f" and {len(build.files) - 1} more" if len(build.files) > 1 else ""
        raise DocumentError(
            f"{build.files[0].label}{more}: must hold at least one document, got none, "
            f"{sum(skipped.values())} skipped ({reasons or 'the files are empty'}); "
            "check the files and the fields"
        )


# What is published and reported of a build.


def _publish(build: Build, result: BuildResult, job: Job, opened: OpenJob, warning: str | None) -> None:
    """Make the finished units stores."""
    recipe = job.recipe
    routes = build.base.routes if build.base else ()
    publication = Publication(
        is_cleared=build.cleared is None,
        cleared=tuple(build.cleared or ()),
        units=tuple(result.units),
        base={route: read_manifest(build.journal.out / route).shards for route in routes},
        manifest={
            "kind": recipe.kind,
            "keys": opened.spec.keys,
            "tokenizer": job.identity,
            "recipe": {
                "name": recipe.name,
                "tokenizer": job.tokenizer,
                "engine": opened.tokenizer.engine,
                "on_error": job.options.on_error,
                **({"engine_warning": warning} if warning else {}),
                **build.identity["options"],
                "recipe": build.identity["recipe"],
            },
        },
        ledger=_ledger(build, result),
    )
    publish(build.journal, publication)


def keep_tokenizer(files: Mapping[str, bytes], stores: Sequence[Path]) -> None:
    """Keep the files of the tokenizer in every store, so that its texts can be read wherever it goes."""
    copies: dict[str, Path] = {}
    for store in stores:
        for name, data in files.items():
            path = store / TOKENIZER_FOLDER / name
            if path.is_file() and path.read_bytes() == data:
                continue
            make_folder(path.parent)
            try:
                os.link(copies[name], path)  # the stores of one build share one copy, where links can be made
            except (KeyError, OSError):
                write_atomically(path, data)
            copies.setdefault(name, path)


def _ledger(build: Build, result: BuildResult) -> Ledger:
    """Return the ledger of the store once the units are published."""
    inputs = tuple(
        TakenFile(
            name=file.name,
            bytes=file.bytes,
            digest=build.digests[file.path],
            taken=result.taken.get(file.path, {}),
            content=result.contents[file.path],
        )
        for file in build.files
    )
    old = build.base or Ledger(identity={}, routes=(), inputs=(), counts=Counts(), scans=())
    old.counts.merge(result.counts)
    return Ledger(
        identity=build.identity,
        routes=(),
        inputs=old.inputs + inputs,
        counts=old.counts,
        scans=old.scans + tuple(result.scans),
    )


def _report(
    build: Build,
    result: BuildResult | None,
    opened: OpenJob,
    framing: str,
    opening_seconds: float,
    begin: float,
) -> PrepareReport:
    out, finished = build.journal.out, build.journal.ledger()
    assert finished is not None
    manifests = {route: read_manifest(out / route) for route in sorted(finished.routes)}
    result = result or BuildResult()
    counts = result.counts
    return PrepareReport(
        path=out,
        kind=opened.spec.kind,
        stores=[
            StoreReport(
                route=route,
                path=out / route,
                documents=manifest.documents,
                tokens=manifest.tokens,
                shards=len(manifest.shards),
                fingerprint=manifest.fingerprint,
            )
            for route, manifest in manifests.items()
        ],
        documents=sum(manifest.documents for manifest in manifests.values()),
        tokens=sum(manifest.tokens for manifest in manifests.values()),
        shards=sum(len(manifest.shards) for manifest in manifests.values()),
        files=len(finished.inputs),
        new_files=len(build.files),
        new_documents=counts.documents,
        new_tokens=counts.tokens,
        units=result.num_units,
        resumed_units=result.resumed,
        input_bytes=sum(file.bytes for file in build.files),
        text_bytes=counts.text_bytes,
        worked_bytes=result.new_text_bytes,
        skipped=dict(sorted(counts.skipped.items())),
        truncated=counts.truncated,
        notes=dict(sorted(counts.notes.items())),
        engine=opened.tokenizer.engine,
        framing=framing,
        seconds=time.monotonic() - begin,
        opening_seconds=opening_seconds,
    )
