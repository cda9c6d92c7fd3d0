"""How documents become rows: the choices of a user, and the packing of one window by them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenmill.compiled import int64, kernel
from tokenmill.errors import ConfigError, nearest
from tokenmill.packing.best_fit import pack_best_fit
from tokenmill.packing.bos_best_fit import pack_bos_best_fit
from tokenmill.packing.window import (
    FORBID,
    SPLIT,
    TOKENS,
    TRUNCATE_END,
    TRUNCATE_START,
    Fragments,
    Output,
    Written,
    count_window,
    emit,
)
from tokenmill.types import CROPS, PACKINGS, SPLITS, Int32Array, Int64Array, Uint16Array, Uint32Array

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

    def count_tokens(self, fragments: Fragments) -> int:
        """Return how many tokens fragments bring to a window.

        A fragment from within a document begins with a token that was trained before, and is here for context;
        with BOS before it, it needs none.
        """
        context = 0 if self.name == "bos_best_fit" else np.count_nonzero(fragments[1])
        return int(fragments[2].sum() - context)

    def pack(
        self, fragments: Fragments, lengths: Int32Array, seq_len: int, out: Output, counts: Int64Array
    ) -> Written:
        """Pack the fragments of one window into `out`; only the kernels of this policy are compiled for it."""
        if self.name == "bos_best_fit":
            written = pack_bos_best_fit(fragments, lengths, seq_len, self.crop == "discard", out, counts)
        elif self.name == "concat":
            written = _pack_stream(fragments, lengths, seq_len, out)
        else:
            shape = (seq_len, self.split_mode, self.name == "padded")
            written = pack_best_fit(fragments, lengths, shape, out, counts)
        counts[TOKENS] += self.count_tokens(fragments)
        count_window(lengths, seq_len, self.split_mode, out, written, counts)
        return written


@kernel
def _pack_stream(
    fragments: Fragments, lengths: Int32Array, seq_len: int, out: tuple[Uint32Array, Uint16Array, Uint32Array]
) -> Written:
    """Cut fragments end to end into rows of seq_len inputs; the last row of the window is filled with padding."""
    rows, pieces, cuts = out
    row = number = cut = 0
    column = seq_len
    for i in range(fragments.shape[1]):
        document, start, size = int64(fragments[0, i]), int64(fragments[1, i]), int64(fragments[2, i])
        while True:
            if column >= seq_len:
                rows[row] = number
                row += 1
                column = 0
            # A row takes the token behind its last input as a label; it is the first input of the next row.
            taken = min(size, seq_len + 1 - column)
            cut = emit(pieces, cuts, number, cut, document, start, taken, int64(lengths[document]))
            number += 1
            column += taken
            if taken == size:
                break
            start += taken - 1
            size -= taken - 1
    return row, number, cut
