"""The build: inputs are cut into units, units become shards in worker processes, shards become stores."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import xxhash

from tokenmill import __version__
from tokenmill.build.job import TEXT_KEY, Job, PrepareOptions, RecipeSpec, fast_text_field, settle_recipe
from tokenmill.build.journal import (
    Entry,
    Journal,
    Ledger,
    entry_digest,
    refuse_difference,
    refuse_left_shards,
    refuse_strangers,
    unit_key,
)
from tokenmill.build.publish import Tally, begin_publish, finish_publish, give_up_publish, published
from tokenmill.build.unit import MAX_LISTED, TAKEN, UnitResult, read_progress, read_result
from tokenmill.build.work import Bench, fates_of, open_bench, sample_texts
from tokenmill.build.worker import Task, run_here, run_in_processes
from tokenmill.documents import InputFile, Inputs, Unit, chunk_size, cut_files, file_digest, find_files
from tokenmill.errors import (
    ConfigError,
    DocumentError,
    StoreCorruptError,
    StoreError,
    StoreExistsError,
    TokenmillError,
)
from tokenmill.fingerprint import digest, first_difference
from tokenmill.store import Manifest
from tokenmill.store.durable import locked_folder, make_folder, write_atomically
from tokenmill.store.layout import MANIFEST
from tokenmill.store.manifest import read_manifest, shard_to_json
from tokenmill.store.writer import refuse_foreign_shards
from tokenmill.types import Uint8Array

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from tokenmill.encode.recipe import Recipe
    from tokenmill.encode.tokenizer import Tokenizer


# What a build has to do, seen from what is there already: begin, go on, add files, replace, or nothing.


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What a build has to do."""

    journal: Journal
    identity: Mapping[str, Any]
    files: Sequence[InputFile]
    """Those that are not in the store yet."""
    digests: Mapping[str, str]
    """Path -> what tells a changed file from the same one."""
    stamps: Mapping[str, tuple[int, int] | None]
    """Path -> size and time of change, to see at the end that nobody wrote to a file meanwhile."""
    chunk_bytes: int
    base: Ledger | None
    """What the finished store has that is added to; None for a new store or one that is replaced."""
    cleared: Sequence[str] | None
    """Routes of the store that is replaced; None where nothing is."""


def place_order(
    journal: Journal,
    identity: Mapping[str, Any],
    files: Sequence[InputFile],
    *,
    chunk_bytes: int | None,
    rebuild: bool,
) -> Order:
    """Find out what there is to do, and note in the journal that it has begun; refuse what does not fit."""
    ledger, build = journal.ledger(), journal.build()
    if ledger is None and (journal.out / MANIFEST).exists() and not rebuild and build is None:
        raise StoreExistsError(
            f"{journal.out}: must not hold a store that prepare cannot add to, got one without its journal; "
            "choose another path or --rebuild it"
        )
    if build is not None and rebuild and not (build["rebuild"] and _same(build["identity"], identity)):
        build = None  # begun in another way, and given up for this
    if build is not None and not journal.has_finished_units() and not _same(build["identity"], identity):
        build = None  # nothing is lost by beginning anew
    if build is not None:
        refuse_difference(journal.out, build["identity"], identity, finished=False)
    elif ledger is not None and not rebuild:
        refuse_difference(journal.out, ledger.identity, identity, finished=True)
    replaces = rebuild or (build is not None and build["rebuild"])
    routes = list(ledger.routes) if ledger is not None else []
    if replaces:
        for route in {"", *routes}:
            refuse_foreign_shards(journal.out / route)
    else:
        refuse_left_shards(journal.out, routes)
    base = None if replaces else ledger
    contents = {file.path: file_digest(file) for file in files}
    new = _new_files(journal, files, contents, base)
    if build is not None and chunk_bytes in (None, build["chunk_bytes"]):
        chunk = build["chunk_bytes"]
    else:
        chunk = chunk_bytes or chunk_size(new)
        if new:
            journal.begin(identity, chunk, rebuild=replaces)
    return Order(
        journal=journal,
        identity=identity,
        files=new,
        digests={file.path: entry_digest(file.name, contents[file.path]) for file in new},
        stamps={file.path: stamp_of(file) for file in new},
        chunk_bytes=chunk,
        base=base,
        # Those below `out` first: what is left there then is no part of a store.
        cleared=[*filter(None, routes), ""] if replaces else None,
    )


def _same(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return first_difference(dict(old), dict(new)) is None


def stamp_of(file: InputFile) -> tuple[int, int] | None:
    """Return what changes when a file is written to: its size and time; None if it is gone."""
    try:
        found = os.stat(file.path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _new_files(
    journal: Journal, files: Sequence[InputFile], contents: Mapping[str, str], base: Ledger | None
) -> list[InputFile]:
    """Return the files that are not in the store; one that changed or was renamed since it was read is refused."""
    if base is None:
        return list(files)
    there = Counter(entry.digest for entry in base.inputs)
    unknown: list[InputFile] = []
    for file in files:
        digest = entry_digest(file.name, contents[file.path])
        if there[digest] > 0:
            there[digest] -= 1
        else:
            unknown.append(file)
    names = {entry.name: entry for entry in base.inputs}
    # Entries whose file was not given, by size: one of the new files may be it.
    gone: dict[int, list[Entry]] = {}
    for entry in base.inputs:
        if there[entry.digest] > 0 and entry.taken:
            gone.setdefault(entry.bytes, []).append(entry)
    for file in unknown:
        old = names.get(file.name)
        if old is not None:
            raise StoreExistsError(
                f"{journal.out}: files that are in a store must stay as they were, got {file.path} with other "
                f"content than {old.name} had ({old.bytes} -> {file.bytes} bytes); put new records into files "
                "with new names, or --rebuild"
            )
        for entry in gone.get(file.bytes, ()):
            if entry_digest(entry.name, contents[file.path]) == entry.digest:
                raise StoreExistsError(
                    f"{journal.out}: a file must be added once, got {file.path} with the content of {entry.name}, "
                    "which is in the store; leave it out or give it its old name, or --rebuild"
                )
    return unknown


# How far a build has come, shown on the terminal.

_SECONDS_BETWEEN = 0.2


class ProgressBar:
    """A bar on stderr: documents, MB/s, tokens/s, time left by bytes of input; nothing if not `shown`."""

    def __init__(
        self,
        total_bytes: int,
        look: Callable[[], tuple[int, int, int]],
        *,
        shown: bool | None = None,
        what: str = "prepare",
    ) -> None:
        self._what = what
        self._total_bytes = total_bytes
        self._look = look
        self._shown = sys.stderr.isatty() if shown is None else shown
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._begin = self._last = time.monotonic()

    def __enter__(self) -> ProgressBar:
        if self._shown:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn(self._what),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.fields[documents]:,} documents"),
                TextColumn("{task.fields[megabytes]:,.1f} MB/s"),
                TextColumn("{task.fields[tokens]:,.0f} tokens/s"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(
                "prepare", total=self._total_bytes, documents=0, megabytes=0.0, tokens=0.0
            )
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            if error is None:
                self._refresh()
            self._bar.stop()

    def tick(self) -> None:
        """Bring the bar up to date, if it has been a while: cheap enough to call at any time."""
        if self._bar is not None and time.monotonic() - self._last > _SECONDS_BETWEEN:
            self._refresh()

    def _refresh(self) -> None:
        assert self._bar is not None
        assert self._task is not None
        self._last = time.monotonic()
        done_bytes, documents, tokens = self._look()
        seconds = max(self._last - self._begin, 1e-3)
        self._bar.update(
            self._task,
            completed=done_bytes,
            documents=documents,
            megabytes=done_bytes / 1e6 / seconds,
            tokens=tokens / seconds,
        )


def say_loudly(message: str) -> None:
    """Print a warning on stderr, in bold where that is possible."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text(f"warning: {message}", style="bold yellow"), soft_wrap=True)


# Running the units of a build, in this process or in others, and counting what came of them.


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
    fates: Sequence[Uint8Array | None] = [None] * len(units)
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


def _fates(order: Order, scans: Sequence[str], recipe: Recipe) -> list[Uint8Array]:
    """Return what becomes of the records of each unit, as if all files of the store were read again before it."""
    old = list(order.base.scans) if order.base is not None else []
    paths = [order.journal.scans / key for key in (*old, *scans)]
    if gone := [path for path in paths if not path.exists()]:
        raise StoreCorruptError(f"{gone[0]}: must be there to add files, got nothing; start over with --rebuild")
    chosen = recipe.preprocessing
    return fates_of(paths, deduplicate=chosen.deduplicate, max_items=chosen.max_items)[len(old) :]


def _tasks(order: Order, units: Sequence[Unit], fates: Sequence[Uint8Array | None], how: str) -> list[Task]:
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


# What a build did.


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
            "skipped": dict(self.skipped),
            "notes": dict(self.notes),
            "fingerprint": self.fingerprint,
            "tokens_per_byte": self.tokens_per_byte,
            "megabytes_per_second": self.megabytes_per_second,
        }


def store_reports(out: Path, manifests: Mapping[str, Manifest]) -> list[StoreReport]:
    """Say what is in each store of a build."""
    return [
        StoreReport(
            route=route,
            path=out / route,
            documents=manifest.documents,
            tokens=manifest.tokens,
            shards=len(manifest.shards),
            fingerprint=manifest.fingerprint,
        )
        for route, manifest in sorted(manifests.items())
    ]


_OF_READING = ("format", "text_unit", "max_record_bytes")
"""Options beside the recipe and the tokenizer that decide over what is in a store."""


def prepare(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str],
    tokenizer: str = "bytes",
    recipe: RecipeSpec = "text",
    workers: int | None = None,
    rebuild: bool = False,
    progress: bool | None = None,
    options: PrepareOptions | None = None,
) -> PrepareReport:
    """Turn files of text or records into the store `out`.

    `inputs` are paths, globs, folders and `hf:` datasets, read in natural order. `tokenizer` is `bytes`, a
    `tokenizer.json`, a folder that holds one, or `tiktoken:<rank file>`. `recipe` is `text`, `chat`,
    `instruction`, `dpo`, `grpo`, the path of a recipe, or the recipe itself. `workers` is the number of processes,
    by default one a core; the store is the same for any number.

    A build that was interrupted goes on where it stopped. A finished store is added to: files that are in it
    already are left alone. Another tokenizer, recipe or option than it was made with is refused, unless `rebuild`
    is given, which replaces it at the end. The progress bar is shown on a terminal, or as `progress` says.
    """
    begin = time.monotonic()
    options = options or PrepareOptions()
    workers = _num_workers(workers)
    chosen = settle_recipe(recipe, options)
    journal = Journal(Path(out).expanduser())
    found = _inputs(inputs, journal.out, options)
    if found.passed_over:
        say_loudly(
            f"{len(found.passed_over)} files in the given folders are not read, as they are of no known kind: "
            f"{', '.join(found.passed_over[:3])}{', ...' if len(found.passed_over) > 3 else ''}"
        )
    opened, warning = _open_tokenizer(tokenizer, chosen, options, found.files)
    if warning:
        say_loudly(warning)
    bench = open_bench(_job(journal, tokenizer, opened, chosen, options), opened)
    _warn_of_spelled(bench)
    ready = time.monotonic()
    with _system_errors_told(journal.out), _made_and_locked(journal.out) as lock:
        if rebuild:
            give_up_publish(journal)
            journal.drop_unreadable()
        finish_publish(journal)
        ledger = journal.ledger()
        refuse_strangers(journal.out, ledger.routes if ledger else [])
        identity = _identity(bench, chosen, options)
        order = place_order(journal, identity, found.files, chunk_bytes=options.chunk_bytes, rebuild=rebuild)
        outcome = None
        if order.files:
            outcome = drive(order, chosen, Crew(bench=bench, workers=workers, lock=lock, progress=progress))
            described = {"tokenizer": tokenizer, "engine": opened.engine, "on_error": options.on_error}
            if warning:
                described["engine_warning"] = warning
            _publish(order, outcome, bench.job, chosen, described)
        return _report(order, outcome, chosen.kind, opened.engine, (begin, time.monotonic(), ready))


def _inputs(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], out: Path, options: PrepareOptions
) -> Inputs:
    """List the files to read; the store itself may stand among them and is left alone."""
    found = find_files(inputs, format=options.format)
    for path in (str(out.absolute()), *(file.path for file in found.files)):
        if not path.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in path):
            raise DocumentError(f"{path!r}: a path must be UTF-8, got other bytes; rename it")
    store = os.path.realpath(out)
    real_folder = cache(os.path.realpath)  # of few folders there may be millions of files

    def inside(path: str) -> bool:
        return os.path.join(real_folder(os.path.dirname(path)), "").startswith(os.path.join(store, ""))

    outside = [file.path for file in found.files if not inside(file.path)]
    if len(outside) == len(found.files):
        return found
    if not outside:
        raise DocumentError(f"inputs: must not all lie in the store, got {store}; choose another path for it")
    # Once more without them, as names and order are relative to the folder that all files share.
    passed_over = tuple(path for path in found.passed_over if not inside(path))
    return replace(find_files(outside, format=options.format), passed_over=passed_over)


@contextmanager
def _system_errors_told(out: Path) -> Iterator[None]:
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


@contextmanager
def _made_and_locked(out: Path) -> Iterator[int]:
    make_folder(out)
    with locked_folder(out) as lock:
        yield lock


def _identity(bench: Bench, recipe: Recipe, options: PrepareOptions) -> dict[str, Any]:
    """Return what two builds must have in common to be one."""
    return {
        "tokenizer": bench.tokenizer.identity.to_json(),
        "recipe": bench.encoder.to_json() if bench.encoder else recipe.to_json(),
        "options": {name: getattr(options, name) for name in _OF_READING},
    }


def _warn_of_spelled(bench: Bench) -> None:
    """Tell that the ends of turns are no control tokens: any message can spell them."""
    spelled = bench.encoder.spelled() if bench.encoder is not None else ()
    if spelled:
        say_loudly(
            f"the chat template ends turns with {', '.join(map(repr, spelled))}, which the tokenizer has no "
            "control token for: it is spelled in ordinary tokens, and a message may spell it too; "
            "use a template that fits the tokenizer, or add the token to it"
        )


def _num_workers(workers: int | None) -> int:
    if workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers < 1:
        raise ConfigError(f"workers: must be at least 1, got {workers}; leave it out for one a core")
    return workers


def _open_tokenizer(
    spec: str, recipe: Recipe, options: PrepareOptions, files: Sequence[InputFile]
) -> tuple[Tokenizer, str | None]:
    from tokenmill.encode.engines import open_tokenizer, trusted

    framing: dict[str, Any] = options.framing()
    if options.engine != "auto":
        return open_tokenizer(spec, engine=options.engine, **framing), None
    return trusted(spec, sample=sample_texts(files, fast_text_field(recipe)), **framing)


def _job(journal: Journal, spec: str, opened: Tokenizer, recipe: Recipe, options: PrepareOptions) -> Job:
    from tokenmill.encode.frame import token_dtype
    from tokenmill.encode.recipe import record_keys

    vocab_size = opened.identity.vocab_size
    fast = fast_text_field(recipe) is not None
    return Job(
        folder=str(journal.units.absolute()),
        tokenizer=spec,
        identity=opened.identity.to_json(),
        engine=opened.engine.split()[0],
        keys={TEXT_KEY: token_dtype(vocab_size).str} if fast else record_keys(recipe, vocab_size),
        recipe=recipe.to_json(),
        options=options,
    )


def _publish(order: Order, outcome: Outcome, job: Job, recipe: Recipe, described: Mapping[str, str]) -> None:
    """Make the finished units stores."""
    base = order.base
    begin_publish(
        order.journal,
        units=[result.to_json() for result in outcome.results],
        base={
            route: [shard_to_json(shard) for shard in read_manifest(order.journal.out / route).shards]
            for route in (base.routes if base else ())
        },
        cleared=order.cleared,
        manifest={
            "kind": recipe.kind,
            "keys": dict(job.keys),
            "tokenizer": dict(job.identity),
            "recipe": {
                "name": recipe.name,
                **described,
                **order.identity["options"],
                "recipe": order.identity["recipe"],
            },
        },
        ledger=asdict(_ledger(order, outcome)),
    )
    finish_publish(order.journal)


def _ledger(order: Order, outcome: Outcome) -> Ledger:
    """Return what is in the store once the units are."""
    tally, base = outcome.tally, order.base
    counts = dict(base.counts) if base else {}
    for reason, count in sorted(tally.reasons.items()):
        counts[reason] = counts.get(reason, 0) + count
    entries = [
        Entry(
            name=file.name,
            bytes=file.bytes,
            digest=order.digests[file.path],
            taken=tally.taken.get(file.path, {}),
        )
        for file in order.files
    ]
    return Ledger(
        identity=order.identity,
        routes=(),
        inputs=[*(base.inputs if base else ()), *entries],
        counts=counts,
        listed=[*(base.listed if base else ()), *tally.listed][:MAX_LISTED],
        truncated=tally.truncated + (base.truncated if base else 0),
        notes=dict(sorted((tally.notes + Counter(base.notes if base else {})).items())),
        text_bytes=tally.text_bytes + (base.text_bytes if base else 0),
        scans=[*(base.scans if base else ()), *outcome.scans],
    )


def _report(
    order: Order, outcome: Outcome | None, kind: str, engine: str, times: tuple[float, float, float]
) -> PrepareReport:
    ledger = order.journal.ledger()
    assert ledger is not None
    stores = store_reports(order.journal.out, published(order.journal, ledger.routes))
    tally = outcome.tally if outcome else None
    return PrepareReport(
        path=order.journal.out,
        kind=kind,
        stores=stores,
        documents=sum(store.documents for store in stores),
        tokens=sum(store.tokens for store in stores),
        shards=sum(store.shards for store in stores),
        files=len(ledger.inputs),
        new_files=len(order.files),
        new_documents=tally.documents if tally else 0,
        new_tokens=tally.tokens if tally else 0,
        units=len(outcome.results) if outcome else 0,
        resumed_units=outcome.resumed if outcome else 0,
        input_bytes=sum(file.bytes for file in order.files),
        text_bytes=tally.text_bytes if tally else 0,
        worked_bytes=tally.new_text_bytes if tally else 0,
        skipped=dict(sorted(tally.reasons.items())) if tally else {},
        truncated=tally.truncated if tally else 0,
        notes=dict(sorted(tally.notes.items())) if tally else {},
        engine=engine,
        seconds=times[1] - times[0],
        opening_seconds=times[2] - times[0],
    )
