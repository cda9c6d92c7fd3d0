"""The build: units out, parts in, in input order, into one store."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.documents import InputFile, Unit, cut_files, find_files
from tokenmill.errors import ConfigError
from tokenmill.prepare.options import Job, PrepareOptions
from tokenmill.prepare.part import read_part, read_progress
from tokenmill.prepare.pool import run_here, run_in_processes
from tokenmill.prepare.progress import ProgressBar, say_loudly
from tokenmill.prepare.report import PrepareReport
from tokenmill.prepare.sample import sample_texts
from tokenmill.prepare.tally import Tally
from tokenmill.prepare.work import UnitResult, part_folder
from tokenmill.store import Manifest, StoreSpec, StoreWriter

if TYPE_CHECKING:
    from tokenmill.encode.tokenizer import Tokenizer

PARTS = ".tmp-parts"
KEY = "sequence"


def prepare(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str],
    tokenizer: str = "bytes",
    workers: int | None = None,
    rebuild: bool = False,
    progress: bool | None = None,
    warn: Callable[[str], None] = say_loudly,
    options: PrepareOptions | None = None,
) -> PrepareReport:
    """Tokenize files of text into the store `out`.

    `inputs` are paths, globs and folders of `.jsonl`, `.jsonl.gz` and `.jsonl.zst`, read in natural order.
    `tokenizer` is `bytes`, a `tokenizer.json`, a folder that holds one, or `tiktoken:<rank file>`. `workers` is
    the number of processes, by default one a core; the store is the same for any number. A finished store at
    `out` is replaced only with `rebuild`. The progress bar is shown on a terminal, or as `progress` says.
    """
    begin = time.monotonic()
    options = options or PrepareOptions()
    workers = _num_workers(workers)
    found = find_files(inputs)
    if found.passed_over:
        warn(
            f"{len(found.passed_over)} files in the given folders are not read, as their endings are not known: "
            f"{', '.join(found.passed_over[:3])}{', ...' if len(found.passed_over) > 3 else ''}"
        )
    opened, warning = _open_tokenizer(tokenizer, options, found.files)
    if warning:
        warn(warning)
    path = Path(out).expanduser()
    job = _job(path, tokenizer, opened, options)
    tally = Tally(files=found.files)
    with StoreWriter(path, _store_spec(job, opened, warning), rebuild=rebuild) as writer:
        parts = Path(job.parts)
        parts.mkdir()
        bar = ProgressBar(tally.input_bytes, lambda: _so_far(tally, parts), shown=progress)
        try:
            with bar, closing(_results(job, opened, found.files, workers, bar.tick)) as results:
                for unit, result in results:
                    tally.add(unit, result, stop=options.on_error == "stop")
                    _take_part(job, unit, writer)
                    bar.tick()
        finally:
            shutil.rmtree(parts, ignore_errors=True)
        tally.refuse_nothing()
        manifest = writer.commit(inputs=tally.inputs(), skipped=tally.skipped())
    return _report(path, manifest, tally, opened.engine, time.monotonic() - begin)


def _num_workers(workers: int | None) -> int:
    if workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers < 1:
        raise ConfigError(f"workers: must be at least 1, got {workers}; leave it out for one a core")
    return workers


def _open_tokenizer(spec: str, options: PrepareOptions, files: Sequence[InputFile]) -> tuple[Tokenizer, str | None]:
    from tokenmill.encode.agreement import trusted
    from tokenmill.encode.load import open_tokenizer

    framing: dict[str, Any] = {
        "add_bos": options.add_bos,
        "add_eos": options.add_eos,
        "bos_token": options.bos_token,
        "eos_token": options.eos_token,
    }
    if options.engine != "auto":
        return open_tokenizer(spec, engine=options.engine, **framing), None
    return trusted(spec, sample=sample_texts(files, options.text_field), **framing)


def _job(path: Path, spec: str, opened: Tokenizer, options: PrepareOptions) -> Job:
    from tokenmill.encode.frame import token_dtype

    return Job(
        parts=str((path / PARTS).absolute()),
        tokenizer=spec,
        tokenizer_digest=opened.identity.digest,
        engine=opened.engine.split()[0],
        keys={KEY: token_dtype(opened.identity.vocab_size).str},
        options=options,
    )


def _store_spec(job: Job, opened: Tokenizer, warning: str | None) -> StoreSpec:
    return StoreSpec(
        keys=job.keys,
        tokenizer=opened.identity.to_json(),
        recipe={
            "name": "text",
            "text_field": job.options.text_field,
            "tokenizer": job.tokenizer,
            "on_error": job.options.on_error,
            "max_tokens_per_shard": job.options.max_tokens_per_shard,
            "engine": opened.engine,
            **({"engine_warning": warning} if warning else {}),
        },
        max_tokens_per_shard=job.options.max_tokens_per_shard,
    )


def _results(
    job: Job, opened: Tokenizer, files: Sequence[InputFile], workers: int, tick: Callable[[], None]
) -> Generator[tuple[Unit, UnitResult]]:
    chunk_bytes = job.options.chunk_bytes
    workers = min(workers, sum(1 for _ in cut_files(files, chunk_bytes=chunk_bytes)))
    units = cut_files(files, chunk_bytes=chunk_bytes)
    if workers <= 1:
        return run_here(job, opened, units, tick)
    return run_in_processes(job, units, workers, tick)


def _take_part(job: Job, unit: Unit, writer: StoreWriter) -> None:
    """Append a part to the store and delete it."""
    folder = part_folder(job, unit)
    for arrays, offsets in read_part(folder, job.keys):
        writer.append(arrays, offsets)
    shutil.rmtree(folder)


def _so_far(tally: Tally, parts: Path) -> tuple[int, int, int]:
    """Return (bytes, documents, tokens) of the store and of the parts that are waiting or being written."""
    ahead = [read_progress(folder) for folder in parts.iterdir()]
    done = (tally.done_bytes, sum(tally.documents.values()), sum(tally.tokens.values()))
    return (
        done[0] + sum(a[0] for a in ahead),
        done[1] + sum(a[1] for a in ahead),
        done[2] + sum(a[2] for a in ahead),
    )


def _report(path: Path, manifest: Manifest, tally: Tally, engine: str, seconds: float) -> PrepareReport:
    return PrepareReport(
        path=path,
        fingerprint=manifest.fingerprint,
        documents=manifest.documents,
        tokens=manifest.tokens,
        shards=len(manifest.shards),
        files=len(tally.files),
        input_bytes=tally.input_bytes,
        text_bytes=tally.text_bytes,
        skipped=dict(sorted(tally.reasons.items())),
        engine=engine,
        seconds=seconds,
    )
