"""What the plan is told of a source: how many rows it has and what they are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tokenmill.plan.shuffle import MODES, Shuffle, unshuffle_rows

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.types import Fates, Spans


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """How far an epoch has been read when the rows of a source change in the middle of it."""

    rest: bool
    """Whether it was the rest of an earlier epoch that was being read."""
    size: int
    """Rows of the epoch."""
    drawn: int
    """How many of them were drawn."""
    key: int
    """Key of the epoch's order."""
    shuffle: Shuffle

    def unseen(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Say which rows, numbered within the epoch, were not drawn yet."""
        mode, block, window = MODES[self.shuffle.mode], self.shuffle.block_rows, self.shuffle.window_blocks
        places: npt.NDArray[np.int64] = unshuffle_rows(rows, self.size, np.uint64(self.key), mode, block, window)
        return places >= self.drawn

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
class Held:
    """What some rows hold, together."""

    tokens: int
    """Input slots that hold a token; the others are padding."""
    trained: int
    """Labels that masks leave."""

    def __add__(self, other: Held) -> Held:
        return Held(tokens=self.tokens + other.tokens, trained=self.trained + other.trained)


NOTHING = Held(tokens=0, trained=0)


class RowIndex(Protocol):
    """The rows of one source at one sequence length."""

    @property
    def num_rows(self) -> int:
        """How many rows an epoch has."""
        ...

    @property
    def num_rest(self) -> int:
        """How many rows come before the first epoch: what a stage before left of the source, packed anew.

        They are numbered from `num_rows` on.
        """
        ...

    @property
    def seq_len(self) -> int:
        """How many tokens of a row are inputs; it holds one more, so that every label exists."""
        ...

    @property
    def row_slots(self) -> int:
        """How many input slots a row has, over all its arrays."""
        ...

    @property
    def description(self) -> Mapping[str, int | str | bool]:
        """What decides the content of the rows, as JSON: equal descriptions mean equal rows."""
        ...

    @property
    def epoch_description(self) -> Mapping[str, int | str | bool]:
        """What decides the rows of a whole epoch: the description, less the rest before the first one."""
        ...

    def following(self, previous: RowIndex, seen: Seen) -> RowIndex:
        """Return these rows, preceded by what is left of an epoch of the rows that a stage before used."""
        ...

    def fates(self) -> Fates:
        """Return what becomes of every token of the source in an epoch."""
        ...

    def held(self, rows: npt.NDArray[np.int64]) -> Held:
        """Return what the given rows hold; no token is read for it, but masks are."""
        ...

    def spans(self, rows: npt.NDArray[np.int64]) -> Spans:
        """Return what the given rows are made of, in the order given."""
        ...

    def rows_of(self, document: int) -> npt.NDArray[np.int64]:
        """Return the rows that hold a token of a document, in ascending order."""
        ...
