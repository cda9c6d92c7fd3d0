"""The build: inputs are cut into units, units become shards in worker processes, shards become stores."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.build.engines import Executor, WorkerPool
from tokenmill.build.journal import (
    MAX_LISTED,
    Build,
    FinishedBuild,
    Journal,
    Publication,
    TakenFile,
    UnitResult,
    UnitShards,
    add_counts,
    begin_build,
    stamp_of,
    unit_result,
)
from tokenmill.build.mapped import MapIdentity, MapRecord, identify, is_importable
from tokenmill.build.progress import Progress, Show, shown_progress, warn
from tokenmill.build.staged import local_inputs, stage
from tokenmill.build.tasks import Look, cut_build, drop_others, missing_scans, run_scans, write_tasks
from tokenmill.build.unit import LEFT_OUT, OpenJob
from tokenmill.build.worker import Job, PrepareOptions, RecipeSpec, Task, open_job, settle_recipe
from tokenmill.documents import (
    RULES,
    BadRecord,
    InputFile,
    Unit,
    content_digest,
    find_files,
    format_of,
    place,
    sample_texts,
)
from tokenmill.documents.units import is_changed
from tokenmill.encode.engines import framing_of, open_tokenizer, trusted
from tokenmill.encode.files import copy_of
from tokenmill.encode.recipe import RULES as RECIPE_RULES
from tokenmill.encode.recipe import WAYS_OUT, Recipe
from tokenmill.encode.recipe.encoder import ANSWERS_CUT, TOO_LONG
from tokenmill.encode.tokenizer import Tokenizer
from tokenmill.errors import ConfigError, DocumentError, StoreError, TokenmillError
from tokenmill.fingerprint import digest
from tokenmill.store.durable import make_folder, write_atomically
from tokenmill.store.layout import TOKENIZER_FOLDER, read_manifest
from tokenmill.store.lease import Lease, leased_folder
from tokenmill.tables import check_types, is_address, path_of

_OF_READING = ("format", "text_unit", "max_record_bytes")
"""Options beside the recipe and the tokenizer that decide over what is in a store."""


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
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
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
) -> PrepareReport:
    """Turn files of text or records into the store `out`, a folder or an address such as `s3://bucket/path`.

    `inputs` are paths, globs, folders, `hf:` datasets and addresses, in natural order. `tokenizer` is `bytes`, a
    `tokenizer.json`, a `.model`, a folder that holds one, or `tiktoken:<rank file>`. `recipe` is the name
    of a preset (`text`, `chat`, `instruction`, `dpo`, ...), the path of a recipe, or the recipe itself. `workers`
    is the number of processes, by default one a core; the store is the same for any number.
    `executor` runs units elsewhere: anything with
    `submit`, as `concurrent.futures` has it, whose workers see `inputs` and `out` under the same paths.

    `map` is a function that every record goes through first: it returns the record to be read, or None to leave it
    out, counted as `map`. Its name and a hash of its source stand in the manifest. Workers import it by its module;
    one that they cannot import, as it is written in the script itself, is run by this process alone.

    A build that was interrupted goes on where it stopped. A finished store is added to: files that are in it
    already are left alone. Another tokenizer, recipe or option than it was made with is refused, unless `rebuild`
    is given, which replaces it at the end.

    A store for an address is built in the folder `staging`, on a disk that all workers see and that has room for
    it, uploaded, and removed there. By default that is `.tokenmill/staging` where this process runs.

    On a terminal a bar shows how far it is, elsewhere a line on stderr every 30 s; `progress=False` shows nothing.
    `on_progress` is called with the same figures, some five times a second; what it raises stops the build.
    """
    show = partial(shown_progress, shown=progress, on_progress=on_progress)
    build = partial(
        _build_store,
        local_inputs(inputs, staging, options, show),
        tokenizer=tokenizer,
        recipe=recipe,
        map=map,
        workers=workers,
        executor=executor,
        progress=progress,
        on_progress=on_progress,
        options=PrepareOptions() if options is None else options,
    )
    if not isinstance(out, str) or not is_address(out):
        return build(out=out, rebuild=rebuild)
    staged = stage(out, staging, rebuild=rebuild)
    return staged.publish(build(out=staged.folder, rebuild=False), show)


def _build_store(  # noqa: PLR0913 - what stands behind the front door
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str],
    recipe: RecipeSpec,
    map: MapRecord | None,
    workers: int | None,
    executor: Executor | None,
    rebuild: bool,
    progress: bool | None,
    on_progress: Callable[[Progress], None] | None,
    options: PrepareOptions,
) -> PrepareReport:
    """Build a store, or add to it, in a folder."""
    begin = time.monotonic()
    check_types(rebuild=(rebuild, bool), progress=(progress, bool | None), workers=(workers, int | None))
    num_workers = num_workers_of(workers, executor)
    mapped = None if map is None else identify(map)
    if mapped is not None and not is_importable(mapped):
        num_workers = _one_worker(mapped, workers, executor)
    show = partial(shown_progress, shown=progress, on_progress=on_progress)
    setting = open_setting(inputs, out=out, tokenizer=tokenizer, recipe=recipe, map=map, options=options, show=show)
    opening_seconds = time.monotonic() - begin
    result, job, opened = None, setting.job, setting.opened
    with begun_build(setting, rebuild=rebuild) as (build, lease):
        if build.files:
            with WorkerPool(job, opened, num_workers, executor) as pool:
                result = run_build(build, pool, show)
            lease.check()
            _publish(build, result, job, opened, setting.warning)
        report = _report(build, result, opened, setting.framing, opening_seconds, begin)
        _warn_of_cut_answers(report, job.recipe)
        keep_tokenizer(job.tokenizer, [Path(store.path) for store in report.stores])
        return report


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What a build was asked for, with all open that it needs."""

    journal: Journal
    files: Sequence[InputFile]
    job: Job
    opened: OpenJob
    warning: str | None
    """What was told of the engine of the tokenizer."""
    framing: str
    """Which strings are BOS and EOS, and what says so."""


def open_setting(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str],
    recipe: RecipeSpec,
    map: MapRecord | None,
    options: PrepareOptions | None,
    show: Show,
) -> Setting:
    """List the files and open the tokenizer, as `prepare` was asked to."""
    mapped = None if map is None else identify(map)
    options = PrepareOptions() if options is None else options
    settled = settle_recipe(recipe, options)
    journal = Journal(Path(path_of("out", out)).expanduser())
    files = _input_files(inputs, journal.out, options)
    tokenizer = path_of("tokenizer", tokenizer)
    with show("open the tokenizer", 0, lambda: (0, 0, 0)):
        job, opened, warning = _open_job(journal, tokenizer, settled, options, files, (map, mapped))
        framing = _settle_framing(tokenizer, settled, options, opened)
    return Setting(journal=journal, files=files, job=job, opened=opened, warning=warning, framing=framing)


@contextmanager
def begun_build(setting: Setting, *, rebuild: bool) -> Iterator[tuple[Build, Lease]]:
    """Find out what there is to do in the folder of the store, which is held by a lease for that long."""
    journal, options = setting.journal, setting.job.options
    with _system_errors_explained(journal.out):
        make_folder(journal.out)
        with leased_folder(journal.out) as lease:
            if rebuild:
                journal.drop_unreadable()
            journal.finish_publishing()
            build = begin_build(
                journal,
                _identity(setting.job, setting.opened),
                setting.files,
                chunk_bytes=options.chunk_bytes,
                rebuild=rebuild,
                same_names=options.same_names,
            )
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


def _one_worker(mapped: MapIdentity, workers: int | None, executor: Executor | None) -> int:
    """Return one worker, this process: no other can import the function. Refuse others that were asked for."""
    if executor is not None or (workers or 1) > 1:
        raise ConfigError(
            f"map: must be a function of a module that workers can import, got {mapped.name} of {mapped.module}; "
            "put it at the top of a file of its own, or use workers=1"
        )
    return 1


def _input_files(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], out: Path, options: PrepareOptions
) -> Sequence[InputFile]:
    """List the files to read; the store itself may stand among them and is left alone."""
    listed = find_files(inputs, format=options.format)
    for path in (str(out.absolute()), *(file.path for file in listed.files)):
        if not path.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in path):
            raise DocumentError(f"{path!r}: a path must be UTF-8, got other bytes; rename it")
    store = os.path.realpath(out)
    real_folder = cache(os.path.realpath)  # of few folders there may be millions of files

    def is_outside(path: str) -> bool:
        return not os.path.join(real_folder(os.path.dirname(path)), "").startswith(os.path.join(store, ""))

    outside = [file.path for file in listed.files if is_outside(file.path)]
    if not outside:
        raise DocumentError(f"inputs: must not all lie in the store, got {store}; choose another path for it")
    passed_over = list(filter(is_outside, listed.passed_over))
    if passed_over:
        warn(
            f"{len(passed_over)} files in the given folders are not read, as they are of no known kind: "
            f"{', '.join(passed_over[:3])}{', ...' if len(passed_over) > 3 else ''}"
        )
    if len(outside) == len(listed.files):
        return listed.files
    # Once more without them, as names and order are relative to the folder that all files share.
    return find_files(outside, format=options.format).files


def _open_job(
    journal: Journal,
    tokenizer: str,
    recipe: Recipe,
    options: PrepareOptions,
    files: Sequence[InputFile],
    map: tuple[MapRecord | None, MapIdentity | None],
) -> tuple[Job, OpenJob, str | None]:
    """Open all that units need, and warn of what is unusual; return also what was told of the engine."""
    function, mapped = map
    opened_tokenizer, warning = _open_tokenizer(tokenizer, recipe, options, files)
    job = Job(
        folder=str(journal.units.absolute()),
        tokenizer=tokenizer,
        files=copy_of(tokenizer),
        identity=opened_tokenizer.identity.to_json(),
        engine=opened_tokenizer.engine.split()[0],
        recipe=recipe,
        options=options,
        map=mapped,
    )
    opened = open_job(job, opened_tokenizer, function)
    _warn_of_spelled_turns(opened)
    if opened.encoder is not None:
        chat = opened.encoder.chat
        job = replace(job, template=opened.encoder.no_template if chat is None else chat.template.fields())
    return job, opened, warning


def _open_tokenizer(
    spec: str, recipe: Recipe, options: PrepareOptions, files: Sequence[InputFile]
) -> tuple[Tokenizer, str | None]:
    """Return the tokenizer, and what was told of its engine."""
    if options.engine != "auto":
        return open_tokenizer(spec, engine=options.engine, **options.framing()), None
    skip_broken = options.on_error == "skip"
    sample = sample_texts(files, recipe.text_field, delimiter=options.delimiter, skip_broken=skip_broken)
    tokenizer, warning = trusted(spec, sample=sample, **options.framing())
    if warning:
        warn(warning)
    return tokenizer, warning


def _warn_of_spelled_turns(opened: OpenJob) -> None:
    """Warn if the ends of turns are no control tokens: any message can spell them."""
    spelled = opened.encoder.spelled() if opened.encoder is not None else ()
    if spelled:
        warn(
            f"the chat template ends turns with {', '.join(map(repr, spelled))}, which the tokenizer has no "
            "control token for: it is spelled in ordinary tokens, and a message may spell it too; "
            "use a template that fits the tokenizer, or add the token to it"
        )


def _warn_of_cut_answers(report: PrepareReport, recipe: Recipe) -> None:
    """Warn if records lost something that they were to be trained on."""
    cut = report.notes.get(ANSWERS_CUT)
    if cut:
        end = "end" if recipe.preprocessing.truncation_mode == "keep_start" else "beginning"
        warn(
            f"{cut:,} of {report.new_documents:,} records lost trained tokens at their {end} to max_seq_len = "
            f"{recipe.preprocessing.max_seq_len}; raise it, --on-long drop leaves such records out, "
            "--on-long stop refuses them"
        )


def _settle_framing(spec: str, recipe: Recipe, options: PrepareOptions, opened: OpenJob) -> str:
    """Say which strings are BOS and EOS; warn if plain text is to end as turns of a chat do."""
    framing = framing_of(spec, **options.framing())
    if framing.turn_end is not None and recipe.kind == "seq":
        other = f", such as {framing.end_of_text!r}" if framing.end_of_text else ""
        warn(
            f"every document of plain text will end with {framing.turn_end!r}, which ends a turn of a chat "
            f"({framing.line}); name the end of a text with --eos-token{other}, or this one if it is meant"
        )
    lacks_bos = opened.encoder is not None and opened.encoder.lacks_bos
    return framing.line + ("; no BOS before conversations, as the chat template writes none" if lacks_bos else "")


def _identity(job: Job, opened: OpenJob) -> dict[str, Any]:
    """Return what two builds must have in common to be one."""
    return {
        "tokenizer": opened.tokenizer.identity.to_json(),
        "recipe": opened.encoder.to_json() if opened.encoder else job.recipe.to_json(),
        "options": {name: getattr(job.options, name) for name in _OF_READING}
        | ({} if job.options.keep_empty else {"keep_empty": False})
        | ({} if job.options.delimiter is None else {"delimiter": job.options.delimiter})
        | ({"keep": list(job.options.keep)} if job.options.keep else {})
        | ({"map": {"name": job.map.name, "source": job.map.source}} if job.map else {}),
    }


@contextmanager
def _system_errors_explained(out: Path) -> Iterator[None]:
    """Say of an error of the system what it means for the build."""
    try:
        yield
    except TokenmillError:
        raise
    except OSError as error:
        raise StoreError(
            f"{out}: must be a folder that can be written to, got {error}; "
            "make room or mend the path or its rights, and run again: it goes on from there"
        ) from error


# Running the units of a build, and counting what came of them.


@dataclass(kw_only=True, slots=True)
class BuildResult:
    """What came of the units so far, in input order; a line's number follows from the units before."""

    units: list[UnitShards] = field(default_factory=list)
    resumed: int = 0
    """How many of them an earlier try had finished."""
    scans: Sequence[str] = ()
    contents: dict[str, str] = field(default_factory=dict)
    """Path -> digest of all bytes of each file that was read."""
    """Names of the hashes of the records, where duplicates were looked for."""
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
    skipped: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    listed: list[dict[str, Any]] = field(default_factory=list)
    """The first bad records."""

    def add(self, unit: Unit, result: UnitResult, *, resumed: bool, stop: bool) -> None:
        """Count a unit; where bad records `stop` a build, raise the first."""
        counts = result.counts
        # Where a piece begins in its file, in lines: those of the earlier pieces of the same file.
        begins = []
        for piece, lines in zip(unit.pieces, counts.lines, strict=True):
            begins.append(self.lines[piece.file.path])
            self.lines[piece.file.path] += lines
        names = [(piece.file.name, format_of(piece.file.suffix).counts) for piece in unit.pieces]
        pieces_begin = tuple((*name, begin) for name, begin in zip(names, begins, strict=True))
        for route, pieces in sorted(counts.taken.items()):
            for index, documents, tokens in pieces:
                routes = self.taken.setdefault(unit.pieces[index].file.path, {})
                before = routes.get(route, (0, 0))
                routes[route] = (before[0] + documents, before[1] + tokens)
        for bad in counts.bad:
            line = begins[bad.piece] + bad.line
            if stop or bad.reason == TOO_LONG:
                raise bad_record(unit, line, bad)
            if len(self.listed) < MAX_LISTED:
                name = unit.pieces[bad.piece].file.name
                self.listed.append({"file": name, "line": line + 1, "reason": bad.reason, "detail": bad.detail})
        self.units.append(UnitShards(key=result.key, shards=result.shards, pieces=pieces_begin))
        self.resumed += resumed
        self.documents += counts.documents
        self.tokens += counts.tokens
        self.text_bytes += counts.text_bytes
        self.new_text_bytes += 0 if resumed else counts.text_bytes
        self.truncated += counts.truncated
        add_counts(self.skipped, counts.skipped)
        add_counts(self.notes, counts.notes)


def bad_record(unit: Unit, line: int, bad: BadRecord) -> DocumentError:
    """Return the error that names a bad record by its file and line, the rule that it breaks, and the ways out."""
    # A chat without messages lacks no text field: the recipe knows better which fields it wants.
    missing = {"missing_field": RECIPE_RULES["missing_field"]}
    rules = {"domain": "the domain must be a name", **RECIPE_RULES, **RULES, **missing}
    rule = rules.get(bad.reason, f"a record must fit the recipe ({bad.reason})")
    if bad.reason == TOO_LONG:
        return DocumentError(
            f"{place(unit.pieces[bad.piece], line)}: a record must not be longer than max_seq_len, got "
            f"{bad.detail}; raise --max-seq-len, or say --on-long drop or cut"
        )
    ways = WAYS_OUT.get(bad.reason, "mend the record")
    if bad.reason in ("missing_field", "not_text"):
        ways = "name the field with --text-field, or what the records are with --recipe (chat, dpo, ...)"
    elif bad.reason == "too_long":
        ways = "cut the record, allow it with --max-record-bytes"
    return DocumentError(
        f"{place(unit.pieces[bad.piece], line)}: {rule}, got {bad.detail}; "
        f"{ways}, or skip bad ones with --on-error skip"
    )


def run_build(build: Build, pool: WorkerPool, show: Show) -> BuildResult:
    """Run all units that are not done yet; the result is that of an uninterrupted run in one process."""
    journal, stop = build.journal, pool.opened.stop
    cut = cut_build(build, pool.opened)
    result = BuildResult(scans=cut.scans)
    run_scans(journal, missing_scans(journal, cut), pool, show)
    tasks = write_tasks(journal, cut)
    drop_others(journal, tasks)
    # As JSON, which takes a tenth of the memory: there may be a hundred thousand.
    done = {
        task.key: msgspec.json.encode(known) for task in tasks if (known := unit_result(journal.units, task.key))
    }
    look = Look(journal)
    with show("prepare", sum(unit.bytes for unit in cut.units), look) as tick:
        answers = pool.run([task for task in tasks if task.key not in done], tick)
        for task in tasks:
            resumed = task.key in done
            finished = msgspec.json.decode(done.pop(task.key), type=UnitResult) if resumed else next(answers)
            assert finished is not None
            result.add(task.unit, finished, resumed=resumed, stop=stop)
            look.count(task, finished)
            tick()
    _note_contents(build, result, show)
    _refuse_changed(build, tasks, result.scans)
    _refuse_nothing(build, result)
    return result


def _note_contents(build: Build, result: BuildResult, show: Show) -> None:
    """Hash all bytes of the files, so that a change of any of them is seen when files are added."""
    done = 0
    with show("note the inputs", sum(file.bytes for file in build.files), lambda: (done, 0, 0)) as tick:
        for file in build.files:
            result.contents[file.path] = "" if is_changed(file) else content_digest(file)
            done += file.bytes
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

    To a store that is there files may add nothing, unless all their records are bad.
    """
    all_bad = result.skipped and not result.skipped.keys() & LEFT_OUT
    if not result.documents and (build.base is None or all_bad):
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(result.skipped.items()))
        more = f" and {len(build.files) - 1} more" if len(build.files) > 1 else ""
        raise DocumentError(
            f"{build.files[0].path}{more}: must hold at least one document, got none, "
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


def keep_tokenizer(spec: str, stores: Sequence[Path]) -> None:
    """Keep a copy of the tokenizer's files in every store, so that its texts can be read wherever it goes."""
    files = copy_of(spec)
    first: dict[str, Path] = {}
    for store in stores:
        for name, data in files.items():
            path = store / TOKENIZER_FOLDER / name
            if path.is_file() and path.read_bytes() == data:
                continue
            make_folder(path.parent)
            try:
                os.link(first[name], path)  # the stores of one build share one copy, where links can be made
            except (KeyError, OSError):
                write_atomically(path, data)
            first.setdefault(name, path)


def _finished(build: Build, result: BuildResult) -> FinishedBuild:
    """Return what is in the store once the units are."""
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
        text_bytes=result.text_bytes,
        scans=tuple(result.scans),
    )
    old = build.base
    if old is None:
        return new
    counts, notes = dict(old.counts), dict(old.notes)
    add_counts(counts, new.counts)
    add_counts(notes, new.notes)
    return replace(
        new,
        inputs=old.inputs + new.inputs,
        counts=counts,
        listed=(old.listed + new.listed)[:MAX_LISTED],
        truncated=old.truncated + new.truncated,
        notes=dict(sorted(notes.items())),
        text_bytes=old.text_bytes + new.text_bytes,
        scans=old.scans + new.scans,
    )


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
