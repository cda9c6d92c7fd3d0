"""What a user may choose about a build, and what of it a worker has to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tokenmill.documents import ReadOptions
from tokenmill.documents.formats import CHUNK_BYTES
from tokenmill.errors import ConfigError, nearest
from tokenmill.store.writer import MAX_TOKENS_PER_SHARD

if TYPE_CHECKING:
    from tokenmill.encode.tokenizer import Tokenizer

ON_ERROR = ("stop", "skip")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """What is seldom changed."""

    text_field: str = "text"
    """Where the text is in a record; dots go down: `a.b` is field b of the object in field a."""
    on_error: str = "stop"
    """What a bad line does: `stop` the build, or be `skip`ped, counted by reason and listed in the manifest."""
    chunk_bytes: int = CHUNK_BYTES
    """How much of a plain file is one unit of work. The store does not depend on it."""
    max_tokens_per_shard: int = MAX_TOKENS_PER_SHARD
    add_bos: bool | None = None
    """Whether documents start with BOS; None: as the tokenizer has it."""
    add_eos: bool | None = None
    bos_token: str | None = None
    """Which of the tokenizer's strings is BOS, where it does not say."""
    eos_token: str | None = None
    engine: str = "auto"
    """What runs the tokenizer. `auto`: the fast engine if it agrees with the reference on a sample, else that."""

    def __post_init__(self) -> None:
        if self.on_error not in ON_ERROR:
            raise ConfigError(
                f"on_error: must be one of {', '.join(ON_ERROR)}, got {self.on_error!r}; "
                f"{nearest(self.on_error, ON_ERROR)}"
            )
        if self.chunk_bytes < 1:
            raise ConfigError(f"chunk_bytes: must be at least 1, got {self.chunk_bytes}; leave it out")
        ReadOptions(text_field=self.text_field)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a worker has to know beside its unit: plain values, the same for all units."""

    parts: str
    """Folder of the parts."""
    tokenizer: str
    """What names the tokenizer."""
    tokenizer_digest: str
    """Its identity, as the parent found it."""
    engine: str
    """The engine that the parent settled on, as `open_tokenizer` takes it."""
    keys: Mapping[str, str]
    """Arrays that a document becomes, and their dtypes."""
    options: PrepareOptions

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {**asdict(self), "keys": dict(self.keys)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Job:
        """Read what `to_json` wrote."""
        return cls(**{**value, "options": PrepareOptions(**value["options"])})

    def open_tokenizer(self) -> Tokenizer:
        """Open the tokenizer that the parent settled on."""
        from tokenmill.encode.load import open_tokenizer
        from tokenmill.errors import TokenizerError

        options = self.options
        tokenizer = open_tokenizer(
            self.tokenizer,
            add_bos=options.add_bos,
            add_eos=options.add_eos,
            bos_token=options.bos_token,
            eos_token=options.eos_token,
            engine=self.engine,
        )
        if tokenizer.identity.digest != self.tokenizer_digest:
            raise TokenizerError(
                f"tokenizer {self.tokenizer!r}: must stay the same during a build, "
                f"got {tokenizer.identity.digest} after {self.tokenizer_digest}; let nothing write to it, run again"
            )
        return tokenizer
