"""KempnerForge's config in Python, the number of batches per step, and the reading of states."""

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
    """Return a state as a record of a kind; reject values that `state_dict()` cannot have written."""
    return read_table(kind, state, where, error=ResumeError, way_out=AS_SAVED)


def warn_of_differences(what: str, saved: Mapping[str, object], own: Mapping[str, object]) -> None:
    """Log a warning for each value of a state that differs from the current one; missing ones are not compared."""
    for key, value in saved.items():
        if key in own and value not in (UNSET, own[key]):
            _log.warning(
                "state: %s is %r, and %r in this %s: samples or their order differ", key, value, own[key], what
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(DataTable):
    """Paths and options of the data, with KempnerForge's defaults."""

    dtype: str | None = None
    """Dtype of files without a header, such as .bin; it is not guessed."""
    vocab_size: int | None = None
    """Upper bound for all ids of token files; can determine the dtype of files without a header."""
    eos_token_id: int | None = None
    """Id that ends documents of token files; None means the EOS of the tokenizer."""

    def __post_init__(self) -> None:
        DataTable.__post_init__(self)
        names = self.dataset_names
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"data: names of datasets must differ, got {twice[0]!r} twice; rename one")
        if self.datasets:
            self.check_phases()

    def check_phases(self) -> None:
        """Reject weights that name no dataset; without a mixture, only when a loader is built."""
        names = self.dataset_names
        phases = {f"phase at step {phase.start_step}": phase.dataset_weights for phase in self.all_phases}
        for where, weights in (phases | {"anneal_weights": self.anneal_weights}).items():
            for name in weights:
                if name not in names:
                    way_out = nearest(name, names) if names else "add datasets, or leave the weights out"
                    raise ConfigError(f"{where}: weights must name datasets, got {name!r}; {way_out}")

    @classmethod
    def of(cls, config: object) -> DataConfig:
        """Return a config of KempnerForge's class as one of these; missing values keep their defaults."""
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
        """Names of the mixed sources in phases and metrics."""
        return tuple(source.called for source in self.datasets)

    def phase_at(self, step: int) -> TrainingPhase | None:
        """Return the phase of a step; None before the first phase."""
        begun = [phase for phase in self.all_phases if phase.start_step <= step]
        return begun[-1] if begun else None

    def lr_scale_at(self, step: int) -> float:
        """Return the factor of the learning rate at a step."""
        phase = self.phase_at(step)
        return 1.0 if phase is None else phase.lr_scale

    def weights_at(self, step: int) -> list[float]:
        """Return the weights of the sources at a step, in their order."""
        phase = self.phase_at(step)
        weights: Mapping[str, float] = {} if phase is None else phase.dataset_weights
        return [weights.get(source.called, source.weight) for source in self.datasets]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """Number of samples per batch, and of batches per step."""

    batch_size: int
    """Samples per batch, on one rank."""
    num_replicas: int
    grad_accum_steps: int | None
    """Batches per step; None if not given, and a batch then counts as a step."""

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.batches < 1:
            raise ConfigError(
                f"loader: batch_size and grad_accum_steps must be at least 1, got {self.batch_size} and "
                f"{self.grad_accum_steps}; raise them"
            )

    @property
    def batches(self) -> int:
        """Batches per step."""
        return 1 if self.grad_accum_steps is None else self.grad_accum_steps

    @property
    def samples(self) -> int:
        """Samples per batch, over all ranks."""
        return self.batch_size * self.num_replicas

    @property
    def round(self) -> int:
        """Samples per step, over all ranks."""
        return self.samples * self.batches

    def count(self, batches: int, saved: StepShape, *, inside: bool = False) -> int:
        """Return the number of batches of this shape for the same steps as `batches` of a saved shape.

        Within a step, by this count or because a state is `inside` one, steps must have the same shape as before.
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
