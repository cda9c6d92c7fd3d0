"""The nouns that flow from one part to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

Batch: TypeAlias = "dict[str, npt.NDArray[Any]]"
"""One micro-batch: array name -> array."""

ARRAYS = (
    "input_ids",
    "labels",
    "position_ids",
    "doc_ids",
    "loss_mask",
    "source",
    "cu_seqlens",
    "max_seqlen",
    "num_loss_tokens",
)
"""What a batch can deliver."""
POSITIONS = ("document", "row")
"""Where position_ids can start from 0."""
PACKINGS = ("concat", "best_fit", "bos_best_fit", "padded")
"""How documents can become rows."""
SPLITS = ("allow", "forbid", "truncate_start", "truncate_end")
"""What can become of a document longer than a row."""
CROPS = ("return", "discard")
"""What can become of the rest of a cropped document."""
ON_CHANGE = ("unseen", "restart")
ON_ERROR = ("stop", "skip")
ON_EXHAUSTED = ("repeat", "stop", "error")
RAMPS = ("linear", "cosine")
WEIGHINGS = ("rows", "tokens")
"""What a stage can do with a source whose rows are not those of the stage before."""

Whole: TypeAlias = Any
"""A whole number inside a kernel, where the integers of Python and of numpy are one."""

State: TypeAlias = "Mapping[str, int | str]"
"""Where a run stands: small, the same on every rank, JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """The tokens of several documents, end to end."""

    ids: npt.NDArray[np.unsignedinteger[Any]]
    offsets: npt.NDArray[np.int64]
    """Where each document starts in `ids`, and the end of the last: documents + 1 numbers, the first is 0."""

    def __post_init__(self) -> None:
        assert self.offsets.size >= 1
        assert int(self.offsets[0]) == 0
        assert int(self.offsets[-1]) == self.ids.size

    @property
    def num_documents(self) -> int:
        """How many documents there are."""
        return self.offsets.size - 1


AXES: Mapping[str, Mapping[str, str]] = {
    "seq": {"sequence": "documents"},
    "sft": {"sequence": "documents", "loss_mask": "documents", "position_ids": "documents"},
    "dpo": {"chosen": "chosen", "rejected": "rejected", "chosen_mask": "chosen", "rejected_mask": "rejected"},
    "grpo": {"prompts": "prompts", "responses": "responses", "masks": "responses", "rewards": "groups"},
}
"""Training type -> array -> axis: arrays of one axis are of one length and are cut at the same places.

Every axis is cut into records, but for `responses`: it is cut into responses, and `groups` cuts those into records.
`position_ids` is optional.
"""
TOKEN_KEYS = ("sequence", "chosen", "rejected", "prompts", "responses")
"""The arrays that hold token ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A record that could not be encoded."""

    index: int
    """Which of the records that were given, from 0."""
    reason: str
    """A word to count by."""
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Records:
    """Several records of one training type, each array end to end."""

    values: Mapping[str, npt.NDArray[Any]]
    """Array name -> values."""
    offsets: Mapping[str, npt.NDArray[np.int64]]
    """Axis -> where each item starts in its arrays, and the end of the last."""
    kept: npt.NDArray[np.int64]
    """Which of the records that were given these are, in order."""
    refused: Sequence[Refused] = ()
    truncated: int = 0
    """How many of them were cut short."""
    notes: Mapping[str, int] = field(default_factory=dict)
    """What was done to records that a user should know, by name: to how many of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A run of tokens of one document."""

    document: int
    """Index of the document in its source, from 0."""
    start: int
    """First token of the run, counted from the document's first."""
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """The spans of several rows, as arrays: the one source of truth for everything a batch delivers.

    Row i is made of spans `first[i]` to `first[i] + count[i]`, in that order. Each is a segment of its own, which
    attends to itself alone, but for the rest of a document, which is joined to the BOS put before it.
    """

    first: npt.NDArray[np.int64]
    count: npt.NDArray[np.int64]
    document: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    """First token of the span, counted from the document's first."""
    length: npt.NDArray[np.int64]
    shard: npt.NDArray[np.int64]
    token: npt.NDArray[np.int64]
    """First token of the span, counted from the shard's first."""

    @property
    def joined(self) -> npt.NDArray[np.bool_]:
        """Say of each span whether it goes on behind the BOS of its document, which is the span before it."""
        after = np.zeros(self.length.size, np.bool_)
        bos = (self.start[:-1] == 0) & (self.length[:-1] == 1)
        after[1:] = bos & (self.document[1:] == self.document[:-1]) & (self.start[1:] > 0)
        after[self.first[self.count > 0]] = False
        return after

    def row(self, index: int) -> tuple[Span, ...]:
        """Return the spans of one row as objects."""
        begin = int(self.first[index])
        return tuple(
            Span(document=int(self.document[i]), start=int(self.start[i]), length=int(self.length[i]))
            for i in range(begin, begin + int(self.count[index]))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Fates:
    """What becomes of the tokens of some rows, or of a whole source in one epoch."""

    rows: int
    tokens: int
    """Tokens that went in, each counted once."""
    trained: int
    """Tokens that are a label."""
    masked: int
    """Tokens that are delivered but are no label: the first of a document, before which nothing stands, and those
    that a loss mask leaves out."""
    dropped: Mapping[str, int]
    """Tokens that no row holds, by reason."""
    padding: int
    """Input slots that hold no token."""
    added: int = 0
    """BOS that were put before rests of documents; they are not among the tokens that went in."""

    def __post_init__(self) -> None:
        assert self.tokens == self.trained + self.masked + sum(self.dropped.values()), self
