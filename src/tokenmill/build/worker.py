"""What a build was asked for, as a job, and the worker processes that do its units.

Each worker is handed the units of a job one by one, as lines of JSON, and answers in kind. Workers are fresh
interpreters that are spoken to over pipes, and not a `ProcessPoolExecutor`: that one imports the user's main script
again in each worker (which runs an unguarded script twice and loads all that it loads), leaves workers behind when
the parent is killed, and cannot end one in the middle of its work.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any, TypeAlias

import msgspec
import numpy as np

from tokenmill import errors
from tokenmill.build.journal import UnitResult
from tokenmill.build.unit import TEXT_KEY, OpenJob, scan_unit, write_unit
from tokenmill.documents import ReadOptions, Unit
from tokenmill.documents.units import MAX_RECORD_BYTES
from tokenmill.encode.control import with_policy
from tokenmill.encode.engines import open_tokenizer
from tokenmill.encode.recipe import PRESETS, Recipe, load_recipe, open_encoder, record_keys
from tokenmill.encode.recipe.recipe import check_recipe
from tokenmill.encode.tokenizer import Tokenizer, token_dtype
from tokenmill.errors import ConfigError, TokenizerError, TokenmillError, nearest
from tokenmill.store import StoreSpec
from tokenmill.store.writer import MAX_TOKENS_PER_SHARD
from tokenmill.tables import as_json, check_fields, path_of, read_table
from tokenmill.types import ON_ERROR

RecipeSpec: TypeAlias = "str | os.PathLike[str] | Mapping[str, object]"


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """What is seldom changed. None leaves it to the recipe or the tokenizer."""

    text_field: str | None = None
    """Where the text is in a record, for the recipe `text`; dots go down: `a.b` is field b of the object in a."""
    control_strings: str | None = None
    """What becomes of strings such as `<|endoftext|>` in raw text: ordinary `text`, `encode`, or `drop`."""
    chat_template: str | None = None
    """`tokenizer`, the path of a template, or `chatml`: what messages, and the texts of a preset, go through."""
    format: str | None = None
    """How files are read whatever their endings: `text`, `jsonl`, `json`, `parquet`, `arrow`, `csv`, `tsv`, ..."""
    delimiter: str | None = None
    """What stands between the cells of CSV and TSV files; None: a comma, a tab."""
    text_unit: str = "file"
    """What is a document of a plain text file: the `file`, or each `line` that is not blank."""
    keep: tuple[str, ...] = ()
    """Fields of a record that are kept beside its document, such as `id` and `url`; dots go down, long values are
    cut. Which file and line a document came from is noted always."""
    on_error: str = "stop"
    """What a bad record does, or a file that is broken: `stop` the build, or be `skip`ped, counted by reason and
    listed in the manifest; of a broken file, what cannot be read any more."""
    keep_empty: bool = False
    """Whether a text without a character becomes a document, of BOS and EOS alone; else it is left out, counted as
    `empty`."""
    min_chars: int | None = None
    """Records with fewer characters are left out, and counted."""
    max_chars: int | None = None
    max_items: int | None = None
    """Only so many records are taken, the first in input order that the filters leave."""
    max_seq_len: int | None = None
    """Records with more tokens are cut."""
    domain_key: str | None = None
    """Field that names the domain of a record; every domain becomes a store of its own below `out`."""
    deduplicate: bool | None = None
    """Of records with the same content only the first is taken."""
    val_fraction: float | None = None
    """Share of records, by a hash of their content, that go to the store `val` below `out`, the rest to `train`."""
    max_tokens_per_shard: int | None = None
    storage_format: str | None = None
    """`bin`, or `h5` for HDF5."""
    add_bos: bool | None = None
    """Whether documents start with BOS; None: as the tokenizer has it."""
    add_eos: bool | None = None
    bos_token: str | None = None
    """Which of the tokenizer's strings is BOS, where it does not say."""
    eos_token: str | None = None
    engine: str = "auto"
    """What runs the tokenizer. `auto`: the fast engine if it agrees with the reference on a sample, else that."""
    chunk_bytes: int | None = None
    """How much input is one unit of work, which becomes a shard; None: a 24th of the input, 4 MiB to 1 GiB."""
    same_names: bool = False
    """Whether a file with the name of one that is in the store, and other content, is another file; else it is
    refused, as one that has changed."""
    max_record_bytes: int = MAX_RECORD_BYTES
    """A larger record is a bad one; it bounds what a worker holds in memory."""
    checkpoint_seconds: float = 30.0
    """How much work of a worker a kill can lose, at most."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.on_error not in ON_ERROR:
            raise ConfigError(
                f"on_error: must be one of {', '.join(ON_ERROR)}, got {self.on_error!r}; "
                f"{nearest(self.on_error, ON_ERROR)}"
            )
        if self.chunk_bytes is not None and self.chunk_bytes < 1:
            raise ConfigError(f"chunk_bytes: must be at least 1, got {self.chunk_bytes}; leave it out")
        names = list(self.keep)
        if isinstance(self.keep, str) or len(set(names)) < len(names) or not all(all(n.split(".")) for n in names):
            raise ConfigError(
                f"keep: must be a list of fields, each once, got {self.keep!r}; for example id and url"
            )
        ReadOptions(
            text_field="text" if self.text_field is None else self.text_field,
            text_unit=self.text_unit,
            max_record_bytes=self.max_record_bytes,
            delimiter=self.delimiter,
        )

    def framing(self) -> dict[str, Any]:
        """Return what it says of BOS and EOS, as a tokenizer is opened with."""
        return {
            "add_bos": self.add_bos,
            "add_eos": self.add_eos,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
        }


def settle_recipe(spec: RecipeSpec, options: PrepareOptions) -> Recipe:
    """Return the recipe that a spec names, with what the options say on top."""
    if not isinstance(options, PrepareOptions):
        raise ConfigError(f"options: must be PrepareOptions, got {options!r}; write tm.PrepareOptions(name=value)")
    if not isinstance(spec, Mapping):
        spec = path_of("recipe", spec)
    if options.text_field is not None:
        if spec != "text":
            raise ConfigError(
                f"text_field: must be given with the recipe 'text' only, got {spec!r}; name fields in the recipe"
            )
        section = {"field": options.text_field, "action": "train"}
        spec = {"name": "text", "input": {"sections": [section]}}
    if options.chat_template is not None and isinstance(spec, str) and spec in PRESETS:
        spec = {"preset": spec, "chat_template": options.chat_template}
    recipe = load_recipe(spec)
    if options.chat_template is not None:
        recipe = replace(recipe, chat_template=options.chat_template)
    table = as_json(recipe)
    chosen = {name: value for name, value in as_json(options).items() if value is not None}
    for part in (table, table["preprocessing"], table["output"]):
        part |= {name: chosen[name] for name in part if name in chosen}
    if table != as_json(recipe):
        # Options that are named like keys of a recipe are checked like them.
        recipe = read_table(Recipe, table, "recipe:")
        check_recipe(recipe, "recipe")
    return recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a worker has to know beside its unit: plain values, the same for all units."""

    folder: str
    """Where units are written."""
    tokenizer: str
    """What names the tokenizer."""
    identity: Mapping[str, Any]
    """Its identity, as the parent found it."""
    engine: str
    """The engine that the parent settled on, as `open_tokenizer` takes it."""
    recipe: Recipe
    options: PrepareOptions


def open_job(job: Job, tokenizer: Tokenizer | None = None) -> OpenJob:
    """Open a job; the process that made it hands in the tokenizer that it has open already."""
    recipe = job.recipe
    tokenizer = with_policy(tokenizer or _same_tokenizer(job), recipe.control_strings)
    # Of texts alone no other field could be kept.
    identity, text_only = tokenizer.identity, recipe.text_field is not None and not job.options.keep
    # What `encode` gives is bare, so that BOS stands nowhere but where it is placed; templates may place two.
    bare = text_only and recipe.control_strings != "encode"
    bos_is_control = identity.bos_id in tokenizer.special_ids.values()
    vocab_size, output = identity.vocab_size, recipe.output
    return OpenJob(
        folder=Path(job.folder),
        stop=job.options.on_error == "stop",
        checkpoint_seconds=job.options.checkpoint_seconds,
        keep_empty=job.options.keep_empty or recipe.kind != "seq",  # of others, the recipe refuses what is empty
        tokenizer=tokenizer,
        encoder=None if text_only else open_encoder(recipe, tokenizer, tokenizer_spec=job.tokenizer),
        chosen=recipe.preprocessing,
        keep=job.options.keep,
        reading=ReadOptions(
            text_field=recipe.text_field if text_only else None,
            fields=None if text_only else tuple(dict.fromkeys([*recipe.fields, *top_fields(job.options.keep)])),
            text_unit=job.options.text_unit,
            max_record_bytes=job.options.max_record_bytes,
            delimiter=job.options.delimiter,
            skip_broken=job.options.on_error == "skip",
        ),
        spec=StoreSpec(
            keys={TEXT_KEY: token_dtype(vocab_size).str} if text_only else record_keys(recipe, vocab_size),
            tokenizer=job.identity,
            recipe={},
            kind=recipe.kind,
            max_tokens_per_shard=output.max_tokens_per_shard or MAX_TOKENS_PER_SHARD,
            storage=output.storage_format,
            ids_checked=bare and (bos_is_control or not identity.add_bos),
        ),
        key_fields=()
        if recipe.text_field is not None
        else replace(recipe, preprocessing=replace(recipe.preprocessing, domain_key=None)).fields,
    )


def top_fields(names: Sequence[str]) -> list[str]:
    """Return the fields of a record to read for names with dots: a column may have the whole name."""
    return [part for name in names for part in dict.fromkeys((name, name.split(".")[0]))]


def _same_tokenizer(job: Job) -> Tokenizer:
    """Open the tokenizer that the parent settled on."""
    tokenizer = open_tokenizer(job.tokenizer, **job.options.framing(), engine=job.engine)
    if tokenizer.identity.to_json() != job.identity:
        raise TokenizerError(
            f"tokenizer {job.tokenizer!r}: must stay the same during a build, "
            f"got content {tokenizer.identity.content} after {job.identity['content']}; "
            "let nothing write to it, run again"
        )
    return tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One unit and what is to be done with it."""

    unit: Unit
    key: str
    """Name of what comes out; no other task of a build has it."""
    scan: bool = False
    """Whether its records are hashed only."""
    fates: str | None = None
    """File that says what becomes of each record; None: all are taken."""


def run_unit(job: bytes, task: bytes) -> bytes:
    """Do a task of a job, in any process that sees its files: JSON in, JSON out.

    What it writes is a function of the input and the options alone. A process opens a job once.
    """
    return msgspec.json.encode(run_task(_opened(job), msgspec.json.decode(task, type=Task)))


@lru_cache(maxsize=1)
def _opened(job: bytes) -> OpenJob:
    return open_job(msgspec.json.decode(job, type=Job))


def run_task(opened: OpenJob, task: Task, tick: Callable[[], None] = lambda: None) -> UnitResult | None:
    """Do a task, and return what came of its unit; None where it was hashed only."""
    with seldom_collecting():
        if task.scan:
            scan_unit(opened, task.unit, task.key, tick)
            return None
        fates = None if task.fates is None else np.frombuffer(Path(task.fates).read_bytes(), np.uint8)
        return write_unit(opened, task.unit, task.key, fates, tick)


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """Let Python look for cycles seldom: records come and go by the thousand, and none is part of one.

    It takes a tenth of the time of a build else, much of it amid the tokenizer (benchmarks/prepare.py).
    """
    before = gc.get_threshold()
    gc.set_threshold(100_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


# Worker processes.

TICK_SECONDS = 0.2
_ERROR = b"error "
"""Begins an answer that is no result, but the name and message of an error."""
ONE_CORE = {
    **dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "FASTOKENS_BPE_THREADS": "1",  # fastokens has threads of its own beside Rayon's
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment that keeps the libraries of a process to one core: the parallelism is that of the processes."""


class WorkerPool:
    """Processes that run the tasks of a job; this process alone, where one worker is enough.

    No process outlives the `with` block. Workers inherit `lock`, so that after a kill of this process no other
    build begins while one of them still writes.
    """

    def __init__(self, job: Job, opened: OpenJob, num_workers: int, lock: int) -> None:
        self.job = job
        self.opened = opened
        self._num_workers = num_workers
        self._lock = lock
        self._workers: list[_Worker] = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Killed, not asked: a unit may be an hour's work.
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.close()

    def run(self, tasks: Sequence[Task], tick: Callable[[], None]) -> Iterator[UnitResult | None]:
        """Yield the results of tasks in their order; of errors the first in order is raised.

        `tick` is called a few times a second.
        """
        num_workers = min(self._num_workers, len(tasks))
        if num_workers <= 1:
            return (run_task(self.opened, task, tick) for task in tasks)
        return self.run_in_processes(tasks, num_workers, tick)

    def run_in_processes(
        self, tasks: Sequence[Task], num_workers: int, tick: Callable[[], None]
    ) -> Iterator[UnitResult | None]:
        """Run tasks in so many processes, those of an earlier call first."""
        while len(self._workers) < num_workers:
            self._workers.append(_Worker(msgspec.json.encode(self.job), self._lock))
        idle, waiting = self._workers[:num_workers], deque(tasks)
        answers: dict[str, UnitResult | TokenmillError | None] = {}
        with selectors.DefaultSelector() as busy:
            for task in tasks:
                while task.key not in answers:
                    # Tasks are handed over as workers are free; none waits for an earlier one that takes long.
                    while idle and waiting:
                        worker = idle.pop()
                        worker.send(waiting.popleft())
                        busy.register(worker.answers, selectors.EVENT_READ, worker)
                    for ready, _ in busy.select(TICK_SECONDS):
                        worker = ready.data
                        busy.unregister(worker.answers)
                        answer = answers[worker.task.key] = worker.receive()
                        if isinstance(answer, TokenmillError):
                            waiting.clear()  # all of them come after it
                        else:
                            idle.append(worker)
                    tick()
                answer = answers.pop(task.key)
                if isinstance(answer, TokenmillError):
                    raise answer
                yield answer


class _Worker:
    """One worker process, seen from its parent."""

    def __init__(self, job: bytes, lock: int) -> None:
        # The path is handed over as it is now, for a tokenmill that was found by changing it.
        program = f"import sys; sys.path[:] = {sys.path!r}; from tokenmill.build.worker import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ONE_CORE},
            pass_fds=(lock,),
            # Ctrl-C reaches the parent alone, which ends the workers.
            process_group=0,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._messages, self.answers = self.process.stdin, self.process.stdout
        self._unsent = job + b"\n"
        self.task: Task
        """What it works at, or did last."""

    def send(self, task: Task) -> None:
        """Hand it a task; that a process is gone shows when it should answer."""
        self.task = task
        with suppress(BrokenPipeError):
            self._messages.write(self._unsent + msgspec.json.encode(task) + b"\n")
            self._messages.flush()
        self._unsent = b""

    def receive(self) -> UnitResult | TokenmillError | None:
        """Return what it answers, or the error that it ended with."""
        line = self.answers.readline()
        if not line.endswith(b"\n"):
            return self._death()
        if line.startswith(_ERROR):
            name, message = msgspec.json.decode(line.removeprefix(_ERROR), type=tuple[str, str])
            error: TokenmillError = getattr(errors, name)(message)
            return error
        return msgspec.json.decode(line, type=UnitResult | None)

    def close(self) -> None:
        """Wait until a killed process is gone."""
        self.process.wait()
        for pipe in (self._messages, self.answers):
            with suppress(BrokenPipeError):
                pipe.close()

    def _death(self) -> TokenmillError:
        code = self.process.wait()
        how = f"exit code {code}" if code >= 0 else f"an end by {signal.Signals(-code).name}"
        why = " (the system does this when memory runs out)" if code == -signal.SIGKILL else ""
        path = self.task.unit.pieces[0].file.path
        return TokenmillError(
            f"{path}: the worker process {self.process.pid} must live until its unit is done, got {how}{why}; "
            "run again, with fewer workers if memory is short"
        )


def main() -> None:
    """Serve the process that started this one, and end with it."""
    # Results go through a descriptor of their own: what a library prints must not get between them.
    with os.fdopen(os.dup(1), "wb", buffering=0) as channel:
        os.dup2(2, 1)
        messages: SimpleQueue[bytes] = SimpleQueue()
        Thread(target=_listen, args=(messages,), daemon=True).start()
        job = messages.get()
        while True:
            task = messages.get()
            try:
                answer = run_unit(job, task)
            except TokenmillError as error:
                answer = _ERROR + msgspec.json.encode((type(error).__name__, str(error)))
            except Exception:  # a bug: the parent shows where
                answer = _ERROR + msgspec.json.encode(("TokenmillError", traceback.format_exc()))
            channel.write(answer + b"\n")


def _listen(messages: SimpleQueue[bytes]) -> None:
    """Pass on what the parent sends; leave at once when it closes its end or dies, even amid a unit."""
    for line in sys.stdin.buffer:
        messages.put(line)
    os._exit(0)
