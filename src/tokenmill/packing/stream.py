"""The kernel of `concat` for what remains of a window: fragments end to end, cut into rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba
import numpy as np

from tokenmill.packing.window import emit

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.packing.window import Fragments, Output, Written
    from tokenmill.types import Whole


@numba.njit(cache=True, nogil=True)
def pack_stream(fragments: Fragments, lengths: npt.NDArray[np.int32], seq_len: int, out: Output) -> Written:
    """Cut the fragments into rows of seq_len inputs; the last row of the window is filled with padding."""
    rows, pieces, cuts = out
    row: Whole = 0
    number: Whole = 0
    cut: Whole = 0
    column = np.int64(seq_len)
    for i in range(fragments[0].size):
        document, start, size = fragments[0][i], fragments[1][i], np.int64(fragments[2][i])
        while True:
            if column >= seq_len:
                rows[row] = number
                row += 1
                column = np.int64(0)
            # A row takes the token behind its last input as a label; it is the first input of the next row.
            taken = min(size, seq_len + 1 - column)
            cut = emit(pieces, cuts, number, cut, (document, start, taken, lengths[document]))
            number += 1
            column += taken
            if taken == size:
                break
            start += taken - 1
            size -= taken - 1
    return row, number, cut
