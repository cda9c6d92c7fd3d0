"""AstrAI's datasets of windows: seq and sft."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import index as whole
from typing import ClassVar

import torch

from tokenmill.adapters.astrai.formats import detect_format, refuse_unknown
from tokenmill.adapters.astrai.store import Store, StoreFactory, Value
from tokenmill.checks import check_positive
from tokenmill.errors import PlanError, StoreError
from tokenmill.fingerprint import digest

Item = dict[str, Value]


class BaseDataset(torch.utils.data.Dataset[Item], ABC):
    """Windows of a stream: item i is made of the `window_size` values from i * `stride` on, and of the next one.

    `storage` is None until `load`. An index outside the dataset is an IndexError.
    """

    required_keys: ClassVar[tuple[str, ...]] = ()

    def __init__(self, window_size: int, stride: int | None = None, **unknown: object) -> None:
        refuse_unknown(type(self).__name__, unknown, ("window_size", "stride"))
        self.window_size = window_size
        self.stride = window_size if stride is None else stride
        self.storage: Store | None = None
        self._check_sizes()

    def _check_sizes(self) -> None:
        check_positive(type(self).__name__, "window_size", self.window_size)
        check_positive(type(self).__name__, "stride", self.stride)

    def load(self, load_path: str | os.PathLike[str], storage_type: str | None = None, **unknown: object) -> None:
        """Open the store at a path; without a storage type, the one that `detect_format` names."""
        refuse_unknown(f"{type(self).__name__}.load", unknown, ("load_path", "storage_type"))
        store = StoreFactory.create(detect_format(load_path) if storage_type is None else storage_type)
        store.load(load_path)
        missing = [key for key in self.required_keys if key not in store.keys]
        if missing:
            raise StoreError(
                f"{load_path}: {type(self).__name__} must have keys {', '.join(self.required_keys)}, "
                f"got {', '.join(store.keys)}; choose another training type, or prepare the store with them"
            )
        self._check_store(load_path, store)
        self.storage = store

    def _check_store(self, load_path: str | os.PathLike[str], store: Store) -> None:
        if len(store) <= self.window_size:
            raise StoreError(
                f"{load_path}: must have more tokens than window_size, {self.window_size}, got {len(store)}; "
                "lower window_size"
            )

    @property
    def loaded(self) -> Store:
        """The store that was loaded."""
        if self.storage is None:
            raise RuntimeError("Store not loaded")
        return self.storage

    @property
    def count(self) -> int:
        """Number of tokens, or of records where items are records."""
        return len(self.loaded)

    @property
    def keys(self) -> list[str]:
        """Names of the arrays of the store."""
        return self.loaded.keys

    @property
    def fingerprint(self) -> str:
        """Digest of what the items are."""
        return digest([type(self).__name__, self.window_size, self.stride, self.loaded.fingerprint])

    @property
    def num_unused(self) -> int:
        """Tokens that are no target of any window: behind the last one, or between windows."""
        step = min(self.stride, self.window_size)
        return self.count - 1 - ((len(self) - 1) * step + self.window_size)

    def __len__(self) -> int:
        """Return the number of windows that fit whole, each with a next token."""
        return (self.count - 1 - self.window_size) // self.stride + 1

    def get_index(self, index: int) -> tuple[int, int]:
        """Return where the input of a window begins and ends (exclusive); its targets are one further."""
        (place,) = self._checked([index])
        return place * self.stride, place * self.stride + self.window_size

    def _checked(self, indices: Sequence[int]) -> list[int]:
        size, places = len(self), [whole(index) for index in indices]
        for place in places:
            if not 0 <= place < size:
                raise PlanError(
                    f"{type(self).__name__}: an index must lie within 0:{size}, got {place}; count from 0"
                )
        return places

    def __getitem__(self, index: int) -> Item:
        return self.__getitems__([index])[0]

    @abstractmethod
    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        """Return the items of a batch, read together."""


class SEQDataset(BaseDataset):
    """Windows for training on every token: `input_ids` and `target_ids`, int64 (window_size,)."""

    required_keys: ClassVar[tuple[str, ...]] = ("sequence",)

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        """Return the items of a batch, read together."""
        begins = [place * self.stride for place in self._checked(indices)]
        ids = self.loaded.fetch_windows(begins, self.window_size + 1, "sequence")
        # A copy, so that neither sees what is written to the other.
        pairs = zip(ids[:, :-1], ids[:, 1:].clone(), strict=True)
        return [{"input_ids": inputs, "target_ids": targets} for inputs, targets in pairs]


class SFTDataset(SEQDataset):
    """Windows with `position_ids` of the inputs and `loss_mask` of the targets, int64 and bool (window_size,)."""

    required_keys = ("sequence", "loss_mask", "position_ids")

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        """Return the items of a batch, read together."""
        items = super().__getitems__(indices)
        begins = [place * self.stride for place in self._checked(indices)]
        positions = self.loaded.fetch_windows(begins, self.window_size, "position_ids")
        masks = self.loaded.fetch_windows([begin + 1 for begin in begins], self.window_size, "loss_mask")
        for item, position_ids, loss_mask in zip(items, positions, masks, strict=True):
            item |= {"position_ids": position_ids, "loss_mask": loss_mask}
        return items
