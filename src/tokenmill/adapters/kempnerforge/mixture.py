"""The order of samples of several datasets by their weights, dealt to ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.adapters.kempnerforge.samplers import BLOCK, RankSampler
from tokenmill.adapters.kempnerforge.state import EDITED, read_count
from tokenmill.adapters.kempnerforge.weights import (
    Weighing,
    first_weighing,
    weighing_of,
    weights_of,
    whole_weights,
)
from tokenmill.errors import ConfigError, ResumeError
from tokenmill.fingerprint import key64
from tokenmill.plan.permute import permute_all

if TYPE_CHECKING:
    import numpy.typing as npt

_TURNS = 1 << 40
"""Among so many numbers that of a round is shuffled to find who begins it."""


class MixtureSampler(RankSampler):
    """Samples of several datasets by weight, as one run of places that goes on through all epochs.

    After any number of places each dataset is within two samples of its share, whatever the number of ranks. A
    dataset gives each of its samples once, in a new order each time, before it gives one again. The places of a
    round of R go to the R ranks in turn, and another rank begins each round, so that none always gets one dataset.
    """

    kind = "mixture"
    order_keys = ("seed", "sizes", "shuffle", "initial_weights")

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
        super().__init__(rank, num_replicas, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self.sizes = [end - begin for begin, end in pairwise(cumulative_sizes)]
        if list(cumulative_sizes[:1]) != [0] or min(self.sizes, default=0) < 0:
            raise ConfigError(
                f"cumulative_sizes: must begin with 0 and never fall, got {list(cumulative_sizes)}; give those "
                "of a MixtureDataset"
            )
        self.offsets = list(cumulative_sizes[:-1])
        self.size = sum(self.sizes)
        ranks = self.num_replicas
        self.num_samples = sum(size // ranks if drop_last else -(-size // ranks) for size in self.sizes)
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

    def begin_change(self, position: int, since: int | None = None) -> None:
        """Let new weights, if there are any, begin at a place of the run; what was decided for later is dropped.

        So are the weights of places before `since`, which nobody can ask for again; None: before `position`.
        """
        pending, self._pending = self._pending, None
        last = self._at(position)
        kept = [weighing for weighing in self._weighings if weighing.start <= position]
        if pending is not None and pending != last.weights:
            kept = [weighing for weighing in kept if weighing.start < position]
            kept.append(last.change(position, pending))
        begun = sum(weighing.start <= (position if since is None else since) for weighing in kept)
        self._weighings = kept[max(0, begun - 1) :]

    def __iter__(self) -> Iterator[int]:
        skip, self.skip = self.skip, 0
        begin = self.first(self.epoch) + skip * self.num_replicas
        return self._drawing(begin, self.first(self.epoch) + self.num_samples * self.num_replicas)

    def _drawing(self, position: int, end: int) -> Iterator[int]:
        """Yield the samples of this rank, by new weights as soon as there are any."""
        while position < end:
            if self.is_changing:
                self.begin_change(position, self.first(self.epoch))  # who iterates again begins there
            for index in self._block(position, end):
                yield index
                position += self.num_replicas
                if self.is_changing:
                    break

    def indices(self, epoch: int, position: int, end: int) -> Iterator[int]:  # noqa: ARG002 - one run of places
        """Yield what this rank takes from a place of the run on, up to another."""
        while position < end:
            block = self._block(position, end)
            yield from block
            position += len(block) * self.num_replicas

    def first(self, epoch: int) -> int:
        """Return the place at which an epoch begins."""
        return epoch * self.size

    def end(self, epoch: int, position: int, places: int) -> int:
        """Return where an epoch ends that goes on at `position`: a whole number of rounds of so many places on."""
        return position + max(0, self.first(epoch + 1) - position) // places * places

    def after(self, epoch: int, position: int) -> int:  # noqa: ARG002 - another sampler begins every epoch anew
        """Return where the epoch after one begins that has ended at `position`: there, as nothing is lost."""
        return position

    def bounds(self, epoch: int, places: int) -> tuple[int, int]:  # noqa: ARG002 - others fill up a round
        """Return the first and last place at which an epoch can stand: it begins with the rest of the last one."""
        return max(0, self.first(epoch - 1)), self.first(epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return which order this is, and the weights since they last changed."""
        state: dict[str, Any] = {
            **super().state_dict(),
            "sizes": list(self.sizes),
            "initial_weights": list(self._initial),
            "weighing": self._weighings[-1].to_json(),
        }
        return state if self._pending is None else {**state, "pending": list(self._pending)}

    def check_state(self, state: Mapping[str, Any], *, position: int | None = None) -> None:
        """Refuse a state of another order; that of a loader, at a `position`, must say all that decides it."""
        super().check_state(state, position=position)
        if position is not None or "weighing" in state:
            start = weighing_of(state.get("weighing"), len(self.sizes)).start
            if position is not None and start > position:
                raise ResumeError(f"state: weights must begin by position {position}, got start {start}; {EDITED}")
        if "pending" in state:
            weights_of(state["pending"], len(self.sizes))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the epoch and the weights of a state; one of another order is refused.

        Who wants other weights than the run began with says so by `update_weights`, after this.
        """
        self.check_state(state)
        if "weighing" in state:
            self._weighings = [weighing_of(state["weighing"], len(self.sizes))]
            self._pending = weights_of(state["pending"], len(self.sizes)) if "pending" in state else None
        self.epoch = read_count(state, "epoch", default=0)

    def _at(self, position: int) -> Weighing:
        """Return the weights of a place."""
        for weighing in reversed(self._weighings):
            if weighing.start <= position:
                return weighing
        raise ConfigError(
            f"sampler: places must not lie before {self._weighings[0].start}, as the weights there "
            f"are not kept, got {position}; load a state to go back, or make a new sampler"
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
