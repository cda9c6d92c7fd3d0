"""What a worker has to know beside its unit: plain values, the same for all units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tokenmill.documents import ReadOptions
from tokenmill.prepare.options import PrepareOptions
from tokenmill.store import StoreSpec
from tokenmill.store.shard import MAX_TOKENS_PER_SHARD

if TYPE_CHECKING:
    from tokenmill.encode.recipe import Recipe, RecordEncoder
    from tokenmill.encode.tokenizer import Tokenizer

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

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            **asdict(self),
            "identity": dict(self.identity),
            "keys": dict(self.keys),
            "recipe": dict(self.recipe),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Job:
        """Read what `to_json` wrote."""
        return cls(**{**value, "options": PrepareOptions(**value["options"])})

    def load_recipe(self) -> Recipe:
        """Return the recipe."""
        from tokenmill.encode.recipe import load_recipe

        return load_recipe(self.recipe)

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
        text_field = fast_text_field(recipe)
        return ReadOptions(
            text_field=text_field,
            fields=None if text_field is not None else recipe.fields,
            text_unit=self.options.text_unit,
            max_record_bytes=self.options.max_record_bytes,
        )

    def open_tokenizer(self) -> Tokenizer:
        """Open the tokenizer that the parent settled on."""
        from tokenmill.encode.load import open_tokenizer
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


def fast_text_field(recipe: Recipe) -> str | None:
    """Return the field to read, where a record is nothing but the text of one field; None: whole records."""
    return recipe.text_field if recipe.preprocessing.domain_key is None else None
