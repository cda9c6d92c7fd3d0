"""The build: inputs are cut into units, units become shards in worker processes, shards become stores."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.documents import InputFile, Inputs, find_files
from tokenmill.errors import ConfigError, DocumentError, StoreError, TokenmillError
from tokenmill.prepare.bench import Bench, open_bench
from tokenmill.prepare.drive import Crew, Outcome, drive
from tokenmill.prepare.job import TEXT_KEY, Job, fast_text_field
from tokenmill.prepare.journal import Entry, Journal, Ledger, refuse_strangers
from tokenmill.prepare.options import PrepareOptions, RecipeSpec, settle_recipe
from tokenmill.prepare.order import Order, place_order
from tokenmill.prepare.progress import say_loudly
from tokenmill.prepare.publish import begin_publish, finish_publish, give_up_publish, published
from tokenmill.prepare.report import PrepareReport, store_reports
from tokenmill.prepare.sample import sample_texts
from tokenmill.prepare.unit import MAX_LISTED
from tokenmill.store.durable import locked_folder, make_folder
from tokenmill.store.manifest import read_manifest, shard_to_json

if TYPE_CHECKING:
    from tokenmill.encode.recipe import Recipe
    from tokenmill.encode.tokenizer import Tokenizer

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
    from tokenmill.encode.agreement import trusted
    from tokenmill.encode.load import open_tokenizer

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
