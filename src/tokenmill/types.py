"""The nouns that flow from one part to the next."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

AnyArray: TypeAlias = npt.NDArray[Any]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
Float64Array: TypeAlias = npt.NDArray[np.float64]
Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
IntegerArray: TypeAlias = npt.NDArray[np.integer[Any]]
Uint8Array: TypeAlias = npt.NDArray[np.uint8]
Uint16Array: TypeAlias = npt.NDArray[np.uint16]
Uint32Array: TypeAlias = npt.NDArray[np.uint32]
Uint64Array: TypeAlias = npt.NDArray[np.uint64]
UnsignedArray: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

Batch: TypeAlias = dict[str, AnyArray]
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

    ids: UnsignedArray
    offsets: Int64Array
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

    values: Mapping[str, AnyArray]
    """Array name -> values."""
    offsets: Mapping[str, Int64Array]
    """Axis -> where each item starts in its arrays, and the end of the last."""
    kept: Int64Array
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

    first: Int64Array
    count: Int64Array
    document: Int64Array
    start: Int64Array
    """First token of the span, counted from the document's first."""
    length: Int64Array
    shard: Int64Array
    token: Int64Array
    """First token of the span, counted from the shard's first."""

    @property
    def joined(self) -> BoolArray:
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


def natural_key(path: str) -> tuple[object, ...]:
    """Return a sort key that compares digits as numbers, folder by folder.

    >>> sorted(["b/1", "a10", "a9", "a09"], key=natural_key)
    ['a09', 'a9', 'a10', 'b/1']
    """
    parts = tuple(
        tuple(int(piece) if odd % 2 else piece for odd, piece in enumerate(re.split(r"([0-9]+)", part)))
        for part in PurePath(path).parts
    )
    return (parts, path)  # the path itself decides between a09 and a9
