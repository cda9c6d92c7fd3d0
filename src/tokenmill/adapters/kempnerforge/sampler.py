"""The order of samples and their assignment to ranks: a keyed permutation that is computed, not stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from msgspec import UNSET, UnsetType

from tokenmill.adapters.kempnerforge.config import AS_SAVED, read_state, warn_of_differences
from tokenmill.adapters.sampling import ResumableSampler
from tokenmill.errors import ConfigError, ResumeError
from tokenmill.fingerprint import key64
from tokenmill.plan.mixture import MAX_TOTAL, Mixture, build_mixture, integer_weights
from tokenmill.plan.permute import permute_all
from tokenmill.tables import MAX_NUMBER, Count, Positive, as_json
from tokenmill.types import Int64Array

BLOCK = 1024
"""Number of indices that are computed together."""
_DIGITS = 12
"""Digits of a weight raised to a power: more would depend on the machine."""
_UNITS = 1 << 20
"""Parts of a row, in which the lead of a source over its share is stored, so that a state stays small."""
_MOST_AHEAD = 2 * _UNITS
"""Maximum lead or lag of a source, per number of sources."""
_TURNS = 1 << 40
"""Size of the range in which the number of a round is shuffled to find the rank that starts it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerState:
    """Identity of the order of a sampler; a state that no loader saved may lack any of it."""

    kind: str | UnsetType = UNSET
    epoch: Count = 0
    seed: int | UnsetType = UNSET
    num_replicas: Positive | UnsetType = UNSET
    rank: Count | UnsetType = UNSET
    shuffle: bool | UnsetType = UNSET
    size: int | UnsetType = UNSET
    drop_last: bool | UnsetType = UNSET
    sizes: tuple[int, ...] | UnsetType = UNSET
    initial_weights: tuple[int, ...] | UnsetType = UNSET
    weighing: Weighing | UnsetType = UNSET
    pending: tuple[Count, ...] | UnsetType = UNSET


class RankSampler(ResumableSampler):
    """Common part of both samplers: epoch, skipped samples, and states."""

    kind: ClassVar[str]
    """Name of the sampler in a state."""
    order_keys: ClassVar[tuple[str, ...]]
    """Entries of a state that decide the order, and must equal those of this sampler."""
    runs_on: ClassVar[bool]
    """Whether positions count through all epochs, so that the rest of one starts the next; otherwise they start at
    0 in each epoch."""
    num_samples: int

    def __init__(
        self, rank: int | None, num_replicas: int | None, *, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        super().__init__(
            "sampler", rank=rank, num_replicas=num_replicas, seed=seed, shuffle=shuffle, drop_last=drop_last
        )
        self.epoch = 0
        self.skip = 0
        """Samples of this rank that the next iteration skips."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration."""
        if not isinstance(epoch, int) or not 0 <= epoch <= MAX_NUMBER:
            raise ConfigError(f"epoch: must lie within 0 and {MAX_NUMBER}, got {epoch!r}; count from 0")
        self.epoch = epoch

    def set_skip(self, skip: int) -> None:
        """Skip the first samples of this rank, in the next iteration only."""
        if not isinstance(skip, int) or not 0 <= skip <= MAX_NUMBER:
            raise ConfigError(f"skip: must be at least 0, got {skip!r}; it counts the samples of this rank")
        self.skip = skip

    def __len__(self) -> int:
        """Return the number of samples per epoch for this rank."""
        return self.num_samples

    def first(self, epoch: int) -> int:
        """Return the position at which an epoch starts."""
        return epoch * self.size if self.runs_on else 0

    def end(self, epoch: int, position: int, places: int) -> int:
        """Return the end of an epoch that continues at `position`: a whole number of rounds later."""
        rest = max(0, self.first(epoch) + self.size - position)
        return position + (rest // places if self.runs_on else self.rounds(rest, places)) * places

    def bounds(self, epoch: int, places: int) -> tuple[int, int]:
        """Return the first and last possible position of an epoch that is assigned in rounds of this size."""
        rest = self.size if self.runs_on else 0
        filled = 0 if self.runs_on or self.drop_last else places - 1
        return max(0, self.first(epoch) - rest), self.first(epoch) + self.size + filled

    def state_dict(self) -> dict[str, Any]:
        """Return the identity of the order; the loader knows the position of an iteration."""
        return {
            "kind": self.kind,
            "epoch": self.epoch,
            "seed": self.seed,
            "num_replicas": self.num_replicas,
            "rank": self.rank,
            "shuffle": self.shuffle,
        }

    def read_state(self, state: object, *, position: int | None = None) -> SamplerState:
        """Return a state; reject one of another order. With a `position`, that of a loader, it must be complete."""
        record = read_state(SamplerState, state, "state" if position is None else "state.sampler")
        own, saved = self.state_dict(), as_json(record)
        for key in ("kind", *self.order_keys):
            if (position is not None or key in saved) and saved.get(key) != own[key]:
                raise ResumeError(
                    f"state: {key} must be that of this sampler, {own[key]!r}, got {saved.get(key)!r}; "
                    "resume with what made it, or start anew"
                )
        return record

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to the epoch of a state; one of another order is rejected, and its rank is ignored."""
        self.epoch = self.read_state(state).epoch


class DistributedSampler(RankSampler):
    """Samples of a dataset in a new order every epoch, so that `drop_last` leaves out other samples each time."""

    kind = "distributed"
    runs_on = False
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
        self.num_samples = self.rounds(self.size)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        skip, self.skip = self.skip, 0
        position = skip * self.num_replicas
        return self.indices(self.epoch, position, self.end(self.epoch, position, self.num_replicas))

    def indices(self, epoch: int, position: int, end: int) -> Iterator[int]:
        """Return the samples of this rank after the first `position` samples of all ranks in an epoch.

        Any position is possible, also one from another number of ranks. Positions after the end of the epoch start
        at its first ones again.
        """
        return self.samples(position, end, key64(self.seed, "sampler", epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the identity of the order; the loader knows the position of an iteration."""
        return {**super().state_dict(), "size": self.size, "drop_last": self.drop_last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore only the epoch; a state of another order logs a warning, because loaders reject it."""
        record = read_state(SamplerState, state)
        saved = as_json(record)
        keys = ("kind", *self.order_keys)
        warn_of_differences("sampler", {key: saved.get(key, UNSET) for key in keys}, self.state_dict())
        self.epoch = record.epoch


@dataclass(frozen=True, kw_only=True)
class Weighing:
    """Whole-number weights of the sources from a position on."""

    start: Count
    weights: tuple[Count, ...]
    """One weight per source; 0 for a source that is not drawn."""
    drawn: tuple[Count, ...]
    """Samples that were drawn from each source before `start`."""
    ahead: tuple[int, ...]
    """Lead of each source over its share at `start`, in parts of a row."""

    def __post_init__(self) -> None:
        lengths = {len(self.weights), len(self.drawn), len(self.ahead)}
        far = max(map(abs, self.ahead), default=0) > _MOST_AHEAD * len(self.weights)
        if len(lengths) > 1 or sum(self.drawn) != self.start or not _is_drawable(self.weights) or far:
            raise ResumeError(
                "state: weighing must have the weights of the sources, what was drawn of each, which is start "
                f"together, and how far each is ahead, got {self}; {AS_SAVED}"
            )

    @property
    def sources(self) -> list[int]:
        """Indices of the sources that are drawn."""
        return [source for source, weight in enumerate(self.weights) if weight]

    @cached_property
    def mixture(self) -> Mixture:
        """Mixture that maps positions to sources."""
        return build_mixture(tuple(weight for weight in self.weights if weight), self._leads)

    @property
    def _leads(self) -> list[Fraction]:
        return [Fraction(self.ahead[source], _UNITS) for source in self.sources]

    def draw(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the source at each position, and the number of its earlier draws in the whole run."""
        local, drawn = self.mixture.draw(positions - self.start)
        sources = np.array(self.sources, np.int64)[local]
        return sources, drawn + np.array(self.drawn, np.int64)[sources]

    def change(self, position: int, weights: Sequence[int]) -> Weighing:
        """Return new weights from a position on; sources that lag behind their share are then drawn first."""
        drawn, ahead = list(self.drawn), list(self.ahead)
        length = position - self.start
        leads = self.mixture.rounded_leads(length, self._leads, _UNITS)
        for source, count, lead in zip(self.sources, self.mixture.counts(length), leads, strict=True):
            drawn[source] += count
            ahead[source] = int(lead * _UNITS)
        return Weighing(start=position, weights=tuple(weights), drawn=tuple(drawn), ahead=tuple(ahead))


def _is_drawable(weights: Sequence[int]) -> bool:
    return 0 < sum(weights) <= MAX_TOTAL


def whole_weights(weights: Sequence[float], temperature: float, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return weights as proportional whole numbers; 0 stays 0 at any temperature.

    >>> whole_weights([0.75, 0.25, 0], 1.0, [9, 9, 9]), whole_weights([16, 1], 2.0, [9, 9])
    ((3, 1, 0), (4, 1))
    """
    if len(weights) != len(sizes):
        raise ConfigError(
            f"weights: must be one for each of {len(sizes)} datasets, got {len(weights)}; add or drop"
        )
    if not 0 < temperature < float("inf"):
        raise ConfigError(f"temperature: must be positive, got {temperature}; leave it out for 1")
    for source, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
        if not 0 <= weight < float("inf") or (weight and not size):
            raise ConfigError(
                f"weights: must be at least 0, and 0 for a dataset without samples, got {weight} for dataset "
                f"{source} with {size} samples; change it"
            )
    most = max(weights, default=0)
    if not most:
        raise ConfigError(f"weights: must leave a dataset to draw from, got {list(weights)}; raise one")
    tempered = weights
    if temperature != 1.0:
        # Relative to the largest, so that no power overflows.
        tempered = [float(f"{(weight / most) ** (1 / temperature):.{_DIGITS}g}") for weight in weights]
    for source, (weight, after) in enumerate(zip(weights, tempered, strict=True)):
        if weight and not after:
            raise ConfigError(
                f"temperature: must leave every dataset its share, got {temperature}, which makes weight {weight} "
                f"of dataset {source} beside {most} nothing; raise temperature, or give that dataset weight 0"
            )
    named = {str(source): weight for source, weight in enumerate(tempered) if weight}
    whole = integer_weights(named)
    return tuple(whole.get(str(source), 0) for source in range(len(weights)))


class MixtureSampler(RankSampler):
    """Samples of several datasets by weight, as one sequence of positions through all epochs.

    After any number of positions, each dataset is within two samples of its share, for any number of ranks. A
    dataset yields each of its samples once, in a new order each time, before it repeats one. The positions of a
    round of R are assigned to the R ranks in turn. Another rank starts each round, so that no rank always gets the
    same dataset.
    """

    kind = "mixture"
    runs_on = True
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
        none = (0,) * len(self.sizes)
        self._weighings = [Weighing(start=0, weights=self._initial, drawn=none, ahead=none)]
        self._pending: tuple[int, ...] | None = None
        if self.num_samples < 1:
            raise ConfigError(
                f"datasets: must have a sample for each of {ranks} ranks, got sizes {self.sizes}; add data"
            )

    @property
    def weights(self) -> tuple[int, ...]:
        """Weights of the next sample, as proportional whole numbers."""
        return self._pending or self._weighings[-1].weights

    @property
    def is_changing(self) -> bool:
        """Whether there are new weights that no sample was drawn with yet."""
        return self._pending is not None

    def update_weights(self, weights: Sequence[float], temperature: float = 1.0) -> None:
        """Use other weights from the next sample on; proportional weights change nothing.

        In a `StatefulDataLoader`, the next batch is the first with the new weights, whatever was read ahead. In a
        plain torch loader, it is the first that was not requested yet.
        """
        whole = whole_weights(weights, temperature, self.sizes)
        self._pending = None if whole == self._weighings[-1].weights else whole

    def begin_change(self, position: int, since: int | None = None) -> None:
        """Apply new weights, if there are any, at a position of the run; later changes are dropped.

        The weights of positions before `since` are dropped too, because these are not drawn again; by default,
        those before `position`.
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
        """Yield the samples of this rank, with new weights as soon as there are any."""
        while position < end:
            if self.is_changing:
                self.begin_change(position, self.first(self.epoch))  # a new iteration starts there
            for index in self._block(position, end):
                yield index
                position += self.num_replicas
                if self.is_changing:
                    break

    def indices(self, epoch: int, position: int, end: int) -> Iterator[int]:  # noqa: ARG002 - one run of places
        """Yield the samples of this rank from one position of the run to another."""
        while position < end:
            block = self._block(position, end)
            yield from block
            position += len(block) * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the identity of the order, and the weights since their last change."""
        state: dict[str, Any] = {
            **super().state_dict(),
            "sizes": list(self.sizes),
            "initial_weights": list(self._initial),
            "weighing": as_json(self._weighings[-1]),
        }
        return state if self._pending is None else {**state, "pending": list(self._pending)}

    def read_state(self, state: object, *, position: int | None = None) -> SamplerState:
        """Return a state; reject one of another order. With a `position`, that of a loader, it must be complete."""
        record = super().read_state(state, position=position)
        weighing, pending, sources = record.weighing, record.pending, len(self.sizes)
        if isinstance(weighing, Weighing) and len(weighing.weights) != sources:
            raise ResumeError(
                f"state: weighing must have weights of {sources} sources, got {len(weighing.weights)}; {AS_SAVED}"
            )
        if not isinstance(pending, UnsetType) and (len(pending) != sources or not _is_drawable(pending)):
            raise ResumeError(f"state: pending must be weights of {sources} sources, got {pending}; {AS_SAVED}")
        if position is not None:
            start = weighing.start if isinstance(weighing, Weighing) else None
            if start is None or start > position:
                raise ResumeError(
                    f"state: weighing must begin by position {position}, got start {start}; {AS_SAVED}"
                )
        return record

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to the epoch and the weights of a state; one of another order is rejected.

        To use other weights than those of the state, call `update_weights` after this.
        """
        record = self.read_state(state)
        if isinstance(record.weighing, Weighing):
            self._weighings = [record.weighing]
            self._pending = None if isinstance(record.pending, UnsetType) else record.pending
        self.epoch = record.epoch

    def _at(self, position: int) -> Weighing:
        """Return the weights at a position."""
        for weighing in reversed(self._weighings):
            if weighing.start <= position:
                return weighing
        raise ConfigError(
            f"sampler: places must not lie before {self._weighings[0].start}, as the weights there "
            f"are not kept, got {position}; load a state to go back, or make a new sampler"
        )

    def _block(self, position: int, end: int) -> list[int]:
        """Return the next samples of this rank, several at a time, all drawn with the same weights."""
        weighing = self._at(position)
        later = [other.start for other in self._weighings if other.start > position]
        # A round in which the weights change has two of them, so it is drawn alone.
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

    def _samples(self, sources: Int64Array, drawn: Int64Array) -> Int64Array:
        """Return the sample of each draw: dataset by dataset, epoch by epoch of each."""
        out = np.empty_like(drawn)
        for source in np.unique(sources).tolist():
            size = self.sizes[source]
            epochs, places = np.divmod(drawn, size)
            for epoch in np.unique(epochs[sources == source]).tolist():
                chosen = (sources == source) & (epochs == epoch)
                local = places[chosen]
                if self.shuffle:
                    # By number, because datasets have no names in this interface.
                    local = permute_all(local, size, np.uint64(key64(self.seed, "dataset", source, epoch)))
                out[chosen] = self.offsets[source] + local
        return out
