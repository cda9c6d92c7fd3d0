"""A tokenizer object of another project, as nanochat has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from tokenmill.encode.tokenizer import TokenizerIdentity, checked_ids, engine_errors, join
from tokenmill.errors import TokenizerError
from tokenmill.fingerprint import digest

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.types import Encoded

PROBES = (
    "Once upon a time, a miller ground 1,234 bags of grain.",
    "  def f(x):\n\treturn {'a': x ** 2}  # café, 中文, 👍🏽\r\n",
    "don't DON'T 3.14159 <|endoftext|> <|bos|> https://example.org/?q=%20",
)
"""Texts whose ids stand for a tokenizer that has no file to take a digest of."""


@runtime_checkable
class NanochatTokenizer(Protocol):
    """What is asked of the object."""

    def get_bos_token_id(self) -> int:
        """Return the id that documents start with."""

    def get_vocab_size(self) -> int:
        """Return one more than the largest id."""

    def encode(self, text: list[str], *, prepend: int, num_threads: int) -> list[list[int]]:
        """Return the ids of each text, `prepend` before each."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids."""


@dataclass(frozen=True, kw_only=True)
class ForeignTokenizer:
    """An object with nanochat's methods as a tokenizer; every document starts with its BOS.

    It is known by the name of its class, the size of its vocabulary and the ids of a few texts: a change that
    none of these shows is not seen.
    """

    inner: NanochatTokenizer = field(repr=False)
    num_threads: int = 4

    @cached_property
    def identity(self) -> TokenizerIdentity:
        """What its ids mean."""
        vocab_size, bos = self.inner.get_vocab_size(), self.inner.get_bos_token_id()
        ids = self.inner.encode(list(PROBES), prepend=bos, num_threads=self.num_threads)
        return TokenizerIdentity(
            kind="tiktoken",  # what nanochat's is made of
            content=digest(["foreign", self.engine, vocab_size, [list(map(int, line)) for line in ids]]),
            vocab_size=vocab_size,
            bos_id=bos,
            eos_id=None,
            pad_id=None,
            add_bos=True,
            add_eos=False,
        )

    @property
    def engine(self) -> str:
        """The name of its class."""
        return type(self.inner).__name__

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Its control strings are not known; BOS is placed by its id."""
        return {}

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return the bare ids of each text, as wide as Python's: what is no id of its vocabulary must show."""
        bos = self.identity.bos_id
        assert bos is not None
        with engine_errors(self.engine, f"encode {len(texts)} texts", "look at the tokenizer that was given"):
            lists = self.inner.encode(list(texts), prepend=bos, num_threads=self.num_threads)
        if len(lists) != len(texts) or any(not ids or ids[0] != bos for ids in lists):
            raise TokenizerError(
                f"{self.engine}: encode must give a list of ids for each text, with prepend={bos} before them, "
                f"got {len(lists)} lists for {len(texts)} texts, or another first id; look at its encode"
            )
        return join([np.array(ids[1:], np.int64) for ids in lists])

    def decode(self, ids: npt.NDArray[Any]) -> str:
        """Return the text of ids."""
        return self.inner.decode(checked_ids(ids, self.identity).tolist())
