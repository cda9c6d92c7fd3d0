"""Loaders based on torch's that know the next batch, and resume there exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from msgspec import UnsetType
from torch.utils.data import DataLoader

from tokenmill.adapters.kempnerforge import dataset as datasets
from tokenmill.adapters.kempnerforge.config import AS_SAVED, DataConfig, StepShape, read_state
from tokenmill.adapters.kempnerforge.sampler import DistributedSampler, MixtureSampler
from tokenmill.adapters.torch import find_rank
from tokenmill.config.dialects.kempnerforge import DatasetSource
from tokenmill.errors import ConfigError, ResumeError
from tokenmill.fingerprint import key64
from tokenmill.live import merge_states as merge_live
from tokenmill.tables import Count, Positive, as_json

STATE_VERSION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderState:
    """Position of a loader."""

    version: int
    epoch: Count
    batches_yielded: Count
    """Batches of the epoch."""
    sampler: Mapping[str, Any]
    position: Count
    """Delivered samples of all ranks: of the epoch, or of the run, depending on the sampler."""
    begin: Count
    """Position at which the epoch started."""
    batches: Count
    """Batches of the run."""
    batch_size: Positive
    grad_accum_steps: Positive | None
    phases: tuple[Any, ...]
    """Start and weights of the phases that have started."""
    dataset: str | None = None
    """Fingerprint of the samples, if the dataset has one."""

    def check_place(self, shape: StepShape, bounds: tuple[int, int]) -> None:
        """Reject a position outside of its epoch, or one that its batches do not lead to."""
        if (
            self.begin + self.batches_yielded * shape.samples != self.position
            or (self.batches - self.batches_yielded) % shape.batches
        ):
            raise ResumeError(
                f"state: position must be {self.batches_yielded} batches of {shape.samples} samples behind "
                f"{self.begin}, and batches as far in a step of {shape.batches}, got {self.position} and "
                f"{self.batches}; {AS_SAVED}"
            )
        if not bounds[0] <= self.begin <= self.position <= bounds[1]:
            raise ResumeError(
                f"state: position must lie within {bounds[0]} and {bounds[1]}, which epoch {self.epoch} has, got "
                f"{self.position}; {AS_SAVED}"
            )


class AskedBatches:
    """Batches of indices for torch's loader.

    It has no reference to the loader. A cycle would be freed at any later time, and that code would wait for its
    worker processes.
    """

    def __init__(self) -> None:
        self.indices: Iterator[int] = iter(())
        self.batch_size = 1
        self.count = 0

    def __iter__(self) -> Iterator[list[int]]:
        indices = self.indices
        for _ in range(self.count):
            yield list(islice(indices, self.batch_size))

    def __len__(self) -> int:
        return self.count


class StepLoader:
    """A loader that counts its batches, and derives the step of the next one."""

    def __init__(self, batch_size: int, num_replicas: int, config: object, grad_accum_steps: int | None) -> None:
        self.batch_size = batch_size
        self.config = DataConfig() if config is None else DataConfig.of(config)
        self.config.check_phases()
        self.grad_accum_steps = grad_accum_steps
        self._shape = StepShape(batch_size=batch_size, num_replicas=num_replicas, grad_accum_steps=grad_accum_steps)
        self._batches = 0
        """Delivered batches of the run, as if all had this size."""
        self._pin_memory = self.config.pin_memory and torch.cuda.is_available()
        """Without an accelerator, there is no memory to pin, and torch would warn."""
        self._generator = torch.Generator()
        """Generator for torch's loader, so that an iteration draws nothing from the generator of the model."""

    @property
    def step(self) -> int:
        """Step of the next batch; without `grad_accum_steps`, a batch is a step."""
        return self._batches // self._shape.batches

    @property
    def lr_scale(self) -> float:
        """Factor of the phases for the learning rate at the step of the next batch."""
        if self.grad_accum_steps is None and self.config.all_phases:
            raise ConfigError(
                "lr_scale: grad_accum_steps must be given to know the step of a batch, got none; give it, or ask "
                "config.lr_scale_at(step)"
            )
        return self.config.lr_scale_at(self.step)


class StatefulDataLoader(StepLoader):
    """Batches of a dataset in the order of a sampler, through torch's loader.

    `config` is a `DataConfig` of this package or of KempnerForge. `collate_fn` makes a batch of samples, as in
    KempnerForge. `for batch in loader` continues from the current position to the end of the epoch, also after a
    `break`. `set_epoch` or `set_skip` of the sampler set another position. Batches that were read ahead are not
    counted, so a state is exact for any `num_workers`, before and after it was saved.

    `grad_accum_steps` is the number of batches per step. With it, every epoch has whole steps. The samples of a
    step are then the same for all ranks and batch sizes with the same product, and the phases of the config start
    at their step. Without it, call `sampler.update_weights` for phases yourself. An incomplete last step is left
    out. If the sampler has no `drop_last`, it is filled with the first samples of the epoch instead.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        sampler: DistributedSampler | MixtureSampler | None = None,
        config: object = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        *,
        grad_accum_steps: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.sampler = sampler or DistributedSampler(dataset)
        if not isinstance(self.sampler, DistributedSampler | MixtureSampler):
            raise ConfigError(
                "sampler: must be a DistributedSampler or MixtureSampler of this package, so that it can begin "
                f"anywhere, got {type(sampler).__name__}; use one, or torch's own DataLoader"
            )
        super().__init__(batch_size, self.sampler.num_replicas, config, grad_accum_steps)
        self._epoch = self.sampler.epoch
        self._position = self.sampler.first(self._epoch)
        """Delivered samples of all ranks: of the epoch, or of the run, depending on the sampler."""
        self._batches_yielded = 0
        """Batches of the epoch, as if all had this size."""
        self._running: Iterator[datasets.Sample] | None = None
        self._in_epoch = False
        self._asked = AskedBatches()
        workers = self.config.num_workers
        self._loader: DataLoader[datasets.Sample] = DataLoader(
            dataset,
            batch_sampler=self._asked,
            num_workers=workers,
            collate_fn=collate_fn,
            pin_memory=self._pin_memory,
            prefetch_factor=self.config.prefetch_factor if workers else None,
            persistent_workers=workers > 0,
            generator=self._generator,
        )
        if not self._rest():
            raise ConfigError(
                f"dataset: an epoch must have a whole step of {self._shape.round} samples, got {len(dataset)}; add "
                "data, or lower batch_size"
            )

    def _end(self) -> int:
        """Return the end of the epoch: whole steps after its start."""
        begin = self._position - self._batches % self._shape.batches * self._shape.samples
        return self.sampler.end(self._epoch, begin, self._shape.round)

    def _rest(self) -> int:
        """Return the number of remaining batches of the epoch."""
        return max(0, self._end() - self._position) // self._shape.samples

    def __len__(self) -> int:
        """Return the number of batches of this epoch: the delivered and the remaining ones."""
        return self._batches_yielded + self._rest()

    def __iter__(self) -> StatefulDataLoader:
        self._in_epoch = True
        self._running = None
        if self.sampler.epoch != self._epoch or self.sampler.skip:
            self._jump()
        return self

    def _jump(self) -> None:
        """Move to the epoch and the sample that `set_epoch` and `set_skip` of the sampler chose."""
        if self.grad_accum_steps is not None and self.config.all_phases:
            raise ConfigError(
                "sampler: set_epoch and set_skip must not move a loader whose phases begin at a step, as they do "
                f"not say the step, got epoch {self.sampler.epoch} and skip {self.sampler.skip}; resume by "
                "load_state_dict, or leave out grad_accum_steps and call update_weights"
            )
        origin = self._position - self._batches_yielded * self._shape.samples
        if self.sampler.epoch != self._epoch:
            self._epoch = self.sampler.epoch
            origin = self._position = self.sampler.first(self._epoch)
            # If an epoch is left within a step, this step ends.
            self._batches = -(-self._batches // self._shape.batches) * self._shape.batches
        self._position += self.sampler.skip * self.sampler.num_replicas
        self.sampler.set_skip(0)
        self._count_from(origin)
        self._mark()

    def _count_from(self, origin: int) -> None:
        """Count the batches of an epoch from its start: those of whole steps, and those of the current one."""
        self._position = min(self._position, max(origin, self.sampler.first(self._epoch) + self.sampler.size))
        begun = self._batches % self._shape.batches
        steps = max(0, self._position - origin - begun * self._shape.samples) // self._shape.round
        self._batches_yielded = steps * self._shape.batches + begun

    def __next__(self) -> datasets.Sample:
        if not self._in_epoch:
            raise StopIteration
        self._apply_phase()
        if isinstance(self.sampler, MixtureSampler) and self.sampler.is_changing:
            self.sampler.begin_change(self._position)
            self._running = None  # batches that were read ahead were drawn with the old weights
        if self._running is None:
            self._running = self._start()
        try:
            batch = next(self._running)
        except StopIteration:
            self._end_epoch()
            raise
        except BaseException:
            self._running = None  # a retry gets this batch, or the error again
            raise
        self._position += self._shape.samples
        self._batches_yielded += 1
        self._batches += 1
        self._mark()
        return batch

    def _start(self) -> Iterator[datasets.Sample]:
        """Start to read the rest of the epoch."""
        self._asked.indices = self.sampler.indices(self._epoch, self._position, self._end())
        self._asked.batch_size = self.batch_size
        self._asked.count = self._rest()
        self._generator.manual_seed(key64(self.sampler.seed, self._epoch, self._position))
        return iter(self._loader)

    def _end_epoch(self) -> None:
        if not self.sampler.runs_on:
            self._position = 0  # the rest of the epoch is left out
        if self.sampler.epoch == self._epoch:  # otherwise `set_epoch` has chosen the next one already
            self.sampler.set_epoch(self._epoch + 1)
        self._epoch += 1
        self._batches_yielded = 0
        self._running = None
        self._in_epoch = False
        self._mark()

    def _mark(self) -> None:
        if hasattr(self.dataset, "mark"):
            # A mixture starts an epoch with the rest of the last one.
            self.dataset.mark(self._epoch, max(0, self._position - self.sampler.first(self._epoch)))

    def _apply_phase(self) -> None:
        """Draw with the weights of the step, if the loader knows its steps."""
        steps = self.grad_accum_steps
        if steps is None or self._batches % steps or not isinstance(self.sampler, MixtureSampler):
            return
        if any(phase.start_step == self.step for phase in self.config.all_phases):
            self.sampler.update_weights(self.config.weights_at(self.step), self.config.mix_temperature)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader, as JSON; it is the same on every rank, except for the rank in it."""
        state: dict[str, Any] = {
            "version": STATE_VERSION,
            "epoch": self._epoch,
            "batches_yielded": self._batches_yielded,
            "sampler": {**self.sampler.state_dict(), "epoch": self._epoch},
            "position": self._position,
            "begin": self._position - self._batches_yielded * self._shape.samples,
            "batches": self._batches,
            "batch_size": self.batch_size,
            "grad_accum_steps": self.grad_accum_steps,
            "phases": self._begun(self.step),
        }
        fingerprint = getattr(self.dataset, "fingerprint", None)
        return state if fingerprint is None else {**state, "dataset": fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, also in a running iteration. Ranks, workers and batch size may differ."""
        record, shape = self._read(state)
        batches = self._shape.count(record.batches, shape)
        record.check_place(shape, self.sampler.bounds(record.epoch, shape.round))
        steps = batches // self._shape.batches
        if list(record.phases) != self._begun(steps):
            raise ResumeError(
                f"state: phases that began before step {steps} must be as they were, {list(record.phases)}, got "
                f"{self._begun(steps)}; put them back, or let a new phase begin later"
            )
        self.sampler.load_state_dict(record.sampler)
        self.sampler.set_epoch(record.epoch)
        self.sampler.set_skip(0)
        self._epoch = record.epoch
        self._position = record.position
        self._batches_yielded = record.batches_yielded
        self._batches = batches
        self._running = None
        if (shape.samples, shape.batches) != (self._shape.samples, self._shape.batches):
            self._count_from(record.begin)
        self._mark()

    def _read(self, state: object) -> tuple[LoaderState, StepShape]:
        """Return a state and its number of batches per step; reject one of other samples, or of another order."""
        version = state.get("version", STATE_VERSION) if isinstance(state, Mapping) else STATE_VERSION
        if version != STATE_VERSION:
            raise ResumeError(f"state: version must be {STATE_VERSION}, got {version!r}; resume where it was saved")
        record = read_state(LoaderState, state)
        own = getattr(self.dataset, "fingerprint", None)
        if record.dataset != own:
            saved, own = (value and value[:12] for value in (record.dataset, own))
            raise ResumeError(
                f"state: the samples must be those of dataset {saved!r}, got {own!r}; put the files back as they "
                "were, or start anew"
            )
        ranks = self.sampler.read_state(record.sampler, position=record.position).num_replicas
        if isinstance(ranks, UnsetType):
            raise ResumeError(f"state: sampler must say num_replicas, got none; {AS_SAVED}")
        shape = StepShape(
            batch_size=record.batch_size, num_replicas=ranks, grad_accum_steps=record.grad_accum_steps
        )
        return record, shape

    def _begun(self, step: int) -> list[list[Any]]:
        """Return start and weights of the phases that this loader has started before a step."""
        if self.grad_accum_steps is None or not isinstance(self.sampler, MixtureSampler):
            return []
        starts = [phase.start_step for phase in self.config.all_phases if phase.start_step < step]
        return [[start, self.config.weights_at(start)] for start in starts]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamLoaderState(datasets.StreamState):
    """Position of a loader of a stream."""

    batches_yielded: Count
    batch_size: Positive
    world_size: Positive
    grad_accum_steps: Positive | None


class StreamingDataLoader(StepLoader):
    """Batches of a stream, through torch's loader in this process.

    `grad_accum_steps` is the number of batches per step, so that `lr_scale` follows the phases of the config.
    """

    def __init__(
        self,
        dataset: datasets.StreamingHuggingFaceDataset,
        batch_size: int,
        config: object = None,
        *,
        grad_accum_steps: int | None = None,
    ) -> None:
        super().__init__(batch_size, dataset.world_size, config, grad_accum_steps)
        self.dataset = dataset
        self._loader: DataLoader[datasets.Sample] = DataLoader(
            dataset,
            batch_size=batch_size,
            pin_memory=self._pin_memory,
            drop_last=True,
            generator=self._generator,
        )

    def __iter__(self) -> Iterator[datasets.Sample]:
        for batch in self._loader:
            self._batches += 1
            yield batch

    def close(self) -> None:
        """Stop the threads of the stream."""
        self.dataset.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this rank, as JSON; `merge_states` joins those of all ranks."""
        inner = self.dataset.state_dict()
        return {
            "epoch": inner["epoch"],
            "batches_yielded": self._batches,
            "batch_size": self.batch_size,
            "world_size": self._shape.num_replicas,
            "grad_accum_steps": self.grad_accum_steps,
            "live": inner["live"],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, also in a running iteration.

        Between two steps, batches may have another size. `batches_yielded` then continues as if all had this size.
        It is derived from the steps, or from the samples if `grad_accum_steps` is not given.
        """
        record = read_state(StreamLoaderState, state)
        shape = StepShape(
            batch_size=record.batch_size, num_replicas=record.world_size, grad_accum_steps=record.grad_accum_steps
        )
        batches = self._shape.count(record.batches_yielded, shape, inside="batches" in record.live)
        if self.grad_accum_steps is None:
            batches = record.batches_yielded * shape.samples // self._shape.samples
        self.dataset.live.load_state_dict(record.live)
        self._batches = batches


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the states of all ranks, saved after the same batch, into one that any number of ranks can load."""
    loaders = any(isinstance(state, Mapping) and "batches_yielded" in state for state in states)
    records = [
        as_json(read_state(StreamLoaderState if loaders else datasets.StreamState, state)) for state in states
    ]
    for record in records:
        for key in ("batches_yielded", "batch_size", "world_size", "grad_accum_steps"):
            if record.get(key) != records[0].get(key):
                raise ResumeError(
                    f"states: {key} must be the same on all ranks, got {records[0].get(key)!r} and "
                    f"{record.get(key)!r}; save them after the same batch of one run"
                )
    live = merge_live([record["live"] for record in records])
    return {**records[0], "epoch": min(record["epoch"] for record in records), "live": live}


def build_dataloader(
    config: object,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    seed: int | None = None,
    grad_accum_steps: int | None = None,
    cache_dir: str | None = None,
) -> StatefulDataLoader | StreamingDataLoader:
    """Return the loader of a config: `datasets` have priority, then `dataset_path`, then `hf_dataset_name`.

    `config` is a `DataConfig` of this package or of KempnerForge, or KempnerForge's config of a whole job. Its
    [train] sets what is not given here: `batch_size` (per rank and batch), `seq_len` (inputs per sample), `seed`
    (default 42) and `grad_accum_steps` (batches per step, default 1). Phases start at their step. Text is prepared
    once, below `cache_dir`.
    """
    train = getattr(config, "train", None)
    config = DataConfig.of(config if train is None else getattr(config, "data", config))
    config.check_phases()
    batch_size, seq_len = _setting(batch_size, train, "batch_size"), _setting(seq_len, train, "seq_len")
    grad_accum_steps = _setting(grad_accum_steps, train, "grad_accum_steps", 1)
    seed = _setting(seed, train, "data_seed", _setting(None, train, "seed", 42))
    rank, world_size = find_rank(rank=rank, world_size=world_size)
    first = config.all_datasets[0]
    if config.hf_streaming and any(source.hf_name for source in config.all_datasets):
        lanes = batch_size * world_size * grad_accum_steps
        stream = _stream(config, first, seq_len, rank=rank, world_size=world_size, seed=seed, lanes=lanes)
        return StreamingDataLoader(stream, batch_size, config, grad_accum_steps=grad_accum_steps)
    dataset: datasets.MixtureDataset | datasets.MemoryMappedDataset | datasets.HuggingFaceDataset
    sampler: MixtureSampler | DistributedSampler
    if config.datasets:
        parts = [_dataset(config, source, seq_len, cache_dir) for source in config.datasets]
        dataset = datasets.MixtureDataset(parts, config.dataset_names)
        sampler = MixtureSampler(
            dataset.cumulative_sizes,
            [source.weight for source in config.datasets],
            num_replicas=world_size,
            rank=rank,
            seed=seed,
            temperature=config.mix_temperature,
        )
    else:
        dataset = _dataset(config, first, seq_len, cache_dir)
        sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, seed=seed)
    return StatefulDataLoader(dataset, batch_size, sampler, config, grad_accum_steps=grad_accum_steps)


def _setting(value: int | None, train: object, name: str, default: int | None = None) -> int:
    """Return a setting: the argument, otherwise that of [train], otherwise the default."""
    for setting in (value, getattr(train, name, None), default):
        if setting is not None:
            return int(setting)
    raise ConfigError(
        f"build_dataloader: {name} must be given where the config has no [train], got none; add {name}=..."
    )


def _stream(
    config: DataConfig, source: DatasetSource, seq_len: int, *, rank: int, world_size: int, seed: int, lanes: int
) -> datasets.StreamingHuggingFaceDataset:
    texts = [source.called for source in config.datasets if source.hf_name]
    if texts:
        raise ConfigError(
            f"data: hf_streaming must be left out where text is mixed, as that is tokenized once, got {texts[0]!r} "
            "among datasets; set hf_streaming to false, or name it alone as hf_dataset_name"
        )
    return datasets.StreamingHuggingFaceDataset(
        source.hf_name,
        config.hf_dataset_split,
        config.hf_dataset_text_field,
        seq_len,
        config.tokenizer_for(source),
        source.hf_config or None,
        rank=rank,
        world_size=world_size,
        seed=seed,
        pack_sequences=config.pack_sequences,
        lanes=lanes,
    )


def _dataset(
    config: DataConfig, source: DatasetSource, seq_len: int, cache_dir: str | None
) -> datasets.MemoryMappedDataset | datasets.HuggingFaceDataset:
    if source.path:
        return datasets.MemoryMappedDataset(
            source.path,
            seq_len + 1,
            config.file_pattern,
            config.pack_sequences,
            _eos_id(config) if config.pack_sequences else None,
            dtype=config.dtype,
            vocab_size=config.vocab_size,
        )
    return datasets.HuggingFaceDataset(
        source.hf_name,
        config.hf_dataset_split,
        config.hf_dataset_text_field,
        seq_len,
        config.tokenizer_for(source),
        source.hf_config or None,
        config.pack_sequences,
        cache_dir=cache_dir,
    )


def _eos_id(config: DataConfig) -> int | None:
    """Return the id that ends documents: that of the config, otherwise of the tokenizer, otherwise of the files."""
    if config.eos_token_id is not None or not config.tokenizer_path:
        return config.eos_token_id
    from tokenmill.encode.engines import read_identity

    return read_identity(config.tokenizer_path).eos_id
