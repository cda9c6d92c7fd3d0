"""The items of a rank in order, from any position on: computed, without a list of indices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch

from tokenmill.adapters.astrai.store import refuse_unknown
from tokenmill.adapters.sampling import ResumableSampler
from tokenmill.errors import ConfigError, ResumeError
from tokenmill.fingerprint import key64
from tokenmill.tables import Count, as_json, read_table

_WHERE = "ResumableDistributedSampler"


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerState:
    """Position of a sampler: the same on every rank."""

    version: int
    epoch: Count
    position: Count
    """Items of the epoch that all ranks together have drawn."""
    seed: int
    shuffle: bool
    samples: int
    data: str
    """Fingerprint of the dataset; empty if it has none."""


class ResumableDistributedSampler(ResumableSampler):
    """Every item once per epoch, assigned to the ranks in turn, in a new order in each epoch.

    A pass starts at item `start_iter` of this rank in `start_epoch` and ends with the epoch; the next pass is the
    next epoch. `start_iter` counts within the epoch, or, as AstrAI's trainers do, from the first epoch on. An
    unfinished pass starts again at the same item. If the ranks cannot share an epoch evenly, its first items are
    repeated to fill it up, or, with `drop_last`, its last ones are left out.

    Rank and number of ranks are those of `replica`, otherwise of `process_group`, of torch.distributed, or of RANK
    and WORLD_SIZE; the default is 0 of 1.
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
        refuse_unknown(type(self), unknown)
        rank, num_replicas = (None, None) if replica is None else replica
        super().__init__(
            _WHERE,
            process_group,
            rank=rank,
            num_replicas=num_replicas,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
        )
        self.size = self.num_samples = len(data_source)
        self._data = str(getattr(data_source, "fingerprint", ""))
        self._moves = 0  # number of moves, for a running pass to notice
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
        """Number of items of the epoch that this rank has drawn."""
        return self._position // self.num_replicas

    @property
    def num_samples_per_replica(self) -> int:
        """Number of items of each rank in a whole epoch."""
        return self.rounds(self.size)

    @property
    def total_size(self) -> int:
        """Number of items of all ranks in a whole epoch."""
        return self.num_samples_per_replica * self.num_replicas

    def __len__(self) -> int:
        """Return the number of items of this rank in a pass that starts now."""
        return self.rounds(self.size - self._begin)

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
        epoch, begin = self.epoch, self._begin
        end = begin + len(self) * self.num_replicas
        for number, index in enumerate(self.samples(begin, end, key64("sampler", self.seed, epoch)), 1):
            self._position = begin + number * self.num_replicas
            yield index
        self._go_to(epoch + 1, 0)

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of an epoch; nothing changes if it is the current one."""
        if epoch != self.epoch:
            self._moves += 1
            self._go_to(epoch, 0)

    def state_dict(self) -> dict[str, int | str | bool]:
        """Return the position of the sampler, as JSON: the same on every rank, and valid for any number of ranks.

        It counts the drawn items. A DataLoader with workers draws ahead: set `start_iter` instead, to the number of
        batches that were trained on times the batch size.
        """
        state: dict[str, int | str | bool] = as_json(self._state())
        return state

    def _state(self) -> SamplerState:
        done = not self.rounds(self.size - self._position)
        return SamplerState(
            version=1,
            epoch=self.epoch + done,
            position=0 if done else self._position,
            seed=self.seed,
            shuffle=self.shuffle,
            samples=self.num_samples,
            data=self._data,
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, also in a running pass; a state of other data, seed or shuffle is rejected."""
        way_out = "use a state as state_dict() gave it"
        saved, own = read_table(SamplerState, state, "state", error=ResumeError, way_out=way_out), self._state()
        for key in ("version", "seed", "shuffle", "samples", "data"):
            if getattr(saved, key) != getattr(own, key):
                raise ResumeError(
                    f"{_WHERE}: {key} must be that of the state, {getattr(saved, key)!r}, got "
                    f"{getattr(own, key)!r}; go on with the same data and options, or begin anew"
                )
        if saved.position >= self.num_samples:
            raise ResumeError(
                f"{_WHERE}: position must lie within 0:{self.num_samples}, got {saved.position}; {way_out}"
            )
        self._moves += 1
        done = not self.rounds(self.size - saved.position)
        self._go_to(saved.epoch + done, 0 if done else saved.position)
