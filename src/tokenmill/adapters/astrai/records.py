"""AstrAI's datasets of records: pairs for dpo, groups for grpo."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from tokenmill.adapters.astrai.dataset import BaseDataset, Item
from tokenmill.adapters.astrai.store import Store
from tokenmill.errors import ConfigError, StoreError
from tokenmill.store.layout import token_keys

_BLOCK = 1 << 18
"""Records whose lengths are looked at together."""


class RecordDataset(BaseDataset):
    """Records, each an item, never cut: `window_size` is the longest that an array of a record may be; 0: any."""

    def __init__(self, window_size: int = 0, stride: int | None = None, **unknown: object) -> None:
        super().__init__(window_size, stride, **unknown)

    def _check_sizes(self) -> None:
        if self.window_size < 0 or self.stride not in (0, self.window_size):
            raise ConfigError(
                f"{type(self).__name__}: window_size must be at least 0 and stride left out, "
                f"got {self.window_size} and {self.stride}; records are items, whatever their length"
            )

    def _check_store(self, load_path: str | os.PathLike[str], store: Store) -> None:
        if not store.num_records:
            raise StoreError(f"{load_path}: must have records, got none; prepare it from more input")
        if not self.window_size:
            return
        for key in token_keys(self.required_keys):
            longest = _longest(store, key)
            if longest > self.window_size:
                raise StoreError(
                    f"{load_path}: {key} of a record must have at most window_size tokens, {self.window_size}, "
                    f"got {longest}; raise it, give 0 for any length, or prepare with max_seq_len"
                )

    @property
    def count(self) -> int:
        """Number of records."""
        return self.loaded.num_records

    @property
    def num_unused(self) -> int:
        """Always 0: every record is an item."""
        return 0

    def __len__(self) -> int:
        return self.count

    def get_index(self, index: int) -> tuple[int, int]:
        """Return a record and the one behind it."""
        (place,) = self._checked([index])
        return place, place + 1

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        """Return the items of a batch; where they are is found for all at once."""
        return self.loaded.fetch_records(self._checked(indices), self.required_keys)


class DPODataset(RecordDataset):
    """Pairs: `chosen` and `rejected`, int64 (C,) and (R,), with masks of the same shapes, bool."""

    required_keys = ("chosen", "rejected", "chosen_mask", "rejected_mask")


class GRPODataset(RecordDataset):
    """Groups: `prompts`, int64 (P,); `responses` and `masks`, G of int64 and bool; `rewards`, float32 (G,)."""

    required_keys = ("prompts", "responses", "masks", "rewards")


def _longest(store: Store, key: str) -> int:
    opened = store.opened
    axis = opened.axis(key)
    items = int(opened.axes[axis].items[-1])
    blocks = (opened.offsets(axis, begin, min(items, begin + _BLOCK)) for begin in range(0, items, _BLOCK))
    return max((int(np.diff(offsets).max()) for offsets in blocks), default=0)
