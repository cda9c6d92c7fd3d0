"""The order of samples, dealt to ranks: a keyed permutation, of which nothing is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from itertools import islice
from typing import Any, ClassVar

import numpy as np
from torch.utils.data import Sampler

from tokenmill.adapters.kempnerforge.ranks import find_rank
from tokenmill.adapters.kempnerforge.state import check_mapping, read_count
from tokenmill.checks import MAX_NUMBER, check_seed
from tokenmill.errors import ConfigError, ResumeError
from tokenmill.fingerprint import key64
from tokenmill.plan.permute import permute_all

BLOCK = 1024
"""Indices that are computed together."""


class RankSampler(Sampler[int]):
    """What both samplers do alike: know their rank, an epoch, and what of it is skipped."""

    kind: ClassVar[str]
    """What a state calls it."""
    order_keys: ClassVar[tuple[str, ...]]
    """What of a state decides the order, and must be that of this sampler."""
    size: int
    """Samples of all ranks in an epoch."""
    num_samples: int

    def __init__(
        self, rank: int | None, num_replicas: int | None, *, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        self.rank, self.num_replicas = find_rank(rank, num_replicas)
        check_seed("sampler", seed)
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.skip = 0
        """Samples of this rank that the next iteration leaves out."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration."""
        if not isinstance(epoch, int) or not 0 <= epoch <= MAX_NUMBER:
            raise ConfigError(f"epoch: must lie within 0 and {MAX_NUMBER}, got {epoch!r}; count from 0")
        self.epoch = epoch

    def set_skip(self, skip: int) -> None:
        """Leave out the first samples of this rank, in the next iteration alone."""
        if not isinstance(skip, int) or not 0 <= skip <= MAX_NUMBER:
            raise ConfigError(f"skip: must be at least 0, got {skip!r}; it counts the samples of this rank")
        self.skip = skip

    def __len__(self) -> int:
        """Return how many samples an epoch has for this rank."""
        return self.num_samples

    def state_dict(self) -> dict[str, Any]:
        """Return which order this is; where an iteration stands is for the loader to know."""
        return {
            "kind": self.kind,
            "epoch": self.epoch,
            "seed": self.seed,
            "num_replicas": self.num_replicas,
            "rank": self.rank,
            "shuffle": self.shuffle,
        }

    def check_state(self, state: Mapping[str, Any], *, position: int | None = None) -> None:
        """Refuse a state of another order; that of a loader, at a `position`, must say all that decides it."""
        check_mapping(state)
        own = self.state_dict()
        for key in ("kind", *self.order_keys):
            if (position is not None or key in state) and state.get(key) != own[key]:
                raise ResumeError(
                    f"state: {key} must be that of this sampler, {own[key]!r}, got {state.get(key)!r}; "
                    "resume with what made it, or start anew"
                )
        read_count(state, "epoch", default=0)


class DistributedSampler(RankSampler):
    """The samples of a dataset in a new order every epoch, of which rank r of R takes places r, r + R, r + 2R, ...

    The order is the same for any number of ranks. With `drop_last` the last samples that do not go round are left
    out, others in every epoch; without it the first ones are taken again.
    """

    kind = "distributed"
    order_keys = ("seed", "size", "shuffle", "drop_last")

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
    ) -> None:
        super().__init__(rank, num_replicas, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self.dataset = dataset
        self.size = len(dataset)
        if self.size < 1 or (drop_last and self.size < self.num_replicas):
            raise ConfigError(
                f"dataset: must have a sample for each of {self.num_replicas} ranks, got {self.size}; add data, or "
                "use a smaller seq_len"
            )
        self.num_samples = self.size // self.num_replicas if drop_last else -(-self.size // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        skip, self.skip = self.skip, 0
        position = skip * self.num_replicas
        return self.indices(self.epoch, position, self.end(self.epoch, position, self.num_replicas))

    def indices(self, epoch: int, position: int, end: int) -> Iterator[int]:
        """Yield what this rank takes of an epoch after its first `position` places, of all ranks, were taken.

        Any position will do, also one that another number of ranks has left. Places from the end of the epoch on
        are its first ones again.
        """
        key = np.uint64(key64(self.seed, "sampler", epoch))
        step = BLOCK * self.num_replicas
        for begin in range(position + self.rank, end, step):
            places = np.arange(begin, min(begin + step, end), self.num_replicas, dtype=np.int64) % self.size
            yield from (permute_all(places, self.size, key) if self.shuffle else places).tolist()

    def first(self, epoch: int) -> int:  # noqa: ARG002 - other samplers count through
        """Return the place at which an epoch begins."""
        return 0

    def end(self, epoch: int, position: int, places: int) -> int:  # noqa: ARG002 - other samplers count through
        """Return where an epoch ends that goes on at `position`: a whole number of rounds of so many places on."""
        rest = max(0, self.size - position)
        return position + (rest // places if self.drop_last else -(-rest // places)) * places

    def after(self, epoch: int, position: int) -> int:  # noqa: ARG002 - what is left of an epoch is left out
        """Return where the epoch after one begins that has ended at `position`."""
        return self.first(epoch + 1)

    def bounds(self, epoch: int, places: int) -> tuple[int, int]:  # noqa: ARG002 - other samplers count through
        """Return the first and last place at which an epoch can stand that is dealt in rounds of so many places."""
        return 0, self.size if self.drop_last else self.size + places - 1

    def state_dict(self) -> dict[str, Any]:
        """Return which order this is; where an iteration stands is for the loader to know."""
        return {**super().state_dict(), "size": self.size, "drop_last": self.drop_last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the epoch of a state; one of another order is refused, and its rank is of no concern."""
        self.check_state(state)
        self.epoch = read_count(state, "epoch", default=0)


class AskedBatches:
    """The batches of indices that torch's loader asks for next.

    It does not hold the loader: a cycle would be freed at any time later, and its worker processes would be waited
    for in whatever runs then.
    """

    def __init__(self) -> None:
        self.indices: Iterator[int] = iter(())
        self.batch_size = 1
        self.count = 0

    def __iter__(self) -> Iterator[list[int]]:
        indices = self.indices
        for _ in range(self.count):
            yield list(islice(indices, self.batch_size))

    def __len__(self) -> int:
        return self.count
