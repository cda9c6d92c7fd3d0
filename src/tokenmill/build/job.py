"""What a build was asked for: options, the recipe that follows from them, and the job that workers are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from tokenmill.build.select import Rules
from tokenmill.documents import ReadOptions
from tokenmill.documents.units import MAX_RECORD_BYTES
from tokenmill.encode.engines import open_tokenizer
from tokenmill.encode.recipe import PRESETS, Recipe, RecordEncoder, load_recipe, open_encoder, record_keys
from tokenmill.encode.recipe.recipe import check_recipe
from tokenmill.encode.tokenizer import Tokenizer, token_dtype, with_policy
from tokenmill.errors import ConfigError, TokenizerError, nearest
from tokenmill.store import StoreSpec
from tokenmill.store.writer import MAX_TOKENS_PER_SHARD
from tokenmill.tables import as_json, read_table
from tokenmill.types import ON_ERROR

RecipeSpec: TypeAlias = "str | Mapping[str, object]"
TEXT_KEY = "sequence"
"""The array of a build whose records are nothing but a text."""


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
    text_unit: str = "file"
    """What is a document of a plain text file: the `file`, or each `line` that is not blank."""
    on_error: str = "stop"
    """What a bad record does: `stop` the build, or be `skip`ped, counted by reason and listed in the manifest."""
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
    max_record_bytes: int = MAX_RECORD_BYTES
    """A larger record is a bad one; it bounds what a worker holds in memory."""
    checkpoint_seconds: float = 30.0
    """How much work of a worker a kill can lose, at most."""

    def __post_init__(self) -> None:
        if self.on_error not in ON_ERROR:
            raise ConfigError(
                f"on_error: must be one of {', '.join(ON_ERROR)}, got {self.on_error!r}; "
                f"{nearest(self.on_error, ON_ERROR)}"
            )
        if self.chunk_bytes is not None and self.chunk_bytes < 1:
            raise ConfigError(f"chunk_bytes: must be at least 1, got {self.chunk_bytes}; leave it out")
        ReadOptions(
            text_field="text" if self.text_field is None else self.text_field,
            text_unit=self.text_unit,
            max_record_bytes=self.max_record_bytes,
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


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenJob:
    """A job and what a process opens once to do all its units."""

    job: Job
    tokenizer: Tokenizer
    encoder: RecordEncoder | None
    """None where records are nothing but a text."""
    rules: Rules
    reading: ReadOptions
    spec: StoreSpec
    key_fields: tuple[str, ...]
    """Fields that tell records apart; the domain is none of them."""


def open_job(job: Job, tokenizer: Tokenizer | None = None) -> OpenJob:
    """Open a job; the process that made it hands in the tokenizer that it has open already."""
    recipe = job.recipe
    tokenizer = with_policy(tokenizer or _same_tokenizer(job), recipe.control_strings)
    identity, text_only = tokenizer.identity, recipe.text_field is not None
    # What `encode` gives is bare, so that BOS stands nowhere but where it is placed; templates may place two.
    bare = text_only and recipe.control_strings != "encode"
    bos_is_control = identity.bos_id in tokenizer.special_ids.values()
    vocab_size, output = identity.vocab_size, recipe.output
    return OpenJob(
        job=job,
        tokenizer=tokenizer,
        encoder=None if text_only else open_encoder(recipe, tokenizer, tokenizer_spec=job.tokenizer),
        rules=Rules.of(recipe.preprocessing),
        reading=ReadOptions(
            text_field=recipe.text_field,
            fields=None if text_only else recipe.fields,
            text_unit=job.options.text_unit,
            max_record_bytes=job.options.max_record_bytes,
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
        key_fields=replace(recipe, preprocessing=replace(recipe.preprocessing, domain_key=None)).fields,
    )


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
