"""AstrAI's datasets: windows for seq and sft, records for dpo and grpo; the pipeline that makes their stores."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from operator import index as as_index
from typing import ClassVar

import numpy as np
import torch

from tokenmill.adapters.astrai.store import (
    Store,
    StoreFactory,
    Value,
    detect_format,
    dtype_of,
    refuse_unknown,
)
from tokenmill.errors import ConfigError, PlanError, StoreError
from tokenmill.fingerprint import digest
from tokenmill.store.layout import token_keys
from tokenmill.tables import check_choice, check_positive
from tokenmill.types import TRAINING_TYPES

Item = dict[str, Value]


class BaseDataset(torch.utils.data.Dataset[Item], ABC):
    """Windows of a stream: item i contains the `window_size` values from i * `stride` on, and the next one.

    `storage` is None until `load`. An index outside the dataset is an IndexError.
    """

    required_keys: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        window_size: int | Store = 0,
        stride: int | None = None,
        store: Store | None = None,
        **unknown: object,
    ) -> None:
        """Create a dataset to be loaded later, or one that reads from a store with its sizes as defaults."""
        refuse_unknown(type(self), unknown)
        first = window_size if isinstance(window_size, Store) else store  # AstrAI's newest version has it first
        size = 0 if isinstance(window_size, Store) else window_size
        if first is not None and not size:
            size, stride = first.window_size, first.stride if stride is None else stride
        self.window_size = size
        self.stride = size if stride is None else stride
        self.storage: Store | None = None
        self._check_sizes()
        if first is not None:
            self.bind(first)

    def _check_sizes(self) -> None:
        check_positive(type(self).__name__, "window_size", self.window_size)
        check_positive(type(self).__name__, "stride", self.stride)

    def load(self, load_path: str | os.PathLike[str], storage_type: str | None = None, **options: object) -> None:
        """Open the store at a path; without a storage type, the one of `detect_format`.

        The `options` are those of the store's `load`.
        """
        _refuse_options(self.load, options)
        store = StoreFactory.create(detect_format(load_path) if storage_type is None else storage_type)
        store.load(load_path, **options)  # type: ignore[arg-type]
        self.bind(store)

    def bind(self, store: Store) -> None:
        """Read from a loaded store."""
        missing = [key for key in self.required_keys if key not in store.keys]
        if missing:
            raise StoreError(
                f"{store.path}: {type(self).__name__} must have keys {', '.join(self.required_keys)}, "
                f"got {', '.join(store.keys)}; choose another training type, or prepare the store with them"
            )
        self._check_store(store)
        self.storage = store

    def _check_store(self, store: Store) -> None:
        tokens = store.token_count
        if tokens <= self.window_size:
            raise StoreError(
                f"{store.path}: must have more tokens than window_size, {self.window_size}, got {tokens}; "
                "lower window_size"
            )

    @property
    def store(self) -> Store | None:
        """Alias of `storage`."""
        return self.storage

    @property
    def loaded(self) -> Store:
        """The loaded store."""
        if self.storage is None:
            raise RuntimeError("Store not loaded")
        return self.storage

    @property
    def count(self) -> int:
        """Number of tokens, or of records if items are records; 0 before `load`."""
        return self.token_count

    @property
    def token_count(self) -> int:
        """Number of values of the shortest array of the store."""
        return 0 if self.storage is None else self.storage.token_count

    @property
    def keys(self) -> list[str]:
        """Names of the arrays of the store; none before `load`."""
        return [] if self.storage is None else self.storage.keys

    @property
    def fingerprint(self) -> str:
        """Digest of everything that decides the items."""
        return digest([type(self).__name__, self.window_size, self.stride, self.loaded.fingerprint])

    @property
    def num_unused(self) -> int:
        """Tokens that are not a target of any window: after the last one, or between windows."""
        step = min(self.stride, self.window_size)
        return self.count - 1 - ((len(self) - 1) * step + self.window_size)

    def __len__(self) -> int:
        """Return the number of complete windows, each with a next token; 0 before `load`."""
        return 0 if self.storage is None else (self.count - 1 - self.window_size) // self.stride + 1

    def get_index(self, index: int) -> tuple[int, int]:
        """Return start and end (exclusive) of the input of a window; its targets are one further."""
        (place,) = self._checked([index])
        return place * self.stride, place * self.stride + self.window_size

    def _checked(self, indices: Sequence[int]) -> list[int]:
        size, places = len(self) if self.loaded.keys else 0, [as_index(index) for index in indices]
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
    """Windows for training on every token: `input_ids` and `target_ids`, int64 (window_size,).

    If the store has positions, as AstrAI files may, there are also `position_ids` of the inputs, and a `loss_mask`
    without targets at position 0: no document is trained to predict the start of the next one.
    """

    required_keys: ClassVar[tuple[str, ...]] = ("sequence",)

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        """Return the items of a batch, read together."""
        begins = [place * self.stride for place in self._checked(indices)]
        ids = self.loaded.fetch_windows(begins, self.window_size + 1, "sequence")
        # Copies, so that a write to one does not change the other.
        columns = {"input_ids": ids[:, :-1], "target_ids": ids[:, 1:].clone()}
        if "position_ids" in self.keys:
            positions = self.loaded.fetch_windows(begins, self.window_size + 1, "position_ids")
            columns |= {"position_ids": positions[:, :-1], "loss_mask": positions[:, 1:] != 0}
        return [{name: column[row] for name, column in columns.items()} for row in range(len(begins))]


class SFTDataset(SEQDataset):
    """Windows with `position_ids` of the inputs and `loss_mask` of the targets, int64 and bool (window_size,)."""

    required_keys = ("sequence", "loss_mask", "position_ids")

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        """Return the items of a batch, read together."""
        items = super().__getitems__(indices)
        targets = [place * self.stride + 1 for place in self._checked(indices)]
        masks = self.loaded.fetch_windows(targets, self.window_size, "loss_mask")
        for item, loss_mask in zip(items, masks, strict=True):
            item["loss_mask"] = loss_mask
        return items


def _refuse_options(called: Callable[..., object], options: Mapping[str, object]) -> None:
    """Reject options that no store has for its `load`."""
    known = {name for store in StoreFactory.stores.values() for name in signature(store.load).parameters}
    refuse_unknown(called, {name: value for name, value in options.items() if name not in known})


_BLOCK = 1 << 18
"""Number of records whose lengths are read together."""


class RecordDataset(BaseDataset):
    """Records, one per item, never cut: `window_size` is the maximum length of an array; 0 is no limit."""

    def _check_sizes(self) -> None:
        if self.window_size < 0 or self.stride not in (0, self.window_size):
            raise ConfigError(
                f"{type(self).__name__}: window_size must be at least 0 and stride left out, "
                f"got {self.window_size} and {self.stride}; records are items, whatever their length"
            )

    def _check_store(self, store: Store) -> None:
        if not store.num_records:
            raise StoreError(f"{store.path}: must have records, got none; prepare it from more input")
        if not self.window_size:
            return
        for key in token_keys(self.required_keys):
            longest = _longest(store, key)
            if longest > self.window_size:
                raise StoreError(
                    f"{store.path}: {key} of a record must have at most window_size tokens, {self.window_size}, "
                    f"got {longest}; raise it, give 0 for any length, or prepare with max_seq_len"
                )

    @property
    def count(self) -> int:
        """Number of records; 0 before `load`."""
        return 0 if self.storage is None else self.storage.num_records

    @property
    def num_unused(self) -> int:
        """Always 0: every record is an item."""
        return 0

    def __len__(self) -> int:
        return self.count

    def get_index(self, index: int) -> tuple[int, int]:
        """Return a record and the next one."""
        (place,) = self._checked([index])
        return place, place + 1

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        """Return the items of a batch; their positions are looked up together."""
        return self.loaded.fetch_records(self._checked(indices), self.required_keys)


class DPODataset(RecordDataset):
    """Pairs: `chosen` and `rejected`, int64 (C,) and (R,), with masks of the same shapes, bool."""

    required_keys = tuple(TRAINING_TYPES["dpo"])


class GRPODataset(RecordDataset):
    """Groups: `prompts`, int64 (P,); `responses` and `masks`, G of int64 and bool; `rewards`, float32 (G,)."""

    required_keys = tuple(TRAINING_TYPES["grpo"])


def _longest(store: Store, key: str) -> int:
    opened = store.opened
    axis = opened.axis(key)
    items = int(opened.axes[axis].items[-1])
    blocks = (opened.offsets(axis, begin, min(items, begin + _BLOCK)) for begin in range(0, items, _BLOCK))
    return max((int(np.diff(offsets).max()) for offsets in blocks), default=0)


def dpo_collate_fn(batch: Sequence[Item]) -> dict[str, torch.Tensor]:
    """Return pairs as tensors (B, T), where T is the length of the longest, chosen or rejected.

    Shorter ones are padded with 0, where their mask is false.
    """
    length = max(len(item[key]) for item in batch for key in ("chosen", "rejected"))
    return _collate(batch, dict.fromkeys(TRAINING_TYPES["dpo"], (length,)))


def grpo_collate_fn(batch: Sequence[Item]) -> dict[str, torch.Tensor]:
    """Return groups as tensors: `prompts`, `prompt_mask` (B, P), `responses`, `masks` (B, G, R), `rewards` (B, G).

    P, G and R are the largest of the batch, so no response is left out. Prompts are padded on the left, so that
    they end where responses start; the mask marks their tokens. Missing responses of a smaller group have reward 0
    and a false mask.
    """
    group = max(len(item["responses"]) for item in batch)
    response = max((len(each) for item in batch for each in item["responses"]), default=0)
    prompt = max(len(item["prompts"]) for item in batch)
    shapes: dict[str, tuple[int, ...]] = {
        "prompts": (prompt,),
        "responses": (group, response),
        "masks": (group, response),
        "rewards": (group,),
    }
    out = _collate(batch, shapes)
    lengths = torch.tensor([[len(item["prompts"])] for item in batch])
    prompts = {"prompts": out.pop("prompts"), "prompt_mask": torch.arange(prompt) >= prompt - lengths}
    return prompts | out


def _collate(batch: Sequence[Item], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    out = {}
    for key, shape in shapes.items():
        out[key] = torch.from_numpy(np.zeros((len(batch), *shape), dtype_of(key)))
        for row, item in zip(out[key], batch, strict=True):
            values = item[key]
            # A group of responses is a list; a smaller one leaves lines of zeros.
            for line, value in zip(row, values, strict=False) if isinstance(values, list) else [(row, values)]:
                begin = len(line) - len(value) if key == "prompts" else 0
                line[begin : begin + len(value)] = value
    return out


class DatasetFactory:
    """Datasets by training type."""

    datasets: ClassVar[Mapping[str, type[BaseDataset]]] = {
        "seq": SEQDataset,
        "sft": SFTDataset,
        "dpo": DPODataset,
        "grpo": GRPODataset,
    }

    @classmethod
    def create(
        cls,
        train_type: str,
        window_size: int | Store = 0,
        stride: int | None = None,
        store: Store | None = None,
        **unknown: object,
    ) -> BaseDataset:
        """Return a dataset to be loaded later, or one that reads from a store."""
        check_choice("DatasetFactory", "train_type", train_type, tuple(cls.datasets))
        refuse_unknown(cls.create, unknown)
        return cls.datasets[train_type](window_size, stride, store)

    @classmethod
    def load(
        cls,
        train_type: str,
        load_path: str | os.PathLike[str] | None = None,
        window_size: int = 0,
        stride: int | None = None,
        storage_type: str | None = None,
        tokenizer_path: str | os.PathLike[str] | None = None,
        max_len: int = 2048,
        store: Store | None = None,
        **options: object,
    ) -> BaseDataset:
        """Open a store as a dataset, or use an open one: `train_type` is seq, sft, dpo or grpo.

        `window_size` is the longest input, and `stride` the distance between windows, by default the same. Records
        in `.jsonl` files are first prepared into a store, once, with `tokenizer_path` and `max_len` of a record.
        The other `options` are those of the store's `load`, such as `share_memory`.
        """
        _refuse_options(cls.load, options)
        if store is not None:
            return cls.create(train_type, window_size, stride, store)
        if load_path is None:
            raise ConfigError("DatasetFactory.load: load_path or store must be given, got neither; name a store")
        dataset = cls.create(train_type, window_size, stride)
        storage_type = detect_format(load_path) if storage_type is None else storage_type
        if storage_type == "jsonl":
            options |= {"tokenizer_path": tokenizer_path, "max_len": max_len, "train_type": train_type}
        dataset.load(load_path, storage_type, **options)
        return dataset

    @classmethod
    def from_store(
        cls, train_type: str, store: Store, window_size: int = 0, stride: int | None = None
    ) -> BaseDataset:
        """Return a dataset that reads from a loaded store."""
        return cls.create(train_type, window_size, stride, store)
