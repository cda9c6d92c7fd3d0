"""What a build did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenmill.fingerprint import digest
from tokenmill.store import Manifest


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
