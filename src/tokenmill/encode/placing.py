"""The kernel that copies documents to their places, with BOS and EOS around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np
from numba import types

if TYPE_CHECKING:
    import numpy.typing as npt

_numba: Any = types
_IDS = _numba.Array(_numba.uint32, 1, "C", readonly=True)
"""What engines give may be memory that must not be written to."""
_FLAGS, _NUMBERS, _NUMBER = _numba.boolean[::1], _numba.int64[::1], _numba.int64
_SIGNATURES = [
    _NUMBER(_IDS, _NUMBERS, _numba.UniTuple(_FLAGS, 2), _NUMBERS, _numba.UniTuple(_NUMBER, 2), width[::1])
    for width in (_numba.uint8, _numba.uint16, _numba.uint32)
]


@numba.njit(_SIGNATURES, cache=True, nogil=True)
def place_documents(
    ids: npt.NDArray[np.uint32],
    offsets: npt.NDArray[np.int64],
    needs: tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]],
    places: npt.NDArray[np.int64],
    tokens: tuple[int, int],
    framed: npt.NDArray[Any],
) -> int:
    """Copy each document to its place in `framed`, and return the largest id, which may be too large for that.

    `needs` says which documents are to be given BOS, and which EOS; `tokens` are the two.
    """
    needs_bos, needs_eos = needs
    bos, eos = tokens
    largest = np.uint32(0)
    for document in range(offsets.size - 1):
        at = places[document]
        if needs_bos[document]:
            framed[at] = bos
            at += 1
        source = ids[offsets[document] : offsets[document + 1]]
        target = framed[at : at + source.size]
        for k in range(source.size):
            target[k] = source[k]
            largest = max(largest, source[k])
        if needs_eos[document]:
            framed[at + source.size] = eos
    return int(largest)
