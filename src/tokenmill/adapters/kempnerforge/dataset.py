"""Datasets: token files and Hugging Face text with a sample for every index, and endless text."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from msgspec import UNSET, UnsetType
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from tokenmill.adapters import ENDLESS
from tokenmill.adapters.kempnerforge.config import AS_SAVED, read_state, warn_of_differences
from tokenmill.adapters.torch import find_rank, read_windows, to_torch
from tokenmill.build.cached import cached_store
from tokenmill.config.dialects import hub_name
from tokenmill.errors import ConfigError, PlanError, ResumeError, StoreMissingError
from tokenmill.fingerprint import digest
from tokenmill.live import LiveLoader, LiveOptions, open_live
from tokenmill.loader import IGNORE, LoaderOptions
from tokenmill.loader.buffers import BufferPool
from tokenmill.packing.stored import LOSS_MASK
from tokenmill.store import Store, open_store
from tokenmill.store.foreign.files import memmap_tokens
from tokenmill.store.layout import is_ours
from tokenmill.store.maps import MapCache
from tokenmill.tables import Count
from tokenmill.types import AnyArray

Sample = dict[str, torch.Tensor]
CACHE_DIR = ".tokenmill/stores"
"""Default folder for tokenized text: that of a run whose config is in this folder."""
DTYPE_VARIABLE = "TOKENMILL_DTYPE"
"""Environment variable with the dtype of .bin files, for callers without an argument, such as KempnerForge's loop.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetState:
    """Identity of the samples of a dataset, and the position of a loader; missing values are not compared."""

    epoch: Count = 0
    sample_idx: Count = 0
    total_samples: int | UnsetType = UNSET
    total_sequences: int | UnsetType = UNSET
    fingerprint: str | UnsetType = UNSET


class Chunked(Dataset[Sample]):
    """Samples of `length` consecutive tokens of some stores; no sample crosses the end of a store.

    With an `eos_id`, which ends documents, documents are distinguished.
    """

    def __init__(self, open_stores: Callable[[], list[Store]], *, length: int, eos_id: int | None) -> None:
        """Take samples from some stores, which workers open again; a sample has one token more than inputs."""
        if length < 2:
            raise ConfigError(f"seq_len: a sample must have at least 2 tokens, got {length}; raise it")
        self._open_stores = open_stores
        self.stores = open_stores()
        for store in self.stores:
            bound = 1 << 8 * store.dtype(store.manifest.token_key).itemsize
            if eos_id is not None and not 0 <= eos_id < bound:
                raise ConfigError(
                    f"{store.path}: eos_token_id must be an id that its dtype can hold, below {bound}, "
                    f"got {eos_id}; give that of the tokenizer"
                )
        self.length = length
        self.eos_id = eos_id
        self.epoch = 0
        self.sample_idx = 0
        self.begins = [0, *accumulate(store.num_tokens // length for store in self.stores)]
        """First sample of each store, and the end of the last."""
        self._pools: dict[int, BufferPool] = {}

    def __getstate__(self) -> dict[str, Any]:
        # For worker processes that are not forked: they open the files again.
        return {**self.__dict__, "stores": bool(self.stores), "_pools": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.stores = self._open_stores() if self.stores else []

    @cached_property
    def fingerprint(self) -> str:
        """Digest of everything that decides the samples."""
        return digest([[store.fingerprint for store in self.stores], self.length, self.eos_id])

    @property
    def num_unused_tokens(self) -> int:
        """Tokens after the last complete sample of each store, which are in no sample."""
        return sum(store.num_tokens % self.length for store in self.stores)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.begins[-1]

    def __getitem__(self, index: int) -> Sample:
        """Return one sample."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Return the samples of a batch, read together; their tensors are parts of one block each."""
        out = {name: array[: len(indices)] for name, array in self._pool(len(indices)).batch().items()}
        inputs, labels = out["input_ids"], out["labels"]
        for number, rows in _by_part(indices, self.begins).items():
            store = self.stores[number]
            begins = [(indices[row] - self.begins[number]) * self.length for row in rows]
            for index, tokens in read_windows(store, store.manifest.token_key, begins, self.length):
                inputs[rows[index]], labels[rows[index]] = tokens[:-1], tokens[1:]
            if LOSS_MASK in store.keys:
                for index, mask in read_windows(store, LOSS_MASK, begins, self.length):
                    labels[rows[index]][mask[1:] == 0] = IGNORE
        if self.eos_id is not None:
            ends = inputs == self.eos_id
            # EOS is the last token of its document, so it has no next token to predict.
            labels[ends] = IGNORE
            np.cumsum(ends, axis=1, out=out["doc_ids"])
            out["doc_ids"] -= ends
        lines = zip(*(torch.from_numpy(array).unbind() for array in out.values()), strict=True)
        return [dict(zip(out, line, strict=True)) for line in lines]

    def _pool(self, rows: int) -> BufferPool:
        """Return memory for at least this number of samples; it is used again when no sample refers to it.

        The size is the next power of two, because a mixture requests another number each time, and would need a
        pool for each.
        """
        rows = 1 << max(0, rows - 1).bit_length()
        if rows not in self._pools:
            names = ("input_ids", "labels") if self.eos_id is None else ("input_ids", "labels", "doc_ids")
            self._pools[rows] = BufferPool(dict.fromkeys(names, ((rows, self.length - 1), np.int64)))
        return self._pools[rows]

    def mark(self, epoch: int, sample_idx: int) -> None:
        """Record the position of a loader, for the state."""
        self.epoch, self.sample_idx = epoch, sample_idx

    def state_dict(self) -> dict[str, Any]:
        """Return the position of a loader, and the identity of the samples."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a dataset; a state of other samples logs a warning, because loaders reject it."""
        record = read_state(DatasetState, state)
        saved = {key: getattr(record, key) for key in ("total_samples", "total_sequences", "fingerprint")}
        warn_of_differences("dataset", saved, self.state_dict())
        self.mark(record.epoch, self._restored(record))

    def _restored(self, _: DatasetState) -> int:
        """Return the sample after loading a state; only the epoch is restored, unless a subclass restores more."""
        return self.sample_idx


def _by_part(indices: Sequence[int], begins: Sequence[int]) -> dict[int, list[int]]:
    """Return the parts of some samples: part -> positions among the indices."""
    places: dict[int, list[int]] = {}
    for place, index in enumerate(indices):
        if not 0 <= index < begins[-1]:
            raise PlanError(f"dataset: samples must lie within 0:{begins[-1]}, got {index}; count from 0")
        places.setdefault(bisect_right(begins, index) - 1, []).append(place)
    return places


class MemoryMappedDataset(Chunked):
    """Token files as samples of `seq_len` tokens, which are `seq_len` - 1 inputs with their labels.

    Files are read in the order of their names. The tokens after the last complete sample of each file are not used;
    `num_unused_tokens` is their number. Files without a header need `dtype`, or a `vocab_size` that determines it,
    or the environment variable TOKENMILL_DTYPE. With `pack_sequences`, the label of EOS is -100, and `doc_ids`
    count documents from 0 in each sample.
    """

    def __init__(
        self,
        data_dir: str,
        seq_len: int,
        file_pattern: str = "*.npy",
        pack_sequences: bool = False,
        eos_token_id: int | None = None,
        *,
        dtype: str | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.seq_len = seq_len
        open_files = partial(_open_files, str(data_dir), file_pattern, dtype=dtype, vocab_size=vocab_size)
        super().__init__(open_files, length=seq_len, eos_id=eos_token_id if pack_sequences else None)
        if pack_sequences and eos_token_id is None:
            self.eos_id = _eos_of(self.stores)
        if pack_sequences and self.eos_id is None:
            raise ConfigError(
                f"{data_dir}: eos_token_id must be given with pack_sequences, got none; give that of the tokenizer"
            )

    def close(self) -> None:
        """Close all files; a closed dataset has no samples."""
        self.stores, self.begins = [], [0]
        self.__dict__.pop("fingerprint", None)  # that of samples which are no more

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the identity of the samples; the loader knows the position within an epoch."""
        return {"epoch": self.epoch, "total_samples": len(self), "fingerprint": self.fingerprint}


class HuggingFaceDataset(Chunked):
    """Hugging Face text as samples of `seq_len` inputs and labels: concatenated documents, each with EOS.

    The first process tokenizes it once, into a store below `cache_dir`; later ones map that. `dataset_name` is a
    name on the hub, a folder of data files, or one that `save_to_disk` made. The tokenizer is a file or folder; it
    is not downloaded.
    """

    def __init__(
        self,
        dataset_name: str,
        split: str,
        text_field: str,
        seq_len: int,
        tokenizer_path: str,
        dataset_config: str | None = None,
        pack_sequences: bool = False,
        *,
        cache_dir: str | None = None,
    ) -> None:
        self.seq_len = seq_len
        self.text_field = text_field
        store = cached_store(
            [hub_name(dataset_name, dataset_config or "", split)],
            tokenizer=tokenizer_path,
            text_field=text_field,
            folder=Path(cache_dir or CACHE_DIR),
            where=f"dataset {dataset_name!r}",
            progress=False,
        )
        super().__init__(partial(_open_files, str(store), ""), length=seq_len + 1, eos_id=None)
        eos = _eos_of(self.stores)
        if eos is None:
            raise ConfigError(
                f"{store}: the tokenizer must have an EOS, which documents are told apart by, got none; name it in "
                "the tokenizer_config.json beside it"
            )
        self.eos_id = eos if pack_sequences else None

    def state_dict(self) -> dict[str, Any]:
        """Return the position of a loader, and the identity of the samples."""
        return {
            "epoch": self.epoch,
            "sample_idx": self.sample_idx,
            "total_sequences": len(self),
            "fingerprint": self.fingerprint,
        }

    def _restored(self, record: DatasetState) -> int:
        return record.sample_idx

    @property
    def _packed_sequences(self) -> list[AnyArray]:
        """All samples as arrays of `seq_len` + 1 ids, which KempnerForge's evaluation stacks."""
        (store,) = self.stores
        begins = [number * self.length for number in range(len(self))]
        windows = read_windows(store, store.manifest.token_key, begins, self.length)
        by_number = {number: ids.astype(np.int64) for number, ids in windows}
        return [by_number[number] for number in range(len(self))]


def _open_files(
    folder: str, pattern: str, *, dtype: str | None = None, vocab_size: int | None = None
) -> list[Store]:
    """Open the token files of a folder in the order of their names, each as a store; or a tokenmill store."""
    maps = MapCache()
    if is_ours(Path(folder)):
        return [open_store(folder, maps=maps, dtype=dtype, vocab_size=vocab_size)]
    # Labels and ends of sequences next to ids are read with them.
    files = [file for file in sorted(Path(folder).glob(pattern)) if memmap_tokens(file) in (None, file)]
    if not files:
        raise StoreMissingError(
            f"{folder}: must hold files that match {pattern!r}, got none; fix data_dir or file_pattern"
        )
    if dtype is None and vocab_size is None and files[0].suffix == ".bin":
        dtype = os.environ.get(DTYPE_VARIABLE)
    return [open_store(file, maps=maps, dtype=dtype, vocab_size=vocab_size) for file in files]


def _eos_of(stores: Sequence[Store]) -> int | None:
    """Return the id that ends every document, if the stores that add one agree; otherwise None."""
    ids = {store.manifest.tokenizer.get("eos_id") for store in stores if store.manifest.tokenizer.get("add_eos")}
    return ids.pop() if len(ids) == 1 else None


class MapStyle(Protocol):
    """Interface of a dataset that can be mixed with others."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int) -> Sample:
        """Return a sample."""
        ...


class MixtureDataset(Dataset[Sample]):
    """Several datasets, concatenated; `dataset_idx` of a sample is the number of its dataset."""

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
        """Names of the datasets."""
        return list(self.names)

    @property
    def fingerprint(self) -> str:
        """Digest of everything that decides the samples, if the datasets have one; otherwise of their sizes."""
        return digest([getattr(dataset, "fingerprint", len(dataset)) for dataset in self.datasets])

    def __len__(self) -> int:
        """Return the number of samples of all datasets."""
        return self.begins[-1]

    def __getitem__(self, index: int) -> Sample:
        """Return one sample."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Return the samples of a batch; those of one dataset are read together if it supports that."""
        samples: dict[int, Sample] = {}
        for number, places in _by_part(indices, self.begins).items():
            dataset, own = self.datasets[number], [indices[place] - self.begins[number] for place in places]
            together = getattr(dataset, "__getitems__", None)
            read = together(own) if together else [dataset[index] for index in own]
            for place, sample in zip(places, read, strict=True):
                samples[place] = {**sample, "dataset_idx": torch.tensor(number)}
        return [samples[place] for place in range(len(indices))]

    def mark(self, epoch: int, sample_idx: int) -> None:
        """Record the position of a loader, for the states of the datasets."""
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
        """Pass their states to the datasets."""
        if not isinstance(state, Mapping):
            raise ResumeError(f"state: expected a table, got {state!r}; {AS_SAVED}")
        for number, dataset in enumerate(self.datasets):
            if f"dataset_{number}" in state and hasattr(dataset, "load_state_dict"):
                dataset.load_state_dict(state[f"dataset_{number}"])


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamState:
    """Position of a stream."""

    epoch: Count
    live: Mapping[str, Any]


class StreamingHuggingFaceDataset(IterableDataset[Sample]):
    """Endless samples of `seq_len` inputs and labels, epoch after epoch; the text is tokenized as it is read.

    Use it with `num_workers=0`: `threads` read and tokenize ahead, and the state stays in the process that saves
    it. A sample never contains text of two windows of the files; its end is padded instead.

    `lanes` are independent streams, assigned to the ranks, by default one per rank. Their number stays the same for
    the whole run. A `shuffle_buffer_size` of 0 reads documents in order. Any other number shuffles them in windows
    of files, without a buffer. With `pack_sequences`, samples have `doc_ids`. The label after the end of a document
    is always -100.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - as KempnerForge has it
        self,
        dataset_name: str,
        split: str,
        text_field: str,
        seq_len: int,
        tokenizer_path: str,
        dataset_config: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 42,
        shuffle_buffer_size: int = 10_000,
        pack_sequences: bool = False,
        *,
        lanes: int | None = None,
        threads: int = 1,
    ) -> None:
        super().__init__()
        self.rank, self.world_size = find_rank(rank=rank, world_size=world_size)
        self.seed = seed
        self.shuffle_buffer_size = shuffle_buffer_size
        self.pack_sequences = pack_sequences
        self.lanes = lanes or self.world_size
        self.threads = threads
        self.seq_len = seq_len
        self.tokenizer_path = tokenizer_path
        self.text_field = text_field
        self.documents = hub_name(dataset_name, dataset_config or "", split)

    @cached_property
    def live(self) -> LiveLoader:
        """The stream; files and tokenizer are opened on first use."""
        options = LiveOptions(
            seq_len=self.seq_len,
            packing="concat",
            seed=self.seed,
            shuffle=self.shuffle_buffer_size > 0,
            text_field=self.text_field,
        )
        arrays = ("input_ids", "labels", "doc_ids") if self.pack_sequences else ("input_ids", "labels")
        loader = LiveLoader(
            open_live([self.documents], tokenizer=self.tokenizer_path, options=options),
            steps=ENDLESS,
            global_batch_size=self.lanes,
            rank=self.rank,
            world_size=self.world_size,
            options=LoaderOptions(threads=self.threads, arrays=arrays),
        )
        loader.announces = False
        return loader

    def __iter__(self) -> Iterator[Sample]:
        if get_worker_info() is not None:
            raise ConfigError(
                "num_workers: must be 0 for text that is streamed, as its state would stay in the workers, "
                f"got {get_worker_info().num_workers}; threads read ahead instead"
            )
        for batch in self.live:
            yield {name: array[0] for name, array in to_torch(batch).items()}

    def close(self) -> None:
        """Stop the threads; the next sample starts them again."""
        if "live" in self.__dict__:
            self.live.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of the lanes of this rank, as JSON; `merge_states` joins those of all ranks."""
        epochs = [position.epoch for position in self.live.text.positions().values()]
        return {"epoch": min(epochs), "live": self.live.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state: that of this rank, or the joined one for any number of ranks."""
        self.live.load_state_dict(read_state(StreamState, state).live)
