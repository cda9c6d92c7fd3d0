"""What a build was asked for, as a job; and `run_unit`, by which any process does a unit of one.

A job holds all that a worker needs beside the files to read and the folder to write to: the files of the tokenizer
and the chat template go with it, by content. So a unit can be done on any machine that sees input and output.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np
import xxhash

from tokenmill import __version__, errors
from tokenmill.build.journal import UnitResult
from tokenmill.build.mapped import MapIdentity, MapRecord, load_map
from tokenmill.build.unit import TEXT_KEY, OpenJob, scan_unit, write_unit
from tokenmill.documents import ReadOptions, Unit
from tokenmill.documents.units import MAX_EXPANSION, MAX_RECORD_BYTES
from tokenmill.encode.engines import open_tokenizer
from tokenmill.encode.files import spec_of_copy
from tokenmill.encode.recipe import PRESETS, Recipe, load_recipe, open_encoder, record_keys
from tokenmill.encode.recipe.recipe import check_recipe
from tokenmill.encode.tokenizer import Tokenizer, token_dtype, with_policy
from tokenmill.errors import (
    ConfigError,
    StoreCorruptError,
    StoreError,
    TokenizerError,
    TokenmillError,
    nearest,
)
from tokenmill.store import StoreSpec
from tokenmill.store.durable import write_atomically
from tokenmill.store.writer import MAX_TOKENS_PER_SHARD
from tokenmill.tables import as_json, check_fields, path_of, read_table
from tokenmill.types import ON_ERROR, Uint8Array

if TYPE_CHECKING:
    from tokenmill.encode.chat.template import ChatTemplate

RecipeSpec: TypeAlias = "str | os.PathLike[str] | Mapping[str, object]"


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """What is seldom changed. None leaves it to the recipe or the tokenizer."""

    text_field: str | None = None
    """Where the text is in a record, for the recipe `text`; dots go down: `a.b` is field b of the object in a."""
    control_strings: str | None = None
    """What becomes of strings such as `<|endoftext|>` in raw text: ordinary `text`, `encode`, or `drop`."""
    system: str | None = None
    """What the system says in every conversation that does not say it itself."""
    train_turns: str | None = None
    """Which messages of the trained roles are trained on: `all`, or the `last`."""
    mask: Mapping[str, str] | None = None
    """Role -> `train` or `mask`, over what the recipe says."""
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
    """Records with more tokens are cut, or what `on_long` says."""
    on_long: str | None = None
    """What becomes of them: `cut` (the default), `drop`, counted as `too_long`, or `stop` the build."""
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
    """How much input is one unit of work, which becomes a shard; None: by its size, 4 to 256 MiB (`chunk_size`)."""
    same_names: bool = False
    """Whether a file with the name of one that is in the store, and other content, is another file; else it is
    refused, as one that has changed."""
    max_record_bytes: int = MAX_RECORD_BYTES
    """A larger record is a bad one; it bounds what a worker holds in memory."""
    max_expansion: int = MAX_EXPANSION
    """How many times its size a file may hold of text, compressed or encoded; 4 GiB are always allowed."""
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
            max_expansion=self.max_expansion,
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
    if options.mask is not None:
        chosen["mask"] = dict(sorted({**recipe.mask, **options.mask}.items()))
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
    files: Mapping[str, bytes]
    """The files that open it, by name; none for `bytes`."""
    identity: Mapping[str, Any]
    """Its identity, as the parent found it."""
    engine: str
    """The engine that the parent settled on, as `open_tokenizer` takes it."""
    recipe: Recipe
    template: Mapping[str, Any] | str | None = None
    """Fields of the `ChatTemplate` that the parent found, or why it found none though some records may need one."""
    options: PrepareOptions
    map: MapIdentity | None = None
    """The function of the user that records go through first, if there is one."""
    version: str = __version__
    """Of the tokenmill that made it: no other may do its units."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFile:
    """Stands for a job that is in a file, for engines that would send it along with every unit."""

    file: str
    digest: str


def open_job(job: Job, tokenizer: Tokenizer | None = None, map: MapRecord | None = None) -> OpenJob:
    """Open a job; the process that made it hands in the tokenizer, which it has open, and the user's function."""
    if tokenizer is not None:
        return replace(_open_job(job, tokenizer), map=map)
    if job.version != __version__:
        raise ConfigError(
            f"{socket.gethostname()}: workers must have the tokenmill of the build, {job.version}, got "
            f"{__version__}; install that one there"
        )
    spec: str | None = job.tokenizer
    if job.files:
        # It stays as long as the process: the reference of a fast engine is opened by the first text that needs it.
        folder = Path(mkdtemp(prefix="tokenmill-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        for name, data in job.files.items():
            (folder / name).write_bytes(data)
        spec = spec_of_copy(folder)
    assert spec is not None, sorted(job.files)
    opened = _open_job(job, _same_tokenizer(job, spec))
    return replace(opened, map=None if job.map is None else load_map(job.map))


def _open_job(job: Job, tokenizer: Tokenizer) -> OpenJob:
    """Open a job with its tokenizer."""
    recipe, encoder = job.recipe, None
    tokenizer = with_policy(tokenizer, recipe.control_strings)
    if recipe.fim is not None:
        tokenizer = recipe.fim.wrap(tokenizer)
    # Of texts alone no other field could be kept.
    identity, text_only = tokenizer.identity, recipe.text_field is not None and not job.options.keep
    text_only = text_only and job.map is None
    # What `encode` gives is bare, so that BOS stands nowhere but where it is placed; templates may place two.
    bare = text_only and recipe.control_strings != "encode"
    bos_is_control = identity.bos_id in tokenizer.special_ids.values()
    vocab_size, output = identity.vocab_size, recipe.output
    if not text_only:
        template: ChatTemplate | str | None = None if isinstance(job.template, Mapping) else job.template
        if isinstance(job.template, Mapping):
            from tokenmill.encode.chat.template import ChatTemplate  # late: jinja2 takes time to load

            template = msgspec.convert(job.template, ChatTemplate)
        encoder = open_encoder(
            recipe, tokenizer, tokenizer_spec=job.tokenizer, add_bos=job.options.add_bos, template=template
        )
    return OpenJob(
        folder=Path(job.folder),
        stop=job.options.on_error == "stop",
        checkpoint_seconds=job.options.checkpoint_seconds,
        keep_empty=job.options.keep_empty or recipe.kind != "seq",  # of others, the recipe refuses what is empty
        tokenizer=tokenizer,
        encoder=encoder,
        chosen=recipe.preprocessing,
        keep=job.options.keep,
        reading=ReadOptions(
            text_field=recipe.text_field if text_only else None,
            # A function may read any field.
            fields=None
            if text_only or job.map is not None
            else tuple(dict.fromkeys([*recipe.fields, *top_fields(job.options.keep)])),
            text_unit=job.options.text_unit,
            max_record_bytes=job.options.max_record_bytes,
            max_expansion=job.options.max_expansion,
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
        map=None,
        key_fields=()
        if recipe.text_field is not None
        else replace(recipe, preprocessing=replace(recipe.preprocessing, domain_key=None)).fields,
    )


ONE_CORE = {
    **dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "FASTOKENS_BPE_THREADS": "1",  # fastokens has threads of its own beside Rayon's
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment that keeps the libraries of a process to one core: the parallelism is that of the processes."""


def top_fields(names: Sequence[str]) -> list[str]:
    """Return the fields of a record to read for names with dots: a column may have the whole name."""
    return [part for name in names for part in dict.fromkeys((name, name.split(".")[0]))]


def _same_tokenizer(job: Job, spec: str) -> Tokenizer:
    """Open the tokenizer that the parent settled on."""
    tokenizer = open_tokenizer(spec, **job.options.framing(), engine=job.engine)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came of a task."""

    result: UnitResult | None = None
    """None where the unit was hashed only."""
    error: tuple[str, str] | None = None
    """Or an error of ours, by its class and message: another try would end with the same."""


def run_unit(job: bytes, task: bytes) -> bytes:
    """Do a task of a job, in any process that sees its files: JSON in, JSON out.

    What it writes is a function of the input and the options alone; it may be called in any order, several times,
    at once. A process opens a job once. A record that cannot be read, and all else that tokenmill refuses, is an
    answer and not raised: what an engine tries again, as it does with lost workers, cannot be mended that way.
    """
    try:
        answer = Answer(result=run_task(_opened(job), msgspec.json.decode(task, type=Task)))
    except TokenmillError as error:
        answer = Answer(error=(type(error).__name__, str(error)))
    return msgspec.json.encode(answer)


def read_answer(data: bytes) -> UnitResult | TokenmillError | None:
    """Return what `run_unit` answered: a result, or an error to be raised."""
    answer = msgspec.json.decode(data, type=Answer)
    if answer.error is None:
        return answer.result
    error: TokenmillError = getattr(errors, answer.error[0])(answer.error[1])
    return error


_last: tuple[str, OpenJob] | None = None
"""The job that this process has open, by its digest."""


def _opened(job: bytes) -> OpenJob:
    global _last  # noqa: PLW0603 - to open a tokenizer takes longer than many a unit
    name, before = xxhash.xxh3_128_hexdigest(job), _last
    if before is None or before[0] != name:
        for variable, value in ONE_CORE.items():
            os.environ.setdefault(variable, value)
        kind = msgspec.json.decode(job)
        if "file" in kind:
            job = read_job_file(msgspec.convert(kind, JobFile))
        before = _last = name, open_job(msgspec.json.decode(job, type=Job))
    return before[1]


def write_job_file(folder: Path, job: bytes) -> bytes:
    """Write a job to a file; return what stands for it in `run_unit`."""
    digest = xxhash.xxh3_128_hexdigest(job)
    file = folder / f"job-{digest}.json"
    if not file.exists():
        write_atomically(file, job)
    return msgspec.json.encode(JobFile(file=str(file.absolute()), digest=digest))


def read_job_file(reference: JobFile) -> bytes:
    """Return the job that a file holds."""
    try:
        job = Path(reference.file).read_bytes()
    except OSError as error:
        raise StoreError(
            f"{reference.file}: a worker must find its job, got {error.strerror}; is the build over, and does this "
            "machine see the folder of the store under the same path?"
        ) from None
    if xxhash.xxh3_128_hexdigest(job) != reference.digest:
        raise StoreCorruptError(f"{reference.file}: must be as prepare wrote it, got other content; run again")
    return job


def run_task(opened: OpenJob, task: Task, tick: Callable[[], None] = lambda: None) -> UnitResult | None:
    """Do a task, and return what came of its unit; None where it was hashed only."""
    with seldom_collecting():
        if task.scan:
            scan_unit(opened, task.unit, task.key, tick)
            return None
        fates = None if task.fates is None else _read_fates(Path(task.fates))
        return write_unit(opened, task.unit, task.key, fates, tick)


def _read_fates(file: Path) -> Uint8Array:
    """Read what becomes of each record, from a file that is named by the digest of its content."""
    data = file.read_bytes()
    if xxhash.xxh3_128_hexdigest(data) != file.name:
        raise StoreCorruptError(f"{file}: must hold what its name says, got other bytes; run the build again")
    return np.frombuffer(data, np.uint8)


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
