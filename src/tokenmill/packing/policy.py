"""How documents become rows: the choices of a user, and the packing of one window by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.compiled import kernel
from tokenmill.errors import ConfigError, nearest
from tokenmill.packing.best_fit import pack_best_fit
from tokenmill.packing.bos_best_fit import pack_bos_best_fit
from tokenmill.packing.window import FORBID, SPLIT, TOKENS, TRUNCATE_END, TRUNCATE_START, count_window, emit
from tokenmill.types import CROPS, PACKINGS, SPLITS, Int32Array, Int64Array

if TYPE_CHECKING:
    from tokenmill.packing.window import Fragments, Output, Written


# The kernel of `concat` for what remains of a window: fragments end to end, cut into rows.


@kernel
def pack_stream(fragments: Fragments, lengths: Int32Array, seq_len: int, out: Output) -> Written:
    """Cut the fragments into rows of seq_len inputs; the last row of the window is filled with padding."""
    rows, pieces, cuts = out
    row = 0
    number = 0
    cut = 0
    column = int(np.int64(seq_len))
    for i in range(fragments[0].size):
        document, start, size = fragments[0][i], fragments[1][i], int(np.int64(fragments[2][i]))
        while True:
            if column >= seq_len:
                rows[row] = number
                row += 1
                column = 0
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


CONCAT, BEST_FIT, BOS_BEST_FIT, PADDED = range(4)
POLICIES = dict(zip(PACKINGS, (CONCAT, BEST_FIT, BOS_BEST_FIT, PADDED), strict=True))
SPLIT_MODES = dict(zip(SPLITS, (SPLIT, FORBID, TRUNCATE_START, TRUNCATE_END), strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """How documents become rows."""

    name: str = "best_fit"
    split: str = "allow"
    """What happens to a document longer than a row: it is cut into rows (`allow`), refused (`forbid`), or loses
    its beginning (`truncate_start`) or end (`truncate_end`). `padded` never cuts: there `allow` means `forbid`."""
    crop: str = "return"
    """What `bos_best_fit` does with the rest of a cropped document: `return` it to the pool, or `discard` it."""

    def __post_init__(self) -> None:
        for field, value, known in (
            ("packing", self.name, PACKINGS),
            ("split", self.split, SPLITS),
            ("crop", self.crop, CROPS),
        ):
            if value not in known:
                raise ConfigError(
                    f"{field}: must be one of {', '.join(known)}, got {value!r}; {nearest(value, known)}"
                )

    @property
    def split_mode(self) -> int:
        """The number of `split` for the kernels."""
        return FORBID if self.name == "padded" and self.split == "allow" else SPLIT_MODES[self.split]

    def describe(self) -> dict[str, int | str | bool]:
        """Return what decides the rows, as JSON."""
        described: dict[str, int | str | bool] = {"packing": self.name}
        if self.name in ("best_fit", "padded"):
            described["split"] = next(name for name, mode in SPLIT_MODES.items() if mode == self.split_mode)
        if self.name == "bos_best_fit":
            described["crop"] = self.crop
        return described

    def numbers(self) -> tuple[int, int, int]:
        """Return (policy, split, discard) for the kernels."""
        return POLICIES[self.name], self.split_mode, int(self.crop == "discard")


@kernel
def pack_window(
    fragments: Fragments,
    lengths: Int32Array,
    shape: tuple[int, int, int, int],
    out: Output,
    counts: Int64Array,
) -> Written:
    """Pack the fragments of one window into `out`; shape is (seq_len, policy, split, discard)."""
    seq_len, policy, split, discard = shape
    if policy == BOS_BEST_FIT:
        written = pack_bos_best_fit(fragments, lengths, (seq_len, discard == 1), out, counts)
    elif policy == CONCAT:
        written = pack_stream(fragments, lengths, seq_len, out)
    else:
        written = pack_best_fit(fragments, lengths, (seq_len, split, policy == PADDED), out, counts)
    counts[TOKENS] += count_tokens(fragments, policy)
    count_window((seq_len, split), lengths, out, written, counts)
    return written


@kernel
def count_tokens(fragments: Fragments, policy: int) -> int:
    """Return how many tokens fragments bring to a window."""
    _, starts, sizes = fragments
    tokens = 0
    for i in range(sizes.size):
        # A fragment from within a document begins with a token that was trained before, and is here for context;
        # with BOS before it, it needs none.
        tokens += int(np.int64(sizes[i])) - (starts[i] > 0 and policy != BOS_BEST_FIT)
    return tokens
