"""Samples cut from token files: runs of so many tokens, one behind the other, none over the end of a file."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from tokenmill.errors import ConfigError, PlanError, StoreMissingError
from tokenmill.fingerprint import digest
from tokenmill.loader import IGNORE
from tokenmill.loader.buffers import BufferPool
from tokenmill.store import open_store
from tokenmill.store.foreign.files import is_ours
from tokenmill.store.layout import key_file
from tokenmill.store.maps import MapCache

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.store import Store

Sample = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """The samples of some stores, in order."""

    stores: Sequence[Store]
    length: int
    """Tokens of a sample: one more than it has inputs."""
    eos_id: int | None
    """Ends documents, which are then told apart; None: they are not."""

    def __post_init__(self) -> None:
        if self.length < 2:
            raise ConfigError(f"seq_len: a sample must have at least 2 tokens, got {self.length}; raise it")
        for store in self.stores:
            bound = 1 << 8 * store.dtype(store.manifest.token_key).itemsize
            if self.eos_id is not None and not 0 <= self.eos_id < bound:
                raise ConfigError(
                    f"{store.path}: eos_token_id must be an id that its dtype can hold, below {bound}, "
                    f"got {self.eos_id}; give that of the tokenizer"
                )

    @cached_property
    def begins(self) -> list[int]:
        """First sample of each store, and the end of the last."""
        counts = [store.num_tokens // self.length for store in self.stores]
        return [0, *np.cumsum(counts, dtype=np.int64).tolist()]

    @property
    def num_samples(self) -> int:
        """How many whole samples there are."""
        return self.begins[-1]

    @property
    def num_unused(self) -> int:
        """Tokens behind the last whole sample of each store, which no sample holds."""
        return sum(store.num_tokens % self.length for store in self.stores)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of what decides every sample."""
        return digest([[store.fingerprint for store in self.stores], self.length, self.eos_id])

    def samples(self, indices: Sequence[int]) -> list[Sample]:
        """Return some samples; their tensors are parts of one block each."""
        places: dict[int, list[tuple[int, int]]] = {}
        for row, index in enumerate(indices):
            if not 0 <= index < self.num_samples:
                raise PlanError(f"dataset: samples must lie within 0:{self.num_samples}, got {index}; count from 0")
            number = bisect_right(self.begins, index) - 1
            places.setdefault(number, []).append((row, (index - self.begins[number]) * self.length))
        out = {name: array[: len(indices)] for name, array in self._pool(len(indices)).batch().items()}
        inputs, labels = out["input_ids"], out["labels"]
        for number, rows in places.items():
            self._copy(self.stores[number], rows, inputs, labels)
        if self.eos_id is not None:
            ends = inputs == self.eos_id
            # EOS is the last token of its document: what comes after it is not its to predict.
            labels[ends] = IGNORE
            np.cumsum(ends, axis=1, out=out["doc_ids"])
            out["doc_ids"] -= ends
        lines = zip(*(torch.from_numpy(array).unbind() for array in out.values()), strict=True)
        return [dict(zip(out, line, strict=True)) for line in lines]

    def _copy(
        self,
        store: Store,
        rows: Sequence[tuple[int, int]],
        inputs: npt.NDArray[np.int64],
        labels: npt.NDArray[np.int64],
    ) -> None:
        """Fill rows with the samples that begin at some tokens of a store: (row, token)."""
        key = store.manifest.token_key
        if store.num_shards != 1:  # a sample may lie in several
            for row, begin in rows:
                tokens = store.fetch(begin, begin + self.length, key)
                inputs[row], labels[row] = tokens[:-1], tokens[1:]
            return
        with store.maps.borrow([store.file(0, key_file(key))]) as (mapped,):
            stream = mapped.data.view(store.dtype(key))
            for row, begin in rows:
                tokens = stream[begin : begin + self.length]
                inputs[row], labels[row] = tokens[:-1], tokens[1:]

    def _pool(self, rows: int) -> BufferPool:
        """Return memory for at least so many samples, which is used again when nobody holds them any more.

        The next power of two, as a mixture asks for another number each time, and a pool for each would pile up.
        """
        rows = 1 << max(0, rows - 1).bit_length()
        if rows not in self._pools:
            names = ("input_ids", "labels") if self.eos_id is None else ("input_ids", "labels", "doc_ids")
            self._pools[rows] = BufferPool(dict.fromkeys(names, ((rows, self.length - 1), np.int64)))
        return self._pools[rows]

    @cached_property
    def _pools(self) -> dict[int, BufferPool]:
        return {}


def open_files(folder: str, pattern: str, *, dtype: str | None, vocab_size: int | None) -> list[Store]:
    """Open the token files of a folder in the order of their names, each as a store; a store of ours as it is."""
    maps = MapCache()
    if is_ours(Path(folder)):
        return [open_store(folder, maps=maps, dtype=dtype, vocab_size=vocab_size)]
    files = sorted(Path(folder).glob(pattern))
    if not files:
        raise StoreMissingError(
            f"{folder}: must hold files that match {pattern!r}, got none; fix data_dir or file_pattern"
        )
    return [open_store(file, maps=maps, dtype=dtype, vocab_size=vocab_size) for file in files]


def eos_of(stores: Sequence[Store]) -> int | None:
    """Return the id that ends every document, as the stores themselves say; None where they do not."""
    said = {store.manifest.tokenizer.get("eos_id") for store in stores if store.manifest.tokenizer.get("add_eos")}
    return said.pop() if len(said) == 1 and stores else None
