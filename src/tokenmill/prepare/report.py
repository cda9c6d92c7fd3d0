"""What a build did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareReport:
    """The numbers of a finished build."""

    path: Path
    fingerprint: str
    """Of the store: the same for the same documents and options."""
    documents: int
    tokens: int
    shards: int
    files: int
    input_bytes: int
    """Size of the input files as they are on disk, compressed or not."""
    text_bytes: int
    """Size of the documents' text as UTF-8."""
    skipped: Mapping[str, int]
    """Records that were left out, by reason."""
    engine: str
    """What ran the tokenizer."""
    seconds: float

    @property
    def tokens_per_byte(self) -> float:
        """Tokens, BOS and EOS among them, for a byte of text."""
        return self.tokens / self.text_bytes if self.text_bytes else 0.0

    @property
    def megabytes_per_second(self) -> float:
        """Text a second, in 10⁶ bytes, over the whole build and all workers."""
        return self.text_bytes / 1e6 / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            **asdict(self),
            "path": str(self.path),
            "skipped": dict(self.skipped),
            "tokens_per_byte": self.tokens_per_byte,
            "megabytes_per_second": self.megabytes_per_second,
        }
