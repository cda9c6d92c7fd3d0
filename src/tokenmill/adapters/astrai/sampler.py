"""Which items a rank is given, in which order, from any place on: computed, with no list of indices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch

from tokenmill.adapters.astrai.store import refuse_unknown
from tokenmill.adapters.distributed import find_rank
from tokenmill.errors import ConfigError, ResumeError, nearest
from tokenmill.fingerprint import key64
from tokenmill.plan.permute import permute_all
from tokenmill.tables import MAX_NUMBER, check_seed
from tokenmill.types import Int64Array

_BLOCK = 4096
"""Indices that are computed together."""
_WHERE = "ResumableDistributedSampler"
_PLACE = ("epoch", "position")
_ORDER = ("version", "seed", "shuffle", "samples", "data")
_OPTIONS = (
    *("data_source", "start_epoch", "start_iter", "seed", "drop_last", "shuffle", "process_group", "replica"),
)


class ResumableDistributedSampler(torch.utils.data.Sampler[int]):
    """Every item once an epoch, dealt to the ranks in turn; every epoch has an order of its own.

    A pass begins at item `start_iter` of this rank in `start_epoch` and ends with the epoch; the next pass is the
    next epoch. `start_iter` counts within the epoch, or, as trainers of AstrAI do, from the first epoch on. A
    pass that was not finished is begun again at the same place. Where the ranks cannot share an epoch evenly, its
    first items are given once more to fill up, or, with `drop_last`, its last ones to nobody.

    Rank and number of ranks are those of `replica`, else of `process_group`, else of torch.distributed, else of
    RANK and WORLD_SIZE, else 0 of 1.
    """

    def __init__(
        self,
        data_source: Sized,
        start_epoch: int = 0,
        start_iter: int = 0,
        seed: int = 42,
        drop_last: bool = False,
        shuffle: bool = True,
        process_group: torch.distributed.ProcessGroup | None = None,
        replica: tuple[int, int] | None = None,
        **unknown: object,
    ) -> None:
        super().__init__()
        refuse_unknown(_WHERE, unknown, _OPTIONS)
        check_seed(_WHERE, seed)
        self.rank, self.num_replicas = find_rank(process_group) if replica is None else replica
        if not 0 <= self.rank < self.num_replicas:
            raise ConfigError(
                f"{_WHERE}: rank must lie within 0:{self.num_replicas}, got {self.rank}; "
                "give replica=(rank, number of ranks)"
            )
        self.num_samples = len(data_source)
        self.seed, self.drop_last, self.shuffle = seed, drop_last, shuffle
        self._data = str(getattr(data_source, "fingerprint", ""))
        self._moves = 0  # how often it was sent elsewhere, for a running pass to notice
        if not self.num_samples_per_replica:
            raise ConfigError(
                f"{_WHERE}: every rank must get an item, got {self.num_samples} for {self.num_replicas} ranks"
                f"{' with drop_last' * drop_last}; use fewer ranks"
            )
        for name, value in (("start_epoch", start_epoch), ("start_iter", start_iter)):
            if value < 0:
                raise ConfigError(f"{_WHERE}: {name} must be at least 0, got {value}; count from 0")
        past, within = divmod(start_iter, self.num_samples_per_replica)
        if past not in (0, start_epoch):
            raise ConfigError(
                f"{_WHERE}: start_iter must lie in start_epoch, {start_epoch}, got {start_iter}, which is in epoch "
                f"{past} of {self.num_samples_per_replica} items a rank; give start_epoch={past}"
            )
        self._go_to(start_epoch, within * self.num_replicas)

    def _go_to(self, epoch: int, position: int) -> None:
        self.epoch = epoch
        self._begin = self._position = position

    @property
    def iter(self) -> int:
        """How many items of the epoch this rank has drawn."""
        return self._position // self.num_replicas

    @property
    def num_samples_per_replica(self) -> int:
        """How many items each rank is given in a whole epoch."""
        return self._rounds(0)

    @property
    def total_size(self) -> int:
        """How many items all ranks are given in a whole epoch."""
        return self.num_samples_per_replica * self.num_replicas

    def _rounds(self, position: int) -> int:
        """Return how many items each rank is still given from a position of the epoch on."""
        spare = 0 if self.drop_last else self.num_replicas - 1
        return max(0, self.num_samples - position + spare) // self.num_replicas

    def __len__(self) -> int:
        """Return how many items a pass that begins now gives to this rank."""
        return self._rounds(self._begin)

    def __iter__(self) -> Iterator[int]:
        moves = self._moves
        for index in self._pass():
            yield index
            if self._moves != moves:
                break
        else:
            return
        yield from self

    def _pass(self) -> Iterator[int]:
        epoch, begin, rounds = self.epoch, self._begin, len(self)
        for first in range(0, rounds, _BLOCK):
            numbers = np.arange(first, min(rounds, first + _BLOCK))
            for number, index in zip(numbers.tolist(), self._indices(epoch, begin, numbers), strict=True):
                self._position = begin + (number + 1) * self.num_replicas
                yield index
        self._go_to(epoch + 1, 0)

    def _indices(self, epoch: int, begin: int, numbers: Int64Array) -> list[int]:
        """Return the items of this rank by their numbers from a position of an epoch on."""
        places = (begin + numbers * self.num_replicas + self.rank) % self.num_samples
        if self.shuffle:
            places = permute_all(places, self.num_samples, np.uint64(key64("sampler", self.seed, epoch)))
        indices: list[int] = places.tolist()
        return indices

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; where it is the current one, nothing changes."""
        if epoch != self.epoch:
            self._moves += 1
            self._go_to(epoch, 0)

    def state_dict(self) -> dict[str, int | str | bool]:
        """Return where the sampler stands, as JSON: the same on every rank, and good for any number of ranks.

        It counts what was drawn. A DataLoader with workers draws ahead: give it `start_iter` instead, the batches
        that were trained on times the batch size.
        """
        done = not self._rounds(self._position)
        return {
            "version": 1,
            "epoch": self.epoch + done,
            "position": 0 if done else self._position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "samples": self.num_samples,
            "data": self._data,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state says, a running pass too; a state of other data, seed or shuffle is refused."""
        mine = self.state_dict()
        if not isinstance(state, Mapping):
            raise ResumeError(
                f"{_WHERE}: a state must be the dict that state_dict() gave, got {type(state).__name__}; pass that"
            )
        for key in (*mine, *state):
            if key not in state or key not in mine:
                raise ResumeError(
                    f"{_WHERE}: a state must have keys {', '.join(mine)}, got {', '.join(map(str, state))}; "
                    f"{nearest(str(key), mine)}"
                )
        for key in _ORDER:
            if state[key] != mine[key]:
                raise ResumeError(
                    f"{_WHERE}: {key} must be that of the state, {state[key]!r}, got {mine[key]!r}; "
                    "go on with the same data and options, or begin anew"
                )
        for key in _PLACE:
            limit = self.num_samples if key == "position" else MAX_NUMBER
            if type(state[key]) is not int or not 0 <= state[key] < limit:
                raise ResumeError(
                    f"{_WHERE}: {key} must lie within 0:{limit}, got {state[key]!r}; use the state as it was saved"
                )
        self._moves += 1
        done = not self._rounds(state["position"])
        self._go_to(state["epoch"] + done, 0 if done else state["position"])
