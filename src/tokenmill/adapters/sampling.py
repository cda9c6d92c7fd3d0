"""Order of samples that both the KempnerForge and the AstrAI sampler have: computed, resumable at any position."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from tokenmill.adapters.torch import find_rank
from tokenmill.plan.permute import permute_all
from tokenmill.tables import check_seed

BLOCK = 4096
"""Number of samples that are computed together."""


class ResumableSampler(torch.utils.data.Sampler[int]):
    """Samples of a dataset, assigned to ranks in rounds of one each, from any position of an epoch.

    Rank r of R takes the positions r, r + R, r + 2R, ... of a keyed permutation, so the order is the same for any
    number of ranks. If the last round is not full, it starts again at the first positions, or, with `drop_last`, it
    is left out.
    """

    size: int
    """Samples of all ranks per epoch."""

    def __init__(
        self,
        where: str,
        process_group: torch.distributed.ProcessGroup | None = None,
        *,
        rank: int | None,
        num_replicas: int | None,
        seed: int,
        shuffle: bool,
        drop_last: bool,
    ) -> None:
        self.rank, self.num_replicas = find_rank(process_group, rank=rank, world_size=num_replicas)
        check_seed(where, seed)
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last

    def rounds(self, rest: int, places: int | None = None) -> int:
        """Return the number of rounds that `rest` positions make; a round has one position per rank by default."""
        places = places or self.num_replicas
        return max(0, rest) // places if self.drop_last else -(-max(0, rest) // places)

    def samples(self, position: int, end: int, key: int) -> Iterator[int]:
        """Yield the samples of this rank between two positions of the epoch whose permutation has this key."""
        places = range(position + self.rank, end, self.num_replicas)
        for first in range(0, len(places), BLOCK):
            block = places[first : first + BLOCK]
            numbers = np.arange(block.start, block.stop, block.step, dtype=np.int64) % self.size
            yield from (permute_all(numbers, self.size, np.uint64(key)) if self.shuffle else numbers).tolist()
