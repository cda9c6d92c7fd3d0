"""A loader of torch that knows which batch comes next, and resumes there exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from tokenmill.adapters.kempnerforge.config import DataConfig
from tokenmill.adapters.kempnerforge.mixture import MixtureSampler
from tokenmill.adapters.kempnerforge.samplers import DistributedSampler
from tokenmill.adapters.kempnerforge.state import STATE_VERSION, batches_of, check_state
from tokenmill.errors import ConfigError, ResumeError
from tokenmill.fingerprint import key64

Tensors = dict[str, torch.Tensor]


class StatefulDataLoader:
    """Batches of a dataset in the order of a sampler, by torch's own loader.

    `for batch in loader` goes on from where the loader stands to the end of the epoch, also after a `break`. What
    was read ahead is not counted: a state is exact whatever `num_workers` is, before or after it was saved.

    `grad_accum_steps` says how many batches a step has. Then every epoch has whole steps, so that the samples of a
    step are the same for any number of ranks and batch size that make up as many, and the phases of the config
    begin at their step. Without it, phases are left to who calls `sampler.update_weights`.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        sampler: DistributedSampler | MixtureSampler | None = None,
        config: DataConfig | None = None,
        *,
        grad_accum_steps: int | None = None,
    ) -> None:
        if batch_size < 1 or (grad_accum_steps or 1) < 1:
            raise ConfigError(
                f"loader: batch_size and grad_accum_steps must be at least 1, got {batch_size} and "
                f"{grad_accum_steps}; raise them"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.config = config or DataConfig()
        self.sampler = sampler or DistributedSampler(dataset)
        if not isinstance(self.sampler, DistributedSampler | MixtureSampler):
            raise ConfigError(
                "sampler: must be a DistributedSampler or MixtureSampler of this package, so that it can begin "
                f"anywhere, got {type(sampler).__name__}; use one, or torch's own DataLoader"
            )
        self.grad_accum_steps = grad_accum_steps
        self._epoch = self.sampler.epoch
        self._position = self.sampler.first(self._epoch)
        """Samples of all ranks that were handed out: of the epoch, or of the run, as the sampler counts."""
        self._batches_yielded = 0
        self._batches = 0
        """Batches of the run that were handed out."""
        self._running: Iterator[Tensors] | None = None
        self._in_epoch = False
        self._generator = torch.Generator()
        self._asked = _Batches()
        self._loader: DataLoader[Tensors] = self._make_loader()
        if not self._rest(self._epoch, self._position):
            raise ConfigError(
                f"dataset: an epoch must have a whole step of {self._round} samples, got {len(dataset)}; add data, "
                "or lower batch_size"
            )

    def _make_loader(self) -> DataLoader[Tensors]:
        workers = self.config.num_workers
        return DataLoader(
            self.dataset,
            batch_sampler=self._asked,
            num_workers=workers,
            # Without an accelerator there is nothing to pin memory for, and torch would warn.
            pin_memory=self.config.pin_memory and torch.cuda.is_available(),
            prefetch_factor=self.config.prefetch_factor if workers else None,
            persistent_workers=workers > 0,
            # Its own, so that an iteration draws nothing from the generator that the model uses.
            generator=self._generator,
        )

    @property
    def _round(self) -> int:
        """Samples of a step, of all ranks."""
        return self.batch_size * self.sampler.num_replicas * (self.grad_accum_steps or 1)

    @property
    def step(self) -> int:
        """The step that the next batch belongs to; a batch is a step where `grad_accum_steps` is not given."""
        return self._batches // (self.grad_accum_steps or 1)

    @property
    def lr_scale(self) -> float:
        """What the phases of the config multiply the learning rate of the next batch's step by."""
        if self.grad_accum_steps is None and self.config.all_phases:
            raise ConfigError(
                "lr_scale: grad_accum_steps must be given to know the step of a batch, got none; give it, or ask "
                "config.lr_scale_at(step)"
            )
        return self.config.lr_scale_at(self.step)

    def _rest(self, epoch: int, position: int) -> int:
        """Return how many batches an epoch still has: as many as make whole steps."""
        each = self.batch_size * self.sampler.num_replicas
        begun = self._batches % (self.grad_accum_steps or 1)
        begin = position - begun * each
        steps = (self.sampler.end(epoch, begin) - begin) // self._round
        return max(0, steps * (self.grad_accum_steps or 1) - begun)

    def __len__(self) -> int:
        """Return how many batches this epoch has: those that were handed out, and the rest."""
        return self._batches_yielded + self._rest(self._epoch, self._position)

    def __iter__(self) -> StatefulDataLoader:
        self._in_epoch = True
        self._position += self.sampler.skip * self.sampler.num_replicas
        self.sampler.set_skip(0)
        self._running = None
        return self

    def __next__(self) -> Tensors:
        if not self._in_epoch:
            raise StopIteration
        self._apply_phase()
        if isinstance(self.sampler, MixtureSampler) and self.sampler.is_changing:
            self.sampler.begin_change(self._position)
            self._running = None  # what was read ahead was drawn by the old weights
        if self._running is None:
            self._running = self._start()
        try:
            batch = next(self._running)
        except StopIteration:
            self._end_epoch()
            raise
        except BaseException:
            self._running = None  # whoever tries again gets this batch, or the error again
            raise
        self._position += self.batch_size * self.sampler.num_replicas
        self._batches_yielded += 1
        self._batches += 1
        self._mark()
        return batch

    def _start(self) -> Iterator[Tensors]:
        """Begin to read the rest of the epoch."""
        self.sampler.set_epoch(self._epoch)
        self._asked.indices = self.sampler.indices(self._epoch, self._position)
        self._asked.batch_size = self.batch_size
        self._asked.count = self._rest(self._epoch, self._position)
        self._generator.manual_seed(key64(self.sampler.seed, self._epoch, self._position))
        return iter(self._loader)

    def _end_epoch(self) -> None:
        self._position = self.sampler.after(self._epoch, self._position)
        self._epoch += 1
        self._batches_yielded = 0
        self._running = None
        self._in_epoch = False
        self.sampler.set_epoch(self._epoch)
        self._mark()

    def _mark(self) -> None:
        if hasattr(self.dataset, "mark"):
            self.dataset.mark(self._epoch, self._position - self.sampler.first(self._epoch))

    def _apply_phase(self) -> None:
        """Draw by the weights of the step, where the loader knows what a step is."""
        steps = self.grad_accum_steps
        if steps is None or self._batches % steps or not isinstance(self.sampler, MixtureSampler):
            return
        if any(phase.start_step == self.step for phase in self.config.all_phases):
            self.sampler.update_weights(self.config.weights_at(self.step), self.config.mix_temperature)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands, as JSON; but for the rank in it the same on every rank."""
        state: dict[str, Any] = {
            "version": STATE_VERSION,
            "epoch": self._epoch,
            "batches_yielded": self._batches_yielded,
            "sampler": {**self.sampler.state_dict(), "epoch": self._epoch},
            "position": self._position,
            "batches": self._batches,
            "batch_size": self.batch_size,
            "grad_accum_steps": self.grad_accum_steps,
            "phases": self._begun(self.step),
        }
        fingerprint = getattr(self.dataset, "fingerprint", None)
        return state if fingerprint is None else {**state, "dataset": fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state says; a running iteration follows. Ranks, workers and batch size may be others."""
        check_state(state, getattr(self.dataset, "fingerprint", None))
        each = self.batch_size * self.sampler.num_replicas
        batches = batches_of(state, self.grad_accum_steps, each)
        steps = batches // (self.grad_accum_steps or 1)
        if state["phases"] != self._begun(steps):
            raise ResumeError(
                f"state: phases that began before step {steps} must be as they were, {state['phases']}, got "
                f"{self._begun(steps)}; put them back, or let a new phase begin later"
            )
        self.sampler.load_state_dict(state["sampler"])
        self._epoch = int(state["epoch"])
        self._position = int(state["position"])
        self._batches_yielded = int(state["batches_yielded"])
        self._batches = batches
        self._running = None
        self.sampler.set_epoch(self._epoch)
        self.sampler.set_skip(0)
        self._mark()

    def _begun(self, step: int) -> list[list[Any]]:
        """Return start and weights of the phases that this loader has begun before a step."""
        if self.grad_accum_steps is None or not isinstance(self.sampler, MixtureSampler):
            return []
        starts = [phase.start_step for phase in self.config.all_phases if phase.start_step < step]
        return [[start, self.config.weights_at(start)] for start in starts]


class _Batches:
    """The batches of indices that torch's loader asks for next.

    It does not hold the loader: a cycle would be freed at any time later, and its worker processes would be waited
    for in whatever runs then.
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
