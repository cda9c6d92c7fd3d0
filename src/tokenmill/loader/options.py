"""Options of a loader: arrays of a batch, prefetching, and threads."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.errors import ConfigError, nearest
from tokenmill.tables import check_fields
from tokenmill.types import POSITIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderOptions:
    """Arrays of a batch, and how batches are prefetched; the tokens of a batch do not depend on them."""

    arrays: tuple[str, ...] = ("input_ids", "labels", "position_ids", "doc_ids")
    threads: int = 1
    """Threads that assemble batches ahead of the caller, or that read and tokenize live text; 0 does it all when a
    batch is asked for."""
    prefetch: int = 8
    """Micro-batches that are kept ready."""
    positions: str = "document"
    """Start of `position_ids` from 0: at every `document`, or at the start of the `row` only."""
    horizon: int = 1
    """Number of next tokens that are labels of an input; with more than one, `labels` has one more axis."""
    columns: tuple[str, ...] = ()
    """Fields that stores of records keep of each (`prepare --keep`), which a batch delivers beside its arrays."""
    pad_to: str = "row"
    """How far the rows of a batch are padded: to the length of a `row`, or of the longest one of the `batch`, where
    one is iterated over; `loader[step]` pads to the row."""
    timeout: float = 30.0
    """Seconds after which a thread that reads live text, and gets no further, is given up."""
    ahead: int | None = None
    """Windows of live text that are made before they are needed, besides the one that each lane holds; at least
    `threads`. None: one more than `threads`, so that no thread waits until its last window is taken."""

    def __post_init__(self) -> None:
        check_fields(self, "loader.")
        if self.positions not in POSITIONS:
            raise ConfigError(
                f"positions: expected one of {', '.join(POSITIONS)}, got {self.positions!r}; "
                f"{nearest(self.positions, POSITIONS)}"
            )
        if self.threads < 0 or self.prefetch < 1 or not self.timeout > 0:
            raise ConfigError(
                "loader: threads must be at least 0, prefetch at least 1 and timeout more than 0, got "
                f"{self.threads}, {self.prefetch} and {self.timeout}; use threads=0 to do without prefetching"
            )
        if self.horizon < 1:
            raise ConfigError(f"loader: horizon must be at least 1, got {self.horizon}; leave it out for 1")
        if self.ahead is not None and self.ahead < 1:
            raise ConfigError(f"loader: ahead must be at least 1, got {self.ahead}; leave it out")
