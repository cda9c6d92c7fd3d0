"""Which lanes of a run a rank reads, and which of them gives which row of a batch."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.errors import ConfigError
from tokenmill.loader.loader import RankSlice


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One rank's part: rank r of R has the r-th of R equal runs of lanes, and of the rows of every batch."""

    lanes: int
    """Of all ranks; each gives the same number of neighbouring rows to every global batch."""
    global_batch_size: int
    rank: int
    world_size: int
    micro_batch: int

    def __post_init__(self) -> None:
        # Checks each of the three by itself.
        RankSlice(rank=self.rank, world_size=self.world_size, micro_batch=self.micro_batch)
        if self.global_batch_size < 1:
            raise ConfigError(f"global_batch_size: must be at least 1, got {self.global_batch_size}; raise it")
        if self.global_batch_size % self.lanes:
            near = _nearest(self.lanes, _divisors(self.global_batch_size))
            raise ConfigError(
                f"lanes: must divide global_batch_size {self.global_batch_size}, got {self.lanes}; "
                f"use {near}, or leave it out"
            )
        if self.lanes % self.world_size:
            near = _nearest(self.world_size, _divisors(self.lanes))
            raise ConfigError(
                f"world_size: must divide the {self.lanes} lanes, got {self.world_size}; use {near} ranks, or "
                "another number of lanes at the start of a run"
            )
        if self.rows % self.micro_batch:
            near = _nearest(self.micro_batch, _divisors(self.rows))
            raise ConfigError(
                f"micro_batch: must divide the {self.rows} rows of a rank (global_batch_size "
                f"{self.global_batch_size}, world_size {self.world_size}), got {self.micro_batch}; use {near}"
            )

    @property
    def rows(self) -> int:
        """How many rows of a step the rank delivers."""
        return self.global_batch_size // self.world_size

    @property
    def batches(self) -> int:
        """How many micro-batches a step has."""
        return self.rows // self.micro_batch

    @property
    def rows_per_lane(self) -> int:
        """How many rows a lane gives to a step."""
        return self.global_batch_size // self.lanes

    @property
    def own(self) -> range:
        """The lanes of the rank."""
        each = self.lanes // self.world_size
        return range(self.rank * each, (self.rank + 1) * each)

    def lanes_of(self, batch: int) -> list[int]:
        """Return the lane of each row of a micro-batch of a step.

        >>> share = Share(lanes=4, global_batch_size=8, rank=1, world_size=2, micro_batch=2)
        >>> share.lanes_of(0), share.lanes_of(1)
        ([2, 2], [3, 3])
        """
        first = self.rank * self.rows + batch * self.micro_batch
        return [slot // self.rows_per_lane for slot in range(first, first + self.micro_batch)]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _nearest(wanted: int, legal: list[int]) -> str:
    near = [*[size for size in legal if size < wanted][-1:], *[size for size in legal if size > wanted][:1]]
    return " or ".join(map(str, near))
