"""The order of samples, dealt to ranks: a keyed permutation, of which nothing is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from tokenmill.adapters.kempnerforge.ranks import find_rank
from tokenmill.checks import check_seed
from tokenmill.errors import ConfigError, ResumeError
from tokenmill.fingerprint import key64
from tokenmill.plan.permute import permute_all

BLOCK = 1024
"""Indices that are computed together."""


class DistributedSampler(Sampler[int]):
    """The samples of a dataset in a new order every epoch, of which rank r of R takes places r, r + R, r + 2R, ...

    The order is the same for any number of ranks. With `drop_last` the last samples that do not go round are left
    out, others in every epoch; without it the first ones are taken again.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
    ) -> None:
        self.rank, self.num_replicas = find_rank(rank, num_replicas)
        check_seed("sampler", seed)
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.size = len(dataset)
        if self.size < 1 or (drop_last and self.size < self.num_replicas):
            raise ConfigError(
                f"dataset: must have a sample for each of {self.num_replicas} ranks, got {self.size}; add data, or "
                "use a smaller seq_len"
            )
        self.num_samples = self.size // self.num_replicas if drop_last else -(-self.size // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self.epoch = 0
        self.skip = 0
        """Samples of this rank that the next iteration leaves out."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration."""
        self.epoch = epoch

    def set_skip(self, skip: int) -> None:
        """Leave out the first samples of this rank, in the next iteration alone."""
        self.skip = checked_skip(skip)

    def __len__(self) -> int:
        """Return how many samples an epoch has for this rank."""
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        skip, self.skip = self.skip, 0
        return self.indices(self.epoch, skip * self.num_replicas)

    def indices(self, epoch: int, position: int) -> Iterator[int]:
        """Yield what this rank takes of an epoch after its first `position` places, of all ranks, were taken.

        Any position will do, also one that another number of ranks has left.
        """
        key = np.uint64(key64(self.seed, "sampler", epoch))
        end = self.end(epoch, position)
        step = BLOCK * self.num_replicas
        for begin in range(position + self.rank, end, step):
            places = np.arange(begin, min(begin + step, end), self.num_replicas, dtype=np.int64) % self.size
            yield from (permute_all(places, self.size, key) if self.shuffle else places).tolist()

    def first(self, epoch: int) -> int:  # noqa: ARG002 - other samplers count through
        """Return the place at which an epoch begins."""
        return 0

    def end(self, epoch: int, position: int) -> int:  # noqa: ARG002 - other samplers count through
        """Return where an epoch ends that goes on at `position`: a whole number of rounds from there."""
        rest = max(0, self.size - position)
        rounds = rest // self.num_replicas if self.drop_last else -(-rest // self.num_replicas)
        return position + rounds * self.num_replicas

    def after(self, epoch: int, position: int) -> int:  # noqa: ARG002 - what is left of an epoch is left out
        """Return where the epoch after one begins that has ended at `position`."""
        return self.first(epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return which order this is; where an iteration stands is for the loader to know."""
        return {
            "epoch": self.epoch,
            "seed": self.seed,
            "num_replicas": self.num_replicas,
            "rank": self.rank,
            "size": self.size,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the epoch of a state; one of another order is refused, and its rank is of no concern."""
        check_same(state, self.state_dict(), ("seed", "size", "shuffle", "drop_last"))
        self.epoch = int(state.get("epoch", 0))


def checked_skip(skip: int) -> int:
    """Refuse to leave out fewer samples than none."""
    if skip < 0:
        raise ConfigError(f"skip: must be at least 0, got {skip}; it counts the samples of this rank")
    return skip


def check_same(state: Mapping[str, Any], own: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    """Refuse a state that says something else than this sampler where both say it."""
    for key in keys:
        if key in state and state[key] != own[key]:
            raise ResumeError(
                f"state: {key} must be that of this sampler, {own[key]!r}, got {state[key]!r}; "
                "resume with what made it, or start anew"
            )
