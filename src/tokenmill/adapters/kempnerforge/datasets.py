"""Datasets that give a sample for an index: token files, and text of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from tokenmill.adapters.kempnerforge.chunks import Chunks, Sample, eos_of, open_files
from tokenmill.adapters.kempnerforge.state import check_mapping, read_count
from tokenmill.dialects.sources import text_source
from tokenmill.errors import ConfigError, ResumeError
from tokenmill.prepare.cached import cached_store
from tokenmill.store import open_store

CACHE_DIR = ".tokenmill/stores"
"""Where the tokens of text are kept, unless it is said: the place of a run whose config is in this folder."""


class Chunked(Dataset[Sample]):
    """What both datasets do alike: samples of so many tokens, one behind the other."""

    chunks: Chunks
    epoch: int

    @property
    def fingerprint(self) -> str:
        """Digest of what decides every sample."""
        return self.chunks.fingerprint

    @property
    def num_unused_tokens(self) -> int:
        """Tokens at the ends of files that no sample holds."""
        return self.chunks.num_unused

    def __len__(self) -> int:
        """Return how many samples there are."""
        return self.chunks.num_samples

    def __getitem__(self, index: int) -> Sample:
        """Return one sample."""
        return self.chunks.samples([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Return the samples of a batch, read together."""
        return self.chunks.samples(indices)


class MemoryMappedDataset(Chunked):
    """Token files as samples of `seq_len` tokens, which are `seq_len` - 1 inputs with their labels.

    Files are read in the order of their names, and what is left at the end of each, less than a sample, is not
    used: `num_unused_tokens` says how much that is. Files without a header need `dtype`, or a `vocab_size` that
    proves it. With `pack_sequences` the label of EOS is -100, and `doc_ids` count documents from 0 in each sample.
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
        self._given = {
            "data_dir": str(data_dir),
            "seq_len": seq_len,
            "file_pattern": file_pattern,
            "pack_sequences": pack_sequences,
            "eos_token_id": eos_token_id,
            "dtype": dtype,
            "vocab_size": vocab_size,
        }
        self.seq_len = seq_len
        stores = open_files(str(data_dir), file_pattern, dtype=dtype, vocab_size=vocab_size)
        eos = eos_of(stores) if eos_token_id is None else eos_token_id
        if pack_sequences and eos is None:
            raise ConfigError(
                f"{data_dir}: eos_token_id must be given with pack_sequences, got none; give that of the tokenizer"
            )
        self.chunks = Chunks(stores=stores, length=seq_len, eos_id=eos if pack_sequences else None)
        self.epoch = 0

    def mark(self, epoch: int, sample_idx: int) -> None:  # noqa: ARG002 - the samples of an epoch are not kept here
        """Note where a loader stands, for the state."""
        self.epoch = epoch

    def close(self) -> None:
        """Let go of all files; a dataset that is closed has no samples."""
        self.chunks = Chunks(stores=[], length=self.seq_len, eos_id=None)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and which samples these are; the loader knows the place within an epoch."""
        return {"epoch": self.epoch, "total_samples": len(self), "fingerprint": self.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the epoch of a state; one of other samples is refused."""
        check_samples(state, self.state_dict())
        self.epoch = read_count(state, "epoch", default=0)

    def __getstate__(self) -> dict[str, Any]:
        # For worker processes that are not forked: they open the files again.
        return {"given": self._given, "epoch": self.epoch, "open": bool(self.chunks.stores)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state["given"])  # type: ignore[misc]
        self.epoch = state["epoch"]
        if not state["open"]:
            self.close()


class HuggingFaceDataset(Chunked):
    """Text of Hugging Face as samples of `seq_len` inputs and labels, documents end to end with EOS behind each.

    It is tokenized once, into a store below `cache_dir`, by whichever process comes first; later ones map it.
    `dataset_name` is a name at the hub, a folder of data files, or one that `save_to_disk` made. The tokenizer is a
    file or folder; none is downloaded.
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
        source = text_source(
            dataset_name, config=dataset_config or "", split=split, tokenizer=tokenizer_path, text_field=text_field
        )
        store = cached_store(
            source["documents"],
            tokenizer=tokenizer_path,
            text_field=text_field,
            folder=Path(cache_dir or CACHE_DIR),
            where=f"dataset {dataset_name!r}",
            progress=False,
        )
        self._open(str(store), seq_len, pack_sequences)

    def _open(self, store: str, seq_len: int, pack_sequences: bool) -> None:
        opened = open_store(store)
        eos = eos_of([opened])
        if eos is None:
            raise ConfigError(
                f"{store}: the tokenizer must have an EOS, which documents are told apart by, got none; name it in "
                "the tokenizer_config.json beside it"
            )
        self._given = (store, seq_len, pack_sequences)
        self.chunks = Chunks(stores=[opened], length=seq_len + 1, eos_id=eos if pack_sequences else None)
        self.epoch = 0
        self.sample_idx = 0

    def mark(self, epoch: int, sample_idx: int) -> None:
        """Note where a loader stands, for the state."""
        self.epoch, self.sample_idx = epoch, sample_idx

    def state_dict(self) -> dict[str, Any]:
        """Return where a loader stands, and which samples these are."""
        return {
            "epoch": self.epoch,
            "sample_idx": self.sample_idx,
            "total_sequences": len(self),
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take epoch and sample of a state; one of other samples is refused."""
        check_samples(state, self.state_dict())
        self.epoch = read_count(state, "epoch", default=0)
        self.sample_idx = read_count(state, "sample_idx", default=0)

    def __getstate__(self) -> dict[str, Any]:
        # For worker processes that are not forked: they open the store again.
        return {"given": self._given, "marked": (self.epoch, self.sample_idx), "text_field": self.text_field}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._open(*state["given"])
        self.seq_len, self.text_field = state["given"][1], state["text_field"]
        self.mark(*state["marked"])


def check_samples(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse the state of a dataset with other samples."""
    check_mapping(state)
    for key in ("total_samples", "total_sequences", "fingerprint"):
        if key in state and key in own and state[key] != own[key]:
            raise ResumeError(
                f"state: {key} must be that of this dataset, {own[key]!r}, got {state[key]!r}; "
                "put the files back as they were, or start anew"
            )
