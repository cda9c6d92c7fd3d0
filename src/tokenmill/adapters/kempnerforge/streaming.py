"""Text of Hugging Face that is tokenized while a model trains, and a loader that resumes it exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tokenmill.adapters.distributed import find_rank
from tokenmill.adapters.kempnerforge.config import DataConfig, StepShape, read_state
from tokenmill.adapters.kempnerforge.datasets import Sample
from tokenmill.adapters.torch import to_torch
from tokenmill.config.dialects.sources import text_source
from tokenmill.errors import ConfigError, ResumeError
from tokenmill.live import LiveLoader, LiveOptions, open_live
from tokenmill.live import merge_states as merge_live
from tokenmill.tables import Count, Positive, as_json

_FOR_EVER = 1 << 40
"""Steps of a stream that ends when nobody draws from it any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamState:
    """Where a stream stands."""

    epoch: Count
    live: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamLoaderState(StreamState):
    """Where a loader of a stream stands."""

    batches_yielded: Count
    batch_size: Positive
    world_size: Positive
    grad_accum_steps: Positive | None


class StreamingHuggingFaceDataset(IterableDataset[Sample]):
    """Samples of `seq_len` inputs and labels without end, epoch after epoch; the text is tokenized as it is read.

    To be used with `num_workers=0`: `threads` read and tokenize ahead, and the state stays in the process that
    saves it. A sample never reaches into another window of the files; its end is padded then.

    `lanes` are independent streams, dealt to the ranks (one a rank, unless it is said); their number stays for the
    whole run. A `shuffle_buffer_size` of 0 reads documents in their order, any other number shuffles them in
    windows of files, without a buffer. With `pack_sequences` samples have `doc_ids`; the label behind the end of a
    document is -100 in any case.
    """

    def __init__(  # noqa: PLR0913 - as KempnerForge has it
        self,
        dataset_name: str,
        split: str,
        text_field: str,
        seq_len: int,
        tokenizer_path: str,
        dataset_config: str | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 42,
        shuffle_buffer_size: int = 10_000,
        pack_sequences: bool = False,
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
        self.documents: list[str] = text_source(
            dataset_name, config=dataset_config or "", split=split, tokenizer=tokenizer_path, text_field=text_field
        )["documents"]

    @cached_property
    def live(self) -> LiveLoader:
        """The stream itself; files and tokenizer are opened when it is first needed."""
        options = LiveOptions(
            seq_len=self.seq_len,
            packing="concat",
            seed=self.seed,
            shuffle=self.shuffle_buffer_size > 0,
            text_field=self.text_field,
        )
        arrays = ("input_ids", "labels", "doc_ids") if self.pack_sequences else ("input_ids", "labels")
        return LiveLoader(
            open_live(self.documents, tokenizer=self.tokenizer_path, options=options),
            steps=_FOR_EVER,
            global_batch_size=self.lanes,
            rank=self.rank,
            world_size=self.world_size,
            threads=self.threads,
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
        epochs = [position.epoch for position in self.live.text.positions().values()]
        return {"epoch": min(epochs), "live": self.live.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state says: that of this rank, or the joined one at any number of ranks."""
        self.live.load_state_dict(read_state(StreamState, state).live)


class StreamingDataLoader:
    """Batches of a stream, by torch's own loader in this process.

    `grad_accum_steps` says how many batches a step has, so that `lr_scale` follows the phases of the config.
    """

    def __init__(
        self,
        dataset: StreamingHuggingFaceDataset,
        batch_size: int,
        config: DataConfig | None = None,
        *,
        grad_accum_steps: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.config = config or DataConfig()
        self.grad_accum_steps = grad_accum_steps
        self._shape = StepShape(
            batch_size=batch_size, num_replicas=dataset.world_size, grad_accum_steps=grad_accum_steps
        )
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
        """Batches of the run, as if all had been of this size."""

    def __iter__(self) -> Iterator[Sample]:
        for batch in self._loader:
            self._batches_yielded += 1
            yield batch

    @property
    def step(self) -> int:
        """The step that the next batch belongs to; a batch is a step where `grad_accum_steps` is not given."""
        return self._batches_yielded // self._shape.batches

    @property
    def lr_scale(self) -> float:
        """What the phases of the config multiply the learning rate of the next batch's step by."""
        return self._shape.lr_scale(self.config, self.step)

    def close(self) -> None:
        """Stop the threads of the stream."""
        self.dataset.close()

    def state_dict(self) -> dict[str, Any]:
        """Return where this rank stands, as JSON; `merge_states` joins those of all ranks."""
        inner = self.dataset.state_dict()
        return {
            "epoch": inner["epoch"],
            "batches_yielded": self._batches_yielded,
            "batch_size": self.batch_size,
            "world_size": self._shape.num_replicas,
            "grad_accum_steps": self.grad_accum_steps,
            "live": inner["live"],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state says; a running iteration follows.

        Between two steps batches may be of another size, and `batches_yielded` then goes on as if all had been: by
        the steps, or by the samples if nobody said what a step is.
        """
        record = read_state(StreamLoaderState, state)
        shape = StepShape(
            batch_size=record.batch_size, num_replicas=record.world_size, grad_accum_steps=record.grad_accum_steps
        )
        batches = self._shape.count(record.batches_yielded, shape, inside="batches" in record.live)
        if self.grad_accum_steps is None:
            batches = record.batches_yielded * shape.samples // self._shape.samples
        self.dataset.live.load_state_dict(record.live)
        self._batches_yielded = batches


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the states of all ranks, saved after the same batch, into one that any number of ranks can load."""
    loaders = any(isinstance(state, Mapping) and "batches_yielded" in state for state in states)
    records = [as_json(read_state(StreamLoaderState if loaders else StreamState, state)) for state in states]
    for record in records:
        for key in ("batches_yielded", "batch_size", "world_size", "grad_accum_steps"):
            if record.get(key) != records[0].get(key):
                raise ResumeError(
                    f"states: {key} must be the same on all ranks, got {records[0].get(key)!r} and "
                    f"{record.get(key)!r}; save them after the same batch of one run"
                )
    live = merge_live([record["live"] for record in records])
    return {**records[0], "epoch": min(record["epoch"] for record in records), "live": live}
