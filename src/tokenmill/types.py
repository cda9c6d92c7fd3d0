"""The nouns that flow from one part to the next."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from tokenmill.errors import ConfigError

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
    "cu_seqlens_unpadded",
    "max_seqlen",
    "num_loss_tokens",
)
"""Arrays that a batch can have."""
POSITIONS = ("document", "row")
"""Where position_ids can start from 0."""
PACKINGS = ("concat", "best_fit", "bos_best_fit", "padded")
"""Ways to pack documents into rows."""
WHOLE_PACKINGS = ("padded", "best_fit")
"""Packings that keep a document whole where it fits a row; `on_long` decides about longer ones."""
CROPS = ("return", "discard")
"""Treatment of the rest of a cropped document."""
ON_CHANGE = ("unseen", "restart")
"""Treatment of a source whose rows differ from those of the previous stage."""
ON_ERROR = ("stop", "skip")
"""Treatment of an input record that cannot be used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteOptions:
    """How stores in object storage are read: the table [remote]. Secrets have no place in it."""

    endpoint: str | None = None
    """Where the server is; None: that of the cloud, or what the environment says."""
    region: str | None = None
    allow_http: bool = False
    """Whether requests may go unencrypted to other machines."""
    mirror: str | None = None
    """A folder in which what was read is kept, shared by all processes of a machine; None: what is read is kept in
    memory until it is used."""
    limit_bytes: int | None = None
    """How much of the arrays the mirror may hold; 0: nothing; None: all."""
    horizon_bytes: int = 64 << 20
    """How much is asked for ahead of training, and held in memory."""
    concurrency: int = 192
    """Concurrent requests of a process."""
    deadline: float = 120.0
    """Seconds after which a range that could not be read ends the run."""
    verify_pages: bool = True
    """Whether every page is verified by its checksum."""

    def __post_init__(self) -> None:
        for name in ("horizon_bytes", "concurrency", "deadline"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"remote: {name} must be more than 0, got {getattr(self, name)}; raise it")
        if self.limit_bytes is not None and self.limit_bytes < 0:
            raise ConfigError(
                f"remote: limit_bytes must not be negative, got {self.limit_bytes}; use 0 to keep nothing on disk"
            )
        if self.limit_bytes and self.mirror is None:
            raise ConfigError("remote: limit_bytes needs a mirror; set `mirror` to a folder")


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


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array of a training type, as a store keeps it."""

    axis: str
    """Arrays of one axis are of one length and are cut at the same places.

    Every axis is cut into records, but for `responses`: it is cut into responses, which `groups` cuts into records.
    """
    holds: Literal["ids", "mask", "positions", "rewards"]
    mask: str | None = None
    """Of an array of token ids: the array that says which of them are trained on; None: there is none."""

    @property
    def dtype(self) -> str | None:
        """The dtype on disk; None for token ids, whose vocabulary decides."""
        return _STORED_DTYPES.get(self.holds)


_STORED_DTYPES = {"mask": "|u1", "positions": "<u4", "rewards": "<f4"}
TRAINING_TYPES: Mapping[str, Mapping[str, StoredArray]] = {
    "seq": {"sequence": StoredArray("documents", "ids")},
    "sft": {
        "sequence": StoredArray("documents", "ids", mask="loss_mask"),
        "loss_mask": StoredArray("documents", "mask"),
        "position_ids": StoredArray("documents", "positions"),
    },
    "dpo": {
        "chosen": StoredArray("chosen", "ids", mask="chosen_mask"),
        "rejected": StoredArray("rejected", "ids", mask="rejected_mask"),
        "chosen_mask": StoredArray("chosen", "mask"),
        "rejected_mask": StoredArray("rejected", "mask"),
    },
    "grpo": {
        "prompts": StoredArray("prompts", "ids"),
        "responses": StoredArray("responses", "ids", mask="masks"),
        "masks": StoredArray("responses", "mask"),
        "rewards": StoredArray("groups", "rewards"),
    },
}
"""Training type -> array -> what it is. A store of `sft` may lack `position_ids`, and one of any type its masks."""
STORED_ARRAYS: Mapping[str, StoredArray] = {
    name: array for arrays in TRAINING_TYPES.values() for name, array in arrays.items()
}
"""The same over all training types: an array is the same in each, but that `seq` has no mask."""
TOKEN_KEYS = tuple(name for name, array in STORED_ARRAYS.items() if array.holds == "ids")
"""The arrays that hold token ids."""
MASK_KEYS = tuple(name for name, array in STORED_ARRAYS.items() if array.holds == "mask")
"""The arrays of 0 and 1, one for each token."""
RECORD_TYPES = frozenset(
    kind for kind, arrays in TRAINING_TYPES.items() if all(array.axis != "documents" for array in arrays.values())
)
"""Training types whose records have several arrays of token ids: each is a row of its own."""


def token_arrays(kind: str) -> dict[str, str | None]:
    """Return the arrays of token ids of a training type, each with the array of its mask, if it has one.

    >>> token_arrays("grpo")
    {'prompts': None, 'responses': 'masks'}
    """
    return {name: array.mask for name, array in TRAINING_TYPES[kind].items() if array.holds == "ids"}


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
    noted: Mapping[str, int] = field(default_factory=dict)
    """For each note, the index of the first stored record that has it."""


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
        """Whether each span continues the document whose BOS is the previous span."""
        after = np.zeros(self.length.size, np.bool_)
        bos = (self.start[:-1] == 0) & (self.length[:-1] == 1)
        after[1:] = bos & (self.document[1:] == self.document[:-1]) & (self.start[1:] > 0)
        after[self.first[self.count > 0]] = False
        return after

    def row(self, index: int) -> tuple[Span, ...]:
        """Return the spans of one row as objects."""
        own = slice(self.first[index], self.first[index] + self.count[index])
        parts = zip(*(array[own].tolist() for array in (self.document, self.start, self.length)), strict=True)
        return tuple(Span(document=document, start=start, length=length) for document, start, length in parts)


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
    """BOS that were inserted before rests of documents; `tokens` does not count them."""

    def __post_init__(self) -> None:
        assert self.tokens == self.trained + self.masked + sum(self.dropped.values()), self


NO_DOCUMENTS: Int64Array = np.empty(0, np.int64)
"""Documents to leave out of a source that is used whole."""


def run_sums(first: Int64Array, count: Int64Array, values: Int64Array) -> Int64Array:
    """Return the sum of the `count` values from each `first` on.

    >>> run_sums(np.array([1, 0]), np.array([2, 0]), np.array([5, 6, 7])).tolist()
    [13, 0]
    """
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])
    sums: Int64Array = ends[first + count] - ends[first]
    return sums


def counted_from(first: Int64Array, count: Int64Array) -> Int64Array:
    """Return `count` numbers from each `first`, one range after the other.

    >>> counted_from(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    behind: Int64Array = np.repeat(first - (np.cumsum(count) - count), count)
    return np.arange(behind.size) + behind


def distinct(values: Int64Array) -> Int64Array:
    """Return the distinct values in ascending order; as numpy.unique, but without sorting where they lie close."""
    if not values.size:
        return values.copy()
    lowest, highest = int(values.min()), int(values.max())
    if lowest == highest:
        return values[:1].copy()
    if highest - lowest > 16 * values.size:
        return np.unique(values)
    present = np.zeros(highest - lowest + 1, np.bool_)
    present[values - lowest] = True
    return np.flatnonzero(present) + lowest


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
