"""KempnerForge's config in Python, how batches make up steps, and how states are read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TypeVar

from msgspec import UNSET

from tokenmill.config.dialects.kempnerforge import DatasetSource, DataTable, TrainingPhase
from tokenmill.errors import ConfigError, ResumeError, nearest
from tokenmill.tables import read_table

T = TypeVar("T")
_log = logging.getLogger("tokenmill")
AS_SAVED = "use a state as state_dict() gave it: the order of KempnerForge's own is another"


def read_state(kind: type[T], state: object, where: str = "state") -> T:
    """Return a state as a record of a kind; what `state_dict()` cannot have given is refused."""
    return read_table(kind, state, where, error=ResumeError, way_out=AS_SAVED)


def warn_of_differences(what: str, saved: Mapping[str, object], own: Mapping[str, object]) -> None:
    """Log a warning for each value of a state that is not that of what loads it; one left out is not compared."""
    for key, value in saved.items():
        if key in own and value not in (UNSET, own[key]):
            _log.warning(
                "state: %s is %r, and %r in this %s: samples or their order differ", key, value, own[key], what
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(DataTable):
    """Where data comes from and how it is loaded, with KempnerForge's defaults."""

    dtype: str | None = None
    """Of files without a header, such as .bin: it is not guessed."""
    vocab_size: int | None = None
    """All ids of token files must be below; may prove the dtype of files without a header."""
    eos_token_id: int | None = None
    """Ends the documents of token files; None: the EOS of the tokenizer."""

    def __post_init__(self) -> None:
        DataTable.__post_init__(self)
        names = self.dataset_names
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"data: names of datasets must differ, got {twice[0]!r} twice; rename one")
        if self.datasets:
            self.check_phases()

    def check_phases(self) -> None:
        """Refuse weights that name no dataset; where there is no mixture, only when a loader is built."""
        names = self.dataset_names
        phases = {f"phase at step {phase.start_step}": phase.dataset_weights for phase in self.all_phases}
        for where, weights in (phases | {"anneal_weights": self.anneal_weights}).items():
            for name in weights:
                if name not in names:
                    way_out = nearest(name, names) if names else "add datasets, or leave the weights out"
                    raise ConfigError(f"{where}: weights must name datasets, got {name!r}; {way_out}")

    @classmethod
    def of(cls, config: object) -> DataConfig:
        """Return a config of KempnerForge's own class as one of these; what it does not have keeps its default."""
        if isinstance(config, DataConfig):
            return config
        values = {item.name: getattr(config, item.name) for item in fields(cls) if hasattr(config, item.name)}
        if "dataset_path" not in values:
            raise ConfigError(
                f"config: must be a DataConfig of this package or of KempnerForge, got {type(config).__name__}; "
                "give its [data] as DataConfig(...)"
            )
        for key, kind in (("datasets", DatasetSource), ("phases", TrainingPhase)):
            names = [item.name for item in fields(kind)]
            values[key] = [kind(*(getattr(item, name) for name in names)) for item in values.get(key, ())]
        return cls(**values)

    @property
    def dataset_names(self) -> tuple[str, ...]:
        """What phases and metrics call the sources that are mixed."""
        return tuple(source.called for source in self.datasets)

    def phase_at(self, step: int) -> TrainingPhase | None:
        """Return the phase that a step belongs to; None before the first."""
        begun = [phase for phase in self.all_phases if phase.start_step <= step]
        return begun[-1] if begun else None

    def lr_scale_at(self, step: int) -> float:
        """Return what the learning rate of a step is multiplied by."""
        phase = self.phase_at(step)
        return 1.0 if phase is None else phase.lr_scale

    def weights_at(self, step: int) -> list[float]:
        """Return the weights of the sources at a step, in their order."""
        phase = self.phase_at(step)
        weights: Mapping[str, float] = {} if phase is None else phase.dataset_weights
        return [weights.get(source.called, source.weight) for source in self.datasets]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """How many samples make a batch, and how many batches a step."""

    batch_size: int
    """Samples of a batch, of one rank."""
    num_replicas: int
    grad_accum_steps: int | None
    """Batches of a step; None: not given, and a batch counts as a step."""

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.batches < 1:
            raise ConfigError(
                f"loader: batch_size and grad_accum_steps must be at least 1, got {self.batch_size} and "
                f"{self.grad_accum_steps}; raise them"
            )

    @property
    def batches(self) -> int:
        """Batches of a step."""
        return 1 if self.grad_accum_steps is None else self.grad_accum_steps

    @property
    def samples(self) -> int:
        """Samples of a batch, of all ranks."""
        return self.batch_size * self.num_replicas

    @property
    def round(self) -> int:
        """Samples of a step, of all ranks."""
        return self.samples * self.batches

    def count(self, batches: int, saved: StepShape, *, inside: bool = False) -> int:
        """Return how many batches of this shape have made up the steps that `batches` of a saved one did.

        In the middle of a step, be it by this count or because a state is said to be `inside` of one, steps must be
        what they were.
        """
        if (saved.grad_accum_steps is None) != (self.grad_accum_steps is None):
            raise ResumeError(
                "state: grad_accum_steps must be given or left out as when it was saved, "
                f"{saved.grad_accum_steps}, got {self.grad_accum_steps}; without it no step is known"
            )
        steps, begun = divmod(batches, saved.batches)
        if (begun or inside) and (saved.batches, saved.samples) != (self.batches, self.samples):
            raise ResumeError(
                f"state: was saved in the middle of step {steps}, so it must go on with {saved.batches} batches a "
                f"step of {saved.samples} samples over all ranks, got {self.batches} of {self.samples}; resume "
                "with those, or from a state saved between two steps"
            )
        return steps * self.batches + begun
