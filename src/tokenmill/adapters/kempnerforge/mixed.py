"""Several datasets as one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset

from tokenmill.adapters.kempnerforge.chunks import Sample
from tokenmill.adapters.kempnerforge.state import check_mapping
from tokenmill.errors import ConfigError, PlanError
from tokenmill.fingerprint import digest


class MapStyle(Protocol):
    """What is asked of a dataset that is mixed with others."""

    def __len__(self) -> int:
        """Return how many samples there are."""
        ...

    def __getitem__(self, index: int) -> Sample:
        """Return a sample."""
        ...


class MixtureDataset(Dataset[Sample]):
    """Several datasets one behind the other; each sample says by `dataset_idx` which it is of."""

    def __init__(self, datasets: Sequence[MapStyle], names: Sequence[str]) -> None:
        if len(datasets) != len(names) or not datasets:
            raise ConfigError(
                f"datasets: must be at least one, with a name each, got {len(datasets)} with {len(names)} names; "
                "give as many"
            )
        self.datasets = tuple(datasets)
        self.names = tuple(names)
        self.begins = [0, *accumulate(len(dataset) for dataset in datasets)]

    @property
    def cumulative_sizes(self) -> list[int]:
        """First sample of each dataset, and the end of the last."""
        return list(self.begins)

    @property
    def dataset_names(self) -> list[str]:
        """What the datasets are called."""
        return list(self.names)

    @property
    def fingerprint(self) -> str:
        """Digest of what decides every sample, as far as the datasets say it."""
        return digest([getattr(dataset, "fingerprint", len(dataset)) for dataset in self.datasets])

    def __len__(self) -> int:
        """Return how many samples all datasets have together."""
        return self.begins[-1]

    def __getitem__(self, index: int) -> Sample:
        """Return one sample."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Return the samples of a batch; those of one dataset are read together if it can."""
        places: dict[int, list[int]] = {}
        for place, index in enumerate(indices):
            if not 0 <= index < len(self):
                raise PlanError(f"dataset: samples must lie within 0:{len(self)}, got {index}; count from 0")
            places.setdefault(bisect_right(self.begins, index) - 1, []).append(place)
        found: dict[int, Sample] = {}
        for number, here in places.items():
            wanted = [indices[place] - self.begins[number] for place in here]
            for place, sample in zip(here, _read(self.datasets[number], wanted), strict=True):
                found[place] = {**sample, "dataset_idx": torch.tensor(number)}
        return [found[place] for place in range(len(indices))]

    def mark(self, epoch: int, sample_idx: int) -> None:
        """Note where a loader stands, for the states of the datasets."""
        for dataset in self.datasets:
            if hasattr(dataset, "mark"):
                dataset.mark(epoch, sample_idx)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the datasets that have one."""
        return {
            f"dataset_{number}": dataset.state_dict()
            for number, dataset in enumerate(self.datasets)
            if hasattr(dataset, "state_dict")
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hand the datasets their states."""
        check_mapping(state)
        for number, dataset in enumerate(self.datasets):
            if f"dataset_{number}" in state and hasattr(dataset, "load_state_dict"):
                dataset.load_state_dict(state[f"dataset_{number}"])


def _read(dataset: MapStyle, indices: list[int]) -> list[Sample]:
    if hasattr(dataset, "__getitems__"):
        samples: list[Sample] = dataset.__getitems__(indices)
        return samples
    return [dataset[index] for index in indices]
