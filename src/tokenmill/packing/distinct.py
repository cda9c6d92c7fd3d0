"""The distinct values of small whole numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

_SMALL = 1 << 14


def distinct(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the distinct values in ascending order, as numpy.unique; a few times faster for shard numbers."""
    if values.size and int(values.max()) < _SMALL:
        return np.flatnonzero(np.bincount(values))
    return np.unique(values)
