"""What the plan is told of a source: how many rows it has and what they are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tokenmill.types import Spans


class RowIndex(Protocol):
    """The rows of one source at one sequence length."""

    @property
    def num_rows(self) -> int:
        """How many rows an epoch has."""
        ...

    @property
    def seq_len(self) -> int:
        """How many tokens of a row are inputs; it holds one more, so that every label exists."""
        ...

    @property
    def description(self) -> Mapping[str, int | str | bool]:
        """What decides the content of the rows, as JSON: equal descriptions mean equal rows."""
        ...

    def spans(self, rows: npt.NDArray[np.int64]) -> Spans:
        """Return what the given rows are made of, in the order given."""
        ...

    def rows_of(self, document: int) -> npt.NDArray[np.int64]:
        """Return the rows that hold a token of a document, in ascending order."""
        ...
