"""Fill-in-the-middle: some documents are cut in three, and their middle is moved behind prefix and suffix.

Documents are cut between characters, as a user's cursor cuts them, and the parts are tokenized apart, as they are
when a model is asked to fill a gap. Which documents are cut, where, and in which order the parts stand is a
function of the seed, the epoch and the text itself: not of files, workers or how often a job was begun.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
import xxhash
from msgspec import Meta

from tokenmill.encode.tokenizer import Tokenizer, TokenizerIdentity, offsets_of, split
from tokenmill.errors import ConfigError
from tokenmill.fingerprint import key64
from tokenmill.types import AnyArray, Encoded

Share = Annotated[float, Meta(ge=0, le=1)]
PARTS = ("prefix", "suffix", "middle")
KNOWN_TOKENS = (
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),
)
"""What tokenizers call the control strings before prefix, suffix and middle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fim:
    """How many documents are cut, and how."""

    rate: Share
    """Share of documents that are cut; the others stay as they are."""
    spm_rate: Share = 0.5
    """Share of those whose suffix stands first: prefix token, suffix token, suffix, middle token, prefix, middle.
    Of the others: prefix token, prefix, suffix token, suffix, middle token, middle."""
    level: Literal["character"] = "character"
    """What documents are cut between."""
    seed: Annotated[int, Meta(ge=0)] = 0
    tokens: Mapping[Literal["prefix", "suffix", "middle"], str] | None = None
    """Control strings of the tokenizer, where they are not called as usual."""

    def wrap(self, tokenizer: Tokenizer, epoch: int = 0) -> FimTokenizer:
        """Return a tokenizer that cuts some of its documents in an epoch; refuse one that lacks its tokens."""
        return FimTokenizer(
            identity=tokenizer.identity,
            engine=tokenizer.engine,
            special_ids=tokenizer.special_ids,
            tokenizer=tokenizer,
            fim=self,
            epoch=epoch,
            ids=self.find_ids(tokenizer),
        )

    def find_ids(self, tokenizer: Tokenizer) -> tuple[int, int, int]:
        """Return the ids before prefix, suffix and middle; refuse a tokenizer that lacks them."""
        special_ids = tokenizer.special_ids
        written: Mapping[str, str] = {str(part): name for part, name in (self.tokens or {}).items()}
        choices = (tuple(written.get(part, "") for part in PARTS),) if written else KNOWN_TOKENS
        # Of the usual names, take the three of which the tokenizer has most.
        names = max(choices, key=lambda choice: sum(name in special_ids for name in choice))
        lacking = [f"{part} ({name!r})" for part, name in zip(PARTS, names, strict=True) if name not in special_ids]
        if lacking:
            raise ConfigError(
                "fim: the tokenizer must have control tokens for prefix, suffix and middle, got none for "
                f"{', '.join(lacking)}; add them to the tokenizer, or name those that it has: "
                "tokens = { prefix = ..., suffix = ..., middle = ... }"
            )
        prefix, suffix, middle = (special_ids[name] for name in names)
        if len({prefix, suffix, middle} - {tokenizer.identity.bos_id, tokenizer.identity.eos_id}) < len(PARTS):
            raise ConfigError(
                f"fim: tokens must be three control tokens other than BOS and EOS, got {list(names)}; name others"
            )
        return prefix, suffix, middle


@dataclass(frozen=True, kw_only=True, slots=True)
class FimTokenizer:
    """A tokenizer that cuts some of the documents it is given."""

    identity: TokenizerIdentity
    engine: str
    special_ids: Mapping[str, int]
    tokenizer: Tokenizer = field(repr=False)
    fim: Fim
    epoch: int
    ids: tuple[int, int, int]
    """Before prefix, suffix and middle."""

    def decode(self, ids: AnyArray) -> str:
        """Return the text of ids."""
        return self.tokenizer.decode(ids)

    def encode_with_controls(self, texts: Sequence[str]) -> Encoded:
        """Return the ids of each text, those of control strings among them; nothing is cut."""
        return self.tokenizer.encode_with_controls(texts)

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return the ids of each text, some of them cut in three."""
        cuts = [cut_places(text, self.fim, self.epoch) for text in texts]
        pieces: list[str] = []
        for text, places in zip(texts, cuts, strict=True):
            if places is None:
                pieces.append(text)
            else:
                first, last, _ = places
                pieces += (text[:first], text[last:], text[first:last])
        encoded = self.tokenizer.encode(pieces)
        piece_ids = iter(split(encoded))
        prefix_id, suffix_id, middle_id = (np.array([id_], encoded.ids.dtype) for id_ in self.ids)
        parts: list[AnyArray] = []
        lengths = []
        for places in cuts:
            if places is None:
                document = [next(piece_ids)]
            else:
                prefix, suffix, middle = next(piece_ids), next(piece_ids), next(piece_ids)
                document = [prefix_id, prefix, suffix_id, suffix, middle_id, middle]
                if places[2]:
                    document = [prefix_id, suffix_id, suffix, middle_id, prefix, middle]
            parts += document
            lengths.append(sum(part.size for part in document))
        return Encoded(ids=np.concatenate([encoded.ids[:0], *parts]), offsets=offsets_of(lengths))


def cut_places(text: str, fim: Fim, epoch: int) -> tuple[int, int, bool] | None:
    """Return where the middle of a text begins and ends, and whether its suffix comes first; None: it is whole."""
    if not text:
        return None
    content = text.encode(errors="surrogatepass")
    number = xxhash.xxh3_128_intdigest(content, seed=key64("fim", fim.seed, epoch))
    chance, order, *places = ((number >> shift) & 0xFFFFFFFF for shift in (96, 64, 32, 0))
    if chance >= fim.rate * (1 << 32):
        return None
    first, last = sorted((place * (len(text) + 1)) >> 32 for place in places)
    return first, last, order < fim.spm_rate * (1 << 32)
