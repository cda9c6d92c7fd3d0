"""How batches make up steps, and what phases say of a step."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.adapters.kempnerforge.config import DataConfig
from tokenmill.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """What a batch and a step have."""

    batch_size: int
    """Samples of a batch, of one rank."""
    num_replicas: int
    grad_accum_steps: int | None
    """Batches of a step; None: nobody said it, and a batch counts as one."""

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

    def lr_scale(self, config: DataConfig, step: int) -> float:
        """Return what the phases of a config multiply the learning rate of a step by."""
        if self.grad_accum_steps is None and config.all_phases:
            raise ConfigError(
                "lr_scale: grad_accum_steps must be given to know the step of a batch, got none; give it, or ask "
                "config.lr_scale_at(step)"
            )
        return config.lr_scale_at(step)
