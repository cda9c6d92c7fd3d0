"""What a worker has to know beside its unit: plain values, the same for all units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from tokenmill.documents import ReadOptions
from tokenmill.documents.units import MAX_RECORD_BYTES
from tokenmill.errors import ConfigError, nearest
from tokenmill.store import StoreSpec
from tokenmill.store.writer import MAX_TOKENS_PER_SHARD

if TYPE_CHECKING:
    from tokenmill.encode.recipe import Recipe, RecordEncoder
    from tokenmill.encode.tokenizer import Tokenizer


# What a user may choose about a build, and the recipe that follows from it.

ON_ERROR = ("stop", "skip")
RecipeSpec: TypeAlias = "str | Mapping[str, object]"
_OF_PREPROCESSING = (
    "min_chars",
    "max_chars",
    "max_items",
    "max_seq_len",
    "domain_key",
    "deduplicate",
    "val_fraction",
)
_OF_OUTPUT = ("max_tokens_per_shard", "storage_format")


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

    def framing(self) -> dict[str, bool | str | None]:
        """Return what it says of BOS and EOS, as a tokenizer is opened with."""
        return {
            "add_bos": self.add_bos,
            "add_eos": self.add_eos,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
        }


def settle_recipe(spec: RecipeSpec, options: PrepareOptions) -> Recipe:
    """Return the recipe that a spec names, with what the options say on top."""
    from tokenmill.encode.recipe import PRESETS, load_recipe

    if options.text_field is not None:
        if spec != "text":
            raise ConfigError(
                f"text_field: must be given with the recipe 'text' only, got {spec!r}; name fields in the recipe"
            )
        section = {"field": options.text_field, "action": "train"}
        spec = {"name": "text", "input": {"sections": [section]}}
    said = {
        part: {name: getattr(options, name) for name in names if getattr(options, name) is not None}
        for part, names in (("preprocessing", _OF_PREPROCESSING), ("output", _OF_OUTPUT))
    }
    if options.chat_template is not None and isinstance(spec, str) and spec in PRESETS:
        spec = {"preset": spec, "chat_template": options.chat_template}
    recipe = load_recipe(spec)
    if options.chat_template is not None:
        recipe = replace(recipe, chat_template=options.chat_template)
    if not any(said.values()) and options.control_strings is None:
        return recipe
    # Through the reader once more, so that an option is checked like a key of a recipe.
    whole = {**recipe.to_json()}
    if options.control_strings is not None:
        whole["control_strings"] = options.control_strings
    for part, values in said.items():
        whole[part] = {**dict(whole[part]), **values}  # type: ignore[call-overload]
    return replace(load_recipe(whole), name=recipe.name)


TEXT_KEY = "sequence"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a worker has to know beside its unit."""

    folder: str
    """Where units are written."""
    tokenizer: str
    """What names the tokenizer."""
    identity: Mapping[str, Any]
    """Its identity, as the parent found it."""
    engine: str
    """The engine that the parent settled on, as `open_tokenizer` takes it."""
    keys: Mapping[str, str]
    """Arrays that a record becomes, and their dtypes."""
    recipe: Mapping[str, Any]
    options: PrepareOptions

    def spec(self, recipe: Recipe) -> StoreSpec:
        """Return what the stores of the build hold."""
        output = recipe.output
        return StoreSpec(
            keys=self.keys,
            tokenizer=self.identity,
            recipe={},
            kind=recipe.kind,
            max_tokens_per_shard=output.max_tokens_per_shard or MAX_TOKENS_PER_SHARD,
            storage=output.storage_format,
        )

    def reading(self, recipe: Recipe) -> ReadOptions:
        """Return how records are read: their text alone where nothing else is needed."""
        text_field = recipe.text_field
        return ReadOptions(
            text_field=text_field,
            fields=None if text_field is not None else recipe.fields,
            text_unit=self.options.text_unit,
            max_record_bytes=self.options.max_record_bytes,
        )

    def open_tokenizer(self) -> Tokenizer:
        """Open the tokenizer that the parent settled on."""
        from tokenmill.encode.engines import open_tokenizer
        from tokenmill.errors import TokenizerError

        tokenizer = open_tokenizer(self.tokenizer, **self.options.framing(), engine=self.engine)  # type: ignore[arg-type]
        if tokenizer.identity.to_json() != self.identity:
            raise TokenizerError(
                f"tokenizer {self.tokenizer!r}: must stay the same during a build, "
                f"got content {tokenizer.identity.content} after {self.identity['content']}; "
                "let nothing write to it, run again"
            )
        return tokenizer

    def open_encoder(self, recipe: Recipe, tokenizer: Tokenizer) -> RecordEncoder:
        """Open what turns whole records into arrays."""
        from tokenmill.encode.recipe import open_encoder

        return open_encoder(recipe, tokenizer, tokenizer_spec=self.tokenizer)
