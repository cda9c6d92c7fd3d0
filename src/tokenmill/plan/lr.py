"""Learning-rate schedules that follow tokens instead of steps."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import cos, pi

import numpy as np

from tokenmill.errors import ConfigError, nearest
from tokenmill.plan.plan import Plan
from tokenmill.plan.stages import as_step
from tokenmill.types import Float64Array

DECAYS = ("cosine", "linear", "none")
"""Shapes of the decay of a learning rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSchedule:
    """Factor of the learning rate at each step: `schedule(step)`, from 0 on.

    The factor is a function of the tokens before a step, in input slots and with those of skipped steps. So it ends
    at the last step for any stages and batch ramps, and a skip does not move it. It includes `lr_scale` of stages.
    """

    plan: Plan
    warmup: int = 0
    """Tokens over which the factor rises to 1, linearly; the first step has its share."""
    decay: str = "cosine"
    """Shape of the decay: `cosine`, `linear`, or `none`."""
    decay_tokens: int | None = None
    """Last tokens of the run over which the factor decays; None for all after the warm-up."""
    final: float = 0.1
    """Factor at the last step, without `lr_scale`."""

    def __post_init__(self) -> None:
        if self.decay not in DECAYS:
            raise ConfigError(
                f"lr_schedule: decay must be one of {', '.join(DECAYS)}, got {self.decay!r}; "
                f"{nearest(self.decay, DECAYS)}"
            )
        total = self.plan.slots_before(self.plan.steps, skipped=True)
        if not 0 <= self.warmup + (self.decay_tokens or 0) <= total or not 0 <= self.final <= 1:
            raise ConfigError(
                f"lr_schedule: warm-up and decay must fit the {total} tokens of the run, and final lie within 0 "
                f"and 1, got {self.warmup}, {self.decay_tokens} and {self.final}; shorten them"
            )

    def __call__(self, step: int) -> float:
        """Return the factor of a step; after the last it stays as it is there."""
        step = min(as_step(step), self.plan.steps - 1)
        stage = self.plan.stage(step)
        before = self.plan.slots_before(step, skipped=True)
        return self._factor(before, before + stage.step_slots, self._end) * stage.spec.lr_scale

    def _factor(self, before: int, after: int, end: int) -> float:
        """Return the factor of a step without `lr_scale`.

        The tokens are those before the step, after it, and before the last step of the run.
        """
        factor = min(1.0, after / self.warmup) if self.warmup else 1.0
        begin = self.warmup if self.decay_tokens is None else max(self.warmup, end - self.decay_tokens)
        if self.decay == "none" or before < begin:
            return factor
        decayed = (before - begin) / (end - begin) if end > begin else 1.0
        left = (1 + cos(pi * decayed)) / 2 if self.decay == "cosine" else 1 - decayed
        return min(factor, self.final + (1 - self.final) * left)

    @property
    def _end(self) -> int:
        """Tokens before the last step."""
        return self.plan.slots_before(self.plan.steps - 1, skipped=True)

    def nth(self, number: int) -> float:
        """Return the factor of the n-th step that is trained on, from 0: as optimizers count, which skip none."""
        return self(min(self.plan.nth_trained(number), self.plan.steps - 1))

    def table(self) -> Float64Array:
        """Return the factors of all steps that are trained on, for frameworks that look them up."""
        factors: list[float] = []
        end = self._end
        for stage in self.plan.trained_stages:
            before, scale = self.plan.slots_before_stages[0][stage.index], stage.spec.lr_scale
            edges = pairwise(before + step * stage.step_slots for step in range(stage.num_steps + 1))
            factors += [self._factor(*edge, end) * scale for edge in edges]
        return np.array(factors)
