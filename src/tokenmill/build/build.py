"""`prepare`: cuts inputs into units, makes shards of units in worker processes, and stores of shards."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.build.counts import Counts, ListedRecord, extend_listed
from tokenmill.build.cut import cut_build, write_next_tasks, write_tasks
from tokenmill.build.engines import Executor
from tokenmill.build.inputs import stamp_of
from tokenmill.build.job import (
    Job,
    MapIdentity,
    MapRecord,
    OpenJob,
    PrepareOptions,
    RecipeSpec,
    Setting,
    asked_for,
    build_identity,
    field_of_strings,
    identify,
    is_importable,
    open_setting,
    record_setting,
)
from tokenmill.build.journal import Ledger, TakenFile
from tokenmill.build.progress import Progress, Show, Step, shown_progress
from tokenmill.build.publish import Publication, UnitShards, drop_unreadable, finish_publishing, publish
from tokenmill.build.records import ArrowData, Paths, Records, paths_or_records, written_records
from tokenmill.build.schedule import (
    MAX_IN_FLIGHT,
    Outcome,
    WorkerPool,
    bad_record,
    check_timeout,
    num_workers_of,
    run_tasks,
)
from tokenmill.build.select import LEFT_OUT
from tokenmill.build.staged import build_remote, staging_parent
from tokenmill.build.state import Build, Request, open_build
from tokenmill.build.tasks import TaskList
from tokenmill.build.uploads import MAX_UNITS, UnitUploads
from tokenmill.documents import InputFile, content_digest, format_of
from tokenmill.encode.recipe import Recipe
from tokenmill.encode.recipe.encoder import ANSWERS_CUT, TOO_LONG
from tokenmill.errors import ConfigError, DocumentError, StoreError, TokenmillError, warn
from tokenmill.fields import top_fields
from tokenmill.fingerprint import digest
from tokenmill.store.files import make_folder, write_atomically
from tokenmill.store.layout import TOKENIZER_FOLDER, read_manifest
from tokenmill.store.lease import Lease, leased_folder
from tokenmill.tables import check_callable, check_types, is_address, path_of


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
    """Units that an earlier, interrupted build had finished."""
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
    """Note -> number of records, such as those whose tools the chat template does not write."""
    engine: str
    """Engine of the tokenizer."""
    framing: str
    """Strings of BOS and EOS, and the file that specifies them."""
    seconds: float
    opening_seconds: float
    """Seconds to find the files, and to open and verify the tokenizer."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the store, or of all stores."""
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

    Examples:
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
    build = partial(build, asked_inputs=None if isinstance(taken, Records) else taken)
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
def _not_shown(what: Step, total_bytes: object, look: object, /) -> Iterator[Callable[[], None]]:  # noqa: ARG001
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
    asked_inputs: Paths | None,
    address: str | None = None,
) -> PrepareReport:
    """Build a store, or add to it, in a folder; with an `address`, its shards are uploaded there and removed."""
    begin = time.monotonic()
    check_timeout(unit_timeout)
    num_workers = num_workers_of(workers, executor)
    if map is not None and not is_importable(function := identify(map)):
        num_workers = _one_worker(function, workers, executor)
    setting = open_setting(
        inputs, out=out, tokenizer=tokenizer, recipe=recipe, map=map, options=options, show=show, rebuild=rebuild
    )
    opening_seconds = time.monotonic() - begin
    _check_template(setting)
    asked = {} if asked_inputs is None else asked_for(asked_inputs, tokenizer, recipe, options, map)
    result, job, opened = None, setting.job, setting.opened
    with opened_build(setting, rebuild=rebuild) as (build, lease):
        if build.files:
            uploads = None if address is None else UnitUploads(build.journal, address)
            max_units = MAX_IN_FLIGHT if uploads is None else MAX_UNITS
            with closing(WorkerPool(job, opened, num_workers, executor, unit_timeout, max_units)) as pool:
                result = run_build(build, asked, pool, show, uploads)
            lease.check()
            _publish(build, result, job, opened, setting.warning)
        report = _report(build, result, opened, setting.framing, opening_seconds, begin)
        _warn_of_cut_answers(report, job.recipe)
        keep_tokenizer(job.files, [Path(store.path) for store in report.stores])
        return report


@contextmanager
def opened_build(setting: Setting, *, rebuild: bool) -> Iterator[tuple[Build, Lease]]:
    """Begin or resume the build in the folder of the store, and hold its lease."""
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


def _one_worker(function: MapIdentity, workers: int | None, executor: Executor | None) -> int:
    """Return 1, for this process, as no other one can import the function; refuse more if they were asked for."""
    if executor is not None or (workers or 1) > 1:
        raise ConfigError(
            "map: must be a function of a module that workers can import, "
            f"got {function.name} of {function.module}; "
            "put it at the top of a file of its own, or use workers=1"
        )
    return 1


def _check_template(setting: Setting) -> None:
    """Raise if records need a worker for their chat template, and a function that no worker can import."""
    encoder, function = setting.opened.encoder, setting.job.map
    if encoder is not None and encoder.chat is not None and function is not None and not is_importable(function):
        raise ConfigError(
            f"map: chat templates run in workers, which cannot import {function.name} of {function.module}; "
            "put it at the top of a file of its own"
        )


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

    def add(self, outcome: Outcome, recipe: Recipe, *, stop: bool) -> Sequence[UnitShards]:
        """Count a unit, or digests of files, and return the segments that are new.

        Raise for the first bad record if bad records `stop` the build.
        """
        if outcome.digests is not None:
            self.contents.update(outcome.digests)
            return ()
        unit, segments, resumed = outcome.task.unit, outcome.segments, outcome.is_resumed
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
        return self.units[len(self.units) - len(segments) :]


def run_build(
    build: Build, asked: Mapping[str, Any], pool: WorkerPool, show: Show, uploads: UnitUploads | None = None
) -> BuildResult:
    """Do all tasks that are not done yet; the result is that of an uninterrupted run in one process."""
    journal, stop = build.journal, pool.opened.stop
    cut = cut_build(build, pool.opened)
    tasks = write_tasks(journal, cut, msgspec.json.encode(pool.job), asked)
    if tasks.head.phase == "hash":
        for _ in run_tasks(journal, tasks, range(len(tasks)), pool, show):
            pass
        tasks = write_next_tasks(journal, tasks)
    result = BuildResult(scans=cut.scans)
    with closing(run_tasks(journal, tasks, range(len(tasks)), pool, show)) as outcomes:
        for outcome in outcomes:
            for unit in result.add(outcome, pool.job.recipe, stop=stop):
                if uploads is not None:
                    uploads.send(unit)
    for file in build.files:
        if file.path not in result.contents:  # empty files belong to no unit
            result.contents[file.path] = content_digest(file)
    _check_unchanged(build, tasks, result.scans)
    _check_not_empty(build, result)
    return result


def _check_unchanged(build: Build, tasks: TaskList, scans: Sequence[str]) -> None:
    """Raise if a file was written to while it was read, and remove what was made from it."""
    changed = {file.path for file in build.files if stamp_of(file) != build.stamps[file.path]}
    if not changed:
        return
    for task in tasks.tasks():
        if all(piece.file.path not in changed for piece in task.unit.pieces):
            continue
        if task.kind == "digest":
            (build.journal.digests / task.key).unlink()
            continue
        build.journal.drop_unit(task.key)
        if scans:
            (build.journal.scans / scans[task.unit.index]).unlink(missing_ok=True)
    raise DocumentError(
        f"{min(changed)}: changed while it was read; "
        "let no other process write to it, and run again: the other files are done"
    )


def _check_not_empty(build: Build, result: BuildResult) -> None:
    """Raise if there is not one document: an empty store is a mistake that would show much later.

    Files may add nothing to a store that exists, unless all their records are bad.
    """
    skipped = result.counts.skipped
    all_bad = skipped and not skipped.keys() & LEFT_OUT
    if not result.counts.documents and (build.base is None or all_bad):
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(skipped.items()))
        more = f" and {len(build.files) - 1} more" if len(build.files) > 1 else ""
        raise DocumentError(
            f"{build.files[0].label}{more}: no document was taken, "
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
