"""Rows of a source, as the plan knows them: the one interface of packed documents, records and live text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tokenmill.plan.order import EpochOrder, Shuffle
from tokenmill.types import AnyArray, BoolArray, Int64Array

if TYPE_CHECKING:
    from tokenmill.types import Fates, Spans

ENDLESS_ROWS = 1 << 62
"""Number of rows of a source without epochs: more than a run can read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochProgress:
    """Rows that were drawn of an epoch, when the rows of a source change in the middle of it."""

    rest: bool
    """Whether the epoch is the rest of an earlier one."""
    size: int
    """Number of rows of the epoch."""
    drawn: int
    """Number of rows that were drawn."""
    key: int
    """Key of the epoch's order."""
    shuffle: Shuffle
    starts: Int64Array | None = None
    """First row of each packing window, where rows are packed in windows."""

    def unseen(self, rows: Int64Array) -> BoolArray:
        """Return whether each row, numbered within the epoch, was not drawn yet."""
        order = EpochOrder(
            size=self.size, key=np.uint64(self.key), numbers=self.shuffle.numbers, starts=self.starts
        )
        return order.places(rows) >= self.drawn

    def describe(self) -> dict[str, int | str | bool]:
        """Return what decides which rows were drawn, as JSON."""
        return {
            "rest": self.rest,
            "size": self.size,
            "drawn": self.drawn,
            "key": f"{self.key:016x}",
            **self.shuffle.describe(),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCounts:
    """Number of tokens and labels in a set of rows."""

    tokens: int
    """Input slots that hold a token; the others are padding."""
    trained: int
    """Labels that loss masks leave."""

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(tokens=self.tokens + other.tokens, trained=self.trained + other.trained)


NOTHING = TokenCounts(tokens=0, trained=0)


class Rows(Protocol):
    """Rows of one source at one sequence length.

    Packed documents and records have epochs: all rows of an epoch are known before the first is read. Live text has
    none. Its rows are known by their ordinals, and questions about documents raise a `PlanError`.
    """

    @property
    def seq_len(self) -> int:
        """Number of input tokens of a row; it holds one more, so that every label exists."""
        ...

    @property
    def row_slots(self) -> int:
        """Number of input slots of a row, over all its arrays."""
        ...

    @property
    def description(self) -> Mapping[str, int | str | bool]:
        """Description of the content of the rows, as JSON: equal descriptions mean equal rows."""
        ...

    @property
    def epoch_description(self) -> Mapping[str, int | str | bool]:
        """Description of the rows of a whole epoch: `description` without the rest before the first epoch."""
        ...

    @property
    def cross_document_labels(self) -> bool:
        """Whether the first token of a document is the label of the last token of the document before it."""
        ...

    @property
    def segment_multiple(self) -> int:
        """Number of columns: segments are padded to a multiple of it."""
        ...

    @property
    def has_epochs(self) -> bool:
        """Whether all rows of an epoch are known before the first is read."""
        ...

    @property
    def num_rows(self) -> int:
        """Number of rows of an epoch; `ENDLESS_ROWS` without epochs."""
        ...

    @property
    def num_rest(self) -> int:
        """Number of rows before the first epoch: what an earlier stage left of the source, packed again.

        They are numbered from `num_rows` on.
        """
        ...

    @property
    def index_arrays(self) -> Sequence[tuple[AnyArray, bool]]:
        """Arrays of the row index, each with whether it is mapped from a file."""
        ...

    def window_starts(self, *, rest: bool) -> Int64Array | None:
        """Return the first row of each packing window of an epoch, or of the rest, and the end.

        None where rows are not packed in windows: consecutive rows are then neighbors at rest.
        """
        ...

    def following(self, previous: Rows, seen: EpochProgress) -> Rows:
        """Return these rows, preceded by what is left of an epoch of the rows of an earlier stage."""
        ...

    def fates(self) -> Fates:
        """Return the fate of every token of the source in an epoch."""
        ...

    def held(self, rows: Int64Array) -> TokenCounts:
        """Return the tokens and labels of some rows; reads masks, but no token."""
        ...

    def spans(self, rows: Int64Array) -> Spans:
        """Return the spans of some rows, in the order given."""
        ...

    def rows_of(self, documents: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the rows that hold tokens of documents, and the index in `documents` of each row.

        Rows are ordered by that index, then ascending. A document that no row holds has none.
        """
        ...
