"""`prepare`: inputs are cut into units, units become shards in worker processes, shards become stores."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from tokenmill import __version__
from tokenmill.build.engines import Executor, LocalExecutor, UnitWatch, run_by
from tokenmill.build.job import (
    Job,
    MapIdentity,
    PrepareOptions,
    RecipeSpec,
    Setting,
    Task,
    build_identity,
    field_of_strings,
    identify,
    is_importable,
    open_setting,
    record_setting,
    run_task,
    write_job_file,
)
from tokenmill.build.journal import (
    MAX_LISTED,
    SIZE,
    WORKERS,
    Build,
    BuildSize,
    FinishedBuild,
    Journal,
    Publication,
    TakenFile,
    UnitResult,
    UnitShards,
    add_counts,
    begin_build,
    stamp_of,
    unit_key,
    unit_result,
)
from tokenmill.build.progress import Progress, Show, shown_progress, units_done
from tokenmill.build.records import ArrowData, Paths, Records, paths_or_records, written_records
from tokenmill.build.staged import build_remote, staging_parent
from tokenmill.build.unit import LEFT_OUT, TAKEN, MapRecord, OpenJob, fates_of, is_whole_scan
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
                journal.drop_unreadable()
            journal.finish_publishing()
            build = begin_build(
                journal,
                build_identity(setting.job, setting.opened),
                setting.files,
                chunk_bytes=options.chunk_bytes,
                rebuild=rebuild,
                same_names=options.same_names,
                tokenizer=setting.job.tokenizer,
            )
            with journal.end_noted():
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
    """What came of the units so far; they are added in input order, as lines are counted over units of a file."""

    units: list[UnitShards] = field(default_factory=list)
    resumed: int = 0
    """How many of them an earlier try had finished."""
    scans: Sequence[str] = ()
    """Names of the hashes of the records, where duplicates were looked for."""
    contents: dict[str, str] = field(default_factory=dict)
    """Path -> digest of all bytes of each file that was read."""
    text_bytes: int = 0
    new_text_bytes: int = 0
    """Of units that were done now, not in an earlier try."""
    truncated: int = 0
    lines: Counter[str] = field(default_factory=Counter)
    """By path."""
    documents: int = 0
    tokens: int = 0
    taken: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    """Path -> route -> documents and tokens."""
    route_documents: Counter[str] = field(default_factory=Counter)
    """Documents by route: the sum over all of `taken`."""
    skipped: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    noted: dict[str, dict[str, int]] = field(default_factory=dict)
    """Route -> note -> the first document of which it is true."""
    listed: list[dict[str, Any]] = field(default_factory=list)
    """The first bad records."""

    def add(self, unit: Unit, result: UnitResult, recipe: Recipe, *, resumed: bool, stop: bool) -> None:
        """Count a unit; where bad records `stop` a build of a recipe, raise the first."""
        counts = result.counts
        # Of each piece: its file, what is counted there, and how many lines stand before it in the file.
        pieces_begin: list[tuple[str, str, int]] = []
        for piece, lines in zip(unit.pieces, counts.lines, strict=True):
            file = piece.file
            pieces_begin.append((file.name, format_of(file.suffix).counts, self.lines[file.path]))
            self.lines[file.path] += lines
        for route, firsts in sorted(counts.noted.items()):
            documents_before = self.route_documents[route]
            noted = self.noted.setdefault(route, {})
            for name, document in firsts.items():
                noted.setdefault(name, documents_before + document)
        for route, pieces in sorted(counts.taken.items()):
            for index, documents, tokens in pieces:
                taken = self.taken.setdefault(unit.pieces[index].file.path, {})
                earlier = taken.get(route, (0, 0))
                taken[route] = (earlier[0] + documents, earlier[1] + tokens)
                self.route_documents[route] += documents
        for bad in counts.bad:
            name, _, first_line = pieces_begin[bad.piece]
            line = first_line + bad.line
            if stop or bad.reason == TOO_LONG:
                raise bad_record(unit, line, bad, recipe)
            if len(self.listed) < MAX_LISTED or all(bad.reason != record["reason"] for record in self.listed):
                self.listed.append({"file": name, "line": line + 1, "reason": bad.reason, "detail": bad.detail})
        self.units.append(UnitShards(key=result.key, shards=result.shards, pieces=tuple(pieces_begin)))
        self.resumed += resumed
        self.documents += counts.documents
        self.tokens += counts.tokens
        self.text_bytes += counts.text_bytes
        self.new_text_bytes += 0 if resumed else counts.text_bytes
        self.truncated += counts.truncated
        add_counts(self.skipped, counts.skipped)
        add_counts(self.notes, counts.notes)


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

    def run(self, tasks: Sequence[Task], tick: Callable[[], None]) -> Iterator[UnitResult | None]:
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
    ) -> Iterator[UnitResult | None]:
        """Run tasks in so many processes; those of an earlier call are used again."""
        self._processes = self._processes or LocalExecutor()
        self._processes.grow(num_workers)
        return run_by(self._processes, msgspec.json.encode(self.job), tasks, tick, self._watch())

    def _watch(self) -> UnitWatch:
        return UnitWatch(Path(self.job.folder).with_name(WORKERS), self._unit_timeout)


def drop_others(journal: Journal, tasks: Sequence[Task]) -> None:
    """Remove units of inputs that are no longer asked for, finished or not."""
    wanted = {name for task in tasks for name in (task.key, f".tmp-{task.key}")}
    for folder in list(journal.units.iterdir()):
        if folder.name not in wanted:
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
        task.key: msgspec.json.encode(known) for task in tasks if (known := unit_result(journal.units, task.key))
    }
    left = {task.key for task in tasks}
    done_bytes = 0

    def look() -> tuple[int, int, int]:
        return units_done(journal.workers, left, (done_bytes, result.documents, result.tokens))

    with show("prepare", sum(unit.bytes for unit in cut.units), look) as tick:
        new = pool.run([task for task in tasks if task.key not in earlier], tick)
        for task in tasks:
            resumed = task.key in earlier
            finished = msgspec.json.decode(earlier.pop(task.key), type=UnitResult) if resumed else next(new)
            assert finished is not None
            result.add(task.unit, finished, pool.job.recipe, resumed=resumed, stop=stop)
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
            shutil.rmtree(build.journal.units / task.key)
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
    all_bad = result.skipped and not result.skipped.keys() & LEFT_OUT
    if not result.documents and (build.base is None or all_bad):
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(result.skipped.items()))
        more = f" and {len(build.files) - 1} more" if len(build.files) > 1 else ""
        raise DocumentError(
            f"{build.files[0].label}{more}: must hold at least one document, got none, "
            f"{sum(result.skipped.values())} skipped ({reasons or 'the files are empty'}); "
            "check the files and the fields"
        )


# What is published and reported of a build.


def _publish(build: Build, result: BuildResult, job: Job, opened: OpenJob, warning: str | None) -> None:
    """Make the finished units stores."""
    recipe = job.recipe
    routes = build.base.routes if build.base else ()
    publication = Publication(
        phase="move" if build.cleared is None else "clear",
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
        ledger=_finished(build, result),
    )
    build.journal.publish(publication)


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


def _finished(build: Build, result: BuildResult) -> FinishedBuild:
    """Return what the store holds once the units are published."""
    new = FinishedBuild(
        identity=build.identity,
        routes=(),
        inputs=tuple(
            TakenFile(
                name=file.name,
                bytes=file.bytes,
                digest=build.digests[file.path],
                taken=result.taken.get(file.path, {}),
                content=result.contents[file.path],
            )
            for file in build.files
        ),
        counts=dict(sorted(result.skipped.items())),
        listed=tuple(result.listed),
        truncated=result.truncated,
        notes=dict(sorted(result.notes.items())),
        noted={route: dict(sorted(firsts.items())) for route, firsts in sorted(result.noted.items())},
        text_bytes=result.text_bytes,
        scans=tuple(result.scans),
    )
    old = build.base
    if old is None:
        return new
    counts, notes = dict(old.counts), dict(old.notes)
    add_counts(counts, new.counts)
    add_counts(notes, new.notes)
    noted = {route: dict(firsts) for route, firsts in old.noted.items()}
    for route, firsts in new.noted.items():
        documents_before = sum(file.taken.get(route, (0, 0))[0] for file in old.inputs)
        later = {name: documents_before + document for name, document in firsts.items()}
        noted[route] = dict(sorted({**later, **noted.get(route, {})}.items()))
    return replace(
        new,
        inputs=old.inputs + new.inputs,
        counts=counts,
        listed=(*old.listed, *_newly_listed(old.listed, new.listed)),
        truncated=old.truncated + new.truncated,
        notes=dict(sorted(notes.items())),
        noted=noted,
        text_bytes=old.text_bytes + new.text_bytes,
        scans=old.scans + new.scans,
    )


def _newly_listed(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return which bad records are listed behind those of earlier builds: the first, and one of each reason."""
    listed = list(new[: max(0, MAX_LISTED - len(old))])
    reasons = {record["reason"] for record in (*old, *listed)}
    for record in new[len(listed) :]:
        if record["reason"] not in reasons:
            listed.append(record)
            reasons.add(record["reason"])
    return listed


def _report(
    build: Build,
    result: BuildResult | None,
    opened: OpenJob,
    framing: str,
    opening_seconds: float,
    begin: float,
) -> PrepareReport:
    out, finished = build.journal.out, build.journal.finished()
    assert finished is not None
    manifests = {route: read_manifest(out / route) for route in sorted(finished.routes)}
    result = result or BuildResult()
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
        new_documents=result.documents,
        new_tokens=result.tokens,
        units=len(result.units),
        resumed_units=result.resumed,
        input_bytes=sum(file.bytes for file in build.files),
        text_bytes=result.text_bytes,
        worked_bytes=result.new_text_bytes,
        skipped=dict(sorted(result.skipped.items())),
        truncated=result.truncated,
        notes=dict(sorted(result.notes.items())),
        engine=opened.tokenizer.engine,
        framing=framing,
        seconds=time.monotonic() - begin,
        opening_seconds=opening_seconds,
    )
