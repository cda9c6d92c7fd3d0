"""The distinct values among many shard or source numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba
import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


@numba.njit(cache=True, nogil=True)
def distinct(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the distinct values in ascending order; as numpy.unique, but without sorting where they lie close."""
    if values.size == 0:
        return values[:0].copy()
    lowest = values[0]
    highest = values[0]
    for value in values:
        lowest = min(lowest, value)
        highest = max(highest, value)
    if highest - lowest > 16 * values.size:
        return np.unique(values)
    present = np.zeros(highest - lowest + 1, np.bool_)
    for value in values:
        present[value - lowest] = True
    found: npt.NDArray[np.int64] = np.flatnonzero(present) + lowest
    return found
