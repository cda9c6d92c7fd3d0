"""The order of samples of several datasets by their weights, dealt to ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Sampler

from tokenmill.adapters.kempnerforge.ranks import find_rank
from tokenmill.adapters.kempnerforge.samplers import BLOCK, check_same, checked_skip
from tokenmill.adapters.kempnerforge.weights import Weighing, first_weighing, weighing_of, whole_weights
from tokenmill.checks import check_seed
from tokenmill.errors import ConfigError
from tokenmill.fingerprint import key64
from tokenmill.plan.permute import permute_all

if TYPE_CHECKING:
    import numpy.typing as npt

_TURNS = 1 << 40
"""Among so many numbers that of a round is shuffled to find who begins it."""


class MixtureSampler(Sampler[int]):
    """Samples of several datasets by weight, as one run of places that goes on through all epochs.

    After any number of places each dataset is within two samples of its share, whatever the number of ranks. A
    dataset gives each of its samples once, in a new order each time, before it gives one again. The places of a
    round of R go to the R ranks in turn, and another rank begins each round, so that none always gets one dataset.
    """

    def __init__(
        self,
        cumulative_sizes: Sequence[int],
        weights: Sequence[float],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        temperature: float = 1.0,
    ) -> None:
        self.rank, self.num_replicas = find_rank(rank, num_replicas)
        check_seed("sampler", seed)
        self.sizes = [end - begin for begin, end in pairwise(cumulative_sizes)]
        self.offsets = list(cumulative_sizes[:-1])
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        ranks = self.num_replicas
        self.num_samples = sum(size // ranks if drop_last else -(-size // ranks) for size in self.sizes)
        self.epoch = 0
        self.skip = 0
        self._initial = whole_weights(weights, temperature, self.sizes)
        self._weighings = [first_weighing(self._initial)]
        self._pending: tuple[int, ...] | None = None
        if self.num_samples < 1:
            raise ConfigError(
                f"datasets: must have a sample for each of {ranks} ranks, got sizes {self.sizes}; add data"
            )

    @property
    def weights(self) -> tuple[int, ...]:
        """The weights of the next sample, as whole numbers in proportion."""
        return self._pending or self._weighings[-1].weights

    @property
    def is_changing(self) -> bool:
        """Whether there are new weights that no sample was drawn by yet."""
        return self._pending is not None

    def update_weights(self, weights: Sequence[float], temperature: float = 1.0) -> None:
        """Draw by other weights from the next sample on; the same ones in proportion change nothing.

        In a `StatefulDataLoader` the next batch is the first, whatever was read ahead. In a plain loader of torch
        it is the first that was not asked for yet.
        """
        whole = whole_weights(weights, temperature, self.sizes)
        self._pending = None if whole == self._weighings[-1].weights else whole

    def begin_change(self, position: int) -> None:
        """Let new weights, if there are any, begin at a place of the run; what was decided for later is dropped."""
        pending, self._pending = self._pending, None
        last = self._at(position)
        kept = [weighing for weighing in self._weighings if weighing.start <= position]
        if pending is not None and pending != last.weights:
            kept = [weighing for weighing in kept if weighing.start < position]
            kept.append(last.change(position, pending))
        self._weighings = kept

    def set_epoch(self, epoch: int) -> None:
        """Choose the part of the run that the next iteration goes through."""
        self.epoch = epoch

    def set_skip(self, skip: int) -> None:
        """Leave out the first samples of this rank, in the next iteration alone."""
        self.skip = checked_skip(skip)

    def __len__(self) -> int:
        """Return how many samples an epoch has for this rank."""
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        skip, self.skip = self.skip, 0
        begin = self.first(self.epoch) + skip * self.num_replicas
        return self._drawing(begin, self.first(self.epoch) + self.num_samples * self.num_replicas)

    def _drawing(self, position: int, end: int) -> Iterator[int]:
        """Yield the samples of this rank, by new weights as soon as there are any."""
        while position < end:
            if self.is_changing:
                self.begin_change(position)
            for index in self._block(position, end):
                yield index
                position += self.num_replicas
                if self.is_changing:
                    break

    def indices(self, epoch: int, position: int) -> Iterator[int]:
        """Yield what this rank takes of an epoch from a place of the run on."""
        end = self.end(epoch, position)
        while position < end:
            block = self._block(position, end)
            yield from block
            position += len(block) * self.num_replicas

    def first(self, epoch: int) -> int:
        """Return the place at which an epoch begins."""
        return epoch * sum(self.sizes)

    def end(self, epoch: int, position: int) -> int:
        """Return where an epoch ends that goes on at `position`: a whole number of rounds from there."""
        rest = max(0, self.first(epoch + 1) - position)
        return position + rest // self.num_replicas * self.num_replicas

    def after(self, epoch: int, position: int) -> int:  # noqa: ARG002 - another sampler begins every epoch anew
        """Return where the epoch after one begins that has ended at `position`: there, as nothing is lost."""
        return position

    def state_dict(self) -> dict[str, Any]:
        """Return which order this is, and the weights since they last changed."""
        state: dict[str, Any] = {
            "epoch": self.epoch,
            "seed": self.seed,
            "num_replicas": self.num_replicas,
            "rank": self.rank,
            "sizes": list(self.sizes),
            "shuffle": self.shuffle,
            "initial_weights": list(self._initial),
            "weighing": self._weighings[-1].to_json(),
        }
        return state if self._pending is None else {**state, "pending": list(self._pending)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the epoch and the weights of a state; one of another order is refused.

        Who wants other weights than the run began with says so by `update_weights`, after this.
        """
        check_same(state, self.state_dict(), ("seed", "sizes", "shuffle", "initial_weights"))
        if "weighing" in state:
            held = weighing_of(state["weighing"], len(self.sizes))
            pending = {**held.to_json(), "weights": state.get("pending", list(held.weights))}
            self._pending = weighing_of(pending, len(self.sizes)).weights if "pending" in state else None
            self._weighings = [held]
        self.epoch = int(state.get("epoch", 0))

    def _at(self, position: int) -> Weighing:
        """Return the weights of a place."""
        for weighing in reversed(self._weighings):
            if weighing.start <= position:
                return weighing
        raise ConfigError(
            f"sampler: places must not lie before {self._weighings[0].start}, as the state that was loaded does "
            f"not say the weights there, got {position}; make a new sampler to go back"
        )

    def _block(self, position: int, end: int) -> list[int]:
        """Return the next samples of this rank, some at a time, all drawn by the same weights."""
        weighing = self._at(position)
        later = [other.start for other in self._weighings if other.start > position]
        # A round in which the weights change has two of them: it is drawn alone.
        stop = min(end, position + BLOCK * self.num_replicas, *later) if later else end
        rounds = max(1, min(BLOCK, (stop - position) // self.num_replicas))
        begins = position + self.num_replicas * np.arange(rounds, dtype=np.int64)
        turns = permute_all(begins % _TURNS, _TURNS, np.uint64(key64(self.seed, "turns")))
        places = begins + (turns + self.rank) % self.num_replicas
        if rounds == 1:
            weighing = self._at(int(places[0]))
        sources, drawn = weighing.draw(places)
        samples: list[int] = self._samples(sources, drawn).tolist()
        return samples

    def _samples(self, sources: npt.NDArray[np.int64], drawn: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the sample of each draw: dataset by dataset, epoch by epoch of each."""
        out = np.empty_like(drawn)
        for source in np.unique(sources).tolist():
            size = self.sizes[source]
            epochs, places = np.divmod(drawn, size)
            for epoch in np.unique(epochs[sources == source]).tolist():
                chosen = (sources == source) & (epochs == epoch)
                local = places[chosen]
                if self.shuffle:
                    # By number, as this interface gives datasets no names.
                    local = permute_all(local, size, np.uint64(key64(self.seed, "dataset", source, epoch)))
                out[chosen] = self.offsets[source] + local
        return out
