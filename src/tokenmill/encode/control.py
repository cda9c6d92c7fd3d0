"""What becomes of control strings, such as `<|endoftext|>`, that stand in raw text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.encode.tokenizer import Tokenizer, TokenizerIdentity
from tokenmill.errors import ConfigError, nearest
from tokenmill.types import Encoded

if TYPE_CHECKING:
    import numpy.typing as npt

POLICIES = ("text", "encode", "drop")
"""They are ordinary text, become control ids, or are taken out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlTokenizer:
    """A tokenizer that gives control strings in raw text their ids, or takes them out first."""

    tokenizer: Tokenizer = field(repr=False)
    policy: str
    pattern: re.Pattern[str] = field(repr=False)

    @property
    def identity(self) -> TokenizerIdentity:
        """What its ids mean."""
        return self.tokenizer.identity

    @property
    def engine(self) -> str:
        """Name and version of what does the work."""
        return self.tokenizer.engine

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Control strings and their ids."""
        return self.tokenizer.special_ids

    def decode(self, ids: npt.NDArray[Any]) -> str:
        """Return the text of ids."""
        return self.tokenizer.decode(ids)

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return the ids of each text."""
        if self.policy == "drop":
            return self.tokenizer.encode([self._without(text) for text in texts])
        if not any(map(self.pattern.search, texts)):
            return self.tokenizer.encode(texts)
        # Pieces of text and control strings by turns: a b c d e -> text a, string b, text c, ...
        pieces = [self.pattern.split(text) for text in texts]
        bare = self.tokenizer.encode([part for text in pieces for part in text[::2]])
        plain = bare.ids.astype(np.uint32, copy=False)
        controls = [np.array([self.special_ids[name] for name in text[1::2]], np.uint32) for text in pieces]
        places = np.cumsum([0, *(len(text[::2]) for text in pieces)])
        runs = [
            np.insert(
                plain[bare.offsets[first] : bare.offsets[last]],
                bare.offsets[first + 1 : last] - bare.offsets[first],
                names,
            )
            for first, last, names in zip(places[:-1], places[1:], controls, strict=True)
        ]
        offsets = np.zeros(len(runs) + 1, np.int64)
        np.cumsum([run.size for run in runs], out=offsets[1:])
        return Encoded(ids=np.concatenate(runs), offsets=offsets)

    def _without(self, text: str) -> str:
        while self.pattern.search(text):  # taking one out may join the halves of another
            text = self.pattern.sub("", text)
        return text


def with_policy(tokenizer: Tokenizer, policy: str) -> Tokenizer:
    """Return a tokenizer that treats control strings in raw text so; `text` is what every tokenizer does itself."""
    if policy not in POLICIES:
        raise ConfigError(
            f"control_strings: must be one of {', '.join(POLICIES)}, got {policy!r}; {nearest(policy, POLICIES)}"
        )
    names = sorted(tokenizer.special_ids, key=len, reverse=True)
    if policy == "text" or not names:
        return tokenizer
    pattern = re.compile(
        f"({'|'.join(map(re.escape, names))})" if policy == "encode" else "|".join(map(re.escape, names))
    )
    return ControlTokenizer(tokenizer=tokenizer, policy=policy, pattern=pattern)
