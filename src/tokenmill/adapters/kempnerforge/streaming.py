"""Text of Hugging Face that is tokenized while a model trains, and a loader that resumes it exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict, Unpack

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tokenmill.adapters.kempnerforge.chunks import Sample
from tokenmill.adapters.kempnerforge.ranks import find_rank
from tokenmill.adapters.torch import to_torch
from tokenmill.dialects.sources import text_source
from tokenmill.errors import ConfigError, ResumeError, nearest
from tokenmill.live import LiveLoader, LiveOptions, open_live
from tokenmill.live import merge_states as merge_live

_FOR_EVER = 1 << 40
"""Steps of a stream that ends when nobody draws from it any more."""
_KEYS = ("epoch", "live")


class Streaming(TypedDict, total=False):
    """How a stream is read; each of them may be left out."""

    rank: int | None
    world_size: int | None
    seed: int
    shuffle_buffer_size: int
    pack_sequences: bool
    lanes: int | None
    threads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamOptions:
    """How a stream is read, with all that was not said."""

    rank: int | None = None
    world_size: int | None = None
    seed: int = 42
    shuffle_buffer_size: int = 10_000
    """0 reads documents in their order; any other number shuffles them in windows of files, without a buffer."""
    pack_sequences: bool = False
    """Whether samples have `doc_ids`. The label behind the end of a document is -100 in any case."""
    lanes: int | None = None
    """Independent streams, dealt to the ranks; None: one a rank. Their number stays for the whole run."""
    threads: int = 1
    """Threads that read and tokenize ahead."""


class StreamingHuggingFaceDataset(IterableDataset[Sample]):
    """Samples of `seq_len` inputs and labels without end, epoch after epoch; the text is tokenized as it is read.

    To be used with `num_workers=0`: threads read ahead, and the state stays in the process that saves it. A sample
    never reaches into another window of the files; its end is padded then.
    """

    def __init__(
        self,
        dataset_name: str,
        split: str,
        text_field: str,
        seq_len: int,
        tokenizer_path: str,
        dataset_config: str | None = None,
        **streaming: Unpack[Streaming],
    ) -> None:
        super().__init__()
        for name in streaming:
            if name not in Streaming.__annotations__:
                raise ConfigError(
                    f"streaming: options must be known, got {name!r}; {nearest(name, Streaming.__annotations__)}"
                )
        self.options = StreamOptions(**streaming)
        self.rank, self.world_size = find_rank(self.options.rank, self.options.world_size)
        self.seq_len = seq_len
        self.tokenizer_path = tokenizer_path
        self.text_field = text_field
        self.documents: list[str] = text_source(
            dataset_name, config=dataset_config or "", split=split, tokenizer=tokenizer_path, text_field=text_field
        )["documents"]

    @cached_property
    def live(self) -> LiveLoader:
        """The stream itself; files and tokenizer are opened when it is first needed."""
        options = LiveOptions(
            seq_len=self.seq_len,
            packing="concat",
            seed=self.options.seed,
            shuffle=self.options.shuffle_buffer_size > 0,
            text_field=self.text_field,
        )
        arrays = ("input_ids", "labels", "doc_ids") if self.options.pack_sequences else ("input_ids", "labels")
        return LiveLoader(
            open_live(self.documents, tokenizer=self.tokenizer_path, options=options),
            steps=_FOR_EVER,
            global_batch_size=self.options.lanes or self.world_size,
            rank=self.rank,
            world_size=self.world_size,
            threads=self.options.threads,
            arrays=arrays,
        )

    def __iter__(self) -> Iterator[Sample]:
        if get_worker_info() is not None:
            raise ConfigError(
                "num_workers: must be 0 for text that is streamed, as its state would stay in the workers, "
                f"got {get_worker_info().num_workers}; threads read ahead instead"
            )
        for batch in self.live:
            yield {name: array[0] for name, array in to_torch(batch).items()}

    def close(self) -> None:
        """Stop the threads; who goes on drawing starts them again."""
        if "live" in self.__dict__:
            self.live.close()

    def state_dict(self) -> dict[str, Any]:
        """Return where the lanes of this rank stand, as JSON; `merge_states` joins those of all ranks."""
        live = self.live.state_dict()
        return {"epoch": min(cursor[0] for cursor in live["lanes"].values()), "live": live}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state says: that of this rank, or the joined one at any number of ranks."""
        _check_keys(state, _KEYS)
        self.live.load_state_dict(state["live"])


class StreamingDataLoader:
    """Batches of a stream, by torch's own loader in this process."""

    def __init__(self, dataset: StreamingHuggingFaceDataset, batch_size: int, *, pin_memory: bool = False) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self._loader: DataLoader[Sample] = DataLoader(
            dataset,
            batch_size=batch_size,
            # Without an accelerator there is nothing to pin memory for, and torch would warn.
            pin_memory=pin_memory and torch.cuda.is_available(),
            drop_last=True,
            # Its own, so that an iteration draws nothing from the generator that the model uses.
            generator=torch.Generator(),
        )
        self._batches_yielded = 0

    def __iter__(self) -> Iterator[Sample]:
        for batch in self._loader:
            self._batches_yielded += 1
            yield batch

    def close(self) -> None:
        """Stop the threads of the stream."""
        self.dataset.close()

    def state_dict(self) -> dict[str, Any]:
        """Return where this rank stands, as JSON; `merge_states` joins those of all ranks."""
        inner = self.dataset.state_dict()
        return {"epoch": inner["epoch"], "batches_yielded": self._batches_yielded, "live": inner["live"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state says; a running iteration follows."""
        _check_keys(state, (*_KEYS, "batches_yielded"))
        self.dataset.load_state_dict({key: state[key] for key in _KEYS})
        self._batches_yielded = int(state["batches_yielded"])


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the states of all ranks, saved after the same batch, into one that any number of ranks can load."""
    for state in states:
        _check_keys(state, _KEYS)
    live = merge_live([state["live"] for state in states])
    return {**states[0], "epoch": min(int(state["epoch"]) for state in states), "live": live}


def _check_keys(state: Mapping[str, Any], keys: Sequence[str]) -> None:
    missing = [key for key in keys if key not in state]
    if missing:
        raise ResumeError(
            f"state: must have {', '.join(keys)}, got none of {missing}; use a state of such a stream, as the "
            "order of KempnerForge's own is another"
        )
