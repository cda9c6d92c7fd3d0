"""Which rows of a global batch a rank takes, and in which micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.plan.plan import Plan
    from tokenmill.plan.stages import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSlice:
    """One rank's part: rank r of R takes the r-th of R equal runs of every global batch."""

    rank: int
    world_size: int
    micro_batch: int
    """Rows that are delivered at a time."""

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank: must lie within 0:world_size, got rank {self.rank} of {self.world_size}; "
                "pass the rank and size of the data-parallel group"
            )
        if self.micro_batch < 1:
            raise ConfigError(f"micro_batch: must be at least 1, got {self.micro_batch}; leave it out for 1")

    def check(self, plan: Plan) -> None:
        """Refuse a slicing that does not divide the batch of every stage, before the first step."""
        share = self.world_size * self.micro_batch
        for stage in plan.stages:
            batch = stage.spec.global_batch_size
            if batch % share:
                raise ConfigError(
                    f"stage {stage.spec.name!r}: global_batch_size must be divisible by world_size * micro_batch, "
                    f"got {batch} and {self.world_size} * {self.micro_batch}; {self._way_out(batch)}"
                )

    def _way_out(self, batch: int) -> str:
        share = self.world_size * self.micro_batch
        below, above = batch // share * share, -(-batch // share) * share
        batches = f"use global_batch_size {' or '.join(str(size) for size in (below, above) if size)}"
        name, fixed = (
            ("micro_batch", self.world_size) if batch % self.world_size == 0 else ("world_size", self.micro_batch)
        )
        legal = [size for size in range(1, batch + 1) if batch % (size * fixed) == 0]
        wanted: int = getattr(self, name)
        near = [*[size for size in legal if size < wanted][-1:], *[size for size in legal if size > wanted][:1]]
        return f"{batches}, or {name} {' or '.join(map(str, near))}" if near else batches

    def rows(self, stage: Stage) -> int:
        """Return how many rows of a step this rank takes."""
        return stage.spec.global_batch_size // self.world_size

    def batches(self, stage: Stage) -> int:
        """Return how many micro-batches a step has."""
        return self.rows(stage) // self.micro_batch

    def places(self, stage: Stage, first: int, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return (step, slot) of every row of `count` micro-batches from the stage's `first`-th on."""
        rows = self.rows(stage)
        begin = first * self.micro_batch
        index = np.arange(begin, begin + count * self.micro_batch)
        return index // rows + stage.spec.start_step, index % rows + self.rank * rows
