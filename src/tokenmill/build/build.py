"""The build: inputs are cut into units, units become shards in worker processes, shards become stores."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import xxhash

from tokenmill import __version__
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
    unit_key,
)
from tokenmill.build.unit import LEFT_OUT, TAKEN, OpenJob, fates_of, read_progress
from tokenmill.build.worker import Job, PrepareOptions, RecipeSpec, Task, WorkerPool, open_job, settle_recipe
from tokenmill.documents import (
    RULES,
    BadRecord,
    InputFile,
    Unit,
    cut_files,
    find_files,
    format_of,
    place,
    sample_texts,
)
from tokenmill.encode.engines import framing_of, open_tokenizer, trusted
from tokenmill.encode.files import copy_of
from tokenmill.encode.recipe import RULES as RECIPE_RULES
from tokenmill.encode.recipe import Recipe
from tokenmill.encode.recipe.recipe import Preprocessing
from tokenmill.encode.tokenizer import Tokenizer
from tokenmill.errors import ConfigError, DocumentError, StoreCorruptError, StoreError, TokenmillError
from tokenmill.fingerprint import digest
from tokenmill.store.durable import locked_folder, make_folder, write_atomically
from tokenmill.store.layout import TOKENIZER_FOLDER, read_manifest
from tokenmill.tables import check_types, path_of
from tokenmill.types import Uint8Array

_OF_READING = ("format", "text_unit", "max_record_bytes")
"""Options beside the recipe and the tokenizer that decide over what is in a store."""
_SECONDS_BETWEEN = 0.2
"""Two looks at how far a build has come."""
LINE_SECONDS = 30.0
"""How often a line says so, where no terminal shows a bar."""
SLOW_SECONDS = 2.0
"""How long the tokenizer is opened before a line says so."""
Show: TypeAlias = Callable[
    [str, int, Callable[[], tuple[int, int, int]]], AbstractContextManager[Callable[[], None]]
]
"""What shows how far a step of the build is: what it is, its bytes, and a look at those that are done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreReport:
    """One store of a build."""

    route: str
    """Its name below `out`: a domain, `train` or `val`; empty for `out` itself."""
    path: Path
    documents: int
    tokens: int
    shards: int
    fingerprint: str
    """The same for the same documents and options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareReport:
    """The numbers of a finished build; documents and tokens are those of the whole store."""

    path: Path
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a build is."""

    what: str
    """`open the tokenizer`, `look for duplicates` or `prepare`."""
    done_bytes: int
    """Of the input, as it is on disk; units that an earlier try had finished count at once."""
    total_bytes: int
    documents: int
    tokens: int
    seconds: float
    """Since this step began."""


def prepare(  # noqa: PLR0913 - the front door
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str] = "bytes",
    recipe: RecipeSpec = "text",
    workers: int | None = None,
    rebuild: bool = False,
    progress: bool | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    options: PrepareOptions | None = None,
) -> PrepareReport:
    """Turn files of text or records into the store `out`.

    `inputs` are paths, globs, folders and `hf:` datasets, read in natural order. `tokenizer` is `bytes`, a
    `tokenizer.json`, a `.model`, a folder that holds one, or `tiktoken:<rank file>`. `recipe` is `text`, `chat`,
    `instruction`, `dpo`, `grpo`, the path of a recipe, or the recipe itself. `workers` is the number of processes,
    by default one a core; the store is the same for any number.

    A build that was interrupted goes on where it stopped. A finished store is added to: files that are in it
    already are left alone. Another tokenizer, recipe or option than it was made with is refused, unless `rebuild`
    is given, which replaces it at the end.

    On a terminal a bar shows how far it is, elsewhere a line on stderr every 30 s; `progress=False` shows nothing.
    `on_progress` is called with the same figures, some five times a second; what it raises stops the build.
    """
    begin = time.monotonic()
    options = PrepareOptions() if options is None else options
    check_types(rebuild=(rebuild, bool), progress=(progress, bool | None), workers=(workers, int | None))
    num_workers = _num_workers(workers)
    settled = settle_recipe(recipe, options)
    journal = Journal(Path(path_of("out", out)).expanduser())
    files = _input_files(inputs, journal.out, options)
    tokenizer = path_of("tokenizer", tokenizer)
    show = partial(_shown_progress, shown=progress, on_progress=on_progress)
    with show("open the tokenizer", 0, lambda: (0, 0, 0)):
        job, opened, warning = _open_job(journal, tokenizer, settled, options, files)
        framing = _settle_framing(tokenizer, settled, options)
    opening_seconds = time.monotonic() - begin
    result = None
    with _system_errors_explained(journal.out):
        make_folder(journal.out)
        with locked_folder(journal.out) as lock:
            if rebuild:
                journal.drop_unreadable()
            journal.finish_publishing()
            identity, names, size = _identity(job, opened), options.same_names, options.chunk_bytes
            build = begin_build(journal, identity, files, chunk_bytes=size, rebuild=rebuild, same_names=names)
            if build.files:
                with WorkerPool(job, opened, num_workers, lock) as pool:
                    result = run_build(build, pool, show)
                _publish(build, result, job, opened, warning)
            report = _report(build, result, opened, framing, opening_seconds, begin)
            keep_tokenizer(tokenizer, [store.path for store in report.stores])
            return report


def _num_workers(workers: int | None) -> int:
    if workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers < 1:
        raise ConfigError(f"workers: must be at least 1, got {workers}; leave it out for one a core")
    return workers


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
    journal: Journal, tokenizer: str, recipe: Recipe, options: PrepareOptions, files: Sequence[InputFile]
) -> tuple[Job, OpenJob, str | None]:
    """Open all that units need, and warn of what is unusual; return also what was told of the engine."""
    opened_tokenizer, warning = _open_tokenizer(tokenizer, recipe, options, files)
    job = Job(
        folder=str(journal.units.absolute()),
        tokenizer=tokenizer,
        identity=opened_tokenizer.identity.to_json(),
        engine=opened_tokenizer.engine.split()[0],
        recipe=recipe,
        options=options,
    )
    opened = open_job(job, opened_tokenizer)
    _warn_of_spelled_turns(opened)
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


def _settle_framing(spec: str, recipe: Recipe, options: PrepareOptions) -> str:
    """Say which strings are BOS and EOS; warn if plain text is to end as turns of a chat do."""
    framing = framing_of(spec, **options.framing())
    if framing.turn_end is not None and recipe.kind == "seq":
        other = f", such as {framing.end_of_text!r}" if framing.end_of_text else ""
        warn(
            f"every document of plain text will end with {framing.turn_end!r}, which ends a turn of a chat "
            f"({framing.line}); name the end of a text with --eos-token{other}, or this one if it is meant"
        )
    return framing.line


def _identity(job: Job, opened: OpenJob) -> dict[str, Any]:
    """Return what two builds must have in common to be one."""
    return {
        "tokenizer": opened.tokenizer.identity.to_json(),
        "recipe": opened.encoder.to_json() if opened.encoder else job.recipe.to_json(),
        "options": {name: getattr(job.options, name) for name in _OF_READING}
        | ({} if job.options.keep_empty else {"keep_empty": False})
        | ({} if job.options.delimiter is None else {"delimiter": job.options.delimiter})
        | ({"keep": list(job.options.keep)} if job.options.keep else {}),
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

    results: list[UnitResult] = field(default_factory=list)
    resumed: int = 0
    """How many of them an earlier try had finished."""
    scans: Sequence[str] = ()
    """Names of the hashes of the records, where duplicates were looked for."""
    done_bytes: int = 0
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
    pieces: list[tuple[tuple[str, str, int], ...]] = field(default_factory=list)
    """Of each unit, where its pieces begin: see `UnitShards`."""

    def add(self, unit: Unit, result: UnitResult, *, resumed: bool, stop: bool) -> None:
        """Count a unit; where bad records `stop` a build, raise the first."""
        counts = result.counts
        # Where a piece begins in its file, in lines: those of the earlier pieces of the same file.
        begins = []
        for piece, lines in zip(unit.pieces, counts.lines, strict=True):
            begins.append(self.lines[piece.file.path])
            self.lines[piece.file.path] += lines
        names = [(piece.file.name, format_of(piece.file.suffix).counts) for piece in unit.pieces]
        self.pieces.append(tuple((*name, begin) for name, begin in zip(names, begins, strict=True)))
        for route, pieces in sorted(counts.taken.items()):
            for index, documents, tokens in pieces:
                routes = self.taken.setdefault(unit.pieces[index].file.path, {})
                before = routes.get(route, (0, 0))
                routes[route] = (before[0] + documents, before[1] + tokens)
        for bad in counts.bad:
            line = begins[bad.piece] + bad.line
            if stop:
                raise _bad_record(unit, line, bad)
            if len(self.listed) < MAX_LISTED:
                name = unit.pieces[bad.piece].file.name
                self.listed.append({"file": name, "line": line + 1, "reason": bad.reason, "detail": bad.detail})
        self.results.append(result)
        self.resumed += resumed
        self.documents += counts.documents
        self.tokens += counts.tokens
        self.done_bytes += unit.bytes
        self.text_bytes += counts.text_bytes
        self.new_text_bytes += 0 if resumed else counts.text_bytes
        self.truncated += counts.truncated
        add_counts(self.skipped, counts.skipped)
        add_counts(self.notes, counts.notes)


def _bad_record(unit: Unit, line: int, bad: BadRecord) -> DocumentError:
    # A chat without messages lacks no text field: the recipe knows better which fields it wants.
    missing = {"missing_field": RECIPE_RULES["missing_field"]}
    rules = {"domain": "the domain must be a name", **RECIPE_RULES, **RULES, **missing}
    rule = rules.get(bad.reason, f"a record must fit the recipe ({bad.reason})")
    ways = "mend the record"
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
    journal, stop, chosen = build.journal, pool.opened.stop, pool.opened.chosen
    units = list(cut_files(build.files, chunk_bytes=build.chunk_bytes, skip_broken=not stop))
    how = digest([__version__, dict(build.identity)])
    result = BuildResult()
    fates: Sequence[Uint8Array | None] = [None] * len(units)
    if chosen.deduplicate or chosen.max_items is not None:
        result.scans = [unit_key(unit, build.digests, [how, "scan"]) for unit in units]
        _scan(build, units, result.scans, pool, show)
        fates = _fates(build, result.scans, chosen)
    tasks = _tasks(build, units, fates, how)
    _drop_others(journal, tasks)
    done = {task.key: known for task in tasks if (known := journal.result(task.key)) is not None}

    def look() -> tuple[int, int, int]:
        """Count what is in finished units and in those under way."""
        ahead = [read_progress(folder) for folder in journal.units.glob(".tmp-*")]
        now = (result.done_bytes, result.documents, result.tokens)
        position, documents, tokens = map(sum, zip(now, *ahead, strict=True))
        return position, documents, tokens

    with show("prepare", sum(unit.bytes for unit in units), look) as tick:
        answers = pool.run([task for task in tasks if task.key not in done], tick)
        for task in tasks:
            unit_result = done.get(task.key) or next(answers)
            assert unit_result is not None
            result.add(task.unit, unit_result, resumed=task.key in done, stop=stop)
            tick()
    _refuse_changed(build, tasks, result.scans)
    _refuse_nothing(build, result)
    return result


def _scan(build: Build, units: Sequence[Unit], keys: Sequence[str], pool: WorkerPool, show: Show) -> None:
    """Hash the records of all units that are not hashed yet."""
    folder = build.journal.scans
    missing = {key: unit for unit, key in zip(units, keys, strict=True) if not (folder / key).exists()}
    tasks = [Task(unit=unit, key=key, scan=True) for key, unit in missing.items()]
    total = sum(unit.bytes for unit in missing.values())
    done = 0
    with show("look for duplicates", total, lambda: (done, 0, 0)) as tick:
        for task, _ in zip(tasks, pool.run(tasks, tick), strict=True):
            done += task.unit.bytes
            tick()


def _fates(build: Build, scans: Sequence[str], chosen: Preprocessing) -> list[Uint8Array]:
    """Return what becomes of the records of each unit, as if all files of the store were read again before it."""
    old = build.base.scans if build.base is not None else ()
    paths = [build.journal.scans / key for key in (*old, *scans)]
    if gone := [path for path in paths if not path.exists()]:
        raise StoreCorruptError(f"{gone[0]}: must be there to add files, got nothing; start over with --rebuild")
    return fates_of(paths, deduplicate=chosen.deduplicate, max_items=chosen.max_items)[len(old) :]


def _tasks(build: Build, units: Sequence[Unit], fates: Sequence[Uint8Array | None], how: str) -> list[Task]:
    """Return a task for each unit, each with a key of its own: of copies the second, third ... are numbered."""
    copies: Counter[str] = Counter()
    tasks: list[Task] = []
    for unit, each in zip(units, fates, strict=True):
        name = "" if each is None or bool((each == TAKEN).all()) else xxhash.xxh3_128_hexdigest(each.data)
        key = unit_key(unit, build.digests, [how, name])
        copies[key] += 1
        if copies[key] > 1:
            key = digest([key, copies[key]])
        file = build.journal.fates / name
        if name and each is not None:
            file.parent.mkdir(exist_ok=True)
            write_atomically(file, each.tobytes())
        tasks.append(Task(unit=unit, key=key, fates=str(file.absolute()) if name else None))
    return tasks


def _drop_others(journal: Journal, tasks: Sequence[Task]) -> None:
    """Remove units of inputs that are no longer asked for, finished or not."""
    known = {name for task in tasks for name in (task.key, f".tmp-{task.key}")}
    for folder in list(journal.units.iterdir()):
        if folder.name not in known:
            shutil.rmtree(folder)


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
        units=tuple(
            UnitShards(key=unit.key, shards=unit.shards, pieces=pieces)
            for unit, pieces in zip(result.results, result.pieces, strict=True)
        ),
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
        units=len(result.results),
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


# What is shown on the terminal.


def warn(message: str) -> None:
    """Print a warning on stderr, in bold where that is possible."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text(f"warning: {message}", style="bold yellow"), soft_wrap=True)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


@contextmanager
def _shown_progress(
    what: str,
    total_bytes: int,
    look: Callable[[], tuple[int, int, int]],
    *,
    shown: bool | None,
    on_progress: Callable[[Progress], None] | None,
) -> Iterator[Callable[[], None]]:
    """Show how far a step of the build is: a bar on a terminal, else a line every 30 s; a hook is told as well.

    Gives a function that brings it up to date, if it has been a while: cheap enough to call at any time. `look`
    returns the bytes, documents and tokens that are done. A step without bytes has a line, if it is slow.
    """
    begin, last = time.monotonic(), 0.0
    with ExitStack() as stack:
        tell = (lambda _: None) if shown is False else stack.enter_context(_told(what, total_bytes, always=shown))

        def tick(seconds_between: float = _SECONDS_BETWEEN) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last < seconds_between:
                return
            last = now
            done_bytes, documents, tokens = look()
            progress = Progress(
                what=what,
                done_bytes=done_bytes,
                total_bytes=total_bytes,
                documents=documents,
                tokens=tokens,
                seconds=now - begin,
            )
            tell(progress)
            if on_progress is not None:
                on_progress(progress)

        tick()
        yield tick
        tick(0)


@contextmanager
def _told(what: str, total_bytes: int, *, always: bool | None) -> Iterator[Callable[[Progress], None]]:
    """Give what tells people on stderr how far a step is; a bar is shown on a terminal, or `always`."""
    if not total_bytes:
        line = threading.Timer(SLOW_SECONDS, _say, [f"{what}: this takes a while"])
        line.daemon = True
        line.start()
        try:
            yield lambda _: None
        finally:
            line.cancel()
        return
    if not (always or sys.stderr.isatty()):
        last = 0.0

        def tell(now: Progress) -> None:
            nonlocal last
            if now.seconds - last >= LINE_SECONDS:
                last = now.seconds
                done, total = now.done_bytes / 1e6, total_bytes / 1e6
                _say(
                    f"{what}: {done:,.0f} of {total:,.0f} MB, {done / total:.0%}; {now.documents:,} documents, "
                    f"{now.tokens:,} tokens, {done / now.seconds:,.1f} MB/s"
                )

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn(what),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[documents]:,} documents"),
        TextColumn("{task.fields[megabytes]:,.1f} MB/s"),
        TextColumn("{task.fields[tokens]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total_bytes, documents=0, megabytes=0.0, tokens=0.0)

        def show(now: Progress) -> None:
            seconds = max(now.seconds, 1e-3)
            bar.update(
                task,
                completed=now.done_bytes,
                documents=now.documents,
                megabytes=now.done_bytes / 1e6 / seconds,
                tokens=now.tokens / seconds,
            )

        yield show
