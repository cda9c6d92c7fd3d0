"""A Lightning data module that feeds a Trainer with the batches of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenmill.adapters import need

need("torch", extra="torch", adapter="tokenmill.adapters.lightning")
need("lightning", extra="lightning", adapter="tokenmill.adapters.lightning")

import lightning

from tokenmill.adapters.torch import TorchLoader, check_rank, joined_state
from tokenmill.errors import ConfigError
from tokenmill.loader import Loader
from tokenmill.plan.plan import TokensSeen
from tokenmill.run.evals import Eval, find_evals
from tokenmill.run.run import Run
from tokenmill.store import Store

EvalData = Eval | Store | str | os.PathLike[str]
"""Evaluation data: an eval of a run, a store, or the path of a store."""
MakeLoader = Callable[[int, int], Loader]
"""Function of (rank, world size) that returns the loader of that rank."""


class RunData(lightning.LightningDataModule):
    """Trains on a run: this rank's batches, with its state in Lightning's checkpoints.

    One Lightning epoch is the whole run. Pass `max_epochs=1` and `accumulate_grad_batches` to the Trainer.
    """

    def __init__(
        self,
        run: Run | MakeLoader,
        *,
        micro_batch: int = 1,
        evals: EvalData | Sequence[EvalData] | Mapping[str, EvalData] | None = None,
    ) -> None:
        super().__init__()
        named = dict(enumerate(evals)) if isinstance(evals, list | tuple) else evals
        self.evals = list(find_evals(named, run, where="evals", beside="run").values())
        """Evaluation data: `run.evals[...]` or stores. Several are several dataloaders, in order."""
        if evals and not self.evals:
            raise ConfigError(f"evals: must be evals of a run or stores, got {evals!r}; pass run.evals[...]")
        for item in self.evals:
            _ = item.parts  # errors of a store are raised now, not at the first validation
        if self.evals:
            # Lightning warns if a module has this method but no validation_step.
            self.val_dataloader = self._val_dataloader
        self.run = run
        self.micro_batch = micro_batch
        """Rows per batch and rank; has no effect if `run` is a function."""
        self.loader: Loader | None = None
        """Loader of this rank, after the Trainer has requested batches."""
        self._saved: Mapping[str, Any] | None = None

    def train_dataloader(self) -> _Batches:
        """Return the batches of this rank, from the position of the last loaded state."""
        rank, world_size = self._own_rank()
        if isinstance(self.run, Run):
            self.loader = self.run.loader(rank=rank, world_size=world_size, micro_batch=self.micro_batch)
        else:
            self.loader = self.run(rank, world_size)
            way_out = "hand on the two arguments of the function"
            check_rank(self.loader, rank, world_size, where="run", way_out=way_out)
        _check_trainer(self.trainer, self.loader)
        if self._saved is not None:
            self.loader.load_state_dict(self._saved)
            self._saved = None
            _reopen(self.trainer, self.loader)
        return _Batches(self.loader, _begin(self.trainer, self.loader))

    def _val_dataloader(self) -> list[TorchLoader]:
        """Return the batches of every eval for this rank, the same each time."""
        rank, world_size = self._own_rank()
        return [
            TorchLoader(item.loader(rank=rank, world_size=world_size, micro_batch=self.micro_batch))
            for item in self.evals
        ]

    def _own_rank(self) -> tuple[int, int]:
        # The strategy knows the ranks that share their data, such as those of tensor parallelism.
        own = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        return own["rank"], own["num_replicas"]

    @property
    def tokens_seen(self) -> TokensSeen | None:
        """Input slots and labels that all ranks received before the next step; None before the first batch."""
        return None if self.loader is None else self.loader.tokens_seen

    def state_dict(self) -> dict[str, Any]:
        """Return the position of all ranks, as JSON; Lightning calls it on all ranks together."""
        if self.loader is None:
            return dict(self._saved or {})
        return joined_state(self.loader)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Apply a state to the current loader and to the next one."""
        self._saved = dict(state)
        if self.loader is not None:
            self.loader.load_state_dict(state)


class _Batches(TorchLoader):
    """Stands for a DataLoader in Lightning, which then does not shard it over ranks again.

    It has a state, because Lightning warns if it resumes within an epoch without one.
    """

    def __init__(self, loader: Loader, begin: int) -> None:
        super().__init__(loader)
        self.begin = begin

    def __len__(self) -> int:
        """Return the number of micro-batches of the epoch, so that Lightning knows the last one."""
        return len(self.loader) - self.begin

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the data module, which is that of the loader."""
        return joined_state(self.loader)


def _reopen(trainer: lightning.Trainer, loader: Loader) -> None:
    """Continue an epoch that Lightning considers finished, if the run has batches left.

    `max_steps` or `max_time` ended it, or the run is longer now. Otherwise Lightning would train on nothing and
    report that `max_epochs` was reached.
    """
    if loader.num_drawn >= len(loader):
        return
    epochs, batches = trainer.fit_loop.epoch_progress, trainer.fit_loop.epoch_loop.batch_progress
    batches.is_last_batch = False
    if epochs.current.processed:
        for count in (epochs.current, epochs.total):
            count.processed = count.completed = count.ready - 1
        trainer.fit_loop.restarting = True


def _begin(trainer: lightning.Trainer, loader: Loader) -> int:
    """Return the number of micro-batches before the epoch, and correct Lightning's count after a resume.

    Lightning counts those of the ranks of the earlier job. With more ranks now, it would consider the epoch
    finished.
    """
    drawn = loader.num_drawn
    if not trainer.fit_loop.restarting:
        return drawn
    counts = trainer.fit_loop.epoch_loop.batch_progress.current
    more = drawn - counts.ready
    for name in ("ready", "started", "processed", "completed"):
        setattr(counts, name, getattr(counts, name) + more)
    return 0


def _check_trainer(trainer: lightning.Trainer, loader: Loader) -> None:
    """Reject a Trainer whose steps differ from those of the run, or that would continue after its end."""
    stages = loader.plan.trained_stages
    sizes, steps = {loader.part.batches(stage) for stage in stages}, sum(stage.num_steps for stage in stages)
    if trainer.lightning_module.automatic_optimization and sizes != {trainer.accumulate_grad_batches}:
        wanted = " and ".join(map(str, sorted(sizes)))
        raise ConfigError(
            f"trainer: accumulate_grad_batches must be {wanted}, which is global_batch_size / (world_size * "
            f"micro_batch), got {trainer.accumulate_grad_batches}; say that, or optimize by hand"
        )
    if trainer.max_epochs != 1 and not 0 < trainer.max_steps <= steps:
        raise ConfigError(
            f"trainer: max_epochs must be 1, as the run says when data repeats, got {trainer.max_epochs}; "
            "say max_epochs=1"
        )
